"""The worker's side of the connector: blocks into vLLM's cache and out of it.

Loads are used layer by layer, as they come (KC-3), or as a whole where computing meanwhile would slow both
down; what does not come is named, so that vLLM computes it. Stores are copied in the step that completes
them and sent by the client's own thread; beyond a limit they are left out. No failure of a peer is an
exception here.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import numpy as np

from kvsp_client import MissReason, PrefixMemory
from kvsp_client.memory import MemoryPool
from kvsp_client.vllm.layout import Tensor
from kvsp_client.vllm.schedule import PAUSE_S, Load, Plan, Store
from kvsp_core.errors import KVSPError
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.layout import Array

if TYPE_CHECKING:
    from kvsp_client import BlockingClient

__all__ = ["EngineCache", "HostCache", "Transfers"]

_SILENT: Final = (MissReason.UNAVAILABLE, MissReason.DEADLINE)
"""Why a block did not come that its holders might have, had they answered."""
_REMEMBERED_KEYS: Final = 1 << 16
_REMEMBERED_S: Final = 60.0
"""How long a block is taken to be held: the cache server may evict it, or die, without saying so."""


class EngineCache(Protocol):
    """vLLM's KV cache, all layers; arrays are [blocks, block_tokens, kv_heads, head_dim]."""

    def write(self, layer: int, blocks: Sequence[int], keys: Array, values: Array) -> None:
        """Fill blocks of a layer."""
        ...

    def read(self, layer: int, blocks: Sequence[int], keys: Array, values: Array) -> None:
        """Copy blocks of a layer into arrays."""
        ...


class HostCache:
    """A cache in host memory: `layers` holds K and V of each layer as views that `layout.split` made, of
    numpy."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._layers = layers
        self._type = layers[0][0].dtype

    def write(self, layer: int, blocks: Sequence[int], keys: Array, values: Array) -> None:
        """Fill blocks of a layer."""
        numbers = np.asarray(blocks)
        for own, given in zip(self._layers[layer], (keys, values), strict=True):
            own[numbers] = given.view(self._type)

    def read(self, layer: int, blocks: Sequence[int], keys: Array, values: Array) -> None:
        """Copy blocks of a layer into arrays."""
        for own, target in zip(
            self._layers[layer], (keys.view(self._type), values.view(self._type)), strict=True
        ):
            for place, block in enumerate(blocks):
                target[place] = own[block]


@attrs.define(eq=False)
class _Loading:
    """A load that runs."""

    load: Load
    memory: PrefixMemory
    fetch: Any
    good: int
    """Leading blocks of which every layer so far is in vLLM's cache."""
    layers: int = 0
    """Layers that vLLM has waited for."""


@attrs.define(eq=False)
class _Storing:
    """A store that runs."""

    store: Store
    job: Any
    memory: PrefixMemory


