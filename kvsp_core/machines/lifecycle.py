"""The lifecycle of an inference instance, as the instance itself keeps it.

An instance is active, draining or sleeping, and reports so to the placement controller (PC) often enough
that the PC never takes it for failed (protocol section "Instance Status and Lifecycle", requirements ST-1,
ST-3, LC-1, LC-3, LC-4, decisions W14 and W15). `InstanceLifecycle` decides when a status is sent, what
state it states, which sessions may begin, when the instance asks to sleep, and when a process that was told
to stop may end.

The PC's side is `kvsp_core.machines.fleet`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.errors import LocalProtocolError
from kvsp_core.limits import ENGINE_FAILING_MS, MAX_ENGINE_FAILURES, STATUS_RETRY_MS
from kvsp_core.machines.alarms import TimerFired
from kvsp_core.machines.table import Table, refuse, stays, to
from kvsp_core.problems import INVALID_STATE, Problem

__all__ = [
    "LIFECYCLE",
    "AnswerState",
    "ChangeState",
    "CloseSession",
    "Effect",
    "Event",
    "FailStatus",
    "Fenced",
    "FrozenLifecycle",
    "InstanceKind",
    "InstanceLifecycle",
    "OpenSession",
    "ReceiveStatusAnswer",
    "RefuseStatus",
    "Refused",
    "ReportEngine",
    "ReportLoad",
    "SafeToStop",
    "SendStatus",
    "StateEntered",
    "Stop",
    "TimerFired",
]


class InstanceKind(Enum):
    """What an instance is."""

    ACTIVE = "active"
    DRAINING = "draining"
    """Completes its sessions and takes no new ones; then it sleeps."""
    SLEEPING = "sleeping"
    STOPPING = "stopping"
    """Drains because its process is to end; nothing wakes it."""
    STOPPED = "stopped"
    """Its process may end."""
    FENCED = "fenced"
    """The PC knows a later incarnation of this instance: this one must not act any more (ST-4)."""

    @property
    def reported(self) -> str:
        """The name of the state in a status record."""
        return _REPORTED.get(self, self.value)


_REPORTED: Final = MappingProxyType(
    {
        InstanceKind.STOPPING: "draining",
        InstanceKind.STOPPED: "sleeping",
        InstanceKind.FENCED: "failed",
    }
)


# Events


@attrs.frozen
class OpenSession:
    """A session is to begin here, or a shard to be held: what keeps the instance from sleeping."""


@attrs.frozen
class CloseSession:
    """A session has ended here, or a shard was released."""


@attrs.frozen
class ChangeState:
    """The PC asks for a state (PUT state), by its registered name."""

    state: str


@attrs.frozen
class ReportLoad:
    """The share of the instance's capacity that is in use, 0 to 1."""

    load: float = attrs.field(validator=[attrs.validators.ge(0), attrs.validators.le(1)])


@attrs.frozen
class ReportEngine:
    """The engine has ended a sequence with an error, or has `drawn` a token."""

    drawn: bool


@attrs.frozen
class ReceiveStatusAnswer:
    """The PC answered a status: the state it wants the instance to be in."""

    seq: int
    state: str


@attrs.frozen
class FailStatus:
    """A status got no answer in time, or an error that may pass."""

    seq: int


@attrs.frozen
class RefuseStatus:
    """The PC refused a status as one of a former epoch."""

    seq: int


@attrs.frozen
class Stop:
    """The process is asked to end."""


Event: TypeAlias = (
    OpenSession
    | CloseSession
    | ChangeState
    | ReportLoad
    | ReportEngine
    | ReceiveStatusAnswer
    | FailStatus
    | RefuseStatus
    | Stop
    | TimerFired
)


# Effects


@attrs.frozen(kw_only=True)
class SendStatus:
    """Send a status record with these members; say within `timeout_ms` how that ended."""

    seq: int
    state: str
    requested_state: str | None
    failing: bool
    """Whether the engine has failed so often in a row that other instances are to be given work first."""
    timeout_ms: int


@attrs.frozen
class AnswerState:
    """Answer the PC's request for a state: the one the instance is in now."""

    state: str


@attrs.frozen
class Refused:
    """Answer the session or the state that was asked for with this problem; nothing has changed."""

    problem: Problem


@attrs.frozen
class StateEntered:
    """The instance is in another state now."""

    state: str


@attrs.frozen
class SafeToStop:
    """The instance was told to stop and has no session left: its process may end."""


@attrs.frozen
class Fenced:
    """A later incarnation exists. End every session without a word, and restart with a higher epoch."""


