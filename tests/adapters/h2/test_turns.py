"""What one peer can set off at a time is bounded, and the rest waits until others have had their turn."""

from __future__ import annotations

import pytest

from kvsp_h2 import (
    BodyEnded,
    ConnectionEnded,
    ExchangeEnded,
    RequestReceived,
    WireLimits,
    secure_client,
    secure_server,
)
from kvsp_h2.frames import PREFACE
from tests.adapters.certificates import SERVER_URI, Certificates
from tests.adapters.h2.pair import GET, End, Pair, Raw, frame, headers, ok, put, request_block, settings

RST = 3
WIDE = WireLimits(stream_window_bytes=64 << 20, connection_window_bytes=64 << 20)


def joined(certificates: Certificates, limits: WireLimits, client_limits: WireLimits = WIDE) -> Pair:
    server, client = (certificates.credentials(c) for c in (certificates.server, certificates.client))
    pair = Pair(
        server=secure_server(server, SERVER_URI, 0, limits=limits),
        client=secure_client(client, SERVER_URI, 0, limits=client_limits),
    )
    pair.run()
    pair.later(1)
    return pair


def all_of(end: End) -> bytes:
    """Return all that an end has to send."""
    octets = b""
    while more := end.connection.data_to_send():
        octets += more
    return octets


def turns(pair: Pair, octets: bytes) -> list[int]:
    """Give the server octets; return how many events there were in each turn."""
    end, counts = pair.server, []
    before = len(end.events)
    end.connection.receive_data(octets, pair.now_ms)
    end.drain()
    counts.append(len(end.events) - before)
    while end.connection.next_deadline_ms() == 0:
        before = len(end.events)
        end.connection.handle_timer(pair.now_ms)
        end.drain()
        counts.append(len(end.events) - before)
    return counts


# Requests that are given up ---------------------------------------------------------------------------------


@pytest.mark.requirement("SE-3")
def test_a_request_that_is_given_up_before_it_is_told_of_is_never_told() -> None:
    raw = Raw()
    octets = b""
    for stream_id in range(1, 201, 4):
        octets += headers(stream_id, request_block()) + frame(RST, 0, stream_id, bytes(4))
        octets += headers(stream_id + 2, request_block(method="PUT"), end=False)
        octets += frame(0, 1, stream_id + 2, b"body") + frame(RST, 0, stream_id + 2, bytes(4))
    octets += headers(203, request_block())
    raw.send(octets)
    assert [type(event) for event in raw.end.events] == [RequestReceived]
    assert raw.end.events[0].stream_id == 203  # type: ignore[union-attr]
    assert not raw.end.bodies
    raw.send(frame(RST, 0, 203, bytes(4)))
    assert isinstance(raw.end.events[-1], ExchangeEnded), "what was told of is told to its end"


@pytest.mark.requirement("SE-3")
def test_what_is_never_told_gives_its_window_back() -> None:
    raw = Raw(WireLimits(stream_window_bytes=65_535, connection_window_bytes=65_535))
    for stream_id in range(1, 101, 2):
        sent = headers(stream_id, request_block(method="PUT"), end=False)
        raw.send(sent + frame(0, 0, stream_id, bytes(10_000)) + frame(RST, 0, stream_id, bytes(4)))
    assert not raw.end.http.ended
    assert raw.end.events == []


def test_requests_that_are_given_up_still_count_as_such() -> None:
    raw = Raw(WireLimits(resets_burst=50, resets_per_s=1))
    pairs = [headers(i, request_block()) + frame(RST, 0, i, bytes(4)) for i in range(1, 201, 2)]
    raw.send(b"".join(pairs))
    assert raw.refused() == "too many exchanges given up"


# Turns ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("SE-3")
@pytest.mark.parametrize("frames", [1, 7, 64])
def test_a_turn_reads_so_many_frames(certificates: Certificates, frames: int) -> None:
    pair = joined(certificates, WireLimits(turn_frames=frames))
    asked = [pair.calling.request(GET) for _ in range(100)]
    counts = turns(pair, all_of(pair.client))
    assert max(counts) <= frames
    told = [event.stream_id for event in pair.server.of(RequestReceived)]  # type: ignore[union-attr]
    assert told == asked, "in their order, and none is lost"
    for stream_id in asked:
        pair.serving.respond(stream_id, ok())
    pair.run()
    pair.later(1)
    assert len(pair.client.of(ExchangeEnded)) == 100


@pytest.mark.requirement("SE-3")
def test_nothing_more_is_to_be_received_while_input_waits(certificates: Certificates) -> None:
    pair = joined(certificates, WireLimits(turn_frames=4))
    server = pair.server.connection
    asked = [pair.calling.request(GET) for _ in range(10)]
    server.receive_data(all_of(pair.client), 0)
    seen = []
    for _ in range(4):
        pair.server.drain()
        seen.append(server.input_waits)  # type: ignore[union-attr]
        server.handle_timer(0)
    assert seen == [True, True, False, False]
    assert len(pair.server.of(RequestReceived)) == len(asked)


@pytest.mark.requirement("SE-3")
def test_a_body_in_tiny_frames_is_read_in_turns(certificates: Certificates) -> None:
    pair = joined(certificates, WireLimits())
    stream_id = pair.calling.request(put(1000), end=False)
    octets = all_of(pair.client)
    pair.client.connection._tls.write(  # type: ignore[union-attr]
        b"".join(frame(0, n == 999, stream_id, bytes([n % 256])) for n in range(1000))
    )
    pieces: list[int] = []
    pair.server.on_event = lambda event: pieces.append(1)
    pair.server.connection.receive_data(octets + pair.client.connection._tls.data_to_send(), 0)  # type: ignore[union-attr]
    pair.server.drain()
    assert sum(pieces) <= 33
    pair.later(1)
    assert pair.server.bodies[stream_id] == bytes(n % 256 for n in range(1000))
    assert pair.server.of(BodyEnded)


