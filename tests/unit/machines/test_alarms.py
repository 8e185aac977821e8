"""Alarms: one deadline for each key, which may move."""

from __future__ import annotations

from kvsp_core.machines.alarms import Alarms


def test_deadlines_ring_in_time_once_and_move_both_ways() -> None:
    alarms: Alarms[str] = Alarms()
    assert alarms.next_ms() is None
    alarms.set("a", 10)
    alarms.set("b", 20)
    alarms.set("a", 30)  # later
    assert alarms.take_due(10) == ()
    assert alarms.take_due(25) == ("b",)
    alarms.set("a", 26)  # earlier
    assert alarms.next_ms() == 26
    assert alarms.freeze(20) == (("a", 6),)
    assert alarms.take_due(26) == ("a",)
    assert alarms.take_due(99) == ()
    alarms.set("c", 100)
    alarms.set("c", None)
    assert alarms.take_due(200) == ()
    assert alarms.next_ms() is None


def test_deadlines_that_move_again_and_again_take_no_room() -> None:
    alarms: Alarms[str] = Alarms()
    for at_ms in range(10_000, 0, -1):
        alarms.set("a", at_ms)
    assert len(alarms._heap) <= 66
    assert alarms.take_due(1) == ("a",)
