"""Stand-ins for the modules of SGLang, LMCache and torch that the backends import, which are not
installed here.

`make test-vllm` runs the backends with the real interface classes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvsp_core.identity import Scope

SCOPE_KEY = bytes(range(32))
SCOPE = Scope(SCOPE_KEY)


class Bitmap:
    """LMCache's, as far as it is used."""

    def __init__(self, size: int) -> None:
        self.bits = [False] * size

    def set(self, number: int) -> None:
        self.bits[number] = True

    def test(self, number: int) -> bool:
        return self.bits[number]


class StoreResult(int):
    """LMCache's `L2StoreResult`."""

    def __new__(cls, success: bool, bytes_transferred: int) -> StoreResult:
        return super().__new__(cls, bytes_transferred if success else -1)

    def is_successful(self) -> bool:
        return self >= 0


class Notifier:
    """LMCache's event notifier: a file descriptor that becomes readable."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0)

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


class L2AdapterInterface:
    """LMCache's interface, as far as it does something."""

    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.stored: list[Any] = []

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored += keys


class HiCacheStorage:
    """SGLang's interface, as far as it does something."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the backends be imported."""
    modules: dict[str, dict[str, Any]] = {
        "torch": {"uint8": np.uint8},
        "lmcache": {},
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.v1": {},
        "lmcache.v1.distributed": {},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": StoreResult},
        "lmcache.v1.distributed.l2_adapters": {},
        "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
        "lmcache.v1.platform": {},
        "lmcache.v1.platform.event_notifier": {"create_event_notifier": Notifier},
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "HiCacheStorageConfig": SimpleNamespace,
            "HiCacheStorageExtraInfo": SimpleNamespace,
        },
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
    for name in ("kvsp_client.sglang", "kvsp_client.lmcache"):
        patch.delitem(sys.modules, name, raising=False)


class Tensor:
    """A torch tensor over a numpy array, as far as it is used."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def view(self, dtype: Any) -> Tensor:
        return Tensor(self.array.view(dtype))

    def numpy(self) -> np.ndarray:
        return self.array


def page_pool(layout: str, *, pages: int, tokens: int, layers: int, heads: int, dim: int) -> SimpleNamespace:
    """Return host memory as SGLang's `MHATokenToKVPoolHost` has it, in bf16."""
    if layout == "page_first_direct":
        shape = (2, pages, layers, tokens, heads, dim)
    else:
        shape = (2, layers, pages * tokens, heads, dim)
    return SimpleNamespace(
        layout=layout,
        page_size=tokens,
        layer_num=layers,
        head_num=heads,
        head_dim=dim,
        dtype=np.dtype(ml_dtypes.bfloat16),
        kv_buffer=Tensor(np.zeros(shape, ml_dtypes.bfloat16)),
    )


def chunk(layers: int, tokens: int, hidden: int, first: int) -> SimpleNamespace:
    """Return memory as LMCache has it for a chunk, [2, layers, tokens, hidden] in bf16."""
    size = 2 * layers * tokens * hidden
    array = np.arange(first, first + size, dtype=np.uint16) if first else np.zeros(size, np.uint16)
    shape = (2, layers, tokens, hidden)
    return SimpleNamespace(array=array, byte_array=memoryview(array).cast("B"), get_shape=lambda: shape)


def key(number: int, *, salt: str = "", rank: int = 0) -> SimpleNamespace:
    """Return a chunk's key as LMCache has it."""
    return SimpleNamespace(
        chunk_hash=number.to_bytes(32, "big"),
        model_name="m",
        kv_rank=rank,
        object_group_id=0,
        cache_salt=salt,
    )


def write_key(directory: Path) -> Path:
    """Write the tenant's key to a file."""
    path = directory / "tenant.key"
    path.touch(0o600)
    path.write_bytes(SCOPE_KEY)
    return path
