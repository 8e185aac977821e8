"""Whole clusters of the shipped roles, under faults: what holds for every seed, and that a seed is a
history.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import attrs
import pytest

from kvsp_core.limits import MAX_ENGINE_FAILURES
from kvsp_sim import simulate
from kvsp_sim.cluster import SimulatedCluster
from kvsp_sim.commands import simulate_command
from kvsp_sim.simulate import Options, Outcome, run_seed, run_seeds
from kvsp_sim.trace import Trace
from tests.hash_seeds import printed

CHUNK = 25
SEEDS = 200
MORE_SEEDS = 2_200
MANY_SEEDS = 10_000

FAILED_ONCE: tuple[tuple[int, Options], ...] = (
    *((seed, Options()) for seed in (4, 6, 70, 321, 484, 522, 553, 1972, 61020, 70134, 701190, 701816)),
    (7, Options(faults="storage")),
    (135, Options(faults="engines", steps=4_000)),
)
"""Seeds that found a fault. They hold now, and stay."""


def check(outcome: Outcome) -> None:
    assert outcome.failure is None, f"\n{outcome}"


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_seed_holds(first: int) -> None:
    for seed in range(first, first + CHUNK):
        check(run_seed(seed, Options()))


def test_the_options_of_a_run_that_failed_are_what_the_command_takes() -> None:
    options = Options(steps=7, instances=5, holders=0, users=2, faults="network", wire="h2")
    taken = simulate_command.make_context("simulate", options.as_text().split()).params
    assert {name: taken[name] for name in attrs.asdict(options)} == attrs.asdict(options)


@pytest.mark.verify
@pytest.mark.parametrize("first", range(SEEDS, MORE_SEEDS, 4 * CHUNK))
def test_more_seeds_hold(first: int) -> None:
    for seed in range(first, first + 4 * CHUNK):
        check(run_seed(seed, Options()))


@pytest.mark.long
@pytest.mark.parametrize("first", range(MORE_SEEDS, MANY_SEEDS, 4 * CHUNK))
def test_many_more_seeds_hold(first: int) -> None:
    for seed in range(first, first + 4 * CHUNK):
        check(run_seed(seed, Options()))


@pytest.mark.parametrize(("seed", "options"), FAILED_ONCE)
def test_a_seed_that_found_a_fault_holds_now(seed: int, options: Options) -> None:
    check(run_seed(seed, options))


@pytest.mark.parametrize("faults", ["none", "network", "processes", "storage", "engines"])
def test_every_profile_of_faults_holds(faults: str) -> None:
    check(run_seed(1, Options(faults=faults)))


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_that_is_dead_attracts_no_more_requests_than_it_takes_to_see_it(seed: int) -> None:
    """Idle as it is, it would be the cheapest for all of them."""
    cluster = SimulatedCluster(seed, Options(faults="none", users=2), Trace())
    cluster.cluster.processes["operator"].crash()  # who would drain the others
    cluster.world.run(until_us=500_000)
    dead = next(host for host in cluster.cluster.hosts.values() if host.engine is not None)
    assert dead.engine is not None
    dead.engine.dead = True
    cluster.world.run(until_us=15_000_000)
    assert cluster.counts["requests served"] > 20
    under_way = cluster.options.users
    assert cluster.counts["kvsp_engine_failures"] <= MAX_ENGINE_FAILURES + under_way


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_that_hangs_holds_up_nobody_for_long(seed: int) -> None:
    cluster = SimulatedCluster(seed, Options(faults="engines", users=2), Trace())
    cluster._chaos.heal()
    cluster.cluster.processes["operator"].crash()  # who would drain the others
    cluster.world.run(until_us=500_000)
    hung = next(host for host in cluster.cluster.hosts.values() if host.engine is not None)
    assert hung.engine is not None
    hung.engine.hang()
    cluster.world.run(until_us=15_000_000)
    assert cluster.counts["requests served"] > 20
    assert cluster.counts["kvsp_engine_silences"] == 1


@pytest.mark.verify
@pytest.mark.parametrize("first", range(0, 300, CHUNK))
def test_engines_that_fail_or_hang_cost_no_output(first: int) -> None:
    for seed in range(first, first + CHUNK):
        outcome = run_seed(seed, Options(faults="engines", steps=4_000))
        check(outcome)
        hung = outcome.counts.get("engines hung", 0)
        assert outcome.counts.get("kvsp_engine_silences", 0) <= hung, "one that works is not taken for hung"


@pytest.mark.verify
@pytest.mark.parametrize(
    ("seconds", "served"), [(5, 60), pytest.param(60, 1_000, marks=pytest.mark.long)], ids=["some", "minute"]
)
def test_a_large_deployment_runs(seconds: int, served: int) -> None:
    cluster = SimulatedCluster(3, Options(instances=64, holders=16, users=16), Trace())
    cluster.world.run(until_us=seconds * 1_000_000)
    assert cluster.counts["requests served"] >= served


@pytest.mark.requirement("OP-2")
def test_clocks_need_not_agree() -> None:
    outcome = run_seed(7, Options(faults="none"))
    check(outcome)
    assert outcome.counts["requests served"] > 0


@pytest.mark.parametrize(
    "seeds", [(4, 5), pytest.param(range(100, 120), marks=pytest.mark.verify)], ids=["few", "many"]
)
def test_a_seed_gives_one_history_under_any_hash_seed(seeds: Sequence[int]) -> None:
    program = (
        "from kvsp_sim.simulate import *\n"
        f"for seed in {[*seeds]}: print(run_seed(seed, Options()).trace_hash)"
    )
    assert len({printed(program, seed) for seed in ("0", "1", "2")}) == 1


def test_an_interrupt_is_for_the_process_that_waits_for_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies of one while it takes a seed would leave all waiting."""
    held = "interrupts are held"

    def look(seed: int, options: Options) -> Outcome:
        found = {held: signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())}
        return attrs.evolve(ended, seed=seed, counts=found)

    ended = run_seed(0, options := Options(steps=1))
    monkeypatch.setattr(simulate, "run_seed", look)
    found = list(run_seeds(range(8), options, jobs=2))
    assert {outcome.seed for outcome in found} == set(range(8))
    assert all(outcome.counts[held] for outcome in found)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
