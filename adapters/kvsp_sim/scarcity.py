"""Limits of a simulated deployment: as shipped, or drawn so small that they are reached."""

from __future__ import annotations

from typing import Final

import attrs

from kvsp_core import limits
from kvsp_core.machines.prefetch import PrefetchLimits
from kvsp_sim.randomness import Randomness

__all__ = ["Scarcity"]

_AMPLE: Final = 0.5
"""How often all limits are as shipped."""


@attrs.frozen(kw_only=True)
class Scarcity:
    """How much of each thing a deployment takes at a time."""

    index_client_bytes: int = limits.MAX_INDEX_BYTES_PER_CLIENT
    incoming_blocks: int = limits.MAX_INCOMING_BLOCKS
    leases_per_client: int = limits.MAX_LEASES_PER_CLIENT
    lookup_keys: int = limits.MAX_LOOKUP_KEYS
    sessions: int = limits.MAX_SESSIONS
    pending_placements: int = limits.MAX_PENDING_PLACEMENTS
    batch_size: int = 8
    loads: int = limits.MAX_CONCURRENT_LOADS
    pending_blocks: int = limits.MAX_PENDING_BLOCKS
    pending_directives: int = limits.MAX_PENDING_DIRECTIVES
    resumes: int = limits.MAX_CONCURRENT_RESUMES

    @classmethod
    def drawn(cls, random: Randomness) -> Scarcity:
        """Return limits of which, in a part of the runs, each is small or as shipped."""
        if random.chance(_AMPLE):
            return cls()
        small = {
            "index_client_bytes": random.pick((3_000, 16_000)),
            "incoming_blocks": 1,
            "leases_per_client": random.pick((1, 4)),
            "lookup_keys": random.pick((1, 3)),
            "sessions": random.pick((3, 10)),
            "pending_placements": 1,
            "batch_size": random.pick((1, 2)),
            "loads": 1,
            "pending_blocks": random.pick((2, 6)),
            "pending_directives": 1,
            "resumes": 1,
        }
        return cls(**{name: least for name, least in small.items() if random.chance(0.5)})

    @property
    def lists_all(self) -> bool:
        """Whether the index has room for the records of all."""
        return self.index_client_bytes == limits.MAX_INDEX_BYTES_PER_CLIENT

    @property
    def prefetch(self) -> PrefetchLimits:
        """What an instance takes on for prefetch directives."""
        return PrefetchLimits(
            concurrent_loads=self.loads,
            pending_directives=self.pending_directives,
            pending_blocks=self.pending_blocks,
        )
