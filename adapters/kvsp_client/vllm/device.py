"""What needs torch: a cache in device memory, and the check that CPU attention lays blocks out as `layout`
says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvsp_client.vllm.layout import CacheLayout, Geometry, Tensor, split
from kvsp_core.errors import LocalProtocolError
from kvsp_core.layout import Array

__all__ = ["DeviceCache", "check_cpu_layout"]


class DeviceCache:
    """A cache in the memory of a device: `layers` holds K and V of each layer as views that `layout.split`
    made."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._layers = layers
        self._device = layers[0][0].device
        self._integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[layers[0][0].element_size()]

    def write(self, layer: int, blocks: Sequence[int], keys: Array, values: Array) -> None:
        """Fill blocks of a layer."""
        numbers = torch.tensor(blocks, device=self._device)
        for own, given in zip(self._layers[layer], (keys, values), strict=True):
            octets = torch.from_numpy(given.view(f"i{given.itemsize}")).to(self._device)
            own[numbers] = octets.view(own.dtype)

    def read(self, layer: int, blocks: Sequence[int], keys: Array, values: Array) -> None:
        """Copy blocks of a layer into arrays; returns when the copy is whole."""
        numbers = torch.tensor(blocks, device=self._device)
        for own, target in zip(self._layers[layer], (keys, values), strict=True):
            gathered = own[numbers].contiguous().view(self._integers).cpu()
            target.view(f"i{target.itemsize}")[...] = gathered.numpy()


def check_cpu_layout(dtype: torch.dtype, geometry: Geometry) -> None:
    """Raise `LocalProtocolError` where this processor's attention does not lay K and V out as `layout` says.

    vLLM picks a kernel by the processor, and some pack K for their matrix instructions. So a block is
    written by vLLM's own kernel and read through the mapping.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens, heads, dim = geometry.block_tokens, geometry.kv_heads, geometry.head_dim
    isa = _get_attn_isa(dtype, tokens, dim)
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(tokens, heads, dim, generator=generator).to(dtype) for _ in range(2))
    cache = torch.zeros(1, heads, tokens, 2 * dim, dtype=dtype)
    key_cache, value_cache = cache.view(1, heads, 2 * tokens, dim).chunk(2, dim=2)
    slots = torch.arange(tokens, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
    found = split(cache, CacheLayout.CPU, geometry)
    if not (torch.equal(found[0][0], keys) and torch.equal(found[1][0], values)):
        raise LocalProtocolError(
            f"vLLM's attention packs K and V in its own way on this processor (kernel {isa}),"
            " which this connector does not know; run vLLM without KVSP here"
        )
