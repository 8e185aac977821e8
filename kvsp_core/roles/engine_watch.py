"""Notices an engine that is silent: it owes something, and has reported nothing at all for too long.

An engine that fails says so. One that hangs takes commands and says nothing, so that only the time can tell.
What it owes is a sequence that it computes or draws for, and a job; of a paused sequence nothing is expected.
Decision W32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from kvsp_core.roles import engine
from kvsp_core.roles.role import Effect, Input, JobDone, JobFailed

__all__ = ["EngineWatch"]

_Owed: TypeAlias = tuple[str, int]
"""A sequence or a job, by its number."""


class EngineWatch:
    """When the engine of an instance was last heard, and what it owes.

    It is silent once it has reported nothing for `silence_ms`, and has owed something for as long. It is not
    silent any more as soon as it reports anything.
    """

    def __init__(self, silence_ms: int) -> None:
        self._silence_ms = silence_ms
        self._heard_at_ms = 0
        self._owed_since_ms: dict[_Owed, int] = {}  # the oldest first
        self._paused: set[int] = set()
        self.silent = False

    def told(self, effects: Iterable[Effect], now_ms: int) -> None:
        """Take note of what goes out: commands to the engine are among it."""
        owed = self._owed_since_ms
        for effect in effects:
            match effect:
                case engine.StartSequence(sequence=number):
                    owed["sequence", number] = now_ms
                case engine.Pause(number):
                    if owed.pop(("sequence", number), None) is not None:
                        self._paused.add(number)
                case engine.Proceed(number):
                    if number in self._paused:
                        self._paused.remove(number)
                        owed["sequence", number] = now_ms
                case engine.Abort(number):
                    self._over(number)
                case engine.ImportBlock() | engine.ExportBlock() | engine.LoadShard() | engine.Attend():
                    owed["job", effect.job_id] = now_ms
                case _:
                    pass

    def heard(self, item: Input, now_ms: int) -> None:
        """Take note of what comes in: what the engine reports is among it."""
        match item:
            case JobDone(job_id) | JobFailed(job_id):
                if self._owed_since_ms.pop(("job", job_id), None) is None:
                    return  # a job of a tier
            case engine.SequenceEnded(number):
                self._over(number)
            case engine.Prefilled() | engine.TokensDecoded() | engine.BlockComputed():
                pass
            case _:
                return
        self._heard_at_ms, self.silent = now_ms, False

    def _over(self, number: int) -> None:
        self._owed_since_ms.pop(("sequence", number), None)
        self._paused.discard(number)

    def next_deadline_ms(self) -> int | None:
        """Return when the engine will have been silent for too long, or None."""
        if self.silent or not self._owed_since_ms:
            return None
        oldest_ms = next(iter(self._owed_since_ms.values()))
        return max(self._heard_at_ms, oldest_ms) + self._silence_ms

    def fell_silent(self, now_ms: int) -> bool:
        """Return whether the engine counts as silent from now on."""
        due_ms = self.next_deadline_ms()
        if due_ms is None or now_ms < due_ms:
            return False
        self.silent = True
        return True

    def freeze(self, now_ms: int) -> tuple[bool, tuple[int, ...], tuple[tuple[_Owed, int], ...]]:
        """Return all that makes a difference as a hashable value, times as what has passed."""
        owed = self._owed_since_ms.items()
        waited = tuple(sorted((each, now_ms - max(since_ms, self._heard_at_ms)) for each, since_ms in owed))
        return self.silent, tuple(sorted(self._paused)), waited
