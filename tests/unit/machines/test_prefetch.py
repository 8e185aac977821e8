"""Prefetch directives: pending until all is resident, nothing is left to try, or the deadline has come."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any, TypeVar

import attrs
import pytest

from kvsp_core.machines import prefetch_load as load
from kvsp_core.machines.prefetch import (
    TABLE,
    Accepted,
    Awaited,
    CancelLookup,
    DirectiveState,
    Effect,
    Ended,
    Evicted,
    LoadReport,
    LoadRequest,
    Lookup,
    LookupAnswered,
    LookupFailed,
    Pin,
    PrefetchLimits,
    PrefetchTable,
    PublishBlock,
    Rejected,
    RequestArrived,
    RequestsRun,
    Submit,
    TimerFired,
    Unpin,
    Withdraw,
)
from kvsp_core.machines.retrieval import Refused
from kvsp_core.machines.table import Cell, Kind
from kvsp_core.messages import PrefetchBlock, PrefetchDirective
from kvsp_core.problems import CONFLICT, TOO_LARGE, UNAVAILABLE, ProblemType
from kvsp_core.records import ReplicaRecord
from tests.machine_kit import cells, check_cell
from tests.unit.machines.test_retrieval import COMPAT, H1, H2, LAYERS, SCOPE, B, ended, replica

NOW = 1000
T = TypeVar("T")
PENDING, PARTIAL = DirectiveState.PENDING, DirectiveState.PARTIAL
COMPLETE, FAILED, ABSENT = DirectiveState.COMPLETE, DirectiveState.FAILED, DirectiveState.ABSENT


def key(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def record(number: int, holder: str = H1, **changes: Any) -> ReplicaRecord:
    return replica(holder, block_key=key(number), **changes)


def directive(*numbers: int, name: str = "d1", sources: tuple[str, ...] = (H1, H2), **changes: Any) -> Submit:
    held = changes.pop("held", ())
    producers = changes.pop("producers", None)
    message = PrefetchDirective(
        directive=name,
        request_ref="ref",
        scope_id=SCOPE,
        compat_id=COMPAT,
        blocks=tuple(PrefetchBlock(block_key=key(n), sources=sources) for n in numbers),
        layer_order="ascending",
        deadline_ms=50,
        lease_ms=2000,
    )
    return Submit(
        directive=attrs.evolve(message, **changes),
        held=frozenset(key(n) for n in held),
        layers=LAYERS,
        block_tokens=B,
        producers=producers,
    )


class World:
    """A table with what answers it: every call below plays one answer in."""

    def __init__(self, **limits: Any) -> None:
        self.table = PrefetchTable(PrefetchLimits(**limits))
        self.now_ms = NOW
        self.seen: list[Effect] = []

    def handle(self, event: Any, *, after_ms: int = 0) -> tuple[Effect, ...]:
        self.now_ms += after_ms
        effects = self.table.handle(event, self.now_ms)
        self.seen += effects
        return effects

    def jobs(self) -> dict[int, int]:
        """The block numbers of the loads that were begun, by job."""
        numbers = {key(n): n for n in range(100)}
        requests = [e for e in self.seen if isinstance(e, LoadRequest) and e.block_key]
        return {request.job: numbers[request.block_key] for request in requests}

    def job(self, number: int) -> int:
        """The last job that loads a block."""
        return max(job for job, block in self.jobs().items() if block == number)

    def look_up(self, *numbers: int, name: str = "d1") -> tuple[Effect, ...]:
        return self.handle(LookupAnswered(name, tuple((record(n),) for n in numbers)))

    def report(self, number: int, event: load.Event) -> tuple[Effect, ...]:
        return self.handle(LoadReport(self.job(number), event))

    def fetch(self, number: int) -> None:
        self.report(number, load.LeaseGranted(H1, f"lease{number}"))
        self.report(number, load.Fetched(ended(0)))

    def store(self, number: int) -> tuple[Effect, ...]:
        return self.report(number, load.Stored())

    def load(self, number: int) -> tuple[Effect, ...]:
        self.fetch(number)
        return self.store(number)

    def loaded(self, name: str = "d1") -> list[int]:
        status = self.table.status(name)
        assert status is not None
        numbers = {key(n): n for n in range(100)}
        return [numbers[each] for each in status.loaded]

    def state(self, name: str = "d1") -> DirectiveState:
        return self.table.state_of(name)


def of(kind: type[T], effects: tuple[Any, ...]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def problems(effects: tuple[Effect, ...]) -> list[ProblemType]:
    return [effect.problem.type for effect in of(Rejected, effects)]


# The ordinary way


@pytest.mark.requirement("PF-1", "PF-3")
def test_a_directive_is_accepted_loaded_block_by_block_and_complete() -> None:
    world = World()
    effects = world.handle(directive(1, 2))
    assert effects == (Accepted("d1"), Lookup("d1", (key(1), key(2)), (H1, H2)))
    assert (world.state(), world.loaded()) == (PENDING, [])
    effects = world.look_up(1, 2)
    assert [(e.job, e.effect) for e in of(LoadRequest, effects)] == [
        (0, load.AcquireLease(H1, 2000)),
        (1, load.AcquireLease(H1, 2000)),
    ]
    world.fetch(1)
    assert world.store(1) == (
        PublishBlock(key(1)),
        Pin(key(1)),
        LoadRequest(0, key(1), load.ReleaseLease(H1, "lease1")),
    )
    assert (world.state(), world.loaded()) == (PENDING, [1])
    assert Ended("d1", COMPLETE, 2, 2) in world.load(2)
    assert (world.state(), world.loaded()) == (COMPLETE, [1, 2])


@pytest.mark.requirement("PF-7")
def test_the_request_reference_is_given_back() -> None:
    world = World()
    world.handle(directive(1))
    status = world.table.status("d1")
    assert status is not None
    assert status.request_ref == "ref"
    assert world.table.status("other") is None


@pytest.mark.requirement("PF-3")
def test_what_is_held_already_counts_as_loaded_and_is_not_asked_for() -> None:
    world = World()
    effects = world.handle(directive(1, 2, 3, held=(1, 3)))
    assert of(Lookup, effects) == [Lookup("d1", (key(2),), (H1, H2))]
    assert of(Pin, effects) == [Pin(key(1)), Pin(key(3))]
    assert world.loaded() == [1, 3]
    world = World()
    assert of(Ended, world.handle(directive(1, held=(1,)))) == [Ended("d1", COMPLETE, 1, 1)]


def test_records_are_looked_up_again_behind_a_gap() -> None:
    world = World()
    world.handle(directive(1, 2, 3, 4))
    effects = world.look_up(1)
    assert of(Lookup, effects) == [Lookup("d1", (key(3), key(4)), (H1, H2))]
    world.look_up(3)
    for number in (1, 3):
        world.load(number)
    assert (world.state(), world.loaded()) == (PARTIAL, [1, 3])


def test_long_directives_are_looked_up_in_pieces() -> None:
    world = World(lookup_keys=2)
    assert of(Lookup, world.handle(directive(*range(5))))[0].block_keys == (key(0), key(1))
    assert of(Lookup, world.look_up(0, 1))[0].block_keys == (key(2), key(3))
    assert of(Lookup, world.look_up(2, 3))[0].block_keys == (key(4),)


@pytest.mark.requirement("PF-3", "PF-6")
def test_only_the_named_sources_are_used_in_the_order_in_which_they_are_named() -> None:
    world = World()
    world.handle(directive(1, sources=(H2, H1)))
    elsewhere = record(1, "https://elsewhere.example/")
    effects = world.handle(LookupAnswered("d1", ((record(1, H1), elsewhere, record(1, H2)),)))
    assert [e.effect for e in of(LoadRequest, effects)] == [load.AcquireLease(H2, 2000)]
    effects = world.report(1, load.LeaseRefused(H2, 404))
    assert [e.effect for e in of(LoadRequest, effects)] == [load.AcquireLease(H1, 2000)]
    assert Ended("d1", FAILED, 0, 1) in world.report(1, load.LeaseRefused(H1, 404))


@pytest.mark.requirement("SE-2")
def test_where_producers_are_named_only_their_digest_is_loaded() -> None:
    world = World()
    effects = world.handle(directive(1, sources=(H1,), producers=(H2,)))
    assert of(Lookup, effects)[0].holders == (H1, H2)
    other = record(1, H2, layer_digests=None, digest="sha-256:" + "00" * 32)
    world.handle(LookupAnswered("d1", ((record(1, H1), other),)))
    assert world.state() is FAILED
    world.handle(directive(1, name="d2", sources=(H1,), producers=(H2,)))
    world.handle(LookupAnswered("d2", ((record(1, H1), record(1, H2)),)))
    assert world.state("d2") is PENDING


def test_a_load_of_the_instances_own_takes_a_block_from_whoever_has_it() -> None:
    world = World()
    own = attrs.evolve(directive(1, sources=()), any_source=True)
    assert of(Lookup, world.handle(own)) == [Lookup("d1", (key(1),), ())]
    world.look_up(1)
    world.load(1)
    assert world.state() is COMPLETE
    world.handle(directive(2, name="d2", sources=()))
    world.look_up(2, name="d2")
    assert world.state("d2") is FAILED


# Ends


@pytest.mark.requirement("PF-4")
def test_a_two_block_directive_one_half_of_which_never_ends_is_partial_at_its_deadline() -> None:
    world = World()
    world.handle(directive(1, 2))
    world.look_up(1, 2)
    world.load(1)
    world.report(2, load.LeaseGranted(H1, "lease2"))
    assert world.table.next_deadline_ms() == NOW + 50
    assert world.handle(TimerFired(), after_ms=49) == ()
    effects = world.handle(TimerFired(), after_ms=1)
    assert [e.effect for e in of(LoadRequest, effects)] == [
        load.CancelFetch(0),
        load.ReleaseLease(H1, "lease2"),
    ]
    assert of(Ended, effects) == [Ended("d1", PARTIAL, 1, 2)]
    assert (world.state(), world.loaded()) == (PARTIAL, [1])
    assert world.table.loads == 0


@pytest.mark.requirement("PF-4")
def test_at_the_deadline_it_is_partial_even_with_nothing_loaded() -> None:
    world = World()
    world.handle(directive(1))
    assert world.handle(TimerFired(), after_ms=50) == (CancelLookup("d1"), Ended("d1", PARTIAL, 0, 1))
    assert world.look_up(1) == ()
    assert (world.state(), world.table.loads) == (PARTIAL, 0)


@pytest.mark.requirement("PF-4")
def test_a_late_completion_is_listed_where_it_became_resident_and_never_changes_the_end() -> None:
    world = World()
    world.handle(directive(1, 2))
    world.look_up(1, 2)
    world.load(1)
    world.fetch(2)
    world.handle(TimerFired(), after_ms=50)
    assert (world.state(), world.loaded()) == (PARTIAL, [1])
    assert PublishBlock(key(2)) in world.store(2)
    assert (world.state(), world.loaded()) == (PARTIAL, [1, 2])


@pytest.mark.requirement("PF-4")
def test_a_completion_at_the_deadline_comes_after_it() -> None:
    world = World()
    world.handle(directive(1))
    world.look_up(1)
    world.fetch(1)
    world.now_ms += 50
    assert of(Ended, world.store(1)) == [Ended("d1", PARTIAL, 0, 1)]
    assert (world.state(), world.loaded()) == (PARTIAL, [1])


def test_a_lease_granted_after_the_deadline_is_released() -> None:
    world = World()
    world.handle(directive(1))
    world.look_up(1)
    world.handle(TimerFired(), after_ms=50)
    effects = world.report(1, load.LeaseGranted(H1, "late"))
    assert effects == (LoadRequest(0, key(1), load.ReleaseLease(H1, "late")),)
    effects = world.handle(LoadReport(99, load.LeaseGranted(H1, "stray")))
    assert effects == (LoadRequest(99, "", load.ReleaseLease(H1, "stray")),)
    assert world.handle(LoadReport(99, load.Fetched(Refused(0, 404)))) == ()


@pytest.mark.requirement("PF-1")
def test_nothing_left_to_try_is_partial_with_some_and_failed_with_none() -> None:
    world = World()
    world.handle(directive(1, 2))
    world.handle(LookupAnswered("d1", ()))
    assert world.state() is PENDING
    world.handle(LookupAnswered("d1", ()))
    assert world.state() is FAILED
    world.handle(directive(1, 2, name="d2"))
    world.look_up(1, 2, name="d2")
    world.load(1)
    world.report(2, load.LeaseRefused(H1, 404))
    assert world.state("d2") is PARTIAL


def test_an_index_that_does_not_answer_leaves_what_is_known_already() -> None:
    world = World(lookup_keys=1)
    world.handle(directive(1, 2))
    world.look_up(1)
    world.handle(LookupFailed("d1"))
    assert world.state() is PENDING
    world.load(1)
    assert world.state() is PARTIAL
    assert world.handle(LookupFailed("d1")) == ()


@pytest.mark.requirement("LK-4")
def test_an_index_that_takes_fewer_keys_is_asked_for_fewer_from_then_on() -> None:
    world = World()
    asked = [of(Lookup, world.handle(directive(1, 2, 3, 4)))]
    asked += [of(Lookup, world.handle(LookupFailed("d1", too_long=True))) for _ in range(2)]
    assert [len(lookup.block_keys) for (lookup,) in asked] == [4, 2, 1]
    (lookup,) = of(Lookup, world.look_up(1))
    assert lookup.block_keys == (key(2),)
    (lookup,) = of(Lookup, world.handle(directive(5, 6, name="d2")))
    assert lookup.block_keys == (key(5),)
    assert not of(Lookup, world.handle(LookupFailed("d2", too_long=True)))  # it takes not even one
    assert world.state("d2") is FAILED


@pytest.mark.requirement("LK-4")
def test_an_index_that_takes_more_keys_again_is_asked_for_more_after_a_while() -> None:
    world = World()
    world.handle(directive(*range(20)))
    for _ in range(4):
        (lookup,) = of(Lookup, world.handle(LookupFailed("d1", too_long=True)))
    for number in range(16):
        assert lookup.block_keys == (key(number),)
        world.table = PrefetchTable.thaw(world.table.freeze(world.now_ms), world.now_ms)
        (lookup,) = of(Lookup, world.look_up(number))
    assert lookup.block_keys == (key(16), key(17))


def test_a_block_that_cannot_be_stored_is_given_up_for_everybody() -> None:
    world = World()
    world.handle(directive(1))
    world.look_up(1)
    world.handle(directive(1, name="d2"))
    world.look_up(1, name="d2")
    world.fetch(1)
    world.report(1, load.StoreFailed())
    assert (world.state("d1"), world.state("d2")) == (FAILED, FAILED)


def test_a_block_that_is_evicted_is_not_listed_any_more() -> None:
    world = World()
    world.handle(directive(1, 2))
    world.look_up(1, 2)
    world.load(1)
    world.handle(Evicted(key(1)))
    assert world.loaded() == []
    world.load(2)
    assert (world.state(), world.loaded()) == (PARTIAL, [2])
    world.handle(Evicted(key(2)))
    assert (world.state(), world.loaded()) == (PARTIAL, [])


# The same again, and limits


@pytest.mark.requirement("PF-1")
def test_the_same_directive_again_is_accepted_and_with_other_content_a_conflict() -> None:
    world = World()
    world.handle(directive(1))
    before = world.table.freeze(NOW)
    assert world.handle(directive(1)) == (Accepted("d1"),)
    assert problems(world.handle(directive(2))) == [CONFLICT]
    assert problems(world.handle(directive(1, deadline_ms=60))) == [CONFLICT]
    assert world.table.freeze(NOW) == before
    world.look_up(1)
    world.load(1)
    assert world.handle(directive(1)) == (Accepted("d1"),)
    assert problems(world.handle(directive(2))) == [CONFLICT]


@pytest.mark.requirement("PF-5", "SE-3")
def test_pending_directives_are_limited() -> None:
    world = World(pending_directives=2, pending_blocks=5)
    world.handle(directive(1, 2))
    before = world.table.freeze(NOW)
    assert problems(world.handle(directive(1, 2, 3, 4, name="d2"))) == [UNAVAILABLE]
    assert world.table.freeze(NOW) == before
    world.handle(directive(3, name="d2"))
    assert problems(world.handle(directive(4, name="d3"))) == [UNAVAILABLE]
    assert world.state("d3") is ABSENT
    world.handle(TimerFired(), after_ms=50)
    assert world.handle(directive(4, name="d3"))[0] == Accepted("d3")


def test_a_directive_that_is_too_large_is_refused() -> None:
    world = World(directive_blocks=2, sources_per_block=1)
    assert problems(world.handle(directive(1, 2, 3, sources=(H1,)))) == [TOO_LARGE]
    assert problems(world.handle(directive(1, 2))) == [TOO_LARGE]
    assert world.state() is ABSENT


@pytest.mark.requirement("PF-2")
def test_few_blocks_load_at_a_time_and_the_earliest_deadline_goes_first() -> None:
    world = World(concurrent_loads=1)
    world.handle(directive(1, 2, 3, deadline_ms=500))
    world.look_up(1, 2, 3)
    world.handle(directive(9, name="urgent", deadline_ms=40))
    world.look_up(9, name="urgent")
    assert world.table.loads == 1
    assert sorted(world.jobs().values()) == [1]
    world.load(1)
    assert world.table.loads == 1
    assert sorted(world.jobs().values()) == [1, 9]
    world.load(9)
    assert sorted(world.jobs().values()) == [1, 2, 9]


# Requests are spared


def spared(*numbers: int, **changes: Any) -> World:
    """A table whose directive waits to load these blocks while requests run; the first has begun."""
    world = World()
    world.handle(RequestsRun(True))
    world.handle(directive(*numbers, **{"deadline_ms": 8000, **changes}))
    world.look_up(*numbers)
    return world


@pytest.mark.requirement("PF-2")
def test_while_requests_run_blocks_load_one_by_one_and_requests_have_as_much_time_between() -> None:
    world = spared(1, 2, 3)
    assert sorted(world.jobs().values()) == [1]
    world.now_ms += 7
    world.load(1)
    assert world.table.loads == 0
    assert world.table.next_deadline_ms() == world.now_ms + 7
    assert world.handle(TimerFired(), after_ms=6) == ()
    world.handle(TimerFired(), after_ms=1)
    assert sorted(world.jobs().values()) == [1, 2]
    world.load(2)
    assert sorted(world.jobs().values()) == [1, 2, 3]


@pytest.mark.requirement("PF-2")
def test_when_no_request_runs_any_more_blocks_load_as_many_as_may() -> None:
    world = spared(1, 2, 3)
    world.handle(RequestsRun(False))
    assert world.table.loads == 3


@pytest.mark.requirement("PF-2", "PF-4")
def test_a_directive_that_its_request_waits_for_is_not_held_up() -> None:
    world = spared(1, 2, 3)
    world.handle(directive(8, 9, name="d2", deadline_ms=9000))
    world.look_up(8, 9, name="d2")
    world.handle(Awaited("d2"))
    world.handle(Awaited("d2"))
    assert sorted(world.jobs().values()) == [1, 2, 3, 8, 9]
    for number in (8, 9):
        world.load(number)
    world.handle(directive(5, 6, name="d3"))
    world.look_up(5, 6, name="d3")
    assert not {5, 6} & set(world.jobs().values())


@pytest.mark.requirement("PF-4")
def test_a_block_whose_share_of_the_time_is_over_does_not_wait_for_the_one_before() -> None:
    world = spared(1, 2, 3, 4)
    assert world.table.next_deadline_ms() == NOW + 8000 // 8
    world.handle(TimerFired(), after_ms=1000)
    assert sorted(world.jobs().values()) == [1, 2]
    world.handle(directive(9, name="urgent", deadline_ms=40))
    world.look_up(9, name="urgent")
    assert world.table.next_deadline_ms() == world.now_ms + 20
    world.handle(TimerFired(), after_ms=20)
    assert sorted(world.jobs().values()) == [1, 2, 9]


@pytest.mark.requirement("PF-2", "PF-4")
@pytest.mark.parametrize("load_ms", [1, 10, 50, 100, 200])
def test_a_deadline_is_met_although_requests_run(load_ms: int) -> None:
    world = spared(*range(16), deadline_ms=1000)
    ends: dict[int, int] = {}
    while world.state() is PENDING:
        for number in world.jobs().values():
            ends.setdefault(number, world.now_ms + load_ms)
        due_ms = world.table.next_deadline_ms()
        assert due_ms is not None
        world.now_ms = min(due_ms, *(end for end in ends.values() if end > world.now_ms), NOW + 1000)
        for number in [number for number, end in ends.items() if end == world.now_ms]:
            world.load(number)
        world.handle(TimerFired())
    assert world.state() is COMPLETE
    assert world.now_ms < NOW + 1000


def test_what_two_directives_want_is_loaded_once() -> None:
    world = World()
    world.handle(directive(1))
    world.look_up(1)
    world.handle(directive(1, 2, name="d2", deadline_ms=500))
    world.look_up(1, 2, name="d2")
    assert sorted(world.jobs().values()) == [1, 2]
    world.handle(TimerFired(), after_ms=50)
    assert (world.state("d1"), world.table.loads) == (PARTIAL, 2)
    world.load(1)
    assert (world.loaded("d1"), world.loaded("d2")) == ([1], [1])


def test_where_the_sources_of_one_directive_fail_those_of_the_next_are_tried() -> None:
    world = World()
    world.handle(directive(1, sources=(H1,)))
    world.look_up(1)
    world.handle(directive(1, name="d2", sources=(H2,)))
    world.handle(LookupAnswered("d2", ((record(1, H2),),)))
    effects = world.report(1, load.LeaseRefused(H1, 404))
    assert of(Ended, effects) == [Ended("d1", FAILED, 0, 1)]
    assert [e.effect for e in of(LoadRequest, effects)] == [load.AcquireLease(H2, 2000)]


def test_a_directive_that_comes_while_a_block_is_stored_waits_for_it() -> None:
    world = World()
    world.handle(directive(1))
    world.look_up(1)
    world.fetch(1)
    world.handle(TimerFired(), after_ms=50)
    world.handle(directive(1, name="d2"))
    world.look_up(1, name="d2")
    assert list(world.jobs()) == [0]
    world.store(1)
    assert (world.state("d2"), world.loaded("d2")) == (COMPLETE, [1])


def test_a_block_that_becomes_resident_during_the_lookup_is_not_loaded_again() -> None:
    world = World()
    world.handle(directive(1))
    world.look_up(1)
    world.handle(directive(1, 2, name="d2"))
    world.load(1)
    assert world.loaded("d2") == [1]
    world.look_up(1, 2, name="d2")
    assert sorted(world.jobs().values()) == [1, 2]


# Pins and memory


def test_what_was_loaded_stays_pinned_until_the_request_comes() -> None:
    world = World()
    world.handle(directive(1, 2))
    world.look_up(1, 2)
    world.load(1)
    assert world.table.is_pinned(key(1))
    assert world.handle(RequestArrived("ref")) == (Unpin(key(1)),)
    assert of(Pin, world.load(2)) == []
    assert world.handle(RequestArrived("ref")) == ()


def test_pins_lapse_when_the_request_does_not_come() -> None:
    world = World()
    world.handle(directive(1))
    world.look_up(1)
    world.load(1)
    assert world.table.next_deadline_ms() == NOW + 2000
    assert world.handle(TimerFired(), after_ms=1999) == ()
    assert world.handle(TimerFired(), after_ms=1) == (Unpin(key(1)),)
    assert world.loaded() == [1]


def test_a_block_of_two_directives_is_pinned_until_the_last_lets_go() -> None:
    world = World()
    world.handle(directive(1, held=(1,), request_ref="a"))
    assert of(Pin, world.handle(directive(1, name="d2", held=(1,), request_ref="b"))) == []
    assert world.handle(RequestArrived("a")) == ()
    assert world.handle(RequestArrived("b")) == (Unpin(key(1)),)


def test_an_outcome_is_forgotten_after_a_time() -> None:
    world = World(kept_ms=5000)
    world.handle(directive(1, held=(1,)))
    world.handle(TimerFired(), after_ms=4999)
    assert world.state() is COMPLETE
    world.handle(TimerFired(), after_ms=1)
    assert (world.state(), world.table.status("d1")) == (ABSENT, None)
    assert world.table.next_deadline_ms() is None
    assert world.handle(directive(2))[0] == Accepted("d1")


def test_outcomes_that_are_kept_are_limited_and_the_oldest_goes_first() -> None:
    world = World(kept_blocks=2)
    for n in (1, 2):
        world.handle(directive(n, name=f"d{n}", held=(n,)))
    assert world.handle(directive(3, name="d3", held=(3,)))[-1] == Unpin(key(1))
    assert [world.state(f"d{n}") for n in (1, 2, 3)] == [ABSENT, COMPLETE, COMPLETE]


def test_a_block_that_two_directives_name_may_make_room_for_one_by_the_end_of_the_other() -> None:
    world = World(kept_blocks=2)
    world.handle(directive(1, deadline_ms=1000))
    world.look_up(1)
    world.handle(directive(1, name="d2"))
    world.look_up(1, name="d2")
    world.handle(TimerFired(), after_ms=50)
    world.handle(directive(3, name="d3", held=(3,)))
    assert (world.state("d1"), world.state("d2"), world.state("d3")) == (PENDING, PARTIAL, COMPLETE)
    world.load(1)
    assert (world.state("d1"), world.state("d2"), world.state("d3")) == (COMPLETE, ABSENT, COMPLETE)


def test_the_outcome_of_the_largest_directive_is_kept_until_the_next_ends() -> None:
    world = World(kept_blocks=2)
    world.handle(directive(1, 2, 3, held=(1, 2, 3)))
    assert (world.state(), world.loaded()) == (COMPLETE, [1, 2, 3])
    world.handle(directive(4, name="d2", held=(4,)))
    assert world.state() is ABSENT


def test_directives_that_come_and_go_leave_nothing_behind() -> None:
    world = World(kept_blocks=1)
    for n in range(500):
        world.handle(directive(1, name=f"d{n}", held=(1,), deadline_ms=10**6))
    assert world.state("d498") is ABSENT
    assert [name for _, name in world.table._alarms] == ["d499"]


@pytest.mark.requirement("PF-4")
def test_blocks_whose_turn_never_came_leave_nothing_behind() -> None:
    world = World(concurrent_loads=1)
    world.handle(directive(1, deadline_ms=10**5))
    world.look_up(1)
    for n in range(100):
        world.handle(directive(2, 3, 4, name=f"w{n}", deadline_ms=10))
        world.look_up(2, 3, 4, name=f"w{n}")
        world.handle(TimerFired(), after_ms=10)
    assert world.table.loads == 1
    assert len(world.table._queue._ready) < 100
    world.handle(directive(2, 5, name="last", deadline_ms=10))
    world.look_up(2, 5, name="last")
    world.load(1)
    assert world.jobs()[world.job(2)] == 2


@pytest.mark.requirement("SK-6")
def test_a_block_is_of_one_scope_and_one_model() -> None:
    world = World()
    world.handle(directive(1, 2))
    for other in ({"scope_id": "ab" * 16}, {"compat_id": "cd" * 32}):
        effects = world.handle(directive(3, 2, name="d2", **other))
        assert problems(effects) == [CONFLICT]
        assert world.state("d2") is ABSENT
    world.handle(Withdraw("d1"))
    assert world.handle(directive(3, 2, name="d2", scope_id="ab" * 16))[0] == Accepted("d2")


def test_durations_are_cut_to_the_limit() -> None:
    world = World(directive_ms=100)
    world.handle(directive(1, deadline_ms=10**9, lease_ms=10**9))
    assert world.table.next_deadline_ms() == NOW + 100
    world.handle(TimerFired(), after_ms=100)
    assert world.table.next_deadline_ms() == NOW + 200


def test_a_frozen_table_goes_on_where_it_stood() -> None:
    world = World(concurrent_loads=2)
    world.handle(directive(1, 2, 3, 4, held=(4,)))
    world.look_up(1, 2, 3)
    world.load(1)
    world.report(2, load.LeaseGranted(H1, "L"))
    frozen = world.table.freeze(world.now_ms)
    again = PrefetchTable.thaw(frozen, 77_000)
    assert again.freeze(77_000) == frozen
    assert hash(again.freeze(77_000)) == hash(frozen)
    assert again.next_deadline_ms() == 77_050
    assert (again.loads, again.pending) == (world.table.loads, world.table.pending)
    assert again.handle(TimerFired(), 77_050) == world.handle(TimerFired(), after_ms=50)
    assert again.freeze(77_050) == world.table.freeze(world.now_ms)


def test_a_frozen_table_spares_requests_as_before() -> None:
    world = spared(1, 2, 3)
    world.now_ms += 7
    world.load(1)
    frozen = world.table.freeze(world.now_ms)
    again = PrefetchTable.thaw(frozen, 77_000)
    assert again.freeze(77_000) == frozen
    assert again.next_deadline_ms() == 77_007
    assert again.handle(TimerFired(), 77_007) == world.handle(TimerFired(), after_ms=7) != ()
    assert again.freeze(77_007) == world.table.freeze(world.now_ms)


# Legality


class _Subject:
    def __init__(self, kind: Kind) -> None:
        self.world = World()
        if kind is ABSENT:
            return
        self.world.handle(directive(1, 2))
        if kind is FAILED:
            self.world.handle(LookupFailed("d1"))
            return
        self.world.look_up(1, 2)
        self.world.load(1)
        if kind is COMPLETE:
            self.world.load(2)
        if kind is PARTIAL:
            self.world.handle(TimerFired(), after_ms=50)

    def kind(self) -> Kind:
        return self.world.state()

    def freeze(self) -> Hashable:
        return self.world.table.freeze(self.world.now_ms)

    def handle(self, event: Any) -> tuple[Any, ...]:
        return self.world.handle(event)


EVENTS = {
    type(event): event
    for event in (
        directive(1, 2),
        LookupAnswered("d1", ((record(1),),)),
        LookupFailed("d1"),
        LoadReport(1, load.LeaseGranted(H1, "L")),
        Evicted(key(1)),
        RequestArrived("ref"),
        Awaited("d1"),
        RequestsRun(True),
        Withdraw("d1"),
        TimerFired(),
    )
}


def test_a_directive_that_is_withdrawn_stops_lets_go_and_is_forgotten() -> None:
    world = World()
    world.handle(directive(1, 2, 3))
    world.look_up(1, 2)
    world.load(1)
    world.report(2, load.LeaseGranted(H1, "lease2"))
    effects = world.handle(Withdraw("d1"))
    assert [type(e.effect) for e in of(LoadRequest, effects)] == [load.CancelFetch, load.ReleaseLease]
    assert of(Unpin, effects) == [Unpin(key(1))]
    assert world.table.status("d1") is None
    assert world.table.next_deadline_ms() is None
    world.handle(directive(3, name="d2"))
    assert of(CancelLookup, world.handle(Withdraw("d2"))) == [CancelLookup("d2")]


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(TABLE))
def test_every_event_in_every_state(kind: Kind, event_type: type, cell: Cell) -> None:
    check_cell(cell, subject=_Subject(kind), event=EVENTS[event_type])
