"""What our client does with servers that send odd or wrong frames (RFC 9113, RFC 7541, section by section).

The client has sent GET on stream 1 and POST, whose body is not complete, on stream 3. Each case is what a
server sends after its SETTINGS, and what becomes of the connection and of stream 1.
"""

from __future__ import annotations

import struct

import attrs
import pytest

from kvsp_core.heads import Request
from kvsp_h2 import ClientConnection, ConnectionEnded, ContinueReceived, ExchangeEnded, GoingAway, WireLimits
from tests.adapters.h2.pair import BASE_URI, GET, End, block, frame, headers, put, read_frames, settings

PROTOCOL, FLOW, CLOSED, SIZE, CANCEL, COMPRESSION, CALM = 1, 3, 5, 6, 8, 9, 11
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)


@attrs.frozen
class Case:
    """Frames of a server; the code of GOAWAY or of a reset of stream 1, or None where the answer is taken."""

    name: str
    octets: bytes
    goaway: int | None = None
    reset: int | None = None
    status: int | None = None
    raw: bool = False


def head(*more: tuple[str, str], status: str = "200") -> bytes:
    return block((":status", status), *more)


def answer(stream_id: int = 1, *more: tuple[str, str], status: str = "200", end: bool = False) -> bytes:
    return headers(stream_id, head(*more, status=status), end=end)


def data(octets: bytes = b"x", *, end: bool = True, stream_id: int = 1) -> bytes:
    return frame(DATA, int(end), stream_id, octets)


FINE = answer(end=True)
UPDATE = frame(WINDOW, 0, 0, struct.pack(">L", 1))

