"""Header lists of HTTP/2 messages: what RFC 9113, section 8 allows, checked before anybody reads them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

__all__ = [
    "HeaderList",
    "Malformed",
    "RequestHead",
    "check_trailers",
    "list_bytes",
    "request_head",
    "response_head",
]

HeaderList: TypeAlias = "list[tuple[bytes, bytes]]"
"""Names and values in the order they came."""

_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_METHOD: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_PATH: Final = re.compile(rb"/[!$-~]*|\*")
_SCHEME: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*")
_AUTHORITY: Final = re.compile(rb"[!$-.0->A-~]+")
_STATUS: Final = re.compile(rb"[1-9][0-9][0-9]")
# What no value may hold: NUL, CR and LF anywhere, white space at either end.
_BAD_VALUE: Final = re.compile(rb"[\x00\r\n]|^[ \t]|[ \t]\Z")
_CONNECTION_FIELDS: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
_REQUEST_PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path"))


class Malformed(Exception):
    """A message is not as RFC 9113 says: a stream error of type PROTOCOL_ERROR."""


class RequestHead(NamedTuple):
    """A request's head, checked: method, authority, target and the fields that are no pseudo-fields."""

    method: str
    authority: str
    target: str
    fields: HeaderList
    expects_continue: bool


def list_bytes(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the size of a header list as SETTINGS_MAX_HEADER_LIST_SIZE counts it (RFC 9113, 6.5.2)."""
    return sum(len(name) + len(value) + 32 for name, value in headers)


def request_head(headers: HeaderList) -> RequestHead:
    """Return the head of a request, or raise `Malformed`. The target of CONNECT, which no role has, is
    ``*``."""
    pseudo, fields = _split(headers, _REQUEST_PSEUDO)
    method = pseudo.get(b":method", b"")
    if not _METHOD.fullmatch(method):
        raise Malformed("no method")
    target = pseudo.get(b":path", b"")
    if method == b"CONNECT":
        if b":path" in pseudo or b":scheme" in pseudo or b":authority" not in pseudo:
            raise Malformed("CONNECT has an authority and neither scheme nor path")
        target = b"*"
    elif not _SCHEME.fullmatch(pseudo.get(b":scheme", b"")):
        raise Malformed("no scheme")
    elif not _PATH.fullmatch(target) or (target == b"*" and method != b"OPTIONS"):
        raise Malformed("no path that begins with a slash")
    authority = pseudo.get(b":authority")
    expects = False
    for name, value in fields:
        if name == b"host":
            if authority is not None and value.lower() != authority.lower():
                raise Malformed("host and authority differ")
            authority = value
        elif name == b"expect":
            expects = value.lower() == b"100-continue"
    if authority is None or not _AUTHORITY.fullmatch(authority):
        raise Malformed("no authority")
    return RequestHead(method.decode(), authority.decode(), target.decode(), fields, expects)


def response_head(headers: HeaderList) -> tuple[int, HeaderList]:
    """Return the status and the fields of a response. Raises `Malformed`."""
    pseudo, fields = _split(headers, frozenset((b":status",)))
    status = pseudo.get(b":status", b"")
    if not _STATUS.fullmatch(status):
        raise Malformed("no status of three digits")
    return int(status), fields


def check_trailers(headers: HeaderList) -> None:
    """Raise `Malformed` where trailers hold a pseudo-field or anything else they may not."""
    _split(headers, frozenset())


def _split(headers: HeaderList, allowed: frozenset[bytes]) -> tuple[dict[bytes, bytes], HeaderList]:
    pseudo: dict[bytes, bytes] = {}
    fields: HeaderList = []
    for header in headers:
        name, value = header
        if _BAD_VALUE.search(value):
            raise Malformed("a value holds what no value may hold")
        if name[:1] == b":":
            if name not in allowed or name in pseudo or fields:
                raise Malformed("a pseudo-field is unknown, repeated, or after other fields")
            pseudo[name] = value
            continue
        if not _TOKEN.fullmatch(name):
            raise Malformed("a name is empty, in capitals, or no token")
        if name in _CONNECTION_FIELDS or (name == b"te" and value.lower() != b"trailers"):
            raise Malformed("a field is for HTTP/1.1 connections only")
        fields.append(header)
    return pseudo, fields
