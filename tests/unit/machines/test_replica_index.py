"""The story of the replica index: publish, look up, refresh, withdraw, expire."""

from __future__ import annotations

import gc
import hashlib
import json
import random
from collections.abc import Callable, Hashable

import attrs
import pytest

from kvsp_core import bodies
from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import component_id
from kvsp_core.machines import packed_replicas
from kvsp_core.machines import replica_index as m
from kvsp_core.machines.replica_match import Match
from kvsp_core.machines.table import Cell
from kvsp_core.problems import BAD_REQUEST, CONFLICT, NOT_FOUND, STORAGE_FULL, TOO_LARGE, ProblemType
from kvsp_core.records import ReplicaRecord, Residency
from tests.machine_kit import cells, check_cell, problems_in

H1, H2, H3 = (f"https://h{i}.example/kvsp/" for i in (1, 2, 3))


def hex_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


COMPAT, SCOPE, OTHER_SCOPE = hex_of("descriptor"), hex_of("scope")[:32], hex_of("other")[:32]
CHAIN = tuple(hex_of(f"block {i}") for i in range(20))
HOST = (Residency(tier="host", layers=(0, 3)),)


def record(key: str, holder: str = H1, **changes: object) -> ReplicaRecord:
    members: dict[str, object] = {
        "block_key": key,
        "compat_id": COMPAT,
        "scope_id": SCOPE,
        "holder": holder,
        "codec": 1,
        "size": 2048,
        "digest": "sha-256:" + hex_of(f"octets of {key}"),
        "residency": HOST,
        "ttl_ms": 1000,
    }
    return ReplicaRecord(**(members | changes))  # type: ignore[arg-type]


def publication(of: ReplicaRecord, client: str | None = None) -> m.Publish:
    holder_id = component_id(of.holder)
    return m.Publish(client=client or of.holder, holder_id=holder_id, block_key=of.block_key, record=of)


def publish(index: m.ReplicaIndex, *records: ReplicaRecord, now_ms: int = 0) -> None:
    for each in records:
        (answer,) = index.handle(publication(each), now_ms)
        assert isinstance(answer, m.Published)


def withdraw(
    index: m.ReplicaIndex, key: str, holder: str = H1, digest: str | None = None, now_ms: int = 0
) -> m.Effect:
    event = m.Withdraw(holder_id=component_id(holder), block_key=key, digest=digest)
    (answer,) = index.handle(event, now_ms)
    return answer


def look_up(
    index: m.ReplicaIndex,
    keys: tuple[str, ...] = CHAIN,
    *,
    now_ms: int = 0,
    scope_id: str = SCOPE,
    compat_id: str = COMPAT,
    holders: tuple[str, ...] = (),
) -> Match:
    event = m.Lookup(compat_id=compat_id, scope_id=scope_id, block_keys=keys, holders=holders)
    (found,) = index.handle(event, now_ms)
    assert isinstance(found, m.Found)
    return found.match


def holders_of(match: Match) -> list[list[str]]:
    return [[replica.holder for replica in replicas] for replicas in match.replicas()]


def refusal(effect: m.Effect) -> ProblemType:
    (problem,) = problems_in((effect,))
    return problem.type


# Publication


@pytest.mark.requirement("PB-2")
def test_a_record_is_created_once_and_then_refreshed() -> None:
    index = m.ReplicaIndex(max_ttl_ms=600)
    event = publication(record(CHAIN[0], ttl_ms=500))
    assert index.handle(event, 0) == (m.Published(created=True, ttl_ms=500),)
    assert index.handle(event, 100) == (m.Published(created=False, ttl_ms=500),)
    assert index.handle(event, 400) == (m.Published(created=False, ttl_ms=500),)
    longer = publication(record(CHAIN[0], ttl_ms=5000))
    assert index.handle(longer, 500) == (m.Published(created=False, ttl_ms=600),)  # capped
    assert index.packed.records == 1
    assert look_up(index, now_ms=1099).matched == 1
    assert look_up(index, now_ms=1100).matched == 0


