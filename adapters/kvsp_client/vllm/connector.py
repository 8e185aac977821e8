"""The class that vLLM loads: `KVConnectorBase_V1` over `Schedule` and `Transfers`.

vLLM makes one in its scheduler and one in its worker. Nothing that a cache server or an index does can fail
a request: what is not loaded is computed.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvsp_client import BlockingClient, ClientSettings
from kvsp_client.files import read_descriptor
from kvsp_client.vllm.device import DeviceCache, check_cpu_layout
from kvsp_client.vllm.engine_descriptor import Sharing, check_expressible, describe_engine
from kvsp_client.vllm.layout import Geometry, layout_of, split
from kvsp_client.vllm.schedule import Lookups, Plan, Schedule
from kvsp_client.vllm.settings import Settings, read_settings
from kvsp_client.vllm.transfers import EngineCache, HostCache, Transfers
from kvsp_core.errors import LocalProtocolError

__all__ = ["KVSPConnector", "KVSPStats"]

FLUSH_S: Final = 10.0
"""How long a stopping engine waits for its last blocks to be stored."""
_LAYER_NUMBER: Final = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")

logger = logging.getLogger("vllm.kvsp")


@attrs.frozen
class _Metadata(KVConnectorMetadata):
    plan: Plan


class KVSPStats(KVConnectorStats):
    """What was counted since vLLM last asked; it is in vLLM's log lines of KV transfer metrics."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget what was counted."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another has counted."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the sums."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class KVSPConnector(KVConnectorBase_V1):
    """Prefix reuse across vLLM instances and restarts, through an index and a cache server
    (``docs/vllm.md``)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise LocalProtocolError(
                'kv_load_failure_policy: set "recompute"; by default vLLM fails a request whose blocks went'
            )
        check_expressible(vllm_config, kv_cache_config)
        self._settings: Settings = read_settings(transfer.kv_connector_extra_config)
        self._descriptor = describe_engine(
            vllm_config,
            name=self._settings.model,
            directory=Path(self._settings.model_dir) if self._settings.model_dir is not None else None,
        )
        sharing = Sharing(
            self._descriptor,
            Path(self._settings.scope_key_file),
            [read_descriptor(Path(file)) for file in self._settings.descriptor_files],
        )
        self.counted: Counter[str] = Counter()
        """What this side of the connector did since it started."""
        self._reported: Counter[str] = Counter()
        self._client = BlockingClient(
            self._settings.credentials(),
            index=self._settings.index,
            settings=ClientSettings(
                call_timeout_ms=self._settings.lookup_timeout_ms
                if role is KVConnectorRole.SCHEDULER
                else self._settings.load_timeout_ms
            ),
        )
        self._schedule = Schedule(
            sharing,
            Lookups(self._client.lookup, clock=time.monotonic, count=self.counted),
            count=self.counted,
            say=logger.warning,
            loads=transfer.is_kv_consumer,
            stores=transfer.is_kv_producer,
        )
        self._transfers: Transfers | None = None
        self._layer_numbers: Mapping[str, int] = {}
        logger.info(
            "KVSP shares blocks of %d tokens of model %s",
            self._descriptor.block_tokens,
            self._descriptor.model,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """No: this is a cache, and a block that was not stored is a miss later on."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Yes: layers are waited for one by one."""
        return True

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens after those vLLM has itself can be loaded; they are, before the step
        computes."""
        return self._schedule.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take note of what is to be loaded."""
        self._schedule.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return what the worker's side has to do in this step."""
        return _Metadata(self._schedule.plan(scheduler_output))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free the blocks at once: what is stored of them was copied."""
        return False, None

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take vLLM's cache, a tensor for each layer."""
        numbers = {name: _layer_number(name) for name in kv_caches}
        if sorted(numbers.values()) != list(range(self._descriptor.layers)):
            raise LocalProtocolError(
                f"vLLM has KV caches for layers {sorted(numbers.values())}, and the model"
                f" {self._descriptor.layers} layers; KVSP shares whole blocks of a model only"
            )
        self._layer_numbers = numbers
        tensors = [
            tensor for _, tensor in sorted((numbers[name], tensor) for name, tensor in kv_caches.items())
        ]
        self._transfers = Transfers(
            self._client,
            _engine_cache(tensors, Geometry.of(self._descriptor)),
            self._descriptor,
            cache_server=self._settings.cache_server,
            count=self.counted,
            load_timeout_ms=self._settings.load_timeout_ms,
            store_queue_bytes=self._settings.store_queue_bytes,
            overlaps=tensors[0].device.type != "cpu"
            or torch.get_num_threads() < len(os.sched_getaffinity(0)),
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to load."""
        if self._transfers is not None:
            self._transfers.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer, just before it is used."""
        if self._transfers is not None:
            self._transfers.wait_layer(self._layer_numbers[layer_name])

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are copied when the step is over."""

    def wait_for_save(self) -> None:
        """Copy the blocks that the step completed; they are sent while vLLM goes on."""
        if self._transfers is not None:
            self._transfers.finish_loads()
            self._transfers.start_stores(self._plan())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that vLLM has to compute."""
        return self._transfers.take_failed_blocks() if self._transfers is not None else set()

    def _plan(self) -> Plan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Metadata)
        return metadata.plan

    # Both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what was counted since the last call."""
        news = dict(self.counted - self._reported)
        self._reported = self.counted.copy()
        return KVSPStats(data=news) if news else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return statistics with this data."""
        return KVSPStats(data=data or {})

    def shutdown(self) -> None:
        """Send what is left to be stored, and close the connections."""
        if self._transfers is not None:
            self._transfers.flush(FLUSH_S)
        self._client.close()


def _layer_number(name: str) -> int:
    found = _LAYER_NUMBER.findall(name)
    if len(found) != 1:
        raise LocalProtocolError(f"the name {name!r} of a layer of vLLM does not tell its number")
    return int(found[0])


def _engine_cache(tensors: list[torch.Tensor], geometry: Geometry) -> EngineCache:
    """Return a cache over vLLM's tensors."""
    first = tensors[0]
    cpu = first.device.type == "cpu"
    layout = layout_of(tuple(first.shape), geometry, cpu=cpu)
    if not cpu:
        return DeviceCache([split(tensor, layout, geometry) for tensor in tensors])
    check_cpu_layout(first.dtype, geometry)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[first.element_size()]
    return HostCache([split(tensor.view(integers).numpy(), layout, geometry) for tensor in tensors])
