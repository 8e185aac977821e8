"""The generated parts of the documentation are those that the source gives now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("program", ["configuration_page", "coverage", "machine_pages", "resource_pages"])
def test_page_is_current(program: str) -> None:
    command = [sys.executable, str(ROOT / "docs" / "tools" / f"{program}.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
