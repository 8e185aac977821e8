"""A pool sends a request again by itself where no server has acted on it, and only there."""

from __future__ import annotations

import pytest

from kvsp_core.heads import Request
from kvsp_h2 import (
    ClientConnection,
    ConnectionEnded,
    Established,
    Event,
    ExchangeEnded,
    RequestReceived,
    ResponseReceived,
    WireLimits,
)
from kvsp_h2.pool import Call, Pool, PoolLimits
from tests.adapters.h2.pair import BASE_URI, Pair, frame, ok, read_frames

PUT = Request(method="PUT", path="blocks/b1", content_type="x/y")


class Caller:
    """A pool whose connections are joined to servers in memory, and what a call was told."""

    def __init__(self) -> None:
        self.pool = Pool(BASE_URI, lambda: 0.5)
        self.told: list[Event] = []
        self.pairs: list[Pair] = []

    def connect(self) -> Pair:
        """Open a connection as a pump does; what is written goes nowhere before `carry`."""
        assert self.pool.wants_dial(10_000)  # whatever it waits for is over
        return self.connected()

    def connected(self, limits: WireLimits | None = None, *, server: WireLimits | None = None) -> Pair:
        """Have the connection that the pool wanted come to be."""
        pair = Pair(client_limits=limits, server_limits=server)
        pair.serving.greet()
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

    def get(self) -> None:
        """Ask for something."""
        self.pool.call(Request(method="GET", path="x"), on_event=self.told.append)

    def let_time_pass(self, *ms: int) -> None:
        """Fire the timers of every client's end at these times, while nothing comes from anywhere."""
        for now_ms in ms:
            for pair in self.pairs:
                pair.calling.handle_timer(now_ms)

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


@pytest.mark.requirement("HT-3")
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


def test_a_refusal_of_what_was_sent_before_the_server_said_how_many_it_takes_is_no_attempt() -> None:
    caller = Caller()
    for _ in range(5):
        caller.get()
    for _ in range(4):  # on each new one all that wait are sent, and all but one refused
        assert caller.pool.wants_dial(10_000)
        caller.carry(caller.connected(server=WireLimits(max_streams=1)))
    assert not caller.ends
    for pair in (*caller.pairs, caller.pairs[0]):
        asked = pair.server.of(RequestReceived)[-1]
        assert isinstance(asked, RequestReceived)
        pair.serving.respond(asked.stream_id, ok())
        caller.carry(pair)
    assert [end.complete for end in caller.ends] == [True] * 5


def test_a_server_that_refuses_what_it_said_it_takes_is_asked_three_times() -> None:
    caller = Caller()
    pair = caller.connect_and_use()
    caller.get()
    for stream_id in (3, 5, 7):
        assert not caller.ends
        pair.calling.receive_data(frame(3, 0, stream_id, b"\0\0\0\7"), 0)
        caller.carry(pair)
    assert [(end.complete, end.unprocessed) for end in caller.ends] == [(False, True)]


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


def answered(pair: Pair) -> int:
    """Answer every request there is, once; return how many."""
    asked = pair.server.of(RequestReceived)
    pair.server.events.clear()
    for event in asked:
        assert isinstance(event, RequestReceived)
        pair.serving.respond(event.stream_id, ok())
    return len(asked)


@pytest.mark.requirement("HT-3")
def test_no_request_goes_where_the_peer_is_gone_without_notice() -> None:
    caller = Caller()
    gone = caller.connect_and_use()
    gone.server.events.clear()
    caller.get()
    due = gone.calling.next_deadline_ms()
    assert due is not None
    assert due < 20_000, "it is asked sooner than one that owes nothing"
    caller.let_time_pass(due)
    caller.get()
    assert not caller.pool.wants_dial(due), "it may still answer"
    caller.let_time_pass(due + 2_000)
    caller.get()
    second = caller.connect()
    caller.get()
    caller.carry(second)
    assert answered(second) == 2
    caller.carry(second)
    assert len(caller.ends) == 2

    caller.carry(gone)
    assert answered(gone) == 2, "it was not gone after all, and nothing was sent to it twice"
    caller.carry(gone)
    assert len(caller.ends) == 4
    caller.get()
    caller.carry(gone)
    assert answered(gone) == 1


def _pings(pair: Pair) -> int:
    """Return how many PINGs the client's end has to send."""
    return sum(kind == 6 for kind, *_ in read_frames(pair.calling.data_to_send()))


