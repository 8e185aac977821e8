"""The shard maps of a controller: one coordinator for each, its calls, and what it has made durable.

A context that is split over several instances is split anew when the program that embeds the controller says
so (`begin`), and by itself when a member is lost, or has no part in the scope any more: its ranges go to the
instance that may take work and holds the fewest tokens of the context, which computes them (RS-6). The
protocol of it is `kvsp_core.machines.reshard`; decisions W21 and W32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final, TypeAlias, assert_never

import attrs

from kvsp_core.answers import read_outcome
from kvsp_core.errors import LimitExceeded, LocalProtocolError
from kvsp_core.ext_messages import ShardMapInfo
from kvsp_core.limits import (
    CALL_TIMEOUT_MS,
    MAX_SHARD_BLOCK_KEYS,
    MAX_SHARD_MAPS,
    MAX_SHARD_RANGES,
    RESHARD_CALLS,
    RESHARD_DEADLINE_MS,
    RESHARD_RETRY_MS,
)
from kvsp_core.machines import reshard as m
from kvsp_core.machines.alarms import Alarms
from kvsp_core.machines.fleet import Fleet, MemberKind
from kvsp_core.machines.reshard_plan import Plan
from kvsp_core.messages import FetchRange, ReshardAbort, ReshardCommit, ReshardMessage, ReshardPlan
from kvsp_core.problems import PLAN_CONFLICT
from kvsp_core.records import Shard, ShardMap
from kvsp_core.resources import ReshardGroup
from kvsp_core.roles.controller_store import MapContext, StoredMap, map_drop, map_write
from kvsp_core.roles.role import AnswerReceived, CallFailed, Persist
from kvsp_core.roles.work import Work

__all__ = ["AbortCall", "CommitCall", "PlanCall", "ReshardCall", "ShardMaps"]


@attrs.frozen
class PlanCall:
    """Sends a member its plan."""

    map: str = attrs.field(repr=False)
    instance: str
    version: int


@attrs.frozen
class CommitCall:
    """Tells a member that a version holds."""

    map: str = attrs.field(repr=False)
    instance: str
    version: int


@attrs.frozen
class AbortCall:
    """Tells a member that a version will not hold."""

    map: str = attrs.field(repr=False)
    instance: str
    version: int


_MOST_DOUBLINGS: Final = 4

ReshardCall: TypeAlias = PlanCall | CommitCall | AbortCall


@attrs.define(eq=False)
class _Group:
    """One shard map: the context it splits, and how far a change of it has come."""

    context: MapContext
    """The context as the authoritative version of the map splits it."""
    state: m.State
    cause: str | None = None
    """The ``traceparent`` of the request that the last change is for, if there is one; it is not stored."""
    coming: MapContext | None = None
    """The context as the change under way splits it; it takes the other's place when that is decided."""
    failures: int = 0
    """Calls in a row that led nowhere: the next are made after a while that doubles."""
    unwilling: frozenset[str] = frozenset()
    """Members by which changes have failed since the last that did not: others get ranges before them."""
    unheeded: dict[str, int] = attrs.Factory(dict)
    """Member -> calls in a row by which it did not do what the change under way waits for."""
    rests_until_ms: int | None = None
    """Before that no change of it begins by itself."""


