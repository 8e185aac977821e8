"""A simulated cluster of all roles, in which the octets decide what a seed else does: who asks what when,
which messages are lost, late or twice, who crashes. The safety properties hold at every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import kvsp_sim.world
from kvsp_sim.cluster import SimulatedCluster
from kvsp_sim.deployment import Options
from kvsp_sim.faults import PROFILES
from kvsp_sim.randomness import Randomness
from kvsp_sim.trace import Trace

_STEPS = 400
_PROFILES = sorted(PROFILES)
SEEDS = tuple(bytes((number * 31 + place * 89) % 256 for place in range(400)) for number in range(6))


class _Octets(Randomness):
    """Draws from octets that all streams share; where they end, from a stream of its own name."""

    def __init__(self, octets: list[int], seed: int | bytes) -> None:
        super().__init__(seed)
        self._octets = octets
        self._seeded = self._random
        self._random = self._next

    def _next(self) -> float:
        if not self._octets:
            return self._seeded()
        return (self._octets.pop() + self._seeded()) / 256

    def split(self, *names: object) -> Randomness:
        """Return the stream of that name."""
        inner = super().split(*names)
        return _Octets(self._octets, inner._seed)


def one_input(data: bytes) -> None:
    """Run a small cluster for some steps."""
    if not data:
        return
    octets = list(reversed(data[1:]))

    def drawn(seed: int | bytes) -> Randomness:
        return _Octets(octets, seed)

    before: Sequence[object] = (kvsp_sim.world.Randomness,)
    kvsp_sim.world.Randomness = drawn  # type: ignore[assignment,misc]
    try:
        faults = _PROFILES[data[0] % len(_PROFILES)]
        options = Options(steps=_STEPS, instances=2, holders=1, users=2, faults=faults)
        cluster = SimulatedCluster(data[0], options, Trace())
        cluster.world.run(steps=_STEPS)
    finally:
        kvsp_sim.world.Randomness = before[0]  # type: ignore[assignment,misc]
