"""What others offer in Python, used as their documentation shows: the h2 library on a loop, and an ASGI
handler."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import h2.config
import h2.connection
import h2.events
import h2.settings

__all__ = ["PlainClient", "PlainServer", "asgi_application"]

_WINDOW = (1 << 24) - 1
_SETTINGS = {
    h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW,
    h2.settings.SettingCodes.MAX_FRAME_SIZE: 1 << 20,
    h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 128,
    h2.settings.SettingCodes.ENABLE_PUSH: 0,
}


def _connection(*, client: bool) -> h2.connection.H2Connection:
    connection = h2.connection.H2Connection(
        h2.config.H2Configuration(client_side=client, header_encoding="utf-8")
    )
    connection.local_settings = h2.settings.Settings(client=client, initial_values=_SETTINGS)
    connection.max_inbound_frame_size = 1 << 20
    connection.initiate_connection()
    connection.increment_flow_control_window(_WINDOW - 65_535)
    return connection


class PlainServer(asyncio.Protocol):
    """Answers GET with a block."""

    def __init__(self, blocks: Mapping[str, memoryview]) -> None:
        self._blocks = blocks
        self._h2 = _connection(client=False)
        self._bodies: dict[int, memoryview] = {}
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(1 << 20)
        self._send()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._send()

    def data_received(self, data: bytes) -> None:
        for event in self._h2.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                path = dict(event.headers or [])[":path"].removeprefix("/kvsp/")
                block = self._blocks[path]
                fields = [(":status", "200"), ("content-length", str(block.nbytes))]
                self._h2.send_headers(event.stream_id, fields)
                self._bodies[event.stream_id] = block
        self._send()

    def _send(self) -> None:
        for stream_id, body in list(self._bodies.items()):
            while not self._paused and body:
                count = min(self._h2.local_flow_control_window(stream_id), self._h2.max_outbound_frame_size)
                if not count:
                    break
                self._h2.send_data(stream_id, body[:count], end_stream=len(body) <= count)
                body = self._bodies[stream_id] = body[count:]
                self._transport.write(self._h2.data_to_send())
            if not body:
                del self._bodies[stream_id]
        self._transport.write(self._h2.data_to_send())


class PlainClient(asyncio.Protocol):
    """Fetches a path a number of times, some at a time, and joins each body."""

    def __init__(self, path: str, authority: str, count: int, at_once: int) -> None:
        self._fields = [(":method", "GET"), (":scheme", "https"), (":authority", authority), (":path", path)]
        self._h2 = _connection(client=True)
        self._left = count
        self._at_once = at_once
        self._pieces: dict[int, list[bytes]] = {}
        self.received = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        for _ in range(self._at_once):
            self._request()
        self._transport.write(self._h2.data_to_send())

    def _request(self) -> None:
        if self._left:
            self._left -= 1
            stream_id = self._h2.get_next_available_stream_id()
            self._h2.send_headers(stream_id, self._fields, end_stream=True)
            self._pieces[stream_id] = []

    def data_received(self, data: bytes) -> None:
        for event in self._h2.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                assert event.data is not None
                self._pieces[event.stream_id].append(event.data)
                self._h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self.received += len(b"".join(self._pieces.pop(event.stream_id)))
                self._request()
        self._transport.write(self._h2.data_to_send())
        if not self._pieces and not self.done.done():
            self.done.set_result(None)


def asgi_application(blocks: Mapping[str, memoryview]) -> Any:
    """Return a bare ASGI handler: blocks for GET, and for POST the body again."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "GET":
            body: Any = blocks[scope["path"].removeprefix("/kvsp/")]
        else:
            body, more = b"", True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": bytes(body)})

    return application
