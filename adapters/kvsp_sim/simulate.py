"""Run simulated clusters: one seed, or many on several cores.

A run has two phases. First faults happen and safety is checked at every fact. Then everything heals, users
stop asking for more, and within a bound of simulated time all that was begun has to end.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Final, TextIO

import attrs

from kvsp_sim.cluster import SimulatedCluster
from kvsp_sim.deployment import Options
from kvsp_sim.property import Violation
from kvsp_sim.trace import Trace

__all__ = ["Options", "Outcome", "run_seed", "run_seeds"]

HEALED_US: Final = 300_000_000
"""How long, in simulated time, everything may take to end once it has healed."""

HEALED_STEPS: Final = 200_000


@attrs.frozen(kw_only=True)
class Outcome:
    """What became of a seed. `failure` is None where all properties held; `events` are then left out."""

    seed: int
    options: Options
    failure: str | None
    events: tuple[str, ...]
    steps: int
    simulated_ms: int
    trace_hash: str
    counts: Mapping[str, int]

    def __str__(self) -> str:
        if self.failure is None:
            return (
                f"seed {self.seed}: held; {self.steps} steps, {self.simulated_ms} ms of simulated time, "
                f"trace {self.trace_hash}"
            )
        return "\n".join((*self.events, f"seed {self.seed}: {self.failure}", f"  {self.options.as_text()}"))


def run_seed(seed: int, options: Options, out: TextIO | None = None) -> Outcome:
    """Run one seed; every event goes to `out` as a line of text."""
    trace = Trace(out)
    failure = None
    cluster = None
    try:
        cluster = SimulatedCluster(seed, options, trace)
        cluster.world.run(steps=options.steps)
        cluster.heal()
        _run_until_ended(cluster)
    except Violation as violation:
        failure = str(violation)
    except Exception as error:  # whatever a role raises is a finding
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"
        failure = f"{type(error).__name__} at {place}: {error}"
    trace.close()
    world = cluster.world if cluster is not None else None
    return Outcome(
        seed=seed,
        options=options,
        failure=failure,
        events=tuple(trace.lines()) if failure else (),
        steps=world.steps if world else 0,
        simulated_ms=world.now_us // 1000 if world else 0,
        trace_hash=trace.hexdigest(),
        counts=MappingProxyType(dict(cluster.counts)) if cluster is not None else {},
    )


def _run_until_ended(cluster: SimulatedCluster) -> None:
    world = cluster.world
    until_us = world.now_us + HEALED_US
    most_steps = world.steps + HEALED_STEPS
    while (left := cluster.unended()) and world.now_us < until_us and world.steps < most_steps:
        world.run(until_us=min(until_us, world.now_us + 100_000), steps=most_steps)
    if left:
        raise Violation("everything_ends", f"{HEALED_US // 1_000_000} s after all faults: {left}")


def run_seeds(seeds: Iterable[int], options: Options, *, jobs: int = 1) -> Iterator[Outcome]:
    """Run seeds on several cores; yield what became of each, in any order."""
    run = partial(_run_quietly, options=options)
    if jobs == 1:
        yield from map(run, seeds)
        return
    with _interrupts_held():
        workers = multiprocessing.get_context("fork").Pool(jobs)
    with workers as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=4)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C from processes that are begun meanwhile: one that dies of it while it takes the next seed
    leaves the others, and the end of them all, waiting. This process gets it when the block ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_quietly(seed: int, options: Options) -> Outcome:
    outcome = run_seed(seed, options)
    return attrs.evolve(outcome, counts=dict(outcome.counts))
