"""The shards of an instance: its part in reshards, and attention over the ranges it holds (RS-2, RS-3, RS-5,
decisions W21 and W32).

For each shard map one member machine (`reshard_member`). What a plan fetches is loaded block by block into
the tiers here, verified, from the instance that the plan names, and kept there; with the commit it goes into
the engine, a few blocks at a time, where the range computes in place. The blocks stay in the tiers, so that
the next reshard can fetch them from here. A block that is owned and is not here is looked for again and
again, less and less often.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, TypeAlias

import attrs

from kvsp_core.answers import json_response
from kvsp_core.ext_messages import AttendRequest
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.limits import MAX_INSTANCE_SHARD_MAPS, MAX_REMEMBERED_SHARD_MAPS
from kvsp_core.machines import prefetch
from kvsp_core.machines import reshard_member as member
from kvsp_core.machines.alarms import Alarms, earliest
from kvsp_core.machines.prefetch_directive import DirectiveState
from kvsp_core.machines.reshard_plan import MemberPlan, Plan, Range, Transfer, joined
from kvsp_core.messages import ReshardAbort, ReshardCommit, ReshardMessage, ReshardPlan
from kvsp_core.problems import (
    BAD_REQUEST,
    INCOMPATIBLE,
    NOT_FOUND,
    PLAN_CONFLICT,
    SCOPE_DENIED,
    UNAVAILABLE,
    Problem,
)
from kvsp_core.roles import engine
from kvsp_core.roles.engine_watch import EngineWatch
from kvsp_core.roles.instance_loads import Loads
from kvsp_core.roles.instance_settings import InstanceSettings
from kvsp_core.roles.local_blocks import LocalBlocks, check_read
from kvsp_core.roles.role import BlockName, JobDone, JobFailed, JobFault, ReadBlock, Respond
from kvsp_core.roles.serving import done, refuse
from kvsp_core.roles.work import Work

__all__ = ["Purpose", "Shards"]


_AT_A_TIME: Final = 4
"""Blocks on their way from tiers into the engine, of all maps together."""

_FIRST_RETRY_MS, _LAST_RETRY_MS = 1_000, 60_000
"""How long to wait before blocks that are owned and not here are looked for again; doubles each time."""

_ENGINE_FAILED: Final = Problem(UNAVAILABLE, "the engine failed; try again")


@attrs.frozen
class _ReadFor:
    map_id: str = attrs.field(repr=False)
    block: int
    name: BlockName
    tokens: Range
    buffer: int


@attrs.frozen
class _LoadFor:
    map_id: str = attrs.field(repr=False)
    block: int
    tokens: Range
    buffer: int


@attrs.frozen
class _AttendFor:
    request_id: int
    map_id: str = attrs.field(repr=False)
    version: int


Purpose: TypeAlias = _ReadFor | _LoadFor | _AttendFor
"""What a job of a shard is for."""


@attrs.define(repr=False)
class _Shard:
    map_id: str
    state: member.State = attrs.field(factory=member.Outside)
    compat_id: str = ""
    scope_id: str = ""
    keys: tuple[str, ...] = ()
    cause: str | None = None
    """What its last plan belongs to: a ``traceparent``."""
    waiting: list[int] = attrs.field(factory=list)
    """Requests that wait for the plan to be loaded."""
    loading: str | None = None
    """The directive that loads for the plan."""
    seeking: str | None = None
    """The directive that loads what is owned and not here."""
    retries: int = 0
    kept: set[int] = attrs.field(factory=set)
    """Blocks kept from eviction here."""
    in_engine: set[int] = attrs.field(factory=set)
    wanted: set[int] = attrs.field(factory=set)
    """Blocks that belong in the engine."""
    counted: bool = False

    def continues(self, plan: ReshardPlan) -> bool:
        """Return whether a plan is for the context that ranges are held of, as it was or grown at its end.

        A plan that comes again is for the very context that it was for.
        """
        if isinstance(self.state, member.Outside) or plan.compat_id is None:
            return True
        pending = None if isinstance(self.state, member.Owner) else self.state.plan
        again = pending is not None and pending.to == plan.to
        if not again and not self.state.ranges:
            return True
        if (plan.compat_id, plan.scope_id) != (self.compat_id, self.scope_id):
            return False
        held = len(self.keys) if again else max(self.wanted, default=-1) + 1
        return not plan.block_keys or plan.block_keys[:held] == self.keys[:held]

    def lacks(self, block: int) -> bool:
        """Return whether a block belongs in the engine and is not there."""
        return block in self.wanted and block not in self.in_engine


class Shards:
    """All shards of an instance. Arguments as those of `instance_sessions.Sessions`."""

    def __init__(
        self,
        work: Work,
        blocks: LocalBlocks,
        loads: Loads,
        watch: EngineWatch,
        *,
        settings: InstanceSettings,
        models: Mapping[str, CompatibilityDescriptor],
        scopes: Collection[str],
        open_session: Callable[[int], Problem | None],
        close_session: Callable[[int], None],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._work = work
        self._blocks = blocks
        self._loads = loads
        self._watch = watch
        self._settings = settings
        self._models = models
        self._scopes = scopes
        self._open_session = open_session
        self._close_session = close_session
        self._random_bytes = random_bytes
        self._shards: dict[str, _Shard] = {}
        # Of them those that nothing is held of, the one heard of longest ago first: only the highest version
        # that was seen is remembered, so that a plan that comes late is refused.
        self._outside: dict[str, None] = {}
        self._directives: dict[str, tuple[str, int | None]] = {}  # directive -> map, version of its plan
        self._alarms: Alarms[str] = Alarms()  # when the loading of each map has to be over
        self._retries: Alarms[str] = Alarms()  # when to look again for what of a map is not here
        self._queue: deque[tuple[str, int]] = deque()  # blocks that wait for their turn to go into the engine
        self._moving: set[tuple[str, int]] = set()  # blocks that are on their way into it

    # Requests

    def reshard(
        self, request_id: int, message: ReshardMessage, now_ms: int, cause: str | None = None
    ) -> None:
        """Serve POST reshard: a plan, a commit or an abort. What is loaded for a plan is for `cause`."""
        shard = self._shards.get(message.map) or _Shard(message.map)
        match message:
            case ReshardPlan():
                problem = self._refusal(shard, message, now_ms)
                if problem is not None:
                    self._work.emit(refuse(request_id, problem))
                    return
                shard.waiting.append(request_id)
                shard.cause = cause
                self._advance(shard, member.PlanReceived(self._plan(message)), now_ms, request_id, message)
            case ReshardCommit(commit=version):
                self._advance(shard, member.CommitReceived(version), now_ms, request_id)
            case ReshardAbort(abort=version):
                self._advance(shard, member.AbortReceived(version), now_ms, request_id)

    def _refusal(self, shard: _Shard, plan: ReshardPlan, now_ms: int) -> Problem | None:
        """Return why a plan cannot be taken for what it is about."""
        if isinstance(shard.state, member.Outside):
            if self._taking_part >= MAX_INSTANCE_SHARD_MAPS:
                return Problem(UNAVAILABLE, "the instance takes part in as many maps as it can")
        elif not shard.continues(plan):
            return Problem(PLAN_CONFLICT, "the plan is for another context than what is held here")
        needs = plan.fetch or plan.assign
        if not needs:
            return None
        if plan.compat_id is None or plan.compat_id not in self._models:
            return Problem(INCOMPATIBLE, "compat_id: this instance computes another model")
        if plan.scope_id is None or plan.scope_id not in self._scopes:
            return Problem(SCOPE_DENIED, "scope_id: this instance does not hold the key of the scope")
        block_tokens = self._models[plan.compat_id].block_tokens
        for place, entry in enumerate(plan.fetch):
            first, end = entry.tokens
            if first % block_tokens or end % block_tokens or end // block_tokens > len(plan.block_keys):
                return Problem(
                    BAD_REQUEST, f"fetch[{place}].tokens: expected whole blocks that block_keys names"
                )
        if shard.counted:
            return None
        problem = self._open_session(now_ms)
        shard.counted = problem is None
        return problem

    @property
    def _taking_part(self) -> int:
        return len(self._shards) - len(self._outside)

    def _plan(self, message: ReshardPlan) -> Plan:
        return Plan(
            version=message.from_,
            to=message.to,
            deadline_ms=message.deadline_ms,
            member=MemberPlan(
                instance=self._settings.base_uri,
                retain=message.retain,
                fetch=tuple(Transfer(entry.tokens, entry.from_) for entry in message.fetch),
                assign=message.assign,
                release=message.release,
            ),
        )

    def scope_of(self, map_id: str) -> str | None:
        """Return the scope of a shard map; None where it is not known here."""
        shard = self._shards.get(map_id)
        return shard.scope_id or None if shard is not None else None

    def attend(self, request_id: int, map_id: str, body: AttendRequest) -> None:
        """Serve POST ext/shards/{map}/attend: partial attention over what is held here in that version.

        That is its complete blocks: an open end has no key that it could be loaded by.
        """
        shard = self._shards.get(map_id)
        if shard is None or isinstance(shard.state, member.Outside):
            self._work.emit(refuse(request_id, Problem(NOT_FOUND, "no range of this map is held here")))
            return
        problem = member.refuse_step(shard.state, body.version) or self._unfit(shard, body)
        if problem is None and not shard.wanted <= shard.in_engine:
            problem = Problem(UNAVAILABLE, "the range is still being loaded; try again")
        if problem is None and self._watch.silent:
            problem = _ENGINE_FAILED
        if problem is not None:
            self._work.emit(refuse(request_id, problem))
            return
        job = self._work.job(_AttendFor(request_id, map_id, body.version))
        held = joined(self._tokens(shard, block) for block in shard.wanted)
        self._work.emit(engine.Attend(job, map_id, body.layer, held, body.queries))

    def _attended(self, step: _AttendFor, item: JobDone | JobFailed) -> None:
        """Answer a step, unless the map has gone over to another version while it was computed."""
        shard = self._shards.get(step.map_id)
        problem = member.refuse_step(shard.state if shard else member.Outside(), step.version)
        if problem is not None:
            self._work.emit(refuse(step.request_id, problem))
        elif isinstance(item, JobFailed):
            self._work.emit(refuse(step.request_id, _ENGINE_FAILED))
        else:
            response, octets = json_response(item.data)
            self._work.emit(Respond(step.request_id, response, octets))

    def fail_steps(self) -> None:
        """Answer the steps that the engine has as if it had failed; what comes of them is ignored."""
        steps = [(job, of) for job, of in self._work.jobs.items() if isinstance(of, _AttendFor)]
        for job, step in steps:
            del self._work.jobs[job]
            self._attended(step, JobFailed(job, JobFault.BROKEN))

    def _unfit(self, shard: _Shard, body: AttendRequest) -> Problem | None:
        """Return what of a question does not fit the model, as far as its descriptor tells."""
        model = self._models[shard.compat_id]
        if body.layer >= model.layers:
            return Problem(BAD_REQUEST, f"layer: expected one below {model.layers}")
        unit = 4 * model.kv_heads * model.head_dim
        if len(body.queries) % unit:
            return Problem(
                BAD_REQUEST, f"queries: expected fp32 for whole heads, a multiple of {unit} octets"
            )
        return None

    # The member machine

    def _advance(
        self,
        shard: _Shard,
        event: member.Event,
        now_ms: int,
        request_id: int | None = None,
        message: ReshardPlan | None = None,
    ) -> None:
        shard.state, effects = member.transition(shard.state, event, now_ms)
        for effect in effects:
            match effect:
                case member.Answer(problem):
                    assert request_id is not None
                    if request_id in shard.waiting:
                        shard.waiting.remove(request_id)
                    self._answer(request_id, problem)
                    if problem is None and message is not None:
                        self._remember(shard, message)
                case member.AnswerWaiting(_, problem):
                    for waiting in [w for w in shard.waiting if w != request_id]:
                        shard.waiting.remove(waiting)
                        self._answer(waiting, problem)
                case member.LoadRanges(version, transfers):
                    assert message is not None
                    self._remember(shard, message)
                    self._load(shard, version, transfers, now_ms)
                case member.StopLoading():
                    self._stop(shard.loading, now_ms)
                    shard.loading = None
                case member.Discard(_, ranges) | member.Release(ranges):
                    self._drop(shard, ranges)
                case member.Adopt(_, ranges, _):
                    self._adopt(shard, ranges, now_ms)
        self._note(shard, now_ms)

    def _note(self, shard: _Shard, now_ms: int) -> None:
        """Bring in line when the shard is due, whether it counts, and what is remembered of it."""
        map_id, state = shard.map_id, shard.state
        self._alarms.set(map_id, member.next_deadline_ms(state))
        self._outside.pop(map_id, None)
        if not isinstance(state, member.Outside):
            self._shards[map_id] = shard
            return
        if shard.counted:
            shard.counted = False
            self._close_session(now_ms)
        self._stop(shard.seeking, now_ms)
        self._retries.set(map_id, None)
        self._shards.pop(map_id, None)
        if state != member.Outside():
            self._shards[map_id] = _Shard(map_id, state)
            self._outside[map_id] = None
        while len(self._outside) > MAX_REMEMBERED_SHARD_MAPS:
            forgotten = next(iter(self._outside))
            del self._outside[forgotten], self._shards[forgotten]

    def _stop(self, directive: str | None, now_ms: int) -> None:
        """Stop loads that nobody waits for."""
        if directive is not None and self._directives.pop(directive, None) is not None:
            self._loads.withdraw(directive, now_ms)

    def _answer(self, request_id: int, problem: Problem | None) -> None:
        self._work.emit(done(request_id, 200) if problem is None else refuse(request_id, problem))

    @staticmethod
    def _remember(shard: _Shard, message: ReshardPlan) -> None:
        if message.compat_id is not None and message.scope_id is not None:
            shard.compat_id, shard.scope_id = message.compat_id, message.scope_id
        shard.keys = message.block_keys or shard.keys

    # Blocks of ranges

    def _blocks_of(self, shard: _Shard, ranges: Iterable[Range]) -> list[int]:
        """Return the complete blocks of ranges that have a key."""
        model = self._models.get(shard.compat_id)
        if model is None:
            return []
        size, known = model.block_tokens, len(shard.keys)
        spans = (range(-(-first // size), min(end // size, known)) for first, end in ranges)
        return [block for span in spans for block in span]

    def _name_of(self, shard: _Shard, block: int) -> BlockName:
        return BlockName(shard.compat_id, shard.scope_id, shard.keys[block])

    def _load(self, shard: _Shard, version: int, transfers: tuple[Transfer, ...], now_ms: int) -> None:
        sources = {
            block: (transfer.source,)
            for transfer in transfers
            for block in self._blocks_of(shard, (transfer.tokens,))
        }
        state = shard.state
        assert isinstance(state, member.Loading)
        shard.loading = self._submit(shard, sources, state.plan.deadline_ms, now_ms, version)
        if shard.loading is None:
            self._advance(shard, member.LoadFailed(version), now_ms)

    def _submit(
        self,
        shard: _Shard,
        sources: Mapping[int, tuple[str, ...]],
        duration_ms: int,
        now_ms: int,
        version: int | None,
    ) -> str | None:
        """Load blocks into the tiers here; return the directive, or None where it was not taken."""
        directive = self._random_bytes(16).hex()
        self._directives[directive] = (shard.map_id, version)
        taken = self._loads.begin(
            directive,
            {shard.keys[block]: named for block, named in sources.items()},
            model=self._models[shard.compat_id],
            scope_id=shard.scope_id,
            duration_ms=duration_ms,
            now_ms=now_ms,
            cause=shard.cause,
        )
        if not taken:
            del self._directives[directive]
        return directive if taken else None

    def load_ended(self, ended: prefetch.Ended, now_ms: int) -> bool:
        """Take note that loads have ended, where they were of a shard."""
        map_id, version = self._directives.pop(ended.directive, ("", None))
        shard = self._shards.get(map_id)
        if shard is None:
            return False
        if version is None:
            shard.seeking = None
            self._fill(shard, now_ms)
        elif ended.state is DirectiveState.COMPLETE and isinstance(shard.state, member.Loading):
            fetched = (transfer.tokens for transfer in shard.state.plan.member.fetch)
            self._keep(shard, self._blocks_of(shard, fetched))
            self._advance(shard, member.Loaded(version), now_ms)
        else:
            self._advance(shard, member.LoadFailed(version), now_ms)
        return True

    def _keep(self, shard: _Shard, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block not in shard.kept:
                shard.kept.add(block)
                self._blocks.keep(self._name_of(shard, block))

    def _adopt(self, shard: _Shard, ranges: tuple[Range, ...], now_ms: int) -> None:
        """Bring the blocks of the ranges owned now into the engine; load those that are not here."""
        blocks = self._blocks_of(shard, ranges)
        self._keep(shard, blocks)
        shard.wanted, shard.retries = set(blocks), 0
        self._seek(shard, now_ms)
        self._fill(shard, now_ms)

    def _missing(self, shard: _Shard) -> list[int]:
        """Return the blocks that belong in the engine and are in no tier here."""
        wanted = sorted(shard.wanted - shard.in_engine)
        return [block for block in wanted if self._blocks.tier_of(self._name_of(shard, block)) is None]

    def _seek(self, shard: _Shard, now_ms: int) -> None:
        """Load what is owned and not here, from whoever has it."""
        missing = self._missing(shard)
        if missing and shard.seeking is None:
            shard.seeking = self._submit(
                shard, dict.fromkeys(missing, ()), self._settings.shard_load_ms, now_ms, None
            )

    # Into the engine

    def _fill(self, shard: _Shard, now_ms: int) -> None:
        """Bring what is here into the engine in its turn; look later for what is not."""
        missing = self._missing(shard)
        here = sorted(shard.wanted - shard.in_engine - set(missing))
        self._queue.extend((shard.map_id, block) for block in here)
        self._pump(now_ms)
        if missing and shard.seeking is None:
            self._try_again(shard, now_ms)

    def _try_again(self, shard: _Shard, now_ms: int) -> None:
        if self._retries.of(shard.map_id) is None:
            wait_ms = min(_FIRST_RETRY_MS << min(shard.retries, 10), _LAST_RETRY_MS)
            self._retries.set(shard.map_id, now_ms + wait_ms)
            shard.retries += 1

    def _pump(self, now_ms: int) -> None:
        while self._queue and len(self._moving) < _AT_A_TIME:
            map_id, block = place = self._queue.popleft()
            shard = self._shards.get(map_id)
            if shard is None or not shard.lacks(block) or place in self._moving:
                continue
            name = self._name_of(shard, block)
            tier = self._blocks.tier_of(name)
            if tier is None:
                self._try_again(shard, now_ms)
                continue
            self._moving.add(place)
            buffer = self._work.new_buffer()
            job = self._work.job(_ReadFor(map_id, block, name, self._tokens(shard, block), buffer))
            self._work.emit(ReadBlock(job, buffer, name, tier))

    def _drop(self, shard: _Shard, ranges: tuple[Range, ...]) -> None:
        for block in self._blocks_of(shard, ranges):
            shard.wanted.discard(block)
            if block in shard.in_engine:
                shard.in_engine.remove(block)
                self._work.emit(engine.DropShard(shard.map_id, self._tokens(shard, block)))
            if block in shard.kept:
                shard.kept.remove(block)
                self._blocks.let_go(self._name_of(shard, block))

    def _tokens(self, shard: _Shard, block: int) -> Range:
        size = self._models[shard.compat_id].block_tokens
        return block * size, (block + 1) * size

    def job_ended(self, purpose: Purpose, item: JobDone | JobFailed, now_ms: int) -> None:
        """Take in how a job of a shard has ended."""
        if isinstance(purpose, _AttendFor):
            self._attended(purpose, item)
            return
        shard = self._shards.get(purpose.map_id)
        wanted = shard is not None and shard.lacks(purpose.block)
        if isinstance(purpose, _ReadFor):
            self._read(purpose, item, wanted, now_ms)
        else:
            self._loaded(purpose, item, wanted)
        if (purpose.map_id, purpose.block) not in self._moving:
            if shard is not None and shard.lacks(purpose.block):
                self._try_again(shard, now_ms)
            self._pump(now_ms)

    def _read(self, read: _ReadFor, item: JobDone | JobFailed, wanted: bool, now_ms: int) -> None:
        """Hand a block that was read to the engine, where it is what was stored."""
        sound = check_read(self._work, self._blocks, read.name, item, now_ms)
        if sound and wanted:
            job = self._work.job(_LoadFor(read.map_id, read.block, read.tokens, read.buffer))
            self._work.emit(engine.LoadShard(job, read.map_id, read.tokens, read.buffer))
            return
        self._moving.remove((read.map_id, read.block))
        self._work.free(read.buffer)

    def _loaded(self, load: _LoadFor, item: JobDone | JobFailed, wanted: bool) -> None:
        self._moving.remove((load.map_id, load.block))
        self._work.free(load.buffer)
        if isinstance(item, JobFailed):
            self._work.observe("kvsp_instance_shard_load_failures")
        elif wanted:
            shard = self._shards[load.map_id]
            shard.in_engine.add(load.block)
            shard.retries = 0
        else:
            self._work.emit(engine.DropShard(load.map_id, load.tokens))

    def request_ended(self, request_id: int) -> None:
        """Take note that a request is gone."""
        for map_id in self._alarms:
            waiting = self._shards[map_id].waiting
            if request_id in waiting:
                waiting.remove(request_id)

    # Time

    def next_deadline_ms(self) -> int | None:
        """Return when `time_passed` is next due, or None."""
        return earliest(self._alarms.next_ms(), self._retries.next_ms())

    def time_passed(self, now_ms: int) -> None:
        """Let deadlines that have come take effect."""
        for map_id in self._alarms.take_due(now_ms):
            self._advance(self._shards[map_id], member.TimerFired(), now_ms)
        for map_id in self._retries.take_due(now_ms):
            self._seek(self._shards[map_id], now_ms)
            self._fill(self._shards[map_id], now_ms)
