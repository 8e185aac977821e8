"""Blocks in tiers: what a tier is to a loop, and the tier in host memory.

A tier stores the sections of whole blocks and gives back all of them or those of a range of layers. A role
asks by `Store`, `ReadBlock`, `Drop` and `Load`; the methods here block, and a loop calls them in threads.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice, takewhile
from typing import Protocol

import attrs

from kvsp_core.container_header import ContainerHeader
from kvsp_core.errors import KVSPError, LocalProtocolError
from kvsp_core.roles.role import BlockName, JobFault, StoredBlock
from kvsp_services.buffers import header_part

__all__ = ["BlockFault", "BlockTier", "MemoryTier", "RangeDigests", "part_of"]


class BlockFault(KVSPError):
    """A tier could not do what it was asked; `fault` says why, in the role's words."""

    def __init__(self, fault: JobFault) -> None:
        super().__init__(f"block storage: {fault.value}")
        self.fault = fault


class BlockTier(Protocol):
    """A class of storage at a holder, as the loop sees it. Its methods may be called from several threads.

    `blocking` tells whether they take their time, and belong into one.
    """

    blocking: bool

    def store(self, block: StoredBlock, data: memoryview) -> bool:
        """Keep a block, K and V sections in order, replacing what is there; raises `BlockFault`.

        Returns whether the tier keeps `data` itself, which may then never be written to again.
        """
        ...

    def read(
        self, name: BlockName, layers: tuple[int, int] | None, acquire: Callable[[int], memoryview]
    ) -> tuple[StoredBlock, memoryview]:
        """Return a block, its header that of these layers (all, where None), and their sections in order.

        The sections are in memory from `acquire(size)` or in the tier's own, and are not to be written to.
        Digests are those of the whole block. Raises `BlockFault`.
        """
        ...

    def drop(self, name: BlockName) -> None:
        """Remove a block, if it is there."""
        ...

    def catalogue(self) -> tuple[StoredBlock, ...]:
        """Return what the tier holds, as far as it is whole; called once, before anything else."""
        ...

    def purge(self, scope_id: str) -> int:
        """Remove every block of a scope and return how many there were."""
        ...

    def aged(self, at_most: int) -> tuple[BlockName, ...]:
        """Return what has been here for longer than it may be, the oldest first. Short, whatever it holds."""
        ...

    def close(self) -> None:
        """Stop in order."""
        ...


def part_of(header: ContainerHeader, layers: tuple[int, int] | None) -> tuple[ContainerHeader, int, int]:
    """Return the header of these layers (all, where None), how many layers come before, and their octets.

    Raises `BlockFault` where they are not all there.
    """
    try:
        return (header, 0, 0) if layers is None else header_part(header, layers)
    except LocalProtocolError:
        raise BlockFault(JobFault.MISSING) from None


class RangeDigests:
    """Digests of containers of some layers of a block, so that those asked for again are not hashed again
    (decision W17); the last `at_most` of them. May be used from several threads."""

    def __init__(self, at_most: int = 4096) -> None:
        self._at_most = at_most
        self._digests: OrderedDict[tuple[BlockName, str, range], str] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, block: StoredBlock, data: memoryview) -> str:
        """Return the digest, hex32, of the container of these layers, both as a tier gives them."""
        key = (block.name, block.repr_digest, block.header.layers)
        with self._lock:
            known = self._digests.get(key)
            if known is not None:
                self._digests.move_to_end(key)
                return known
        digest = hashlib.sha256(block.header.encode())
        digest.update(data)
        found = digest.hexdigest()
        with self._lock:
            self._digests[key] = found
            if len(self._digests) > self._at_most:
                self._digests.popitem(last=False)
        return found


class MemoryTier:
    """Blocks in host memory, at most `capacity_bytes` of sections. It keeps the memory it is given.

    `aged` names what was stored longer than `retention_ms` ago.
    """

    blocking = False

    def __init__(
        self,
        capacity_bytes: int,
        *,
        retention_ms: int | None = None,
        clock_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._retention_ms = retention_ms
        self._clock_ms = clock_ms
        self._blocks: dict[BlockName, tuple[StoredBlock, memoryview, int]] = {}
        """Each with the time when it was stored, the oldest first."""
        self._lock = threading.Lock()
        self.used_bytes = 0

    def store(self, block: StoredBlock, data: memoryview) -> bool:
        """Keep a block in the memory it comes in."""
        with self._lock:
            held = self._blocks.get(block.name)
            added = data.nbytes - (held[1].nbytes if held else 0)
            if self.used_bytes + added > self._capacity_bytes:
                raise BlockFault(JobFault.FULL)
            self.used_bytes += added
            self._blocks.pop(block.name, None)
            self._blocks[block.name] = (block, data.toreadonly(), self._clock_ms())
        return True

    def read(
        self, name: BlockName, layers: tuple[int, int] | None, acquire: Callable[[int], memoryview]
    ) -> tuple[StoredBlock, memoryview]:
        """Return a block and its sections where they are."""
        held = self._blocks.get(name)
        if held is None:
            raise BlockFault(JobFault.MISSING)
        block, data, _ = held
        part, _, start = part_of(block.header, layers)
        return attrs.evolve(block, header=part), data[start : start + part.data_bytes]

    def drop(self, name: BlockName) -> None:
        """Remove a block, if it is there."""
        with self._lock:
            if held := self._blocks.pop(name, None):
                self.used_bytes -= held[1].nbytes

    def catalogue(self) -> tuple[StoredBlock, ...]:
        """Return what the tier holds."""
        with self._lock:
            return tuple(block for block, _, _ in self._blocks.values())

    def purge(self, scope_id: str) -> int:
        """Remove every block of a scope and return how many there were."""
        with self._lock:
            doomed = [name for name in self._blocks if name.scope_id == scope_id]
        for name in doomed:
            self.drop(name)
        return len(doomed)

    def aged(self, at_most: int) -> tuple[BlockName, ...]:
        """Return what is past its retention."""
        if self._retention_ms is None:
            return ()
        oldest_ms = self._clock_ms() - self._retention_ms
        with self._lock:
            old = takewhile(lambda held: held[1][2] < oldest_ms, self._blocks.items())
            return tuple(name for name, _ in islice(old, at_most))

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._blocks.clear()
            self.used_bytes = 0
