"""An instance's lifecycle against a model of a few rules: what it is, what it may do, when it reports."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines import lifecycle as m
from kvsp_core.machines.lifecycle import InstanceKind as Kind
from kvsp_sim.strategies.lifecycle import lifecycle_events

TTL_MS, SLEEP_AFTER_MS = 300, 250
INTERVAL_MS = TTL_MS // 3
AFTER_DRAIN = {Kind.DRAINING: Kind.SLEEPING, Kind.STOPPING: Kind.STOPPED}
ASKED = {
    (Kind.ACTIVE, "draining"): Kind.DRAINING,
    (Kind.DRAINING, "active"): Kind.ACTIVE,
    (Kind.SLEEPING, "active"): Kind.ACTIVE,
}


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.kind = Kind.ACTIVE
        self.sessions = 0
        self.seq = 0
        self.in_flight = False
        self.reported: str | None = None
        self.last_sent_ms = 0
        self.failing = False
        self.machine = m.InstanceLifecycle(
            random_bytes=random.Random(5).randbytes,
            now_ms=0,
            ttl_ms=TTL_MS,
            sleep_after_ms=SLEEP_AFTER_MS,
        )

    def expect(self, event: m.Event) -> tuple[Kind, bool]:
        """Return the kind after an event, and whether it is refused."""
        kind, current = self.kind, isinstance(event, m.RefuseStatus | m.ReceiveStatusAnswer)
        matches = current and self.in_flight and event.seq == self.seq  # type: ignore[union-attr]
        match event:
            case m.OpenSession():
                return kind, kind is not Kind.ACTIVE
            case m.ChangeState(state):
                if kind is Kind.FENCED:
                    return kind, True
                if state == kind.reported:
                    return kind, False
                if (kind, state) == (Kind.ACTIVE, "sleeping"):
                    return (kind, True) if self.sessions else (Kind.SLEEPING, False)
                return ASKED.get((kind, state), kind), (kind, state) not in ASKED
            case m.ReceiveStatusAnswer(state=state):
                return (
                    Kind.DRAINING if matches and (kind, state) == (Kind.ACTIVE, "draining") else kind
                ), False
            case m.RefuseStatus():
                return (Kind.FENCED if matches else kind), False
            case m.Stop():
                stays = kind in (Kind.STOPPED, Kind.FENCED)
                return (kind if stays else Kind.STOPPING), False
        return kind, False

    @rule(data=st.data(), wait_ms=st.integers(0, 120))
    def event(self, data: st.DataObject, wait_ms: int) -> None:
        self.wait(wait_ms)
        seqs = st.sampled_from(sorted({0, self.seq - 1, self.seq, self.seq}))
        self.send(data.draw(lifecycle_events(seqs)))

    @rule(state=st.sampled_from(["active", "draining", "sleeping"]))
    def answer(self, state: str) -> None:
        self.send(m.ReceiveStatusAnswer(self.seq, state))

    def wait(self, wait_ms: int) -> None:
        """Let time pass, firing the timer when it is due."""
        end_ms = self.now_ms + wait_ms
        while (due_ms := self.machine.next_deadline_ms()) is not None and due_ms <= end_ms:
            self.now_ms = max(self.now_ms, due_ms)
            before = self.machine.freeze(self.now_ms)
            self.send(m.TimerFired())
            assert self.machine.freeze(self.now_ms) != before, "a timer that was due did nothing"
        self.now_ms = end_ms

    def send(self, event: m.Event) -> None:
        if isinstance(event, m.CloseSession) and not self.sessions:
            try:
                self.machine.handle(event, self.now_ms)
            except LocalProtocolError:
                return
            raise AssertionError("a session that never began was closed")
        kind, refused = self.expect(event)
        effects = self.machine.handle(event, self.now_ms)
        assert refused == any(isinstance(effect, m.Refused) for effect in effects)
        if not refused:
            self.sessions += isinstance(event, m.OpenSession)
            self.sessions -= isinstance(event, m.CloseSession)
        ends = isinstance(event, m.FailStatus | m.RefuseStatus | m.ReceiveStatusAnswer)
        if ends and event.seq == self.seq and self.in_flight:  # type: ignore[union-attr]
            self.in_flight = False
            self.failing = isinstance(event, m.FailStatus)
        if not self.sessions:
            kind = AFTER_DRAIN.get(kind, kind)
        changed, self.kind = kind is not self.kind, kind
        assert changed == any(isinstance(effect, m.StateEntered) for effect in effects)
        for effect in effects:
            if isinstance(effect, m.SendStatus):
                self.sent(effect)

    def sent(self, status: m.SendStatus) -> None:
        assert not self.in_flight, "two statuses are in flight"
        assert status.seq == self.seq + 1
        assert status.state == self.kind.reported
        assert status.requested_state is None or self.kind is Kind.ACTIVE
        self.in_flight, self.seq, self.reported = True, status.seq, status.state
        self.last_sent_ms = self.now_ms

    @invariant()
    def agrees(self) -> None:
        assert self.machine.kind is self.kind
        assert self.machine.sessions == self.sessions
        if self.kind in (Kind.SLEEPING, Kind.STOPPED):
            assert not self.sessions

    @invariant()
    def reports_in_time(self) -> None:
        due_ms = self.machine.next_deadline_ms()
        if self.kind is Kind.FENCED or self.in_flight:
            assert due_ms is None
            return
        assert due_ms is not None
        if not self.failing:
            assert due_ms <= self.last_sent_ms + INTERVAL_MS
        if self.reported is not None and self.reported != self.kind.reported and not self.failing:
            assert due_ms <= self.now_ms, "a change of state waits"

    @invariant()
    def survives_freezing(self) -> None:
        other = m.InstanceLifecycle(
            random_bytes=random.Random(5).randbytes, now_ms=0, ttl_ms=TTL_MS, sleep_after_ms=SLEEP_AFTER_MS
        )
        other.thaw(self.machine.freeze(self.now_ms), self.now_ms + 1000)
        assert other.freeze(self.now_ms + 1000) == self.machine.freeze(self.now_ms)


TestLifecycle = Model.TestCase
