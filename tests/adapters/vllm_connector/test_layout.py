"""vLLM's cache tensors as blocks of ``kvsp-layout-1``, on shapes as vLLM makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsp_client.vllm.layout import CacheLayout, Geometry, layout_of, split
from kvsp_core.errors import LocalProtocolError

# SmolLM2-135M in vLLM 0.32 on a CPU: 30 tensors of shape (blocks, 3, 32, 128), contiguous.
SMOLLM2 = Geometry(block_tokens=32, kv_heads=3, head_dim=64)
SMALL = Geometry(block_tokens=4, kv_heads=2, head_dim=6)
BLOCKS = 5


def sections(geometry: Geometry) -> tuple[np.ndarray, np.ndarray]:
    """K and V of all blocks, each element another number."""
    shape = (BLOCKS, geometry.block_tokens, geometry.kv_heads, geometry.head_dim)
    numbers = np.arange(2 * np.prod(shape), dtype=np.int32).reshape(2, *shape)
    return numbers[0], numbers[1]


def stored(layout: CacheLayout, geometry: Geometry, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the tensor as that engine would hold it, written down element by element."""
    n, h, d = geometry.block_tokens, geometry.kv_heads, geometry.head_dim
    if layout is CacheLayout.CPU:
        made = np.zeros((BLOCKS, h, 2 * n * d), np.int32)
        for b, t, head, x in np.ndindex(keys.shape):
            made[b, head, x * n + t] = keys[b, t, head, x]
            made[b, head, n * d + t * d + x] = values[b, t, head, x]
        return made.reshape(BLOCKS, h, n, 2 * d)
    if layout is CacheLayout.CONTENT:
        made = np.zeros((BLOCKS, h, n, 2 * d), np.int32)
        for b, t, head, x in np.ndindex(keys.shape):
            made[b, head, t, x] = keys[b, t, head, x]
            made[b, head, t, d + x] = values[b, t, head, x]
        return made
    both = np.stack([keys, values], 0 if layout is CacheLayout.KV_FIRST else 1)
    return np.ascontiguousarray(both)


@pytest.mark.requirement("KC-4")
@pytest.mark.parametrize("layout", list(CacheLayout))
def test_each_layout_shows_k_and_v_as_the_protocol_orders_them(layout: CacheLayout) -> None:
    keys, values = sections(SMALL)
    found = split(stored(layout, SMALL, keys, values), layout, SMALL)
    np.testing.assert_array_equal(found[0], keys)
    np.testing.assert_array_equal(found[1], values)


@pytest.mark.parametrize("layout", list(CacheLayout))
def test_writing_to_the_views_writes_the_engines_cache(layout: CacheLayout) -> None:
    keys, values = sections(SMALL)
    wanted = stored(layout, SMALL, keys, values)
    cache = np.zeros_like(wanted)
    own_keys, own_values = split(cache, layout, SMALL)
    own_keys[[4, 0, 2, 1, 3]] = keys[[4, 0, 2, 1, 3]]
    own_values[[4, 0, 2, 1, 3]] = values[[4, 0, 2, 1, 3]]
    np.testing.assert_array_equal(cache, wanted)


@pytest.mark.parametrize("layout", [CacheLayout.CONTENT, CacheLayout.KV_FIRST, CacheLayout.BLOCK_FIRST])
def test_the_order_in_memory_is_the_tensors_own_matter(layout: CacheLayout) -> None:
    """HND and NHD are the same axes with other strides."""
    keys, values = sections(SMALL)
    tensor = stored(layout, SMALL, keys, values)
    one, other = tensor.ndim - 3, tensor.ndim - 2
    restrided = np.ascontiguousarray(tensor.swapaxes(one, other)).swapaxes(one, other)
    assert restrided.strides != tensor.strides
    found = split(restrided, layout, SMALL)
    np.testing.assert_array_equal(found[0], keys)
    np.testing.assert_array_equal(found[1], values)
    assert np.shares_memory(found[0], restrided)


@pytest.mark.parametrize(
    ("shape", "cpu", "layout"),
    [
        ((2048, 3, 32, 128), True, CacheLayout.CPU),
        ((2048, 3, 32, 128), False, CacheLayout.CONTENT),
        ((2, 2048, 32, 3, 64), False, CacheLayout.KV_FIRST),
        ((2048, 2, 32, 3, 64), False, CacheLayout.BLOCK_FIRST),
    ],
)
def test_a_layout_is_told_by_its_shape(shape: tuple[int, ...], cpu: bool, layout: CacheLayout) -> None:
    assert layout_of(shape, SMOLLM2, cpu=cpu) is layout


@pytest.mark.parametrize(
    "shape",
    [
        (2048, 32, 576),  # latent attention
        (2, 2, 32, 3, 64),  # two blocks: K and V, or blocks?
        (2048, 3, 16, 128),  # another block size
        (2048, 6, 32, 64),  # K heads, then V heads
        (2, 2048, 16 * 3 * 64),  # packed for another kernel
    ],
)
def test_what_is_not_known_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LocalProtocolError, match="no layout this connector knows"):
        layout_of(shape, SMOLLM2, cpu=False)


def test_a_cpu_cache_that_is_not_contiguous_is_refused() -> None:
    """What joins its axes would be a copy, and blocks written to it would be lost."""
    geometry = SMALL
    wide: Any = np.zeros((BLOCKS, geometry.kv_heads, geometry.block_tokens, 4 * geometry.head_dim), np.int16)
    with pytest.raises(LocalProtocolError, match="not contiguous"):
        split(wide[..., : 2 * geometry.head_dim], CacheLayout.CPU, geometry)
