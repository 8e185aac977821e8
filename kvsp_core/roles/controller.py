"""The Placement Controller (role PC): it places requests, keeps sessions, and moves them when an instance
fails.

`Controller` composes the fleet of instances, the ledgers of sessions and placement. What it promises is
durable first: every answer and call that reveals a state follows the `Persist` of that state, and after a
restart the controller goes on from its store. Work that comes in floods, such as the sessions of a lost
instance, is taken up a few at a time.

Protocol sections "Instance Status and Lifecycle", "Placement Inputs", "Prefetch Directives" and "Session
Checkpoints and Migration"; requirements ST-2, ST-4, LC-1, LC-2, LC-5, PL-1 to PL-3, CP-2, MG-1, MG-3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, assert_never
from uuid import UUID

import attrs

from kvsp_core.answers import read_outcome
from kvsp_core.ext_messages import (
    InstanceInfo,
    InstanceListing,
    PlacementRequest,
    ScopedPrefix,
    SessionListing,
    SessionMove,
)
from kvsp_core.machines import session as sessions
from kvsp_core.machines.alarms import Alarms, earliest
from kvsp_core.machines.fleet import Fleet
from kvsp_core.machines.placement import Candidate, Placement
from kvsp_core.machines.session import Owner, SessionLedger
from kvsp_core.messages import (
    CheckpointRecorded,
    PrefetchDirective,
    ResumeRequest,
)
from kvsp_core.problems import BAD_REQUEST, CONFLICT, NOT_FOUND, UNAVAILABLE, Problem
from kvsp_core.records import SessionCheckpoint, Shard, ShardMap
from kvsp_core.resources import (
    ChangeInstanceState,
    DeleteSession,
    EndShardMap,
    GetSession,
    GetShardMap,
    ListInstances,
    ListSessions,
    MoveSession,
    Operation,
    PlaceRequest,
    PrefetchBlocks,
    RecordCheckpoint,
    ReportStatus,
    ResumeSession,
    RoleName,
    SplitContext,
)
from kvsp_core.roles.authorization import Permission, Policy, authorize
from kvsp_core.roles.controller_instances import Instances, StateCall
from kvsp_core.roles.controller_maps import AbortCall, CommitCall, PlanCall, ShardMaps
from kvsp_core.roles.controller_placement import (
    DescriptorCall,
    Found,
    LookupCall,
    Match,
    Placements,
    ProbeCall,
    Subject,
    blocks_to_load,
    placement_answer,
)
from kvsp_core.roles.controller_sessions import Sessions
from kvsp_core.roles.controller_settings import ControllerSettings
from kvsp_core.roles.controller_shards import serve_shards
from kvsp_core.roles.controller_store import (
    MapContext,
    stored_epochs,
    stored_maps,
    stored_sessions,
)
from kvsp_core.roles.role import (
    AnswerReceived,
    BodyArrived,
    BodyFailed,
    CallFailed,
    Effect,
    Input,
    RequestEnded,
    RequestReceived,
    Stored,
    TimerFired,
)
from kvsp_core.roles.serving import Asked, Desk, answer, done, refuse
from kvsp_core.roles.work import Work

__all__ = ["Controller", "ControllerSettings"]


# What calls and placements are for


@attrs.frozen
class _ForRequest:
    """A request to be placed. Its number alone tells it from others: by that it is cancelled."""

    request_id: int
    client: str = attrs.field(eq=False)
    deadline_ms: int = attrs.field(eq=False)


@attrs.frozen
class _ForSession:
    session: str = attrs.field(repr=False)
    epoch: int


@attrs.frozen
class _ResumeCall:
    session: str = attrs.field(repr=False)
    epoch: int


@attrs.frozen
class _PrefetchCall:
    instance: str


@attrs.frozen
class _Waiting:
    """A request that no instance could take when it came."""

    purpose: _ForRequest
    subject: Subject


_NO_INSTANCE: Final = Problem(UNAVAILABLE, "no instance can take the request now; try again")
_BUSY: Final = Problem(UNAVAILABLE, "the controller has more to place than it can; try again")
_FULL: Final = Problem(UNAVAILABLE, "the controller keeps as many sessions as it can; try again later")
_NO_SESSION: Final = Problem(NOT_FOUND, "no such session; it has ended or was never opened")
_NO_CLASS: Final = Problem(
    CONFLICT,
    "deterministic: no instance says whose results it repeats; ask without it, or name classes of instances "
    "in the controller's configuration",
)


class Controller:
    """The controller at one base URI.

    `stored` is what its store holds, `random_bytes` gives octets for identifiers. `fleet` may be shared with
    an index in the same process.
    """

    def __init__(
        self,
        *,
        base_uri: str,
        policy: Policy,
        settings: ControllerSettings,
        random_bytes: Callable[[int], bytes],
        stored: Stored,
        fleet: Fleet | None = None,
    ) -> None:
        self.base_uri = base_uri
        self.policy = policy
        self._settings = settings
        self._random_bytes = random_bytes
        self._stored: Stored | None = stored
        self._work = Work()
        self._fleet = fleet or Fleet()
        self._sessions = Sessions(
            self._work,
            times=settings.times,
            max_sessions=settings.max_sessions,
            max_resumes=settings.max_resumes,
        )
        self._placements = Placements(
            self._work, self._fleet, settings.placement, lambda: self.policy, self._may_serve
        )
        self._maps = ShardMaps(
            self._work,
            self._fleet,
            self._may_serve,
            deadline_ms=settings.reshard_deadline_ms,
            call_timeout_ms=settings.call_timeout_ms,
        )
        self._instances = Instances(
            self._work,
            self._fleet,
            lost=self._instance_lost,
            back=self._maps.meet,
            forgotten=self._placements.forget,
            may_report=lambda instance: RoleName.INSTANCE in self.policy.roles(instance),
            min_active=settings.min_active,
            call_timeout_ms=settings.call_timeout_ms,
        )
        self._desk = Desk([RoleName.CONTROLLER], self._allow)
        self._placed_at_ms: dict[str, int] = {}
        # Requests that no instance could take, by the number of the request; when each is given up.
        self._waiting: dict[int, _Waiting] = {}
        self._alarms: Alarms[int] = Alarms()
        self._again: deque[int] = deque()  # those of them to be tried again
        self._more_at_ms: int | None = None  # when there is more to be taken up

    # The role

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Go on from what was stored."""
        stored, self._stored = self._stored or {}, None
        epochs = stored_epochs(stored)
        for instance, epoch in epochs.items():
            self._instances.restore(instance, epoch, now_ms)
        for session in stored_sessions(stored):
            effects = self._sessions.restore(session, now_ms)
            self._follow(session.record.session, effects)
        for stored_map in stored_maps(stored):
            self._maps.restore(stored_map, now_ms)
        for owner in self._sessions.owners():
            # A later incarnation was seen, but the crash came before its sessions were moved.
            if epochs.get(owner.instance, owner.incarnation) != owner.incarnation:
                self._lose(owner, now_ms)
        self._obey_policy(now_ms)
        return self._end(now_ms)

    def purge(self, now_ms: int) -> tuple[Effect, ...]:
        """End the sessions and shard maps of the scopes that the policy says are purged, and delete them.

        Move the sessions and ranges of instances that it puts out of their scope, and forget the failed
        instances that it does not name any more.
        """
        self._obey_policy(now_ms)
        self._instances.forget_retired(now_ms)
        return self._end(now_ms)

    def limit(self, *, min_active: int, prefetch: bool, open_by_checkpoint: bool) -> None:
        """Decide by these settings from now on; see `ControllerSettings`."""
        self._settings = attrs.evolve(
            self._settings, min_active=min_active, prefetch=prefetch, open_by_checkpoint=open_by_checkpoint
        )
        self._instances.min_active = min_active

    def _obey_policy(self, now_ms: int) -> None:
        purged = self._sessions.purge(self.policy.purged, now_ms)
        for ledger, effects in (*purged, *self._sessions.displace(self._may_serve, now_ms)):
            self._follow(ledger.record.session, effects)
        self._maps.obey_policy(self.policy.purged, now_ms)

    def next_deadline_ms(self) -> int | None:
        """Return when the controller next wants `TimerFired`, or None. It may be early."""
        return earliest(
            self._fleet.next_deadline_ms(),
            self._sessions.next_deadline_ms(),
            self._maps.next_deadline_ms(),
            self._placements.next_deadline_ms(),
            self._alarms.next_ms(),
            self._more_at_ms,
        )

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Take one input in; return what is to be done."""
        match item:
            case RequestReceived() | BodyArrived() | BodyFailed() | RequestEnded():
                if isinstance(item, RequestEnded):
                    self._request_ended(item.request_id)
                asked, effects = self._desk.take(item)
                self._work.emit(*effects)
                if asked is not None:
                    self._serve(asked, now_ms)
            case AnswerReceived() | CallFailed():
                purpose = self._work.calls.pop(item.call_id, None)
                if purpose is not None:
                    self._called(purpose, item, now_ms)
            case TimerFired():
                self._tick(now_ms)
            case _:
                pass  # a controller has no blocks, no jobs and no engine
        return self._end(now_ms)

    def reshard(
        self, map_id: str, shards: tuple[Shard, ...], context: MapContext, now_ms: int
    ) -> tuple[Effect, ...]:
        """Split a context over instances, or split it anew; no shards end the map. `divide` chooses shards.

        For the program that embeds the controller: the protocol leaves to its policy when a group is
        resized. Raises `LocalProtocolError` while a change of the map is under way, and for an instance that
        cannot take part: not active, or without the scope or the model.
        """
        self._maps.begin(map_id, shards, context, now_ms)
        return self._end(now_ms)

    def shard_map(self, map_id: str) -> ShardMap | None:
        """Return the authoritative version of a shard map, or None."""
        return self._maps.get(map_id)

    def _end(self, now_ms: int) -> tuple[Effect, ...]:
        """Take up what waits, now that something may have changed, and return all effects.

        A few at a time, also where no answer of the index is needed: others have their turn in between.
        """
        if self._instances.take_changed():
            self._sessions.retry_waiting(now_ms)
            self._maps.repair(now_ms)
            self._again = deque(self._waiting)
        self._more_at_ms = None
        for _ in range(self._settings.max_resumes):
            if not self._again or len(self._placements) >= self._settings.max_resumes:
                break
            waiting = self._waiting.pop(self._again.popleft(), None)
            if waiting is not None:
                self._place(waiting.purpose, waiting.subject, now_ms)
        else:
            self._more_at_ms = now_ms
        for _ in range(self._settings.max_resumes):
            if (ledger := self._sessions.next_orphan()) is None:
                break
            self._move(ledger, now_ms)
        else:
            self._more_at_ms = now_ms
        return self._work.take()

    def _tick(self, now_ms: int) -> None:
        self._instances.tick(now_ms)
        for ledger, effects in self._sessions.fire(now_ms):
            self._follow(ledger.record.session, effects)
        self._maps.fire(now_ms)
        self._placements.fire(now_ms)
        for request_id in self._alarms.take_due(now_ms):
            if self._waiting.pop(request_id, None) is not None:
                self._work.emit(refuse(request_id, _NO_INSTANCE))

    def _allow(self, client: str, operation: Operation) -> Problem | None:
        return authorize(self.policy, client, operation)

    def _request_ended(self, request_id: int) -> None:
        """Take note that a request is gone: one that waits for an instance is not placed any more."""
        self._waiting.pop(request_id, None)
        self._alarms.set(request_id, None)
        self._placements.cancel(_ForRequest(request_id, "", 0))

    def _serve(self, asked: Asked, now_ms: int) -> None:
        match asked.operation:
            case ReportStatus():
                self._instances.report(asked, now_ms)
            case RecordCheckpoint():
                self._checkpoint(asked, now_ms)
            case PlaceRequest():
                self._place_request(asked, now_ms)
            case GetSession() | DeleteSession() | MoveSession():
                self._session(asked, now_ms)
            case ListInstances():
                infos = tuple(map(self._instance_info, self._fleet.instances()))
                self._work.emit(answer(asked.request_id, InstanceListing(instances=infos)))
            case ListSessions():
                listing = SessionListing(sessions=tuple(map(Sessions.info, self._sessions)))
                self._work.emit(answer(asked.request_id, listing))
            case ChangeInstanceState():
                self._instances.change_state(asked, now_ms)
            case SplitContext() | GetShardMap() | EndShardMap():
                self._work.emit(serve_shards(self._maps, asked, self.policy, now_ms))
            case _:
                raise AssertionError("the router gives a controller its own resources only")

    def _called(self, purpose: Any, item: AnswerReceived | CallFailed, now_ms: int) -> None:
        match purpose:
            case LookupCall() | DescriptorCall() | ProbeCall():
                found = self._placements.handle(purpose, item, now_ms)
                if found is not None:
                    self._found(found, now_ms)
            case _ResumeCall(session, epoch):
                self._resume_answered(session, epoch, item, now_ms)
            case PlanCall() | CommitCall() | AbortCall():
                self._maps.handle(purpose, item, now_ms)
            case StateCall():
                self._instances.state_answered(purpose, item, now_ms)
            case _PrefetchCall():
                good = isinstance(item, AnswerReceived) and item.response.is_success
                self._work.observe("kvsp_prefetch_directives", outcome="accepted" if good else "refused")
            case _:
                raise AssertionError("no other calls are made")

    def _may_serve(self, instance: str, scope_id: str) -> bool:
        return self.policy.may(instance, Permission.READ, scope_id)

    # Instances

    def _instance_lost(self, owner: Owner, now_ms: int) -> None:
        self._lose(owner, now_ms)
        self._maps.lose(owner.instance, now_ms)

    def _instance_info(self, instance: str) -> InstanceInfo:
        epoch = self._fleet.epoch_of(instance) or 0
        return InstanceInfo(
            instance=instance,
            state=self._fleet.kind_of(instance).value,
            wanted_state=self._fleet.wanted_of(instance),
            epoch=epoch,
            sessions=self._sessions.owned_by(Owner(instance, epoch)),
            status=self._fleet.status_of(instance),
        )

    # Placement

    def _place_request(self, asked: Asked, now_ms: int) -> None:
        request = asked.body
        assert isinstance(request, PlacementRequest)
        for prefix in request.prefixes:
            problem = authorize(self.policy, asked.client, asked.operation, scope_id=prefix.scope_id)
            if problem is not None:
                self._work.emit(refuse(asked.request_id, problem))
                return
        if len(self._placements) + len(self._waiting) >= self._settings.max_pending_placements:
            self._work.emit(refuse(asked.request_id, _BUSY))
            return
        purpose = _ForRequest(asked.request_id, asked.client, now_ms + self._settings.placement_wait_ms)
        subject = Subject(
            compat_id=request.compat_id,
            prefixes=request.prefixes,
            token_count=request.token_count,
            deterministic=request.deterministic,
            avoid=frozenset(request.avoid),
            cause=asked.traceparent,
        )
        self._place(purpose, subject, now_ms)

    def _place(self, purpose: _ForRequest | _ForSession, subject: Subject, now_ms: int) -> None:
        found = self._placements.begin(subject, purpose)
        if found is not None:
            self._found(found, now_ms)

    def _found(self, found: Found, now_ms: int) -> None:
        """Choose an instance, now that everything that can be known is."""
        placement = self._placements.choose(found.subject, found.match, now_ms)
        match found.purpose:
            case _ForRequest():
                self._place_found(found.purpose, found, placement, now_ms)
            case _ForSession(session, epoch):
                self._move_found(session, epoch, found.subject, placement, now_ms)

    def _place_found(self, purpose: _ForRequest, found: Found, placement: Placement, now_ms: int) -> None:
        chosen = placement.chosen
        scope_id = found.subject.prefixes[0].scope_id
        problem = authorize(self.policy, purpose.client, PlaceRequest(), scope_id=scope_id)
        if problem is not None:  # since it was asked
            self._work.emit(refuse(purpose.request_id, problem))
            return
        if self._sessions.is_full:
            self._work.emit(refuse(purpose.request_id, _FULL))
            return
        if chosen is None and self._placements.lacks_class(found.subject):
            self._work.emit(refuse(purpose.request_id, _NO_CLASS))
            return
        if chosen is None or self._fleet.is_failing(chosen.instance):
            self._wake_one(found.subject, now_ms)
        if chosen is None:
            # PL-3: a deployment that watches for this starts an instance, which gets the request, and a
            # directive to load its prefix, as soon as it reports.
            self._work.observe("kvsp_instances_wanted")
            self._waiting[purpose.request_id] = _Waiting(purpose, found.subject)
            self._alarms.set(purpose.request_id, purpose.deadline_ms)
            return
        epoch = self._fleet.epoch_of(chosen.instance)
        assert epoch is not None
        ledger = self._open(purpose.client, found.subject, Owner(chosen.instance, epoch), now_ms)
        reference = self._random_bytes(16).hex()
        self._work.emit(
            answer(purpose.request_id, placement_answer(ledger.record, reference, placement), 201)
        )
        self._work.observe("kvsp_placement_fetched_tokens", chosen.fetched_tokens)
        self._work.observe("kvsp_placement_recomputed_tokens", chosen.recomputed_tokens)
        for miss in placement.misses:
            first, end = miss.blocks
            self._work.observe("kvsp_missed_blocks", end - first, reason=miss.reason.value)
        if self._settings.prefetch and chosen.fetched_tokens:
            self._prefetch(chosen, reference, found.subject, found.match)

    def _open(self, client: str, subject: Subject, owner: Owner, now_ms: int) -> SessionLedger:
        session = str(UUID(bytes=self._random_bytes(16), version=4))
        ledger = self._sessions.open(
            session=session,
            client=client,
            compat_id=subject.compat_id,
            scope_id=subject.prefixes[0].scope_id,
            deterministic=subject.deterministic,
        )
        ledger.cause = subject.cause
        opened = sessions.Open(owner, self._placements.class_of(owner.instance))
        self._follow(session, self._sessions.apply(ledger, opened, now_ms))
        self._placed_at_ms[session] = now_ms
        return ledger

    def _wake_one(self, subject: Subject, now_ms: int) -> None:
        scope_id = subject.prefixes[0].scope_id
        self._instances.wake_one(subject.compat_id, lambda name: self._may_serve(name, scope_id), now_ms)

    def _prefetch(self, chosen: Candidate, reference: str, subject: Subject, match: Match) -> None:
        """Have the chosen instance load the leading blocks it does not hold (LC-2: it is active)."""
        blocks = blocks_to_load(chosen.instance, match)
        if not blocks:
            return
        directive = PrefetchDirective(
            directive=str(UUID(bytes=self._random_bytes(16), version=4)),
            request_ref=reference,
            scope_id=match.prefix.scope_id,
            compat_id=subject.compat_id,
            blocks=blocks,
            layer_order="ascending",
            deadline_ms=self._settings.prefetch_deadline_ms,
            lease_ms=self._settings.prefetch_lease_ms,
        )
        self._work.call(
            chosen.instance,
            PrefetchBlocks(),
            directive,
            purpose=_PrefetchCall(chosen.instance),
            timeout_ms=self._settings.call_timeout_ms,
            cause=subject.cause,
        )

    # Sessions

    def _checkpoint(self, asked: Asked, now_ms: int) -> None:
        checkpoint, operation = asked.body, asked.operation
        assert isinstance(checkpoint, SessionCheckpoint)
        assert isinstance(operation, RecordCheckpoint)
        if checkpoint.session != operation.session:
            problem: Problem | None = Problem(BAD_REQUEST, "session: is not the session of the path")
        else:
            scope_id = checkpoint.scope_id
            problem = authorize(self.policy, asked.client, operation, scope_id=scope_id)
        if problem is not None:
            self._work.emit(refuse(asked.request_id, problem))
            return
        ledger = self._sessions.get(operation.session) or self._opened_by(asked.client, checkpoint, now_ms)
        if ledger is None or authorize(
            self.policy, asked.client, operation, scope_id=ledger.record.scope_id
        ):  # a session of a scope that is not the client's is, for it, not there
            self._work.emit(refuse(asked.request_id, _NO_SESSION))
            return
        event = sessions.CheckpointReceived(asked.client, checkpoint)
        effects = self._sessions.apply(ledger, event, now_ms)
        if any(isinstance(effect, sessions.Acknowledge) for effect in effects):
            ledger.cause = asked.traceparent or ledger.cause
        self._follow(operation.session, effects, asked.request_id)

    def _opened_by(self, client: str, checkpoint: SessionCheckpoint, now_ms: int) -> SessionLedger | None:
        """Open a session by its first checkpoint, where the deployment allows that (decision W19)."""
        incarnation = self._fleet.epoch_of(client)
        allowed = self._settings.open_by_checkpoint and checkpoint.epoch == 1 and not self._sessions.is_full
        if not allowed or incarnation is None or not self._fleet.is_assignable(client):
            return None
        ledger = self._sessions.open(
            session=checkpoint.session,
            client=client,
            compat_id=checkpoint.compat_id,
            scope_id=checkpoint.scope_id,
            deterministic=checkpoint.sampler.deterministic,
        )
        opened = sessions.Open(Owner(client, incarnation), self._placements.class_of(client))
        self._follow(checkpoint.session, self._sessions.apply(ledger, opened, now_ms))
        return ledger

    def _session(self, asked: Asked, now_ms: int) -> None:
        operation = asked.operation
        assert isinstance(operation, GetSession | DeleteSession | MoveSession)
        ledger = self._sessions.get(operation.session)
        if ledger is None:
            self._work.emit(refuse(asked.request_id, _NO_SESSION))
            return
        scope_id, owner = ledger.record.scope_id, ledger.record.client
        if authorize(self.policy, asked.client, operation, scope_id=scope_id, owner=owner) is not None:
            self._work.emit(refuse(asked.request_id, _NO_SESSION))  # as if there were none
            return
        if isinstance(operation, MoveSession):
            assert isinstance(asked.body, SessionMove)
            self._leave(ledger, asked.body.epoch, now_ms)
        if not isinstance(operation, DeleteSession):
            if asked.client == owner:
                ledger.cause = asked.traceparent or ledger.cause
                self._sessions.ask_about(ledger)
            self._work.emit(answer(asked.request_id, Sessions.info(ledger)))
            return
        self._measure(ledger, now_ms)
        self._follow(operation.session, self._sessions.apply(ledger, sessions.Close(), now_ms))
        self._work.emit(done(asked.request_id))

    def _leave(self, ledger: SessionLedger, epoch: int, now_ms: int) -> None:
        """Have a session go on elsewhere whose engine failed in this epoch, as where its instance fails."""
        if ledger.owner is not None and ledger.record.epoch == epoch:
            effects = self._sessions.apply(ledger, sessions.OwnerLost(ledger.owner), now_ms)
            self._follow(ledger.record.session, effects)

    def _measure(self, ledger: SessionLedger, now_ms: int) -> None:
        """Take the time the session took into the mean of its instance, where it stayed there."""
        placed_ms = self._placed_at_ms.pop(ledger.record.session, None)
        if placed_ms is not None and ledger.owner is not None and ledger.record.epoch == 1:
            self._placements.served(ledger.owner.instance, 1000 * (now_ms - placed_ms))

    def _lose(self, owner: Owner, now_ms: int) -> None:
        for ledger, effects in self._sessions.lose(owner, now_ms):
            self._follow(ledger.record.session, effects)

    def _follow(
        self, session: str, effects: Iterable[sessions.Effect], request_id: int | None = None
    ) -> None:
        """Do what a session's ledger wants, persistence excepted; its answer goes to this request."""
        for effect in effects:
            match effect:
                case sessions.Acknowledge(epoch, offset):
                    assert request_id is not None
                    recorded = CheckpointRecorded(epoch=epoch, output_offset=offset)
                    self._work.emit(answer(request_id, recorded))
                case sessions.Refused(problem):
                    if request_id is not None:
                        self._work.emit(refuse(request_id, problem))
                case sessions.SendResume(instance, epoch):
                    self._send_resume(session, instance, epoch)
                case sessions.Resumed():
                    self._work.observe("kvsp_migrations", outcome="resumed")
                case sessions.Failed(moving=moving):
                    if moving:
                        self._work.observe("kvsp_migrations", outcome="failed")
                    self._placed_at_ms.pop(session, None)
                case sessions.Forget():
                    self._placed_at_ms.pop(session, None)
                case (
                    sessions.PersistSession()
                    | sessions.PersistPrompt()
                    | sessions.AppendOutput()
                    | sessions.NeedTarget()
                ):
                    pass  # `Sessions` has seen to it
                case _:
                    assert_never(effect)

    def _move(self, ledger: SessionLedger, now_ms: int) -> None:
        """Find an instance for a session that has lost its own."""
        record = ledger.record
        lost = record.tried[-1] if record.tried else None
        subject = Subject(
            compat_id=record.compat_id,
            prefixes=(ScopedPrefix(scope_id=record.scope_id, block_keys=ledger.prompt_blocks),),
            tail_tokens=ledger.tokens_to_place,
            deterministic=record.deterministic,
            alike=(record.results or lost) if record.deterministic else None,
            avoid=frozenset(record.tried),
            cause=ledger.cause,
        )
        self._place(_ForSession(record.session, record.epoch), subject, now_ms)

    def _move_found(
        self, session: str, epoch: int, subject: Subject, placement: Placement, now_ms: int
    ) -> None:
        ledger = self._sessions.get(session)
        orphaned = sessions.SessionKind.ORPHANED
        if ledger is None or ledger.kind is not orphaned or ledger.record.epoch != epoch:
            return
        chosen = placement.chosen
        if chosen is None or self._fleet.is_failing(chosen.instance):
            self._wake_one(subject, now_ms)
        if chosen is None:
            self._work.observe("kvsp_instances_wanted")
            self._sessions.wait(ledger, now_ms)
            return
        instance = chosen.instance
        incarnation = self._fleet.epoch_of(instance)
        assert incarnation is not None
        event = sessions.TargetChosen(Owner(instance, incarnation), self._placements.class_of(instance))
        self._follow(session, self._sessions.apply(ledger, event, now_ms))

    def _send_resume(self, session: str, instance: str, epoch: int) -> None:
        ledger = self._sessions.get(session)
        checkpoint = ledger.checkpoint() if ledger else None
        assert checkpoint is not None
        self._work.call(
            instance,
            ResumeSession(session),
            ResumeRequest(epoch=epoch, checkpoint=checkpoint),
            purpose=_ResumeCall(session, epoch),
            timeout_ms=self._settings.call_timeout_ms,
            cause=ledger.cause if ledger else None,
        )

    def _resume_answered(
        self, session: str, epoch: int, item: AnswerReceived | CallFailed, now_ms: int
    ) -> None:
        accepted = isinstance(item, AnswerReceived) and read_outcome(item.response, item.body) is None
        ledger = self._sessions.get(session)
        if ledger is None or accepted:
            return  # it confirms by its first checkpoint, or its time runs out
        self._follow(session, self._sessions.apply(ledger, sessions.ResumeFailed(epoch), now_ms))
