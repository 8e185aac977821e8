"""Conversations with a holder: what goes in, and what must come out."""

from __future__ import annotations

import hashlib
import json

import pytest

from kvsp_core.bodies import decode
from kvsp_core.container import decode_container, encode_container
from kvsp_core.container_header import ContainerHeader
from kvsp_core.ext_messages import LeaseListing
from kvsp_core.index_parts import IndexParts
from kvsp_core.machines.lease import LeaseTable
from kvsp_core.messages import LeaseGranted, LeaseRenewal
from kvsp_core.problems import DIGEST_MISMATCH, Problem
from kvsp_core.records import ReplicaRecord
from kvsp_core.resources import (
    GetBlock,
    GetDescriptor,
    HeadBlock,
    ListLeases,
    PutDescriptor,
    ReleaseLease,
    RenewLease,
)
from kvsp_core.roles.holdings import TierLimits
from kvsp_core.roles.local_blocks import BlockAdded, BlockGone, BlockNotAdded, LocalBlocks
from kvsp_core.roles.role import (
    BlockBody,
    BlockName,
    Call,
    CallFailed,
    Drop,
    FreeBuffer,
    JobDone,
    JobFault,
    ReadBlock,
    ReceiveBlock,
    RequestEnded,
    StoredBlock,
)
from kvsp_core.roles.work import Numbers
from tests.unit.roles.holder_kit import (
    ALICE,
    BOB,
    COMPAT,
    DESCRIPTOR,
    HERE,
    OPERATOR,
    OTHER_SCOPE,
    SCOPE,
    Loop,
    container,
    problem_of,
)

K = [hashlib.sha256(bytes([i])).hexdigest() for i in range(9)]
NAMES = [BlockName(COMPAT, SCOPE, key) for key in K]
SIZE = len(container())


# Storage


@pytest.mark.requirement("BR-6", "BR-1", "PB-3")
def test_a_block_is_stored_published_and_given_back() -> None:
    loop = Loop().start()
    assert loop.put(K[0]) == 201
    assert loop.tiers["host"][NAMES[0]] == container()
    assert loop.index_answers() == [("PUT", COMPAT), ("PUT", K[0])]
    answer = loop.ask(GetBlock(COMPAT, SCOPE, K[0]))
    assert answer is not None
    assert answer.response.status == 200
    assert isinstance(answer.body, BlockBody)
    assert answer.response.content_length == SIZE
    assert answer.response.repr_digest == hashlib.sha256(container()).hexdigest()
    loop.end(loop.last_request)
    assert loop.buffers == {}


@pytest.mark.requirement("PB-3")
def test_the_record_says_what_is_held() -> None:
    loop = Loop().start()
    loop.put(K[0])
    (call,) = [call for call in loop.calls.values() if "replicas" in call.request.path]
    assert isinstance(call.body, bytes)
    record = decode(ReplicaRecord, call.body)
    assert (record.holder, record.block_key, record.size, record.ttl_ms) == (HERE, K[0], 64, 6000)
    assert record.digests_agree()
    assert record.residency[0].tier == "host"
    assert record.residency[0].layers == (0, 1)
    assert record.residency[0].read_mbit_per_s == 400_000


@pytest.mark.requirement("BR-6")
def test_a_key_that_is_held_is_412_and_the_copy_stays() -> None:
    loop = Loop().start()
    loop.put(K[0], container(1))
    assert loop.put(K[0], container(2)) == 412
    assert loop.tiers["host"][NAMES[0]] == container(1)


@pytest.mark.requirement("BR-6")
def test_two_that_store_one_key_at_a_time_have_one_winner() -> None:
    loop = Loop().start()
    first, second = loop.begin_put(K[0], container(1)), loop.begin_put(K[0], container(2), client=BOB)
    assert loop.answers[second].response.status == 412
    loop.hold_jobs = True
    loop.send_block(first, container(1))
    third = loop.begin_put(K[0], container(3))
    assert loop.answers[third].response.status == 412
    loop.let_jobs_end()
    assert loop.answers[first].response.status == 201
    assert loop.tiers["host"][NAMES[0]] == container(1)


@pytest.mark.requirement("BR-6")
def test_a_block_that_is_cut_off_leaves_nothing_and_its_key_free() -> None:
    loop = Loop().start()
    number = loop.begin_put(K[0], container())
    effects = loop.give(RequestEnded(number, False, 0))
    assert [type(e) for e in effects] == [FreeBuffer]
    assert loop.calls == {}
    assert loop.put(K[0]) == 201


@pytest.mark.requirement("BR-6")
def test_a_body_that_does_not_match_its_digest_is_not_kept() -> None:
    loop = Loop().start()
    number = loop.begin_put(K[0], container())
    loop.cut_off(number, Problem(DIGEST_MISMATCH))
    assert problem_of(loop.answers[number]) == "kvsp-digest-mismatch 422"
    loop.end(number)
    assert loop.tiers["host"] == {}
    assert loop.put(K[0]) == 201


