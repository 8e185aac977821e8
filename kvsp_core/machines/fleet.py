"""The instances of a placement controller (PC): who lives, in which epoch, and in which state.

The PC believes a status record until it expires; then the instance is failed. It keeps the highest epoch it
has seen of each instance, across its own restarts too, and refuses what an earlier incarnation says (protocol
section "Instance Status and Lifecycle"; requirements ST-2, ST-4, LC-1, LC-2, LC-5; decisions W14 and W15). Of
one that has failed and may not report any more nothing is kept. `Fleet` also keeps what the PC wants of each
instance and asks for it until it is reported.

The instance's side is `kvsp_core.machines.lifecycle`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.limits import MAX_INSTANCES, MAX_STATUS_TTL_MS, STATE_RETRY_MS, WARM_UP_MS
from kvsp_core.machines.alarms import Alarms, TimerFired
from kvsp_core.machines.table import Cell, Table, refuse, stays, to
from kvsp_core.problems import NOT_FOUND, STALE_EPOCH, UNAVAILABLE, Problem
from kvsp_core.records import InstanceStatus

__all__ = [
    "FLEET",
    "AnswerStatus",
    "DrainInstance",
    "DropEpoch",
    "Effect",
    "EndStateRequest",
    "Event",
    "Fleet",
    "ForgetInstance",
    "FrozenFleet",
    "InstanceFailed",
    "InstanceJoined",
    "MemberKind",
    "PersistEpoch",
    "ReceiveStatus",
    "Refused",
    "RequestState",
    "RestoreInstance",
    "StateReported",
    "TimerFired",
    "WakeInstance",
]


class MemberKind(Enum):
    """What an instance is to the PC."""

    UNKNOWN = "unknown"
    RESTORED = "restored"
    """Known from before the PC's restart; it has one maximum TTL to report."""
    ACTIVE = "active"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    OTHER = "other"
    """It reports a state that this program does not know, which counts as not active."""
    FAILED = "failed"


# Events


@attrs.frozen
class ReceiveStatus:
    """An instance reports. `accept_sleep` is what the PC's policy says to a request to sleep."""

    status: InstanceStatus
    accept_sleep: bool = False


@attrs.frozen
class RestoreInstance:
    """The PC has restarted: its store knows this epoch of the instance."""

    instance: str
    epoch: int


@attrs.frozen
class DrainInstance:
    """The PC, or its operator, wants the instance to drain and then to sleep."""

    instance: str


@attrs.frozen
class WakeInstance:
    """The PC, or its operator, wants the instance to be active."""

    instance: str


@attrs.frozen
class EndStateRequest:
    """A `RequestState` is over: answered, refused by the instance, or without an answer."""

    instance: str
    refused: bool = False


@attrs.frozen
class ForgetInstance:
    """The instance may not report any more: where it has failed, nothing of it is kept."""

    instance: str


Event: TypeAlias = (
    ReceiveStatus
    | RestoreInstance
    | DrainInstance
    | WakeInstance
    | EndStateRequest
    | ForgetInstance
    | TimerFired
)


# Effects


@attrs.frozen
class PersistEpoch:
    """Make the instance's epoch durable before anything that follows."""

    instance: str
    epoch: int


@attrs.frozen
class DropEpoch:
    """The instance is forgotten, and its epoch with it."""

    instance: str


@attrs.frozen
class AnswerStatus:
    """Answer the status: the state the PC wants the instance to be in."""

    state: str


@attrs.frozen
class Refused:
    """Answer the status or the operator with this problem; nothing has changed."""

    problem: Problem


@attrs.frozen
class InstanceJoined:
    """An incarnation of the instance reports for the first time, or again after it was failed: it has no
    sessions.
    """

    instance: str
    epoch: int


@attrs.frozen
class InstanceFailed:
    """This incarnation is gone: its sessions fail over."""

    instance: str
    epoch: int


@attrs.frozen
class StateReported:
    """The instance reports another state than before."""

    instance: str
    state: str


@attrs.frozen
class RequestState:
    """Ask the instance for this state (PUT state), and say `EndStateRequest` when that is over."""

    instance: str
    state: str


Effect: TypeAlias = (
    PersistEpoch
    | DropEpoch
    | AnswerStatus
    | Refused
    | InstanceJoined
    | InstanceFailed
    | StateReported
    | RequestState
)


# What is legal

_M = MemberKind
_ALIVE: Final = (_M.ACTIVE, _M.DRAINING, _M.SLEEPING, _M.OTHER)
_RESTING: Final = (_M.DRAINING, _M.SLEEPING)
_REPORTS: Final[Mapping[type, Cell]] = MappingProxyType({ReceiveStatus: to(*_ALIVE, _M.FAILED)})


