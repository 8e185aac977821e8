"""``kvsp serve``: run roles."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from kvsp_core.errors import KVSPError
from kvsp_services.cli import importing
from kvsp_services.config import LoopName, read_config
from kvsp_services.logs import configure_logs

__all__ = ["serve"]


@click.command(short_help="Run the roles that a configuration names.")
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--loop", type=click.Choice(get_args(LoopName)), help="What it runs on; default: what the file says."
)
@click.option("--check", is_flag=True, help="Only read it and the files it names; say what it would run.")
def serve(config: Path, loop: LoopName | None, check: bool) -> None:
    """Run the roles that the CONFIG file names, until SIGTERM. SIGHUP reads policy, limits and
    certificates again. Its keys are in docs/configuration.md."""
    document = read_config(config)
    with importing():
        from kvsp_services import process

    if check:
        process.check_files(document)
        click.echo(f"{config}: runs {', '.join(document.roles)}")
        return
    configure_logs(document.log.level, document.log.format)
    failure = process.serve(document, loop, reread=lambda: read_config(config))
    if failure is not None:
        raise KVSPError(failure)
