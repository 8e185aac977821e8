"""Blocks move down before they would be evicted and up when they are read, and are never lost on the way."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from kvsp_core.bodies import decode
from kvsp_core.records import ReplicaRecord
from kvsp_core.resources import GetBlock
from kvsp_core.roles.holdings import TierLimits
from kvsp_core.roles.role import BlockName, Call, Drop, JobFailed, JobFault, ReadBlock, Store
from tests.unit.roles.holder_kit import COMPAT, SCOPE, Loop, container, problem_of

K = [hashlib.sha256(bytes([i])).hexdigest() for i in range(40)]
NAMES = [BlockName(COMPAT, SCOPE, key) for key in K]
SIZE = len(container())
HOST, LOCAL = "host", "local-storage"


def loop_with(host: int = 8, local: int = 8, **options: Any) -> Loop:
    tiers = {
        HOST: TierLimits(capacity_bytes=host * SIZE, read_mbit_per_s=400_000),
        LOCAL: TierLimits(capacity_bytes=local * SIZE, read_mbit_per_s=9_000),
    }
    return Loop(tiers=tiers, **options).start()


def fill(loop: Loop, count: int, first: int = 0) -> None:
    """Store so many blocks, none of which follows another."""
    for number in range(first, first + count):
        assert loop.put(K[number]) == 201
        loop.holder._arrivals._last_stored.clear()


def numbers_in(loop: Loop, tier: str) -> set[int]:
    return {NAMES.index(name) for name in loop.tiers[tier]}


def tier_at_index(loop: Loop, number: int) -> str:
    """Return the tier that the last record of a block names."""
    records = [
        decode(ReplicaRecord, call.body)
        for call in loop.log
        if isinstance(call, Call) and isinstance(call.body, bytes) and call.request.path.endswith(K[number])
    ]
    return records[-1].residency[0].tier


@pytest.fixture
def loop() -> Loop:
    return loop_with()


def test_what_was_not_used_for_longest_moves_down_and_is_published_anew(loop: Loop) -> None:
    fill(loop, 7)
    loop.index_answers()
    assert numbers_in(loop, LOCAL) == set()
    fill(loop, 1, first=7)
    assert ("DELETE", K[0]) not in loop.index_answers()
    assert (numbers_in(loop, HOST), numbers_in(loop, LOCAL)) == (set(range(1, 8)), {0})
    assert (tier_at_index(loop, 0), tier_at_index(loop, 1)) == (LOCAL, HOST)
    assert loop.get(K[0]).status == 200
    assert loop.buffers == {}


@pytest.mark.requirement("PB-4")
def test_nothing_is_evicted_before_both_tiers_are_full(loop: Loop) -> None:
    fill(loop, 15)
    assert "kvsp_holder_evictions" not in loop.observed
    assert numbers_in(loop, HOST) | numbers_in(loop, LOCAL) == set(range(15))
    fill(loop, 3, first=15)
    assert numbers_in(loop, HOST) | numbers_in(loop, LOCAL) == set(range(3, 18))
    assert loop.observed["kvsp_holder_evictions"] == 3


def test_a_block_that_is_read_moves_up_and_its_answer_does_not_wait_for_that(loop: Loop) -> None:
    fill(loop, 8)
    assert numbers_in(loop, LOCAL) == {0}
    loop.index_answers()
    loop.hold_jobs = True
    answer = loop.ask(GetBlock(COMPAT, SCOPE, K[0]))
    assert answer is None
    read, loop.held_back = loop.held_back, []
    loop.give(read[0])
    assert loop.answers[loop.last_request].response.status == 200
    assert loop.holder.tier_of(NAMES[0]) == LOCAL
    loop.let_jobs_end()
    assert loop.holder.tier_of(NAMES[0]) == HOST
    assert 0 not in numbers_in(loop, LOCAL)
    loop.end(loop.last_request)
    loop.index_answers()
    assert tier_at_index(loop, 0) == HOST
    assert loop.buffers == {}


def test_a_range_of_layers_moves_nothing(loop: Loop) -> None:
    fill(loop, 8)
    stores = len([e for e in loop.log if isinstance(e, Store)])
    loop.get(K[0], layers=(0, 0))
    assert len([e for e in loop.log if isinstance(e, Store)]) == stores
    assert loop.buffers == {}


@pytest.mark.requirement("LE-2")
def test_a_leased_block_does_not_move_down_and_may_move_up(loop: Loop) -> None:
    fill(loop, 7)
    loop.lease(K[0])
    fill(loop, 1, first=7)
    assert numbers_in(loop, LOCAL) == {1}
    loop.lease(K[1])
    loop.get(K[1])
    assert loop.holder.tier_of(NAMES[1]) == HOST
    loop.at(loop.now_ms + 400)
    fill(loop, 12, first=8)
    assert {0, 1} <= numbers_in(loop, HOST) | numbers_in(loop, LOCAL)


def test_few_blocks_move_at_a_time(loop: Loop) -> None:
    loop = loop_with(host=64, local=64)
    loop.hold_jobs = True
    for number in range(40):
        loop.begin_put(K[number], container())
        loop.send_block(number + 1, container())
    loop.holder._blocks.holdings._tiers[HOST].limits = TierLimits(capacity_bytes=40 * SIZE)
    held_back, loop.held_back = loop.held_back, []
    for outcome in held_back:
        loop.give(outcome)
    assert len([e for e in loop.log if isinstance(e, ReadBlock)]) == 4
    loop.let_jobs_end()
    assert len(numbers_in(loop, LOCAL)) == 5
    assert len(numbers_in(loop, HOST)) == 35


def test_a_block_whose_prefix_is_gone_moves_first_and_goes_first() -> None:
    loop = loop_with(host=8, local=4, index=False)
    for number in range(7):
        loop.put(K[number])  # of one client: each follows the one before
    loop.holder.lost(NAMES[3], loop.now_ms)
    fill(loop, 2, first=7)
    assert numbers_in(loop, LOCAL) == {4}
    fill(loop, 4, first=9)
    assert 4 not in numbers_in(loop, HOST) | numbers_in(loop, LOCAL)
    assert loop.observed["kvsp_holder_evictions"] == 1


def test_a_block_that_is_kept_by_the_time_its_copy_is_complete_stays_where_it_is(loop: Loop) -> None:
    fill(loop, 7)
    loop.hold_jobs = True
    number = loop.begin_put(K[7], container())
    loop.send_block(number, container())
    stored = loop.held_back.pop(0)
    loop.give(stored)
    loop.holder.keep(NAMES[0])
    loop.let_jobs_end()
    assert loop.holder.tier_of(NAMES[0]) == HOST
    assert numbers_in(loop, LOCAL) == {1}, "another one moves in its place"
    loop.end(number)
    assert loop.buffers == {}


@pytest.mark.requirement("BR-6")
def test_a_block_that_is_lost_while_it_moves_leaves_nothing_and_can_be_stored_again(loop: Loop) -> None:
    fill(loop, 7)
    loop.index_answers()
    loop.hold_jobs = True
    number = loop.begin_put(K[7], container())
    loop.send_block(number, container())
    stored = loop.held_back.pop(0)
    loop.give(stored)
    loop.do(loop.holder.lost(NAMES[0], loop.now_ms))
    loop.index_answers()
    assert problem_of(loop.answers[loop.begin_put(K[0], container())]) == "about:blank 503"
    loop.let_jobs_end()
    assert 0 not in numbers_in(loop, HOST) | numbers_in(loop, LOCAL)
    assert loop.put(K[0], container(9)) == 201
    assert loop.holder._blocks.holdings.used_bytes == SIZE * len(
        numbers_in(loop, HOST) | numbers_in(loop, LOCAL)
    )


def test_a_block_that_is_rotten_when_it_moves_is_dropped_and_withdrawn(loop: Loop) -> None:
    fill(loop, 7)
    loop.index_answers()
    loop.tiers[HOST][NAMES[0]] = container(200)
    fill(loop, 1, first=7)
    assert ("DELETE", K[0]) in loop.to_index()
    assert loop.holder.tier_of(NAMES[0]) is None
    assert numbers_in(loop, LOCAL) == set()


def test_a_tier_that_does_not_take_a_block_is_left_alone_for_a_while(loop: Loop) -> None:
    loop.faults[LOCAL] = JobFault.BROKEN
    fill(loop, 8)
    assert numbers_in(loop, HOST) == set(range(8))
    tried = len([e for e in loop.log if isinstance(e, Store) and e.tier == LOCAL])
    assert tried == 1
    loop.index_answers()
    assert len([e for e in loop.log if isinstance(e, Store) and e.tier == LOCAL]) == tried
    loop.faults.clear()
    loop.at(loop.now_ms + 1000)
    loop.get(K[7])
    assert len(numbers_in(loop, LOCAL)) == 1


@pytest.mark.requirement("BR-6")
def test_a_block_that_cannot_be_read_right_now_stays_and_moves_later(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(loop, 7)
    loop.index_answers()
    tried: list[ReadBlock] = []

    def busy(effect: Any) -> Any:
        if isinstance(effect, ReadBlock):
            tried.append(effect)
            return JobFailed(effect.job_id, JobFault.BUSY)
        return Loop._job(loop, effect)

    monkeypatch.setattr(loop, "_job", busy)
    fill(loop, 1, first=7)
    assert len(tried) == 1
    assert loop.index_answers() == [("PUT", K[7])]
    assert numbers_in(loop, HOST) == set(range(8))
    monkeypatch.undo()
    loop.at(loop.now_ms + 1000)
    loop.get(K[7])
    assert len(numbers_in(loop, LOCAL)) == 1


def test_a_holder_that_is_about_to_stop_moves_nothing(loop: Loop) -> None:
    fill(loop, 7)
    loop.do(loop.holder.stop(loop.now_ms))
    loop.holder._blocks.holdings._tiers[HOST].limits = TierLimits(capacity_bytes=7 * SIZE)
    loop.index_answers()
    assert numbers_in(loop, LOCAL) == set()
    assert not [e for e in loop.log if isinstance(e, Drop)]


def test_nothing_is_evicted_below_for_a_block_that_does_not_fit_there_all_the_same() -> None:
    loop = loop_with(host=8, local=4, index=False)
    fill(loop, 8)
    for number in range(8, 11):
        fill(loop, 1, first=number)
    below = sorted(numbers_in(loop, LOCAL))
    assert len(below) == 4
    for number in below[1:]:
        loop.lease(K[number])  # they stay, and the room of the first alone is not enough
        loop.holder.keep(NAMES[number])
        loop.holder.let_go(NAMES[number])
    blocks = loop.holder._blocks
    assert blocks.holdings.can_fit(LOCAL, 2 * SIZE)  # as far as is known before the leases are looked at
    assert not blocks._clear(LOCAL, 2 * SIZE, loop.now_ms)
    assert [n for n in below if loop.holder.tier_of(NAMES[n]) is None] == []
    assert blocks._clear(LOCAL, SIZE, loop.now_ms)
    assert [n for n in below if loop.holder.tier_of(NAMES[n]) is None] == below[:1]


def test_only_what_is_colder_than_the_block_that_moves_makes_room_for_it() -> None:
    loop = loop_with(host=8, local=4, index=False)
    fill(loop, 11)
    blocks = loop.holder._blocks
    coldest, *others = (warmth for _, _, warmth in blocks.holdings.in_line(LOCAL))
    assert not blocks._clear(LOCAL, SIZE, loop.now_ms, coldest)
    assert not blocks._clear(LOCAL, 2 * SIZE, loop.now_ms, others[0])
    assert len(list(blocks.holdings.in_line(LOCAL))) == 4
    assert blocks._clear(LOCAL, SIZE, loop.now_ms, others[0])
    assert len(list(blocks.holdings.in_line(LOCAL))) == 3