def _row(kind: MemberKind, *, expires: bool) -> dict[type, Cell]:
    unchanged = (DrainInstance, WakeInstance, EndStateRequest, ForgetInstance)
    timer = to(kind, _M.FAILED) if expires else to(kind)
    return {**_REPORTS, **stays(kind, *unchanged), TimerFired: timer}


_LOST: Final[Mapping[type, Cell]] = MappingProxyType(
    {event: refuse(NOT_FOUND) for event in (DrainInstance, WakeInstance)}
)

FLEET: Final = Table(
    "fleet",
    states=tuple(MemberKind),
    events=get_args(Event),
    cells={
        _M.UNKNOWN: {
            **_row(_M.UNKNOWN, expires=False),
            **_LOST,
            RestoreInstance: to(_M.RESTORED),
        },
        _M.RESTORED: _row(_M.RESTORED, expires=True),
        **{kind: _row(kind, expires=True) for kind in _ALIVE},
        _M.FAILED: {**_row(_M.FAILED, expires=False), **_LOST, ForgetInstance: to(_M.UNKNOWN)},
    },
)

_STALE: Final = Problem(
    STALE_EPOCH, "epoch: a later incarnation of the instance has reported; restart with a higher one"
)
_FULL: Final = Problem(
    UNAVAILABLE, "as many instances are known as can be; take those that are gone out of the policy"
)
_NO_INSTANCE: Final = Problem(NOT_FOUND, "no such instance reports here")
_KINDS: Final = MappingProxyType(
    {kind.value: kind for kind in (_M.ACTIVE, _M.DRAINING, _M.SLEEPING, _M.FAILED)}
)


# What happens


@attrs.define(eq=False)
class _Member:
    instance: str
    kind: MemberKind
    epoch: int
    expires_ms: int
    joined_ms: int
    status: InstanceStatus | None = None
    seq: int = -1
    wants_drain: bool = False
    told_drain: bool = False
    """It was told to drain, which it may still act upon after the PC changed its mind."""
    asking: bool = False
    ask_ms: int | None = None
    """When it is to be asked for the wanted state; None where it is as wanted."""


@attrs.frozen(kw_only=True)
class FrozenFleet:
    """All that a `Fleet` holds, as a hashable value; times are what remains."""

    members: tuple[tuple[object, ...], ...]