def test_a_peer_that_owes_nothing_is_asked_later_and_given_up_no_sooner() -> None:
    for owes in (False, True):
        caller = Caller()
        pair = caller.connect_and_use()
        pair.client.events.clear()
        if owes:
            caller.get()
        asked = [now_ms for now_ms in range(0, 40_000, 500) if caller.let_time_pass(now_ms) or _pings(pair)]
        assert asked == [2_000 if owes else 20_000]
        pair.client.drain()
        [ended] = pair.client.of(ConnectionEnded)
        assert ended == ConnectionEnded("the peer does not answer")


def test_calls_fail_where_none_but_silent_peers_are_left() -> None:
    caller = Caller()
    caller.connect_and_use()
    caller.get()
    caller.let_time_pass(2_000, 4_000)
    caller.get()
    assert caller.pool.wants_dial(4_000)
    caller.pool.dial_failed("the service cannot be reached", 4_000)
    assert [end.reason for end in caller.ends] == ["the service cannot be reached"]


def test_what_waits_goes_where_life_has_come_back() -> None:
    """A sign of life is enough, where no exchange moves and no other connection comes to be."""
    caller = Caller()
    pair = caller.connect_and_use()
    pair.server.events.clear()
    caller.get()
    caller.let_time_pass(2_000, 4_000)
    caller.get()
    assert caller.pool.wants_dial(4_000)
    caller.carry(pair)
    assert len(pair.server.of(RequestReceived)) == 2
    assert not caller.ends


def test_what_waits_for_room_is_no_longer_waiting_for_a_peer_in_doubt() -> None:
    caller = Caller()
    pair = caller.connect_and_use()
    for _ in range(1_000):
        caller.get()
    for _ in range(3):
        caller.connect()
    assert not caller.pool.wants_dial(0), "there are as many as may be"
    woken = []
    caller.pool.wake = lambda: woken.append(caller.pool.wants_dial(4_000))
    caller.let_time_pass(2_000, 4_000)
    link = _Link(pair)
    while (event := pair.calling.next_event()) is not None:
        caller.pool.receive(link, event, 4_000)
    assert woken == [True]


@pytest.mark.requirement("HT-3")
@pytest.mark.parametrize("who", ["server", "client"])
def test_connections_that_drain_do_not_keep_others_from_being_opened(who: str) -> None:
    caller = Caller()
    pair = caller.connect_and_use()
    pair.server.events.clear()
    for _ in range(1_000):
        caller.get()
    for _ in range(3):
        caller.connect()
    for pair in caller.pairs:
        caller.carry(pair)
    assert not caller.pool.wants_dial(0), "there are as many as may be"
    woken: list[bool] = []
    caller.pool.wake = lambda: woken.append(caller.pool.wants_dial(0))
    for pair in caller.pairs:
        end = pair.serving if who == "server" else pair.calling
        end.shutdown(0)
        caller.carry(pair)
    if who == "client":
        caller.get()
    assert True in woken
    new = caller.connected()
    caller.carry(new)
    assert new.server.of(RequestReceived), "what waited is sent at once"
    assert not caller.ends, "and what is under way goes on"


def test_connections_that_drain_are_not_followed_by_others_without_end() -> None:
    caller = Caller()
    while True:
        caller.get()
        if not caller.pool.wants_dial(0):
            break
        pair = caller.connected()
        pair.calling.shutdown(0)
    assert len(caller.pairs) == 2 * PoolLimits().max_connections


def test_calls_fail_where_none_but_connections_that_drain_are_left() -> None:
    caller = Caller()
    pair = caller.connect_and_use()
    caller.get()
    pair.calling.shutdown(0)
    caller.get()
    assert caller.pool.wants_dial(0)
    caller.pool.dial_failed("the service cannot be reached", 0)
    assert [end.reason for end in caller.ends] == ["the service cannot be reached"]


def test_silent_peers_do_not_make_connections_without_end() -> None:
    caller = Caller()
    now_ms = 0
    while True:
        caller.get()
        if not caller.pool.wants_dial(now_ms):
            break
        caller.connected(WireLimits(doubt_ms=1))
        caller.let_time_pass(now_ms := now_ms + 1, now_ms := now_ms + 1)
    assert len(caller.pairs) == 2 * PoolLimits().max_connections
