"""Typed TOML files: what is wrong in them is said with the file, the key and what is allowed there."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvsp_client.typed import typed
from kvsp_core.errors import KVSPError

__all__ = ["DocumentError", "read_toml"]

Document = TypeVar("Document", bound=msgspec.Struct)

_MAX_DOCUMENT_BYTES = 1 << 20
_MAX_SAID = 600


class DocumentError(KVSPError):
    """A file does not say what it should; the text, one line, names file, key and what is allowed."""

    def __init__(self, text: str) -> None:
        # A key may hold anything that a TOML string can.
        printable = "".join(c if c.isprintable() else " " for c in text)
        super().__init__(printable[:_MAX_SAID])


_PATH_SUFFIXES = ("_file", "_files", "_dir", "directory")


def read_toml(path: Path, kind: type[Document]) -> Document:
    """Return the document in a TOML file, every key known and of the right type.

    Types are msgspec structs, whose fields are the keys. Values of keys that end in ``_file``, ``_files``,
    ``_dir`` or ``directory`` are paths relative to the file, and are returned as absolute ones. Raises
    `DocumentError`.
    """
    try:
        octets = path.read_bytes()
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}") from None
    if len(octets) > _MAX_DOCUMENT_BYTES:
        raise DocumentError(f"{path}: larger than {_MAX_DOCUMENT_BYTES} octets")
    try:
        found = tomllib.loads(octets.decode())
    except UnicodeDecodeError:
        raise DocumentError(f"{path}: not a TOML file: it is not UTF-8 text") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DocumentError(f"{path}: not TOML: {error}") from None
    _make_absolute(found, path.resolve().parent)
    try:
        return typed(found, kind)
    except KVSPError as error:
        raise DocumentError(f"{path}: {error}") from None


def _make_absolute(found: Any, directory: Path) -> None:
    """Put the directory before every relative path of a document."""
    if isinstance(found, list):
        for entry in found:
            _make_absolute(entry, directory)
    elif isinstance(found, dict):
        for key, value in found.items():
            if key.endswith(_PATH_SUFFIXES) and isinstance(value, str):
                found[key] = str(directory / value)
            elif key.endswith(_PATH_SUFFIXES) and isinstance(value, list):
                found[key] = [str(directory / v) if isinstance(v, str) else v for v in value]
            else:
                _make_absolute(value, directory)
