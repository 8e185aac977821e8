"""Resize a group of instances that share one context, in two phases: the controller's side (section
"Sequence-Sharded Caches and Resharding"; RS-1, RS-4, RS-5, RS-6, decision W21).

The coordinator sends each member of the old and the new map its plan, collects acknowledgements, decides,
and tells. Its decision is durable before the first commit goes out; recovery without a decision aborts.
Which map is authoritative is what it has made durable, and that is what `state.map` says in every state.

A member that is counted lost in the middle of a change may come back with what it held, or with a plan that
it has acknowledged, and it never decides alone. So whoever has not heard of a decision is owed it
(`Owed`), durably, until it acknowledges: it does not hold the map up, and gets no further plan before that.

Versions are never reused: after an abort the next plan has a higher one, so that a late abort of the earlier
attempt cannot destroy the later. Answers may come late, twice, in any order, or not at all. The member's
side is `reshard_member`, what both compute with `reshard_plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.errors import LocalProtocolError
from kvsp_core.limits import RESHARD_RETRY_MS
from kvsp_core.machines.alarms import TimerFired, earliest
from kvsp_core.machines.reshard_plan import Plan, Range, compare, joined, token_count
from kvsp_core.machines.table import Table, stays, to
from kvsp_core.records import Shard, ShardMap

__all__ = [
    "TABLE",
    "Abort",
    "AbortAnswered",
    "Aborted",
    "Aborting",
    "Begin",
    "CallFailed",
    "Commit",
    "CommitAnswered",
    "Committed",
    "Committing",
    "Effect",
    "Event",
    "MemberBack",
    "MemberLost",
    "Owed",
    "PersistRecord",
    "Phase",
    "PlanAnswered",
    "Prepare",
    "Preparing",
    "RangesLost",
    "ReshardRecord",
    "Stable",
    "State",
    "TimerFired",
    "freeze",
    "next_deadline_ms",
    "record_of",
    "recover",
    "thaw",
    "transition",
]


# States


@attrs.frozen(order=True)
class Owed:
    """A member that has not acknowledged what became of `version`, the last one it had a part in.

    It is told of the current version by a commit, where that is as high, and of the abort otherwise.
    """

    instance: str
    version: int


@attrs.frozen(kw_only=True)
class _Standing:
    """What is known in every state; `map` is the authoritative one."""

    map: ShardMap
    highest: int = 0
    """The highest version ever planned for this map."""
    lost: frozenset[str] = frozenset()
    """Members whose data is gone: their ranges still are theirs, and are computed anew by whoever gets them
    next."""
    owed: frozenset[Owed] = frozenset()
    """Of those who own ranges by `map`, only members that are also `lost`."""
    failed: frozenset[str] = frozenset()
    """Whose call failed: it is called again at `retry_at_ms`."""
    retry_at_ms: int | None = None


@attrs.frozen(kw_only=True)
class Stable(_Standing):
    """No reshard is under way. A new map is ``Stable`` at version 0 without shards."""


@attrs.frozen(kw_only=True)
class Preparing(_Standing):
    """The plans are out; `map` stays authoritative until all have acknowledged (RS-4)."""

    target: ShardMap
    plans: tuple[Plan, ...]
    waiting: frozenset[str]
    deadline_ms: int


@attrs.frozen(kw_only=True)
class Committing(_Standing):
    """The decision is durable and `map`, the new one, authoritative; the members are told until all have
    answered."""

    waiting: frozenset[str]


@attrs.frozen(kw_only=True)
class Aborting(_Standing):
    """The attempt `highest` is given up; the members are told until all have answered.

    Where a plan was refused, the owners are also asked, by a commit of the current version, whether they
    still hold their ranges.
    """

    waiting: frozenset[str]
    asking: frozenset[str] = frozenset()


State: TypeAlias = Stable | Preparing | Committing | Aborting


class Phase(Enum):
    """How far an attempt has come, as far as it is durable."""

    STABLE = "stable"
    PLANNED = "planned"
    COMMITTED = "committed"


@attrs.frozen(kw_only=True)
class ReshardRecord:
    """What of the coordinator survives a crash."""

    phase: Phase
    map: ShardMap
    highest: int
    lost: tuple[str, ...]
    members: tuple[str, ...]
    """Who has to hear of the decision before there is a further attempt."""
    owed: tuple[Owed, ...] = ()


# Events


@attrs.frozen(kw_only=True)
class Begin:
    """Go over to these shards (an empty tuple ends the map). The version is chosen here."""

    shards: tuple[Shard, ...]
    block_tokens: int
    deadline_ms: int


@attrs.frozen
class PlanAnswered:
    """A member answered its plan; anything but 200 is a refusal."""

    instance: str
    version: int
    accepted: bool


@attrs.frozen
class CommitAnswered:
    """A member answered a commit: 200, or a refusal, which means that it holds nothing of that version."""

    instance: str
    version: int
    accepted: bool


@attrs.frozen
class AbortAnswered:
    """A member answered an abort."""

    instance: str
    version: int


@attrs.frozen
class CallFailed:
    """A plan, commit or abort got no answer."""

    instance: str
    version: int


@attrs.frozen
class MemberLost:
    """An instance has failed or restarted: what it held counts as gone."""

    instance: str


@attrs.frozen
class MemberBack:
    """An instance that was lost reports again, in this incarnation or a later one."""

    instance: str


Event: TypeAlias = (
    Begin | PlanAnswered | CommitAnswered | AbortAnswered | CallFailed | MemberLost | MemberBack | TimerFired
)


# Effects


@attrs.frozen
class PersistRecord:
    """Make this durable before any effect that follows."""

    record: ReshardRecord


@attrs.frozen
class Prepare:
    """Send a member its plan."""

    instance: str
    plan: Plan


@attrs.frozen
class Commit:
    """Tell a member that this version is authoritative."""

    instance: str
    version: int


@attrs.frozen
class Abort:
    """Tell a member that this version will not be."""

    instance: str
    version: int


@attrs.frozen(kw_only=True)
class Committed:
    """The map has changed."""

    map: ShardMap
    moved_tokens: int
    computed_tokens: int


@attrs.frozen
class Aborted:
    """The attempt was given up; the map is as it was. A further attempt may begin once the machine is
    stable."""

    version: int
    reason: str
    unwilling: frozenset[str] = frozenset()
    """Members that refused their plan, or did not acknowledge it in time."""


@attrs.frozen
class RangesLost:
    """The data of these ranges is gone; their owner is to compute them, or a new plan is due."""

    instance: str
    ranges: tuple[Range, ...]


Effect: TypeAlias = PersistRecord | Prepare | Commit | Abort | Committed | Aborted | RangesLost

_EVENTS: Final = get_args(Event)
_LATER: Final = tuple(event for event in _EVENTS if event is not Begin)

TABLE: Final = Table(
    "reshard coordinator",
    states=(Stable, Preparing, Committing, Aborting),
    events=_EVENTS,
    cells={
        Stable: {**stays(Stable, *_LATER), Begin: to(Preparing)},
        Preparing: {
            **stays(Preparing, *_LATER),
            PlanAnswered: to(Preparing, Committing, Aborting),
            MemberLost: to(Preparing, Aborting),
            TimerFired: to(Preparing, Aborting),
        },
        Committing: {
            **stays(Committing, *_LATER),
            CommitAnswered: to(Committing, Stable),
            MemberLost: to(Committing, Stable),
        },
        Aborting: {
            **stays(Aborting, *_LATER),
            CommitAnswered: to(Aborting, Stable),
            AbortAnswered: to(Aborting, Stable),
            MemberLost: to(Aborting, Stable),
        },
    },
)

_Result: TypeAlias = tuple[State, tuple[Effect, ...]]


def transition(state: State, event: Event, now_ms: int, *, retry_ms: int = RESHARD_RETRY_MS) -> _Result:
    """Take an event in and return the state that follows and what is to be done, in this order.

    Answers to what was asked in an earlier phase or attempt change nothing. Raises `LocalProtocolError` for
    `Begin` while an attempt is under way, or where it gives ranges to a member that is owed a decision.
    """
    TABLE.check(type(state), event)
    match event:
        case Begin():
            assert isinstance(state, Stable)
            return _begin(state, event, now_ms)
        case MemberLost(instance):
            return _member_lost(state, instance)
        case MemberBack(instance):
            return state, _told_again(state, instance)
        case CallFailed(instance, version):
            return _call_failed(state, instance, version, now_ms + retry_ms), ()
        case TimerFired():
            return _time_passed(state, now_ms)
        case PlanAnswered(instance, version, accepted):
            if isinstance(state, Preparing) and version == state.highest and instance in state.waiting:
                return _plan_answered(state, instance, accepted, now_ms)
        case CommitAnswered(instance, version, accepted):
            if version == state.map.version:
                return _commit_answered(state, instance, accepted)
        case AbortAnswered(instance, version):
            return _abort_answered(state, instance, version)
        case _:
            assert_never(event)
    return state, ()


def _begin(state: Stable, event: Begin, now_ms: int) -> _Result:
    owed = _owed_instances(state.owed)
    if any(shard.instance in owed for shard in event.shards):
        raise LocalProtocolError(
            "a member has not acknowledged the last decision yet; leave it out till then"
        )
    target = ShardMap(map=state.map.map, version=state.highest + 1, shards=event.shards)
    step = compare(state.map, target, block_tokens=event.block_tokens, lost=state.lost)
    plans = tuple(
        Plan(version=state.map.version, to=target.version, deadline_ms=event.deadline_ms, member=member)
        for member in step.plans
    )
    after = Preparing(
        map=state.map,
        highest=target.version,
        lost=state.lost,
        target=target,
        plans=plans,
        waiting=frozenset(plan.member.instance for plan in plans),
        deadline_ms=now_ms + event.deadline_ms,
        owed=state.owed,
        failed=state.failed,
        retry_at_ms=state.retry_at_ms,
    )
    if not plans:
        return _decide(after)
    return after, (PersistRecord(record_of(after)), *(Prepare(p.member.instance, p) for p in plans))


def _plan_answered(state: Preparing, instance: str, accepted: bool, now_ms: int) -> _Result:
    if not accepted:
        return _abort(state, "a member refused the plan", frozenset({instance}), asking=True)
    if now_ms >= state.deadline_ms:
        return _abort(state, "a member was too late", state.waiting)
    state = attrs.evolve(state, waiting=state.waiting - {instance}, failed=state.failed - {instance})
    return (state, ()) if state.waiting else _decide(state)


def _decide(state: Preparing) -> _Result:
    """Commit: durable first, then told. A lost member without a plan is told too, and not waited for."""
    members = frozenset(plan.member.instance for plan in state.plans)
    left_out = {shard.instance for shard in state.map.shards} - members
    after = Committing(
        map=state.target,
        highest=state.highest,
        lost=frozenset(),
        waiting=members,
        owed=_owing(state.owed, left_out, state.highest),
        failed=state.failed,
        retry_at_ms=state.retry_at_ms,
    )
    committed = Committed(
        map=state.target,
        moved_tokens=sum(token_count(t.tokens for t in p.member.fetch) for p in state.plans),
        computed_tokens=sum(token_count(p.member.assign) for p in state.plans),
    )
    commits = (Commit(instance, state.highest) for instance in sorted(members | left_out))
    return _settled(after, (PersistRecord(record_of(after)), committed, *commits))


def _abort(
    state: Preparing, reason: str, unwilling: frozenset[str] = frozenset(), *, asking: bool = False
) -> _Result:
    members = frozenset(plan.member.instance for plan in state.plans)
    owners = frozenset(shard.instance for shard in state.map.shards)
    after = Aborting(
        map=state.map,
        highest=state.highest,
        lost=state.lost,
        waiting=members,
        asking=owners if asking else frozenset(),
        owed=state.owed,
        failed=state.failed - members,
        retry_at_ms=state.retry_at_ms,
    )
    return after, (
        Aborted(state.highest, reason, unwilling),
        *(Abort(instance, state.highest) for instance in sorted(members)),
        *(Commit(instance, state.map.version) for instance in sorted(after.asking)),
    )


def _commit_answered(state: State, instance: str, accepted: bool) -> _Result:
    """A member has heard of the current version. Where it was waited for or asked, its answer also says
    whether it holds its ranges; who is owed an abort stays lost until it has heard of that."""
    version = state.map.version
    heard = (one for one in state.owed if one.instance == instance and one.version <= version)
    state, effects = _acknowledged(state, heard)
    match state:
        case Committing(waiting=waiting) if instance in waiting:
            state = attrs.evolve(state, waiting=waiting - {instance})
        case Aborting(asking=asking) if instance in asking:
            state = attrs.evolve(state, asking=asking - {instance})
        case _:
            return _settled(state, effects)
    if accepted and instance not in _owed_instances(state.owed):
        state = attrs.evolve(state, lost=state.lost - {instance})
    elif not accepted:
        state, lost = _lose(state, instance)
        effects = (*effects, *lost)
    return _settled(state, effects)


def _abort_answered(state: State, instance: str, version: int) -> _Result:
    if isinstance(state, Aborting) and version == state.highest:
        state = attrs.evolve(state, waiting=state.waiting - {instance})
    return _settled(*_acknowledged(state, (Owed(instance, version),)))


def _member_lost(state: State, instance: str) -> _Result:
    state, effects = _lose(state, instance)
    if isinstance(state, Preparing) and instance in {plan.member.instance for plan in state.plans}:
        state, told = _abort(state, "a member was lost")
        effects = (*effects, *told)
    if isinstance(state, Committing | Aborting):
        owed = _owing(state.owed, {instance} & state.waiting, state.highest)
        state = attrs.evolve(state, waiting=state.waiting - {instance}, owed=owed)
    if isinstance(state, Aborting):
        state = attrs.evolve(state, asking=state.asking - {instance})
    return _settled(state, effects)


# Who is owed a decision


def _owing(owed: frozenset[Owed], instances: Collection[str], version: int) -> frozenset[Owed]:
    """Return who is owed a decision, now that these are owed this one; it covers what they were owed."""
    kept = (one for one in owed if one.instance not in instances)
    return frozenset((*kept, *(Owed(instance, version) for instance in instances)))


def _owed_instances(owed: frozenset[Owed]) -> frozenset[str]:
    return frozenset(one.instance for one in owed)


def _acknowledged(state: State, heard: Iterable[Owed]) -> _Result:
    """Take note of what is owed no more."""
    left = state.owed.difference(heard)
    if left == state.owed:
        return state, ()
    state = attrs.evolve(state, owed=left)
    if isinstance(state, Stable):
        state = _quiet(state)
    return state, (PersistRecord(record_of(state)),)


def _quiet(state: Stable) -> Stable:
    """Call nobody again that is owed nothing."""
    failed = state.failed & _owed_instances(state.owed)
    return attrs.evolve(state, failed=failed, retry_at_ms=state.retry_at_ms if failed else None)


def _told_again(state: State, instance: str) -> tuple[Commit | Abort, ...]:
    """Return the decision that a member is owed, or nothing."""
    version = state.map.version
    return tuple(
        Abort(instance, one.version) if one.version > version else Commit(instance, version)
        for one in state.owed
        if one.instance == instance
    )


def _lose(state: State, instance: str) -> _Result:
    """Note that what a member owned is gone; say so once."""
    ranges = joined(shard.tokens for shard in state.map.shards if shard.instance == instance)
    if not ranges or instance in state.lost:
        return state, ()
    state = attrs.evolve(state, lost=state.lost | {instance})
    return state, (PersistRecord(record_of(state)), RangesLost(instance, ranges))


def _settled(state: State, effects: tuple[Effect, ...]) -> _Result:
    """Become stable where everybody has been told."""
    match state:
        case Committing(waiting=waiting) if not waiting:
            pass
        case Aborting(waiting=waiting, asking=asking) if not waiting and not asking:
            pass
        case _:
            return state, effects
    stable = Stable(
        map=state.map,
        highest=state.highest,
        lost=state.lost,
        owed=state.owed,
        failed=state.failed,
        retry_at_ms=state.retry_at_ms,
    )
    return _quiet(stable), (*effects, PersistRecord(record_of(stable)))


def _call_failed(state: State, instance: str, version: int, retry_at_ms: int) -> State:
    match state:
        case Stable():
            concerned = False
        case Aborting():
            concerned = instance in (state.waiting if version == state.highest else state.asking)
        case _:
            concerned = version == state.highest and instance in state.waiting
    if not concerned and instance not in _owed_instances(state.owed):
        return state
    due = retry_at_ms if state.retry_at_ms is None else state.retry_at_ms
    return attrs.evolve(state, failed=state.failed | {instance}, retry_at_ms=due)


def _time_passed(state: State, now_ms: int) -> _Result:
    if isinstance(state, Preparing) and now_ms >= state.deadline_ms:
        return _abort(state, "a member did not acknowledge in time", state.waiting)
    if state.retry_at_ms is None or now_ms < state.retry_at_ms:
        return state, ()
    again = (effect for instance in sorted(state.failed) for effect in _asked_again(state, instance, now_ms))
    return attrs.evolve(state, failed=frozenset(), retry_at_ms=None), tuple(again)


def _asked_again(state: State, instance: str, now_ms: int) -> tuple[Effect, ...]:
    """Return all that a member is to be asked or told, as it stands."""
    again: list[Effect] = [*_told_again(state, instance)]
    match state:
        case Stable():
            pass
        case Preparing():
            again += [
                Prepare(instance, attrs.evolve(plan, deadline_ms=state.deadline_ms - now_ms))
                for plan in state.plans
                if plan.member.instance == instance and instance in state.waiting
            ]
        case Committing():
            if instance in state.waiting:
                again.append(Commit(instance, state.highest))
        case Aborting():
            if instance in state.waiting:
                again.append(Abort(instance, state.highest))
            if instance in state.asking:
                again.append(Commit(instance, state.map.version))
        case _:
            assert_never(state)
    return tuple(again)


def record_of(state: State) -> ReshardRecord:
    """Return what of a state has to survive a crash."""
    match state:
        case Stable():
            phase, members = Phase.STABLE, frozenset[str]()
        case Preparing():
            phase, members = Phase.PLANNED, frozenset(plan.member.instance for plan in state.plans)
        case Aborting():
            phase, members = Phase.PLANNED, state.waiting
        case Committing():
            phase, members = Phase.COMMITTED, state.waiting
        case _:
            assert_never(state)
    return ReshardRecord(
        phase=phase,
        map=state.map,
        highest=state.highest,
        lost=tuple(sorted(state.lost)),
        members=tuple(sorted(members)),
        owed=tuple(sorted(state.owed)),
    )


def recover(record: ReshardRecord) -> _Result:
    """Go on from what was durable: a decision is told again, an attempt without one is given up (RS-6)."""
    lost, owed, members = frozenset(record.lost), frozenset(record.owed), frozenset(record.members)
    effects: tuple[Effect, ...]
    match record.phase:
        case Phase.STABLE:
            state: State = Stable(map=record.map, highest=record.highest, lost=lost, owed=owed)
            effects = ()
        case Phase.PLANNED:
            state = Aborting(
                map=record.map,
                highest=record.highest,
                lost=lost,
                waiting=members,
                owed=owed,
            )
            aborted = Aborted(record.highest, "the controller restarted before it had decided")
            effects = (aborted, *(Abort(instance, record.highest) for instance in record.members))
        case Phase.COMMITTED:
            state = Committing(map=record.map, highest=record.highest, lost=lost, waiting=members, owed=owed)
            effects = tuple(Commit(instance, record.highest) for instance in record.members)
        case _:
            assert_never(record.phase)
    told = (effect for one in record.owed for effect in _told_again(state, one.instance))
    return _settled(state, (*effects, *told))


# Deadlines


def next_deadline_ms(state: State) -> int | None:
    """Return when `TimerFired` is next due, or None."""
    return earliest(state.retry_at_ms, state.deadline_ms if isinstance(state, Preparing) else None)


def freeze(state: State, now_ms: int) -> State:
    """Return the state with its deadlines as the time that remains, so that equal situations compare
    equal."""
    if state.retry_at_ms is not None:
        state = attrs.evolve(state, retry_at_ms=state.retry_at_ms - now_ms)
    if isinstance(state, Preparing):
        state = attrs.evolve(state, deadline_ms=state.deadline_ms - now_ms)
    return state


def thaw(frozen: State, now_ms: int) -> State:
    """Return the state that `freeze` made this of, as it stands at another time."""
    return freeze(frozen, -now_ms)