Effect: TypeAlias = SendStatus | AnswerState | Refused | StateEntered | SafeToStop | Fenced


# What is legal

_K = InstanceKind
_ANY_TIME: Final = (FailStatus, ReportLoad, ReportEngine, TimerFired)

LIFECYCLE: Final = Table(
    "lifecycle",
    states=tuple(InstanceKind),
    events=get_args(Event),
    cells={
        _K.ACTIVE: {
            ChangeState: to(_K.ACTIVE, _K.DRAINING, _K.SLEEPING),
            ReceiveStatusAnswer: to(_K.ACTIVE, _K.DRAINING, _K.SLEEPING),
            RefuseStatus: to(_K.FENCED),
            Stop: to(_K.STOPPING, _K.STOPPED),
            **stays(_K.ACTIVE, OpenSession, CloseSession, *_ANY_TIME),
        },
        _K.DRAINING: {
            OpenSession: refuse(INVALID_STATE),
            CloseSession: to(_K.DRAINING, _K.SLEEPING),
            ChangeState: to(_K.DRAINING, _K.ACTIVE),
            RefuseStatus: to(_K.FENCED),
            Stop: to(_K.STOPPING),
            **stays(_K.DRAINING, ReceiveStatusAnswer, *_ANY_TIME),
        },
        _K.SLEEPING: {
            OpenSession: refuse(INVALID_STATE),
            ChangeState: to(_K.SLEEPING, _K.ACTIVE),
            RefuseStatus: to(_K.FENCED),
            Stop: to(_K.STOPPED),
            **stays(_K.SLEEPING, ReceiveStatusAnswer, *_ANY_TIME),
        },
        _K.STOPPING: {
            OpenSession: refuse(INVALID_STATE),
            CloseSession: to(_K.STOPPING, _K.STOPPED),
            RefuseStatus: to(_K.FENCED),
            **stays(_K.STOPPING, ChangeState, Stop, ReceiveStatusAnswer, *_ANY_TIME),
        },
        _K.STOPPED: {
            OpenSession: refuse(INVALID_STATE),
            RefuseStatus: to(_K.FENCED),
            **stays(_K.STOPPED, ChangeState, Stop, ReceiveStatusAnswer, *_ANY_TIME),
        },
        _K.FENCED: {
            OpenSession: refuse(INVALID_STATE),
            ChangeState: refuse(INVALID_STATE),
            **stays(_K.FENCED, CloseSession, ReceiveStatusAnswer, RefuseStatus, Stop, *_ANY_TIME),
        },
    },
)

# What the PC may ask for, in each state: W15. Asking for the state it is in is never refused.
_ALLOWED: Final = MappingProxyType(
    {
        _K.ACTIVE: (_K.DRAINING, _K.SLEEPING),
        _K.DRAINING: (_K.ACTIVE,),
        _K.SLEEPING: (_K.ACTIVE,),
    }
)
_NO_SESSION: Final = Problem(INVALID_STATE, "the instance takes no new sessions; place it elsewhere")
_RANDOM_OCTETS: Final = 4
_SPREAD: Final = 0.2
"""By how much of itself an interval is shortened at random."""
_SLEEP_BELOW: Final = 0.05
"""The share of what an instance can do that counts as next to no load."""


# What happens


@attrs.frozen(kw_only=True)
class FrozenLifecycle:
    """All that an `InstanceLifecycle` holds, as a hashable value; times are what remains."""

    kind: InstanceKind
    sessions: int
    seq: int
    in_flight: bool
    changed: bool
    failures: int
    send_in_ms: int
    idle_for_ms: int | None
    requested: bool
    engine_failures: int
    failing_ms: int | None


