"""Holders whose index comes back empty fill it again, at a rate that is no storm."""

from __future__ import annotations

import pytest

from tests.hostile.storm import BUCKET_MS, Storm, storm


@pytest.mark.requirement("PB-3")
def test_an_index_that_lost_everything_gets_it_back_within_a_ttl() -> None:
    section = storm(holders=40, blocks=10, ttl_ms=30_000, gone_ms=10_000)
    assert section.held, section.markdown()


@pytest.mark.requirement("PB-3")
def test_holders_do_not_all_come_at_once() -> None:
    world = Storm(holders=40, blocks=10, ttl_ms=30_000)
    world.run(60_000)
    steady = max(world.sent[bucket] for bucket in range(8, 12))
    world.lose_index()
    world.run(70_000)
    world.bring_index()
    world.run(110_000)
    assert max(world.arrived[bucket] for bucket in range(12, 110_000 // BUCKET_MS)) <= 4 * steady
    assert world.records() == 400


@pytest.mark.requirement("PB-3")
def test_refreshes_that_an_outage_has_bunched_are_spread_again() -> None:
    world = Storm(holders=40, blocks=10, ttl_ms=60_000)
    world.run(120_000)
    world.lose_index()
    world.run(135_000)
    world.bring_index()
    world.run(200_000)
    for third in (range(31, 35), range(35, 39)):  # of the TTL, in periods of five seconds
        rates = [world.arrived[bucket] for bucket in third]
        assert max(rates) < 3 * min(rates), rates
