"""Floods, limits and timeouts: each ends in its own way, soon, and with bounded memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable

import pytest

from kvsp_core.problems import problem_of
from kvsp_h2 import (
    ClientConnection,
    ConnectionEnded,
    ExchangeEnded,
    RequestReceived,
    ServerConnection,
    WireLimits,
)
from kvsp_h2.frames import PREFACE
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
    put,
    request_block,
    settings,
)

CALM = 11
PING = frame(6, 0, 0, b"12345678")


def goaway(frames: list[tuple[int, int, int, bytes]]) -> int | None:
    codes = [int.from_bytes(f[3][4:8], "big") for f in frames if f[0] == 7]
    return codes[0] if codes else None


# Floods -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flood", "reason"),
    [
        (PING, "too many frames that bring nothing"),
        (frame(6, 1, 0, bytes(8)), None),
        (settings(), "too many frames that bring nothing"),
        (settings(ack=True), "too many frames that bring nothing"),
        (frame(2, 0, 3, bytes(5)), "too many frames that bring nothing"),
        (frame(0x99, 0, 0, b"?"), "too many frames that bring nothing"),
        (frame(0, 0, 1), "too many frames that bring nothing"),
        (frame(8, 0, 0, struct.pack(">L", 1)), "too many frames that bring nothing"),
        (frame(8, 0, 1, struct.pack(">L", 1)), "too many frames that bring nothing"),
    ],
    ids=[
        "ping",
        "ping-ack",
        "settings",
        "settings-ack",
        "priority",
        "unknown",
        "empty-data",
        "window",
        "stream-window",
    ],
)
def test_frames_that_bring_nothing_are_counted(flood: bytes, reason: str | None) -> None:
    raw = Raw(WireLimits(control_burst=100, control_per_s=10))
    raw.send(headers(1, request_block(method="PUT"), end=False))
    assert goaway(raw.send(flood * 90)) is None
    found = goaway(raw.send(flood * 20))
    if reason is None:
        assert found is None, "they answer nothing and change nothing"
        return
    assert found == CALM
    assert raw.refused() == reason


def test_a_steady_trickle_of_pings_is_fine() -> None:
    raw = Raw(WireLimits(control_burst=100, control_per_s=10))
    for second in range(60):
        raw.now_ms = second * 1000
        assert goaway(raw.send(PING * 10)) is None


def test_streams_that_are_opened_and_reset_are_counted() -> None:
    raw = Raw(WireLimits(resets_burst=50, resets_per_s=1, max_streams=10))
    found = None
    for stream_id in range(1, 201, 2):
        found = goaway(raw.send(headers(stream_id, request_block()) + frame(3, 0, stream_id, bytes(4))))
        if found is not None:
            break
    assert (found, stream_id) == (CALM, 101)
    assert raw.refused() == "too many exchanges given up"


def test_streams_that_make_us_reset_them_are_counted() -> None:
    raw = Raw(WireLimits(resets_burst=50, resets_per_s=1))
    broken = request_block(("X", "y"))
    octets = b"".join(headers(i, broken) for i in range(1, 201, 2))
    assert goaway(raw.send(octets)) == CALM


@pytest.mark.parametrize(
    "provoke",
    [
        lambda i: frame(0, 0, i, b"x"),
        lambda i: headers(i, request_block()),
        lambda i: frame(8, 0, i, struct.pack(">L", 2**31 - 1)),
    ],
    ids=["data-after-the-end", "headers-after-the-end", "window-too-large"],
)
def test_exchanges_that_we_are_made_to_reset_are_counted(provoke: Callable[[int], bytes]) -> None:
    """So that nobody has us begin more than may be under way at a time, by having us break it off."""
    raw = Raw(WireLimits(resets_burst=50, resets_per_s=1))
    found = None
    for stream_id in range(1, 201, 2):
        found = goaway(raw.send(headers(stream_id, request_block()) + provoke(stream_id)))
        if found is not None:
            break
    assert (found, stream_id) == (CALM, 101)
    assert raw.refused() == "too many exchanges given up"
    assert len(raw.end.of(ExchangeEnded)) == len(raw.end.of(RequestReceived)) == 51


@pytest.mark.parametrize(
    "rest",
    [
        lambda i: frame(0, 1, i, b"x"),
        lambda i: frame(0, 0, i, b"xxx"),
        lambda i: headers(i, block(("X", "y"))),
        lambda i: headers(i, block(("x", "y")), end=False),
    ],
    ids=["body-too-short", "body-too-long", "bad-trailers", "fields-that-do-not-end"],
)
def test_requests_that_turn_out_malformed_are_counted(rest: Callable[[int], bytes]) -> None:
    raw = Raw(WireLimits(resets_burst=50, resets_per_s=1))
    head = request_block(("content-length", "2"), method="PUT")
    octets = b"".join(headers(i, head, end=False) + rest(i) for i in range(1, 201, 2))
    assert goaway(raw.send(octets)) == CALM
    assert raw.refused() == "too many exchanges given up"


@pytest.mark.parametrize(
    "flood",
    [headers(1, block((":status", "103")), end=False), headers(1, block((":status", "100")), end=False)],
    ids=["early-hints", "continue"],
)
def test_a_server_does_not_answer_for_ever(flood: bytes) -> None:
    end = End(ClientConnection(BASE_URI, 0, WireLimits(control_burst=100, control_per_s=10)))
    assert isinstance(end.http, ClientConnection)
    end.http.request(GET)
    end.connection.receive_data(settings() + flood * 90, 0)
    end.drain()
    assert not end.of(ConnectionEnded)
    end.connection.receive_data(flood * 20, 0)
    end.drain()
    assert end.events[-1] == ConnectionEnded("too many frames that bring nothing")


def test_malformed_answers_are_counted() -> None:
    end = End(ClientConnection(BASE_URI, 0, WireLimits(resets_burst=50, resets_per_s=1)))
    assert isinstance(end.http, ClientConnection)
    end.connection.receive_data(settings(), 0)
    for stream_id in range(1, 103, 2):
        assert end.http.request(GET) == stream_id
        end.connection.receive_data(headers(stream_id, block(("a", "b"))), 0)
    end.drain()
    assert end.events[-1] == ConnectionEnded("too many exchanges given up")


def test_a_peer_leaves_once() -> None:
    raw = Raw(WireLimits(control_burst=100, control_per_s=10))
    raw.send(headers(1, request_block()))
    assert goaway(raw.send(frame(7, 0, 0, bytes(8)) * 90)) is None
    assert goaway(raw.send(frame(7, 0, 0, bytes(8)) * 20)) == CALM


def test_late_data_after_an_early_answer_is_no_flood() -> None:
    raw = Raw(WireLimits(control_burst=2000))
    raw.send(headers(1, request_block(method="PUT"), end=False))
    raw.end.http.respond(1, ok(0, 413))  # type: ignore[union-attr]
    assert goaway(raw.send(frame(0, 0, 1, bytes(1000)) * 500)) is None


# Memory -----------------------------------------------------------------------------------------------------


def test_a_header_block_is_bounded_however_it_comes() -> None:
    for pieces, size in ((1, 70_000), (8, 10_000)):
        raw = Raw()
        octets = b"".join(frame(9 if n else 1, 1 if not n else 0, 1, bytes(size)) for n in range(pieces))
        assert goaway(raw.send(octets)) == CALM
        assert raw.refused() == "a header block is too large"


def test_a_small_block_of_large_fields_is_bounded() -> None:
    """One field of 4,000 octets in the table, then named a thousand times in a few octets."""
    raw = Raw()
    field = block(("x", "y" * 4000))
    bomb = request_block() + b"\x40" + field[1:] + b"\xbe" * 1000
    assert goaway(raw.send(headers(1, bomb))) == CALM
    assert raw.refused() == "a header list is too large"


def test_a_settings_frame_is_bounded() -> None:
    raw = Raw()
    assert goaway(raw.send(settings(*[(4, 65_535)] * 65))) == CALM
    assert raw.refused() == "too many settings in a frame"


def test_what_a_peer_does_not_read_is_bounded() -> None:
    raw = Raw(WireLimits(max_control_bytes=2000, control_burst=1000))
    connection = raw.end.connection
    for _ in range(300):
        connection.receive_data(PING, 0)
    raw.end.drain()
    assert raw.refused() == "the peer does not read"
    assert connection.dropped


def test_frames_that_are_dropped_cost_no_memory() -> None:
    raw = Raw(WireLimits(control_burst=1 << 20))
    raw.send(headers(1, request_block(method="PUT"), end=False))
    raw.end.http.respond(1, ok(0, 413))  # type: ignore[union-attr]
    raw.take()
    octets = frame(0, 0, 1, bytes(16_384)) + frame(0x42, 0, 0, bytes(1 << 20))
    raw.send(octets)
    tracemalloc.start()
    for _ in range(20):
        raw.send(octets)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    assert not raw.end.http.ended


def test_answers_that_nobody_makes_room_for_are_forgotten_with_their_exchange() -> None:
    """Who opens no window, and gives up what waits for it, leaves nothing behind."""
    raw = Raw(WireLimits(resets_burst=1 << 20))
    http = raw.end.http
    assert isinstance(http, ServerConnection)
    raw.send(headers(1, request_block()))
    http.respond(1, ok(1 << 20), bytes(1 << 20))
    assert sum(len(f[3]) for f in raw.take() if f[0] == 0) == 65_535

    def give_up(streams: range) -> None:
        for stream_id in streams:
            raw.send(headers(stream_id, request_block()))
            http.respond(stream_id, ok(2), b"ok")
            raw.take()
            raw.send(frame(3, 0, stream_id, bytes(4)))
            raw.end.events.clear()

    give_up(range(3, 1003, 2))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    give_up(range(1003, 3003, 2))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000


def test_a_connection_that_had_many_exchanges_remembers_few() -> None:
    pair = Pair()
    pair.echo()
    for _ in range(20):
        pair.exchange(GET)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(1000):
        pair.exchange(GET)
        pair.server.events.clear()
        pair.client.events.clear()
        pair.client.bodies.clear()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 200_000


def test_a_request_with_a_large_header_list_is_answered() -> None:
    raw = Raw(WireLimits(max_header_list_bytes=1000))
    sent = raw.send(headers(1, request_block(("x", "y" * 900))))
    assert problem_of(431, sent[1][3]).detail == "the header list is larger than we allow"


@pytest.mark.parametrize(
    "limits",
    [
        {"stream_window_bytes": 65_534},
        {"connection_window_bytes": 1 << 31},
        {"max_frame_bytes": 16_383},
        {"max_frame_bytes": 1 << 24},
        {"max_streams": 0},
    ],
)
def test_limits_are_checked(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        WireLimits(**limits)


def test_windows_are_kept_to() -> None:
    narrow = WireLimits(stream_window_bytes=65_535, connection_window_bytes=100_000)
    full = frame(0, 0, 1, bytes(16_384)) * 3 + frame(0, 0, 1, bytes(16_383))
    for more, reason in (
        (frame(0, 0, 1, b"x"), "more octets than the window of the stream allows"),
        (frame(0, 0, 3, bytes(34_466)), "more octets than the window of the connection allows"),
    ):
        raw = Raw(narrow)
        raw.end.slow = True
        for stream_id in (1, 3):
            raw.send(headers(stream_id, request_block(method="PUT"), end=False))
        assert goaway(raw.send(full)) is None
        assert goaway(raw.send(more)) == 3
        assert raw.refused() == reason


@pytest.mark.requirement("HT-3")
def test_padding_counts_for_windows_and_is_given_back_as_is_what_nobody_wants() -> None:
    raw = Raw(WireLimits(stream_window_bytes=65_535, connection_window_bytes=65_535))
    raw.send(headers(1, request_block(method="PUT"), end=False))
    windows = {0: 65_535, 1: 65_535}
    padded = frame(0, 8, 1, b"\xff" + b"x" * 100 + bytes(255))
    for number in range(2_000):
        if number == 1_000:
            raw.end.http.respond(1, ok(0, 413))  # type: ignore[union-attr]
        for stream_id in windows:
            windows[stream_id] -= 356
        assert windows[0] >= 0
        assert windows[1] >= 0 or number >= 1_000
        for kind, _, stream_id, payload in raw.send(padded):
            if kind == 8:
                windows[stream_id] += int.from_bytes(payload, "big")
    assert not raw.end.http.ended


# Time -------------------------------------------------------------------------------------------------------


def test_a_client_that_says_nothing_is_dropped() -> None:
    raw = Raw(greet=False)
    connection = raw.end.connection
    assert connection.next_deadline_ms() == 10_000
    connection.handle_timer(9_999)
    assert not connection.ended
    connection.handle_timer(10_000)
    raw.end.drain()
    assert raw.refused() == "the peer began something and did not go on in time"
    assert connection.next_deadline_ms() == 12_000
    connection.handle_timer(12_000)
    assert connection.dropped
    assert connection.next_deadline_ms() is None


@pytest.mark.parametrize(
    "begun",
    [PREFACE[:10], PREFACE, b"\x00\x00", frame(1, 1, 1, request_block()), frame(6, 0, 0, b"1234", length=8)],
)
def test_what_was_begun_has_to_go_on(begun: bytes) -> None:
    raw = Raw(greet=begun[:3] != PREFACE[:3])
    raw.now_ms = 5_000
    raw.send(begun)
    connection = raw.end.connection
    due = connection.next_deadline_ms()
    assert due == (15_000 if begun[:3] != PREFACE[:3] else 10_000)
    connection.handle_timer(due)
    assert connection.ended


def test_frames_that_are_all_cut_in_two_go_on() -> None:
    """Where each lot ends within a frame, and the next completes it, nobody is waited for."""
    raw = Raw()
    octets = PING * 60
    raw.send(octets[:5])
    for second in range(1, 60):
        raw.now_ms = second * 1000
        raw.end.connection.handle_timer(raw.now_ms)
        at = 17 * (second - 1) + 5
        assert goaway(raw.send(octets[at : at + 17])) is None
        due_ms = raw.end.connection.next_deadline_ms()
        assert due_ms is not None
        assert due_ms > raw.now_ms


@pytest.mark.parametrize("size", [1, 8, 9, 10, 12, 20])
def test_a_header_block_has_one_time_for_all_its_frames(size: int) -> None:
    raw = Raw()
    raw.send(frame(6, 0, 0, bytes(8)) + frame(1, 1, 1, request_block())[:5])
    raw.now_ms = 4_000
    raw.send(frame(1, 1, 1, request_block())[5:] + frame(9, 0, 1, bytes(21))[:size])
    raw.now_ms = 8_000
    raw.send(frame(9, 0, 1, bytes(21))[size:])
    assert raw.end.connection.next_deadline_ms() == 10_000
    raw.send(frame(9, 4, 1) + frame(6, 0, 0, bytes(8))[:size][:16])
    assert raw.end.connection.next_deadline_ms() == 18_000


def test_a_body_that_stops_is_given_up() -> None:
    pair = Pair(server_limits=WireLimits(idle_body_ms=1_000))
    stream_id = pair.calling.request(put(100), b"half", end=False)
    pair.run()
    pair.later(800)
    pair.calling.send_data(stream_id, b"more")
    pair.run()
    pair.later(1_100)
    assert pair.server.of(ExchangeEnded) == [], "it moved meanwhile"
    pair.later(1_000)
    assert pair.server.of(ExchangeEnded) == [
        ExchangeEnded(stream_id, False, 0, "the peer let nothing move for too long")
    ]
    assert pair.client.of(ExchangeEnded)[0].reason == "reset by the peer: CANCEL"  # type: ignore[union-attr]


def test_a_client_that_was_answered_early_has_a_while_to_take_note() -> None:
    """Some clients drop an answer when they are cut off at once."""
    raw = Raw(WireLimits(linger_ms=500))
    sent = []
    for stream_id in (1, 3, 5):
        raw.send(headers(stream_id, request_block(method="PUT"), end=False))
        raw.end.http.respond(stream_id, ok(0, 413))  # type: ignore[union-attr]
        sent += raw.take()
    assert [f[0] for f in sent] == [1, 1, 1], "no reset yet"
    assert raw.send(frame(0, 0, 1, b"late") + frame(0, 1, 3, b"the end") + frame(3, 0, 5, bytes(4))) == []
    connection = raw.end.connection
    assert connection.next_deadline_ms() == 500
    connection.handle_timer(499)
    assert raw.take() == []
    connection.handle_timer(500)
    assert raw.take() == [(3, 0, 1, bytes(4))], "the others have ended by themselves"
    assert connection.next_deadline_ms() > 500  # type: ignore[operator]
    assert raw.send(frame(0, 0, 1, b"later still")) == []


def test_clients_that_linger_are_bounded() -> None:
    raw = Raw(WireLimits(max_streams=2))
    sent = []
    for stream_id in (1, 3, 5, 7):
        raw.send(headers(stream_id, request_block(method="PUT"), end=False))
        raw.end.http.respond(stream_id, ok(0, 413))  # type: ignore[union-attr]
        sent += raw.take()
    assert [f[2] for f in sent if f[0] == 3] == [1, 3]


def test_a_reader_that_stops_is_given_up() -> None:
    pair = Pair(server_limits=WireLimits(idle_body_ms=1_000))
    pair.client.slow = True
    stream_id = pair.exchange(GET)
    pair.serving.respond(stream_id, ok(5 << 20), bytes(5 << 20))
    pair.run()
    pair.later(2_100)
    assert pair.server.of(ExchangeEnded)[0].reason == "the peer let nothing move for too long"  # type: ignore[union-attr]


def test_nobody_is_given_up_who_waits_for_us() -> None:
    pair = Pair(
        server_limits=WireLimits(idle_body_ms=1_000, ping_ms=10**8, idle_ms=10**8),
        client_limits=WireLimits(ping_ms=10**8, idle_body_ms=10**8),
    )
    pair.server.slow = True
    pair.exchange(GET)
    pair.exchange(put(5), b"12345")
    pair.exchange(put(1 << 21), bytes(1 << 21))
    pair.later(60_000)
    assert pair.server.of(ExchangeEnded) == []


def test_a_peer_that_is_silent_is_asked_and_then_given_up() -> None:
    pair = Pair(server_limits=WireLimits(ping_ms=5_000, ping_timeout_ms=1_000))
    pair.exchange(GET)
    pair.later(20_000)
    assert not pair.serving.ended, "it answers"
    connection = pair.serving
    connection.handle_timer(pair.now_ms + 5_000)
    connection.handle_timer(pair.now_ms + 6_000)
    pair.server.drain()
    assert pair.server.events[-1] == ConnectionEnded("the peer does not answer")


def test_a_connection_that_nobody_uses_is_closed_in_order() -> None:
    pair = Pair(server_limits=WireLimits(idle_ms=30_000))
    pair.echo()
    pair.exchange(GET)
    pair.later(29_999)
    assert not pair.serving.ended
    pair.later(1)
    assert pair.server.events[-1] == pair.client.events[-1] == ConnectionEnded("")


def test_an_early_timer_changes_nothing() -> None:
    pair = Pair()
    pair.exchange(GET)
    due = pair.serving.next_deadline_ms()
    for now_ms in range(0, 5_000, 500):
        pair.serving.handle_timer(now_ms)
        assert pair.serving.data_to_send() == b""
    assert pair.serving.next_deadline_ms() == due
    assert pair.server.of(RequestReceived)
