"""Which blocks a holder has, in which tier, and which of them go first when room is needed.

`Holdings` counts what each tier takes, and keeps for each tier the blocks that may be evicted in the order
in which they would go: first those whose prefix is gone, since a suffix without its prefix is of no use, then
those that were not used for longest. A block that is leased, kept or being read is in neither.

A block carries no parent. What follows what is learned from clients that store or lease blocks in the order
of a prompt; where that guess is wrong, a block goes earlier or later than it might, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Final, TypeAlias

import attrs

from kvsp_core.errors import LocalProtocolError
from kvsp_core.roles.role import BlockName, StoredBlock

__all__ = ["TIER_ORDER", "Holdings", "TierLimits", "Warmth", "id_of"]

TIER_ORDER: Final = ("device", "host", "remote-memory", "local-storage", "remote-storage")
"""Tiers from the fastest on; one that is not here is the slowest."""

Warmth: TypeAlias = tuple[bool, int]
"""How soon a block would be missed: less is colder. Whether its prefix is there, and its last use."""


@attrs.frozen(kw_only=True)
class TierLimits:
    """What a holder may put into a tier, and how fast it reads it, for the record; None where unknown."""

    capacity_bytes: int = attrs.field(validator=attrs.validators.ge(0))
    read_mbit_per_s: int | None = None


def id_of(name: BlockName) -> str:
    """Return a block's name as one string."""
    return f"{name.compat_id}/{name.scope_id}/{name.block_key}"


@attrs.define
class _Tier:
    limits: TierLimits
    used_bytes: int = 0
    evictable_bytes: int = 0
    is_open: bool = True
    # In the order in which they would go, with the number of the last use of each.
    orphans: dict[str, int] = attrs.field(factory=dict)
    unused: dict[str, int] = attrs.field(factory=dict)

    @property
    def free_bytes(self) -> int:
        return self.limits.capacity_bytes - self.used_bytes if self.is_open else 0

    def first_use(self) -> Warmth:
        """Return what its first victim is: an orphan or not, and when it was used last."""
        queue = self.orphans or self.unused
        return not self.orphans, next(iter(queue.values()), 0)


@attrs.define
class _Held:
    block: StoredBlock
    tier: str
    evictable: bool = False
    use: int = 0
    """The number of its last use."""
    orphan: bool = False
    """Whether the block before it has gone since."""


