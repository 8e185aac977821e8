"""The workflow that users are shown is one: its steps run, shortened, in a directory as a runner has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SHORT = {"SEEDS": "0-1", "SECONDS": "1"}


def workflow() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "kvsp-ci.yml").read_text(encoding="utf-8"))
    return found


def steps() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = workflow()["jobs"]["hostile"]["steps"]
    return found


RUNS = [step for step in steps() if "run" in step and step["name"] != "install"]


def test_it_has_what_a_workflow_has() -> None:
    known = workflow()
    assert known["name"]
    assert set(known[True]) == {"push", "schedule"}, "YAML reads the key 'on' as true"
    assert SHORT.keys() == known["env"].keys()
    assert all(("uses" in step) != ("run" in step) for step in steps())
    assert len(RUNS) == 4
    (install,) = [step for step in steps() if step.get("name") == "install"]
    extras = install["run"].partition("[")[2].partition("]")[0].split(",")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f"\n{extra} = [" in project for extra in extras)


@pytest.mark.parametrize("step", RUNS, ids=lambda step: step["name"])
def test_a_step_of_it_runs(step: dict[str, Any], tmp_path: Path) -> None:
    if "fuzz" in step["run"]:
        pytest.importorskip("atheris")
    (tmp_path / "kvsp").mkdir()
    for part in ("kvsp_core", "adapters", "fuzz", "tests"):
        (tmp_path / "kvsp" / part).symlink_to(ROOT / part)
    shutil.copy(EXAMPLES / "test_our_adapter.py", tmp_path)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "kvsp"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvsp_services.cli "$@"\n')
    program.chmod(0o755)
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    environment = {
        **os.environ,
        **SHORT,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "adapters"))),
    }
    command = step["run"].replace("explore reshard", "explore reshard --crashes 0")
    done = subprocess.run(
        ["sh", "-ec", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
