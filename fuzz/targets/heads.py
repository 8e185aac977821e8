"""Heads of requests and responses: any header fields give a head that survives writing, or the documented
error.
"""

from __future__ import annotations

from kvsp_core.errors import RemoteProtocolError
from kvsp_core.heads import request_fields, request_from_fields, response_fields, response_from_fields

_NAMES = (
    *(b"content-type", b"content-encoding", b"content-length", b"content-digest", b"repr-digest"),
    *(b"if-none-match", b"cache-control", b"location", b"allow", b"retry-after", b"x-other"),
)
_DIGEST = b"sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:"
SEEDS = (
    b"\x00application/kvsp+json\n\x0217\n",
    b"\x00application/kvsp-block\n\x0217\n\x04" + _DIGEST + b"\n\x05*\n",
    b"\x03sha-512=:AAAA:, " + _DIGEST + b";q=1\n\x06private, immutable, max-age=60\n",
    b"\x0217\n\x0217, 18\n\x0799\n\x08GET, PUT\n\x0912\n",
)


def one_input(data: bytes) -> None:
    """Read lines of a name's number and a value as fields; write what was read, and read it again."""
    fields = [(_NAMES[line[0] % len(_NAMES)], line[1:]) for line in data.split(b"\n") if line]
    try:
        request = request_from_fields("GET", "lookup", "", fields, has_body=True)
    except RemoteProtocolError:
        pass
    else:
        request_fields(request)
    try:
        response = response_from_fields(200, fields, has_body=True)
    except RemoteProtocolError:
        return
    response_fields(response)
