"""Every interleaving of the small clusters holds, within the bounds of each configuration."""

from __future__ import annotations

import pytest

from kvsp_sim.configurations import CONFIGURATIONS
from kvsp_sim.explorer import Bounds, explore


def check(name: str, bounds: Bounds, *, complete: bool = True, most: int = 2_000_000) -> None:
    configuration = CONFIGURATIONS[name]
    nodes, properties = configuration.build(configuration.members)
    found = explore(nodes, properties, bounds, max_states=most)
    assert found.finding is None, found.finding
    assert found.complete is complete


@pytest.mark.requirement("RS-6")
def test_a_group_reshards_in_every_order() -> None:
    check("reshard", Bounds(crashes=1))


@pytest.mark.verify
@pytest.mark.requirement("RS-6")
@pytest.mark.parametrize("name", ["reshard", "reshard-member"])
def test_a_group_reshards_in_every_order_with_crashes(name: str) -> None:
    check(name, CONFIGURATIONS[name].bounds)


@pytest.mark.verify
def test_leases_hold_as_far_as_was_explored() -> None:
    """This one has no end within reach: new leases, new identifiers."""
    check("lease", CONFIGURATIONS["lease"].bounds, complete=False, most=300_000)
