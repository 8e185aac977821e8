"""The load of one block: a lease before every fetch, and every lease released whatever happens."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from kvsp_core.machines.prefetch_load import (
    TABLE,
    AcquireLease,
    BlockLoad,
    Cancel,
    CancelFetch,
    Effect,
    Fetched,
    LeaseGranted,
    LeaseRefused,
    Loaded,
    LoadFailed,
    LoadState,
    ReleaseLease,
    Start,
    Store,
    Stored,
    StoreFailed,
)
from kvsp_core.machines.retrieval import Attempt, FetchFailed, Outcome, Part, Refused
from kvsp_core.machines.table import Cell, Kind
from kvsp_core.records import ReplicaRecord
from tests.machine_kit import cells, check_cell
from tests.unit.machines.test_retrieval import DIGEST, H1, H2, arrived, ended, fetch_of, replica, retrieval

NOW = 1000


def started(*records: ReplicaRecord) -> tuple[BlockLoad, tuple[Effect, ...]]:
    machine = BlockLoad(retrieval(*records), lease_ms=2000)
    return machine, machine.handle(Start(), NOW)


@pytest.mark.requirement("PF-3")
def test_a_block_is_leased_fetched_verified_stored_and_the_lease_released() -> None:
    machine, effects = started(replica(H1))
    assert effects == (AcquireLease(H1, 2000),)
    assert machine.handle(LeaseGranted(H1, "L"), NOW) == (fetch_of(0, H1),)
    assert machine.handle(Fetched(arrived(0, 0)), NOW) == ()
    assert machine.handle(Fetched(ended(0)), NOW) == (Store(DIGEST, (Part(0, (0, 3)),)),)
    assert machine.state is LoadState.STORING
    assert machine.handle(Stored(), NOW) == (Loaded(), ReleaseLease(H1, "L"))
    assert machine.finished


@pytest.mark.requirement("PF-6")
@pytest.mark.parametrize(
    "failure", [LeaseRefused(H1, 404), LeaseRefused(H1, 429), LeaseRefused(H1, None)], ids=repr
)
def test_a_refused_lease_is_a_failed_source_and_the_next_one_follows(failure: LeaseRefused) -> None:
    machine, _ = started(replica(H1), replica(H2))
    assert machine.handle(failure, NOW) == (AcquireLease(H2, 2000),)


@pytest.mark.requirement("PF-6", "PB-5")
def test_a_failed_fetch_is_followed_by_the_next_source_and_by_giving_up() -> None:
    machine, _ = started(replica(H1), replica(H2))
    machine.handle(LeaseGranted(H1, "L1"), NOW)
    assert machine.handle(Fetched(Refused(0, 404)), NOW) == (AcquireLease(H2, 2000),)
    machine.handle(LeaseGranted(H2, "L2"), NOW)
    assert machine.handle(Fetched(FetchFailed(1)), NOW) == (
        ReleaseLease(H1, "L1"),
        ReleaseLease(H2, "L2"),
        LoadFailed((Attempt(H1, Outcome.MISS), Attempt(H2, Outcome.UNAVAILABLE))),
    )
    assert machine.finished


@pytest.mark.requirement("BR-5")
def test_a_block_that_does_not_verify_is_not_stored() -> None:
    machine, _ = started(replica(H1))
    machine.handle(LeaseGranted(H1, "L"), NOW)
    effects = machine.handle(Fetched(ended(0, content="b")), NOW)
    assert not any(isinstance(effect, Store) for effect in effects)
    assert machine.state is LoadState.OVER


def test_ranges_from_one_holder_share_its_lease() -> None:
    machine, effects = started(replica(H1, 0, 1), replica(H2, 2, 3))
    assert effects == (AcquireLease(H1, 2000), AcquireLease(H2, 2000))
    assert machine.handle(LeaseGranted(H2, "L2"), NOW) == (fetch_of(1, H2, (2, 3)),)
    assert machine.handle(LeaseGranted(H1, "L1"), NOW) == (fetch_of(0, H1, (0, 1)),)
    assert machine.handle(LeaseGranted(H1, "again"), NOW) == (ReleaseLease(H1, "again"),)
    assert machine.handle(LeaseGranted("https://x.example/", "never asked"), NOW) == (
        ReleaseLease("https://x.example/", "never asked"),
    )


def test_a_refused_lease_fails_each_range_that_waited_for_it_once() -> None:
    machine, _ = started(replica(H1, 0, 1), replica(H1, 2, 3))
    effects = machine.handle(LeaseRefused(H1, None), NOW)
    assert [type(effect) for effect in effects] == [
        LoadFailed
    ]  # nothing was fetched, so nothing is cancelled
    assert machine.finished


def test_a_block_that_cannot_be_kept_has_no_use_for_other_sources() -> None:
    machine, _ = started(replica(H1), replica(H2))
    machine.handle(LeaseGranted(H1, "L"), NOW)
    machine.handle(Fetched(ended(0)), NOW)
    assert machine.handle(StoreFailed(), NOW) == (ReleaseLease(H1, "L"), LoadFailed((), storage=True))


@pytest.mark.requirement("PF-4")
def test_cancelling_stops_the_fetches_and_releases_also_what_is_granted_afterwards() -> None:
    machine, _ = started(replica(H1, 0, 1), replica(H2, 2, 3))
    machine.handle(LeaseGranted(H1, "L1"), NOW)
    assert machine.handle(Cancel(), NOW) == (CancelFetch(0), ReleaseLease(H1, "L1"))
    assert not machine.finished
    assert machine.handle(LeaseGranted(H2, "L2"), NOW) == (ReleaseLease(H2, "L2"),)
    assert machine.finished
    machine, _ = started(replica(H1))
    machine.handle(Cancel(), NOW)
    assert machine.handle(LeaseRefused(H1, None), NOW) == ()
    assert machine.finished


def test_what_is_being_stored_is_not_cancelled() -> None:
    machine, _ = started(replica(H1))
    machine.handle(LeaseGranted(H1, "L"), NOW)
    machine.handle(Fetched(ended(0)), NOW)
    assert machine.handle(Cancel(), NOW) == ()
    assert machine.handle(Stored(), NOW) == (Loaded(), ReleaseLease(H1, "L"))


def test_a_frozen_load_goes_on_where_it_stood() -> None:
    machine, _ = started(replica(H1, 0, 1), replica(H2, 2, 3))
    machine.handle(LeaseGranted(H1, "L1"), NOW)
    again = BlockLoad.thaw(machine.freeze(NOW), NOW)
    assert again.freeze(NOW) == machine.freeze(NOW)
    assert hash(again.freeze(NOW)) == hash(machine.freeze(NOW))
    assert again.handle(Cancel(), NOW) == machine.handle(Cancel(), NOW)
    assert again.next_deadline_ms() is None


class _Subject:
    def __init__(self, kind: Kind) -> None:
        self.machine = BlockLoad(retrieval(replica(H1)), lease_ms=2000)
        if kind is not LoadState.READY:
            self.machine.handle(Start(), NOW)
            self.machine.handle(LeaseGranted(H1, "L"), NOW)
        if kind in (LoadState.STORING, LoadState.OVER):
            self.machine.handle(Fetched(ended(0)), NOW)
        if kind is LoadState.OVER:
            self.machine.handle(Stored(), NOW)

    def kind(self) -> Kind:
        return self.machine.state

    def freeze(self) -> Hashable:
        return self.machine.freeze(NOW)

    def handle(self, event: Any) -> tuple[Any, ...]:
        return self.machine.handle(event, NOW)


EVENTS = {
    type(event): event
    for event in (
        Start(),
        LeaseGranted(H1, "M"),
        LeaseRefused(H1, 404),
        Fetched(ended(0)),
        Stored(),
        StoreFailed(),
        Cancel(),
    )
}


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(TABLE))
def test_every_event_in_every_state(kind: Kind, event_type: type, cell: Cell) -> None:
    check_cell(cell, subject=_Subject(kind), event=EVENTS[event_type])
