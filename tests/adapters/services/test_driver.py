"""The driver carries out what a role wants, in order, and holds back what is not durable yet."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Callable, Sequence

import attrs
import pytest

from kvsp_core.container_header import ContainerHeader
from kvsp_core.heads import Request, Response
from kvsp_core.problems import BAD_REQUEST, DIGEST_MISMATCH, TOO_LARGE
from kvsp_core.roles.engine import EngineCommand, ExportBlock, ImportBlock, Prefilled
from kvsp_core.roles.role import (
    AnswerForm,
    AnswerReceived,
    BlockArrived,
    BlockBody,
    BlockName,
    BlockReceived,
    BodyArrived,
    BodyFailed,
    Call,
    CallFailed,
    CancelCall,
    Drop,
    Effect,
    FreeBuffer,
    Input,
    JobDone,
    JobFailed,
    JobFault,
    LayerArrived,
    LineReceived,
    Load,
    Observe,
    OutputReady,
    Persist,
    Put,
    ReadBlock,
    ReceiveBlock,
    ReceiveBody,
    RequestEnded,
    RequestReceived,
    Respond,
    Send,
    Store,
    StreamEnded,
    StreamStarted,
    TimerFired,
    Write,
)
from kvsp_services.buffers import BufferPool
from kvsp_services.driver import Driver
from kvsp_services.ports import OutgoingListener
from kvsp_services.stores.blocks import MemoryTier

HEADER = ContainerHeader(codec=1, token_count=4, sections=((8, 8), (8, 8)))
SECTIONS = bytes(range(32))
CONTAINER = HEADER.encode() + SECTIONS
LAYER_DIGESTS = tuple(hashlib.sha256(SECTIONS[i : i + 16]).hexdigest() for i in (0, 16))
SHA256 = hashlib.sha256(CONTAINER).hexdigest()
NAME = BlockName("c" * 64, "a" * 32, "b" * 64)
GET = Request(method="GET", path="x")
OK = Response(status=200, content_length=None)
PEER = "https://peer.example/kvsp/"
TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


# A world by hand ----------------------------------------------------------------------------------


class FakeLoop:
    def __init__(self) -> None:
        self.time_ms = 0
        self.timer: tuple[int, Callable[[], None]] | None = None
        self.posted: list[Callable[[], None]] = []

    def now_ms(self) -> int:
        return self.time_ms

    def call_at(self, deadline_ms: int | None, call: Callable[[], None]) -> None:
        self.timer = None if deadline_ms is None else (deadline_ms, call)

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.posted.append(call)

    def in_thread(self, order: object, work: Callable[[], None]) -> None:
        self.posted.append(work)

    def run(self) -> None:
        while self.posted:
            self.posted.pop(0)()

    def advance(self, to_ms: int) -> None:
        self.time_ms = to_ms
        while self.timer is not None and self.timer[0] <= to_ms:
            _, call = self.timer
            self.timer = None
            call()
            self.run()


@attrs.define(eq=False)
class FakeExchange:
    request: Request = GET
    traceparent: str | None = TRACE
    client: str = "spiffe://example/client"
    sent: list[object] = attrs.field(factory=list)
    acknowledged: int = 0
    cancelled: bool = False
    accepted: bool = False
    has_room: bool = True
    free: Callable[[], memoryview] = attrs.field(default=lambda: memoryview(b""))

    def accept_body(self) -> None:
        self.accepted = True

    def respond(self, response: Response, body: Sequence[bytes | memoryview], *, end: bool) -> None:
        self.sent += [response.status, *map(bytes, body)]
        if end:
            self.sent.append("end")

    def send(self, data: bytes | memoryview, *, end: bool) -> bool:
        self.sent.append(bytes(data))
        if end:
            self.sent.append("end")
        return self.has_room

    def receive_into(self, free: Callable[[], memoryview]) -> None:
        self.free = free

    def acknowledge(self, count: int) -> None:
        self.acknowledged += count

    def cancel(self) -> None:
        self.cancelled = True


class FakePeers:
    def __init__(self) -> None:
        self.calls: list[tuple[str, FakeExchange, OutgoingListener]] = []

    def call(
        self,
        base_uri: str,
        request: Request,
        body: Sequence[bytes | memoryview],
        listener: OutgoingListener,
        traceparent: str | None,
    ) -> FakeExchange:
        exchange = FakeExchange(request, traceparent, sent=list(map(bytes, body)))
        self.calls.append((base_uri, exchange, listener))
        return exchange


class FakeCommitter:
    def __init__(self) -> None:
        self.batches: list[tuple[Sequence[Write], Callable[[Exception | None], None]]] = []

    def submit(self, writes: Sequence[Write], done: Callable[[Exception | None], None]) -> None:
        self.batches.append((writes, done))


class FakeEngine:
    def __init__(self) -> None:
        self.commands: list[EngineCommand] = []
        self.layers: list[bytes] = []

    def submit(
        self, command: EngineCommand, layers: Sequence[tuple[bytes | memoryview, bytes | memoryview]] = ()
    ) -> None:
        self.commands.append(command)
        self.layers = [bytes(section) for layer in layers for section in layer]


class ScriptedRole:
    """Writes down what it is told; `answers` says what it wants for a kind of input, once each."""

    base_uri = "https://role.example/kvsp/"

    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.answers: dict[type, list[tuple[Effect, ...]]] = {}
        self.deadline_ms: int | None = None

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        return ()

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        self.inputs.append(item)
        waiting = self.answers.get(type(item))
        return waiting.pop(0) if waiting else ()

    def next_deadline_ms(self) -> int | None:
        return self.deadline_ms

    def on(self, kind: type, *effects: Effect) -> None:
        self.answers.setdefault(kind, []).append(effects)

    def told(self, kind: type) -> list[Input]:
        return [item for item in self.inputs if isinstance(item, kind)]


class World:
    def __init__(self) -> None:
        self.role = ScriptedRole()
        self.loop, self.peers, self.committer = FakeLoop(), FakePeers(), FakeCommitter()
        self.engine, self.tier, self.pool = FakeEngine(), MemoryTier(1000), BufferPool()
        self.observed: list[Observe] = []
        self.failures: list[Exception] = []
        self.driver = Driver(
            self.role,
            self.loop,
            self.peers,
            committer=self.committer,
            tiers={"host": self.tier},
            engine=self.engine,
            pool=self.pool,
            observe=self.observed.append,
            failed=self.failures.append,
        )
        self.driver.start()

    def request(self, head: Request = GET, *, body: bytes | None = None, piece: int = 7) -> FakeExchange:
        exchange = FakeExchange(head)
        self.driver.request_received(exchange, ended=body is None)
        for start in range(0, len(body or b""), piece):
            self.driver.data_received(exchange, memoryview((body or b"")[start : start + piece]))
        if body is not None:
            self.driver.body_ended(exchange)
        return exchange

    def do(self, *effects: Effect) -> None:
        """Let the role ask for these effects."""
        self.role.on(TimerFired, *effects)
        self.driver.handle(TimerFired())

    def put_block(self, buffer: int = 1) -> None:
        """Have a block in a buffer of the role."""
        self.role.on(RequestReceived, ReceiveBlock(self.next_request, buffer, 10_000))
        self.request(Request(method="PUT", path="x", content_length=None), body=CONTAINER)

    @property
    def next_request(self) -> int:
        return len(self.role.told(RequestReceived)) + 1


@pytest.fixture
def world() -> World:
    return World()


def call(number: int = 1, **options: object) -> Call:
    return Call(**{"call_id": number, "base_uri": PEER, "request": GET, "timeout_ms": 100, **options})  # type: ignore[arg-type]


# Requests and their bodies ------------------------------------------------------------------------


def test_a_request_is_answered_and_ends_once(world: World) -> None:
    world.role.on(RequestReceived, Respond(1, OK, b"hello"))
    exchange = world.request()
    assert exchange.sent == [200, b"hello", "end"]
    world.driver.exchange_ended(exchange, complete=True, sent_bytes=5)
    world.driver.exchange_ended(exchange, complete=True, sent_bytes=5)
    assert world.role.told(RequestEnded) == [RequestEnded(1, True, 5)]


def test_a_response_without_a_body_ends_with_its_head(world: World) -> None:
    world.role.on(RequestReceived, Respond(1, Response(status=204)))
    assert world.request().sent == [204, "end"]


def test_a_body_is_handed_over_whole(world: World) -> None:
    world.role.on(RequestReceived, ReceiveBody(1, 100))
    exchange = world.request(body=b"a body in pieces")
    assert world.role.told(BodyArrived) == [BodyArrived(1, b"a body in pieces")]
    assert exchange.acknowledged == 16


def test_octets_wait_until_the_role_asks_for_them(world: World) -> None:
    exchange = world.request(body=b"early")
    assert (exchange.acknowledged, exchange.accepted) == (0, False), "unasked octets hold up the window"
    world.do(ReceiveBody(1, 100))
    assert exchange.accepted
    assert exchange.acknowledged == 5
    assert world.role.told(BodyArrived) == [BodyArrived(1, b"early")]


@pytest.mark.parametrize("declared", [None, 9])
def test_a_body_that_is_too_large_is_refused_once(world: World, declared: int | None) -> None:
    world.role.on(RequestReceived, ReceiveBody(1, 8))
    exchange = world.request(
        Request(method="PUT", path="x", content_length=declared), body=b"123456789", piece=2
    )
    (failed,) = world.role.told(BodyFailed)
    assert isinstance(failed, BodyFailed)
    assert failed.problem.type == TOO_LARGE
    assert world.role.told(BodyArrived) == []
    assert exchange.acknowledged == 9, "what nobody reads must not block the connection"


def test_an_early_answer_does_not_wait_for_the_body(world: World) -> None:
    world.role.on(RequestReceived, Respond(1, Response(status=403)))
    exchange = world.request(body=b"never read")
    assert exchange.sent == [403, "end"]
    assert exchange.acknowledged == 10
    assert world.role.told(BodyArrived) == []


def test_a_stream_is_sent_piece_by_piece_and_the_role_told_when_there_is_room(world: World) -> None:
    world.role.on(RequestReceived, Respond(1, OK, streaming=True), Send(1, b"one\n"))
    exchange = world.request()
    assert world.role.told(OutputReady) == [OutputReady(1)]
    exchange.has_room = False
    world.do(Send(1, b"two\n"))
    assert world.role.told(OutputReady) == [OutputReady(1)]
    exchange.has_room = True
    world.driver.output_ready(exchange)
    assert world.role.told(OutputReady) == [OutputReady(1)] * 2
    world.do(Send(1, b"three\n", end=True))
    assert world.role.told(OutputReady) == [OutputReady(1)] * 2
    assert exchange.sent == [200, b"one\n", b"two\n", b"three\n", "end"]


def test_effects_for_a_request_that_is_gone_are_nothing(world: World) -> None:
    exchange = world.request()
    world.driver.exchange_ended(exchange, complete=False, sent_bytes=0)
    world.do(Respond(1, OK, b"late"), Send(1, b"x"), ReceiveBody(1, 10))
    assert exchange.sent == []


# Blocks -------------------------------------------------------------------------------------------


def test_a_container_arrives_layer_by_layer(world: World) -> None:
    world.put_block()
    assert world.role.told(LayerArrived) == [LayerArrived(1, layer, LAYER_DIGESTS[layer]) for layer in (0, 1)]
    assert world.role.told(BlockArrived) == [BlockArrived(1, 1, HEADER, LAYER_DIGESTS, SHA256)]


def place(world: World, exchange: FakeExchange, octets: bytes) -> None:
    """Put octets where the request's receiver wants them, as a connection does."""
    free = exchange.free()
    free[: len(octets)] = octets
    world.driver.data_placed(exchange, len(octets))


