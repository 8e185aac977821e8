"""Every fuzz target finds the fault that is planted for it: ``fuzz/mutations/targets/TARGET.patch``."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.test_targets import FUZZ, NAMES

ROOT = FUZZ.parent
PATCHES = FUZZ / "mutations" / "targets"
SECONDS = 90
"""As long as a target may look, at most."""


def planted(name: str, tree: Path) -> None:
    """Copy what a target runs, with its fault."""
    for part in ("kvsp_core", "adapters", "fuzz/targets", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "vectors")
        shutil.copytree(ROOT / part, tree / part, ignore=ignored)
    shutil.copy(FUZZ / "run.py", tree / "fuzz")
    command = ["patch", "-p1", "--batch", "--silent", "--forward", "-i", str(PATCHES / f"{name}.patch")]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name}.patch does not apply any more, record it anew: {done.stdout}"


def test_every_target_has_a_fault_to_find() -> None:
    assert {path.stem for path in PATCHES.glob("*.patch")} == set(NAMES)


@pytest.mark.skipif(not shutil.which("patch"), reason="needs patch")
@pytest.mark.parametrize("name", NAMES)
def test_the_fault_of_a_target_can_be_planted(name: str, tmp_path: Path) -> None:
    planted(name, tmp_path)


@pytest.mark.verify
@pytest.mark.skipif(not shutil.which("patch"), reason="needs patch")
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris")
@pytest.mark.parametrize("name", NAMES)
def test_a_target_finds_its_planted_fault(name: str, tmp_path: Path) -> None:
    planted(name, tmp_path)
    command = [sys.executable, "fuzz/run.py", name, "--seconds", str(SECONDS)]
    paths = os.pathsep.join((str(tmp_path), str(tmp_path / "adapters")))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1, f"{name}: it was not found in {SECONDS} s"
    log = (tmp_path / "build" / "fuzz" / name / "log.txt").read_text(errors="replace")
    assert "Uncaught Python exception" in log, log[-2000:]
