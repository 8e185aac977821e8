"""Leases: what a holder has promised to keep, for whom, and until when.

A lease is a holder's promise not to evict the blocks it names until it expires or is released (protocol
section "Leases"; LE-1 to LE-4, PB-4, decision W16). `LeaseTable` guards all blocks of one holder: who may
lease them, when they may be evicted, and when their memory may be used again.

Two kinds of thing have a state here, each with its table. A **lease**, as its client sees it: another
client's lease is as unknown as one that never was. A **block**: free, protected by a lease or by the grace
time after a restart, being withdrawn because of a fault, or leaving because someone still reads it.

A promise holds through its last millisecond, and one more is added to what was granted, since client and
holder both leave out fractions. So every ``until_ms`` here is the last millisecond of something, and what it
ends is over one millisecond later.

Blocks, clients and reads are named by opaque strings of the role's choosing. Names of blocks and leases are
confidential and appear in no repr and no error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final, TypeAlias, assert_never

import attrs

from kvsp_core.errors import LocalProtocolError
from kvsp_core.limits import (
    FAULT_WITHDRAWAL_MS,
    LEASE_QUOTA_BYTES,
    MAX_LEASE_TTL_MS,
    MAX_LEASES_PER_CLIENT,
)
from kvsp_core.machines.alarms import TimerFired, earliest
from kvsp_core.machines.granted_leases import GrantedLeases, Lease
from kvsp_core.machines.table import Table, refuse, to
from kvsp_core.problems import LEASE_QUOTA, NOT_FOUND, Problem

__all__ = [
    "BLOCKS",
    "LEASES",
    "AddBlock",
    "BlockKind",
    "CreateLease",
    "CutRead",
    "Effect",
    "EndRead",
    "EndWithdrawal",
    "Event",
    "EvictBlock",
    "FailBlock",
    "FreeBlock",
    "FrozenLeases",
    "LeaseBroken",
    "LeaseGranted",
    "LeaseKind",
    "LeaseTable",
    "Refused",
    "ReleaseLease",
    "RenewLease",
    "StartRead",
    "TimerFired",
    "Unprotected",
    "WithdrawBlock",
]


class LeaseKind(Enum):
    """What a lease is to the client that names it."""

    UNKNOWN = "unknown"
    """Never granted, ended, or another client's."""
    VALID = "valid"
    BROKEN = "broken"
    """A fault took one of its blocks. Its other blocks stay protected until it expires."""


class BlockKind(Enum):
    """What a block is to the holder."""

    ABSENT = "absent"
    FREE = "free"
    """Held, and may be evicted."""
    PROTECTED = "protected"
    """Under a lease, or restored within the grace time after a restart."""
    WITHDRAWING = "withdrawing"
    """Lost to a fault while protected, which breaks its leases. It goes once its record is withdrawn."""
    LEAVING = "leaving"
    """Evicted, but its memory may not be used again before the last reader is gone."""


# Events


@attrs.frozen(kw_only=True)
class AddBlock:
    """The holder now has a block. `restored` says that it was there before a restart, perhaps leased."""

    block: str = attrs.field(repr=False)
    size_bytes: int = attrs.field(validator=attrs.validators.ge(0))
    restored: bool = False


@attrs.frozen(kw_only=True)
class CreateLease:
    """A client asks for a lease on all of these blocks, or none."""

    client: str
    blocks: tuple[str, ...] = attrs.field(repr=False, validator=attrs.validators.min_len(1))
    ttl_ms: int = attrs.field(validator=attrs.validators.ge(1))


@attrs.frozen(kw_only=True)
class RenewLease:
    """A client asks for more time. It never gets less than it has."""

    client: str
    lease: str = attrs.field(repr=False)
    ttl_ms: int = attrs.field(validator=attrs.validators.ge(1))


@attrs.frozen(kw_only=True)
class ReleaseLease:
    """A client gives a lease back, or the holder does where no octet of its answer could be sent."""

    client: str
    lease: str = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class StartRead:
    """A block is about to be read; until `EndRead` its memory is not used for anything else."""

    read: str
    block: str = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class EndRead:
    """A read is over: done, failed, or cut."""

    read: str


