"""Sampling that can be restored: the token drawn is a function of logits, method, parameters, seed and step
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvsp_core.records import Sampler
from kvsp_core.roles.engine import SequenceRefused

__all__ = ["METHODS", "check_sampler", "draw"]

METHODS: Final = ("greedy", "top-p")
"""The sampling methods of this engine: the names that go into a checkpoint."""
_LEAST_TEMPERATURE: Final = 1e-30
"""With less a logit divided by it may be infinite. Far above it only the likeliest token is drawn."""
_PARAMETERS: Final = ("p", "temperature", "max_tokens", "stop")


def check_sampler(sampler: Sampler) -> None:
    """Raise `SequenceRefused` where this engine cannot draw with a sampler."""
    if sampler.method not in METHODS:
        raise SequenceRefused(f"sampler method is not one of {', '.join(METHODS)}")
    for name in sampler.params:
        if name not in _PARAMETERS:  # leaving it out would draw other tokens than were asked for
            raise SequenceRefused(
                f"sampler.params has members this engine does not know; it knows {', '.join(_PARAMETERS)}"
            )
    if sampler.method == "top-p":
        _top_p_parameters(sampler.params)
    most = sampler.params.get("max_tokens", 1)
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise SequenceRefused("sampler.params.max_tokens must be a number of tokens")
    stop = sampler.params.get("stop", ())
    if not isinstance(stop, list | tuple) or not all(type(token) is int for token in stop):
        raise SequenceRefused("sampler.params.stop must be an array of tokens")


def draw(logits: npt.NDArray[np.float32], sampler: Sampler, step: int) -> int:
    """Return the token drawn from logits [vocabulary] at a step, counted from the first output token."""
    if sampler.method == "greedy":
        return int(logits.argmax())
    p, temperature = _top_p_parameters(sampler.params)
    scaled = logits.astype(np.float64) / max(temperature, _LEAST_TEMPERATURE)
    order = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[order] - scaled[order[0]])
    sums = np.cumsum(weights)
    kept = int(np.searchsorted(sums, p * sums[-1])) + 1
    uniform = np.random.Generator(np.random.Philox(key=[sampler.seed % 2**64, step])).random()
    return int(
        order[min(int(np.searchsorted(sums[:kept], uniform * sums[kept - 1], side="right")), kept - 1)]
    )


def _top_p_parameters(params: Mapping[str, Any]) -> tuple[float, float]:
    p, temperature = params.get("p", 1.0), params.get("temperature", 1.0)
    for name, value, high in (("p", p, 1.0), ("temperature", temperature, 100.0)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
            raise SequenceRefused(f"sampler.params.{name} must be a number above 0 and at most {high:g}")
    return float(p), float(temperature)
