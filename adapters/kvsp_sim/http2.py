"""Calls carried as HTTP/2: by the connections and pools of `kvsp_h2`, their octets in memory.

Roles get the same inputs as from `kvsp_sim.exchange`; what happens on the way is what can happen to octets.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from kvsp_core.container import BlockArrived as ContainerEnded
from kvsp_core.container import BlockRefused, IncomingBlock
from kvsp_core.container import LayerArrived as LayerComplete
from kvsp_core.container_header import ContainerError
from kvsp_core.heads import Request, Response
from kvsp_core.problems import DIGEST_MISMATCH, TOO_LARGE, Problem
from kvsp_core.roles.role import (
    AnswerForm,
    BlockArrived,
    BlockReceived,
    BodyArrived,
    BodyFailed,
    Call,
    LayerArrived,
    OutputReady,
    Respond,
    StreamEnded,
    StreamStarted,
)
from kvsp_h2.events import (
    BodyEnded,
    DataReceived,
    Established,
    Event,
    ExchangeEnded,
    RequestReceived,
    ResponseReceived,
)
from kvsp_h2.events import OutputReady as RoomAgain
from kvsp_h2.http2 import ClientConnection, ServerConnection
from kvsp_h2.limits import WireLimits
from kvsp_h2.pool import Call as PooledCall
from kvsp_h2.pool import Pool, PoolLimits
from kvsp_sim.carried import CarriedCall, CarriedRequest
from kvsp_sim.octets import End, Link
from kvsp_sim.randomness import Randomness
from kvsp_sim.streams import NotingClient, NotingServer, Streams

if TYPE_CHECKING:
    from kvsp_sim.host import Host

__all__ = ["Http2"]

_IN_TWO: Final = 0.3
"""How often the body of a request is handed over in two parts."""


def _draw_limits(random: Randomness) -> WireLimits:
    """Return limits of all connections, some of them small, so that they are reached."""
    return WireLimits(
        max_streams=random.pick((2, 16, 128)),
        max_frame_bytes=random.pick((16_384, 1 << 20)),
        stream_window_bytes=random.pick((65_535, 1 << 20)),
        connection_window_bytes=random.pick((65_535, 16 << 20)),
        send_queue_bytes=random.pick((200, 4_096, 1 << 20)),
        idle_body_ms=random.pick((300, 30_000)),
        linger_ms=random.pick((5, 2_000)),
        ping_ms=random.pick((400, 3_000, 20_000)),
        ping_timeout_ms=random.pick((50, 500, 10_000)),
        idle_ms=random.pick((30, 500, 300_000)),
        drain_ms=random.pick((50, 30_000)),
        doubt_ms=random.pick((20, 300, 2_000)),
    )


class Http2:
    """Carries the calls of all hosts of a simulation; see `carried.Carry`."""

    def __init__(self, random: Randomness) -> None:
        self.random = random
        self.limits = _draw_limits(random)
        self.room_bytes = random.pick((1_000, 16_384, 1 << 20))
        """What each end of a connection may have written that the other has not read."""
        self.told: Counter[str] = Counter()
        self._calls = 0
        self._dialers: dict[tuple[str, str], _Dialer] = {}

    def __call__(self, caller: Host, call: Call, body: bytes) -> CarriedCall:
        """Return a call of a host's role."""
        self._calls += 1
        return _Call(self, caller, call, body, self._calls)

    def pool(self, caller: Host, base_uri: str) -> Pool | None:
        """Return the connections of a host to the role at a base URI; None where there is none."""
        ends = (caller.base_uri, base_uri)
        dialer = self._dialers.get(ends)
        if dialer is None or dialer.life != caller.life:
            server = caller.cluster.hosts.get(base_uri)
            if server is None:
                return None
            dialer = self._dialers[ends] = _Dialer(self, caller, server)
        return dialer.pool


