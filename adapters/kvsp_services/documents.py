"""Typed TOML files: what is wrong in them is said with the file, the key and what is allowed there."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

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
    _refuse_unknown(path, found, kind, "")
    _make_absolute(found, path.resolve().parent)
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise DocumentError(f"{path}: {_said_with_key(str(error))}") from None


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


def _said_with_key(said: str) -> str:
    """Turn ``Expected `int`, got `str` - at `$.a.b` `` into ``a.b: expected int, found str``."""
    text, _, place = said.partition(" - at `")
    text = text.replace("`", "").replace(", got ", ", found ")
    text = text.replace("Object missing required field ", "missing: ")
    key = place.rstrip("`").removeprefix("$").removeprefix(".")
    return f"{key}: {text[:1].lower()}{text[1:]}" if key else f"{text[:1].lower()}{text[1:]}"


def _refuse_unknown(path: Path, found: object, kind: Any, key: str) -> None:
    """Raise for the first key, or word of a fixed set, that the type does not have: msgspec's own messages
    do not say what is allowed there. Other mistakes are left to msgspec.
    """
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for option in options:
            if option is not type(None):
                _refuse_unknown(path, found, option, key)
    elif origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        words = [str(option.value) for option in kind] if origin is None else [str(o) for o in options]
        if isinstance(found, str) and found not in words:
            raise DocumentError(f"{path}: {key}: {found!r} is unknown; {_allowed(found, words)}")
    elif origin in (list, tuple) and isinstance(found, list):
        for number, entry in enumerate(found):
            _refuse_unknown(path, entry, options[0], f"{key}[{number}]")
    elif origin is dict and isinstance(found, dict):
        for name, entry in found.items():
            _refuse_unknown(path, entry, options[1], _joined(key, name))
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(found, dict):
        hints = get_type_hints(kind)
        for name, entry in found.items():
            if name not in hints:
                raise DocumentError(f"{path}: {_joined(key, name)}: unknown; {_allowed(name, hints)}")
            _refuse_unknown(path, entry, hints[name], _joined(key, name))


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _allowed(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
