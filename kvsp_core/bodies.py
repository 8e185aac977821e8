"""Records and messages as JSON octets, both ways.

Reading is tolerant where the protocol says so (unknown members are ignored, of a repeated name the last
value counts) and strict in everything else. Every fault is a `RemoteProtocolError` that names the member by
its path in the document. Writing gives the same octets for equal values: members in the order of the class.
Requirement RR-1; decisions W3 and W4.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import attrs
import msgspec

from kvsp_core.errors import RemoteProtocolError
from kvsp_core.validation import InvalidValue, Parameters

__all__ = ["decode", "decoder", "encode", "from_members", "members_of", "parse"]

T = TypeVar("T")


# Reading ----------------------------------------------------------------------------------------------------


def decode(kind: type[T], octets: bytes | bytearray | memoryview) -> T:
    """Return the record or message of this class that a JSON document holds.

    Raises `RemoteProtocolError`, naming the member, where the document is not JSON, a member is missing, or
    one has a value that is not allowed.
    """
    return decoder(kind)(octets)


def decoder(kind: type[T]) -> Callable[[bytes | bytearray | memoryview], T]:
    """Return a function that does what `decode` does for one class, for where it is done often."""
    if hasattr(kind, "keyword_members"):
        return lambda octets: from_members(kind, parse(octets))
    read = msgspec.json.Decoder(kind).decode

    def decode_kind(octets: bytes | bytearray | memoryview) -> T:
        try:
            return read(octets)
        except msgspec.ValidationError as error:
            return _decode_last_values(kind, octets, error)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _malformed(error) from None

    return decode_kind


def _decode_last_values(kind: type[T], octets: bytes | bytearray | memoryview, first: Exception) -> T:
    """Decode once more what had a fault: of a repeated name the last value counts, and it may be sound."""
    try:
        members = msgspec.json.decode(octets)
    except msgspec.ValidationError:  # a number no reader takes; the first error knows its name
        raise _invalid(first) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(error) from None
    return from_members(kind, members)


def from_members(kind: type[T], members: object) -> T:
    """Return the record or message of this class with the members of a parsed JSON object.

    Raises `RemoteProtocolError`, naming the member, where one is missing or not allowed.
    """
    try:
        keywords = getattr(kind, "keyword_members", ())
        return msgspec.convert(_underscored(members, keywords) if keywords else members, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except RecursionError as error:
        raise _malformed(error) from None


def parse(octets: bytes | bytearray | memoryview) -> object:
    """Return any JSON document as dictionaries, lists and plain values. Raises `RemoteProtocolError`."""
    try:
        return msgspec.json.decode(octets)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(error) from None


def _underscored(value: object, keywords: tuple[str, ...]) -> object:
    """Return a parsed document with an underscore after each name that is a word of Python."""
    if isinstance(value, list):
        return [_underscored(item, keywords) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        f"{name}_" if name in keywords else name: _underscored(item, keywords)
        for name, item in value.items()
        if name[-1:] != "_"
    }


def _malformed(error: Exception) -> RemoteProtocolError:
    if isinstance(error, RecursionError):
        return RemoteProtocolError("the document nests too deep; nothing in KVSP nests as deep")
    return RemoteProtocolError(f"not a JSON document: {str(error).removeprefix('JSON is malformed: ')}")


_PLACE: Final = re.compile(r"(?P<fault>.*?)(?: - at `(?P<key>key in )?\$(?P<path>.*)`)?", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>.*?)_?`")
_BOUND: Final = re.compile(r"Expected `int` (?P<sign>[<>]=) (?P<bound>-?[0-9]+)")
_MOST_OF_A_PATH: Final = 200
_UNDERSCORE: Final = re.compile(r"_(?=[.\[]|$)")
_MISTYPED: Final = re.compile(r"Expected `(?P<expected>[^`]*)`(?P<more>[^`]*), got `?(?P<found>[^`]*)`?")


def _invalid(error: Exception) -> RemoteProtocolError:
    """Return the error in our words: the path, what was found (never a value) and what was expected."""
    place = _PLACE.fullmatch(str(error))
    fault, path = (place["fault"], place["path"] or "") if place else (str(error), "")
    path = _UNDERSCORE.sub("", path.removeprefix("."))
    if len(path) > _MOST_OF_A_PATH:  # a document of arrays in arrays, as nothing in KVSP is
        path = path[:_MOST_OF_A_PATH] + "..."
    if isinstance(error.__cause__, InvalidValue):
        return RemoteProtocolError(error.__cause__.detail, member=_join(path, error.__cause__.member))
    if missing := _MISSING.fullmatch(fault):
        return RemoteProtocolError("is missing", member=_join(path, missing["name"]))
    if bound := _BOUND.fullmatch(fault):
        limit = "at least" if bound["sign"] == ">=" else "at most"
        return RemoteProtocolError(f"expected an integer of {limit} {bound['bound']}", member=path)
    if fault.startswith("Expected `str` of length"):
        return RemoteProtocolError("expected a string of another length", member=path)
    if mistyped := _MISTYPED.fullmatch(fault):
        expected = " or ".join(_words(kind) for kind in mistyped["expected"].split(" | "))
        return RemoteProtocolError(
            f"expected {expected}{mistyped['more']}, found {_words(mistyped['found'])}", member=path
        )
    return RemoteProtocolError(fault[:1].lower() + fault[1:], member=path)


def _join(path: str, member: str) -> str:
    return f"{path}.{member}" if path and member and member[0] != "[" else path + member


def _words(kind: str) -> str:
    match kind:
        case "int":
            return "an integer"
        case "float":
            return "a number with a fraction or exponent"
        case "str":
            return "a string"
        case "bool":
            return "true or false"
        case "array" | "object":
            return f"an {kind}"
        case _:
            return kind


# Writing ----------------------------------------------------------------------------------------------------


def encode(value: object) -> bytes:
    """Return the JSON octets of a record or message; equal values give the same octets."""
    return msgspec.json.encode(members_of(value))


def members_of(value: object) -> dict[str, Any]:
    """Return the JSON object of a record or message, newly made, members in the order of its class.

    A member that is absent (None) is left out, unless the protocol has a null for it; a member of our own
    that is empty is left out too.
    """
    members = {}
    for attribute in type(value).__attrs_attrs__:  # type: ignore[attr-defined]
        name = attribute.name
        item = getattr(value, name)
        if type(item) not in _AS_THEY_ARE:
            if item is None and "null" not in attribute.metadata:
                continue
            if item == () and "omit_empty" in attribute.metadata:
                continue
            item = _plain(item)
        members[name.rstrip("_")] = item
    return members


_AS_THEY_ARE: Final = frozenset((str, int, float, bool, bytes))


def _plain(item: object) -> object:
    if type(item) is tuple:
        return item if not item or type(item[0]) in _AS_THEY_ARE else [_plain(element) for element in item]
    if type(item) is Parameters:
        return item.thawed()
    return members_of(item) if attrs.has(type(item)) else item
