"""Checks that every record and message shares, and the error they raise.

A check takes a value and the path of its member; it returns nothing and raises `InvalidValue`. What it says
names the kind of what was found, never the value: a value may be a token, a key or a session.
"""

from __future__ import annotations

import base64
import re
from array import array
from binascii import a2b_hex
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import attrs
import msgspec

from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.identity import parse_base_uri
from kvsp_core.limits import MAX_BASE_URI_CHARS, MAX_PARAMETERS_BYTES
from kvsp_core.strict_json import frozen_json, kind_of, thawed_json

__all__ = [
    "MAX_INTEGER",
    "MAX_UINT32",
    "InvalidValue",
    "Parameters",
    "are_hex",
    "are_hex_digits",
    "check_array",
    "check_base_uri",
    "check_base_uris",
    "check_boolean",
    "check_digest",
    "check_hex",
    "check_hexes",
    "check_holder",
    "check_identifier",
    "check_integer",
    "check_moqt_uri",
    "check_name",
    "check_octets",
    "check_optional_integer",
    "check_pair",
    "check_ranges",
    "check_share",
    "check_text",
    "check_token_range",
    "check_tokens",
    "check_uuid",
    "fail",
    "is_plain_base_uri",
    "moqt_fields",
    "moqt_namespace",
]

MAX_INTEGER: Final = 2**53 - 1
"""The largest integer that every JSON reader holds exactly; the bound where no narrower one applies."""

MAX_UINT32: Final = 2**32 - 1

MAX_NAME_CHARS: Final = 64
MAX_IDENTIFIER_CHARS: Final = 128

_UUID: Final = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?")
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9_~-][A-Za-z0-9._~-]*")
# Base URIs that need no closer look: no port of five digits, no '.' or '%' in the path, no brackets.
_PLAIN_BASE_URI: Final = re.compile(
    r"https://[A-Za-z0-9][A-Za-z0-9.-]{0,255}+(?::[1-9][0-9]{0,3})?+/(?:[A-Za-z0-9_-]{1,255}+/){0,4}+"
)
is_plain_base_uri: Final = _PLAIN_BASE_URI.fullmatch
"""Returns a match for a base URI of the usual kind; what it does not match may be a base URI all the same."""

_HEX_DIGITS: Final = frozenset("0123456789abcdef")
_HEX_TO_ZERO: Final = bytes(48 if octet in b"0123456789abcdef" else octet for octet in range(256))


class InvalidValue(LocalProtocolError, ValueError):
    """A record or message was given a value that the protocol does not allow; nothing was built.

    `member` is the path of the faulty member, an empty string where it is the whole. For what a peer sent,
    decoding turns this into a `RemoteProtocolError` with the path in the whole document.
    """

    def __init__(self, detail: str, *, member: str = "") -> None:
        super().__init__(f"{member}: {detail}" if member else detail)
        self.detail = detail
        self.member = member


def fail(detail: str, member: str = "") -> InvalidValue:
    """Return the error that says what is wrong with a member."""
    return InvalidValue(detail, member=member)


def check_integer(value: int, member: str, least: int = 0, most: int = MAX_INTEGER) -> None:
    """Refuse what is not an integer within these bounds, both included; True is not one (decision W3)."""
    if type(value) is not int or not least <= value <= most:
        found = "one out of range" if type(value) is int else kind_of(value)
        raise fail(f"expected an integer from {least} to {most}, found {found}", member)


def check_optional_integer(value: int | None, member: str, least: int = 0, most: int = MAX_INTEGER) -> None:
    """Refuse what is neither absent nor an integer within these bounds."""
    if value is not None:
        check_integer(value, member, least, most)


def check_share(value: float, member: str) -> None:
    """Refuse what is not a number from 0 to 1."""
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise fail("expected a number from 0 to 1", member)


def check_boolean(value: bool, member: str) -> None:
    """Refuse what is not true or false."""
    if type(value) is not bool:
        raise fail(f"expected true or false, found {kind_of(value)}", member)


def check_text(value: str, member: str, least: int = 1, most: int = 1024) -> None:
    """Refuse what is not a string of this many characters."""
    if type(value) is not str:
        raise fail(f"expected a string, found {kind_of(value)}", member)
    if not least <= len(value) <= most:
        raise fail(f"expected a string of {least} to {most} characters, found one of {len(value)}", member)


def check_name(value: str, member: str) -> None:
    """Refuse what cannot be a registered name: lowercase ASCII letters, digits and ``-`` (decision W5)."""
    check_text(value, member, most=MAX_NAME_CHARS)
    if _NAME.fullmatch(value) is None:
        raise fail("expected a name of lowercase letters, digits and '-', found other characters", member)