@pytest.mark.requirement("BR-6", "SE-1")
def test_a_client_without_the_scope_stores_nothing() -> None:
    loop = Loop().start()
    number = loop.begin_put(K[0], container(), scope=OTHER_SCOPE)
    assert problem_of(loop.answers[number]) == "kvsp-scope-denied 403"
    assert not any(isinstance(effect, ReceiveBlock) for effect in loop.log)


@pytest.mark.requirement("BR-6")
def test_a_put_without_its_condition_is_refused_from_the_head() -> None:
    loop = Loop().start()
    number = loop.begin_put(K[0], container(), if_none_match=None)
    assert loop.answers[number].response.status == 428


def test_a_container_that_is_not_a_complete_block_is_refused() -> None:
    loop = Loop().start()
    for wrong in (container(layers=1), container(tokens=3), container(layers=3)):
        assert loop.put(K[0], wrong) == 409
    assert loop.tiers["host"] == {}
    assert loop.buffers == {}
    unknowing = Loop(knows=False).start()
    assert unknowing.put(K[0], container(layers=1)) == 201


def test_too_many_blocks_at_a_time_are_put_off() -> None:
    loop = Loop(max_incoming=1).start()
    first, second = loop.begin_put(K[0], container()), loop.begin_put(K[1], container())
    assert loop.answers[second].response.status == 503
    assert loop.answers[second].response.retry_after_s == 1
    loop.end(first, complete=False, sent_bytes=0)
    assert loop.put(K[1]) == 201


# Room


@pytest.mark.requirement("BR-6", "LE-2", "PB-4")
def test_what_is_not_leased_makes_room_and_is_withdrawn_at_once() -> None:
    loop = Loop(blocks=2).start()
    loop.put(K[0])
    loop.put(K[1])
    loop.index_answers()
    assert loop.lease(K[0]).response.status == 201
    assert loop.put(K[2]) == 201
    assert set(loop.tiers["host"]) == {NAMES[0], NAMES[2]}
    assert loop.to_index() == [("DELETE", K[1]), ("PUT", K[2])]
    drops = [e for e in loop.log if isinstance(e, (Drop, Call))]
    withdrawn = next(i for i, e in enumerate(drops) if isinstance(e, Call) and e.request.method == "DELETE")
    assert withdrawn < drops.index(Drop(NAMES[1], "host"))
    assert loop.get(K[1]).status == 404


@pytest.mark.requirement("BR-6", "LE-2")
def test_over_quota_is_507_from_the_head_and_nothing_is_kept() -> None:
    loop = Loop(blocks=1).start()
    loop.put(K[0])
    loop.lease(K[0])
    number = loop.begin_put(K[1], container())
    assert loop.answers[number].response.status == 507
    assert set(loop.tiers["host"]) == {NAMES[0]}
    loop.end(number)
    loop.at(502)
    assert loop.put(K[1]) == 201


def test_what_room_there_was_may_be_gone_when_the_block_has_come() -> None:
    loop = Loop(blocks=1).start()
    first, second = loop.begin_put(K[0], container()), loop.begin_put(K[1], container(2))
    loop.hold_jobs = True
    loop.send_block(first, container())
    loop.send_block(second, container(2))
    assert loop.answers[second].response.status == 507
    loop.let_jobs_end()
    assert loop.answers[first].response.status == 201
    assert set(loop.tiers["host"]) == {NAMES[0]}


def test_a_suffix_goes_before_a_block_that_was_used_less_lately() -> None:
    loop = Loop(blocks=4).start()
    for key in K[:3]:
        loop.put(key)
    loop.put(K[5], client=BOB)
    loop.get(K[1])
    loop.get(K[2])
    loop.put(K[6], client=BOB)  # K[0] goes, and leaves K[1] and K[2] without their prefix
    loop.put(K[7], client=BOB)
    assert set(loop.tiers["host"]) == {NAMES[i] for i in (2, 5, 6, 7)}
    loop.put(K[8], client=BOB)
    assert set(loop.tiers["host"]) == {NAMES[i] for i in (5, 6, 7, 8)}


def test_the_block_not_used_for_longest_goes_first() -> None:
    loop = Loop(blocks=2).start()
    loop.put(K[0])
    loop.put(K[1], client=BOB)
    loop.get(K[0])
    loop.ask(HeadBlock(COMPAT, SCOPE, K[1]))  # asking whether it is there is no use of it
    loop.put(K[2])
    assert set(loop.tiers["host"]) == {NAMES[0], NAMES[2]}