@pytest.mark.requirement("PB-2", "LK-1")
def test_a_record_expires_after_its_ttl_whether_the_timer_fired_or_not() -> None:
    index = m.ReplicaIndex()
    publish(index, record(CHAIN[0], ttl_ms=500))
    match = look_up(index, now_ms=499)
    assert match.matched == 1
    assert match.replicas()[0][0].ttl_ms == 1
    assert look_up(index, now_ms=500).matched == 0
    assert index.handle(publication(record(CHAIN[0], ttl_ms=500)), 500)[0] == m.Published(
        created=True, ttl_ms=500
    )


@pytest.mark.requirement("PB-2")
def test_the_timer_takes_out_what_has_expired_and_keeps_what_was_refreshed() -> None:
    index = m.ReplicaIndex()
    publish(index, *(record(key, ttl_ms=500) for key in CHAIN))
    publish(index, *(record(key, ttl_ms=5000) for key in CHAIN[5:]), now_ms=400)
    assert index.handle(m.TimerFired(), 499) == ()
    deadline_ms = index.next_deadline_ms()
    assert deadline_ms is not None
    assert 500 <= deadline_ms <= 1500
    assert index.handle(m.TimerFired(), deadline_ms) == (m.Expired(records=5),)
    assert index.packed.records == len(CHAIN) - 5
    assert index.handle(m.TimerFired(), deadline_ms) == ()
    assert index.handle(m.TimerFired(), 10_000) == (m.Expired(records=len(CHAIN) - 5),)
    assert index.next_deadline_ms() is None
    assert index.freeze(0) == m.ReplicaIndex().freeze(0)


@pytest.mark.requirement("PB-2")
def test_a_shorter_ttl_at_a_refresh_counts() -> None:
    index = m.ReplicaIndex()
    publish(index, record(CHAIN[0], ttl_ms=100_000))
    publish(index, record(CHAIN[0], ttl_ms=100), now_ms=10)
    assert look_up(index, now_ms=110).matched == 0
    assert index.next_deadline_ms() == 1000
    assert index.handle(m.TimerFired(), 1000) == (m.Expired(records=1),)


@pytest.mark.requirement("PB-1")
@pytest.mark.parametrize(
    ("change", "member"),
    [
        ({"holder_id": component_id(H2)}, "holder"),
        ({"block_key": CHAIN[1]}, "block_key"),
        ({"record": record("0" * 64), "block_key": "0" * 64}, "block_key"),
        (
            {"record": record(CHAIN[0], layer_digests=tuple(hex_of(str(i)) for i in range(4)))},
            "layer_digests",
        ),
    ],
)
def test_a_publication_that_does_not_agree_with_itself_is_refused(
    change: dict[str, object], member: str
) -> None:
    index = m.ReplicaIndex()
    wrong = attrs.evolve(publication(record(CHAIN[0])), **change)
    (answer,) = index.handle(wrong, 0)
    (problem,) = problems_in((answer,))
    assert problem.type is BAD_REQUEST
    assert problem.detail.startswith(member + ":")
    assert index.freeze(0) == m.ReplicaIndex().freeze(0)


@pytest.mark.requirement("PB-1")
def test_a_refresh_must_agree_with_its_path_too() -> None:
    index = m.ReplicaIndex()
    publish(index, record(CHAIN[0]))
    before = index.freeze(0)
    wrong = attrs.evolve(
        publication(record(CHAIN[0])), record=record(CHAIN[1], digest=record(CHAIN[0]).digest)
    )
    assert refusal(index.handle(wrong, 0)[0]) is BAD_REQUEST
    assert index.freeze(0) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "sha-256:" + hex_of("other octets")},
        {"size": 4096},
        {"codec": 0xFF00},
        {"residency": (Residency(tier="device", layers=(0, 3)),)},
        {"residency": (Residency(tier="host", layers=(0, 3), read_mbit_per_s=7),)},
        {"scope_id": OTHER_SCOPE},
        {"compat_id": hex_of("another descriptor")},
        {"ttl_ms": 77},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_changed_record_replaces_the_one_before(changes: dict[str, object]) -> None:
    index = m.ReplicaIndex()
    publish(index, *(record(key) for key in CHAIN[:3]))
    changed = record(CHAIN[1], **changes)
    assert index.handle(publication(changed), 0)[0] == m.Published(created=False, ttl_ms=changed.ttl_ms)
    assert index.record_of(component_id(H1), CHAIN[1], 0) == changed
    assert index.packed.records == 3
    assert look_up(index).matched == (1 if {"scope_id", "compat_id"} & set(changes) else 3)


