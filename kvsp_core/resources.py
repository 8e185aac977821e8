"""The resources of the protocol: which role serves what, and where (section "HTTP Usage", "KVSP Resources").

`RESOURCES` is the table: one row for each method of each resource, with its body, its answer and its limits.
Each row belongs to a typed request, such as `GetBlock`, which holds what the path and the query say. Servers
turn a request's head into one with `Router.route`, clients turn one into a head with `request_for`; both
read this table, so they cannot disagree. Paths are relative to the base URI of the role, whatever its path
(HT-1). Requirements HT-1, HT-4 to HT-9; decisions W10 to W19 and W30 to W33.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeAlias
from urllib.parse import quote, unquote

import attrs

from kvsp_core.bodies import encode
from kvsp_core.ext_messages import (
    AttendAnswer,
    AttendRequest,
    IndexInfo,
    InstanceListing,
    LeaseListing,
    OutputRequest,
    PlacementAnswer,
    PlacementRequest,
    SessionInfo,
    SessionListing,
    SessionMove,
    ShardMapInfo,
    SplitRequest,
)
from kvsp_core.heads import LINES_MEDIA_TYPE, Request, Response, media_type
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.limits import (
    MAX_CONTAINER_BYTES,
    MAX_DESCRIPTOR_BYTES,
    MAX_LOOKUP_ANSWER_BYTES,
    MAX_RESHARD_BODY_BYTES,
    MAX_SESSION_BODY_BYTES,
)
from kvsp_core.messages import (
    CheckpointRecorded,
    DirectiveStatus,
    LeaseGranted,
    LeaseRenewal,
    LeaseRequest,
    LookupAnswer,
    LookupRequest,
    PrefetchDirective,
    PublishAnswer,
    ReshardMessage,
    ResumeRequest,
    StateChange,
    StatusAnswer,
    Withdrawal,
)
from kvsp_core.problems import (
    BAD_REQUEST,
    METHOD_NOT_ALLOWED,
    TOO_LARGE,
    UNKNOWN_RESOURCE,
    UNSUPPORTED_MEDIA_TYPE,
    Problem,
)
from kvsp_core.records import InstanceStatus, ReplicaRecord, SessionCheckpoint
from kvsp_core.registries import BLOCK_MEDIA_TYPE, JSON_MEDIA_TYPE
from kvsp_core.validation import (
    MAX_UINT32,
    InvalidValue,
    check_hex,
    check_identifier,
    check_text,
    check_uuid,
    fail,
)

__all__ = [
    "RESOURCES",
    "Attend",
    "ChangeInstanceState",
    "ChangeState",
    "CreateLease",
    "DeleteSession",
    "DescribeIndex",
    "EndShardMap",
    "GetBlock",
    "GetDescriptor",
    "GetDirective",
    "GetSession",
    "GetShardMap",
    "HeadBlock",
    "ListInstances",
    "ListLeases",
    "ListSessions",
    "Lookup",
    "MoveSession",
    "Operation",
    "PlaceRequest",
    "PrefetchBlocks",
    "PublishReplica",
    "PutDescriptor",
    "RecordCheckpoint",
    "Refusal",
    "ReleaseLease",
    "RenewLease",
    "ReportStatus",
    "Request",
    "ReshardGroup",
    "Resource",
    "Response",
    "ResumeSession",
    "RoleName",
    "Router",
    "SplitContext",
    "StoreBlock",
    "StreamOutput",
    "WithdrawReplica",
    "check_head",
    "request_for",
    "resource_of",
]


class RoleName(Enum):
    """The roles of a principal; all but operator also serve resources or call those who do."""

    INDEX = "index"
    HOLDER = "holder"
    INSTANCE = "instance"
    CONTROLLER = "controller"
    FRONT_END = "front-end"
    OPERATOR = "operator"


# Typed requests ---------------------------------------------------------------------------------------------


@attrs.frozen
class Lookup:
    """Find the replicas of a prefix."""


@attrs.frozen
class PublishReplica:
    """Record a replica, or refresh its record."""

    holder_id: str
    block_key: str = attrs.field(repr=False)


@attrs.frozen
class WithdrawReplica:
    """Forget a replica."""

    holder_id: str
    block_key: str = attrs.field(repr=False)


@attrs.frozen
class GetBlock:
    """Retrieve a block, or the layers `layers[0]` to `layers[1]` of it, in this codec."""

    compat_id: str = attrs.field(repr=False)
    scope_id: str = attrs.field(repr=False)
    block_key: str = attrs.field(repr=False)
    layers: tuple[int, int] | None = None
    codec: int | None = None


@attrs.frozen
class HeadBlock:
    """Ask what retrieving would answer, without the block, and without any effect."""

    compat_id: str = attrs.field(repr=False)
    scope_id: str = attrs.field(repr=False)
    block_key: str = attrs.field(repr=False)
    layers: tuple[int, int] | None = None
    codec: int | None = None


@attrs.frozen
class StoreBlock:
    """Store a block that is not held yet."""

    compat_id: str = attrs.field(repr=False)
    scope_id: str = attrs.field(repr=False)
    block_key: str = attrs.field(repr=False)


@attrs.frozen
class CreateLease:
    """Lease blocks."""


@attrs.frozen
class RenewLease:
    """Extend a lease."""

    lease: str = attrs.field(repr=False)


@attrs.frozen
class ReleaseLease:
    """End a lease."""

    lease: str = attrs.field(repr=False)


@attrs.frozen
class ReportStatus:
    """Report an instance's status."""

    instance_id: str