def test_the_next_tier_takes_what_the_first_cannot() -> None:
    tiers = {"local-storage": TierLimits(capacity_bytes=2 * SIZE), "host": TierLimits(capacity_bytes=SIZE)}
    loop = Loop(tiers=tiers).start()
    loop.put(K[0])
    loop.put(K[1])
    assert (set(loop.tiers["host"]), set(loop.tiers["local-storage"])) == ({NAMES[0]}, {NAMES[1]})
    loop.get(K[0])
    loop.put(K[2], client=BOB)
    loop.put(K[3], client=ALICE)  # what goes is K[1], which was not used for longest, from the slower tier
    assert (set(loop.tiers["host"]), set(loop.tiers["local-storage"])) == (
        {NAMES[0]},
        {NAMES[2], NAMES[3]},
    )
    faulty = Loop(tiers=tiers).start()
    faulty.faults["host"] = JobFault.BROKEN
    assert faulty.put(K[0]) == 201
    assert set(faulty.tiers["local-storage"]) == {NAMES[0]}
    faulty.faults["local-storage"] = JobFault.FULL
    assert faulty.put(K[1]) == 507
    assert faulty.buffers == {}


@pytest.mark.requirement("BR-6")
def test_what_cannot_be_read_or_written_right_now_is_not_lost() -> None:
    loop = Loop().start()
    assert loop.put(K[0]) == 201
    loop.index_answers()
    loop.faults["host"] = JobFault.BUSY
    for operation in (GetBlock(COMPAT, SCOPE, K[0]), HeadBlock(COMPAT, SCOPE, K[0], layers=(0, 0))):
        refused = loop.ask(operation)
        assert refused is not None
        assert (refused.response.status, refused.response.retry_after_s) == (503, 1)
    assert loop.put(K[1]) == 503
    assert loop.answers[loop.last_request].response.retry_after_s == 1
    assert loop.to_index() == []
    loop.faults.clear()
    assert loop.get(K[0]).status == 200
    assert loop.put(K[1]) == 201
    assert loop.buffers == {}


# Retrieval


@pytest.mark.requirement("BR-1", "BR-2")
def test_a_range_of_layers_is_read_as_asked() -> None:
    loop = Loop().start()
    loop.put(K[0])
    assert loop.get(K[0], layers=(1, 1)).status == 200
    assert [e.layers for e in loop.log if isinstance(e, ReadBlock)] == [(1, 1)]
    assert loop.get(K[0], layers=(0, 1)).status == 200
    assert [e.layers for e in loop.log if isinstance(e, ReadBlock)][-1] is None
    answer = loop.ask(GetBlock(COMPAT, SCOPE, K[0], layers=(1, 2)))
    assert problem_of(answer) == "kvsp-layers-unavailable 404"


@pytest.mark.requirement("BR-1", "BR-9")
def test_another_codec_is_not_acceptable() -> None:
    loop = Loop().start()
    loop.put(K[0])
    assert loop.get(K[0], codec=1).status == 200
    assert loop.get(K[0], codec=2).status == 406


@pytest.mark.requirement("BR-7", "SE-1")
def test_the_scope_is_looked_at_before_what_exists() -> None:
    loop = Loop().start()
    loop.put(K[0], client=BOB, scope=OTHER_SCOPE)
    asked = len(loop.log)
    answers = [loop.ask(GetBlock(COMPAT, OTHER_SCOPE, key)) for key in K[:2]]
    assert [problem_of(answer) for answer in answers] == ["kvsp-scope-denied 403"] * 2
    assert answers[0] is not None
    assert answers[1] is not None
    assert answers[0].body == answers[1].body
    assert len(loop.log) == asked + 2
    assert loop.get(K[0], client=BOB, scope=OTHER_SCOPE).status == 200


@pytest.mark.requirement("BR-3")
def test_a_client_may_keep_a_block_for_as_long_as_the_index_lists_it() -> None:
    loop = Loop().start()
    loop.put(K[0])
    assert loop.get(K[0]).max_age_s == 0
    loop.index_answers(ttl_ms=5000)
    loop.now_ms = 1500
    assert loop.get(K[0]).max_age_s == 3


def test_head_tells_what_get_would_and_holds_nothing() -> None:
    loop = Loop().start()
    loop.put(K[0])
    answer = loop.ask(HeadBlock(COMPAT, SCOPE, K[0]))
    assert answer is not None
    assert (answer.response.status, answer.response.content_length, answer.body) == (200, SIZE, b"")
    assert not any(isinstance(effect, ReadBlock) for effect in loop.log)
    ranged = loop.ask(HeadBlock(COMPAT, SCOPE, K[0], layers=(0, 0)))
    assert ranged is not None
    assert (ranged.response.status, ranged.body) == (200, b"")
    loop.end(loop.last_request)
    assert problem_of(loop.ask(HeadBlock(COMPAT, SCOPE, K[1]))) == "kvsp-not-found 404"