def test_a_record_served_by_layer_keeps_its_digests() -> None:
    index = m.ReplicaIndex()
    layers = tuple(hex_of(f"layer {i}") for i in range(4))
    digest = "sha-256:" + hashlib.sha256(bytes.fromhex("".join(layers))).hexdigest()
    plain = record(CHAIN[0], digest=digest)
    publish(index, plain)
    by_layer = record(CHAIN[0], digest=digest, layer_digests=layers)
    publish(index, by_layer)
    assert index.record_of(component_id(H1), CHAIN[0], 0) == by_layer
    publish(index, by_layer, now_ms=10)
    assert look_up(index, now_ms=10).replicas() == [(by_layer,)]
    (source,) = look_up(index, now_ms=10).sources()[0]
    assert (source.layer_digests, source.digest, source.size) == (layers, digest, 2048)
    assert (source.holder, source.residency) == (H1, HOST)


@pytest.mark.requirement("RR-4")
def test_a_moqt_holder_keeps_its_namespace() -> None:
    index = m.ReplicaIndex()
    namespace = "AWEBYgFjAWQBZQ"  # five fields of one octet
    moqt = record(CHAIN[0], "moqt://relay.example:443/", moqt_namespace=namespace)
    publish(index, moqt)
    match = look_up(index)
    assert match.replicas() == [(moqt,)]
    assert json.loads(match.json())["blocks"][0]["replicas"][0]["moqt_namespace"] == namespace


@pytest.mark.requirement("SE-3")
def test_the_room_of_a_client_is_limited() -> None:
    room = 2048 + 3 * 256
    index = m.ReplicaIndex(client_bytes=room)
    publish(index, *(record(key) for key in CHAIN[:3]))
    before = index.freeze(0)
    (answer,) = index.handle(publication(record(CHAIN[3])), 0)
    assert refusal(answer) is STORAGE_FULL
    assert index.freeze(0) == before
    publish(index, record(CHAIN[0]), record(CHAIN[1], size=1))  # what is there can be refreshed and replaced
    publish(index, record(CHAIN[3], H2))  # and others have room of their own
    withdraw(index, CHAIN[2])
    publish(index, record(CHAIN[3]))
    assert index.packed.used_bytes == {H1: room, H2: 2048 + 256}


@pytest.mark.requirement("SE-3")
def test_the_room_of_all_is_limited_and_a_new_kind_of_record_costs_more() -> None:
    index = m.ReplicaIndex(total_bytes=2 * 2048 + 2 * 256)
    publish(index, record(CHAIN[0]))
    kinds = [
        record(key, residency=(Residency(tier="host", layers=(0, i)),)) for i, key in enumerate(CHAIN[1:])
    ]
    answers = [index.handle(publication(each, client=H2), 0)[0] for each in kinds]
    assert [type(answer) for answer in answers[:3]] == [m.Published, m.Refused, m.Refused]
    index.handle(m.TimerFired(), 9999)
    assert index.packed.total_bytes == 0
    assert index.packed.used_bytes == {}


# Withdrawal


@pytest.mark.requirement("PB-1")
def test_a_withdrawn_record_is_gone_and_the_rest_stays() -> None:
    index = m.ReplicaIndex()
    publish(index, *(record(key) for key in CHAIN), record(CHAIN[3], H2))
    assert withdraw(index, CHAIN[3]) == m.Withdrawn()
    assert holders_of(look_up(index))[2:5] == [[H1], [H2], [H1]]
    assert refusal(withdraw(index, CHAIN[3])) is NOT_FOUND
    assert withdraw(index, CHAIN[3], H2) == m.Withdrawn()
    assert look_up(index).matched == 3
    assert look_up(index, CHAIN[4:]).matched == len(CHAIN) - 4
    publish(index, record(CHAIN[3], H3))
    assert look_up(index).matched == len(CHAIN)


