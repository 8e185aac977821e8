"""The simulated network: links with delays, connections that keep order, partitions, and requests that ride
them.

What TLS and TCP rule out does not happen: no octet changes on the way, and what arrives on a connection
arrives in order. All else does. A connection breaks with messages under way, and each end learns of it in
its own time or only by its timeouts; a request that was not answered when its connection broke is sent
again, as HTTP clients do with idempotent methods, while the first copy may still arrive; connections
overtake one another; a direction between two processes is blocked for a while, with what is sent meanwhile
arriving late or never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import attrs

from kvsp_sim.randomness import Randomness
from kvsp_sim.world import World

__all__ = ["Connection", "Network", "NetworkFaults"]


@attrs.define(kw_only=True)
class NetworkFaults:
    """How the network behaves; changed while a simulation runs. Probabilities are for each message."""

    least_us: int = 40
    most_us: int = 400
    slow: float = 0.0
    slow_us: int = 300_000
    breaks: float = 0.0
    resends: float = 0.5
    stalls: float = 0.0
    stall_us: int = 2_000_000

    def heal(self) -> None:
        """Behave from now on."""
        self.slow = self.breaks = self.stalls = 0.0


class Connection:
    """A connection between two processes: both directions keep order, until it breaks."""

    __slots__ = ("client", "last_us", "open", "riders", "server")

    def __init__(self, client: str, server: str) -> None:
        self.client = client
        self.server = server
        self.open = True
        self.last_us = [0, 0]  # when the last message of each direction arrives: to the server, to the client
        self.riders: dict[object, Callable[[], None]] = {}


_Held: TypeAlias = tuple[Connection, int, Callable[..., None], tuple[object, ...]]


class Network:
    """Delivers calls between processes, which are known by name.

    A message that its connection outlives is lost with it, but for requests the server's side has read
    already.
    """

    def __init__(self, world: World, faults: NetworkFaults, *, connections: int = 2) -> None:
        self._world = world
        self._random: Randomness = world.randomness.split("network")
        self.faults = faults
        self._connections = connections
        self._pool: dict[tuple[str, str], list[Connection]] = {}
        self._blocked: dict[tuple[str, str], list[_Held]] = {}

    def connection(self, client: str, server: str) -> Connection:
        """Return a connection from one process to another, one of a few."""
        pool = self._pool.setdefault((client, server), [])
        slot = self._random.below(self._connections)
        if slot < len(pool):
            if pool[slot].open:
                return pool[slot]
            pool[slot] = Connection(client, server)
            return pool[slot]
        pool.append(Connection(client, server))
        return pool[-1]

    def dial(self, client: str, server: str) -> Connection:
        """Return a new connection from one process to another."""
        pool = self._pool.setdefault((client, server), [])
        pool[:] = [connection for connection in pool if connection.open]
        pool.append(Connection(client, server))
        return pool[-1]

    def send(
        self, connection: Connection, to_server: bool, call: Callable[..., None], *arguments: object
    ) -> None:
        """Send a message: `call` is made when it arrives."""
        random, faults, now_us = self._random, self.faults, self._world.now_us
        delay = random.between(faults.least_us, faults.most_us)
        if faults.slow and random.chance(faults.slow):
            delay += random.spread(1, faults.slow_us)
        if faults.breaks and random.chance(faults.breaks):
            self._world.after(random.below(2 * delay), self.break_connection, connection)
        direction = 0 if to_server else 1
        arrives_us = max(now_us + delay, connection.last_us[direction])
        connection.last_us[direction] = arrives_us
        if self._blocked:
            ends = (connection.client, connection.server)
            held = self._blocked.get(ends if to_server else ends[::-1])
            if held is not None:
                held.append((connection, direction, call, arguments))
                return
        self._world.at(arrives_us, call, *arguments)

    def stall_us(self) -> int:
        """Return for how long a stream stands still now; 0 for not at all."""
        faults = self.faults
        if faults.stalls and self._random.chance(faults.stalls):
            return self._random.spread(1_000, faults.stall_us)
        return 0

    def break_connection(self, connection: Connection) -> None:
        """Break a connection: whoever rides it is told."""
        if not connection.open:
            return
        connection.open = False
        riders = list(connection.riders.values())
        connection.riders.clear()
        for tell in riders:
            tell()

    def break_all(self, process: str) -> None:
        """Break every connection of a process."""
        for ends, pool in self._pool.items():
            if process in ends:
                for connection in pool:
                    self.break_connection(connection)

    def block(self, source: str, target: str) -> None:
        """Hold back whatever goes from one process to another."""
        self._blocked.setdefault((source, target), [])

    def unblock(self, source: str, target: str) -> None:
        """Let through what was held back, and what comes."""
        for connection, direction, call, arguments in self._blocked.pop((source, target), ()):
            soon_us = self._world.now_us + self._random.between(1, 10 * self.faults.most_us)
            connection.last_us[direction] = max(soon_us, connection.last_us[direction])
            self._world.at(connection.last_us[direction], call, *arguments)

    @property
    def blocked(self) -> list[tuple[str, str]]:
        """The directions that are blocked, in the order in which they were."""
        return list(self._blocked)