CASES = [
    Case("HTTP/1.1 instead", b"HTTP/1.1 400 Bad Request\r\n\r\n", goaway=PROTOCOL, raw=True),
    Case("octets of something else", b"\x15\x03\x01\x00\x02\x02\x28\x00\x00\x00", goaway=PROTOCOL, raw=True),
    Case("a PING before SETTINGS", frame(PING, 0, 0, bytes(8)), goaway=PROTOCOL, raw=True),
    Case("an acknowledgement before SETTINGS", settings(ack=True), goaway=PROTOCOL, raw=True),
    Case(
        "a preface as if we were the server", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", goaway=PROTOCOL, raw=True
    ),
    Case("an answer", FINE, status=200),
    Case("an answer with a body", answer() + data(), status=200),
    Case("an answer with trailers", answer() + data(end=False) + headers(1, block(("x", "y"))), status=200),
    Case(
        "an answer in two frames",
        frame(HEADERS, 1, 1, head()[:1]) + frame(CONTINUATION, 4, 1, head()[1:]),
        status=200,
    ),
    Case("an unknown frame before the answer", frame(0xEE, 9, 1, b"??") + FINE, status=200),
    Case("an unknown setting", settings((0x77, 1)) + FINE, status=200),
    Case("a status nobody knows", answer(status="299", end=True), status=299),
    Case("a status below 200 first", answer(status="103") + FINE, status=200),
    Case("CONTINUE that nobody asked for", answer(status="100") + FINE, status=200),
    Case("a status below 200 that ends", answer(status="103", end=True), reset=PROTOCOL),
    Case("the status 101", answer(status="101"), reset=PROTOCOL),
    Case("no status", headers(1, block(("a", "b"))), reset=PROTOCOL),
    Case("a status of two digits", answer(status="20"), reset=PROTOCOL),
    Case("a status that is no number", answer(status="2x0"), reset=PROTOCOL),
    Case("a status of 600 and more", answer(status="999", end=True), status=999),
    Case("a pseudo-field of requests", answer(1, (":path", "/")), reset=PROTOCOL),
    Case("two statuses", answer(1, (":status", "200")), reset=PROTOCOL),
    Case("a pseudo-field after others", headers(1, block(("a", "b"), (":status", "200"))), reset=PROTOCOL),
    Case("a name in capitals", answer(1, ("X", "y")), reset=PROTOCOL),
    Case("a value with a line end", answer(1, ("x", "y\r\nz")), reset=PROTOCOL),
    Case("connection", answer(1, ("connection", "close")), reset=PROTOCOL),
    Case("transfer-encoding", answer(1, ("transfer-encoding", "chunked")), reset=PROTOCOL),
    Case("a content-length that is none", answer(1, ("content-length", "x")), reset=PROTOCOL),
    Case(
        "content-lengths that differ",
        answer(1, ("content-length", "1"), ("content-length", "2")),
        reset=PROTOCOL,
    ),
    Case("less than the content-length", answer(1, ("content-length", "2")) + data(), reset=PROTOCOL),
    Case("more than the content-length", answer(1, ("content-length", "2")) + data(b"abc"), reset=PROTOCOL),
    Case("no body where one was said", answer(1, ("content-length", "2"), end=True), reset=PROTOCOL),
    Case("a body after 204", answer(status="204") + data(), reset=PROTOCOL),
    Case("trailers that do not end", answer() + headers(1, block(("x", "y")), end=False), reset=PROTOCOL),
    Case("trailers with a status", answer() + answer(end=True), reset=PROTOCOL),
    Case("a header list too large", answer(1, ("x", "y" * 20_000), end=True), reset=PROTOCOL),
    Case("DATA before the head", data(), goaway=PROTOCOL),
    Case("DATA on stream 0", frame(DATA, 0, 0, b"x"), goaway=PROTOCOL),
    Case("DATA on a stream we did not open", data(stream_id=5), goaway=PROTOCOL),
    Case("DATA on a stream of the server", data(stream_id=2), goaway=PROTOCOL),
    Case("padding too long", answer() + frame(DATA, 9, 1, b"\x05abcd"), goaway=PROTOCOL),
    Case("padding as it may be", answer() + frame(DATA, 9, 1, b"\x04abcd"), status=200),
    Case("HEADERS on a stream we did not open", answer(5), goaway=PROTOCOL),
    Case("HEADERS on a stream of the server", answer(2), goaway=PROTOCOL),
    Case(
        "PUSH_PROMISE", frame(PUSH, 4, 1, struct.pack(">L", 2) + block((":method", "GET"))), goaway=PROTOCOL
    ),
    Case("ENABLE_PUSH of 1 from a server", settings((2, 1)), goaway=PROTOCOL),
    Case("ENABLE_PUSH of 0 from a server", settings((2, 0)) + FINE, status=200),
    Case("INITIAL_WINDOW_SIZE too large", settings((4, 2**31)), goaway=FLOW),
    Case("MAX_FRAME_SIZE too small", settings((5, 100)), goaway=PROTOCOL),
    Case("SETTINGS of 5 octets", frame(SETTINGS, 0, 0, bytes(5)), goaway=SIZE),
    Case("an acknowledgement with octets", frame(SETTINGS, 1, 0, bytes(6)), goaway=SIZE),
    Case("an increment of 0", frame(WINDOW, 0, 0, bytes(4)), goaway=PROTOCOL),
    Case("a window that overflows", frame(WINDOW, 0, 0, struct.pack(">L", 2**31 - 1)), goaway=FLOW),
    Case(
        "a window of the stream that overflows", frame(WINDOW, 0, 1, struct.pack(">L", 2**31 - 1)), reset=FLOW
    ),
    Case("WINDOW_UPDATE on an idle stream", frame(WINDOW, 0, 5, struct.pack(">L", 1)), goaway=PROTOCOL),
    Case("RST_STREAM on an idle stream", frame(RST, 0, 5, bytes(4)), goaway=PROTOCOL),
    Case("PING of 7 octets", frame(PING, 0, 0, bytes(7)), goaway=SIZE),
    Case("a frame larger than allowed", frame(DATA, 0, 1, b"", length=(1 << 20) + 1), goaway=SIZE),
    Case("a block that was interrupted", frame(HEADERS, 1, 1, head()) + UPDATE, goaway=PROTOCOL),
    Case("CONTINUATION alone", frame(CONTINUATION, 4, 1, head()), goaway=PROTOCOL),
    Case("CONTINUATION without end", frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1) * 99, goaway=CALM),
    Case("a block that cannot be decoded", headers(1, b"\xff\xff\xff"), goaway=COMPRESSION),
    Case("an index beyond the tables", headers(1, b"\x88\xbe"), goaway=COMPRESSION),
    Case("a table size above the setting", headers(1, b"\x3f\xe2\x1f\x88"), goaway=COMPRESSION),
    Case("a table size after fields", headers(1, b"\x88\x20"), goaway=COMPRESSION),
    Case("HEADERS after the end", FINE + answer(end=True), goaway=CLOSED, status=200),
    Case("DATA after the end", FINE + data(), status=200, reset=CLOSED),
    Case("a second answer", answer() + answer(), reset=PROTOCOL),
    Case("a status below 200 after the answer", answer() + answer(status="103"), reset=PROTOCOL),
    Case("trailers without a body", answer() + headers(1, block(("x", "y"))), status=200),
    Case("an empty DATA that ends", answer() + data(b""), status=200),
    Case("a body after 304", answer(status="304") + data(), reset=PROTOCOL),
    Case("no body after 204", answer(status="204", end=True), status=204),
    Case("a name that is empty", answer(1, ("", "y")), reset=PROTOCOL),
    Case("te in an answer", answer(1, ("te", "gzip")), reset=PROTOCOL),
    Case("trailers with connection", answer() + headers(1, block(("connection", "x"))), reset=PROTOCOL),
    Case("a padded frame without a pad length", answer() + frame(DATA, 9, 1), goaway=SIZE),
    Case("padding of the whole frame", answer() + frame(DATA, 9, 1, b"\x00"), status=200),
    Case("ALTSVC and ORIGIN", frame(10, 0, 0, b"\x00\x00h3") + frame(12, 0, 0) + FINE, status=200),
    Case("PRIORITY from a server", frame(PRIORITY, 0, 1, bytes(5)) + FINE, status=200),
    Case("PUSH_PROMISE on stream 0", frame(PUSH, 4, 0, struct.pack(">L", 2) + head()), goaway=PROTOCOL),
    Case("a window that shrinks under a body", settings((4, 0)) + FINE, status=200),
    Case("MAX_CONCURRENT_STREAMS of 0", settings((3, 0)) + FINE, status=200),
    Case("HEADER_TABLE_SIZE of 0 and back", settings((1, 0)) + settings((1, 4096)) + FINE, status=200),
    Case("WINDOW_UPDATE after the end", FINE + frame(WINDOW, 0, 1, struct.pack(">L", 9)), status=200),
    Case("RST_STREAM after the end", FINE + frame(RST, 0, 1, bytes(4)), status=200),
]