def test_an_expired_record_cannot_be_withdrawn() -> None:
    index = m.ReplicaIndex()
    publish(index, record(CHAIN[0], ttl_ms=100))
    assert refusal(withdraw(index, CHAIN[0], now_ms=100)) is NOT_FOUND


@pytest.mark.requirement("BR-8", "PB-1")
def test_a_bad_replica_is_not_accepted_again_for_some_time() -> None:
    index = m.ReplicaIndex(quarantine_ms=300)
    bad = record(CHAIN[0], ttl_ms=10_000)
    publish(index, bad, record(CHAIN[0], H2, ttl_ms=10_000))
    assert withdraw(index, CHAIN[0], digest=bad.digest) == m.Withdrawn()
    assert holders_of(look_up(index)) == [[H2]]
    assert refusal(index.handle(publication(bad), 299)[0]) is CONFLICT
    assert holders_of(look_up(index, now_ms=299)) == [[H2]]
    publish(
        index, record(CHAIN[0], digest="sha-256:" + hex_of("sound")), now_ms=299
    )  # a sound one is welcome
    assert index.next_deadline_ms() == 300
    assert index.handle(m.TimerFired(), 300) == ()
    publish(index, bad, now_ms=300)


def test_a_report_of_another_replica_changes_nothing() -> None:
    index = m.ReplicaIndex()
    publish(index, record(CHAIN[0]))
    before = index.freeze(0)
    assert refusal(withdraw(index, CHAIN[0], digest="sha-256:" + hex_of("what it was"))) is NOT_FOUND
    assert index.freeze(0) == before


def test_the_number_of_quarantined_replicas_is_limited() -> None:
    index = m.ReplicaIndex(max_quarantined=2)
    for key in CHAIN[:3]:
        publish(index, record(key))
        withdraw(index, key, digest=record(key).digest)
    kinds = [index.kind_of(component_id(H1), key, 0) for key in CHAIN[:3]]
    assert kinds == [m.RecordKind.UNKNOWN, m.RecordKind.QUARANTINED, m.RecordKind.QUARANTINED]


# Lookup


@pytest.mark.requirement("LK-1")
def test_a_lookup_stops_at_the_first_key_without_a_replica() -> None:
    index = m.ReplicaIndex()
    publish(index, *(record(key) for key in (*CHAIN[:5], *CHAIN[6:])))
    match = look_up(index)
    assert match.matched == 5
    assert match.requested == len(CHAIN)
    assert [replicas[0].block_key for replicas in match.replicas()] == list(CHAIN[:5])
    assert look_up(index, CHAIN[6:]).matched == len(CHAIN) - 6
    assert look_up(index, ()).matched == 0


@pytest.mark.requirement("LK-1")
def test_a_prefix_goes_over_any_number_of_holders() -> None:
    index = m.ReplicaIndex()
    publish(index, *(record(key, (H1, H2, H3)[i % 3]) for i, key in enumerate(CHAIN)))
    publish(index, *(record(key, H3) for key in CHAIN[5:8]))
    assert holders_of(look_up(index)) == [
        sorted({(H1, H2, H3)[i % 3], *([H3] if 5 <= i < 8 else [])}) for i in range(len(CHAIN))
    ]


@pytest.mark.requirement("LK-1")
def test_any_replica_counts_and_partial_ones_state_their_layers() -> None:
    index = m.ReplicaIndex()
    layers = tuple(hex_of(f"layer {i}") for i in range(4))
    digest = "sha-256:" + hashlib.sha256(bytes.fromhex("".join(layers))).hexdigest()
    split = (
        Residency(tier="device", layers=(0, 0)),
        Residency(tier="host", layers=(2, 3), read_mbit_per_s=400_000),
    )
    partial = record(CHAIN[0], digest=digest, layer_digests=layers, residency=split)
    publish(index, partial)
    assert look_up(index).replicas() == [(partial,)]


