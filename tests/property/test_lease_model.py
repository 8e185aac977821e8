"""The lease table against a model that keeps everything in plain lists and looks at all of it each time."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines import lease as m
from kvsp_core.problems import LEASE_QUOTA, NOT_FOUND, ProblemType
from kvsp_sim.strategies import lease as draw
from tests.machine_kit import problems_in

MAX_TTL_MS, QUOTA_BYTES, MAX_LEASES, WITHDRAWAL_MS = 1000, 500, 4, 50


@attrs.define
class Lease:
    client: str
    blocks: set[str]
    expiry_ms: int
    broken: bool = False


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.drawn = 0
        self.sizes: dict[str, int] = {}
        self.restored: set[str] = set()
        self.leases: dict[str, Lease] = {}
        self.names: list[str] = []
        self.failing: dict[str, int] = {}
        self.reads: dict[str, str] = {}
        self.leaving: set[str] = set()
        self.was_protected: set[str] = set()
        self.announced: set[str] = set()
        self.timer_fired = False

    def random_bytes(self, n: int) -> bytes:
        self.drawn += 1
        return self.drawn.to_bytes(n, "big")

    @initialize()
    def start(self) -> None:
        self.table = m.LeaseTable(
            random_bytes=self.random_bytes,
            now_ms=0,
            max_ttl_ms=MAX_TTL_MS,
            quota_bytes=QUOTA_BYTES,
            max_leases=MAX_LEASES,
            withdrawal_ms=WITHDRAWAL_MS,
        )

    # The model's view

    def valid(self) -> dict[str, Lease]:
        return {
            n: lease for n, lease in self.leases.items() if self.now_ms <= lease.expiry_ms and lease.blocks
        }

    def protected(self, block: str) -> bool:
        graced = block in self.restored and self.now_ms <= MAX_TTL_MS + 1
        return graced or any(block in lease.blocks for lease in self.valid().values())

    def leased(self, client: str) -> set[str]:
        return {b for lease in self.valid().values() if lease.client == client for b in lease.blocks}

    def take_out(self, block: str) -> None:
        for lease in self.leases.values():
            lease.blocks.discard(block)
        del self.sizes[block]
        self.restored.discard(block)
        self.failing.pop(block, None)
        if block in self.reads.values():
            self.leaving.add(block)

    def send(self, event: m.Event) -> tuple[m.Effect, ...] | None:
        """Send an event; None where it was illegal, and then nothing has changed."""
        before = self.table.freeze(self.now_ms)
        try:
            effects = self.table.handle(event, self.now_ms)
        except LocalProtocolError:
            assert self.table.freeze(self.now_ms) == before
            return None
        if any(problems_in(effects)):  # what has become free was said, as with any event
            assert self.table.freeze(self.now_ms) == attrs.evolve(before, unprotected=())
        self.announced = {b for e in effects if isinstance(e, m.Unprotected) for b in e.blocks}
        self.timer_fired = isinstance(event, m.TimerFired)
        return effects

    @staticmethod
    def answer(effects: tuple[m.Effect, ...] | None) -> ProblemType | None:
        assert effects is not None
        return next((p.type for p in problems_in(effects)), None)

    # Rules

    @rule(ms=st.one_of(st.integers(0, 3), st.integers(0, 600)))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    @rule(data=st.data())
    def client_acts(self, data: st.DataObject) -> None:
        event = data.draw(draw.lease_events(self.names))
        effects = self.send(event)
        answer = self.answer(effects)
        assert effects is not None
        match event:
            case m.CreateLease():
                if any(b not in self.sizes or b in self.failing for b in event.blocks):
                    assert answer is NOT_FOUND
                    return
                wanted = self.leased(event.client) | set(event.blocks)
                mine = [lease for lease in self.valid().values() if lease.client == event.client]
                over = sum(self.sizes[b] for b in wanted) > QUOTA_BYTES or len(mine) >= MAX_LEASES
                if over or event.ttl_ms > MAX_TTL_MS:
                    assert answer is LEASE_QUOTA
                    return
                (granted,) = [e for e in effects if isinstance(e, m.LeaseGranted)]
                assert granted.ttl_ms == event.ttl_ms
                assert granted.lease not in self.names
                self.names.append(granted.lease)
                self.leases[granted.lease] = Lease(
                    event.client, set(event.blocks), self.now_ms + event.ttl_ms + 1
                )
            case m.RenewLease():
                lease = self.valid().get(event.lease)
                if lease is None or lease.client != event.client or lease.broken:
                    assert answer is NOT_FOUND
                elif event.ttl_ms > MAX_TTL_MS:
                    assert answer is LEASE_QUOTA
                else:
                    lease.expiry_ms = max(lease.expiry_ms, self.now_ms + event.ttl_ms + 1)
                    left_ms = lease.expiry_ms - 1 - self.now_ms
                    assert m.LeaseGranted(lease=event.lease, ttl_ms=left_ms) in effects
            case m.ReleaseLease():
                lease = self.valid().get(event.lease)
                if lease is None or lease.client != event.client or lease.broken:
                    assert answer is NOT_FOUND
                else:
                    assert answer is None
                    del self.leases[event.lease]

    @rule(event=draw.block_events())
    def holder_acts(self, event: m.Event) -> None:
        block = getattr(event, "block", "")
        held = block in self.sizes
        protected = held and self.protected(block)
        failing = block in self.failing
        effects = self.send(event)
        match event:
            case m.AddBlock():
                legal = not held and block not in self.leaving
                assert (effects is not None) == legal
                if legal:
                    self.sizes[block] = event.size_bytes
                    if event.restored and self.now_ms <= MAX_TTL_MS + 1:
                        self.restored.add(block)
            case m.EvictBlock():
                legal = held and not protected and not failing
                assert (effects is not None) == legal
                if legal:
                    self.leaves(block, effects, withdraws=True)
            case m.FailBlock():
                if held and not failing and protected:
                    assert effects is not None
                    assert effects[0] == m.WithdrawBlock(block=block) or isinstance(effects[0], m.Unprotected)
                    assert not any(isinstance(e, m.FreeBlock) for e in effects)
                    self.failing[block] = self.now_ms + WITHDRAWAL_MS
                    for lease in self.valid().values():
                        lease.broken |= block in lease.blocks
                elif held and not failing:
                    self.leaves(block, effects, withdraws=True)
            case m.EndWithdrawal():
                if failing:
                    self.leaves(block, effects, withdraws=False)
            case m.TimerFired():
                for late in [b for b, until_ms in self.failing.items() if self.now_ms > until_ms]:
                    self.leaves(late, effects, withdraws=False)

    def leaves(self, block: str, effects: tuple[m.Effect, ...] | None, *, withdraws: bool) -> None:
        assert effects is not None
        readers = {read for read, b in self.reads.items() if b == block}
        assert (m.WithdrawBlock(block=block) in effects) == withdraws
        assert {e.read for e in effects if isinstance(e, m.CutRead)} >= readers
        assert (m.FreeBlock(block=block) in effects) == (not readers)
        self.take_out(block)

    @rule(event=draw.read_events())
    def reader_acts(self, event: m.Event) -> None:
        effects = self.send(event)
        match event:
            case m.StartRead():
                held = event.block in self.sizes and event.block not in self.failing
                if not held:
                    assert self.answer(effects) is NOT_FOUND
                elif event.read in self.reads:
                    assert effects is None
                else:
                    assert self.answer(effects) is None
                    self.reads[event.read] = event.block
            case m.EndRead():
                assert (effects is None) == (event.read not in self.reads)
                if effects is None:
                    return
                block = self.reads.pop(event.read)
                frees = block in self.leaving and block not in self.reads.values()
                assert (m.FreeBlock(block=block) in effects) == frees
                if frees:
                    self.leaving.remove(block)

    # What always holds

    @invariant()
    def a_block_under_a_lease_may_not_be_evicted(self) -> None:
        for block in draw.BLOCKS:
            free = block in self.sizes and block not in self.failing and not self.protected(block)
            assert self.table.may_evict(block, self.now_ms) == free

    @invariant()
    def quotas_are_kept(self) -> None:
        assert len(self.table.listing(self.now_ms)) == len(self.valid())
        for client in draw.CLIENTS:
            leased_bytes = sum(self.sizes[b] for b in self.leased(client))
            assert self.table.leased_bytes(client, self.now_ms) == leased_bytes <= QUOTA_BYTES

    @invariant()
    def what_becomes_free_is_said(self) -> None:
        free = {b for b in self.sizes if b not in self.failing and not self.protected(b)}
        assert self.announced & set(self.sizes) <= free & self.was_protected
        self.was_protected = {b for b in self.was_protected - self.announced if b in self.sizes}
        if self.timer_fired:
            assert not self.was_protected & free
        self.was_protected |= set(self.sizes) - free - set(self.failing)
        self.announced, self.timer_fired = set(), False

    @invariant()
    def there_is_a_deadline_while_something_can_end(self) -> None:
        deadline_ms = self.table.next_deadline_ms()
        due = [lease.expiry_ms + 1 for lease in self.valid().values()]
        due += [until_ms + 1 for until_ms in self.failing.values()]
        due += [MAX_TTL_MS + 2] if self.restored and self.now_ms <= MAX_TTL_MS + 1 else []
        if due:
            assert deadline_ms is not None
            assert deadline_ms <= max(min(due), self.now_ms + 1)

    @invariant()
    def it_can_be_rebuilt(self) -> None:
        frozen = self.table.freeze(self.now_ms)
        other = m.LeaseTable(random_bytes=self.random_bytes, now_ms=5, max_ttl_ms=MAX_TTL_MS)
        other.thaw(frozen, 5)
        assert other.freeze(5) == frozen


TestLeaseModel = Model.TestCase
