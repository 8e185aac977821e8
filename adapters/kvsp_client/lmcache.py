"""LMCache's second level over KVSP: an `L2AdapterInterface` for its plugin adapter
(``docs/other_engines.md``).

    {"type": "plugin", "module_path": "kvsp_client.lmcache", "class_name": "KVSPL2Adapter",
    "adapter_params": {...}}

A chunk is a block: LMCache keeps it as [2, layers, tokens, heads x dimensions], in which a layer's K and V
are sections as they are, so nothing is copied. Locks are not leases: a chunk that is evicted before it is
loaded is a miss.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform.event_notifier import create_event_notifier

from kvsp_client.backend_settings import Backend, ChunkSettings, checked
from kvsp_client.errors import ClientError
from kvsp_client.object_names import object_keys
from kvsp_client.scopes import salted_scope
from kvsp_core.identity import Scope
from kvsp_core.prefix import PrefixKeys

__all__ = ["KVSPL2Adapter"]

_NAMES: Final = "lmcache-chunk-hash"
_THREADS: Final = 4

logger = logging.getLogger("lmcache.kvsp")


class KVSPL2Adapter(L2AdapterInterface):
    """Chunks of LMCache as blocks at a cache server. `params` are ``adapter_params`` of its configuration."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        settings = checked(ChunkSettings, params, "adapter_params")
        self._backend = Backend(settings, block_tokens=settings.chunk_tokens, names=_NAMES)
        self._notifiers = {kind: create_event_notifier() for kind in ("store", "lookup", "load")}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._results: dict[str, dict[int, Any]] = {"store": {}, "lookup": {}, "load": {}}
        # Requests wait for lookups and loads: they have threads that stores to a slow server cannot take.
        stores, others = (ThreadPoolExecutor(_THREADS, f"kvsp-lmcache-{n}") for n in ("store", "load"))
        self._threads = {"store": stores, "lookup": others, "load": others}

    def get_store_event_fd(self) -> int:
        """Return what is signalled when a store is over."""
        return int(self._notifiers["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return what is signalled when a lookup is over."""
        return int(self._notifiers["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        """Return what is signalled when a load is over."""
        return int(self._notifiers["load"].fileno())

    def _submit(self, kind: str, work: Callable[[], Any], failed: Any) -> int:
        """Do something in a thread. Whatever becomes of it LMCache is told, since it waits for that."""
        number = next(self._numbers)

        def run() -> None:
            try:
                result = work()
            except Exception:
                logger.exception("a %s failed", kind)
                result = failed
            self._say(kind, number, result)

        try:
            self._threads[kind].submit(run)
        except RuntimeError:  # it was closed
            self._say(kind, number, failed)
        return number

    def _say(self, kind: str, number: int, result: Any) -> None:
        with self._lock:
            self._results[kind][number] = result
        if kind in self._notifiers:
            self._notifiers[kind].notify()

    def _take(self, kind: str, number: int) -> Any:
        with self._lock:
            return self._results[kind].pop(number, None)

    # Stores

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Store chunks."""
        work = functools.partial(self._store, list(keys), list(objects))
        return self._submit("store", work, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return what became of the stores that are over since the last call."""
        with self._lock:
            done, self._results["store"] = self._results["store"], {}
        return done

    def _store(self, keys: list[Any], objects: list[Any]) -> L2StoreResult:
        names, octets = self._names(keys), self._octets(objects)
        if names is None or octets is None:
            return L2StoreResult(False, 0)
        try:
            result = self._backend.store(names, lambda block, layer: self._sections(octets[block], layer))
        except ClientError:
            return L2StoreResult(False, 0)
        if result.complete:
            self._notify_keys_stored(keys, [each.nbytes for each in octets])
        return L2StoreResult(result.complete, result.stored * 2 * self._half)

    # Lookups

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Any) -> int:
        """Find out of which leading chunks there are replicas."""
        return self._submit("lookup", functools.partial(self._lookup, list(keys)), _leading(0, len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return what a lookup has found, once."""
        return self._take("lookup", task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Nothing: nothing was locked."""

    def _lookup(self, keys: list[Any]) -> Bitmap:
        names = self._names(keys)
        try:
            found = 0 if names is None else len(self._backend.client.lookup(names))
        except ClientError:
            found = 0
        return _leading(found, len(keys))

    # Loads

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Load chunks into LMCache's memory."""
        work = functools.partial(self._load, list(keys), list(objects))
        return self._submit("load", work, _leading(0, len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return what a load has brought, once."""
        return self._take("load", task_id)

    def _load(self, keys: list[Any], objects: list[Any]) -> Bitmap:
        names, octets = self._names(keys), self._octets(objects)
        if names is None or octets is None:
            return _leading(0, len(keys))
        try:
            got = self._backend.load(names, lambda block, layer: self._sections(octets[block], layer))
        except ClientError:
            got = 0
        return _leading(got, len(keys))

    # Names and octets

    def _names(self, keys: list[Any]) -> PrefixKeys | None:
        """Return the keys of chunks of one salt; None for those of several, which no prompt has."""
        salts = {key.cache_salt for key in keys}
        if len(salts) != 1:
            return None
        (salt,) = salts
        scope = salted_scope(self._backend.scope_key, salt) if salt else Scope(self._backend.scope_key)
        names = (
            json.dumps([key.model_name, key.kv_rank, key.object_group_id]).encode() + key.chunk_hash
            for key in keys
        )
        return object_keys(scope, self._backend.descriptor, names)

    @property
    def _half(self) -> int:
        """The octets of all K, or of all V, of a chunk."""
        return self._backend.descriptor.layers * self._backend.section_bytes

    def _octets(self, objects: list[Any]) -> list[memoryview] | None:
        """Return the memory of chunks; None where one is not whole, or kept otherwise than blocks are."""
        described = self._backend.descriptor
        width = described.kv_heads * described.head_dim
        shape = (2, described.layers, described.block_tokens, width)
        octets = [memoryview(each.byte_array).cast("B") for each in objects]
        whole = all(tuple(each.get_shape()) == shape for each in objects)
        return octets if whole and all(each.nbytes == 2 * self._half for each in octets) else None

    def _sections(self, octets: memoryview, layer: int) -> tuple[memoryview, memoryview]:
        size, start = self._backend.section_bytes, layer * self._backend.section_bytes
        return octets[start : start + size], octets[self._half + start : self._half + start + size]

    def report_status(self) -> dict[str, Any]:
        """Return whether it works."""
        return {"is_healthy": True, "type": type(self).__name__, "cache_server": self._backend.cache_server}

    def close(self) -> None:
        """End what is under way, and close the connections."""
        for threads in self._threads.values():
            threads.shutdown(wait=True, cancel_futures=True)
        self._backend.client.close()
        notifiers, self._notifiers = self._notifiers, {}
        for notifier in notifiers.values():
            notifier.close()


def _leading(count: int, size: int) -> Bitmap:
    """Return a bitmap of the first `count` of `size`."""
    found = Bitmap(size)
    for number in range(count):
        found.set(number)
    return found
