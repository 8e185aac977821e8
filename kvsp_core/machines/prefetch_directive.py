"""One prefetch directive as an instance keeps it: what is loaded, what it waits for, whose records it has
(PF-1, PF-7); and how much an instance takes on for directives.

It decides nothing about other directives or about loading; the table in `prefetch` does.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

import attrs

from kvsp_core import limits
from kvsp_core.messages import DirectiveStatus, PrefetchBlock, PrefetchDirective
from kvsp_core.records import ReplicaRecord

__all__ = ["Directive", "DirectiveState", "PrefetchLimits"]

_LOOKUP_BEHIND_A_GAP: Final = 64
"""Keys that are asked for behind a gap, to begin with."""


@attrs.frozen(kw_only=True)
class PrefetchLimits:
    """How much an instance takes on for prefetch directives; `kvsp_core.limits` says what happens beyond."""

    concurrent_loads: int = limits.MAX_CONCURRENT_LOADS
    pending_directives: int = limits.MAX_PENDING_DIRECTIVES
    pending_blocks: int = limits.MAX_PENDING_BLOCKS
    directive_blocks: int = limits.MAX_DIRECTIVE_BLOCKS
    sources_per_block: int = limits.MAX_SOURCES_PER_BLOCK
    lookup_keys: int = limits.MAX_LOOKUP_KEYS
    directive_ms: int = limits.MAX_DIRECTIVE_MS
    kept_ms: int = limits.DIRECTIVE_KEPT_MS
    kept_blocks: int = limits.MAX_KEPT_BLOCKS


class DirectiveState(Enum):
    """How far a directive has come. Absent is one that was never sent, or has been forgotten."""

    ABSENT = "absent"
    PENDING = "pending"
    PARTIAL = "partial"
    COMPLETE = "complete"
    FAILED = "failed"


@attrs.define(kw_only=True, repr=False)
class Directive:
    """A directive, its geometry, and how far it is. Times are of the monotonic clock."""

    message: PrefetchDirective
    layers: int
    block_tokens: int
    producers: tuple[str, ...] | None
    any_source: bool = False
    """Whether a block that names no source is taken from whoever has it."""
    order: int
    """Directives that came earlier have lower numbers."""
    state: DirectiveState = DirectiveState.PENDING
    deadline_ms: int
    """When loading stops."""
    awaited: bool = False
    """Whether its request is here and waits for it."""
    pins_until_ms: int = 0
    forget_at_ms: int = 0
    pinned: bool = True
    """Whether what is loaded is kept from eviction."""
    loaded: set[str] = attrs.field(factory=set)
    """Exactly the blocks of it that are resident here."""
    waiting: set[str] = attrs.field(factory=set)
    """Blocks that are neither resident nor given up."""
    unasked: deque[str] = attrs.field(factory=deque)
    """Blocks whose records are not known yet, in order."""
    asked: int = 0
    """How many of those are being looked up."""
    most: int = 0
    """How many to look up next."""
    places: dict[str, int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.places = {block.block_key: place for place, block in enumerate(self.message.blocks)}

    @property
    def name(self) -> str:
        """The name the controller gave it."""
        return self.message.directive

    @property
    def blocks(self) -> tuple[PrefetchBlock, ...]:
        """Its blocks, in prefix order."""
        return self.message.blocks

    @property
    def pending(self) -> bool:
        """Whether it is being worked on."""
        return self.state is DirectiveState.PENDING

    def status(self) -> DirectiveStatus:
        """Return what GET of the directive answers."""
        return DirectiveStatus(
            directive=self.name,
            state=self.state.value,
            loaded=tuple(block.block_key for block in self.blocks if block.block_key in self.loaded),
            request_ref=self.message.request_ref,
        )

    def due_ms(self) -> int:
        """Return when something happens by itself: loading stops, pins lapse, or the directive is
        forgotten."""
        if self.pending:
            return self.deadline_ms
        return min(self.pins_until_ms, self.forget_at_ms) if self.pinned else self.forget_at_ms

    def outcome(self) -> DirectiveState:
        """Return how it ends where nothing is left to wait for."""
        if len(self.loaded) == len(self.blocks):
            return DirectiveState.COMPLETE
        return DirectiveState.PARTIAL if self.loaded else DirectiveState.FAILED

    def await_blocks(self, held: frozenset[str], most: int) -> None:
        """Wait for every block that is not held, and look up at most so many records at a time."""
        self.unasked.extend(block.block_key for block in self.blocks if block.block_key not in held)
        self.waiting.update(self.unasked)
        self.most = most

    def next_lookup(self, most: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return the keys to look up next, at most so many, and the holders whose records have to be among
        those returned; None if all are known."""
        self.asked = min(len(self.unasked), self.most, most)
        if not self.asked:
            return None
        keys = tuple(itertools.islice(self.unasked, self.asked))
        sources = [self.blocks[self.places[key]].sources for key in keys]
        if self.any_source and not all(sources):
            return keys, self.producers or ()
        return keys, tuple(dict.fromkeys((*itertools.chain(*sources), *(self.producers or ()))))

    def looked_up(
        self, records: Sequence[tuple[ReplicaRecord, ...]]
    ) -> list[tuple[str, tuple[ReplicaRecord, ...]]]:
        """Take in the records of the leading keys that were asked for; return those to load, each with the
        records at its sources, in the order of the sources.

        The first key without any is given up. Others may follow behind it: few are asked for then, and more
        as long as they are there.
        """
        found = min(len(records), self.asked)
        gap = found < self.asked
        to_load = []
        for replicas in records[:found]:
            key = self.unasked.popleft()
            usable = self._at_sources(key, replicas)
            if key not in self.waiting:
                continue
            if usable:
                to_load.append((key, usable))
            else:
                self.waiting.discard(key)
        if gap:
            self.waiting.discard(self.unasked.popleft())
        self.most = max(_LOOKUP_BEHIND_A_GAP, 2 * found) if gap else 2 * max(self.most, 1)
        self.asked = 0
        return to_load

    def _at_sources(self, key: str, replicas: Sequence[ReplicaRecord]) -> tuple[ReplicaRecord, ...]:
        if self.producers is not None:
            digests = {record.digest for record in replicas if record.holder in self.producers}
            replicas = [record for record in replicas if record.digest in digests]
        sources = self.blocks[self.places[key]].sources
        if self.any_source and not sources:
            return tuple(replicas)
        rank = {source: place for place, source in enumerate(sources)}
        usable = (record for record in replicas if record.holder in rank)
        return tuple(sorted(usable, key=lambda record: rank[record.holder]))

    def stop_looking(self) -> bool:
        """Give up the blocks whose records are not known; return whether a lookup was under way."""
        was_asking = self.asked > 0
        self.waiting.difference_update(self.unasked)
        self.unasked.clear()
        self.asked = 0
        return was_asking

    def freeze(self, now_ms: int) -> tuple[Any, ...]:
        """Return all of it as a hashable value, times as what remains."""
        values = attrs.asdict(self, recurse=False, filter=lambda field, _: field.init)
        for name in ("deadline_ms", "pins_until_ms", "forget_at_ms"):
            values[name] -= now_ms
        for name in ("loaded", "waiting"):
            values[name] = frozenset(values[name])
        values["unasked"] = tuple(values["unasked"])
        return tuple(values.items())

    @classmethod
    def thaw(cls, frozen: tuple[Any, ...], now_ms: int) -> Directive:
        """Return the directive that `freeze` made this of."""
        values = dict(frozen)
        for name in ("deadline_ms", "pins_until_ms", "forget_at_ms"):
            values[name] += now_ms
        for name in ("loaded", "waiting"):
            values[name] = set(values[name])
        values["unasked"] = deque(values["unasked"])
        return cls(**values)
