"""What a deployment says about its instance."""

from __future__ import annotations

import attrs

from kvsp_core.limits import (
    CALL_TIMEOUT_MS,
    COPY_LEASE_MS,
    ENGINE_SILENCE_MS,
    RESHARD_DEADLINE_MS,
    RESUME_LOAD_MS,
    SESSION_KEPT_MS,
)
from kvsp_core.machines.prefetch import PrefetchLimits
from kvsp_core.records import Link

__all__ = ["InstanceSettings"]


@attrs.frozen(kw_only=True)
class InstanceSettings:
    """What an instance is told of its surroundings and of itself. `epoch` increases with every start
    (ST-3)."""

    base_uri: str
    controller_uri: str
    index_uris: tuple[str, ...]
    """The parts of the index (OP-3)."""
    epoch: int
    copy_holder: str | None = None
    """Where blocks of sessions are copied to, so that they survive this instance."""
    batch_size: int = 8
    prefill_tokens_per_s: int = 0
    """Where its rates and links start from; it measures them (0 is not known)."""
    decode_tokens_per_s: int = 0
    links: tuple[Link, ...] = ()
    numerics: str | None = None
    """What the engine says decides the last bits of its results (CP-6); None where it does not say."""
    status_ttl_ms: int = 3_000
    report_to_index: bool = False
    sleep_after_ms: int | None = None
    engine_silence_ms: int = ENGINE_SILENCE_MS
    """How long the engine may report nothing while it has work, until it counts as hung."""
    copy_lease_ms: int = COPY_LEASE_MS
    resume_load_ms: int = RESUME_LOAD_MS
    shard_load_ms: int = RESHARD_DEADLINE_MS
    call_timeout_ms: int = CALL_TIMEOUT_MS
    fetch_timeout_ms: int = 30_000
    session_kept_ms: int = SESSION_KEPT_MS
    prefetch: PrefetchLimits = attrs.field(factory=PrefetchLimits)
