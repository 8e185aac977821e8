"""What HTTP/2 has to keep, whatever becomes of connections: what is given to one end of a stream comes out at
the other, in order, whole or not as a whole, and no request is acted on twice.

Both ends are those of `kvsp_h2`; here they note what they are given, and what they tell is compared with it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import attrs

from kvsp_core.heads import Request, Response
from kvsp_h2.events import BodyEnded, DataReceived, Event, ExchangeEnded, RequestReceived, ResponseReceived
from kvsp_h2.http2 import ClientConnection, ServerConnection
from kvsp_sim.property import Violation

__all__ = ["NotingClient", "NotingServer", "Streams"]


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


class NotingClient(ClientConnection):
    """The client's end of a connection."""

    streams: Streams

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


class NotingServer(ServerConnection):
    """The server's end of a connection."""

    streams: Streams

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
