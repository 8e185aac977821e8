"""Memory for the blocks of a prefix, and how the client is told where it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.layout import Array, element_dtype

__all__ = ["MemoryPool", "PrefixMemory", "Sections", "octets_of"]

Sections: TypeAlias = Callable[[int, int], tuple[Any, Any]]
"""Returns the memory of the K and the V section of a layer of a block: ``sections(block, layer)``.

Blocks count from 0 in the prefix or keys it is given with, layers from 0. Each is a buffer (bytes,
memoryview, numpy array) of contiguous octets, writable where blocks are fetched, of the size of a section:
``descriptor.section_bytes(descriptor.block_tokens)``, in ``kvsp-layout-1``. It is called in the thread of the
client's loop and must not wait for anything.
"""


def octets_of(buffer: Any) -> memoryview:
    """Return the octets of a buffer or of a numpy array of any type, without a copy.

    Raises `LocalProtocolError` where they are not contiguous.
    """
    if type(buffer) is memoryview and buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous:
        return buffer
    try:
        if isinstance(buffer, np.ndarray):
            if not buffer.flags.c_contiguous:
                raise TypeError
            return buffer.reshape(-1).view(np.uint8).data
        return memoryview(buffer).cast("B")
    except TypeError:
        raise LocalProtocolError(
            "a section is a buffer of contiguous octets, or a contiguous array"
        ) from None


class PrefixMemory:
    """Memory for so many blocks of a model, in which each layer of all blocks is one array.

    Used again, it saves the cost of fresh memory; its content is then that of before until it is filled.
    `memory` are octets to use for it, of which there may be more than needed; see `MemoryPool`.
    """

    def __init__(
        self, descriptor: CompatibilityDescriptor, blocks: int, *, memory: Array | None = None
    ) -> None:
        self.descriptor = descriptor
        self.blocks = blocks
        tokens = descriptor.block_tokens
        self._shape = (blocks * tokens, descriptor.kv_heads, descriptor.head_dim)
        self._dtype = element_dtype(descriptor)
        self._section = tokens * math.prod(self._shape[1:]) * self._dtype.itemsize
        shape = (descriptor.layers, 2, blocks, self._section)
        if memory is None:
            memory = np.empty(math.prod(shape), dtype=np.uint8)
        self.octets = memory
        """The octets it uses, and what is left of those it was given."""
        self._octets = memory[: math.prod(shape)].reshape(shape)
        self._flat = self._octets.reshape(-1).data

    def sections(self, block: int, layer: int) -> tuple[memoryview, memoryview]:
        """Return the memory of a section of K and of V; see `Sections`."""
        if not (0 <= block < self.blocks and 0 <= layer < self.descriptor.layers):
            raise IndexError(f"{self!r} has no layer {layer} of block {block}")
        size, side = self._section, self._section * self.blocks
        start = 2 * layer * side + block * size
        return self._flat[start : start + size], self._flat[start + side : start + side + size]

    def layer(self, layer: int) -> tuple[Array, Array]:
        """Return K and V of a layer of all blocks, each (tokens, kv_heads, head_dim), without a copy."""
        return self._array(self._octets[layer, 0]), self._array(self._octets[layer, 1])

    def block(self, block: int, layer: int) -> tuple[Array, Array]:
        """Return K and V of a layer of one block, each (block_tokens, kv_heads, head_dim), without a copy."""
        return self._array(self._octets[layer, 0, block]), self._array(self._octets[layer, 1, block])

    def _array(self, octets: Array) -> Array:
        return octets.reshape(-1).view(self._dtype).reshape(-1, *self._shape[1:])

    def __repr__(self) -> str:
        return f"<PrefixMemory: {self.blocks} blocks>"


class MemoryPool:
    """Memory that is used again: of fresh memory the system makes every page first, when it is written to.

    It keeps `keep_bytes` of what is given back.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._free: list[Array] = []

    def take(self, descriptor: CompatibilityDescriptor, blocks: int) -> PrefixMemory:
        """Return memory for so many blocks: the smallest that is free and large enough, or fresh memory.

        More than twice as large is too large: a few blocks would keep the memory of many from use.
        """
        size = 2 * descriptor.layers * blocks * descriptor.section_bytes(descriptor.block_tokens)
        fitting = [number for number, memory in enumerate(self._free) if size <= memory.nbytes <= 2 * size]
        found = min(fitting, key=lambda number: self._free[number].nbytes, default=None)
        memory = np.empty(size, dtype=np.uint8) if found is None else self._free.pop(found)
        return PrefixMemory(descriptor, blocks, memory=memory)

    def give_back(self, memory: PrefixMemory) -> None:
        """Take memory back that nobody uses any more. Where it is too much, what was free longest goes."""
        if memory.octets.nbytes > self._keep_bytes:
            return
        self._free.append(memory.octets)
        while sum(each.nbytes for each in self._free) > self._keep_bytes:
            del self._free[0]
