"""Connections of the simulated network that carry octets: cut anywhere, late, standing still, and broken in
the middle of anything.

An `End` drives one end of a connection of `kvsp_h2`, as a pump does with a socket. TLS is left out: what it
would add, who the peer is, is told by whom the connection was opened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from kvsp_h2.connection import Connection
from kvsp_h2.events import Event
from kvsp_h2.http2 import ClientConnection, ServerConnection
from kvsp_sim.randomness import Randomness
from kvsp_sim.streams import Streams

if TYPE_CHECKING:
    from kvsp_sim.host import Host
    from kvsp_sim.network import Connection as Path
    from kvsp_sim.network import Network

__all__ = ["End", "Link"]

HTTP = TypeVar("HTTP", bound=Connection)

_UNNOTICED: Final = 0.1
"""How often nothing tells one end that a connection is gone, but the silence."""
_WHOLE: Final = 0.6
"""How often what is written at a time arrives at a time."""
_PIECES: Final = 4


class Link:
    """A connection: its path through the network, and its ends, as far as there are any yet."""

    def __init__(self, path: Path, streams: Streams) -> None:
        self.path = path
        self.streams = streams
        self.opening = True
        self.client: End[ClientConnection] | None = None
        self.server: End[ServerConnection] | None = None
        self._early: list[bytes] = []
        """What has come to a client that stands still and has not seen yet that the connection is open."""

    def arrive(self, to_server: bool, octets: bytes) -> None:
        """Bring octets to one end."""
        end = self.server if to_server else self.client
        if end is not None:
            end.arrive(octets)
        elif self.opening:
            self._early.append(octets)

    def take_early(self) -> None:
        """Bring the client what came before it was there."""
        early, self._early = self._early, []
        for octets in early:
            self.arrive(False, octets)

    def was_read(self, by_server: bool, count: int) -> None:
        """Tell one end that the other has read so many of its octets."""
        end = self.client if by_server else self.server
        if end is not None:
            end.was_read(count)


class End(Generic[HTTP]):
    """One end of a connection: `on_event` is told what its HTTP/2 tells.

    What is written beyond `room_bytes` that the other end has not read waits in the HTTP/2 connection, as it
    does where a socket takes no more.
    """

    def __init__(
        self,
        host: Host,
        link: Link,
        http: HTTP,
        on_event: Callable[[Any, Event], None],
        random: Randomness,
        *,
        is_client: bool,
        room_bytes: int,
    ) -> None:
        self.host = host
        self.http = http
        self._life = host.life
        self._network: Network = host.network
        self._link = link
        self._path = link.path
        self._on_event = on_event
        self._random = random
        self._is_client = is_client
        self._room_bytes = room_bytes
        self._unread = 0
        """Octets we have written that the other end has not read."""
        self._waiting: deque[bytes] = deque()
        """What has arrived while the connection stood still."""
        self._turn_is_due = False
        self._armed_us: int | None = None
        self._closed = False
        self._cut_off = False
        self._path.riders[self] = self._broken

    @property
    def alive(self) -> bool:
        """Whether the process is as it was when the connection was opened."""
        return self.host.life == self._life

    def flush(self) -> None:
        """Tell what has happened, and send what there is to send, once the host has done what it does now."""
        if not self._turn_is_due:
            self._turn_is_due = True
            self.host.later(0, self._turn)

    # What arrives

    def arrive(self, octets: bytes) -> None:
        """Take octets that arrive, empty at their end; where the connection is broken, maybe only a part."""
        if not self.alive:
            return
        if octets and not self._path.open:
            octets = b"" if self._cut_off else octets[: self._random.between(0, len(octets))]
            self._cut_off = True
            if not octets:
                return
        stall_us = 0 if self._waiting else self._network.stall_us()
        if stall_us:
            self.host.later(stall_us, self._go_on)
        if stall_us or self._waiting:
            self._waiting.append(octets)
        else:
            self._read(octets)

    def _go_on(self) -> None:
        while self._waiting:
            self._read(self._waiting.popleft())

    def _read(self, octets: bytes) -> None:
        host = self.host
        if host.process.paused:
            host.process.keep(host, self._read, octets)
            return
        if octets:
            self.http.receive_data(octets, host.now_ms)
            self._link.was_read(not self._is_client, len(octets))
        else:
            self.http.receive_eof(host.now_ms)
        self._turn()

    def was_read(self, count: int) -> None:
        """The other end has read so many octets of ours."""
        was_full = self._unread >= self._room_bytes
        self._unread -= count
        if was_full and self.alive:
            self.flush()

    # What goes out

    def _turn(self) -> None:
        """Tell events and send octets until there are none."""
        self._turn_is_due = False
        http, busy = self.http, True
        while busy:
            busy = False
            while (event := http.next_event()) is not None:
                self._link.streams.check(event, at_client=self._is_client)
                self._on_event(self, event)
            if self._unread < self._room_bytes and (octets := http.data_to_send()):
                self._write(octets)
                busy = True
        if http.dropped:
            self._network.break_connection(self._path)
        elif http.ended and not self._closed:
            self._closed = True
            self._send(b"")
        self._arm()

    def _write(self, octets: bytes) -> None:
        self._unread += len(octets)
        random = self._random
        if not random.chance(_WHOLE):
            for _ in range(random.between(1, _PIECES)):
                cut = random.spread(1, len(octets))
                self._send(octets[:cut])
                octets = octets[cut:]
                if not octets:
                    return
        self._send(octets)

    def _send(self, octets: bytes) -> None:
        if self._path.open:
            self._network.send(self._path, self._is_client, self._link.arrive, self._is_client, octets)

    # Time, and the end

    def _arm(self) -> None:
        """Have the connection woken at its next deadline."""
        due_ms = self.http.next_deadline_ms()
        if due_ms is None or (self.http.ended and self._closed):
            return
        due_us = self.host.process.clock.when(due_ms)
        if self._armed_us is None or due_us < self._armed_us:
            self._armed_us = due_us
            self.host.world.at(due_us, self._timer, due_us)

    def _timer(self, due_us: int) -> None:
        if not self.alive or self._armed_us != due_us:
            return
        process = self.host.process
        if process.paused:
            process.keep(self.host, self._timer, due_us)
            return
        self._armed_us = None
        self.http.handle_timer(self.host.now_ms)
        self._turn()

    def _broken(self) -> None:
        """The connection broke: learn of it soon, late, or by the silence only."""
        if self.alive and not self._random.chance(_UNNOTICED):
            self.host.later(self._random.spread(1, 2_000 if self._is_client else 200_000), self.arrive, b"")
