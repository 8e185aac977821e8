"""What an instance needs of the holder of its own tiers, in the same process and under the same base URI.

An instance is normally also a holder: what it loads and computes it keeps in its tiers, publishes and
serves. The holder role does that; the instance asks it by these calls, which decide at once and return
effects, and reads its news after each. Numbers of calls, jobs and buffers are shared
(`kvsp_core.roles.work.Numbers`), so a completion belongs to one of the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeAlias

import attrs

from kvsp_core.roles.authorization import Policy
from kvsp_core.roles.role import BlockName, Effect, Input, JobDone, JobFailed, StoredBlock
from kvsp_core.roles.work import Work

__all__ = ["BlockAdded", "BlockGone", "BlockNotAdded", "LocalBlocks", "News", "check_read"]


@attrs.frozen
class BlockAdded:
    """The block of an `add` is in a tier, and its record is on its way to the index; so it is where it was
    held already."""

    ticket: int
    name: BlockName


@attrs.frozen
class BlockNotAdded:
    """The block of an `add` could not be kept."""

    ticket: int
    name: BlockName


@attrs.frozen
class BlockGone:
    """A block is not held any more: evicted, lost to a fault, or withdrawn."""

    name: BlockName


News: TypeAlias = BlockAdded | BlockNotAdded | BlockGone


class LocalBlocks(Protocol):
    """The holder role, as the instance beside it sees it."""

    policy: Policy
    """Who may ask for what; it is the instance's."""

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Begin, as any role."""
        ...

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Take in a request for one of the holder's resources, or whatever belongs to one or to its calls
        and jobs."""
        ...

    def stop(self, now_ms: int) -> tuple[Effect, ...]:
        """Be told that the process is to end: withdraw every record."""
        ...

    def fence(self) -> None:
        """Be told that a later incarnation has this base URI: tell the index nothing more."""
        ...

    def purge(self, now_ms: int) -> tuple[Effect, ...]:
        """Delete what is held of the scopes that the policy says are purged."""
        ...

    def limit(self, *, max_lease_ttl_ms: int, lease_quota_bytes: int, replica_ttl_ms: int) -> None:
        """Grant leases and publish records within these limits from now on."""
        ...

    def expire(self, tier: str, names: Iterable[BlockName], now_ms: int) -> tuple[Effect, ...]:
        """Delete blocks that a tier has kept for as long as it may."""
        ...

    @property
    def safe_to_stop(self) -> bool:
        """Whether the index lists nothing of the holder any more."""
        ...

    def next_deadline_ms(self) -> int | None:
        """Return when the holder next wants `TimerFired`, or None."""
        ...

    def tier_of(self, name: BlockName) -> str | None:
        """Return the tier from which a block can be read whole, or None where it is not held so."""
        ...

    def is_sound(self, name: BlockName, layer_digests: tuple[str, ...]) -> bool:
        """Return whether a block is held with these layer digests: what was read is what was stored."""
        ...

    def keep(self, name: BlockName) -> None:
        """Do not evict a block until `let_go` was called as often. It need not be held yet."""
        ...

    def let_go(self, name: BlockName) -> None:
        """Undo one `keep`."""
        ...

    def add(self, block: StoredBlock, buffer: int, now_ms: int) -> tuple[int, tuple[Effect, ...]]:
        """Put a verified block from a buffer into a tier and publish it.

        Returns a ticket that the news will name, and effects. The buffer stays the caller's until then.
        """
        ...

    def lost(self, name: BlockName, now_ms: int) -> tuple[Effect, ...]:
        """Take note that reading a block failed: drop it and withdraw its record."""
        ...

    def take_news(self) -> tuple[News, ...]:
        """Return what has happened since the last time."""
        ...


def check_read(
    work: Work, blocks: LocalBlocks, name: BlockName, item: JobDone | JobFailed, now_ms: int
) -> bool:
    """Return whether what was read is what was stored; a block of which it is not is lost, whoever waits."""
    if isinstance(item, JobDone) and blocks.is_sound(name, item.layer_digests):
        return True
    if not (isinstance(item, JobFailed) and item.takes_nothing):
        work.emit(*blocks.lost(name, now_ms))
    return False