def test_a_container_may_come_straight_into_its_buffer(world: World) -> None:
    exchange = FakeExchange(Request(method="PUT", path="x", content_length=None))
    world.driver.request_received(exchange, ended=False)
    world.do(ReceiveBlock(1, 1, 10_000))
    assert not exchange.free(), "without a header nobody knows how much memory it takes"
    head = HEADER.encode()
    world.driver.data_received(exchange, memoryview(head))
    assert exchange.free().nbytes == len(SECTIONS)
    place(world, exchange, SECTIONS[:20])
    assert world.role.told(LayerArrived) == [LayerArrived(1, 0, LAYER_DIGESTS[0])]
    place(world, exchange, SECTIONS[20:])
    world.driver.body_ended(exchange)
    assert world.role.told(BlockArrived) == [BlockArrived(1, 1, HEADER, LAYER_DIGESTS, SHA256)]
    assert exchange.acknowledged == len(CONTAINER)
    assert not exchange.free(), "its buffer is the role's now"


@pytest.mark.requirement("SE-3")
def test_a_header_that_claims_much_costs_no_memory(world: World) -> None:
    """A few octets could make a holder run out of it, block by block."""
    exchange = FakeExchange(Request(method="PUT", path="x", content_length=None))
    world.driver.request_received(exchange, ended=False)
    world.do(ReceiveBlock(1, 1, 300 << 20))
    header = attrs.evolve(HEADER, sections=((128 << 20, 128 << 20),))
    tracemalloc.start()
    try:
        world.driver.data_received(exchange, memoryview(header.encode()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    place(world, exchange, b"its first octets")
    assert exchange.free().nbytes == (256 << 20) - 16


@pytest.mark.requirement("BR-6")
def test_nothing_comes_into_a_buffer_once_the_request_is_answered(world: World) -> None:
    exchange = FakeExchange(Request(method="PUT", path="x", content_length=None))
    world.driver.request_received(exchange, ended=False)
    world.do(ReceiveBlock(1, 1, 10_000))
    world.driver.data_received(exchange, memoryview(HEADER.encode()))
    assert exchange.free()
    world.do(Respond(1, Response(status=507)), FreeBuffer(1))
    assert not exchange.free(), "another block may have that memory by now"
    world.driver.data_placed(exchange, 0)


@pytest.mark.requirement("BR-6")
@pytest.mark.parametrize("field", ["repr_digest", "content_digest"])
@pytest.mark.parametrize("right", [True, False])
def test_a_container_is_compared_with_the_digest_that_is_stated(
    world: World, field: str, right: bool
) -> None:
    world.role.on(RequestReceived, ReceiveBlock(1, 1, 10_000))
    stated = {field: SHA256 if right else "0" * 64}
    world.request(Request(method="PUT", path="x", content_length=None, **stated), body=CONTAINER)
    assert bool(world.role.told(BlockArrived)) is right
    if not right:
        (failed,) = world.role.told(BodyFailed)
        assert isinstance(failed, BodyFailed)
        assert failed.problem.type == DIGEST_MISMATCH


@pytest.mark.parametrize(
    ("octets", "limit", "problem"),
    [(CONTAINER[:-1], 10_000, BAD_REQUEST), (b"nonsense", 10_000, BAD_REQUEST), (CONTAINER, 50, TOO_LARGE)],
)
def test_a_container_that_is_wrong_is_refused(
    world: World, octets: bytes, limit: int, problem: object
) -> None:
    world.role.on(RequestReceived, ReceiveBlock(1, 1, limit))
    world.request(Request(method="PUT", path="x", content_length=None), body=octets)
    (failed,) = world.role.told(BodyFailed)
    assert isinstance(failed, BodyFailed)
    assert failed.problem.type == problem


def test_a_block_goes_to_a_tier_and_from_there_to_a_client(world: World) -> None:
    world.put_block(buffer=1)
    world.do(Store(1, 1, NAME, "host"), FreeBuffer(1))
    assert world.role.told(JobDone) == [JobDone(1)]
    world.do(ReadBlock(2, 2, NAME, "host", (1, 1)))
    (_, done) = world.role.told(JobDone)
    assert isinstance(done, JobDone)
    assert done.header is not None
    assert list(done.header.layers) == [1]
    world.role.on(RequestReceived, Respond(2, OK, BlockBody(2)), FreeBuffer(2))
    exchange = world.request()
    assert exchange.sent == [200, done.header.encode(), SECTIONS[16:], "end"]


def test_a_part_of_a_buffer_is_sent(world: World) -> None:
    world.put_block(buffer=1)
    world.role.on(RequestReceived, Respond(2, OK, BlockBody(1, (0, 0))))
    exchange = world.request()
    assert exchange.sent[2] == SECTIONS[:16]


def test_memory_is_used_again_only_when_nobody_reads_it(world: World) -> None:
    world.put_block(buffer=1)
    world.role.on(RequestReceived, Respond(2, OK, BlockBody(1)), FreeBuffer(1))
    exchange = world.request()
    assert world.pool.free_bytes == 0, "the response is still being sent"
    world.driver.exchange_ended(exchange, complete=True, sent_bytes=1)
    assert world.pool.free_bytes > 0


def test_memory_that_a_tier_keeps_is_not_used_again(world: World) -> None:
    world.put_block(buffer=1)
    world.do(Store(1, 1, NAME, "host"), FreeBuffer(1))
    assert world.pool.free_bytes == 0
    world.put_block(buffer=2)
    assert world.tier.read(NAME, None, lambda size: memoryview(bytearray(size)))[1] == SECTIONS


def test_jobs_that_fail_say_why(world: World) -> None:
    world.do(ReadBlock(1, 1, NAME, "host"), ReadBlock(2, 2, NAME, "attic"))
    assert world.role.told(JobFailed) == [JobFailed(1, JobFault.MISSING), JobFailed(2, JobFault.BROKEN)]


def test_dropping_and_listing(world: World) -> None:
    world.put_block(buffer=1)
    world.do(Store(1, 1, NAME, "host"), Load(2, "host"), Drop(NAME, "host"), Load(3, "host"))
    _, before, after = world.role.told(JobDone)
    assert isinstance(before, JobDone)
    assert isinstance(after, JobDone)
    assert [block.name for block in before.catalogue] == [NAME]
    assert after.catalogue == ()


# Durability ---------------------------------------------------------------------------------------

WRITE = Put("t", "k", b"v")


@pytest.mark.requirement("CP-2")
def test_what_follows_a_write_waits_until_it_is_durable(world: World) -> None:
    world.role.on(RequestReceived, Respond(1, OK, b"before"), Persist((WRITE,)))
    first = world.request()
    assert first.sent == [200, b"before", "end"]
    world.role.on(RequestReceived, Respond(2, OK, b"after"))
    second = world.request()
    world.do(call())
    assert second.sent == []
    assert world.peers.calls == [], "calls reveal state too"
    (_, done) = world.committer.batches[0]
    done(None)
    assert second.sent == [], "the committer's thread does not touch the loop"
    world.loop.run()
    assert second.sent == [200, b"after", "end"]
    assert len(world.peers.calls) == 1


def test_writes_join_the_next_sync_while_one_is_under_way(world: World) -> None:
    world.role.on(RequestReceived, Persist((WRITE,)), Respond(1, OK, b"1"))
    world.role.on(RequestReceived, Persist((WRITE,)), Respond(2, OK, b"2"))
    first, second = world.request(), world.request()
    assert len(world.committer.batches) == 2
    world.committer.batches[0][1](None)
    world.loop.run()
    assert (first.sent[1:2], second.sent) == ([b"1"], [])
    world.committer.batches[1][1](None)
    world.loop.run()
    assert second.sent[1:2] == [b"2"]


def test_order_holds_among_effects_that_were_held_back(world: World) -> None:
    world.put_block(buffer=1)
    world.do(Persist((WRITE,)), Store(1, 1, NAME, "host"), Observe("second"))
    world.role.on(JobDone, Observe("third"))
    world.committer.batches[0][1](None)
    world.loop.run()
    assert [observed.name for observed in world.observed] == ["second", "third"]


def test_after_a_write_that_failed_nothing_more_is_done(world: World) -> None:
    world.role.on(RequestReceived, Persist((WRITE,)), Respond(1, OK, b"never"))
    exchange = world.request()
    error = OSError("disk full")
    world.committer.batches[0][1](error)
    world.loop.run()
    assert world.failures == [error]
    assert exchange.sent == []
    assert exchange.cancelled
    late = world.request()
    assert late.cancelled
    world.committer.batches[0][1](error)
    world.loop.run()
    assert world.failures == [error]


def test_a_role_that_raises_is_given_up(world: World) -> None:
    def broken(item: Input, now_ms: int) -> tuple[Effect, ...]:
        raise AssertionError("a bug")

    world.role.handle = broken  # type: ignore[method-assign]
    assert world.request().cancelled
    assert len(world.failures) == 1


# Calls --------------------------------------------------------------------------------------------


def test_a_call_brings_its_answer(world: World) -> None:
    world.do(call(body=b"question"))
    ((uri, exchange, listener),) = world.peers.calls
    assert (uri, exchange.sent) == (PEER, [b"question"])
    listener.response_received(OK)
    listener.data_received(memoryview(b"ans"))
    listener.data_received(memoryview(b"wer"))
    listener.body_ended()
    listener.failed("connection lost")
    assert world.role.told(AnswerReceived) == [AnswerReceived(1, OK, b"answer")]
    assert world.role.told(CallFailed) == []


def test_a_call_for_a_block_brings_it_into_a_buffer(world: World) -> None:
    world.do(call(form=AnswerForm.BLOCK, buffer=5, limit_bytes=10_000))
    ((_, _, listener),) = world.peers.calls
    head = Response(status=200, content_length=len(CONTAINER), repr_digest=SHA256)
    listener.response_received(head)
    listener.data_received(memoryview(CONTAINER))
    listener.body_ended()
    assert world.role.told(BlockReceived) == [BlockReceived(1, head, HEADER, LAYER_DIGESTS, True)]
    world.do(Store(1, 5, NAME, "host"))
    assert len(world.tier.catalogue()) == 1


@pytest.mark.requirement("BR-4")
@pytest.mark.parametrize("stated", [None, "0" * 64])
def test_a_block_without_the_right_digest_is_marked(world: World, stated: str | None) -> None:
    world.do(call(form=AnswerForm.BLOCK, buffer=5))
    ((_, _, listener),) = world.peers.calls
    listener.response_received(Response(status=200, content_length=None, repr_digest=stated))
    listener.data_received(memoryview(CONTAINER))
    listener.body_ended()
    (received,) = world.role.told(BlockReceived)
    assert isinstance(received, BlockReceived)
    assert not received.repr_digest_valid


def test_a_refusal_of_a_block_is_a_document(world: World) -> None:
    world.do(call(form=AnswerForm.BLOCK, buffer=5))
    ((_, _, listener),) = world.peers.calls
    head = Response(status=404, content_length=None)
    listener.response_received(head)
    listener.data_received(memoryview(b"{}"))
    listener.body_ended()
    assert world.role.told(AnswerReceived) == [AnswerReceived(1, head, b"{}")]


def test_a_malformed_block_fails_the_call(world: World) -> None:
    world.do(call(form=AnswerForm.BLOCK, buffer=5))
    ((_, exchange, listener),) = world.peers.calls
    listener.response_received(OK)
    listener.data_received(memoryview(b"nonsense" * 10))
    assert exchange.cancelled
    assert len(world.role.told(CallFailed)) == 1


def test_lines_come_one_by_one(world: World) -> None:
    world.do(call(form=AnswerForm.LINES))
    ((_, _, listener),) = world.peers.calls
    listener.response_received(OK)
    listener.data_received(memoryview(b'{"a": 1}\n{"b"'))
    listener.data_received(memoryview(b": 2}\n"))
    listener.body_ended()
    assert world.role.told(StreamStarted) == [StreamStarted(1, OK)]
    assert world.role.told(LineReceived) == [LineReceived(1, b'{"a": 1}'), LineReceived(1, b'{"b": 2}')]
    assert world.role.told(StreamEnded) == [StreamEnded(1)]


def test_a_line_cut_off_fails_the_call(world: World) -> None:
    world.do(call(form=AnswerForm.LINES))
    ((_, _, listener),) = world.peers.calls
    listener.response_received(OK)
    listener.data_received(memoryview(b'{"a"'))
    listener.body_ended()
    assert world.role.told(StreamEnded) == []
    assert len(world.role.told(CallFailed)) == 1


def test_a_call_times_out_once(world: World) -> None:
    world.do(call(timeout_ms=100))
    ((_, exchange, listener),) = world.peers.calls
    world.loop.advance(99)
    assert world.role.told(CallFailed) == []
    world.loop.advance(100)
    listener.failed("cancelled")
    assert world.role.told(CallFailed) == [CallFailed(1, "timed out")]
    assert exchange.cancelled


def test_the_time_of_a_stream_is_that_between_its_lines(world: World) -> None:
    world.do(call(form=AnswerForm.LINES, timeout_ms=100))
    ((_, _, listener),) = world.peers.calls
    world.loop.advance(90)
    listener.response_received(OK)
    world.loop.advance(180)
    listener.data_received(memoryview(b"1\n"))
    world.loop.advance(279)
    assert world.role.told(CallFailed) == []
    world.loop.advance(280)
    assert world.role.told(CallFailed) == [CallFailed(1, "timed out")]


def test_a_cancelled_call_is_never_heard_of_again(world: World) -> None:
    world.do(call(buffer=5, form=AnswerForm.BLOCK), CancelCall(1), CancelCall(1))
    ((_, exchange, listener),) = world.peers.calls
    assert exchange.cancelled
    listener.response_received(OK)
    listener.data_received(memoryview(CONTAINER))
    listener.body_ended()
    listener.failed("late")
    world.loop.advance(1000)
    assert [type(item) for item in world.role.inputs if not isinstance(item, TimerFired)] == []


# The timer and the engine -------------------------------------------------------------------------


def test_the_timer_follows_the_role(world: World) -> None:
    world.role.deadline_ms = 50
    world.do()
    assert world.loop.timer is not None
    assert world.loop.timer[0] == 50
    world.role.deadline_ms = None
    world.loop.advance(50)
    assert world.role.told(TimerFired) == [TimerFired(), TimerFired()]
    assert world.loop.timer is None


def test_blocks_go_into_the_engine_and_come_out_of_it(world: World) -> None:
    world.put_block(buffer=1)
    world.do(ImportBlock(7, 1, 0, 1), ExportBlock(8, 1, 0, 2))
    imported, exported = world.engine.commands
    world.driver.engine_job_over(imported, b"", 4)
    layers = [(SECTIONS[0:8], SECTIONS[8:16]), (SECTIONS[16:24], SECTIONS[24:32])]
    world.driver.engine_job_over(exported, layers, 4)
    world.loop.run()
    whole = (HEADER, LAYER_DIGESTS, SHA256)
    assert world.role.told(JobDone) == [JobDone(7), JobDone(8, *whole)]
    world.do(Store(9, 2, NAME, "host"))
    assert world.tier.read(NAME, None, lambda size: memoryview(bytearray(size)))[1] == SECTIONS


def test_an_import_hands_over_the_layers(world: World) -> None:
    world.put_block(buffer=1)
    world.do(ImportBlock(7, 1, 0, 1))
    assert b"".join(world.engine.layers) == SECTIONS


@pytest.mark.requirement("PF-2")
def test_what_the_engine_did_goes_between_what_a_connection_has_brought(world: World) -> None:
    world.driver.engine_events([Prefilled(3), Prefilled(4)])
    received = [JobDone(1), JobDone(2), JobDone(3)]
    for item in received:
        world.driver.handle(item)
    assert world.role.inputs == [Prefilled(3), received[0], Prefilled(4), *received[1:]]
    world.loop.run()
    assert world.role.told(Prefilled) == [Prefilled(3), Prefilled(4)]


def test_engine_events_come_in_the_loop(world: World) -> None:
    world.driver.engine_events([Prefilled(3)])
    assert world.role.told(Prefilled) == []
    world.loop.run()
    assert world.role.told(Prefilled) == [Prefilled(3)]
