"""The Inference Instance: it serves sessions with an engine, and moves their caches where they are needed
(role II).

`Instance` composes what an instance does, each part in a file of its own: sessions and their output
(`instance_sessions`), loads for directives and resumes (`instance_loads`), copies of what it computes
(`instance_copies`), shards (`instance_shards`), and its lifecycle. The holder of its own tiers serves at the
same base URI beside it, with requests, calls and jobs of its own.

A prefetch directive never delays an admitted request: few blocks load at a time, into tiers, and the engine
hears of nothing until a request is here (PF-2).

Requirements ST-1, ST-3, LC-1, LC-3, LC-4, PF-1 to PF-7, CP-1, CP-3, MG-2, MG-3, RS-2, RS-3, RS-5; decisions
W14, W15, W18 to W22, W31, W32.

An engine that hangs reports nothing (`engine_watch`): then what it was asked for ends as if it had failed, it
is asked for no more, and the status says `failing`, until it reports something. So that it has something to
report it is given a sequence of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import attrs

from kvsp_core.answers import read_answer
from kvsp_core.errors import RemoteProtocolError
from kvsp_core.ext_messages import AttendRequest, OutputRequest
from kvsp_core.identity import CompatibilityDescriptor, Scope, component_id
from kvsp_core.machines import lifecycle, prefetch
from kvsp_core.machines.alarms import earliest
from kvsp_core.machines.lifecycle import InstanceLifecycle
from kvsp_core.machines.prefetch import PrefetchLimits, PrefetchTable
from kvsp_core.messages import PrefetchDirective, ReshardMessage, ResumeRequest, StateChange, StatusAnswer
from kvsp_core.problems import INCOMPATIBLE, NOT_FOUND, SCOPE_DENIED, STALE_EPOCH, Problem
from kvsp_core.records import InstanceStatus, Sampler
from kvsp_core.resources import (
    Attend,
    ChangeState,
    GetDirective,
    Operation,
    PrefetchBlocks,
    Refusal,
    ReportStatus,
    ReshardGroup,
    ResumeSession,
    RoleName,
    Router,
    StreamOutput,
    resource_of,
)
from kvsp_core.roles import engine, instance_copies, instance_loads, instance_sessions, instance_shards
from kvsp_core.roles.authorization import Permission, Policy, authorize
from kvsp_core.roles.engine_watch import EngineWatch
from kvsp_core.roles.instance_copies import Copies
from kvsp_core.roles.instance_loads import Loads
from kvsp_core.roles.instance_meter import Meter
from kvsp_core.roles.instance_sessions import Sessions
from kvsp_core.roles.instance_settings import InstanceSettings
from kvsp_core.roles.instance_shards import Shards
from kvsp_core.roles.local_blocks import LocalBlocks
from kvsp_core.roles.role import (
    AnswerReceived,
    BlockName,
    BlockReceived,
    BodyArrived,
    BodyFailed,
    CallFailed,
    Effect,
    Input,
    JobDone,
    JobFailed,
    LayerArrived,
    OutputReady,
    RequestEnded,
    RequestReceived,
    TimerFired,
)
from kvsp_core.roles.serving import Asked, Desk, answer, done, refuse
from kvsp_core.roles.work import Numbers, Work

__all__ = ["Instance", "InstanceSettings"]

_OWN_LOADS: Final = PrefetchLimits(
    pending_directives=1024, pending_blocks=1 << 22, directive_blocks=1 << 20, kept_ms=1
)
"""Of loads for sessions and shards, which are as large as those are, and which nobody asks about."""

_PROBE: Final = engine.StartSequence(
    sequence=0,  # those of sessions begin with 1
    tokens=(0,),
    cached_tokens=0,
    sampler=Sampler(method="greedy", params={"max_tokens": 1}, seed=0, step=0, deterministic=True),
)
"""What an engine that is silent is asked for: whatever it says to that, it is alive."""


@attrs.frozen
class _StatusFor:
    seq: int


@attrs.frozen
class _Notice:
    """A call whose answer changes nothing."""


class Instance:
    """An instance at one base URI, and the holder of its tiers beside it.

    `models` are the descriptors of what the engine computes, by Compatibility ID, `scopes` the scopes whose
    key the instance holds, by Scope ID. `policy` says who may ask for what, and whose blocks may be used
    (SE-1, SE-2). `numbers` are shared with the holder.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        *,
        models: Mapping[str, CompatibilityDescriptor],
        scopes: Mapping[str, Scope],
        blocks: LocalBlocks,
        numbers: Numbers,
        policy: Policy,
        random_bytes: Callable[[int], bytes],
        now_ms: int,
    ) -> None:
        self.base_uri = settings.base_uri
        self.settings = settings
        self._models = models
        self._scopes = scopes
        self._blocks = blocks
        self._policy = policy
        self._work = Work(numbers)
        self._desk = Desk([RoleName.INSTANCE, RoleName.HOLDER], self._allow)
        self._router = Router([RoleName.INSTANCE, RoleName.HOLDER])
        self._beside: set[int] = set()  # requests that are the holder's
        self._lifecycle = InstanceLifecycle(
            random_bytes=random_bytes,
            now_ms=now_ms,
            ttl_ms=settings.status_ttl_ms,
            sleep_after_ms=settings.sleep_after_ms,
        )
        self._stopped = False
        self._load = -1.0  # as the lifecycle was last told
        self._meter = Meter(
            prefill_tokens_per_s=settings.prefill_tokens_per_s,
            decode_tokens_per_s=settings.decode_tokens_per_s,
            links=settings.links,
        )
        self._watch = EngineWatch(settings.engine_silence_ms)
        self._prefetches = self._loads_of("prefetch", settings.prefetch)
        self._loads = self._loads_of("loads", _OWN_LOADS)
        self._copies = Copies(
            self._work,
            blocks,
            settings,
            cause_of=self._cause_of,
        )
        self._sessions = Sessions(
            self._work,
            blocks,
            self._loads,
            self._prefetches,
            self._copies,
            self._meter,
            self._watch,
            settings=settings,
            models=models,
            scopes=scopes,
            shared_scopes=self._shared_scopes,
            open_session=self._open_session,
            close_session=self._close_session,
            random_bytes=random_bytes,
        )
        self._shards = Shards(
            self._work,
            blocks,
            self._loads,
            self._watch,
            settings=settings,
            models=models,
            scopes=scopes,
            open_session=self._open_session,
            close_session=self._close_session,
            random_bytes=random_bytes,
        )

    def _loads_of(self, name: str, bounds: PrefetchLimits) -> Loads:
        return Loads(
            name,
            self._work,
            self._blocks,
            self._meter,
            settings=self.settings,
            table=PrefetchTable(bounds),
            policy=lambda: self._policy,
        )

    def _shared_scopes(self, client: str) -> Iterable[str]:
        """Return the shared scopes that a client may read and whose key is here (decision W24)."""
        for scope_id in self._scopes:
            if self.policy.scope(scope_id).shared and self.policy.may(client, Permission.READ, scope_id):
                yield scope_id

    def _cause_of(self, session: str) -> str | None:
        known = self._sessions.get(session)
        return None if known is None else known.cause

    def _allow(self, client: str, operation: Operation, scope_id: str | None = None) -> Problem | None:
        return authorize(self.policy, client, operation, scope_id=scope_id)

    @property
    def policy(self) -> Policy:
        """Who may ask for what; a new one holds at once, for the holder beside too."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = self._blocks.policy = policy

    # The loop

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Begin: the holder restores its tiers, and the first status goes out."""
        self._work.emit(*self._blocks.start(now_ms))
        self._live(lifecycle.TimerFired(), now_ms)
        return self._done(now_ms)

    def stop(self, now_ms: int) -> tuple[Effect, ...]:
        """Be told that the process is to end: drain, then withdraw the records of the blocks held here."""
        self._live(lifecycle.Stop(), now_ms)
        return self._done(now_ms)

    def purge(self, now_ms: int) -> tuple[Effect, ...]:
        """Give up sessions of the scopes that the policy says are purged; delete what is held of them.

        End the streams of clients that may not have them any more.
        """
        self._sessions.give_up(self.policy.purged, now_ms)
        self._sessions.put_out(self._allow, now_ms)
        self._work.emit(*self._blocks.purge(now_ms))
        return self._done(now_ms)

    def limit(self, *, max_lease_ttl_ms: int, lease_quota_bytes: int, replica_ttl_ms: int) -> None:
        """Have the holder beside grant leases and publish records within these limits from now on."""
        self._blocks.limit(
            max_lease_ttl_ms=max_lease_ttl_ms,
            lease_quota_bytes=lease_quota_bytes,
            replica_ttl_ms=replica_ttl_ms,
        )

    def expire(self, tier: str, names: Iterable[BlockName], now_ms: int) -> tuple[Effect, ...]:
        """Delete blocks that a tier has kept for as long as it may."""
        self._work.emit(*self._blocks.expire(tier, names, now_ms))
        return self._done(now_ms)

    @property
    def safe_to_stop(self) -> bool:
        """Whether it was told to stop, has nothing left to do and is not listed at the index any more."""
        return self._stopped and self._blocks.safe_to_stop

    @property
    def engine_is_silent(self) -> bool:
        """Whether its engine has work and has reported nothing for too long."""
        return self._watch.silent

    @property
    def is_fenced(self) -> bool:
        """Whether a later incarnation is known (ST-4): this one does nothing more, and is to end."""
        return self._lifecycle.kind is lifecycle.InstanceKind.FENCED

    def next_deadline_ms(self) -> int | None:
        """Return when the instance next wants `TimerFired`, or None."""
        return earliest(
            self._lifecycle.next_deadline_ms(),
            self._watch.next_deadline_ms(),
            self._blocks.next_deadline_ms(),
            self._prefetches.table.next_deadline_ms(),
            self._loads.table.next_deadline_ms(),
            self._sessions.next_deadline_ms(),
            self._copies.next_deadline_ms(),
            self._shards.next_deadline_ms(),
        )

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Take one input in; return what is to be done."""
        self._watch.heard(item, now_ms)
        match item:
            case RequestReceived():
                self._received(item, now_ms)
            case BodyArrived() | BodyFailed():
                self._desk_takes(item, now_ms)
            case OutputReady(request_id):
                if request_id in self._beside:
                    self._work.emit(*self._blocks.handle(item, now_ms))
                else:
                    self._sessions.output_ready(request_id, now_ms)
            case RequestEnded():
                self._request_ended(item, now_ms)
            case AnswerReceived() | BlockReceived() | CallFailed():
                self._call_ended(item, now_ms)
            case JobDone() | JobFailed():
                self._job_ended(item, now_ms)
            case LayerArrived():
                if not any(each.layer_arrived(item, now_ms) for each in (self._prefetches, self._loads)):
                    self._work.emit(*self._blocks.handle(item, now_ms))
            case engine.Prefilled() | engine.TokensDecoded() | engine.BlockComputed():
                self._sessions.engine_event(item, now_ms)
                if isinstance(item, engine.TokensDecoded) and self._lifecycle.engine_failures:
                    self._live(lifecycle.ReportEngine(drawn=True), now_ms)
            case engine.SequenceEnded():
                self._sessions.engine_event(item, now_ms)
                if item.reason == "error":
                    self._engine_failed(now_ms)
                elif item.reason == "refused":
                    self._work.observe("kvsp_engine_refusals")
                if item.sequence == _PROBE.sequence:
                    self._work.emit(engine.Abort(item.sequence))
            case TimerFired():
                self._tick(now_ms)
            case _:
                self._work.emit(*self._blocks.handle(item, now_ms))
        return self._done(now_ms)

    def _done(self, now_ms: int) -> tuple[Effect, ...]:
        """Pass on what the holder has to tell, and loads that have ended, until nothing is new."""
        while True:
            if self._watch.silent:
                self._fail_what_waits(now_ms)
            news = self._blocks.take_news()
            for each in news:
                self._prefetches.take_news(each, now_ms)
                self._loads.take_news(each, now_ms)
                self._copies.take_news(each)
            ended = (*self._prefetches.take_ended(), *self._loads.take_ended())
            for directive in ended:
                if not self._shards.load_ended(directive, now_ms):
                    self._sessions.load_ended(directive.directive, now_ms)
            if not news and not ended:
                break
        load = min(1.0, self._lifecycle.sessions / self.settings.batch_size)
        if load != self._load:
            self._load = load
            self._live(lifecycle.ReportLoad(load), now_ms)
        effects = self._work.take()
        self._watch.told(effects, now_ms)
        return effects

    def _tick(self, now_ms: int) -> None:
        self._live(lifecycle.TimerFired(), now_ms)
        self._work.emit(*self._blocks.handle(TimerFired(), now_ms))
        self._prefetches.handle(prefetch.TimerFired(), now_ms)
        self._loads.handle(prefetch.TimerFired(), now_ms)
        self._sessions.time_passed(now_ms)
        self._copies.time_passed(now_ms)
        self._shards.time_passed(now_ms)
        if self._watch.fell_silent(now_ms):
            self._work.observe("kvsp_engine_silences")
            self._work.emit(engine.Abort(_PROBE.sequence), _PROBE)

    # Engine

    def _engine_failed(self, now_ms: int) -> None:
        self._work.observe("kvsp_engine_failures")
        self._live(lifecycle.ReportEngine(drawn=False), now_ms)

    def _fail_what_waits(self, now_ms: int) -> None:
        """End all that waits for the engine, as if it had failed."""
        self._shards.fail_steps()
        for _ in range(self._sessions.fail_all(now_ms)):
            self._engine_failed(now_ms)

    # Requests

    def _received(self, item: RequestReceived, now_ms: int) -> None:
        """Give a request for a resource of the holder to the holder, any other to the desk."""
        operation = self._router.route(item.request)
        if not isinstance(operation, Refusal) and RoleName.INSTANCE not in resource_of(operation).roles:
            self._beside.add(item.request_id)
            self._work.emit(*self._blocks.handle(item, now_ms))
        else:
            self._desk_takes(item, now_ms)

    def _desk_takes(self, item: RequestReceived | BodyArrived | BodyFailed, now_ms: int) -> None:
        if item.request_id in self._beside:
            self._work.emit(*self._blocks.handle(item, now_ms))
            return
        asked, effects = self._desk.take(item)
        self._work.emit(*effects)
        if asked is not None:
            self._serve(asked, now_ms)

    def _request_ended(self, item: RequestEnded, now_ms: int) -> None:
        if item.request_id in self._beside:
            self._beside.remove(item.request_id)
            self._work.emit(*self._blocks.handle(item, now_ms))
            return
        self._work.emit(*self._desk.take(item)[1])
        self._sessions.request_ended(item.request_id, now_ms)
        self._shards.request_ended(item.request_id)

    def _serve(self, asked: Asked, now_ms: int) -> None:
        request_id, body = asked.request_id, asked.body
        for scope_id in (getattr(body, "scope_id", None), self._scope_of(asked.operation)):
            problem = self._allow(asked.client, asked.operation, scope_id)
            if problem is not None:
                self._work.emit(refuse(request_id, problem))
                return
        match asked.operation:
            case PrefetchBlocks():
                assert isinstance(body, PrefetchDirective)
                self._prefetch(request_id, body, now_ms, asked.traceparent)
            case GetDirective(directive):
                status = self._prefetches.table.status(directive)
                unknown = Problem(NOT_FOUND, "no such directive; it was never sent, or is over for long")
                self._work.emit(refuse(request_id, unknown) if status is None else answer(request_id, status))
            case ResumeSession(session):
                assert isinstance(body, ResumeRequest)
                self._sessions.resume_session(request_id, session, body, now_ms, asked.traceparent)
            case StreamOutput(session):
                assert isinstance(body, OutputRequest)
                cause = asked.traceparent
                self._sessions.stream_output(request_id, asked.client, session, body, now_ms, cause)
            case ReshardGroup():
                assert isinstance(body, ReshardMessage)
                self._shards.reshard(request_id, body, now_ms, asked.traceparent)
            case Attend(map_id):
                assert isinstance(body, AttendRequest)
                self._shards.attend(request_id, map_id, body)
            case ChangeState():
                assert isinstance(body, StateChange)
                self._live(lifecycle.ChangeState(body.state), now_ms, request_id=request_id)
            case _:
                raise AssertionError("the router gives an instance its own resources only")

    def _scope_of(self, operation: Operation) -> str | None:
        """Return the scope of the session or shard map that a request names, where it is known here."""
        match operation:
            case StreamOutput(session):
                known = self._sessions.get(session)
                return None if known is None else known.scope
            case Attend(map_id):
                return self._shards.scope_of(map_id)
            case _:
                return None

    def _prefetch(self, request_id: int, message: PrefetchDirective, now_ms: int, cause: str | None) -> None:
        model = self._models.get(message.compat_id)
        if model is None:
            problem = Problem(INCOMPATIBLE, "compat_id: this instance computes another model")
            self._work.emit(refuse(request_id, problem))
            return
        if message.scope_id not in self._scopes:
            problem = Problem(SCOPE_DENIED, "scope_id: this instance is not in the scope")
            self._work.emit(refuse(request_id, problem))
            return
        for effect in self._prefetches.submit(message, model, now_ms, cause=cause):
            match effect:
                case prefetch.Accepted(directive):
                    location = f"prefetch/{directive}"
                    self._work.emit(done(request_id, 202, location=location))
                case prefetch.Rejected(_, problem):
                    self._work.emit(refuse(request_id, problem))
                case _:
                    pass

    # Calls and jobs

    def _call_ended(self, item: AnswerReceived | BlockReceived | CallFailed, now_ms: int) -> None:
        if item.call_id not in self._work.calls:
            self._work.emit(*self._blocks.handle(item, now_ms))
            return
        purpose = self._work.calls.pop(item.call_id)
        if isinstance(purpose, instance_loads.Purpose):
            loads = self._prefetches if purpose.table == self._prefetches.name else self._loads
            loads.completed(purpose, item, now_ms)
            return
        assert not isinstance(item, BlockReceived)
        if isinstance(purpose, instance_sessions.CheckpointFor):
            self._sessions.call_ended(purpose, item, now_ms)
        elif isinstance(purpose, instance_copies.Purpose):
            self._copies.call_ended(purpose, item, now_ms)
        elif isinstance(purpose, _StatusFor):
            self._live(_status_outcome(purpose.seq, item), now_ms)

    def _job_ended(self, item: JobDone | JobFailed, now_ms: int) -> None:
        if item.job_id not in self._work.jobs:
            self._work.emit(*self._blocks.handle(item, now_ms))
            return
        purpose = self._work.jobs.pop(item.job_id)
        if isinstance(purpose, instance_copies.ExportFor):
            self._sessions.exported(self._copies.job_ended(purpose, item, now_ms), now_ms)
        elif isinstance(purpose, instance_shards.Purpose):
            self._shards.job_ended(purpose, item, now_ms)
        else:
            self._sessions.job_ended(purpose, item, now_ms)

    # Lifecycle

    def _open_session(self, now_ms: int) -> Problem | None:
        return self._live(lifecycle.OpenSession(), now_ms)

    def _close_session(self, now_ms: int) -> None:
        self._live(lifecycle.CloseSession(), now_ms)

    def _live(self, event: lifecycle.Event, now_ms: int, *, request_id: int | None = None) -> Problem | None:
        """Let something happen to the lifecycle; return why it refuses, if it does."""
        refused: Problem | None = None
        for effect in self._lifecycle.handle(event, now_ms):
            match effect:
                case lifecycle.SendStatus():
                    self._meter.status_due(now_ms)
                    self._send_status(effect)
                case lifecycle.AnswerState(state):
                    if request_id is not None:
                        self._work.emit(answer(request_id, StatusAnswer(state=state)))
                case lifecycle.Refused(problem):
                    refused = problem
                    if request_id is not None:
                        self._work.emit(refuse(request_id, problem))
                case lifecycle.StateEntered(state):
                    self._work.observe("kvsp_instance_states_entered", 1, state=state)
                case lifecycle.SafeToStop():
                    self._stopped = True
                    self._work.emit(*self._blocks.stop(now_ms))
                case lifecycle.Fenced():
                    self._sessions.abort_all(now_ms)
                    self._blocks.fence()
        return refused

    def _send_status(self, effect: lifecycle.SendStatus) -> None:
        settings = self.settings
        running, queued = self._sessions.running, self._sessions.queued
        status = InstanceStatus(
            instance=self.base_uri,
            epoch=settings.epoch,
            state=effect.state,
            running=running,
            queued=queued,
            batch_size=settings.batch_size,
            kv_utilization=min(1.0, running / settings.batch_size),
            prefill_tokens_per_s=self._meter.prefill_tokens_per_s,
            decode_tokens_per_s=self._meter.decode_tokens_per_s,
            links=self._meter.links,
            requested_state=effect.requested_state,
            ttl_ms=settings.status_ttl_ms,
            compat_ids=tuple(sorted(self._models)),
            seq=effect.seq,
            numerics=settings.numerics,
            failing=effect.failing or self._watch.silent or None,
        )
        operation = ReportStatus(component_id(self.base_uri))
        self._work.call(
            settings.controller_uri,
            operation,
            status,
            purpose=_StatusFor(effect.seq),
            timeout_ms=effect.timeout_ms,
        )
        if settings.report_to_index:
            for part in settings.index_uris:
                self._work.call(part, operation, status, purpose=_Notice(), timeout_ms=effect.timeout_ms)


def _status_outcome(
    seq: int, item: AnswerReceived | CallFailed
) -> lifecycle.ReceiveStatusAnswer | lifecycle.FailStatus | lifecycle.RefuseStatus:
    if isinstance(item, CallFailed):
        return lifecycle.FailStatus(seq)
    try:
        found = read_answer(StatusAnswer, item.response, item.body)
    except RemoteProtocolError:
        return lifecycle.FailStatus(seq)
    if isinstance(found, Problem):
        return lifecycle.RefuseStatus(seq) if found.type == STALE_EPOCH else lifecycle.FailStatus(seq)
    return lifecycle.ReceiveStatusAnswer(seq, found.state)
