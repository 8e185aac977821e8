"""A lease as its client keeps it: asked for, renewed in time, asked for anew, given back."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from kvsp_core.machines.lease_keeper import (
    TABLE,
    Acquire,
    Answered,
    GiveBack,
    Held,
    KeeperState,
    LeaseKeeper,
    Lost,
    Release,
    Renew,
    Start,
    TimerFired,
    Unanswered,
)
from kvsp_core.machines.table import Cell, Kind
from tests.machine_kit import cells, check_cell

TTL = 900


def held(asked_ms: int = 0, answered_ms: int = 100) -> LeaseKeeper:
    keeper = LeaseKeeper(TTL)
    assert keeper.handle(Start(), asked_ms) == (Acquire(TTL),)
    assert keeper.handle(Answered(201, "one", TTL), answered_ms) == (Held(),)
    return keeper


@pytest.mark.requirement("LE-2")
def test_it_is_renewed_at_a_third_of_its_time_counted_from_asking() -> None:
    keeper = held(asked_ms=0, answered_ms=250)
    assert keeper.next_deadline_ms() == 300
    assert keeper.handle(TimerFired(), 299) == ()
    assert keeper.handle(TimerFired(), 300) == (Renew("one", TTL),)
    assert keeper.handle(TimerFired(), 301) == (), "one call at a time"
    assert keeper.handle(Answered(200, "one", TTL), 400) == (Held(),)
    assert keeper.next_deadline_ms() == 600


@pytest.mark.requirement("LE-3")
def test_where_only_shorter_leases_are_granted_such_a_one_is_asked_for() -> None:
    keeper = LeaseKeeper(TTL)
    keeper.handle(Start(), 0)
    assert keeper.handle(Answered(429, max_ttl_ms=600), 10) == (Acquire(600),)
    assert keeper.handle(Answered(201, "one", 600), 20) == (Held(),)
    assert keeper.handle(TimerFired(), 210) == (Renew("one", 600),)
    assert keeper.handle(Answered(429, max_ttl_ms=300), 220) == (Renew("one", 300),)
    assert keeper.handle(Answered(429, max_ttl_ms=300), 230) == ()  # it cannot be meant
    assert keeper.is_held


@pytest.mark.requirement("LE-3")
def test_a_holder_that_refuses_what_it_says_it_grants_is_not_asked_without_end() -> None:
    keeper = LeaseKeeper(TTL)
    keeper.handle(Start(), 0)
    keeper.handle(Answered(429, max_ttl_ms=600), 0)
    assert keeper.handle(Answered(429, max_ttl_ms=600), 0) == (Lost(429),)


def test_a_renewal_is_repeated_while_the_lease_lasts() -> None:
    keeper = held()
    keeper.handle(TimerFired(), 300)
    assert keeper.handle(Unanswered(), 350) == ()
    assert keeper.is_held
    assert keeper.next_deadline_ms() == 450
    assert keeper.handle(TimerFired(), 450) == (Renew("one", TTL),)
    assert keeper.handle(Answered(503), 500) == ()
    assert keeper.handle(TimerFired(), 900) == (Lost(None),)
    assert not keeper.is_held


def test_a_holder_that_has_forgotten_it_is_asked_anew() -> None:
    keeper = held()
    keeper.handle(TimerFired(), 300)
    assert keeper.handle(Answered(404), 310) == (Acquire(TTL),)
    assert not keeper.is_held
    assert keeper.handle(Answered(201, "two", TTL), 320) == (Held(),)
    assert keeper.handle(Release(), 330) == (GiveBack("two"),)


def test_a_refusal_is_the_end() -> None:
    keeper = LeaseKeeper(TTL)
    keeper.handle(Start(), 0)
    assert keeper.handle(Answered(429), 1) == (Lost(429),)
    keeper = LeaseKeeper(TTL)
    keeper.handle(Start(), 0)
    assert keeper.handle(Unanswered(), 1) == (Lost(None),)


def test_what_is_granted_after_all_is_given_back() -> None:
    keeper = LeaseKeeper(TTL)
    keeper.handle(Start(), 0)
    assert keeper.handle(Release(), 1) == ()
    assert keeper.handle(Answered(201, "late", TTL), 2) == (GiveBack("late"),)
    keeper = held()
    keeper.handle(TimerFired(), 300)
    assert keeper.handle(Release(), 301) == (GiveBack("one"),)
    assert keeper.handle(Answered(200, "one", TTL), 302) == (), "it was given back already"


class Subject:
    def __init__(self, kind: Kind) -> None:
        self.keeper = LeaseKeeper(TTL)
        if kind is not KeeperState.READY:
            self.keeper.handle(Start(), 0)
        if kind is KeeperState.HELD:
            self.keeper.handle(Answered(201, "one", TTL), 0)
        if kind is KeeperState.OVER:
            self.keeper.handle(Release(), 0)

    def kind(self) -> Kind:
        return self.keeper.state

    def freeze(self) -> Hashable:
        return self.keeper.freeze(0)

    def handle(self, event: Any) -> tuple[Any, ...]:
        return self.keeper.handle(event, 0)


EVENTS: dict[type, Any] = {
    Start: Start(),
    Answered: Answered(404),
    Unanswered: Unanswered(),
    TimerFired: TimerFired(),
    Release: Release(),
}


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(TABLE))
def test_legality(kind: Kind, event_type: type, cell: Cell) -> None:
    check_cell(cell, subject=Subject(kind), event=EVENTS[event_type])


def test_no_lease_shows() -> None:
    assert "secret" not in repr((Answered(200, "secret", 1), Renew("secret", 1), GiveBack("secret")))
