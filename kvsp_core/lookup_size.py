"""How many block keys to ask an index for at a time (LK-4).

An index may take fewer than the protocol's default, and may be told to take more again while it runs. Whoever
looks up asks for half as many once it was refused as asking for too many, and for twice as many after a while
in which it was not.
"""

from __future__ import annotations

from typing import Final

import attrs

from kvsp_core.limits import MAX_LOOKUP_KEYS

__all__ = ["LookupSize"]

_ANSWERS: Final = 16
"""Answered lookups of as many keys as may be asked for, after which twice as many are tried: an index that
takes no more refuses at most one in so many."""


@attrs.frozen
class LookupSize:
    """At most `most` keys a lookup now, and never more than `largest`."""

    largest: int = MAX_LOOKUP_KEYS
    most: int = attrs.field(default=attrs.Factory(lambda self: self.largest, takes_self=True))
    answered: int = 0
    """Lookups of that many keys that were answered since it changed."""

    def after_refusal(self, keys: int) -> LookupSize:
        """Return the size after a lookup of so many keys, at least 2, was refused as too long (413)."""
        return attrs.evolve(self, most=min(self.most, keys // 2), answered=0)

    def after_answer(self, keys: int) -> LookupSize:
        """Return the size after a lookup of so many keys was answered."""
        if keys < self.most or self.most == self.largest:
            return self
        if self.answered + 1 < _ANSWERS:
            return attrs.evolve(self, answered=self.answered + 1)
        return attrs.evolve(self, most=min(2 * self.most, self.largest), answered=0)
