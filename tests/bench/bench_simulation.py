"""Simulated events a second, checkers included, on one core; and whether more instances make each dearer."""

from __future__ import annotations

import time
from collections.abc import Iterator

from kvsp_sim.simulate import Options, run_seed
from tests.bench import Row, row

SEEDS = 12
LARGE_SEEDS = 2


def seconds_an_event(options: Options, seeds: int = SEEDS) -> float:
    """Return the CPU seconds of one event, over some seeds."""
    steps = 0
    before = time.process_time()
    for seed in range(seeds):
        steps += run_seed(seed, options).steps
    return (time.process_time() - before) / steps


def rows() -> Iterator[Row]:
    usual = seconds_an_event(Options())
    yield row("simulation.events_per_second", 1 / usual, "1/s", at_least=8_000)
    few = seconds_an_event(Options(instances=8, holders=2, users=8, steps=6_000), LARGE_SEEDS)
    many = seconds_an_event(Options(instances=64, holders=16, users=64, steps=6_000), LARGE_SEEDS)
    yield row("simulation.event_at_64_instances.vs_8", many / few, "ratio", at_most=1.3)
