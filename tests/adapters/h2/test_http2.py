"""Requests and answers over a pair of connections: streams both ways, early answers, pressure, the end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp_core.errors import LocalProtocolError
from kvsp_core.heads import Request, Response
from kvsp_core.problems import problem_of
from kvsp_h2 import (
    BodyEnded,
    ConnectionEnded,
    ContinueReceived,
    DataReceived,
    Event,
    ExchangeEnded,
    GoingAway,
    OutputReady,
    RequestReceived,
    ResponseReceived,
    WireLimits,
)
from tests.adapters.h2.pair import (
    BASE_URI,
    GET,
    Pair,
    Raw,
    frame,
    headers,
    ok,
    put,
    read_frames,
    request_block,
)

NARROW = WireLimits(stream_window_bytes=65_535, connection_window_bytes=65_535, max_frame_bytes=16_384)


def test_a_request_and_its_answer_arrive_as_they_were_sent() -> None:
    pair = Pair()
    request = Request(
        method="PUT",
        path="blocks/aa/bb",
        query="x=1",
        content_type="application/kvsp-block",
        content_length=5,
        if_none_match="*",
        repr_digest="ab" * 32,
    )
    stream_id = pair.exchange(request, b"octet")
    assert pair.server.events == [RequestReceived(stream_id, request, False), BodyEnded(stream_id)]
    assert pair.server.bodies == {stream_id: b"octet"}
    response = Response(status=201, content_type="x/y", content_length=3, location="leases/x7")
    pair.serving.respond(stream_id, response, b"abc")
    pair.run()
    assert pair.server.events[2:] == [ExchangeEnded(stream_id, True, 3)]
    assert pair.client.events == [
        ResponseReceived(stream_id, response, False),
        BodyEnded(stream_id),
        ExchangeEnded(stream_id, True, 5),
    ]
    assert pair.client.bodies == {stream_id: b"abc"}


@pytest.mark.parametrize("split", [None, 1, 7, 9, 10, 1000])
@pytest.mark.parametrize("limits", [WireLimits(), NARROW], ids=["wide", "narrow"])
def test_bodies_stream_both_ways_in_any_split(split: int | None, limits: WireLimits) -> None:
    size = 300_000 if split != 1 else 70_000
    body = bytes(i * 7 & 255 for i in range(size))
    pair = Pair(server_limits=limits, client_limits=limits, split=split)
    stream_id = pair.exchange(put(len(body)), body)
    pair.serving.respond(stream_id, ok(None), body[:1000], end=False)
    pair.run()
    pair.serving.send_data(stream_id, body[1000:])
    pair.run()
    pair.serving.send_data(stream_id, b"", end=True)
    pair.run()
    assert pair.server.bodies[stream_id] == body
    assert pair.client.bodies[stream_id] == body
    assert pair.client.events[-1] == ExchangeEnded(stream_id, True, len(body))


def test_pieces_of_a_body_share_frames() -> None:
    raw = Raw()
    raw.send(headers(1, request_block()))
    raw.end.http.respond(1, ok(30), b"", end=False)  # type: ignore[union-attr]
    for at in range(0, 30, 3):
        raw.end.http.send_data(1, b"abc", end=at == 27)
    frames = [f for f in raw.take() if f[0] == 0]
    assert frames == [(0, 1, 1, b"abc" * 10)]


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=6), st.integers(0, 3))
def test_many_bodies_at_once_come_whole(sizes: list[int], order: int) -> None:
    pair = Pair(server_limits=NARROW, client_limits=NARROW if order % 2 else WireLimits())
    bodies = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    streams = [pair.calling.request(put(len(body)), body) for body in bodies]
    pair.run()
    for stream_id, body in zip(streams, bodies, strict=True):
        pair.serving.respond(stream_id, ok(len(body)), body)
    pair.run()
    for stream_id, body in zip(streams, bodies, strict=True):
        assert pair.server.bodies[stream_id] == pair.client.bodies[stream_id] == body


def test_exchanges_take_turns() -> None:
    """A large answer does not keep a small one waiting."""
    pair = Pair(client_limits=WireLimits(stream_window_bytes=8 << 20))
    large, small = pair.exchange(GET), pair.exchange(GET)
    pair.serving.respond(large, ok(4 << 20), bytes(4 << 20))
    pair.serving.respond(small, ok(3), b"now")
    first = pair.serving.data_to_send()
    assert (0, 1, small, b"now") in read_frames(first)


# Early answers ----------------------------------------------------------------------------------------------


def test_an_early_answer_reaches_a_client_that_is_still_sending() -> None:
    pair = Pair(server_limits=NARROW)

    def refuse(event: Event) -> None:
        if isinstance(event, RequestReceived):
            pair.serving.respond(event.stream_id, ok(4, 413), b"long")

    pair.server.on_event = refuse
    stream_id = pair.calling.request(put(10_000_000), bytes(1_000_000), end=False)
    pair.run()
    assert pair.client.events == [
        ResponseReceived(stream_id, ok(4, 413), False),
        BodyEnded(stream_id),
        ExchangeEnded(stream_id, True, pair.client.events[-1].sent_bytes),  # type: ignore[union-attr]
    ]
    assert pair.client.events[-1].sent_bytes < 200_000  # type: ignore[union-attr]
    assert pair.server.of(ExchangeEnded) == [ExchangeEnded(stream_id, True, 4)]
    assert pair.exchange(GET) == stream_id + 2, "the connection goes on"
    assert pair.calling.send_data(stream_id, b"late") is True, "what comes too late does nothing"


def test_eight_large_puts_through_narrow_windows_all_get_their_early_answer() -> None:
    pair = Pair(server_limits=NARROW, client_limits=NARROW)
    pair.server.slow = True  # nobody reads these bodies

    def refuse(event: Event) -> None:
        if isinstance(event, DataReceived) and pair.server.of(ExchangeEnded) == []:
            for known in pair.server.of(RequestReceived):
                pair.serving.respond(known.stream_id, ok(0, 413))  # type: ignore[union-attr]

    pair.server.on_event = refuse
    streams = [pair.calling.request(put(5_000_000), bytes(5_000_000)) for _ in range(8)]
    pair.run()
    ended = {e.stream_id: e.complete for e in pair.client.of(ExchangeEnded)}  # type: ignore[union-attr]
    assert ended == dict.fromkeys(streams, True)
    pair.server.slow, pair.server.on_event = False, lambda event: None
    again = pair.exchange(put(200_000), bytes(200_000))
    assert len(pair.server.bodies[again]) == 200_000, "the windows are whole again"


def test_a_client_that_asks_first_is_told_to_continue_or_answered() -> None:
    pair = Pair()
    stream_id = pair.calling.request(put(4), end=False, expect_continue=True)
    pair.run()
    assert pair.client.events == []
    pair.serving.accept_body(stream_id)
    pair.serving.accept_body(stream_id)
    pair.run()
    assert pair.client.events == [ContinueReceived(stream_id)], "and is told once"
    pair.calling.send_data(stream_id, b"body", end=True)
    pair.run()
    assert pair.server.bodies[stream_id] == b"body"
    other = pair.calling.request(put(4), end=False, expect_continue=True)
    pair.run()
    pair.serving.respond(other, ok(0, 412))
    pair.run()
    assert pair.client.events[1:] == [
        ResponseReceived(other, ok(0, 412), True),
        ExchangeEnded(other, True, 0),
    ]


def test_nobody_is_told_to_continue_who_did_not_ask() -> None:
    pair = Pair()
    stream_id = pair.exchange(put(4), b"body")
    pair.serving.accept_body(stream_id)
    pair.run()
    assert pair.client.events == []


# Pressure ---------------------------------------------------------------------------------------------------


def test_a_sender_is_told_of_pressure_and_when_it_is_over() -> None:
    pair = Pair(client_limits=NARROW)
    pair.client.slow = True
    stream_id = pair.exchange(GET)
    pair.serving.respond(stream_id, ok(None), b"", end=False)
    sent = 0
    while pair.serving.send_data(stream_id, bytes(100_000)):
        sent += 100_000
    pair.run()
    assert sent == 1_000_000
    assert pair.server.of(OutputReady) == []
    assert len(pair.client.bodies[stream_id]) == 65_535, "no more than the window"
    pair.client.slow = False
    pair.calling.acknowledge(stream_id, 65_535)
    pair.run()
    assert pair.server.of(OutputReady) == [OutputReady(stream_id)]


def test_a_reader_that_acknowledges_nothing_gets_one_window() -> None:
    pair = Pair(server_limits=NARROW)
    pair.server.slow = True
    stream_id = pair.exchange(put(1_000_000), bytes(1_000_000))
    assert len(pair.server.bodies[stream_id]) == 65_535
    with pytest.raises(LocalProtocolError):
        pair.serving.acknowledge(stream_id, 65_536)
    with pytest.raises(LocalProtocolError):
        pair.serving.acknowledge(stream_id, -1)
    pair.server.slow = False
    pair.serving.acknowledge(stream_id, 65_535)
    pair.run()
    assert len(pair.server.bodies[stream_id]) == 1_000_000


def test_windows_are_refilled_in_batches() -> None:
    pair = Pair()
    updates = 0
    stream_id = pair.calling.request(put(8 << 20), bytes(8 << 20))
    for _ in itertools.count():
        octets = pair.calling.data_to_send()
        pair.serving.receive_data(octets, 0)
        pair.server.drain()
        back = pair.serving.data_to_send()
        updates += sum(f[0] == 8 for f in read_frames(back))
        pair.calling.receive_data(back, 0)
        if not octets and not back:
            break
    assert len(pair.server.bodies[stream_id]) == 8 << 20
    assert updates < 40, "512 frames of 16 KiB, or 8 of 1 MiB, came in"


# Calls that are not allowed, or come late -------------------------------------------------------------------


def test_a_request_is_answered_once_and_in_order() -> None:
    pair = Pair()
    stream_id = pair.exchange(GET)
    with pytest.raises(LocalProtocolError):
        pair.serving.send_data(stream_id, b"before the head")
    with pytest.raises(LocalProtocolError):
        pair.serving.respond(stream_id, ok(0, 103))
    pair.serving.respond(stream_id, ok(None), b"x", end=False)
    with pytest.raises(LocalProtocolError):
        pair.serving.respond(stream_id, ok())
    pair.serving.send_data(stream_id, b"", end=True)
    with pytest.raises(LocalProtocolError):
        pair.serving.send_data(stream_id, b"after the end")
    pair.run()
    assert pair.client.bodies[stream_id] == b"x"
    assert pair.serving.respond(stream_id, ok()) is True, "late, and without effect"
    pair.serving.reset(stream_id)
    pair.serving.acknowledge(stream_id, 10)
    pair.run()
    assert pair.client.of(ExchangeEnded) == [ExchangeEnded(stream_id, True, 0)]


def test_either_end_can_give_an_exchange_up() -> None:
    pair = Pair()
    first, second = pair.exchange(put(None), b"x"), pair.exchange(GET)
    pair.calling.reset(first)
    pair.serving.reset(second)
    pair.run()
    assert pair.client.of(ExchangeEnded) == [
        ExchangeEnded(first, False, 1, "given up here"),
        ExchangeEnded(second, False, 0, "reset by the peer: CANCEL"),
    ]
    assert pair.server.of(ExchangeEnded) == [
        ExchangeEnded(second, False, 0, "given up here"),
        ExchangeEnded(first, False, 0, "reset by the peer: CANCEL"),
    ]


def test_head_and_no_content_have_no_body() -> None:
    pair = Pair()
    head = pair.exchange(Request(method="HEAD", path="blocks/b1"))
    pair.serving.respond(head, ok(2_097_152))
    gone = pair.exchange(Request(method="DELETE", path="leases/x"))
    pair.serving.respond(gone, ok(0, 204))
    pair.run()
    assert pair.client.of(ResponseReceived) == [
        ResponseReceived(head, ok(2_097_152), True),
        ResponseReceived(gone, ok(0, 204), True),
    ]


# Answered without a role ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_fields", "status", "detail"),
    [
        (request_block(path="/other/blocks"), 404, "this service has no resource of that path"),
        (request_block(path="/kvsp"), 404, "this service has no resource of that path"),
        (request_block(path="*", method="OPTIONS"), 404, "this service has no resource of that path"),
        (
            request_block(("content-digest", "nonsense")),
            400,
            "content-digest: expected 'sha-256=:BASE64:' (RFC 9530)",
        ),
        (request_block(("x", "y" * 20_000)), 431, "the header list is larger than we allow"),
    ],
)
def test_what_no_role_needs_to_see_is_answered_here(request_fields: bytes, status: int, detail: str) -> None:
    raw = Raw()
    sent = raw.send(headers(1, request_fields))
    kinds = [(f[0], f[2]) for f in sent]
    assert kinds == [(1, 1), (0, 1)]
    assert problem_of(status, sent[1][3]).detail == detail
    assert problem_of(status, sent[1][3]).status == status
    assert raw.end.events == [], "no role heard of it"
    raw.send(headers(3, request_block()))
    assert [type(e) for e in raw.end.events] == [RequestReceived]


@pytest.mark.requirement("HT-1")
def test_resources_are_below_the_base_uri_whatever_its_path() -> None:
    for base in ("https://h1.example/", "https://h1.example:8443/a/b/c/"):
        from kvsp_h2 import ClientConnection, ServerConnection

        pair = Pair(server=ServerConnection(base, 0), client=ClientConnection(base, 0))
        stream_id = pair.exchange(GET)
        assert pair.server.events == [RequestReceived(stream_id, GET, True)]


# The end ----------------------------------------------------------------------------------------------------


def test_a_server_closes_in_order() -> None:
    """Requests on their way when it begins are served, later ones are not sent, open ones finish."""
    pair = Pair()
    first = pair.exchange(GET)
    pair.serving.shutdown(0)
    second = pair.calling.request(GET)  # crosses the announcement
    pair.run()
    assert pair.client.of(GoingAway) == [GoingAway()]
    assert not pair.calling.can_request
    assert [e.stream_id for e in pair.server.of(RequestReceived)] == [first, second]  # type: ignore[union-attr]
    for stream_id in (first, second):
        pair.serving.respond(stream_id, ok(2), b"ok")
    pair.run()
    assert [e.complete for e in pair.client.of(ExchangeEnded)] == [True, True]  # type: ignore[union-attr]
    assert pair.server.events[-1] == pair.client.events[-1] == ConnectionEnded("")
    assert pair.serving.ended
    assert pair.calling.ended


@pytest.mark.parametrize("ends", ["it is shut down", "its time is over"])
def test_settings_come_first_even_of_a_server_that_ends_before_its_client_spoke(ends: str) -> None:
    raw = Raw(greet=False)
    if ends == "it is shut down":
        raw.end.connection.shutdown(0)
    else:
        raw.end.connection.handle_timer(10_000)
    assert [f[0] for f in raw.take()] == [4, 8, 7], "SETTINGS and the window, then GOAWAY"
    assert raw.end.connection.ended


def test_a_graceful_end_has_an_end() -> None:
    pair = Pair(server_limits=WireLimits(drain_ms=5_000))
    stream_id = pair.exchange(GET)
    pair.serving.shutdown(0)
    pair.run()
    pair.later(4_999)
    assert not pair.serving.ended
    pair.later(1)
    assert pair.server.events[-2:] == [
        ExchangeEnded(stream_id, False, 0, "the time for closing in order is over"),
        ConnectionEnded("the time for closing in order is over"),
    ]
    assert pair.client.of(ExchangeEnded)[0].complete is False  # type: ignore[union-attr]


def test_a_client_closes_in_order() -> None:
    pair = Pair()
    stream_id = pair.exchange(GET)
    pair.calling.shutdown(0)
    assert not pair.calling.can_request
    with pytest.raises(LocalProtocolError):
        pair.calling.request(GET)
    pair.run()
    pair.serving.respond(stream_id, ok(2), b"ok")
    pair.run()
    assert pair.client.events[-2:] == [ExchangeEnded(stream_id, True, 0), ConnectionEnded("")]
    assert pair.server.events[-1] == ConnectionEnded("")


def test_a_lost_connection_ends_every_exchange() -> None:
    pair = Pair()
    streams = [pair.exchange(GET), pair.exchange(put(None), b"x")]
    pair.client.connection.receive_eof(5)
    pair.client.drain()
    reason = "the connection was closed by the peer"
    assert pair.client.events == [
        ExchangeEnded(streams[0], False, 0, reason),
        ExchangeEnded(streams[1], False, 1, reason),
        ConnectionEnded(reason),
    ]


def test_a_request_that_a_leaving_server_did_not_see_can_be_sent_again() -> None:
    pair = Pair()
    pair.exchange(GET)
    unseen = pair.calling.request(GET)
    goaway = frame(7, 0, 0, (1).to_bytes(4, "big") + bytes(4))
    pair.calling.receive_data(goaway, 0)
    pair.client.drain()
    assert pair.client.of(ExchangeEnded) == [
        ExchangeEnded(unseen, False, 0, "the server is going away", unprocessed=True)
    ]


def test_more_requests_than_allowed_are_refused_one_by_one() -> None:
    raw = Raw(WireLimits(max_streams=2))
    sent = raw.send(b"".join(headers(i, request_block()) for i in (1, 3, 5)))
    assert [f for f in sent if f[0] == 3] == [(3, 0, 5, (7).to_bytes(4, "big"))]
    assert [e.stream_id for e in raw.end.of(RequestReceived)] == [1, 3]  # type: ignore[union-attr]
    pair = Pair(server_limits=WireLimits(max_streams=2))
    pair.run()
    pair.exchange(GET)
    pair.exchange(GET)
    assert not pair.calling.can_request, "our client does not try"


# Other protocols --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("octets", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"POST /kvsp/lookup HTTP/1.0\r\n"])
def test_a_client_of_http_1_is_answered_in_kind(octets: bytes) -> None:
    raw = Raw(greet=False)
    raw.end.connection.receive_data(octets, 0)
    said = raw.end.connection.data_to_send()
    assert said.startswith(b"HTTP/1.1 505 ")
    assert b"connection: close" in said
    assert raw.end.http.ended


@pytest.mark.parametrize(
    "octets", [b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", bytes(24)]
)
def test_a_client_of_something_else_is_refused_at_once(octets: bytes) -> None:
    raw = Raw(greet=False)
    sent = raw.send(octets)
    assert [f[0] for f in sent] == [4, 8, 7]
    assert raw.end.events == [ConnectionEnded("the client does not speak HTTP/2")]


def test_a_server_that_speaks_http_1_ends_the_connection() -> None:
    pair = Pair()
    pair.calling.receive_data(b"HTTP/1.1 400 Bad Request\r\n\r\n", 0)
    pair.client.drain()
    assert pair.client.events == [ConnectionEnded("the first frame is not SETTINGS")]


@pytest.mark.requirement("HT-9")
def test_only_fields_of_http_go_over_the_wire() -> None:
    from hpack import Decoder

    pair = Pair()
    pair.calling.request(put(3), b"abc")
    sent = read_frames(pair.calling.data_to_send()[24:])
    names = {n for f in sent if f[0] == 1 for n, _ in Decoder().decode(f[3])}
    assert names == {":method", ":scheme", ":authority", ":path", "content-type", "content-length"}
    assert BASE_URI
