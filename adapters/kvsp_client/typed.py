"""Settings from outside as typed structs: a mistake is one line with its key and what is allowed there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from enum import Enum
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from kvsp_core.errors import LocalProtocolError
from kvsp_core.validation import MAX_INTEGER

__all__ = ["Amount", "Count", "typed"]

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
Amount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]

_WORDS: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a section",
}
"""For msgspec's names of types those of docs/configuration.md."""

Settings = TypeVar("Settings", bound=msgspec.Struct)


def typed(found: object, kind: type[Settings]) -> Settings:
    """Return what was found as a struct of this kind, every key known and of the right type.

    Raises `LocalProtocolError` for the first mistake.
    """
    _refuse_unknown(found, kind, "")
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise LocalProtocolError(_said_with_key(str(error))) from None


def _said_with_key(said: str) -> str:
    """Turn ``Expected `int`, got `str` - at `$.a.b` `` into ``a.b: expected an integer, found text``."""
    text, _, place = said.partition(" - at `")
    text = text.replace("Object missing required field ", "missing: ").replace(", got ", ", found ")
    text = re.sub(r"`(\w+)( \| null)?`", lambda found: _WORDS.get(found[1], found[1]), text).replace("`", "")
    key = place.rstrip("`").removeprefix("$").removeprefix(".")
    return f"{key}: {text[:1].lower()}{text[1:]}" if key else f"{text[:1].lower()}{text[1:]}"


def _refuse_unknown(found: object, kind: Any, key: str) -> None:
    """Raise for the first key, or word of a fixed set, that the type does not have: msgspec's own messages
    do not say what is allowed there. Other mistakes are left to msgspec.
    """
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for option in options:
            if option is not type(None):
                _refuse_unknown(found, option, key)
    elif origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        words = [str(option.value) for option in kind] if origin is None else [str(o) for o in options]
        if isinstance(found, str) and found not in words:
            raise LocalProtocolError(f"{key}: {found!r} is unknown; {_allowed(found, words)}")
    elif origin in (list, tuple) and isinstance(found, list):
        for number, entry in enumerate(found):
            _refuse_unknown(entry, options[0], f"{key}[{number}]")
    elif origin is dict and isinstance(found, dict):
        for name, entry in found.items():
            _refuse_unknown(entry, options[1], _joined(key, name))
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(found, dict):
        hints = get_type_hints(kind)
        for name, entry in found.items():
            if name not in hints:
                raise LocalProtocolError(f"{_joined(key, name)}: unknown; {_allowed(name, hints)}")
            _refuse_unknown(entry, hints[name], _joined(key, name))


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _allowed(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