def test_large_frames_take_one_turn(certificates: Certificates) -> None:
    pair = joined(certificates, WIDE)
    stream_id = pair.calling.request(put(3 << 20), bytes(3 << 20))
    pair.server.connection.receive_data(all_of(pair.client), 0)
    pair.server.drain()
    assert len(pair.server.bodies[stream_id]) == 3 << 20
    assert pair.server.connection.next_deadline_ms() != 0


@pytest.mark.requirement("SE-3")
def test_a_turn_sends_so_many_octets(certificates: Certificates) -> None:
    pair = joined(certificates, WireLimits(turn_bytes=1 << 20))
    stream_id = pair.exchange(GET)
    pair.serving.respond(stream_id, ok(5 << 20), bytes(5 << 20))
    server = pair.server.connection
    sizes = []
    for _ in range(10):
        octets = all_of(pair.server)
        sizes.append(len(octets))
        pair.client.connection.receive_data(octets, 0)
        pair.client.drain()
        if server.next_deadline_ms() != 0:
            break
        server.handle_timer(0)
        pair.server.drain()
    assert max(sizes) < (1 << 20) + (300 << 10)
    assert len(sizes) >= 5
    assert pair.client.bodies[stream_id] == bytes(5 << 20)


def test_what_was_sent_before_a_farewell_is_told_before_it(certificates: Certificates) -> None:
    pair = joined(certificates, WireLimits(turn_frames=3))
    for _ in range(10):
        pair.calling.request(GET)
    octets = all_of(pair.client)
    pair.client.connection._tls.close()  # type: ignore[union-attr]
    turns(pair, octets + pair.client.connection._tls.data_to_send())  # type: ignore[union-attr]
    kinds = [type(event) for event in pair.server.events]
    assert kinds.count(RequestReceived) == 10
    assert kinds[-1] is ConnectionEnded


def test_a_connection_that_ends_while_input_waits_has_nothing_to_go_on_with(
    certificates: Certificates,
) -> None:
    pair = joined(certificates, WireLimits(turn_frames=3))
    for _ in range(10):
        pair.calling.request(GET)
    server = pair.server.connection
    server.receive_data(all_of(pair.client), 0)
    pair.server.drain()
    server.receive_eof(0)
    pair.server.drain()
    assert server.ended
    assert not server.input_waits  # type: ignore[union-attr]
    assert server.next_deadline_ms() != 0


@pytest.mark.parametrize("step_by_step", [False, True])
def test_answers_that_came_before_the_end_are_told_before_it(
    certificates: Certificates, step_by_step: bool
) -> None:
    pair = joined(certificates, WIDE, WireLimits(turn_frames=3))
    for _ in range(25):
        pair.calling.request(GET)
    pair.server.connection.receive_data(all_of(pair.client), 0)
    pair.server.drain()
    for asked in pair.server.of(RequestReceived):
        pair.serving.respond(asked.stream_id, ok(4), b"body")  # type: ignore[attr-defined]
    octets = all_of(pair.server)
    pair.calling.step_by_step = step_by_step  # type: ignore[misc]
    pair.client.connection.receive_data(octets, 0)
    pair.client.drain()
    assert pair.client.connection.input_waits  # type: ignore[union-attr]
    pair.client.connection.receive_eof(0)
    pair.client.drain()
    ends = pair.client.of(ExchangeEnded)
    assert [end.complete for end in ends] == [True] * 25  # type: ignore[attr-defined]
    assert pair.client.of(ConnectionEnded)


def test_what_ends_out_of_its_turn_leaves_the_memory_that_is_shared(certificates: Certificates) -> None:
    """Another connection's events may lie in it that nobody has looked at yet."""
    shared = memoryview(bytearray(b"x" * (256 << 10)))
    server, client = (certificates.credentials(c) for c in (certificates.server, certificates.client))
    pair = Pair(
        server=secure_server(server, SERVER_URI, 0, limits=WireLimits(turn_frames=3), scratch=shared),
        client=secure_client(client, SERVER_URI, 0),
    )
    pair.run()
    for _ in range(10):
        pair.calling.request(GET)
    pair.server.connection.receive_data(all_of(pair.client), 0)
    shared[:] = b"x" * len(shared)
    pair.serving.abort("for a test", 0)
    pair.server.drain()
    assert bytes(shared) == b"x" * len(shared)
    assert pair.server.of(ConnectionEnded)


def test_the_last_words_of_a_connection_wait_for_no_turn(certificates: Certificates) -> None:
    pair = joined(certificates, WireLimits(turn_bytes=1 << 18))
    stream_id = pair.exchange(GET)
    pair.serving.respond(stream_id, ok(5 << 20), bytes(5 << 20))
    first = all_of(pair.server)
    pair.server.connection.http.abort("for a test", 0)  # type: ignore[union-attr]
    pair.client.connection.receive_data(first + all_of(pair.server), 0)
    pair.client.drain()
    assert pair.client.of(ConnectionEnded), "the farewell was sent"


def test_a_preface_and_frames_in_one_piece_are_all_taken() -> None:
    raw = Raw(greet=False)
    octets = PREFACE + settings() + headers(1, request_block())
    assert raw.end.connection.receive_data(octets, 0) == len(octets)
