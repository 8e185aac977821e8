"""Memory for the blocks of a prefix, and how the client is told where it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.layout import Array, element_dtype

__all__ = ["PrefixMemory", "Sections", "octets_of"]

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
    """

    def __init__(self, descriptor: CompatibilityDescriptor, blocks: int) -> None:
        self.descriptor = descriptor
        self.blocks = blocks
        tokens = descriptor.block_tokens
        self._shape = (blocks * tokens, descriptor.kv_heads, descriptor.head_dim)
        self._dtype = element_dtype(descriptor)
        self._section = tokens * math.prod(self._shape[1:]) * self._dtype.itemsize
        self._octets = np.empty((descriptor.layers, 2, blocks, self._section), dtype=np.uint8)
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