class Transfers:
    """Moves what a plan says, a step after the other.

    `overlaps` says whether vLLM computes with the first layers while the last ones arrive. Where it computes
    with all of the processor's cores, it is better to wait: its threads would wait for each other while one
    of their cores is at work for the client.
    """

    def __init__(
        self,
        client: BlockingClient,
        cache: EngineCache,
        descriptor: CompatibilityDescriptor,
        *,
        cache_server: str,
        count: Counter[str],
        load_timeout_ms: int,
        store_queue_bytes: int,
        overlaps: bool,
    ) -> None:
        self._client = client
        self._cache = cache
        self._layers = descriptor.layers
        self._shape = (descriptor.block_tokens, descriptor.kv_heads, descriptor.head_dim)
        self._cache_server = cache_server
        self._count = count
        self._load_timeout_ms = load_timeout_ms
        self._store_queue_bytes = store_queue_bytes
        self._overlaps = overlaps
        self._loading: list[_Loading] = []
        self._failed: set[int] = set()
        self._void = False
        """Whether this step computed with blocks that are not there."""
        self._silent_until = float("-inf")
        self._storing: list[_Storing] = []
        self._memory = MemoryPool(store_queue_bytes)
        self._queued_bytes = 0
        self._held: OrderedDict[str, float] = OrderedDict()
        """Keys that the cache server was said to hold lately, and when; the oldest first."""

    # Loads

    def start_loads(self, plan: Plan) -> None:
        """Begin to fetch what a plan loads.

        After a load that brought nothing, since nobody answered, none is begun for a while: each step would
        wait for it in vain.
        """
        self._void = False
        for load in plan.loads:
            if time.monotonic() < self._silent_until:
                self._count["loads_left_out"] += 1
                self._lost(load, 0)
                continue
            try:
                memory = self._memory.take(load.prefix.keys.descriptor, len(load.prefix))
                fetch = self._client.start_fetch(
                    load.prefix, memory.sections, deadline_ms=self._load_timeout_ms
                )
            except (KVSPError, MemoryError):
                self._lost(load, 0)
                continue
            self._loading.append(_Loading(load, memory, fetch, len(load.blocks)))
        if not self._overlaps:
            for loading in self._loading:
                with suppress(KVSPError):  # which the first layer will raise too
                    loading.fetch.result()

    def wait_layer(self, layer: int) -> None:
        """Wait until a layer is in vLLM's cache, of all blocks that come."""
        for loading in self._loading:
            if layer != loading.layers or not loading.good:
                continue
            loading.layers += 1
            try:
                usable = loading.fetch.wait_layer(layer)
            except KVSPError:
                usable = 0
            loading.good = min(loading.good, usable)
            if loading.good:
                keys, values = loading.memory.layer(layer)
                rows = loading.good * self._shape[0]
                shape = (loading.good, *self._shape)
                blocks = loading.load.blocks[: loading.good]
                self._cache.write(layer, blocks, keys[:rows].reshape(shape), values[:rows].reshape(shape))

    def finish_loads(self) -> None:
        """Take note of what was not loaded; nothing is written to memory of this step any more."""
        loads, self._loading = self._loading, []
        for loading in loads:
            try:
                result = loading.fetch.result()
            except KVSPError:
                self._lost(loading.load, 0)
                continue
            self._memory.give_back(loading.memory)
            good = min(loading.good, result.blocks, *result.withdrawn)
            if loading.layers < self._layers:
                good = 0  # vLLM did not ask for all layers: what it computed with is not what was fetched
            self._lost(loading.load, good)
            for miss in result.misses:
                self._count[f"load_missed_{miss.reason.name.lower()}"] += 1
            if not result.blocks and result.misses and result.misses[0].reason in _SILENT:
                self._silent_until = time.monotonic() + PAUSE_S

    def _lost(self, load: Load, good: int) -> None:
        """Take note that all but the first `good` blocks of a load are to be computed."""
        lost = load.blocks[good:]
        self._count["loaded_tokens"] += good * self._shape[0]
        if lost:
            self._count["load_failed_tokens"] += len(lost) * self._shape[0]
            self._failed.update(lost)
            self._void = True
            for key in load.prefix.keys.keys[good:]:
                self._held.pop(key, None)

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks of vLLM's cache that could not be filled, once.

        Where vLLM drafts tokens it asks for them before it says that the step is over.
        """
        self.finish_loads()
        failed, self._failed = self._failed, set()
        return failed

    # Stores

    def start_stores(self, plan: Plan) -> None:
        """Copy the blocks that a step completed, and have them sent.

        After a failed load nothing of the step is stored: it was computed with blocks that are not there.
        """
        self._take_stored()
        for store in plan.stores:
            if self._void:
                self._count["stores_void"] += len(store.blocks)
            else:
                self._start_store(store)

    def _start_store(self, store: Store) -> None:
        new = next((n for n, key in enumerate(store.keys.keys) if key not in self._held), len(store.blocks))
        if new:
            store = Store(store.keys.part(new, len(store.keys)), store.blocks[new:])
        count = len(store.blocks)
        if not count:
            return
        descriptor = store.keys.descriptor
        size = 2 * descriptor.layers * count * descriptor.section_bytes(descriptor.block_tokens)
        if self._queued_bytes + size > self._store_queue_bytes:
            self._count["stores_left_out"] += count
            return
        try:
            memory, shape = self._memory.take(descriptor, count), (count, *self._shape)
        except MemoryError:
            self._count["stores_left_out"] += count
            return
        if self._queued_bytes + memory.octets.nbytes > self._store_queue_bytes:  # used again, it is larger
            self._memory.give_back(memory)
            self._count["stores_left_out"] += count
            return
        for layer in range(self._layers):
            keys, values = memory.layer(layer)
            self._cache.read(layer, store.blocks, keys.reshape(shape), values.reshape(shape))
        try:
            job = self._client.start_store(self._cache_server, store.keys, memory.sections)
        except KVSPError:
            self._count["store_failed_cancelled"] += count
            return
        self._queued_bytes += memory.octets.nbytes
        self._storing.append(_Storing(store, job, memory))

    def _take_stored(self) -> None:
        ended = [storing for storing in self._storing if storing.job.done]
        self._storing = [storing for storing in self._storing if storing not in ended]
        for storing in ended:
            self._queued_bytes -= storing.memory.octets.nbytes
            self._memory.give_back(storing.memory)
            try:
                result = storing.job.result()
            except KVSPError:
                self._count["store_failed_cancelled"] += len(storing.store.blocks)
                continue
            self._count["stored_blocks"] += result.stored
            self._count["present_blocks"] += result.present
            failed = {block for block, _ in result.failed}
            for _, outcome in result.failed:
                self._count[f"store_failed_{outcome.name.lower()}"] += 1
            for number, key in enumerate(storing.store.keys.keys):
                if number not in failed:
                    self._held[key] = time.monotonic()
                    self._held.move_to_end(key)
        before = time.monotonic() - _REMEMBERED_S
        while self._held and (len(self._held) > _REMEMBERED_KEYS or next(iter(self._held.values())) < before):
            self._held.popitem(last=False)

    def flush(self, timeout_s: float) -> None:
        """Wait for what is being stored, for so long at most; what is left then is given up."""
        until = time.monotonic() + timeout_s
        for storing in self._storing:
            try:
                storing.job.result(max(0.0, until - time.monotonic()))
            except TimeoutError:
                storing.job.cancel()
            except KVSPError:
                pass
        self._take_stored()
