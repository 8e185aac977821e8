"""Sockets and timers of trio for the connections of `kvsp_h2`; every decision is made there."""

from __future__ import annotations

import math
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import trio

from kvsp_h2 import ClientConnection, Credentials, Event, SecureConnection, ServerConnection, WireLimits
from kvsp_h2.pool import Pool, PoolLimits
from kvsp_h2.pumping import BACKLOG, HTTP, BaseDialer, BaseLink, BaseListener, BaseNetwork, Links
from kvsp_trio.streams import AnyStream, LoopSocket

__all__ = ["Link", "Listener", "Network", "open_network"]


class Link(BaseLink[HTTP]):
    """One connection on its stream."""

    def __init__(
        self,
        network: Network,
        connection: SecureConnection[HTTP],
        on_event: Callable[[Link[HTTP], Event], None],
        stream: trio.abc.Stream,
        links: Links[Link[HTTP]],
    ) -> None:
        super().__init__(network, connection, on_event, links)
        self._stream: LoopSocket | AnyStream
        if isinstance(stream, trio.SocketStream):
            self._stream = LoopSocket(stream, network.memory)
        else:
            self._stream = AnyStream(stream)
        self._unsent = memoryview(b"")
        self._wake = trio.Event()
        self._eof = self._over = False
        self._scope = trio.CancelScope()

    def abort(self) -> None:
        """Close at once."""
        self._over = True
        self._scope.cancel()

    async def run(self) -> None:
        """Carry octets until the connection is over."""
        self._links.add(self)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                self.flush()
                while not self._over:
                    await self._read()
                nursery.cancel_scope.cancel()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the peer is gone, and that is said below
        except* Exception as group:
            self._network.report(group)
        finally:
            self._over = True
            self._end()
            with trio.CancelScope(shield=True):
                await self._stream.aclose()

    def _turn(self) -> None:
        connection = self.connection
        while True:
            self._tell()
            if self._unsent or self._over:
                break
            octets = memoryview(connection.data_to_send())
            if not octets:
                break
            self._unsent = octets[self._stream.send_some(octets) :]
        if self._unsent:
            self._wake.set()
        elif connection.ended:
            self._over = True
        if connection.dropped:
            self._over = True
        if self._over:
            self._scope.cancel()
        due = _seconds(connection.next_deadline_ms())
        if due < self._scope.deadline:  # they mostly move away, and an early call is a no-op
            self._scope.deadline = due

    async def _read(self) -> None:
        """Take what arrives, or do what is due; let others have their turn before what waits for it."""
        waits = self.connection.input_waits
        octets = None if self._eof or waits else self._stream.receive_now()
        if waits:
            await trio.lowlevel.checkpoint()
        elif octets is None:
            with trio.CancelScope(deadline=_seconds(self.connection.next_deadline_ms())) as self._scope:
                if self._eof:
                    await trio.sleep_forever()
                octets = await self._stream.receive()
        now_ms = self._network.now_ms()
        if octets:
            self.connection.receive_data(octets, now_ms)
        elif octets is not None:
            self._eof = True
            self.connection.receive_eof(now_ms)
        elif not self._over:
            self.connection.handle_timer(now_ms)
        self.flush()

    async def _write(self) -> None:
        """Send what the stream did not take at once."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._unsent:
                await self._stream.send(self._unsent)
                self._unsent = memoryview(b"")
                self.flush()


class Network(BaseNetwork):
    """What the connections of one trio program share; made by `open_network`."""

    def __init__(self, nursery: trio.Nursery) -> None:
        super().__init__()
        self.nursery = nursery
        self._quiet = trio.Event()

    def now_ms(self) -> int:
        """Return the time of trio's clock."""
        return int(trio.current_time() * 1000)

    def report(self, error: Exception) -> None:
        """Show an error of somebody's `on_event`: it costs that connection, no other."""
        traceback.print_exception(error)

    def link_lost(self) -> None:
        """Wake up who waits for connections to end."""
        self._quiet.set()

    async def listen(
        self,
        credentials: Credentials,
        base_uri: str,
        on_event: Callable[[Link[ServerConnection], Event], None],
        *,
        host: str | None = "127.0.0.1",
        port: int = 0,
        limits: WireLimits | None = None,
        max_connections: int = 4096,
    ) -> Listener:
        """Serve the role at `base_uri`: `on_event` is told what happens on any of its connections.

        A connection beyond `max_connections` costs the oldest whose handshake is not complete.
        """

        async def serve(stream: trio.abc.Stream) -> None:
            connection = self._accepted(credentials, base_uri, limits)
            await Link(self, connection, on_event, stream, listener.links).run()

        listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
        listener = Listener(max_connections, serve, listeners)
        self.nursery.start_soon(listener.run, self.nursery)
        self._parts.append(listener)
        return listener

    def service(
        self,
        credentials: Credentials,
        base_uri: str,
        *,
        limits: WireLimits | None = None,
        pool_limits: PoolLimits | None = None,
        connect: Callable[[], Awaitable[trio.abc.Stream]] | None = None,
    ) -> Pool:
        """Return the role at `base_uri` as something to call. Connections are opened as calls need them.

        `connect` opens them where they are not to go to the host and port of the base URI.
        """
        pool = self._pool(base_uri, limits, pool_limits)
        self._parts.append(_Dialer(self, pool, credentials, connect))
        return pool

    async def close(self) -> None:
        """Close everything in order."""
        self._shut_down()
        while any(self._open_links()):
            self._quiet = trio.Event()
            await self._quiet.wait()


