"""Heads of requests and responses, to and from HTTP header fields: one place for clients and servers.

KVSP defines no HTTP field of its own (HT-9). A head holds the few standard fields that the protocol gives a
meaning; every other field is none of a role's business, and not read. What a role answers carries
``Cache-Control: no-store`` unless it says otherwise, which only block data does (HT-5, BR-3).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from typing import Final, TypeAlias

import attrs

from kvsp_core.errors import RemoteProtocolError

__all__ = [
    "LINES_MEDIA_TYPE",
    "Fields",
    "Request",
    "Response",
    "is_traceparent",
    "media_type",
    "request_fields",
    "request_from_fields",
    "response_fields",
    "response_from_fields",
    "traceparent_of",
]

LINES_MEDIA_TYPE: Final = "application/x-ndjson"
"""The media type of streamed output: one JSON document a line (decision W31)."""

Fields: TypeAlias = "list[tuple[bytes, bytes]]"
"""Header fields in order, names in lowercase."""


@attrs.frozen(kw_only=True)
class Request:
    """The head of a request to a role.

    `path` is what follows the role's base URI, such as ``leases/x7``, as it is on the wire; `query` what
    follows the question mark. Digests are hex32 of SHA-256. `content_length` is 0 where there is no body and
    None where its length is not told.
    """

    method: str
    path: str = attrs.field(repr=False)
    query: str = ""
    content_type: str | None = None
    content_encoding: str | None = None
    content_length: int | None = 0
    if_none_match: str | None = None
    content_digest: str | None = attrs.field(default=None, repr=False)
    repr_digest: str | None = attrs.field(default=None, repr=False)


@attrs.frozen(kw_only=True)
class Response:
    """The head of a response.

    `max_age_s` is set for block data only, which clients may keep that long for themselves; every other
    response is not to be stored. `allow` are the methods of a resource that does not have the one asked for.
    `content_length` None is one that is streamed. `location` is a reference relative to the request, such as
    ``leases/x7``, or whatever a peer made it.
    """

    status: int
    content_type: str | None = None
    content_encoding: str | None = None
    content_length: int | None = 0
    max_age_s: int | None = None
    location: str | None = attrs.field(default=None, repr=False)
    allow: tuple[str, ...] = ()
    retry_after_s: int | None = None
    content_digest: str | None = attrs.field(default=None, repr=False)
    repr_digest: str | None = attrs.field(default=None, repr=False)

    @property
    def is_success(self) -> bool:
        """Whether the status is of class 2xx; a client acts on one it does not know by its class (HT-6)."""
        return 200 <= self.status <= 299


# Requests ---------------------------------------------------------------------------------------------------


def request_fields(request: Request) -> Fields:
    """Return the header fields of a request, without its method and target."""
    fields: Fields = []
    _content_fields(fields, request)
    if request.if_none_match is not None:
        fields.append((b"if-none-match", request.if_none_match.encode("latin-1")))
    return fields


def request_from_fields(
    method: str, path: str, query: str, fields: Iterable[tuple[bytes, bytes]], *, has_body: bool
) -> Request:
    """Return the head of a request that came in.

    `path` and `query` are below the role's base URI. `has_body` tells whether octets may follow.
    Raises `RemoteProtocolError` that names the field where one of those we read is not as its definition
    says (400).
    """
    found = _read(fields)
    length = _integer(found.get("content-length"), "content-length")
    return Request(
        method=method,
        path=path,
        query=query,
        content_type=found.get("content-type"),
        content_encoding=found.get("content-encoding"),
        content_length=length if has_body else 0,
        if_none_match=found.get("if-none-match"),
        content_digest=_digest(found.get("content-digest"), "content-digest"),
        repr_digest=_digest(found.get("repr-digest"), "repr-digest"),
    )


def is_traceparent(value: bytes) -> bool:
    """Return whether this is a ``traceparent`` as W3C Trace Context, section 3.2 says, of the length it has
    now."""
    return _TRACEPARENT.fullmatch(value) is not None


def traceparent_of(fields: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return what a request says that it belongs to; None where it says nothing, or nothing well formed.

    The field is no part of a `Request`: no role acts on it, and it is another one in requests that are alike
    (decision W34).
    """
    found = [value for name, value in fields if name.lower() == b"traceparent"]
    return found[0].decode("ascii") if len(found) == 1 and is_traceparent(found[0]) else None


# Responses --------------------------------------------------------------------------------------------------


def response_fields(response: Response) -> Fields:
    """Return the header fields of a response, without its status."""
    fields: Fields = []
    if response.max_age_s is None:
        fields.append((b"cache-control", b"no-store"))
    else:
        fields.append((b"cache-control", b"private, immutable, max-age=%d" % response.max_age_s))
    _content_fields(fields, response)
    if response.location is not None:
        fields.append((b"location", response.location.encode("latin-1")))
    if response.allow:
        fields.append((b"allow", ", ".join(response.allow).encode("latin-1")))
    if response.retry_after_s is not None:
        fields.append((b"retry-after", b"%d" % response.retry_after_s))
    return fields


