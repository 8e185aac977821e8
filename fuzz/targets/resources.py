"""Requests: any method, path, query, fields and body reach a role as a typed request, or are refused with a
problem; and a typed request that is sent again means the same.
"""

from __future__ import annotations

from kvsp_core.errors import RemoteProtocolError
from kvsp_core.heads import request_from_fields
from kvsp_core.resources import Operation, Refusal, RoleName, Router, request_for
from kvsp_core.roles.authorization import Policy, ScopeRules, authorize
from kvsp_core.roles.role import BodyArrived, ReceiveBody, RequestReceived, Respond
from kvsp_core.roles.serving import Desk

_HEX32, _HEX16 = b"ab" * 32, b"0f" * 16
_CLIENT = "https://c.example/"
_POLICY = Policy({_CLIENT: list(RoleName)}, {_HEX16.decode(): ScopeRules(read=[_CLIENT], write=[_CLIENT])})
_ROUTER = Router(RoleName)
_JSON = b"\napplication/kvsp+json\n"
SEEDS = (
    b"POST\nlookup\n" + _JSON + b'{"scope_id":"%b","compat_id":"%b","block_keys":[]}' % (_HEX16, _HEX32),
    b"GET\nblocks/%b/%b/%b\nlayers=0-15&codec=1\n\n" % (_HEX32, _HEX16, _HEX32),
    b"PUT\nblocks/%b/%b/%b\n\napplication/kvsp-block\nKVB1" % (_HEX32, _HEX16, _HEX32),
    b"DELETE\nreplicas/lHUr-xSeDt_3qpqwQwQffdTj0kqh7BCC4vrbIxWUOkw/%b\n\n\n" % _HEX32,
    b"PUT\nleases/x%2Fy\n" + _JSON + b'{"ttl_ms":1}',
    b"POST\nreshard\n" + _JSON + b'{"map":"m","commit":5}',
    b"PUT\nsessions/6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11/checkpoint\n" + _JSON + b"{}",
    b"POST\next/placements\n" + _JSON + b'{"compat_id":"%b","prefixes":[],"token_count":1}' % _HEX32,
)


def one_input(data: bytes) -> None:
    """Take lines for method, path, query and media type, and the body after them, as a request."""
    method, path, query, media, body = (data.split(b"\n", 4) + [b""] * 5)[:5]
    try:
        request = request_from_fields(
            *(part.decode("latin-1") for part in (method, path, query)),
            [(b"content-type", media)],
            has_body=bool(body),
        )
    except RemoteProtocolError:
        return
    operation = _ROUTER.route(request)
    if not isinstance(operation, Refusal):
        assert _ROUTER.route(request_for(operation)[0]) == operation
    desk = Desk(RoleName, _allow)
    asked, effects = desk.take(RequestReceived(1, _CLIENT, request))
    if effects and isinstance(effects[0], ReceiveBody):
        asked, effects = desk.take(BodyArrived(1, body))
    assert (asked is None) == bool(effects)
    for effect in effects:
        assert isinstance(effect, Respond)
        assert 400 <= effect.response.status < 500


def _allow(client: str, operation: Operation) -> None:
    authorize(_POLICY, client, operation)