@asynccontextmanager
async def open_network() -> AsyncIterator[Network]:
    """Open a network for listeners and services; what is open when the block ends is closed in order."""
    async with trio.open_nursery() as nursery:
        network = Network(nursery)
        try:
            yield network
            await network.close()
        finally:
            network.abort()
        nursery.cancel_scope.cancel()


class Listener(BaseListener[Link[ServerConnection]]):
    """A role that is being served; `serve` does so on one stream."""

    def __init__(
        self,
        max_connections: int,
        serve: Callable[[trio.abc.Stream], Awaitable[None]],
        listeners: list[trio.SocketListener],
    ) -> None:
        super().__init__(max_connections)
        self.serve = serve
        self.port = int(listeners[0].socket.getsockname()[1])
        self._listeners = listeners
        self._accepting = trio.CancelScope()

    async def run(self, nursery: trio.Nursery) -> None:
        """Accept connections."""
        with self._accepting:
            await trio.serve_listeners(self.serve, self._listeners, handler_nursery=nursery)

    def _stop_accepting(self) -> None:
        self._accepting.cancel()


class _Dialer(BaseDialer[Link[ClientConnection]]):
    """Opens the connections that a pool wants."""

    _network: Network

    def __init__(
        self,
        network: Network,
        pool: Pool,
        credentials: Credentials,
        connect: Callable[[], Awaitable[trio.abc.Stream]] | None,
    ) -> None:
        super().__init__(network, pool, credentials)
        self._connect = connect or self._connect_to_host
        self._waits = trio.CancelScope()
        self._dials = trio.CancelScope()
        """That of the one attempt that is made at a time, from the moment it is ordered."""

    def _stop_dialing(self) -> None:
        self._dials.cancel()
        self._waits.cancel()

    def _look(self) -> None:
        """Open a connection where the pool wants one, now or at its deadline."""
        network = self._network
        if self.pool.wants_dial(network.now_ms()):
            self._dials = trio.CancelScope()
            network.nursery.start_soon(self._dial, self._dials)
        self._waits.cancel()
        if self.pool.next_deadline_ms() is not None:
            self._waits = trio.CancelScope(deadline=_seconds(self.pool.next_deadline_ms()))
            network.nursery.start_soon(self._look_later, self._waits)

    async def _look_later(self, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep_forever()
        if scope is self._waits and trio.current_time() >= scope.deadline:
            self._look()

    async def _connect_to_host(self) -> trio.abc.Stream:
        where = urlsplit(self.pool.base_uri)
        return await trio.open_tcp_stream(where.hostname or "", where.port or 443)

    async def _dial(self, scope: trio.CancelScope) -> None:
        network, pool = self._network, self.pool
        stream: trio.abc.Stream | None = None
        with scope:
            try:
                with trio.fail_after(pool.wire_limits.handshake_ms / 1000):
                    stream = await self._connect()
            except (OSError, trio.TooSlowError, ValueError):
                self._unreachable()
        if stream is None:
            return
        if scope.cancel_called:
            await trio.aclose_forcefully(stream)
        else:
            await Link(network, self._connection(), self._receive, stream, self.links).run()


def _seconds(due_ms: int | None) -> float:
    return math.inf if due_ms is None else due_ms / 1000
