"""Clocks of simulated processes: each with its own zero and its own rate."""

from __future__ import annotations

import attrs

__all__ = ["Clock"]

_PPM = 1_000_000


@attrs.frozen
class Clock:
    """A monotonic clock in milliseconds that runs against the world's time in microseconds.

    `offset_ms` is what it shows at the world's time 0, `drift_ppm` how many parts in a million it is too
    fast.
    """

    offset_ms: int = 0
    drift_ppm: int = 0

    def read(self, world_us: int) -> int:
        """Return what the clock shows, in ms."""
        return self.offset_ms + world_us * (_PPM + self.drift_ppm) // (1000 * _PPM)

    def when(self, local_ms: int) -> int:
        """Return the first time of the world, in us, at which the clock shows `local_ms` or more."""
        return -((self.offset_ms - local_ms) * 1000 * _PPM // (_PPM + self.drift_ppm))
