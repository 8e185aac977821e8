"""A call and the requests that carry it, from the caller's side and from the answering one's.

An `Exchange` is the call of a role; a `Leg` is one copy of its request on a connection. Mostly there is one
leg; where a connection broke before the answer, there may be a second, while the first one may still be
served.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING, Final

from kvsp_core.container import BlockArrived as ContainerEnded
from kvsp_core.container import BlockRefused, IncomingBlock
from kvsp_core.container import LayerArrived as LayerComplete
from kvsp_core.errors import RemoteProtocolError
from kvsp_core.heads import Response
from kvsp_core.problems import BAD_REQUEST, DIGEST_MISMATCH, TOO_LARGE, Problem
from kvsp_core.roles.role import (
    AnswerForm,
    BlockArrived,
    BlockReceived,
    BodyArrived,
    BodyFailed,
    Call,
    Input,
    LayerArrived,
    OutputReady,
    Respond,
    StreamEnded,
    StreamStarted,
)
from kvsp_sim.carried import CarriedCall, CarriedRequest
from kvsp_sim.network import Connection
from kvsp_sim.wire import is_idempotent, request_on_wire, response_on_wire

if TYPE_CHECKING:
    from kvsp_sim.host import Host

__all__ = ["Exchange", "Leg"]

WINDOW_BYTES: Final = 2_048
"""What a streamed answer may have under way before it has to wait."""

MAX_LEGS: Final = 3

_UNNOTICED: Final = 0.1
"""How often nothing tells that a connection is gone, but the silence."""


class Exchange(CarriedCall):
    """A call under way."""

    __slots__ = ("collected", "leg", "legs", "request", "started")

    def __init__(self, caller: Host, call: Call, body: bytes) -> None:
        super().__init__(caller, call, body)
        self.request = request_on_wire(call.request, len(body))
        self.started = False  # something of the answer has come
        self.leg: Leg | None = None
        self.legs = 0
        self.collected: tuple[Response, list[bytes]] | None = None

    def _send(self) -> None:
        caller = self.caller
        target = caller.cluster.hosts.get(self.call.base_uri)
        if target is None:
            caller.later(caller.network.faults.most_us, self.fail, "no connection")
            return
        self.legs += 1
        connection = caller.network.connection(caller.process.name, target.process.name)
        self.leg = Leg(self, target, connection)
        caller.network.send(connection, True, self.leg.arrive)

    # Ends

    def end(self, item: Input) -> None:
        """Bring the caller the last it hears of the call."""
        if self.leg is not None:
            self.leg.release()
        super().end(item)

    def _give_up(self) -> None:
        if self.leg is not None:
            self.leg.abandon()

    def connection_lost(self, leg: Leg) -> None:
        """Send the request again where that is allowed, or say that the connection is gone."""
        if not self.alive or leg is not self.leg:
            return
        caller = self.caller
        random = caller.randomness
        if random.chance(_UNNOTICED):
            return
        again = not self.started and self.legs < MAX_LEGS and is_idempotent(self.call.request)
        if again and random.chance(caller.network.faults.resends):
            caller.later(random.between(1, 5_000), self._again)
        else:
            caller.later(random.between(1, 2_000), self.fail, "connection lost")

    def _again(self) -> None:
        if self.alive:
            self._send()

    # Answers

    def answered(self, leg: Leg, response: Response, body: bytes, streaming: bool) -> None:
        """Take an answer in."""
        if not self.alive or leg is not self.leg:
            return
        call = self.call
        good = response.is_success
        self.started = True
        if call.form is AnswerForm.LINES and streaming and good:
            self.expect_more()
            self.caller.deliver(StreamStarted(call.call_id, response))
        elif call.form is AnswerForm.BLOCK and good:
            self._take_block(response, body)
        elif streaming:
            self.collected = (response, [])
        else:
            self.end_with(response, body)

    def _take_block(self, response: Response, body: bytes) -> None:
        call, caller = self.call, self.caller
        assert call.buffer is not None
        try:
            incoming = IncomingBlock(max_size_bytes=call.limit_bytes or len(body), with_sha256=True)
            events = (*incoming.receive_data(body), *(() if incoming.ended else incoming.receive_eof()))
        except RemoteProtocolError:
            events = (BlockRefused(Problem(BAD_REQUEST, "")),)
        layers = [event for event in events if isinstance(event, LayerComplete)]
        last = events[-1]
        if not isinstance(last, ContainerEnded):
            self.fail("malformed")
            return
        caller.buffers[call.buffer] = body
        delay_us = 0
        for layer in layers:
            delay_us += caller.randomness.between(1, caller.network.faults.most_us)
            caller.later(delay_us, self._layer, LayerArrived(call.buffer, layer.layer, layer.digest))
        valid = response.repr_digest == (last.sha256 or b"").hex()
        digests = tuple(layer.digest for layer in layers)
        whole = BlockReceived(call.call_id, response, last.header, digests, valid)
        caller.later(delay_us + 1, self._whole, whole)

    def _layer(self, item: LayerArrived) -> None:
        if self.alive:
            self.caller.deliver(item)

    def _whole(self, item: BlockReceived) -> None:
        if self.alive:
            self.end(item)

    def piece(self, leg: Leg, data: bytes, end: bool) -> None:
        """Take a piece of a streamed answer in."""
        if not self.alive or leg is not self.leg:
            return
        if self.collected is not None:
            response, pieces = self.collected
            pieces.append(data)
            if end:
                self.end_with(response, b"".join(pieces))
            return
        self.take_lines(data)
        if end and self.alive:
            self.end(StreamEnded(self.call.call_id))


class Leg(CarriedRequest):
    """One copy of a request, and what is sent back on it."""

    __slots__ = (
        "_held",
        "_resume_us",
        "_under_way",
        "connection",
        "exchange",
    )

    def __init__(self, exchange: Exchange, server: Host, connection: Connection) -> None:
        super().__init__(server, exchange.request, exchange.body)
        self.exchange = exchange
        self.connection = connection
        self._under_way = 0
        self._held: deque[tuple[bytes, bool]] = deque()
        self._resume_us = 0
        connection.riders[self] = self._lost

    @property
    def client(self) -> str:
        """The principal of the caller."""
        return self.exchange.caller.base_uri

    @property
    def heard(self) -> bool:
        """Whether what is answered now may come to the caller."""
        return self.open and self.connection.open

    # The connection

    def release(self) -> None:
        """The exchange is over for the caller; the other side may still have to learn of its end."""
        if not self.open:
            self.connection.riders.pop(self, None)

    def abandon(self) -> None:
        """Tell the other side that nobody waits any more."""
        if self.connection.open:
            self.server.network.send(self.connection, True, self.end, False)

    def _lost(self) -> None:
        self.exchange.connection_lost(self)
        if self.open:
            random = self.server.randomness
            self.server.later(random.spread(1, 200_000), self.end, False)

    # At the server

    def arrive(self) -> None:
        """The request is there."""
        server, caller = self.server, self.exchange.caller
        if not self.connection.open:
            if server.randomness.chance(0.5):
                return
            server.later(server.randomness.spread(1, 200_000), self.end, False)
        if server.role is None or not server.process.up:
            caller.later(server.network.faults.most_us, self._refused)
            return
        self.tell()

    def _refused(self) -> None:
        if self.exchange.leg is self:
            self.exchange.fail("no connection")

    def receive_body(self, limit_bytes: int) -> None:
        """Bring the role the body."""
        body = self.body
        item: Input
        if len(body) > limit_bytes:
            item = BodyFailed(
                self.request_id, Problem(TOO_LARGE, f"the body is larger than {limit_bytes} octets")
            )
        else:
            item = BodyArrived(self.request_id, body)
        self.soon(self.deliver, item)

    def receive_block(self, buffer: int, limit_bytes: int) -> None:
        """Bring the role the body as a container."""
        server, body = self.server, self.body
        try:
            incoming = IncomingBlock(max_size_bytes=limit_bytes)
            events = (*incoming.receive_data(body), *(() if incoming.ended else incoming.receive_eof()))
        except RemoteProtocolError:
            events = ()
        last = events[-1] if events else BlockRefused(Problem(TOO_LARGE, "the container is too large"))
        problem = last.problem if isinstance(last, BlockRefused) else self._digest_problem(body)
        if problem is not None:
            self.soon(self.deliver, BodyFailed(self.request_id, problem))
            return
        assert isinstance(last, ContainerEnded)
        server.buffers[buffer] = body
        delay_us = 0
        digests = []
        for event in events:
            if isinstance(event, LayerComplete):
                delay_us += server.randomness.between(1, server.network.faults.most_us)
                server.later(delay_us, self.deliver, LayerArrived(buffer, event.layer, event.digest))
                digests.append(event.digest)
        whole = BlockArrived(
            self.request_id, buffer, last.header, tuple(digests), hashlib.sha256(body).hexdigest()
        )
        server.later(delay_us + 1, self.deliver, whole)

    def _digest_problem(self, body: bytes) -> Problem | None:
        request = self.request
        stated = {request.content_digest, request.repr_digest} - {None}
        if stated and stated != {hashlib.sha256(body).hexdigest()}:
            return Problem(DIGEST_MISMATCH, "the body does not match its digest")
        return None

    def respond(self, effect: Respond, body: bytes) -> None:
        """Send an answer back."""
        server, exchange = self.server, self.exchange
        response, body = self.answer(effect, body)
        head = response_on_wire(response, None if effect.streaming else len(body))
        if self.connection.open:
            server.network.send(self.connection, False, exchange.answered, self, head, body, effect.streaming)
        if not effect.streaming:
            self.sent_bytes = len(body) if self.connection.open else 0
            self.soon(self.end, self.connection.open)

    def send(self, data: bytes, end: bool) -> None:
        """Send a piece of a streamed answer."""
        server = self.server
        self.sent_bytes += len(data)
        self._under_way += len(data)
        if self.connection.open:
            server.network.send(self.connection, False, self._piece, data, end)
        if end:
            self.soon(self.end, self.connection.open)

    def _piece(self, data: bytes, end: bool) -> None:
        server = self.server
        now_us = server.world.now_us
        stall_us = server.network.stall_us()
        if stall_us and not self._held:
            self._resume_us = now_us + stall_us
            server.world.at(self._resume_us, self._resume)
        if self._resume_us > now_us:
            self._held.append((data, end))
        else:
            self._pass(data, end)

    def _resume(self) -> None:
        while self._held:
            self._pass(*self._held.popleft())

    def _pass(self, data: bytes, end: bool) -> None:
        self._under_way -= len(data)
        if self._under_way <= WINDOW_BYTES // 2 and not end:
            self.deliver(OutputReady(self.request_id))
        if self.connection.open:
            self.exchange.piece(self, data, end)

    def end(self, complete: bool) -> None:
        """Tell the role that the request is over."""
        if self.alive:
            self.connection.riders.pop(self, None)
            super().end(complete)
