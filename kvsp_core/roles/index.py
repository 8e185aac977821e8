"""The Index Service: it records who holds which block and answers which prefix of a prompt is held (role IS).

`Index` composes the replica index with descriptors by content (decision W30) and, where instances report to
it or a controller in the same process shares its fleet, with estimates for targets (LK-2, decision W25). It
holds soft state only: after a restart it is empty, and the holders' refreshes fill it again.

Protocol sections "Publishing and Withdrawing Replicas" and "Lookup"; requirements PB-1, PB-2, LK-1 to LK-4,
SE-2.
"""

from __future__ import annotations

from typing import Final, assert_never

from kvsp_core.bodies import encode
from kvsp_core.identity import component_id
from kvsp_core.limits import MAX_LOOKUP_TARGETS
from kvsp_core.machines import fleet as fleets
from kvsp_core.machines import replica_index as replicas
from kvsp_core.machines.alarms import earliest
from kvsp_core.machines.fleet import Fleet
from kvsp_core.machines.placement import fetch_estimate, recompute_us
from kvsp_core.machines.replica_index import ReplicaIndex
from kvsp_core.machines.replica_match import Match
from kvsp_core.messages import LookupRequest, PublishAnswer, StatusAnswer, TargetEstimate, Withdrawal
from kvsp_core.problems import BAD_REQUEST, NOT_FOUND, TOO_LARGE, Problem
from kvsp_core.records import InstanceStatus, ReplicaRecord
from kvsp_core.resources import (
    DescribeIndex,
    GetDescriptor,
    Lookup,
    Operation,
    PublishReplica,
    PutDescriptor,
    ReportStatus,
    RoleName,
    WithdrawReplica,
)
from kvsp_core.roles.authorization import NO_SCOPE, Policy, authorize
from kvsp_core.roles.descriptors import Descriptors
from kvsp_core.roles.role import (
    BodyArrived,
    BodyFailed,
    Effect,
    Input,
    Observe,
    RequestEnded,
    RequestReceived,
    TimerFired,
)
from kvsp_core.roles.serving import Asked, Desk, answer, done, refuse

__all__ = ["Index"]

_NOT_LISTED: Final = Problem(NOT_FOUND, "no such record; it was withdrawn or has expired")