def greeted() -> End:
    end = End(ClientConnection(BASE_URI, 0))
    assert isinstance(end.http, ClientConnection)
    end.http.request(GET)
    end.http.request(put(None), b"x", end=False)
    end.connection.data_to_send()
    return end


@pytest.mark.requirement("HT-3")
@pytest.mark.parametrize("sent", CASES, ids=lambda c: c.name)
def test_a_server_that_is_odd_or_wrong(sent: Case) -> None:
    end = greeted()
    end.connection.receive_data((b"" if sent.raw else settings()) + sent.octets, 0)
    end.drain()
    said = read_frames(end.connection.data_to_send())
    goaway = [int.from_bytes(f[3][4:8], "big") for f in said if f[0] == GOAWAY]
    resets = [int.from_bytes(f[3], "big") for f in said if f[0] == RST and f[2] == 1]
    assert goaway == ([] if sent.goaway is None else [sent.goaway])
    assert resets == ([] if sent.reset is None else [sent.reset])
    over = {e.stream_id: e.complete for e in end.of(ExchangeEnded)}  # type: ignore[union-attr]
    assert over.get(1) is (sent.status is not None)
    assert (3 in over) is (sent.goaway is not None), "the other exchange goes on"
    assert bool(end.of(ConnectionEnded)) is (sent.goaway is not None)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 50
    assert len({c.name for c in CASES}) == len(CASES)


def test_goaway_splits_what_was_seen_from_what_can_be_sent_again() -> None:
    end = greeted()
    end.connection.receive_data(settings() + frame(GOAWAY, 0, 0, struct.pack(">LL", 1, 11)), 0)
    end.drain()
    assert end.events == [
        GoingAway(),
        ExchangeEnded(3, False, 1, "the peer ended the connection: ENHANCE_YOUR_CALM", unprocessed=True),
    ]
    end.connection.receive_data(FINE, 0)
    end.drain()
    assert end.of(ExchangeEnded)[1] == ExchangeEnded(1, True, 0)
    assert end.events[-1] == ConnectionEnded("the peer ended the connection: ENHANCE_YOUR_CALM")