@pytest.mark.requirement("PB-3")
def test_octets_that_are_not_what_was_stored_are_a_miss_and_go() -> None:
    loop = Loop().start()
    loop.put(K[0])
    loop.index_answers()
    loop.tiers["host"][NAMES[0]] = container(9)
    assert loop.get(K[0]).status == 404
    assert loop.to_index() == [("DELETE", K[0])]
    assert loop.tiers["host"] == {}
    assert loop.observed["kvsp_holder_digest_failures"] == 1
    loop.index_answers()
    assert loop.put(K[0]) == 201


@pytest.mark.parametrize("fault", [fault for fault in JobFault if fault is not JobFault.BUSY])
def test_a_tier_that_cannot_read_is_a_miss(fault: JobFault) -> None:
    loop = Loop().start()
    loop.put(K[0])
    loop.index_answers()
    loop.faults["host"] = fault
    assert loop.get(K[0]).status == 404
    assert loop.to_index() == [("DELETE", K[0])]
    assert loop.buffers == {}


@pytest.mark.requirement("LE-2")
def test_a_reader_keeps_the_room_of_its_block_until_it_is_done() -> None:
    loop = Loop(blocks=1).start()
    loop.put(K[0])
    loop.ask(GetBlock(COMPAT, SCOPE, K[0]))
    reader = loop.last_request
    assert loop.put(K[1]) == 507
    loop.end(reader)
    assert loop.put(K[1]) == 201


def test_a_reader_that_leaves_early_is_waited_for_until_its_job_is_over() -> None:
    loop = Loop(blocks=1).start()
    loop.put(K[0])
    loop.hold_jobs = True
    assert loop.ask(GetBlock(COMPAT, SCOPE, K[0])) is None
    loop.end(loop.last_request, complete=False, sent_bytes=0)
    assert loop.put(K[1]) == 507
    loop.let_jobs_end()
    assert loop.buffers == {}
    assert loop.put(K[1]) == 201


# Leases


@pytest.mark.requirement("LE-1", "OP-1")
def test_a_lease_is_granted_renewed_and_released() -> None:
    loop = Loop().start()
    loop.put(K[0])
    granted = loop.lease(K[0], ttl_ms=500)
    assert isinstance(granted.body, bytes)
    lease = decode(LeaseGranted, granted.body)
    assert lease.ttl_ms == 500
    assert granted.response.location == f"leases/{lease.lease}"
    loop.end(loop.last_request)
    loop.now_ms = 100
    renewed = loop.ask(RenewLease(lease.lease), LeaseRenewal(ttl_ms=800))
    assert renewed is not None
    assert isinstance(renewed.body, bytes)
    assert decode(LeaseGranted, renewed.body).ttl_ms == 800
    assert problem_of(loop.ask(RenewLease(lease.lease), LeaseRenewal(ttl_ms=5), client=BOB)).endswith("404")
    released = loop.ask(ReleaseLease(lease.lease))
    assert released is not None
    assert released.response.status == 204
    assert problem_of(loop.ask(ReleaseLease(lease.lease))) == "kvsp-not-found 404"
    assert loop.observed["kvsp_lease_rejections"] == 1  # BOB's; who gives back twice is refused nothing


@pytest.mark.requirement("LE-1", "BR-7")
def test_a_lease_on_what_the_client_may_not_read_is_not_found() -> None:
    loop = Loop().start()
    loop.put(K[0])
    loop.put(K[1], client=BOB, scope=OTHER_SCOPE)
    assert problem_of(loop.lease(K[0], K[1])) == problem_of(loop.lease(K[0], K[2])) == "kvsp-not-found 404"
    assert loop.lease(K[0], K[1], client=BOB).response.status == 201


@pytest.mark.requirement("LE-3", "SE-3")
def test_a_lease_beyond_the_quota_is_refused() -> None:
    random_bytes = [i.to_bytes(16, "big") for i in range(9)]
    table = LeaseTable(random_bytes=lambda n: random_bytes.pop(), now_ms=0, quota_bytes=SIZE)
    loop = Loop(lease_table=table).start()
    loop.put(K[0])
    loop.put(K[1])
    assert problem_of(loop.lease(K[0], K[1])) == "kvsp-lease-quota 429"
    assert loop.observed["kvsp_lease_rejections"] == 1
    assert loop.lease(K[0]).response.status == 201
    loop.put(K[2])
    assert loop.lease(*[K[0]] * 8193).response.status == 413


@pytest.mark.requirement("LE-1")
def test_a_lease_whose_answer_never_went_out_is_released() -> None:
    for sent_bytes, status in ((0, 201), (1, 507)):
        loop = Loop(blocks=1).start()
        loop.put(K[0])
        loop.lease(K[0])
        loop.end(loop.last_request, complete=False, sent_bytes=sent_bytes)
        assert loop.put(K[1]) == status


