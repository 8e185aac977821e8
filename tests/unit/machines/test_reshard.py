"""The coordinator of a reshard: durable decision before the first commit, and everybody hears of it."""

from __future__ import annotations

from collections.abc import Hashable

import attrs
import pytest

from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines.reshard import (
    TABLE,
    Abort,
    AbortAnswered,
    Aborted,
    Aborting,
    Begin,
    CallFailed,
    Commit,
    CommitAnswered,
    Committed,
    Committing,
    Effect,
    Event,
    MemberBack,
    MemberLost,
    Owed,
    PersistRecord,
    Phase,
    PlanAnswered,
    Prepare,
    Preparing,
    RangesLost,
    ReshardRecord,
    Stable,
    State,
    TimerFired,
    freeze,
    next_deadline_ms,
    recover,
    thaw,
    transition,
)
from kvsp_core.machines.table import Cell, Kind
from kvsp_core.records import Shard, ShardMap
from tests.machine_kit import cells, check_cell

A, B, C = "https://a.example/kvsp/", "https://b.example/kvsp/", "https://c.example/kvsp/"
THREE = ShardMap(
    map="m",
    version=4,
    shards=(
        Shard(tokens=(0, 32), instance=A),
        Shard(tokens=(32, 64), instance=B),
        Shard(tokens=(64, 96), instance=C),
    ),
)
TWO = (Shard(tokens=(0, 48), instance=A), Shard(tokens=(48, 96), instance=C))
STABLE = Stable(map=THREE, highest=4)
BEGIN = Begin(shards=TWO, block_tokens=4, deadline_ms=200)
ACKS = (PlanAnswered(A, 5, True), PlanAnswered(B, 5, True), PlanAnswered(C, 5, True))


def run(state: State, *events: Event, now_ms: int = 1000) -> tuple[State, tuple[Effect, ...]]:
    """Play events one after the other; return the last state and the effects of the last event."""
    effects: tuple[Effect, ...] = ()
    for event in events:
        state, effects = transition(state, event, now_ms)
    return state, effects


def records(effects: tuple[Effect, ...]) -> list[ReshardRecord]:
    return [effect.record for effect in effects if isinstance(effect, PersistRecord)]


@pytest.mark.requirement("RS-1")
def test_the_version_is_durable_before_a_plan_goes_to_each_member_of_either_map() -> None:
    state, effects = run(STABLE, BEGIN)
    assert isinstance(state, Preparing)
    assert isinstance(effects[0], PersistRecord)
    assert effects[0].record.phase is Phase.PLANNED
    assert effects[0].record.highest == 5
    plans = [effect for effect in effects if isinstance(effect, Prepare)]
    assert [plan.instance for plan in plans] == [A, B, C]
    assert {(plan.plan.version, plan.plan.to) for plan in plans} == {(4, 5)}
    assert state.map == THREE


@pytest.mark.requirement("RS-4")
def test_the_decision_is_durable_before_the_first_commit() -> None:
    state, effects = run(STABLE, BEGIN, *ACKS[:2])
    assert effects == ()
    assert state.map == THREE
    state, effects = run(state, ACKS[2])
    assert isinstance(state, Committing)
    assert state.map == attrs.evolve(THREE, version=5, shards=TWO)
    assert isinstance(effects[0], PersistRecord)
    assert effects[0].record.phase is Phase.COMMITTED
    assert effects[1] == Committed(map=state.map, moved_tokens=32, computed_tokens=0)
    assert effects[2:] == (Commit(A, 5), Commit(B, 5), Commit(C, 5))


@pytest.mark.requirement("RS-4")
def test_it_is_stable_again_when_all_have_heard() -> None:
    state, effects = run(STABLE, BEGIN, *ACKS, CommitAnswered(A, 5, True), CommitAnswered(B, 5, True))
    assert isinstance(state, Committing)
    assert effects == ()
    state, effects = run(state, CommitAnswered(C, 5, True))
    assert state == Stable(map=attrs.evolve(THREE, version=5, shards=TWO), highest=5)
    assert records(effects)[0].phase is Phase.STABLE


