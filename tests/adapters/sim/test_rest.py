"""What is true at rest: a deployment comes to it by itself, and each truth is seen to be broken."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvsp_core.roles.role import BlockName, Put
from kvsp_sim import rest
from kvsp_sim.cluster import SimulatedCluster
from kvsp_sim.deployment import CONTROLLER, INDEX
from kvsp_sim.disk import apply_write
from kvsp_sim.facts import MemberRestarted, RecordTaken
from kvsp_sim.host import Host
from kvsp_sim.properties import Violation
from kvsp_sim.simulate import Options
from kvsp_sim.trace import Trace

HOLDER = "https://holder0.example/"
SEED = 0
"""A seed with shard maps and blocks at rest, and with room for all that they need."""


def at_rest() -> SimulatedCluster:
    cluster = SimulatedCluster(SEED, Options(faults="none"), Trace())
    cluster.rest._sees_records_expire = True
    cluster.world.run(steps=2_000)
    cluster.heal()
    for _ in range(60):
        cluster.world.run(until_us=cluster.world.now_us + 1_000_000)
        if not cluster.rest.missing(with_maps=True):
            return cluster
    raise AssertionError(cluster.rest.missing(with_maps=True))


def owner(cluster: SimulatedCluster) -> Host:
    """Return who owns ranges that are in its engine."""
    return next(host for host in cluster.cluster.hosts.values() if host.in_engine)


def lose_an_owner(cluster: SimulatedCluster) -> None:
    cluster.properties.observe(MemberRestarted(member=owner(cluster).base_uri))


def forget_a_range(cluster: SimulatedCluster) -> None:
    owner(cluster).in_engine.clear()


def list_a_block_that_is_not_there(cluster: SimulatedCluster) -> None:
    until_ms = cluster.cluster.hosts[INDEX].now_ms + 1_000
    cluster.properties.observe(RecordTaken(index=INDEX, holder=HOLDER, block="b", until_ms=until_ms))


def hold_a_block_that_is_not_listed(cluster: SimulatedCluster) -> None:
    tier = next(iter(cluster.cluster.hosts[HOLDER].tiers.values()))
    tier.blocks[BlockName("c", "s", "b")] = b""


def keep_a_buffer(cluster: SimulatedCluster) -> None:
    cluster.cluster.hosts[HOLDER].buffers[1] = b""


def report_work(cluster: SimulatedCluster) -> None:
    key, status = next(iter(cluster.cluster.witness.statuses.items()))
    cluster.cluster.witness.statuses[key] = msgspec.structs.replace(status, running=1)


def change_an_epoch(cluster: SimulatedCluster) -> None:
    key, status = next(iter(cluster.cluster.witness.statuses.items()))
    cluster.cluster.witness.statuses[key] = msgspec.structs.replace(status, epoch=status.epoch + 1)


def keep_an_open_session(cluster: SimulatedCluster) -> None:
    write(cluster, "sessions", b'{"kind":"running"}')


def keep_the_output_of_a_session(cluster: SimulatedCluster) -> None:
    write(cluster, "outputs", b"")


def keep_a_block_of_a_purged_scope(cluster: SimulatedCluster) -> None:
    cluster.rest.purged = "s"
    hold_a_block_that_is_not_listed(cluster)
    cluster.rest.too_old.add((HOLDER, "b"))


def keep_a_map_of_a_purged_scope(cluster: SimulatedCluster) -> None:
    cluster.rest.purged = "5c" * 16
    write(cluster, "maps", b'{"context":{"scope_id":"' + b"5c" * 16 + b'"}}')


def write(cluster: SimulatedCluster, table: str, value: bytes) -> None:
    apply_write(cluster.cluster.hosts[CONTROLLER].store._durable, Put(table, "unknown", value))


BREAKS: tuple[tuple[str, Callable[[SimulatedCluster], None]], ...] = (
    ("ranges_are_owned", lose_an_owner),
    ("ranges_are_loaded", forget_a_range),
    ("what_is_listed_is_held", list_a_block_that_is_not_there),
    ("what_is_held_is_listed", hold_a_block_that_is_not_listed),
    ("requests_leave_nothing", keep_a_buffer),
    ("instances_are_idle", report_work),
    ("epochs_agree", change_an_epoch),
    ("sessions_are_over", keep_an_open_session),
    ("sessions_are_over", keep_the_output_of_a_session),
    ("what_is_purged_is_gone", keep_a_block_of_a_purged_scope),
    ("what_is_purged_is_gone", keep_a_map_of_a_purged_scope),
)


@pytest.mark.requirement("RS-6")
@pytest.mark.parametrize(("name", "harm"), BREAKS)
def test_what_is_not_true_at_rest_is_named(
    name: str, harm: Callable[[SimulatedCluster], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = at_rest()
    harm(cluster)
    assert cluster.rest.missing(with_maps=True)  # it may still come true
    monkeypatch.setattr(rest, "_PATIENCE_US", -1)
    with pytest.raises(Violation) as caught:
        cluster.rest.missing(with_maps=True)
    assert caught.value.name == name


def test_ranges_in_an_engine_after_the_end_of_their_maps_are_named() -> None:
    assert "ranges of shard maps that have ended" in at_rest().rest.missing(with_maps=False)
