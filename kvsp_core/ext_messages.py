"""The bodies of our own resources: sessions, shards that compute in place, and what operators see.

Other implementations never need them (decisions W31 to W33). Form as in `kvsp_core.messages`.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from kvsp_core.bodies import from_members, parse
from kvsp_core.limits import MAX_AVOIDED_INSTANCES
from kvsp_core.records import InstanceStatus, Sampler, Shard
from kvsp_core.validation import (
    MAX_UINT32,
    check_array,
    check_base_uri,
    check_base_uris,
    check_boolean,
    check_hex,
    check_hexes,
    check_holder,
    check_integer,
    check_name,
    check_octets,
    check_optional_integer,
    check_ranges,
    check_share,
    check_text,
    check_token_range,
    check_tokens,
    check_uuid,
    fail,
)

__all__ = [
    "AttendAnswer",
    "AttendRequest",
    "CandidateCost",
    "HolderInfo",
    "IndexInfo",
    "InstanceInfo",
    "InstanceListing",
    "LeaseInfo",
    "LeaseListing",
    "MissedBlocks",
    "OutputEnd",
    "OutputLine",
    "OutputRequest",
    "OutputToken",
    "PlacementAnswer",
    "PlacementRequest",
    "ScopedPrefix",
    "SessionInfo",
    "SessionListing",
    "SessionMove",
    "ShardMapInfo",
    "SplitRequest",
    "decode_output_line",
]


# Placement and sessions -------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ScopedPrefix:
    """The block keys of a prompt in one scope, in prefix order."""

    scope_id: str = attrs.field(repr=False)
    block_keys: tuple[str, ...] = attrs.field(repr=False)

    def __attrs_post_init__(self) -> None:
        check_hex(self.scope_id, "scope_id", 32)
        check_hexes(self.block_keys, "block_keys")


@attrs.frozen(kw_only=True)
class PlacementRequest:
    """POST ext/placements: where should this request go (decision W31).

    The first of `prefixes` is in the scope of the session, further ones are in shared scopes (decision W24).
    `deterministic` asks for instances whose results are bit-identical, so that a failover repeats them.
    `avoid` are instances on which the request has failed before: it goes there only where no other can take
    it.
    """

    compat_id: str = attrs.field(repr=False)
    prefixes: tuple[ScopedPrefix, ...]
    token_count: int
    deterministic: bool = False
    avoid: tuple[str, ...] = attrs.field(default=(), metadata={"omit_empty": True})

    def __attrs_post_init__(self) -> None:
        check_hex(self.compat_id, "compat_id")
        check_array(self.prefixes, "prefixes", 1)
        if len({prefix.scope_id for prefix in self.prefixes}) != len(self.prefixes):
            raise fail("expected each scope once", "prefixes")
        check_integer(self.token_count, "token_count", 1, MAX_UINT32)
        check_boolean(self.deterministic, "deterministic")
        check_base_uris(self.avoid, "avoid")
        if len(self.avoid) > MAX_AVOIDED_INSTANCES:
            raise fail(f"expected at most {MAX_AVOIDED_INSTANCES} instances", "avoid")


@attrs.frozen(kw_only=True)
class CandidateCost:
    """What a request would cost at an instance; `refused` says why it could not go there."""

    instance: str
    refused: str | None = None
    cost_us: int | None = None
    wait_us: int
    fetch_us: int
    recompute_us: int | None = None
    resident_tokens: int
    fetched_tokens: int
    recomputed_tokens: int
    explanation: str

    def __attrs_post_init__(self) -> None:
        check_base_uri(self.instance, "instance")
        if self.refused is not None:
            check_text(self.refused, "refused")
        for member in ("wait_us", "fetch_us", "resident_tokens", "fetched_tokens", "recomputed_tokens"):
            check_integer(getattr(self, member), member)
        check_optional_integer(self.cost_us, "cost_us")
        check_optional_integer(self.recompute_us, "recompute_us")
        check_text(self.explanation, "explanation")


@attrs.frozen(kw_only=True)
class MissedBlocks:
    """Why a run of blocks, by their indices (half open), could not be loaded: ``no replica``."""

    blocks: tuple[int, int]
    reason: str

    def __attrs_post_init__(self) -> None:
        check_token_range(self.blocks, "blocks")
        check_text(self.reason, "reason")


@attrs.frozen(kw_only=True)
class PlacementAnswer:
    """Answers a placement: the session, who owns it in which epoch, and why it went there."""

    session: str = attrs.field(repr=False)
    epoch: int
    instance: str
    request_ref: str = attrs.field(repr=False)
    candidates: tuple[CandidateCost, ...] = attrs.field(default=(), metadata={"omit_empty": True})
    misses: tuple[MissedBlocks, ...] = attrs.field(default=(), metadata={"omit_empty": True})

    def __attrs_post_init__(self) -> None:
        check_uuid(self.session, "session")
        check_integer(self.epoch, "epoch")
        check_base_uri(self.instance, "instance")
        check_text(self.request_ref, "request_ref")
        check_array(self.candidates, "candidates")
        check_array(self.misses, "misses")


@attrs.frozen(kw_only=True)
class SessionInfo:
    """Answers GET ext/sessions/{session}: who owns it in which epoch, and how far it is.

    `state` is ``placed``, ``running``, ``resuming``, ``finished``, ``cancelled`` or ``failed``; `detail` says
    why it failed. `instance` is absent while there is none.
    """

    session: str = attrs.field(repr=False)
    state: str
    epoch: int
    instance: str | None = None
    output_offset: int
    detail: str | None = None

    def __attrs_post_init__(self) -> None:
        check_uuid(self.session, "session")
        check_name(self.state, "state")
        check_integer(self.epoch, "epoch")
        if self.instance is not None:
            check_base_uri(self.instance, "instance")
        check_integer(self.output_offset, "output_offset")
        if self.detail is not None:
            check_text(self.detail, "detail")


@attrs.frozen(kw_only=True)
class SessionMove:
    """POST ext/sessions/{session}/move: the engine of its instance has failed in this epoch, so have another
    instance go on (decision W31). Where the session has gone on already nothing changes; answered with a
    `SessionInfo`.
    """

    epoch: int

    def __attrs_post_init__(self) -> None:
        check_integer(self.epoch, "epoch")


@attrs.frozen(kw_only=True)
class OutputRequest:
    """POST ext/sessions/{session}/output: stream the output tokens from this index on (decision W31).

    A new session brings `prompt`, `sampler` and where it belongs; one that goes on brings `prompt` only where
    it was asked for by 428.
    """

    from_index: int
    epoch: int
    compat_id: str | None = attrs.field(default=None, repr=False)
    scope_id: str | None = attrs.field(default=None, repr=False)
    prompt: tuple[int, ...] | None = attrs.field(default=None, repr=False)
    sampler: Sampler | None = None
    request_ref: str | None = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        check_integer(self.from_index, "from_index")
        check_integer(self.epoch, "epoch")
        if self.compat_id is not None:
            check_hex(self.compat_id, "compat_id")
        if self.scope_id is not None:
            check_hex(self.scope_id, "scope_id", 32)
        if self.prompt is not None:
            check_tokens(self.prompt, "prompt")
            check_array(self.prompt, "prompt", 1)
        if self.sampler is not None:
            for member in ("compat_id", "scope_id", "prompt"):
                if getattr(self, member) is None:
                    raise fail("is missing; a new session brings it with its sampler", member)
        if self.request_ref is not None:
            check_text(self.request_ref, "request_ref", least=0)


@attrs.frozen(kw_only=True)
class OutputToken:
    """A line of streamed output: one token."""

    index: int
    epoch: int
    token: int = attrs.field(repr=False)

    def __attrs_post_init__(self) -> None:
        check_integer(self.index, "index")
        check_integer(self.epoch, "epoch")
        check_integer(self.token, "token", 0, MAX_UINT32)


@attrs.frozen(kw_only=True)
class OutputEnd:
    """The last line of streamed output: why it ends, before which index. `detail` explains an ``error``, and
    `refused` says that it is no failure: the engine does not serve what was asked.
    """

    end: str
    index: int
    epoch: int
    detail: str | None = None
    refused: bool | None = None

    def __attrs_post_init__(self) -> None:
        check_name(self.end, "end")
        check_integer(self.index, "index")
        check_integer(self.epoch, "epoch")
        if self.detail is not None:
            check_text(self.detail, "detail")
        if self.refused is not None:
            check_boolean(self.refused, "refused")


OutputLine: TypeAlias = OutputToken | OutputEnd


def decode_output_line(line: bytes) -> OutputLine:
    """Return what a line of streamed output holds. Raises `RemoteProtocolError`."""
    members = parse(line)
    if isinstance(members, dict) and "end" in members:
        return from_members(OutputEnd, members)
    return from_members(OutputToken, members)


# Shards that compute in place -------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class AttendRequest:
    """POST ext/shards/{map}/attend: attend from these queries of one layer over the range held here.

    `queries` are fp32, little endian, [queries, heads, head_dim] row-major, after positional encoding and
    scaling, of positions behind the range; base64 in JSON. `version` is that of the shard map.
    """

    version: int
    layer: int
    queries: bytes = attrs.field(repr=False)

    def __attrs_post_init__(self) -> None:
        check_integer(self.version, "version")
        check_integer(self.layer, "layer", 0, MAX_UINT32)
        check_octets(self.queries, "queries", 4)


@attrs.frozen(kw_only=True)
class AttendAnswer:
    """Answers with attention over the `ranges` that are held, and over nothing else: `output` like the
    queries, normalised over them, and `log_sum_exp` of the scores, fp32 [queries, heads]; base64 in JSON.

    Ranges are held in complete blocks. The tokens behind the last one have no block key, and whoever decodes
    has them.
    """

    output: bytes = attrs.field(repr=False)
    log_sum_exp: bytes = attrs.field(repr=False)
    ranges: tuple[tuple[int, int], ...] = attrs.field(default=(), metadata={"omit_empty": True})

    def __attrs_post_init__(self) -> None:
        check_octets(self.output, "output", 4)
        check_octets(self.log_sum_exp, "log_sum_exp", 4)
        check_ranges(self.ranges, "ranges")


# What operators see -----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class InstanceInfo:
    """What the controller knows of an instance; `status` is its last report, absent once it has failed."""

    instance: str
    state: str
    wanted_state: str | None = None
    epoch: int
    sessions: int
    status: InstanceStatus | None = None

    def __attrs_post_init__(self) -> None:
        check_base_uri(self.instance, "instance")
        check_name(self.state, "state")
        if self.wanted_state is not None:
            check_name(self.wanted_state, "wanted_state")
        check_integer(self.epoch, "epoch")
        check_integer(self.sessions, "sessions")


@attrs.frozen(kw_only=True)
class InstanceListing:
    """Answers GET ext/instances."""

    instances: tuple[InstanceInfo, ...]


@attrs.frozen(kw_only=True)
class SessionListing:
    """Answers GET ext/sessions."""

    sessions: tuple[SessionInfo, ...]


@attrs.frozen(kw_only=True)
class HolderInfo:
    """How many records a holder has at the index."""

    holder: str
    records: int

    def __attrs_post_init__(self) -> None:
        check_holder(self.holder, "holder")
        check_integer(self.records, "records")


@attrs.frozen(kw_only=True)
class IndexInfo:
    """Answers GET ext/index."""

    records: int
    size_bytes: int
    holders: tuple[HolderInfo, ...]

    def __attrs_post_init__(self) -> None:
        check_integer(self.records, "records")
        check_integer(self.size_bytes, "size_bytes")


@attrs.frozen(kw_only=True)
class LeaseInfo:
    """A lease at a holder: whose it is, how much it keeps, how long it still runs."""

    client: str
    blocks: int
    size_bytes: int
    ttl_ms: int

    def __attrs_post_init__(self) -> None:
        check_text(self.client, "client", most=2048)
        check_integer(self.blocks, "blocks")
        check_integer(self.size_bytes, "size_bytes")
        check_integer(self.ttl_ms, "ttl_ms")


@attrs.frozen(kw_only=True)
class LeaseListing:
    """Answers GET ext/leases. `leased_share` is the share of the holder's octets that is leased."""

    leases: tuple[LeaseInfo, ...]
    leased_share: float

    def __attrs_post_init__(self) -> None:
        check_share(self.leased_share, "leased_share")