class ShardMaps:
    """All shard maps of one controller. `may_serve` says whether an instance has a part in a scope."""

    def __init__(
        self,
        work: Work,
        fleet: Fleet,
        may_serve: Callable[[str, str], bool],
        *,
        max_maps: int = MAX_SHARD_MAPS,
        deadline_ms: int = RESHARD_DEADLINE_MS,
        retry_ms: int = RESHARD_RETRY_MS,
        call_timeout_ms: int = CALL_TIMEOUT_MS,
    ) -> None:
        self._work = work
        self._fleet = fleet
        self._may_serve = may_serve
        self._max_maps = max_maps
        self._prepare_ms = deadline_ms
        self._retry_ms = retry_ms
        self._call_timeout_ms = call_timeout_ms
        self._groups: dict[str, _Group] = {}
        self._member_of: dict[str, dict[str, None]] = {}  # instance -> maps that give it ranges
        self._alarms: Alarms[str] = Alarms()
        self._ending: Collection[str] = ()  # the scopes whose maps are to end
        self._unrepaired: dict[str, None] = {}  # maps with ranges that have no living owner
        # Maps that split nothing and are kept for what is still to be told, or for the versions that were
        # planned; the oldest makes room for a new map.
        self._over: dict[str, None] = {}

    def get(self, map_id: str) -> ShardMap | None:
        """Return the authoritative version of a map, or None where it splits nothing."""
        group = self._groups.get(map_id)
        return None if group is None or map_id in self._over else group.state.map

    @property
    def is_full(self) -> bool:
        """Whether no further map can be made."""
        return len(self._groups) - len(self._over) >= self._max_maps

    def context(self, map_id: str) -> MapContext:
        """Return the context that a known map splits, or is to split where it splits none yet."""
        return self._groups[map_id].context

    def lost(self, map_id: str) -> frozenset[str]:
        """Return the members whose data is gone and not computed anew yet."""
        group = self._groups.get(map_id)
        return group.state.lost if group else frozenset()

    def is_stable(self, map_id: str) -> bool:
        """Return whether no change of a map is under way; so it is with one that is not known."""
        group = self._groups.get(map_id)
        return group is None or isinstance(group.state, m.Stable)

    def unfit(self, map_id: str, instances: Iterable[str], context: MapContext) -> str | None:
        """Return the first of these instances that may not have ranges of a map: it has not acknowledged an
        earlier change, or has no part in the context's scope, or has no ranges and is not active (LC-2), or
        does not compute the model."""
        group = self._groups.get(map_id)
        held = {shard.instance for shard in group.state.map.shards} if group else frozenset[str]()
        owed = _owed(group)
        for each in instances:
            stays = each in held and self._may_serve(each, context.scope_id)
            if each in owed or not (stays or self._may_take(each, context)):
                return each
        return None

    def info(self, map_id: str) -> ShardMapInfo:
        """Return what an operator may see of a known map."""
        state = self._groups[map_id].state
        return ShardMapInfo(
            version=state.map.version,
            planned=state.highest,
            state=type(state).__name__.lower(),
            shards=state.map.shards,
        )

    def next_deadline_ms(self) -> int | None:
        """Return when `fire` is next due, or None. It may be early."""
        return self._alarms.next_ms()

    # What is to be done

    def begin(
        self,
        map_id: str,
        shards: tuple[Shard, ...],
        context: MapContext,
        now_ms: int,
        cause: str | None = None,
    ) -> None:
        """Go over to these shards; none end the map. A map's identifier is not used again after its end.

        The context takes the place of the one before when the change is decided; its calls are for the
        request `cause`. Raises `LocalProtocolError` while a change is under way, or for an instance that may
        not take ranges, and `LimitExceeded` where there are too many maps, shards or blocks.
        """
        if len(shards) > MAX_SHARD_RANGES:
            raise LimitExceeded(f"a map has at most {MAX_SHARD_RANGES} shards; join those that touch")
        if len(context.block_keys) > MAX_SHARD_BLOCK_KEYS:
            raise LimitExceeded(f"a map has at most {MAX_SHARD_BLOCK_KEYS} blocks; use larger blocks")
        group = self._groups.get(map_id)
        if (unfit := self.unfit(map_id, {shard.instance: None for shard in shards}, context)) is not None:
            raise LocalProtocolError(
                f"{unfit} is not active, has no part in the scope or the model, or has not acknowledged the "
                "last change: no ranges (LC-2)"
            )
        if group is None:
            if self.is_full:
                raise LimitExceeded(f"a controller keeps at most {self._max_maps} shard maps; end some")
            if len(self._groups) >= self._max_maps:
                self._end(next(iter(self._over)))
            group = _Group(context, m.Stable(map=ShardMap(map=map_id, version=0, shards=())))
        event = m.Begin(shards=shards, block_tokens=context.block_tokens, deadline_ms=self._prepare_ms)
        state, effects = m.transition(group.state, event, now_ms)
        self._groups[map_id] = group
        self._over.pop(map_id, None)
        if not group.state.map.shards:
            group.context = context
        group.coming, group.cause, group.rests_until_ms = context, cause, None
        self._enter(map_id, group, state, effects, now_ms)

    def restore(self, stored: StoredMap, now_ms: int) -> None:
        """Go on with a map that was stored."""
        state, effects = m.recover(stored.record)
        group = _Group(stored.context, state)
        map_id = stored.record.map.map
        self._groups[map_id] = group
        self._note_members(map_id, frozenset(), _members(state))
        self._enter(map_id, group, state, effects, now_ms)

    # What happens

    def obey_policy(self, purged: Collection[str], now_ms: int) -> None:
        """Go by a new policy: end the maps of `purged` scopes, and have members that have no part in the
        scope of their map any more count as lost. What is being changed follows a while after that."""
        self._ending = purged
        for map_id, group in tuple(self._groups.items()):
            if map_id in self._over:
                self._rest(map_id, group)
            elif isinstance(group.state, m.Stable):
                self._change(map_id, group, now_ms)

    def lose(self, instance: str, now_ms: int) -> None:
        """An incarnation of an instance is gone, and with it what it held."""
        for map_id in tuple(self._member_of.get(instance, ())):
            self._apply(map_id, m.MemberLost(instance), now_ms)

    def meet(self, instance: str, now_ms: int) -> None:
        """An instance that was lost reports again: tell it what it has not acknowledged."""
        for map_id in tuple(self._member_of.get(instance, ())):
            self._apply(map_id, m.MemberBack(instance), now_ms)

    def repair(self, now_ms: int) -> None:
        """Give ranges without a living owner to instances that can take them; ask when instances change."""
        for map_id in tuple(self._unrepaired):
            group = self._groups[map_id]
            if isinstance(group.state, m.Stable):
                self._change(map_id, group, now_ms)

    def fire(self, now_ms: int) -> None:
        """Let the deadlines that have come take effect."""
        for map_id in self._alarms.take_due(now_ms):
            self._apply(map_id, m.TimerFired(), now_ms)
            group = self._groups.get(map_id)
            if group is None or not isinstance(group.state, m.Stable) or map_id in self._over:
                continue
            self._change(map_id, group, now_ms)

    def handle(self, call: ReshardCall, item: AnswerReceived | CallFailed, now_ms: int) -> None:
        """Take in the end of a call to a member."""
        if call.map not in self._groups:
            return
        event: m.Event = m.CallFailed(call.instance, call.version)
        if self._fleet.kind_of(call.instance) in (MemberKind.FAILED, MemberKind.UNKNOWN):
            event = m.MemberLost(call.instance)  # it is called again when it reports
        if isinstance(item, AnswerReceived):
            problem = read_outcome(item.response, item.body)
            match call:
                case PlanCall(_, instance, version):
                    # Any answer but 200 is a refusal (decision W21).
                    event = m.PlanAnswered(instance, version, item.response.status == 200)
                case CommitCall(_, instance, version):
                    if problem is None or problem.type == PLAN_CONFLICT:
                        event = m.CommitAnswered(instance, version, problem is None)
                case AbortCall(_, instance, version):
                    if item.response.status < 500:
                        event = m.AbortAnswered(instance, version)
                case _:
                    assert_never(call)
        group = self._groups[call.map]
        if (
            isinstance(event, m.CommitAnswered)
            and isinstance(group.state, m.Committing)
            and not event.accepted
        ):
            group.unwilling |= {call.instance} & group.state.waiting
        retry_ms = self._retry_ms << group.failures
        failed = isinstance(event, m.CallFailed)
        group.failures = min(group.failures + 1, _MOST_DOUBLINGS) if failed else 0
        if failed and self._is_given_up(group, call):
            self._apply(call.map, m.MemberLost(call.instance), now_ms)
        self._apply(call.map, event, now_ms, retry_ms)

    @staticmethod
    def _is_given_up(group: _Group, call: ReshardCall) -> bool:
        """Count a call by which a member did not do what a change waits for; return whether it was one too
        many. It counts as lost then, though it reports: it is owed the decision, and holds nothing up."""
        match group.state:
            case m.Committing(waiting=waiting):
                awaited = waiting
            case m.Aborting(waiting=waiting, asking=asking):
                awaited = waiting | asking
            case _:
                return False
        if call.instance not in awaited:
            return False
        group.unheeded[call.instance] = group.unheeded.get(call.instance, 0) + 1
        if group.unheeded[call.instance] < RESHARD_CALLS:
            return False
        group.unwilling |= {call.instance}
        return True

    def _apply(self, map_id: str, event: m.Event, now_ms: int, retry_ms: int = RESHARD_RETRY_MS) -> None:
        group = self._groups.get(map_id)
        if group is not None:
            state, effects = m.transition(group.state, event, now_ms, retry_ms=retry_ms)
            self._enter(map_id, group, state, effects, now_ms)

    def _enter(
        self, map_id: str, group: _Group, state: m.State, effects: Iterable[m.Effect], now_ms: int
    ) -> None:
        """Take a state over, and do what the coordinator wants."""
        before, group.state = group.state, state
        self._note_members(map_id, _members(before), _members(state))
        due_ms = m.next_deadline_ms(state)
        self._alarms.set(map_id, due_ms)
        for effect in effects:
            self._do(map_id, group, effect)
        if not isinstance(state, m.Stable):
            return
        if not state.map.shards:
            self._rest(map_id, group)
            return
        if state.lost & _members(state):
            self._unrepaired[map_id] = None
        else:
            self._unrepaired.pop(map_id, None)
        if isinstance(before, m.Aborting | m.Committing):
            group.unheeded.clear()
            # Not at once, lest a member that refuses, a plan or what became of it, be asked without end.
            group.rests_until_ms = now_ms + self._retry_ms
        self._change(map_id, group, now_ms)

    def _change(self, map_id: str, group: _Group, now_ms: int) -> None:
        """Begin the change that a stable map is in want of, if any, unless the last one was a moment ago."""
        ends = group.context.scope_id in self._ending
        if not ends and (displaced := self._displaced(group)) is not None:
            self._apply(map_id, m.MemberLost(displaced), now_ms)  # which leads here again
            return
        if not ends and map_id not in self._unrepaired:
            group.rests_until_ms = None
            return
        rests_until_ms, due_ms = group.rests_until_ms, m.next_deadline_ms(group.state)
        if rests_until_ms is not None and now_ms < rests_until_ms:
            self._alarms.set(map_id, rests_until_ms if due_ms is None else min(due_ms, rests_until_ms))
        elif ends:
            self.begin(map_id, (), group.context, now_ms)
        else:
            self._reassign(map_id, group, now_ms)

    def _displaced(self, group: _Group) -> str | None:
        """Return a member that has ranges, and no part in their scope any more."""
        have = (shard.instance for shard in group.state.map.shards if shard.instance not in group.state.lost)
        scope_id = group.context.scope_id
        return next((each for each in have if not self._may_serve(each, scope_id)), None)

    def _do(self, map_id: str, group: _Group, effect: m.Effect) -> None:
        match effect:
            case m.PersistRecord(record):
                if record.phase is m.Phase.COMMITTED and group.coming is not None:
                    group.context, group.coming = group.coming, None
                self._work.emit(Persist((map_write(StoredMap(record=record, context=group.context)),)))
            case m.Prepare(instance, plan):
                message = _plan_message(map_id, group, plan)
                self._tell(group, PlanCall(map_id, instance, plan.to), message, plan.deadline_ms)
            case m.Commit(instance, version):
                commit = ReshardCommit(map=map_id, commit=version)
                self._tell(group, CommitCall(map_id, instance, version), commit)
            case m.Abort(instance, version):
                abort = ReshardAbort(map=map_id, abort=version)
                self._tell(group, AbortCall(map_id, instance, version), abort)
            case m.Committed(moved_tokens=moved, computed_tokens=computed):
                group.unwilling = frozenset()
                self._work.observe("kvsp_reshards", outcome="committed")
                self._work.observe("kvsp_reshard_moved_tokens", moved)
                self._work.observe("kvsp_recomputed_tokens", computed)
            case m.Aborted(unwilling=unwilling):
                group.coming = None
                group.unwilling |= unwilling
                self._work.observe("kvsp_reshards", outcome="aborted")
            case m.RangesLost():
                self._unrepaired[map_id] = None
                self._work.observe("kvsp_shards_lost")
            case _:
                assert_never(effect)

    def _tell(
        self, group: _Group, call: ReshardCall, message: ReshardMessage, timeout_ms: int | None = None
    ) -> None:
        self._work.call(
            call.instance,
            ReshardGroup(),
            message,
            purpose=call,
            timeout_ms=timeout_ms or self._call_timeout_ms,
            cause=group.cause,
        )

    def _reassign(self, map_id: str, group: _Group, now_ms: int) -> None:
        """Give the ranges of lost members to whoever holds least, of those who have not failed to take them,
        if there are any; wait where nobody can take them."""
        assert isinstance(group.state, m.Stable)
        self._unrepaired[map_id] = None
        owed = _owed(group)
        assignable = (status.instance for status in self._fleet.assignable())
        able = [n for n in assignable if n not in owed and self._may_take(n, group.context)]
        held = dict.fromkeys((n for n in able if n not in group.unwilling), 0)
        if not held:
            held, group.unwilling = dict.fromkeys(able, 0), frozenset()
        for shard in group.state.map.shards:
            if shard.instance in held and shard.instance not in group.state.lost:
                held[shard.instance] += shard.tokens[1] - shard.tokens[0]
        if not held:
            return
        shards = []
        for shard in group.state.map.shards:
            if shard.instance in group.state.lost:
                least = min(held, key=lambda instance: (held[instance], instance))
                held[least] += shard.tokens[1] - shard.tokens[0]
                shard = attrs.evolve(shard, instance=least)
            shards.append(shard)
        self.begin(map_id, tuple(shards), group.context, now_ms)

    def _may_take(self, instance: str, context: MapContext) -> bool:
        """Return whether an instance can be given ranges of a context; any other would refuse its plan."""
        status = self._fleet.status_of(instance)
        if status is None or not self._fleet.is_assignable(instance):
            return False
        computes = not status.compat_ids or context.compat_id in status.compat_ids
        return computes and self._may_serve(instance, context.scope_id)

    def _note_members(self, map_id: str, before: frozenset[str], after: frozenset[str]) -> None:
        for instance in before - after:
            maps = self._member_of[instance]
            del maps[map_id]
            if not maps:
                del self._member_of[instance]
        for instance in after - before:
            self._member_of.setdefault(instance, {})[map_id] = None

    def _rest(self, map_id: str, group: _Group) -> None:
        """Keep of a map that splits nothing what is still needed: who is to be told, the versions planned."""
        self._unrepaired.pop(map_id, None)
        has_ended = group.state.map.version > 0 or group.context.scope_id in self._ending
        if has_ended and not _owed(group):
            self._end(map_id)
        elif map_id not in self._over:
            self._over[map_id] = None
            group.context = attrs.evolve(group.context, block_keys=())
            self._do(map_id, group, m.PersistRecord(m.record_of(group.state)))

    def _end(self, map_id: str) -> None:
        self._note_members(map_id, _members(self._groups.pop(map_id).state), frozenset())
        self._over.pop(map_id, None)
        self._unrepaired.pop(map_id, None)
        self._alarms.set(map_id, None)
        self._work.emit(Persist((map_drop(map_id),)))


def _owed(group: _Group | None) -> frozenset[str]:
    """Return the instances that have not acknowledged a change of a map."""
    return frozenset(one.instance for one in group.state.owed) if group else frozenset()


def _members(state: m.State) -> frozenset[str]:
    """Return the instances that have a part in a map or in a change of it, or have not heard of one."""
    members = {shard.instance for shard in state.map.shards} | {one.instance for one in state.owed}
    match state:
        case m.Stable():
            pass
        case m.Preparing():
            members |= {plan.member.instance for plan in state.plans}
        case m.Committing() | m.Aborting():
            members |= state.waiting
        case _:
            assert_never(state)
    return frozenset(members)


def _plan_message(map_id: str, group: _Group, plan: Plan) -> ReshardPlan:
    member, context = plan.member, group.coming or group.context
    return ReshardPlan(
        map=map_id,
        from_=plan.version,
        to=plan.to,
        deadline_ms=plan.deadline_ms,
        retain=member.retain,
        fetch=tuple(FetchRange(tokens=one.tokens, from_=one.source) for one in member.fetch),
        release=member.release,
        compat_id=context.compat_id,
        scope_id=context.scope_id,
        block_keys=context.block_keys,
        assign=member.assign,
    )
