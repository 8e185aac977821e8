"""Who may do what: one table, and the policy it is applied to (section "Security Considerations").

`RULES` says for each typed request which roles of the client may make it, how the client has to stand to what
it names, and which permission it needs in the scope concerned. What no rule allows is refused: 403
``about:blank`` where the role or the relation is wrong, ``kvsp-scope-denied`` where the scope is.
`authorize` is asked with the head alone, before a body is read, and again when the scope is known, where the
head does not tell it. Requirements SE-1 to SE-3, SK-6, BR-7, PB-1, LK-3, PF-5; decisions W11 and W22.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

import attrs

from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import component_id
from kvsp_core.problems import FORBIDDEN, NOT_FOUND, SCOPE_DENIED, Problem
from kvsp_core.records import ReplicaRecord
from kvsp_core.resources import (
    Attend,
    ChangeInstanceState,
    ChangeState,
    CreateLease,
    DeleteSession,
    DescribeIndex,
    EndShardMap,
    GetBlock,
    GetDescriptor,
    GetDirective,
    GetSession,
    GetShardMap,
    HeadBlock,
    ListInstances,
    ListLeases,
    ListSessions,
    Lookup,
    MoveSession,
    Operation,
    PlaceRequest,
    PrefetchBlocks,
    PublishReplica,
    PutDescriptor,
    RecordCheckpoint,
    ReleaseLease,
    RenewLease,
    ReportStatus,
    ReshardGroup,
    ResumeSession,
    RoleName,
    SplitContext,
    StoreBlock,
    StreamOutput,
    WithdrawReplica,
)

__all__ = ["NO_SCOPE", "RULES", "Permission", "Policy", "Relation", "Rule", "ScopeRules", "authorize"]

NO_SCOPE: Final = "none"
"""No scope has this name, so no policy allows anything in it."""


class Permission(Enum):
    """What a principal may do in a scope."""

    READ = "read"
    """Look replicas up, retrieve and lease blocks, run sessions."""
    WRITE = "write"
    """Store blocks at a holder."""
    PUBLISH = "publish"
    """Publish replicas: be trusted to serve what it says it does."""
    WITHDRAW = "withdraw"
    """Withdraw replicas of others that were found bad."""


class Relation(Enum):
    """How the client stands to the holder, instance or session that the request names."""

    ANYBODY = "anybody"
    ITSELF = "itself"
    OWNER = "owner"
    """The client opened the session; only the role that keeps it knows."""
    DELEGATE = "delegate"
    """The policy says that the client publishes for that holder."""


@attrs.frozen
class Rule:
    """A client with one of these roles and this relation may make the request, with this permission in its
    scope; None where it concerns no scope.

    `hidden` is for requests that name something whose scope only the serving role knows: what the client may
    not see is answered like what is not there.
    """

    roles: frozenset[RoleName]
    relation: Relation = Relation.ANYBODY
    permission: Permission | None = None
    hidden: bool = False


# The table --------------------------------------------------------------------------------------------------

_CONTROLLER: Final = frozenset({RoleName.CONTROLLER})
_FRONT_END: Final = frozenset({RoleName.FRONT_END})
_INSTANCE: Final = frozenset({RoleName.INSTANCE})
_OPERATOR: Final = frozenset({RoleName.OPERATOR})
_KEEPERS: Final = frozenset({RoleName.HOLDER, RoleName.INSTANCE})
_USERS: Final = _KEEPERS | _OPERATOR

_READ, _WRITE = Permission.READ, Permission.WRITE
_PUBLISH, _WITHDRAW = Permission.PUBLISH, Permission.WITHDRAW
_ANYBODY, _ITSELF = Relation.ANYBODY, Relation.ITSELF
_OWNER, _DELEGATE = Relation.OWNER, Relation.DELEGATE

RULES: Final[Mapping[type[Operation], tuple[Rule, ...]]] = MappingProxyType(
    {
        # index
        Lookup: (Rule(_USERS | _CONTROLLER, permission=_READ),),
        PublishReplica: (Rule(_KEEPERS, _ITSELF, _PUBLISH), Rule(_KEEPERS, _DELEGATE, _PUBLISH)),
        WithdrawReplica: (
            Rule(_KEEPERS, _ITSELF),
            Rule(_KEEPERS, _DELEGATE),
            Rule(_USERS | _CONTROLLER, _ANYBODY, _WITHDRAW, hidden=True),
        ),
        DescribeIndex: (Rule(_OPERATOR),),
        # index and holder
        PutDescriptor: (Rule(_USERS | _CONTROLLER),),
        GetDescriptor: (Rule(_USERS | _CONTROLLER | _FRONT_END),),
        # holder
        GetBlock: (Rule(_USERS, permission=_READ),),
        HeadBlock: (Rule(_USERS, permission=_READ),),
        StoreBlock: (Rule(_USERS, permission=_WRITE),),
        CreateLease: (Rule(_USERS, permission=_READ, hidden=True),),
        RenewLease: (Rule(_USERS),),
        ReleaseLease: (Rule(_USERS),),
        ListLeases: (Rule(_OPERATOR),),
        # controller, and index where it is told of instances
        ReportStatus: (Rule(_INSTANCE, _ITSELF),),
        # controller
        RecordCheckpoint: (Rule(_INSTANCE, permission=_READ),),
        PlaceRequest: (Rule(_FRONT_END, permission=_READ),),
        GetSession: (Rule(_FRONT_END, _OWNER, _READ, hidden=True), Rule(_OPERATOR)),
        DeleteSession: (Rule(_FRONT_END, _OWNER, _READ, hidden=True), Rule(_OPERATOR)),
        MoveSession: (Rule(_FRONT_END, _OWNER, _READ, hidden=True),),
        ListInstances: (Rule(_OPERATOR),),
        ListSessions: (Rule(_OPERATOR),),
        ChangeInstanceState: (Rule(_OPERATOR),),
        SplitContext: (Rule(_OPERATOR, permission=_READ),),
        GetShardMap: (Rule(_OPERATOR),),
        EndShardMap: (Rule(_OPERATOR),),
        # instance
        PrefetchBlocks: (Rule(_CONTROLLER),),
        GetDirective: (Rule(_CONTROLLER),),
        ResumeSession: (Rule(_CONTROLLER),),
        ReshardGroup: (Rule(_CONTROLLER),),
        ChangeState: (Rule(_CONTROLLER),),
        StreamOutput: (Rule(_FRONT_END, permission=_READ, hidden=True),),
        Attend: (Rule(_INSTANCE, permission=_READ, hidden=True),),
    }
)
"""Who may make which request. What is not here is refused.

