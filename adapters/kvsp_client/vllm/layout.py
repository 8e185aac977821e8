"""How vLLM keeps K and V of a layer, as views in the order of ``kvsp-layout-1`` (requirement KC-4,
decision W8).

`split` takes the tensor of one layer, numpy's or torch's, and returns K and V indexed [block, token,
kv_head, dimension] over the same memory: assigning to a view writes vLLM's cache, copying one gives
sections to send. Only slices, transpositions and splits of an axis are used, so nothing is copied and both
libraries do the same; what HND and NHD mean for strides is therefore in the tensor itself.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeAlias

import attrs

from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor

__all__ = ["CacheLayout", "Geometry", "Tensor", "layout_of", "split"]

Tensor: TypeAlias = Any
"""A numpy array or a torch tensor: what both can do is used."""


class CacheLayout(Enum):
    """What the axes of a layer's tensor are. H: KV heads, N: tokens of a block, D: dimensions of a head."""

    CPU = "cpu"
    """[blocks, H, N, 2 D]: in each block and head all K, stored [D, N], then all V, stored [N, D]."""
    CONTENT = "content"
    """[blocks, H, N, 2 D], K before V for each token: attention on GPUs, since vLLM 0.30."""
    KV_FIRST = "kv-first"
    """[2, blocks, N, H, D]: FlashAttention, before that."""
    BLOCK_FIRST = "block-first"
    """[blocks, 2, N, H, D]: FlashInfer and Triton, before that."""


@attrs.frozen
class Geometry:
    """The shape of a block in one layer."""

    block_tokens: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, descriptor: CompatibilityDescriptor) -> Geometry:
        """Return that of a descriptor."""
        return cls(descriptor.block_tokens, descriptor.kv_heads, descriptor.head_dim)


def layout_of(shape: tuple[int, ...], geometry: Geometry, *, cpu: bool) -> CacheLayout:
    """Return the layout of a layer's tensor from its shape; `cpu` where vLLM's CPU attention made it.

    Raises `LocalProtocolError` where the shape is none of those known, or does not tell them apart: guessed
    wrongly, K would be taken for V.
    """
    tokens, heads, dim = geometry.block_tokens, geometry.kv_heads, geometry.head_dim
    if len(shape) == 4 and tuple(shape[1:]) == (heads, tokens, 2 * dim):
        return CacheLayout.CPU if cpu else CacheLayout.CONTENT
    if len(shape) == 5 and tuple(shape[2:]) == (tokens, heads, dim):
        if shape[0] == 2 and shape[1] != 2:
            return CacheLayout.KV_FIRST
        if shape[1] == 2 and shape[0] != 2:
            return CacheLayout.BLOCK_FIRST
    raise LocalProtocolError(
        f"a KV cache tensor has the shape {tuple(shape)}; with {tokens} tokens a block, {heads} KV heads and "
        f"head dimension {dim} that is no layout this connector knows"
    )


def split(cache: Tensor, layout: CacheLayout, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return K and V of a layer's tensor, each [blocks, block_tokens, kv_heads, head_dim], over its memory.

    Raises `LocalProtocolError` where vLLM's CPU layout is not contiguous within a head.
    """
    tokens, heads, dim = geometry.block_tokens, geometry.kv_heads, geometry.head_dim
    if layout is CacheLayout.KV_FIRST:
        return cache[0], cache[1]
    if layout is CacheLayout.BLOCK_FIRST:
        return cache[:, 0], cache[:, 1]
    if layout is CacheLayout.CONTENT:
        by_token = cache.swapaxes(1, 2)
        return by_token[..., :dim], by_token[..., dim:]
    if _element_strides(cache)[2:] != (2 * dim, 1):
        # Joining the last two axes would then copy, and what is written to the copy would be lost.
        raise LocalProtocolError("vLLM's CPU cache is not contiguous within a head; its layout is not known")
    blocks, half = cache.shape[0], tokens * dim
    flat = cache.reshape(blocks, heads, 2 * half)
    keys = flat[:, :, :half].reshape(blocks, heads, dim, tokens)
    values = flat[:, :, half:].reshape(blocks, heads, tokens, dim)
    return keys.swapaxes(2, 3).swapaxes(1, 2), values.swapaxes(1, 2)


def _element_strides(cache: Tensor) -> tuple[int, ...]:
    """Return strides in elements, which is what torch counts; numpy counts octets."""
    if hasattr(cache, "stride"):
        return tuple(cache.stride())
    return tuple(step // cache.itemsize for step in cache.strides)
