"""``kvsp simulate`` and ``kvsp explore``."""

from __future__ import annotations

import time
from pathlib import Path

import attrs
import click

from kvsp_sim.configurations import CONFIGURATIONS
from kvsp_sim.deployment import WIRES
from kvsp_sim.explorer import Bounds, Exploration, explore
from kvsp_sim.faults import PROFILES
from kvsp_sim.simulate import Options, Outcome, run_seed, run_seeds

__all__ = ["explore_command", "simulate_command"]


class _SeedRange(click.ParamType):  # type: ignore[type-arg]
    """Seeds from A to B, both included."""

    name = "A-B"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> range:
        """Return the seeds."""
        if isinstance(value, range):
            return value
        first, dash, last = str(value).partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            self.fail(f"{value!r} are no seeds; give the first and the last, such as 0-199", param, ctx)
        return range(int(first), int(last) + 1)


@click.command("simulate", short_help="Run a whole cluster in simulated time, from a seed.")
@click.option("--seed", type=click.IntRange(min=0), default=None, help="One seed (default 0).")
@click.option("--seeds", type=_SeedRange(), default=None, help="Many seeds, such as 0-199.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=2_000,
    show_default=True,
    help="Events delivered to roles while faults happen.",
)
@click.option("--instances", type=click.IntRange(1, 256), default=3, show_default=True)
@click.option("--holders", type=click.IntRange(0, 64), default=2, show_default=True)
@click.option(
    "--users",
    type=click.IntRange(1, 10_000),
    default=4,
    show_default=True,
    help="Users that send requests, one after the other each.",
)
@click.option("--faults", type=click.Choice(sorted(PROFILES)), default="all", show_default=True)
@click.option("--wire", type=click.Choice(WIRES), default="messages", show_default=True,
              help="What carries calls: messages, or the octets of HTTP/2.")  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(1, 64), default=1, show_default=True, help="With --seeds: processes."
)
@click.option("--stop", is_flag=True, help="With --seeds: stop at the first that fails.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), default=None,
              help="Write every event to a file; needs --seed.")  # fmt: skip
def simulate_command(
    seed: int | None,
    seeds: range | None,
    steps: int,
    instances: int,
    holders: int,
    users: int,
    faults: str,
    wire: str,
    jobs: int,
    stop: bool,
    trace: Path | None,
) -> int:
    """Run a whole cluster in simulated time, decided by a seed.

    Faults happen and safety is checked; then all heals, and all that was begun has to end. The same seed and
    options give the same run. Exit status 1 where a property does not hold; the seed and the last events are
    printed.
    """
    if seeds is not None and (seed is not None or trace is not None):
        raise click.UsageError("--seeds goes with neither --seed nor --trace.")
    if seeds is None and (stop or jobs > 1):
        raise click.UsageError("--jobs and --stop go with --seeds.")
    options = Options(
        steps=steps, instances=instances, holders=holders, users=users, faults=faults, wire=wire
    )
    if seeds is None:
        if trace is None:
            return _tell(run_seed(seed or 0, options))
        try:
            with trace.open("w", encoding="utf-8") as out:
                outcome = run_seed(seed or 0, options, out)
        except OSError as error:  # a full disk names no file
            raise OSError(error.errno, error.strerror, str(trace)) from None
        return _tell(outcome)
    return _run_many(seeds, options, jobs, stop)


def _tell(outcome: Outcome) -> int:
    click.echo(str(outcome))
    for name, count in sorted(outcome.counts.items()):
        click.echo(f"  {count:>8} {name}")
    return 1 if outcome.failure else 0


