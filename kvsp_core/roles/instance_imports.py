"""Brings the blocks of a prefix from the tiers of an instance into its engine, in order, a few at a time
(MG-2, KC-3).

Blocks are kept from eviction on the way. Where one cannot be read or taken in, the prefix ends before it:
what follows is computed.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import attrs

from kvsp_core.roles import engine
from kvsp_core.roles.instance_copies import Copies
from kvsp_core.roles.local_blocks import LocalBlocks, check_read
from kvsp_core.roles.role import BlockName, JobDone, JobFailed, ReadBlock
from kvsp_core.roles.work import Work

__all__ = ["Imports", "Purpose", "Run"]

_AHEAD: Final = 4
"""Blocks of a sequence that are read at a time."""

Run: TypeAlias = tuple[str, int]
"""A session, and which of the attempts to serve it."""


@attrs.frozen
class _ReadFor:
    run: Run = attrs.field(repr=False)
    index: int
    buffer: int
    name: BlockName


@attrs.frozen
class _ImportFor:
    run: Run = attrs.field(repr=False)
    index: int
    buffer: int
    size_bytes: int


Purpose: TypeAlias = _ReadFor | _ImportFor
"""What a job of an import is for."""


@attrs.define
class _Import:
    sequence: int
    names: tuple[BlockName, ...] = attrs.field(repr=False)
    copy_as: tuple[BlockName, ...] = attrs.field(repr=False)
    wanted: int
    """How many leading blocks are to go in; less once one has failed."""
    next_read: int = 0
    next_import: int = 0
    imported: int = 0
    read: dict[int, tuple[int, int]] = attrs.field(factory=dict)
    """Blocks read and not yet handed to the engine: index -> buffer, octets."""


class Imports:
    """All imports under way."""

    def __init__(self, work: Work, blocks: LocalBlocks, copies: Copies) -> None:
        self._work = work
        self._blocks = blocks
        self._copies = copies
        self._imports: dict[Run, _Import] = {}
        self._done: list[tuple[Run, int]] = []

    def begin(
        self, run: Run, sequence: int, names: tuple[BlockName, ...], copy_as: tuple[BlockName, ...]
    ) -> None:
        """Bring these blocks, the first ones of a sequence, into the engine, and copy them under the names
        that the session has for them: what comes from a shared scope has two (decision W24).
        """
        for name in names:
            self._blocks.keep(name)
        self._imports[run] = _Import(sequence, names, copy_as, len(names))
        self._pump(run)

    def abandon(self, run: Run) -> None:
        """Nobody waits for an import any more."""
        each = self._imports.pop(run, None)
        if each is None:
            return
        for name in each.names:
            self._blocks.let_go(name)
        for buffer, _ in each.read.values():
            self._work.free(buffer)

    @property
    def any_done(self) -> bool:
        """Whether an import has ended that was not taken."""
        return bool(self._done)

    def take_done(self) -> tuple[tuple[Run, int], ...]:
        """Return the imports that have ended since the last time, and how many blocks each brought in."""
        done, self._done = tuple(self._done), []
        return done

    def _pump(self, run: Run) -> None:
        """Read ahead, and hand over in order."""
        each = self._imports[run]
        while each.next_read < min(each.wanted, each.next_import + _AHEAD):
            name = each.names[each.next_read]
            tier = self._blocks.tier_of(name)
            if tier is None:
                each.wanted = each.next_read
                break
            buffer = self._work.new_buffer()
            job = self._work.job(_ReadFor(run, each.next_read, buffer, name))
            self._work.emit(ReadBlock(job, buffer, name, tier))
            each.next_read += 1
        while each.next_import < each.wanted and each.next_import in each.read:
            buffer, size_bytes = each.read.pop(each.next_import)
            job = self._work.job(_ImportFor(run, each.next_import, buffer, size_bytes))
            self._work.emit(engine.ImportBlock(job, each.sequence, each.next_import, buffer))
            each.next_import += 1
        if each.imported >= each.wanted:
            self.abandon(run)
            self._done.append((run, each.wanted))

    def job_ended(self, purpose: Purpose, item: JobDone | JobFailed, now_ms: int) -> None:
        """Take in how a read or an import has ended."""
        failed = isinstance(item, JobFailed)
        if isinstance(purpose, _ReadFor):
            failed = not check_read(self._work, self._blocks, purpose.name, item, now_ms)
        each = self._imports.get(purpose.run)
        if each is None:
            self._work.free(purpose.buffer)
            return
        if isinstance(purpose, _ReadFor):
            wanted = not failed and purpose.index < each.wanted
            if isinstance(item, JobDone) and item.header is not None and wanted:
                each.read[purpose.index] = purpose.buffer, item.header.size_bytes
            else:
                self._work.free(purpose.buffer)
        else:
            each.imported += not failed
            copy_as = each.copy_as[purpose.index]
            if failed or not self._copies.copy(*purpose.run, copy_as, purpose.buffer, purpose.size_bytes):
                self._work.free(purpose.buffer)
        if failed:
            each.wanted = min(each.wanted, purpose.index)
        self._pump(purpose.run)
