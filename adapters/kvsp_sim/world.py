"""The simulated world's time, and what is due when."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvsp_sim.randomness import Randomness
from kvsp_sim.trace import Trace

__all__ = ["World"]


class World:
    """Simulated time in microseconds, and what is due when. Calls that are due together run in the order in
    which they were asked for.
    """

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        self.now_us = 0
        self.steps = 0
        self.randomness = Randomness(seed)
        self.trace = trace or Trace()
        self._due: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0

    def at(self, time_us: int, call: Callable[..., None], *arguments: object) -> None:
        """Have something done at a time; at once, if that has passed."""
        self._count += 1
        heapq.heappush(self._due, (max(time_us, self.now_us), self._count, call, arguments))

    def after(self, delay_us: int, call: Callable[..., None], *arguments: object) -> None:
        """Have something done after a time."""
        self._count += 1
        heapq.heappush(self._due, (self.now_us + delay_us, self._count, call, arguments))

    def run(self, *, steps: int | None = None, until_us: int | None = None) -> None:
        """Let time pass until so many steps are done in all, or until a time, or until nothing is due."""
        due = self._due
        limit = float("inf") if steps is None else steps
        end = float("inf") if until_us is None else until_us
        while due and self.steps < limit:
            if due[0][0] > end:
                break
            self.now_us, _, call, arguments = heapq.heappop(due)
            call(*arguments)
        if until_us is not None and self.steps < limit:
            self.now_us = max(self.now_us, until_us)
