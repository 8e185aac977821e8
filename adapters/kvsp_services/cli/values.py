"""``kvsp compat``, ``scope``, ``keys`` and ``inspect``: the values of the protocol, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import click

from kvsp_core.block_keys import block_keys
from kvsp_core.errors import KVSPError, LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_services.files import read_scope

__all__ = ["compat", "inspect", "keys", "scope"]

_DOCUMENT = click.File("rb")
_EXISTING = click.Path(exists=True, path_type=Path)


def _read_descriptor(file: BinaryIO) -> CompatibilityDescriptor:
    try:
        return CompatibilityDescriptor.from_json(file.read())
    except KVSPError as error:
        raise LocalProtocolError(f"{file.name}: {error}") from None


def _read_tokens(file: BinaryIO) -> list[int]:
    try:
        tokens = json.load(file)
    except (ValueError, RecursionError) as error:
        raise LocalProtocolError(f"{file.name}: this is no JSON array of tokens: {error}") from None
    if not isinstance(tokens, list):
        raise LocalProtocolError(f"{file.name}: tokens are a JSON array, such as [128000, 791]")
    return tokens


@click.command()
@click.argument("descriptor", type=_DOCUMENT)
def compat(descriptor: BinaryIO) -> None:
    """Print the Compatibility ID of a DESCRIPTOR file (- for standard input)."""
    click.echo(_read_descriptor(descriptor).compat_id)


@click.command()
@click.option("--scope-key-file", type=_EXISTING, required=True, help="At least 32 octets, or 64 hex digits.")
def scope(scope_key_file: Path) -> None:
    """Print the Scope ID of a Scope Key. The key itself is never printed."""
    click.echo(read_scope(scope_key_file).scope_id)


@click.command()
@click.option("--descriptor", type=_DOCUMENT, required=True, help="The Compatibility Descriptor, a JSON file.")
@click.option("--scope-key-file", type=_EXISTING, required=True, help="At least 32 octets, or 64 hex digits.")
@click.option("--tokens", type=_DOCUMENT, required=True, help="A JSON array of tokens; - for standard input.")
def keys(descriptor: BinaryIO, scope_key_file: Path, tokens: BinaryIO) -> None:
    """Print the block keys of a sequence of tokens, one a line; incomplete last blocks have none."""
    members = _read_descriptor(descriptor)
    found, _ = block_keys(read_scope(scope_key_file), members, _read_tokens(tokens))
    click.echo("".join(f"{key.hex()}\n" for key in found), nl=False)


@click.command()
@click.argument("file", type=_DOCUMENT)
def inspect(file: BinaryIO) -> None:
    """Show the header, sections and digests of a container FILE; exit 1 with the reason where it is broken."""
    raise LocalProtocolError(f"{file.name}: not yet")
