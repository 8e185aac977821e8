"""Every recorded fault still fits the source, and breaks what it means to break rather than a name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted((ROOT / "fuzz" / "mutations").rglob("*.patch"))


@pytest.mark.skipif(not shutil.which("patch"), reason="needs patch")
def test_every_recorded_fault_fits_and_uses_only_names_that_are_there(tmp_path: Path) -> None:
    for recorded in PATCHES:
        tree = tmp_path / recorded.relative_to(ROOT).with_suffix("")
        changed = [line[6:] for line in recorded.read_text().splitlines() if line.startswith("+++ b/")]
        for name in changed:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
        command = ["patch", "-p1", "--batch", "--silent", "--forward", "-i", str(recorded)]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{recorded.name} does not apply, record it anew: {done.stdout}"
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F821", "--quiet", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
