"""In what simulated deployments differ beside their size, times and limits: each in a part of the seeds."""

from __future__ import annotations

from typing import Final

import attrs

from kvsp_sim.randomness import Randomness

__all__ = ["Variety"]

_PLAIN: Final = 0.6
"""How often a deployment has nothing of all this."""
_OFTEN: Final = 0.4
"""How often another one has each."""


@attrs.frozen(kw_only=True)
class Variety:
    """What a deployment has that most have not."""

    burst: int = 1
    """How many tokens an engine draws in a step."""
    stretch: int = 1
    """How much longer outputs are."""
    busy: float = 0.0
    """How often a tier has no time for a job."""
    sleep_after_ms: int | None = None
    """After how long with nothing to do an instance asks to sleep."""
    reports_to_index: bool = False
    index_parts: int = 1
    opens_by_checkpoint: bool = False
    """Whether a first checkpoint opens its session."""
    asks_more: bool = False
    """Whether the operator splits contexts and asks for estimates too."""
    producers: int = 0
    """How many instances state the digests that tenants' blocks have to have; where none does, any may."""
    says_numerics: bool = False
    """Whether instances say themselves whose results they repeat, those of their kind; else all do alike."""
    knows_models: bool = True
    """Whether index, holders and controller are told of the model beforehand."""

    @classmethod
    def drawn(cls, random: Randomness) -> Variety:
        """Return what a seed has."""
        if random.chance(_PLAIN):
            return cls()
        return cls(
            burst=random.pick((2, 5)) if random.chance(_OFTEN) else 1,
            stretch=random.pick((3, 8)) if random.chance(_OFTEN) else 1,
            busy=random.pick((0.01, 0.1)) if random.chance(_OFTEN) else 0.0,
            sleep_after_ms=random.pick((50, 400)) if random.chance(_OFTEN) else None,
            reports_to_index=random.chance(_OFTEN),
            index_parts=random.pick((2, 3)) if random.chance(_OFTEN) else 1,
            opens_by_checkpoint=random.chance(_OFTEN),
            asks_more=random.chance(_OFTEN),
            producers=random.pick((1, 2)) if random.chance(_OFTEN) else 0,
            says_numerics=random.chance(_OFTEN),
            knows_models=not random.chance(_OFTEN),
        )
