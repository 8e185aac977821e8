"""What an instance measures of itself for its status: how fast it computes, and what its links carry (PL-1).

Moving averages, from start values that the deployment gives; the clock has milliseconds, so what is faster
counts as one.
"""

from __future__ import annotations

from typing import Final

from kvsp_core.limits import MAX_MEASURED_LINKS
from kvsp_core.records import Link

__all__ = ["Meter"]

_WEIGHT: Final = 0.25
"""How much the newest sample counts."""


class Meter:
    """Rates of an instance. A rate of 0 is one that is not known yet."""

    def __init__(
        self, *, prefill_tokens_per_s: int, decode_tokens_per_s: int, links: tuple[Link, ...]
    ) -> None:
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.decode_tokens_per_s = decode_tokens_per_s
        self._links = {link.holder: (link.mbit_per_s, link.rtt_us) for link in links}
        self._decoded = 0
        self._decoded_since_ms = 0
        self._prefills: dict[int, tuple[int, int]] = {}  # sequence -> tokens, since when

    @property
    def links(self) -> tuple[Link, ...]:
        """The links to holders, as a status reports them."""
        return tuple(
            Link(holder=holder, mbit_per_s=mbit_per_s, rtt_us=rtt_us)
            for holder, (mbit_per_s, rtt_us) in self._links.items()
        )

    def started(self, sequence: int, tokens: int, now_ms: int) -> None:
        """A sequence was given to the engine, with so many tokens to compute."""
        self._prefills[sequence] = tokens, now_ms

    def prefilled(self, sequence: int, now_ms: int) -> None:
        """The engine has computed them."""
        tokens, since_ms = self._prefills.pop(sequence, (0, now_ms))
        if tokens:
            rate = 1000 * tokens // max(1, now_ms - since_ms)
            self.prefill_tokens_per_s = _moved(self.prefill_tokens_per_s, rate)

    def left(self, sequence: int) -> None:
        """A sequence is gone."""
        self._prefills.pop(sequence, None)

    def decoded(self, tokens: int) -> None:
        """The engine drew so many tokens, over all its sequences."""
        self._decoded += tokens

    def status_due(self, now_ms: int) -> None:
        """A status goes out: take the tokens drawn since the last one into account."""
        elapsed_ms = now_ms - self._decoded_since_ms
        if self._decoded and elapsed_ms > 0:
            rate = 1000 * self._decoded // elapsed_ms
            self.decode_tokens_per_s = _moved(self.decode_tokens_per_s, rate)
        self._decoded, self._decoded_since_ms = 0, now_ms

    def answered(self, holder: str, elapsed_ms: int) -> None:
        """A holder answered a small request after this time."""
        mbit_per_s, rtt_us = self._links.pop(holder, (0, 0))
        self._set(holder, mbit_per_s, _moved(rtt_us, 1000 * max(1, elapsed_ms)))

    def fetched(self, holder: str, size_bytes: int, elapsed_ms: int) -> None:
        """So many octets came from a holder in this time."""
        mbit_per_s, rtt_us = self._links.pop(holder, (0, 0))
        rate = max(1, 8 * size_bytes // (1000 * max(1, elapsed_ms)))
        self._set(holder, _moved(mbit_per_s, rate), rtt_us)

    def _set(self, holder: str, mbit_per_s: int, rtt_us: int) -> None:
        self._links[holder] = mbit_per_s, rtt_us
        if len(self._links) > MAX_MEASURED_LINKS:
            del self._links[next(iter(self._links))]


def _moved(mean: int, sample: int) -> int:
    return sample if not mean else round(mean + _WEIGHT * (sample - mean))
