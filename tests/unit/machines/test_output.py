"""The story of the output gate: what may leave an instance, and when a checkpoint is asked for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines import output as m
from kvsp_core.machines.output import GateKind as K
from kvsp_core.machines.table import Cell
from kvsp_core.problems import NOT_FOUND, STALE_EPOCH, Problem
from tests.machine_kit import cells, check_cell

STALE = Problem(STALE_EPOCH, "older")


def gate(*, deterministic: bool = False, epoch: int = 1, **options: Any) -> m.OutputGate:
    return m.OutputGate(
        **{"prompt_tokens": 6, "block_tokens": 4, "deterministic": deterministic, "epoch": epoch} | options
    )


def opened(attached: bool = True, **options: Any) -> m.OutputGate:
    it = gate(**options)
    assert it.handle(m.Begin(), 0) == (m.SendCheckpoint(it.decoded),)
    if attached:
        assert it.handle(m.Attached(it.decoded), 0) == ()
    it.handle(m.CheckpointAcknowledged(it.epoch, it.decoded), 0)
    return it


def decode(it: m.OutputGate, count: int, now_ms: int = 0) -> tuple[m.Effect, ...]:
    first = it.decoded
    return it.handle(m.Decoded(first, tuple(range(100 + first, 100 + first + count))), now_ms)


# The first checkpoint


@pytest.mark.requirement("CP-3", "CP-1")
@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_leaves_before_the_first_checkpoint_is_acknowledged(deterministic: bool) -> None:
    it = gate(deterministic=deterministic)
    it.handle(m.Attached(0), 0)
    assert it.handle(m.Begin(), 0) == (m.SendCheckpoint(0),)
    assert decode(it, 1) == ()
    assert it.released == 0
    effects = it.handle(m.CheckpointAcknowledged(1, 0), 5)
    assert (m.Deliver(0, (100,)) in effects) == deterministic


@pytest.mark.requirement("CP-1")
def test_a_first_checkpoint_that_gets_no_answer_is_sent_again() -> None:
    it = gate(retry_ms=50)
    it.handle(m.Begin(), 0)
    assert it.next_deadline_ms() is None
    assert it.handle(m.CheckpointFailed(), 10) == ()
    assert it.next_deadline_ms() == 60
    assert it.handle(m.TimerFired(), 59) == ()
    assert it.handle(m.TimerFired(), 60) == (m.SendCheckpoint(0),)
    assert it.kind is K.OPENING


# Holding back


@pytest.mark.requirement("CP-3")
def test_tokens_of_a_sampler_that_is_not_deterministic_wait_for_their_checkpoint() -> None:
    it = opened()
    assert decode(it, 1) == ()
    assert decode(it, 1) == (m.SendCheckpoint(2),)  # 6 + 2 tokens complete the second block
    assert decode(it, 1) == ()
    assert it.released == 0
    assert it.handle(m.CheckpointAcknowledged(1, 2), 9) == (m.Deliver(0, (100, 101)),)
    assert it.released == 2


@pytest.mark.requirement("CP-3")
def test_an_acknowledgement_releases_only_what_it_covers() -> None:
    it = opened()
    decode(it, 2)
    effects = it.handle(m.CheckpointAcknowledged(1, 1), 0)
    assert effects == (m.Deliver(0, (100,)),)  # the controller recorded less than was sent
    assert it.handle(m.TimerFired(), it.next_deadline_ms() or 0) == (m.SendCheckpoint(2),)


@pytest.mark.requirement("CP-3")
def test_an_acknowledgement_of_more_than_was_sent_covers_what_was_sent() -> None:
    it = opened()
    decode(it, 2)
    decode(it, 1)
    assert it.handle(m.CheckpointAcknowledged(1, 3), 0) == (m.Deliver(0, (100, 101)),)
    assert it.covered == 2


def test_an_acknowledgement_that_nobody_waits_for_changes_nothing() -> None:
    it = opened()
    decode(it, 1)
    assert it.handle(m.CheckpointAcknowledged(1, 1), 0) == ()
    assert it.released == 0


@pytest.mark.requirement("CP-3")
def test_a_token_is_held_for_a_bounded_time() -> None:
    it = opened(max_hold_ms=100)
    decode(it, 1, now_ms=1000)
    assert it.next_deadline_ms() == 1100
    assert it.handle(m.TimerFired(), 1099) == ()
    assert it.handle(m.TimerFired(), 1100) == (m.SendCheckpoint(1),)
    assert it.next_deadline_ms() is None


@pytest.mark.requirement("CP-5")
def test_tokens_of_a_deterministic_sampler_leave_at_once() -> None:
    it = opened(deterministic=True)
    assert decode(it, 1) == (m.Deliver(0, (100,)),)
    assert decode(it, 1) == (m.SendCheckpoint(2), m.Deliver(1, (101,)))
    assert it.next_deadline_ms() is None


# When checkpoints are due


@pytest.mark.requirement("CP-1")
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_checkpoint_is_asked_for_at_each_completed_block(deterministic: bool) -> None:
    it = opened(deterministic=deterministic, max_hold_ms=10**9)
    offsets = []
    for _ in range(12):
        for effect in decode(it, 1):
            if isinstance(effect, m.SendCheckpoint):
                offsets.append(effect.offset)
                it.handle(m.CheckpointAcknowledged(1, effect.offset), 0)
    assert offsets == [2, 6, 10]


@pytest.mark.requirement("CP-1")
def test_checkpoints_are_never_more_than_64_tokens_apart() -> None:
    it = opened(block_tokens=1000, max_hold_ms=10**9, attached=False)
    offsets = [0]
    for count in (63, 1, 30, 70, 200):
        effects = decode(it, count)
        while asked := [e.offset for e in effects if isinstance(e, m.SendCheckpoint)]:
            offsets += asked
            effects = it.handle(m.CheckpointAcknowledged(1, asked[0]), 0)
    assert it.decoded == 364
    assert offsets == [0, 64, 128, 192, 256, 320]


@pytest.mark.requirement("CP-1")
def test_one_checkpoint_is_under_way_at_a_time() -> None:
    it = opened()
    assert m.SendCheckpoint(2) in decode(it, 2)
    assert decode(it, 8) == ()
    assert it.handle(m.CheckpointAcknowledged(1, 2), 0) == (m.SendCheckpoint(10), m.Deliver(0, (100, 101)))


def test_a_checkpoint_that_failed_is_sent_again_with_what_came_since() -> None:
    it = opened(retry_ms=50)
    decode(it, 2)
    it.handle(m.CheckpointFailed(), 0)
    assert decode(it, 1) == ()
    assert it.handle(m.TimerFired(), 50) == (m.SendCheckpoint(3),)


def test_a_single_token_whose_checkpoint_failed_is_not_held_for_ever() -> None:
    it = opened(retry_ms=50, max_hold_ms=100)
    decode(it, 1)
    it.handle(m.TimerFired(), 100)
    it.handle(m.CheckpointFailed(), 110)
    assert it.next_deadline_ms() == 160
    assert it.handle(m.TimerFired(), 160) == (m.SendCheckpoint(1),)


# Pausing


@pytest.mark.requirement("CP-3")
def test_decoding_pauses_at_the_limit_and_goes_on_when_enough_is_covered() -> None:
    it = opened(max_uncovered_tokens=8)
    decode(it, 2)
    assert decode(it, 5) == ()
    assert decode(it, 1) == (m.PauseDecoding(),)
    assert decode(it, 1) == ()  # drawn before the engine heard of it
    effects = it.handle(m.CheckpointAcknowledged(1, 2), 0)
    assert m.ProceedDecoding() not in effects
    assert m.SendCheckpoint(9) in effects
    assert m.ProceedDecoding() in it.handle(m.CheckpointAcknowledged(1, 9), 0)


# Losing the session


@pytest.mark.requirement("MG-3", "MG-4")
@pytest.mark.parametrize("problem", [STALE, Problem(NOT_FOUND, "unknown")])
def test_a_refused_checkpoint_ends_the_session_here_without_an_end_line(problem: Problem) -> None:
    it = opened()
    decode(it, 2)
    assert it.handle(m.CheckpointRefused(problem), 0) == (m.Abandon(problem),)
    assert it.kind is K.LOST
    assert decode(it, 1) == ()
    assert it.handle(m.Attached(0), 0) == ()
    assert it.handle(m.EngineEnded("stop"), 0) == ()
    assert it.released == 0


@pytest.mark.requirement("MG-3")
def test_an_acknowledgement_in_another_epoch_means_that_the_session_has_moved() -> None:
    it = opened(epoch=2)
    decode(it, 2)
    (lost,) = it.handle(m.CheckpointAcknowledged(3, 2), 0)
    assert isinstance(lost, m.Abandon)
    assert lost.problem.type is STALE_EPOCH


# The end


@pytest.mark.requirement("CP-3")
def test_the_end_waits_until_the_last_token_is_covered() -> None:
    it = opened()
    decode(it, 1)
    assert it.handle(m.EngineEnded("stop"), 0) == (m.SendCheckpoint(1),)
    assert it.kind is K.ENDING
    assert it.handle(m.CheckpointAcknowledged(1, 1), 0) == (m.Deliver(0, (100,)), m.DeliverEnd("stop", 1))
    assert it.kind is K.ENDED


def test_the_end_of_a_deterministic_session_waits_for_nothing() -> None:
    it = opened(deterministic=True)
    decode(it, 1)
    assert it.handle(m.EngineEnded("length"), 0) == (m.DeliverEnd("length", 1),)


def test_an_engine_that_ends_early_still_waits_for_the_first_checkpoint() -> None:
    it = gate()
    it.handle(m.Begin(), 0)
    it.handle(m.Attached(0), 0)
    assert it.handle(m.EngineEnded("stop"), 0) == ()
    assert it.handle(m.CheckpointAcknowledged(1, 0), 0) == (m.DeliverEnd("stop", 0),)


def test_an_ended_session_can_be_read_again() -> None:
    it = opened(deterministic=True)
    decode(it, 3)
    it.handle(m.EngineEnded("stop"), 0)
    it.handle(m.Detached(), 0)
    assert it.handle(m.Attached(1), 0) == (m.Deliver(1, (101, 102)), m.DeliverEnd("stop", 3))
    assert it.handle(m.CheckpointRefused(STALE), 0) == ()


def test_the_engine_may_not_go_on_after_its_end_nor_leave_tokens_out() -> None:
    it = gate()
    it.handle(m.Begin(), 0)
    before = it.freeze(0)
    with pytest.raises(LocalProtocolError, match="the next is 0"):
        it.handle(m.Decoded(1, (5,)), 0)
    assert it.freeze(0) == before
    it.handle(m.EngineEnded("stop"), 0)
    for event in (m.Decoded(0, (5,)), m.EngineEnded("stop")):
        with pytest.raises(LocalProtocolError):
            it.handle(event, 0)


# Streams


@pytest.mark.requirement("MG-4", "MG-2")
def test_a_resumed_instance_first_sends_the_tokens_of_the_checkpoint_again() -> None:
    it = gate(epoch=2, generated=(100, 101, 102))
    assert it.handle(m.Begin(), 0) == (m.SendCheckpoint(3),)
    it.handle(m.Attached(1), 0)
    assert it.handle(m.CheckpointAcknowledged(2, 3), 0) == (m.Deliver(1, (101, 102)),)


@pytest.mark.requirement("MG-2", "CP-5")
def test_a_resumed_instance_continues_at_the_offset_for_who_has_it_all() -> None:
    it = gate(deterministic=True, epoch=2, generated=(100, 101, 102))
    it.handle(m.Begin(), 0)
    it.handle(m.Attached(5), 0)  # the client has two tokens more than the checkpoint
    it.handle(m.CheckpointAcknowledged(2, 3), 0)
    assert m.Deliver(3, (103,)) in decode(it, 1)
    assert it.handle(m.Attached(5), 0) == ()
    assert decode(it, 1) == ()
    assert m.Deliver(5, (105,)) in decode(it, 1)


def test_a_new_stream_replaces_the_one_before() -> None:
    it = opened(deterministic=True)
    decode(it, 3)
    assert it.handle(m.Attached(2), 0) == (m.Deliver(2, (102,)),)
    it.handle(m.Detached(), 0)
    assert decode(it, 1) == ()
    assert it.released == 4


def test_a_slow_stream_is_given_no_more_than_its_window() -> None:
    it = opened(deterministic=True, window_tokens=4)
    assert m.Deliver(0, (100, 101, 102, 103)) in decode(it, 6)
    assert it.handle(m.StreamReady(), 0) == (m.Deliver(4, (104, 105)),)
    assert m.Deliver(6, (106, 107)) in decode(it, 5)
    assert it.handle(m.StreamReady(), 0) == (m.Deliver(8, (108, 109, 110)),)


# The table


class Subject:
    def __init__(self, kind: K) -> None:
        self.gate = gate() if kind is K.NEW else opened()
        if kind is K.OPENING:
            self.gate = gate()
            self.gate.handle(m.Begin(), 0)
        if kind in (K.ENDING, K.ENDED, K.LOST):
            decode(self.gate, 1)
            self.gate.handle(m.EngineEnded("stop"), 0)
        if kind is K.ENDED:
            self.gate.handle(m.CheckpointAcknowledged(1, 1), 0)
        if kind is K.LOST:
            self.gate.handle(m.CheckpointRefused(STALE), 0)
        assert self.gate.kind is kind

    def kind(self) -> K:
        return self.gate.kind

    def freeze(self) -> Hashable:
        return self.gate.freeze(0)

    def handle(self, event: m.Event) -> tuple[m.Effect, ...]:
        return self.gate.handle(event, 0)


EVENTS: dict[type, m.Event] = {
    m.Begin: m.Begin(),
    m.Decoded: m.Decoded(0, (100,)),
    m.EngineEnded: m.EngineEnded("stop"),
    m.CheckpointAcknowledged: m.CheckpointAcknowledged(1, 1),
    m.CheckpointRefused: m.CheckpointRefused(STALE),
    m.CheckpointFailed: m.CheckpointFailed(),
    m.Attached: m.Attached(0),
    m.StreamReady: m.StreamReady(),
    m.Detached: m.Detached(),
    m.TimerFired: m.TimerFired(),
}


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(m.TABLE))
def test_legality(kind: K, event_type: type, cell: Cell) -> None:
    check_cell(cell, subject=Subject(kind), event=EVENTS[event_type])


@pytest.mark.parametrize("kind", list(K))
def test_a_frozen_gate_comes_back_as_it_was(kind: K) -> None:
    before = Subject(kind).gate
    after = gate()
    after.thaw(before.freeze(100), 500)
    assert after.freeze(500) == before.freeze(100)
    if kind is not K.NEW:
        with pytest.raises(LocalProtocolError):
            before.thaw(after.freeze(0), 0)


def test_nothing_confidential_is_shown() -> None:
    it = opened(deterministic=True)
    shown = repr((*decode(it, 3), it.freeze(0), m.Decoded(0, (100,))))
    assert "100" not in shown
    assert "102" not in shown
