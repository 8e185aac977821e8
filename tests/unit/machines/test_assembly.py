"""The story of the output assembly: one sample, each token once and in order, whatever arrives."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import pytest

from kvsp_core.machines import assembly as m
from kvsp_core.machines.assembly import AssemblyKind as K
from kvsp_core.machines.table import Cell
from tests.machine_kit import cells, check_cell


def feed(it: m.OutputAssembly, arrivals: Iterable[tuple[int, int]]) -> list[int]:
    """Feed tokens as (epoch, index), the value being 100 + index; return the indices delivered."""
    delivered = []
    for epoch, index in arrivals:
        for effect in it.handle(m.TokenArrived(index, epoch, 100 + index), 0):
            assert isinstance(effect, m.Deliver)
            assert effect.token == 100 + effect.index
            delivered.append(effect.index)
    return delivered


@pytest.mark.requirement("CP-4")
def test_each_index_is_delivered_once_and_in_order() -> None:
    it = m.OutputAssembly()
    assert feed(it, [(1, 0), (1, 2), (1, 2), (1, 0), (1, 1), (1, 1), (1, 4), (1, 3)]) == [0, 1, 2, 3, 4]
    assert it.tokens() == (100, 101, 102, 103, 104)
    assert it.next_index == 5


@pytest.mark.requirement("CP-4", "MG-3")
def test_nothing_of_an_old_epoch_passes_after_a_newer_one_was_seen() -> None:
    it = m.OutputAssembly()
    assert feed(it, [(1, 0), (2, 3), (1, 1), (1, 2)]) == [0]
    assert feed(it, [(2, 1), (2, 2)]) == [1, 2, 3]


@pytest.mark.requirement("CP-4", "MG-4")
def test_what_waited_behind_a_gap_does_not_pass_after_a_newer_epoch_either() -> None:
    it = m.OutputAssembly()
    assert feed(it, [(1, 1)]) == []
    assert it.handle(m.TokenArrived(0, 2, 7), 0) == (m.Deliver(0, 7),)
    assert it.handle(m.TokenArrived(1, 2, 8), 0) == (m.Deliver(1, 8),)


@pytest.mark.requirement("MG-4")
def test_tokens_lost_between_two_epochs_come_again() -> None:
    """Tokens 7 to 9 of epoch 1 are covered by a checkpoint but overtaken by epoch 2, which sends them again
    from where the front end stands.
    """
    it = m.OutputAssembly()
    feed(it, [(1, i) for i in range(7)])
    from_index = it.next_index
    arrivals = [(2, from_index), (1, 7), (1, 8), (1, 9), (2, 8), (2, 9), (2, 10), (2, 11)]
    assert feed(it, arrivals) == [7, 8, 9, 10, 11]


@pytest.mark.requirement("CP-5")
def test_regenerated_duplicates_are_discarded_by_index() -> None:
    it = m.OutputAssembly()
    feed(it, [(1, 0), (1, 1), (1, 2)])
    assert feed(it, [(2, 0), (2, 1), (2, 2), (2, 3)]) == [3]


@pytest.mark.requirement("MG-4")
@pytest.mark.parametrize("early", [False, True])
def test_a_duplicate_with_another_value_ends_the_stream_with_an_error(early: bool) -> None:
    it = m.OutputAssembly()
    index = 3 if early else 0
    feed(it, [(1, index)])
    (error,) = it.handle(m.TokenArrived(index, 1, 9), 0)
    assert isinstance(error, m.Contradicted)
    assert "9" not in error.detail
    assert it.kind is K.FAILED
    assert feed(it, [(1, 0), (1, 1)]) == []


@pytest.mark.requirement("MG-4")
def test_a_resumed_instance_that_contradicts_what_was_delivered_is_not_believed() -> None:
    it = m.OutputAssembly()
    feed(it, [(1, 0), (1, 1)])
    (error,) = it.handle(m.TokenArrived(1, 2, 9), 0)
    assert isinstance(error, m.Contradicted)


def test_the_end_comes_after_the_last_token() -> None:
    it = m.OutputAssembly()
    feed(it, [(1, 0)])
    assert it.handle(m.EndArrived("stop", 2, 1), 0) == ()
    assert it.kind is K.ENDING
    assert it.handle(m.EndArrived("stop", 2, 1), 0) == ()
    assert it.handle(m.TokenArrived(1, 1, 5), 0) == (m.Deliver(1, 5), m.Finished("stop"))
    assert it.handle(m.EndArrived("stop", 2, 1), 0) == ()
    assert it.kind is K.FINISHED


def test_an_empty_output_ends_at_once() -> None:
    assert m.OutputAssembly().handle(m.EndArrived("stop", 0, 1), 0) == (m.Finished("stop"),)


@pytest.mark.requirement("CP-4", "MG-3")
def test_an_end_of_an_old_epoch_does_not_count() -> None:
    it = m.OutputAssembly()
    feed(it, [(2, 0)])
    assert it.handle(m.EndArrived("stop", 1, 1), 0) == ()
    assert it.kind is K.OPEN
    it.handle(m.EndArrived("stop", 3, 2), 0)
    feed(it, [(3, 1)])
    assert it.kind is K.OPEN  # the end that epoch 2 announced is forgotten


@pytest.mark.parametrize("arrival", [m.EndArrived("stop", 1, 1), m.EndArrived("stop", 4, 1)])
def test_an_end_that_contradicts_what_came_is_an_error(arrival: m.EndArrived) -> None:
    it = m.OutputAssembly()
    feed(it, [(1, 0), (1, 1), (1, 4)])
    (error,) = it.handle(arrival, 0)
    assert isinstance(error, m.Contradicted)


def test_two_ends_and_a_token_beyond_the_end_are_errors() -> None:
    for second in (m.EndArrived("length", 3, 1), m.EndArrived("stop", 4, 1), m.TokenArrived(3, 1, 5)):
        it = m.OutputAssembly()
        it.handle(m.EndArrived("stop", 3, 1), 0)
        (error,) = it.handle(second, 0)
        assert isinstance(error, m.Contradicted)


@pytest.mark.requirement("MG-4")
def test_a_stream_that_breaks_is_asked_for_from_where_the_client_stands() -> None:
    it = m.OutputAssembly()
    feed(it, [(1, 0), (1, 2)])
    assert it.handle(m.StreamCut(), 0) == (m.AskAgain(1),)
    assert feed(it, [(1, 1)]) == [1]
    it.handle(m.EndArrived("stop", 4, 1), 0)
    assert it.handle(m.StreamCut(), 0) == (m.AskAgain(2),)
    assert it.kind is K.OPEN


@pytest.mark.requirement("MG-4")
def test_too_many_tokens_behind_a_gap_are_asked_for_again() -> None:
    it = m.OutputAssembly(max_early_tokens=2)
    assert feed(it, [(1, 2), (1, 3)]) == []
    assert it.handle(m.TokenArrived(4, 1, 104), 0) == (m.AskAgain(0),)
    assert feed(it, [(1, 0), (1, 1), (1, 2), (1, 3)]) == [0, 1, 2, 3]


class Subject:
    def __init__(self, kind: K) -> None:
        self.it = m.OutputAssembly()
        if kind in (K.ENDING, K.FINISHED):
            self.it.handle(m.EndArrived("stop", 1 if kind is K.ENDING else 0, 1), 0)
        if kind is K.FAILED:
            self.it.handle(m.TokenArrived(0, 1, 1), 0)
            self.it.handle(m.TokenArrived(0, 1, 2), 0)
        assert self.it.kind is kind

    def kind(self) -> K:
        return self.it.kind

    def freeze(self) -> Hashable:
        return self.it.freeze(0)

    def handle(self, event: m.Event) -> tuple[m.Effect, ...]:
        return self.it.handle(event, 0)


EVENTS: dict[type, m.Event] = {
    m.TokenArrived: m.TokenArrived(0, 1, 1),
    m.EndArrived: m.EndArrived("stop", 1, 1),
    m.StreamCut: m.StreamCut(),
}


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(m.TABLE))
def test_legality(kind: K, event_type: type, cell: Cell) -> None:
    check_cell(cell, subject=Subject(kind), event=EVENTS[event_type])


@pytest.mark.parametrize("kind", list(K))
def test_a_frozen_assembly_comes_back_as_it_was(kind: K) -> None:
    before = Subject(kind).it
    assert m.OutputAssembly.thaw(before.freeze(0), 0).freeze(0) == before.freeze(0)
    assert before.next_deadline_ms() is None


def test_no_token_is_shown() -> None:
    it = m.OutputAssembly()
    effects = it.handle(m.TokenArrived(0, 1, 4711), 0)
    assert "4711" not in repr((effects, m.TokenArrived(0, 1, 4711), it.freeze(0)))