@attrs.frozen(kw_only=True)
class SplitRequest:
    """PUT ext/shards/{map}: split a context over these instances, or split it anew (decision W33).

    Of a context of `token_count` tokens `block_keys` names the complete blocks. The controller chooses the
    ranges: equal shares, so that the fewest tokens move.
    """

    compat_id: str = attrs.field(repr=False)
    scope_id: str = attrs.field(repr=False)
    block_keys: tuple[str, ...] = attrs.field(repr=False)
    block_tokens: int
    token_count: int
    instances: tuple[str, ...]

    def __attrs_post_init__(self) -> None:
        check_hex(self.compat_id, "compat_id")
        check_hex(self.scope_id, "scope_id", 32)
        check_hexes(self.block_keys, "block_keys")
        check_integer(self.block_tokens, "block_tokens", 1, MAX_UINT32)
        check_integer(self.token_count, "token_count", 1, MAX_UINT32)
        check_base_uris(self.instances, "instances")
        check_array(self.instances, "instances", 1)
        blocks = self.token_count // self.block_tokens
        if len(self.block_keys) != blocks:
            raise fail(f"expected the keys of the {blocks} complete blocks of the context", "block_keys")


@attrs.frozen(kw_only=True)
class ShardMapInfo:
    """Answers GET and PUT ext/shards/{map}: the authoritative shards, and whether a change is under way.

    `state` is ``stable``, ``preparing``, ``committing`` or ``aborting``. `planned` is the highest version
    that was ever planned: while stable, more than `version` means that the last change was given up.
    """

    version: int
    planned: int
    state: str
    shards: tuple[Shard, ...]

    def __attrs_post_init__(self) -> None:
        check_integer(self.version, "version")
        check_integer(self.planned, "planned")
        check_name(self.state, "state")
        check_array(self.shards, "shards")
