"""Simulated storage keeps its promises, and breaks them only as its faults say."""

from __future__ import annotations

import pytest

from kvsp_core.container import ContainerHeader, OutgoingBlock, decode_container
from kvsp_core.roles.role import Append, BlockName, Delete, JobFault, Put
from kvsp_sim.disk import DurableStore, StorageFaults, Tier, catalogue
from kvsp_sim.randomness import Randomness
from kvsp_sim.world import World

NAME = BlockName("c" * 64, "5" * 32, "a" * 64)
OTHER = BlockName("c" * 64, "5" * 32, "b" * 64)


def container(octet: int) -> bytes:
    header = ContainerHeader(codec=1, token_count=1, sections=((4, 4), (4, 4)))
    return b"".join(OutgoingBlock(header, [(bytes([octet]) * 4, b"v" * 4)] * 2).pieces)


def tier(faults: StorageFaults, *, capacity: int = 1000, survives: bool = True) -> Tier:
    return Tier(World(1), Randomness(1), faults, name="host", capacity_bytes=capacity, survives=survives)


def test_writes_become_durable_in_order_and_as_a_whole() -> None:
    world = World(1)
    store = DurableStore(world, Randomness(1), StorageFaults())
    told: list[bool] = []
    store.persist((Put("t", "a", b"1"), Append("log", "k", 0, b"abc")), told.append)
    store.persist((Delete("t", "a"), Append("log", "k", 1, b"x")), told.append)
    assert store.load() == {}
    world.run()
    assert told == [True, True]
    assert store.load() == {"t": {}, "log": {"k": b"ax"}}


def test_a_crash_keeps_some_of_what_was_under_way_in_order() -> None:
    kept = set()
    for seed in range(30):
        world = World(seed)
        store = DurableStore(world, Randomness(seed), StorageFaults())
        for number in range(3):
            store.persist((Put("t", str(number), b"a"), Put("u", str(number), b"b")), lambda _: None)
        store.crash()
        world.run()
        stored = store.load()
        assert stored.get("t", {}).keys() == stored.get("u", {}).keys()
        kept.add(tuple(sorted(stored.get("t", {}))))
    assert kept == {(), ("0",), ("0", "1"), ("0", "1", "2")}


def test_persisting_can_fail_and_then_nothing_is_stored() -> None:
    world = World(1)
    store = DurableStore(world, Randomness(1), StorageFaults(persist_fails=1.0))
    told: list[bool] = []
    store.persist((Put("t", "a", b"1"),), told.append)
    world.run()
    assert told == [False]
    assert store.load() == {}


def test_an_append_may_not_leave_a_hole() -> None:
    world = World(1)
    store = DurableStore(world, Randomness(1), StorageFaults())
    store.persist((Append("log", "k", 3, b"abc"),), lambda _: None)
    with pytest.raises(AssertionError, match="leaves a hole"):
        world.run()


def test_a_tier_keeps_blocks_up_to_its_capacity() -> None:
    kept = tier(StorageFaults(), capacity=len(container(1)))
    assert kept.store(NAME, container(1)) is None
    assert kept.store(NAME, container(2)) is None  # in its place
    assert kept.store(OTHER, container(1)) is JobFault.FULL
    assert kept.read(NAME) == container(2)
    assert kept.read(OTHER) is JobFault.MISSING
    kept.drop(NAME)
    assert kept.used_bytes == 0


@pytest.mark.parametrize(("survives", "left"), [(True, 1), (False, 0)])
def test_memory_is_empty_after_a_crash(survives: bool, left: int) -> None:
    kept = tier(StorageFaults(), survives=survives)
    kept.store(NAME, container(1))
    kept.crash()
    assert len(kept.blocks) == left
    assert len(catalogue(kept.blocks)) == left


def test_a_crash_tears_what_was_written_last_and_keeps_some_of_what_was_under_way() -> None:
    left = set()
    for seed in range(60):
        kept = Tier(World(1), Randomness(seed), StorageFaults(), name="t", capacity_bytes=1000, survives=True)
        kept.store(NAME, container(1))
        kept.begin(OTHER, container(2))
        kept.crash()
        assert kept.used_bytes == sum(map(len, kept.blocks.values()))
        left.add(frozenset(kept.blocks))
        kept.crash()
        assert frozenset(kept.blocks) in left  # what has lasted through a restart is synchronised
    assert left == {frozenset(names) for names in ((), (NAME,), (OTHER,), (NAME, OTHER))}


def test_a_tier_in_memory_keeps_nothing_of_what_was_under_way() -> None:
    for seed in range(10):
        kept = Tier(
            World(1), Randomness(seed), StorageFaults(), name="t", capacity_bytes=1000, survives=False
        )
        kept.begin(NAME, container(1))
        kept.crash()
        assert kept.blocks == {}


def test_writes_that_failed_may_be_there_after_the_restart_and_who_asks_is_told() -> None:
    kept = set()
    for seed in range(20):
        world, told = World(seed), list[object]()
        store = DurableStore(world, Randomness(seed), StorageFaults(persist_fails=1.0), told.append)
        store.persist((Put("t", "a", b"1"),), lambda _: None)
        world.run()
        assert (store.load(), told) == ({}, [])
        store.crash()
        assert told == ([(Put("t", "a", b"1"),)] if "t" in store.load() else [])
        kept.add("t" in store.load())
    assert kept == {False, True}


def test_a_tier_that_is_busy_keeps_what_it_has() -> None:
    faults = StorageFaults()
    kept = tier(faults)
    kept.store(NAME, container(1))
    faults.busy = 1.0
    assert kept.store(OTHER, container(2)) is JobFault.BUSY
    assert kept.read(NAME) is JobFault.BUSY
    faults.heal()
    assert kept.read(NAME) == container(1)
    assert kept.read(OTHER) is JobFault.MISSING


def test_what_rots_keeps_its_form() -> None:
    kept = tier(StorageFaults(rots=1.0))
    kept.store(NAME, container(1))
    read = kept.read(NAME)
    assert isinstance(read, bytes)
    assert read != container(1)
    assert decode_container(read)[0] == decode_container(container(1))[0]


def test_what_is_swapped_forgotten_or_noticed() -> None:
    faults = StorageFaults(swapped=1.0)
    kept = tier(faults)
    kept.store(NAME, container(1))
    kept.store(OTHER, container(2))
    assert {kept.read(NAME) for _ in range(20)} == {container(1), container(2)}
    faults.heal()
    faults.forgotten = 1.0
    kept.drop(NAME)
    assert kept.store(NAME, container(1)) is None
    assert kept.read(NAME) is JobFault.MISSING
    faults.heal()
    faults.noticed = 1.0
    assert kept.read(OTHER) is JobFault.CORRUPT
    assert kept.blocks == {}
