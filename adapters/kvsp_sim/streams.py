"""What HTTP/2 has to keep, whatever becomes of connections: what is given to one end of a stream comes out at
the other, in order, whole or not as a whole, and no request is acted on twice; neither end finds fault with
the other, says anything on a stream that it has ended, or loses a part of its windows.

Both ends are those of `kvsp_h2`; here they note what they are given, and what they tell and say is compared
with it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, ClassVar, Final

import attrs
from h2.errors import ErrorCodes

from kvsp_core.heads import Request, Response
from kvsp_h2.connection import Connection
from kvsp_h2.events import BodyEnded, DataReceived, Event, ExchangeEnded, RequestReceived, ResponseReceived
from kvsp_h2.frames import (
    DATA,
    END_STREAM,
    GOAWAY,
    HEAD_BYTES,
    HEADERS,
    PREFACE,
    RST_STREAM,
    WINDOW_UPDATE,
    Buffer,
)
from kvsp_h2.http2 import ClientConnection, ServerConnection
from kvsp_sim.property import Violation

__all__ = ["NotingClient", "NotingServer", "Said", "Streams"]

_NO_FAULT: Final = frozenset(
    (ErrorCodes.NO_ERROR, ErrorCodes.CANCEL, ErrorCodes.REFUSED_STREAM, ErrorCodes.ENHANCE_YOUR_CALM)
)
"""Why a stream or a connection may end where nobody broke the protocol: it is over, nobody waits any more,
there were too many, or one end has said much that brings nothing, or begun something and not gone on."""


class _Body:
    """The octets of one direction: what was given, and how much of it has come out."""

    def __init__(self) -> None:
        self.octets = bytearray()
        self.ended = False
        self.arrived = 0

    def arrive(self, data: memoryview) -> bool:
        """Return whether these are the octets that come next."""
        start, self.arrived = self.arrived, self.arrived + len(data)
        return self.octets[start : self.arrived] == data

    @property
    def is_whole(self) -> bool:
        """Whether all that was given has come out, and nothing more will be given."""
        return self.ended and self.arrived == len(self.octets)


class _Stream:
    def __init__(self) -> None:
        self.heads: list[Request | Response] = []
        self.asked = _Body()
        self.answered = _Body()
        self.over = {True: False, False: False}  # at the client, at the server


class Streams:
    """The streams of one connection.

    `told` counts how often a server's role was told of each call; calls are told apart by their traceparent.
    """

    def __init__(self, told: Counter[str]) -> None:
        self._told = told
        self._streams: defaultdict[int, _Stream] = defaultdict(_Stream)

    def give_head(self, stream_id: int, head: Request | Response) -> None:
        """Take note of a head that is given to one end."""
        self._streams[stream_id].heads.append(head)

    def give(self, stream_id: int, data: Any, *, by_client: bool, end: bool) -> None:
        """Take note of a part of a body that is given to one end."""
        stream = self._streams[stream_id]
        body = stream.asked if by_client else stream.answered
        body.octets += data
        body.ended = end

    def check(self, event: Event, *, at_client: bool) -> None:
        """Compare what one end tells with what the other was given. Raises `Violation`."""
        if (stream_id := getattr(event, "stream_id", 0)) == 0:
            return
        stream = self._streams[stream_id]
        if stream.over[at_client]:
            _fail(f"{event!r} after the end")
        body = stream.answered if at_client else stream.asked
        match event:
            case RequestReceived(_, request, ended, name):
                self._check_told(name or "")
                _check_head(stream.heads[:1], request)
                if ended and not body.is_whole:
                    _fail("a request lost its body")
            case ResponseReceived(_, response, ended):
                _check_head(stream.heads[1:], response)
                if ended and not body.is_whole:
                    _fail("a response lost its body")
            case DataReceived(_, data):
                if not body.arrive(data):
                    _fail("octets of a body are not those that were given")
            case BodyEnded():
                if not body.is_whole:
                    _fail(f"a body ends after {body.arrived} octets, and is not whole")
            case ExchangeEnded(_, complete, sent_bytes):
                stream.over[at_client] = True
                gone = body.is_whole if at_client else sent_bytes == len(stream.answered.octets)
                if complete and not (stream.answered.ended and gone):
                    _fail("an exchange is told to be complete, and is not")
            case _:
                pass

    def _check_told(self, name: str) -> None:
        self._told[name] += 1
        if self._told[name] > 1:
            raise Violation("a_call_arrives_once", "a server was told twice of a request")


def _check_head(given: list[Request | Response], arrived: Request | Response) -> None:
    if [attrs.evolve(head, content_length=None) for head in given] != [
        attrs.evolve(arrived, content_length=None)
    ]:
        _fail(f"{arrived!r} is not the head that was given")


def _fail(explanation: str) -> None:
    raise Violation("octets_arrive_as_given", explanation)


class Said:
    """What one end of a connection has said, frame by frame."""

    def __init__(self, *, by_client: bool) -> None:
        self._who = "the client" if by_client else "the server"
        self._before = PREFACE if by_client else b""
        self._ended: dict[int, bool] = {}
        """The streams that it has ended, and whether by a reset."""

    def check(self, octets: bytes) -> None:
        """Look at the next frames, which are whole. Raises `Violation`."""
        at = len(self._before) if octets else 0
        assert octets.startswith(self._before[:at])
        self._before = self._before[at:]
        while at < len(octets):
            length = int.from_bytes(octets[at : at + 3], "big")
            kind, flags = octets[at + 3], octets[at + 4]
            stream_id = int.from_bytes(octets[at + 5 : at + HEAD_BYTES], "big")
            at += HEAD_BYTES
            if kind in (RST_STREAM, GOAWAY):
                start = at + 4 * (kind == GOAWAY)
                self._check_code(kind, int.from_bytes(octets[start : start + 4], "big"))
            self._check_stream(kind, flags, stream_id)
            at += length

    def _check_code(self, kind: int, code: int) -> None:
        if code not in _NO_FAULT:
            what = "a stream" if kind == RST_STREAM else "the connection"
            raise Violation("nobody_is_at_fault", f"{self._who} ends {what} with {ErrorCodes(code).name}")

    def _check_stream(self, kind: int, flags: int, stream_id: int) -> None:
        was_reset = self._ended.get(stream_id)
        if was_reset or (was_reset is False and kind not in (RST_STREAM, WINDOW_UPDATE)):
            explanation = f"{self._who} says more on stream {stream_id}: a frame of kind {kind}"
            raise Violation("what_is_ended_is_over", explanation)
        if kind == RST_STREAM:
            self._ended[stream_id] = True
        elif kind in (DATA, HEADERS) and flags & END_STREAM:
            self._ended[stream_id] = False


def _check_windows(end: Connection) -> None:
    """Compare what a peer may send, and what it was not told yet that it may, with what it could at first."""
    reader, limits = end._reader, end._limits
    if reader.data_left or end.ended:
        return
    lost = limits.connection_window_bytes - end._windows.left - end._windows.credit
    for exchange in end._exchanges.values():
        lost -= exchange.unacknowledged
        if not exchange.body_ended:
            known = exchange.window + exchange.credit + exchange.unacknowledged
            _check_lost(limits.stream_window_bytes - known, f"stream {exchange.stream_id}")
    _check_lost(lost, "the connection")


def _check_lost(count: int, whose: str) -> None:
    if count:
        raise Violation("windows_lose_nothing", f"the window of {whose} lost {count} octets")


class _Noting(Connection):
    """What is checked alike at both ends."""

    streams: Streams
    is_client: ClassVar[bool]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._said = Said(by_client=self.is_client)

    def receive_data(self, data: Buffer, now_ms: int) -> int:
        """Take octets from the other end."""
        taken = super().receive_data(data, now_ms)
        _check_windows(self)
        return taken

    def data_to_send(self) -> bytes:
        """Return the octets to send next."""
        octets = super().data_to_send()
        self._said.check(octets)
        return octets


class NotingClient(_Noting, ClientConnection):
    """The client's end of a connection."""

    is_client = True

    def request(self, request: Request, *arguments: Any, **keywords: Any) -> int:
        """Send a request and return its stream."""
        stream_id = super().request(request, *arguments, **keywords)
        self.streams.give_head(stream_id, request)
        return stream_id

    def _send_head(self, exchange: Any, block: bytes, *, end: bool) -> None:
        if end:
            self.streams.give(exchange.stream_id, b"", by_client=True, end=True)
        super()._send_head(exchange, block, end=end)

    def send_data(self, stream_id: int, data: Any, *, end: bool = False) -> bool:
        """Queue octets of a body."""
        self.streams.give(stream_id, data, by_client=True, end=end)
        return super().send_data(stream_id, data, end=end)


class NotingServer(_Noting, ServerConnection):
    """The server's end of a connection."""

    is_client = False

    def respond(self, stream_id: int, response: Response, *arguments: Any, **keywords: Any) -> bool:
        """Answer a request."""
        self.streams.give_head(stream_id, response)
        return super().respond(stream_id, response, *arguments, **keywords)

    def _send_head(self, exchange: Any, block: bytes, *, end: bool) -> None:
        if end:
            self.streams.give(exchange.stream_id, b"", by_client=False, end=True)
        super()._send_head(exchange, block, end=end)

    def send_data(self, stream_id: int, data: Any, *, end: bool = False) -> bool:
        """Queue octets of a body."""
        self.streams.give(stream_id, data, by_client=False, end=end)
        return super().send_data(stream_id, data, end=end)
