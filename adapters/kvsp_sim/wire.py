"""Heads of requests and responses as they come out at the other end, after HTTP header fields and back."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from kvsp_core.errors import RemoteProtocolError
from kvsp_core.heads import (
    Request,
    Response,
    request_fields,
    request_from_fields,
    response_fields,
    response_from_fields,
)

__all__ = ["is_idempotent", "request_line", "request_on_wire", "response_on_wire"]

_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "PUT", "DELETE"})


@lru_cache(maxsize=4096)
def request_on_wire(request: Request, length: int) -> Request:
    """Return a request as its server reads it; `length` is that of its body."""
    fields = [field for field in request_fields(request) if field[0] != b"content-length"]
    if length:
        fields.append((b"content-length", b"%d" % length))
    try:
        return request_from_fields(request.method, request.path, request.query, fields, has_body=length > 0)
    except RemoteProtocolError as error:
        raise AssertionError(f"a role made a request that cannot be read: {error}") from None


@lru_cache(maxsize=4096)
def response_on_wire(response: Response, length: int | None) -> Response:
    """Return a response as its client reads it; `length` is that of its body, None where it is streamed."""
    fields = [field for field in response_fields(response) if field[0] != b"content-length"]
    if length is not None:
        fields.append((b"content-length", b"%d" % length))
    return response_from_fields(response.status, fields, has_body=length != 0)


def is_idempotent(request: Request) -> bool:
    """Return whether HTTP allows to send the request again where its connection broke."""
    return request.method in _IDEMPOTENT


_NAME: Final = re.compile(r"[0-9a-f]{8}[0-9a-f-]{24,}|[A-Za-z0-9_-]{43}")


def request_line(request: Request) -> str:
    """Return method and path of a request for a reader, names of things shortened."""
    path = _NAME.sub(lambda name: f"{name[0][:4]}~", request.path)
    return f"{request.method} {path}" + (f"?{request.query}" if request.query else "")
