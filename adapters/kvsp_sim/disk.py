"""Simulated storage: the durable store of a role, and the tiers that hold blocks."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import attrs

from kvsp_core.container import decode_container
from kvsp_core.errors import RemoteProtocolError
from kvsp_core.roles.role import Append, BlockName, Delete, JobFault, Put, Stored, StoredBlock, Write
from kvsp_sim.randomness import Randomness
from kvsp_sim.world import World

__all__ = ["DurableStore", "StorageFaults", "Tier", "apply_write", "catalogue", "rotten"]

_FRESH: Final = 4
"""How many of the last containers of a tier may not have been synchronised yet."""
_TORN: Final = 0.2


@attrs.define(kw_only=True)
class StorageFaults:
    """How storage behaves; changed while a simulation runs. Probabilities are for each operation."""

    least_us: int = 50
    most_us: int = 2_000
    late: float = 0.0
    late_us: int = 500_000
    persist_fails: float = 0.0
    job_fails: float = 0.0
    rots: float = 0.0  # what is read is not what was stored, and the tier does not notice
    noticed: float = 0.0  # the same, and it does
    swapped: float = 0.0  # another block of the tier is read in its place
    forgotten: float = 0.0  # stored, acknowledged, and not there
    full: float = 0.0
    busy: float = 0.0  # not now: nothing has changed

    def delay_us(self, random: Randomness) -> int:
        """Return how long an operation takes."""
        if self.late and random.chance(self.late):
            return random.spread(self.most_us, self.late_us)
        return random.between(self.least_us, self.most_us)

    def heal(self) -> None:
        """Behave from now on."""
        self.late = self.persist_fails = self.job_fails = 0.0
        self.rots = self.noticed = self.swapped = self.forgotten = self.full = self.busy = 0.0


def apply_write(stored: Stored, write: Write) -> None:
    """Apply a write to what is stored."""
    table = stored.setdefault(write.table, {})
    match write:
        case Put():
            table[write.key] = write.value
        case Append():
            before = table.get(write.key, b"")
            if write.offset > len(before):
                raise AssertionError(
                    f"{write.table}: an append at {write.offset} leaves a hole after {len(before)}"
                )
            table[write.key] = before[: write.offset] + write.value
        case Delete():
            table.pop(write.key, None)


class DurableStore:
    """What a role persisted. Writes become durable in order, each group as a whole, after a delay.

    Of a group that could not be made durable a restart shows whether it is all the same. `written` is told
    what has become durable.
    """

    def __init__(
        self,
        world: World,
        random: Randomness,
        faults: StorageFaults,
        written: Callable[[tuple[Write, ...]], None] = lambda _: None,
    ) -> None:
        self._world = world
        self._random = random
        self._faults = faults
        self._written = written
        self._pending: list[tuple[Write, ...]] = []
        self._durable: Stored = {}
        self._free_us = 0
        self._life = 0

    def persist(self, writes: tuple[Write, ...], done: Callable[[bool], None]) -> None:
        """Make writes durable; `done` tells whether they are."""
        self._pending.append(writes)
        fails = bool(self._faults.persist_fails) and self._random.chance(self._faults.persist_fails)
        self._free_us = max(self._free_us, self._world.now_us) + self._faults.delay_us(self._random)
        self._world.at(self._free_us, self._commit, self._life, fails, done)

    def _commit(self, life: int, fails: bool, done: Callable[[bool], None]) -> None:
        if life != self._life:
            return
        if not fails:
            self._apply(self._pending.pop(0))
        done(not fails)

    def crash(self) -> None:
        """Lose power: of the groups under way some became durable, in order, and nobody was told."""
        self._life += 1
        for writes in self._pending[: self._random.between(0, len(self._pending))]:
            self._apply(writes)
        self._pending.clear()
        self._free_us = 0

    def _apply(self, writes: tuple[Write, ...]) -> None:
        for write in writes:
            apply_write(self._durable, write)
        self._written(writes)

    def load(self) -> Stored:
        """Return a copy of what is durable."""
        return {name: dict(table) for name, table in self._durable.items()}


class Tier:
    """A tier of blocks: containers by name, up to a capacity in octets."""

    def __init__(
        self,
        world: World,
        random: Randomness,
        faults: StorageFaults,
        *,
        name: str,
        capacity_bytes: int,
        survives: bool,
    ) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.blocks: dict[BlockName, bytes] = {}
        self.forgotten: set[BlockName] = set()
        """What was stored, acknowledged, and is not there; nobody has noticed yet."""
        self.used_bytes = 0
        self._world = world
        self._random = random
        self._faults = faults
        self._survives = survives
        self._under_way: dict[BlockName, bytes] = {}
        self._fresh: deque[BlockName] = deque(maxlen=_FRESH)

    def delay_us(self) -> int:
        """Return how long the next job takes."""
        return self._faults.delay_us(self._random)

    def begin(self, name: BlockName, container: bytes) -> None:
        """Begin to write a container, which `store` ends."""
        self._under_way[name] = container

    def store(self, name: BlockName, container: bytes) -> JobFault | None:
        """Keep a container; return why it is not kept."""
        self._under_way.pop(name, None)
        if self._faults.busy and self._random.chance(self._faults.busy):
            return JobFault.BUSY
        if self._faults.job_fails and self._random.chance(self._faults.job_fails):
            return JobFault.BROKEN
        size = len(container) - len(self.blocks.get(name, b""))
        full = self._faults.full and self._random.chance(self._faults.full)
        if full or self.used_bytes + size > self.capacity_bytes:
            return JobFault.FULL
        if self._faults.forgotten and self._random.chance(self._faults.forgotten):
            self.forgotten.add(name)
            return None
        self.blocks[name] = container
        self.used_bytes += size
        self._fresh.append(name)
        return None

    def read(self, name: BlockName) -> bytes | JobFault:
        """Return a container as the tier gives it, or why it gives none."""
        faults, random = self._faults, self._random
        if faults.busy and random.chance(faults.busy):
            return JobFault.BUSY
        if faults.job_fails and random.chance(faults.job_fails):
            return JobFault.BROKEN
        container = self.blocks.get(name)
        if container is None:
            return JobFault.MISSING
        if faults.noticed and random.chance(faults.noticed):
            self.drop(name)
            return JobFault.CORRUPT
        if faults.swapped and random.chance(faults.swapped):
            return random.pick(list(self.blocks.values()))
        if faults.rots and random.chance(faults.rots):
            return rotten(container, random)
        return container

    def drop(self, name: BlockName) -> None:
        """Remove a container."""
        self.forgotten.discard(name)
        self.used_bytes -= len(self.blocks.pop(name, b""))

    def crash(self) -> None:
        """Lose power: memory is empty, storage keeps what it had, but for what was not synchronised.

        Of what was written last, some is torn, which is found when the tier is listed; of what was under way,
        some is there, which nobody was told.
        """
        if not self._survives:
            self.blocks.clear()
            self.used_bytes = 0
        for name in self._fresh:
            if self._random.chance(_TORN):
                self.drop(name)
        under_way = self._under_way.items() if self._survives else ()
        for name, container in under_way:
            if self._random.chance(0.5) and self.used_bytes + len(container) <= self.capacity_bytes:
                self.blocks[name] = container
                self.used_bytes += len(container)
        self._fresh.clear()
        self._under_way.clear()
        self.forgotten.clear()


def rotten(container: bytes, random: Randomness) -> bytes:
    """Return the container with one bit of its sections turned, so that its form is still right."""
    header, _ = decode_container(container)
    octets = bytearray(container)
    octets[random.between(header.header_bytes, len(octets) - 1)] ^= 1 << random.below(8)
    return bytes(octets)


def catalogue(blocks: Mapping[BlockName, bytes]) -> tuple[StoredBlock, ...]:
    """Return what a tier holds, as `Load` asks for it."""
    stored = []
    for name, container in blocks.items():
        try:
            header, digests = decode_container(container)
        except RemoteProtocolError:
            continue
        stored.append(StoredBlock(name, header, digests, hashlib.sha256(container).hexdigest()))
    return tuple(stored)
