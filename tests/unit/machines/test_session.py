"""The story of a session at the controller: who may extend it, what is kept of it, and how it moves."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import attrs
import pytest

from kvsp_core.machines import session as m
from kvsp_core.machines.session import SessionKind as K
from kvsp_core.machines.table import Cell
from kvsp_core.problems import CONFLICT, FORBIDDEN, NOT_FOUND, STALE_EPOCH, ProblemType
from kvsp_core.records import Sampler, SessionCheckpoint
from tests.machine_kit import cells, check_cell, problems_in

A, B, C = (m.Owner(f"https://{name}.example/", 1) for name in ("a", "b", "c"))
SESSION = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
COMPAT, SCOPE, KEYS = "c" * 64, "5" * 32, ("1" * 64, "2" * 64)
TIMES = m.SessionTimes(placed_ms=100, idle_ms=1000, wait_ms=200, resume_ms=50, kept_ms=300, attempts=2)
SAMPLER = Sampler(method="top-p", params={"p": 0.9}, seed=7, step=0, deterministic=False)


def ledger() -> m.SessionLedger:
    return m.SessionLedger(
        session=SESSION,
        client="https://fe.example/",
        compat_id=COMPAT,
        scope_id=SCOPE,
        deterministic=False,
        times=TIMES,
    )


def checkpoint(*tokens: int, epoch: int = 1, **changes: Any) -> SessionCheckpoint:
    whole = SessionCheckpoint(
        session=SESSION,
        epoch=epoch,
        compat_id=COMPAT,
        scope_id=SCOPE,
        prompt_blocks=KEYS,
        prompt_tail=(374, 264),
        generated=tokens,
        output_offset=len(tokens),
        sampler=attrs.evolve(SAMPLER, step=len(tokens)),
    )
    return attrs.evolve(whole, **changes)


def write(
    it: m.SessionLedger, *tokens: int, epoch: int = 1, owner: m.Owner = A, now_ms: int = 0, **changes: Any
) -> tuple[m.Effect, ...]:
    return it.handle(
        m.CheckpointReceived(owner.instance, checkpoint(*tokens, epoch=epoch, **changes)), now_ms
    )


def running(*tokens: int) -> m.SessionLedger:
    it = ledger()
    it.handle(m.Open(A), 0)
    write(it, *tokens)
    return it


def resuming(*tokens: int) -> m.SessionLedger:
    it = running(*tokens)
    it.handle(m.OwnerLost(A), 0)
    it.handle(m.TargetChosen(B), 0)
    return it


def refusal(effects: tuple[m.Effect, ...]) -> ProblemType:
    (problem,) = problems_in(effects)
    assert len(effects) == 1
    return problem.type


def kinds(effects: tuple[m.Effect, ...]) -> list[type]:
    return [type(effect) for effect in effects]


# From placement to the first checkpoint


def test_a_session_is_durable_before_anybody_hears_of_it() -> None:
    it = ledger()
    (persist,) = it.handle(m.Open(A), 0)
    assert persist == m.PersistSession(it.record)
    assert (it.record.epoch, it.owner, it.kind) == (1, A, K.PLACED)


@pytest.mark.requirement("CP-2")
def test_a_checkpoint_is_durable_before_it_is_acknowledged() -> None:
    it = ledger()
    it.handle(m.Open(A), 0)
    effects = write(it)
    assert kinds(effects) == [m.PersistPrompt, m.PersistSession, m.Acknowledge]
    assert effects[-1] == m.Acknowledge(1, 0)
    effects = write(it, 1, 2)
    assert kinds(effects) == [m.AppendOutput, m.PersistSession, m.Acknowledge]
    assert effects[0] == m.AppendOutput(0, (1, 2))
    assert effects[-1] == m.Acknowledge(1, 2)


def test_a_session_that_is_placed_and_never_begun_fails() -> None:
    it = ledger()
    it.handle(m.Open(A), 0)
    assert it.next_deadline_ms() == 100
    assert it.handle(m.TimerFired(), 99) == ()
    effects = it.handle(m.TimerFired(), 100)
    assert kinds(effects) == [m.PersistSession, m.Failed]
    assert it.kind is K.FAILED


# What is recorded


@pytest.mark.requirement("CP-2")
def test_the_checkpoint_of_highest_offset_is_kept() -> None:
    it = running(1, 2, 3)
    assert write(it, 1, 2) == (m.Acknowledge(1, 3),)  # late, and no contradiction
    assert write(it, 1, 2, 3) == (m.Acknowledge(1, 3),)
    write(it, 1, 2, 3, 4)
    assert it.checkpoint() == checkpoint(1, 2, 3, 4)


@pytest.mark.requirement("CP-2", "MG-4")
@pytest.mark.parametrize("tokens", [(1, 9), (1, 9, 3), (1, 9, 3, 4), (9,)])
def test_a_checkpoint_that_contradicts_the_record_is_refused(tokens: tuple[int, ...]) -> None:
    it = running(1, 2, 3)
    before = it.freeze(0)
    assert refusal(write(it, *tokens)) is CONFLICT
    assert it.freeze(0) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"compat_id": "d" * 64},
        {"scope_id": "6" * 32},
        {"prompt_blocks": KEYS[:1]},
        {"prompt_tail": ()},
        {"sampler": attrs.evolve(SAMPLER, seed=8)},
        {"sampler": attrs.evolve(SAMPLER, deterministic=True)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_a_session_is_never_changes(changes: dict[str, Any]) -> None:
    it = running(1)
    before = it.freeze(0)
    assert refusal(write(it, 1, 2, **changes)) is CONFLICT
    assert it.freeze(0) == before


@pytest.mark.requirement("CP-2")
def test_what_is_kept_and_written_grows_with_the_output_and_not_with_its_square() -> None:
    it = running()
    written, largest = 0, 0
    for count in range(16, 1601, 16):
        effects = write(it, *range(count))
        appended = [e for e in effects if isinstance(e, m.AppendOutput)]
        written += sum(len(e.tokens) for e in appended)
        largest = max(largest, max(len(repr(e)) for e in effects if isinstance(e, m.PersistSession)))
    assert written == 1600
    assert largest < 2000  # a record does not hold the output
    assert it.record.output_offset == 1600


# Who may write


@pytest.mark.requirement("CP-2", "MG-3", "SE-1")
def test_only_the_owner_in_the_current_epoch_may_write() -> None:
    it = resuming(1, 2)
    assert it.record.epoch == 2
    before = it.freeze(0)
    assert refusal(write(it, 1, 2, 3, epoch=1, owner=A)) is STALE_EPOCH
    assert refusal(write(it, 1, 2, 3, epoch=3, owner=B)) is CONFLICT
    assert refusal(write(it, 1, 2, 3, epoch=2, owner=A)) is FORBIDDEN
    assert it.freeze(0) == before
    assert m.Acknowledge(2, 3) in write(it, 1, 2, 3, epoch=2, owner=B)


@pytest.mark.requirement("MG-3", "CP-2")
def test_the_epoch_rises_when_the_owner_is_lost_not_when_the_next_one_is_found() -> None:
    it = running(1, 2)
    effects = it.handle(m.OwnerLost(A), 10)
    assert kinds(effects) == [m.PersistSession, m.NeedTarget]
    assert it.record.epoch == 2
    assert refusal(write(it, 1, 2, 3, epoch=1)) is STALE_EPOCH
    assert refusal(write(it, 1, 2, 3, epoch=2)) is FORBIDDEN


def test_the_loss_of_another_incarnation_changes_nothing() -> None:
    it = running(1)
    assert it.handle(m.OwnerLost(attrs.evolve(A, incarnation=0)), 0) == ()
    assert it.handle(m.OwnerLost(B), 0) == ()
    assert it.kind is K.RUNNING


# Moving


@pytest.mark.requirement("MG-1")
def test_a_session_of_a_failed_instance_is_resumed_from_its_latest_checkpoint() -> None:
    it = running(1, 2)
    it.handle(m.OwnerLost(A), 0)
    effects = it.handle(m.TargetChosen(B), 0)
    assert kinds(effects) == [m.PersistSession, m.SendResume]
    assert effects[-1] == m.SendResume(B.instance, 2)
    assert it.checkpoint() == checkpoint(1, 2, epoch=2)
    effects = write(it, 1, 2, epoch=2, owner=B)
    assert kinds(effects) == [m.PersistSession, m.Resumed, m.Acknowledge]
    assert (it.kind, it.owner) == (K.RUNNING, B)


@pytest.mark.requirement("MG-1")
def test_an_instance_that_does_not_confirm_in_time_is_replaced_by_the_next() -> None:
    it = resuming(1)
    assert it.next_deadline_ms() == 50
    effects = it.handle(m.TimerFired(), 50)
    assert kinds(effects) == [m.PersistSession, m.NeedTarget]
    assert it.record.epoch == 3
    assert it.record.tried == (A.instance, B.instance)
    assert refusal(write(it, 1, epoch=2, owner=B, now_ms=51)) is STALE_EPOCH
    it.handle(m.TargetChosen(C), 60)
    assert m.Resumed(3) in write(it, 1, epoch=3, owner=C, now_ms=70)
    assert it.record.tried == ()


@pytest.mark.requirement("MG-1")
@pytest.mark.parametrize("event", [m.ResumeFailed(2), m.OwnerLost(B)])
def test_a_resume_that_fails_goes_to_the_next_instance_at_once(event: m.Event) -> None:
    it = resuming(1)
    assert m.NeedTarget(3) in it.handle(event, 1)
    assert it.handle(m.ResumeFailed(2), 2) == ()  # late


@pytest.mark.requirement("MG-1")
def test_a_session_that_nobody_resumes_fails_after_a_bounded_number_of_attempts() -> None:
    it = resuming(1)
    it.handle(m.ResumeFailed(2), 0)
    it.handle(m.TargetChosen(C), 0)
    effects = it.handle(m.ResumeFailed(3), 0)
    assert kinds(effects) == [m.PersistSession, m.Failed]
    assert "2 attempts" in it.record.reason
    assert refusal(write(it, 1, epoch=3, owner=C)) is NOT_FOUND


def test_a_session_waits_a_bounded_time_for_an_instance() -> None:
    it = running(1)
    it.handle(m.OwnerLost(A), 0)
    assert it.next_deadline_ms() == 200
    assert it.handle(m.TimerFired(), 199) == ()
    assert kinds(it.handle(m.TimerFired(), 200)) == [m.PersistSession, m.Failed]


def test_a_session_lost_before_its_first_checkpoint_is_placed_anew() -> None:
    it = ledger()
    it.handle(m.Open(A), 0)
    assert m.NeedTarget(2) in it.handle(m.OwnerLost(A), 5)
    assert it.checkpoint() is None
    assert kinds(it.handle(m.TargetChosen(B), 9)) == [m.PersistSession]
    assert (it.kind, it.owner, it.record.epoch) == (K.PLACED, B, 2)
    assert refusal(write(it, epoch=1, owner=A)) is STALE_EPOCH
    assert m.Acknowledge(2, 0) in write(it, epoch=2, owner=B)
    assert it.kind is K.RUNNING


@pytest.mark.requirement("CP-6")
def test_a_session_knows_whether_it_goes_on_only_where_the_same_tokens_would_come() -> None:
    it = ledger()
    it.handle(m.Open(A), 0)
    assert not it.record.deterministic
    write(it, sampler=attrs.evolve(SAMPLER, deterministic=True))
    assert it.record.deterministic


# Ends


def test_a_session_that_sends_nothing_for_too_long_fails() -> None:
    it = running(1)
    write(it, 1, now_ms=500)
    assert it.handle(m.TimerFired(), 1000) == ()
    assert kinds(it.handle(m.TimerFired(), 1500)) == [m.PersistSession, m.Failed]


def test_a_closed_session_is_kept_for_a_while_and_then_forgotten() -> None:
    it = running(1)
    assert kinds(it.handle(m.Close(), 0)) == [m.PersistSession]
    assert it.is_over
    assert refusal(write(it, 1, 2)) is NOT_FOUND
    assert it.handle(m.Close(), 10) == ()
    assert it.handle(m.TimerFired(), 299) == ()
    assert it.handle(m.TimerFired(), 300) == (m.Forget(),)
    assert it.next_deadline_ms() is None


# Restarts


@pytest.mark.requirement("CP-2", "MG-1")
def test_a_restarted_controller_has_what_it_acknowledged_and_calls_again() -> None:
    it = resuming(1, 2, 3)
    back, effects = m.SessionLedger.restore(it.record, m.Prompt(KEYS, (374, 264)), (1, 2, 3), 0, times=TIMES)
    assert effects == (m.SendResume(B.instance, 2),)
    assert back.freeze(0) == it.freeze(0)
    assert m.Resumed(2) in write(back, 1, 2, 3, epoch=2, owner=B)


def test_restoring_a_session_that_waits_for_an_instance_asks_for_one() -> None:
    it = running(1)
    it.handle(m.OwnerLost(A), 0)
    _, effects = m.SessionLedger.restore(it.record, m.Prompt(KEYS, ()), (1,), 0)
    assert effects == (m.NeedTarget(2),)


def test_an_empty_session_is_restored_as_it_was() -> None:
    for it in (running(), ledger()):
        if it.kind is K.NEW:
            it.handle(m.Open(A), 0)
        frozen = it.freeze(0)
        back, effects = m.SessionLedger.restore(frozen.record, frozen.prompt, (), 0, times=TIMES)
        assert effects == ()
        assert back.freeze(0) == frozen


@pytest.mark.parametrize("tokens", [(1, 2), (1, 2, 4), ()])
def test_a_log_that_is_not_what_was_acknowledged_fails_the_session(tokens: tuple[int, ...]) -> None:
    it = running(1, 2, 3)
    back, effects = m.SessionLedger.restore(it.record, m.Prompt(KEYS, (374, 264)), tokens, 0)
    assert kinds(effects) == [m.PersistSession, m.Failed]
    assert back.kind is K.FAILED


def test_what_a_log_holds_beyond_what_was_acknowledged_does_not_count() -> None:
    it = running(1, 2)
    back, _ = m.SessionLedger.restore(it.record, m.Prompt(KEYS, (374, 264)), (1, 2, 3), 0, times=TIMES)
    assert back.freeze(0) == it.freeze(0)


# The table


class Subject:
    def __init__(self, kind: K) -> None:
        self.it = ledger() if kind is K.NEW else running() if kind is not K.RESUMING else resuming()
        if kind is K.PLACED:
            self.it = ledger()
            self.it.handle(m.Open(A), 0)
        if kind is K.ORPHANED:
            self.it.handle(m.OwnerLost(A), 0)
        if kind is K.CLOSED:
            self.it.handle(m.Close(), 0)
        if kind is K.FAILED:
            self.it.handle(m.TimerFired(), 10_000)
        assert self.it.kind is kind

    def kind(self) -> K:
        return self.it.kind

    def freeze(self) -> Hashable:
        return self.it.freeze(0)

    def handle(self, event: m.Event) -> tuple[m.Effect, ...]:
        return self.it.handle(event, 0)


EVENTS: dict[type, m.Event] = {
    m.Open: m.Open(A),
    m.CheckpointReceived: m.CheckpointReceived(A.instance, checkpoint(1)),
    m.OwnerLost: m.OwnerLost(A),
    m.TargetChosen: m.TargetChosen(B),
    m.ResumeFailed: m.ResumeFailed(2),
    m.Close: m.Close(),
    m.TimerFired: m.TimerFired(),
}


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(m.TABLE))
def test_legality(kind: K, event_type: type, cell: Cell) -> None:
    check_cell(cell, subject=Subject(kind), event=EVENTS[event_type])


@pytest.mark.parametrize("kind", list(K))
def test_a_frozen_session_comes_back_as_it_was(kind: K) -> None:
    frozen = Subject(kind).it.freeze(0)
    assert m.SessionLedger.thaw(frozen, 700).freeze(700) == frozen


@pytest.mark.requirement("SE-5")
def test_nothing_confidential_is_shown() -> None:
    it = resuming(4711, 4712)
    effects = write(it, 4711, 4712, 4713, epoch=2, owner=B)
    shown = repr((effects, it.freeze(0), m.CheckpointReceived(A.instance, checkpoint(4711))))
    for secret in ("4711", "4713", SESSION, COMPAT, SCOPE, KEYS[0], "374"):
        assert secret not in shown
