"""A server and a client joined in memory, and raw frames to throw at either."""

from __future__ import annotations

import struct
from collections.abc import Callable

from hpack import Encoder

from kvsp_core.heads import Request, Response
from kvsp_h2 import (
    ClientConnection,
    DataReceived,
    Event,
    RequestReceived,
    SecureConnection,
    ServerConnection,
    WireLimits,
)
from kvsp_h2.frames import PREFACE

BASE_URI = "https://h1.example/kvsp/"
GET = Request(method="GET", path="blocks/b1")
Connection = (
    ServerConnection
    | ClientConnection
    | SecureConnection[ServerConnection]
    | SecureConnection[ClientConnection]
)


def put(size_bytes: int | None) -> Request:
    return Request(method="PUT", path="blocks/b1", content_type="x/y", content_length=size_bytes)


def ok(size_bytes: int | None = 0, status: int = 200) -> Response:
    return Response(status=status, content_length=size_bytes)


class End:
    """One end with all it has told so far; bodies are collected, and acknowledged unless `slow`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.events: list[Event] = []
        self.bodies: dict[int, bytearray] = {}
        self.slow = False
        self.on_event: Callable[[Event], None] = lambda event: None

    @property
    def http(self) -> ServerConnection | ClientConnection:
        if isinstance(self.connection, SecureConnection):
            assert self.connection.http is not None
            return self.connection.http
        return self.connection

    def drain(self) -> bool:
        """Take the events; return whether there were any."""
        found = False
        while (event := self.connection.next_event()) is not None:
            found = True
            if isinstance(event, DataReceived):
                self.bodies.setdefault(event.stream_id, bytearray()).extend(event.data)
                if not self.slow:
                    self.http.acknowledge(event.stream_id, len(event.data))
            else:
                self.events.append(event)
            self.on_event(event)
        return found

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


class Pair:
    """Two ends, a clock, and octets carried between them until both are quiet."""

    def __init__(
        self,
        *,
        server_limits: WireLimits | None = None,
        client_limits: WireLimits | None = None,
        server: Connection | None = None,
        client: Connection | None = None,
        split: int | None = None,
    ) -> None:
        self.now_ms = 0
        self.split = split
        self.server = End(server or ServerConnection(BASE_URI, 0, server_limits or WireLimits()))
        self.client = End(client or ClientConnection(BASE_URI, 0, client_limits or WireLimits()))

    @property
    def serving(self) -> ServerConnection:
        http = self.server.http
        assert isinstance(http, ServerConnection)
        return http

    @property
    def calling(self) -> ClientConnection:
        http = self.client.http
        assert isinstance(http, ClientConnection)
        return http

    def run(self) -> None:
        """Carry octets and take events until nothing moves."""
        moving = True
        while moving:
            moving = self.carry(self.client, self.server)
            moving |= self.carry(self.server, self.client)

    def carry(self, source: End, target: End) -> bool:
        moved = source.drain()
        octets = source.connection.data_to_send()
        step = self.split or len(octets) or 1
        for at in range(0, len(octets), step):
            target.connection.receive_data(octets[at : at + step], self.now_ms)
            target.drain()
        if not octets and source.connection.ended and not target.connection.ended:
            target.connection.receive_eof(self.now_ms)
        return bool(octets) or moved | target.drain()

    def later(self, ms: int) -> None:
        """Let time pass, firing timers when they are due, and carry what they make."""
        until = self.now_ms + ms
        while True:
            due = [
                d
                for d in (e.connection.next_deadline_ms() for e in (self.server, self.client))
                if d is not None
            ]
            if not due or min(due) > until:
                break
            self.now_ms = max(self.now_ms, min(due))
            self.server.connection.handle_timer(self.now_ms)
            self.client.connection.handle_timer(self.now_ms)
            self.run()
        self.now_ms = until

    def exchange(self, request: Request, body: bytes = b"") -> int:
        """Send a request and carry it over; return its stream."""
        stream_id = self.calling.request(request, body)
        self.run()
        return stream_id

    def echo(self) -> None:
        """Have the server answer every request at once."""

        def answer(event: Event) -> None:
            if isinstance(event, RequestReceived):
                self.serving.respond(event.stream_id, ok(2), b"ok")

        self.server.on_event = answer


# Raw frames -------------------------------------------------------------------------------------------------


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """Return any frame at all; `length` lies about the payload."""
    size = len(payload) if length is None else length
    return struct.pack(">HBBBL", size >> 8, size & 255, kind, flags, stream_id) + payload


def block(*fields: tuple[str, str]) -> bytes:
    """Return fields as a header block that uses no table, so that it means the same anywhere."""
    encoder = Encoder()
    return encoder.encode(
        [(n.encode("latin-1"), v.encode("latin-1"), True) for n, v in fields], huffman=False
    )


def request_block(*more: tuple[str, str], method: str = "GET", path: str = "/kvsp/blocks/b1") -> bytes:
    return block(
        (":method", method), (":scheme", "https"), (":authority", "h1.example"), (":path", path), *more
    )


def settings(*entries: tuple[int, int], ack: bool = False) -> bytes:
    return frame(4, int(ack), 0, b"".join(struct.pack(">HL", *entry) for entry in entries))


def headers(stream_id: int, fields: bytes, *, end: bool = True) -> bytes:
    return frame(1, 0x4 | end, stream_id, fields)


def read_frames(octets: bytes) -> list[tuple[int, int, int, bytes]]:
    """Return what a connection sent as (kind, flags, stream, payload)."""
    frames = []
    at = 0
    while at < len(octets):
        high, low, kind, flags, stream_id = struct.unpack_from(">HBBBL", octets, at)
        end = at + 9 + (high << 8 | low)
        frames.append((kind, flags, stream_id, octets[at + 9 : end]))
        at = end
    return frames


class Raw:
    """A server under raw octets: what it says to each, as frames."""

    def __init__(self, limits: WireLimits | None = None, *, greet: bool = True) -> None:
        self.end = End(ServerConnection(BASE_URI, 0, limits or WireLimits()))
        self.now_ms = 0
        if greet:
            self.send(PREFACE + settings())

    def send(self, octets: bytes) -> list[tuple[int, int, int, bytes]]:
        self.end.connection.receive_data(octets, self.now_ms)
        return self.take()

    def take(self) -> list[tuple[int, int, int, bytes]]:
        octets = b""
        while True:
            told = self.end.drain()
            more = self.end.connection.data_to_send()
            octets += more
            if not (told or more):
                return read_frames(octets)

    def refused(self) -> str:
        """Return why the connection ended."""
        [event] = self.end.events[-1:]
        return getattr(event, "reason", "")
