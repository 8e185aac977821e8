"""Take part in resizing a group of instances that share one context: an instance's side (section
"Sequence-Sharded Caches and Resharding"; RS-2, RS-3, RS-5, RS-6, decisions W21 and W32).

A member loads what it is to own anew beside what it owns, acknowledges, and waits: once prepared it never
decides alone, and until the commit it serves the version it has. It keeps the highest version it has seen,
in a plan, a commit or an abort, and refuses plans at or below it, so that nothing that comes late can bring
an old attempt back.

What it loads is bounded by its deadline; a plan that was acknowledged is held until the controller has
decided.
"""

from __future__ import annotations

from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines.alarms import TimerFired
from kvsp_core.machines.reshard_plan import Plan, Range, Transfer, intersect, joined, subtract, token_count
from kvsp_core.machines.table import Table, stays, to
from kvsp_core.problems import BAD_REQUEST, PLAN_CONFLICT, Problem

__all__ = [
    "TABLE",
    "AbortReceived",
    "Adopt",
    "Answer",
    "AnswerWaiting",
    "Appended",
    "CommitReceived",
    "Discard",
    "Effect",
    "Event",
    "LoadFailed",
    "LoadRanges",
    "Loaded",
    "Loading",
    "Outside",
    "Owner",
    "PlanReceived",
    "Prepared",
    "Release",
    "State",
    "StopLoading",
    "TimerFired",
    "freeze",
    "may_append",
    "next_deadline_ms",
    "refuse_step",
    "thaw",
    "transition",
]

# States


@attrs.frozen(kw_only=True)
class Outside:
    """Holds no range of the map."""

    version: int = 0
    """The version whose commit made it release its last range; 0 where it never held one."""
    highest: int = 0
    """The highest version seen, in a plan, a commit or an abort."""


@attrs.frozen(kw_only=True)
class Owner:
    """Holds these ranges in this version, and computes with them."""

    version: int
    highest: int
    ranges: tuple[Range, ...]
    mapped_end: int
    """Where the last range ends by the map; decoding may have appended tokens since that the map does not
    show."""


@attrs.frozen(kw_only=True)
class Loading:
    """Loads what a plan gives it. What it owns in `version` is served as before."""

    version: int
    highest: int
    ranges: tuple[Range, ...]
    mapped_end: int
    plan: Plan
    deadline_ms: int


@attrs.frozen(kw_only=True)
class Prepared:
    """Has acknowledged a plan and waits for the decision, however long that takes."""

    version: int
    highest: int
    ranges: tuple[Range, ...]
    mapped_end: int
    plan: Plan


State: TypeAlias = Outside | Owner | Loading | Prepared


# Events


@attrs.frozen
class PlanReceived:
    """The controller sent a plan."""

    plan: Plan


@attrs.frozen
class CommitReceived:
    """The controller says that a version is authoritative."""

    version: int


@attrs.frozen
class AbortReceived:
    """The controller says that a version will not be."""

    version: int


@attrs.frozen
class Loaded:
    """Everything that the plan to this version fetches is here, verified."""

    version: int


@attrs.frozen
class LoadFailed:
    """Something that the plan to this version fetches cannot be had."""

    version: int


@attrs.frozen
class Appended:
    """Decoding appended tokens at the open end: positions `first` to `end`."""

    first: int
    end: int


Event: TypeAlias = PlanReceived | CommitReceived | AbortReceived | Loaded | LoadFailed | Appended | TimerFired


# Effects


@attrs.frozen
class Answer:
    """Answer the request at hand: 200, or a problem."""

    problem: Problem | None = None


@attrs.frozen
class AnswerWaiting:
    """Answer every request that waits for the plan to this version: 200, or a problem."""

    version: int
    problem: Problem | None = None


@attrs.frozen
class LoadRanges:
    """Load these ranges beside what is held; report `Loaded` or `LoadFailed`. The request at hand waits."""

    version: int
    transfers: tuple[Transfer, ...]


@attrs.frozen
class StopLoading:
    """Stop loading for this version."""

    version: int


@attrs.frozen
class Discard:
    """Free what was loaded for this version."""

    version: int
    ranges: tuple[Range, ...]


@attrs.frozen
class Adopt:
    """Compute with these ranges from now on, under this version. `assigned` are to be computed first."""

    version: int
    ranges: tuple[Range, ...]
    assigned: tuple[Range, ...]


@attrs.frozen
class Release:
    """Free these ranges: they are somebody else's."""

    ranges: tuple[Range, ...]


Effect: TypeAlias = Answer | AnswerWaiting | LoadRanges | StopLoading | Discard | Adopt | Release

_EVENTS: Final = get_args(Event)

