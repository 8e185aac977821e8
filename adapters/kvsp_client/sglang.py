"""SGLang's hierarchical cache over KVSP: a `HiCacheStorage` for its dynamic backend
(``docs/other_engines.md``).

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvsp",
        "module_path": "kvsp_client.sglang", "class_name": "KVSPStorage", "interface_v1": 1, "kvsp": {...}}'

A page is a block, read from and written to SGLang's host memory without a copy, so its layout is one in
which a layer of a page is in one piece: ``layer_first`` or ``page_first_direct``. Nothing that goes wrong
here is an exception there: what did not come is a miss, and what was not expected is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo

from kvsp_client.backend_settings import Backend, BackendSettings, checked
from kvsp_client.errors import ClientError
from kvsp_client.memory import Sections
from kvsp_client.object_names import object_keys
from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import Scope
from kvsp_core.layout import Array
from kvsp_core.prefix import PrefixKeys

__all__ = ["KVSPStorage"]

T = TypeVar("T")

_NAMES: Final = "sglang-page-hash"
_LAYER_FIRST: Final = "layer_first"
_PAGE_FIRST: Final = "page_first_direct"

logger = logging.getLogger("sglang.kvsp")


class KVSPStorage(HiCacheStorage):
    """Pages of SGLang's host cache as blocks at a cache server.

    `kwargs`, which SGLang passes, is not used: the memory pool is registered. Raises `LocalProtocolError` for
    settings that are wrong, and for what blocks cannot hold.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise LocalProtocolError(
                'hicache extra config: set "interface_v1": 1, so that pages are not copied'
            )
        if storage_config.is_mla_model:
            raise LocalProtocolError(
                "KVSP cannot share this cache: latent attention keeps no K and V of each head"
            )
        if max(storage_config.tp_size, storage_config.pp_size, storage_config.attn_cp_size) > 1:
            raise LocalProtocolError(
                "KVSP cannot share this cache: each rank has a part of a page, and parts are not put together"
            )
        self._settings = checked(BackendSettings, extra.get("kvsp") or {}, "hicache extra config, kvsp")
        self._backend: Backend | None = None
        self._memory: Array | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take SGLang's host memory."""
        super().register_mem_pool_host(mem_pool_host)
        backend = Backend(self._settings, block_tokens=mem_pool_host.page_size, names=_NAMES)
        described, pool = backend.descriptor, mem_pool_host
        if (pool.layer_num, pool.head_num, pool.head_dim) != (
            described.layers,
            described.kv_heads,
            described.head_dim,
        ):
            raise LocalProtocolError(
                "kvsp.model_dir: the model there has other layers or heads than SGLang's"
            )
        if pool.layout not in (_LAYER_FIRST, _PAGE_FIRST):
            raise LocalProtocolError(
                f"--hicache-mem-layout {pool.layout}: use {_LAYER_FIRST} or {_PAGE_FIRST}, in which a layer"
                " of a page is in one piece"
            )
        memory: Array = pool.kv_buffer.view(torch.uint8).numpy()
        sizes = pool.dtype.itemsize * pool.head_dim, memory.nbytes > 0, memory.flags.c_contiguous
        if sizes != (memory.shape[-1], True, True):
            raise LocalProtocolError("SGLang's host memory is not as its pool says")
        if pool.page_size * pool.head_num * memory.shape[-1] != backend.section_bytes:
            raise LocalProtocolError(
                f"kvsp.kv_dtype: {described.kv_dtype} is not the element type of SGLang's cache"
            )
        self._memory = memory
        self._by_page = pool.layout == _PAGE_FIRST
        self._backend = backend

    def _section(self, page_start: int, layer: int, side: int) -> memoryview:
        assert self._memory is not None
        assert self._backend is not None
        tokens = self._backend.descriptor.block_tokens
        if self._by_page:
            section = self._memory[side, page_start // tokens, layer]
        else:
            section = self._memory[side, layer, page_start : page_start + tokens]
        octets: memoryview = section.reshape(-1).data  # in one piece, so this is no copy
        return octets

    def _sections(self, host_indices: torch.Tensor, pages: int) -> Sections:
        """Return where so many pages are whose tokens have these places in SGLang's memory.

        Raises `LocalProtocolError` where they are not whole pages: what is written there would be others'.
        """
        assert self._backend is not None
        assert self._memory is not None
        size, places = self._backend.descriptor.block_tokens, host_indices.tolist()
        tokens = self._memory.shape[1] * size if self._by_page else self._memory.shape[2]
        starts: list[int] = places[::size]
        for number, start in enumerate(starts):
            page = places[number * size : (number + 1) * size]
            if start % size or start < 0 or page != list(range(start, min(start + size, tokens))):
                raise LocalProtocolError("these places in SGLang's memory are not those of a page")
        if len(places) != pages * size:
            raise LocalProtocolError("there are not as many places in SGLang's memory as pages have tokens")
        return lambda page, layer: (
            self._section(starts[page], layer, 0),
            self._section(starts[page], layer, 1),
        )

    def _keys(self, keys: Sequence[str]) -> PrefixKeys:
        assert self._backend is not None
        names = (bytes.fromhex(key) for key in keys)
        return object_keys(Scope(self._backend.scope_key), self._backend.descriptor, names)

    @staticmethod
    def _attempt(work: Callable[[], T], failed: T) -> T:
        """Return what comes of it, or `failed`: SGLang's threads end with an exception."""
        try:
            return work()
        except ClientError:
            return failed  # of a peer, and counted
        except Exception:
            logger.exception("pages were left out")
            return failed

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return of how many leading pages there are replicas."""

        def exist() -> int:
            assert self._backend is not None
            return len(self._backend.client.lookup(self._keys(keys)))

        return self._attempt(exist, 0)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fetch pages into host memory; what has not come, and all after it, is False."""

        def load() -> int:
            assert self._backend is not None
            return self._backend.load(self._keys(keys), self._sections(host_indices, len(keys)))

        got = self._attempt(load, 0)
        return [number < got for number in range(len(keys))]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages from host memory; one that is there already counts as stored."""

        def store() -> list[bool]:
            assert self._backend is not None
            result = self._backend.store(self._keys(keys), self._sections(host_indices, len(keys)))
            failed = {block for block, _ in result.failed}
            return [number not in failed for number in range(len(keys))]

        return self._attempt(store, [False] * len(keys))

    def exists(self, key: str) -> bool:
        """Return whether there is a replica of a page."""
        return self.batch_exists([key]) == 1

    # SGLang calls these only without "interface_v1", which is refused.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Return None."""
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Return nothing."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Return False."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Close the connections."""
        if self._backend is not None:
            self._backend.client.close()