@pytest.mark.requirement("LK-3", "SK-4")
def test_a_lookup_sees_one_scope_and_one_descriptor() -> None:
    index = m.ReplicaIndex()
    publish(index, *(record(key) for key in CHAIN))
    publish(index, *(record(key, H2, scope_id=OTHER_SCOPE) for key in CHAIN[:3]))
    assert holders_of(look_up(index)) == [[H1]] * len(CHAIN)
    assert holders_of(look_up(index, scope_id=OTHER_SCOPE)) == [[H2]] * 3
    assert look_up(index, compat_id=hex_of("another descriptor")).matched == 0
    assert look_up(index, scope_id=hex_of("nobody's")[:32]).matched == 0


def test_replicas_are_limited_and_the_holders_named_come_first() -> None:
    index = m.ReplicaIndex(max_replicas=2)
    holders = [f"https://h{i}.example/" for i in range(5)]
    publish(index, *(record(key, holder) for holder in holders for key in CHAIN))
    assert holders_of(look_up(index))[0] == holders[:2]
    named = look_up(index, holders=(holders[4], H1, holders[3], holders[4]))
    assert holders_of(named)[0] == [holders[4], holders[3]]
    withdraw(index, CHAIN[2], holders[4])
    assert holders_of(look_up(index, holders=(holders[4],)))[1:4] == [
        [holders[4], holders[0]],
        [holders[0], holders[1]],
        [holders[4], holders[0]],
    ]


@pytest.mark.requirement("LK-4")
def test_a_lookup_of_too_many_keys_is_refused() -> None:
    index = m.ReplicaIndex(max_keys=3)
    event = m.Lookup(compat_id=COMPAT, scope_id=SCOPE, block_keys=CHAIN[:4])
    (answer,) = index.handle(event, 0)
    assert refusal(answer) is TOO_LARGE
    assert look_up(index, CHAIN[:3]).matched == 0


# The answer's body


@pytest.mark.requirement("LK-1")
def test_the_body_holds_the_records_with_the_time_that_remains() -> None:
    index = m.ReplicaIndex()
    layers = tuple(hex_of(f"layer {i}") for i in range(4))
    digest = "sha-256:" + hashlib.sha256(bytes.fromhex("".join(layers))).hexdigest()
    for i, key in enumerate(CHAIN):
        publish(index, record(key, ttl_ms=900 + i))
        if i % 2:
            publish(index, record(key, H2, digest=digest, layer_digests=layers))
    match = look_up(index, now_ms=300)
    body = json.loads(match.json())
    assert body == {
        "matched": len(CHAIN),
        "blocks": [
            {
                "block_key": key,
                "replicas": [json.loads(bodies.encode(replica)) for replica in replicas],
            }
            for key, replicas in zip(CHAIN, match.replicas(), strict=True)
        ],
    }
    assert body["blocks"][3]["replicas"][0]["ttl_ms"] == 603
    assert len(body["blocks"][3]["replicas"]) == 2
    assert json.loads(match.json(b'[{"instance":"x"}]'))["targets"] == [{"instance": "x"}]
    assert look_up(index, CHAIN[::-1], scope_id=OTHER_SCOPE).json() == b'{"matched":0,"blocks":[]}'


def test_a_long_body_comes_in_pieces_that_are_whole_together() -> None:
    index = m.ReplicaIndex()
    keys = tuple(hex_of(f"long {i}") for i in range(1000))
    publish(index, *(record(key) for key in keys))
    match = look_up(index, keys)
    pieces = list(match._pieces(b"[]"))
    assert len(pieces) > 1
    body = json.loads(b"".join(pieces))
    assert [block["block_key"] for block in body["blocks"]] == list(keys)
    assert body["targets"] == []


@pytest.mark.requirement("LK-4")
def test_a_body_is_limited_by_replicas_first_and_then_by_keys() -> None:
    every = [record(key, holder) for holder in (H1, H2, H3) for key in CHAIN]
    free = m.ReplicaIndex()
    publish(free, *every)
    whole = len(look_up(free).json())
    for share, replicas, all_keys in ((0.8, 2, True), (0.5, 1, True), (0.2, 1, False)):
        index = m.ReplicaIndex(max_answer_bytes=int(whole * share))
        publish(index, *every)
        octets = look_up(index).json()
        body = json.loads(octets)
        assert {len(block["replicas"]) for block in body["blocks"]} == {replicas}
        assert body["matched"] == len(body["blocks"])
        assert (body["matched"] == len(CHAIN)) == all_keys
        assert 0 < len(octets) <= whole * share


