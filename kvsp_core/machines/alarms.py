"""When many things are next due: one deadline each, the earliest at hand, a change in O(log n)."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

__all__ = ["Alarms"]


class Alarms:
    """One deadline for each key.

    A deadline that moves later costs nothing: its entry is moved when it comes up. So what is set may ring
    early, and who hears it has to look whether it is due.
    """

    def __init__(self) -> None:
        self._deadlines: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def set(self, key: str, deadline_ms: int | None) -> None:
        """Set, move or (None) remove the deadline of a key."""
        if deadline_ms is None:
            self._deadlines.pop(key, None)
            return
        known = self._deadlines.get(key)
        self._deadlines[key] = deadline_ms
        if known is None or deadline_ms < known:
            heappush(self._heap, (deadline_ms, key))
            if len(self._heap) > 2 * len(self._deadlines) + 64:
                self._heap = [(at_ms, name) for name, at_ms in self._deadlines.items()]
                heapify(self._heap)

    def next_ms(self) -> int | None:
        """Return the earliest deadline, or an earlier time, or None."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: int) -> tuple[str, ...]:
        """Return the keys whose deadlines have come, and remove those."""
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now_ms:
            _, key = heappop(self._heap)
            deadline_ms = self._deadlines.get(key)
            if deadline_ms is None:
                continue
            if deadline_ms <= now_ms:
                del self._deadlines[key]
                due.append(key)
            else:
                heappush(self._heap, (deadline_ms, key))
        return tuple(due)

    def freeze(self, now_ms: int) -> tuple[tuple[str, int], ...]:
        """Return the deadlines as the time that remains, as a hashable value."""
        return tuple(sorted((key, at_ms - now_ms) for key, at_ms in self._deadlines.items()))