TABLE: Final = Table(
    "reshard member",
    states=(Outside, Owner, Loading, Prepared),
    events=_EVENTS,
    cells={
        Outside: {
            **stays(Outside, CommitReceived, AbortReceived, Loaded, LoadFailed, TimerFired),
            PlanReceived: to(Outside, Loading, Prepared),
        },
        Owner: {
            **stays(Owner, *_EVENTS),
            PlanReceived: to(Owner, Loading, Prepared),
            CommitReceived: to(Owner, Outside),
        },
        Loading: {
            PlanReceived: to(Loading, Prepared),
            CommitReceived: to(Loading, Outside),
            AbortReceived: to(Loading, Outside, Owner),
            Loaded: to(Loading, Prepared),
            LoadFailed: to(Loading, Outside, Owner),
            Appended: to(Loading),
            TimerFired: to(Loading, Outside, Owner),
        },
        Prepared: {
            **stays(Prepared, *_EVENTS),
            PlanReceived: to(Loading, Prepared),
            CommitReceived: to(Prepared, Outside, Owner),
            AbortReceived: to(Prepared, Outside, Owner),
        },
    },
)

_Result: TypeAlias = tuple[State, tuple[Effect, ...]]


def transition(state: State, event: Event, now_ms: int) -> _Result:
    """Take an event in and return the state that follows and what is to be done, in this order.

    What the controller may not ask is an `Answer` with ``kvsp-plan-conflict``. Raises `LocalProtocolError`
    for tokens appended where `may_append` is false.
    """
    TABLE.check(type(state), event)
    match event:
        case PlanReceived(plan):
            return _plan_received(state, plan, now_ms)
        case CommitReceived(version):
            return _commit_received(state, version)
        case AbortReceived(version):
            return _abort_received(state, version)
        case Loaded(version):
            if isinstance(state, Loading) and version == state.plan.to:
                return _prepared(state), (AnswerWaiting(version),)
        case LoadFailed(version):
            if isinstance(state, Loading) and version == state.plan.to:
                return _given_up(state, Problem(PLAN_CONFLICT, "a range could not be loaded"))
        case Appended(first, end):
            return _appended(state, first, end), ()
        case TimerFired():
            if isinstance(state, Loading) and now_ms >= state.deadline_ms:
                return _given_up(state, Problem(PLAN_CONFLICT, "the ranges were not loaded in time"))
        case _:
            assert_never(event)
    return state, ()


def _ranges(state: State) -> tuple[Range, ...]:
    return () if isinstance(state, Outside) else state.ranges


def _settled(version: int, highest: int, ranges: tuple[Range, ...], mapped_end: int) -> Outside | Owner:
    if ranges:
        return Owner(version=version, highest=highest, ranges=ranges, mapped_end=mapped_end)
    return Outside(version=version, highest=highest)


def _plan_received(state: State, plan: Plan, now_ms: int) -> _Result:
    held = state.plan if isinstance(state, Loading | Prepared) else None
    if held is not None and attrs.evolve(plan, deadline_ms=held.deadline_ms) == held:
        return state, ((Answer(),) if isinstance(state, Prepared) else ())
    problem = _objection(state, plan)
    if problem is not None:
        return state, (Answer(problem),)
    given_up: tuple[Effect, ...] = ()
    if isinstance(state, Loading | Prepared):
        state, given_up = _given_up(state, Problem(PLAN_CONFLICT, "a later plan replaced this one"))
    loading = Loading(
        version=state.version,
        highest=plan.to,
        ranges=_ranges(state),
        mapped_end=0 if isinstance(state, Outside) else state.mapped_end,
        plan=plan,
        deadline_ms=now_ms + plan.deadline_ms,
    )
    if not plan.member.fetch:
        return _prepared(loading), (*given_up, Answer())
    return loading, (*given_up, LoadRanges(plan.to, plan.member.fetch))


def _objection(state: State, plan: Plan) -> Problem | None:
    """Return why this plan cannot be taken here, or None."""
    member = plan.member
    fetched = tuple(transfer.tokens for transfer in member.fetch)
    named = (*member.retain, *fetched, *member.assign, *member.release)
    if token_count(named) != token_count(joined(named)) or plan.to <= plan.version:
        return Problem(BAD_REQUEST, "ranges overlap, or `to` is not above `from`; send a consistent plan")
    if plan.to <= state.highest:
        return Problem(
            PLAN_CONFLICT, "a plan, commit or abort of this version or a higher one was seen before"
        )
    held, kept = _ranges(state), (*member.retain, *member.release)
    if plan.version != state.version and (held or kept):
        return Problem(PLAN_CONFLICT, "`from` is not the version held here")
    if subtract(kept, held):
        return Problem(PLAN_CONFLICT, "the plan retains or releases what is not held here")
    if intersect((*fetched, *member.assign), held):
        return Problem(PLAN_CONFLICT, "the plan fetches or assigns what is held here already")
    if not isinstance(state, Outside) and not _only_growth(
        subtract(held, kept), member.retain, state.mapped_end
    ):
        return Problem(PLAN_CONFLICT, "the plan neither retains nor releases all that is held here")
    return None


