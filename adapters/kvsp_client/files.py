"""Files that a process is given: secrets, documents and whatever is hashed in pieces; and those it writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvsp_core.errors import KVSPError, LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor, Scope

__all__ = ["file_pieces", "read_descriptor", "read_scope", "read_secret", "replacing"]

PIECE_BYTES: Final = 1 << 20
MAX_SECRET_BYTES: Final = 4096
_HEX_DIGITS: Final = frozenset(b"0123456789abcdefABCDEF")


def file_pieces(path: Path) -> Iterator[bytes]:
    """Go through the octets of a file in pieces of at most 1 MiB; it is opened when the first is asked
    for."""
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def read_secret(path: Path) -> bytes:
    """Return the octets of a secret from a file that only its owner can read.

    The file holds the octets themselves, or an even number of hex digits and at most a newline. Raises
    `LocalProtocolError`, never quoting the content, where others can read it (SE-5) or it is too large, and
    `OSError` where it cannot be read.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
            raise LocalProtocolError(f"{path} can be read by others than its owner; run: chmod 600 {path}")
        content = file.read(MAX_SECRET_BYTES + 1)
    if len(content) > MAX_SECRET_BYTES:
        raise LocalProtocolError(f"{path} is no key: it has more than {MAX_SECRET_BYTES} octets")
    text = content.strip()
    if text and len(text) % 2 == 0 and _HEX_DIGITS.issuperset(text):
        return bytes.fromhex(text.decode("ascii"))
    return content


def read_scope(path: Path) -> Scope:
    """Return the scope whose key is in a file: at least 32 octets, or 64 hex digits; see `read_secret`."""
    try:
        return Scope(read_secret(path))
    except LocalProtocolError as error:
        named = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise LocalProtocolError(named) from None


def read_descriptor(path: Path) -> CompatibilityDescriptor:
    """Return the Compatibility Descriptor in a file. Raises `LocalProtocolError` that names the file where it
    holds none, and `OSError` where it cannot be read."""
    try:
        return CompatibilityDescriptor.from_json(path.read_bytes())
    except KVSPError as error:
        raise LocalProtocolError(f"{path}: {error}") from None


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have an error of the operating system name this file: those of writing, such as a full disk, name
    none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: Path, content: bytes, *, mode: int = 0o666) -> Iterator[None]:
    """Write a file beside another one, or where none is, and give it that name when the block ends.

    So a file is whole or as it was, whatever happens meanwhile, and of several neither is there without the
    others. `mode` is that of the new file, less the umask. A link stays, and what it leads to is replaced; a
    device or a pipe is just written to. Raises `OSError` that names the file.
    """
    if path.exists() and not path.is_file():
        with _naming(path):
            path.write_bytes(content)
        yield
        return
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(f"{target.name}.part")
    with _naming(path):
        unfinished.unlink(missing_ok=True)
    try:
        with (
            _naming(path),
            open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file,
        ):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield
        with _naming(path):
            unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
