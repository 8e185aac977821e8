"""What is drawn for a deployment: most have nothing of it, and each thing is drawn now and then."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest

from kvsp_sim import cluster
from kvsp_sim.deployment import Options
from kvsp_sim.randomness import Randomness
from kvsp_sim.trace import Trace
from kvsp_sim.variety import Variety


def test_each_is_drawn_in_a_part_of_the_seeds() -> None:
    drawn = [Variety.drawn(Randomness(seed)) for seed in range(200)]
    assert 60 < sum(one == Variety() for one in drawn) < 180
    for field in attrs.fields(Variety):
        assert 10 < sum(getattr(one, field.name) != field.default for one in drawn) < 80, field.name


def test_each_act_of_housekeeping_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_KEPT", 1.0)
    counts: Counter[str] = Counter()
    for seed in range(10):
        simulated = cluster.SimulatedCluster(seed, Options(faults="none", users=1), Trace())
        simulated.world.run(until_us=5_000_000)
        counts += simulated.counts
    for name in (
        "stops",
        "stopped in order",
        "blocks that are too old",
        "instances out of a scope",
        "front ends out of a scope",
        "scopes purged",
        "instances replaced",
    ):
        assert counts[name], name
