"""Index, holder and controller: any sequence of requests by any clients, with whatever comes of the calls and
jobs of the roles, is answered once each, and no error of theirs ever shows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from kvsp_core.errors import RemoteProtocolError
from kvsp_core.heads import Response, request_from_fields
from kvsp_core.identity import component_id
from kvsp_core.problems import BAD_REQUEST, Problem
from kvsp_core.resources import RESOURCES, RoleName
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.controller import Controller, ControllerSettings
from kvsp_core.roles.controller_placement import PlacementSettings
from kvsp_core.roles.holder import Holder
from kvsp_core.roles.holdings import TierLimits
from kvsp_core.roles.index import Index
from kvsp_core.roles.role import (
    AnswerReceived,
    BodyArrived,
    BodyFailed,
    Call,
    CallFailed,
    JobFailed,
    JobFault,
    Load,
    ReadBlock,
    ReceiveBlock,
    ReceiveBody,
    RequestEnded,
    RequestReceived,
    Respond,
    Role,
    Store,
    TimerFired,
)

_MEMBERS = {
    "compat_id": "cd" * 32,
    "scope_id": "0c" * 16,
    "block_key": "ab" * 32,
    "session": "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11",
    "lease": "x",
    "directive": "d",
    "map": "m",
}
_HERE, _OTHER = "https://here.example/kvsp/", "https://other.example/kvsp/"
_CLIENTS = ("https://a.example/", "https://b.example/", "spiffe://example/ops", "https://nobody.example/")
_POLICY = Policy(
    {client: list(RoleName) for client in _CLIENTS[:3]},
    {
        _MEMBERS["scope_id"]: ScopeRules(
            read=_CLIENTS[:2], write=_CLIENTS[:1], publish=_CLIENTS[:1], withdraw=_CLIENTS[:1]
        )
    },
)
_BLOCK = b'"block_key": "%b", "compat_id": "%b", "scope_id": "%b"' % tuple(
    _MEMBERS[name].encode() for name in ("block_key", "compat_id", "scope_id")
)
_SAMPLER = b'{"method": "greedy", "params": {}, "seed": 0, "step": 2, "deterministic": true}'
_BODIES = (
    b'{%b, "block_keys": ["%b"]}' % (_BLOCK, b"ab" * 32),
    b'{%b, "holder": "%b", "codec": 1, "size": 8, "digest": "sha-256:%b", "residency": [{"tier": "host",'
    b' "layers": [0, 0]}], "ttl_ms": 1000}' % (_BLOCK, _CLIENTS[0].encode(), b"00" * 32),
    b'{"block_keys": ["%b"], "ttl_ms": 500}' % (b"ab" * 32),
    b'{"ttl_ms": 500}',
    b'{"instance": "%b", "state": "active", "epoch": 3, "ttl_ms": 1000, "seq": 1}' % _CLIENTS[0].encode(),
    b'{"compat_id": "%b", "prefixes": [{"scope_id": "%b", "block_keys": ["%b"]}], "token_count": 20}'
    % (b"cd" * 32, b"0c" * 16, b"ab" * 32),
    b'{"session": "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11", "epoch": 1, %b, "prompt_blocks": [], "prompt_tail":'
    b' [1], "generated": [5, 6], "output_offset": 2, "sampler": %b}' % (_BLOCK.split(b", ", 1)[1], _SAMPLER),
    b'{"state": "draining"}',
)
_ASKED = tuple(itertools.product(range(len(RESOURCES)), (0, 1)))
SEEDS = (
    *(
        bytes([role, *(octet for row, client in _ASKED for octet in (row, client, body, 0))])
        for role in range(3)
        for body in range(len(_BODIES))
    ),
    b"\x00\x00\x00\x00\xf0x\xff" * 20,
)


def _random_bytes() -> Any:
    numbers = itertools.count(1)
    return lambda count: next(numbers).to_bytes(count, "big")


def _role(number: int) -> Role:
    if number == 0:
        return Index(base_uri=_HERE, policy=_POLICY)
    if number == 1:
        return Holder(
            base_uri=_HERE,
            policy=_POLICY,
            tiers={"host": TierLimits(capacity_bytes=10_000, read_mbit_per_s=None)},
            random_bytes=_random_bytes(),
            now_ms=0,
            index_uris=(_OTHER,),
        )
    settings = ControllerSettings(
        placement=PlacementSettings(index_uris=(_OTHER,)), open_by_checkpoint=True, placement_wait_ms=500
    )
    return Controller(
        base_uri=_HERE, policy=_POLICY, settings=settings, random_bytes=_random_bytes(), stored={}
    )


class _Conversation:
    """A role, and a world that does with its effects what the octets say."""

    def __init__(self, role: Role, octets: Iterator[int]) -> None:
        self.role = role
        self.octets = octets
        self.now_ms = 0
        self.requests = 0
        self.answered: set[int] = set()
        self.ended: set[int] = set()
        self.body = b""
        self.do(role.start(0))

    def give(self, item: Any) -> None:
        self.do(self.role.handle(item, self.now_ms))

    def do(self, effects: tuple[object, ...]) -> None:
        for effect in effects:
            match effect:
                case Respond(request_id=number):
                    assert 1 <= number <= self.requests, "an answer to nobody"
                    assert number not in self.answered, "two answers to one request"
                    self.answered.add(number)
                    assert 100 <= effect.response.status < 600
                case ReceiveBody():
                    self.give(BodyArrived(effect.request_id, self.body))
                case ReceiveBlock():
                    self.give(BodyFailed(effect.request_id, Problem(BAD_REQUEST, "cut off")))
                case Call():
                    choice = next(self.octets, 0)
                    if choice < 80:
                        self.give(CallFailed(effect.call_id, "timed out"))
                    elif choice < 240:
                        status = (200, 201, 204, 400, 403, 404, 409, 503)[choice % 8]
                        self.give(AnswerReceived(effect.call_id, Response(status=status), b""))
                case Store() | ReadBlock() | Load():
                    self.give(JobFailed(effect.job_id, JobFault.MISSING))
                case _:
                    pass

    def ask(self, row: int, client: int, body: int, change: int) -> None:
        resource = RESOURCES[row % len(RESOURCES)]
        known = {**_MEMBERS, "holder_id": component_id(_CLIENTS[0]), "instance_id": component_id(_CLIENTS[0])}
        names = re.findall(r"\{(\w+)\}", resource.path)
        path = resource.path.format(**{name: known[name] for name in names})
        octets = bytearray(_BODIES[body % len(_BODIES)])
        if change:  # another octet somewhere
            octets[change * 7919 % len(octets)] = change
        self.body = bytes(octets)
        self.requests += 1
        has_body = bool(resource.body or resource.limit_bytes)
        fields = [(b"content-type", resource.body_type.encode())] if has_body else []
        try:
            request = request_from_fields(resource.method, path, "", fields, has_body=has_body)
        except RemoteProtocolError:
            return
        self.give(RequestReceived(self.requests, _CLIENTS[client % len(_CLIENTS)], request))

    def step(self, first: int) -> None:
        if first >= 240:  # time passes, to the next deadline or not
            deadline = self.role.next_deadline_ms()
            self.now_ms += next(self.octets, 0) * 10
            if deadline is not None and first >= 248:
                self.now_ms = max(self.now_ms, deadline)
            self.give(TimerFired())
        elif first >= 232 and self.requests:
            number = next(self.octets, 0) % self.requests + 1
            if number not in self.ended:
                self.ended.add(number)
                self.answered.add(number)
                self.give(RequestEnded(number, False, 0))
                self.answered.discard(number)
        else:
            self.ask(first, *(next(self.octets, 0) for _ in range(3)))


def one_input(data: bytes) -> None:
    """Hold a conversation."""
    octets = iter(data)
    conversation = _Conversation(_role(next(octets, 0) % 3), octets)
    for first in octets:
        conversation.step(first)
