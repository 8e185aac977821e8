"""Keeps the blocks that an instance computes: in its own tiers, and copied to another holder so that they
survive it (CP-1, decision W20).

Each complete block of a session is exported from the engine, added to the tiers here, and stored at the
holder of copies, where one lease or several keep it while the session lives; a session that ends gives them
back, one that goes on elsewhere lets them run out. Few blocks are under way at a time; the others wait in
the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

import attrs

from kvsp_core.answers import read_answer, read_outcome
from kvsp_core.errors import RemoteProtocolError
from kvsp_core.limits import MAX_LEASE_KEYS
from kvsp_core.machines.alarms import Alarms
from kvsp_core.messages import LeaseGranted, LeaseRenewal, LeaseRequest
from kvsp_core.resources import CreateLease, ReleaseLease, RenewLease, StoreBlock
from kvsp_core.roles import engine
from kvsp_core.roles.instance_settings import InstanceSettings
from kvsp_core.roles.local_blocks import BlockAdded, BlockGone, LocalBlocks, News
from kvsp_core.roles.role import (
    AnswerReceived,
    BlockBody,
    BlockName,
    CallFailed,
    JobDone,
    JobFailed,
    StoredBlock,
)
from kvsp_core.roles.work import Work

__all__ = ["Copies", "ExportFor", "Purpose"]

_AT_A_TIME: Final = 4
"""Blocks on their way out of the engine, into tiers and to the holder of copies."""

_MOST_GONE: Final = 8
"""Copies of a session that are looked for one by one and found gone, before all not leased count as gone."""

_ANEW: Final = ""
"""Stands for a lease where one could not be had, and is to be asked for again."""

_Run: TypeAlias = tuple[str, int]
"""A session, and which of the attempts to serve it."""


@attrs.frozen
class ExportFor:
    """A block on its way out of the engine."""

    run: _Run = attrs.field(repr=False)
    name: BlockName
    buffer: int


@attrs.frozen
class _PutFor:
    run: _Run = attrs.field(repr=False)
    name: BlockName
    buffer: int


@attrs.frozen
class _LeaseFor:
    run: _Run = attrs.field(repr=False)
    keys: tuple[str, ...] = attrs.field(repr=False)


@attrs.frozen
class _RenewFor:
    run: _Run = attrs.field(repr=False)
    lease: str = attrs.field(repr=False)


@attrs.frozen
class _Notice:
    """A lease given back; the answer changes nothing."""


Purpose: TypeAlias = ExportFor | _PutFor | _LeaseFor | _RenewFor | _Notice
"""What a call or job for copies is for."""


@attrs.define(repr=False)
class _Kept:
    """What is kept elsewhere for a session."""

    pending: int = 0
    unleased: list[str] = attrs.field(factory=list)
    most: int = MAX_LEASE_KEYS
    """How many blocks the next lease may name: half as many after one that named a block that is gone, and
    twice as many after one that was granted."""
    gone: int = 0
    """Blocks in a row that turned out to be gone."""
    leasing: bool = False
    closed: bool = False
    leases: dict[str, tuple[str, ...]] = attrs.field(factory=dict)


class Copies:
    """The copies of all sessions of an instance. Without a `copy_holder` in the settings blocks are kept here
    only. `cause_of` returns the request that a session is for."""

    def __init__(
        self,
        work: Work,
        blocks: LocalBlocks,
        settings: InstanceSettings,
        *,
        cause_of: Callable[[str], str | None],
    ) -> None:
        self._work = work
        self._blocks = blocks
        self._holder = settings.copy_holder
        self._lease_ms = settings.copy_lease_ms
        self._call_timeout_ms = settings.fetch_timeout_ms  # most calls carry a block
        self._cause_of = cause_of
        self._kept: dict[_Run, _Kept] = {}
        self._queue: deque[tuple[_Run, BlockName, int, int]] = deque()
        self._users: dict[int, int] = {}  # buffer -> who still reads it
        self._tickets: dict[int, int] = {}  # ticket -> buffer
        self._alarms: Alarms[tuple[_Run, str]] = Alarms()  # when to renew which lease, or `_ANEW`
        self._puts = 0  # on their way
        self._unreachable = False  # whether the last of them got no answer

    def export(self, session: str, run: int, name: BlockName, sequence: int, index: int) -> None:
        """Keep a block that the engine has computed."""
        kept = self._kept.setdefault((session, run), _Kept())
        kept.pending += 1
        self._queue.append(((session, run), name, sequence, index))
        self._pump()

    def copy(self, session: str, run: int, name: BlockName, buffer: int, size_bytes: int) -> bool:
        """Copy a block that is held here; return whether the buffer is now ours to free."""
        if self._holder is None:
            return False
        self._kept.setdefault((session, run), _Kept())
        self._users[buffer] = 1
        self._put((session, run), name, buffer, size_bytes)
        return True

    def busy(self, session: str, run: int) -> bool:
        """Return whether blocks of a session have yet to leave the engine."""
        kept = self._kept.get((session, run))
        return kept is not None and kept.pending > 0

    def close(self, session: str, run: int) -> None:
        """The session has ended: what keeps its copies is given back. Blocks still in the engine are kept
        all the same."""
        kept = self._kept.get((session, run))
        if kept is None:
            return
        self._stop_renewing((session, run), kept)
        for lease in kept.leases:
            self._release(lease)
        kept.leases.clear()
        kept.unleased.clear()
        kept.closed = True
        self._forget_closed((session, run), kept)

    def _forget_closed(self, run: _Run, kept: _Kept) -> None:
        """Forget a session that has ended, once nothing more is to come of it."""
        if kept.closed and not kept.pending and not kept.leasing:
            del self._kept[run]

    def abandon(self, session: str, run: int) -> None:
        """The session goes on elsewhere: whoever serves it loads the copies, so their leases run out by
        themselves."""
        kept = self._kept.pop((session, run), None)
        if kept is not None:
            self._stop_renewing((session, run), kept)

    # Out of the engine

    def _pump(self) -> None:
        while self._queue and len(self._users) < _AT_A_TIME:
            run, name, sequence, index = self._queue.popleft()
            if run not in self._kept:
                continue
            buffer = self._work.new_buffer()
            self._users[buffer] = 1
            job = self._work.job(ExportFor(run, name, buffer))
            self._work.emit(engine.ExportBlock(job, sequence, index, buffer))

    def job_ended(self, purpose: ExportFor, item: JobDone | JobFailed, now_ms: int) -> str:
        """Take in how an export has ended; return the session it was for."""
        kept = self._kept.get(purpose.run)
        if kept is not None:
            kept.pending -= 1
            self._forget_closed(purpose.run, kept)
        if isinstance(item, JobFailed) or item.header is None or kept is None:
            self._done_with(purpose.buffer)
            return purpose.run[0]
        block = StoredBlock(purpose.name, item.header, item.layer_digests, item.repr_digest)
        ticket, effects = self._blocks.add(block, purpose.buffer, now_ms)
        self._tickets[ticket] = purpose.buffer
        self._work.emit(*effects)
        if self._holder is not None:
            self._users[purpose.buffer] += 1
            self._put(purpose.run, purpose.name, purpose.buffer, item.header.size_bytes)
        return purpose.run[0]

    def take_news(self, news: News) -> None:
        """Take in what the holder beside says of a block."""
        if isinstance(news, BlockGone):
            return
        buffer = self._tickets.pop(news.ticket, None)
        if buffer is not None:
            self._work.observe(
                "kvsp_instance_blocks_kept"
                if isinstance(news, BlockAdded)
                else "kvsp_instance_blocks_not_kept"
            )
            self._done_with(buffer)

    def _done_with(self, buffer: int) -> None:
        self._users[buffer] -= 1
        if not self._users[buffer]:
            del self._users[buffer]
            self._work.free(buffer)
            self._pump()

    # At the holder of copies

    def _put(self, run: _Run, name: BlockName, buffer: int, size_bytes: int) -> None:
        """Copy a block. While the holder does not answer one block at a time goes there, and the others are
        done without: waiting for it would keep those that follow, and their sessions, in the engine."""
        assert self._holder is not None
        if self._unreachable and self._puts:
            self._work.observe("kvsp_instance_copy_failures")
            self._done_with(buffer)
            return
        self._puts += 1
        self._work.call(
            self._holder,
            StoreBlock(name.compat_id, name.scope_id, name.block_key),
            purpose=_PutFor(run, name, buffer),
            timeout_ms=self._call_timeout_ms,
            block=BlockBody(buffer),
            length=size_bytes,
            cause=self._cause_of(run[0]),
        )

    def call_ended(self, purpose: Purpose, item: AnswerReceived | CallFailed, now_ms: int) -> None:
        """Take in how a call about copies was answered."""
        status = item.response.status if isinstance(item, AnswerReceived) else None
        match purpose:
            case _PutFor(run, name, buffer):
                self._puts -= 1
                self._unreachable = status is None
                kept = self._kept.get(run)
                if status is not None and (200 <= status < 300 or status == 412):
                    if kept is not None and not kept.closed:
                        kept.unleased.append(name.block_key)
                        self._lease(run, kept)
                else:
                    self._work.observe("kvsp_instance_copy_failures")
                self._done_with(buffer)
            case _LeaseFor(run, keys):
                self._leased(run, keys, item, now_ms)
            case _RenewFor(run, lease):
                self._renewed(run, lease, item, now_ms)
            case _:
                pass

    def _lease(self, run: _Run, kept: _Kept) -> None:
        """Lease what was copied since the last time, as much as one lease may name."""
        if kept.leasing or not kept.unleased:
            return
        assert self._holder is not None
        keys, kept.unleased = tuple(kept.unleased[: kept.most]), kept.unleased[kept.most :]
        kept.leasing = True
        self._work.call(
            self._holder,
            CreateLease(),
            LeaseRequest(block_keys=keys, ttl_ms=self._lease_ms),
            purpose=_LeaseFor(run, keys),
            timeout_ms=self._call_timeout_ms,
            cause=self._cause_of(run[0]),
        )

    def _leased(
        self, run: _Run, keys: tuple[str, ...], item: AnswerReceived | CallFailed, now_ms: int
    ) -> None:
        granted = _granted(item)
        kept = self._kept.get(run)
        if kept is None:
            return  # the session goes on elsewhere, where the copies are wanted
        kept.leasing = False
        if kept.closed:
            if granted is not None:
                self._release(granted.lease)
            self._forget_closed(run, kept)
            return
        if granted is not None:
            kept.leases[granted.lease] = keys
            kept.most, kept.gone = min(2 * kept.most, MAX_LEASE_KEYS), 0
            self._renew_later(run, granted.lease, granted, now_ms)
            self._lease(run, kept)
        elif self._shortened(item):
            kept.unleased = [*keys, *kept.unleased]
            self._lease(run, kept)
        elif not isinstance(item, AnswerReceived) or item.response.status != 404:
            kept.unleased = [*keys, *kept.unleased]
            self._alarms.set((run, _ANEW), now_ms + max(1, self._lease_ms // 3))
        else:
            self._not_there(kept, keys)
            self._lease(run, kept)

    def _not_there(self, kept: _Kept, keys: tuple[str, ...]) -> None:
        """A lease is on all of its blocks or on none: one that is gone must not cost the others theirs."""
        if len(keys) > 1:
            kept.most = len(keys) // 2
            kept.unleased = [*keys, *kept.unleased]
            return
        kept.gone += 1
        if kept.gone >= _MOST_GONE:  # so many that the others will be, too
            keys = (*keys, *kept.unleased)
            kept.unleased, kept.most, kept.gone = [], MAX_LEASE_KEYS, 0
        self._work.observe("kvsp_instance_copies_lost", len(keys))

    def _renewed(self, run: _Run, lease: str, item: AnswerReceived | CallFailed, now_ms: int) -> None:
        kept = self._kept.get(run)
        if kept is None or lease not in kept.leases:
            return
        if isinstance(item, AnswerReceived) and item.response.status == 404:
            kept.unleased += kept.leases.pop(lease)
            self._lease(run, kept)
        elif self._shortened(item):
            self._renew(run, lease)
        else:
            self._renew_later(run, lease, _granted(item), now_ms)

    def _shortened(self, item: AnswerReceived | CallFailed) -> bool:
        """Return whether a lease was refused only because the holder grants shorter ones; such are asked for
        from now on."""
        problem = read_outcome(item.response, item.body) if isinstance(item, AnswerReceived) else None
        if problem is None or problem.max_ttl_ms is None or problem.max_ttl_ms >= self._lease_ms:
            return False
        self._lease_ms = problem.max_ttl_ms
        return True

    def _renew(self, run: _Run, lease: str) -> None:
        assert self._holder is not None
        self._work.call(
            self._holder,
            RenewLease(lease),
            LeaseRenewal(ttl_ms=self._lease_ms),
            purpose=_RenewFor(run, lease),
            timeout_ms=self._call_timeout_ms,
        )

    def _renew_later(self, run: _Run, lease: str, granted: LeaseGranted | None, now_ms: int) -> None:
        held_ms = self._lease_ms if granted is None else min(granted.ttl_ms, self._lease_ms)
        self._alarms.set((run, lease), now_ms + max(1, held_ms // 3))

    def _stop_renewing(self, run: _Run, kept: _Kept) -> None:
        for lease in (_ANEW, *kept.leases):
            self._alarms.set((run, lease), None)

    def _release(self, lease: str) -> None:
        assert self._holder is not None
        timeout_ms = self._call_timeout_ms
        self._work.call(self._holder, ReleaseLease(lease), purpose=_Notice(), timeout_ms=timeout_ms)

    # Time

    def next_deadline_ms(self) -> int | None:
        """Return when `time_passed` is next due, or None."""
        return self._alarms.next_ms()

    def time_passed(self, now_ms: int) -> None:
        """Renew the leases that are due."""
        for run, lease in self._alarms.take_due(now_ms):
            if lease == _ANEW:
                self._lease(run, self._kept[run])
            else:
                self._renew(run, lease)


def _granted(item: AnswerReceived | CallFailed) -> LeaseGranted | None:
    if not isinstance(item, AnswerReceived):
        return None
    try:
        granted = read_answer(LeaseGranted, item.response, item.body)
    except RemoteProtocolError:
        return None
    return granted if isinstance(granted, LeaseGranted) else None