@pytest.mark.requirement("LE-4")
def test_a_fault_of_a_leased_block_is_withdrawn_before_it_is_dropped() -> None:
    loop = Loop().start()
    loop.put(K[0])
    loop.index_answers()
    granted = loop.lease(K[0])
    assert isinstance(granted.body, bytes)
    lease = decode(LeaseGranted, granted.body).lease
    loop.tiers["host"][NAMES[0]] = container(9)
    assert loop.get(K[0]).status == 404
    assert loop.to_index() == [("DELETE", K[0])]
    assert NAMES[0] in loop.tiers["host"]
    assert loop.put(K[0]) == 503  # it is on its way out
    loop.index_answers()
    assert loop.tiers["host"] == {}
    assert problem_of(loop.ask(RenewLease(lease), LeaseRenewal(ttl_ms=5))) == "kvsp-not-found 404"
    assert loop.observed["kvsp_leases_broken"] == 1


@pytest.mark.requirement("LE-4")
def test_an_index_that_does_not_answer_does_not_hold_up_a_fault_for_long() -> None:
    loop = Loop().start()
    loop.put(K[0])
    loop.index_answers()
    loop.lease(K[0], ttl_ms=900)
    loop.holder.lost(NAMES[0], loop.now_ms)
    loop.at(500)
    assert NAMES[0] in loop.tiers["host"]
    loop.at(501)
    assert loop.tiers["host"] == {}


def test_operators_see_leases_without_their_names() -> None:
    loop = Loop().start()
    loop.put(K[0])
    loop.put(K[1])
    loop.lease(K[0])
    answer = loop.ask(ListLeases(), client=OPERATOR)
    assert answer is not None
    assert isinstance(answer.body, bytes)
    listing = decode(LeaseListing, answer.body)
    assert listing.leased_share == 0.5
    (lease,) = listing.leases
    assert (lease.client, lease.blocks, lease.size_bytes) == (ALICE, 1, SIZE)
    assert K[0] not in answer.body.decode()
    assert problem_of(loop.ask(ListLeases(), client=ALICE)) == "about:blank 403"


# Publication


@pytest.mark.requirement("PB-3")
def test_records_are_refreshed_at_a_third_of_the_ttl() -> None:
    loop = Loop().start()
    loop.put(K[0])
    loop.index_answers(ttl_ms=3000)
    loop.at(999)
    assert loop.to_index() == []
    loop.at(1000)
    assert loop.index_answers(ttl_ms=3000) == [("PUT", K[0])]
    loop.at(1999)
    assert loop.to_index() == []
    loop.at(2000)
    assert loop.to_index() == [("PUT", K[0])]


@pytest.mark.requirement("PB-3")
def test_a_withdrawal_waits_for_the_publication_before_it() -> None:
    loop = Loop(blocks=1).start()
    loop.put(K[0])
    loop.put(K[1])  # K[0] is evicted while its publication is on its way
    assert loop.to_index() == [("PUT", COMPAT), ("PUT", K[0]), ("PUT", K[1])]
    assert loop.index_answers() == [("PUT", COMPAT), ("PUT", K[0]), ("PUT", K[1]), ("DELETE", K[0])]


def test_a_block_stored_again_is_published_after_its_withdrawal() -> None:
    loop = Loop(blocks=1).start()
    loop.put(K[0])
    loop.index_answers()
    loop.put(K[1])
    loop.put(K[0])
    seen = loop.index_answers()
    about = [method for method, key in seen if key == K[0]]
    assert about == ["DELETE", "PUT"]


def test_an_index_that_is_silent_is_asked_again_and_again_more_slowly() -> None:
    loop = Loop().start()
    loop.put(K[0])
    times = []
    for _ in range(6):
        loop.index_is_silent()
        deadline_ms = loop.holder.next_deadline_ms()
        assert deadline_ms is not None
        times.append(deadline_ms - loop.now_ms)
        loop.at(deadline_ms)
        assert ("PUT", K[0]) in loop.to_index()
    assert times == sorted(times)
    assert times[-1] > 8 * times[0]
    assert loop.index_answers()[-1] == ("PUT", K[0])


def test_a_withdrawal_that_never_arrives_is_given_up_when_the_record_has_expired() -> None:
    loop = Loop(blocks=1).start()
    loop.put(K[0])
    loop.index_answers(ttl_ms=6000)
    loop.put(K[1])
    for _ in range(60):
        loop.index_is_silent()
        deadline_ms = loop.holder.next_deadline_ms()
        assert deadline_ms is not None
        loop.at(deadline_ms)
    assert ("DELETE", K[0]) not in loop.to_index()


@pytest.mark.requirement("BR-8")
def test_a_block_that_the_index_refuses_as_bad_goes() -> None:
    loop = Loop().start()
    loop.put(K[0])
    loop.index_answers(409)
    assert loop.get(K[0]).status == 404
    assert loop.tiers["host"] == {}