@pytest.mark.requirement("RS-5")
def test_the_deadline_aborts_for_all() -> None:
    state, _ = run(STABLE, BEGIN, *ACKS[:2])
    assert next_deadline_ms(state) == 1200
    assert run(state, TimerFired(), now_ms=1199) == (state, ())
    state, effects = run(state, TimerFired(), now_ms=1200)
    assert isinstance(state, Aborting)
    assert state.map == THREE
    assert effects[1:] == (Abort(A, 5), Abort(B, 5), Abort(C, 5))


@pytest.mark.requirement("RS-5")
def test_an_acknowledgement_after_the_deadline_does_not_count() -> None:
    state, _ = run(STABLE, BEGIN, *ACKS[:2])
    state, effects = run(state, ACKS[2], now_ms=1200)
    assert isinstance(state, Aborting)
    assert isinstance(effects[0], Aborted)


@pytest.mark.requirement("RS-5")
def test_a_refusal_aborts_for_all_and_asks_the_owners_whether_they_still_hold() -> None:
    state, effects = run(STABLE, BEGIN, PlanAnswered(B, 5, False))
    assert isinstance(state, Aborting)
    assert effects[1:4] == (Abort(A, 5), Abort(B, 5), Abort(C, 5))
    assert effects[4:] == (Commit(A, 4), Commit(B, 4), Commit(C, 4))
    state, effects = run(state, CommitAnswered(B, 4, False))
    assert effects[1:] == (RangesLost(B, ((32, 64),)),)
    assert records(effects)[0].lost == (B,)
    state, _ = run(state, CommitAnswered(A, 4, True), CommitAnswered(C, 4, True))
    state, _ = run(state, *(AbortAnswered(i, 5) for i in (A, B, C)))
    assert state == Stable(map=THREE, highest=5, lost=frozenset({B}))


@pytest.mark.requirement("RS-6")
def test_the_attempt_after_an_abort_has_a_version_never_planned_before() -> None:
    state, _ = run(STABLE, BEGIN, TimerFired(), now_ms=1000)
    state, _ = run(state, TimerFired(), now_ms=1200)
    state, _ = run(state, *(AbortAnswered(i, 5) for i in (A, B, C)))
    assert state == Stable(map=THREE, highest=5)
    state, effects = run(state, BEGIN)
    assert [(e.plan.version, e.plan.to) for e in effects if isinstance(e, Prepare)] == [(4, 6)] * 3
    late = run(state, PlanAnswered(A, 5, True), AbortAnswered(A, 5), CommitAnswered(A, 5, True))
    assert late == (state, ())


def test_only_one_attempt_at_a_time() -> None:
    for state in (run(STABLE, BEGIN)[0], run(STABLE, BEGIN, *ACKS)[0]):
        with pytest.raises(LocalProtocolError, match="Begin is not allowed"):
            transition(state, BEGIN, 1000)


@pytest.mark.requirement("RS-6")
def test_a_call_that_failed_is_made_again() -> None:
    preparing, _ = run(STABLE, BEGIN)
    state, _ = run(preparing, CallFailed(B, 5))
    state, effects = transition(state, TimerFired(), 1100, retry_ms=100)
    assert effects == ()
    failed, _ = transition(preparing, CallFailed(B, 5), 1000, retry_ms=100)
    assert next_deadline_ms(failed) == 1100
    state, effects = transition(failed, TimerFired(), 1100)
    assert [(e.instance, e.plan.deadline_ms) for e in effects if isinstance(e, Prepare)] == [(B, 100)]
    committing, _ = run(STABLE, BEGIN, *ACKS, CallFailed(C, 5), CallFailed(A, 5), CommitAnswered(A, 5, True))
    assert run(committing, TimerFired(), now_ms=1500)[1] == (Commit(C, 5),)
    aborting, _ = run(STABLE, BEGIN, PlanAnswered(B, 5, False), CallFailed(A, 5), CallFailed(B, 4))
    again = (Abort(A, 5), Commit(A, 4), Abort(B, 5), Commit(B, 4))
    assert run(aborting, TimerFired(), now_ms=1500)[1] == again


