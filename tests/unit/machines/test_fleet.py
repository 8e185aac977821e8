"""The instances of a controller: expiry as failure, epochs as fences, states asked for until reported."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvsp_core.machines.fleet import (
    FLEET,
    AnswerStatus,
    DrainInstance,
    DropEpoch,
    Effect,
    EndStateRequest,
    Event,
    Fleet,
    ForgetInstance,
    InstanceFailed,
    InstanceJoined,
    MemberKind,
    PersistEpoch,
    ReceiveStatus,
    Refused,
    RequestState,
    RestoreInstance,
    StateReported,
    TimerFired,
    WakeInstance,
)
from kvsp_core.machines.table import Cell
from kvsp_core.problems import NOT_FOUND, STALE_EPOCH, UNAVAILABLE
from kvsp_core.records import InstanceStatus
from tests.machine_kit import cells, check_cell

II = "https://ii1.example/kvsp/"
TTL_MS = 3000
MAX_TTL_MS = 10_000
RETRY_MS = 500


def status(epoch: int = 5, seq: int | None = 1, state: str = "active", **members: Any) -> InstanceStatus:
    known = {
        "instance": II,
        "running": 0,
        "queued": 0,
        "batch_size": 8,
        "kv_utilization": 0.5,
        "prefill_tokens_per_s": 1000,
        "decode_tokens_per_s": 100,
        "links": (),
        "ttl_ms": TTL_MS,
    }
    return InstanceStatus(epoch=epoch, seq=seq, state=state, **(known | members))


def fleet(**options: Any) -> Fleet:
    return Fleet(**({"max_ttl_ms": MAX_TTL_MS, "retry_ms": RETRY_MS} | options))


def report(
    machine: Fleet, now_ms: int, *args: Any, accept_sleep: bool = False, **members: Any
) -> tuple[Effect, ...]:
    return machine.handle(ReceiveStatus(status(*args, **members), accept_sleep), now_ms)


class InKind:
    """A fleet whose one instance is in some kind of state, for the legality tests."""

    def __init__(self, kind: MemberKind) -> None:
        self.machine = fleet()
        if kind is MemberKind.RESTORED:
            self.machine.handle(RestoreInstance(II, 5), 0)
        elif kind is not MemberKind.UNKNOWN:
            report(self.machine, 0, state="resting" if kind is MemberKind.OTHER else kind.value)
        assert self.kind() is kind

    def kind(self) -> MemberKind:
        return self.machine.kind_of(II)

    def freeze(self) -> object:
        return self.machine.freeze(0)

    def handle(self, event: Event) -> tuple[Effect, ...]:
        return self.machine.handle(event, 0)


@pytest.mark.parametrize(("kind", "event_type", "cell"), cells(FLEET))
def test_every_event_in_every_state(kind: MemberKind, event_type: type, cell: Cell) -> None:
    examples: dict[type, Event] = {
        ReceiveStatus: ReceiveStatus(status(seq=9)),
        RestoreInstance: RestoreInstance(II, 7),
        DrainInstance: DrainInstance(II),
        WakeInstance: WakeInstance(II),
        EndStateRequest: EndStateRequest(II),
        ForgetInstance: ForgetInstance(II),
        TimerFired: TimerFired(),
    }
    check_cell(cell, subject=InKind(kind), event=examples[event_type])


# Joining, failing, epochs


@pytest.mark.requirement("ST-4")
def test_an_instance_that_has_failed_makes_room_when_it_is_forgotten_and_others_keep_their_epochs() -> None:
    machine = fleet(max_instances=2)
    other = "https://ii2.example/kvsp/"
    report(machine, 0)
    report(machine, 0, instance=other)
    assert machine.handle(ForgetInstance(II), 0) == ()  # it lives
    machine.handle(TimerFired(), TTL_MS + 1)
    (refused,) = report(machine, TTL_MS + 1, instance="https://ii3.example/kvsp/")
    assert isinstance(refused, Refused)
    assert machine.handle(ForgetInstance(II), TTL_MS + 1) == (DropEpoch(II),)
    assert machine.handle(ForgetInstance(II), TTL_MS + 1) == ()
    assert machine.kind_of(II) is MemberKind.UNKNOWN
    report(machine, TTL_MS + 1, instance="https://ii3.example/kvsp/")
    machine.handle(TimerFired(), 3 * TTL_MS)  # no alarm of it is left that would do harm
    assert machine.instances() == (other, "https://ii3.example/kvsp/")
    (refused,) = report(machine, 3 * TTL_MS, epoch=4, instance=other)
    assert isinstance(refused, Refused)
    assert refused.problem.type is STALE_EPOCH


@pytest.mark.requirement("ST-2")
def test_an_instance_whose_record_expires_has_failed() -> None:
    machine = fleet()
    assert report(machine, 0) == (
        PersistEpoch(II, 5),
        InstanceJoined(II, 5),
        StateReported(II, "active"),
        AnswerStatus("active"),
    )
    assert machine.handle(TimerFired(), TTL_MS) == ()
    assert machine.next_deadline_ms() == TTL_MS + 1
    assert machine.handle(TimerFired(), TTL_MS + 1) == (InstanceFailed(II, 5),)
    assert machine.kind_of(II) is MemberKind.FAILED
    assert machine.status_of(II) is None
    assert machine.next_deadline_ms() is None


@pytest.mark.requirement("ST-2")
def test_each_report_gives_it_its_ttl_again_but_never_more_than_the_most() -> None:
    machine = fleet()
    report(machine, 0)
    report(machine, 2000, seq=2)
    assert machine.handle(TimerFired(), 5000) == ()
    report(machine, 5000, seq=3, ttl_ms=10**9)
    assert machine.handle(TimerFired(), 5000 + MAX_TTL_MS) == ()
    assert machine.handle(TimerFired(), 5001 + MAX_TTL_MS) == (InstanceFailed(II, 5),)


@pytest.mark.requirement("ST-4", "MG-3")
def test_a_report_of_an_earlier_incarnation_is_refused() -> None:
    machine = fleet()
    report(machine, 0)
    before = machine.freeze(1)
    (refused,) = report(machine, 1, epoch=4, seq=99)
    assert isinstance(refused, Refused)
    assert refused.problem.type is STALE_EPOCH
    assert machine.freeze(1) == before
    machine.handle(TimerFired(), TTL_MS + 1)
    (refused,) = report(machine, TTL_MS + 2, epoch=4, seq=100)
    assert isinstance(refused, Refused)


def test_a_higher_epoch_within_the_ttl_fails_the_old_incarnation_at_once() -> None:
    machine = fleet()
    report(machine, 0)
    assert report(machine, 10, epoch=6)[:3] == (
        InstanceFailed(II, 5),
        PersistEpoch(II, 6),
        InstanceJoined(II, 6),
    )


def test_an_instance_that_failed_and_reports_again_in_its_epoch_joins_without_its_sessions() -> None:
    machine = fleet()
    report(machine, 0)
    machine.handle(TimerFired(), TTL_MS + 1)
    effects = report(machine, TTL_MS + 100, seq=2)
    assert effects[0] == InstanceJoined(II, 5)
    assert InstanceFailed(II, 5) not in effects


def test_a_late_report_changes_nothing() -> None:
    machine = fleet()
    report(machine, 0, seq=3, state="draining")
    before = machine.freeze(10)
    assert report(machine, 10, seq=2) == (AnswerStatus("draining"),)
    assert report(machine, 10, seq=3) == (AnswerStatus("draining"),)
    assert machine.freeze(10) == before


def test_reports_without_a_number_are_taken_as_they_come() -> None:
    machine = fleet()
    report(machine, 0, seq=None)
    assert StateReported(II, "draining") in report(machine, 10, seq=None, state="draining")


@pytest.mark.requirement("ST-2", "ST-4")
def test_a_restarted_controller_gives_each_instance_one_maximum_ttl_and_keeps_its_epoch() -> None:
    machine = fleet()
    machine.handle(RestoreInstance(II, 5), 0)
    (refused,) = report(machine, 1, epoch=4)
    assert isinstance(refused, Refused)
    assert machine.handle(TimerFired(), MAX_TTL_MS) == ()
    assert machine.handle(TimerFired(), MAX_TTL_MS + 1) == (InstanceFailed(II, 5),)

    machine = fleet()
    machine.handle(RestoreInstance(II, 5), 0)
    effects = report(machine, 1)
    assert effects == (StateReported(II, "active"), AnswerStatus("active"))
    assert machine.warmth(II, 1) == 1


def test_an_instance_that_calls_itself_failed_has_failed() -> None:
    machine = fleet()
    report(machine, 0)
    assert InstanceFailed(II, 5) in report(machine, 1, seq=2, state="failed")
    assert InstanceFailed(II, 5) not in report(machine, 2, seq=3, state="failed")
    assert report(machine, 3, seq=4)[0] == InstanceJoined(II, 5)


def test_more_instances_than_the_limit_are_refused() -> None:
    machine = fleet(max_instances=1)
    report(machine, 0)
    (refused,) = report(machine, 0, instance="https://ii2.example/")
    assert isinstance(refused, Refused)
    assert refused.problem.type is UNAVAILABLE
    assert machine.instances() == (II,)


# Work goes to active instances only


@pytest.mark.requirement("LC-2")
@pytest.mark.parametrize("state", ["draining", "sleeping", "failed", "resting"])
def test_only_an_active_instance_is_given_work(state: str) -> None:
    machine = fleet()
    report(machine, 0)
    assert machine.is_assignable(II)
    assert [s.instance for s in machine.assignable()] == [II]
    report(machine, 1, seq=2, state=state)
    assert not machine.is_assignable(II)
    assert list(machine.assignable()) == []


@pytest.mark.requirement("LC-2")
def test_an_instance_that_is_to_drain_is_given_no_work_before_it_does() -> None:
    machine = fleet()
    report(machine, 0)
    machine.handle(DrainInstance(II), 1)
    assert not machine.is_assignable(II)


def test_a_new_incarnation_starts_slow() -> None:
    machine = fleet(warm_up_ms=1000, warm_up_from=0.2)
    assert machine.warmth(II, 0) == 0
    report(machine, 0)
    assert [round(machine.warmth(II, t), 2) for t in (0, 500, 1000, 5000)] == [0.2, 0.6, 1, 1]
    report(machine, 900, epoch=6)
    assert round(machine.warmth(II, 900), 2) == 0.2


# What is wanted is asked for


@pytest.mark.requirement("LC-1")
def test_a_request_to_sleep_is_accepted_or_refused_by_the_answer() -> None:
    machine = fleet()
    report(machine, 0)
    asked = {"requested_state": "sleeping"}
    assert report(machine, 1, seq=2, **asked)[-1] == AnswerStatus("active")
    assert report(machine, 2, seq=3, accept_sleep=True, **asked)[-1] == AnswerStatus("draining")
    assert not machine.is_assignable(II)
    assert report(machine, 3, seq=4, state="sleeping")[-1] == AnswerStatus("sleeping")
    assert machine.handle(TimerFired(), 2000) == ()


@pytest.mark.requirement("LC-5")
def test_a_drain_is_asked_for_until_it_is_reported() -> None:
    machine = fleet()
    report(machine, 0)
    assert machine.handle(DrainInstance(II), 10) == (RequestState(II, "draining"),)
    assert report(machine, 20, seq=2)[-1] == AnswerStatus("draining")
    machine.handle(EndStateRequest(II), 100)
    assert machine.next_deadline_ms() == 100 + RETRY_MS
    assert machine.handle(TimerFired(), 100 + RETRY_MS) == (RequestState(II, "draining"),)
    machine.handle(EndStateRequest(II), 700)
    report(machine, 800, seq=3, state="draining")
    assert machine.handle(TimerFired(), 3000) == ()


@pytest.mark.requirement("LC-4")
def test_a_sleeper_is_woken_by_put_state_repeated_until_it_reports_active() -> None:
    machine = fleet()
    report(machine, 0, state="sleeping")
    assert machine.handle(WakeInstance(II), 10) == (RequestState(II, "active"),)
    assert report(machine, 20, seq=2, state="sleeping")[-1] == AnswerStatus("sleeping")
    machine.handle(EndStateRequest(II), 30)
    effects = report(machine, 30 + RETRY_MS, seq=3, state="sleeping")
    assert RequestState(II, "active") in effects
    machine.handle(EndStateRequest(II), 600)
    report(machine, 700, seq=4)
    assert machine.is_assignable(II)
    assert machine.handle(TimerFired(), 2000) == ()


def test_a_drain_the_instance_begins_of_itself_is_adopted() -> None:
    machine = fleet()
    report(machine, 0)
    assert report(machine, 10, seq=2, state="draining") == (
        StateReported(II, "draining"),
        AnswerStatus("draining"),
    )
    assert machine.handle(TimerFired(), 2000) == ()


def test_a_drain_that_comes_late_is_not_taken_for_the_instances_own() -> None:
    machine = fleet()
    report(machine, 0)
    machine.handle(DrainInstance(II), 10)
    machine.handle(WakeInstance(II), 11)
    machine.handle(EndStateRequest(II), 12)
    assert RequestState(II, "active") in report(machine, 20, seq=2, state="draining")


def test_an_instance_that_refuses_to_wake_is_left_to_stop() -> None:
    machine = fleet()
    report(machine, 0, state="draining")
    machine.handle(WakeInstance(II), 10)
    machine.handle(EndStateRequest(II, refused=True), 20)
    assert report(machine, 30, seq=2, state="sleeping") == (
        StateReported(II, "sleeping"),
        AnswerStatus("sleeping"),
    )
    assert machine.handle(TimerFired(), 2000) == ()


@pytest.mark.parametrize("event", [DrainInstance(II), WakeInstance(II)], ids=["drain", "wake"])
def test_an_instance_that_does_not_report_cannot_be_moved(event: Event) -> None:
    (refused,) = fleet().handle(event, 0)
    assert isinstance(refused, Refused)
    assert refused.problem.type is NOT_FOUND


def test_a_frozen_fleet_goes_on_elsewhere_at_another_time() -> None:
    machine = fleet()
    report(machine, 0, state="sleeping")
    machine.handle(WakeInstance(II), 10)
    machine.handle(EndStateRequest(II), 30)
    other = fleet()
    other.thaw(machine.freeze(100), 50_000)
    assert other.freeze(50_000) == machine.freeze(100)
    assert other.handle(TimerFired(), 50_430) == (RequestState(II, "active"),)
    hash(attrs.astuple(machine.freeze(100), recurse=False))