@pytest.mark.requirement("BR-8")
def test_a_block_that_the_index_refuses_stays_for_who_keeps_it_and_is_offered_later() -> None:
    loop = Loop().start()
    loop.holder.keep(NAMES[0])
    loop.put(K[0])
    loop.index_answers(409)
    assert loop.get(K[0]).status == 200
    assert loop.to_index() == []
    loop.at(1000)
    assert loop.index_answers() == [("PUT", COMPAT), ("PUT", K[0])]
    loop.at(3000)
    assert loop.index_answers(409) == [("PUT", K[0])]
    loop.holder.let_go(NAMES[0])
    loop.at(5000)
    loop.index_answers(409)
    assert loop.get(K[0]).status == 404


def test_descriptors_are_told_once_and_again_to_an_index_that_forgot() -> None:
    loop = Loop().start()
    loop.put(K[0])
    assert loop.index_answers() == [("PUT", COMPAT), ("PUT", K[0])]
    loop.put(K[1])
    assert loop.index_answers() == [("PUT", K[1])]
    loop.listed.clear()  # the index has restarted, and answers refreshes with 201
    loop.at(2000)
    assert set(loop.index_answers()) == {("PUT", K[0]), ("PUT", K[1])}
    loop.at(4000)
    assert ("PUT", COMPAT) in loop.index_answers()


@pytest.mark.requirement("OP-3", "PB-3")
def test_a_record_goes_to_the_part_of_the_index_that_its_key_belongs_to() -> None:
    parts = IndexParts(("https://is1.example/", "https://is2.example/"))
    loop = Loop(index_uris=parts.uris).start()
    for key in K[:3]:
        loop.put(key)
    used = {parts.of(key) for key in K[:3]}
    assert len(used) == 2
    told = {(call.base_uri, call.request.path.split("/")[-1]) for call in loop.calls.values()}
    assert told == {(parts.of(key), key) for key in K[:3]} | {(part, COMPAT) for part in used}
    loop.index_answers()
    loop.do(loop.holder.lost(NAMES[0], 0))
    (withdrawal,) = loop.calls.values()
    assert (withdrawal.request.method, withdrawal.base_uri) == ("DELETE", parts.of(K[0]))


def test_a_holder_without_an_index_publishes_nothing() -> None:
    loop = Loop(index=False, blocks=1).start()
    loop.put(K[0])
    loop.put(K[1])
    assert loop.calls == {}
    loop.lease(K[1])
    loop.holder.lost(NAMES[1], 0)
    loop.at(1)
    assert problem_of(loop.lease(K[1])) == "kvsp-not-found 404"


def test_requests_to_the_index_are_limited_in_number() -> None:
    stored = [
        ("host", BlockName(COMPAT, SCOPE, hashlib.sha256(b"%d" % i).hexdigest()), container())
        for i in range(99)
    ]
    loop = Loop(blocks=99).start(*stored)
    assert len(loop.calls) == 32
    assert len(loop.index_answers()) == 100


@pytest.mark.requirement("OP-3", "PB-3")
def test_a_part_of_the_index_that_does_not_answer_holds_up_none_of_the_others() -> None:
    parts = IndexParts(("https://is1.example/", "https://is2.example/"))
    keys = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(200)]
    loop = Loop(blocks=200, index_uris=parts.uris)
    loop.start(*(("host", BlockName(COMPAT, SCOPE, key), container()) for key in keys))
    silent: dict[int, Call] = {}
    told = []
    while loop.calls:
        silent |= {n: call for n, call in loop.calls.items() if call.base_uri == parts.uris[0]}
        loop.calls = {n: call for n, call in loop.calls.items() if n not in silent}
        told += loop.index_answers()
    assert len(silent) == 32
    assert {key for _, key in told} == {key for key in keys if parts.of(key) == parts.uris[1]} | {COMPAT}


# Restart


@pytest.mark.requirement("LE-2", "PB-3", "PB-4")
def test_a_restarted_holder_publishes_what_it_finds_and_evicts_none_of_it_for_a_while() -> None:
    loop = Loop(blocks=1)
    loop.hold_jobs = True
    loop.start(("host", NAMES[0], container()))
    assert loop.get(K[0]).status == 503
    assert loop.put(K[1]) == 503
    assert loop.lease(K[0]).response.status == 503
    loop.let_jobs_end()
    assert loop.index_answers() == [("PUT", COMPAT), ("PUT", K[0])]
    assert loop.get(K[0]).status == 200
    assert loop.put(K[1]) == 507
    loop.at(1002)
    assert loop.put(K[1]) == 201


def test_a_block_in_two_tiers_stays_in_the_faster() -> None:
    tiers = {"host": TierLimits(capacity_bytes=SIZE), "local-storage": TierLimits(capacity_bytes=SIZE)}
    loop = Loop(tiers=tiers).start(("host", NAMES[0], container()), ("local-storage", NAMES[0], container()))
    assert loop.tiers == {"host": {NAMES[0]: container()}, "local-storage": {}}


