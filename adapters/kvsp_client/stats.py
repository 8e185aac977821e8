"""What a client has done so far, counted."""

from __future__ import annotations

from collections import Counter

import attrs

from kvsp_core.machines.prefix_load import MissReason
from kvsp_core.machines.retrieval import Outcome
from kvsp_core.storing import StoreOutcome

__all__ = ["ClientStats"]


@attrs.define(kw_only=True)
class ClientStats:
    """Counts since the client was made. What `Client.stats` returns is a copy that counts no further.

    `failed_attempts` counts replicas that were tried in vain, also where another one then served the block.
    """

    lookups: int = 0
    lookup_failures: int = 0
    looked_up_blocks: int = 0
    matched_blocks: int = 0
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    """Octets of sections of the blocks that were fetched whole."""
    missed_blocks: Counter[MissReason] = attrs.field(factory=Counter)
    failed_attempts: Counter[Outcome] = attrs.field(factory=Counter)
    stores: Counter[StoreOutcome] = attrs.field(factory=Counter)
    stored_bytes: int = 0
    leases_granted: int = 0
    leases_refused: int = 0
    leases_lost: int = 0