A lease belongs to who created it and a checkpoint to who owns the session: the lease table and the session
ledger see to that, and answer for a lease or a session of another as if there were none.
"""


# The policy -------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ScopeRules:
    """What a scope allows, to principals by their URI.

    `producers`, where there are any, are those whose digests alone count (SE-2). A `shared` scope holds
    content that is public among its readers (SK-6, decision W24). A `purged` scope allows nothing, and what
    roles have of it they delete.
    """

    read: frozenset[str] = attrs.field(default=frozenset(), converter=frozenset)
    write: frozenset[str] = attrs.field(default=frozenset(), converter=frozenset)
    publish: frozenset[str] = attrs.field(default=frozenset(), converter=frozenset)
    withdraw: frozenset[str] = attrs.field(default=frozenset(), converter=frozenset)
    producers: frozenset[str] = attrs.field(default=frozenset(), converter=frozenset)
    shared: bool = False
    purged: bool = False

    def principals(self, permission: Permission) -> frozenset[str]:
        """Return who has a permission."""
        who: frozenset[str] = getattr(self, permission.value)
        return who


_NO_RULES: Final = ScopeRules()


@attrs.frozen(eq=False, init=False, repr=False)
class Policy:
    """Who is what, and who may do what in which scope (decision W22). What it does not say is refused.

    `delegates` gives for a principal the base URIs of the holders that it publishes for.
    """

    _roles: Mapping[str, frozenset[RoleName]]
    _scopes: Mapping[str, ScopeRules]
    _delegates: Mapping[str, frozenset[str]]
    _ids: Mapping[str, str]
    _somewhere: Mapping[Permission, frozenset[str]]
    purged: frozenset[str]
    """The scopes of which nothing is to be left."""

    def __init__(
        self,
        principals: Mapping[str, Iterable[RoleName]],
        scopes: Mapping[str, ScopeRules] = MappingProxyType({}),
        delegates: Mapping[str, Iterable[str]] = MappingProxyType({}),
    ) -> None:
        for scope_id, rules in scopes.items():
            if rules.purged and any(rules.principals(permission) for permission in Permission):
                raise LocalProtocolError(f"scope {scope_id}: it is purged, and cannot allow anything")
            for name in ("read", "write", "publish", "withdraw", "producers"):
                if not principals.keys() >= getattr(rules, name):
                    raise LocalProtocolError(f"scope {scope_id}: {name} names a principal that has no role")
        if not principals.keys() >= delegates.keys():
            raise LocalProtocolError("delegates names a principal that has no role")
        self.__attrs_init__(
            MappingProxyType({principal: frozenset(roles) for principal, roles in principals.items()}),
            MappingProxyType(dict(scopes)),
            MappingProxyType({who: frozenset(map(component_id, uris)) for who, uris in delegates.items()}),
            MappingProxyType({principal: component_id(principal) for principal in principals}),
            MappingProxyType(
                {
                    permission: frozenset().union(
                        *(rules.principals(permission) for rules in scopes.values())
                    )
                    for permission in Permission
                }
            ),
            frozenset(scope_id for scope_id, rules in scopes.items() if rules.purged),
        )

    def __repr__(self) -> str:
        return f"<Policy: {len(self._roles)} principals, {len(self._scopes)} scopes>"

    def roles(self, principal: str) -> frozenset[RoleName]:
        """Return the roles of a principal; none where the policy does not name it."""
        return self._roles.get(principal, frozenset())

    def may(self, principal: str, permission: Permission, scope_id: str | None) -> bool:
        """Return whether a principal has a permission in a scope; for None, in any scope at all."""
        if scope_id is None:
            return principal in self._somewhere[permission]
        return principal in self.scope(scope_id).principals(permission)

    def scope(self, scope_id: str) -> ScopeRules:
        """Return what a scope allows: nothing where the policy does not name it."""
        return self._scopes.get(scope_id, _NO_RULES)

    def producers(self, scope_id: str) -> tuple[str, ...]:
        """Return the holders whose digests alone count in a scope, in order; none where all do (SE-2).

        A lookup names them, so that their records are among those returned.
        """
        return tuple(sorted(self.scope(scope_id).producers))

    def stands(self, principal: str, relation: Relation, named: str) -> bool:
        """Return whether a principal stands in a relation to a holder or instance, by its identifier."""
        match relation:
            case Relation.ANYBODY | Relation.OWNER:
                return True  # whose something is, `authorize` is told
            case Relation.ITSELF:
                return self._ids.get(principal) == named
            case Relation.DELEGATE:
                return named in self._delegates.get(principal, ())

    def trusted(self, replicas: Iterable[ReplicaRecord]) -> tuple[ReplicaRecord, ...]:
        """Return the replicas a consumer may load from: the second check of what the index checked (SE-2).

        Their holder may publish in the scope, and, where the scope names producers, their digest is one that
        a producer's own record states.
        """
        served = [record for record in replicas if self._serves(record)]
        stated = {
            (record.scope_id, record.block_key, record.digest)
            for record in served
            if record.holder in self.scope(record.scope_id).producers
        }
        return tuple(
            record
            for record in served
            if not self.scope(record.scope_id).producers
            or (record.scope_id, record.block_key, record.digest) in stated
        )

    def _serves(self, record: ReplicaRecord) -> bool:
        publishers = self.scope(record.scope_id).publish
        if record.holder in publishers:
            return True
        named = component_id(record.holder)
        return any(named in self._delegates.get(publisher, ()) for publisher in publishers)


# The decision -----------------------------------------------------------------------------------------------

_ROLE_WRONG: Final = Problem(FORBIDDEN, "the client has no role that may make this request")
_RELATION_WRONG: Final = Problem(FORBIDDEN, "the client may make this request for itself only")
_SCOPE_WRONG: Final = Problem(SCOPE_DENIED, "the client has no such permission in this scope")
_NOT_THERE: Final = Problem(NOT_FOUND)


def authorize(
    policy: Policy,
    client: str,
    operation: Operation,
    *,
    scope_id: str | None = None,
    owner: str | None = None,
) -> Problem | None:
    """Return why a client may not make a request, or None where it may.

    Ask with the head alone first: a client that has the permission it needs in no scope at all is refused
    then. Ask again with `scope_id` once it is known, from the body or from what the request names, and with
    the `owner` of what it names, where that belongs to somebody. A block's scope is in its path, so one
    question is enough. No answer depends on whether what is named exists.
    """
    roles = policy.roles(client)
    scope_id = scope_id or getattr(operation, "scope_id", None)
    named: str = getattr(operation, "holder_id", "") or getattr(operation, "instance_id", "")
    refusal = _ROLE_WRONG
    for rule in RULES.get(type(operation), ()):
        if not roles & rule.roles:
            continue
        if rule.relation is Relation.OWNER and owner not in (None, client):
            refusal = _NOT_THERE
        elif not policy.stands(client, rule.relation, named):
            refusal = _RELATION_WRONG if refusal is _ROLE_WRONG else refusal
        elif rule.permission is None or policy.may(client, rule.permission, scope_id):
            return None
        else:
            refusal = _NOT_THERE if rule.hidden and scope_id is not None else _SCOPE_WRONG
    return refusal
