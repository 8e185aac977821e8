"""The blocks of a prefix: ready by layer, ended by a gap, void where what was taken comes otherwise."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from kvsp_core.machines import prefix_load as load
from kvsp_core.machines import retrieval
from kvsp_core.machines.prefix_load import (
    TABLE,
    CancelFetch,
    Ended,
    Fetch,
    Fetched,
    LayersReady,
    LoadState,
    Miss,
    MissReason,
    PrefixLoad,
    ReportBad,
    Start,
    Stop,
)
from kvsp_core.machines.retrieval import Attempt, Outcome
from kvsp_core.machines.table import Cell, Kind
from tests.machine_kit import cells, check_cell
from tests.unit.machines import test_retrieval as one_block
from tests.unit.machines.test_retrieval import H1, H2, LAYERS, NOW, digests_of, ended, replica


class Story:
    """A load of some blocks, each at these holders."""

    def __init__(self, *blocks: list[Any], at_a_time: int = 8) -> None:
        machines = [one_block.retrieval(*records) for records in blocks]
        self.load = PrefixLoad(machines, layers=LAYERS, at_a_time=at_a_time)
        self.said: list[Any] = []

    def __call__(self, event: load.Event) -> tuple[load.Effect, ...]:
        effects = self.load.handle(event, NOW)
        self.said += effects
        return effects

    def layer(self, block: int, fetch: int, layer: int, content: str = "a") -> tuple[load.Effect, ...]:
        arrived = retrieval.LayersArrived(fetch, layer, (digests_of(content)[layer],))
        return self(Fetched(block, arrived))

    def end(self, block: int, fetch: int, content: str = "a") -> tuple[load.Effect, ...]:
        return self(Fetched(block, ended(fetch, content=content)))


def test_a_layer_is_ready_once_every_block_has_it() -> None:
    story = Story([replica(H1)], [replica(H1)])
    assert [type(effect) for effect in story(Start())] == [Fetch, Fetch]
    assert story.layer(0, 0, 0) == ()
    assert story.load.take_layer(0) is None
    assert story.layer(1, 0, 0) == (LayersReady(1),)
    assert story.load.take_layer(0) == 2
    assert story.load.take_layer(1) is None
    assert story.end(0, 0) == ()
    assert story.load.complete_blocks == 1
    *_, last = story.end(1, 0)
    assert last == Ended(blocks=2, misses=(), void=())
    assert story.load.take_layer(LAYERS - 1) == 2


def test_so_many_blocks_are_under_way() -> None:
    story = Story(*[[replica(H1)]] * 3, at_a_time=1)
    assert [effect.block for effect in story(Start()) if isinstance(effect, Fetch)] == [0]
    assert [effect.block for effect in story.end(0, 0) if isinstance(effect, Fetch)] == [1]
    assert [effect.block for effect in story.end(1, 0) if isinstance(effect, Fetch)] == [2]


def test_a_gap_ends_the_prefix_before_it() -> None:
    story = Story(*[[replica(H1)]] * 4)
    story(Start())
    story.end(3, 0)
    effects = story(Fetched(1, retrieval.Refused(0, 404)))
    assert effects == (CancelFetch(2, 0),)
    assert story.load.blocks == 1
    (*_, last) = story.end(0, 0)
    gap = Miss(1, MissReason.GONE, (Attempt(H1, Outcome.MISS),))
    assert last == Ended(
        blocks=1, misses=(gap, Miss(2, MissReason.AFTER_GAP), Miss(3, MissReason.AFTER_GAP)), void=()
    )


def test_nothing_known_is_not_found() -> None:
    story = Story([], [replica(H1)])
    (last,) = story(Start())
    assert last == Ended(
        blocks=0, misses=(Miss(0, MissReason.NOT_FOUND), Miss(1, MissReason.AFTER_GAP)), void=()
    )
    empty = Story()
    assert empty(Start()) == (Ended(blocks=0, misses=(), void=()),)
    assert empty.load.take_layer(LAYERS - 1) == 0, "nobody waits for layers of nothing"


@pytest.mark.requirement("BR-5", "BR-8")
def test_a_bad_replica_is_reported_and_the_next_follows() -> None:
    story = Story([replica(H1), replica(H2)])
    story(Start())
    effects = story.layer(0, 0, 0, content="b")
    assert [type(effect) for effect in effects] == [CancelFetch, ReportBad, Fetch]
    assert effects[1].holder == H1
    assert story.end(0, 1)[-1] == Ended(blocks=1, misses=(), void=())


def test_what_was_taken_is_void_where_it_comes_otherwise_and_only_then() -> None:
    for again, void in (("a", ()), ("b", (0,))):
        story = Story([replica(H1), replica(H2, content=again)])
        story(Start())
        story.layer(0, 0, 0)
        story.layer(0, 0, 1)
        assert story.load.take_layer(0) == 1
        story(Fetched(0, retrieval.FetchFailed(0)))
        assert story.load.take_layer(0) is None, "it has to come again"
        story.layer(0, 1, 0, content=again)
        assert story.load.void == void
        assert story.end(0, 1, content=again)[-1] == Ended(blocks=1, misses=(), void=void)


def test_what_was_taken_is_void_where_its_block_is_cut_off() -> None:
    story = Story(*[[replica(H1)]] * 3)
    story(Start())
    for block in range(3):
        story.layer(block, 0, 0)
    assert story.load.take_layer(0) == 3
    assert LayersReady(1) in story(Fetched(1, retrieval.FetchFailed(0)))
    assert story.load.void == (1, 2)
    assert story.end(0, 0)[-1].void == (1, 2)  # type: ignore[union-attr]


def test_stopping_keeps_what_is_complete() -> None:
    story = Story(*[[replica(H1)]] * 3)
    story(Start())
    story.end(0, 0)
    story.end(2, 0)
    effects = story(Stop(MissReason.DEADLINE))
    assert effects == (
        CancelFetch(1, 0),
        Ended(blocks=1, misses=(Miss(1, MissReason.DEADLINE), Miss(2, MissReason.AFTER_GAP)), void=()),
    )
    assert story(Stop(MissReason.CANCELLED)) == ()
    assert story.end(1, 0) == ()


class Subject:
    def __init__(self, kind: Kind) -> None:
        self.load = Story([replica(H1)]).load
        if kind is not LoadState.READY:
            self.load.handle(Start(), NOW)
        if kind is LoadState.OVER:
            self.load.handle(Stop(MissReason.CANCELLED), NOW)

    def kind(self) -> Kind:
        return self.load.state

    def freeze(self) -> Hashable:
        return self.load.freeze(NOW)

    def handle(self, event: Any) -> tuple[Any, ...]:
        return self.load.handle(event, NOW)


EVENTS = {
    Start: Start(),
    Fetched: Fetched(0, retrieval.FetchFailed(0)),
    Stop: Stop(MissReason.CANCELLED),
}


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(TABLE))
def test_legality(kind: Kind, event_type: type, cell: Cell) -> None:
    check_cell(cell, subject=Subject(kind), event=EVENTS[event_type])
