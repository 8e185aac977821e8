"""The bodies of requests and answers, one class each (sections "Procedures" and "Records").

Attributes have the names of the JSON members; where a member's name is a word of Python, an underscore
follows (`from_`). Every message is checked when it is built, like a record. `kvsp_core.bodies` reads and
writes them, `kvsp_core.resources` says where each belongs. Members and messages that are ours are marked so;
other implementations never need them.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import attrs

from kvsp_core.bodies import from_members, parse
from kvsp_core.errors import LimitExceeded, RemoteProtocolError
from kvsp_core.limits import MAX_SHARD_BLOCK_KEYS, MAX_SHARD_RANGES
from kvsp_core.records import ReplicaRecord, SessionCheckpoint
from kvsp_core.strict_json import kind_of
from kvsp_core.validation import (
    check_array,
    check_base_uri,
    check_base_uris,
    check_digest,
    check_hex,
    check_hexes,
    check_holder,
    check_identifier,
    check_integer,
    check_name,
    check_ranges,
    check_text,
    check_token_range,
    fail,
)

__all__ = [
    "CheckpointRecorded",
    "DirectiveStatus",
    "FetchRange",
    "LeaseGranted",
    "LeaseRenewal",
    "LeaseRequest",
    "LookupAnswer",
    "LookupRequest",
    "MatchedBlock",
    "PrefetchBlock",
    "PrefetchDirective",
    "PublishAnswer",
    "ReshardAbort",
    "ReshardCommit",
    "ReshardMessage",
    "ReshardPlan",
    "ResumeRequest",
    "StateChange",
    "StatusAnswer",
    "TargetEstimate",
    "Withdrawal",
    "decode_reshard",
]


# Index: publishing and lookup -------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class PublishAnswer:
    """Answers PUT of a replica record: how long it is kept unless it is refreshed."""

    ttl_ms: int

    def __attrs_post_init__(self) -> None:
        check_integer(self.ttl_ms, "ttl_ms", 1)


@attrs.frozen(kw_only=True)
class Withdrawal:
    """May come with DELETE of a replica record: the digest that was found bad (decision W12)."""

    digest: str | None = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.digest is not None:
            check_digest(self.digest, "digest")


@attrs.frozen(kw_only=True)
class LookupRequest:
    """POST lookup: which of these blocks, in prefix order, have replicas, and where.

    `targets` are instances to estimate loading and computing for. `holders`, ours, are holders whose replicas
    are to be among those returned (decision W32).
    """

    scope_id: str = attrs.field(repr=False)
    compat_id: str = attrs.field(repr=False)
    block_keys: tuple[str, ...] = attrs.field(repr=False)
    targets: tuple[str, ...] = attrs.field(default=(), metadata={"omit_empty": True})
    holders: tuple[str, ...] = attrs.field(default=(), metadata={"omit_empty": True})

    def __attrs_post_init__(self) -> None:
        check_hex(self.scope_id, "scope_id", 32)
        check_hex(self.compat_id, "compat_id")
        check_hexes(self.block_keys, "block_keys")
        check_base_uris(self.targets, "targets")
        check_array(self.holders, "holders")
        for index, holder in enumerate(self.holders):
            check_holder(holder, f"holders[{index}]")


@attrs.frozen(kw_only=True)
class MatchedBlock:
    """A block that was found, with its replicas; their `ttl_ms` is what remains."""

    block_key: str = attrs.field(repr=False)
    replicas: tuple[ReplicaRecord, ...]

    def __attrs_post_init__(self) -> None:
        check_hex(self.block_key, "block_key")
        check_array(self.replicas, "replicas", 1)
        for index, replica in enumerate(self.replicas):
            if replica.block_key != self.block_key:
                raise fail("expected the key of the block", f"replicas[{index}].block_key")


@attrs.frozen(kw_only=True)
class TargetEstimate:
    """What it takes an instance to load the matched blocks, and to compute the same tokens."""

    instance: str
    fetch_us: int
    recompute_us: int

    def __attrs_post_init__(self) -> None:
        check_base_uri(self.instance, "instance")
        check_integer(self.fetch_us, "fetch_us")
        check_integer(self.recompute_us, "recompute_us")


@attrs.frozen(kw_only=True)
class LookupAnswer:
    """Answers a lookup: the leading blocks that have replicas, in order (decision W13)."""

    matched: int
    blocks: tuple[MatchedBlock, ...]
    targets: tuple[TargetEstimate, ...] = attrs.field(default=(), metadata={"omit_empty": True})

    def __attrs_post_init__(self) -> None:
        check_integer(self.matched, "matched")
        check_array(self.blocks, "blocks")
        check_array(self.targets, "targets")
        if self.matched != len(self.blocks):
            raise fail("expected the number of 'blocks'", "matched")


# Holder: leases ---------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class LeaseRequest:
    """POST leases: keep these blocks for so long (decision W16)."""

    block_keys: tuple[str, ...] = attrs.field(repr=False)
    ttl_ms: int

    def __attrs_post_init__(self) -> None:
        check_array(self.block_keys, "block_keys", 1)
        check_hexes(self.block_keys, "block_keys")
        check_integer(self.ttl_ms, "ttl_ms", 1)


@attrs.frozen(kw_only=True)
class LeaseGranted:
    """Answers POST and PUT of a lease: its identifier and how long it holds from when it was asked for."""

    lease: str = attrs.field(repr=False)
    ttl_ms: int

    def __attrs_post_init__(self) -> None:
        check_text(self.lease, "lease", most=256)
        check_integer(self.ttl_ms, "ttl_ms", 1)


@attrs.frozen(kw_only=True)
class LeaseRenewal:
    """PUT of a lease: hold it for so long from now; never shorter than it holds anyway."""

    ttl_ms: int

    def __attrs_post_init__(self) -> None:
        check_integer(self.ttl_ms, "ttl_ms", 1)


# Controller: status, checkpoints ----------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class StatusAnswer:
    """Answers a status with the state the controller wants, and PUT state with the state that is."""

    state: str

    def __attrs_post_init__(self) -> None:
        check_name(self.state, "state")


@attrs.frozen(kw_only=True)
class CheckpointRecorded:
    """Answers a checkpoint with what is now recorded (decision W19)."""

    epoch: int
    output_offset: int

    def __attrs_post_init__(self) -> None:
        check_integer(self.epoch, "epoch")
        check_integer(self.output_offset, "output_offset")


# Instance: state, prefetch, resume --------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class StateChange:
    """PUT state: be in this state (decision W15)."""

    state: str

    def __attrs_post_init__(self) -> None:
        check_name(self.state, "state")


@attrs.frozen(kw_only=True)
class PrefetchBlock:
    """A block to load and the holders that have it, in order of preference."""

    block_key: str = attrs.field(repr=False)
    sources: tuple[str, ...]

    def __attrs_post_init__(self) -> None:
        check_hex(self.block_key, "block_key")
        check_array(self.sources, "sources")
        for index, source in enumerate(self.sources):
            check_holder(source, f"sources[{index}]")


@attrs.frozen(kw_only=True)
class PrefetchDirective:
    """POST prefetch: load these blocks within `deadline_ms`, keep them for `lease_ms` (PF-1 to PF-7).

    `request_ref` means something to the controller only. A `layer_order` other than ``ascending``, or none,
    leaves the order to the instance.
    """

    directive: str
    request_ref: str | None = attrs.field(default=None, repr=False)
    scope_id: str = attrs.field(repr=False)
    compat_id: str = attrs.field(repr=False)
    blocks: tuple[PrefetchBlock, ...]
    layer_order: str | None = None
    deadline_ms: int
    lease_ms: int

    def __attrs_post_init__(self) -> None:
        check_identifier(self.directive, "directive")
        if self.request_ref is not None:
            check_text(self.request_ref, "request_ref", least=0)
        check_hex(self.scope_id, "scope_id", 32)
        check_hex(self.compat_id, "compat_id")
        check_array(self.blocks, "blocks", 1)
        if len({block.block_key for block in self.blocks}) != len(self.blocks):
            raise fail("expected each block once", "blocks")
        if self.layer_order is not None:
            check_name(self.layer_order, "layer_order")
        check_integer(self.deadline_ms, "deadline_ms", 1)
        check_integer(self.lease_ms, "lease_ms", 1)


@attrs.frozen(kw_only=True)
class DirectiveStatus:
    """Answers GET of a directive: ``pending``, ``partial``, ``complete`` or ``failed``; loaded keys."""

    directive: str
    state: str
    loaded: tuple[str, ...] = attrs.field(repr=False)
    request_ref: str | None = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        check_identifier(self.directive, "directive")
        check_name(self.state, "state")
        check_hexes(self.loaded, "loaded")
        if self.request_ref is not None:
            check_text(self.request_ref, "request_ref", least=0)


@attrs.frozen(kw_only=True)
class ResumeRequest:
    """POST resume: go on with a session from this checkpoint, in this epoch (decision W20)."""

    epoch: int
    checkpoint: SessionCheckpoint

    def __attrs_post_init__(self) -> None:
        check_integer(self.epoch, "epoch")


# Instance: resharding ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class FetchRange:
    """Token positions to load, and the instance that has them."""

    keyword_members: ClassVar = ("from",)

    tokens: tuple[int, int]
    from_: str

    def __attrs_post_init__(self) -> None:
        check_token_range(self.tokens, "tokens")
        check_base_uri(self.from_, "from")


@attrs.frozen(kw_only=True)
class ReshardPlan:
    """POST reshard: prepare to go from one version of a shard map to another (decision W21).

    `compat_id`, `scope_id`, `block_keys` (of the context's complete blocks, from position 0 on) and `assign`
    (positions owned anew that there is nothing to load for) are ours (decision W32).
    """

    keyword_members: ClassVar = ("from",)

    map: str = attrs.field(repr=False)
    from_: int
    to: int
    deadline_ms: int
    retain: tuple[tuple[int, int], ...]
    fetch: tuple[FetchRange, ...]
    release: tuple[tuple[int, int], ...]
    compat_id: str | None = attrs.field(default=None, repr=False)
    scope_id: str | None = attrs.field(default=None, repr=False)
    block_keys: tuple[str, ...] = attrs.field(default=(), repr=False, metadata={"omit_empty": True})
    assign: tuple[tuple[int, int], ...] = attrs.field(default=(), metadata={"omit_empty": True})

    def __attrs_post_init__(self) -> None:
        check_identifier(self.map, "map")
        check_integer(self.from_, "from")
        check_integer(self.to, "to", 1)
        if self.to <= self.from_:
            raise fail("expected a version above 'from'", "to")
        check_integer(self.deadline_ms, "deadline_ms", 1)
        check_array(self.fetch, "fetch")
        for member in ("retain", "release", "assign"):
            check_ranges(getattr(self, member), member)
        self._check_apart()
        if self.compat_id is not None:
            check_hex(self.compat_id, "compat_id")
        if self.scope_id is not None:
            check_hex(self.scope_id, "scope_id", 32)
        check_hexes(self.block_keys, "block_keys")
        if self.block_keys and (self.compat_id is None or self.scope_id is None):
            raise fail("is missing; block keys mean nothing without it", "compat_id")

    def _check_apart(self) -> None:
        """A position is kept, loaded, taken on or given up: one of these."""
        fetched = (entry.tokens for entry in self.fetch)
        end = 0
        for start, next_end in sorted((*self.retain, *fetched, *self.assign, *self.release)):
            if start < end:
                raise fail("names token positions twice in 'retain', 'fetch', 'assign' and 'release'")
            end = next_end


@attrs.frozen(kw_only=True)
class ReshardCommit:
    """POST reshard: the version planned now holds."""

    map: str = attrs.field(repr=False)
    commit: int

    def __attrs_post_init__(self) -> None:
        check_identifier(self.map, "map")
        check_integer(self.commit, "commit", 1)


@attrs.frozen(kw_only=True)
class ReshardAbort:
    """POST reshard: the version planned will never hold."""

    map: str = attrs.field(repr=False)
    abort: int

    def __attrs_post_init__(self) -> None:
        check_identifier(self.map, "map")
        check_integer(self.abort, "abort", 1)


ReshardMessage: TypeAlias = ReshardPlan | ReshardCommit | ReshardAbort


def decode_reshard(octets: bytes | bytearray | memoryview) -> ReshardMessage:
    """Return the plan, commit or abort that a body of POST reshard holds: told apart by their members.

    Raises `RemoteProtocolError` where it is none of them or more than one, and `LimitExceeded`, before a plan
    is looked at in detail, where it has more ranges or keys than a member takes.
    """
    members = parse(octets)
    if not isinstance(members, dict):
        raise RemoteProtocolError(f"expected an object, found {kind_of(members)}")
    _check_counts(members)
    match [name for name in ("to", "commit", "abort") if name in members]:
        case ["to"]:
            return from_members(ReshardPlan, members)
        case ["commit"]:
            return from_members(ReshardCommit, members)
        case ["abort"]:
            return from_members(ReshardAbort, members)
        case _:
            raise RemoteProtocolError("expected one of the members 'to', 'commit' and 'abort'")


def _check_counts(members: dict[str, object]) -> None:
    counted = {name: found for name, found in members.items() if isinstance(found, list)}
    if len(counted.get("block_keys", ())) > MAX_SHARD_BLOCK_KEYS:
        raise LimitExceeded(f"block_keys: at most {MAX_SHARD_BLOCK_KEYS} in a plan; use larger blocks")
    ranges = (counted.get(name, ()) for name in ("retain", "fetch", "assign", "release"))
    if sum(map(len, ranges)) > MAX_SHARD_RANGES:
        raise LimitExceeded(f"at most {MAX_SHARD_RANGES} ranges in a plan; join those that touch")
