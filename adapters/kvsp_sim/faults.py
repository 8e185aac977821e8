"""What goes wrong in a simulation: which faults, how often, how long, and their end.

A profile names the kinds of faults that may happen. A seed draws from them: each run has some kinds and not
others, rare or frequent, since faults that hide one another are found one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from kvsp_sim.clock import Clock
from kvsp_sim.disk import StorageFaults
from kvsp_sim.engine import SimulatedEngine
from kvsp_sim.host import Cluster, Process
from kvsp_sim.network import NetworkFaults
from kvsp_sim.randomness import Randomness

__all__ = ["PROFILES", "Chaos", "draw_clock"]

_NETWORK: Final = ("slow", "breaks", "stalls", "one-way", "two-way", "isolate")
_PROCESSES: Final = ("crash", "pause")
_STORAGE: Final = ("late", "persist-fails", "job-fails", "rots", "noticed", "swapped", "forgotten", "full")

PROFILES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "none": (),
        "network": _NETWORK,
        "processes": _PROCESSES,
        "storage": _STORAGE,
        "engines": ("engine-dies", "engine-hangs"),
        "all": (*_NETWORK, *(_PROCESSES * 3), *_STORAGE),
    }
)
"""Kinds of faults by the name of a profile. A kind that stands twice is drawn twice as often."""

_MAX_OFFSET_MS: Final = 10**9
_MAX_DRIFT_PPM: Final = 5_000
_LONGEST_US: Final = 1_500_000
"""A fault may last longer than anybody waits for a silent peer."""


def draw_clock(random: Randomness) -> Clock:
    """Return a clock with an offset and a rate of its own (OP-2)."""
    drift_ppm = random.pick((0, 0, random.between(-_MAX_DRIFT_PPM, _MAX_DRIFT_PPM)))
    return Clock(random.below(_MAX_OFFSET_MS), drift_ppm)


class Chaos:
    """Lets faults happen in a cluster, until `heal`.

    `storage` gives the storage faults of each process; `mean_us` is the mean time between two faults.
    `persisting` names the processes that keep something durable: they are hit more often. `keeping` names
    those that keep blocks.
    """

    def __init__(
        self,
        cluster: Cluster,
        network: NetworkFaults,
        storage: Mapping[str, StorageFaults],
        kinds: tuple[str, ...],
        random: Randomness,
        *,
        mean_us: int,
        spared: frozenset[str] = frozenset(),
        persisting: tuple[str, ...] = (),
        keeping: tuple[str, ...] = (),
    ) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._network = network
        self._storage = storage
        self._random = random
        self._mean_us = max(1, mean_us)
        self._spared = spared
        self._persisting = persisting
        share = random.pick((0.2, 0.5))
        self._kinds = tuple(kind for kind in kinds if random.chance(share))
        self._most = random.pick((3, 8, 20))
        self._over = not self._kinds
        self._ends: list[Callable[[], None]] = []
        self._start: Mapping[str, Callable[[], None]] = {
            "slow": lambda: self._for_a_while(self._network, "slow", 0.3),
            "breaks": lambda: self._for_a_while(self._network, "breaks", 0.1),
            "stalls": lambda: self._for_a_while(self._network, "stalls", 0.2),
            "one-way": self._one_way,
            "two-way": self._two_way,
            "isolate": self._isolate,
            "crash": self._crash,
            "pause": self._pause,
            "late": lambda: self._storage_fault("late", 0.5),
            "persist-fails": lambda: self._storage_fault("persist_fails", 0.2, self._persisting),
            "job-fails": lambda: self._storage_fault("job_fails", 0.3, keeping),
            "rots": lambda: self._storage_fault("rots", 0.5, keeping),
            "noticed": lambda: self._storage_fault("noticed", 0.5, keeping),
            "swapped": lambda: self._storage_fault("swapped", 0.5, keeping),
            "forgotten": lambda: self._storage_fault("forgotten", 0.5, keeping),
            "full": lambda: self._storage_fault("full", 1.0, keeping),
            "engine-dies": self._kill_engine,
            "engine-hangs": self._hang_engine,
        }
        self._next()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of faults this run has."""
        return self._kinds

    def heal(self) -> None:
        """End all faults; none happens any more."""
        self._over = True
        for end in self._ends:
            end()
        self._ends.clear()
        self._network.heal()
        for faults in self._storage.values():
            faults.heal()
        for source, target in self._cluster.network.blocked:
            self._cluster.network.unblock(source, target)
        for process in self._cluster.processes.values():
            if process.paused:
                process.proceed()
            if not process.up:
                self._restart(process)

    def _next(self) -> None:
        if not self._over:
            self._world.after(self._random.between(1, 2 * self._mean_us), self._happen)

    def _happen(self) -> None:
        if not self._over:
            if len(self._ends) < self._most:
                self._start[self._random.pick(self._kinds)]()
            self._next()

    def _later(self, end: Callable[[], None]) -> None:
        """Have a fault end after a while, short or long."""
        self._ends.append(end)
        self._world.after(self._random.spread(500, _LONGEST_US), self._end, end)

    def _end(self, end: Callable[[], None]) -> None:
        if end in self._ends:
            self._ends.remove(end)
            end()

    def _for_a_while(self, faults: NetworkFaults | StorageFaults, name: str, most: float) -> None:
        setattr(faults, name, most * self._random.between(1, 10) / 10)
        self._later(lambda: setattr(faults, name, 0.0))

    # Processes

    def _serving(self) -> list[str]:
        """Return the processes whose engines are at work: what befalls them, users have to be spared."""
        processes = self._cluster.processes.items()
        return [
            name
            for name, process in processes
            if any(host.engine is not None and not host.engine.idle for host in process.hosts)
        ]

    def _process(self) -> Process | None:
        names = [name for name in self._cluster.processes if name not in self._spared]
        often = self._random.pick((self._persisting, self._serving(), (), ()))
        process = self._cluster.processes[self._random.pick(often or names)]
        return process if process.up and not process.paused else None

    def _crash(self) -> None:
        process = self._process()
        if process is not None:
            self._cluster.counts["crashes"] += 1
            process.crash()
            self._later(lambda: self._restart(process))

    def _restart(self, process: Process) -> None:
        if not process.up:
            process.set_clock(draw_clock(self._random))
            process.start()

    def _pause(self) -> None:
        process = self._process()
        if process is not None:
            self._cluster.counts["pauses"] += 1
            process.pause()
            life = process.starts
            self._later(lambda: process.proceed() if process.starts == life and process.paused else None)

    # Engines

    def _sound_engine(self) -> SimulatedEngine | None:
        """Return an engine, where none is dead or hangs: it is one at a time."""
        engines = [host.engine for host in self._cluster.hosts.values() if host.engine is not None]
        if any(engine.dead or engine.hung for engine in engines):
            return None
        return self._random.pick(engines)

    def _kill_engine(self) -> None:
        """Have everything fail that an engine is asked for, for a while."""
        engine = self._sound_engine()
        if engine is not None:
            engine.dead = True
            self._cluster.counts["engines dead"] += 1
            self._later(lambda: setattr(engine, "dead", False))

    def _hang_engine(self) -> None:
        """Have an engine say nothing any more: for a while, or until its process is restarted."""
        engine = self._sound_engine()
        if engine is not None:
            engine.hang()
            self._cluster.counts["engines hung"] += 1
            if self._random.chance(0.8):
                self._later(engine.go_on)

    def restart_hung(self) -> bool:
        """Restart the processes whose engines hang for good; return whether there were any."""
        hosts = [
            host for host in self._cluster.hosts.values() if host.engine is not None and host.engine.hung
        ]
        for host in hosts:
            host.process.crash()
            host.process.start()
        return bool(hosts)

    # Network

    def _pair(self) -> tuple[str, str]:
        first, second, *_ = self._random.shuffled(list(self._cluster.processes))
        return first, second

    def _block(self, directions: list[tuple[str, str]]) -> None:
        self._cluster.counts["partitions"] += 1
        network = self._cluster.network
        new = [direction for direction in directions if direction not in network.blocked]
        for direction in new:
            network.block(*direction)

        def unblock() -> None:
            for direction in new:
                network.unblock(*direction)

        self._later(unblock)

    def _one_way(self) -> None:
        self._block([self._pair()])

    def _two_way(self) -> None:
        first, second = self._pair()
        self._block([(first, second), (second, first)])

    def _isolate(self) -> None:
        serving = self._serving() if self._random.chance(0.5) else []
        name = self._random.pick(serving or list(self._cluster.processes))
        others = [other for other in self._cluster.processes if other != name]
        out = [(name, other) for other in others]
        into = [(other, name) for other in others]
        self._block(self._random.pick((out, into, out + into)))

    # Storage

    def _storage_fault(self, name: str, most: float, of: tuple[str, ...] = ()) -> None:
        process = self._random.pick(of or list(self._storage))
        self._cluster.counts["storage faults"] += 1
        self._for_a_while(self._storage[process], name, most)
