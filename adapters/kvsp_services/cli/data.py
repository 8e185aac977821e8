"""``kvsp lookup``, ``get``, ``put`` and ``lease``: the data side, from a shell."""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path
from typing import BinaryIO

import click

from kvsp_client.files import read_scope, replacing
from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.index_parts import IndexParts
from kvsp_core.messages import LeaseGranted, LeaseRequest, LookupAnswer, LookupRequest, MatchedBlock
from kvsp_core.resources import CreateLease, GetBlock, Lookup, StoreBlock
from kvsp_h2 import Credentials
from kvsp_services.asking import ask, ask_for, expect_success
from kvsp_services.cli.connection import as_json_option, show_json, show_table, with_credentials
from kvsp_services.cli.options import (
    BLOCK_KEY,
    counted,
    descriptor_option,
    holder_option,
    index_option,
    scope_key_option,
    tokens_option,
)
from kvsp_services.cli.progress import progress_bar
from kvsp_services.cli.values import read_descriptor, read_keys

__all__ = ["get", "lease", "lookup", "put"]


def _in_a_directory(_context: click.Context, parameter: click.Parameter, output: Path) -> Path:
    if not output.parent.is_dir():
        raise click.BadParameter(f"{output}: there is no directory {output.parent}", param=parameter)
    return output


@click.command(short_help="Show which blocks of a prompt are held, and where.")
@index_option(required=True)
@descriptor_option()
@scope_key_option()
@tokens_option()
@as_json_option
@with_credentials
def lookup(
    credentials: Credentials,
    index_uris: tuple[str, ...],
    descriptor: BinaryIO,
    scope_key_file: Path,
    tokens: BinaryIO,
    as_json: bool,
) -> None:
    """Show which blocks of a prompt are held, and where; exit 1 where none is."""
    model, scope = read_descriptor(descriptor), read_scope(scope_key_file)
    keys, _ = read_keys(scope, model, tokens)
    if not keys:
        raise LocalProtocolError(f"fewer tokens than a block has ({model.block_tokens}): nothing to look up")
    request = LookupRequest(
        compat_id=model.compat_id, scope_id=scope.scope_id, block_keys=tuple(key.hex() for key in keys)
    )
    parts = IndexParts(index_uris)
    answers = {
        uri: ask_for(LookupAnswer, credentials, uri, Lookup(), share)
        for uri, share in parts.shares(request).items()
    }
    blocks = tuple(
        MatchedBlock(block_key=key, replicas=replicas)
        for key, replicas in zip(request.block_keys, parts.joined(request, answers), strict=False)
    )
    answer = LookupAnswer(matched=len(blocks), blocks=blocks)
    if as_json:
        show_json(answer)
    else:
        rows = [
            (number, replica.holder, ", ".join(part.tier for part in replica.residency), replica.ttl_ms)
            for number, block in enumerate(answer.blocks)
            for replica in block.replicas
        ]
        show_table(("block", "holder", "tiers", "ms left"), rows)
        tokens_held = counted(answer.matched * model.block_tokens, "token")
        click.echo(f"{answer.matched} of {counted(len(keys), 'block')}, {tokens_held}")
    if not answer.matched:
        click.get_current_context().exit(1)


@click.command(short_help="Fetch a block from a holder into a file, and check its digest.")
@click.argument("block_key", type=BLOCK_KEY, metavar="BLOCK_KEY")
@holder_option
@descriptor_option()
@scope_key_option()
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    callback=_in_a_directory,
    help="The file that it goes to.",
)
@as_json_option
@with_credentials
def get(
    credentials: Credentials,
    block_key: str,
    holder: str,
    descriptor: BinaryIO,
    scope_key_file: Path,
    output: Path,
    as_json: bool,
) -> None:
    """Fetch the block of a BLOCK_KEY from a holder into a file, and check it against its Repr-Digest."""
    model, scope = read_descriptor(descriptor), read_scope(scope_key_file)
    operation = GetBlock(model.compat_id, scope.scope_id, block_key)
    with progress_bar("fetching", shown=not as_json) as progress:
        answer = ask(credentials, holder, operation, progress=progress)
    expect_success(holder, answer)
    if answer.response.repr_digest != hashlib.sha256(answer.body).hexdigest():
        raise RemoteProtocolError(
            f"{holder}: the block does not match its digest and was discarded; try another holder"
        )
    with replacing(output, answer.body, mode=0o600):
        pass
    if as_json:
        show_json({"output": str(output), "size_bytes": len(answer.body)})
    else:
        click.echo(f"{output}: {counted(len(answer.body), 'octet')}")


@click.command(short_help="Store a container file at a holder.")
@click.argument("file", type=click.File("rb"))
@click.option("--block-key", type=BLOCK_KEY, required=True, help="The block key; kvsp keys prints it.")
@holder_option
@descriptor_option()
@scope_key_option()
@as_json_option
@with_credentials
def put(
    credentials: Credentials,
    file: BinaryIO,
    block_key: str,
    holder: str,
    descriptor: BinaryIO,
    scope_key_file: Path,
    as_json: bool,
) -> None:
    """Store a container FILE at a holder as the block of a key."""
    model, scope = read_descriptor(descriptor), read_scope(scope_key_file)
    octets = _contents(file)
    operation = StoreBlock(model.compat_id, scope.scope_id, block_key)
    with progress_bar("storing", shown=not as_json) as progress:
        answer = ask(credentials, holder, operation, pieces=(octets,), progress=progress)
    expect_success(holder, answer)
    if as_json:
        show_json({"holder": holder, "size_bytes": octets.nbytes})
    else:
        click.echo(f"{holder}: stored {counted(octets.nbytes, 'octet')}")


def _contents(file: BinaryIO) -> memoryview:
    """Return the octets of a file, which are not read into memory."""
    try:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):  # a pipe or device; an empty file
        raise LocalProtocolError(f"{file.name}: expected a file with a container in it") from None


@click.command(short_help="Lease blocks at a holder: it keeps them for a while.")
@click.argument("keys", nargs=-1, required=True, type=BLOCK_KEY, metavar="KEYS...")
@holder_option
@click.option(
    "--ttl-ms",
    type=click.IntRange(min=1),
    default=30_000,
    show_default=True,
    help="How long, in milliseconds; more than the holder allows is refused.",
)
@as_json_option
@with_credentials
def lease(credentials: Credentials, keys: tuple[str, ...], holder: str, ttl_ms: int, as_json: bool) -> None:
    """Lease the blocks of these KEYS at a holder, so that they are not evicted for a while."""
    blocks = tuple(dict.fromkeys(keys))
    request = LeaseRequest(block_keys=blocks, ttl_ms=ttl_ms)
    granted = ask_for(LeaseGranted, credentials, holder, CreateLease(), request)
    if as_json:
        show_json(granted)
    else:
        click.echo(f"leased {counted(len(blocks), 'block')} for {granted.ttl_ms} ms")