def test_a_match_is_used_before_the_index_changes() -> None:
    index = m.ReplicaIndex()
    publish(index, record(CHAIN[0]))
    match = look_up(index)
    publish(index, record(CHAIN[1]))
    _is_too_late(match)


def test_a_match_is_used_before_another_lookup_moves_the_keys_together() -> None:
    index = m.ReplicaIndex()
    keys = tuple(hex_of(f"scattered {i}") for i in range(100))
    publish(index, *(record(key) for key in (*keys[::2], *keys[1::2])))
    match = look_up(index, keys[:1])
    look_up(index, keys)
    _is_too_late(match)


def _is_too_late(match: Match) -> None:
    for use in (match.json, match.replicas, match.sources):
        with pytest.raises(LocalProtocolError, match="use a match at once"):
            use()


# However the keys came


@pytest.mark.parametrize("chunk", [2, 3, 256])
def test_answers_do_not_depend_on_the_order_of_publication(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(packed_replicas, "_SLOTS", chunk)
    keys = tuple(hex_of(f"long {i}") for i in range(100))
    records = [record(key, holder) for holder in (H1, H2) for key in keys]
    index = m.ReplicaIndex()
    publish(index, *random.Random(chunk).sample(records, len(records)))
    for _ in range(3):
        match = look_up(index, keys)
        assert match.matched == 100
        assert [sorted(r.holder for r in replicas) for replicas in match.replicas()] == [[H1, H2]] * 100
    frozen = index.freeze(0)
    assert len(frozen.records) == 200


def test_a_prefix_that_lies_in_pieces_is_moved_together_by_its_lookups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_replicas, "_MOVED_RECORDS", 400)
    keys = tuple(hex_of(f"long {i}") for i in range(1000))
    index = m.ReplicaIndex()
    publish(index, *(record(key) for key in random.Random(1).sample(keys, len(keys))))
    before = index.freeze(0)
    runs = []
    for _ in range(4):
        assert look_up(index, keys).matched == 1000
        runs.append(len(index.packed._runs(bytes.fromhex("".join(keys)))))
    assert runs[0] > 500
    assert runs[-1] <= 5
    assert index.freeze(0) == before


def test_a_lookup_may_name_a_key_many_times() -> None:
    index = m.ReplicaIndex()
    publish(index, *(record(key) for key in CHAIN))
    assert look_up(index, (CHAIN[0],) * 9).matched == 9
    assert index.packed.keys == sum(chunk.live for chunk in index.packed._chunks.values()) == len(CHAIN)
    assert look_up(index).matched == len(CHAIN)


def test_two_prompts_with_one_prefix_do_not_move_each_other() -> None:
    trunk = tuple(hex_of(f"trunk {i}") for i in range(10))
    left, right = (trunk + tuple(hex_of(f"{side} {i}") for i in range(10)) for side in ("left", "right"))
    index = m.ReplicaIndex()
    publish(index, *(record(key) for key in (*left, *right[10:])))
    before = dict(index.packed._where)
    for keys in (left, right, left, right):
        assert look_up(index, keys).matched == 20
    assert index.packed._where == before


def test_a_nearly_empty_chunk_is_given_up() -> None:
    keys = tuple(hex_of(f"long {i}") for i in range(600))
    index = m.ReplicaIndex()
    publish(index, *(record(key) for key in keys))
    for key in keys:
        if key not in keys[::50]:
            withdraw(index, key)
    assert look_up(index, keys[::50]).matched == 12
    assert len(index.packed._chunks) == 1
    for key in keys[::50]:
        withdraw(index, key)
    assert index.packed._chunks == {}
    assert index.packed._open == {}
    assert index.packed._where == {}


def test_a_lookup_of_zero_octets_never_matches_what_was_withdrawn() -> None:
    index = m.ReplicaIndex()
    publish(index, *(record(key) for key in CHAIN[:3]))
    withdraw(index, CHAIN[1])
    assert look_up(index, (CHAIN[0], "0" * 64, CHAIN[2])).matched == 1