@attrs.frozen
class RecordCheckpoint:
    """Record a checkpoint of a session."""

    session: str = attrs.field(repr=False)


@attrs.frozen
class PrefetchBlocks:
    """Load blocks ahead of a request."""


@attrs.frozen
class GetDirective:
    """Read the state of a prefetch directive."""

    directive: str


@attrs.frozen
class ResumeSession:
    """Go on with a session of another instance."""

    session: str = attrs.field(repr=False)


@attrs.frozen
class ReshardGroup:
    """Prepare, commit or abort a change of a shard map."""


@attrs.frozen
class ChangeState:
    """Be in another lifecycle state."""


@attrs.frozen
class PutDescriptor:
    """Ours: make a Compatibility Descriptor known (decision W30)."""

    compat_id: str = attrs.field(repr=False)


@attrs.frozen
class GetDescriptor:
    """Ours: read a Compatibility Descriptor."""

    compat_id: str = attrs.field(repr=False)


@attrs.frozen
class PlaceRequest:
    """Ours: open a session where it is served best (decision W31)."""


@attrs.frozen
class GetSession:
    """Ours: ask who owns a session."""

    session: str = attrs.field(repr=False)


@attrs.frozen
class DeleteSession:
    """Ours: end a session, finished or not."""

    session: str = attrs.field(repr=False)


@attrs.frozen
class MoveSession:
    """Ours: have another instance go on with a session whose engine has failed."""

    session: str = attrs.field(repr=False)


@attrs.frozen
class StreamOutput:
    """Ours: begin a session at its instance, or take its output up again."""

    session: str = attrs.field(repr=False)


@attrs.frozen
class Attend:
    """Ours: compute partial attention over a shard (decision W32)."""

    map: str = attrs.field(repr=False)


@attrs.frozen
class ListInstances:
    """Ours, for operators: the instances (decision W33)."""


@attrs.frozen
class ListSessions:
    """Ours, for operators: the sessions."""


@attrs.frozen
class DescribeIndex:
    """Ours, for operators: how much the index holds."""


@attrs.frozen
class ListLeases:
    """Ours, for operators: the leases at a holder."""


@attrs.frozen
class ChangeInstanceState:
    """Ours, for operators: have the controller drain or wake an instance."""

    instance_id: str


@attrs.frozen
class SplitContext:
    """Ours, for operators: split a context over instances, or split it anew."""

    map: str = attrs.field(repr=False)


@attrs.frozen
class GetShardMap:
    """Ours, for operators: ask how a context is split."""

    map: str = attrs.field(repr=False)


@attrs.frozen
class EndShardMap:
    """Ours, for operators: have the members let go of a context."""

    map: str = attrs.field(repr=False)


Operation: TypeAlias = (
    Lookup
    | PublishReplica
    | WithdrawReplica
    | GetBlock
    | HeadBlock
    | StoreBlock
    | CreateLease
    | RenewLease
    | ReleaseLease
    | ReportStatus
    | RecordCheckpoint
    | PrefetchBlocks
    | GetDirective
    | ResumeSession
    | ReshardGroup
    | ChangeState
    | PutDescriptor
    | GetDescriptor
    | PlaceRequest
    | GetSession
    | DeleteSession
    | MoveSession
    | StreamOutput
    | Attend
    | ListInstances
    | ListSessions
    | DescribeIndex
    | ListLeases
    | ChangeInstanceState
    | SplitContext
    | GetShardMap
    | EndShardMap
)


