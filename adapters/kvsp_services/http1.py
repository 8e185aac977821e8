"""HTTP/1.1 without TLS, for the API of a front end and for monitoring: requests to an application, and
answers back.

Whatever a client sends costs its own connection at most. How many there are is bounded: beyond that the one
that has been without a request for longest is closed, and a request beyond those that may be under way is
answered 503. Nothing is upgraded, to WebSocket or HTTP/2: a client that offers it goes on in HTTP/1.1.
"""

from __future__ import annotations

import resource
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from email.utils import formatdate
from ipaddress import ip_address
from typing import Any, Final, cast
from urllib.parse import unquote, urlsplit

import anyio
import h11
import structlog
from anyio.abc import SocketAttribute, SocketListener, SocketStream, TaskGroup
from starlette.types import ASGIApp, Message, Scope

from kvsp_core.errors import LocalProtocolError
from kvsp_services.logs import said_of
from kvsp_services.openai_requests import Refusal

__all__ = ["connections_allowed", "serve"]

IDLE_S: Final = 5.0
"""How long a connection may be without a whole head of a request; then it is closed."""
STALLED_S: Final = 60.0
"""How long a client may take nothing of what is sent to it; then its connection is closed."""
_LINGER_S: Final = 2.0
"""How long more is read of a request that was answered before it was whole. Some clients lose the answer
when they are cut off at once."""
_GRACE_S: Final = 3.0
"""How long answers may take to end once the server is to stop."""
_MAX_CONNECTIONS: Final = 8192
_WAITING_CONNECTIONS: Final = 128
"""Connections that the system keeps until they are accepted."""
_PIECE_BYTES: Final = 64 << 10
"""Octets that are read, and sent, at a time."""
_AGAIN_S: Final = 0.05
"""Time until accepting is tried again where it failed, as without descriptors."""
_GONE: Final = (OSError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)
"""What comes of a connection whose client is not there any more."""
_BUSY: Final = "this server answers as many requests as it can; ask again"
_MALFORMED: Final = "this is no request of HTTP/1.1"
_CALLED_OTHERWISE: Final = (
    "this server is for its own machine, and is not called so; ask for localhost or 127.0.0.1"
)