def test_a_tier_that_is_being_listed_has_no_room() -> None:
    """What an instance adds meanwhile takes the place of what is found later, and of nothing else."""
    tiers = {"host": TierLimits(capacity_bytes=SIZE), "local-storage": TierLimits(capacity_bytes=SIZE)}
    loop = Loop(tiers=tiers, numbers=Numbers())
    loop.hold_jobs = True
    loop.start(("local-storage", NAMES[0], container()))
    loop.buffers[900] = octets = container()
    refused, effects = loop.holder.add(stored(NAMES[0], octets), 900, 0)
    loop.do(effects)
    assert loop.holder.take_news() == (BlockNotAdded(refused, NAMES[0]),)
    loop.give(loop.held_back.pop(0))  # the memory is listed, and has room
    added, effects = loop.holder.add(stored(NAMES[0], octets), 900, 0)
    loop.do(effects)
    loop.give(loop.held_back.pop(0))  # the storage is listed: it has what is just being added
    loop.let_jobs_end()
    assert loop.holder.take_news() == (BlockAdded(added, NAMES[0]),)
    assert loop.tiers == {"host": {NAMES[0]: octets}, "local-storage": {}}
    assert loop.get(K[0]).status == 200


def test_a_tier_that_cannot_be_listed_counts_as_empty() -> None:
    loop = Loop()
    loop.faults["host"] = JobFault.BROKEN
    loop.start()
    assert loop.get(K[0]).status == 404


def test_descriptors_are_served() -> None:
    loop = Loop(knows=False).start()
    assert problem_of(loop.ask(GetDescriptor(COMPAT))) == "kvsp-not-found 404"
    answer = loop.ask(PutDescriptor(COMPAT), DESCRIPTOR.canonical_json)
    assert answer is not None
    assert answer.response.status == 201
    known = loop.ask(GetDescriptor(COMPAT))
    assert known is not None
    assert isinstance(known.body, bytes)
    assert json.loads(known.body) == DESCRIPTOR.members()


# Beside an instance


def test_an_instance_adds_keeps_and_loses_blocks() -> None:
    loop = Loop(blocks=1, numbers=Numbers()).start()
    local: LocalBlocks = loop.holder
    octets = container()
    loop.buffers[900] = octets
    ticket, effects = local.add(stored(NAMES[0], octets), 900, 0)
    loop.do(effects)
    assert local.take_news() == (BlockAdded(ticket, NAMES[0]),)
    assert 900 in loop.buffers  # it stays the instance's
    assert local.tier_of(NAMES[0]) == "host"
    assert loop.to_index()[-1] == ("PUT", K[0])
    local.keep(NAMES[0])
    assert loop.put(K[1]) == 507
    local.let_go(NAMES[0])
    assert loop.put(K[1]) == 201
    assert local.take_news() == (BlockGone(NAMES[0]),)
    assert local.tier_of(NAMES[0]) is None
    again, effects = local.add(stored(NAMES[1], octets), 900, 0)
    assert local.take_news() == (BlockAdded(again, NAMES[1]),)
    loop.do(local.lost(NAMES[1], 0))
    assert local.take_news() == (BlockGone(NAMES[1]),)


@pytest.mark.requirement("ST-4")
def test_beside_an_instance_that_was_replaced_it_tells_the_index_nothing_more() -> None:
    """What the index lists at this base URI is the later one's, not for this one to refresh or withdraw."""
    loop = Loop(numbers=Numbers()).start()
    loop.put(K[0])
    loop.index_answers()
    loop.put(K[1])
    loop.holder.fence()
    assert not loop.holder.safe_to_stop, "calls are under way"
    assert loop.put(K[2]) == 503
    loop.index_answers()
    loop.at(loop.now_ms + 600_000)
    assert loop.calls == {}, "nothing is refreshed"
    for key in K[:2]:
        loop.do(loop.holder.expire("host", [BlockName(COMPAT, SCOPE, key)], loop.now_ms))
    assert loop.calls == {}, "nothing is withdrawn"
    assert loop.tiers["host"] == {}
    assert loop.holder.safe_to_stop
    loop.do(loop.holder.stop(loop.now_ms))
    assert loop.calls == {}
    assert loop.holder.safe_to_stop


@pytest.mark.requirement("ST-4")
@pytest.mark.parametrize("answered", [True, False])
def test_it_forgets_what_it_was_withdrawing_when_it_is_replaced(answered: bool) -> None:
    loop = Loop(numbers=Numbers()).start()
    loop.put(K[0])
    loop.index_answers()
    loop.do(loop.holder.expire("host", [BlockName(COMPAT, SCOPE, K[0])], loop.now_ms))
    loop.holder.fence()
    if answered:
        loop.index_answers()
    else:
        loop.index_is_silent()
    assert loop.calls == {}
    assert loop.holder.safe_to_stop
    assert loop.holder._blocks.publisher._entries == {}