# The table --------------------------------------------------------------------------------------------------

_KIB: Final = 1024
_MIB: Final = 1024 * 1024


@attrs.frozen
class Resource:
    """A row: a method of a resource.

    `body` and `answer` are the classes of the JSON documents, None where there is none; block data and
    streamed output are told by their media types. Sizes are in octets: more is 413 for a body, and a failed
    call for an answer.
    """

    roles: tuple[RoleName, ...]
    method: str
    path: str
    operation: type[Operation]
    body: object = None
    limit_bytes: int = 0
    answer: object = None
    answer_limit_bytes: int = 16 * _KIB
    body_type: str = JSON_MEDIA_TYPE
    answer_type: str = JSON_MEDIA_TYPE
    query: tuple[str, ...] = ()
    body_required: bool = True
    template: tuple[str, ...] = attrs.field(init=False)
    """The segments of the path; in braces what is to be filled in."""

    @template.default
    def _segments(self) -> tuple[str, ...]:
        return tuple(self.path.split("/"))


_IS: Final = (RoleName.INDEX,)
_HOLDER: Final = (RoleName.HOLDER,)
_PC: Final = (RoleName.CONTROLLER,)
_II: Final = (RoleName.INSTANCE,)
_PC_IS: Final = (RoleName.CONTROLLER, RoleName.INDEX)
_IS_HOLDER: Final = (RoleName.INDEX, RoleName.HOLDER)
_BLOCK: Final = "blocks/{compat_id}/{scope_id}/{block_key}"
_REPLICA: Final = "replicas/{holder_id}/{block_key}"
_DESCRIPTOR: Final = "ext/descriptors/{compat_id}"
_QUERY: Final = ("layers", "codec")

# fmt: off
RESOURCES: Final[tuple[Resource, ...]] = (
    Resource(_IS, "POST", "lookup", Lookup, LookupRequest, 4 * _MIB,
             LookupAnswer, 2 * MAX_LOOKUP_ANSWER_BYTES),
    Resource(_IS, "PUT", _REPLICA, PublishReplica, ReplicaRecord, 512 * _KIB, PublishAnswer),
    Resource(_IS, "DELETE", _REPLICA, WithdrawReplica, Withdrawal, 16 * _KIB, body_required=False),
    Resource(_HOLDER, "GET", _BLOCK, GetBlock, query=_QUERY,
             answer_type=BLOCK_MEDIA_TYPE, answer_limit_bytes=MAX_CONTAINER_BYTES),
    Resource(_HOLDER, "HEAD", _BLOCK, HeadBlock, query=_QUERY, answer_type=BLOCK_MEDIA_TYPE),
    Resource(_HOLDER, "PUT", _BLOCK, StoreBlock, body_type=BLOCK_MEDIA_TYPE, limit_bytes=MAX_CONTAINER_BYTES),
    Resource(_HOLDER, "POST", "leases", CreateLease, LeaseRequest, 4 * _MIB, LeaseGranted),
    Resource(_HOLDER, "PUT", "leases/{lease}", RenewLease, LeaseRenewal, 16 * _KIB, LeaseGranted),
    Resource(_HOLDER, "DELETE", "leases/{lease}", ReleaseLease),
    Resource(_PC_IS, "PUT", "instances/{instance_id}/status", ReportStatus,
             InstanceStatus, 1 * _MIB, StatusAnswer),
    Resource(_PC, "PUT", "sessions/{session}/checkpoint", RecordCheckpoint,
             SessionCheckpoint, MAX_SESSION_BODY_BYTES, CheckpointRecorded),
    Resource(_II, "POST", "prefetch", PrefetchBlocks, PrefetchDirective, 8 * _MIB),
    Resource(_II, "GET", "prefetch/{directive}", GetDirective,
             answer=DirectiveStatus, answer_limit_bytes=4 * _MIB),
    # A resume brings a checkpoint and its new epoch.
    Resource(_II, "POST", "sessions/{session}/resume", ResumeSession,
             ResumeRequest, MAX_SESSION_BODY_BYTES + _KIB),
    Resource(_II, "POST", "reshard", ReshardGroup, ReshardMessage, MAX_RESHARD_BODY_BYTES),
    Resource(_II, "PUT", "state", ChangeState, StateChange, 16 * _KIB, StatusAnswer),

    Resource(_IS_HOLDER, "PUT", _DESCRIPTOR, PutDescriptor, CompatibilityDescriptor, MAX_DESCRIPTOR_BYTES),
    Resource(_IS_HOLDER, "GET", _DESCRIPTOR, GetDescriptor,
             answer=CompatibilityDescriptor, answer_limit_bytes=MAX_DESCRIPTOR_BYTES),
    Resource(_PC, "POST", "ext/placements", PlaceRequest,
             PlacementRequest, 16 * _MIB, PlacementAnswer, 16 * _MIB),
    Resource(_PC, "GET", "ext/sessions/{session}", GetSession, answer=SessionInfo),
    Resource(_PC, "DELETE", "ext/sessions/{session}", DeleteSession),
    Resource(_PC, "POST", "ext/sessions/{session}/move", MoveSession, SessionMove, 16 * _KIB, SessionInfo),
    Resource(_II, "POST", "ext/sessions/{session}/output", StreamOutput,
             OutputRequest, MAX_SESSION_BODY_BYTES,
             answer_type=LINES_MEDIA_TYPE),
    Resource(_II, "POST", "ext/shards/{map}/attend", Attend,
             AttendRequest, 64 * _MIB, AttendAnswer, 64 * _MIB),
    Resource(_PC, "GET", "ext/instances", ListInstances,
             answer=InstanceListing, answer_limit_bytes=64 * _MIB),
    Resource(_PC, "GET", "ext/sessions", ListSessions, answer=SessionListing, answer_limit_bytes=64 * _MIB),
    Resource(_IS, "GET", "ext/index", DescribeIndex, answer=IndexInfo, answer_limit_bytes=16 * _MIB),
    Resource(_HOLDER, "GET", "ext/leases", ListLeases, answer=LeaseListing, answer_limit_bytes=64 * _MIB),
    Resource(_PC, "PUT", "ext/instances/{instance_id}/state", ChangeInstanceState,
             StateChange, 16 * _KIB, StatusAnswer),
    Resource(_PC, "PUT", "ext/shards/{map}", SplitContext, SplitRequest, 16 * _MIB, ShardMapInfo, 1 * _MIB),
    Resource(_PC, "GET", "ext/shards/{map}", GetShardMap, answer=ShardMapInfo, answer_limit_bytes=1 * _MIB),
    Resource(_PC, "DELETE", "ext/shards/{map}", EndShardMap),
)
# fmt: on