class Holdings:
    """The blocks of a holder by `id_of` their names, and the room they take."""

    def __init__(self, tiers: Mapping[str, TierLimits]) -> None:
        order = sorted(tiers, key=lambda tier: TIER_ORDER.index(tier) if tier in TIER_ORDER else 99)
        self._tiers = {tier: _Tier(tiers[tier]) for tier in order}
        self._held: dict[str, _Held] = {}
        self._ids_of_key: dict[str, tuple[str, ...]] = {}
        self._next: dict[str, str] = {}  # what follows a block, as far as has been seen
        self._previous: dict[str, str] = {}
        self._uses = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: str) -> bool:
        return block in self._held

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers, the fastest first."""
        return tuple(self._tiers)

    @property
    def used_bytes(self) -> int:
        """The octets that all blocks take, leaving ones included."""
        return sum(tier.used_bytes for tier in self._tiers.values())

    def get(self, block: str) -> tuple[StoredBlock, str] | None:
        """Return a block with the tier it is in, or None."""
        held = self._held.get(block)
        return None if held is None else (held.block, held.tier)

    def with_key(self, block_key: str) -> tuple[str, ...]:
        """Return the blocks of this key: mostly one, more where scopes or descriptors differ."""
        return self._ids_of_key.get(block_key, ())

    def of_scopes(self, scopes: Collection[str]) -> tuple[str, ...]:
        """Return the blocks of these scopes, after a look at all blocks."""
        return tuple(block for block, held in self._held.items() if held.block.name.scope_id in scopes)

    def free_bytes(self, tier: str) -> int:
        """Return the room that is left in a tier."""
        return self._tiers[tier].free_bytes

    def limits(self, tier: str) -> TierLimits:
        """Return the limits of a tier."""
        return self._tiers[tier].limits

    # What comes and goes

    def add(self, block: str, stored: StoredBlock, tier: str) -> None:
        """Hold a block. Its room has been taken by `reserve`."""
        if block in self._held:
            raise LocalProtocolError("the block is held already")
        self._held[block] = _Held(stored, tier)
        key = stored.name.block_key
        self._ids_of_key[key] = (*self._ids_of_key.get(key, ()), block)

    def remove(self, block: str) -> tuple[StoredBlock, str]:
        """Stop holding a block; its room stays taken until `release`. What follows it has lost its prefix."""
        self.set_evictable(block, False)
        held = self._held.pop(block)
        key = held.block.name.block_key
        others = tuple(other for other in self._ids_of_key[key] if other != block)
        if others:
            self._ids_of_key[key] = others
        else:
            del self._ids_of_key[key]
        follower = self._next.pop(block, None)
        if follower is not None:
            del self._previous[follower]
            self._orphan(follower)
        before = self._previous.pop(block, None)
        if before is not None:
            del self._next[before]
        return held.block, held.tier

    def close(self, tier: str) -> None:
        """Have no room in a tier, for as long as nobody knows what is in it."""
        self._tiers[tier].is_open = False

    def open(self, tier: str) -> None:
        """Have the room in a tier that its blocks leave."""
        self._tiers[tier].is_open = True

    def reserve(self, tier: str, size_bytes: int) -> None:
        """Take room in a tier."""
        self._tiers[tier].used_bytes += size_bytes

    def release(self, tier: str, size_bytes: int) -> None:
        """Give room in a tier back."""
        self._tiers[tier].used_bytes -= size_bytes

    def move(self, block: str, tier: str) -> None:
        """Hold a block in another tier. Room is taken there and given back here by `reserve` and `release`;
        until it is said that it may be, the block is not evicted."""
        self.set_evictable(block, False)
        self._held[block].tier = tier

    # What goes first

    def first_use(self, tier: str) -> Warmth:
        """Return how soon the first block of a tier would be missed."""
        return self._tiers[tier].first_use()

    def coldest(self, tier: str) -> str | None:
        """Return the block of a tier that would be missed least, of those that may be evicted."""
        found = self._tiers[tier]
        return next(iter(found.orphans or found.unused), None)

    def set_evictable(self, block: str, evictable: bool, *, used: bool = True) -> None:
        """Say whether a block may be evicted. One that newly may has just been `used`, and goes last."""
        held = self._held.get(block)
        if held is None or held.evictable == evictable:
            return
        held.evictable = evictable
        tier, size_bytes = self._tiers[held.tier], held.block.header.size_bytes
        if evictable:
            if used or not held.use:
                self._uses += 1
                held.use, held.orphan = self._uses, False
            (tier.orphans if held.orphan else tier.unused)[block] = held.use
            tier.evictable_bytes += size_bytes
        else:
            tier.unused.pop(block, None)
            tier.orphans.pop(block, None)
            tier.evictable_bytes -= size_bytes

    def in_order(self, blocks: Iterable[str]) -> None:
        """Learn that each of these blocks follows the one before it."""
        before: str | None = None
        for block in blocks:
            if before is not None and block != before and before in self._held and block in self._held:
                self._link(before, block)
            before = block

    def room_for(self, size_bytes: int) -> str | None:
        """Return the fastest tier with room for so much, else the one whose blocks are missed least."""
        candidates = [
            (tier.first_use(), name) for name, tier in self._tiers.items() if self.can_fit(name, size_bytes)
        ]
        for _, name in candidates:
            if self._tiers[name].free_bytes >= size_bytes:
                return name
        return min(candidates, default=(None, None))[1]

    def can_fit(self, tier: str, size_bytes: int) -> bool:
        """Return whether a tier has so much room once all that may be evicted is gone."""
        found = self._tiers[tier]
        return found.free_bytes + found.evictable_bytes >= size_bytes

    def in_line(self, tier: str) -> Iterator[tuple[str, int, Warmth]]:
        """Go through what may be evicted from a tier, the coldest first: the block, its octets, its warmth.

        Nothing may be added, removed or used meanwhile.
        """
        found = self._tiers[tier]
        for queue, warm in ((found.orphans, False), (found.unused, True)):
            for block, use in queue.items():
                yield block, self._held[block].block.header.size_bytes, (warm, use)

    def victims(self, tier: str, size_bytes: int) -> Iterator[str]:
        """Go through the blocks to evict, until there is room for so much.

        Before the next is asked for, each has to be removed, or `set_evictable` has to say that it stays.
        """
        found = self._tiers[tier]
        while found.free_bytes < size_bytes:
            block = self.coldest(tier)
            if block is None:
                return
            yield block
            if block in self._held and self._held[block].evictable:
                raise LocalProtocolError("a block that is to be evicted was not")

    def _link(self, before: str, block: str) -> None:
        if self._next.get(before) == block:
            return
        old = self._next.get(before)
        if old is not None:
            del self._previous[old]
        old = self._previous.get(block)
        if old is not None:
            del self._next[old]
        self._next[before] = block
        self._previous[block] = before

    def _orphan(self, block: str) -> None:
        held = self._held.get(block)
        if held is not None and held.evictable:
            tier = self._tiers[held.tier]
            if block in tier.unused:
                held.orphan = True
                tier.orphans[block] = tier.unused.pop(block)

    # The whole state

    def freeze(self, now_ms: int) -> Hashable:
        """Return all that is held as a hashable value. Of uses only the order counts."""
        held = (
            (block, each.tier, each.evictable, each.block.repr_digest) for block, each in self._held.items()
        )
        uses = sorted(
            (use, name, block, block in tier.orphans)
            for name, tier in self._tiers.items()
            for block, use in (*tier.unused.items(), *tier.orphans.items())
        )
        return (
            tuple(sorted(held)),
            tuple(sorted(self._next.items())),
            tuple((tier.used_bytes, tier.is_open) for tier in self._tiers.values()),
            tuple(use[1:] for use in uses),
        )
