"""Looks for what must not be seen, in every form it could have, in whatever a run has left behind."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from tests.hostile.kills import Hurt

__all__ = ["Find", "forms_of", "look_through", "secrets_of"]

KEY_FILES = ("tenant.key", "storage.key", "ca.key")
"""Where secrets belong."""


@attrs.frozen
class Find:
    """A secret, by a name of its kind, in a file."""

    path: Path
    kind: str
    form: str


def forms_of(secret: bytes) -> Iterator[tuple[str, bytes]]:
    """Go through the forms in which octets could be written: raw, in hex, in base64 from any octet on."""
    yield "raw", secret
    yield "hex", secret.hex().encode()
    yield "HEX", secret.hex().upper().encode()
    for skipped in range(3):
        whole = (len(secret) - skipped) // 3 * 3
        part = secret[skipped : skipped + whole]
        yield "base64", base64.b64encode(part)
        yield "base64url", base64.urlsafe_b64encode(part)


def forms_of_tokens(tokens: Iterable[int]) -> Iterator[tuple[str, bytes]]:
    """Go through the forms in which tokens could be written."""
    numbers = list(tokens)
    yield "list", json.dumps(numbers)[1:-1].encode()
    yield "list", json.dumps(numbers, separators=(",", ":"))[1:-1].encode()
    for size in (2, 4):
        yield f"{size} octets each", b"".join(number.to_bytes(size, "little") for number in numbers)


def secrets_of(hurt: Hurt) -> dict[bytes, tuple[str, str]]:
    """Return every form of every secret of a run -> what it is and the form."""
    from kvsp_core.block_keys import block_keys
    from kvsp_engines.text import TextCodec

    world = hurt.world
    found: dict[bytes, tuple[str, str]] = {}

    def add(kind: str, forms: Iterable[tuple[str, bytes]]) -> None:
        for form, octets in forms:
            found[octets] = (kind, form)

    add("scope key", forms_of((world.directory / "tenant.key").read_bytes()))
    add("storage key", forms_of((world.directory / "storage.key").read_bytes()))
    for block in hurt.blocks.kept[:40]:
        add("block key", forms_of(bytes.fromhex(block.key)))
        add("KV octets", forms_of(block.octets[-96:-48]))
        add("KV octets", forms_of(block.octets[len(block.octets) // 2 :][:48]))
    codec = TextCodec(world.model_dir)
    for question in hurt.streams.questions:
        tokens = codec.encode_chat([{"role": "user", "content": question.prompt}])
        for key in block_keys(world.scope, world.descriptor, tokens)[0]:
            add("block key", forms_of(key))
        add("prompt tokens", forms_of_tokens(tokens[20:36]))
        add("prompt text", [("text", question.prompt[20:44].encode())])
        answer = question.text.encode()
        add(
            "answer text", [("text", answer[10:40]), ("JSON", json.dumps(question.text[5:30]).encode()[1:-1])]
        )
    for session in hurt.ledger.known():
        add("session", [("text", session.encode()), *forms_of(bytes.fromhex(session.replace("-", "")))])
    return {octets: what for octets, what in found.items() if len(octets) >= 12}


def look_through(directory: Path, secrets: dict[bytes, tuple[str, str]]) -> list[Find]:
    """Return every secret that is in a file of a directory, or in a name of one; key files excepted."""
    finds = []
    for path in sorted(directory.rglob("*")):
        octets = b"" if not path.is_file() or path.name in KEY_FILES else path.read_bytes()
        octets += path.name.encode()
        finds += [Find(path, *what) for secret, what in secrets.items() if secret in octets]
    return finds