class InstanceLifecycle:
    """The lifecycle of one incarnation of an instance.

    `ttl_ms` is that of its status records: one is sent at least every third of it (ST-1), and at once when
    the state changes, never more than one at a time. Intervals are shortened at random by up to a fifth and
    retries are spread at random, so that many instances that lost their PC do not come back in step. Where
    `sleep_after_ms` is given, next to no load for that long makes the instance ask to sleep (LC-1).
    An engine that fails `MAX_ENGINE_FAILURES` sequences in a row is said to be failing for a while.
    `random_bytes` gives octets.
    """

    def __init__(
        self,
        *,
        random_bytes: Callable[[int], bytes],
        now_ms: int,
        ttl_ms: int,
        sleep_after_ms: int | None = None,
        retry_ms: int = STATUS_RETRY_MS,
    ) -> None:
        if ttl_ms < 3:
            raise LocalProtocolError("ttl_ms must be at least 3, since a status is sent every third of it")
        self._random_bytes = random_bytes
        self._interval_ms = ttl_ms // 3
        self._sleep_after_ms = sleep_after_ms
        self._retry_ms = min(retry_ms, self._interval_ms)
        self._kind = InstanceKind.ACTIVE
        self._sessions = 0
        self._seq = 0
        self._in_flight = False
        self._changed = False  # since the status that is in flight
        self._failures = 0  # in a row
        self._send_ms = now_ms
        self._idle_since_ms: int | None = None
        self._requested = False
        self._engine_failures = 0  # in a row, capped
        self._failing_until_ms: int | None = None

    @property
    def kind(self) -> InstanceKind:
        """What the instance is now."""
        return self._kind

    @property
    def sessions(self) -> int:
        """Sessions and shards it has."""
        return self._sessions

    @property
    def engine_failures(self) -> int:
        """Sequences that the engine has failed since it drew a token, as far as they matter."""
        return self._engine_failures

    def next_deadline_ms(self) -> int | None:
        """Return when to send `TimerFired` next, or None."""
        if self._kind is InstanceKind.FENCED:
            return None
        if self._in_flight:
            return None
        ask_ms = self._ask_to_sleep_ms()
        return self._send_ms if ask_ms is None else min(self._send_ms, ask_ms)

    def handle(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Let an event happen at `now_ms` and return what is to be done about it, in order."""
        if (problem := LIFECYCLE.check(self._kind, event)) is not None:
            return (Refused(Problem(problem, _NO_SESSION.detail)),)
        effects: list[Effect] = []
        before = self._kind
        match event:
            case OpenSession():
                self._sessions += 1
            case CloseSession():
                self._close_session()
            case ChangeState(state):
                effects.append(self._change(state))
            case ReportLoad(load):
                self._report_load(load, now_ms)
            case ReportEngine(drawn):
                self._report_engine(drawn, now_ms)
            case ReceiveStatusAnswer(seq, state):
                self._answered(seq, state, now_ms)
            case FailStatus(seq):
                self._failed(seq, now_ms)
            case RefuseStatus(seq):
                if self._in_flight and seq == self._seq:
                    self._kind, self._in_flight = InstanceKind.FENCED, False
            case Stop():
                if self._kind in (_K.STOPPED, _K.FENCED):
                    effects.append(SafeToStop())
                else:
                    self._kind = _K.STOPPING if self._sessions else _K.STOPPED
            case TimerFired():
                pass
            case _:
                assert_never(event)
        if self._kind is not before:
            effects += self._entered(now_ms)
        return (*effects, *self._send(now_ms))

    # Parts

    def _close_session(self) -> None:
        if not self._sessions:
            raise LocalProtocolError("the instance has no session to close; close each once")
        self._sessions -= 1
        self._settle()

    def _settle(self) -> None:
        """Let a drain end when no session is left (LC-3)."""
        if not self._sessions:
            ends = {_K.DRAINING: _K.SLEEPING, _K.STOPPING: _K.STOPPED}
            self._kind = ends.get(self._kind, self._kind)

    def _change(self, state: str) -> Effect:
        if state != self._kind.reported:
            wanted = next((kind for kind in _ALLOWED.get(self._kind, ()) if kind.reported == state), None)
            if wanted is None:
                detail = (
                    f"state: an instance that is {self._kind.reported} does not become what was asked for"
                )
                return Refused(Problem(INVALID_STATE, detail))
            if wanted is _K.SLEEPING and self._sessions:
                detail = "state: the instance has sessions; ask it to drain, and it sleeps when they end"
                return Refused(Problem(INVALID_STATE, detail))
            self._kind = wanted
            self._settle()
        return AnswerState(self._kind.reported)

    def _report_load(self, load: float, now_ms: int) -> None:
        if load >= _SLEEP_BELOW or self._kind is not InstanceKind.ACTIVE:
            self._idle_since_ms, self._requested = None, False
        elif self._idle_since_ms is None:
            self._idle_since_ms = now_ms

    def _report_engine(self, drawn: bool, now_ms: int) -> None:
        was_failing = self._is_failing(now_ms)
        self._engine_failures = 0 if drawn else min(MAX_ENGINE_FAILURES, self._engine_failures + 1)
        failing = self._engine_failures >= MAX_ENGINE_FAILURES
        self._failing_until_ms = now_ms + ENGINE_FAILING_MS if failing else None
        if failing is not was_failing:
            self._changed, self._send_ms = True, min(self._send_ms, now_ms)

    def _is_failing(self, now_ms: int) -> bool:
        return self._failing_until_ms is not None and now_ms < self._failing_until_ms

    def _ask_to_sleep_ms(self) -> int | None:
        """Return when the instance will have been idle for long enough to ask, once."""
        if self._sleep_after_ms is None or self._idle_since_ms is None or self._requested:
            return None
        return self._idle_since_ms + self._sleep_after_ms

    def _answered(self, seq: int, state: str, now_ms: int) -> None:
        if not self._in_flight or seq != self._seq:
            return
        self._in_flight, self._failures = False, 0
        self._send_ms = now_ms if self._changed else self._send_ms
        if self._kind is not InstanceKind.ACTIVE:
            return
        if state == InstanceKind.DRAINING.reported:
            # An answer can only start a drain; nothing else in it moves the instance (W14).
            self._kind = InstanceKind.DRAINING
            self._settle()
        elif self._requested:
            self._idle_since_ms, self._requested = now_ms, False

    def _failed(self, seq: int, now_ms: int) -> None:
        if not self._in_flight or seq != self._seq:
            return
        self._in_flight = False
        self._failures += 1
        # With the time it waited for an answer this is an interval at most (ST-1).
        longest_ms = max(1, self._interval_ms // 2)
        most_ms = min(longest_ms, self._retry_ms << min(self._failures - 1, 16))
        self._send_ms = now_ms + self._random_ms(1, most_ms)

    def _entered(self, now_ms: int) -> list[Effect]:
        self._idle_since_ms, self._requested = None, False
        self._changed, self._send_ms = True, min(self._send_ms, now_ms)
        effects: list[Effect] = [StateEntered(self._kind.reported)]
        if self._kind is InstanceKind.STOPPED:
            effects.append(SafeToStop())
        if self._kind is InstanceKind.FENCED:
            effects.append(Fenced())
        return effects

    def _send(self, now_ms: int) -> tuple[Effect, ...]:
        """Send a status where one is due and none is under way."""
        if self._kind is InstanceKind.FENCED or self._in_flight:
            return ()
        ask_ms = self._ask_to_sleep_ms()
        if ask_ms is not None and now_ms >= ask_ms:
            self._requested, self._send_ms = True, min(self._send_ms, now_ms)
        if now_ms < self._send_ms:
            return ()
        self._seq += 1
        self._in_flight, self._changed = True, False
        shortest_ms = max(1, round(self._interval_ms * (1 - _SPREAD)))
        self._send_ms = now_ms + self._random_ms(shortest_ms, self._interval_ms)
        return (
            SendStatus(
                seq=self._seq,
                state=self._kind.reported,
                requested_state=InstanceKind.SLEEPING.reported if self._requested else None,
                failing=self._is_failing(now_ms),
                timeout_ms=max(1, self._interval_ms // 2),
            ),
        )

    def _random_ms(self, least_ms: int, most_ms: int) -> int:
        drawn = int.from_bytes(self._random_bytes(_RANDOM_OCTETS), "big")
        return least_ms + (drawn * (most_ms - least_ms + 1) >> 8 * _RANDOM_OCTETS)

    # The whole state

    def freeze(self, now_ms: int) -> FrozenLifecycle:
        """Return all that is held as a hashable value, with what remains of each time."""
        return FrozenLifecycle(
            kind=self._kind,
            sessions=self._sessions,
            seq=self._seq,
            in_flight=self._in_flight,
            changed=self._changed,
            failures=self._failures,
            send_in_ms=self._send_ms - now_ms,
            idle_for_ms=None if self._idle_since_ms is None else now_ms - self._idle_since_ms,
            requested=self._requested,
            engine_failures=self._engine_failures,
            failing_ms=None if self._failing_until_ms is None else self._failing_until_ms - now_ms,
        )

    def thaw(self, frozen: FrozenLifecycle, now_ms: int) -> None:
        """Take over the state of another lifecycle."""
        self._kind = frozen.kind
        self._sessions = frozen.sessions
        self._seq = frozen.seq
        self._in_flight = frozen.in_flight
        self._changed = frozen.changed
        self._failures = frozen.failures
        self._send_ms = now_ms + frozen.send_in_ms
        self._idle_since_ms = None if frozen.idle_for_ms is None else now_ms - frozen.idle_for_ms
        self._requested = frozen.requested
        self._engine_failures = frozen.engine_failures
        self._failing_until_ms = None if frozen.failing_ms is None else now_ms + frozen.failing_ms
