"""Names of a prefix, its lookups, and the order in which replicas are tried."""

from __future__ import annotations

import attrs
import pytest

from kvsp_core.block_keys import block_keys
from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.limits import MAX_LOOKUP_KEYS
from kvsp_core.messages import LookupAnswer, MatchedBlock
from kvsp_core.prefix import Prefix, PrefixKeys, found_replicas, in_order
from kvsp_core.records import ReplicaRecord, Residency
from kvsp_core.storing import StoreOutcome, store_outcome
from kvsp_core.validation import InvalidValue

SCOPE = Scope(bytes(range(32)))
MODEL = CompatibilityDescriptor.from_members(
    {
        "model": "m",
        "model_digest": "sha-256:" + "1" * 64,
        "tokenizer_digest": "sha-256:" + "2" * 64,
        "layers": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "kv_dtype": "bf16",
        "positional": "rope",
        "block_tokens": 4,
        "layout": "kvsp-layout-1",
    }
)
H1, H2 = "https://h1.example/kvsp/", "https://h2.example/kvsp/"


def record(
    holder: str = H1, *, key: str = "ab" * 32, tier: str = "host", rate: int = 0, last: int = 3
) -> ReplicaRecord:
    return ReplicaRecord(
        block_key=key,
        compat_id=MODEL.compat_id,
        scope_id=SCOPE.scope_id,
        holder=holder,
        codec=1,
        size=1,
        digest="sha-256:" + "0" * 64,
        layer_digests=("0" * 64,) * 4,
        residency=(Residency(tier=tier, layers=(0, last), read_mbit_per_s=rate),),
        ttl_ms=1,
    )


def test_keys_are_those_of_the_complete_blocks() -> None:
    keys = PrefixKeys.of(SCOPE, MODEL, range(11))
    expected, _ = block_keys(SCOPE, MODEL, range(11))
    assert keys.keys == tuple(key.hex() for key in expected)
    assert (len(keys), keys.tokens) == (2, 8)
    assert keys.part(1).keys == keys.keys[1:]
    with pytest.raises(InvalidValue, match="keys"):
        PrefixKeys(descriptor=MODEL, scope_id=SCOPE.scope_id, keys=("AB",))
    with pytest.raises(LocalProtocolError):
        Prefix(keys=keys, replicas=())


@pytest.mark.requirement("LK-4")
def test_a_long_prefix_takes_consecutive_lookups() -> None:
    keys = PrefixKeys(
        descriptor=MODEL,
        scope_id=SCOPE.scope_id,
        keys=tuple(f"{number:064x}" for number in range(2 * MAX_LOOKUP_KEYS + 1)),
    )
    lookups = keys.lookups()
    assert [len(lookup.block_keys) for lookup in lookups] == [MAX_LOOKUP_KEYS, MAX_LOOKUP_KEYS, 1]
    assert sum((lookup.block_keys for lookup in lookups), ()) == keys.keys
    assert keys.part(0, 0).lookups() == ()
    assert [len(lookup.block_keys) for lookup in keys.part(0, 5).lookups(2)] == [2, 2, 1]


def test_only_what_was_asked_for_is_taken_from_an_answer() -> None:
    keys = PrefixKeys.of(SCOPE, MODEL, range(12))
    (request,) = keys.lookups()

    def answer(*blocks: tuple[str, tuple[ReplicaRecord, ...]]) -> LookupAnswer:
        matched = tuple(MatchedBlock(block_key=key, replicas=records) for key, records in blocks)
        return LookupAnswer(matched=len(matched), blocks=matched)

    first, second, third = (record(key=key) for key in keys.keys)
    foreign = attrs.evolve(second, scope_id="0" * 32)
    full = answer((keys.keys[0], (first,)), (keys.keys[1], (foreign, second)))
    assert found_replicas(request, full) == ((first,), (second,))
    gap = answer((keys.keys[0], (first,)), (keys.keys[1], (foreign,)), (keys.keys[2], (third,)))
    assert found_replicas(request, gap) == ((first,),)
    with pytest.raises(RemoteProtocolError, match="blocks"):
        found_replicas(request, answer((keys.keys[1], (second,))))


@pytest.mark.requirement("PB-5")
def test_replicas_are_tried_from_the_best_on() -> None:
    slow, fast = record(tier="local-storage"), record(tier="device")
    faster_rate, part = record(tier="device", rate=100), record(tier="device", last=1)
    assert in_order([slow, part, fast, faster_rate]) == (faster_rate, fast, slow, part)
    assert in_order([fast, slow], avoid=[H1]) == (fast, slow)
    assert in_order([record(H1, tier="device"), record(H2)], avoid={H1})[0].holder == H2


def test_equal_replicas_are_spread_over_holders() -> None:
    firsts = {
        in_order([record(H1, key=f"{n:064x}"), record(H2, key=f"{n:064x}")])[0].holder for n in range(20)
    }
    assert firsts == {H1, H2}


@pytest.mark.requirement("BR-6", "HT-6")
def test_what_the_status_of_a_store_means() -> None:
    meanings = {
        201: StoreOutcome.STORED,
        299: StoreOutcome.STORED,
        412: StoreOutcome.PRESENT,
        507: StoreOutcome.FULL,
        409: StoreOutcome.INCOMPATIBLE,
        422: StoreOutcome.CORRUPT,
        403: StoreOutcome.REFUSED,
        499: StoreOutcome.REFUSED,
        429: StoreOutcome.UNAVAILABLE,
        503: StoreOutcome.UNAVAILABLE,
        599: StoreOutcome.UNAVAILABLE,
    }
    assert {status: store_outcome(status) for status in meanings} == meanings
    assert {outcome for outcome in StoreOutcome if outcome.is_stored} == {
        StoreOutcome.STORED,
        StoreOutcome.PRESENT,
    }
    assert not StoreOutcome.CORRUPT.ends_all
    assert StoreOutcome.FULL.ends_all
