"""The fleet of a controller against a model that looks at every instance each time."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvsp_core.machines import fleet as m
from kvsp_core.machines.fleet import MemberKind as Kind
from kvsp_core.problems import NOT_FOUND, STALE_EPOCH
from kvsp_sim.strategies.lifecycle import INSTANCES, fleet_events
from tests.machine_kit import problems_in

MAX_TTL_MS, RETRY_MS = 300, 50
KINDS = {"active": Kind.ACTIVE, "draining": Kind.DRAINING, "sleeping": Kind.SLEEPING, "failed": Kind.FAILED}
GONE = (Kind.UNKNOWN, Kind.FAILED)


@attrs.define
class Instance:
    kind: Kind = Kind.UNKNOWN
    epoch: int = -1
    seq: int = -1
    expires_ms: int = 0
    asking: bool = False
    asked_ms: int = -10_000


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.machine = m.Fleet(max_ttl_ms=MAX_TTL_MS, retry_ms=RETRY_MS)
        self.known = {name: Instance() for name in INSTANCES}

    @initialize(epoch=st.none() | st.integers(1, 4))
    def restore(self, epoch: int | None) -> None:
        if epoch is not None:
            assert self.machine.handle(m.RestoreInstance(INSTANCES[0], epoch), 0) == ()
            self.known[INSTANCES[0]] = Instance(Kind.RESTORED, epoch, -1, MAX_TTL_MS)

    @rule(event=fleet_events(), wait_ms=st.integers(0, 150))
    def event(self, event: m.Event, wait_ms: int) -> None:
        self.now_ms += wait_ms
        failed = {(name, known.epoch) for name, known in self.known.items() if self.expire(known)}
        before = {name: known.kind for name, known in self.known.items()}
        effects = self.machine.handle(event, self.now_ms)
        failed |= self.apply(event, effects)
        said = [(e.instance, e.epoch) for e in effects if isinstance(e, m.InstanceFailed)]
        assert len(said) == len(set(said))
        assert set(said) == failed
        for effect in effects:
            if isinstance(effect, m.RequestState):
                self.requested(effect, before[effect.instance])
        if isinstance(event, m.EndStateRequest):
            # Last: what is asked again because its time has come is asked before the event happens.
            self.known[event.instance].asking = False

    def expire(self, known: Instance) -> bool:
        """Fail an instance whose record is over; return whether it just has."""
        if known.kind in GONE or self.now_ms <= known.expires_ms:
            return False
        known.kind, known.asking = Kind.FAILED, False
        return True

    def apply(self, event: m.Event, effects: tuple[m.Effect, ...]) -> set[tuple[str, int]]:
        """Let the event happen in the model; return the incarnations it makes fail."""
        problems = [problem.type for problem in problems_in(effects)]
        match event:
            case m.ReceiveStatus(status):
                return self.report(status.instance, event, problems, effects)
            case m.DrainInstance(name) | m.WakeInstance(name):
                assert problems == ([NOT_FOUND] if self.known[name].kind in GONE else [])
        return set()

    def report(
        self, name: str, event: m.ReceiveStatus, problems: list[object], effects: tuple[m.Effect, ...]
    ) -> set[tuple[str, int]]:
        known, status = self.known[name], event.status
        assert problems == ([STALE_EPOCH] if status.epoch < known.epoch else [])
        late = status.epoch == known.epoch and status.seq is not None and status.seq <= known.seq
        if problems or late:
            return set()
        alive = known.kind not in GONE
        newer = status.epoch > known.epoch
        fails = {(name, known.epoch)} if alive and (newer or status.state == "failed") else set()
        joins = (newer or not alive) and status.state != "failed"
        assert (m.PersistEpoch(name, status.epoch) in effects) == newer
        assert (m.InstanceJoined(name, status.epoch) in effects) == joins
        if newer:
            assert effects.index(m.PersistEpoch(name, status.epoch)) < effects.index(effects[-1])
        known.asking = known.asking and not (newer or not alive)
        known.kind = KINDS.get(status.state, Kind.OTHER)
        known.epoch, known.seq = status.epoch, -1 if status.seq is None else status.seq
        known.expires_ms = self.now_ms + min(status.ttl_ms, MAX_TTL_MS)
        answer = effects[-1]
        assert isinstance(answer, m.AnswerStatus)
        assert answer.state == status.state or (status.state, answer.state) == ("active", "draining")
        return fails

    def requested(self, effect: m.RequestState, before: Kind) -> None:
        known = self.known[effect.instance]
        assert not known.asking, "a state is asked for twice at a time"
        # What is asked again because its time has come is asked before the event happens.
        differs_from = (Kind.ACTIVE,) if effect.state == "draining" else (Kind.DRAINING, Kind.SLEEPING)
        assert known.kind in differs_from or before in differs_from
        known.asking, known.asked_ms = True, self.now_ms

    @invariant()
    def agrees(self) -> None:
        for name, known in self.known.items():
            if known.kind in GONE or self.now_ms <= known.expires_ms:
                assert self.machine.kind_of(name) is known.kind
            assert (self.machine.epoch_of(name) or -1) == known.epoch
            if self.machine.is_assignable(name):
                assert known.kind is Kind.ACTIVE

    @invariant()
    def looks_in_time(self) -> None:
        expiries = [k.expires_ms + 1 for k in self.known.values() if k.kind not in GONE]
        due_ms = self.machine.next_deadline_ms()
        assert not expiries or (due_ms is not None and due_ms <= min(expiries))

    @invariant()
    def survives_freezing(self) -> None:
        other = m.Fleet(max_ttl_ms=MAX_TTL_MS, retry_ms=RETRY_MS)
        other.thaw(self.machine.freeze(self.now_ms), self.now_ms + 5000)
        assert other.freeze(self.now_ms + 5000) == self.machine.freeze(self.now_ms)


TestFleet = Model.TestCase
