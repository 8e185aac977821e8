"""Sockets and timers of asyncio for the connections of `kvsp_h2`; every decision is made there."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, cast
from urllib.parse import urlsplit

from kvsp_h2 import ClientConnection, Credentials, Event, SecureConnection, ServerConnection, WireLimits
from kvsp_h2.pool import Pool, PoolLimits
from kvsp_h2.pumping import BACKLOG, HTTP, BaseDialer, BaseLink, BaseListener, BaseNetwork, Links

__all__ = ["Link", "Listener", "Network", "open_network", "run"]

_ACCEPTED_AT_A_TIME: Final = 16
"""Connections that are accepted before those there are have their turn."""
_HIGH_WATER: Final = 256 << 10
"""Octets that a transport holds back before the connection is asked for no more."""


class Link(BaseLink[HTTP], asyncio.BufferedProtocol):
    """One connection on its transport."""

    _network: Network

    def __init__(
        self,
        network: Network,
        connection: SecureConnection[HTTP],
        on_event: Callable[[Link[HTTP], Event], None],
        links: Links[Link[HTTP]],
    ) -> None:
        super().__init__(network, connection, on_event, links)
        self._transport: asyncio.Transport | None = None
        self._paused = self._reading_paused = False
        self._timer: asyncio.Handle | None = None
        self._timer_due = 0.0

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def fileno(self) -> int:
        """Return the file descriptor of its socket, or -1 where it has none."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def _turn(self) -> None:
        connection = self.connection
        while True:
            self._tell()
            if self._paused or self._transport is None:
                break
            octets = connection.data_to_send()
            if not octets:
                break
            self._transport.write(octets)
        if self._transport is not None and connection.ended:
            if connection.dropped:
                self._transport.abort()
            elif not self._paused:
                self._transport.close()
        self._read_or_wait()
        self._set_timer()

    # Called by the loop ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(_HIGH_WATER)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            with suppress(OSError):  # where the peer is gone already, as reading will tell
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.add(self)
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return memory for what arrives; all links share it, since each deals with it before the next."""
        return self._network.memory

    def buffer_updated(self, nbytes: int) -> None:
        """Take what has arrived."""
        network = self._network
        self.connection.receive_data(network.memory[:nbytes], network.now_ms())
        self.flush()

    def eof_received(self) -> bool:
        """Take the end of what arrives."""
        self.connection.receive_eof(self._network.now_ms())
        self.flush()
        return False

    def pause_writing(self) -> None:
        """Hold output back."""
        self._paused = True

    def resume_writing(self) -> None:
        """Go on with output."""
        self._paused = False
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        """End."""
        self._transport = None
        self._end()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read_or_wait(self) -> None:
        """Receive nothing while what has come waits for its turn."""
        waits = self.connection.input_waits
        if waits is self._reading_paused or self._transport is None or self._transport.is_closing():
            return
        self._reading_paused = waits
        if waits:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _set_timer(self) -> None:
        """Wake up by the connection's deadline. Deadlines mostly move away, and an early call is a no-op."""
        due_ms = self.connection.next_deadline_ms()
        if due_ms is None or self._transport is None:
            return
        due = (due_ms + 1) / 1000
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._network.loop.call_at(due, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self.connection.handle_timer(self._network.now_ms())
        self.flush()


class Network(BaseNetwork):
    """What the connections of one event loop share. Made inside the loop; `close` ends all that came of
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self._quiet = asyncio.Event()

    def now_ms(self) -> int:
        """Return the time of the loop's monotonic clock."""
        return int(self.loop.time() * 1000)

    def report(self, error: Exception) -> None:
        """Show an error of somebody's `on_event`: it costs that connection, no other."""
        self.loop.call_exception_handler({"message": "dealing with an event failed", "exception": error})

    def link_lost(self) -> None:
        """Wake up who waits for connections to end."""
        self._quiet.set()

    async def listen(
        self,
        credentials: Credentials,
        base_uri: str,
        on_event: Callable[[Link[ServerConnection], Event], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: WireLimits | None = None,
        sock: socket.socket | None = None,
        reuse_port: bool = False,
        max_connections: int = 4096,
    ) -> Listener:
        """Serve the role at `base_uri`: `on_event` is told what happens on any of its connections.

        `sock`, where given, is bound already. With `reuse_port` several processes may share the work.
        A connection beyond `max_connections` costs the oldest whose handshake is not complete.
        """

        def accept() -> asyncio.BaseProtocol:
            return Link(self, self._accepted(credentials, base_uri, limits), on_event, listener.links)

        listener = Listener(max_connections)
        if sock is not None:
            listener.server = await self.loop.create_server(accept, sock=sock, backlog=_ACCEPTED_AT_A_TIME)
        else:
            listener.server = await self.loop.create_server(
                accept, host, port, backlog=_ACCEPTED_AT_A_TIME, reuse_port=reuse_port
            )
        for listening in listener.server.sockets:
            _hold(listening.fileno())
        listener.port = int(listener.server.sockets[0].getsockname()[1])
        self._parts.append(listener)
        return listener

    def service(
        self,
        credentials: Credentials,
        base_uri: str,
        *,
        limits: WireLimits | None = None,
        pool_limits: PoolLimits | None = None,
    ) -> Pool:
        """Return the role at `base_uri` as something to call. Connections are opened as calls need them."""
        pool = self._pool(base_uri, limits, pool_limits)
        self._parts.append(_Dialer(self, pool, credentials))
        return pool

    def filenos(self) -> set[int]:
        """Return the file descriptors of all connections."""
        return {link.fileno() for part in self._parts for link in part.links} - {-1}

    async def close(self) -> None:
        """Close everything in order."""
        self._shut_down()
        while any(self._open_links()):
            self._quiet.clear()
            await self._quiet.wait()


@asynccontextmanager
async def open_network() -> AsyncIterator[Network]:
    """Open a network for listeners and services; what is open when the block ends is closed in order."""
    network = Network()
    try:
        yield network
        await network.close()
    finally:
        network.abort()


class Listener(BaseListener[Link[ServerConnection]]):
    """A role that is being served."""

    server: asyncio.Server

    def _stop_accepting(self) -> None:
        self.server.close()


class _Dialer(BaseDialer[Link[ClientConnection]]):
    """Opens the connections that a pool wants."""

    _network: Network

    def __init__(self, network: Network, pool: Pool, credentials: Credentials) -> None:
        super().__init__(network, pool, credentials)
        self._dials: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def _stop_dialing(self) -> None:
        for task in self._dials:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Open a connection where the pool wants one, now or at its deadline."""
        network = self._network
        if self.pool.wants_dial(network.now_ms()):
            task = network.loop.create_task(self._dial())
            self._dials.add(task)
            task.add_done_callback(self._dials.discard)
        due_ms = self.pool.next_deadline_ms()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due_ms is None else network.loop.call_at((due_ms + 1) / 1000, self._look)

    async def _dial(self) -> None:
        network, pool = self._network, self.pool
        where = urlsplit(pool.base_uri)

        def make() -> Link[ClientConnection]:
            return Link(network, self._connection(), self._receive, self.links)

        try:
            async with asyncio.timeout(pool.wire_limits.handshake_ms / 1000):
                await network.loop.create_connection(make, where.hostname or "", where.port or 443)
        except (OSError, TimeoutError, ValueError):
            self._unreachable()


def _hold(fileno: int) -> None:
    """Have the system hold more connections than asyncio accepts at a time, which is one number there."""
    with socket.socket(fileno=os.dup(fileno)) as listening:
        listening.listen(BACKLOG)


def run(main: Callable[[], Any]) -> Any:
    """Run an async function on uvloop where that is installed, else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    return uvloop.run(main())