@attrs.frozen(kw_only=True)
class EvictBlock:
    """The holder takes a free block out, for want of room or because it has been kept long enough."""

    block: str = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class FailBlock:
    """A fault took a block: it goes, leased or not."""

    block: str = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class EndWithdrawal:
    """The withdrawal of a block's record was acknowledged, or cannot be."""

    block: str = attrs.field(repr=False)


Event: TypeAlias = (
    AddBlock
    | CreateLease
    | RenewLease
    | ReleaseLease
    | StartRead
    | EndRead
    | EvictBlock
    | FailBlock
    | EndWithdrawal
    | TimerFired
)


# Effects


@attrs.frozen(kw_only=True)
class LeaseGranted:
    """Answer a creation or a renewal: the lease holds for `ttl_ms` from now."""

    lease: str = attrs.field(repr=False)
    ttl_ms: int


@attrs.frozen(kw_only=True)
class Refused:
    """Answer the lease or the read that was asked for with this problem; nothing has changed."""

    problem: Problem


@attrs.frozen(kw_only=True)
class LeaseBroken:
    """A fault broke a lease. Its client hears of it when it next uses the lease."""

    client: str
    lease: str = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class Unprotected:
    """These blocks may be evicted from now on."""

    blocks: tuple[str, ...] = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class WithdrawBlock:
    """Withdraw the record of this block from the index.

    Where a fault took it while it was protected, `EndWithdrawal` says that this is done.
    """

    block: str = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class CutRead:
    """End this read with a clear failure, then say `EndRead`: its block is leaving."""

    read: str


@attrs.frozen(kw_only=True)
class FreeBlock:
    """The memory of this block may be used again."""

    block: str = attrs.field(repr=False)


Effect: TypeAlias = LeaseGranted | Refused | LeaseBroken | Unprotected | WithdrawBlock | CutRead | FreeBlock


# What is legal

_L, _B = LeaseKind, BlockKind

LEASES: Final = Table(
    "lease",
    states=tuple(LeaseKind),
    events=(CreateLease, RenewLease, ReleaseLease, FailBlock, EndWithdrawal, TimerFired),
    cells={
        _L.UNKNOWN: {
            CreateLease: to(_L.UNKNOWN, _L.VALID),
            RenewLease: refuse(NOT_FOUND),
            ReleaseLease: refuse(NOT_FOUND),
            FailBlock: to(_L.UNKNOWN),
            EndWithdrawal: to(_L.UNKNOWN),
            TimerFired: to(_L.UNKNOWN),
        },
        _L.VALID: {
            CreateLease: to(_L.VALID),
            RenewLease: to(_L.VALID),
            ReleaseLease: to(_L.UNKNOWN),
            FailBlock: to(_L.VALID, _L.BROKEN),
            EndWithdrawal: to(_L.VALID),
            TimerFired: to(_L.VALID, _L.UNKNOWN),
        },
        _L.BROKEN: {
            CreateLease: to(_L.BROKEN),
            RenewLease: refuse(NOT_FOUND),
            ReleaseLease: refuse(NOT_FOUND),
            FailBlock: to(_L.BROKEN),
            EndWithdrawal: to(_L.BROKEN, _L.UNKNOWN),
            TimerFired: to(_L.BROKEN, _L.UNKNOWN),
        },
    },
)

