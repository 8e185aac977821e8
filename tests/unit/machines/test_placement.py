"""Where a request goes: the estimates of the protocol, the choice, and the reasons for both."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp_core.block_keys import block_keys
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.machines.placement import (
    Candidate,
    Known,
    LowestCost,
    Miss,
    MissReason,
    Prompt,
    SourceLoad,
    evaluate,
    explain_miss,
    explain_misses,
    fetch_estimate,
    mean_service_us,
    place,
    recompute_us,
)
from kvsp_core.records import InstanceStatus, Link, ReplicaRecord, Residency

I7, I9 = "https://ii7.example/kvsp/", "https://ii9.example/kvsp/"
H1, H2, H3 = "https://h1.example/kvsp/", "https://h2.example/kvsp/", "https://h3.example/kvsp/"
COMPAT, OTHER_COMPAT = "5e" * 32, "6f" * 32
SCOPE, OTHER_SCOPE = "6d" * 16, "7e" * 16
LAYERS = 32
DESCRIPTOR = {
    "model": "example-model",
    "model_digest": "sha-256:" + "11" * 32,
    "tokenizer_digest": "sha-256:" + "22" * 32,
    "layers": LAYERS,
    "kv_heads": 8,
    "head_dim": 128,
    "kv_dtype": "bf16",
    "positional": "rope",
    "block_tokens": 4,
    "layout": "kvsp-layout-1",
}


def replica(
    holder: str,
    *layers: tuple[int, int],
    digest: str = "aa",
    size: int = 2_000_000,
    read_mbit_per_s: int | None = None,
    tier: str = "host",
) -> ReplicaRecord:
    return ReplicaRecord(
        block_key="11" * 32,
        compat_id=COMPAT,
        scope_id=SCOPE,
        holder=holder,
        codec=1,
        size=size,
        digest="sha-256:" + digest * 32,
        layer_digests=("22" * 32,) * LAYERS,
        residency=tuple(
            Residency(tier=tier, layers=each, read_mbit_per_s=read_mbit_per_s)
            for each in (layers or ((0, LAYERS - 1),))
        ),
        ttl_ms=60_000,
    )


def link(holder: str, mbit_per_s: int, rtt_us: int = 0) -> Link:
    return Link(holder=holder, mbit_per_s=mbit_per_s, rtt_us=rtt_us)


def status(instance: str = I7, *links: Link, **changes: object) -> InstanceStatus:
    base = InstanceStatus(
        instance=instance,
        epoch=12,
        state="active",
        running=1,
        queued=0,
        batch_size=32,
        kv_utilization=0.5,
        prefill_tokens_per_s=40_000,
        decode_tokens_per_s=3_100,
        links=links,
        ttl_ms=3_000,
    )
    return attrs.evolve(base, **changes)  # type: ignore[arg-type]


# Estimates


@pytest.mark.requirement("PL-1")
def test_one_source_costs_its_round_trip_and_its_octets() -> None:
    estimate = fetch_estimate(I7, [link(H1, 200_000, rtt_us=12)], [[replica(H1)]] * 3)
    assert estimate.fetch_us == 12 + 8 * 3 * 2_000_000 // 200_000
    assert estimate.loads == (SourceLoad(holder=H1, size_bytes=6_000_000, fetch_us=252),)


@pytest.mark.requirement("PL-1")
def test_sources_work_in_parallel_and_the_slowest_counts() -> None:
    blocks = [[replica(H1)], [replica(H2)]]
    estimate = fetch_estimate(I7, [link(H1, 100_000), link(H2, 50_000)], blocks)
    assert estimate.fetch_us == max(160, 320)


@pytest.mark.requirement("PL-1")
def test_each_block_goes_to_the_source_that_finishes_it_first() -> None:
    both = [replica(H1), replica(H2)]
    estimate = fetch_estimate(I7, [link(H1, 100_000), link(H2, 50_000)], [both] * 3)
    assert [(load.holder, load.size_bytes) for load in estimate.loads] == [(H1, 4_000_000), (H2, 2_000_000)]
    assert estimate.fetch_us == 320


@pytest.mark.requirement("PL-1")
def test_a_storage_tier_slows_the_layers_that_are_in_it() -> None:
    record = attrs.evolve(
        replica(H1),
        residency=(
            Residency(tier="device", layers=(0, 15)),
            Residency(tier="local-storage", layers=(16, 31), read_mbit_per_s=50_000),
        ),
    )
    assert fetch_estimate(I7, [link(H1, 200_000)], [[record]]).fetch_us == 40 + 160
    faster_tier = attrs.evolve(record, residency=(attrs.evolve(record.residency[1], layers=(0, 31)),))
    assert fetch_estimate(I7, [link(H1, 10_000)], [[faster_tier]]).fetch_us == 1600


@pytest.mark.requirement("PL-1")
def test_what_is_resident_is_free() -> None:
    estimate = fetch_estimate(I7, [link(H1, 100_000)], [[replica(I7), replica(H1)], [replica(H1)]])
    assert (estimate.blocks, estimate.resident_blocks, estimate.fetch_us) == (2, 1, 160)


@pytest.mark.requirement("PL-1")
def test_layers_of_several_sources_make_a_block_where_their_digest_is_the_same() -> None:
    links = [link(H1, 100_000), link(H2, 100_000)]
    halves = [replica(H1, (0, 15)), replica(H2, (16, 31))]
    assert fetch_estimate(I7, links, [halves]).fetch_us == 80
    mixed = [replica(H1, (0, 15)), replica(H2, (16, 31), digest="bb")]
    assert fetch_estimate(I7, links, [mixed]).blocks == 0
    overlapping = [replica(H1, (0, 23)), replica(H2, (8, 31))]
    assert fetch_estimate(I7, links, [overlapping]).fetch_us == 120


@pytest.mark.requirement("PL-1")
def test_blocks_behind_a_gap_do_not_count() -> None:
    links = [link(H1, 100_000)]
    assert fetch_estimate(I7, links, [[replica(H1)], [], [replica(H1)]]).blocks == 1
    assert fetch_estimate(I7, links, [[replica(H1)], [replica(H3)], [replica(H1)]]).blocks == 1
    assert fetch_estimate(I7, [link(H1, 0)], [[replica(H1)]]).blocks == 0
    assert fetch_estimate(I7, links, [[replica(H1, (0, 15))]], layers=32).blocks == 0


def test_a_partial_replica_here_does_not_make_a_block_resident() -> None:
    assert fetch_estimate(I7, [], [[replica(I7, (0, 15))]]).resident_blocks == 0


def test_without_layer_digests_and_descriptor_the_highest_layer_counts_as_the_last() -> None:
    record = attrs.evolve(replica(H1), layer_digests=None)
    assert fetch_estimate(I7, [link(H1, 100_000)], [[record]]).blocks == 1
    assert fetch_estimate(I7, [link(H1, 100_000)], [[record]], layers=40).blocks == 0


def test_recompute_and_mean_service_time() -> None:
    assert recompute_us(42_000, 42_000) == 1_000_000
    assert recompute_us(1, 0) is None
    assert recompute_us(0, 0) == 0
    assert mean_service_us(1000, 1800) == 1100


@given(
    st.lists(st.lists(st.sampled_from([H1, H2, H3]), unique=True, max_size=3), max_size=6),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
)
def test_no_source_is_asked_for_more_than_the_slowest_would_take_alone(
    holders: list[list[str]], rates: tuple[int, int, int]
) -> None:
    links = [link(holder, rate * 10_000, 5) for holder, rate in zip((H1, H2, H3), rates, strict=True)]
    blocks = [[replica(holder) for holder in each] for each in holders]
    estimate = fetch_estimate(I7, links, blocks)
    leading = next((i for i, each in enumerate(holders) if not each), len(holders))
    assert estimate.blocks == leading
    assert sum(load.size_bytes for load in estimate.loads) == leading * 2_000_000
    assert estimate.fetch_us <= 5 + leading * 1600
    for load in estimate.loads:
        rate = {each.holder: each.mbit_per_s for each in links}[load.holder]
        assert load.fetch_us == pytest.approx(5 + 8 * load.size_bytes / rate, abs=1)


# Candidates


def prompt(*blocks: list[ReplicaRecord], tokens: int = 1000) -> Prompt:
    return Prompt(tokens=tokens, block_tokens=256, layers=LAYERS, blocks=blocks)


@pytest.mark.requirement("PL-1")
def test_the_cost_is_waiting_and_the_cheaper_of_loading_and_computing() -> None:
    loads = evaluate(
        status(I7, link(H1, 100_000, 10), queued=3),
        prompt([replica(H1)], [replica(H1)]),
        mean_service_us=2000,
    )
    assert loads.wait_us == 6000
    assert (loads.fetched_tokens, loads.recomputed_tokens) == (512, 488)
    assert loads.fetch_us == 330
    assert loads.recompute_us == 12_200
    assert loads.cost_us == 6000 + 330 + 12_200
    slow = evaluate(status(I7, link(H1, 100, 10)), prompt([replica(H1)]), mean_service_us=2000)
    assert (slow.fetched_tokens, slow.recomputed_tokens, slow.cost_us) == (0, 1000, 25_000)
    assert slow.loads == ()


@pytest.mark.requirement("PL-1")
def test_resident_blocks_are_neither_loaded_nor_computed() -> None:
    here = evaluate(status(I7), prompt([replica(I7)], [replica(I7)]), mean_service_us=0)
    assert (here.resident_tokens, here.fetched_tokens, here.recomputed_tokens) == (512, 0, 488)
    assert here.cost_us == 12_200
    slow_link = status(I7, link(H1, 100, 10))
    mixed = evaluate(slow_link, prompt([replica(I7)], [replica(H1)]), mean_service_us=0)
    assert (mixed.resident_tokens, mixed.fetched_tokens, mixed.recomputed_tokens) == (256, 0, 744)


def test_an_unknown_prefill_rate_gives_no_cost_unless_nothing_is_computed() -> None:
    unknown = status(I7, link(H1, 100_000), prefill_tokens_per_s=0)
    assert evaluate(unknown, prompt([replica(H1)]), mean_service_us=0).cost_us is None
    assert evaluate(unknown, prompt([replica(H1)], tokens=256), mean_service_us=0).cost_us == 160


@pytest.mark.requirement("LC-2", "PL-2")
@pytest.mark.parametrize("state", ["draining", "sleeping", "failed", "hibernating"])
def test_an_instance_that_is_not_active_gets_nothing(state: str) -> None:
    result = place(prompt(), [status(state=state)], mean_service_us={}, default_service_us=0)
    assert result.chosen is None
    assert result.candidates[0].refused == f"its state is {state}"


# Choosing


def candidate(instance: str, cost_us: int | None, **changes: object) -> Candidate:
    base = Candidate(
        instance=instance,
        queued=0,
        resident_tokens=0,
        fetched_tokens=0,
        recomputed_tokens=0,
        fetch_us=0,
        recompute_us=0,
        recompute_all_us=0,
        wait_us=0,
        cost_us=cost_us,
    )
    return attrs.evolve(base, **changes)  # type: ignore[arg-type]


@pytest.mark.requirement("PL-2")
def test_the_lowest_cost_wins_and_ties_are_broken_as_stated() -> None:
    choose = LowestCost().choose
    assert choose([candidate(I7, 5), candidate(I9, 4)]) == candidate(I9, 4)
    assert choose([candidate(I7, 5, queued=1), candidate(I9, 5)]) == candidate(I9, 5)
    warm = candidate(I9, 5, resident_tokens=16)
    assert choose([candidate(I7, 5), warm]) == warm
    assert choose([candidate(I9, 5), candidate(I7, 5)]) == candidate(I7, 5)
    assert choose([candidate(I7, None), candidate(I9, 10**9)]) == candidate(I9, 10**9)
    assert choose([candidate(I7, None)]) == candidate(I7, None)
    assert choose([candidate(I7, 1, refused="draining"), candidate(I9, 4)]) == candidate(I9, 4)
    assert choose([]) is None


def test_an_instance_that_warms_up_counts_as_dearer() -> None:
    assert LowestCost().choose([candidate(I7, 10, warmth=0.1), candidate(I9, 50)]) == candidate(I9, 50)


@pytest.mark.requirement("PL-3")
def test_nothing_is_chosen_where_nothing_is_acceptable() -> None:
    policy = LowestCost(acceptable_us=100)
    assert policy.choose([candidate(I7, 101)]) is None
    assert policy.choose([candidate(I7, 100)]) == candidate(I7, 100)


@pytest.mark.requirement("PL-2")
def test_the_policy_is_replaceable() -> None:
    class Last:
        def choose(self, candidates: object) -> Candidate | None:
            return candidates[-1]  # type: ignore[index, no-any-return]

    result = place(
        prompt(), [status(I9), status(I7)], mean_service_us={}, default_service_us=0, policy=Last()
    )
    assert result.chosen is not None
    assert result.chosen.instance == I9


@pytest.mark.requirement("PL-2")
def test_a_placement_explains_itself() -> None:
    instances = [
        status(I9, link(H1, 100_000)),
        status(I7, queued=2),
        status(H3, state="draining"),
        status(H2, prefill_tokens_per_s=0),
    ]
    result = place(
        prompt([replica(H1)]),
        instances,
        mean_service_us={I7: 500},
        default_service_us=100,
        warmth={I9: 0.5},
        refused={I7: "it was told to stop"},
        misses=(Miss(blocks=(1, 3), reason=MissReason.EXPIRED),),
    )
    assert result.explain() == (
        f"goes to {I9}",
        f"{I9}: 18760 us: 0 waiting, 160 loading 256 tokens, 18600 computing 744; 0 are here already",
        f"{H2}: cost unknown: no prefill rate is reported",
        f"{H3}: its state is draining",
        f"{I7}: it was told to stop",
        "blocks 1..2: expired",
    )
    nobody = place(prompt(), [], mean_service_us={}, default_service_us=0)
    assert nobody.explain() == ("goes to nobody: no instance is acceptable",)


# Misses


def miss(*known: Known) -> MissReason | None:
    return explain_miss(known, compat_id=COMPAT, scope_id=SCOPE, layers=LAYERS)


def test_why_a_block_did_not_match() -> None:
    record = replica(H1)
    assert miss() is MissReason.NO_REPLICA
    assert miss(Known(record)) is None
    assert miss(Known(record, expired=True)) is MissReason.EXPIRED
    assert miss(Known(attrs.evolve(record, compat_id=OTHER_COMPAT))) is MissReason.OTHER_COMPAT_ID
    assert miss(Known(attrs.evolve(record, scope_id=OTHER_SCOPE))) is MissReason.OTHER_SCOPE
    assert miss(Known(replica(H1, (0, 15)))) is MissReason.PARTIAL_LAYERS
    assert miss(Known(replica(H1, (0, 15))), Known(replica(H2, (16, 31)))) is None
    mixed = Known(replica(H1, (0, 15))), Known(replica(H2, (16, 31), digest="bb"))
    assert miss(*mixed) is MissReason.PARTIAL_LAYERS


def test_the_reason_that_came_closest_is_given() -> None:
    other_scope = Known(attrs.evolve(replica(H1), scope_id=OTHER_SCOPE))
    expired = Known(replica(H2), expired=True)
    assert miss(expired, other_scope) is MissReason.EXPIRED
    assert miss(other_scope, expired) is MissReason.EXPIRED


def test_misses_come_as_runs_and_what_follows_a_gap_is_told_apart() -> None:
    hit, nothing, expired = [Known(replica(H1))], list[Known](), [Known(replica(H1), expired=True)]
    found = explain_misses(
        [hit, nothing, nothing, hit, expired], compat_id=COMPAT, scope_id=SCOPE, layers=LAYERS
    )
    assert found == (
        Miss(blocks=(1, 3), reason=MissReason.NO_REPLICA),
        Miss(blocks=(3, 4), reason=MissReason.BEHIND_A_GAP),
        Miss(blocks=(4, 5), reason=MissReason.EXPIRED),
    )


@pytest.mark.requirement("CD-6")
def test_the_same_tokens_under_another_adapter_never_match() -> None:
    scope = Scope(bytes(range(32)))
    plain = CompatibilityDescriptor.from_members(DESCRIPTOR)
    adapted = CompatibilityDescriptor.from_members({**DESCRIPTOR, "adapters": ["sha-256:" + "33" * 32]})
    stored, _ = block_keys(scope, plain, range(8))
    wanted, _ = block_keys(scope, adapted, range(8))
    record = attrs.evolve(replica(H1), block_key=stored[0].hex(), compat_id=plain.compat_id)
    known = {stored[0]: [Known(record)]}
    blocks = [known.get(key, []) for key in wanted]
    misses = explain_misses(blocks, compat_id=adapted.compat_id, scope_id=SCOPE)
    assert misses == (Miss(blocks=(0, 2), reason=MissReason.NO_REPLICA),)
    reason = explain_miss(known[stored[0]], compat_id=adapted.compat_id, scope_id=SCOPE)
    assert reason is MissReason.OTHER_COMPAT_ID
