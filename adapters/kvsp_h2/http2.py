"""HTTP/2 without I/O: the server's and the client's end of a connection (RFC 9113; requirements HT-3, HT-9).

Octets and time go in, events and octets come out; there is no TLS here, so that a simulator and fuzzers can
drive it. One connection belongs to one role: targets outside its base URI are answered here, as are heads
that cannot be read. No body is compressed (decision W23).
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar, Final, NamedTuple
from urllib.parse import urlsplit

import attrs
from h2.errors import ErrorCodes

from kvsp_core.answers import problem_response
from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.heads import (
    Request,
    Response,
    request_fields,
    request_from_fields,
    response_from_fields,
    traceparent_of,
)
from kvsp_core.problems import BAD_REQUEST, UNKNOWN_RESOURCE, Problem, blank
from kvsp_h2.connection import DRAIN_PING, HIGHEST_STREAM, Connection
from kvsp_h2.events import (
    BodyEnded,
    ConnectionEnded,
    ContinueReceived,
    DataPlaced,
    DataReceived,
    Event,
    ExchangeEnded,
    GoingAway,
    OutputReady,
    RequestReceived,
    ResponseReceived,
)
from kvsp_h2.exchange import Exchange
from kvsp_h2.fields import HeaderList, Malformed, request_head, response_head
from kvsp_h2.frames import PREFACE, Buffer, Fault, goaway, header_frames
from kvsp_h2.heads import ReceivedHead
from kvsp_h2.limits import WireLimits

__all__ = [
    "WANTS_HTTP2",
    "BodyEnded",
    "ClientConnection",
    "ConnectionEnded",
    "ContinueReceived",
    "DataPlaced",
    "DataReceived",
    "Event",
    "ExchangeEnded",
    "GoingAway",
    "OutputReady",
    "RequestReceived",
    "ResponseReceived",
    "ServerConnection",
    "WireLimits",
    "http1_refusal",
]

_DRAIN_PING_MS: Final = 1000
"""Time for a client to learn that a server is going away, before it is held to it."""
_DEFAULT_LIMITS: Final = WireLimits()
_ASSUMED_STREAMS: Final = 100
"""Requests at a time until the server has said how many it allows."""
_BODILESS: Final = frozenset((204, 304))


def http1_refusal(status: str, text: str) -> bytes:
    """Return an HTTP/1.1 answer for a peer that speaks nothing newer: status line and one line of text."""
    return (
        f"HTTP/1.1 {status}\r\nconnection: close\r\ncache-control: no-store\r\ncontent-type: text/plain\r\n"
        f"content-length: {len(text) + 2}\r\n\r\n{text}\r\n"
    ).encode("ascii")


WANTS_HTTP2: Final = http1_refusal("505 HTTP Version Not Supported", "This service speaks HTTP/2.")


class _Asked(NamedTuple):
    """What the head of a request means: the request and what it belongs to, or the problem with it that needs
    no role."""

    ended: bool
    method: str
    expects_continue: bool
    request: Request | None
    problem: Problem
    traceparent: str | None = None


_NO_PROBLEM: Final = Problem(BAD_REQUEST)


class ServerConnection(Connection):
    """The server's end.

    `base_uri` is that of the role behind it: the path of a `Request` is what follows it.
    """

    _CLIENT: ClassVar[bool] = False

    def __init__(self, base_uri: str, now_ms: int, limits: WireLimits = _DEFAULT_LIMITS) -> None:
        super().__init__(now_ms, limits)
        self._base_path = urlsplit(base_uri).path
        self._preface = PREFACE
        # What we say first waits for the client's preface, or for anything else there is to say, so that who
        # speaks something else gets an answer in kind; under TLS, where both have agreed on HTTP/2, `greet`
        # says it at once.
        self._greeting = bytes(self._control)
        self._control.clear()

    def greet(self) -> None:
        """Say what a server says first, without waiting for the client."""
        self._control += self._greeting
        self._greeting = b""

    def accept_body(self, stream_id: int) -> None:
        """Ask for the body of a request whose client waits for that (``Expect: 100-continue``)."""
        exchange = self._exchanges.get(stream_id)
        if exchange is not None and exchange.wants_continue and not exchange.head_sent:
            exchange.wants_continue = False
            block = self._encoder.encode([(b":status", b"100")])
            self._control += header_frames(stream_id, block, self._sender.largest, end=False)

    def respond(self, stream_id: int, response: Response, body: Buffer = b"", *, end: bool = True) -> bool:
        """Answer a request; where `end` is false, more of the body follows by `send_data`.

        A body that the client is still sending is not waited for: its octets are dropped, and after a while
        the client is told to stop. Returns whether there is room for more. Raises `LocalProtocolError`
        where it was answered.
        """
        exchange = self._exchanges.get(stream_id)
        if exchange is None:
            return True
        if exchange.head_sent:
            raise LocalProtocolError("a request is answered once")
        if response.status < 200:
            raise LocalProtocolError("an answer has a status of 200 or more")
        bodiless = exchange.method == "HEAD" or response.status in _BODILESS
        ends = bodiless or (end and not len(body))
        self._send_head(exchange, self._encoder.encode_response(response), end=ends)
        if ends:
            self._finish_answer(exchange)
            return True
        return self.send_data(stream_id, body, end=end)

    def _receive_reset(self, stream_id: int, code: int) -> None:
        exchange = self._exchanges.get(stream_id)
        if exchange is not None and self._take_back(stream_id):
            exchange.untold = True
        super()._receive_reset(stream_id, code)

    def _take_back(self, stream_id: int) -> bool:
        """Tell nothing of a request that is given up before it was told of; return whether it is one."""
        about = next((e for e in self._events if getattr(e, "stream_id", 0) == stream_id), None)
        if not isinstance(about, RequestReceived):
            return False
        self._events = deque(e for e in self._events if getattr(e, "stream_id", 0) != stream_id)
        return True

    def _read(self, view: memoryview) -> int:
        size = view.nbytes
        if self._preface:
            view = self._read_preface(view)
        return size - view.nbytes + super()._read(view)

    def _read_preface(self, view: memoryview) -> memoryview:
        """Take the client's preface (RFC 9113, 3.4), or answer who speaks something else."""
        count = min(len(self._preface), view.nbytes)
        if view[:count] != self._preface[:count]:
            text = PREFACE[: -len(self._preface)] + bytes(view[:64])
            if text[:3] != b"PRI" and text[:1].isalpha():
                self._stopped = True
                self._greeting = b""
                self._control += WANTS_HTTP2
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "the client does not speak HTTP/2")
        self._preface = self._preface[count:]
        if not self._preface:
            self._h2.receive_data(PREFACE)
            self.greet()
        return view[count:]

    def _receive_first_block(
        self, stream_id: int, head: ReceivedHead, trace: bytes | None, ends: bool
    ) -> None:
        if stream_id % 2 == 0 or stream_id <= self._opened_there:
            super()._receive_first_block(stream_id, head, trace, ends)
            return
        self._opened_there = stream_id
        exchange = self._open(stream_id)
        exchange.head_received = True
        exchange.body_ended = ends
        if len(self._exchanges) > self._limits.max_streams or stream_id > self._last_accepted:
            self._turn_away(exchange, ErrorCodes.REFUSED_STREAM)
            return
        asked = head.meaning
        if not isinstance(asked, _Asked) or asked.ended is not ends:
            try:
                asked = head.meaning = self._understand(head, ends)
            except Malformed:
                self._turn_away(exchange, ErrorCodes.PROTOCOL_ERROR)
                return
        exchange.method = asked.method
        if asked.request is None:
            self._refuse(exchange, *problem_response(asked.problem))
            return
        exchange.expected = asked.request.content_length
        exchange.wants_continue = asked.expects_continue and not ends
        belongs_to = asked.traceparent if trace is None else trace.decode("ascii")
        self._events.append(RequestReceived(stream_id, asked.request, ends, belongs_to))

    def _understand(self, received: ReceivedHead, ended: bool) -> _Asked:
        """Return what a head asks for, or the problem with it that needs no role. Raises `Malformed`."""
        head = request_head(received.headers)
        if ended and any(n == b"content-length" and v.strip(b"0") for n, v in head.fields):
            raise Malformed("its body is missing")

        def refused(problem: Problem) -> _Asked:
            return _Asked(ended, head.method, head.expects_continue, None, problem)

        if received.size_bytes > self._limits.max_header_list_bytes:
            return refused(Problem(blank(431), "the header list is larger than we allow"))
        path, _, query = head.target.partition("?")
        if not path.startswith(self._base_path):
            return refused(Problem(UNKNOWN_RESOURCE, "this service has no resource of that path"))
        below = path[len(self._base_path) :]
        try:
            request = request_from_fields(head.method, below, query, head.fields, has_body=not ended)
        except RemoteProtocolError as error:
            return refused(Problem(BAD_REQUEST, str(error)))
        trace = traceparent_of(head.fields)
        return _Asked(ended, head.method, head.expects_continue, request, _NO_PROBLEM, trace)

    def _turn_away(self, exchange: Exchange, code: ErrorCodes) -> None:
        """Reset a stream that nobody was told of."""
        self._count_reset()
        self._reset_stream(exchange, code)
        self._forget(exchange)

    def _refuse(self, exchange: Exchange, response: Response, body: bytes) -> None:
        """Answer a request that nobody was told of."""
        exchange.untold = True
        self.respond(exchange.stream_id, response, body)

    def _output_ended(self, exchange: Exchange) -> None:
        super()._output_ended(exchange)
        self._finish_answer(exchange)

    def _finish_answer(self, exchange: Exchange) -> None:
        """End an exchange that is answered, even where its client is still sending."""
        if not exchange.body_ended:  # some drop their answer when they are cut off at once
            exchange.was_reset = True
            self._lingering.add(exchange.stream_id, self._now_ms + self._limits.linger_ms)
            self._cut_off(self._now_ms)
        self._finish(exchange, complete=True)

    def _begin_drain(self) -> None:
        """Announce the end first, so that requests under way to us are not lost (RFC 9113, 6.8)."""
        if not self._exchanges:
            self._stop_accepting()
            return
        self._control += goaway(HIGHEST_STREAM, ErrorCodes.NO_ERROR)
        self._h2.ping(DRAIN_PING)
        self._goaway_due_ms = self._now_ms + _DRAIN_PING_MS
        self._collect()


