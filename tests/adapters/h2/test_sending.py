"""Bodies go out whole and within the peer's windows and frames, whatever it changes on the way."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp_h2 import ClientConnection, ConnectionEnded, ExchangeEnded, RequestReceived, ServerConnection
from kvsp_h2.frames import DATA, HEADERS, PREFACE, RST_STREAM
from tests.adapters.h2.pair import (
    BASE_URI,
    GET,
    End,
    Pair,
    Raw,
    block,
    frame,
    headers,
    ok,
    read_frames,
    request_block,
    settings,
)

SIZE = 300_000
changes = st.lists(
    st.one_of(
        st.tuples(st.just("stream"), st.sampled_from([1, 7, 1000, 16_384, 100_000])),
        st.tuples(st.just("connection"), st.sampled_from([1, 7, 1000, 16_384, 100_000])),
        st.tuples(st.just("initial"), st.sampled_from([0, 1, 1000, 65_535, 200_000])),
        st.tuples(st.just("frame"), st.sampled_from([16_384, 20_000, 100_000])),
    ),
    max_size=25,
)


@pytest.mark.requirement("HT-3")
@pytest.mark.parametrize("by_peer", [True, False])
def test_nothing_of_a_body_follows_the_end_of_its_exchange(by_peer: bool) -> None:
    pair = Pair()
    stream_id = pair.exchange(GET)
    pair.serving.respond(stream_id, ok(SIZE * 3), bytes(SIZE * 3))
    begun = read_frames(pair.serving.data_to_send())
    assert {kind for kind, *_ in begun} == {DATA, HEADERS}, "and more waits"
    if by_peer:
        pair.serving.receive_data(frame(RST_STREAM, 0, stream_id, bytes(4)), 0)
    else:
        pair.serving.reset(stream_id)
    rest = read_frames(pair.serving.data_to_send())
    assert DATA not in {kind for kind, *_ in rest}


@pytest.mark.requirement("HT-3")
@given(changes)
def test_windows_and_frames_may_change_in_the_middle_of_bodies(found: list[tuple[str, int]]) -> None:
    raw = Raw()
    windows = {0: 65_535, 1: 65_535, 3: 65_535}
    initial, largest = 65_535, 16_384
    body = bytes(range(256)) * (SIZE // 256)
    got = {1: bytearray(), 3: bytearray()}

    def take(octets: bytes) -> None:
        for kind, _, stream_id, payload in raw.send(octets):
            if kind == 0:
                assert len(payload) <= largest
                windows[0] -= len(payload)
                windows[stream_id] -= len(payload)
                assert windows[0] >= 0, "more than the window of the connection allows"
                assert not payload or windows[stream_id] >= 0, "more than the window of the stream allows"
                got[stream_id] += payload

    http = raw.end.http
    assert isinstance(http, ServerConnection)
    raw.send(headers(1, request_block()) + headers(3, request_block()))
    for stream_id in got:
        http.respond(stream_id, ok(len(body)), body)
    take(b"")
    for kind, value in [*found, ("frame", 16_384), ("initial", SIZE), ("connection", 2 * SIZE)]:
        if kind == "stream":
            windows[1] += value
            take(frame(8, 0, 1, struct.pack(">L", value)))
        elif kind == "connection":
            windows[0] += value
            take(frame(8, 0, 0, struct.pack(">L", value)))
        elif kind == "frame":
            largest = value
            take(settings((5, value)))
        else:
            for stream_id in got:
                windows[stream_id] += value - initial
            initial = value
            take(settings((4, value)))
    assert got == {1: body, 3: body}
    assert [e.complete for e in raw.end.events if isinstance(e, ExchangeEnded)] == [True, True]


def test_exchanges_that_wait_for_the_connection_may_be_given_up() -> None:
    raw = Raw()
    http = raw.end.http
    assert isinstance(http, ServerConnection)
    raw.send(b"".join(headers(stream_id, request_block()) for stream_id in (1, 3, 5)))
    for stream_id in (1, 3, 5):
        http.respond(stream_id, ok(100_000), bytes(100_000))
    sent = sum(len(f[3]) for f in raw.take() if f[0] == 0)
    assert sent == 65_535
    raw.send(frame(3, 0, 3, struct.pack(">L", 8)))
    http.reset(5)
    rest = raw.send(frame(8, 0, 0, struct.pack(">L", 1 << 20)) + frame(8, 0, 1, struct.pack(">L", 1 << 20)))
    assert {f[2] for f in rest if f[0] == 0} == {1}
    assert sent + sum(len(f[3]) for f in rest if f[0] == 0) >= 100_000


def test_a_head_that_comes_again_is_a_request_of_its_own() -> None:
    raw = Raw()
    again = request_block(("content-length", "0"), method="PUT")
    unknown = request_block(path="/elsewhere")
    said = raw.send(
        headers(1, again)
        + headers(3, again, end=False)
        + headers(5, again)
        + frame(0, 1, 3)
        + headers(7, unknown)
        + headers(9, unknown)
    )
    told = [(e.stream_id, e.ended) for e in raw.end.events if isinstance(e, RequestReceived)]
    assert told == [(1, True), (3, False), (5, True)]
    assert [f[2] for f in said if f[0] == 1] == [7, 9], "both are answered 404"
    bad = request_block(("connection", "close"))
    said = raw.send(headers(11, bad) + headers(13, bad) + headers(15, again))
    assert [f[2] for f in said if f[0] == 3] == [11, 13]


def test_a_client_may_close_after_any_octet() -> None:
    octets = (
        PREFACE
        + settings()
        + headers(1, request_block(("content-length", "6"), method="PUT"), end=False)
        + frame(0, 8, 1, b"\x02abc\x00\x00")
        + headers(3, request_block())
        + frame(6, 0, 0, bytes(8))
        + frame(0, 1, 1, b"def")
        + frame(3, 0, 3, bytes(4))
        + frame(7, 0, 0, struct.pack(">LL", 0, 0))
    )
    for size in range(len(octets) + 1):
        raw = Raw(greet=False)
        raw.send(octets[:size])
        raw.end.connection.receive_eof(0)
        raw.end.drain()
        asked = [e.stream_id for e in raw.end.events if isinstance(e, RequestReceived)]
        ended = [e.stream_id for e in raw.end.events if isinstance(e, ExchangeEnded)]
        assert sorted(asked) == sorted(ended), f"after {size} octets"
        assert raw.end.http.ended
        assert not raw.end.http._exchanges
        http = raw.end.http
        assert isinstance(http, ServerConnection)
        assert http.respond(1, ok()), "calls for what is over do nothing"
        assert raw.end.http.next_deadline_ms() is not None


def test_a_server_may_leave_in_the_middle_of_a_body() -> None:
    for last, complete in ((1, True), (0, False)):
        end = End(ClientConnection(BASE_URI, 0))
        http = end.http
        assert isinstance(http, ClientConnection)
        assert http.request(GET) == 1
        head = block((":status", "200"), ("content-length", "6"))
        http.receive_data(settings() + headers(1, head, end=False) + frame(0, 0, 1, b"abc"), 0)
        http.receive_data(frame(7, 0, 0, struct.pack(">LL", last, 0)), 0)
        http.receive_data(frame(0, 1, 1, b"def"), 0)
        end.drain()
        ends = [e for e in end.events if isinstance(e, ExchangeEnded)]
        assert [(e.complete, e.unprocessed) for e in ends] == [(complete, False)], "it had begun to answer"
        assert end.bodies[1] == (b"abcdef" if complete else b"abc")
        assert isinstance(end.events[-1], ConnectionEnded)
        assert not http.can_request
