"""What ``kv_connector_extra_config`` may say, each key known and typed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsp_client.backend_settings import Deployment, checked
from kvsp_client.typed import Count

__all__ = ["Settings", "read_settings"]


class Settings(Deployment, frozen=True, kw_only=True):
    """The connector's settings; paths are relative to where vLLM was started.

    Requests with a cache salt get scopes whose keys are derived from that of the tenant.
    """

    model: str | None = None
    """The model's name in descriptors, the same for all who share; by default the name of its directory."""
    model_dir: str | None = None
    """Where the model's files are, if not where vLLM's model says."""
    descriptor_files: tuple[str, ...] = ()
    """Descriptors of what is shared in this deployment. Where any are named, an engine whose own descriptor
    is none of them does not start, and a request with an adapter that none of them has is not shared."""
    lookup_timeout_ms: Count = 1_000
    """How long a request may wait for the index; the prompt is computed then."""
    load_timeout_ms: Count = 5_000
    """How long a batch may wait for blocks; what has not come is computed then."""
    store_queue_bytes: Count = 512 << 20
    """Copies of blocks that wait to be stored; beyond that blocks are left out, and counted.
    So much memory, once used, is kept to be used again."""

    def files(self) -> dict[str, str]:
        """Return the files that have to be there, by the key that names each."""
        descriptors = {f"descriptor_files[{n}]": file for n, file in enumerate(self.descriptor_files)}
        return super().files() | descriptors


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """Return the settings in ``kv_connector_extra_config``; raises as `checked` does."""
    return checked(Settings, extra, "kv_connector_extra_config")