class ClientConnection(Connection):
    """The client's end, to the role at `base_uri`: the path of a `Request` is below that."""

    _CLIENT: ClassVar[bool] = True

    def __init__(self, base_uri: str, now_ms: int, limits: WireLimits = _DEFAULT_LIMITS) -> None:
        super().__init__(now_ms, limits)
        parts = urlsplit(base_uri)
        self._authority = parts.netloc.encode("ascii")
        self._base_path = parts.path

    @property
    def can_request(self) -> bool:
        """Whether one more request may be sent now."""
        if self.spent:
            return False
        allowed = self._h2.remote_settings.max_concurrent_streams if self._settled else _ASSUMED_STREAMS
        return len(self._exchanges) < allowed

    @property
    def settled(self) -> bool:
        """Whether the server has said how many requests it takes at a time; until then that is assumed."""
        return self._settled

    @property
    def spent(self) -> bool:
        """Whether no further request can be sent, now or later; those under way may go on."""
        out_of_streams = self._opened_here >= HIGHEST_STREAM - 2
        return self._ended or self._peer_left or self._stopped or out_of_streams

    def request(
        self,
        request: Request,
        body: Buffer = b"",
        *,
        end: bool = True,
        expect_continue: bool = False,
        traceparent: str | None = None,
    ) -> int:
        """Send a request and return its stream; where `end` is false, more of the body follows by
        `send_data`.

        With `expect_continue` the server is asked to say by `ContinueReceived` that it wants the body;
        `traceparent` says what the request belongs to, as `is_traceparent` has it. Raises
        `LocalProtocolError` where `can_request` is false.
        """
        if not self.can_request:
            raise LocalProtocolError("no further request can be sent on this connection now")
        path = self._base_path + request.path + ("?" + request.query if request.query else "")
        headers: HeaderList = [
            (b":method", request.method.encode("ascii")),
            (b":scheme", b"https"),
            (b":authority", self._authority),
            (b":path", path.encode("ascii")),
            *request_fields(request),
        ]
        if expect_continue:
            headers.append((b"expect", b"100-continue"))
        ends = end and not len(body)
        stream_id = self._opened_here = self._opened_here + 2 if self._opened_here else 1
        exchange = self._open(stream_id)
        exchange.method = request.method
        self._life.awaits = True
        self._send_head(exchange, self._encoder.encode(headers, traceparent), end=ends)
        if not ends:
            self.send_data(stream_id, body, end=end)
        return stream_id

    def _receive_response_block(self, exchange: Exchange, head: ReceivedHead, ends: bool) -> None:
        try:
            self._receive_response(exchange, head, ends)
        except (Malformed, RemoteProtocolError) as error:
            self._break_off(exchange, ErrorCodes.PROTOCOL_ERROR, f"a malformed response: {error}")

    def _receive_response(self, exchange: Exchange, head: ReceivedHead, ended: bool) -> None:
        status, fields = response_head(head.headers)
        if head.size_bytes > self._limits.max_header_list_bytes:
            raise Malformed("its header list is larger than we allow")
        if status < 200:
            if status == 101 or ended:
                raise Malformed("HTTP/2 has no status 101, and no response ends with a status below 200")
            self._count_chatter()
            if status == 100:
                self._events.append(ContinueReceived(exchange.stream_id))
            return
        response = response_from_fields(status, fields, has_body=True)
        exchange.head_received = True
        bodiless = exchange.method == "HEAD" or status in _BODILESS
        exchange.expected = 0 if bodiless else response.content_length
        if ended and exchange.expected:
            raise Malformed("its body is missing")
        if ended and not bodiless:
            response = attrs.evolve(response, content_length=0)
        self._events.append(ResponseReceived(exchange.stream_id, response, ended))
        if ended:
            exchange.body_ended = True
            self._finish_response(exchange)

    def _end_body(self, exchange: Exchange) -> None:
        super()._end_body(exchange)
        self._finish_response(exchange)

    def _finish_response(self, exchange: Exchange) -> None:
        """End an exchange whose response is whole; a body it did not wait for is given up."""
        if not exchange.out_ended:
            self._reset_stream(exchange, ErrorCodes.NO_ERROR)
        self._finish(exchange, complete=True)
