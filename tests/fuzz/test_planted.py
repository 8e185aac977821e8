"""Simulator and explorer find the faults that are planted for them."""

from __future__ import annotations

import os

import pytest

from fuzz import planted
from kvsp_sim.properties import Properties
from kvsp_sim.rest import TRUTHS

ALL = planted.read_planted()


def test_every_planted_fault_says_what_finds_it() -> None:
    assert len(ALL) >= 9
    assert all(fault.commands and fault.breaks for fault in ALL)


def test_every_property_has_a_planted_fault_that_breaks_it() -> None:
    names = {"everything_ends", *TRUTHS, *(one.name for one in Properties().all)}
    assert names <= {name for fault in ALL for name in fault.breaks}


def test_it_is_told_after_how_much_a_fault_was_found() -> None:
    explored = "lease, at most 0 crashes, 0 partitions: 1,234 states, 5,678 transitions, depth 9, 1 s\n"
    assert planted.found_after(explored) == planted.Look(None, states=(1234,))
    assert planted.found_after("seed 4\n5 seeds, 900 steps\n") == planted.Look(None, seeds=(5,))


@pytest.mark.verify
@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: planted.Planted) -> None:
    ranges = len(planted.RANGES) if os.environ.get("KVSP_PROFILE") == "long" else 1
    look = planted.look_for(fault, ranges=ranges)
    assert look.wrong is None
    assert look.states or look.seeds
