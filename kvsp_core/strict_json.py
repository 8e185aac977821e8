"""JSON read strictly, for documents that are hashed: nothing that two readers could understand differently.

Used for Compatibility Descriptors (decision W4); other bodies are read by `kvsp_core.messages`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeAlias

from kvsp_core.errors import LimitExceeded, RemoteProtocolError
from kvsp_core.limits import MAX_DESCRIPTOR_BYTES, MAX_DESCRIPTOR_DEPTH

__all__ = ["Json", "frozen_json", "kind_of", "strict_json", "thawed_json"]

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A JSON value. Those that are kept are immutable: tuples and read-only mappings."""

_MAX_INTEGER: Final = 2**53 - 1
_LONGEST_INTEGER: Final = 20
# A string, closed or not, is one token, so that the scan is linear whatever the text.
_NESTING: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{\]}]', re.DOTALL)


def strict_json(octets: bytes | bytearray | memoryview) -> Json:
    """Return the value of a JSON document, immutable, refusing what two readers could understand differently.

    Raises `RemoteProtocolError`, naming the member where there is one, or `LimitExceeded`.
    """
    if len(octets) > MAX_DESCRIPTOR_BYTES:
        raise LimitExceeded(f"a descriptor has at most {MAX_DESCRIPTOR_BYTES} octets, found {len(octets)}")
    try:
        text = str(octets, "utf-8")
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"a descriptor is UTF-8; octet {error.start} is not") from None
    depth = 0
    for token in _NESTING.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > MAX_DESCRIPTOR_DEPTH:
            raise RemoteProtocolError(f"a descriptor nests at most {MAX_DESCRIPTOR_DEPTH} levels deep")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_members,
            parse_int=_integer,
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise RemoteProtocolError(f"not JSON at {where}: {error.msg}") from None
    return frozen_json(value)


def _unique_members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members: dict[str, object] = {}
    for name, value in pairs:
        if name in members:
            raise RemoteProtocolError("is given twice; a descriptor states each member once", member=name)
        members[name] = value
    return members


def _integer(digits: str) -> int:
    # Python reads long integers in quadratic time; of one that is refused anyway the value does not matter.
    return int(digits) if len(digits) <= _LONGEST_INTEGER else _MAX_INTEGER + 1


def frozen_json(value: object, member: str = "", depth: int = 1) -> Json:
    """Return an immutable copy of a JSON value.

    Raises `RemoteProtocolError`, naming the place, where the value has no canonical form.
    """
    if depth > MAX_DESCRIPTOR_DEPTH:
        raise RemoteProtocolError(f"nests at most {MAX_DESCRIPTOR_DEPTH} levels deep", member=member)
    match value:
        case None | bool():
            return value
        case int() if abs(value) <= _MAX_INTEGER:
            return value
        case int():
            detail = f"holds an integer beyond {_MAX_INTEGER}, which JSON does not keep exactly"
            raise RemoteProtocolError(detail, member=member)
        case float() if math.isfinite(value):
            return value
        case float():
            raise RemoteProtocolError("holds a number that JSON does not have", member=member)
        case str() if _is_unicode(value):
            return value
        case list() | tuple():
            return tuple(frozen_json(item, f"{member}[{i}]", depth + 1) for i, item in enumerate(value))
        case Mapping() if all(isinstance(name, str) and _is_unicode(name) for name in value):
            path = f"{member}." if member else ""
            return MappingProxyType(
                {name: frozen_json(item, path + name, depth + 1) for name, item in value.items()}
            )
        case str() | Mapping():
            raise RemoteProtocolError("holds a text that is not Unicode", member=member)
        case _:
            raise RemoteProtocolError(f"holds {kind_of(value)}", member=member)


def thawed_json(value: object) -> object:
    """Return a JSON value as the lists and dictionaries that the canonical writer takes."""
    match value:
        case list() | tuple():
            return [thawed_json(item) for item in value]
        case Mapping():
            return {name: thawed_json(item) for name, item in value.items()}
        case _:
            return value


def _is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which UTF-8 cannot carry."""
    return not re.search("[\ud800-\udfff]", text)


def kind_of(value: object) -> str:
    """Name the kind of a JSON value, never the value."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int():
            return "an integer out of range" if abs(value) > 2**32 - 1 or value < 1 else "an integer"
        case float():
            return "a number with a fraction or exponent"
        case str():
            return "a string" if value else "an empty string"
        case list() | tuple():
            return "an array"
        case Mapping():
            return "an object"
        case _:
            return f"a Python {type(value).__name__}, which is not JSON"
