"""A member of a reshard: prepares, waits, never decides alone, and is not fooled by what comes late."""

from __future__ import annotations

from collections.abc import Hashable

import attrs
import pytest

from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines.reshard_member import (
    TABLE,
    AbortReceived,
    Adopt,
    Answer,
    AnswerWaiting,
    Appended,
    CommitReceived,
    Discard,
    Effect,
    Event,
    Loaded,
    LoadFailed,
    Loading,
    LoadRanges,
    Outside,
    Owner,
    PlanReceived,
    Prepared,
    Release,
    State,
    StopLoading,
    TimerFired,
    freeze,
    may_append,
    next_deadline_ms,
    refuse_step,
    thaw,
    transition,
)
from kvsp_core.machines.reshard_plan import MemberPlan, Plan, Transfer
from kvsp_core.machines.table import Cell, Kind
from kvsp_core.problems import BAD_REQUEST, PLAN_CONFLICT, ProblemType
from tests.machine_kit import cells, check_cell

ME, OTHER = "https://a.example/kvsp/", "https://b.example/kvsp/"
OWNER = Owner(version=4, highest=4, ranges=((0, 32),), mapped_end=32)
GROW = Plan(
    version=4,
    to=5,
    deadline_ms=200,
    member=MemberPlan(instance=ME, retain=((0, 32),), fetch=(Transfer((32, 48), OTHER),)),
)
JOIN = Plan(version=4, to=5, deadline_ms=200, member=MemberPlan(instance=ME, assign=((64, 96),)))
LEAVE = Plan(version=4, to=5, deadline_ms=200, member=MemberPlan(instance=ME, release=((0, 32),)))


def run(state: State, *events: Event, now_ms: int = 1000) -> tuple[State, tuple[Effect, ...]]:
    """Play events one after the other; return the last state and the effects of the last event."""
    effects: tuple[Effect, ...] = ()
    for event in events:
        state, effects = transition(state, event, now_ms)
    return state, effects


def refusals(effects: tuple[Effect, ...]) -> list[ProblemType]:
    return [e.problem.type for e in effects if isinstance(e, Answer | AnswerWaiting) and e.problem]


@pytest.mark.requirement("RS-3")
def test_the_plan_is_acknowledged_once_everything_is_loaded_and_not_before() -> None:
    state, effects = run(OWNER, PlanReceived(GROW))
    assert isinstance(state, Loading)
    assert effects == (LoadRanges(5, GROW.member.fetch),)
    assert next_deadline_ms(state) == 1200
    state, effects = run(state, Loaded(5))
    assert effects == (AnswerWaiting(5),)
    assert isinstance(state, Prepared)


@pytest.mark.requirement("RS-2", "RS-4")
def test_a_commit_adopts_the_new_ranges_and_releases_the_old() -> None:
    state, effects = run(OWNER, PlanReceived(GROW), Loaded(5), CommitReceived(5))
    assert state == Owner(version=5, highest=5, ranges=((0, 48),), mapped_end=48)
    assert effects == (Adopt(5, ((0, 48),), ()), Answer())
    state, effects = run(OWNER, PlanReceived(LEAVE), CommitReceived(5))
    assert state == Outside(version=5, highest=5)
    assert effects == (Adopt(5, (), ()), Release(((0, 32),)), Answer())


@pytest.mark.requirement("RS-4")
def test_the_old_version_is_served_until_the_commit() -> None:
    state, _ = run(OWNER, PlanReceived(GROW), Loaded(5))
    assert refuse_step(state, 4) is None
    assert refuse_step(state, 5) is not None
    state, _ = run(state, CommitReceived(5))
    assert refuse_step(state, 5) is None
    problem = refuse_step(state, 4)
    assert problem is not None
    assert problem.type is PLAN_CONFLICT
    assert refuse_step(Outside(), 0) is not None


@pytest.mark.requirement("RS-5")
def test_an_abort_discards_what_was_fetched_and_keeps_what_was_held() -> None:
    prepared, _ = run(OWNER, PlanReceived(GROW), Loaded(5))
    state, effects = run(prepared, AbortReceived(5))
    assert state == attrs.evolve(OWNER, highest=5)
    assert effects == (Discard(5, ((32, 48),)), Answer())
    loading, _ = run(OWNER, PlanReceived(GROW))
    state, effects = run(loading, AbortReceived(5))
    assert state == attrs.evolve(OWNER, highest=5)
    assert effects[:2] == (
        StopLoading(5),
        AnswerWaiting(5, effects[1].problem),  # type: ignore[union-attr]
    )
    assert refusals(effects) == [PLAN_CONFLICT]
    assert effects[2:] == (Discard(5, ((32, 48),)), Answer())