def response_from_fields(status: int, fields: Iterable[tuple[bytes, bytes]], *, has_body: bool) -> Response:
    """Return the head of a response that came in. A digest that is not well formed counts as absent.

    Raises `RemoteProtocolError` where the length is not a number.
    """
    found = _read(fields)
    length = _integer(found.get("content-length"), "content-length")
    return Response(
        status=status,
        content_type=found.get("content-type"),
        content_encoding=found.get("content-encoding"),
        content_length=length if has_body else 0,
        max_age_s=_max_age_s(found.get("cache-control", "")),
        location=found.get("location"),
        allow=tuple(part.strip() for part in found.get("allow", "").split(",") if part.strip()),
        retry_after_s=_seconds(found.get("retry-after", "")),
        content_digest=_digest_or_none(found.get("content-digest")),
        repr_digest=_digest_or_none(found.get("repr-digest")),
    )


# Fields -----------------------------------------------------------------------------------------------------

_READ: Final = frozenset(
    (
        *(b"content-type", b"content-encoding", b"content-length", b"content-digest", b"repr-digest"),
        *(b"if-none-match", b"cache-control", b"location", b"allow", b"retry-after"),
    )
)
# A member of the dictionary of RFC 9530 whose value is a byte sequence, as RFC 8941 writes them.
_DIGEST_MEMBER: Final = re.compile(r"(?P<name>[a-z*][a-z0-9_.*-]*)=:(?P<value>[A-Za-z0-9+/=]*):(?:;[^,]*)?")
_TRACEPARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_MAX_AGE: Final = re.compile(r"(?:^|,)\s*max-age=\"?([0-9]{1,10})\"?\s*(?:,|$)", re.IGNORECASE)


def media_type(content_type: str | None) -> str:
    """Return the media type of a Content-Type field in lowercase, without parameters; empty where absent."""
    return (content_type or "").partition(";")[0].strip().lower()


def _content_fields(fields: Fields, head: Request | Response) -> None:
    if head.content_type is not None:
        fields.append((b"content-type", head.content_type.encode("latin-1")))
    if head.content_encoding is not None:
        fields.append((b"content-encoding", head.content_encoding.encode("latin-1")))
    if head.content_length is not None and (head.content_length or isinstance(head, Response)):
        fields.append((b"content-length", b"%d" % head.content_length))
    if head.content_digest is not None:
        fields.append((b"content-digest", _digest_field(head.content_digest)))
    if head.repr_digest is not None:
        fields.append((b"repr-digest", _digest_field(head.repr_digest)))


def _read(fields: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the values of the fields we read; several lines of one are joined (RFC 9110, 5.3)."""
    found: dict[str, str] = {}
    for name, value in fields:
        lower = name.lower()
        if lower in _READ:
            key, text = lower.decode("ascii"), value.decode("latin-1").strip()
            found[key] = f"{found[key]}, {text}" if key in found else text
    return found


def _integer(text: str | None, name: str) -> int | None:
    if text is None:
        return None
    # Several lines that say the same are one (RFC 9110, 8.6).
    values = {part.strip() for part in text.split(",")}
    value = values.pop()
    if values or not (value.isascii() and value.isdigit()) or len(value) > 19:
        raise RemoteProtocolError("expected one number of octets", member=name)
    return int(value)


def _digest_field(digest: str) -> bytes:
    return b"sha-256=:" + base64.b64encode(bytes.fromhex(digest)) + b":"


def _digest(text: str | None, name: str) -> str | None:
    """Return the SHA-256 of a digest field as hex32; None where it has none. Other algorithms are ignored."""
    if text is None:
        return None
    digest = None
    for part in text.split(","):
        member = _DIGEST_MEMBER.fullmatch(part.strip(" \t"))
        if member is None:
            raise RemoteProtocolError("expected 'sha-256=:BASE64:' (RFC 9530)", member=name)
        if member["name"] == "sha-256":
            digest = member["value"]
    if digest is None:
        return None
    try:
        octets = base64.b64decode(digest + "=" * (-len(digest) % 4), validate=True)
    except (binascii.Error, ValueError):
        octets = b""
    if len(octets) != 32:
        raise RemoteProtocolError("expected the 32 octets of a SHA-256 in base64", member=name)
    return octets.hex()


def _digest_or_none(text: str | None) -> str | None:
    try:
        return _digest(text, "")
    except RemoteProtocolError:
        return None


def _max_age_s(cache_control: str) -> int | None:
    found = _MAX_AGE.search(cache_control)
    return int(found[1]) if found and "no-store" not in cache_control.lower() else None


def _seconds(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