BLOCKS: Final = Table(
    "block of a holder",
    states=tuple(BlockKind),
    events=(
        AddBlock,
        CreateLease,
        ReleaseLease,
        StartRead,
        EndRead,
        EvictBlock,
        FailBlock,
        EndWithdrawal,
        TimerFired,
    ),
    cells={
        _B.ABSENT: {
            AddBlock: to(_B.FREE, _B.PROTECTED),
            CreateLease: refuse(NOT_FOUND),
            ReleaseLease: to(_B.ABSENT),
            StartRead: refuse(NOT_FOUND),
            FailBlock: to(_B.ABSENT),
            EndWithdrawal: to(_B.ABSENT),
            TimerFired: to(_B.ABSENT),
        },
        _B.FREE: {
            CreateLease: to(_B.PROTECTED, _B.FREE),
            ReleaseLease: to(_B.FREE),
            StartRead: to(_B.FREE),
            EndRead: to(_B.FREE),
            EvictBlock: to(_B.ABSENT, _B.LEAVING),
            FailBlock: to(_B.ABSENT, _B.LEAVING),
            EndWithdrawal: to(_B.FREE),
            TimerFired: to(_B.FREE),
        },
        _B.PROTECTED: {
            CreateLease: to(_B.PROTECTED),
            ReleaseLease: to(_B.PROTECTED, _B.FREE),
            StartRead: to(_B.PROTECTED),
            EndRead: to(_B.PROTECTED),
            FailBlock: to(_B.WITHDRAWING),
            EndWithdrawal: to(_B.PROTECTED),
            TimerFired: to(_B.PROTECTED, _B.FREE),
        },
        _B.WITHDRAWING: {
            CreateLease: refuse(NOT_FOUND),
            ReleaseLease: to(_B.WITHDRAWING),
            StartRead: refuse(NOT_FOUND),
            EndRead: to(_B.WITHDRAWING),
            FailBlock: to(_B.WITHDRAWING),
            EndWithdrawal: to(_B.ABSENT, _B.LEAVING),
            TimerFired: to(_B.WITHDRAWING, _B.ABSENT, _B.LEAVING),
        },
        _B.LEAVING: {
            CreateLease: refuse(NOT_FOUND),
            ReleaseLease: to(_B.LEAVING),
            StartRead: refuse(NOT_FOUND),
            EndRead: to(_B.LEAVING, _B.ABSENT),
            FailBlock: to(_B.LEAVING),
            EndWithdrawal: to(_B.LEAVING),
            TimerFired: to(_B.LEAVING),
        },
    },
)

_LEASE_ID_OCTETS: Final = 16
_NOT_HELD: Final = Problem(NOT_FOUND, "a block of the lease is not held here; look up its replicas again")
_NO_LEASE: Final = Problem(NOT_FOUND, "no such lease; create a new one")
_NO_BLOCK: Final = Problem(NOT_FOUND, "the block is not held here; continue with another replica")


# What happens


@attrs.frozen(kw_only=True)
class FrozenLeases:
    """All that a `LeaseTable` holds, as a hashable value; times are what remains."""

    blocks: tuple[tuple[str, int, bool], ...] = attrs.field(repr=False)
    """Name, octets, and whether it is in its grace after a restart."""
    leases: tuple[tuple[str, str, tuple[str, ...], int, bool], ...] = attrs.field(repr=False)
    """Name, client, blocks, time, and whether it is broken."""
    reads: tuple[tuple[str, str], ...] = attrs.field(repr=False)
    """Read and block."""
    withdrawing: tuple[tuple[str, int], ...] = attrs.field(repr=False)
    leaving: tuple[str, ...] = attrs.field(repr=False)
    unprotected: tuple[str, ...] = attrs.field(repr=False)
    """What has become free and has not been said yet."""
    grace_ms: int