def test_failures_of_calls_that_nobody_waits_for_change_nothing() -> None:
    for state in (STABLE, run(STABLE, BEGIN)[0], run(STABLE, BEGIN, *ACKS)[0]):
        assert run(state, CallFailed(A, 3)) == (state, ())


@pytest.mark.requirement("RS-6")
def test_a_member_lost_before_the_decision_aborts() -> None:
    state, effects = run(STABLE, BEGIN, *ACKS[:2], MemberLost(A))
    assert isinstance(state, Aborting)
    assert RangesLost(A, ((0, 32),)) in effects
    assert state.waiting == {B, C}
    state, _ = run(state, AbortAnswered(B, 5), AbortAnswered(C, 5))
    assert state == Stable(map=THREE, highest=5, lost=frozenset({A}), owed=frozenset({Owed(A, 5)}))


@pytest.mark.requirement("RS-6")
def test_a_member_lost_after_the_decision_is_not_silent() -> None:
    state, effects = run(STABLE, BEGIN, *ACKS, MemberLost(A))
    assert RangesLost(A, ((0, 48),)) in effects
    state, effects = run(state, CommitAnswered(B, 5, True), CommitAnswered(C, 5, False))
    assert RangesLost(C, ((48, 96),)) in effects
    assert isinstance(state, Stable)
    assert state.lost == {A, C}
    assert records(effects)[-1].lost == (A, C)


@pytest.mark.requirement("RS-6")
def test_lost_ranges_are_planned_anew_and_computed() -> None:
    state, effects = run(STABLE, MemberLost(B))
    assert effects[1:] == (RangesLost(B, ((32, 64),)),)
    assert run(state, MemberLost(B)) == (state, ())
    state, effects = run(state, BEGIN)
    plans = {e.instance: e.plan.member for e in effects if isinstance(e, Prepare)}
    assert set(plans) == {A, C}
    assert (plans[A].assign, plans[C].assign) == (((32, 48),), ((48, 64),))
    state, effects = run(state, PlanAnswered(A, 5, True), PlanAnswered(C, 5, True))
    assert Commit(B, 5) in effects
    state, _ = run(state, CommitAnswered(A, 5, True), CommitAnswered(C, 5, True))
    assert isinstance(state, Stable)
    assert state.lost == frozenset()


@pytest.mark.requirement("RS-6")
def test_a_member_wrongly_taken_for_lost_is_found_to_hold_its_ranges() -> None:
    state, _ = run(STABLE, MemberLost(B))
    anew = Begin(shards=THREE.shards, block_tokens=4, deadline_ms=200)
    state, _ = run(state, anew, PlanAnswered(B, 5, False), CommitAnswered(B, 4, True))
    assert state.lost == frozenset()


@pytest.mark.requirement("RS-6")
def test_recovery_without_a_decision_aborts() -> None:
    _, effects = run(STABLE, BEGIN)
    state, effects = recover(records(effects)[0])
    assert isinstance(state, Aborting)
    assert state.map == THREE
    assert effects[1:] == (Abort(A, 5), Abort(B, 5), Abort(C, 5))
    state, _ = run(state, *(AbortAnswered(i, 5) for i in (A, B, C)), BEGIN)
    assert state.highest == 6


@pytest.mark.requirement("RS-6")
def test_recovery_with_a_decision_tells_it_again() -> None:
    decided, effects = run(STABLE, BEGIN, *ACKS)
    state, effects = recover(records(effects)[0])
    assert state == decided
    assert effects == (Commit(A, 5), Commit(B, 5), Commit(C, 5))


