"""What is refused changes nothing: every resource of every role, asked by clients of each role and
permission.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import attrs
import pytest

from kvsp_core.ext_messages import (
    AttendRequest,
    OutputRequest,
    PlacementRequest,
    ScopedPrefix,
    SplitRequest,
)
from kvsp_core.heads import Request
from kvsp_core.identity import Scope
from kvsp_core.messages import (
    LeaseRenewal,
    LeaseRequest,
    LookupRequest,
    PrefetchBlock,
    PrefetchDirective,
    ReshardAbort,
    ResumeRequest,
    StateChange,
)
from kvsp_core.records import InstanceStatus, ReplicaRecord, Residency, Sampler, SessionCheckpoint
from kvsp_core.registries import BLOCK_MEDIA_TYPE
from kvsp_core.resources import RESOURCES, Resource, RoleName, request_for
from kvsp_core.roles.authorization import Permission, Policy, ScopeRules, authorize
from kvsp_core.roles.controller import Controller, ControllerSettings
from kvsp_core.roles.controller_placement import PlacementSettings
from kvsp_core.roles.descriptors import Descriptors
from kvsp_core.roles.holder import Holder
from kvsp_core.roles.holdings import TierLimits
from kvsp_core.roles.index import Index
from kvsp_core.roles.instance import Instance, InstanceSettings
from kvsp_core.roles.role import (
    BodyArrived,
    Effect,
    JobDone,
    Load,
    ReceiveBody,
    RequestEnded,
    RequestReceived,
    Respond,
    Role,
)
from kvsp_core.roles.work import Numbers
from kvsp_sim.snapshot import frozen
from tests.unit.roles.holder_kit import DESCRIPTOR
from tests.unit.roles.test_authorization import MEMBERS, typed

HERE, PC, IS, THIRD = (f"https://{name}.example/kvsp/" for name in ("here", "pc", "is", "third"))
SCOPE, OTHER = Scope(bytes(32)), Scope(bytes(range(32)))
KEY, COMPAT = MEMBERS["block_key"], DESCRIPTOR.compat_id
SAMPLER: Final = Sampler(method="greedy", params={"max_tokens": 4}, seed=1, step=0, deterministic=False)
PRINCIPALS: Final = tuple(itertools.product(RoleName, (None, *Permission)))
NOBODY: Final = "https://nobody.example/kvsp/"


def uri_of(role: RoleName, permission: Permission | None) -> str:
    return f"https://{role.value}-{permission.value if permission else 'none'}.example/kvsp/"


def policy() -> Policy:
    """Return a policy in which each role has a principal with each permission in `SCOPE`, and one with none.

    In the scope of others nobody may anything.
    """
    allowed = {p.value: frozenset(uri_of(role, p) for role in RoleName) for p in Permission}
    roles = {uri_of(role, permission): [role] for role, permission in PRINCIPALS}
    roles |= {HERE: [RoleName.INSTANCE, RoleName.HOLDER], PC: [RoleName.CONTROLLER], IS: [RoleName.INDEX]}
    return Policy(roles, {SCOPE.scope_id: ScopeRules(**allowed), OTHER.scope_id: ScopeRules()})


def octets(count: int) -> bytes:
    return bytes(range(count))


def descriptors() -> Descriptors:
    known = Descriptors()
    known.add(DESCRIPTOR)
    return known


def holder(numbers: Numbers | None = None) -> Holder:
    return Holder(
        base_uri=HERE,
        policy=policy(),
        tiers={"host": TierLimits(capacity_bytes=10_000)},
        random_bytes=octets,
        now_ms=0,
        index_uris=(IS,),
        descriptors=descriptors(),
        numbers=numbers,
    )


def instance() -> Instance:
    numbers = Numbers()
    return Instance(
        InstanceSettings(base_uri=HERE, controller_uri=PC, index_uris=(IS,), epoch=1),
        models={COMPAT: DESCRIPTOR},
        scopes={SCOPE.scope_id: SCOPE, OTHER.scope_id: OTHER},
        blocks=holder(numbers),
        numbers=numbers,
        policy=policy(),
        random_bytes=octets,
        now_ms=0,
    )


def controller() -> Controller:
    settings = ControllerSettings(
        placement=PlacementSettings(index_uris=(IS,), descriptors={COMPAT: DESCRIPTOR})
    )
    return Controller(base_uri=PC, policy=policy(), settings=settings, random_bytes=octets, stored={})


def started(role: RoleName) -> Role:
    """Return a role that has found out what its tiers hold: nothing."""
    made: Role
    match role:
        case RoleName.INDEX:
            made = Index(base_uri=IS, policy=policy(), descriptors=descriptors())
        case RoleName.HOLDER:
            made = holder()
        case RoleName.INSTANCE:
            made = instance()
        case _:
            made = controller()
    for effect in made.start(0):
        if isinstance(effect, Load):
            made.handle(JobDone(effect.job_id), 0)
    return made


def checkpoint(scope_id: str) -> SessionCheckpoint:
    return SessionCheckpoint(
        session=MEMBERS["session"],
        epoch=1,
        compat_id=COMPAT,
        scope_id=scope_id,
        prompt_blocks=(),
        prompt_tail=(1, 2),
        generated=(),
        output_offset=0,
        sampler=SAMPLER,
    )


def record(scope_id: str, named: str) -> ReplicaRecord:
    return ReplicaRecord(
        block_key=KEY,
        compat_id=COMPAT,
        scope_id=scope_id,
        holder=named,
        codec=1,
        size=64,
        digest="sha-256:" + "0" * 64,
        residency=(Residency(tier="host", layers=(0, 1)),),
        ttl_ms=1000,
    )


def body_of(row: Resource, scope_id: str, named: str) -> Any:
    """Return a body that is in order, and says this scope where a body does."""
    match row.operation.__name__:
        case "Lookup":
            return LookupRequest(scope_id=scope_id, compat_id=COMPAT, block_keys=(KEY,))
        case "PublishReplica":
            return record(scope_id, named)
        case "CreateLease":
            return LeaseRequest(block_keys=(KEY,), ttl_ms=100)
        case "RenewLease":
            return LeaseRenewal(ttl_ms=100)
        case "ReportStatus":
            return InstanceStatus(
                instance=named,
                epoch=1,
                state="active",
                running=0,
                queued=0,
                batch_size=1,
                kv_utilization=0.0,
                prefill_tokens_per_s=1,
                decode_tokens_per_s=1,
                links=(),
                ttl_ms=1000,
            )
        case "RecordCheckpoint":
            return checkpoint(scope_id)
        case "PrefetchBlocks":
            return PrefetchDirective(
                directive="d",
                scope_id=scope_id,
                compat_id=COMPAT,
                blocks=(PrefetchBlock(block_key=KEY, sources=(THIRD,)),),
                deadline_ms=50,
                lease_ms=50,
            )
        case "ResumeSession":
            return ResumeRequest(epoch=2, checkpoint=attrs.evolve(checkpoint(scope_id), epoch=2))
        case "ReshardGroup":
            return ReshardAbort(map="m", abort=2)
        case "ChangeState" | "ChangeInstanceState":
            return StateChange(state="draining")
        case "PutDescriptor":
            return DESCRIPTOR.canonical_json
        case "PlaceRequest":
            prefix = ScopedPrefix(scope_id=scope_id, block_keys=(KEY,))
            return PlacementRequest(compat_id=COMPAT, prefixes=(prefix,), token_count=8)
        case "StreamOutput":
            return OutputRequest(
                from_index=0, epoch=1, compat_id=COMPAT, scope_id=scope_id, prompt=(1, 2), sampler=SAMPLER
            )
        case "SplitContext":
            return SplitRequest(
                compat_id=COMPAT,
                scope_id=scope_id,
                block_keys=(KEY,),
                block_tokens=4,
                token_count=6,
                instances=(HERE,),
            )
        case "Attend":
            return AttendRequest(version=1, layer=0, queries=bytes(16))
        case _:
            return None


@attrs.frozen
class Asking:
    """A request as a client makes it, and whether it may: as far as the head says, and in all."""

    client: str
    head: Request
    body: bytes
    refused_by_head: bool
    allowed: bool


def askings(row: Resource) -> list[Asking]:
    known, found = policy(), []
    clients = (NOBODY, *(uri_of(*principal) for principal in PRINCIPALS))
    itself_or_not = (True, False) if {"{holder_id}", "{instance_id}"} & set(row.path.split("/")) else (True,)
    scopes = (SCOPE.scope_id, OTHER.scope_id)
    for client, scope_id, itself in itertools.product(clients, scopes, itself_or_not):
        named = client if itself else THIRD
        operation = typed(row, named)
        if "{scope_id}" in row.path:
            operation = type(operation)(COMPAT, scope_id, KEY)  # type: ignore[call-arg]
        elif "{compat_id}" in row.path:
            operation = type(operation)(COMPAT)  # type: ignore[call-arg]
        head, body = request_for(
            operation,
            body_of(row, scope_id, named),
            length=64 if row.body_type == BLOCK_MEDIA_TYPE else None,
        )
        refused = authorize(known, client, operation) is not None
        allowed = authorize(known, client, operation, scope_id=scope_id) is None
        found.append(Asking(client, head, body, refused, allowed))
    return found


CASES = [(role, row) for row in RESOURCES for role in row.roles]


@pytest.mark.requirement("SE-1", "PF-5", "LK-3", "BR-7")
@pytest.mark.parametrize(
    ("name", "row"), CASES, ids=[f"{role.value}-{row.method}-{row.path}" for role, row in CASES]
)
def test_a_refusal_changes_nothing_and_comes_from_the_head_where_that_says_it(
    name: RoleName, row: Resource
) -> None:
    role, refused = started(name), 0
    before = frozen(role, 0)
    for number, asking in enumerate(askings(row)):
        effects = role.handle(RequestReceived(number, asking.client, asking.head), 0)
        if asking.refused_by_head:
            assert [type(effect) for effect in effects] == [Respond], asking.client
        elif any(isinstance(effect, ReceiveBody) for effect in effects):
            effects = role.handle(BodyArrived(number, asking.body), 0)
        status = answered(effects)
        role.handle(RequestEnded(number, True, 1), 0)
        if status is not None and status >= 400:
            refused += 1
            assert frozen(role, 0) == before, f"{asking.client}: {status}"
        else:
            assert asking.allowed, f"{asking.client}: {status}"
            role = started(name)
    assert refused


def answered(effects: tuple[Effect, ...]) -> int | None:
    found = [effect.response.status for effect in effects if isinstance(effect, Respond)]
    return found[0] if found else None
