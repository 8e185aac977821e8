"""Simulator and explorer find the faults that are planted for them."""

from __future__ import annotations

import pytest

from fuzz import planted

ALL = planted.read_planted()

RARE = ("use-a-block-unverified",)
"""Found in few histories: the first fifty seeds may miss them."""


def test_every_planted_fault_says_what_finds_it() -> None:
    assert len(ALL) >= 9
    assert all(fault.commands and fault.breaks for fault in ALL)


CASES = [
    pytest.param(fault, id=fault.name, marks=pytest.mark.long if fault.name in RARE else pytest.mark.verify)
    for fault in ALL
]


@pytest.mark.parametrize("fault", CASES)
def test_a_planted_fault_is_found(fault: planted.Planted) -> None:
    assert planted.look_for(fault, ranges=1) is None
