"""The backends for SGLang and LMCache with the real interface classes, made by the real factories.

Run with vLLM's Python and a path to packages of both that were installed without what they depend on;
nothing of either that needs a GPU is imported. The argument is a JSON object of settings; prints what it
has shown.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

LAYERS, HEADS, DIM, TOKENS = 30, 3, 64, 32


def main() -> None:
    settings = json.loads(sys.argv[1])
    {"sglang": sglang, "lmcache": lmcache, "device": device}[sys.argv[2]](settings)


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sglang(settings: dict[str, Any]) -> None:
    """Pages through SGLang's own factory of dynamic backends, and a pool as its `MHATokenToKVPoolHost` is."""
    for name in ("triton", "triton.language", "IPython", "IPython.display"):
        module: Any = MagicMock(name=name, __spec__=None, __path__=[], __version__="0")
        sys.modules[name] = module
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="m",
        extra_config={
            "backend_name": "kvsp",
            "module_path": "kvsp_client.sglang",
            "class_name": "KVSPStorage",
            "interface_v1": 1,
            "kvsp": settings,
        },
    )
    keys = [("5a" * 31) + f"{n:02x}" for n in range(2)]
    pools = [
        SimpleNamespace(
            layout="layer_first",
            page_size=TOKENS,
            layer_num=LAYERS,
            head_num=HEADS,
            head_dim=DIM,
            dtype=torch.float32,
            kv_buffer=torch.randn(2, LAYERS, 2 * TOKENS, HEADS, DIM) * scale,
        )
        for scale in (1, 0)
    ]
    backends = [StorageBackendFactory.create_backend("dynamic", config, pool) for pool in pools]
    for backend, pool in zip(backends, pools, strict=True):
        assert isinstance(backend, HiCacheStorage)
        backend.register_mem_pool_host(pool)
    indices = torch.arange(2 * TOKENS)
    assert backends[1].batch_exists(keys) == 0
    assert backends[0].batch_set_v1(keys, indices) == [True, True]
    until(lambda: backends[1].batch_exists(keys) == 2)
    assert backends[1].batch_get_v1(keys, indices) == [True, True]
    assert torch.equal(pools[0].kv_buffer, pools[1].kv_buffer)
    for backend in backends:
        backend.close()
    print("sglang: pages stored and loaded")


def lmcache(settings: dict[str, Any]) -> None:
    """Chunks through LMCache's own plugin adapter, keys and memory objects."""
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.distributed.l2_adapters.config import get_type_name_for_config
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import (
        PluginL2AdapterConfig,
        _create_plugin_adapter,
    )
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    config = PluginL2AdapterConfig.from_dict(
        {
            "module_path": "kvsp_client.lmcache",
            "class_name": "KVSPL2Adapter",
            "adapter_params": settings | {"chunk_tokens": TOKENS},
        }
    )
    assert get_type_name_for_config(config) == "plugin"
    adapter = _create_plugin_adapter(config)
    assert isinstance(adapter, L2AdapterInterface)

    def memory(values: torch.Tensor) -> TensorMemoryObj:
        raw = values.contiguous().view(torch.uint8).flatten()
        metadata = MemoryObjMetadata(
            shape=values.shape,
            dtype=values.dtype,
            address=0,
            phy_size=raw.numel(),
            ref_count=1,
            pin_count=0,
            fmt=MemoryFormat.KV_2LTD,
        )
        return TensorMemoryObj(raw, metadata, None)

    def finished(descriptor: int, take: Callable[[], Any]) -> Any:
        assert select.select([descriptor], [], [], 60)[0]
        import os

        os.eventfd_read(descriptor)
        return take()

    def looked_up(keys: list[Any]) -> list[bool]:
        number = adapter.submit_lookup_and_lock_task(keys, {})
        found = finished(
            adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(number)
        )
        return [found.test(n) for n in range(len(keys))]

    keys = [ObjectKey(chunk_hash=bytes([n]) * 32, model_name="m", kv_rank=0) for n in (1, 2, 3)]
    shape = (2, LAYERS, TOKENS, HEADS * DIM)
    stored = [memory(torch.randn(*shape)) for _ in range(2)]
    number = adapter.submit_store_task(keys[:2], stored)
    done = finished(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    assert done[number].is_successful()
    until(lambda: looked_up(keys) == [True, True, False])
    loaded = [memory(torch.zeros(*shape)) for _ in range(3)]
    number = adapter.submit_load_task(keys, loaded)
    found = finished(adapter.get_load_event_fd(), lambda: adapter.query_load_result(number))
    assert [found.test(n) for n in range(3)] == [True, True, False]
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(stored, loaded, strict=False))
    assert adapter.get_usage().total_bytes_used == sum(each.get_size() for each in stored)
    adapter.close()
    print("lmcache: chunks stored and loaded")


def device(settings: dict[str, Any]) -> None:
    """The cache of a device, with torch's tensors in host memory: every layout, restrided."""
    import numpy as np

    from kvsp_client.vllm.device import DeviceCache, check_cpu_layout
    from kvsp_client.vllm.layout import CacheLayout, Geometry, split

    geometry = Geometry(TOKENS, HEADS, DIM)
    shapes = {
        CacheLayout.CPU: (5, HEADS, TOKENS, 2 * DIM),
        CacheLayout.CONTENT: (5, HEADS, TOKENS, 2 * DIM),
        CacheLayout.KV_FIRST: (2, 5, TOKENS, HEADS, DIM),
        CacheLayout.BLOCK_FIRST: (5, 2, TOKENS, HEADS, DIM),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check_cpu_layout(dtype, geometry)
        for layout, shape in shapes.items():
            tensor = torch.zeros(*shape, dtype=dtype)
            if layout is not CacheLayout.CPU:
                one, other = len(shape) - 3, len(shape) - 2
                tensor = tensor.transpose(one, other).contiguous().transpose(one, other)
            cache = DeviceCache([split(tensor, layout, geometry)])
            kind = np.dtype(f"u{dtype.itemsize}")
            given = np.arange(2 * 2 * TOKENS * HEADS * DIM).astype(kind).reshape(2, 2, TOKENS, HEADS, DIM)
            cache.write(0, [4, 1], given[0], given[1])
            found = np.zeros_like(given)
            cache.read(0, [4, 1], found[0], found[1])
            assert (found == given).all(), (dtype, layout)
    print("device: every layout")


if __name__ == "__main__":
    main()