class Index:
    """The index at one base URI.

    `policy` says who may do what. `fleet` is the controller's where one runs in the same process; without it
    the index keeps one of its own, of the instances that report to it.
    """

    def __init__(
        self,
        *,
        base_uri: str,
        policy: Policy,
        replica_index: ReplicaIndex | None = None,
        fleet: Fleet | None = None,
        descriptors: Descriptors | None = None,
    ) -> None:
        self.base_uri = base_uri
        self.policy = policy
        self._replicas = replica_index or ReplicaIndex()
        self._fleet = fleet or Fleet()
        self._owns_fleet = fleet is None
        self._descriptors = descriptors or Descriptors()
        self._desk = Desk([RoleName.INDEX], self._allow)

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Begin: there is nothing to do."""
        return ()

    def next_deadline_ms(self) -> int | None:
        """Return when the index next wants `TimerFired`, or None."""
        fleet_ms = self._fleet.next_deadline_ms() if self._owns_fleet else None
        return earliest(self._replicas.next_deadline_ms(), fleet_ms)

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Take one input in; return what is to be done."""
        match item:
            case RequestReceived() | BodyArrived() | BodyFailed() | RequestEnded():
                asked, effects = self._desk.take(item)
                return effects if asked is None else self._serve(asked, now_ms)
            case TimerFired():
                return self._tick(now_ms)
            case _:
                return ()  # an index calls nobody and has no jobs

    def _allow(self, client: str, operation: Operation) -> Problem | None:
        return authorize(self.policy, client, operation)

    def _serve(self, asked: Asked, now_ms: int) -> tuple[Effect, ...]:
        match asked.operation:
            case Lookup():
                return self._look_up(asked, now_ms)
            case PublishReplica():
                return self._publish(asked, now_ms)
            case WithdrawReplica():
                return self._withdraw(asked, now_ms)
            case ReportStatus():
                return self._report(asked, now_ms)
            case PutDescriptor() | GetDescriptor():
                return self._descriptors.serve(asked)
            case DescribeIndex():
                return (answer(asked.request_id, self._replicas.describe()),)
            case _:
                raise AssertionError("the router gives an index its own resources only")

    def limit(self, *, max_ttl_ms: int, max_lookup_keys: int) -> None:
        """Grant and answer within these limits from now on."""
        self._replicas.limit(max_ttl_ms=max_ttl_ms, max_keys=max_lookup_keys)

    def go_by(self, fleet: Fleet) -> None:
        """Estimate from now on by what a controller in the same process knows of instances."""
        self._fleet, self._owns_fleet = fleet, False

    # Lookup

    def _look_up(self, asked: Asked, now_ms: int) -> tuple[Effect, ...]:
        request = asked.body
        assert isinstance(request, LookupRequest)
        if problem := authorize(self.policy, asked.client, asked.operation, scope_id=request.scope_id):
            return (refuse(asked.request_id, problem),)
        if len(request.targets) > MAX_LOOKUP_TARGETS:
            problem = Problem(TOO_LARGE, f"targets: at most {MAX_LOOKUP_TARGETS}; ask again for the others")
            return (refuse(asked.request_id, problem),)
        event = replicas.Lookup(
            compat_id=request.compat_id,
            scope_id=request.scope_id,
            block_keys=request.block_keys,
            holders=request.holders,
        )
        (effect,) = self._replicas.handle(event, now_ms)
        if isinstance(effect, replicas.Refused):
            return (refuse(asked.request_id, effect.problem),)
        assert isinstance(effect, replicas.Found)
        match = effect.match
        targets = self._estimates(request, match, now_ms) if request.targets else b""
        return (answer(asked.request_id, match.json(targets)), *self._observed(request, match))

    def _observed(self, request: LookupRequest, match: Match) -> tuple[Effect, ...]:
        """Count hits and misses (OP-1); in tokens where the descriptor says how many a block has."""
        effects: list[Effect] = [Observe("kvsp_index_lookup_requests")]
        if match.matched:
            effects.append(Observe("kvsp_index_lookup_hits"))
        if descriptor := self._descriptors.get(request.compat_id):
            block_tokens = descriptor.block_tokens
            effects.append(Observe("kvsp_lookup_requested_tokens", match.requested * block_tokens))
            effects.append(Observe("kvsp_lookup_hit_tokens", match.matched * block_tokens))
        return tuple(effects)

    def _estimates(self, request: LookupRequest, match: Match, now_ms: int) -> bytes:
        """Return the JSON of the targets that enough is known of (LK-2)."""
        descriptor = self._descriptors.get(request.compat_id)
        if descriptor is None:
            return b"[]"
        if self._owns_fleet:
            self._fleet.handle(fleets.TimerFired(), now_ms)
        sources = match.sources()
        estimates = []
        for target in dict.fromkeys(request.targets):
            status = self._fleet.status_of(target)
            if status is None:
                continue
            fetch = fetch_estimate(target, status.links, sources, layers=descriptor.layers)
            computing_us = recompute_us(match.matched * descriptor.block_tokens, status.prefill_tokens_per_s)
            if computing_us is None or fetch.blocks < match.matched:
                continue
            estimates.append(
                encode(TargetEstimate(instance=target, fetch_us=fetch.fetch_us, recompute_us=computing_us))
            )
        return b"[" + b",".join(estimates) + b"]"

    # Publishing and withdrawing

    def _publish(self, asked: Asked, now_ms: int) -> tuple[Effect, ...]:
        record, operation = asked.body, asked.operation
        assert isinstance(record, ReplicaRecord)
        assert isinstance(operation, PublishReplica)
        if problem := authorize(self.policy, asked.client, operation, scope_id=record.scope_id):
            return (refuse(asked.request_id, problem),)
        event = replicas.Publish(
            client=asked.client, holder_id=operation.holder_id, block_key=operation.block_key, record=record
        )
        (effect,) = self._replicas.handle(event, now_ms)
        if isinstance(effect, replicas.Refused):
            return (refuse(asked.request_id, effect.problem),)
        assert isinstance(effect, replicas.Published)
        status = 201 if effect.created else 200
        return (answer(asked.request_id, PublishAnswer(ttl_ms=effect.ttl_ms), status),)

    def _withdraw(self, asked: Asked, now_ms: int) -> tuple[Effect, ...]:
        operation, body = asked.operation, asked.body
        assert isinstance(operation, WithdrawReplica)
        digest = body.digest if isinstance(body, Withdrawal) else None
        # Whether a record exists in a scope is told only to those who may withdraw it, not even by the time
        # that it takes.
        scope_id = self._replicas.scope_of(operation.holder_id, operation.block_key, now_ms)
        problem = authorize(self.policy, asked.client, operation, scope_id=scope_id or NO_SCOPE)
        if scope_id is None or problem is not None:
            return (refuse(asked.request_id, _NOT_LISTED),)
        event = replicas.Withdraw(holder_id=operation.holder_id, block_key=operation.block_key, digest=digest)
        (effect,) = self._replicas.handle(event, now_ms)
        if isinstance(effect, replicas.Refused):
            return (refuse(asked.request_id, effect.problem),)
        reason = "digest" if digest is not None else "evicted"
        return (done(asked.request_id), Observe("kvsp_index_withdrawals", labels=(("reason", reason),)))

    # Instances that report here too

    def _report(self, asked: Asked, now_ms: int) -> tuple[Effect, ...]:
        status, operation = asked.body, asked.operation
        assert isinstance(status, InstanceStatus)
        assert isinstance(operation, ReportStatus)
        if component_id(status.instance) != operation.instance_id:
            problem = Problem(BAD_REQUEST, "instance: must be the one that the path names")
            return (refuse(asked.request_id, problem),)
        if self._owns_fleet:
            for effect in self._fleet.handle(fleets.ReceiveStatus(status), now_ms):
                if isinstance(effect, fleets.Refused):
                    return (refuse(asked.request_id, effect.problem),)
        return (answer(asked.request_id, StatusAnswer(state=status.state)),)

    def _tick(self, now_ms: int) -> tuple[Effect, ...]:
        if self._owns_fleet:
            self._fleet.handle(fleets.TimerFired(), now_ms)
        effects = []
        for effect in self._replicas.handle(replicas.TimerFired(), now_ms):
            match effect:
                case replicas.Expired(records=records):
                    effects.append(Observe("kvsp_index_expired_records", records))
                case replicas.Published() | replicas.Withdrawn() | replicas.Found() | replicas.Refused():
                    pass
                case _:
                    assert_never(effect)
        return tuple(effects)