class Fleet:
    """The instances one PC knows.

    A status record counts for its own TTL, at most `max_ttl_ms`. A new incarnation counts for less in
    placement while it warms up, over `warm_up_ms` from `warm_up_from` to the whole.
    """

    def __init__(
        self,
        *,
        max_ttl_ms: int = MAX_STATUS_TTL_MS,
        max_instances: int = MAX_INSTANCES,
        retry_ms: int = STATE_RETRY_MS,
        warm_up_ms: int = WARM_UP_MS,
        warm_up_from: float = 0.25,
    ) -> None:
        self._max_ttl_ms = max_ttl_ms
        self._max_instances = max_instances
        self._retry_ms = retry_ms
        self._warm_up_ms = warm_up_ms
        self._warm_up_from = warm_up_from
        self._members: dict[str, _Member] = {}
        self._alarms: Alarms[str] = Alarms()  # of each instance: its expiry, or a state to ask for

    # Questions

    def kind_of(self, instance: str) -> MemberKind:
        """Return what an instance is to the PC."""
        member = self._members.get(instance)
        return member.kind if member else MemberKind.UNKNOWN

    def epoch_of(self, instance: str) -> int | None:
        """Return the highest epoch seen of an instance, or None."""
        member = self._members.get(instance)
        return member.epoch if member else None

    def status_of(self, instance: str) -> InstanceStatus | None:
        """Return the last status of the incarnation that lives, or None."""
        member = self._members.get(instance)
        return member.status if member and member.kind in _ALIVE else None

    def wanted_of(self, instance: str) -> str | None:
        """Return the state an instance is to go over to, or None where it is as wanted."""
        member = self._members.get(instance)
        if member is None or member.kind not in _ALIVE or self._agrees(member):
            return None
        return MemberKind.DRAINING.value if member.wants_drain else MemberKind.ACTIVE.value

    def is_assignable(self, instance: str) -> bool:
        """Return whether new requests and directives may go to an instance (LC-2): it is active, and meant
        to be.
        """
        member = self._members.get(instance)
        return member is not None and member.kind is MemberKind.ACTIVE and not member.wants_drain

    def is_failing(self, instance: str) -> bool:
        """Return whether an instance says that its engine fails: others are given work first."""
        status = self.status_of(instance)
        return status is not None and bool(status.failing)

    def assignable(self) -> Iterator[InstanceStatus]:
        """Go through the statuses of all instances that may be given work."""
        for instance, member in self._members.items():
            if member.status is not None and self.is_assignable(instance):
                yield member.status

    def instances(self) -> tuple[str, ...]:
        """Return all instances known, failed ones too."""
        return tuple(self._members)

    def warmth(self, instance: str, now_ms: int) -> float:
        """Return how much of an instance placement should count on: up to 1, less while it warms up."""
        member = self._members.get(instance)
        if member is None:
            return 0.0
        share = min(1.0, (now_ms - member.joined_ms) / self._warm_up_ms) if self._warm_up_ms else 1.0
        return self._warm_up_from + (1 - self._warm_up_from) * share

    def next_deadline_ms(self) -> int | None:
        """Return when to send `TimerFired` next, or None. It may be early: nothing happens then."""
        return self._alarms.next_ms()

    # Events

    def handle(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Let an event happen at `now_ms` and return what is to be done about it, in order."""
        late = self._expire(now_ms)
        match event:
            case ReceiveStatus():
                effects = self._receive(event, now_ms)
            case RestoreInstance(instance, epoch):
                effects = self._restore(event, instance, epoch, now_ms)
            case DrainInstance(instance):
                effects = self._want(event, instance, True, now_ms)
            case WakeInstance(instance):
                effects = self._want(event, instance, False, now_ms)
            case EndStateRequest():
                effects = self._end_request(event, now_ms)
            case ForgetInstance(instance):
                effects = self._forget(instance)
            case TimerFired():
                effects = ()
            case _:
                assert_never(event)
        return (*late, *effects)

    def _restore(self, event: RestoreInstance, instance: str, epoch: int, now_ms: int) -> tuple[Effect, ...]:
        FLEET.check(self.kind_of(instance), event)
        member = _Member(instance, MemberKind.RESTORED, epoch, now_ms + self._max_ttl_ms, now_ms)
        self._members[instance] = member
        self._set_alarm(member)
        return ()

    def _receive(self, event: ReceiveStatus, now_ms: int) -> tuple[Effect, ...]:
        status = event.status
        member = self._members.get(status.instance)
        if member is None:
            if len(self._members) >= self._max_instances:
                return (Refused(_FULL),)
            member = _Member(status.instance, MemberKind.UNKNOWN, -1, now_ms, now_ms)
            self._members[status.instance] = member
        if status.epoch < member.epoch:
            return (Refused(_STALE),)
        if status.epoch == member.epoch and status.seq is not None and status.seq <= member.seq:
            # A late one: what it says is older than what is known.
            return (self._answer(member),)
        before = member.status.state if member.status and status.epoch == member.epoch else None
        effects = self._admit(member, status, now_ms)
        member.status = status
        member.seq = -1 if status.seq is None else status.seq
        member.kind = _KINDS.get(status.state, MemberKind.OTHER)
        member.expires_ms = now_ms + min(status.ttl_ms, self._max_ttl_ms)
        if before != status.state:
            effects.append(StateReported(status.instance, status.state))
        effects += self._compare(member, event, now_ms)
        self._set_alarm(member)
        return (*effects, self._answer(member))

    def _admit(self, member: _Member, status: InstanceStatus, now_ms: int) -> list[Effect]:
        """Take a new incarnation in, or one that is back; what was there before has failed at once (W14)."""
        effects: list[Effect] = []
        was_alive = member.kind in (*_ALIVE, MemberKind.RESTORED)
        is_newer = status.epoch > member.epoch
        if was_alive and (is_newer or status.state == MemberKind.FAILED.value):
            effects.append(InstanceFailed(member.instance, member.epoch))
        if is_newer:  # last: once this is durable, nobody learns of the failure again
            effects.append(PersistEpoch(member.instance, status.epoch))
        if is_newer or not was_alive:
            member.epoch, member.joined_ms = status.epoch, now_ms
            member.wants_drain, member.told_drain = False, False
            member.asking, member.ask_ms = False, None
            if status.state != MemberKind.FAILED.value:
                effects.append(InstanceJoined(member.instance, status.epoch))
        elif member.kind is MemberKind.RESTORED:
            # It lived on while the PC was away, and is warm.
            member.joined_ms = now_ms - self._warm_up_ms
        return effects

    def _compare(self, member: _Member, event: ReceiveStatus, now_ms: int) -> list[Effect]:
        """Compare what is reported with what is wanted, and ask for that where it differs."""
        if member.kind is MemberKind.ACTIVE:
            if event.status.requested_state == MemberKind.SLEEPING.value and event.accept_sleep:
                member.wants_drain = True
            elif not member.wants_drain and not member.asking:
                member.told_drain = False
        elif member.kind in _RESTING and not member.wants_drain and not member.told_drain:
            # It drains of itself, which the PC adopts.
            member.wants_drain = True
        if self._agrees(member):
            member.ask_ms = None
            return []
        return self._ask(member, now_ms)

    def _agrees(self, member: _Member) -> bool:
        if member.wants_drain:
            return member.kind is not MemberKind.ACTIVE
        return member.kind not in _RESTING

    def _answer(self, member: _Member) -> AnswerStatus:
        """Say what is wanted. An answer can only start a drain; all else is asked for by PUT state (W14)."""
        if member.kind is MemberKind.ACTIVE and member.wants_drain:
            member.told_drain = True
            return AnswerStatus(MemberKind.DRAINING.value)
        return AnswerStatus(member.status.state if member.status else MemberKind.ACTIVE.value)

    def _want(
        self, event: DrainInstance | WakeInstance, instance: str, drain: bool, now_ms: int
    ) -> tuple[Effect, ...]:
        if FLEET.check(self.kind_of(instance), event) is not None:
            return (Refused(_NO_INSTANCE),)
        member = self._members[instance]
        if not drain and member.kind in _RESTING:
            member.told_drain = True  # by its own report; it is not to be adopted again while it is woken
        member.wants_drain, member.ask_ms = drain, None
        if member.kind not in _ALIVE or self._agrees(member):
            return ()
        return tuple(self._ask(member, now_ms))

    def _ask(self, member: _Member, now_ms: int) -> list[Effect]:
        """Ask for the wanted state, unless that is under way or was done a moment ago."""
        if member.asking or (member.ask_ms is not None and now_ms < member.ask_ms):
            return []
        member.asking = True
        member.ask_ms = now_ms + self._retry_ms
        member.told_drain |= member.wants_drain
        wanted = MemberKind.DRAINING if member.wants_drain else MemberKind.ACTIVE
        return [RequestState(member.instance, wanted.value)]

    def _end_request(self, event: EndStateRequest, now_ms: int) -> tuple[Effect, ...]:
        member = self._members.get(event.instance)
        if member is None or not member.asking:
            return ()
        member.asking = False
        if event.refused:
            # It knows better: an instance that is stopping is not woken.
            member.wants_drain, member.ask_ms = member.kind in _RESTING, None
        elif member.ask_ms is not None:
            member.ask_ms = now_ms + self._retry_ms
            self._set_alarm(member)
        return ()

    def _forget(self, instance: str) -> tuple[Effect, ...]:
        if self.kind_of(instance) is not MemberKind.FAILED:
            return ()
        del self._members[instance]
        self._alarms.set(instance, None)
        return (DropEpoch(instance),)

    # Time

    def _set_alarm(self, member: _Member) -> None:
        """Have the member looked at in time. An alarm that is too early is moved when it comes up."""
        times = [member.expires_ms + 1] if member.kind in (*_ALIVE, MemberKind.RESTORED) else []
        if member.ask_ms is not None and not member.asking:
            times.append(member.ask_ms)
        known_ms = self._alarms.of(member.instance)
        if times and (known_ms is None or min(times) < known_ms):
            self._alarms.set(member.instance, min(times))

    def _expire(self, now_ms: int) -> tuple[Effect, ...]:
        """Fail the instances whose record is over, and ask again for states that are not reported yet."""
        effects: list[Effect] = []
        for instance in self._alarms.take_due(now_ms):
            member = self._members[instance]
            if member.kind in (*_ALIVE, MemberKind.RESTORED) and now_ms > member.expires_ms:
                member.kind, member.status = MemberKind.FAILED, None
                member.asking, member.ask_ms = False, None
                effects.append(InstanceFailed(instance, member.epoch))
            elif member.ask_ms is not None and member.ask_ms <= now_ms:
                effects += self._ask(member, now_ms)
            self._set_alarm(member)
        return tuple(effects)

    # The whole state

    def freeze(self, now_ms: int) -> FrozenFleet:
        """Return all that is held as a hashable value, with what remains of each time."""
        members = (
            attrs.evolve(
                member,
                expires_ms=member.expires_ms - now_ms,
                joined_ms=max(member.joined_ms - now_ms, -self._warm_up_ms),
                ask_ms=None if member.ask_ms is None else member.ask_ms - now_ms,
            )
            for member in self._members.values()
        )
        frozen = (attrs.astuple(member, recurse=False) for member in members)
        return FrozenFleet(members=tuple(sorted(frozen, key=lambda member: str(member[0]))))

    def thaw(self, frozen: FrozenFleet, now_ms: int) -> None:
        """Take over the state of another fleet. This one must be new."""
        for values in frozen.members:
            member = _Member(*values)  # type: ignore[arg-type]
            member.expires_ms += now_ms
            member.joined_ms += now_ms
            if member.ask_ms is not None:
                member.ask_ms += now_ms
            self._members[member.instance] = member
            self._set_alarm(member)