def test_recovery_when_nothing_was_under_way() -> None:
    stable, effects = run(STABLE, MemberLost(B))
    assert recover(records(effects)[0]) == (stable, ())
    ended, effects = run(
        stable, MemberLost(A), MemberLost(C), Begin(shards=(), block_tokens=4, deadline_ms=1)
    )
    everybody = frozenset(Owed(member, 5) for member in (A, B, C))
    assert ended == Stable(map=ShardMap(map="m", version=5, shards=()), highest=5, owed=everybody)
    assert recover(records(effects)[-1]) == (ended, (Commit(A, 5), Commit(B, 5), Commit(C, 5)))


def test_a_map_begins_at_version_zero() -> None:
    state, effects = run(Stable(map=ShardMap(map="m", version=0, shards=())), BEGIN)
    assert [(e.plan.version, e.plan.to) for e in effects if isinstance(e, Prepare)] == [(0, 1)] * 2
    state, effects = run(state, PlanAnswered(A, 1, True), PlanAnswered(C, 1, True))
    assert effects[1] == Committed(map=state.map, moved_tokens=0, computed_tokens=96)


def test_a_frozen_state_does_not_depend_on_when() -> None:
    early = transition(transition(STABLE, BEGIN, 1000)[0], CallFailed(A, 5), 1005)[0]
    late = transition(transition(STABLE, BEGIN, 7000)[0], CallFailed(A, 5), 7005)[0]
    assert early != late
    assert freeze(early, 1010) == freeze(late, 7010)
    assert hash(freeze(early, 1010)) == hash(freeze(late, 7010))
    assert thaw(freeze(early, 1010), 1010) == early
    assert freeze(STABLE, 9) is STABLE


# Who was counted lost and comes back has to hear of what was decided without it


@pytest.mark.requirement("RS-6")
def test_a_member_left_out_is_told_until_it_acknowledges() -> None:
    state, effects = run(STABLE, MemberLost(B), BEGIN, PlanAnswered(A, 5, True), PlanAnswered(C, 5, True))
    assert Commit(B, 5) in effects
    state, _ = run(state, CommitAnswered(A, 5, True), CommitAnswered(C, 5, True))
    assert isinstance(state, Stable)  # nobody waits for it
    assert next_deadline_ms(state) is None
    state, effects = run(state, CallFailed(B, 5))
    assert next_deadline_ms(state) == 1500
    assert run(state, TimerFired(), now_ms=1499) == (state, ())
    state, effects = run(state, TimerFired(), now_ms=1500)
    assert effects == (Commit(B, 5),)
    assert run(state, CommitAnswered(B, 4, True)) == (state, ())  # it speaks of another version
    state, effects = run(state, CommitAnswered(B, 5, False))
    assert (state.owed, records(effects)[0].owed) == (frozenset(), ())
    assert run(state, MemberBack(B)) == (state, ())


@pytest.mark.requirement("RS-6")
@pytest.mark.parametrize("decided", [True, False])
def test_a_member_lost_in_a_change_is_told_when_it_is_back(decided: bool) -> None:
    state, _ = run(STABLE, BEGIN, *(ACKS if decided else ACKS[:2]), MemberLost(C))
    told = (
        (CommitAnswered(A, 5, True), CommitAnswered(B, 5, True))
        if decided
        else (
            AbortAnswered(A, 5),
            AbortAnswered(B, 5),
        )
    )
    state, effects = run(state, *told)
    assert isinstance(state, Stable)
    assert records(effects)[-1].owed == (Owed(C, 5),)
    decision = Commit(C, 5) if decided else Abort(C, 5)
    assert run(state, MemberBack(C)) == (state, (decision,))
    assert recover(records(effects)[-1]) == (state, (decision,))  # a crash in between changes nothing
    state, _ = run(state, CommitAnswered(C, 5, True) if decided else AbortAnswered(C, 5))
    assert state.owed == frozenset()
    assert state.lost == {C}  # what it holds is not relied upon before it is asked