class _Dialer:
    """Opens the connections that a pool wants."""

    def __init__(self, wire: Http2, caller: Host, server: Host) -> None:
        self.life = caller.life
        self._wire = wire
        self._caller = caller
        self._server = server
        self._network = caller.network
        random = wire.random
        limits = PoolLimits(
            max_connections=random.pick((1, 2, 4)), backoff_ms=random.pick((5, 100)), max_backoff_ms=1_000
        )
        self.pool = Pool(
            server.base_uri,
            lambda: random.below(1000) / 1000,
            limits=limits,
            wire_limits=wire.limits,
        )
        self.pool.wake = self._look
        self._due_ms: int | None = None
        """For when the last look was ordered."""

    def _look(self) -> None:
        """Open a connection where the pool wants one, now or at its deadline."""
        caller, pool = self._caller, self.pool
        if caller.life != self.life:
            return
        if caller.process.paused:
            caller.process.keep(caller, self._look)
            return
        if pool.wants_dial(caller.now_ms):
            self._dial()
        due_ms = pool.next_deadline_ms()
        if due_ms is not None and due_ms != self._due_ms:
            self._due_ms = due_ms
            caller.later(max(1, caller.process.clock.when(due_ms) - caller.world.now_us), self._look)

    def _dial(self) -> None:
        caller = self._caller
        path = self._network.dial(caller.process.name, self._server.process.name)
        link = Link(path, Streams(self._wire.told))
        link.path.riders[link] = lambda: caller.later(1, self._unopened, link)
        self._network.send(link.path, True, self._accept, link)
        caller.later(1000 * self._wire.limits.handshake_ms, self._unopened, link)

    def _accept(self, link: Link) -> None:
        """The server's side learns of the connection."""
        server, wire = self._server, self._wire
        if not link.path.open:
            return
        if server.role is None or not server.process.up:
            self._network.send(link.path, False, self._unopened, link)
            return
        if server.process.paused:
            server.process.keep(server, self._accept, link)
            return
        http = NotingServer(server.base_uri, server.now_ms, wire.limits)
        http.streams = link.streams
        served = _Served(server, self._caller.base_uri)
        link.server = End(
            server, link, http, served.on_event, wire.random, is_client=False, room_bytes=wire.room_bytes
        )
        self._network.send(link.path, False, self._established, link)
        http.greet()
        link.server.flush()

    def _established(self, link: Link) -> None:
        """The caller's side learns that the connection is open."""
        caller, wire = self._caller, self._wire
        if not link.opening or caller.life != self.life:
            return
        if caller.process.paused:
            caller.process.keep(caller, self._established, link)
            return
        link.opening = False
        link.path.riders.pop(link, None)
        http = NotingClient(self._server.base_uri, caller.now_ms, wire.limits)
        http.streams = link.streams
        link.client = End(
            caller, link, http, self._receive, wire.random, is_client=True, room_bytes=wire.room_bytes
        )
        self._receive(link.client, Established(self._server.base_uri))
        link.client.flush()
        link.take_early()

    def _unopened(self, link: Link) -> None:
        """No connection came to be."""
        if link.opening and self._caller.life == self.life:
            link.opening = False
            self._network.break_connection(link.path)
            self.pool.dial_failed("no connection", self._caller.now_ms)

    def _receive(self, end: End[ClientConnection], event: Event) -> None:
        self.pool.receive(end, event, self._caller.now_ms)