def connections_allowed() -> int:
    """Return how many connections may be open: three quarters of the files that the process may have open,
    so that its roles have the rest, and 8,192 at most."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, files * 3 // 4)


async def serve(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    key: str,
    listening: Callable[[int], None],
    stopping: Callable[[], Awaitable[Any]],
    connections: int | None = None,
) -> None:
    """Serve an application of the ASGI kind until `stopping` returns.

    `listening` is told the port once connections are taken; `key` is that of the port in the configuration.
    `connections` may be open at a time, by default `connections_allowed`. Raises `LocalProtocolError` where
    it cannot listen.
    """
    try:
        opened = await anyio.create_tcp_listener(
            local_host=host or None, local_port=port, backlog=_WAITING_CONNECTIONS, reuse_port=False
        )
    except OSError as error:
        raise LocalProtocolError(
            f"{key}: cannot listen on {host}:{port}: {error.strerror or error};"
            f" stop what listens there, or set {key}"
        ) from None
    listeners = cast("Sequence[SocketListener]", opened.listeners)
    listening(opened.extra(SocketAttribute.local_port))
    await _Server(app, host, connections or connections_allowed()).serve(listeners, stopping)


class _Server:
    """Serves an application that is configured to listen on `host`. `connections` may be open at a time;
    seven eighths of them may have a request under way.
    """

    def __init__(self, app: ASGIApp, host: str, connections: int) -> None:
        self.app = app
        self.host = host
        self._connections = connections
        self._requests = max(1, connections * 7 // 8)
        self._idle: dict[_Connection, None] = {}  # in the order in which they became so
        self._busy = 0
        self.stopping = False

    async def serve(
        self, listeners: Sequence[SocketListener], stopping: Callable[[], Awaitable[Any]]
    ) -> None:
        """Take connections until `stopping` returns, and let answers end for a while then."""
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as accepting:
                for listener in listeners:
                    accepting.start_soon(self._accept, listener, tasks)
                await stopping()
                accepting.cancel_scope.cancel()
            self.stopping = True
            for connection in tuple(self._idle):
                connection.end()
            tasks.cancel_scope.deadline = anyio.current_time() + _GRACE_S

    async def _accept(self, listener: SocketListener, tasks: TaskGroup) -> None:
        local = ip_address(listener.extra(SocketAttribute.local_address)[0]).is_loopback
        async with listener:
            while True:
                try:
                    stream = await listener.accept()
                except _GONE:  # or no descriptor is left
                    await anyio.sleep(_AGAIN_S)
                else:
                    tasks.start_soon(self._connected, stream, local)

    async def _connected(self, stream: SocketStream, local: bool) -> None:
        connection = _Connection(self, stream, local)
        self._idle[connection] = None
        if len(self._idle) + self._busy > self._connections:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.end()
        try:
            try:
                await connection.run()
            finally:
                with anyio.CancelScope(shield=True), suppress(*_GONE):
                    await stream.aclose()
        except Exception as error:
            structlog.get_logger().error("HTTP connection failed", error=said_of(error))
        finally:
            self._idle.pop(connection, None)

    def begins(self, connection: _Connection) -> bool:
        """Take note of a request; return whether it may be answered by the application."""
        self._idle.pop(connection, None)
        self._busy += 1
        return self._busy <= self._requests

    def ended(self, connection: _Connection) -> None:
        """Take note that a request is over."""
        self._busy -= 1
        self._idle[connection] = None


class _Connection:
    """One connection: requests one after the other. It is `local` where it came to the loopback interface."""

    def __init__(self, server: _Server, stream: SocketStream, local: bool) -> None:
        self._server = server
        self._stream = stream
        self._local = local
        self._scope = anyio.CancelScope()
        self._method = ""
        self.http = h11.Connection(h11.SERVER)
        self.gone = False
        """Whether the client has closed its side, or what it sends is not to be read."""

    def end(self) -> None:
        """Close it, whatever it is at."""
        self._scope.cancel()

    async def run(self) -> None:
        """Answer requests until one of both ends does not go on."""
        with self._scope:
            try:
                while (request := await self._next_request()) is not None:
                    await self._answer(request)
                    if self.gone or self.http.our_state is not h11.DONE:
                        break
                    self.http.start_next_cycle()
            except h11.RemoteProtocolError as error:
                await self._refuse(error.error_status_hint)
            if not self.gone:
                await self._linger()

    async def _next_request(self) -> h11.Request | None:
        self._method = ""
        with anyio.move_on_after(IDLE_S):
            while True:
                event = self.http.next_event()
                if isinstance(event, h11.Request):
                    self._method = event.method.decode()
                    return event
                if event is not h11.NEED_DATA:
                    break
                await self.read()
        self.gone = True  # there is nobody to tell anything
        return None

    async def _answer(self, request: h11.Request) -> None:
        may = self._server.begins(self)
        try:
            scope = _scope_of(request)
            exchange = _Exchange(self, self._method, close=not may or self._server.stopping)
            app = self._server.app if may else _refusal(503, _BUSY)
            if self._local and not _is_called(request, self._server.host):
                app = _refusal(421, _CALLED_OTHERWISE)
            await app(scope, exchange.receive, exchange.send)
            if exchange.fault is not None and not self.gone:
                raise exchange.fault
        finally:
            self._server.ended(self)

    async def read(self) -> None:
        """Take in what comes next, or that nothing more will."""
        try:
            octets = await self._stream.receive(_PIECE_BYTES)
        except _GONE:
            octets, self.gone = b"", True
        self.http.receive_data(octets)

    async def write(self, octets: bytes) -> None:
        """Send, as the client takes it; where it does not, this is the end of the connection."""
        try:
            for start in range(0, len(octets), _PIECE_BYTES):
                with anyio.fail_after(STALLED_S):
                    await self._stream.send(octets[start : start + _PIECE_BYTES])
        except _GONE:  # or its time is over
            self.end()
            await anyio.sleep_forever()

    async def _refuse(self, status: int) -> None:
        """Answer what is no request, where that is still possible."""
        if self.gone or self.http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        exchange = _Exchange(self, self._method, close=True)
        await _refusal(status, _MALFORMED)({"type": "http"}, exchange.receive, exchange.send)

    async def _linger(self) -> None:
        with anyio.move_on_after(_LINGER_S), suppress(*_GONE):
            await self._stream.send_eof()
            while True:
                await self._stream.receive(_PIECE_BYTES)


class _Exchange:
    """A request and its answer, as the application takes and gives them.

    After an answer with `close` the connection is not used again. `fault` is what is wrong with the request's
    body, where the answer had not begun when that was found.
    """

    def __init__(self, connection: _Connection, method: str, *, close: bool) -> None:
        self._connection = connection
        self._http = connection.http
        self._method = method
        self._close = close
        self._whole = False
        self._head: Message | None = None
        self.fault: h11.RemoteProtocolError | None = None

    async def receive(self) -> Message:
        """Return the next piece of the body; after it, wait until the client has gone. One that sends more
        requests than are kept until their turn is taken for gone."""
        http, connection = self._http, self._connection
        while not self._whole and self.fault is None:
            if http.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                await connection.write(http.send(go_on) or b"")
            try:
                event = http.next_event()
            except h11.RemoteProtocolError as error:
                self.fault = error
            else:
                if isinstance(event, h11.Data):
                    return {"type": "http.request", "body": bytes(event.data), "more_body": True}
                if isinstance(event, h11.EndOfMessage):
                    self._whole = True
                    return {"type": "http.request", "body": b"", "more_body": False}
                await connection.read()
        while not connection.gone and self.fault is None:
            await connection.read()
            if len(http.trailing_data[0]) > _PIECE_BYTES:  # without reading on, nobody would see it leave
                connection.gone = True
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send the head of the answer, with what comes first of its body, or more of that."""
        if self._connection.gone or self.fault is not None:
            return
        if message["type"] == "http.response.start":
            self._head = message
            return
        octets = b""
        if self._head is not None:
            octets = self._http.send(self._response(self._head)) or b""
            self._head = None
        if message.get("body") and self._method != "HEAD":
            octets += self._http.send(h11.Data(data=message["body"])) or b""
        if not message.get("more_body", False):
            octets += self._http.send(h11.EndOfMessage()) or b""
        await self._connection.write(octets)

    def _response(self, message: Message) -> h11.Response:
        headers = [(b"date", formatdate(usegmt=True).encode()), *message.get("headers", ())]
        if self._close or not self._is_whole():
            headers.append((b"connection", b"close"))
        return h11.Response(status_code=message["status"], headers=headers)

    def _is_whole(self) -> bool:
        """Return whether all of the request is here, so that another one may follow."""
        try:
            while not self._whole:
                event = self._http.next_event()
                if not isinstance(event, h11.Data | h11.EndOfMessage):
                    return False
                self._whole = isinstance(event, h11.EndOfMessage)
        except h11.RemoteProtocolError:
            return False
        return True