def check_identifier(value: str, member: str) -> None:
    """Refuse what cannot be one segment of a path as it stands."""
    check_text(value, member, most=MAX_IDENTIFIER_CHARS)
    if _IDENTIFIER.fullmatch(value) is None:
        raise fail("expected letters, digits, '-', '.', '_' or '~', found other characters", member)


def check_uuid(value: str, member: str) -> None:
    """Refuse what is not a UUID in its usual form, such as ``6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11``."""
    if type(value) is not str or _UUID.fullmatch(value) is None:
        raise fail(f"expected a UUID, 36 characters with hyphens, found {_other(value)}", member)


def check_hex(value: str, member: str, digits: int = 64) -> None:
    """Refuse what is not exactly this many lowercase hex digits (decision W1)."""
    if type(value) is not str or len(value) != digits or not _HEX_DIGITS.issuperset(value):
        raise fail(f"expected {digits} lowercase hex digits, found {_other(value)}", member)


def check_digest(value: str, member: str) -> None:
    """Refuse what is not ``sha-256:`` and 64 lowercase hex digits."""
    if (
        type(value) is not str
        or len(value) != 72
        or value[:8] != "sha-256:"
        or not _HEX_DIGITS.issuperset(value[8:])
    ):
        raise fail(f"expected 'sha-256:' and 64 lowercase hex digits, found {_other(value)}", member)


def check_hexes(values: tuple[str, ...], member: str, digits: int = 64) -> None:
    """Refuse an array that holds anything but strings of this many lowercase hex digits.

    All are checked in one go, so that thousands of keys cost little.
    """
    check_array(values, member)
    if not are_hex(values, digits):
        for index, value in enumerate(values):
            check_hex(value, f"{member}[{index}]", digits)


def are_hex(values: Sequence[str], digits: int = 64) -> bool:
    """Return whether every string is this many lowercase hex digits, in one pass over all of them."""
    try:
        lines = "\n".join(values).encode().translate(_HEX_TO_ZERO)
    except (TypeError, UnicodeEncodeError):
        return False
    return lines == ((b"0" * digits + b"\n") * len(values))[:-1]


def are_hex_digits(text: str) -> bool:
    """Return whether a text is an even number of lowercase hex digits and nothing else."""
    try:
        a2b_hex(text)
    except ValueError:
        return False
    return not ("A" in text or "B" in text or "C" in text or "D" in text or "E" in text or "F" in text)


def check_array(values: Sequence[object], member: str, least: int = 0) -> None:
    """Refuse what is not a tuple, or has fewer elements than this."""
    if type(values) is not tuple:
        raise fail(f"expected an array (a tuple here), found {kind_of(values)}", member)
    if len(values) < least:
        raise fail(f"expected at least {least}, found {len(values)}", member)


def check_tokens(values: tuple[int, ...], member: str) -> None:
    """Refuse an array that holds anything but integers from 0 to 2^32-1."""
    check_array(values, member)
    try:
        array("I", values)  # the quickest look at the bounds of all
        sound = set(map(type, values)) <= {int}
    except (OverflowError, TypeError):
        sound = False
    if not sound:
        for index, value in enumerate(values):
            if type(value) is not int or not 0 <= value <= MAX_UINT32:
                check_integer(value, f"{member}[{index}]", 0, MAX_UINT32)


def check_base_uri(value: str, member: str) -> None:
    """Refuse what is not a base URI (decision W2)."""
    if type(value) is str and is_plain_base_uri(value) is not None:
        return
    try:
        parse_base_uri(value)
    except RemoteProtocolError as error:
        raise fail(error.detail, member) from None


def check_holder(value: str, member: str) -> None:
    """Refuse what is neither a base URI nor a moqt URI (RR-4)."""
    if type(value) is str and value.startswith("moqt://"):
        check_moqt_uri(value, member)
    else:
        check_base_uri(value, member)


def check_base_uris(values: tuple[str, ...], member: str) -> None:
    """Refuse an array that holds anything but base URIs, each once."""
    check_array(values, member)
    for index, value in enumerate(values):
        check_base_uri(value, f"{member}[{index}]")
    if len(set(values)) != len(values):
        raise fail("expected each base URI once", member)


def check_octets(value: bytes, member: str, unit: int = 1) -> None:
    """Refuse what is not octets, a whole number of units of at least one."""
    if type(value) is not bytes or not value or len(value) % unit:
        raise fail(f"expected base64 of a multiple of {unit} octets", member)


def check_pair(value: tuple[int, int], member: str, most: int = MAX_INTEGER) -> None:
    """Refuse what is not a tuple of two integers from 0 to `most`."""
    if type(value) is not tuple or len(value) != 2:
        raise fail("expected an array of two integers", member)
    for index, bound in enumerate(value):
        check_integer(bound, f"{member}[{index}]", 0, most)


