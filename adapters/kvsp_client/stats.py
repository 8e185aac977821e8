"""What a client has done so far, counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvsp_core.machines.prefix_load import MissReason
from kvsp_core.machines.retrieval import Outcome
from kvsp_core.storing import StoreOutcome

__all__ = ["ClientStats", "Counters"]


@attrs.frozen(kw_only=True)
class ClientStats:
    """Counts since the client was made.

    `failed_attempts` counts replicas that were tried in vain, also where another one then served the block.
    """

    lookups: int = 0
    lookup_failures: int = 0
    looked_up_blocks: int = 0
    matched_blocks: int = 0
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    """Octets of sections of the blocks that were fetched whole."""
    missed_blocks: Mapping[MissReason, int] = attrs.field(factory=dict)
    failed_attempts: Mapping[Outcome, int] = attrs.field(factory=dict)
    stores: Mapping[StoreOutcome, int] = attrs.field(factory=dict)
    stored_bytes: int = 0
    leases_granted: int = 0
    leases_refused: int = 0
    leases_lost: int = 0


@attrs.define
class Counters:
    """The same, while it grows."""

    lookups: int = 0
    lookup_failures: int = 0
    looked_up_blocks: int = 0
    matched_blocks: int = 0
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    missed_blocks: dict[MissReason, int] = attrs.field(factory=dict)
    failed_attempts: dict[Outcome, int] = attrs.field(factory=dict)
    stores: dict[StoreOutcome, int] = attrs.field(factory=dict)
    stored_bytes: int = 0
    leases_granted: int = 0
    leases_refused: int = 0
    leases_lost: int = 0

    def miss(self, reason: MissReason) -> None:
        """Count a block that was not fetched."""
        self.missed_blocks[reason] = self.missed_blocks.get(reason, 0) + 1

    def attempt(self, outcome: Outcome) -> None:
        """Count a replica that was tried in vain."""
        self.failed_attempts[outcome] = self.failed_attempts.get(outcome, 0) + 1

    def store(self, outcome: StoreOutcome) -> None:
        """Count what an attempt to store a block came to."""
        self.stores[outcome] = self.stores.get(outcome, 0) + 1

    def snapshot(self) -> ClientStats:
        """Return the counts so far."""
        counts: dict[str, Any] = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in attrs.asdict(self, recurse=False).items()
        }
        return ClientStats(**counts)
