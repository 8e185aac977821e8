"""Whether a silent peer is still there: when it is asked, doubted and given up; no I/O."""

from __future__ import annotations

from enum import Enum

from kvsp_h2.limits import WireLimits

__all__ = ["Liveness", "Verdict"]


class Verdict(Enum):
    """What is to be done about a peer that was silent."""

    WAIT = "wait"
    ASK = "ask it with a PING"
    DOUBT = "tell that it is in doubt"
    GIVE_UP = "end the connection"


class Liveness:
    """Signs of life of one peer, against the limits `ping_ms`, `ping_timeout_ms` and `doubt_ms`.

    `doubts` is whether a peer that does not answer soon is doubted before it is given up: servers are.
    """

    def __init__(self, now_ms: int, limits: WireLimits, *, doubts: bool) -> None:
        self._limits = limits
        self._ping_ms = limits.ping_ms
        self._early_ms = min(limits.doubt_ms, limits.ping_ms)
        self._doubts = doubts
        self._heard_ms = now_ms
        self._asked_ms: int | None = None
        self.awaits = False
        """Whether a request has gone out since the peer was last heard of."""
        self.in_doubt = False
        """Whether the peer was asked if it is there, and has let some time pass since."""

    def hear(self, now_ms: int) -> bool:
        """Take note that the peer is there; return whether it was in doubt until now."""
        self._heard_ms = now_ms
        self._asked_ms = None
        self.awaits = False
        if not self.in_doubt:
            return False
        self.in_doubt = False
        return True

    def look(self, now_ms: int) -> Verdict:
        """Return what is to be done now, and take it as done. Calling too early changes nothing."""
        if now_ms < self.next_deadline_ms():
            return Verdict.WAIT
        if self._asked_ms is None:
            self._asked_ms = now_ms
            return Verdict.ASK
        if now_ms >= self._give_up_due_ms(self._asked_ms):
            return Verdict.GIVE_UP
        self.in_doubt = True
        return Verdict.DOUBT

    def next_deadline_ms(self) -> int:
        """Return when `look` is next to be called, where the peer stays silent: it is asked sooner where it
        has a request of ours."""
        asked_ms = self._asked_ms
        if asked_ms is None:
            return self._heard_ms + (self._early_ms if self.awaits else self._ping_ms)
        due_ms = self._give_up_due_ms(asked_ms)
        if self._doubts and not self.in_doubt:
            return min(due_ms, asked_ms + self._limits.doubt_ms)
        return due_ms

    def _give_up_due_ms(self, asked_ms: int) -> int:
        """Return when the peer is to be given up: no sooner where it was asked early."""
        return max(asked_ms, self._heard_ms + self._ping_ms) + self._limits.ping_timeout_ms