_BY_OPERATION: Final[Mapping[type, Resource]] = MappingProxyType({row.operation: row for row in RESOURCES})


def resource_of(operation: Operation) -> Resource:
    """Return the row of a typed request."""
    return _BY_OPERATION[type(operation)]


# Serving ----------------------------------------------------------------------------------------------------


@attrs.frozen
class Refusal:
    """Why a request has no meaning here: 404, 405 with the methods there are, or 400."""

    problem: Problem
    allow: tuple[str, ...] = ()


class Router:
    """Finds the typed request for the head of one, among the resources of the roles at a base URI."""

    def __init__(self, roles: Iterable[RoleName]) -> None:
        served = set(roles)
        rows = [row for row in RESOURCES if served & set(row.roles)]
        self._by_shape: dict[tuple[str, int], list[tuple[tuple[str, ...], list[Resource]]]] = {}
        for row in rows:
            shape = self._by_shape.setdefault((row.template[0], len(row.template)), [])
            for known, same in shape:
                if known == row.template:
                    same.append(row)
                    break
            else:
                shape.append((row.template, [row]))

    def route(self, request: Request) -> Operation | Refusal:
        """Return what a request asks for, or why it has no meaning here (HT-8).

        An identifier in the path or a query that is malformed is 400; whether it exists is not looked at.
        """
        segments = request.path.split("/")
        for template, rows in self._by_shape.get((segments[0], len(segments)), ()):
            if not _fits(template, segments):
                continue
            for row in rows:
                if row.method == request.method:
                    return _typed(row, segments, request.query)
            allow = tuple(row.method for row in rows)
            detail = f"this resource has {', '.join(allow)}"
            return Refusal(Problem(METHOD_NOT_ALLOWED, detail), allow)
        return Refusal(Problem(UNKNOWN_RESOURCE, "there is no such resource below this base URI"))


