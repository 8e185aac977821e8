"""The page "Use it with vLLM" works as written, with vLLM's programs on the path."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests.docs import test_snippets as snippets
from tests.vllm.conftest import PYTHON
from tests.vllm.kit import ROOT


def test_ten_commands(tmp_path: Path) -> None:
    page = ROOT / "docs" / "vllm.md"
    folder = Path(PYTHON).parent
    assert (folder / "vllm").exists(), f"{PYTHON} has no vllm"
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)  # what is installed there counts
    blocks = [
        snippets.Block(match["language"], page.read_text().count("\n", 0, match.start("text")), match["text"])
        for match in snippets.BLOCK.finditer(page.read_text())
        if match["why"] == "needs"
    ]
    try:
        for block in blocks:
            snippets.run_console(block, page, tmp_path, environment, limit_s=600)
    finally:
        while snippets.GROUPS:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(snippets.GROUPS.pop(), signal.SIGKILL)
    assert sum(len(list(snippets.commands_of(block.text))) for block in blocks) == 10