@pytest.mark.requirement("RS-5")
def test_what_cannot_be_loaded_in_time_is_refused_and_discarded() -> None:
    loading, _ = run(OWNER, PlanReceived(GROW))
    assert run(loading, TimerFired(), now_ms=1199) == (loading, ())
    for ended, effects in (run(loading, TimerFired(), now_ms=1200), run(loading, LoadFailed(5))):
        assert ended == attrs.evolve(OWNER, highest=5)
        assert refusals(effects) == [PLAN_CONFLICT]
        assert Discard(5, ((32, 48),)) in effects
    late, effects = run(loading, LoadFailed(5), Loaded(5))
    assert (late, effects) == (attrs.evolve(OWNER, highest=5), ())


@pytest.mark.requirement("RS-6")
def test_a_prepared_member_waits_for_the_decision_however_long() -> None:
    state, _ = run(OWNER, PlanReceived(GROW), Loaded(5))
    assert next_deadline_ms(state) is None
    assert run(state, TimerFired(), now_ms=10**9) == (state, ())


@pytest.mark.requirement("RS-3")
@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (attrs.evolve(GROW, version=3), PLAN_CONFLICT),
        (attrs.evolve(GROW, to=4), BAD_REQUEST),
        (attrs.evolve(GROW, version=3, to=4), PLAN_CONFLICT),
        (attrs.evolve(LEAVE, member=MemberPlan(instance=ME, release=((0, 64),))), PLAN_CONFLICT),
        (attrs.evolve(LEAVE, member=MemberPlan(instance=ME, retain=((0, 16),), release=())), PLAN_CONFLICT),
        (attrs.evolve(LEAVE, member=MemberPlan(instance=ME, release=((0, 16),))), PLAN_CONFLICT),
        (attrs.evolve(JOIN, member=MemberPlan(instance=ME, assign=((0, 32),))), PLAN_CONFLICT),
        (
            attrs.evolve(GROW, member=MemberPlan(instance=ME, retain=((0, 32),), assign=((16, 48),))),
            BAD_REQUEST,
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_changes_nothing(plan: Plan, problem: ProblemType) -> None:
    state, effects = run(OWNER, PlanReceived(plan))
    assert refusals(effects) == [problem]
    assert state is OWNER


@pytest.mark.requirement("RS-3", "RS-6")
def test_without_the_map_only_a_plan_that_keeps_nothing_is_taken() -> None:
    assert isinstance(run(Outside(), PlanReceived(JOIN))[0], Prepared)
    assert refusals(run(Outside(), PlanReceived(GROW))[1]) == [PLAN_CONFLICT]
    assert refusals(run(Outside(), PlanReceived(LEAVE))[1]) == [PLAN_CONFLICT]


@pytest.mark.requirement("RS-6")
def test_the_very_plan_it_holds_is_answered_as_before() -> None:
    loading, _ = run(OWNER, PlanReceived(GROW))
    again = PlanReceived(attrs.evolve(GROW, deadline_ms=50))
    assert run(loading, again) == (loading, ())
    prepared, _ = run(loading, Loaded(5))
    assert run(prepared, again) == (prepared, (Answer(),))
    other = PlanReceived(attrs.evolve(GROW, member=attrs.evolve(GROW.member, fetch=())))
    assert refusals(run(prepared, other)[1]) == [PLAN_CONFLICT]


@pytest.mark.requirement("RS-6")
def test_an_aborted_version_never_comes_back() -> None:
    aborted, _ = run(OWNER, PlanReceived(GROW), Loaded(5), AbortReceived(5))
    assert refusals(run(aborted, PlanReceived(GROW))[1]) == [PLAN_CONFLICT]
    never_planned, _ = run(OWNER, AbortReceived(5))
    assert refusals(run(never_planned, PlanReceived(GROW))[1]) == [PLAN_CONFLICT]


@pytest.mark.requirement("RS-6")
def test_a_late_abort_of_the_first_attempt_does_not_touch_the_second() -> None:
    second = attrs.evolve(GROW, to=6)
    state, _ = run(
        OWNER,
        PlanReceived(GROW),
        Loaded(5),
        AbortReceived(5),
        PlanReceived(second),
        Loaded(6),
        AbortReceived(5),
    )
    assert isinstance(state, Prepared)
    assert run(state, CommitReceived(6))[0] == Owner(version=6, highest=6, ranges=((0, 48),), mapped_end=48)


@pytest.mark.requirement("RS-6")
def test_a_plan_that_comes_late_is_given_up_with_the_abort_of_a_later_one() -> None:
    state, effects = run(OWNER, PlanReceived(GROW), AbortReceived(6))
    assert state == attrs.evolve(OWNER, highest=6)
    assert [type(effect) for effect in effects] == [StopLoading, AnswerWaiting, Discard, Answer]
    assert effects[-1] == Answer()
    prepared, _ = run(OWNER, PlanReceived(GROW), Loaded(5), AbortReceived(6))
    assert run(prepared, CommitReceived(5))[0] == Owner(
        version=5, highest=6, ranges=((0, 48),), mapped_end=48
    )


@pytest.mark.requirement("RS-6")
def test_a_later_plan_from_the_same_version_replaces_one_whose_abort_was_lost() -> None:
    second = attrs.evolve(GROW, to=6)
    state, effects = run(OWNER, PlanReceived(GROW), Loaded(5), PlanReceived(second))
    assert isinstance(state, Loading)
    assert effects == (Discard(5, ((32, 48),)), LoadRanges(6, GROW.member.fetch))


@pytest.mark.requirement("RS-4", "RS-6")
def test_commit_and_abort_are_idempotent() -> None:
    committed, _ = run(OWNER, PlanReceived(GROW), Loaded(5), CommitReceived(5))
    assert run(committed, CommitReceived(5)) == (committed, (Answer(),))
    assert run(committed, CommitReceived(4)) == (committed, (Answer(),))
    assert run(committed, AbortReceived(3)) == (committed, (Answer(),))
    left, _ = run(OWNER, PlanReceived(LEAVE), CommitReceived(5))
    assert run(left, CommitReceived(5)) == (left, (Answer(),))


@pytest.mark.requirement("RS-6")
def test_a_restarted_member_answers_a_commit_with_a_conflict() -> None:
    state, effects = run(Outside(), CommitReceived(5))
    assert refusals(effects) == [PLAN_CONFLICT]
    assert state == Outside(highest=5)
    assert refusals(run(state, PlanReceived(JOIN))[1]) == [PLAN_CONFLICT]


@pytest.mark.requirement("RS-6")
def test_a_member_that_the_map_went_on_without_frees_what_it_held() -> None:
    state, effects = run(OWNER, CommitReceived(7))
    assert state == Outside(highest=7)
    assert effects[0] == Release(((0, 32),))
    assert refusals(effects) == [PLAN_CONFLICT]
    state, effects = run(OWNER, PlanReceived(GROW), CommitReceived(5))
    assert state == Outside(highest=5)
    assert refusals(effects) == [PLAN_CONFLICT, PLAN_CONFLICT]
    assert Discard(5, ((32, 48),)) in effects
    assert Release(((0, 32),)) in effects


def test_a_commit_between_the_version_held_and_the_plan_is_a_conflict_and_changes_nothing() -> None:
    state, _ = run(OWNER, PlanReceived(attrs.evolve(GROW, to=8)), Loaded(8))
    after, effects = run(state, CommitReceived(6))
    assert after is state
    assert refusals(effects) == [PLAN_CONFLICT]


@pytest.mark.requirement("RS-6")
def test_nothing_is_appended_to_a_range_that_is_about_to_leave() -> None:
    assert may_append(OWNER, 32)
    assert not may_append(OWNER, 16)
    assert not may_append(Outside(), 0)
    leaving, _ = run(OWNER, PlanReceived(LEAVE))
    assert not may_append(leaving, 32)
    with pytest.raises(LocalProtocolError, match="where it stays"):
        transition(leaving, Appended(32, 33), 1000)
    assert may_append(run(leaving, AbortReceived(5))[0], 32)


def test_a_retained_open_end_grows_through_a_reshard() -> None:
    keep = attrs.evolve(LEAVE, member=MemberPlan(instance=ME, retain=((16, 32),), release=((0, 16),)))
    state, _ = run(OWNER, PlanReceived(keep), Appended(32, 35), CommitReceived(5))
    assert state == Owner(version=5, highest=5, ranges=((16, 35),), mapped_end=32)
    grown, _ = run(OWNER, Appended(32, 35))
    assert isinstance(run(grown, PlanReceived(keep))[0], Prepared)
    assert refusals(run(grown, PlanReceived(LEAVE))[1]) == [PLAN_CONFLICT]
    kept, _ = run(grown, PlanReceived(keep), CommitReceived(5))
    assert kept == state
    to_six = attrs.evolve(keep, version=5, to=6, member=MemberPlan(instance=ME, retain=((16, 32),)))
    assert isinstance(run(kept, PlanReceived(to_six))[0], Prepared)


def test_a_frozen_state_does_not_depend_on_when() -> None:
    early, _ = transition(OWNER, PlanReceived(GROW), 1000)
    late, _ = transition(OWNER, PlanReceived(GROW), 7000)
    assert early != late
    assert freeze(early, 1010) == freeze(late, 7010)
    assert thaw(freeze(early, 1010), 1010) == early
    assert freeze(OWNER, 5) is OWNER
    assert hash(freeze(early, 1010)) == hash(freeze(late, 7010))


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
        Outside(),
        OWNER,
        run(OWNER, PlanReceived(GROW))[0],
        run(OWNER, PlanReceived(GROW), Loaded(5))[0],
    )
}
EVENTS = {
    type(event): event
    for event in (
        PlanReceived(attrs.evolve(GROW, to=6)),
        CommitReceived(5),
        AbortReceived(5),
        Loaded(5),
        LoadFailed(5),
        Appended(32, 33),
        TimerFired(),
    )
}


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(TABLE))
def test_every_event_in_every_state(kind: Kind, event_type: type, cell: Cell) -> None:
    check_cell(cell, subject=_Subject(STATES[kind]), event=EVENTS[event_type])  # type: ignore[index]
