"""One block on its way: verified, from whoever has it, never mixed, never used unverified."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any

import attrs
import pytest

from kvsp_core.container import ContainerHeader, replica_digest
from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines.retrieval import (
    TABLE,
    Attempt,
    BlockEnded,
    Cancel,
    CancelFetch,
    Done,
    Effect,
    Fetch,
    FetchFailed,
    GiveUp,
    LayersArrived,
    LayersUsable,
    LayersWithdrawn,
    Outcome,
    Part,
    Refused,
    ReportBad,
    Retrieval,
    Start,
    StateKind,
    outcome_of_status,
)
from kvsp_core.machines.table import Cell, Kind
from kvsp_core.records import ReplicaRecord, Residency
from tests.machine_kit import cells, check_cell

H1, H2, H3 = "https://h1.example/kvsp/", "https://h2.example/kvsp/", "https://h3.example/kvsp/"
KEY, COMPAT, SCOPE = "11" * 32, "22" * 32, "33" * 16
LAYERS, B = 4, 16
NOW = 1000


def digests_of(content: str) -> tuple[str, ...]:
    """The layer digests of one version of the block: engines differ in last bits."""
    return tuple(hashlib.sha256(f"{content}{layer}".encode()).hexdigest() for layer in range(LAYERS))


def replica(
    holder: str, /, first: int = 0, last: int = LAYERS - 1, *, content: str = "a", **changes: object
) -> ReplicaRecord:
    record = ReplicaRecord(
        block_key=KEY,
        compat_id=COMPAT,
        scope_id=SCOPE,
        holder=holder,
        codec=1,
        size=4096,
        digest=replica_digest(digests_of(content)),
        layer_digests=digests_of(content),
        residency=(Residency(tier="host", layers=(first, last)),),
        ttl_ms=1000,
    )
    return attrs.evolve(record, **changes)  # type: ignore[arg-type]


def retrieval(*records: ReplicaRecord, **options: Any) -> Retrieval:
    return Retrieval(
        records,
        block_key=KEY,
        compat_id=COMPAT,
        scope_id=SCOPE,
        layers=LAYERS,
        block_tokens=B,
        **options,
    )


def started(*records: ReplicaRecord, **options: Any) -> tuple[Retrieval, tuple[Effect, ...]]:
    machine = retrieval(*records, **options)
    return machine, machine.handle(Start(), NOW)


def ended(fetch: int, first: int = 0, last: int = LAYERS - 1, **changes: Any) -> BlockEnded:
    content = changes.pop("content", "a")
    header = ContainerHeader(
        codec=changes.pop("codec", 1),
        first_layer=first,
        token_count=changes.pop("token_count", B),
        sections=((512, 512),) * (last + 1 - first),
    )
    event = BlockEnded(
        fetch=fetch,
        header=header,
        layer_digests=digests_of(content)[first : last + 1],
        repr_digest_valid=True,
    )
    return attrs.evolve(event, **changes)


def arrived(fetch: int, layer: int, content: str = "a") -> LayersArrived:
    return LayersArrived(fetch, layer, (digests_of(content)[layer],))


def fetch_of(number: int, holder: str, layers: tuple[int, int] | None = None, codec: int = 1) -> Fetch:
    return Fetch(fetch=number, holder=holder, layers=layers, codec=codec)


DIGESTS = digests_of("a")
DIGEST = replica_digest(DIGESTS)
OTHER_DIGEST = replica_digest(digests_of("b"))


# The ordinary way


@pytest.mark.requirement("BR-4", "KC-3")
def test_layers_that_came_together_are_usable_together_unless_one_of_them_is_not_what_was_asked_for() -> None:
    machine, _ = started(replica(H1))
    machine.handle(arrived(0, 1), NOW)
    assert machine.handle(LayersArrived(0, 0, DIGESTS[:3]), NOW) == (LayersUsable(0, (0, 2)),)
    for wrong in (
        LayersArrived(0, 2, (DIGESTS[2], DIGESTS[2])),  # the last one is another
        LayersArrived(0, 2, (*DIGESTS[2:], DIGESTS[3])),  # more than there are
    ):
        machine, _ = started(replica(H1))
        effects = machine.handle(wrong, NOW)
        assert effects == (
            CancelFetch(0),
            ReportBad(H1, DIGEST),
            GiveUp((Attempt(H1, Outcome.CORRUPT),)),
        )


@pytest.mark.requirement("BR-4", "KC-3")
def test_layers_are_usable_as_they_arrive_and_the_block_is_done_when_all_of_it_verified() -> None:
    machine, effects = started(replica(H1), replica(H2))
    assert effects == (fetch_of(0, H1),)
    assert machine.handle(arrived(0, 0), NOW) == (LayersUsable(0, (0,)),)
    assert machine.handle(arrived(0, 0), NOW) == ()
    assert machine.handle(arrived(0, 1), NOW) == (LayersUsable(0, (1,)),)
    assert machine.state is StateKind.FETCHING
    assert machine.handle(ended(0), NOW) == (
        LayersUsable(0, (2, 3)),
        Done(DIGEST, (Part(0, (0, 3)),)),
    )
    assert machine.state is StateKind.COMPLETE
    assert machine.handle(Cancel(), NOW) == ()
    assert machine.state is StateKind.COMPLETE


@pytest.mark.requirement("PB-5")
def test_a_miss_is_followed_by_the_next_replica_and_then_by_recomputation() -> None:
    machine, _ = started(replica(H1), replica(H2, content="b"))
    assert machine.handle(Refused(0, 404), NOW) == (fetch_of(1, H2),)
    assert machine.handle(Refused(1, 404), NOW) == (
        GiveUp((Attempt(H1, Outcome.MISS), Attempt(H2, Outcome.MISS))),
    )
    assert machine.state is StateKind.UNAVAILABLE


def test_without_a_replica_it_is_computed() -> None:
    assert started()[1] == (GiveUp(()),)


@pytest.mark.requirement("HT-6")
@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, None),
        (203, None),
        (299, None),
        (404, Outcome.MISS),
        (410, Outcome.MISS),
        (403, Outcome.REFUSED),
        (418, Outcome.REFUSED),
        (499, Outcome.REFUSED),
        (302, Outcome.REFUSED),
        (429, Outcome.UNAVAILABLE),
        (503, Outcome.UNAVAILABLE),
        (599, Outcome.UNAVAILABLE),
    ],
)
def test_unknown_status_codes_are_acted_on_by_their_class(status: int, outcome: Outcome | None) -> None:
    assert outcome_of_status(status) is outcome
    machine, _ = started(replica(H1))
    effects = machine.handle(Refused(0, status), NOW)
    assert effects == (GiveUp((Attempt(H1, outcome or Outcome.UNAVAILABLE),)),)


# Verification


@pytest.mark.requirement("BR-4", "BR-5", "BR-8")
def test_a_layer_with_a_wrong_digest_ends_the_fetch_and_nothing_of_it_is_used() -> None:
    machine, _ = started(replica(H1), replica(H2))
    machine.handle(arrived(0, 0), NOW)
    assert machine.handle(arrived(0, 1, "b"), NOW) == (
        CancelFetch(0),
        LayersWithdrawn(0, (0,)),
        ReportBad(H1, DIGEST),
        fetch_of(1, H2),
    )
    assert machine.handle(ended(0), NOW) == ()


@pytest.mark.requirement("BR-4", "BR-5")
@pytest.mark.parametrize(
    "fault",
    [
        {"repr_digest_valid": False},
        {"content": "b"},
        {"token_count": B - 1},
        {"codec": 2},
        {"layer_digests": digests_of("a")[:3]},
        {"last": 2},
        {"first": 1},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_a_block_that_fails_in_the_end_is_withdrawn_from_use(fault: dict[str, Any]) -> None:
    machine, _ = started(replica(H1), replica(H2))
    for layer in range(LAYERS):
        machine.handle(arrived(0, layer), NOW)
    assert machine.handle(ended(0, **fault), NOW) == (
        LayersWithdrawn(0, (0, 1, 2, 3)),
        ReportBad(H1, DIGEST),
        fetch_of(1, H2),
    )


@pytest.mark.requirement("BR-4")
def test_without_layer_digests_nothing_is_usable_before_the_replica_digest_was_checked() -> None:
    machine, _ = started(replica(H1, layer_digests=None), replica(H2, layer_digests=None))
    assert machine.handle(arrived(0, 0, "b"), NOW) == ()
    assert machine.handle(ended(0, content="b"), NOW) == (ReportBad(H1, DIGEST), fetch_of(1, H2))
    assert machine.handle(arrived(1, 0), NOW) == ()
    effects = machine.handle(ended(1), NOW)
    assert effects == (LayersUsable(1, tuple(range(LAYERS))), Done(DIGEST, (Part(1, (0, 3)),)))


@pytest.mark.requirement("BR-4", "BR-8")
def test_a_record_whose_layer_digests_do_not_give_its_digest_is_bad_before_anything_is_fetched() -> None:
    lying = replica(H1, layer_digests=digests_of("b"))
    _, effects = started(lying)
    assert effects == (ReportBad(H1, DIGEST), GiveUp((Attempt(H1, Outcome.CORRUPT),)))


def test_a_layer_that_was_not_asked_for_is_a_fault() -> None:
    machine, _ = started(replica(H1, 0, 1), replica(H2, 2, 3))
    assert machine.handle(arrived(0, 3), NOW) == (
        CancelFetch(0),
        ReportBad(H1, DIGEST),
        CancelFetch(1),
        GiveUp((Attempt(H1, Outcome.CORRUPT),)),
    )


# Layer ranges


@pytest.mark.requirement("BR-4")
def test_layer_ranges_of_several_replicas_make_one_block() -> None:
    machine, effects = started(replica(H1, 0, 1), replica(H2, 2, 3))
    assert effects == (fetch_of(0, H1, (0, 1)), fetch_of(1, H2, (2, 3)))
    assert machine.handle(arrived(1, 2), NOW) == (LayersUsable(1, (2,)),)
    assert machine.handle(ended(1, 2, 3), NOW) == (LayersUsable(1, (3,)),)
    assert machine.handle(ended(0, 0, 1), NOW) == (
        LayersUsable(0, (0, 1)),
        Done(DIGEST, (Part(0, (0, 1)), Part(1, (2, 3)))),
    )


@pytest.mark.requirement("BR-4")
def test_one_replica_that_has_all_is_preferred_to_several() -> None:
    _, effects = started(replica(H1, 0, 1), replica(H2))
    assert effects == (fetch_of(0, H2),)


@pytest.mark.requirement("BR-5")
def test_a_part_that_fails_is_asked_for_elsewhere() -> None:
    machine, _ = started(replica(H1, 0, 1), replica(H2, 2, 3), replica(H3, 0, 2))
    assert machine.handle(FetchFailed(0), NOW) == (fetch_of(2, H3, (0, 1)),)
    machine.handle(ended(2, 0, 1), NOW)
    effects = machine.handle(ended(1, 2, 3), NOW)
    assert effects[-1] == Done(DIGEST, (Part(2, (0, 1)), Part(1, (2, 3))))


@pytest.mark.requirement("BR-5", "BR-4")
def test_layers_of_replicas_with_different_digests_are_never_mixed() -> None:
    assert started(replica(H1, 0, 1), replica(H2, 2, 3, content="b"))[1] == (GiveUp(()),)
    machine, _ = started(replica(H1, 0, 1), replica(H2, 2, 3), replica(H3, content="b"))
    machine.handle(ended(0, 0, 1), NOW)
    machine.handle(arrived(1, 2), NOW)
    assert machine.handle(FetchFailed(1), NOW) == (
        LayersWithdrawn(1, (2,)),
        LayersWithdrawn(0, (0, 1)),
        fetch_of(2, H3),
    )
    assert machine.handle(ended(2, content="b"), NOW)[-1] == Done(OTHER_DIGEST, (Part(2, (0, 3)),))


@pytest.mark.requirement("BR-5")
def test_a_corrupt_part_discards_the_other_parts_of_the_same_replica() -> None:
    scattered = replica(
        H1,
        residency=(Residency(tier="host", layers=(0, 0)), Residency(tier="device", layers=(2, 2))),
    )
    others = replica(
        H2, residency=(Residency(tier="host", layers=(1, 1)), Residency(tier="host", layers=(3, 3)))
    )
    machine, effects = started(scattered, others, replica(H3, 0, 2))
    assert [e.layers for e in effects if isinstance(e, Fetch)] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    machine.handle(ended(0, 0, 0), NOW)
    assert machine.handle(arrived(2, 2, "b"), NOW) == (
        CancelFetch(2),
        LayersWithdrawn(0, (0,)),
        ReportBad(H1, DIGEST),
        fetch_of(4, H3, (0, 0)),
        fetch_of(5, H3, (2, 2)),
    )


@pytest.mark.requirement("RR-3")
def test_a_replica_without_layer_digests_is_asked_for_as_a_whole_or_not_at_all() -> None:
    whole = replica(H1, layer_digests=None)
    assert started(whole)[1] == (fetch_of(0, H1),)
    assert started(replica(H1, 0, 1, layer_digests=None), replica(H2, 2, 3))[1] == (GiveUp(()),)


# What is not taken


@pytest.mark.requirement("SK-4", "CD-6")
@pytest.mark.parametrize(
    "changes",
    [
        {"block_key": "44" * 32},
        {"compat_id": "44" * 32},
        {"scope_id": "44" * 16},
        {"codec": 0xFF01},
        {"layer_digests": digests_of("a")[:1] * (LAYERS + 1)},
        {"holder": "moqt://relay.example/", "moqt_namespace": "AWEBYgFjAWQBZQ"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_records_of_something_else_are_left_out(changes: dict[str, Any]) -> None:
    assert started(replica(H1, **changes))[1] == (GiveUp(()),)


@pytest.mark.requirement("SE-2")
def test_only_replicas_with_the_producers_digest_are_taken() -> None:
    _, effects = started(replica(H1, content="b"), replica(H2), producer_digests={DIGEST})
    assert effects == (fetch_of(0, H2),)
    assert started(replica(H1), producer_digests=set())[1] == (GiveUp(()),)
    with pytest.raises(LocalProtocolError, match="producer's digest"):
        retrieval(producer_digests={DIGEST}, codec=2)


@pytest.mark.requirement("BR-9")
def test_a_transcoded_block_is_checked_by_repr_digest_alone_and_used_only_whole() -> None:
    machine, effects = started(replica(H1, codec=0xFF01), replica(H2, 0, 1), codec=1)
    assert effects == (fetch_of(0, H1),)
    assert machine.handle(arrived(0, 0, "b"), NOW) == ()
    effects = machine.handle(ended(0, content="b"), NOW)
    assert effects[-1] == Done(OTHER_DIGEST, (Part(0, (0, 3)),))
    machine, _ = started(replica(H1, codec=0xFF01), codec=1)
    assert machine.handle(ended(0, repr_digest_valid=False), NOW)[0] == ReportBad(H1, DIGEST)


@pytest.mark.requirement("BR-9")
def test_the_replicas_own_codec_is_asked_for_and_nothing_else_taken() -> None:
    machine, effects = started(replica(H1, codec=0xFF01), codecs=(1, 0xFF01))
    assert effects == (fetch_of(0, H1, codec=0xFF01),)
    assert ReportBad(H1, DIGEST) in machine.handle(ended(0, codec=1), NOW)


# Ends


def test_a_cancelled_retrieval_stops_and_withdraws() -> None:
    machine, _ = started(replica(H1, 0, 1), replica(H2, 2, 3))
    machine.handle(ended(0, 0, 1), NOW)
    assert machine.handle(Cancel(), NOW) == (CancelFetch(1), LayersWithdrawn(0, (0, 1)))
    assert machine.state is StateKind.UNAVAILABLE
    assert machine.handle(ended(1, 2, 3), NOW) == ()


def test_a_frozen_retrieval_goes_on_where_it_stood() -> None:
    machine, _ = started(replica(H1, 0, 1), replica(H2, 2, 3))
    machine.handle(arrived(0, 0), NOW)
    frozen = machine.freeze(NOW)
    again = Retrieval.thaw(frozen, NOW + 5)
    assert again.freeze(NOW + 5) == frozen
    assert hash(frozen) == hash(again.freeze(NOW))
    assert again.handle(ended(1, 2, 3), NOW) == machine.handle(ended(1, 2, 3), NOW)
    assert again.next_deadline_ms() is None


# Legality


class _Subject:
    def __init__(self, kind: Kind) -> None:
        self.machine = retrieval(replica(H1))
        if kind is not StateKind.READY:
            self.machine.handle(Start(), NOW)
        if kind is StateKind.COMPLETE:
            self.machine.handle(ended(0), NOW)
        if kind is StateKind.UNAVAILABLE:
            self.machine.handle(FetchFailed(0), NOW)

    def kind(self) -> Kind:
        return self.machine.state

    def freeze(self) -> Hashable:
        return self.machine.freeze(NOW)

    def handle(self, event: Any) -> tuple[Any, ...]:
        return self.machine.handle(event, NOW)


EVENTS = {type(e): e for e in (Start(), arrived(0, 1), ended(0), Refused(0, 404), FetchFailed(0), Cancel())}


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(TABLE))
def test_every_event_in_every_state(kind: Kind, event_type: type, cell: Cell) -> None:
    check_cell(cell, subject=_Subject(kind), event=EVENTS[event_type])
