"""The records of the protocol: replicas, instances, sessions, shard maps (section "Records").

Attributes have the names of the JSON members. Sequences are tuples, octets are lowercase hex. Every record is
checked when it is built: `InvalidValue` names the member. `kvsp_core.bodies` reads and writes them as JSON.
Requirements RR-2 to RR-6, RS-1; decisions W1 to W9 and W32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import attrs

from kvsp_core.registries import STORAGE_TIERS
from kvsp_core.validation import (
    MAX_UINT32,
    Parameters,
    are_hex,
    check_array,
    check_base_uri,
    check_boolean,
    check_digest,
    check_hex,
    check_hexes,
    check_identifier,
    check_integer,
    check_moqt_uri,
    check_name,
    check_optional_integer,
    check_pair,
    check_share,
    check_text,
    check_token_range,
    check_tokens,
    check_uuid,
    fail,
    moqt_fields,
)

__all__ = [
    "InstanceStatus",
    "Link",
    "ReplicaRecord",
    "Residency",
    "Sampler",
    "SessionCheckpoint",
    "Shard",
    "ShardMap",
]

_KNOWN_TIERS: Final = frozenset(STORAGE_TIERS)

MAX_CODEC: Final = 0xFFFF
MIN_SEED: Final = -(2**63)
MAX_SEED: Final = 2**64 - 1


# Replicas ---------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Residency:
    """Which layers of a replica are in a tier: an inclusive range.

    `read_mbit_per_s` is the rate at which the holder reads that tier, None or 0 where it is not known. A tier
    may be newer than this program; it then counts as the slowest.
    """

    tier: str
    layers: tuple[int, int]
    read_mbit_per_s: int | None = None

    def __attrs_post_init__(self) -> None:
        first, last = self.layers
        if not (
            self.tier in _KNOWN_TIERS
            and type(first) is type(last) is int
            and 0 <= first <= last <= MAX_UINT32
            and self.read_mbit_per_s is None
        ):
            self._check()

    def _check(self) -> None:
        check_name(self.tier, "tier")
        check_pair(self.layers, "layers", MAX_UINT32)
        if self.layers[0] > self.layers[1]:
            raise fail("expected the first layer of an inclusive range before its last", "layers")
        check_optional_integer(self.read_mbit_per_s, "read_mbit_per_s")


@attrs.frozen(kw_only=True)
class ReplicaRecord:
    """A copy of a block, or of some of its layers, at a holder.

    `size` is the octets of all K and V sections. `layer_digests` has an entry for every layer of the block;
    None says that the replica is served whole only (RR-3). A `moqt` holder comes with a `moqt_namespace`, and
    its publisher is then the holder (RR-4).
    """

    block_key: str = attrs.field(repr=False)
    compat_id: str = attrs.field(repr=False)
    scope_id: str = attrs.field(repr=False)
    holder: str
    codec: int
    size: int
    digest: str = attrs.field(repr=False)
    layer_digests: tuple[str, ...] | None = attrs.field(default=None, repr=False)
    residency: tuple[Residency, ...]
    ttl_ms: int
    moqt_namespace: str | None = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        self._check_names()
        if self.holder.startswith("https://"):
            check_base_uri(self.holder, "holder")
            if self.moqt_namespace is not None:
                raise fail("is given only where the holder is a moqt URI", "moqt_namespace")
        else:
            self._check_moqt()
        check_integer(self.codec, "codec", 1, MAX_CODEC)
        check_integer(self.size, "size")
        check_integer(self.ttl_ms, "ttl_ms", 1)
        self._check_residency()

    def _check_names(self) -> None:
        """Check all that is hex in one pass; look at each only to say which one is wrong."""
        digest = self.digest
        scope_twice = self.scope_id * 2
        names = (self.block_key, self.compat_id, scope_twice, digest[8:], *(self.layer_digests or ()))
        if not (are_hex(names) and digest[:8] == "sha-256:"):
            check_hex(self.block_key, "block_key")
            check_hex(self.compat_id, "compat_id")
            check_hex(self.scope_id, "scope_id", 32)
            check_digest(digest, "digest")
            check_hexes(self.layer_digests or (), "layer_digests")
        if self.layer_digests is not None:
            check_array(self.layer_digests, "layer_digests", 1)

    def _check_moqt(self) -> None:
        if not self.holder.startswith("moqt://"):
            raise fail("expected a base URI that starts with 'https://', or a moqt URI", "holder")
        check_moqt_uri(self.holder, "holder")
        if self.moqt_namespace is None:
            raise fail("is missing; a moqt holder is named by it", "moqt_namespace")
        moqt_fields(self.moqt_namespace)

    def _check_residency(self) -> None:
        check_array(self.residency, "residency", 1)
        ranges = [entry.layers for entry in self.residency]
        ranges.sort()
        next_layer = 0
        gap = False
        for first, last in ranges:
            if first != next_layer:
                gap = True
                if first < next_layer:
                    raise fail("expected layer ranges that do not overlap", "residency")
            next_layer = last + 1
        if self.layer_digests is None:
            if gap:
                raise fail("is missing; a replica that lacks layers is served by range", "layer_digests")
        elif next_layer > len(self.layer_digests):
            raise fail("expected an entry for every layer that residency names", "layer_digests")

    def has_layers(self, first: int, last: int) -> bool:
        """Return whether every layer from `first` to `last`, both included, is resident."""
        for entry in sorted(self.residency, key=lambda entry: entry.layers):
            if entry.layers[0] <= first <= entry.layers[1]:
                first = entry.layers[1] + 1
        return first > last

    def digests_agree(self) -> bool:
        """Return whether `digest` is that of `layer_digests` (KC-5), or there are none to compare with."""
        if self.layer_digests is None:
            return True
        return self.digest[8:] == hashlib.sha256(bytes.fromhex("".join(self.layer_digests))).hexdigest()


# Instances --------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Link:
    """What an instance has measured towards a holder. A rate of 0 is one that is not known."""

    holder: str
    mbit_per_s: int
    rtt_us: int

    def __attrs_post_init__(self) -> None:
        check_base_uri(self.holder, "holder")
        check_integer(self.mbit_per_s, "mbit_per_s")
        check_integer(self.rtt_us, "rtt_us")


@attrs.frozen(kw_only=True)
class InstanceStatus:
    """What an instance reports of itself (the Instance Status Record).

    `requested_state` is a state the instance asks to be in, or None. A state may be newer than this program;
    it then counts as not active. `compat_ids` (what it can compute, empty where it does not say) and `seq`
    (the number of the report within the epoch) are ours (decision W32).
    """

    instance: str
    epoch: int
    state: str
    running: int
    queued: int
    batch_size: int
    kv_utilization: float
    prefill_tokens_per_s: int
    decode_tokens_per_s: int
    links: tuple[Link, ...]
    requested_state: str | None = attrs.field(default=None, metadata={"null": True})
    ttl_ms: int
    compat_ids: tuple[str, ...] = attrs.field(default=(), repr=False, metadata={"omit_empty": True})
    seq: int | None = None

    def __attrs_post_init__(self) -> None:
        check_base_uri(self.instance, "instance")
        check_integer(self.epoch, "epoch")
        check_name(self.state, "state")
        for member in ("running", "queued", "batch_size", "prefill_tokens_per_s", "decode_tokens_per_s"):
            check_integer(getattr(self, member), member)
        check_share(self.kv_utilization, "kv_utilization")
        check_array(self.links, "links")
        if len({link.holder for link in self.links}) != len(self.links):
            raise fail("expected one link for each holder", "links")
        if self.requested_state is not None:
            check_name(self.requested_state, "requested_state")
        check_integer(self.ttl_ms, "ttl_ms", 1)
        check_hexes(self.compat_ids, "compat_ids")
        check_optional_integer(self.seq, "seq")


# Sessions ---------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Sampler:
    """How output tokens are chosen, and where the random sequence stands: what a resume restores.

    `params` are for the sampling method to understand. `deterministic` is true only if every instance that
    may resume the session gives bit-identical tokens from the same state (CP-6).
    """

    method: str
    params: Mapping[str, Any] = attrs.field(default=Parameters(), repr=False)
    seed: int = attrs.field(repr=False)
    step: int
    deterministic: bool

    def __attrs_post_init__(self) -> None:
        check_text(self.method, "method", most=64)
        if type(self.params) is not Parameters:
            object.__setattr__(self, "params", Parameters(self.params, "params"))
        check_integer(self.seed, "seed", MIN_SEED, MAX_SEED)
        check_integer(self.step, "step")
        check_boolean(self.deterministic, "deterministic")


@attrs.frozen(kw_only=True)
class SessionCheckpoint:
    """From where another instance can go on with a session.

    `prompt_blocks` are the keys of the complete blocks of the prompt, `prompt_tail` its tokens after them.
    `generated` is every output token since the session began, over all epochs, and `output_offset` how many
    those are (decision W7). The session's UUID is kept in lowercase.
    """

    session: str = attrs.field(repr=False)
    epoch: int
    compat_id: str = attrs.field(repr=False)
    scope_id: str = attrs.field(repr=False)
    prompt_blocks: tuple[str, ...] = attrs.field(repr=False)
    prompt_tail: tuple[int, ...] = attrs.field(repr=False)
    generated: tuple[int, ...] = attrs.field(repr=False)
    output_offset: int
    sampler: Sampler

    def __attrs_post_init__(self) -> None:
        check_uuid(self.session, "session")
        object.__setattr__(self, "session", self.session.lower())
        check_integer(self.epoch, "epoch")
        check_hex(self.compat_id, "compat_id")
        check_hex(self.scope_id, "scope_id", 32)
        check_hexes(self.prompt_blocks, "prompt_blocks")
        check_tokens(self.prompt_tail, "prompt_tail")
        check_tokens(self.generated, "generated")
        check_integer(self.output_offset, "output_offset")
        if self.output_offset != len(self.generated):
            raise fail("expected the number of tokens in 'generated'", "output_offset")


# Shard maps -------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Shard:
    """The token positions an instance holds of a context: a half-open range."""

    tokens: tuple[int, int]
    instance: str

    def __attrs_post_init__(self) -> None:
        check_token_range(self.tokens, "tokens")
        check_base_uri(self.instance, "instance")


@attrs.frozen(kw_only=True)
class ShardMap:
    """How one context is split over instances: ranges from position 0 on, without gap or overlap (RS-1).

    Before its first version and after its last a map has no shards.
    """

    map: str = attrs.field(repr=False)
    version: int
    shards: tuple[Shard, ...]

    def __attrs_post_init__(self) -> None:
        check_identifier(self.map, "map")
        check_integer(self.version, "version")
        check_array(self.shards, "shards")
        end = 0
        for index, shard in enumerate(self.shards):
            if shard.tokens[0] != end:
                raise fail(f"expected a range that starts at {end}", f"shards[{index}].tokens")
            end = shard.tokens[1]
