"""Keep a lease at a holder for as long as it is wanted (section "Leases"; LE-2, decision W16).

The client's side of a lease: it is asked for, renewed at a third of its time, and given back. A renewal that
is not answered is repeated while the lease lasts, which the client counts from when it asked. Where the
holder grants shorter leases only, and says so, such a one is asked for. A holder that does not know the lease
any more was perhaps restarted: it is asked for a new one. Where that is refused, the lease is lost.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.machines.alarms import TimerFired
from kvsp_core.machines.table import Table, to

__all__ = [
    "TABLE",
    "Acquire",
    "Answered",
    "Effect",
    "Event",
    "Frozen",
    "GiveBack",
    "Held",
    "KeeperState",
    "LeaseKeeper",
    "Lost",
    "Release",
    "Renew",
    "Start",
    "TimerFired",
    "Unanswered",
]

_RENEW_AT: Final = 3
"""A lease is renewed after this part of its time, and so is a renewal that was not answered."""


class KeeperState(Enum):
    """What there is of the lease."""

    READY = "ready"
    ASKING = "asking"
    HELD = "held"
    OVER = "over"


# Events


@attrs.frozen
class Start:
    """Begin."""


@attrs.frozen
class Answered:
    """The holder answered what it was last asked: with a lease and its time, or with a refusal's status, and
    the longest time that it grants where it said so."""

    status: int
    lease: str = attrs.field(default="", repr=False)
    ttl_ms: int = 0
    max_ttl_ms: int | None = None


@attrs.frozen
class Unanswered:
    """The holder did not answer what it was last asked."""


@attrs.frozen
class Release:
    """The lease is not wanted any more."""


Event: TypeAlias = Start | Answered | Unanswered | TimerFired | Release


# Effects


@attrs.frozen
class Acquire:
    """Ask the holder for a lease."""

    ttl_ms: int


@attrs.frozen
class Renew:
    """Ask the holder to hold the lease for so long from now."""

    lease: str = attrs.field(repr=False)
    ttl_ms: int


@attrs.frozen
class GiveBack:
    """Release the lease at the holder; the answer changes nothing."""

    lease: str = attrs.field(repr=False)


@attrs.frozen
class Held:
    """The lease holds."""


@attrs.frozen
class Lost:
    """There is no lease, and none is asked for any more. `status` is that of the refusal, or None."""

    status: int | None


Effect: TypeAlias = Acquire | Renew | GiveBack | Held | Lost

_READY, _ASKING, _HELD, _OVER = KeeperState

TABLE: Final = Table(
    "lease that is kept",
    states=tuple(KeeperState),
    events=get_args(Event),
    cells={
        _READY: {Start: to(_ASKING), TimerFired: to(_READY), Release: to(_OVER)},
        _ASKING: {
            Answered: to(_ASKING, _HELD, _OVER),
            Unanswered: to(_OVER),
            TimerFired: to(_ASKING),
            Release: to(_OVER),
        },
        _HELD: {
            Answered: to(_HELD, _ASKING),
            Unanswered: to(_HELD),
            TimerFired: to(_HELD, _OVER),
            Release: to(_OVER),
        },
        # A lease that is granted after all is given back.
        _OVER: {Answered: to(_OVER), Unanswered: to(_OVER), TimerFired: to(_OVER), Release: to(_OVER)},
    },
)


@attrs.frozen(kw_only=True)
class Frozen:
    """A keeper as a value, its times as time remaining."""

    state: KeeperState
    ttl_ms: int
    lease: str = attrs.field(repr=False)
    asked_for_ms: int | None
    """How long ago the call that is under way was made."""
    ends_in_ms: int
    renew_in_ms: int


class LeaseKeeper:
    """A lease of `ttl_ms` on some blocks at one holder. One call is under way at a time."""

    def __init__(self, ttl_ms: int) -> None:
        self.state = KeeperState.READY
        self._ttl_ms = ttl_ms
        self._lease = ""
        self._asked_ms = 0
        self._asking = False
        self._until_ms = 0
        self._renew_ms = 0

    @property
    def is_held(self) -> bool:
        """Whether the lease holds, as far as is known."""
        return self.state is KeeperState.HELD

    def next_deadline_ms(self) -> int | None:
        """Return when `TimerFired` is due next, or None."""
        if self.state is not KeeperState.HELD:
            return None
        return self._until_ms if self._asking else min(self._renew_ms, self._until_ms)

    def handle(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Take an event in and return what is to be done."""
        TABLE.check(self.state, event)
        match event:
            case Start():
                return (self._acquire(now_ms),)
            case Answered():
                self._asking = False
                return self._answered(event, now_ms)
            case Unanswered():
                self._asking = False
                if self.state is KeeperState.ASKING:
                    self.state = KeeperState.OVER
                    return (Lost(None),)
                self._renew_ms = now_ms + max(1, self._ttl_ms // (_RENEW_AT * _RENEW_AT))
                return ()
            case TimerFired():
                return self._timer(now_ms)
            case Release():
                held, self.state = self.is_held, KeeperState.OVER
                return (GiveBack(self._lease),) if held else ()
            case _:
                assert_never(event)

    def _acquire(self, now_ms: int) -> Acquire:
        self.state = KeeperState.ASKING
        self._asked_ms, self._asking = now_ms, True
        return Acquire(self._ttl_ms)

    def _answered(self, event: Answered, now_ms: int) -> tuple[Effect, ...]:
        granted = 200 <= event.status < 300
        if self.state is KeeperState.OVER:
            return (GiveBack(event.lease),) if granted and event.lease != self._lease else ()
        if granted:
            self.state = KeeperState.HELD
            self._lease = event.lease
            # The holder counts from when it was asked, which is after we sent it; we count from before.
            self._until_ms = self._asked_ms + event.ttl_ms
            self._renew_ms = self._asked_ms + max(1, event.ttl_ms // _RENEW_AT)
            return (Held(),)
        shorter = event.max_ttl_ms is not None and event.max_ttl_ms < self._ttl_ms
        if event.max_ttl_ms is not None and shorter:
            self._ttl_ms = event.max_ttl_ms
        if self.state is KeeperState.ASKING and not shorter:
            self.state = KeeperState.OVER
            return (Lost(event.status),)
        if self.state is KeeperState.ASKING or event.status in (404, 410):
            return (self._acquire(now_ms),)
        if shorter:
            self._renew_ms = now_ms
            return self._timer(now_ms)
        self._renew_ms = now_ms + max(1, self._ttl_ms // (_RENEW_AT * _RENEW_AT))
        return ()

    def _timer(self, now_ms: int) -> tuple[Effect, ...]:
        if self.state is not KeeperState.HELD:
            return ()
        if now_ms >= self._until_ms:
            self.state = KeeperState.OVER
            return (Lost(None),)
        if self._asking or now_ms < self._renew_ms:
            return ()
        self._asked_ms, self._asking = now_ms, True
        return (Renew(self._lease, self._ttl_ms),)

    def freeze(self, now_ms: int) -> Frozen:
        """Return all of it as a hashable value."""
        return Frozen(
            state=self.state,
            ttl_ms=self._ttl_ms,
            lease=self._lease,
            asked_for_ms=now_ms - self._asked_ms if self._asking else None,
            ends_in_ms=max(0, self._until_ms - now_ms) if self.is_held else 0,
            renew_in_ms=max(0, self._renew_ms - now_ms) if self.is_held else 0,
        )
