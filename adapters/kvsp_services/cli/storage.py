"""``kvsp backup`` and ``kvsp purge``: what an operator does with what is on disk."""

from __future__ import annotations

from pathlib import Path

import click

from kvsp_core.errors import KVSPError
from kvsp_services.cli.options import FILE, SCOPE_ID, counted
from kvsp_services.stores.block_files import FileTier, is_tier
from kvsp_services.stores.durable import back_up
from kvsp_services.stores.sealing import read_storage_key_file

__all__ = ["backup", "purge"]


@click.command(short_help="Copy a role's store to a new file, also while it runs.")
@click.argument("store", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
def backup(store: Path, target: Path) -> None:
    """Copy a role's STORE (data/ROLE.sqlite) to a new file TARGET, also while the role is running.

    The copy opens with the same storage key; keep that too, and apart.
    """
    back_up(store, target)
    click.echo(target)


@click.command(short_help="Delete a tenant's blocks from the disk of a stopped holder.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--storage-key-file", type=FILE, required=True, help="The key that the tier was made with.")
@click.option(
    "--scope", "scope_id", type=SCOPE_ID, required=True, help="The tenant's Scope ID; kvsp scope prints it."
)
def purge(directory: Path, storage_key_file: Path, scope_id: str) -> None:
    """Delete a tenant's blocks from disk, for a holder or instance that is not running.

    DIRECTORY is that of a tier, as the configuration names it. The number of blocks that were deleted is
    printed.

    One that is running is refused: it does it itself, in memory and at the index too. Write `purged = true`
    under the scope in its policy, and send it SIGHUP.
    """
    if not is_tier(directory):
        raise KVSPError(f"{directory}: there are no blocks here; name the directory of a tier")
    tier = FileTier(directory, read_storage_key_file(storage_key_file), 0)
    tier.lock()
    try:
        click.echo(f"{counted(tier.purge(scope_id), 'block')} deleted")
    finally:
        tier.unlock()
