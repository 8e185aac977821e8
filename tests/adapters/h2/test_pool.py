"""A pool sends a request again by itself where no server has acted on it, and only there."""

from __future__ import annotations

import pytest

from kvsp_core.heads import Request
from kvsp_h2 import (
    ClientConnection,
    Established,
    Event,
    ExchangeEnded,
    RequestReceived,
    ResponseReceived,
)
from kvsp_h2.pool import Call, Pool
from tests.adapters.h2.pair import BASE_URI, Pair, frame, ok

PUT = Request(method="PUT", path="blocks/b1", content_type="x/y")


class Caller:
    """A pool whose connections are joined to servers in memory, and what a call was told."""

    def __init__(self) -> None:
        self.pool = Pool(BASE_URI, lambda: 0.5)
        self.told: list[Event] = []
        self.pairs: list[Pair] = []

    def connect(self) -> Pair:
        """Open a connection as a pump does; what is written goes nowhere before `carry`."""
        pair = Pair()
        pair.serving.greet()
        assert self.pool.wants_dial(10_000)  # whatever it waits for is over
        self.pairs.append(pair)
        self.pool.receive(_Link(pair), Established(BASE_URI), 0)
        return pair

    def connect_and_use(self) -> Pair:
        """Open a connection, and have one request answered on it."""
        self.pool.call(Request(method="GET", path="x"), on_event=lambda _: None)
        pair = self.connect()
        self.carry(pair)
        pair.serving.respond(1, ok())
        self.carry(pair)
        return pair

    def carry(self, pair: Pair) -> None:
        """Carry octets both ways, and tell the pool what its end was told."""
        link = _Link(pair)
        pair.client.on_event = lambda event: self.pool.receive(link, event, 0)
        pair.run()

    def put(self, *pieces: bytes, expect_continue: bool = False) -> Call:
        """Store a block whose octets are handed over one after the other."""
        first, *rest = pieces
        call = self.pool.call(
            PUT, first, on_event=self.told.append, end=not rest, expect_continue=expect_continue
        )
        for number, piece in enumerate(rest, 1):
            call.send_data(piece, end=number == len(rest))
        return call

    @property
    def ends(self) -> list[ExchangeEnded]:
        return [event for event in self.told if isinstance(event, ExchangeEnded)]


class _Link:
    """A connection as a pump offers it to a pool; one of the same pair is the same."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    @property
    def http(self) -> ClientConnection:
        return self._pair.calling

    def flush(self) -> None:
        """Send nothing yet."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Link) and other._pair is self._pair

    def __hash__(self) -> int:
        return id(self._pair)


def answer_body(pair: Pair) -> bytes:
    """Return the body of the newest request."""
    asked = pair.server.of(RequestReceived)[-1]
    assert isinstance(asked, RequestReceived)
    return bytes(pair.server.bodies[asked.stream_id])


def answer(pair: Pair) -> bytes:
    """Answer the one request there is; return its body."""
    (asked,) = pair.server.of(RequestReceived)
    assert isinstance(asked, RequestReceived)
    pair.serving.respond(asked.stream_id, ok())
    return bytes(pair.server.bodies[asked.stream_id])


@pytest.mark.parametrize("waits", [False, True], ids=["on a connection that is open", "on a new one"])
@pytest.mark.parametrize(
    "pieces", [(b"head and data",), (b"head", b" and data"), (b"he", b"ad and", b" data")]
)
def test_what_a_server_that_goes_away_has_not_acted_on_is_sent_again(
    pieces: tuple[bytes, ...], waits: bool
) -> None:
    caller = Caller()
    if waits:
        caller.put(*pieces)
        first = caller.connect()
    else:
        first = caller.connect_and_use()
        caller.put(*pieces)
    first.serving.shutdown(0)  # while the request is on its way
    caller.carry(first)
    assert not caller.ends
    second = caller.connect()
    caller.carry(second)
    assert answer(second) == b"head and data"
    caller.carry(second)
    assert [end.complete for end in caller.ends] == [True]
    assert [type(event) for event in caller.told].count(ResponseReceived) == 1


@pytest.mark.parametrize(
    "left", [frame(7, 0, 0, bytes(8)), frame(3, 0, 1, b"\0\0\0\7")], ids=["GOAWAY", "REFUSED_STREAM"]
)
def test_what_a_server_has_begun_to_answer_is_not_sent_again(left: bytes) -> None:
    caller = Caller()
    caller.put(b"head and data")
    pair = caller.connect()
    caller.carry(pair)
    pair.serving.respond(1, ok(10), b"five ", end=False)
    caller.carry(pair)
    pair.calling.receive_data(left, 0)
    caller.carry(pair)
    assert [(end.complete, end.unprocessed) for end in caller.ends] == [(False, False)]
    assert [type(event) for event in caller.told].count(ResponseReceived) == 1


def test_what_was_handed_over_bit_by_bit_is_not_sent_again() -> None:
    caller = Caller()
    first = caller.connect_and_use()
    caller.put(b"head", b"more", expect_continue=True)
    first.serving.shutdown(0)
    caller.carry(first)
    assert [(end.complete, end.unprocessed) for end in caller.ends] == [(False, True)]


def test_of_a_body_that_comes_bit_by_bit_little_is_kept() -> None:
    caller = Caller()
    pair = caller.connect_and_use()
    call = caller.pool.call(PUT, b"first", on_event=caller.told.append, end=False)
    for _ in range(20):
        assert call.send_data(bytes(100_000))
        caller.carry(pair)
    assert sum(len(data) for data, _ in call._pieces) <= 1 << 20
    call.send_data(b"last", end=True)
    caller.carry(pair)
    assert len(answer_body(pair)) == 5 + 2_000_000 + 4
