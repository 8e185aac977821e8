"""How much of the machine others used while a row was measured, so that its figures can be read rightly."""

from __future__ import annotations

import os
import resource
from pathlib import Path

__all__ = ["BUSY", "OtherWork"]

BUSY = 0.1
"""The share of the machine's processor time from which on it is said that others used it."""
_IDLE, _IO_WAIT = 3, 4


class OtherWork:
    """Counts from when it is made until it is asked; processes of ours count once they are waited for."""

    def __init__(self) -> None:
        self._ticks = _ticks()
        self._ours = _ours()

    def share(self) -> float:
        """Return which share of all processor time was neither idle nor ours."""
        before, now = self._ticks, _ticks()
        if before is None or now is None:
            return 0.0
        spent = [after - earlier for after, earlier in zip(now, before, strict=True)]
        idle, total = spent[_IDLE] + spent[_IO_WAIT], sum(spent)
        ours = (_ours() - self._ours) * os.sysconf("SC_CLK_TCK")
        return max(0.0, total - idle - ours) / total if total else 0.0

    def note(self) -> str:
        """Return a line about a machine that was busy with other work; empty where it was not."""
        share = self.share()
        if share < BUSY:
            return ""
        return f"The machine was busy with other work, too: with {share:.0%} of its processor time."


def _ticks() -> list[int] | None:
    """Return the processor time of the machine by kind; None where the system does not say."""
    try:
        line = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return None
    return [int(word) for word in line.split()[1:9]]  # what guests use is in the first of them


def _ours() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
