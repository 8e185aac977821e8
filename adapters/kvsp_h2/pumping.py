"""What the pumps have in common: links, listeners, dialers and networks, without their sockets and timers.

A pump derives its own from these and adds what its loop does differently. Nothing here waits.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

from kvsp_h2.connection import Connection
from kvsp_h2.events import Established, Event
from kvsp_h2.http2 import ClientConnection, ServerConnection
from kvsp_h2.limits import WireLimits
from kvsp_h2.pool import Pool, PoolLimits
from kvsp_h2.secure import SCRATCH_BYTES, SecureConnection, secure_client, secure_server
from kvsp_h2.tls import Credentials

__all__ = ["BACKLOG", "RECEIVE_BYTES", "BaseDialer", "BaseLink", "BaseListener", "BaseNetwork", "Links"]

HTTP = TypeVar("HTTP", bound=Connection)
LinkT = TypeVar("LinkT", bound="BaseLink[Any]")

RECEIVE_BYTES = 256 << 10
"""Memory for what arrives at a time."""
BACKLOG = 1024
"""Connections that the system holds until they are accepted."""


class BaseLink(ABC, Generic[HTTP]):
    """One connection on its transport. `on_event` is called with each of its events, in turn.

    Answers and requests given to `http` outside of `on_event` are sent by `flush`.
    """

    def __init__(
        self,
        network: BaseNetwork,
        connection: SecureConnection[HTTP],
        on_event: Callable[[Any, Event], None],
        links: Links[Any],
    ) -> None:
        self.connection = connection
        self._network = network
        self._on_event = on_event
        self._links = links
        self._turning = False

    @property
    def http(self) -> HTTP:
        """The HTTP/2 connection; there is one from `Established` on."""
        http = self.connection.http
        assert http is not None, "the handshake is not complete"
        return http

    def flush(self) -> None:
        """Tell what has happened, and send what there is to send."""
        if self._turning:
            return
        self._turning = True
        try:
            self._turn()
        finally:
            self._turning = False

    def shutdown(self) -> None:
        """Close in order."""
        self.connection.shutdown(self._network.now_ms())
        self.flush()

    @abstractmethod
    def abort(self) -> None:
        """Close at once."""

    @abstractmethod
    def _turn(self) -> None:
        """Do what `flush` is for: until there is neither an event nor output that the transport takes."""

    def _tell(self) -> None:
        """Tell of every event there is. An error of who is told costs this connection, no other."""
        next_event = self.connection.next_event
        while (event := next_event()) is not None:
            try:
                self._on_event(self, event)
            except Exception as error:
                self._network.report(error)
                self.abort()

    def _end(self) -> None:
        """Take note that the transport is gone."""
        self._links.discard(self)
        self.connection.receive_eof(self._network.now_ms())
        self.flush()
        self._network.link_lost()


class Links(Generic[LinkT]):
    """The connections there are, in the order in which they came; at most `limit`, where there is one."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._links: dict[LinkT, None] = {}

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[LinkT]:
        return iter(self._links)

    def add(self, link: LinkT) -> None:
        """Take note of a new connection. One too many costs the oldest whose handshake is not complete.

        So those who connect and say nothing keep no newcomer out, and nobody who is there already is
        closed: where all the others are, it is the newcomer itself that is.
        """
        self._links[link] = None
        if self._limit is not None and len(self._links) > self._limit:
            unproven = next(link for link in self._links if link.connection.http is None)
            self.discard(unproven)
            unproven.abort()

    def discard(self, link: LinkT) -> None:
        """Take note that a connection is gone."""
        self._links.pop(link, None)


class BaseListener(ABC, Generic[LinkT]):
    """A role that is being served, and its connections."""

    port: int
    """The port it listens on."""

    def __init__(self, max_connections: int) -> None:
        self.links: Links[LinkT] = Links(max_connections)

    @abstractmethod
    def _stop_accepting(self) -> None:
        """Accept no more connections."""

    def shutdown(self) -> None:
        """Accept no more connections, and close those there are in order."""
        self._stop_accepting()
        for link in tuple(self.links):
            link.shutdown()

    def abort(self) -> None:
        """Close everything at once."""
        self._stop_accepting()
        for link in tuple(self.links):
            link.abort()


class BaseDialer(ABC, Generic[LinkT]):
    """Opens the connections that a pool wants."""

    def __init__(self, network: BaseNetwork, pool: Pool, credentials: Credentials) -> None:
        self.links: Links[LinkT] = Links()
        self._network = network
        self.pool: Final = pool
        self._credentials = credentials
        self._closing = False
        pool.wake = self._look

    @abstractmethod
    def _look(self) -> None:
        """Open a connection where the pool wants one, now or at its deadline."""

    @abstractmethod
    def _stop_dialing(self) -> None:
        """Give up connections that are being opened, and open no more."""

    def shutdown(self) -> None:
        """Fail the calls that wait, and close the connections in order."""
        self._closing = True
        self.pool.close("this service is not called any more")
        self._stop_dialing()
        for link in tuple(self.links):
            link.shutdown()

    def abort(self) -> None:
        """Close everything at once."""
        self._closing = True
        self.pool.close("this service is not called any more")
        self._stop_dialing()
        for link in tuple(self.links):
            link.abort()

    def _connection(self) -> SecureConnection[ClientConnection]:
        network, pool = self._network, self.pool
        return secure_client(
            self._credentials,
            pool.base_uri,
            network.now_ms(),
            limits=pool.wire_limits,
            scratch=network.scratch,
        )

    def _receive(self, link: LinkT, event: Event) -> None:
        self.pool.receive(link, event, self._network.now_ms())
        if self._closing and isinstance(event, Established):
            link.shutdown()  # it came to be after the others were closed

    def _unreachable(self) -> None:
        self.pool.dial_failed("the service cannot be reached", self._network.now_ms())


class BaseNetwork(ABC):
    """What the connections of one loop share: time, memory, and everything that is to be closed."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(RECEIVE_BYTES))
        """For what arrives: each link deals with it before the next one uses it."""
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        """For what was decrypted, likewise."""
        self._parts: list[BaseListener[Any] | BaseDialer[Any]] = []

    @abstractmethod
    def now_ms(self) -> int:
        """Return the time of the loop's monotonic clock."""

    @abstractmethod
    def report(self, error: Exception) -> None:
        """Show an error of somebody's `on_event`."""

    @abstractmethod
    def link_lost(self) -> None:
        """Wake up who waits for connections to end."""

    def _accepted(
        self, credentials: Credentials, base_uri: str, limits: WireLimits | None
    ) -> SecureConnection[ServerConnection]:
        return secure_server(credentials, base_uri, self.now_ms(), limits=limits, scratch=self.scratch)

    @staticmethod
    def _pool(base_uri: str, limits: WireLimits | None, pool_limits: PoolLimits | None) -> Pool:
        return Pool(base_uri, random.random, limits=pool_limits, wire_limits=limits)

    def forget(self, pool: Pool) -> None:
        """Let go of a service that is not called any more."""
        for part in self._parts:
            if isinstance(part, BaseDialer) and part.pool is pool:
                part.abort()
                self._parts.remove(part)
                break

    def _shut_down(self) -> None:
        """Begin to close everything in order."""
        for part in self._parts:
            part.shutdown()

    def _open_links(self) -> Iterable[BaseLink[Any]]:
        return (link for part in self._parts for link in part.links)

    def abort(self) -> None:
        """Close everything at once."""
        for part in self._parts:
            part.abort()
        self._parts.clear()
