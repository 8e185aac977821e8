"""The index role as a playbook: what goes in, what must come out."""

from __future__ import annotations

import itertools
import json
from typing import Any

import attrs
import pytest

from kvsp_core.bodies import decode
from kvsp_core.ext_messages import IndexInfo
from kvsp_core.heads import Response
from kvsp_core.identity import CompatibilityDescriptor, component_id
from kvsp_core.limits import MAX_LOOKUP_TARGETS
from kvsp_core.machines.fleet import Fleet, ReceiveStatus
from kvsp_core.messages import LookupAnswer, LookupRequest, Withdrawal
from kvsp_core.records import InstanceStatus, Link, ReplicaRecord, Residency
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
    request_for,
)
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.index import Index
from kvsp_core.roles.role import BodyArrived, Observe, ReceiveBody, RequestReceived, Respond, TimerFired

H1, H2, PC, II = (f"https://{name}.example/kvsp/" for name in ("h1", "h2", "pc", "ii"))
OPERATOR = "spiffe://example/operator"
SCOPE, OTHER_SCOPE = "0f" * 16, "1e" * 16
DESCRIPTOR = CompatibilityDescriptor(
    model="m",
    model_digest="sha-256:" + "0" * 64,
    tokenizer_digest="sha-256:" + "1" * 64,
    layers=2,
    kv_heads=1,
    head_dim=8,
    kv_dtype="bf16",
    positional="rope",
    block_tokens=16,
)
KEYS = tuple(f"{number:064x}" for number in range(1, 9))
POLICY = Policy(
    {
        H1: [RoleName.HOLDER],
        H2: [RoleName.HOLDER],
        PC: [RoleName.CONTROLLER],
        II: [RoleName.INSTANCE],
        OPERATOR: [RoleName.OPERATOR],
    },
    {
        SCOPE: ScopeRules(read=[PC, II], publish=[H1, H2, II], withdraw=[II]),
        OTHER_SCOPE: ScopeRules(read=[H2], publish=[H2]),
    },
)
NUMBERS = itertools.count(1)


def record(key: str = KEYS[0], holder: str = H1, **members: Any) -> ReplicaRecord:
    known: dict[str, Any] = {
        "compat_id": DESCRIPTOR.compat_id,
        "scope_id": SCOPE,
        "codec": 1,
        "size": 1024,
        "digest": "sha-256:" + "cd" * 32,
        "residency": (Residency(tier="host", layers=(0, 1)),),
        "ttl_ms": 60_000,
    }
    return ReplicaRecord(block_key=key, holder=holder, **(known | members))


