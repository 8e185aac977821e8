"""Time, as machines and roles see it: the event of a deadline, and when the next of many is due."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

import attrs

__all__ = ["Alarms", "TimerFired", "earliest"]

Key = TypeVar("Key", bound=Hashable)


@attrs.frozen
class TimerFired:
    """A deadline may have come. Where none has, nothing happens."""


def earliest(*deadlines_ms: int | None) -> int | None:
    """Return the first of some deadlines, of which None is one of nothing; None where nothing is due."""
    first_ms = None
    for at_ms in deadlines_ms:
        if at_ms is not None and (first_ms is None or at_ms < first_ms):
            first_ms = at_ms
    return first_ms


class Alarms(Generic[Key]):
    """One deadline for each key, the earliest at hand, every change in O(log n).

    Keys are drawn from one ordered type; of those that are due at the same time the least comes first.
    """

    def __init__(self) -> None:
        self._deadlines: dict[Key, int] = {}
        # An entry for each deadline, at it or before it: one that moves later is put right when it comes up.
        # Entries of deadlines that moved earlier or are gone are thrown away then.
        self._heap: list[tuple[int, Key]] = []

    def __iter__(self) -> Iterator[Key]:
        """Go through the keys that have a deadline."""
        return iter(self._deadlines)

    def set(self, key: Key, deadline_ms: int | None) -> None:
        """Set, move or (None) remove the deadline of a key."""
        known_ms = self._deadlines.get(key)
        if deadline_ms is None:
            self._deadlines.pop(key, None)
        else:
            self._deadlines[key] = deadline_ms
            if known_ms is None or deadline_ms < known_ms:
                heappush(self._heap, (deadline_ms, key))
        if len(self._heap) > 2 * len(self._deadlines) + 64:
            self._heap = [(at_ms, each) for each, at_ms in self._deadlines.items()]
            heapify(self._heap)

    def of(self, key: Key) -> int | None:
        """Return the deadline of a key, or None."""
        return self._deadlines.get(key)

    def next_ms(self) -> int | None:
        """Return the earliest deadline, or None."""
        while self._heap:
            at_ms, key = self._heap[0]
            deadline_ms = self._deadlines.get(key)
            if deadline_ms == at_ms:
                return at_ms
            heappop(self._heap)
            if deadline_ms is not None and deadline_ms > at_ms:
                heappush(self._heap, (deadline_ms, key))
        return None

    def take_next(self, now_ms: int) -> Key | None:
        """Return the key whose deadline came first, and remove that deadline; None where none has come."""
        next_ms = self.next_ms()
        if next_ms is None or next_ms > now_ms:
            return None
        _, key = heappop(self._heap)
        del self._deadlines[key]
        return key

    def take_due(self, now_ms: int) -> tuple[Key, ...]:
        """Return the keys whose deadlines have come, the earliest first, and remove those deadlines."""
        return tuple(iter(lambda: self.take_next(now_ms), None))

    def freeze(self, now_ms: int) -> tuple[tuple[Key, int], ...]:
        """Return the deadlines as the time that remains, as a hashable value."""
        return tuple(sorted((key, at_ms - now_ms) for key, at_ms in self._deadlines.items()))
