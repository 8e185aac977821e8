"""The planner: the fewest tokens move, in whole blocks, and two maps say what each member does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines.reshard_plan import (
    MemberPlan,
    Transfer,
    compare,
    divide,
    intersect,
    joined,
    subtract,
    token_count,
)
from kvsp_core.records import Shard, ShardMap

B = 4
NAMES = tuple(f"https://{name}.example/kvsp/" for name in "abcd")
A, B_, C, D = NAMES


def shard_map(*shards: tuple[int, int, str], version: int = 1) -> ShardMap:
    return ShardMap(
        map="m",
        version=version,
        shards=tuple(Shard(tokens=(first, end), instance=instance) for first, end, instance in shards),
    )


def plans_of(current: ShardMap, target: ShardMap, **options: object) -> dict[str, MemberPlan]:
    step = compare(current, target, block_tokens=B, **options)  # type: ignore[arg-type]
    return {plan.instance: plan for plan in step.plans}


@pytest.mark.requirement("RS-1", "RS-2")
def test_three_members_become_two() -> None:
    current = shard_map((0, 32, A), (32, 64, B_), (64, 98, C))
    shards = divide(current, 98, [A, C], block_tokens=B)
    target = shard_map((0, 48, A), (48, 98, C), version=2)
    assert shards == target.shards
    step = compare(current, target, block_tokens=B)
    assert step.plans == (
        MemberPlan(instance=A, retain=((0, 32),), fetch=(Transfer((32, 48), B_),)),
        MemberPlan(instance=B_, release=((32, 64),)),
        MemberPlan(instance=C, retain=((64, 98),), fetch=(Transfer((48, 64), B_),)),
    )
    assert (step.moved_tokens, step.computed_tokens, step.retained_tokens) == (32, 0, 66)


@pytest.mark.requirement("RS-2")
def test_a_range_that_stays_is_retained_and_nowhere_fetched() -> None:
    current = shard_map((0, 32, A), (32, 64, B_))
    plans = plans_of(current, shard_map((0, 16, A), (16, 64, B_), version=2))
    assert plans[B_] == MemberPlan(instance=B_, retain=((32, 64),), fetch=(Transfer((16, 32), A),))
    assert plans[A] == MemberPlan(instance=A, retain=((0, 16),), release=((16, 32),))


def test_a_first_map_assigns_everything_and_moves_nothing() -> None:
    empty = ShardMap(map="m", version=0, shards=())
    shards = divide(empty, 41, [A, B_, C], block_tokens=B)
    assert [s.tokens for s in shards] == [(0, 16), (16, 28), (28, 41)]
    step = compare(empty, ShardMap(map="m", version=1, shards=shards), block_tokens=B)
    assert (step.moved_tokens, step.computed_tokens) == (0, 41)
    assert [plan.assign for plan in step.plans] == [((0, 16),), ((16, 28),), ((28, 41),)]


def test_a_map_ends_by_releasing_everything() -> None:
    current = shard_map((0, 32, A), (32, 60, B_))
    plans = plans_of(current, ShardMap(map="m", version=2, shards=()))
    assert plans == {
        A: MemberPlan(instance=A, release=((0, 32),)),
        B_: MemberPlan(instance=B_, release=((32, 60),)),
    }


def test_the_tail_that_changes_hands_is_computed_again() -> None:
    current = shard_map((0, 10, A))
    plans = plans_of(current, shard_map((0, 10, B_), version=2))
    assert plans[B_].fetch == (Transfer((0, 8), A),)
    assert plans[B_].assign == ((8, 10),)


def test_the_tail_stays_where_its_holder_keeps_a_block() -> None:
    current = shard_map((0, 30, A))
    shards = divide(current, 30, [A, B_], block_tokens=B)
    assert shards[-1].instance == A
    assert compare(current, ShardMap(map="m", version=2, shards=shards), block_tokens=B).computed_tokens == 0


def test_a_context_that_grew_since_its_map_was_made_is_retained_whole() -> None:
    current = shard_map((0, 32, A), (32, 60, B_))
    plans = plans_of(current, shard_map((0, 32, A), (32, 75, B_), version=2))
    assert plans[B_] == MemberPlan(instance=B_, retain=((32, 75),))


@pytest.mark.requirement("RS-6")
def test_a_lost_range_is_computed_by_its_new_owner() -> None:
    current = shard_map((0, 32, A), (32, 64, B_))
    plans = plans_of(current, shard_map((0, 64, A), version=2), lost={B_})
    assert plans == {A: MemberPlan(instance=A, retain=((0, 32),), assign=((32, 64),))}


def test_a_member_whose_data_is_lost_can_be_given_its_range_again() -> None:
    current = shard_map((0, 32, A), (32, 64, B_))
    plans = plans_of(current, shard_map((0, 32, A), (32, 64, B_), version=2), lost={B_})
    assert plans[B_] == MemberPlan(instance=B_, assign=((32, 64),))


def test_what_a_plan_cannot_be() -> None:
    current = shard_map((0, 32, A))
    with pytest.raises(LocalProtocolError, match="inside a block"):
        compare(current, shard_map((0, 30, A), (30, 32, B_)), block_tokens=B)
    with pytest.raises(LocalProtocolError, match="does not shrink"):
        compare(current, shard_map((0, 16, A)), block_tokens=B)
    with pytest.raises(LocalProtocolError, match="each named once"):
        divide(current, 32, [A, A], block_tokens=B)
    with pytest.raises(LocalProtocolError, match="each named once"):
        divide(current, 32, [], block_tokens=B)
    with pytest.raises(LocalProtocolError, match="without tokens"):
        divide(ShardMap(map="m", version=0, shards=()), 0, [A], block_tokens=B)
    for blocks in ({A: 4, B_: 3}, {A: 8}, {A: 9, B_: -1}):
        with pytest.raises(LocalProtocolError, match="add up to the 8 blocks"):
            divide(current, 32, [A, B_], block_tokens=B, blocks=blocks)


def test_shares_of_ones_own_choosing() -> None:
    shards = divide(shard_map((0, 32, A)), 32, [A, B_], block_tokens=B, blocks={A: 1, B_: 7})
    assert [(s.tokens, s.instance) for s in shards] == [((0, 28), B_), ((28, 32), A)]


SPLITS = st.lists(st.sampled_from(NAMES[:3]), max_size=6)


@pytest.mark.requirement("RS-1")
@given(
    owners=SPLITS,
    tail=st.integers(0, B - 1),
    members=st.permutations(NAMES).flatmap(lambda p: st.integers(1, 4).map(lambda n: p[:n])),
    lost=st.sets(st.sampled_from(NAMES[:3])),
)
def test_no_even_split_moves_less(owners: list[str], tail: int, members: list[str], lost: set[str]) -> None:
    length = len(owners) * B + tail
    if length == 0:
        return
    shards = [(i * B, (i + 1) * B, owner) for i, owner in enumerate(owners)]
    if tail:
        first, _, owner = shards.pop() if shards else (0, 0, A)
        shards.append((first, length, owner))
    current = shard_map(*shards)
    chosen = divide(current, length, members, block_tokens=B, lost=lost)
    assert chosen[0].tokens[0] == 0
    assert chosen[-1].tokens[1] == length
    assert all(left.tokens[1] == right.tokens[0] for left, right in itertools.pairwise(chosen))
    step = compare(current, ShardMap(map="m", version=2, shards=chosen), block_tokens=B, lost=lost)
    assert step.moved_tokens + step.computed_tokens + step.retained_tokens == length
    cheapest = min(
        sum(was != now and was not in lost for was, now in zip(owners, placing, strict=True))
        for placing in itertools.product(members, repeat=len(owners))
        if max(map(placing.count, members)) - min(map(placing.count, members)) <= 1
    )
    assert step.moved_tokens == cheapest * B


RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1])))


@given(ranges=RANGES, others=RANGES)
def test_ranges_are_sets_of_positions(ranges: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    def positions(some: object) -> set[int]:
        return {p for first, end in some for p in range(first, end)}  # type: ignore[attr-defined]

    left, right = positions(ranges), positions(others)
    assert positions(joined(ranges)) == left
    assert positions(subtract(ranges, others)) == left - right
    assert positions(intersect(ranges, others)) == left & right
    assert token_count(joined(ranges)) == len(left)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(joined(ranges)))
