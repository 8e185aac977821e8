"""The records of the protocol: replicas, instances, sessions, shard maps (section "Records").

Attributes have the names of the JSON members. Sequences are tuples, octets are lowercase hex. Every record is
checked when it is built: `InvalidValue` names the member. `kvsp_core.bodies` reads and writes them as JSON.
Requirements RR-2 to RR-6, RS-1; decisions W1 to W9 and W32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

import attrs
import msgspec

from kvsp_core.registries import STORAGE_TIERS
from kvsp_core.validation import (
    MAX_INTEGER,
    MAX_UINT32,
    Parameters,
    are_hex_digits,
    check_array,
    check_base_uri,
    check_boolean,
    check_digest,
    check_hex,
    check_hexes,
    check_holder,
    check_identifier,
    check_integer,
    check_name,
    check_optional_integer,
    check_pair,
    check_share,
    check_text,
    check_token_range,
    check_tokens,
    check_uuid,
    fail,
    is_plain_base_uri,
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

# Replica records are read by the thousand. So what reading can check by type, at least cost, is in the types,
# and checked once more by a converter where a program builds a record; reading does not run converters.
_Layer: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_UINT32)]
_Rate: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
_Codec: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_CODEC)]
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
_Ttl: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
_Hex32: TypeAlias = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]


def _layers(value: tuple[int, int]) -> tuple[int, int]:
    check_pair(value, "layers", MAX_UINT32)
    return value


def _rate(value: int | None) -> int | None:
    check_optional_integer(value, "read_mbit_per_s")
    return value


def _codec(value: int) -> int:
    check_integer(value, "codec", 1, MAX_CODEC)
    return value


def _size(value: int) -> int:
    check_integer(value, "size")
    return value


def _ttl_ms(value: int) -> int:
    check_integer(value, "ttl_ms", 1)
    return value


def _layer_digests(value: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if value is not None:
        check_hexes(value, "layer_digests")
    return value


def _residency(value: tuple[Residency, ...]) -> tuple[Residency, ...]:
    check_array(value, "residency", 1)
    return value


@attrs.frozen(kw_only=True)
class Residency:
    """Which layers of a replica are in a tier: an inclusive range.

    `read_mbit_per_s` is the rate at which the holder reads that tier, None or 0 where it is not known. A tier
    may be newer than this program; it then counts as the slowest.
    """

    tier: str
    layers: tuple[_Layer, _Layer] = attrs.field(converter=_layers)
    read_mbit_per_s: _Rate | None = attrs.field(default=None, converter=_rate)

    def __attrs_post_init__(self) -> None:
        first, last = self.layers
        if first > last:
            raise fail("expected the first layer of an inclusive range before its last", "layers")
        if self.tier not in _KNOWN_TIERS:
            check_name(self.tier, "tier")


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
    codec: _Codec = attrs.field(converter=_codec)
    size: _Size = attrs.field(converter=_size)
    digest: str = attrs.field(repr=False)
    layer_digests: tuple[_Hex32, ...] | None = attrs.field(default=None, repr=False, converter=_layer_digests)
    residency: tuple[Residency, ...] = attrs.field(converter=_residency)
    ttl_ms: _Ttl = attrs.field(converter=_ttl_ms)
    moqt_namespace: str | None = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        """Pass a sound record of the usual kind at the least cost: all that is hex is looked at as one text.

        Of any other, find out whether it is unusual or wrong.
        """
        layer_digests = self.layer_digests
        if layer_digests is None or self.moqt_namespace is not None or len(self.digest) != 72:
            self._check()
            return
        next_layer = 0
        for entry in self.residency:
            first, last = entry.layers
            if first != next_layer:
                self._check()
                return
            next_layer = last + 1
        block_key, compat_id, scope_id = self.block_key, self.compat_id, self.scope_id
        joined = "".join(
            [block_key, compat_id, scope_id, self.digest.removeprefix("sha-256:"), *layer_digests]
        )
        if not (
            0 < next_layer <= len(layer_digests)
            and len(block_key) == len(compat_id) == 64
            and len(scope_id) == 32
            and len(joined) == 224 + 64 * len(layer_digests)
            and are_hex_digits(joined)
            and is_plain_base_uri(self.holder)
        ):
            self._check()

    def _check(self) -> None:
        check_hex(self.block_key, "block_key")
        check_hex(self.compat_id, "compat_id")
        check_hex(self.scope_id, "scope_id", 32)
        check_holder(self.holder, "holder")
        check_digest(self.digest, "digest")
        if self.layer_digests is not None:
            check_array(self.layer_digests, "layer_digests", 1)
            check_hexes(self.layer_digests, "layer_digests")
        self._check_residency()
        self._check_namespace()

    def _check_residency(self) -> None:
        check_array(self.residency, "residency", 1)
        next_layer = 0
        has_gap = False
        for first, last in sorted(entry.layers for entry in self.residency):
            if first < next_layer:
                raise fail("expected layer ranges that do not overlap", "residency")
            has_gap = has_gap or first > next_layer
            next_layer = last + 1
        if self.layer_digests is None and has_gap:
            raise fail("is missing; a replica that lacks layers is served by range", "layer_digests")
        if self.layer_digests is not None and next_layer > len(self.layer_digests):
            raise fail("expected an entry for every layer that residency names", "layer_digests")

    def _check_namespace(self) -> None:
        if self.holder.startswith("https://"):
            if self.moqt_namespace is not None:
                raise fail("is given only where the holder is a moqt URI", "moqt_namespace")
        elif self.moqt_namespace is None:
            raise fail("is missing; a moqt holder is named by it", "moqt_namespace")
        else:
            moqt_fields(self.moqt_namespace)

    def has_layers(self, first: int, last: int) -> bool:
        """Return whether every layer from `first` to `last`, both included, is resident."""
        for entry in sorted(self.residency, key=lambda entry: entry.layers):
            if entry.layers[0] <= first <= entry.layers[1]:
                first = entry.layers[1] + 1
        return first > last

    @property
    def is_whole(self) -> bool:
        """Whether all layers are there, as far as the record shows how many the block has."""
        layers = len(self.layer_digests or ()) or max(entry.layers[1] for entry in self.residency) + 1
        return self.has_layers(0, layers - 1)

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
    it then counts as not active. `compat_ids` (what it can compute, empty where it does not say), `seq` (the
    number of the report within the epoch), `numerics` and `failing` are ours (decision W32). `numerics` names
    what decides the last bits of its results: instances of one name repeat each other's tokens (CP-6).
    `failing` is true where its engine has failed several requests in a row: others are given work first.
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
    numerics: str | None = None
    failing: bool | None = None

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
        if self.numerics is not None:
            check_text(self.numerics, "numerics", most=256)
        if self.failing is not None:
            check_boolean(self.failing, "failing")


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
