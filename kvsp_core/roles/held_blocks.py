"""What a holder holds: the blocks in its tiers, who may not lose them, and what the index is told of them.

`HeldBlocks` joins the lease table, which says what may be evicted, `Holdings`, which says what goes first,
and `Publisher`, which talks to the index. A block is published once it is in a tier, withdrawn as soon as it
is not held any more (PB-3), and its memory freed when its last reader is gone (PB-4, LE-2, LE-4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias, assert_never

from kvsp_core.container import replica_digest
from kvsp_core.machines import lease as leases
from kvsp_core.machines.alarms import earliest
from kvsp_core.machines.lease import BlockKind, LeaseTable
from kvsp_core.problems import NOT_FOUND, Problem
from kvsp_core.records import ReplicaRecord, Residency
from kvsp_core.roles.descriptors import Descriptors
from kvsp_core.roles.holdings import Holdings, TierLimits, Warmth, id_of
from kvsp_core.roles.publication import Publisher
from kvsp_core.roles.role import BlockName, Drop, StoredBlock
from kvsp_core.roles.tier_moves import TierMoves
from kvsp_core.roles.work import Work

__all__ = ["HeldBlocks", "LeaseEvent"]

LeaseEvent: TypeAlias = leases.CreateLease | leases.RenewLease | leases.ReleaseLease

_GOING: Final = Problem(NOT_FOUND, "a block of the lease is to be deleted; the lease ends when it expires")


class HeldBlocks:
    """The blocks of one holder, by `id_of` their names. Effects go to `work`."""

    def __init__(
        self,
        work: Work,
        *,
        holder: str,
        tiers: Mapping[str, TierLimits],
        lease_table: LeaseTable,
        index_uris: tuple[str, ...],
        replica_ttl_ms: int,
        descriptors: Descriptors,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._work = work
        self._holder = holder
        self.holdings = Holdings(tiers)
        self.lease_table = lease_table
        self.publisher = Publisher(
            work,
            holder=holder,
            index_uris=index_uris,
            record_of=self._record_of,
            descriptor_of=descriptors.get,
            random_bytes=random_bytes,
            ttl_ms=replica_ttl_ms,
        )
        self.moves = TierMoves(
            work,
            self.holdings,
            make_room=self._clear,
            in_use=lambda block: block in self._kept or block in self._reads_of,
            moved=self._moved,
            lost=self.lose,
        )
        self._leaving: dict[str, tuple[StoredBlock, str]] = {}
        self._read_of: dict[str, str] = {}
        self._reads_of: dict[str, int] = {}  # blocks that are being read from their tier, and how often
        self._kept: dict[str, int] = {}
        self._doomed: set[str] = set()  # to be deleted as soon as nobody has a right to them any more
        self._let_go: list[str] = []  # of those, which nothing beside this holder keeps any more
        self._gone: list[BlockName] = []

    def next_deadline_ms(self) -> int | None:
        """Return when to call `tick` next, or None."""
        if self._let_go:
            return 0
        return earliest(self.lease_table.next_deadline_ms(), self.publisher.next_deadline_ms())

    def tick(self, now_ms: int) -> None:
        """Do what is due: refreshes, leases that end, withdrawals that took too long."""
        self.publisher.tick(now_ms)
        self._apply(self.lease_table.handle(leases.TimerFired(), now_ms), now_ms)

    def settle(self, now_ms: int) -> None:
        """Take the publisher's news in: faulty blocks wait for them, and what the index refuses goes as
        soon as nobody keeps it.
        """
        while withdrawn := self.publisher.take_withdrawn():
            for block in withdrawn:
                if block in self.holdings:
                    continue  # it stays, and is only not published any more
                self._apply(self.lease_table.handle(leases.EndWithdrawal(block=block), now_ms), now_ms)
        for block in self.publisher.take_refused():
            if block in self._kept:  # an engine needs it, which is given no octets but those of its digest
                self.publisher.try_later(block, now_ms)
            else:
                self.lose(block, now_ms)
        while self._let_go:
            self._free_if_unused(self._let_go.pop(), now_ms)

    def take_gone(self) -> tuple[BlockName, ...]:
        """Return the blocks that are not held any more since the last time."""
        gone, self._gone = tuple(self._gone), []
        return gone

    # Coming and going

    def is_absent(self, block: str, now_ms: int) -> bool:
        """Return whether nothing of the block is here, not even an older copy on its way out."""
        absent = self.lease_table.kind_of_block(block, now_ms) is BlockKind.ABSENT
        return absent and block not in self.moves

    def hold(
        self, block: str, stored: StoredBlock, tier: str, now_ms: int, *, restored: bool = False
    ) -> None:
        """Hold a block that is in a tier, whose room is reserved, and publish it."""
        self.holdings.add(block, stored, tier)
        event = leases.AddBlock(block=block, size_bytes=stored.header.size_bytes, restored=restored)
        self._apply(self.lease_table.handle(event, now_ms), now_ms)
        self._free_if_unused(block, now_ms)
        self.publisher.publish(block, stored.name.block_key, now_ms)

    def restore(self, stored: StoredBlock, tier: str, now_ms: int) -> None:
        """Hold a block that was in a tier before a restart."""
        block = id_of(stored.name)
        if block in self.holdings:  # in a faster tier too: something was cut off
            self._work.emit(Drop(stored.name, tier))
            return
        self.holdings.reserve(tier, stored.header.size_bytes)
        self.hold(block, stored, tier, now_ms, restored=True)

    def make_room(self, size_bytes: int, now_ms: int) -> str | None:
        """Return a tier with so much room, after evicting what has to go; None where there is none."""
        tier = self.holdings.room_for(size_bytes)
        return tier if tier is not None and self._clear(tier, size_bytes, now_ms) else None

    def _clear(self, tier: str, size_bytes: int, now_ms: int, below: Warmth | None = None) -> bool:
        """Evict what goes first in a tier until so much fits; return whether it does, else nothing goes.

        With `below`, only what is colder than that goes.
        """
        if not self._can_clear(tier, size_bytes, now_ms, below):
            return False
        for block in self.holdings.victims(tier, size_bytes):
            if not self._may_go(block, now_ms):
                self.holdings.set_evictable(block, False)
                continue
            self._work.observe("kvsp_holder_evictions", tier=tier)
            self._apply(self.lease_table.handle(leases.EvictBlock(block=block), now_ms), now_ms)
        return True

    def _can_clear(self, tier: str, size_bytes: int, now_ms: int, below: Warmth | None) -> bool:
        if not self.holdings.can_fit(tier, size_bytes):
            return False
        missing_bytes, protected = size_bytes - self.holdings.free_bytes(tier), []
        for block, block_bytes, warmth in self.holdings.in_line(tier):
            if missing_bytes <= 0 or (below is not None and warmth >= below):
                break
            if self._may_go(block, now_ms):
                missing_bytes -= block_bytes
            else:
                protected.append(block)
        for block in protected:
            self.holdings.set_evictable(block, False)
        return missing_bytes <= 0

    def _may_go(self, block: str, now_ms: int) -> bool:
        return block not in self._kept and self.lease_table.may_evict(block, now_ms)

    def lose(self, block: str, now_ms: int) -> None:
        """A fault took a block: withdraw it, then drop it."""
        if block in self.holdings:
            self._apply(self.lease_table.handle(leases.FailBlock(block=block), now_ms), now_ms)

    def delete(self, blocks: Iterable[str], now_ms: int) -> None:
        """Withdraw blocks at once; delete each as soon as it is not leased, kept or read.

        Until then no lease on them is granted or renewed (LE-2 holds for those that were).
        """
        for block in blocks:
            if block in self.holdings and block not in self._doomed:
                self._doomed.add(block)
                self.publisher.withdraw(block, now_ms)
                self._free_if_unused(block, now_ms)

    # Use

    def lease(self, event: LeaseEvent, now_ms: int) -> leases.LeaseGranted | Problem | None:
        """Let a lease begin, go on or end; return what is granted or why not, or None for an end."""
        outcome: leases.LeaseGranted | Problem | None = None
        if self._doomed and not self._doomed.isdisjoint(self._wanted(event)):
            return _GOING
        effects = self.lease_table.handle(event, now_ms)
        for effect in effects:
            if isinstance(effect, leases.LeaseGranted):
                outcome = effect
            elif isinstance(effect, leases.Refused):
                outcome = effect.problem
        self._apply(effects, now_ms)
        return outcome

    def _wanted(self, event: LeaseEvent) -> tuple[str, ...]:
        """Return the blocks that a client wants to be kept."""
        match event:
            case leases.CreateLease(blocks=blocks):
                return blocks
            case leases.RenewLease(client=client, lease=lease):
                return self.lease_table.blocks_of(client, lease)
            case leases.ReleaseLease():
                return ()
            case _:
                assert_never(event)

    def in_use(self, blocks: Iterable[str]) -> None:
        """Note that these blocks were leased, in the order of a prompt."""
        blocks = tuple(blocks)
        for block in blocks:
            self.holdings.set_evictable(block, False)
        self.holdings.in_order(blocks)

    def start_read(self, read: str, block: str, now_ms: int, *, uses: bool) -> Problem | None:
        """Begin to read a block; return why not. Where it `uses` the block, the block goes later."""
        for effect in self.lease_table.handle(leases.StartRead(read=read, block=block), now_ms):
            if isinstance(effect, leases.Refused):
                return effect.problem
        self._read_of[read] = block
        self._reads_of[block] = self._reads_of.get(block, 0) + 1
        if uses:
            self.holdings.set_evictable(block, False)
        return None

    def was_read(self, block: str) -> None:
        """Take note that a read has got what it wants out of the tier."""
        self._reads_of[block] -= 1
        if not self._reads_of[block]:
            del self._reads_of[block]

    def end_read(self, read: str, now_ms: int) -> None:
        """End a read, if it is one."""
        block = self._read_of.pop(read, None)
        if block is not None:
            self._apply(self.lease_table.handle(leases.EndRead(read=read), now_ms), now_ms)
            self._free_if_unused(block, now_ms)

    def keep(self, block: str) -> None:
        """Do not evict a block until `let_go` was called as often. It need not be held yet."""
        self._kept[block] = self._kept.get(block, 0) + 1
        self.holdings.set_evictable(block, False)

    def let_go(self, block: str) -> None:
        """Undo one `keep`."""
        self._kept[block] -= 1
        if not self._kept[block]:
            del self._kept[block]
            # Whether a lease protects it is looked at when it is to be evicted.
            free = not self.lease_table.is_read(block) and block not in self.moves
            self.holdings.set_evictable(block, free)
            if block in self._doomed:
                self._let_go.append(block)

    # Parts

    def _apply(self, effects: tuple[leases.Effect, ...], now_ms: int) -> None:
        """Do what the lease table says, in its order. What answers a request is for who asked."""
        for effect in effects:
            match effect:
                case leases.WithdrawBlock(block=block):
                    self._leave(block, now_ms)
                case leases.FreeBlock(block=block):
                    stored, tier = self._leaving.pop(block)
                    self.holdings.release(tier, stored.header.size_bytes)
                    self._work.emit(Drop(stored.name, tier))
                case leases.Unprotected(blocks=blocks):
                    for block in blocks:
                        self._free_if_unused(block, now_ms)
                case leases.LeaseBroken():
                    self._work.observe("kvsp_leases_broken")
                case leases.CutRead():
                    # An answer that has begun keeps its buffer until it is sent; one that has not finds the
                    # block gone when its job is over. Until then the room is not used again.
                    pass
                case leases.LeaseGranted() | leases.Refused():
                    pass
                case _:
                    assert_never(effect)

    def _leave(self, block: str, now_ms: int) -> None:
        """The block is not held any more: the index is told at once."""
        stored, tier = self.holdings.remove(block)
        self._doomed.discard(block)
        self._leaving[block] = stored, tier
        self._gone.append(stored.name)
        self.publisher.withdraw(block, now_ms)

    def _moved(self, block: str, now_ms: int, to_another: bool) -> None:
        """A block has moved to another tier, or not after all: that it was moved is no use of it."""
        self._free_if_unused(block, now_ms, used=False)
        if to_another:
            found = self.holdings.get(block)
            if found is None or block in self._doomed:
                return
            self.publisher.publish(block, found[0].name.block_key, now_ms)

    def _free_if_unused(self, block: str, now_ms: int, *, used: bool = True) -> None:
        free = (
            block in self.holdings
            and block not in self._kept
            and block not in self.moves
            and not self.lease_table.is_read(block)
            and self.lease_table.may_evict(block, now_ms)
        )
        if free and block in self._doomed:
            self._work.observe("kvsp_holder_deletions")
            self._apply(self.lease_table.handle(leases.EvictBlock(block=block), now_ms), now_ms)
            return
        self.holdings.set_evictable(block, free, used=used)

    def _record_of(self, block: str, ttl_ms: int) -> ReplicaRecord | None:
        found = self.holdings.get(block)
        if found is None:
            return None
        stored, tier = found
        rate = self.holdings.limits(tier).read_mbit_per_s
        last = len(stored.layer_digests) - 1
        return ReplicaRecord(
            block_key=stored.name.block_key,
            compat_id=stored.name.compat_id,
            scope_id=stored.name.scope_id,
            holder=self._holder,
            codec=stored.header.codec,
            size=stored.header.data_bytes,
            digest=replica_digest(stored.layer_digests),
            layer_digests=stored.layer_digests,
            residency=(Residency(tier=tier, layers=(0, last), read_mbit_per_s=rate),),
            ttl_ms=ttl_ms,
        )