def test_a_refused_request_can_be_sent_again() -> None:
    end = greeted()
    end.connection.receive_data(settings() + frame(RST, 0, 1, struct.pack(">L", 7)), 0)
    end.drain()
    assert end.events == [ExchangeEnded(1, False, 0, "reset by the peer: REFUSED_STREAM", unprocessed=True)]


def test_continue_is_told() -> None:
    end = greeted()
    end.connection.receive_data(settings() + answer(3, status="100"), 0)
    end.drain()
    assert end.events == [ContinueReceived(3)]


def test_a_window_of_ours_is_kept() -> None:
    narrow = WireLimits(stream_window_bytes=65_535, connection_window_bytes=65_535)
    end = End(ClientConnection(BASE_URI, 0, narrow))
    end.slow = True
    end.http.request(GET)  # type: ignore[union-attr]
    end.connection.receive_data(settings() + answer(), 0)
    for _ in range(3):
        end.connection.receive_data(data(bytes(16_384), end=False), 0)
    end.connection.receive_data(data(bytes(16_383), end=False), 0)
    end.drain()
    assert not end.of(ConnectionEnded)
    end.connection.receive_data(data(b"x", end=False), 0)
    end.drain()
    assert end.events[-1] == ConnectionEnded("more octets than the window of the connection allows")


@pytest.mark.requirement("HT-3")
def test_answers_to_many_requests_that_were_given_up_are_passed_over() -> None:
    """However many they are, they are no fault of the server, and what it sends counts for its window."""
    end = End(ClientConnection(BASE_URI, 0))
    http = end.http
    assert isinstance(http, ClientConnection)
    http.receive_data(settings((3, 1000)), 0)
    streams = [http.request(GET) for _ in range(900)]
    for stream_id in streams[:-1]:
        http.reset(stream_id)
    http.data_to_send()
    for stream_id in streams:
        http.receive_data(answer(stream_id) + data(bytes(16_384), stream_id=stream_id), 0)
    end.drain()
    assert [e.stream_id for e in end.of(ExchangeEnded) if e.complete] == streams[-1:]  # type: ignore[union-attr]
    assert not end.of(ConnectionEnded)


def test_an_answer_before_the_request_has_ended_ends_it() -> None:
    end = greeted()
    end.connection.receive_data(settings() + answer(3, status="413", end=True), 0)
    end.drain()
    assert end.of(ExchangeEnded) == [ExchangeEnded(3, True, 1)]
    resets = [f[2:] for f in read_frames(end.connection.data_to_send()) if f[0] == RST]
    assert resets == [(3, bytes(4))], "without an error"
    end.connection.receive_data(FINE, 0)
    end.drain()
    assert len(end.of(ExchangeEnded)) == 2


def test_a_body_after_head_is_malformed() -> None:
    for answered, complete in (
        (answer(1, ("content-length", "9"), end=True), True),
        (answer() + data(), False),
    ):
        end = End(ClientConnection(BASE_URI, 0))
        assert isinstance(end.http, ClientConnection)
        end.http.request(Request(method="HEAD", path="blocks/b1"))
        end.connection.receive_data(settings() + answered, 0)
        end.drain()
        assert [e.complete for e in end.of(ExchangeEnded)] == [complete]  # type: ignore[union-attr]


def test_goaway_whose_last_stream_goes_up_brings_nothing_back() -> None:
    end = greeted()
    leaving = b"".join(frame(GOAWAY, 0, 0, struct.pack(">LL", last, 0)) for last in (1, 3))
    end.connection.receive_data(settings() + leaving, 0)
    end.drain()
    assert [(e.stream_id, e.unprocessed) for e in end.of(ExchangeEnded)] == [(3, True)]  # type: ignore[union-attr]
    assert len(end.of(GoingAway)) == 1
    end.connection.receive_data(answer(3, end=True) + FINE, 0)
    end.drain()
    assert [e.stream_id for e in end.of(ExchangeEnded)] == [3, 1]  # type: ignore[union-attr]
