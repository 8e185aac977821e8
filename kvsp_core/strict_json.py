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

__all__ = ["Json", "frozen_json", "kind_of", "shown_name", "strict_json", "thawed_json"]

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A JSON value. Those that are kept are immutable: tuples and read-only mappings."""

_MAX_INTEGER: Final = 2**53 - 1
_LONGEST_INTEGER: Final = 20
_SHOWN_CHARS: Final = 40
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")
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
        depth += (token[0] in "[{") - (token[0] in "]}")
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
            detail = "is given twice; a descriptor states each member once"
            raise RemoteProtocolError(detail, member=shown_name(name))
        members[name] = value
    return members


def _integer(digits: str) -> int:
    # Python reads long integers in quadratic time; of one that is refused anyway the value does not matter.
    return int(digits) if len(digits) <= _LONGEST_INTEGER else _MAX_INTEGER + 1


def frozen_json(value: object, member: str = "", depth: int = 1) -> Json:
    """Return an immutable copy of a JSON value.

    Raises `RemoteProtocolError`, naming the place below `member`, where the value has no canonical form.
    """
    try:
        return _frozen(value, depth)
    except RemoteProtocolError as error:
        raise RemoteProtocolError(error.detail, member=_path(member, error.member)) from None


def _frozen(value: object, depth: int) -> Json:
    if depth > MAX_DESCRIPTOR_DEPTH:
        raise RemoteProtocolError(f"nests at most {MAX_DESCRIPTOR_DEPTH} levels deep")
    if isinstance(value, str):
        if not _is_unicode(value):
            raise RemoteProtocolError("holds a text that is not Unicode")
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if abs(value) > _MAX_INTEGER:
            raise RemoteProtocolError(
                f"holds an integer beyond {_MAX_INTEGER}, which JSON does not keep exactly"
            )
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RemoteProtocolError("holds a number that JSON does not have")
        return value
    if isinstance(value, (list, tuple)):
        return _frozen_array(value, depth)
    if isinstance(value, (dict, Mapping)):  # the exact type first, which is quick
        return _frozen_object(value, depth)
    raise RemoteProtocolError(f"holds {kind_of(value)}")


def _frozen_array(value: Sequence[object], depth: int) -> Json:
    items: list[Json] = []
    try:
        for item in value:
            items.append(_frozen(item, depth + 1))
    except RemoteProtocolError as error:
        place = _path(f"[{len(items)}]", error.member)
        raise RemoteProtocolError(error.detail, member=place) from None
    return tuple(items)


def _frozen_object(value: Mapping[object, object], depth: int) -> Json:
    members: dict[str, Json] = {}
    name: object = ""
    try:
        for name, item in value.items():
            if not isinstance(name, str) or not _is_unicode(name):
                break
            members[name] = _frozen(item, depth + 1)
        else:
            return MappingProxyType(members)
    except RemoteProtocolError as error:
        place = _path(shown_name(str(name)), error.member)
        raise RemoteProtocolError(error.detail, member=place) from None
    raise RemoteProtocolError("holds a member whose name is not Unicode text")


def _path(first: str, rest: str) -> str:
    return f"{first}.{rest}" if first and rest and rest[0] != "[" else first + rest


def shown_name(name: str) -> str:
    """Return a member's name as errors show it: a peer chose it, so it may be long or hold anything."""
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name[:_SHOWN_CHARS])


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
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


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