def test_a_block_that_an_instance_cannot_keep_is_told() -> None:
    loop = Loop(blocks=1, numbers=Numbers()).start()
    loop.put(K[0])
    loop.lease(K[0])
    loop.buffers[900] = container()
    ticket, effects = loop.holder.add(stored(NAMES[1], container()), 900, 0)
    assert effects == ()
    assert loop.holder.take_news() == (BlockNotAdded(ticket, NAMES[1]),)
    faulty = Loop(numbers=Numbers()).start()
    faulty.faults["host"] = JobFault.FULL
    faulty.buffers[900] = container()
    ticket, effects = faulty.holder.add(stored(NAMES[0], container()), 900, 0)
    faulty.do(effects)
    assert faulty.holder.take_news() == (BlockNotAdded(ticket, NAMES[0]),)


def stored(name: BlockName, octets: bytes) -> StoredBlock:
    header, digests = decode_container(octets)
    return StoredBlock(name, header, digests, hashlib.sha256(octets).hexdigest())


def test_completions_of_another_role_are_ignored() -> None:
    loop = Loop().start()
    assert loop.give(JobDone(4711)) == ()
    assert loop.give(CallFailed(4711, "timed out")) == ()


def test_a_block_let_go_while_it_is_leased_stays() -> None:
    loop = Loop(blocks=1).start()
    loop.put(K[0])
    loop.holder.keep(NAMES[0])
    loop.lease(K[0])
    loop.holder.let_go(NAMES[0])
    assert loop.put(K[1]) == 507
    assert set(loop.tiers["host"]) == {NAMES[0]}


def test_a_block_lost_before_its_turn_to_be_published_is_not_published() -> None:
    names = [BlockName(COMPAT, SCOPE, hashlib.sha256(b"%d" % i).hexdigest()) for i in range(99)]
    loop = Loop(blocks=99).start(*(("host", name, container()) for name in names))
    loop.do(loop.holder.lost(names[98], 0))
    loop.at(0)
    asked = loop.index_answers()
    assert len(asked) == 99
    assert ("PUT", names[98].block_key) not in asked
    assert names[98] not in loop.tiers["host"]


def test_an_index_that_fails_is_asked_again() -> None:
    loop = Loop(blocks=1).start()
    loop.put(K[0])
    loop.index_fails()
    loop.at(800)
    assert loop.index_answers() == [("PUT", COMPAT), ("PUT", K[0])]
    loop.put(K[1])
    loop.index_fails()
    loop.at(1800)
    assert set(loop.index_answers()) == {("DELETE", K[0]), ("PUT", K[1])}


def test_an_answer_of_the_index_that_cannot_be_read_counts_as_the_ttl_asked_for() -> None:
    loop = Loop().start()
    loop.put(K[0])
    loop.index_answers(200)
    assert loop.get(K[0]).max_age_s == 6


def test_blocks_that_come_and_go_leave_no_deadlines_behind() -> None:
    loop = Loop(blocks=1).start()
    for i in range(300):
        loop.put(K[i % 9])
        loop.index_answers()
    assert len(loop.holder._blocks.publisher._alarms.freeze(0)) == 1


def test_a_container_that_does_not_begin_with_the_first_layer_is_refused() -> None:
    loop = Loop(knows=False).start()
    header = ContainerHeader(codec=1, first_layer=1, token_count=4, sections=((16, 16),))
    octets = b"".join(encode_container(header, [(bytes(16), bytes(16))]))
    assert loop.put(K[0], octets) == 409


# Stopping


@pytest.mark.requirement("PB-3")
def test_a_holder_that_stops_withdraws_its_records_and_still_serves_what_it_has() -> None:
    loop = Loop().start()
    assert loop.put(K[0]) == loop.put(K[1]) == 201
    loop.index_answers()
    loop.do(loop.holder.stop(loop.now_ms))
    assert not loop.holder.safe_to_stop
    assert loop.put(K[2]) == 503
    assert loop.lease(K[0]).response.status == 503
    assert loop.get(K[0]).status == 200, "who has looked it up may still fetch it"
    assert loop.index_answers() == [("DELETE", K[0]), ("DELETE", K[1])]
    assert loop.holder.safe_to_stop
    assert loop.tiers["host"][NAMES[0]] == container(), "what is on disk is there at the next start"


def test_a_holder_that_publishes_nothing_is_safe_to_stop_at_once() -> None:
    loop = Loop(index=False).start()
    assert loop.put(K[0]) == 201
    assert not loop.holder.safe_to_stop
    loop.do(loop.holder.stop(loop.now_ms))
    assert loop.holder.safe_to_stop


def test_a_holder_that_is_alone_keeps_no_news() -> None:
    loop = Loop(blocks=1).start()
    for key in (K[0], K[1], K[0]):
        assert loop.put(key) == 201
    assert loop.holder.take_news() == ()
