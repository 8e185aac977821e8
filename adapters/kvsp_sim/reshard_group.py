"""A group that reshards, for the explorer: the shipped coordinator and member machines, and as little
around them as makes them roles.

The coordinator goes through a list of maps, one attempt after another, and persists as `ReshardRecord` says.
Members load by asking the source for the range, and lose everything in a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs
import msgspec

from kvsp_core.answers import empty_response, problem_response
from kvsp_core.bodies import decode, encode
from kvsp_core.heads import Request
from kvsp_core.machines import reshard, reshard_member
from kvsp_core.machines.reshard_plan import MemberPlan, Plan, Transfer
from kvsp_core.messages import FetchRange, ReshardAbort, ReshardCommit, ReshardPlan, decode_reshard
from kvsp_core.problems import Problem
from kvsp_core.records import Shard, ShardMap
from kvsp_core.resources import ReshardGroup, request_for
from kvsp_core.roles.engine import DropShard
from kvsp_core.roles.role import (
    AnswerReceived,
    BodyArrived,
    Call,
    CallFailed,
    CancelCall,
    Effect,
    Input,
    Persist,
    Put,
    ReceiveBody,
    RequestEnded,
    RequestReceived,
    Respond,
    TimerFired,
)
from kvsp_core.roles.work import Numbers
from kvsp_sim.explored_node import ExploredNode
from kvsp_sim.host import Start

__all__ = ["BLOCK_TOKENS", "MAP", "RESHARD_EFFECTS", "Coordinator", "Member", "Moved", "PlainEngine"]

BLOCK_TOKENS: Final = 4
MAP: Final = "m"
_TABLE: Final = "maps"
_CALL_MS: Final = 1_000


@attrs.frozen
class Moved:
    """An effect: every move of the map was decided, and its members know."""


def _moved(node: ExploredNode, _: Moved) -> None:
    node.waiting -= {MAP}


RESHARD_EFFECTS: Final[Mapping[type, Callable[..., None]]] = MappingProxyType({Moved: _moved})
"""What to do with `Moved`: nobody waits for the map any more."""


class PlainEngine:
    """An engine without memory: what it is told is seen by the witness, and that is all."""

    def execute(self, command: object) -> None:
        """Do nothing."""


class Coordinator:
    """Moves a map through `maps`, each a tuple of shards, as far as `stored` says it is not there yet."""

    def __init__(self, start: Start, base_uri: str, maps: Sequence[tuple[Shard, ...]]) -> None:
        self.base_uri = base_uri
        self._maps = maps
        self._begun = int(start.stored.get("begun", {}).get(MAP, b"0"))
        record = start.stored.get(_TABLE, {}).get(MAP)
        self._state: reshard.State = reshard.Stable(map=ShardMap(map=MAP, version=0, shards=()))
        self._recovered: tuple[reshard.Effect, ...] = ()
        if record is not None:
            self._state, self._recovered = reshard.recover(_read_record(record))
        self._lives: dict[str, int] = {}
        self._calls: dict[int, tuple[str, str, int]] = {}  # call -> (what, member, version)
        self._numbers = Numbers()

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Tell again what was decided, or begin."""
        return (*self._effects(self._recovered), *self._next_map(now_ms))

    def next_deadline_ms(self) -> int | None:
        """Return when the machine wants its timer."""
        return reshard.next_deadline_ms(self._state)

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Take one input in."""
        match item:
            case RequestReceived(request_id):
                return (ReceiveBody(request_id, 1_000),)
            case BodyArrived(request_id, body):
                return (*self._member_started(body, now_ms), Respond(request_id, *empty_response()))
            case AnswerReceived(call_id, response):
                what, member, version = self._calls.pop(call_id)
                return self._event(_answered(what, member, version, response.is_success), now_ms)
            case CallFailed(call_id):
                _, member, version = self._calls.pop(call_id)
                return self._event(reshard.CallFailed(member, version), now_ms)
            case TimerFired():
                return self._event(reshard.TimerFired(), now_ms)
        return ()

    def _member_started(self, body: bytes, now_ms: int) -> tuple[Effect, ...]:
        member, life = body.decode().split()
        before = self._lives.get(member, 1)
        if int(life) <= before:
            return ()
        self._lives[member] = int(life)
        lost = self._event(reshard.MemberLost(member), now_ms)
        return (*lost, *self._event(reshard.MemberBack(member), now_ms))

    def _event(self, event: reshard.Event, now_ms: int) -> tuple[Effect, ...]:
        self._state, effects = reshard.transition(self._state, event, now_ms)
        return (*self._effects(effects), *self._next_map(now_ms))

    def _next_map(self, now_ms: int) -> tuple[Effect, ...]:
        if not isinstance(self._state, reshard.Stable):
            return ()
        if self._begun >= len(self._maps):
            return (Moved(),)  # type: ignore[return-value]  # an effect that only this role has
        shards = self._maps[self._begun]
        if {shard.instance for shard in shards} & {owed.instance for owed in self._state.owed}:
            return ()  # a member has not heard of the last decision yet
        begin = reshard.Begin(shards=shards, block_tokens=BLOCK_TOKENS, deadline_ms=_CALL_MS)
        self._begun += 1
        note = Persist((Put("begun", MAP, b"%d" % self._begun),))
        self._state, effects = reshard.transition(self._state, begin, now_ms)
        return (note, *self._effects(effects))

    def _effects(self, effects: Sequence[reshard.Effect]) -> tuple[Effect, ...]:
        done: list[Effect] = []
        for effect in effects:
            match effect:
                case reshard.PersistRecord(record):
                    done.append(Persist((Put(_TABLE, MAP, _write_record(record)),)))
                case reshard.Prepare(member, plan):
                    done.append(self._call("plan", member, plan.to, _plan_message(plan)))
                case reshard.Commit(member, version):
                    message = ReshardCommit(map=MAP, commit=version)
                    done.append(self._call("commit", member, version, message))
                case reshard.Abort(member, version):
                    done.append(self._call("abort", member, version, ReshardAbort(map=MAP, abort=version)))
        return tuple(done)

    def _call(self, what: str, member: str, version: int, message: object) -> Call:
        self._numbers.calls += 1
        self._calls[self._numbers.calls] = (what, member, version)
        request, body = request_for(ReshardGroup(), message)
        return Call(
            call_id=self._numbers.calls, base_uri=member, request=request, body=body, timeout_ms=_CALL_MS
        )


def _answered(what: str, member: str, version: int, accepted: bool) -> reshard.Event:
    if what == "plan":
        return reshard.PlanAnswered(member, version, accepted)
    if what == "commit":
        return reshard.CommitAnswered(member, version, accepted)
    return reshard.AbortAnswered(member, version)


def _write_record(record: reshard.ReshardRecord) -> bytes:
    return msgspec.json.encode(
        {
            "phase": record.phase.value,
            "map": encode(record.map).decode(),
            "highest": record.highest,
            "lost": record.lost,
            "members": record.members,
            "owed": [(one.instance, one.version) for one in record.owed],
        }
    )


def _read_record(octets: bytes) -> reshard.ReshardRecord:
    members = msgspec.json.decode(octets)
    return reshard.ReshardRecord(
        phase=reshard.Phase(members["phase"]),
        map=decode(ShardMap, members["map"].encode()),
        highest=members["highest"],
        lost=tuple(members["lost"]),
        members=tuple(members["members"]),
        owed=tuple(reshard.Owed(*one) for one in members["owed"]),
    )


def _plan_message(plan: Plan) -> ReshardPlan:
    member = plan.member
    return ReshardPlan(
        map=MAP,
        from_=plan.version,
        to=plan.to,
        deadline_ms=plan.deadline_ms,
        retain=member.retain,
        fetch=tuple(FetchRange(tokens=t.tokens, from_=t.source) for t in member.fetch),
        release=member.release,
        assign=member.assign,
    )


def _read_plan(message: ReshardPlan, instance: str) -> Plan:
    return Plan(
        version=message.from_,
        to=message.to,
        deadline_ms=message.deadline_ms,
        member=MemberPlan(
            instance=instance,
            retain=message.retain,
            fetch=tuple(Transfer(f.tokens, f.from_) for f in message.fetch),
            release=message.release,
            assign=message.assign,
        ),
    )


class Member:
    """Takes part in the moves of a map; tells the coordinator of each start but the first."""

    def __init__(self, start: Start, base_uri: str, coordinator: str) -> None:
        self.base_uri = base_uri
        self._life = start.life
        self._coordinator = coordinator
        self._state: reshard_member.State = reshard_member.Outside()
        self._waiting: list[int] = []  # requests that wait for the plan being loaded
        self._loads: dict[int, int] = {}  # call -> version
        self._numbers = Numbers()

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Tell of the start."""
        if self._life == 1:
            return ()
        return (self._call(self._coordinator, "started", f"{self.base_uri} {self._life}".encode()),)

    def next_deadline_ms(self) -> int | None:
        """Return when the machine wants its timer."""
        return reshard_member.next_deadline_ms(self._state)

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Take one input in."""
        match item:
            case RequestReceived(request_id, _, request) if request.path == "range":
                return (Respond(request_id, *empty_response(200)),)
            case RequestReceived(request_id):
                return (ReceiveBody(request_id, 10_000),)
            case BodyArrived(request_id, body):
                return self._asked(request_id, body, now_ms)
            case RequestEnded(request_id):
                self._waiting = [waiting for waiting in self._waiting if waiting != request_id]
            case AnswerReceived(call_id, response) if call_id in self._loads:
                version = self._loads.pop(call_id)
                good = response.is_success
                if good and version in self._loads.values():
                    return ()
                event = reshard_member.Loaded(version) if good else reshard_member.LoadFailed(version)
                return self._event(event, now_ms)
            case CallFailed(call_id) if call_id in self._loads:
                return self._event(reshard_member.LoadFailed(self._loads.pop(call_id)), now_ms)
            case TimerFired():
                return self._event(reshard_member.TimerFired(), now_ms)
        return ()

    def _asked(self, request_id: int, body: bytes, now_ms: int) -> tuple[Effect, ...]:
        event: reshard_member.Event
        match decode_reshard(body):
            case ReshardPlan() as plan:
                event = reshard_member.PlanReceived(_read_plan(plan, self.base_uri))
            case ReshardCommit(commit=version):
                event = reshard_member.CommitReceived(version)
            case ReshardAbort(abort=version):
                event = reshard_member.AbortReceived(version)
        return self._event(event, now_ms, request_id)

    def _event(
        self, event: reshard_member.Event, now_ms: int, request_id: int | None = None
    ) -> tuple[Effect, ...]:
        self._state, effects = reshard_member.transition(self._state, event, now_ms)
        done: list[Effect] = []
        answered = False
        for effect in effects:
            match effect:
                case reshard_member.Answer(problem):
                    assert request_id is not None
                    done.append(_answer(request_id, problem))
                    answered = True
                case reshard_member.AnswerWaiting(_, problem):
                    done += [_answer(waiting, problem) for waiting in self._waiting]
                    self._waiting.clear()
                case reshard_member.LoadRanges(version, transfers):
                    for transfer in transfers:
                        done.append(self._call(transfer.source, "range", b""))
                        self._loads[self._numbers.calls] = version
                case reshard_member.StopLoading():
                    done += [CancelCall(call) for call in self._loads]
                    self._loads.clear()
                case reshard_member.Discard(_, ranges) | reshard_member.Release(ranges):
                    done += [DropShard(MAP, tokens) for tokens in ranges]
        if request_id is not None and not answered:
            self._waiting.append(request_id)
        return tuple(done)

    def _call(self, base_uri: str, path: str, body: bytes) -> Call:
        self._numbers.calls += 1
        request = Request(method="POST", path=path, content_length=len(body))
        return Call(
            call_id=self._numbers.calls, base_uri=base_uri, request=request, body=body, timeout_ms=_CALL_MS
        )


def _answer(request_id: int, problem: Problem | None) -> Respond:
    head, body = empty_response(200) if problem is None else problem_response(problem)
    return Respond(request_id, head, body)