class _Call(CarriedCall):
    """A call on its stream."""

    __slots__ = ("_block", "_collected", "_digests", "_name", "_pooled", "_response", "_wire")

    def __init__(self, wire: Http2, caller: Host, call: Call, body: bytes, number: int) -> None:
        super().__init__(caller, call, body)
        self._name = f"00-{number:032x}-{number:016x}-01"
        self._wire = wire
        self._pooled: PooledCall | None = None
        self._response: Response | None = None
        self._collected = bytearray()
        self._block: IncomingBlock | None = None
        self._digests: list[str] = []

    def _send(self) -> None:
        caller, body, random = self.caller, self.body, self._wire.random
        pool = self._wire.pool(caller, self.call.base_uri)
        if pool is None:
            caller.later(caller.network.faults.most_us, self.fail, "no connection")
            return
        cut = random.below(len(body)) if body and random.chance(_IN_TWO) else 0
        self._pooled = pool.call(
            self.call.request,
            body[:cut] or body,
            on_event=self._receive,
            end=not cut,
            traceparent=self._name,
        )
        if cut:
            self._pooled.send_data(body[cut:], end=True)

    def _give_up(self) -> None:
        if self._pooled is not None:
            self._pooled.cancel()

    def _receive(self, event: Event) -> None:
        """Take an event of the call's stream."""
        if self._pooled is None:  # it is being made, and the role has not yet done what it does
            self.caller.later(1, self._receive, event)
            return
        if not self.alive:
            return
        match event:
            case ResponseReceived(_, response, ended):
                self._begin_answer(response)
                if ended and self.alive:
                    self._end_answer()
            case DataReceived(_, data):
                self._take(bytes(data))
                self._acknowledge(len(data))
            case BodyEnded():
                self._end_answer()
            case ExchangeEnded(complete=False, reason=reason):
                self.fail(reason)
            case _:
                pass

    def _acknowledge(self, count: int) -> None:
        assert self._pooled is not None
        stall_us = self.caller.network.stall_us()
        if stall_us:
            self.caller.later(stall_us, self._pooled.acknowledge, count)
        else:
            self._pooled.acknowledge(count)

    def _begin_answer(self, response: Response) -> None:
        call = self.call
        self._response = response
        if response.is_success and call.form is AnswerForm.LINES:
            self.expect_more()
            self.caller.deliver(StreamStarted(call.call_id, response))
        elif response.is_success and call.form is AnswerForm.BLOCK:
            assert call.limit_bytes is not None
            try:
                self._block = IncomingBlock(
                    size_bytes=response.content_length, max_size_bytes=call.limit_bytes, with_sha256=True
                )
            except ContainerError:
                self.fail("malformed")

    def _take(self, octets: bytes) -> None:
        call = self.call
        if self._block is not None:
            assert call.buffer is not None
            for event in self._block.receive_data(octets) if not self._block.ended else ():
                if isinstance(event, BlockRefused):
                    self.fail("malformed")
                elif isinstance(event, LayerComplete) and self.alive:
                    self._digests.append(event.digest)
                    self.caller.deliver(LayerArrived(call.buffer, event.layer, event.digest))
        elif call.form is AnswerForm.LINES and self._response is not None and self._response.is_success:
            self.take_lines(octets)
        else:
            self._collected += octets

    def _end_answer(self) -> None:
        response, call, block = self._response, self.call, self._block
        assert response is not None
        if block is not None:
            last = block.receive_eof()[-1]
            if not isinstance(last, ContainerEnded):
                self.fail("malformed")
                return
            assert call.buffer is not None
            self.caller.buffers[call.buffer] = bytes(block.container)
            valid = response.repr_digest == (last.sha256 or b"").hex()
            self.end(BlockReceived(call.call_id, response, last.header, tuple(self._digests), valid))
        elif call.form is not AnswerForm.LINES or not response.is_success:
            self.end_with(response, bytes(self._collected))
        elif self.rest.strip():
            self.fail("malformed")
        else:
            self.end(StreamEnded(call.call_id))


class _Served:
    """The requests of one connection at the role that serves it."""

    def __init__(self, server: Host, client: str) -> None:
        self._server = server
        self._client = client
        self._requests: dict[int, _Request] = {}

    def on_event(self, end: End[ServerConnection], event: Event) -> None:
        """Take an event of the connection."""
        match event:
            case RequestReceived(stream_id, request, ended):
                arrived = _Request(self._server, self._client, end, stream_id, request, ended=ended)
                self._requests[stream_id] = arrived
                arrived.tell()
            case DataReceived(stream_id, data):
                self._requests[stream_id].data_received(bytes(data))
            case BodyEnded(stream_id):
                self._requests[stream_id].body_ended()
            case RoomAgain(stream_id):
                self._requests[stream_id].room_again()
            case ExchangeEnded(stream_id):
                self._requests.pop(stream_id).over(event)
            case _:
                pass


