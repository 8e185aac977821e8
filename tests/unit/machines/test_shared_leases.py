"""Leases that loads share: asked for with what comes next, halved where refused, given back when unneeded."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from kvsp_core.limits import MAX_MEASURED_LINKS
from kvsp_core.machines.shared_leases import (
    TABLE,
    Answered,
    Ask,
    Done,
    GiveBack,
    Granted,
    Refused,
    SharedLeases,
    SharedState,
    Unanswered,
    Want,
)
from kvsp_core.machines.table import Cell, Kind
from tests.machine_kit import cells, check_cell

H, OTHER = "https://h.example/kvsp/", "https://o.example/kvsp/"
TTL = 1000
KEYS = tuple("abcdefgh")


def want(load: int, ahead: str = "", holder: str = H) -> Want:
    return Want(load=load, holder=holder, block_key=KEYS[load], ttl_ms=TTL, ahead=tuple(ahead))


def granted(request: int = 0, lease: str = "one", ttl_ms: int = TTL) -> Answered:
    return Answered(request=request, status=201, lease=lease, ttl_ms=ttl_ms)


@pytest.fixture
def leases() -> SharedLeases:
    return SharedLeases(most_keys=4)


def test_one_lease_for_a_load_and_those_that_come_after_it(leases: SharedLeases) -> None:
    assert leases.room_at(H) == 3
    assert leases.handle(want(0, "bcdefg"), 0) == (Ask(0, H, ("a", "b", "c", "d"), TTL),)
    assert leases.handle(want(1, "cdefgh"), 0) == ()  # it is being asked for
    assert leases.handle(granted(), 10) == (Granted(0, H, "one"), Granted(1, H, "one"))
    assert leases.handle(want(2, "defgh"), 20) == (Granted(2, H, "one"),)
    assert leases.handle(Done(0, H), 30) == ()
    assert leases.handle(want(3, "efgh"), 40) == (Granted(3, H, "one"),)
    for load in (1, 3):
        assert leases.handle(Done(load, H), 50) == ()
    assert leases.handle(Done(2, H), 60) == (GiveBack(H, "one"),)
    assert leases.handle(Done(2, H), 70) == ()
    assert leases.handle(want(4, "fgh"), 80) == (Ask(1, H, ("e", "f", "g", "h"), TTL),)
    assert leases.next_deadline_ms() is None


@pytest.mark.requirement("LE-3", "PF-3")
def test_where_only_shorter_leases_are_granted_such_are_asked_for_from_then_on(leases: SharedLeases) -> None:
    leases.handle(want(0, "bc"), 0)
    leases.handle(want(1), 0)
    refused = Answered(request=0, status=429, max_ttl_ms=600)
    assert leases.handle(refused, 5) == (Ask(1, H, ("a", "b", "c"), 600),)
    assert leases.handle(granted(1, ttl_ms=600), 10) == (Granted(0, H, "one"), Granted(1, H, "one"))
    assert leases.handle(want(4), 20) == (Ask(2, H, ("e",), 600),)
    refused = Answered(request=2, status=429, max_ttl_ms=600)
    assert leases.handle(refused, 25) == (Refused(4, H, 429),)  # it cannot be meant
    assert leases.handle(want(5, holder=OTHER), 30) == (Ask(3, OTHER, ("f",), TTL),)
    for number in range(300):
        leases.handle(want(6, holder=f"https://{number}.example/"), 40)
        leases.handle(Answered(request=4 + 2 * number, status=429, max_ttl_ms=600), 40)
    assert len(leases._longest_ms) == MAX_MEASURED_LINKS


def test_each_holder_has_its_own(leases: SharedLeases) -> None:
    leases.handle(want(0, "b"), 0)
    assert leases.handle(want(1, "c", OTHER), 0) == (Ask(1, OTHER, ("b", "c"), TTL),)


def test_what_is_leased_already_is_not_asked_for_again(leases: SharedLeases) -> None:
    leases.handle(want(0, "bc"), 0)
    assert leases.handle(want(3, "bce"), 0) == (Ask(1, H, ("d", "e"), TTL),)


@pytest.mark.requirement("PF-3")
def test_a_lease_whose_time_is_half_over_serves_no_further_load(leases: SharedLeases) -> None:
    leases.handle(want(0, "bc"), 0)
    leases.handle(granted(ttl_ms=600), 50)  # the holder grants less than it was asked for
    assert leases.handle(want(1, "c"), 299) == (Granted(1, H, "one"),)
    assert leases.handle(want(2), 300) == (Ask(1, H, ("c",), TTL),)
    assert leases.handle(granted(1, "two"), 310) == (Granted(2, H, "two"),)
    assert leases.handle(Done(0, H), 320) == ()
    assert leases.handle(Done(1, H), 330) == (GiveBack(H, "one"),)
    assert leases.handle(Done(2, H), 340) == (GiveBack(H, "two"),)


def test_a_lease_that_is_replaced_before_anybody_used_it_again_is_given_back(leases: SharedLeases) -> None:
    leases.handle(want(0, "b"), 0)
    leases.handle(granted(), 0)
    leases.handle(Done(0, H), 1)
    assert leases.handle(want(1), 500) == (Ask(1, H, ("b",), TTL), GiveBack(H, "one"))


@pytest.mark.requirement("PF-6")
def test_blocks_that_are_refused_together_are_asked_for_one_by_one(leases: SharedLeases) -> None:
    leases.handle(want(0, "bcd"), 0)
    leases.handle(want(1), 0)
    asked = leases.handle(Answered(request=0, status=404), 10)
    assert asked == (Ask(1, H, ("a",), TTL), Ask(2, H, ("b",), TTL))
    assert leases.handle(granted(1), 20) == (Granted(0, H, "one"),)
    assert leases.handle(Answered(request=2, status=404), 20) == (Refused(1, H, 404),)
    assert leases.state_of(H, "b") is SharedState.ABSENT


def test_the_next_lease_is_half_as_large_and_grows_again(leases: SharedLeases) -> None:
    leases.handle(want(0, "bcd"), 0)
    leases.handle(Answered(request=0, status=429), 0)
    leases.handle(Answered(request=1, status=429), 0)
    assert leases.room_at(H) == 1
    assert leases.handle(want(1, "cdef"), 0) == (Ask(2, H, ("b", "c"), TTL),)
    leases.handle(granted(2), 0)
    assert leases.room_at(H) == 3
    assert leases.room_at(OTHER) == 3


@pytest.mark.parametrize("end", [Unanswered(0), Answered(request=0, status=503)])
def test_a_holder_that_cannot_answer_is_not_asked_again_for_each_block(
    leases: SharedLeases, end: Unanswered | Answered
) -> None:
    leases.handle(want(0, "bcd"), 0)
    leases.handle(want(1), 0)
    status = end.status if isinstance(end, Answered) else None
    assert leases.handle(end, 10) == (Refused(0, H, status), Refused(1, H, status))
    assert leases.room_at(H) == 3
    assert leases.state_of(H, "c") is SharedState.ABSENT


@pytest.mark.requirement("PF-6")
def test_a_lease_of_blocks_that_nobody_wants_any_more_is_given_back(leases: SharedLeases) -> None:
    leases.handle(want(0, "bc"), 0)
    leases.handle(granted(), 0)
    assert leases.release_unwanted(lambda key: False) == ()  # a load has it
    leases.handle(Done(0, H), 1)
    assert leases.release_unwanted(lambda key: key == "b") == ()
    assert leases.release_unwanted(lambda key: key == "c") == ()
    assert leases.state_of(H, "b") is SharedState.ABSENT
    assert leases.release_unwanted(lambda key: False) == (GiveBack(H, "one"),)
    assert leases.release_unwanted(lambda key: False) == ()


def test_how_small_leases_have_to_be_is_remembered_of_few_holders(leases: SharedLeases) -> None:
    for number in range(300):
        leases.handle(want(0, "b", f"https://{number}.example/"), 0)
        leases.handle(Answered(request=2 * number, status=404), 0)
    assert leases.room_at("https://299.example/") == 0
    assert leases.room_at("https://0.example/") == 3


# Legality


class Subject:
    def __init__(self, kind: Kind) -> None:
        self.leases = SharedLeases()
        if kind is not SharedState.ABSENT:
            self.leases.handle(want(0), 0)
        if kind is SharedState.HELD:
            self.leases.handle(granted(), 0)

    def kind(self) -> Kind:
        return self.leases.state_of(H, "a")

    def freeze(self) -> Hashable:
        return self.leases.freeze(0)

    def handle(self, event: Any) -> tuple[Any, ...]:
        return self.leases.handle(event, 0)


EVENTS: dict[type, Any] = {
    Want: want(0),
    Answered: granted(),
    Unanswered: Unanswered(0),
    Done: Done(0, H),
}


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(TABLE))
def test_legality(kind: Kind, event_type: type, cell: Cell) -> None:
    check_cell(cell, subject=Subject(kind), event=EVENTS[event_type])


def test_no_lease_and_no_block_shows() -> None:
    secret = "5ec4e7"
    said = (
        Want(load=1, holder=H, block_key=secret, ttl_ms=1, ahead=(secret,)),
        granted(lease=secret),
        Ask(1, H, (secret,), 1),
        GiveBack(H, secret),
        Granted(1, H, secret),
    )
    assert secret not in repr(said)