def _run_many(seeds: range, options: Options, jobs: int, stop: bool) -> int:
    started = time.monotonic()
    steps = done = 0
    failed: list[int] = []
    for outcome in run_seeds(seeds, options, jobs=jobs):
        done += 1
        steps += outcome.steps
        if outcome.failure:
            failed.append(outcome.seed)
            click.echo(str(outcome))
            if stop:
                break
    took = time.monotonic() - started
    click.echo(f"{done} seeds, {steps} steps, {took:.0f} s, {steps / max(took, 1e-9):,.0f} steps/s")
    if failed:
        click.echo(f"failed: {' '.join(str(seed) for seed in sorted(failed))}")
    return 1 if failed else 0


class _Bound(click.ParamType):  # type: ignore[type-arg]
    """How often something may happen: a number, or ``any``."""

    name = "N|any"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """Return the number, or ``any``."""
        if value != "any" and not str(value).isdecimal():
            self.fail(f"{value!r} is no bound; give a number, or any", param, ctx)
        return value if value == "any" else int(str(value))


@click.command(
    "explore",
    short_help="Go through every order of events of a small cluster.",
    epilog=f"CONFIGURATION is one of {', '.join(sorted(CONFIGURATIONS))}. Each has bounds of its own, which "
    "hold where no option changes them.",
)
@click.argument("configuration", metavar="CONFIGURATION", type=click.Choice(sorted(CONFIGURATIONS)))
@click.option("--members", type=click.IntRange(1, 8), default=None, help="Members of the group, or clients.")
@click.option("--crashes", type=click.IntRange(min=0), default=None, help="Crashes in one timeline.")
@click.option("--partitions", type=click.IntRange(min=0), default=None,
              help="Pairs of nodes that are separated in one timeline.")  # fmt: skip
@click.option(
    "--losses",
    type=click.IntRange(min=0),
    default=None,
    help="Calls that fail in one timeline beside those that a crash or a partition lets fail.",
)
@click.option("--timers", type=_Bound(), default=None, help="Timers that go off in one timeline.")
@click.option("--switches", type=_Bound(), default=None,
              help="How often a node acts out of turn.")  # fmt: skip
@click.option("--max-states", type=click.IntRange(min=1), default=5_000_000, show_default=True)
def explore_command(
    configuration: str,
    members: int | None,
    crashes: int | None,
    partitions: int | None,
    losses: int | None,
    timers: int | str | None,
    switches: int | str | None,
    max_states: int,
) -> int:
    """Go through every order of events of a small cluster, within bounds.

    Prints the states, the transitions and the depth; for a violation the shortest way to it, and exit
    status 1.
    """
    chosen = CONFIGURATIONS[configuration]
    faults = {"crashes": crashes, "partitions": partitions, "losses": losses}
    given: dict[str, int | str | None] = {**faults, "timers": timers, "switches": switches}
    changes = {name: None if n == "any" else n for name, n in given.items() if n is not None}
    bounds = attrs.evolve(chosen.bounds, **changes)  # type: ignore[arg-type]
    started = time.monotonic()
    nodes, properties = chosen.build(chosen.members if members is None else members)
    found = explore(nodes, properties, bounds, max_states=max_states)
    return _tell_exploration(configuration, bounds, found, time.monotonic() - started)


def _tell_exploration(name: str, bounds: Bounds, found: Exploration, took: float) -> int:
    timers = "any number of" if bounds.timers is None else bounds.timers
    click.echo(
        f"{name}, at most {bounds.crashes} crashes, {bounds.partitions} partitions, "
        f"{bounds.losses} failed calls, {timers} timers"
        + (", a crash last" if bounds.crash_last else "")
        + ("" if bounds.switches is None else f", {bounds.switches} switches")
        + ": "
        f"{found.states:,} states, {found.transitions:,} transitions, depth {found.depth}, {took:.0f} s"
    )
    if found.finding is not None:
        for number, step in enumerate(found.finding.steps, 1):
            click.echo(f"{number:>4}. {step}")
        click.echo(str(found.finding.violation))
        return 1
    if not found.complete:
        click.echo("not complete: the limit of states was reached; raise --max-states or lower a bound")
        return 1
    click.echo("complete: no property is broken")
    return 0
