"""Authorization: every cell of the table tried, allowed and refused, and what the policy says in between."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import component_id
from kvsp_core.records import ReplicaRecord, Residency
from kvsp_core.resources import (
    RESOURCES,
    CreateLease,
    GetBlock,
    HeadBlock,
    Lookup,
    Operation,
    PublishReplica,
    ReportStatus,
    Resource,
    RoleName,
    StoreBlock,
    WithdrawReplica,
)
from kvsp_core.roles.authorization import (
    RULES,
    Permission,
    Policy,
    Relation,
    Rule,
    ScopeRules,
    authorize,
)

CLIENT = "https://client.example/kvsp/"
OTHER = "https://other.example/kvsp/"
KEY = "ab" * 32
SCOPE, OTHER_SCOPE, UNKNOWN_SCOPE = "0c" * 16, "0d" * 16, "0e" * 16
MEMBERS = {
    "compat_id": "cd" * 32,
    "scope_id": SCOPE,
    "block_key": KEY,
    "session": "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11",
    "lease": "x",
    "directive": "d",
    "map": "m",
}
SCOPE_IN_HEAD = (GetBlock, HeadBlock, StoreBlock)


def typed(row: Resource, named: str) -> Operation:
    """Return the request of a row, about the holder or instance with this base URI."""
    ids = {"holder_id": component_id(named), "instance_id": component_id(named)}
    operation: Any = row.operation
    return operation(**{n: (MEMBERS | ids)[n] for n in re.findall(r"\{(\w+)\}", row.path)})  # type: ignore[no-any-return]


def policy(
    roles: frozenset[RoleName],
    relation: Relation,
    permission: Permission | None,
    scope_id: str = SCOPE,
) -> tuple[Policy, str]:
    """Return a policy under which the client stands in this relation to a holder, and that holder."""
    rules = {} if permission is None else {scope_id: ScopeRules(**{permission.value: [CLIENT]})}
    delegates = {CLIENT: [OTHER]} if relation is Relation.DELEGATE else {}
    principals = {CLIENT: roles, OTHER: {RoleName.HOLDER}}
    return Policy(principals, rules, delegates), CLIENT if relation is Relation.ITSELF else OTHER


@attrs.frozen
class Cell:
    row: Resource
    role: RoleName
    relation: Relation
    permission: Permission | None

    @property
    def rule(self) -> Rule | None:
        """The rule that allows this, if any."""
        for rule in RULES[self.row.operation]:
            if (
                self.role in rule.roles
                and rule.relation in (Relation.ANYBODY, self.relation)
                and rule.permission in (None, self.permission)
            ):
                return rule
        return None


def cells() -> Iterator[Cell]:
    for row, role, relation, permission in itertools.product(
        RESOURCES, RoleName, Relation, (None, *Permission)
    ):
        yield Cell(row, role, relation, permission)


CELLS = tuple(cells())


@pytest.mark.requirement("SE-1", "BR-7", "PB-1", "LK-3", "PF-5")
@pytest.mark.parametrize("row", RESOURCES, ids=lambda row: f"{row.method}-{row.path}")
def test_every_cell_of_the_table(row: Resource) -> None:
    """Each role, relation and permission: allowed where a rule says so, refused as it should be elsewhere."""
    allowed = 0
    for cell in (cell for cell in CELLS if cell.row is row):
        known, named = policy(frozenset({cell.role}), cell.relation, cell.permission)
        operation = typed(row, named)
        owner = CLIENT if cell.relation is Relation.OWNER else OTHER
        problem = authorize(known, CLIENT, operation, scope_id=SCOPE, owner=owner)
        if cell.rule is not None:
            assert problem is None, cell
            assert authorize(known, CLIENT, operation) is None, cell
            allowed += 1
            continue
        assert problem is not None, cell
        fitting = [
            rule
            for rule in RULES[row.operation]
            if cell.role in rule.roles and rule.relation in (Relation.ANYBODY, cell.relation)
        ]
        owners = [
            rule
            for rule in RULES[row.operation]
            if cell.role in rule.roles and rule.relation is Relation.OWNER
        ]
        if not fitting and owners:
            assert (problem.status, problem.type.suffix) == (404, "kvsp-not-found"), cell
        elif not fitting:
            assert (problem.status, problem.type.suffix) == (403, ""), cell
        elif fitting[-1].hidden:
            assert (problem.status, problem.type.suffix) == (404, "kvsp-not-found"), cell
        else:
            assert (problem.status, problem.type.suffix) == (403, "kvsp-scope-denied"), cell
        # Whose a session is, its head does not tell.
        head_refused = not any(rule.permission is cell.permission for rule in owners)
        assert (authorize(known, CLIENT, operation) is not None) is head_refused, cell
    assert allowed


# Said once more, so that a change of the table is seen: x index, h holder, i instance, c controller,
# f front end, o operator; and the permission needed by who is not the holder or instance named.
WHO = {
    "POST lookup": ("hico", "read"),
    "PUT replicas": ("hi", "publish"),
    "DELETE replicas": ("hico", "withdraw"),
    "GET blocks": ("hio", "read"),
    "HEAD blocks": ("hio", "read"),
    "PUT blocks": ("hio", "write"),
    "POST leases": ("hio", "read"),
    "PUT leases": ("hio", None),
    "DELETE leases": ("hio", None),
    "PUT instances": ("i", None),
    "PUT sessions": ("i", "read"),
    "POST prefetch": ("c", None),
    "GET prefetch": ("c", None),
    "POST sessions": ("c", None),
    "POST reshard": ("c", None),
    "PUT state": ("c", None),
    "PUT ext/descriptors": ("hico", None),
    "GET ext/descriptors": ("hicfo", None),
    "POST ext/placements": ("f", "read"),
    "GET ext/sessions/{session}": ("fo", "read"),
    "DELETE ext/sessions/{session}": ("fo", "read"),
    "POST ext/sessions/{session}/move": ("f", "read"),
    "POST ext/sessions/{session}/output": ("f", "read"),
    "POST ext/shards": ("i", "read"),
    "PUT ext/shards": ("o", "read"),
    "GET ext/shards": ("o", None),
    "DELETE ext/shards": ("o", None),
    "GET ext/instances": ("o", None),
    "GET ext/sessions": ("o", None),
    "GET ext/index": ("o", None),
    "GET ext/leases": ("o", None),
    "PUT ext/instances": ("o", None),
}
LETTERS = dict(zip(RoleName, "xhicfo", strict=True))


def short_name(row: Resource) -> str:
    names = [f"{row.method} {row.path}", f"{row.method} {'/'.join(row.path.split('/')[:2])}"]
    return next((name for name in names if name in WHO), f"{row.method} {row.path.split('/')[0]}")


@pytest.mark.requirement("SE-1", "PF-5")
@pytest.mark.parametrize("row", RESOURCES, ids=short_name)
def test_who_may_make_a_request_at_all(row: Resource) -> None:
    letters, permission = WHO[short_name(row)]
    rules = RULES[row.operation]
    assert set(letters) == {LETTERS[role] for rule in rules for role in rule.roles}
    assert permission in {None, *(rule.permission and rule.permission.value for rule in rules)}
    if permission is not None:
        strangers = [rule for rule in rules if RoleName.OPERATOR not in rule.roles or rule.permission]
        assert any(rule.permission and rule.permission.value == permission for rule in strangers)


@pytest.mark.requirement("SE-1")
def test_every_resource_has_a_rule_and_every_rule_a_role() -> None:
    assert len(WHO) == len(RESOURCES)
    assert set(RULES) == {row.operation for row in RESOURCES}
    assert all(rule.roles for rules in RULES.values() for rule in rules)


@pytest.mark.requirement("SE-1")
@pytest.mark.parametrize("row", RESOURCES, ids=lambda row: f"{row.method}-{row.path}")
def test_a_client_that_the_policy_does_not_name_may_nothing(row: Resource) -> None:
    known = Policy({OTHER: list(RoleName)}, {SCOPE: ScopeRules(read=[OTHER])})
    problem = authorize(known, CLIENT, typed(row, CLIENT))
    assert problem is not None
    assert (problem.status, problem.type.suffix) == (403, "")


@pytest.mark.requirement("PF-5")
@pytest.mark.parametrize("role", [role for role in RoleName if role is not RoleName.CONTROLLER])
def test_directives_are_the_controllers_alone(role: RoleName) -> None:
    directives = [
        row for row in RESOURCES if row.path in ("prefetch", "reshard", "state", "sessions/{session}/resume")
    ]
    assert len(directives) == 4
    for row in directives:
        known, named = policy(frozenset({role}), Relation.ITSELF, Permission.READ)
        problem = authorize(known, CLIENT, typed(row, named))
        assert problem is not None
        assert problem.status == 403


# Scopes


def readers() -> Policy:
    roles = {RoleName.HOLDER, RoleName.INSTANCE}
    return Policy(
        {CLIENT: roles, OTHER: roles},
        {SCOPE: ScopeRules(read=[CLIENT], write=[CLIENT]), OTHER_SCOPE: ScopeRules(read=[OTHER])},
    )


@pytest.mark.requirement("LK-3", "BR-7")
@pytest.mark.parametrize("scope_id", [OTHER_SCOPE, UNKNOWN_SCOPE])
def test_a_scope_of_others_and_one_that_does_not_exist_are_refused_alike(scope_id: str) -> None:
    known = readers()
    for operation in (
        Lookup(),
        GetBlock("cd" * 32, scope_id, KEY),
        HeadBlock("cd" * 32, scope_id, KEY),
        StoreBlock("cd" * 32, scope_id, KEY),
    ):
        problem = authorize(known, CLIENT, operation, scope_id=scope_id)
        assert problem is not None
        assert problem.type.suffix == "kvsp-scope-denied"
        assert scope_id not in problem.detail
    hidden = authorize(known, CLIENT, CreateLease(), scope_id=scope_id)
    assert hidden is not None
    assert hidden.type.suffix == "kvsp-not-found"


@pytest.mark.requirement("BR-7")
def test_the_scope_of_a_block_is_in_its_path_and_refused_from_the_head() -> None:
    for kind in SCOPE_IN_HEAD:
        assert authorize(readers(), CLIENT, kind("cd" * 32, SCOPE, KEY)) is None
        refused = authorize(readers(), CLIENT, kind("cd" * 32, OTHER_SCOPE, KEY))
        assert refused is not None
        assert refused.type.suffix == "kvsp-scope-denied"


@pytest.mark.requirement("LK-3")
def test_who_may_read_nowhere_is_refused_before_the_body_tells_the_scope() -> None:
    known = Policy(
        {CLIENT: {RoleName.CONTROLLER}, OTHER: {RoleName.CONTROLLER}}, {SCOPE: ScopeRules(read=[OTHER])}
    )
    refused = authorize(known, CLIENT, Lookup())
    assert refused is not None
    assert refused.type.suffix == "kvsp-scope-denied"
    assert authorize(known, OTHER, Lookup()) is None


@pytest.mark.requirement("SK-6")
def test_a_shared_scope_is_marked_and_has_readers_like_any_other() -> None:
    known = Policy({CLIENT: {RoleName.INSTANCE}}, {SCOPE: ScopeRules(read=[CLIENT], shared=True)})
    assert known.scope(SCOPE).shared
    assert not known.scope(OTHER_SCOPE).shared
    assert known.may(CLIENT, Permission.READ, SCOPE)
    assert not known.may(CLIENT, Permission.PUBLISH, SCOPE)
    assert not known.may(OTHER, Permission.READ, SCOPE)


# Holders publish for themselves


@pytest.mark.requirement("PB-1")
def test_a_holder_publishes_for_itself_and_for_whom_the_policy_says() -> None:
    known = Policy(
        {CLIENT: {RoleName.HOLDER}, OTHER: {RoleName.HOLDER}},
        {SCOPE: ScopeRules(publish=[CLIENT, OTHER])},
        {CLIENT: ["moqt://relay.example/live"]},
    )
    mine = PublishReplica(component_id(CLIENT), KEY)
    assert authorize(known, CLIENT, mine, scope_id=SCOPE) is None
    for_relay = PublishReplica(component_id("moqt://relay.example/live"), KEY)
    assert authorize(known, CLIENT, for_relay, scope_id=SCOPE) is None
    for client, operation in (
        (OTHER, mine),
        (OTHER, for_relay),
        (CLIENT, PublishReplica(component_id(OTHER), KEY)),
    ):
        refused = authorize(known, client, operation, scope_id=SCOPE)
        assert refused is not None
        assert (refused.status, refused.type.suffix) == (403, "")


@pytest.mark.requirement("BR-8")
def test_a_bad_replica_is_withdrawn_by_whom_its_scope_allows_and_else_is_not_there() -> None:
    known = Policy(
        {CLIENT: {RoleName.INSTANCE}, OTHER: {RoleName.INSTANCE}},
        {SCOPE: ScopeRules(withdraw=[CLIENT])},
    )
    operation = WithdrawReplica(component_id("https://h1.example/"), KEY)
    assert authorize(known, CLIENT, operation) is None
    assert authorize(known, CLIENT, operation, scope_id=SCOPE) is None
    hidden = authorize(known, CLIENT, operation, scope_id=OTHER_SCOPE)
    assert hidden is not None
    assert hidden.type.suffix == "kvsp-not-found"
    refused = authorize(known, OTHER, operation)
    assert refused is not None
    assert refused.status == 403


@pytest.mark.requirement("SE-1")
def test_an_instance_reports_its_own_status() -> None:
    known = Policy({CLIENT: {RoleName.INSTANCE}})
    assert authorize(known, CLIENT, ReportStatus(component_id(CLIENT))) is None
    refused = authorize(known, CLIENT, ReportStatus(component_id(OTHER)))
    assert refused is not None
    assert "for itself only" in refused.detail


# What a consumer checks again


def record(holder: str, digest: str = "00" * 32, scope_id: str = SCOPE, key: str = KEY) -> ReplicaRecord:
    return ReplicaRecord(
        block_key=key,
        compat_id="cd" * 32,
        scope_id=scope_id,
        holder=holder,
        codec=1,
        size=8,
        digest="sha-256:" + digest,
        layer_digests=("11" * 32,),
        residency=(Residency(tier="host", layers=(0, 0)),),
        ttl_ms=1000,
    )


@pytest.mark.requirement("SE-2")
def test_a_consumer_takes_replicas_of_holders_that_may_publish_in_the_scope() -> None:
    known = Policy(
        {CLIENT: {RoleName.HOLDER}, OTHER: {RoleName.HOLDER}},
        {SCOPE: ScopeRules(publish=[CLIENT]), OTHER_SCOPE: ScopeRules(publish=[OTHER])},
    )
    good, bad = record(CLIENT), record(OTHER)
    assert known.trusted([bad, good, record(CLIENT, scope_id=OTHER_SCOPE)]) == (good,)
    assert Policy({}).trusted([good]) == ()


@pytest.mark.requirement("SE-2")
def test_where_a_scope_names_producers_their_digests_alone_count() -> None:
    producer = "https://ii1.example/kvsp/"
    known = Policy(
        {CLIENT: {RoleName.HOLDER}, producer: {RoleName.INSTANCE}},
        {SCOPE: ScopeRules(publish=[CLIENT, producer], producers=[producer])},
    )
    stated, copy, lie = record(producer, "aa" * 32), record(CLIENT, "aa" * 32), record(CLIENT, "bb" * 32)
    assert known.trusted([lie, copy, stated]) == (copy, stated)
    assert known.trusted([lie, copy]) == ()
    assert known.trusted([stated, record(CLIENT, "aa" * 32, key="12" * 32)]) == (stated,)


# The policy itself


def test_a_policy_names_principals_that_it_gives_roles() -> None:
    with pytest.raises(LocalProtocolError, match="read names a principal that has no role"):
        Policy({}, {SCOPE: ScopeRules(read=[CLIENT])})
    with pytest.raises(LocalProtocolError, match="delegates names a principal that has no role"):
        Policy({}, {}, {CLIENT: [OTHER]})
    assert repr(readers()) == "<Policy: 2 principals, 2 scopes>"
    assert readers().roles(CLIENT) == {RoleName.HOLDER, RoleName.INSTANCE}
    assert readers().roles("https://nobody.example/") == frozenset()
