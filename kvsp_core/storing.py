"""What becomes of blocks that a client stores at a holder (section "Block Retrieval and Storage"; BR-6, BR-7,
decision W17).
"""

from __future__ import annotations

from enum import Enum

__all__ = ["StoreOutcome", "store_outcome"]


class StoreOutcome(Enum):
    """What an attempt to store a block came to."""

    STORED = "stored"
    PRESENT = "present"
    """412: the holder has a replica of this key, and keeps it."""
    FULL = "full"
    """507: there is no room."""
    INCOMPATIBLE = "incompatible"
    """409: the block does not fit what its compatibility ID stands for."""
    CORRUPT = "corrupt"
    """422: what arrived is not what was sent."""
    REFUSED = "refused"
    """We may not store there."""
    UNAVAILABLE = "unavailable"
    """The holder cannot store now, or did not answer in time."""
    DEADLINE = "deadline"
    """The time was over."""
    NOT_TRIED = "not tried"
    """A block before it could not be stored for a reason that holds for this one too."""

    @property
    def is_stored(self) -> bool:
        """Whether the holder has the block now."""
        return self in (StoreOutcome.STORED, StoreOutcome.PRESENT)

    @property
    def ends_all(self) -> bool:
        """Whether trying further blocks of the same prefix at the same holder is of no use now."""
        return not self.is_stored and self is not StoreOutcome.CORRUPT


def store_outcome(status: int) -> StoreOutcome:
    """Return what the status of an answer to PUT of a block means, by its class where it is not listed
    (HT-6)."""
    if 200 <= status < 300:
        return StoreOutcome.STORED
    match status:
        case 412:
            return StoreOutcome.PRESENT
        case 507:
            return StoreOutcome.FULL
        case 409:
            return StoreOutcome.INCOMPATIBLE
        case 422:
            return StoreOutcome.CORRUPT
        case 408 | 429:
            return StoreOutcome.UNAVAILABLE
        case _:
            return StoreOutcome.UNAVAILABLE if status >= 500 else StoreOutcome.REFUSED
