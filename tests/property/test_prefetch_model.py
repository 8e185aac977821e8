"""Prefetch under disorder, against a simple model of what is resident, listed, leased and pinned."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kvsp_core.container import ContainerHeader
from kvsp_core.machines import prefetch as m
from kvsp_core.machines import prefetch_load as load
from kvsp_core.machines import retrieval
from kvsp_core.machines.prefetch_directive import DirectiveState
from kvsp_sim.strategies.prefetch import BLOCK_KEYS, BLOCK_TOKENS, LAYERS, layer_digests, replicas, submits
from tests.property.models import EndingModel

PENDING, COMPLETE = DirectiveState.PENDING, DirectiveState.COMPLETE
LIMITS = m.PrefetchLimits(concurrent_loads=2, pending_directives=3, kept_ms=400, kept_blocks=9, lookup_keys=2)


@attrs.define
class Seen:
    """What the outside world knows of a directive."""

    submit: m.Submit
    deadline_ms: int
    ended: DirectiveState | None = None


class Prefetching(EndingModel):
    """One instance's table, with an index, holders and tiers that answer when they like."""

    @initialize()
    def start(self) -> None:
        self.table = m.PrefetchTable(LIMITS)
        self.now_ms = 0
        self.count = 0
        self.resident: set[str] = set()
        self.pinned: set[str] = set()
        self.seen: dict[str, Seen] = {}
        self.lookups: dict[str, tuple[str, ...]] = {}
        self.asked: list[tuple[int, str]] = []
        self.leases: set[tuple[str, str]] = set()
        self.fetches: dict[tuple[int, int], retrieval.Fetch] = {}
        self.leased: set[tuple[int, str]] = set()
        self.stores: dict[int, str] = {}

    def handle(self, event: Any) -> None:
        effects = self.table.handle(event, self.now_ms)
        due_ms = self.table.next_deadline_ms()
        assert due_ms is None or due_ms > self.now_ms, "a timer that is due at once would never end"
        for effect in effects:
            match effect:
                case m.Lookup(name, keys):
                    assert len(keys) <= LIMITS.lookup_keys
                    self.lookups[name] = keys
                case m.CancelLookup(name):
                    self.lookups.pop(name, None)
                case m.LoadRequest(job, key, of_load):
                    self.of_load(job, key, of_load)
                case m.PublishBlock(key):
                    assert key in self.resident
                case m.Pin(key):
                    assert key in self.resident
                    assert key not in self.pinned
                    self.pinned.add(key)
                case m.Unpin(key):
                    self.pinned.remove(key)
                case m.Ended(name, state, loaded):
                    seen = self.seen[name]
                    assert seen.ended is None, "a terminal state was left"
                    seen.ended = state
                    blocks = seen.submit.directive.blocks
                    if state is COMPLETE:
                        assert loaded == len(blocks)
                    elif state is DirectiveState.FAILED:
                        assert loaded == 0

    def of_load(self, job: int, key: str, effect: load.Effect) -> None:
        match effect:
            case load.AcquireLease(holder):
                self.asked.append((job, holder))
            case load.ReleaseLease(holder, lease):
                self.leases.remove((holder, lease))
                self.leased.discard((job, holder))
            case load.Fetch(fetch=fetch, holder=holder):
                assert (job, holder) in self.leased, "a block is fetched without a lease"
                self.fetches[job, fetch] = effect
            case load.CancelFetch(fetch):
                del self.fetches[job, fetch]
            case load.Store():
                self.stores[job] = key

    # What can happen

    @rule(data=st.data(), again=st.booleans())
    def directive_comes(self, data: st.DataObject, again: bool) -> None:
        if again and self.seen:
            name = data.draw(st.sampled_from(sorted(self.seen)))
            if self.table.state_of(name) is not DirectiveState.ABSENT:
                self.handle(self.seen[name].submit)
            return
        self.count += 1
        name = f"d{self.count}"
        submit = data.draw(submits(name, frozenset(self.resident)))
        self.seen[name] = Seen(submit, self.now_ms + submit.directive.deadline_ms)
        self.handle(submit)
        if self.table.state_of(name) is DirectiveState.ABSENT:
            del self.seen[name]

    @precondition(lambda self: self.lookups)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def index_answers(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.lookups)))
        keys = self.lookups.pop(name)
        if fails:
            self.handle(m.LookupFailed(name))
            return
        found = keys[: data.draw(st.integers(0, len(keys)))]
        records = tuple(tuple(data.draw(st.lists(replicas(key), min_size=1, max_size=3))) for key in found)
        self.handle(m.LookupAnswered(name, records))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), status=st.sampled_from([None, None, 404, 503, 201, 201, 201]))
    def holder_answers_a_lease(self, data: st.DataObject, status: int | None) -> None:
        job, holder = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        if status != 201:
            self.handle(m.LoadReport(job, load.LeaseRefused(holder, status)))
            return
        self.count += 1
        lease = f"L{self.count}"
        self.leases.add((holder, lease))
        self.leased.add((job, holder))
        self.handle(m.LoadReport(job, load.LeaseGranted(holder, lease)))

    @precondition(lambda self: self.fetches)
    @rule(data=st.data(), version=st.sampled_from(["a", "a", "b", "x"]), fails=st.booleans())
    def holder_answers_a_fetch(self, data: st.DataObject, version: str, fails: bool) -> None:
        job, number = data.draw(st.sampled_from(sorted(self.fetches)))
        fetch = self.fetches.pop((job, number))
        if fails:
            self.handle(m.LoadReport(job, load.Fetched(retrieval.Refused(number, 404))))
            return
        first, last = fetch.layers or (0, LAYERS - 1)
        ended = retrieval.BlockEnded(
            fetch=number,
            header=ContainerHeader(
                codec=1,
                first_layer=first,
                token_count=BLOCK_TOKENS,
                sections=((512, 512),) * (last + 1 - first),
            ),
            layer_digests=layer_digests(version)[first : last + 1],
            repr_digest_valid=True,
        )
        self.handle(m.LoadReport(job, load.Fetched(ended)))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), works=st.sampled_from([True, True, False]))
    def tier_answers(self, data: st.DataObject, works: bool) -> None:
        job = data.draw(st.sampled_from(sorted(self.stores)))
        key = self.stores.pop(job)
        if works:
            self.resident.add(key)
        self.handle(m.LoadReport(job, load.Stored() if works else load.StoreFailed()))

    @rule(key=st.sampled_from(BLOCK_KEYS), fault=st.booleans())
    def block_is_evicted(self, key: str, fault: bool) -> None:
        if key in self.pinned and not fault:
            return
        if key in self.resident and key not in self.stores.values():
            self.resident.remove(key)
            self.pinned.discard(key)
            self.handle(m.Evicted(key))

    @rule(reference=st.sampled_from(["r1", "r2"]))
    def request_arrives(self, reference: str) -> None:
        self.handle(m.RequestArrived(reference))

    @rule(running=st.booleans())
    def requests_run(self, running: bool) -> None:
        self.handle(m.RequestsRun(running))

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def request_waits(self, data: st.DataObject) -> None:
        self.handle(m.Awaited(data.draw(st.sampled_from(sorted(self.seen)))))

    @rule(later_ms=st.integers(0, 250))
    def time_passes(self, later_ms: int) -> None:
        self.now_ms += later_ms
        self.handle(m.TimerFired())

    @rule()
    def frozen_and_thawed(self) -> None:
        frozen = self.table.freeze(self.now_ms)
        self.now_ms += 17
        for seen in self.seen.values():
            seen.deadline_ms += 17
        self.table = m.PrefetchTable.thaw(frozen, self.now_ms)
        assert self.table.freeze(self.now_ms) == frozen
        assert hash(frozen) is not None

    # What must hold

    @invariant()
    def what_is_listed_is_what_is_resident(self) -> None:
        for name in self.seen:
            status = self.table.status(name)
            if status is not None:
                assert set(status.loaded) <= self.resident

    @invariant()
    def deadlines_are_kept(self) -> None:
        for name, seen in self.seen.items():
            state = self.table.state_of(name)
            if state is PENDING:
                assert seen.ended is None
                assert self.now_ms < seen.deadline_ms
            elif state is not DirectiveState.ABSENT:
                assert state is seen.ended

    @invariant()
    def little_is_loaded_at_a_time(self) -> None:
        assert self.table.loads <= LIMITS.concurrent_loads
        assert self.table.pending <= LIMITS.pending_directives

    @invariant()
    def pins_are_known(self) -> None:
        assert self.pinned == {key for key in BLOCK_KEYS if self.table.is_pinned(key)}

    def at_end(self) -> None:
        """Everything that was asked is answered, time goes by: no lease, pin or directive is left."""
        for _ in range(200):
            if self.lookups:
                self.handle(m.LookupFailed(self.lookups.popitem()[0]))
            elif self.asked:
                job, holder = self.asked.pop()
                self.handle(m.LoadReport(job, load.LeaseRefused(holder, None)))
            elif self.fetches:
                (job, number), _ = self.fetches.popitem()
                self.handle(m.LoadReport(job, load.Fetched(retrieval.FetchFailed(number))))
            elif self.stores:
                self.handle(m.LoadReport(self.stores.popitem()[0], load.StoreFailed()))
        self.now_ms += 10_000
        self.handle(m.TimerFired())
        self.handle(m.RequestsRun(False))
        assert self.leases == set(), "a lease was never released"
        assert self.pinned == set()
        assert self.table.pending == self.table.loads == 0
        assert self.table.next_deadline_ms() is None
        now, empty = self.table.freeze(0), m.PrefetchTable(LIMITS).freeze(0)
        queue = attrs.evolve(empty.queue, next_job=now.queue.next_job, ready=now.queue.ready)
        assert now == attrs.evolve(empty, queue=queue, next_order=now.next_order)


TestPrefetching = Prefetching.TestCase
