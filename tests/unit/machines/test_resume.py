"""The story of a session at an instance: begun, resumed, repeated, overtaken by a newer epoch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import attrs
import pytest

from kvsp_core.machines import resume as m
from kvsp_core.machines.table import Cell
from kvsp_core.problems import CONFLICT, INVALID_STATE, STALE_EPOCH, Problem
from kvsp_core.records import Sampler, SessionCheckpoint
from tests.machine_kit import cells, check_cell, problems_in

B = 4
DRAINING = Problem(INVALID_STATE, "draining")


def checkpoint(*, blocks: int = 2, tail: int = 2, generated: int = 3, epoch: int = 1) -> SessionCheckpoint:
    return SessionCheckpoint(
        session="6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11",
        epoch=epoch,
        compat_id="c" * 64,
        scope_id="5" * 32,
        prompt_blocks=tuple(f"{i:064x}" for i in range(blocks)),
        prompt_tail=tuple(range(tail)),
        generated=tuple(range(generated)),
        output_offset=generated,
        sampler=Sampler(method="greedy", seed=0, step=generated, deterministic=True),
    )


def resume(epoch: int = 2, refusal: Problem | None = None, **changes: Any) -> m.ResumeReceived:
    return m.ResumeReceived(epoch=epoch, checkpoint=checkpoint(**changes), refusal=refusal)


def step(state: m.State, event: m.Event, now_ms: int = 0) -> tuple[m.State, tuple[m.Effect, ...]]:
    return m.transition(state, event, now_ms, block_tokens=B, prompt_wait_ms=100)


def after(*events: m.Event, state: m.State | None = None) -> m.State:
    state = m.Absent() if state is None else state
    for event in events:
        state, _ = step(state, event)
    return state


def refusal(effects: tuple[m.Effect, ...]) -> object:
    (problem,) = problems_in(effects)
    return problem.type


# Beginning and resuming


def test_a_session_placed_here_begins() -> None:
    state, effects = step(m.Absent(), m.BeginReceived(epoch=1))
    assert state == m.Serving(epoch=1)
    assert effects == (m.Accepted(), m.Start(epoch=1))
    assert step(state, m.BeginReceived(epoch=1)) == (state, (m.Accepted(),))


@pytest.mark.requirement("MG-2")
def test_a_resumed_session_loads_its_blocks_and_goes_on_from_them() -> None:
    state, effects = step(m.Absent(), resume())
    assert effects == (m.Accepted(), m.LoadBlocks(2))
    state, effects = step(state, m.BlocksLoaded(2, blocks=3))
    # 8 + 2 + 3 tokens: three blocks are loaded, the thirteenth token is computed
    assert effects == (m.Start(epoch=2, checkpoint=checkpoint(), cached_blocks=3),)
    assert isinstance(state, m.Serving)


@pytest.mark.requirement("MG-2")
def test_what_was_generated_and_is_not_loaded_is_computed_again() -> None:
    _, effects = step(after(resume()), m.BlocksLoaded(2, blocks=2))
    assert effects == (m.Start(epoch=2, checkpoint=checkpoint(), cached_blocks=2),)


@pytest.mark.requirement("MG-2")
def test_the_last_token_is_always_computed() -> None:
    event = resume(tail=2, generated=2)  # 12 tokens, three whole blocks, all loaded
    _, effects = step(after(event), m.BlocksLoaded(2, blocks=3))
    assert effects == (m.Start(epoch=2, checkpoint=event.checkpoint, cached_blocks=2),)


# The prompt


@pytest.mark.requirement("MG-2")
def test_a_prompt_whose_blocks_are_gone_is_asked_for_again() -> None:
    state, effects = step(after(resume()), m.BlocksLoaded(2, blocks=1), 10)
    assert effects == (m.AskPrompt(2),)
    assert m.next_deadline_ms(state) == 110
    refused, effects = step(state, m.PromptReceived(2, matches=False))
    assert refused == state
    assert refusal(effects) is CONFLICT
    state, effects = step(state, m.PromptReceived(2, matches=True))
    assert effects == (m.Start(epoch=2, checkpoint=checkpoint(), cached_blocks=1),)


@pytest.mark.requirement("MG-2")
def test_a_prompt_of_whole_blocks_without_output_leaves_no_token_to_go_on_from() -> None:
    """Every block is loaded, but the next token is drawn from the last one, which the keys do not tell."""
    state, effects = step(after(resume(tail=0, generated=0)), m.BlocksLoaded(2, blocks=2))
    assert isinstance(state, m.NeedsPrompt)
    assert effects == (m.AskPrompt(2),)


def test_a_prompt_that_came_early_is_not_asked_for() -> None:
    state = after(resume(), m.PromptReceived(2, matches=True))
    _, effects = step(state, m.BlocksLoaded(2, blocks=0))
    assert effects == (m.Start(epoch=2, checkpoint=checkpoint(), cached_blocks=0),)


def test_a_prompt_that_nobody_brings_ends_the_attempt() -> None:
    state = after(resume(), m.BlocksLoaded(2, blocks=0))
    assert step(state, m.TimerFired(), 99) == (state, ())
    state, (given_up,) = step(state, m.TimerFired(), 100)
    assert isinstance(state, m.Ended)
    assert isinstance(given_up, m.GiveUp)


# Epochs


@pytest.mark.parametrize(
    "state", [after(resume()), after(resume(), m.BlocksLoaded(2, 3)), after(resume(), m.SessionEnded(2))]
)
def test_the_same_resume_again_is_accepted_again_and_starts_nothing(state: m.State) -> None:
    assert step(state, resume()) == (state, (m.Accepted(),))
    # also where the instance would take no new session
    assert step(state, resume(refusal=DRAINING)) == (state, (m.Accepted(),))


@pytest.mark.requirement("MG-3")
@pytest.mark.parametrize("event", [resume(epoch=1), resume(generated=4), m.BeginReceived(epoch=1)])
def test_an_older_epoch_or_another_resume_of_the_same_is_stale(event: m.Event) -> None:
    for state in (after(resume()), after(resume(), m.BlocksLoaded(2, 3)), after(resume(), m.SessionEnded(2))):
        unchanged, effects = step(state, event)
        assert unchanged == state
        assert refusal(effects) is STALE_EPOCH


@pytest.mark.requirement("MG-3", "MG-4")
def test_an_engine_that_still_emits_in_the_old_epoch_is_stopped_before_the_new_one_begins() -> None:
    state, effects = step(after(m.BeginReceived(epoch=1)), resume(epoch=2))
    assert effects == (m.AbortEpoch(1), m.Accepted(), m.LoadBlocks(2))
    assert step(state, m.SessionEnded(1)) == (state, ())
    assert step(state, m.BlocksLoaded(1, 3)) == (state, ())
    _, effects = step(state, resume(epoch=3))
    assert effects == (m.AbortEpoch(2), m.Accepted(), m.LoadBlocks(3))


def test_a_session_placed_anew_begins_anew() -> None:
    state, effects = step(after(m.BeginReceived(epoch=1)), m.BeginReceived(epoch=2))
    assert effects == (m.AbortEpoch(1), m.Accepted(), m.Start(epoch=2))
    assert state == m.Serving(epoch=2)


@pytest.mark.requirement("LC-3")
@pytest.mark.parametrize("event", [resume(refusal=DRAINING), m.BeginReceived(epoch=2, refusal=DRAINING)])
def test_what_the_instance_may_not_take_is_refused_and_changes_nothing(event: m.Event) -> None:
    for state in (m.Absent(), m.Serving(epoch=1), m.Ended(epoch=1)):
        unchanged, effects = step(state, event)
        assert unchanged == state
        assert refusal(effects) is INVALID_STATE


# The table

STATES: dict[type, m.State] = {
    m.Absent: m.Absent(),
    m.Loading: after(resume()),
    m.NeedsPrompt: after(resume(), m.BlocksLoaded(2, 0)),
    m.Serving: after(resume(), m.BlocksLoaded(2, 3)),
    m.Ended: after(resume(), m.SessionEnded(2)),
}
EVENTS: dict[type, m.Event] = {
    m.BeginReceived: m.BeginReceived(epoch=2),
    m.ResumeReceived: resume(epoch=2),
    m.BlocksLoaded: m.BlocksLoaded(2, 0),
    m.PrefixLost: m.PrefixLost(epoch=2, checkpoint=checkpoint(), blocks=1),
    m.PromptReceived: m.PromptReceived(2, matches=True),
    m.SessionEnded: m.SessionEnded(2),
    m.TimerFired: m.TimerFired(),
}


@attrs.define
class Subject:
    state: m.State

    def kind(self) -> type:
        return type(self.state)

    def freeze(self) -> Hashable:
        return m.freeze(self.state, 0)

    def handle(self, event: m.Event) -> tuple[m.Effect, ...]:
        self.state, effects = step(self.state, event)
        return effects


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(m.TABLE))
def test_legality(kind: type, event_type: type, cell: Cell) -> None:
    check_cell(cell, subject=Subject(STATES[kind]), event=EVENTS[event_type])


@pytest.mark.parametrize("state", STATES.values(), ids=lambda state: type(state).__name__)
def test_a_frozen_state_comes_back_as_it_was(state: m.State) -> None:
    frozen = m.freeze(state, 30)
    hash(frozen)
    assert m.freeze(m.thaw(frozen, 700), 700) == frozen


@pytest.mark.requirement("SE-5")
def test_nothing_confidential_is_shown() -> None:
    shown = repr((*STATES.values(), *EVENTS.values(), m.Start(epoch=1, checkpoint=checkpoint())))
    for secret in ("6f1d", "cccc", "5555", "0000"):
        assert secret not in shown