@pytest.mark.requirement("RS-6")
def test_an_abort_that_is_owed_is_told_beside_a_later_attempt_and_is_covered_by_its_commit() -> None:
    state, _ = run(STABLE, BEGIN, MemberLost(C), AbortAnswered(A, 5), AbortAnswered(B, 5))
    with pytest.raises(LocalProtocolError, match="not acknowledged"):
        run(state, BEGIN)  # C is to have a part in it
    later = Begin(shards=(Shard(tokens=(0, 96), instance=A),), block_tokens=4, deadline_ms=200)
    state, _ = run(state, CallFailed(C, 5), later)
    state, effects = run(state, MemberBack(C))
    assert effects == (Abort(C, 5),)
    state, effects = run(state, PlanAnswered(A, 6, True), PlanAnswered(B, 6, True))
    assert Commit(C, 6) in effects
    state, effects = run(state, MemberBack(C))
    assert effects == (Commit(C, 6),)
    state, _ = run(state, AbortAnswered(C, 5))
    assert state.owed == {Owed(C, 6)}
    state, _ = run(state, CommitAnswered(C, 6, False))
    assert (state.owed, state.lost) == (frozenset(), frozenset())


@pytest.mark.requirement("RS-6")
@pytest.mark.parametrize("arrives", [True, False])
def test_an_abort_on_its_way_while_the_next_attempt_commits_is_not_the_last_word(arrives: bool) -> None:
    newcomer = "https://d.example/kvsp/"
    given = (*THREE.shards[:2], attrs.evolve(THREE.shards[2], instance=newcomer))
    state, _ = run(STABLE, Begin(shards=given, block_tokens=4, deadline_ms=200), MemberLost(newcomer))
    state, _ = run(state, *(AbortAnswered(member, 5) for member in (A, B, C)))
    state, effects = run(state, MemberBack(newcomer))
    assert effects == (Abort(newcomer, 5),)
    state, _ = run(state, BEGIN, *(PlanAnswered(member, 6, True) for member in (A, B, C)))
    assert state.owed == {Owed(newcomer, 5)}
    state, effects = run(state, AbortAnswered(newcomer, 5) if arrives else CallFailed(newcomer, 5))
    if arrives:
        assert state.owed == frozenset()
    else:
        state, effects = run(state, TimerFired(), now_ms=1500)
        assert effects == (Commit(newcomer, 6),)
        state, _ = run(state, CommitAnswered(newcomer, 6, False))
        assert state.owed == frozenset()


@pytest.mark.requirement("RS-6")
def test_who_is_owed_an_abort_stays_lost_though_it_holds_its_ranges() -> None:
    state, _ = run(STABLE, BEGIN, MemberLost(C), AbortAnswered(A, 5), AbortAnswered(B, 5))
    later = Begin(shards=(Shard(tokens=(0, 96), instance=A),), block_tokens=4, deadline_ms=200)
    state, _ = run(state, later, PlanAnswered(B, 6, False), CommitAnswered(C, 4, True))
    assert state.lost == {C}  # so no plan goes to it before it has heard


# Legality


class _Subject:
    def __init__(self, state: State) -> None:
        self.state = state

    def kind(self) -> Kind:
        return type(self.state)

    def freeze(self) -> Hashable:
        return freeze(self.state, 1000)

    def handle(self, event: Event) -> tuple[Effect, ...]:
        self.state, effects = transition(self.state, event, 1000)
        return effects


STATES = {
    type(state): state
    for state in (
        STABLE,
        run(STABLE, BEGIN)[0],
        run(STABLE, BEGIN, *ACKS)[0],
        run(STABLE, BEGIN, PlanAnswered(B, 5, False))[0],
    )
}
EVENTS = {
    type(event): event
    for event in (
        BEGIN,
        ACKS[0],
        CommitAnswered(A, 5, True),
        AbortAnswered(A, 5),
        CallFailed(A, 5),
        MemberLost(A),
        MemberBack(A),
        TimerFired(),
    )
}


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(TABLE))
def test_every_event_in_every_state(kind: Kind, event_type: type, cell: Cell) -> None:
    check_cell(cell, subject=_Subject(STATES[kind]), event=EVENTS[event_type])  # type: ignore[index]