class LeaseTable:
    """The leases of one holder and the blocks they protect.

    `random_bytes` gives unguessable octets; a lease's identifier is 128 bits of it, so none is used twice,
    across restarts too. `now_ms` is the time of the start, from which restored blocks have a grace of
    `max_ttl_ms`. `quota_bytes` and `max_leases` hold for each client; `withdrawal_ms` is how long the record
    of a block that a fault took may take to be withdrawn.

    All costs are O(log n), or proportional to the blocks an event names.
    """

    def __init__(
        self,
        *,
        random_bytes: Callable[[int], bytes],
        now_ms: int,
        max_ttl_ms: int = MAX_LEASE_TTL_MS,
        quota_bytes: int = LEASE_QUOTA_BYTES,
        max_leases: int = MAX_LEASES_PER_CLIENT,
        withdrawal_ms: int = FAULT_WITHDRAWAL_MS,
    ) -> None:
        self._random_bytes = random_bytes
        self._max_ttl_ms = max_ttl_ms
        self._withdrawal_ms = withdrawal_ms
        # Blocks may be millions: strings and numbers only, which the garbage collector does not visit.
        self._sizes: dict[str, int] = {}
        self._restored: dict[str, None] = {}  # a set that keeps its order, as the others below
        self._grace_until_ms = _last_ms(now_ms, max_ttl_ms)
        # What is out of the ordinary about a few of them.
        self._leases = GrantedLeases(self._size_of, quota_bytes=quota_bytes, max_leases=max_leases)
        self._reads: dict[str, str] = {}
        self._readers_of: dict[str, dict[str, None]] = {}
        self._withdrawing: dict[str, int] = {}  # until when, earliest first, since each has the same time
        self._leaving: set[str] = set()
        self._unprotected: dict[str, None] = {}  # what has become free and has not been said yet

    def limit(self, *, max_ttl_ms: int, quota_bytes: int) -> None:
        """Grant leases within these limits from now on; those there are run on."""
        self._max_ttl_ms = max_ttl_ms
        self._leases.quota_bytes = quota_bytes

    # Questions

    def kind_of_block(self, block: str, now_ms: int) -> BlockKind:
        """Return what a block is at this moment, whether the timer has fired or not."""
        if block in self._leaving:
            return BlockKind.LEAVING
        if block not in self._sizes:
            return BlockKind.ABSENT
        if block in self._withdrawing:
            return BlockKind.WITHDRAWING
        if now_ms <= self._grace_until_ms and block in self._restored:
            return BlockKind.PROTECTED
        if any(now_ms <= lease.until_ms for lease in self._leases.on(block)):
            return BlockKind.PROTECTED
        return BlockKind.FREE

    def kind_of_lease(self, client: str, lease: str, now_ms: int) -> LeaseKind:
        """Return what a lease is to this client at this moment."""
        held = self._leases.get(lease)
        if held is None or held.client != client or now_ms > held.until_ms:
            return LeaseKind.UNKNOWN
        return LeaseKind.BROKEN if held.broken else LeaseKind.VALID

    def may_evict(self, block: str, now_ms: int) -> bool:
        """Return whether a held block may be evicted now. A reader does not prevent it: it is cut first."""
        return self.kind_of_block(block, now_ms) is BlockKind.FREE

    def is_read(self, block: str) -> bool:
        """Return whether someone is reading the block; eviction does well to spare it."""
        return block in self._readers_of

    def blocks_of(self, client: str, lease: str) -> tuple[str, ...]:
        """Return the blocks of a client's lease; none where it has no such lease."""
        held = self._leases.get(lease)
        return tuple(held.blocks) if held is not None and held.client == client else ()

    def leased_bytes(self, client: str, now_ms: int) -> int:
        """Return the octets a client has under lease, each block counted once."""
        self._expire(now_ms)
        return self._leases.leased_bytes(client)

    def listing(self, now_ms: int) -> tuple[tuple[str, int, int, int], ...]:
        """Return client, number of blocks, octets and remaining time of each lease, for operators."""
        self._expire(now_ms)
        return tuple(
            (held.client, len(held.blocks), sum(map(self._size_of, held.blocks)), held.until_ms - now_ms)
            for held in self._leases
        )

    def next_deadline_ms(self) -> int | None:
        """Return when to send `TimerFired` next, or None."""
        if self._unprotected:
            return 0  # found expired by a question, or by an event that was refused
        return earliest(
            self._leases.next_end_ms(),
            next(iter(self._withdrawing.values())) + 1 if self._withdrawing else None,
            self._grace_until_ms + 1 if self._restored else None,
        )

    # Events

    def handle(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Let an event happen at `now_ms` and return what is to be done about it, in order.

        Raises `LocalProtocolError`, with nothing changed, where the holder does what its own promises forbid.
        """
        self._expire(now_ms)
        match event:
            case AddBlock():
                effects = self._add(event, now_ms)
            case CreateLease():
                effects = self._create(event, now_ms)
            case RenewLease():
                effects = self._renew(event, now_ms)
            case ReleaseLease():
                effects = self._release(event, now_ms)
            case StartRead():
                effects = self._start_read(event, now_ms)
            case EndRead():
                effects = self._end_read(event, now_ms)
            case EvictBlock():
                effects = self._evict(event, now_ms)
            case FailBlock():
                effects = self._fail(event, now_ms)
            case EndWithdrawal(block=block):
                effects = self._take_out(block) if block in self._withdrawing else ()
            case TimerFired():
                effects = self._stop_withdrawing(now_ms)
            case _:
                assert_never(event)
        return (*self._unprotect(now_ms), *effects)

    def _add(self, event: AddBlock, now_ms: int) -> tuple[Effect, ...]:
        BLOCKS.check(self.kind_of_block(event.block, now_ms), event)
        self._sizes[event.block] = event.size_bytes
        if event.restored and now_ms <= self._grace_until_ms:
            self._restored[event.block] = None
        return ()

    def _create(self, event: CreateLease, now_ms: int) -> tuple[Effect, ...]:
        for block in event.blocks:
            if BLOCKS.check(self.kind_of_block(block, now_ms), event):
                return (Refused(problem=_NOT_HELD),)
        if problem := self._too_long(event) or self._leases.refusal(event.client, event.blocks):
            return (Refused(problem=problem),)
        name = self._random_bytes(_LEASE_ID_OCTETS).hex()
        if self._leases.get(name) is not None:
            raise LocalProtocolError("random_bytes gave the same octets twice; leases could be guessed")
        blocks = dict.fromkeys(event.blocks)
        self._leases.add(Lease(name, event.client, blocks, _last_ms(now_ms, event.ttl_ms)))
        return (LeaseGranted(lease=name, ttl_ms=event.ttl_ms),)

    def _renew(self, event: RenewLease, now_ms: int) -> tuple[Effect, ...]:
        lease = self._valid(event, now_ms)
        if lease is None:
            return (Refused(problem=_NO_LEASE),)
        if problem := self._too_long(event):
            return (Refused(problem=problem),)
        self._leases.extend(lease, _last_ms(now_ms, event.ttl_ms))
        return (LeaseGranted(lease=lease.name, ttl_ms=lease.until_ms - _last_ms(now_ms, 0)),)

    def _too_long(self, event: CreateLease | RenewLease) -> Problem | None:
        if event.ttl_ms <= self._max_ttl_ms:
            return None
        detail = f"ttl_ms: at most {self._max_ttl_ms} ms are granted; ask for less"
        return Problem(LEASE_QUOTA, detail, self._max_ttl_ms)

    def _release(self, event: ReleaseLease, now_ms: int) -> tuple[Effect, ...]:
        lease = self._valid(event, now_ms)
        if lease is None:
            return (Refused(problem=_NO_LEASE),)
        self._let_go(self._leases.end(lease))
        return ()

    def _valid(self, event: RenewLease | ReleaseLease, now_ms: int) -> Lease | None:
        """Return the lease that a client names; None where it is not its own or not valid any more."""
        if LEASES.check(self.kind_of_lease(event.client, event.lease, now_ms), event):
            return None
        return self._leases.get(event.lease)

    def _start_read(self, event: StartRead, now_ms: int) -> tuple[Effect, ...]:
        if BLOCKS.check(self.kind_of_block(event.block, now_ms), event):
            return (Refused(problem=_NO_BLOCK),)
        if event.read in self._reads:
            raise LocalProtocolError("a read of this name has started already; name each read anew")
        self._enter_read(event.read, event.block)
        return ()

    def _end_read(self, event: EndRead, now_ms: int) -> tuple[Effect, ...]:
        block = self._reads.get(event.read)
        if block is None:
            raise LocalProtocolError("no read of this name is under way; end each read once")
        BLOCKS.check(self.kind_of_block(block, now_ms), event)
        del self._reads[event.read]
        readers = self._readers_of[block]
        del readers[event.read]
        if readers:
            return ()
        del self._readers_of[block]
        if block not in self._leaving:
            return ()
        self._leaving.remove(block)
        return (FreeBlock(block=block),)

    def _evict(self, event: EvictBlock, now_ms: int) -> tuple[Effect, ...]:
        BLOCKS.check(self.kind_of_block(event.block, now_ms), event)
        return (WithdrawBlock(block=event.block), *self._take_out(event.block))

    def _fail(self, event: FailBlock, now_ms: int) -> tuple[Effect, ...]:
        block = event.block
        kind = self.kind_of_block(block, now_ms)
        BLOCKS.check(kind, event)
        if kind is BlockKind.FREE:
            return (WithdrawBlock(block=block), *self._take_out(block))
        if kind is not BlockKind.PROTECTED:
            return ()  # it is not here, or on its way out already
        self._withdrawing[block] = now_ms + self._withdrawal_ms
        effects: list[Effect] = [WithdrawBlock(block=block)]
        for lease in self._leases.on(block):
            if not lease.broken:
                lease.broken = True
                effects.append(LeaseBroken(client=lease.client, lease=lease.name))
        return tuple(effects)

    def _stop_withdrawing(self, now_ms: int) -> tuple[Effect, ...]:
        late = [*itertools.takewhile(lambda block: self._withdrawing[block] < now_ms, self._withdrawing)]
        return tuple(effect for block in late for effect in self._take_out(block))

    # Parts

    def _size_of(self, block: str) -> int:
        return self._sizes[block]

    def _take_out(self, block: str) -> tuple[Effect, ...]:
        """Stop holding a block; its memory is free once the last reader is gone."""
        self._leases.take_out(block)
        del self._sizes[block]
        self._restored.pop(block, None)
        self._withdrawing.pop(block, None)
        readers = self._readers_of.get(block)
        if not readers:
            return (FreeBlock(block=block),)
        self._leaving.add(block)
        return tuple(CutRead(read=read) for read in readers)

    def _enter_read(self, read: str, block: str) -> None:
        self._reads[read] = block
        self._readers_of.setdefault(block, {})[read] = None

    def _expire(self, now_ms: int) -> None:
        """End the leases whose time is over, and the grace after a restart."""
        self._let_go(self._leases.end_due(now_ms))
        if self._restored and now_ms > self._grace_until_ms:
            self._let_go(self._restored)
            self._restored = {}

    def _let_go(self, blocks: Iterable[str]) -> None:
        self._unprotected.update(dict.fromkeys(blocks))

    def _unprotect(self, now_ms: int) -> tuple[Effect, ...]:
        """Say once which blocks have become free and still are."""
        if not self._unprotected:
            return ()
        blocks = tuple(block for block in self._unprotected if self.may_evict(block, now_ms))
        self._unprotected = {}
        return (Unprotected(blocks=blocks),) if blocks else ()

    # The whole state

    def freeze(self, now_ms: int) -> FrozenLeases:
        """Return all that is held as a hashable value, with what remains of each time."""
        self._expire(now_ms)
        leases = (
            (held.name, held.client, tuple(held.blocks), held.until_ms - now_ms, held.broken)
            for held in self._leases
        )
        return FrozenLeases(
            blocks=tuple(sorted((b, size, b in self._restored) for b, size in self._sizes.items())),
            leases=tuple(sorted(leases)),
            reads=tuple(sorted(self._reads.items())),
            withdrawing=tuple((block, until_ms - now_ms) for block, until_ms in self._withdrawing.items()),
            leaving=tuple(sorted(self._leaving)),
            unprotected=tuple(self._unprotected),
            grace_ms=max(0, self._grace_until_ms - now_ms) if self._restored else 0,
        )

    def thaw(self, frozen: FrozenLeases, now_ms: int) -> None:
        """Take over the state of another table. This one must be new and hold nothing."""
        if self._sizes or self._reads:
            raise LocalProtocolError(
                "a table that holds blocks cannot take over another's state; use a new one"
            )
        self._grace_until_ms = now_ms + frozen.grace_ms
        self._sizes = {block: size for block, size, _ in frozen.blocks}
        self._restored = {block: None for block, _, restored in frozen.blocks if restored}
        self._withdrawing = {block: now_ms + left_ms for block, left_ms in frozen.withdrawing}
        self._leaving = set(frozen.leaving)
        self._unprotected = dict.fromkeys(frozen.unprotected)
        for read, block in frozen.reads:
            self._enter_read(read, block)
        for name, client, blocks, left_ms, broken in frozen.leases:
            self._leases.add(Lease(name, client, dict.fromkeys(blocks), now_ms + left_ms, broken))


def _last_ms(now_ms: int, ttl_ms: int) -> int:
    """Return the last millisecond of what is promised for so long: one is added, for what is truncated."""
    return now_ms + ttl_ms + 1
