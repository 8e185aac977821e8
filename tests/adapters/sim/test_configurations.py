"""Every interleaving of the small clusters holds, within the bounds of each configuration."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from click.testing import CliRunner

from kvsp_sim.commands import explore_command
from kvsp_sim.configurations import CONFIGURATIONS
from kvsp_sim.explorer import Bounds, Search, explore

FULL = [
    "reshard",
    "reshard-member",
    "reshard-loser",
    "reshard-roles",
    "reshard-roles-controller",
    "reshard-roles-member",
    "reshard-roles-loser",
    "session",
    "session-partition",
    "session-controller",
    "session-failures",
    "session-second-failure",
    "session-crashes",
    "lease",
    "retrieval",
]


def check(name: str, bounds: Bounds) -> None:
    configuration = CONFIGURATIONS[name]
    nodes, properties = configuration.build(configuration.members)
    found = explore(nodes, properties, bounds)
    assert found.finding is None, found.finding
    assert found.complete


def test_every_configuration_is_explored() -> None:
    assert sorted(FULL) == sorted(CONFIGURATIONS)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_states_are_the_same_at_any_time(name: str) -> None:
    met = []
    for later_ms in (0, 10_000):
        nodes, properties = CONFIGURATIONS[name].build(CONFIGURATIONS[name].members)
        for node in nodes:
            node.now_ms += later_ms
        search = Search(nodes, properties, Bounds(crashes=1, losses=1, timers=None))
        search.run(max_states=200)
        met.append([{node.freeze() for node in space.nodes} for space in search.spaces])
    assert met[0] == met[1]


# In seconds


@pytest.mark.requirement("RS-6")
def test_a_group_reshards_in_every_order() -> None:
    check("reshard", Bounds(crashes=1))


@pytest.mark.requirement("RS-2", "RS-6")
@pytest.mark.parametrize("name", ["reshard", "reshard-roles"])
def test_both_moves_of_a_group_are_committed_where_nothing_fails(name: str) -> None:
    nodes, properties = CONFIGURATIONS[name].build(CONFIGURATIONS[name].members)
    search = Search(nodes, properties, Bounds())
    assert search.run(max_states=10_000).complete
    ends = {search.properties.all[state[-2]].one_owner.authoritative("m") for state in search.ends()}
    assert ends == {2}


@pytest.mark.requirement("MG-1", "MG-3", "CP-2")
@pytest.mark.parametrize("bounds", [Bounds(timers=1), Bounds(losses=1), Bounds(partitions=1)], ids=str)
def test_a_session_moves_in_every_order(bounds: Bounds) -> None:
    check("session", bounds)


@pytest.mark.requirement("LE-2", "PB-4")
def test_leases_hold_in_every_order_with_any_number_of_timers() -> None:
    check("lease", Bounds(timers=None))


def test_what_was_explored_is_told() -> None:
    told = CliRunner().invoke(explore_command, ["session", "--crashes", "0", "--losses", "1"])
    assert "at most 0 crashes, 0 partitions, 1 failed calls, 0 timers" in told.output
    assert "complete: no property is broken" in told.output
    short = CliRunner().invoke(explore_command, ["lease", "--timers", "any", "--max-states", "10"])
    assert "any number of timers" in short.output
    assert "not complete" in short.output
    assert CliRunner().invoke(explore_command, ["lease", "--timers", "few"]).exit_code == 2


# In minutes


@pytest.mark.verify
@pytest.mark.requirement("RS-6", "MG-1", "LE-2")
@pytest.mark.parametrize("name", FULL)
def test_every_order_holds_within_the_usual_bounds(name: str) -> None:
    check(name, CONFIGURATIONS[name].bounds)


def ends(name: str, *, renews: bool) -> tuple[int, set[Hashable]]:
    """Return how many states there are, and what the properties remember of those in which nobody waits."""
    configuration = CONFIGURATIONS[name]
    nodes, properties = configuration.build(configuration.members)
    for node in nodes if not renews else ():
        node.renews = lambda _: None
    search = Search(nodes, properties, configuration.bounds)
    explored = search.run(max_states=100_000)
    while search.mattered():
        search = Search(nodes, properties, configuration.bounds, search)
        explored = search.run(max_states=100_000)
    assert explored.complete
    return explored.states, {search.properties.all[state[-2]].freeze() for state in search.ends()}


@pytest.mark.verify
def test_the_ends_are_the_same_where_calls_of_older_epochs_stay_open() -> None:
    states, met = ends("session-crashes", renews=True)
    more_states, met_too = ends("session-crashes", renews=False)
    assert states < more_states
    assert met == met_too