def test_millions_of_records_would_not_be_objects() -> None:
    index = m.ReplicaIndex()
    gc.collect()
    before = len(gc.get_objects())
    publish(index, *(record(hex_of(f"long {i}")) for i in range(2000)))
    gc.collect()
    assert len(gc.get_objects()) - before < 200


# The whole state and what is shown


def test_an_index_is_rebuilt_from_its_frozen_state() -> None:
    index = m.ReplicaIndex()
    publish(index, *(record(key, holder) for key in CHAIN for holder in (H1, H2)))
    withdraw(index, CHAIN[0], digest=record(CHAIN[0]).digest)
    frozen = index.freeze(100)
    hash(frozen)
    other = m.ReplicaIndex()
    other.thaw(frozen, 7000)
    assert other.freeze(7000) == frozen
    assert refusal(other.handle(publication(record(CHAIN[0])), 7000)[0]) is CONFLICT
    assert index.freeze(1000).records == ()
    with pytest.raises(LocalProtocolError, match="use a new one"):
        other.thaw(frozen, 7000)


def test_it_says_how_much_it_holds() -> None:
    index = m.ReplicaIndex()
    publish(index, *(record(key) for key in CHAIN), record(CHAIN[0], H2))
    publish(index, record(CHAIN[0], H1, scope_id=OTHER_SCOPE))  # another kind, in place of the first
    info = index.describe()
    assert info.records == len(CHAIN) + 1
    assert [(each.holder, each.records) for each in info.holders] == [(H1, len(CHAIN)), (H2, 1)]
    assert info.size_bytes == 3 * 2048 + info.records * 256


def test_nothing_confidential_is_shown() -> None:
    index = m.ReplicaIndex()
    event = publication(record(CHAIN[0]))
    shown = repr((event, index.handle(event, 0), index.freeze(0), m.Found(match=look_up(index))))
    shown += repr(m.Withdraw(holder_id="h", block_key=CHAIN[0], digest=record(CHAIN[0]).digest))
    for secret in (CHAIN[0], COMPAT, SCOPE, record(CHAIN[0]).digest[8:]):
        assert secret not in shown


# What is legal, from the table


@attrs.define
class Subject:
    index: m.ReplicaIndex
    now_ms: int = 10

    def kind(self) -> m.RecordKind:
        return self.index.kind_of(component_id(H1), CHAIN[0], self.now_ms)

    def freeze(self) -> Hashable:
        return self.index.freeze(self.now_ms)

    def handle(self, event: m.Event) -> tuple[m.Effect, ...]:
        return self.index.handle(event, self.now_ms)


def in_kind(kind: m.RecordKind) -> m.ReplicaIndex:
    index = m.ReplicaIndex()
    publish(index, record(CHAIN[0], H2))
    if kind is not m.RecordKind.UNKNOWN:
        publish(index, record(CHAIN[0]))
    if kind is m.RecordKind.QUARANTINED:
        withdraw(index, CHAIN[0], digest=record(CHAIN[0]).digest)
    return index


EVENTS: dict[type, tuple[Callable[[], m.Event], ...]] = {
    m.Publish: (
        lambda: publication(record(CHAIN[0])),
        lambda: publication(record(CHAIN[0], digest="sha-256:" + hex_of("other"))),
    ),
    m.Withdraw: (
        lambda: m.Withdraw(holder_id=component_id(H1), block_key=CHAIN[0]),
        lambda: m.Withdraw(holder_id=component_id(H1), block_key=CHAIN[0], digest=record(CHAIN[0]).digest),
    ),
    m.Lookup: (lambda: m.Lookup(compat_id=COMPAT, scope_id=SCOPE, block_keys=CHAIN),),
    m.TimerFired: (m.TimerFired,),
}


@pytest.mark.requirement("PB-2")
@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(m.TABLE))
def test_legality(kind: m.RecordKind, event_type: type, cell: Cell) -> None:
    for event in EVENTS[event_type]:
        subject = Subject(in_kind(kind))
        assert subject.kind() is kind
        check_cell(cell, subject=subject, event=event())
