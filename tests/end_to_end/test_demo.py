"""The demonstration with the tiny model: real processes, real signals, on both loops."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def demo(tmp_path: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], str]:
    command = [sys.executable, "-m", "kvsp_services.cli", "demo", "--fast", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    report = tmp_path / "report.html"
    done = subprocess.run(
        [*command, "--report", str(report)], env=environment, capture_output=True, text=True, timeout=600
    )
    return done, report.read_text() if report.exists() else ""


@pytest.mark.requirement("CP-1", "CP-2", "CP-4", "CP-6", "MG-1", "MG-2", "MG-4", "PF-1", "RS-2", "LC-1")
@pytest.mark.parametrize("loop", ["trio", "asyncio"])
def test_every_check_of_every_step_holds(tmp_path: Path, loop: str) -> None:
    done, page = demo(tmp_path, "--loop", loop)
    failed = re.findall(r"^   NO    (.*\n.*)", done.stdout, re.MULTILINE)
    assert not failed, "\n".join(["these checks did not hold:", *failed, "", done.stdout, done.stderr])
    assert done.returncode == 0, done.stdout + done.stderr
    assert [int(n) for n in re.findall(r"^(\d)\. ", done.stdout, re.MULTILINE)] == [1, 2, 3, 4, 5, 6]
    assert page.count("<svg") == 1
    assert "http://" not in page
    assert "https://" not in page


def test_a_check_that_does_not_hold_shows_in_table_report_and_exit_status(tmp_path: Path) -> None:
    from kvsp_services.demo.report import report
    from kvsp_services.demo.steps import Step
    from kvsp_services.demo.watching import Mark, Sample

    step = Step(1, "A <title>")
    step.check("it holds", True, "1 token")
    step.check("it does not", False, "2 tokens")
    other = Step(2, "Another")
    states = {"index": "up", "alpha": "down"}
    samples = [
        Sample(0.0, states, {"1": ("running", "alpha")}, {"cache": 2}),
        Sample(1.0, states, {"1": ("finished", "nobody")}, {"cache": 0}),
    ]
    marks = [Mark(0.5, "alpha", "kill -9"), Mark(0.1, "", "1")]
    page = report("A report", [step, other], samples, marks)
    assert "1 of 2 checks held" in page
    assert "did not hold" in page
    assert "A &lt;title&gt;" in page
    assert "kill -9" in page
    assert not step.held


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for processes in /proc")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_demonstration_that_is_stopped_leaves_no_process_behind(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    command = [sys.executable, "-m", "kvsp_services.cli", "demo", "--fast"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        while "ready after" not in demo.stdout.readline():
            assert demo.poll() is None
        children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
        assert len(children) == 7
        demo.send_signal(number)
        assert demo.wait(120) == status
    until = time.monotonic() + 60
    while left := [child for child in children if _runs(child)]:
        assert time.monotonic() < until, f"{len(left)} processes are left"
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # it has ended, though nobody may have asked about it yet