class Talk:
    """An index, and clients who ask it things."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.index = Index(base_uri="https://is.example/kvsp/", policy=POLICY)
        self.observed: list[Observe] = []
        assert self.index.start(0) == ()

    def ask(self, client: str, operation: Operation, body: object = None) -> tuple[Response, bytes]:
        """Ask and return the answer; the body is sent only where it is asked for."""
        request, octets = request_for(operation, body)
        number = next(NUMBERS)
        effects = self.index.handle(RequestReceived(number, client, request), self.now_ms)
        if isinstance(effects[0], ReceiveBody):
            assert effects[0].limit_bytes >= len(octets)
            effects = self.index.handle(BodyArrived(number, octets), self.now_ms)
        self.observed += [effect for effect in effects if isinstance(effect, Observe)]
        (respond,) = [effect for effect in effects if isinstance(effect, Respond)]
        assert respond.request_id == number
        assert isinstance(respond.body, bytes)
        assert respond.response.max_age_s is None
        return respond.response, respond.body

    def publish(self, client: str, published: ReplicaRecord) -> int:
        operation = PublishReplica(component_id(published.holder), published.block_key)
        return self.ask(client, operation, published)[0].status

    def look_up(self, client: str = PC, keys: tuple[str, ...] = KEYS[:3], **members: Any) -> LookupAnswer:
        body = LookupRequest(scope_id=SCOPE, compat_id=DESCRIPTOR.compat_id, block_keys=keys, **members)
        response, octets = self.ask(client, Lookup(), body)
        assert response.status == 200, octets
        return decode(LookupAnswer, octets)

    def withdraw(self, client: str, holder: str = H1, key: str = KEYS[0], digest: str | None = None) -> int:
        body = Withdrawal(digest=digest) if digest else None
        return self.ask(client, WithdrawReplica(component_id(holder), key), body)[0].status


@pytest.fixture
def talk() -> Talk:
    return Talk()


def kind_of(answer: tuple[Response, bytes]) -> tuple[int, str]:
    response, octets = answer
    return response.status, json.loads(octets)["type"].rpartition("#")[2]


@pytest.mark.requirement("PB-2", "LK-1")
def test_what_is_published_is_found_until_it_expires(talk: Talk) -> None:
    assert talk.publish(H1, record(KEYS[0])) == 201
    assert talk.publish(H1, record(KEYS[1])) == 201
    assert talk.publish(H1, record(KEYS[1])) == 200
    talk.now_ms = 10_000
    answer = talk.look_up()
    assert answer.matched == 2
    assert [block.block_key for block in answer.blocks] == list(KEYS[:2])
    assert answer.blocks[0].replicas == (record(KEYS[0], ttl_ms=50_000),)
    talk.now_ms = 60_000
    assert talk.look_up().matched == 0
    deadline_ms = talk.index.next_deadline_ms()
    assert deadline_ms is not None
    effects = talk.index.handle(TimerFired(), deadline_ms + 60_000)
    assert effects == (Observe("kvsp_index_expired_records", 2),)
    assert talk.index.next_deadline_ms() is None


@pytest.mark.requirement("OP-1")
def test_hits_and_misses_are_counted(talk: Talk) -> None:
    talk.look_up()
    assert talk.observed == [Observe("kvsp_index_lookup_requests")]
    talk.ask(H1, PutDescriptor(DESCRIPTOR.compat_id), DESCRIPTOR.canonical_json)
    talk.publish(H1, record(KEYS[0]))
    talk.look_up()
    assert talk.observed[1:] == [
        Observe("kvsp_index_lookup_requests"),
        Observe("kvsp_index_lookup_hits"),
        Observe("kvsp_lookup_requested_tokens", 3 * DESCRIPTOR.block_tokens),
        Observe("kvsp_lookup_hit_tokens", DESCRIPTOR.block_tokens),
    ]


@pytest.mark.requirement("PB-1", "SE-2")
@pytest.mark.parametrize(
    ("client", "published", "status", "kind"),
    [
        (H2, record(holder=H1), 403, "about:blank"),
        (PC, record(holder=PC), 403, "about:blank"),
        ("https://stranger.example/", record(holder=H1), 403, "about:blank"),
        (H1, record(holder=H1, scope_id=OTHER_SCOPE), 403, "kvsp-scope-denied"),
        (H1, record(holder=H1, scope_id="2d" * 16), 403, "kvsp-scope-denied"),
    ],
)
def test_only_a_holder_trusted_for_the_scope_publishes_and_for_itself(
    talk: Talk, client: str, published: ReplicaRecord, status: int, kind: str
) -> None:
    operation = PublishReplica(component_id(published.holder), published.block_key)
    assert kind_of(talk.ask(client, operation, published)) == (status, kind)
    assert talk.look_up().matched == 0


@pytest.mark.requirement("PB-1")
def test_path_and_record_must_agree(talk: Talk) -> None:
    assert talk.ask(H1, PublishReplica(component_id(H1), KEYS[1]), record(KEYS[0]))[0].status == 400
    assert talk.ask(H1, PublishReplica(component_id(H1), KEYS[0]), record(holder=H2))[0].status == 400


@pytest.mark.requirement("LK-3")
def test_a_client_without_the_scope_learns_nothing(talk: Talk) -> None:
    talk.publish(H1, record(KEYS[0]))
    body = LookupRequest(scope_id=SCOPE, compat_id=DESCRIPTOR.compat_id, block_keys=KEYS[:1])
    held = talk.ask(H2, Lookup(), body)
    assert kind_of(held) == (403, "kvsp-scope-denied")
    assert talk.ask(H2, Lookup(), attrs.evolve(body, block_keys=KEYS[5:6])) == held
    assert talk.look_up(keys=KEYS[:1], holders=(H1,)).matched == 1


def test_a_withdrawal_by_the_holder_and_again(talk: Talk) -> None:
    talk.publish(H1, record())
    assert talk.withdraw(H1) == 204
    assert talk.withdraw(H1) == 404
    assert talk.look_up().matched == 0


@pytest.mark.requirement("BR-8")
def test_a_bad_replica_is_withdrawn_on_the_holders_behalf_and_kept_out(talk: Talk) -> None:
    talk.publish(H1, record())
    assert talk.withdraw(II, digest="sha-256:" + "ee" * 32) == 404
    assert talk.withdraw(II, digest=record().digest) == 204
    assert talk.publish(H1, record()) == 409
    assert talk.publish(H1, record(digest="sha-256:" + "aa" * 32)) == 201


@pytest.mark.parametrize("client", [PC, H2, "https://stranger.example/"])
def test_others_may_not_withdraw_nor_learn_what_there_is(talk: Talk, client: str) -> None:
    talk.publish(H1, record())
    held = talk.ask(client, WithdrawReplica(component_id(H1), KEYS[0]))
    assert held == talk.ask(client, WithdrawReplica(component_id(H1), KEYS[7]))
    assert held[0].status in (403, 404)
    assert talk.look_up().matched == 1


@pytest.mark.requirement("LK-4")
def test_a_lookup_has_limits(talk: Talk) -> None:
    many = tuple(f"{number:064x}" for number in range(8193))
    body = LookupRequest(scope_id=SCOPE, compat_id=DESCRIPTOR.compat_id, block_keys=many)
    assert talk.ask(PC, Lookup(), body)[0].status == 413
    targets = tuple(f"https://t{number}.example/" for number in range(MAX_LOOKUP_TARGETS + 1))
    body = attrs.evolve(body, block_keys=KEYS[:1], targets=targets)
    assert talk.ask(PC, Lookup(), body)[0].status == 413


def status(**members: Any) -> InstanceStatus:
    known: dict[str, Any] = {
        "instance": II,
        "epoch": 1,
        "state": "active",
        "running": 0,
        "queued": 0,
        "batch_size": 8,
        "kv_utilization": 0.5,
        "prefill_tokens_per_s": 1000,
        "decode_tokens_per_s": 100,
        "links": (Link(holder=H1, mbit_per_s=8, rtt_us=100),),
        "ttl_ms": 3000,
        "seq": 1,
    }
    return InstanceStatus(**(known | members))


@pytest.mark.requirement("LK-2")
def test_targets_that_are_known_are_estimated(talk: Talk) -> None:
    talk.publish(H1, record(KEYS[0]))
    talk.publish(H1, record(KEYS[1]))
    report = ReportStatus(component_id(II))
    assert talk.ask(II, report, status())[0].status == 200
    assert talk.look_up(targets=(II, PC)).targets == ()
    assert talk.ask(H1, PutDescriptor(DESCRIPTOR.compat_id), DESCRIPTOR.canonical_json)[0].status == 201
    (estimate,) = talk.look_up(targets=(II, PC)).targets or ()
    assert estimate.instance == II
    assert estimate.fetch_us == 100 + 8 * 2 * 1024 // 8
    assert estimate.recompute_us == 1_000_000 * 32 // 1000
    talk.now_ms = 3001
    assert talk.look_up(targets=(II,)).targets == ()


@pytest.mark.requirement("LK-2")
def test_targets_are_estimated_by_what_a_controller_beside_knows(talk: Talk) -> None:
    talk.publish(H1, record(KEYS[0]))
    talk.ask(H1, PutDescriptor(DESCRIPTOR.compat_id), DESCRIPTOR.canonical_json)
    beside = Fleet()
    beside.handle(ReceiveStatus(status()), 0)
    assert talk.look_up(targets=(II,)).targets == ()
    talk.index.go_by(beside)
    assert [estimate.instance for estimate in talk.look_up(targets=(II,)).targets or ()] == [II]
    talk.ask(II, ReportStatus(component_id(II)), status(epoch=5, seq=2))
    assert beside.epoch_of(II) == 1  # it is the controller that instances report to


def test_a_status_is_of_the_instance_that_sends_it(talk: Talk) -> None:
    assert talk.ask(H1, ReportStatus(component_id(II)), status())[0].status == 403
    other = status(instance="https://other.example/")
    assert talk.ask(II, ReportStatus(component_id(II)), other)[0].status == 400
    talk.ask(II, ReportStatus(component_id(II)), status(epoch=5))
    assert kind_of(talk.ask(II, ReportStatus(component_id(II)), status(epoch=4))) == (409, "kvsp-stale-epoch")


@pytest.mark.requirement("CD-6")
def test_a_descriptor_is_kept_under_its_own_id_only(talk: Talk) -> None:
    assert talk.ask(PC, GetDescriptor(DESCRIPTOR.compat_id))[0].status == 404
    wrong = talk.ask(H1, PutDescriptor("ab" * 32), DESCRIPTOR.canonical_json)
    assert kind_of(wrong) == (409, "kvsp-incompatible")
    assert talk.ask(H1, PutDescriptor(DESCRIPTOR.compat_id), DESCRIPTOR.canonical_json)[0].status == 201
    assert talk.ask(H1, PutDescriptor(DESCRIPTOR.compat_id), DESCRIPTOR.canonical_json)[0].status == 204
    response, octets = talk.ask(PC, GetDescriptor(DESCRIPTOR.compat_id))
    assert (response.status, octets) == (200, DESCRIPTOR.canonical_json)


def test_an_operator_sees_how_much_there_is(talk: Talk) -> None:
    talk.publish(H1, record(KEYS[0]))
    talk.publish(H2, record(KEYS[0], holder=H2))
    talk.publish(H2, record(KEYS[1], holder=H2))
    response, octets = talk.ask(OPERATOR, DescribeIndex())
    assert response.status == 200
    info = decode(IndexInfo, octets)
    assert (info.records, [(h.holder, h.records) for h in info.holders]) == (3, [(H1, 1), (H2, 2)])
    assert talk.ask(PC, DescribeIndex())[0].status == 403


@pytest.mark.requirement("HT-8")
def test_resources_of_other_roles_are_not_here(talk: Talk) -> None:
    request, _ = request_for(PutDescriptor("ab" * 32), b"{}")
    effects = talk.index.handle(
        RequestReceived(next(NUMBERS), PC, attrs.evolve(request, path="leases", method="POST")), 0
    )
    (respond,) = effects
    assert isinstance(respond, Respond)
    assert respond.response.status == 404