def check_token_range(value: tuple[int, int], member: str) -> None:
    """Refuse what is not a half-open range of token positions that holds at least one."""
    check_pair(value, member)
    if value[0] >= value[1]:
        raise fail("expected the start of a half-open range below its end", member)


def check_ranges(values: tuple[tuple[int, int], ...], member: str) -> None:
    """Refuse an array that holds anything but half-open ranges of token positions, ascending and apart."""
    check_array(values, member)
    end = 0
    for index, value in enumerate(values):
        check_token_range(value, f"{member}[{index}]")
        if value[0] < end:
            raise fail("expected ranges in ascending order that do not overlap", f"{member}[{index}]")
        end = value[1]


def _other(value: object) -> str:
    """Name the kind of what was found where a string of a certain form was expected."""
    return "a string of another form" if isinstance(value, str) and value else kind_of(value)


# Media over QUIC Transport ----------------------------------------------------------------------------------

_MOQT_URI: Final = re.compile(
    r"moqt://(?:[A-Za-z0-9][A-Za-z0-9._~-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
    r"(?:/(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*)?"
    r"(?:\?(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*)?"
)
MOQT_FIELDS: Final = 5


def check_moqt_uri(value: str, member: str) -> None:
    """Refuse what is not a ``moqt`` URI with a host, without user information or fragment."""
    if len(value) > MAX_BASE_URI_CHARS or _MOQT_URI.fullmatch(value) is None:
        raise fail("expected moqt://host or moqt://host:port/path, of the characters a URI may have", member)


def moqt_fields(namespace: str, member: str = "moqt_namespace") -> tuple[bytes, ...]:
    """Return the five Track Namespace Fields of a ``moqt_namespace`` (RR-4)."""
    octets = b""
    if type(namespace) is str and re.fullmatch(r"[A-Za-z0-9_-]*", namespace) and len(namespace) % 4 != 1:
        octets = base64.urlsafe_b64decode(namespace + "=" * (-len(namespace) % 4))
    if not octets or _base64url(octets) != namespace:
        raise fail("expected base64url without padding", member)
    fields: list[bytes] = []
    rest = octets
    while rest and len(fields) <= MOQT_FIELDS:
        length = rest[0]
        fields.append(rest[1 : 1 + length])
        if length == 0 or len(fields[-1]) != length:
            raise fail("expected fields of at least one octet, each after its length in one octet", member)
        rest = rest[1 + length :]
    if len(fields) != MOQT_FIELDS:
        raise fail(f"expected {MOQT_FIELDS} Track Namespace Fields, found another number", member)
    return tuple(fields)


def moqt_namespace(fields: Sequence[bytes]) -> str:
    """Return the ``moqt_namespace`` of five Track Namespace Fields of 1 to 255 octets each (RR-4)."""
    if len(fields) != MOQT_FIELDS or not all(1 <= len(field) <= 255 for field in fields):
        raise fail(f"expected {MOQT_FIELDS} fields of 1 to 255 octets", "moqt_namespace")
    return _base64url(b"".join(bytes([len(field)]) + field for field in fields))


def _base64url(octets: bytes) -> str:
    return base64.urlsafe_b64encode(octets).rstrip(b"=").decode("ascii")


# Free-form members ------------------------------------------------------------------------------------------


@attrs.frozen(init=False, eq=False, repr=False)
class Parameters(Mapping[str, Any]):
    """A JSON object whose members only its reader knows: immutable, hashable, equal by its canonical text."""

    _members: Mapping[str, Any]
    _text: bytes

    def __init__(self, members: Mapping[str, Any] = MappingProxyType({}), member: str = "") -> None:
        try:
            if len(msgspec.json.encode(members)) > MAX_PARAMETERS_BYTES:
                raise fail(f"expected at most {MAX_PARAMETERS_BYTES} octets of JSON", member)
        except (TypeError, OverflowError, RecursionError, UnicodeEncodeError):
            pass  # not plain JSON; what is wrong with it is said below
        try:
            frozen = frozen_json(members, member)
        except RemoteProtocolError as error:
            raise fail(error.detail, error.member or member) from None
        if not isinstance(frozen, Mapping):
            raise fail(f"expected an object, found {kind_of(members)}", member)
        self.__attrs_init__(frozen, msgspec.json.encode(thawed_json(frozen), order="sorted"))

    def __getitem__(self, name: str) -> Any:
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return f"<Parameters: {len(self)} members>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self._text == (other if isinstance(other, Parameters) else Parameters(other))._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[object, ...]:
        return Parameters, (thawed_json(self._members),)

    def thawed(self) -> object:
        """Return the members as a new dictionary, nested arrays and objects as lists and dictionaries."""
        return thawed_json(self._members)
