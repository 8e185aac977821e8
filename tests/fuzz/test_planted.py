"""Simulator and explorer find the faults that are planted for them."""

from __future__ import annotations

import os

import pytest

from fuzz import planted

ALL = planted.read_planted()


def test_every_planted_fault_says_what_finds_it() -> None:
    assert len(ALL) >= 9
    assert all(fault.commands and fault.breaks for fault in ALL)


@pytest.mark.verify
@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: planted.Planted) -> None:
    ranges = len(planted.RANGES) if os.environ.get("KVSP_PROFILE") == "long" else 1
    assert planted.look_for(fault, ranges=ranges).wrong is None