def _refusal(status: int, detail: str) -> Any:
    response = Refusal(status, detail).response
    if status == 503:
        response.headers["retry-after"] = "1"
    return response


def _is_called(request: h11.Request, name: str) -> bool:
    """Return whether a request, where it says whom it is for, names an address, localhost or this name.

    A page of a foreign site may have its own name lead to this machine, for which a browser takes all that
    is here for that site's.
    """
    for field in (value.decode("latin-1") for key, value in request.headers if key == b"host"):
        try:
            host = (urlsplit(f"//{field}").hostname or "").removesuffix(".")
            if host not in ("localhost", name.lower()):
                ip_address(host)
        except ValueError:
            return False
    return True


def _scope_of(request: h11.Request) -> Scope:
    """Return what the application is told of a request. Raises `RemoteProtocolError` of h11."""
    names = [name for name, _ in request.headers]
    uncertain = b"content-length" in names or request.http_version == b"1.0"
    if b"transfer-encoding" in names and uncertain:  # others may have taken its end to be elsewhere
        raise h11.RemoteProtocolError("how long the body is is not certain")
    if request.http_version not in (b"1.0", b"1.1"):
        raise h11.RemoteProtocolError("another version", error_status_hint=505)
    target = request.target.decode("latin-1")
    try:
        path, query = target.partition("?")[::2] if target[0] == "/" else urlsplit(target)[2:4]
    except ValueError:
        raise h11.RemoteProtocolError("the target is no URI") from None
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.http_version.decode(),
        "method": request.method.decode(),
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode("latin-1"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": list(request.headers),
        "client": None,
        "server": None,
    }
