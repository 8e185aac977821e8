"""Memory for blocks, used again and again: fresh memory costs more than what is done with it."""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Sequence
from typing import Final, TypeAlias

import attrs

from kvsp_core.container_header import ContainerHeader
from kvsp_core.errors import LocalProtocolError
from kvsp_core.registries import RAW_CODEC

__all__ = ["BlockBuffer", "BufferPool", "header_part"]

_STEP_BYTES: Final = 64 << 10
"""Sizes are rounded up to a multiple of this, so that blocks of one model share memory and little is
wasted."""

_LARGE_BYTES: Final = 4 << 20
"""From here on memory is only taken as it is written to: a header may claim much of which nothing comes."""
_Memory: TypeAlias = "bytearray | mmap.mmap"


def _fresh(size: int) -> _Memory:
    if size < _LARGE_BYTES:
        return bytearray(size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class BufferPool:
    """Hands out memory and takes it back, at most `kept_bytes` of it while nobody uses it."""

    def __init__(self, kept_bytes: int = 256 << 20) -> None:
        self._kept_bytes = kept_bytes
        self._free: dict[int, list[_Memory]] = {}
        self._lock = threading.Lock()
        self.free_bytes = 0

    def acquire(self, size: int) -> _Memory:
        """Return memory of at least this size, its content left from whoever had it before."""
        rounded = max(1, -(-size // _STEP_BYTES)) * _STEP_BYTES
        with self._lock:
            free = self._free.get(rounded)
            if free:
                self.free_bytes -= rounded
                return free.pop()
        return _fresh(rounded)

    def release(self, memory: _Memory) -> None:
        """Take memory back that nobody looks at any more."""
        with self._lock:
            if self.free_bytes + len(memory) <= self._kept_bytes:
                self.free_bytes += len(memory)
                self._free.setdefault(len(memory), []).append(memory)


@attrs.define(eq=False)
class BlockBuffer:
    """A role's buffer: the block in it, as far as it has come, and who still needs its memory."""

    pool: BufferPool
    header: ContainerHeader | None = None
    layer_digests: tuple[str, ...] = attrs.field(default=(), repr=False)
    repr_digest: str = attrs.field(default="", repr=False)
    data: memoryview = attrs.field(default=memoryview(b""), repr=False)
    """K and V sections of all its layers, in order."""
    _memory: _Memory | None = attrs.field(default=None, repr=False, init=False)
    _users: int = attrs.field(default=1, init=False)
    _kept: bool = attrs.field(default=False, init=False)

    def acquire(self, size: int) -> memoryview:
        """Return memory of the pool for this buffer, in place of what it had."""
        self._give_back()
        self._memory = self.pool.acquire(size)
        return memoryview(self._memory)[:size]

    def fill(
        self, header: ContainerHeader, data: memoryview, layer_digests: tuple[str, ...], repr_digest: str
    ) -> None:
        """Say what is in the buffer now."""
        self.header, self.data = header, data
        self.layer_digests, self.repr_digest = layer_digests, repr_digest

    def fill_from_layers(
        self, layers: Sequence[tuple[bytes | memoryview, bytes | memoryview]], token_count: int
    ) -> None:
        """Copy the sections of all layers of a block into memory of the pool, and compute their digests."""
        sections = tuple((memoryview(k).nbytes, memoryview(v).nbytes) for k, v in layers)
        header = ContainerHeader(codec=RAW_CODEC, token_count=token_count, sections=sections)
        data = self.acquire(header.data_bytes)
        whole = hashlib.sha256(header.encode())
        digests, position = [], 0
        for k_section, v_section in layers:
            start = position
            for section in (k_section, v_section):
                octets = memoryview(section).cast("B")
                data[position : position + octets.nbytes] = octets
                position += octets.nbytes
            digests.append(hashlib.sha256(data[start:position]).hexdigest())
            whole.update(data[start:position])
        self.fill(header, data, tuple(digests), whole.hexdigest())

    def layers(self) -> list[tuple[memoryview, memoryview]]:
        """Return the K and V section of each layer in the buffer, in place."""
        if self.header is None:
            raise LocalProtocolError("this buffer holds no block yet")
        found, start = [], 0
        for k_bytes, v_bytes in self.header.sections:
            middle, end = start + k_bytes, start + k_bytes + v_bytes
            found.append((self.data[start:middle], self.data[middle:end]))
            start = end
        return found

    def keep(self) -> None:
        """Leave the memory to a tier: it does not go back to the pool."""
        self._kept = True

    def use(self) -> None:
        """Take note of one more who reads the buffer, such as an answer that is being sent."""
        self._users += 1

    def free(self) -> None:
        """Take note that one of them is done; after the last the memory goes back to the pool."""
        if self._users <= 0:
            raise LocalProtocolError("this buffer is free already")
        self._users -= 1
        if self._users == 0:
            self.data = memoryview(b"")
            self._give_back()

    def _give_back(self) -> None:
        if self._memory is not None and not self._kept:
            self.pool.release(self._memory)
        self._memory, self._kept = None, False

    def pieces(self, layers: tuple[int, int] | None = None) -> tuple[bytes, memoryview]:
        """Return the container of these layers (all, where None): its header, and its sections in place."""
        header = self.header
        if header is None:
            raise LocalProtocolError("this buffer holds no block yet")
        if layers is None:
            return header.encode(), self.data
        part, _, start = header_part(header, layers)
        return part.encode(), self.data[start : start + part.data_bytes]


def header_part(header: ContainerHeader, layers: tuple[int, int]) -> tuple[ContainerHeader, int, int]:
    """Return the header of a range of layers, how many layers come before, and how many octets.

    Raises `LocalProtocolError` where they are not all there.
    """
    first, last = layers[0] - header.first_layer, layers[1] - header.first_layer
    if not 0 <= first <= last < len(header.sections):
        raise LocalProtocolError(f"layers {layers[0]} to {layers[1]} are not all there")
    part = attrs.evolve(header, first_layer=layers[0], sections=header.sections[first : last + 1])
    return part, first, sum(map(sum, header.sections[:first]))
