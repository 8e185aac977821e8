"""``kvsp compat``, ``scope``, ``keys`` and ``inspect``: the values of the protocol, without a network."""

from __future__ import annotations

import hashlib
import json
import mmap
from pathlib import Path
from typing import Any, BinaryIO

import click

from kvsp_client.files import read_scope, read_secret
from kvsp_client.model_dir import descriptor_of_directory
from kvsp_client.scopes import salted_scope
from kvsp_core.block_keys import block_keys
from kvsp_core.container import decode_container, replica_digest
from kvsp_core.errors import KVSPError, LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.registries import INITIAL_REGISTRIES
from kvsp_services.cli.options import descriptor_option, scope_key_option, tokens_option

__all__ = ["compat", "inspect", "keys", "read_descriptor", "read_keys", "scope"]

_DOCUMENT = click.File("rb")


def read_descriptor(file: BinaryIO) -> CompatibilityDescriptor:
    """Return the descriptor in a file; an error names the file."""
    try:
        return CompatibilityDescriptor.from_json(file.read())
    except KVSPError as error:
        raise LocalProtocolError(f"{file.name}: {error}") from None


def read_keys(
    scope: Scope, descriptor: CompatibilityDescriptor, file: BinaryIO
) -> tuple[list[bytes], list[int]]:
    """Return the block keys of the tokens in a file, and these; an error names the file."""
    tokens = _read_tokens(file)
    try:
        return block_keys(scope, descriptor, tokens)[0], tokens
    except LocalProtocolError as error:
        raise LocalProtocolError(f"{file.name}: {error}") from None


def _read_tokens(file: BinaryIO) -> list[int]:
    try:
        tokens = json.load(file)
    except (ValueError, RecursionError) as error:
        raise LocalProtocolError(f"{file.name}: this is no JSON array of tokens: {error}") from None
    if not isinstance(tokens, list):
        raise LocalProtocolError(f"{file.name}: tokens are a JSON array, such as [128000, 791]")
    return tokens


@click.command(short_help="Print a Compatibility ID, or derive a model's descriptor.")
@click.argument("descriptor", type=_DOCUMENT, required=False)
@click.option(
    "--model-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Derive the descriptor from a model's directory (config.json, *.safetensors, tokenizer.json).",
)
@click.option("--model", help="With --model-dir: the model string. Default: the directory's name.")
@click.option(
    "--block-tokens", type=click.IntRange(min=1), help="With --model-dir: tokens a block. Default: 16."
)
@click.option("--kv-dtype", help="With --model-dir: the cache's element type. Default: that of the weights.")
def compat(descriptor: BinaryIO | None, model_dir: Path | None, **given: Any) -> None:
    """Print the Compatibility ID of a DESCRIPTOR file (- for standard input).

    With --model-dir it derives the descriptor of a model and prints that instead.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if (descriptor is None) == (model_dir is None):
        raise click.UsageError("Give either a DESCRIPTOR file or --model-dir.")
    if model_dir is not None:
        members = descriptor_of_directory(model_dir, **chosen).members()
        click.echo(json.dumps(members, indent=2, ensure_ascii=False))
        return
    if chosen:
        raise click.UsageError(f"--{next(iter(chosen)).replace('_', '-')} goes with --model-dir.")
    assert descriptor is not None
    click.echo(read_descriptor(descriptor).compat_id)


@click.command()
@scope_key_option()
@click.option("--salt", help="Of the scope for requests with this cache salt.")
def scope(scope_key_file: Path, salt: str | None) -> None:
    """Print the Scope ID of a Scope Key. The key itself is never printed."""
    found = read_scope(scope_key_file)
    if salt:
        found = salted_scope(read_secret(scope_key_file), salt)
    click.echo(found.scope_id)


@click.command(short_help="Print the block keys of a sequence of tokens.")
@descriptor_option()
@scope_key_option()
@tokens_option()
def keys(descriptor: BinaryIO, scope_key_file: Path, tokens: BinaryIO) -> None:
    """Print the block keys of a sequence of tokens, one a line; incomplete last blocks have none."""
    members = read_descriptor(descriptor)
    found, _ = read_keys(read_scope(scope_key_file), members, tokens)
    click.echo("".join(f"{key.hex()}\n" for key in found), nl=False)


@click.command(short_help="Show header, sections and digests of a container file.")
@click.argument("file", type=_DOCUMENT)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def inspect(file: BinaryIO, as_json: bool) -> None:
    """Show header, sections and digests of a container FILE; exit 1 with the reason where it is broken."""
    octets = _mapped(file)
    try:
        header, digests = decode_container(octets, max_size_bytes=len(octets))
    except KVSPError as error:
        raise LocalProtocolError(f"{file.name}: {error}") from None
    codec = INITIAL_REGISTRIES.codecs.get(header.codec)
    shown = {
        "codec": header.codec,
        "codec_name": codec.name if codec else None,
        "first_layer": header.first_layer,
        "layer_count": len(header.sections),
        "token_count": header.token_count,
        "header_bytes": header.header_bytes,
        "size_bytes": header.size_bytes,
        "digest": replica_digest(digests),
        "container_sha256": hashlib.sha256(octets).hexdigest(),
    }
    rows = [
        {"layer": layer, "k_bytes": k_bytes, "v_bytes": v_bytes, "digest": digest}
        for layer, (k_bytes, v_bytes), digest in zip(header.layers, header.sections, digests, strict=True)
    ]
    if as_json:
        click.echo(json.dumps({**shown, "layers": rows}))
        return
    for name, value in shown.items():
        click.echo(f"{name.replace('_', ' '):<17} {value}")
    click.echo(f"\n{'layer':>5} {'K octets':>12} {'V octets':>12}  digest")
    for row in rows:
        click.echo(f"{row['layer']:>5} {row['k_bytes']:>12} {row['v_bytes']:>12}  {row['digest']}")


def _mapped(file: BinaryIO) -> memoryview:
    """Return the octets of a file, not read but mapped where that can be done."""
    try:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):  # standard input, a pipe, or an empty file
        return memoryview(file.read())
