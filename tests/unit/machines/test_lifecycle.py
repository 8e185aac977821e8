"""The lifecycle of an instance: when it reports, what it admits, how it drains, sleeps, wakes and stops."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from kvsp_core.errors import LocalProtocolError
from kvsp_core.limits import ENGINE_FAILING_MS, MAX_ENGINE_FAILURES
from kvsp_core.machines.lifecycle import (
    LIFECYCLE,
    AnswerState,
    ChangeState,
    CloseSession,
    Effect,
    Event,
    FailStatus,
    Fenced,
    InstanceKind,
    InstanceLifecycle,
    OpenSession,
    ReceiveStatusAnswer,
    Refused,
    RefuseStatus,
    ReportEngine,
    ReportLoad,
    SafeToStop,
    SendStatus,
    StateEntered,
    Stop,
    TimerFired,
)
from kvsp_core.machines.table import Cell
from kvsp_core.problems import INVALID_STATE
from tests.machine_kit import cells, check_cell

TTL_MS = 3000
INTERVAL_MS = TTL_MS // 3


def source(seed: int = 1) -> Callable[[int], bytes]:
    return random.Random(seed).randbytes


def instance(seed: int = 1, **options: object) -> InstanceLifecycle:
    return InstanceLifecycle(random_bytes=source(seed), now_ms=0, ttl_ms=TTL_MS, **options)  # type: ignore[arg-type]


def sent(effects: tuple[Effect, ...]) -> SendStatus:
    (status,) = [effect for effect in effects if isinstance(effect, SendStatus)]
    return status


def answer(machine: InstanceLifecycle, state: str, now_ms: int) -> tuple[Effect, ...]:
    """Answer the status that is in flight."""
    return machine.handle(ReceiveStatusAnswer(machine.freeze(now_ms).seq, state), now_ms)


def started(**options: object) -> InstanceLifecycle:
    """Return an instance whose first status has been answered."""
    machine = instance(**options)  # type: ignore[arg-type]
    machine.handle(TimerFired(), 0)
    answer(machine, "active", 1)
    return machine


class InKind:
    """A lifecycle in some kind of state, for the legality tests."""

    def __init__(self, kind: InstanceKind) -> None:
        self.machine = machine = started()
        steps: dict[InstanceKind, list[Event]] = {
            InstanceKind.ACTIVE: [OpenSession()],
            InstanceKind.DRAINING: [OpenSession(), ChangeState("draining")],
            InstanceKind.SLEEPING: [ChangeState("sleeping")],
            InstanceKind.STOPPING: [OpenSession(), Stop()],
            InstanceKind.STOPPED: [Stop()],
            InstanceKind.FENCED: [OpenSession(), ChangeState("draining"), RefuseStatus(2)],
        }
        for step in steps[kind]:
            machine.handle(step, 10)
        assert machine.kind is kind

    def kind(self) -> InstanceKind:
        return self.machine.kind

    def freeze(self) -> object:
        return self.machine.freeze(10)

    def handle(self, event: Event) -> tuple[Effect, ...]:
        return self.machine.handle(event, 10)


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(LIFECYCLE))
@pytest.mark.requirement("LC-3", "LC-4")
def test_every_event_in_every_state(kind: InstanceKind, event_type: type, cell: Cell) -> None:
    subject = InKind(kind)
    examples: dict[type, Event] = {
        ChangeState: ChangeState("active"),
        ReportLoad: ReportLoad(0.5),
        ReportEngine: ReportEngine(drawn=False),
        ReceiveStatusAnswer: ReceiveStatusAnswer(subject.machine.freeze(10).seq, "active"),
        FailStatus: FailStatus(subject.machine.freeze(10).seq),
        RefuseStatus: RefuseStatus(2),
    }
    if kind is InstanceKind.ACTIVE and event_type is RefuseStatus:
        subject.machine.handle(TimerFired(), 5000)
    check_cell(cell, subject=subject, event=examples.get(event_type) or event_type())


# Status


@pytest.mark.requirement("ST-1")
def test_a_status_is_sent_at_least_every_third_of_its_ttl_and_numbered() -> None:
    machine = instance()
    times, now_ms = [], 0
    for number in range(1, 200):
        status = sent(machine.handle(TimerFired(), now_ms))
        assert (status.seq, status.state, status.requested_state) == (number, "active", None)
        times.append(now_ms)
        answer(machine, "active", now_ms + 3)
        now_ms = machine.next_deadline_ms() or 0
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) <= INTERVAL_MS
    assert min(gaps) >= INTERVAL_MS * 0.8
    assert len(set(gaps)) > 50


@pytest.mark.requirement("ST-1")
def test_an_idle_instance_reports_for_twice_its_ttl_and_longer() -> None:
    machine, now_ms, last_ms = started(), 1, 0
    while now_ms < 20 * TTL_MS:
        now_ms = machine.next_deadline_ms() or 0
        assert now_ms - last_ms <= INTERVAL_MS
        last_ms = now_ms
        sent(machine.handle(TimerFired(), now_ms))
        answer(machine, "active", now_ms)


def test_one_status_is_in_flight_at_a_time() -> None:
    machine = instance()
    assert sent(machine.handle(TimerFired(), 0)).timeout_ms <= INTERVAL_MS
    assert machine.next_deadline_ms() is None
    assert machine.handle(TimerFired(), 10 * TTL_MS) == ()
    assert machine.handle(OpenSession(), 10 * TTL_MS) == ()
    assert sent(answer(machine, "active", 10 * TTL_MS)).seq == 2


def test_a_change_of_state_is_reported_at_once_or_when_the_status_in_flight_is_answered() -> None:
    machine = started()
    effects = machine.handle(ChangeState("draining"), 10)
    assert effects[:2] == (AnswerState("sleeping"), StateEntered("sleeping"))
    assert sent(effects).state == "sleeping"
    assert machine.handle(ChangeState("active"), 11) == (AnswerState("active"), StateEntered("active"))
    assert sent(answer(machine, "sleeping", 12)).state == "active"


def test_an_answer_to_an_earlier_status_says_nothing() -> None:
    machine = instance()
    machine.handle(TimerFired(), 0)
    machine.handle(FailStatus(1), 100)
    machine.handle(TimerFired(), machine.next_deadline_ms() or 0)
    before = machine.freeze(500)
    for late in (ReceiveStatusAnswer(1, "draining"), FailStatus(1), RefuseStatus(1)):
        assert machine.handle(late, 500) == ()
        assert machine.freeze(500) == before


def test_a_thousand_instances_that_lost_their_controller_do_not_come_back_in_step() -> None:
    fleet = [instance(seed) for seed in range(1000)]
    for machine in fleet:
        machine.handle(TimerFired(), 0)
        for failure in range(1, 6):
            machine.handle(FailStatus(failure), failure * 1000)
            machine.handle(TimerFired(), machine.next_deadline_ms() or 0)
        machine.handle(FailStatus(6), 10_000)
    again = [machine.next_deadline_ms() or 0 for machine in fleet]
    assert max(again) <= 10_000 + INTERVAL_MS
    per_50_ms = [sum(1 for t in again if low <= t < low + 50) for low in range(10_000, 11_000, 50)]
    assert max(per_50_ms) < 160


def test_the_first_retry_is_quick_and_later_ones_slower() -> None:
    waits = []
    machine = instance(retry_ms=100)
    now_ms = 0
    for failure in range(1, 7):
        machine.handle(TimerFired(), now_ms)
        machine.handle(FailStatus(failure), now_ms + 500)
        waits.append((machine.next_deadline_ms() or 0) - now_ms - 500)
        now_ms = machine.next_deadline_ms() or 0
    longest = [100, 200, 400, 500, 500, 500]
    assert all(0 < wait <= most for wait, most in zip(waits, longest, strict=True))


@pytest.mark.requirement("ST-1")
def test_statuses_that_get_no_answer_are_never_further_apart_than_a_third_of_the_ttl() -> None:
    for seed in range(20):
        machine = instance(seed)
        now_ms, sent_ms = 0, 0
        for _ in range(12):
            status = sent(machine.handle(TimerFired(), now_ms))
            assert now_ms - sent_ms <= INTERVAL_MS
            sent_ms = now_ms
            machine.handle(FailStatus(status.seq), now_ms + status.timeout_ms)
            now_ms = machine.next_deadline_ms() or 0


@pytest.mark.requirement("ST-4")
def test_an_instance_that_a_later_incarnation_replaced_is_fenced_for_good() -> None:
    machine = instance()
    machine.handle(OpenSession(), 0)
    machine.handle(TimerFired(), 0)
    assert machine.handle(RefuseStatus(1), 5) == (StateEntered("failed"), Fenced())
    assert machine.next_deadline_ms() is None
    (refused,) = machine.handle(OpenSession(), 6)
    assert isinstance(refused, Refused)
    assert machine.handle(Stop(), 7) == (SafeToStop(),)


# Draining, sleeping, waking, stopping


@pytest.mark.requirement("LC-3")
def test_a_drain_completes_its_sessions_refuses_new_ones_and_ends_in_sleep() -> None:
    machine = started()
    machine.handle(OpenSession(), 10)
    machine.handle(OpenSession(), 10)
    assert machine.handle(ChangeState("draining"), 20)[0] == AnswerState("draining")
    (refused,) = machine.handle(OpenSession(), 21)
    assert isinstance(refused, Refused)
    assert refused.problem.type is INVALID_STATE
    machine.handle(CloseSession(), 30)
    assert machine.kind is InstanceKind.DRAINING
    machine.handle(CloseSession(), 40)
    assert machine.kind is InstanceKind.SLEEPING
    assert sent(answer(machine, "draining", 41)).state == "sleeping"


@pytest.mark.requirement("LC-4")
def test_a_sleeper_wakes_on_put_state_only() -> None:
    machine = started()
    machine.handle(ChangeState("sleeping"), 10)
    answer(machine, "active", 11)
    machine.handle(ReportLoad(0.9), 12)
    assert machine.kind is InstanceKind.SLEEPING
    assert machine.handle(ChangeState("active"), 13)[0] == AnswerState("active")
    assert machine.kind is InstanceKind.ACTIVE


@pytest.mark.requirement("LC-4")
def test_a_status_answer_starts_a_drain_and_does_nothing_else() -> None:
    machine = instance()
    machine.handle(OpenSession(), 0)
    machine.handle(TimerFired(), 0)
    answer(machine, "sleeping", 1)
    assert machine.kind is InstanceKind.ACTIVE
    machine.handle(TimerFired(), 2000)
    answer(machine, "draining", 2001)
    assert machine.kind is InstanceKind.DRAINING
    answer(machine, "active", 2002)
    assert machine.kind is InstanceKind.DRAINING


@pytest.mark.requirement("LC-5")
@pytest.mark.parametrize("state", ["sleeping", "failed", "", "resting", "stopping", "ACTIVE"])
def test_a_state_that_is_not_allowed_is_refused(state: str) -> None:
    machine = started()
    machine.handle(OpenSession(), 5)
    before = machine.freeze(10)
    (refused,) = machine.handle(ChangeState(state), 10)
    assert isinstance(refused, Refused)
    assert refused.problem.type is INVALID_STATE
    assert machine.freeze(10) == before


def test_the_state_it_is_in_is_never_refused() -> None:
    for kind in InstanceKind:
        if kind is not InstanceKind.FENCED:
            subject = InKind(kind)
            assert subject.handle(ChangeState(kind.reported))[0] == AnswerState(kind.reported)
            assert subject.kind() is kind


def test_a_stop_drains_and_says_when_it_is_safe() -> None:
    machine = started()
    machine.handle(OpenSession(), 10)
    effects = machine.handle(Stop(), 20)
    assert effects[0] == StateEntered("draining")
    assert sent(effects).state == "draining"
    (refused,) = machine.handle(ChangeState("active"), 21)
    assert isinstance(refused, Refused)
    assert SafeToStop() in machine.handle(CloseSession(), 30)
    assert machine.handle(Stop(), 31) == (SafeToStop(),)


def test_a_session_is_closed_once() -> None:
    machine = started()
    with pytest.raises(LocalProtocolError, match="close each once"):
        machine.handle(CloseSession(), 5)


# Asking to sleep


@pytest.mark.requirement("LC-1")
def test_low_load_for_a_time_asks_to_sleep_and_a_refusal_waits_for_the_time_again() -> None:
    machine = started(sleep_after_ms=5000)
    machine.handle(ReportLoad(0.01), 100)
    now_ms = 100
    while True:
        now_ms = machine.next_deadline_ms() or 0
        status = sent(machine.handle(TimerFired(), now_ms))
        if status.requested_state is not None:
            break
        answer(machine, "active", now_ms)
    assert now_ms == 5100
    assert status.requested_state == "sleeping"
    answer(machine, "active", 5101)
    assert machine.kind is InstanceKind.ACTIVE
    assert sent(machine.handle(TimerFired(), 6200)).requested_state is None
    answer(machine, "active", 6201)
    assert sent(machine.handle(TimerFired(), 10_101)).requested_state == "sleeping"
    answer(machine, "draining", 10_102)
    assert machine.kind is InstanceKind.SLEEPING


@pytest.mark.requirement("LC-1")
def test_load_in_between_starts_the_time_anew() -> None:
    machine = started(sleep_after_ms=500)
    machine.handle(ReportLoad(0.01), 100)
    machine.handle(ReportLoad(0.5), 400)
    machine.handle(ReportLoad(0.01), 450)
    assert machine.handle(TimerFired(), 600) == ()
    assert machine.next_deadline_ms() == 950
    assert sent(machine.handle(TimerFired(), 950)).requested_state == "sleeping"


def test_without_the_setting_it_never_asks() -> None:
    machine = started()
    machine.handle(ReportLoad(0), 100)
    assert sent(machine.handle(TimerFired(), 10**9)).requested_state is None


# The engine


def test_an_engine_that_fails_again_and_again_is_reported_at_once_and_for_a_while() -> None:
    machine = started()
    now_ms = 100
    for _ in range(MAX_ENGINE_FAILURES - 1):
        assert machine.handle(ReportEngine(drawn=False), now_ms) == ()
    assert sent(machine.handle(ReportEngine(drawn=False), now_ms)).failing
    answer(machine, "active", now_ms)
    while now_ms < 100 + ENGINE_FAILING_MS:
        now_ms = machine.next_deadline_ms() or 0
        assert sent(machine.handle(TimerFired(), now_ms)).failing == (now_ms < 100 + ENGINE_FAILING_MS)
        answer(machine, "active", now_ms)
    # It is tried again: one more failure will do, and a token is the end of it.
    assert sent(machine.handle(ReportEngine(drawn=False), now_ms)).failing
    answer(machine, "active", now_ms)
    assert not sent(machine.handle(ReportEngine(drawn=True), now_ms)).failing
    answer(machine, "active", now_ms)
    assert machine.engine_failures == 0
    assert machine.handle(ReportEngine(drawn=False), now_ms) == ()


def test_failures_with_tokens_in_between_are_those_of_requests() -> None:
    machine = started()
    for _ in range(2 * MAX_ENGINE_FAILURES):
        assert machine.handle(ReportEngine(drawn=False), 100) == ()
        assert machine.handle(ReportEngine(drawn=True), 100) == ()


def test_a_frozen_lifecycle_goes_on_elsewhere_at_another_time() -> None:
    machine = started(sleep_after_ms=500)
    machine.handle(ReportLoad(0), 300)
    for _ in range(MAX_ENGINE_FAILURES):
        machine.handle(ReportEngine(drawn=False), 350)
    answer(machine, "active", 360)
    other = instance(sleep_after_ms=500)
    other.thaw(machine.freeze(400), 70_000)
    assert other.freeze(70_000) == machine.freeze(400)
    assert (other.next_deadline_ms() or 0) - 70_000 == (machine.next_deadline_ms() or 0) - 400


def test_a_ttl_must_leave_room_for_three_reports() -> None:
    with pytest.raises(LocalProtocolError, match="at least 3"):
        InstanceLifecycle(random_bytes=source(), now_ms=0, ttl_ms=2)
