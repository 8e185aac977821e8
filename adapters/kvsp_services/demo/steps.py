"""What a step of the demonstration is: how much is asked in it, what has to hold, and what was seen."""

from __future__ import annotations

from typing import Final

import attrs

__all__ = ["FAST", "REAL", "Check", "Scale", "Step"]


@attrs.frozen(kw_only=True)
class Scale:
    """How much is asked: documents and answers in tokens, and how long anything may take."""

    document_tokens: int
    answer_tokens: int
    long_answer_tokens: int
    """Of the answers in whose middle something is killed."""
    kill_after: int
    """Pieces of the answer after which that happens."""
    patience_s: float
    """Far more than anything takes: it ends a hang, and decides nothing else."""


FAST: Final = Scale(
    document_tokens=900, answer_tokens=16, long_answer_tokens=240, kill_after=5, patience_s=180
)
"""For the tiny model."""
REAL: Final = Scale(
    document_tokens=1200, answer_tokens=32, long_answer_tokens=48, kill_after=12, patience_s=240
)
"""For SmolLM2 on two cores."""


@attrs.frozen
class Check:
    """One thing that has to hold, and the figures that show it."""

    what: str
    held: bool
    figures: str


@attrs.define
class Step:
    """One step of the story."""

    number: int
    title: str
    checks: list[Check] = attrs.field(factory=list)
    figures: list[tuple[str, str, str]] = attrs.field(factory=list)
    """Rows of a small table: what, first, second."""
    took_s: float = 0.0

    def check(self, what: str, held: bool, figures: str) -> None:
        """Note whether something held."""
        self.checks.append(Check(what, held, figures))

    @property
    def held(self) -> bool:
        """Whether every check held."""
        return all(check.held for check in self.checks)