class _Request(CarriedRequest):
    """A request on its stream."""

    __slots__ = (
        "_answer",
        "_block",
        "_buffer",
        "_client",
        "_digests",
        "_early",
        "_end",
        "_ended",
        "_limit_bytes",
        "_octets",
        "_stream_id",
        "_taking",
    )

    def __init__(
        self,
        server: Host,
        client: str,
        end: End[ServerConnection],
        stream_id: int,
        request: Request,
        *,
        ended: bool,
    ) -> None:
        super().__init__(server, request, b"")
        self._client = client
        self._end = end
        self._stream_id = stream_id
        self._ended = ended
        self._early = bytearray()
        """Octets that came before the role has asked for them; the client has to wait."""
        self._taking = False
        self._octets = bytearray()
        self._limit_bytes = 0
        self._block: IncomingBlock | None = None
        self._buffer = 0
        self._digests: list[str] = []
        self._answer: tuple[Respond, bytes] | None = None

    @property
    def client(self) -> str:
        """The principal of the caller."""
        return self._client

    @property
    def heard(self) -> bool:
        """Whether what is answered now may come to the caller."""
        return self.open

    # The body

    def receive_body(self, limit_bytes: int) -> None:
        """Bring the role the body."""
        self._limit_bytes = limit_bytes
        self.soon(self._begin_body)

    def receive_block(self, buffer: int, limit_bytes: int) -> None:
        """Bring the role the body as a container."""
        self._buffer = buffer
        try:
            self._block = IncomingBlock(
                size_bytes=self.request.content_length, max_size_bytes=limit_bytes, with_sha256=True
            )
        except ContainerError as error:
            self.soon(self._fail_body, error.problem)
        else:
            self.soon(self._begin_body)

    def _begin_body(self) -> None:
        if self.responded or not self.alive:
            return
        self._end.http.accept_body(self._stream_id)
        self._taking = True
        early, self._early = bytes(self._early), bytearray()
        self.data_received(early)
        if self._ended:
            self.body_ended()

    def data_received(self, octets: bytes) -> None:
        """Take octets of the body."""
        if not self._taking and not self.responded:
            self._early += octets
            return
        if self._taking:
            self._take(octets)
        self._end.http.acknowledge(self._stream_id, len(octets))
        self._end.flush()

    def _take(self, octets: bytes) -> None:
        if self._block is None:
            self._octets += octets
            if len(self._octets) > self._limit_bytes:
                detail = f"the body is larger than {self._limit_bytes} octets"
                self._fail_body(Problem(TOO_LARGE, detail))
            return
        for event in self._block.receive_data(octets):
            if isinstance(event, BlockRefused):
                self._fail_body(event.problem)
            elif isinstance(event, LayerComplete):
                self._digests.append(event.digest)
                self.deliver(LayerArrived(self._buffer, event.layer, event.digest))

    def _fail_body(self, problem: Problem) -> None:
        self._taking = False
        self.deliver(BodyFailed(self.request_id, problem))

    def body_ended(self) -> None:
        """The body is whole."""
        self._ended = True
        if not self._taking:
            return
        self._taking = False
        if self._block is None:
            self.body = bytes(self._octets)
            self.deliver(BodyArrived(self.request_id, self.body))
            return
        last = self._block.receive_eof()[-1]
        if not isinstance(last, ContainerEnded):
            problem = last.problem if isinstance(last, BlockRefused) else Problem(TOO_LARGE)
            self._fail_body(problem)
            return
        digest = (last.sha256 or b"").hex()
        if {self.request.content_digest, self.request.repr_digest} - {None, digest}:
            self._fail_body(Problem(DIGEST_MISMATCH, "the body does not match its digest"))
            return
        self.body = self.server.buffers[self._buffer] = bytes(self._block.container)
        digests = tuple(self._digests)
        self.deliver(BlockArrived(self.request_id, self._buffer, last.header, digests, digest))

    # The answer

    def respond(self, effect: Respond, body: bytes) -> None:
        """Send an answer back."""
        response, octets = self.answer(effect, body)
        self._answer = (effect, body)
        self._taking = False
        self._end.http.respond(self._stream_id, response, octets, end=not effect.streaming)
        self._acknowledge_early()
        self._end.flush()

    def _acknowledge_early(self) -> None:
        """Let go of a body that the role did not want."""
        self._end.http.acknowledge(self._stream_id, len(self._early))
        self._early.clear()

    def send(self, data: bytes, end: bool) -> None:
        """Send a piece of a streamed answer."""
        if self._end.http.send_data(self._stream_id, data, end=end) and not end:
            self.soon(self.room_again)
        self._end.flush()

    def room_again(self) -> None:
        """There is room for more of the answer."""
        self.deliver(OutputReady(self.request_id))

    def over(self, event: ExchangeEnded) -> None:
        """Nothing more of the request comes, and nothing more goes out."""
        self._taking = False
        self.sent_bytes = event.sent_bytes
        if self._answer is not None and not event.complete and not event.sent_bytes:
            self.server.witness.unheard(self, *self._answer)
        self.end(event.complete)
