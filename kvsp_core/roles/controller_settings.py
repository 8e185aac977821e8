"""What a deployment says about its controller."""

from __future__ import annotations

import attrs

from kvsp_core.limits import (
    CALL_TIMEOUT_MS,
    MAX_CONCURRENT_RESUMES,
    MAX_PENDING_PLACEMENTS,
    MAX_SESSIONS,
    PLACEMENT_WAIT_MS,
    RESHARD_DEADLINE_MS,
)
from kvsp_core.machines.session import DEFAULT_TIMES, SessionTimes
from kvsp_core.roles.controller_placement import PlacementSettings

__all__ = ["ControllerSettings"]


@attrs.frozen(kw_only=True)
class ControllerSettings:
    """What a deployment says about its controller.

    `min_active` instances stay awake whatever they ask. With `open_by_checkpoint` a first checkpoint in
    epoch 1 opens its session (decision W19). `prefetch` sends a directive to the chosen instance where
    loading is cheaper than computing; it may take `prefetch_deadline_ms`, and what it loaded is kept for
    `prefetch_lease_ms`. Members of a shard map have `reshard_deadline_ms` to load what a change gives them.
    """

    placement: PlacementSettings
    times: SessionTimes = DEFAULT_TIMES
    max_sessions: int = MAX_SESSIONS
    max_resumes: int = MAX_CONCURRENT_RESUMES
    max_pending_placements: int = MAX_PENDING_PLACEMENTS
    placement_wait_ms: int = PLACEMENT_WAIT_MS
    min_active: int = 1
    open_by_checkpoint: bool = False
    prefetch: bool = True
    prefetch_deadline_ms: int = 1000
    prefetch_lease_ms: int = 5000
    reshard_deadline_ms: int = RESHARD_DEADLINE_MS
    call_timeout_ms: int = CALL_TIMEOUT_MS
