"""One exchange on a stream, and what a connection keeps for all of them: budgets, and streams that linger or
are over."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

__all__ = ["Budget", "Exchange", "Lingering", "Past"]

_REMEMBERED: Final = 256
"""Streams that are over of which it is known how they ended."""


class Budget:
    """How many things a peer may still make us do: a burst, refilled by time."""

    __slots__ = ("_burst", "_left", "_per_s", "_since_ms")

    def __init__(self, burst: int, per_s: int, now_ms: int) -> None:
        self._burst = self._left = burst * 1000
        self._per_s = per_s
        self._since_ms = now_ms

    def spend(self, now_ms: int) -> bool:
        """Take one; return whether there was one."""
        self._left = min(self._burst, self._left + (now_ms - self._since_ms) * self._per_s)
        self._since_ms = now_ms
        if self._left < 1000:
            return False
        self._left -= 1000
        return True


class Exchange:
    """One request and its response on a stream: how far both have got."""

    __slots__ = (
        "body_ended",
        "credit",
        "expected",
        "free",
        "gone",
        "head_received",
        "head_sent",
        "method",
        "moved",
        "out",
        "out_bytes",
        "out_end",
        "out_ended",
        "pressed",
        "queued",
        "received",
        "send_window",
        "sent_bytes",
        "stream_id",
        "unacknowledged",
        "untold",
        "wants_continue",
        "was_reset",
        "window",
    )

    def __init__(self, stream_id: int, window: int, send_window: int) -> None:
        self.stream_id = stream_id
        self.method = ""
        self.gone = False
        """Whether it is over; calls for it do nothing any more."""
        self.untold = False
        """Whether nobody was told of it: it was refused here."""
        self.was_reset = False
        # What comes in: octets the peer may still send, octets that count but were not acknowledged,
        # octets acknowledged that the peer was not told of.
        self.window = window
        self.unacknowledged = 0
        self.credit = 0
        self.head_received = self.body_ended = self.wants_continue = False
        self.expected: int | None = None
        self.free: Callable[[], memoryview] | None = None
        """Says where octets belong, where the application has said so."""
        self.received = 0
        # What goes out.
        self.head_sent = self.out_end = self.out_ended = False
        self.send_window = send_window
        self.out: deque[memoryview] = deque()
        self.out_bytes = self.sent_bytes = 0
        self.queued = self.pressed = False
        self.moved = True
        """Whether octets moved since the timer last looked."""

    @property
    def waits_for_peer(self) -> bool:
        """Whether the next octet is the peer's to send, or to make room for."""
        return self.out_bytes > 0 or (self.head_received and not self.body_ended and not self.unacknowledged)

    @property
    def has_output(self) -> bool:
        """Whether there is something to put into frames."""
        return self.out_bytes > 0 or (self.out_end and not self.out_ended)


class Lingering:
    """Streams that were answered before their request was whole, each with when it is to be cut off."""

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._due_ms: OrderedDict[int, int] = OrderedDict()

    @property
    def due_ms(self) -> int | None:
        """When the next is to be cut off."""
        return next(iter(self._due_ms.values())) if self._due_ms else None

    def add(self, stream_id: int, due_ms: int) -> None:
        """Let a stream linger; times only go up."""
        self._due_ms[stream_id] = due_ms

    def discard(self, stream_id: int) -> bool:
        """Forget a stream that has ended by itself; return whether it lingered."""
        return self._due_ms.pop(stream_id, None) is not None

    def take_due(self, now_ms: int) -> list[int]:
        """Return, and forget, the streams whose time is over, and the oldest of those that are too many."""
        taken = []
        while self._due_ms:
            stream_id, due_ms = next(iter(self._due_ms.items()))
            if now_ms < due_ms and len(self._due_ms) <= self._at_most:
                break
            del self._due_ms[stream_id]
            taken.append(stream_id)
        return taken


class Past:
    """Streams that are over: whether their late frames are to be expected, or break the protocol."""

    def __init__(self) -> None:
        self._was_reset: OrderedDict[int, bool] = OrderedDict()
        self._forgotten = 0
        """The highest stream of those that are not remembered any more."""

    def add(self, stream_id: int, was_reset: bool) -> None:
        """Take note that a stream is over."""
        self._was_reset[stream_id] = was_reset
        if len(self._was_reset) > _REMEMBERED:
            forgotten, _ = self._was_reset.popitem(last=False)
            self._forgotten = max(self._forgotten, forgotten)

    def was_reset(self, stream_id: int) -> bool | None:
        """Return whether a stream ended by a reset, so that late frames are to be expected: of what is not
        remembered, that is assumed. None where there was no such stream."""
        known = self._was_reset.get(stream_id)
        return True if known is None and stream_id <= self._forgotten else known
