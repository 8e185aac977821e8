"""``kvsp backup`` and ``kvsp purge``: what an operator does with what is on disk."""

from __future__ import annotations

import re
from pathlib import Path

import click

from kvsp_client.files import read_secret
from kvsp_services.stores.block_files import FileTier
from kvsp_services.stores.durable import back_up

__all__ = ["backup", "purge"]


@click.command()
@click.argument("store", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
def backup(store: Path, target: Path) -> None:
    """Copy a role's STORE (data/ROLE.sqlite) to a new file TARGET, also while the role is running.

    The copy opens with the same storage key; keep that too, and apart.
    """
    back_up(store, target)
    click.echo(target)


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--storage-key-file", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--scope", "scope_id", required=True, help="The Scope ID; kvsp scope prints it.")
def purge(directory: Path, storage_key_file: Path, scope_id: str) -> None:
    """Delete every block of a scope from the DIRECTORY of a holder that does not run; prints how many.

    Those that run delete a scope, in every tier and at the index, when its policy says `purged = true` and
    they get SIGHUP.
    """
    if not re.fullmatch(r"[0-9a-f]{32}", scope_id):
        raise click.UsageError("--scope is 32 lowercase hex digits; kvsp scope --scope-key-file prints it.")
    tier = FileTier(directory, read_secret(storage_key_file), 0)
    click.echo(f"{tier.purge(scope_id)} blocks deleted")