def _only_growth(left: tuple[Range, ...], retain: tuple[Range, ...], mapped_end: int) -> bool:
    """Return whether what a plan leaves out is no more than tokens appended to a range that it retains."""
    retained_ends = {end for _, end in joined(retain)}
    return all(first >= mapped_end and first in retained_ends for first, _ in left)


def _prepared(state: Loading) -> Prepared:
    return Prepared(
        version=state.version,
        highest=state.highest,
        ranges=state.ranges,
        mapped_end=state.mapped_end,
        plan=state.plan,
    )


def _given_up(state: Loading | Prepared, problem: Problem) -> _Result:
    """Forget the plan held, and what was loaded for it."""
    effects: list[Effect] = []
    if isinstance(state, Loading):
        effects += [StopLoading(state.plan.to), AnswerWaiting(state.plan.to, problem)]
    if state.plan.member.fetch:
        effects.append(Discard(state.plan.to, tuple(t.tokens for t in state.plan.member.fetch)))
    return _settled(state.version, state.highest, state.ranges, state.mapped_end), tuple(effects)


def _commit_received(state: State, version: int) -> _Result:
    if version <= state.version:
        return state, (Answer(),)
    if isinstance(state, Prepared) and version == state.plan.to:
        member = state.plan.member
        gained = (*(transfer.tokens for transfer in member.fetch), *member.assign)
        ranges = joined((*subtract(state.ranges, member.release), *gained))
        effects: tuple[Effect, ...] = (Adopt(version, ranges, member.assign),)
        if member.release:
            effects = (*effects, Release(member.release))
        mapped_end = max((end for _, end in (*member.retain, *gained)), default=0)
        return _settled(version, state.highest, ranges, mapped_end), (*effects, Answer())
    refusal = Answer(Problem(PLAN_CONFLICT, "nothing of this version is held here; plan anew"))
    if isinstance(state, Loading | Prepared) and version < state.plan.to:
        return state, (refusal,)
    return _left_behind(state, version, refusal)


def _abort_received(state: State, version: int) -> _Result:
    """Give up the plan that is aborted, or one before it that is still being loaded: a later
    version is not planned before it was decided, so nobody waits for it any more."""
    effects: tuple[Effect, ...] = ()
    is_over = isinstance(state, Loading) and version > state.plan.to
    if isinstance(state, Loading | Prepared) and (is_over or version == state.plan.to):
        state, effects = _given_up(state, Problem(PLAN_CONFLICT, "the plan was aborted"))
    return attrs.evolve(state, highest=max(state.highest, version)), (*effects, Answer())


def _left_behind(state: State, version: int, refusal: Answer) -> _Result:
    """The map went on without this member, which the controller counts as lost: what is held here is
    nobody's."""
    effects: tuple[Effect, ...] = ()
    if isinstance(state, Loading | Prepared):
        state, effects = _given_up(state, Problem(PLAN_CONFLICT, "the map went on without this member"))
    if isinstance(state, Owner):
        effects = (*effects, Release(state.ranges))
    return Outside(highest=max(state.highest, version)), (*effects, refusal)


def may_append(state: State, position: int) -> bool:
    """Return whether tokens may be appended here: at the end of the last range, unless that is about to be
    released.
    """
    if isinstance(state, Outside) or not state.ranges or position != state.ranges[-1][1]:
        return False
    return isinstance(state, Owner) or not intersect(state.plan.member.release, ((position - 1, position),))


def _appended(state: State, first: int, end: int) -> State:
    if isinstance(state, Outside) or end <= first or not may_append(state, first):
        raise LocalProtocolError("tokens are appended only at the end of the last range, where it stays")
    return attrs.evolve(state, ranges=joined((*state.ranges, (first, end))))


def refuse_step(state: State, version: int) -> Problem | None:
    """Return why a computation under this map version is refused here, or None: versions never mix (W32)."""
    if not isinstance(state, Outside) and state.version == version and state.ranges:
        return None
    return Problem(PLAN_CONFLICT, "the computation is for another version of the map; ask the controller")


# Deadlines


def next_deadline_ms(state: State) -> int | None:
    """Return when `TimerFired` is next due, or None."""
    return state.deadline_ms if isinstance(state, Loading) else None


def freeze(state: State, now_ms: int) -> State:
    """Return the state with its deadline as the time that remains, so that equal situations compare equal."""
    if isinstance(state, Loading):
        return attrs.evolve(state, deadline_ms=state.deadline_ms - now_ms)
    return state


def thaw(frozen: State, now_ms: int) -> State:
    """Return the state that `freeze` made this of, as it stands at another time."""
    return freeze(frozen, -now_ms)
