"""Moves blocks between the tiers of a holder: down before they would be evicted, up when they are read.

A part of each tier is kept free by moving what would be missed least to a slower tier, where that has room
or holds something colder. A block that is read whole from a slow tier goes into the fastest one with room.
Few blocks move at a time. A block counts as held where it was until its copy is complete, and its record is
published anew then; where somebody reads or keeps it by that time it stays where it was, since that read may
still be under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import attrs

from kvsp_core.limits import MAX_TIER_MOVES
from kvsp_core.roles.holdings import Holdings, Warmth
from kvsp_core.roles.role import Drop, JobDone, JobFailed, ReadBlock, Store, StoredBlock
from kvsp_core.roles.work import Work

__all__ = ["MoveRead", "MoveStore", "Purpose", "TierMoves"]

_FREE_SHARE: Final = 8
"""One part in so many of a tier is kept free."""

_FEWEST_BLOCKS: Final = 4
"""A tier that holds fewer is filled up: keeping a part of it free would leave too little."""

_REST_MS: Final = 1_000
"""How long nothing moves to a tier that did not take a block."""


@attrs.frozen
class _Move:
    block: str = attrs.field(repr=False)
    stored: StoredBlock
    source: str
    target: str
    buffer: int

    @property
    def size_bytes(self) -> int:
        return self.stored.header.size_bytes


@attrs.frozen
class MoveRead:
    """A block that moves is read."""

    move: _Move


@attrs.frozen
class MoveStore:
    """A block that moves is written."""

    move: _Move


Purpose: TypeAlias = MoveRead | MoveStore
"""What a job of a move is for."""


class TierMoves:
    """The moves of one holder.

    `make_room` makes room in a tier by evicting what is colder there than so much, or evicts nothing.
    `in_use` says whether a block is being read or kept. `moved` is told when a move has ended, and `lost`
    when a block turned out not to be what was stored.
    """

    def __init__(
        self,
        work: Work,
        holdings: Holdings,
        *,
        make_room: Callable[[str, int, int, Warmth], bool],
        in_use: Callable[[str], bool],
        moved: Callable[[str, int, bool], None],
        lost: Callable[[str, int], None],
    ) -> None:
        self._work = work
        self._holdings = holdings
        self._make_room = make_room
        self._in_use = in_use
        self._moved = moved
        self._lost = lost
        self._moves: dict[str, _Move] = {}
        self._leaving_bytes: dict[str, int] = {}  # tier -> what is on its way out of it
        self._rests_until_ms: dict[str, int] = {}

    def __contains__(self, block: str) -> bool:
        """Return whether a block is on its way between tiers, held still or not."""
        return block in self._moves

    # Beginning

    def make_free(self, now_ms: int) -> None:
        """Move down what would be missed least, where a tier is as good as full."""
        for tier in self._holdings.tiers[:-1]:
            wanted = self._holdings.limits(tier).capacity_bytes // _FREE_SHARE
            while len(self._moves) < MAX_TIER_MOVES and self._free_soon(tier) < wanted:
                block = self._holdings.coldest(tier)
                if block is None or not self._move_down(block, tier, now_ms):
                    break

    def _free_soon(self, tier: str) -> int:
        return self._holdings.free_bytes(tier) + self._leaving_bytes.get(tier, 0)

    def _move_down(self, block: str, tier: str, now_ms: int) -> bool:
        found = self._holdings.get(block)
        assert found is not None
        stored, size_bytes = found[0], found[0].header.size_bytes
        if size_bytes * _FEWEST_BLOCKS > self._holdings.limits(tier).capacity_bytes:
            return False
        for lower in self._holdings.tiers[self._holdings.tiers.index(tier) + 1 :]:
            if now_ms < self._rests_until_ms.get(lower, 0):
                continue
            room = self._holdings.free_bytes(lower) >= size_bytes
            if room or self._make_room(lower, size_bytes, now_ms, self._holdings.first_use(tier)):
                move = self._begin(block, stored, tier, lower, self._work.new_buffer())
                job = self._work.job(MoveRead(move))
                self._work.emit(ReadBlock(job, move.buffer, stored.name, tier))
                return True
        return False

    def move_up(self, block: str, buffer: int, now_ms: int) -> bool:
        """Move a block that was read whole into a buffer to a faster tier with room; return whether it moves.
        Then the buffer is given back here."""
        found = self._holdings.get(block)
        if found is None or block in self._moves or len(self._moves) >= MAX_TIER_MOVES:
            return False
        stored, tier = found
        for faster in self._holdings.tiers[: self._holdings.tiers.index(tier)]:
            room = self._holdings.free_bytes(faster) >= stored.header.size_bytes
            if room and now_ms >= self._rests_until_ms.get(faster, 0):
                self._store(self._begin(block, stored, tier, faster, buffer))
                return True
        return False

    def _begin(self, block: str, stored: StoredBlock, source: str, target: str, buffer: int) -> _Move:
        move = self._moves[block] = _Move(block, stored, source, target, buffer)
        self._holdings.set_evictable(block, False)
        self._holdings.reserve(target, move.size_bytes)
        self._leaving_bytes[source] = self._leaving_bytes.get(source, 0) + move.size_bytes
        return move

    def _store(self, move: _Move) -> None:
        job = self._work.job(MoveStore(move))
        self._work.emit(Store(job, move.buffer, move.stored.name, move.target))

    # What comes of it

    def job_ended(self, purpose: Purpose, item: JobDone | JobFailed, now_ms: int) -> None:
        """Take in how a job of a move has ended."""
        move = purpose.move
        held = self._holdings.get(move.block) == (move.stored, move.source)
        if isinstance(purpose, MoveRead):
            sound = isinstance(item, JobDone) and item.layer_digests == move.stored.layer_digests
            if held and sound:
                self._store(move)
                return
            later = isinstance(item, JobFailed) and item.takes_nothing
            if later:
                self._rests_until_ms[move.target] = now_ms + _REST_MS
            self._end(move, now_ms, stays=held and (sound or later))
            if held and not sound and not later:
                self._lost(move.block, now_ms)
            return
        if isinstance(item, JobFailed):
            self._work.observe("kvsp_holder_store_failures", tier=move.target, fault=item.fault.value)
            self._rests_until_ms[move.target] = now_ms + _REST_MS
            self._end(move, now_ms, stays=held)
        elif held and not self._in_use(move.block):
            self._holdings.move(move.block, move.target)
            self._holdings.reserve(move.target, move.size_bytes)
            self._holdings.release(move.source, move.size_bytes)
            self._work.emit(Drop(move.stored.name, move.source))
            self._work.observe("kvsp_holder_blocks_moved", source=move.source, target=move.target)
            self._end(move, now_ms, stays=True, moved=True)
        else:
            self._work.emit(Drop(move.stored.name, move.target))
            self._end(move, now_ms, stays=held)

    def _end(self, move: _Move, now_ms: int, *, stays: bool, moved: bool = False) -> None:
        """Give back what the move took; `stays` says whether the block is held, `moved` where."""
        del self._moves[move.block]
        self._holdings.release(move.target, move.size_bytes)
        self._leaving_bytes[move.source] -= move.size_bytes
        self._work.free(move.buffer)
        if stays:
            self._moved(move.block, now_ms, moved)
