"""The worker's side: into vLLM's cache layer by layer, and out of it by copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from kvsp_client import ClientClosed, LayersWithdrawn, MissReason, PrefixKeys, StoreOutcome
from kvsp_client.memory import MemoryPool
from kvsp_client.vllm.engine_descriptor import describe_engine
from kvsp_client.vllm.layout import CacheLayout, Geometry, split
from kvsp_client.vllm.schedule import PAUSE_S, Load, Plan, Store
from kvsp_client.vllm.transfers import HostCache, Transfers
from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor
from tests.adapters.vllm_connector import fakes

BLOCKS, LAYERS, TOKENS, HEADS, DIM = 8, 3, 4, 2, 6


@attrs.define
class FakeFetch:
    """A fetch that brings what the test says; `brings` is called with a layer and returns usable blocks."""

    sections: Callable[[int, int], Any]
    blocks: int
    brings: Callable[[int], int]
    withdrawn: tuple[int, ...] = ()
    result_blocks: int | None = None
    reason: MissReason = MissReason.GONE
    waited_for: list[int | str] = attrs.field(factory=list)

    def wait_layer(self, layer: int) -> int:
        self.waited_for.append(layer)
        usable = self.brings(layer)
        for block in range(usable):
            for section, sign in zip(self.sections(block, layer), (1, -1), strict=True):
                memoryview(section).cast("B")[:] = content(block, layer, sign).tobytes()
        return usable

    def result(self) -> Any:
        self.waited_for.append("all")
        blocks = self.blocks if self.result_blocks is None else self.result_blocks
        missing = range(blocks, self.blocks)
        misses = tuple(SimpleNamespace(block=n, reason=self.reason) for n in missing)
        return SimpleNamespace(blocks=blocks, withdrawn=self.withdrawn, misses=misses)


@attrs.define
class FakeJob:
    """A store whose end the test decides."""

    sections: Callable[[int, int], Any]
    keys: PrefixKeys
    done: bool = False
    failed: tuple[tuple[int, StoreOutcome], ...] = ()
    cancelled: bool = False
    breaks: bool = False

    def result(self, timeout_s: float | None = None) -> Any:
        if self.breaks:
            raise LocalProtocolError("this should not be")
        if self.cancelled:
            raise ClientClosed("cancelled")
        if not self.done:
            raise TimeoutError
        stored = len(self.keys) - len(self.failed)
        return SimpleNamespace(stored=stored, present=0, failed=self.failed)

    def cancel(self) -> None:
        self.cancelled = self.done = True


class FakeClient:
    """A client whose fetches and stores are kept."""

    def __init__(self) -> None:
        self.brings: Callable[[int], int] = lambda layer: 99
        self.withdrawn: tuple[int, ...] = ()
        self.result_blocks: int | None = None
        self.reason = MissReason.GONE
        self.jobs: list[FakeJob] = []
        self.fetches: list[FakeFetch] = []

    def start_fetch(self, prefix: Any, sections: Any, deadline_ms: int) -> FakeFetch:
        count = len(prefix)
        fetch = FakeFetch(
            sections,
            count,
            lambda layer: min(count, self.brings(layer)),
            self.withdrawn,
            self.result_blocks,
            self.reason,
        )
        self.fetches.append(fetch)
        return fetch

    def start_store(self, holder: str, keys: PrefixKeys, sections: Any) -> FakeJob:
        self.jobs.append(FakeJob(sections, keys))
        return self.jobs[-1]


def content(block: int, layer: int, sign: int) -> np.ndarray:
    """Return a section of small integers as bf16 has them, for K (1) or V (-1)."""
    base = 1000 * (layer + 1) + 100 * block
    return (np.arange(TOKENS * HEADS * DIM, dtype=np.int16) + base) * np.int16(sign)


class World:
    """Transfers over a cache as vLLM has it on a CPU."""

    def __init__(self, directory: Path, *, store_queue_bytes: int = 1 << 20, overlaps: bool = True) -> None:
        self.descriptor: CompatibilityDescriptor = describe_engine(fakes.engine(directory))
        self.tensors = [np.zeros((BLOCKS, HEADS, TOKENS, 2 * DIM), np.int16) for _ in range(LAYERS)]
        geometry = Geometry.of(self.descriptor)
        self.views = [split(tensor, CacheLayout.CPU, geometry) for tensor in self.tensors]
        self.client = FakeClient()
        self.count: Counter[str] = Counter()
        client: Any = self.client
        self.transfers = Transfers(
            client,
            HostCache(self.views),
            self.descriptor,
            cache_server="https://cache.example/",
            count=self.count,
            load_timeout_ms=1000,
            store_queue_bytes=store_queue_bytes,
            overlaps=overlaps,
        )

    def keys(self, count: int, start: int = 0) -> PrefixKeys:
        keys = tuple(f"{number:064x}" for number in range(start, start + count))
        return PrefixKeys(descriptor=self.descriptor, scope_id="0" * 32, keys=keys)

    def load(self, *blocks: int) -> Load:
        prefix: Any = fakes.FoundPrefix(self.keys(len(blocks)))
        return Load(prefix, blocks)

    def run(self, plan: Plan, *, layers: int = LAYERS) -> set[int]:
        self.transfers.start_loads(plan)
        for layer in range(layers):
            self.transfers.wait_layer(layer)
        self.transfers.finish_loads()
        self.transfers.start_stores(plan)
        return self.transfers.take_failed_blocks()

    def holds(self, engine_block: int, block: int) -> bool:
        """Return whether a block of the cache has the content of a block of the prefix, in all layers."""
        return all(
            (view[engine_block].reshape(-1) == content(block, layer, sign)).all()
            for layer, views in enumerate(self.views)
            for view, sign in zip(views, (1, -1), strict=True)
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(fakes.model_directory(tmp_path / "some-model"))


@pytest.mark.requirement("KC-3")
def test_a_layer_is_in_the_cache_when_it_was_waited_for(world: World) -> None:
    world.transfers.start_loads(Plan(loads=(world.load(5, 2),)))
    assert not world.tensors[0].any()
    world.transfers.wait_layer(0)
    assert world.tensors[0].any()
    assert not world.tensors[1].any()


@pytest.mark.parametrize(("overlaps", "before"), [(True, []), (False, ["all"])])
def test_a_load_is_waited_for_as_a_whole_where_vllm_computes_with_all_cores(
    tmp_path: Path, overlaps: bool, before: list[str]
) -> None:
    world = World(fakes.model_directory(tmp_path / "m"), overlaps=overlaps)
    world.transfers.start_loads(Plan(loads=(world.load(5, 2),)))
    (fetch,) = world.client.fetches
    assert fetch.waited_for == before
    for layer in range(LAYERS):
        world.transfers.wait_layer(layer)
    world.transfers.finish_loads()
    assert fetch.waited_for == [*before, *range(LAYERS), "all"]
    assert world.holds(5, 0)
    assert world.holds(2, 1)


def test_memory_is_used_again_once_nothing_uses_it(world: World) -> None:
    def memory_of(sections: Any) -> int:
        return id(sections.__self__.octets)

    for _ in range(2):
        world.run(Plan(loads=(world.load(5, 2),)))
    loaded = [memory_of(fetch.sections) for fetch in world.client.fetches]
    world.run(Plan(stores=(Store(world.keys(2), (1, 2)),)))
    world.run(Plan(loads=(world.load(5, 2),)))
    stored, meanwhile = memory_of(world.client.jobs[0].sections), memory_of(world.client.fetches[2].sections)
    assert loaded == [stored] * 2
    assert meanwhile != stored, "which is being sent"
    world.client.jobs[0].done = True
    world.run(Plan())
    world.run(Plan(loads=(world.load(5, 2), world.load(3, 4))))
    assert {memory_of(fetch.sections) for fetch in world.client.fetches[3:]} == {stored, meanwhile}


def test_without_memory_blocks_are_computed_and_not_stored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(MemoryPool, "take", take)
    plan = Plan(loads=(world.load(5, 2),))
    assert world.run(plan) == {5, 2}
    world.run(Plan(stores=(Store(world.keys(2), (1, 2)),)))
    assert world.count["stores_left_out"] == 2
    assert world.client.jobs == []


def test_blocks_are_loaded_into_their_places(world: World) -> None:
    assert world.run(Plan(loads=(world.load(5, 2),))) == set()
    assert world.holds(5, 0)
    assert world.holds(2, 1)
    assert world.count["loaded_tokens"] == 8
    untouched = [n for n in range(BLOCKS) if n not in (5, 2)]
    assert not any(tensor[untouched].any() for tensor in world.tensors)


def test_what_does_not_come_is_computed(world: World) -> None:
    world.client.brings = lambda layer: 3 if layer == 0 else 1
    world.client.result_blocks = 1
    assert world.run(Plan(loads=(world.load(5, 2, 7),))) == {2, 7}
    assert world.holds(5, 0)
    assert world.count["loaded_tokens"] == 4
    assert world.count["load_failed_tokens"] == 8
    assert world.count["load_missed_gone"] == 2


def test_what_is_withdrawn_after_use_is_computed(world: World) -> None:
    world.client.withdrawn = (1,)
    assert world.run(Plan(loads=(world.load(5, 2, 7),))) == {2, 7}

    def withdrawn(layer: int) -> int:
        if layer == 2:
            raise LayersWithdrawn((0,))
        return 3

    world.client.withdrawn = ()
    world.client.brings = withdrawn
    assert world.run(Plan(loads=(world.load(5, 2, 7),))) == {5, 2, 7}


def test_layers_that_vllm_did_not_wait_for_do_not_count(world: World) -> None:
    """A kernel graph that leaves the hook out computes with what was there before."""
    assert world.run(Plan(loads=(world.load(5, 2),)), layers=LAYERS - 1) == {5, 2}


def test_one_failed_load_does_not_stop_another(world: World) -> None:
    world.client.result_blocks = 0
    world.client.brings = lambda layer: 0
    broken = world.load(5)
    world.transfers.start_loads(Plan(loads=(broken,)))
    world.client.result_blocks = None
    world.client.brings = lambda layer: 9
    assert world.run(Plan(loads=(world.load(3),))) == {5}
    assert world.holds(3, 0)


def fill(world: World) -> None:
    for layer, (keys, values) in enumerate(world.views):
        for block in range(BLOCKS):
            keys[block] = content(block, layer, 1).reshape(TOKENS, HEADS, DIM)
            values[block] = content(block, layer, -1).reshape(TOKENS, HEADS, DIM)


def test_what_is_stored_is_a_copy(world: World) -> None:
    fill(world)
    world.run(Plan(stores=(Store(world.keys(2), (6, 1)),)))
    for tensor in world.tensors:
        tensor[:] = 0
    (job,) = world.client.jobs
    for place, block in enumerate((6, 1)):
        for layer in range(LAYERS):
            sections = job.sections(place, layer)
            for section, sign in zip(sections, (1, -1), strict=True):
                assert bytes(section) == content(block, layer, sign).tobytes()


def test_nothing_is_stored_of_a_step_whose_load_failed(world: World) -> None:
    world.client.brings = lambda layer: 0
    world.client.result_blocks = 0
    plan = Plan(loads=(world.load(5),), stores=(Store(world.keys(1, 1), (2,)),))
    assert world.run(plan) == {5}
    assert not world.client.jobs
    assert world.count["stores_void"] == 1
    world.client.brings = lambda layer: 9
    world.run(Plan(stores=(Store(world.keys(1, 1), (2,)),)))
    assert len(world.client.jobs) == 1


def test_a_load_that_failed_is_told_before_the_step_is_over(world: World) -> None:
    """vLLM asks so early where it drafts tokens; what the step computed is void all the same."""
    world.client.brings = lambda layer: 1
    world.client.result_blocks = 1
    plan = Plan(loads=(world.load(5, 2),), stores=(Store(world.keys(1, 2), (7,)),))
    world.transfers.start_loads(plan)
    for layer in range(LAYERS):
        world.transfers.wait_layer(layer)
    assert world.transfers.take_failed_blocks() == {2}
    world.transfers.finish_loads()
    world.transfers.start_stores(plan)
    assert not world.client.jobs
    assert world.transfers.take_failed_blocks() == set()
    assert world.count["loaded_tokens"] == 4


@pytest.mark.parametrize("reason", [MissReason.UNAVAILABLE, MissReason.DEADLINE])
def test_holders_that_do_not_answer_are_left_alone_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch, reason: MissReason
) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("kvsp_client.vllm.transfers.time", clock)
    world.client.result_blocks, world.client.brings = 0, lambda layer: 0
    world.client.reason = reason
    plan = Plan(loads=(world.load(5, 2),), stores=(Store(world.keys(1, 2), (7,)),))
    for now[0], asked in ((1000.0, 1), (1000.0 + PAUSE_S / 2, 1), (1000.0 + PAUSE_S, 2)):
        assert world.run(plan) == {5, 2}
        assert len(world.client.fetches) == asked
    assert not world.client.jobs
    assert world.count["loads_left_out"] == 1


def test_a_few_blocks_do_not_keep_the_memory_of_many(tmp_path: Path) -> None:
    """Else a queue of small stores to a slow cache server would keep that of every large load."""
    block_bytes = 2 * LAYERS * TOKENS * HEADS * DIM * 2
    world = World(fakes.model_directory(tmp_path / "m"), store_queue_bytes=8 * block_bytes)
    for number in range(8):
        world.run(Plan(loads=(world.load(*range(8)),)))
        world.run(Plan(stores=(Store(world.keys(1, number), (0,)),)))
    assert len(world.client.jobs) == 8
    kept = [job.sections.__self__.octets.nbytes for job in world.client.jobs]
    assert sum(kept) <= 8 * block_bytes


def test_a_store_that_cannot_begin_or_end_is_one_that_failed(world: World) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise LocalProtocolError("this should not be")

    begin = world.client.start_store
    world.client.start_store = broken  # type: ignore[method-assign]
    world.run(Plan(stores=(Store(world.keys(1), (0,)),)))
    world.client.start_store = begin  # type: ignore[method-assign]
    for number in (1, 2):
        world.run(Plan(stores=(Store(world.keys(1, number), (0,)),)))
    for job in world.client.jobs:
        job.done = job.breaks = True
    world.run(Plan())
    assert world.count["store_failed_cancelled"] == 3
    taken = [world.transfers._memory.take(world.descriptor, 1).octets for _ in range(2)]
    assert taken[0] is not taken[1]


def test_copies_that_wait_are_limited(tmp_path: Path) -> None:
    block_bytes = 2 * LAYERS * TOKENS * HEADS * DIM * 2
    world = World(fakes.model_directory(tmp_path / "m"), store_queue_bytes=2 * block_bytes)
    world.run(Plan(stores=(Store(world.keys(2), (0, 1)),)))
    world.run(Plan(stores=(Store(world.keys(1, 2), (2,)),)))
    assert len(world.client.jobs) == 1
    assert world.count["stores_left_out"] == 1
    world.client.jobs[0].done = True
    world.run(Plan(stores=(Store(world.keys(1, 2), (2,)),)))
    assert len(world.client.jobs) == 2
    assert world.count["stored_blocks"] == 2


def test_copies_count_as_large_as_the_memory_that_they_keep(tmp_path: Path) -> None:
    """Memory that is used again may be twice as large as what it is used for."""
    block_bytes = 2 * LAYERS * TOKENS * HEADS * DIM * 2
    world = World(fakes.model_directory(tmp_path / "m"), store_queue_bytes=3 * block_bytes)
    world.run(Plan(stores=(Store(world.keys(2), (0, 1)),)))
    world.run(Plan(loads=(world.load(5, 2),)))
    world.run(Plan(stores=(Store(world.keys(1, 2), (2,)),)))
    assert len(world.client.jobs) == 1
    assert world.count["stores_left_out"] == 1
    world.run(Plan(loads=(world.load(5, 2),)))
    one, other = (fetch.sections.__self__ for fetch in world.client.fetches)  # type: ignore[attr-defined]
    assert one.octets is other.octets, "it was given back"


def test_what_is_stored_is_not_stored_again_until_a_load_of_it_fails(world: World) -> None:
    plan = Plan(stores=(Store(world.keys(3), (0, 1, 2)),))
    world.run(plan)
    world.client.jobs[0].done = True
    world.client.jobs[0].failed = ((2, StoreOutcome.FULL),)
    world.run(plan)
    assert world.count["store_failed_full"] == 1
    assert [job.keys.keys for job in world.client.jobs[1:]] == [world.keys(1, 2).keys]
    world.client.brings = lambda layer: 0
    world.client.result_blocks = 0
    world.run(Plan(loads=(world.load(0),)))
    world.run(Plan(stores=(Store(world.keys(1), (0,)),)))
    assert world.client.jobs[-1].keys == world.keys(1)


def test_what_was_stored_long_ago_is_stored_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("kvsp_client.vllm.transfers.time", clock)
    plan = Plan(stores=(Store(world.keys(1), (0,)),))
    world.run(plan)
    world.client.jobs[0].done = True
    for now[0], jobs in ((1001.0, 1), (1060.0, 1), (1062.0, 2)):
        world.run(plan)
        assert len(world.client.jobs) == jobs


def test_stopping_waits_for_stores_and_then_gives_up(world: World) -> None:
    world.run(Plan(stores=(Store(world.keys(1), (0,)),)))
    world.run(Plan(stores=(Store(world.keys(1, 1), (1,)),)))
    world.client.jobs[0].done = True
    world.transfers.flush(0.0)
    assert [job.cancelled for job in world.client.jobs] == [False, True]
    assert world.count["stored_blocks"] == 1
    assert world.count["store_failed_cancelled"] == 1


def test_a_client_that_is_closed_is_a_load_that_failed(world: World) -> None:
    def closed(*arguments: Any, **options: Any) -> Any:
        raise ClientClosed("the client was closed")

    world.client.start_fetch = closed  # type: ignore[method-assign]
    assert world.run(Plan(loads=(world.load(5, 2),))) == {5, 2}