def check_head(operation: Operation, request: Request) -> Problem | None:
    """Return why the body of a request is not to be taken in, as far as its head shows, or None.

    Ask this once the client is known to be allowed what it asks for.
    """
    row = resource_of(operation)
    if not row.limit_bytes:
        return None
    if not row.body_required and request.content_length == 0:
        return None
    if request.content_encoding is not None and request.content_encoding.lower() != "identity":
        return Problem(UNSUPPORTED_MEDIA_TYPE, "content-encoding: no body is sent encoded in KVSP")
    if media_type(request.content_type) != row.body_type:
        return Problem(UNSUPPORTED_MEDIA_TYPE, f"content-type: expected {row.body_type}")
    if request.content_length is not None and request.content_length > row.limit_bytes:
        return Problem(TOO_LARGE, f"content-length: at most {row.limit_bytes} octets are taken here")
    return None


def _fits(template: tuple[str, ...], segments: list[str]) -> bool:
    return all(part == segment or part[0] == "{" for part, segment in zip(template, segments, strict=True))


def _typed(row: Resource, segments: list[str], query: str) -> Operation | Refusal:
    members: dict[str, object] = {}
    try:
        for part, segment in zip(row.template, segments, strict=True):
            if part[0] == "{":
                members[part[1:-1]] = _path_member(part[1:-1], segment)
        if row.query and query:
            members |= _query_members(query)
    except InvalidValue as error:
        return Refusal(Problem(BAD_REQUEST, str(error)))
    return row.operation(**members)  # type: ignore[arg-type]


_COMPONENT_ID: Final = re.compile(r"[A-Za-z0-9_-]{43}")


def _path_member(name: str, segment: str) -> str:
    """Return a part of the path as it is meant, or raise `InvalidValue`."""
    try:
        value = unquote(segment, errors="strict")
    except UnicodeDecodeError:
        raise fail("expected UTF-8 in percent encoding", name) from None
    match name:
        case "compat_id" | "block_key":
            check_hex(value, name)
        case "scope_id":
            check_hex(value, name, 32)
        case "holder_id" | "instance_id":
            if _COMPONENT_ID.fullmatch(value) is None:
                raise fail("expected base64url without padding of a SHA-256, 43 characters", name)
        case "session":
            check_uuid(value, name)
            return value.lower()
        case "lease":
            check_text(value, name, most=256)
        case _:
            check_identifier(value, name)
    return value


_LAYERS: Final = re.compile(r"([0-9]{1,10})-([0-9]{1,10})")
_CODEC: Final = re.compile(r"[0-9]{1,5}")


def _query_members(query: str) -> dict[str, object]:
    """Return ``layers=a-b`` and ``codec=n`` of a query; parameters we do not know are ignored."""
    members: dict[str, object] = {}
    for part in query.split("&"):
        name, _, value = part.partition("=")
        if name not in _QUERY:
            continue
        if name in members:
            raise fail("is given twice", name)
        value = unquote(value, errors="replace")
        if name == "layers":
            bounds = _LAYERS.fullmatch(value)
            if bounds is None or not int(bounds[1]) <= int(bounds[2]) <= MAX_UINT32:
                raise fail("expected two layers, first and last: layers=0-15", name)
            members[name] = (int(bounds[1]), int(bounds[2]))
        else:
            if _CODEC.fullmatch(value) is None or int(value) > 0xFFFF:
                raise fail("expected the number of a codec, 0 to 65535", name)
            members[name] = int(value)
    return members


# Calling ----------------------------------------------------------------------------------------------------


def request_for(
    operation: Operation, body: object = None, *, length: int | None = None
) -> tuple[Request, bytes]:
    """Return the head and the body of a request.

    `body` is a record or message, or the octets of one encoded already. For a block, whose octets go their
    own way, give its `length`.
    """
    row = resource_of(operation)
    octets = body if isinstance(body, bytes) else b"" if body is None else encode(body)
    path = "/".join(
        quote(getattr(operation, part[1:-1]), safe="") if part[0] == "{" else part for part in row.template
    )
    query = []
    if isinstance(operation, GetBlock | HeadBlock):
        if operation.layers is not None:
            query.append("layers={}-{}".format(*operation.layers))
        if operation.codec is not None:
            query.append(f"codec={operation.codec}")
    is_block = row.operation is StoreBlock
    content_length = length if length is not None else len(octets)
    return (
        Request(
            method=row.method,
            path=path,
            query="&".join(query),
            content_type=row.body_type if content_length else None,
            content_length=content_length,
            if_none_match="*" if is_block else None,
        ),
        octets,
    )
