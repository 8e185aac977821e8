"""What goes round in a simulated deployment: names that its operators work with, and that a stranger may have
picked up somewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import attrs

from kvsp_core.block_keys import block_keys
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.index_parts import IndexParts

__all__ = ["Overheard", "Places"]

_REMEMBERED: Final = 12


def _recent() -> deque[tuple[str, str]]:
    return deque(maxlen=_REMEMBERED)


@attrs.define
class Overheard:
    """The last of each kind, as pairs."""

    prompts: deque[tuple[str, tuple[int, ...]]] = attrs.field(factory=lambda: deque(maxlen=_REMEMBERED))
    """Scope and tokens."""
    sessions: deque[tuple[str, str]] = attrs.field(factory=_recent)
    """Session and its instance."""
    blocks: deque[tuple[str, str]] = attrs.field(factory=_recent)
    """Holder and key of a block that it has published."""
    leases: deque[tuple[str, str]] = attrs.field(factory=_recent)
    """Holder and lease."""
    checkpoints: deque[tuple[str, bytes]] = attrs.field(factory=lambda: deque(maxlen=_REMEMBERED))
    """Session and body."""
    directives: deque[tuple[str, str]] = attrs.field(factory=_recent)
    """Instance and directive that it has accepted."""
    maps: dict[str, int] = attrs.field(factory=dict)
    """Shard maps and the highest version that was decided."""
    members: deque[tuple[str, str]] = attrs.field(factory=_recent)
    """Shard map and a member that has acknowledged a commit of it."""


@attrs.frozen(kw_only=True)
class Places:
    """Who is where in a deployment, and its scopes and model."""

    index: IndexParts
    controller: str
    holders: tuple[str, ...]
    instances: tuple[str, ...]
    scopes: Mapping[str, Scope] = attrs.field(repr=False)
    descriptor: CompatibilityDescriptor = attrs.field(repr=False)

    @property
    def keepers(self) -> tuple[str, ...]:
        """All that hold blocks."""
        return (*self.holders, *self.instances)

    def keys(self, scope_id: str, tokens: tuple[int, ...]) -> tuple[str, ...]:
        """Return the keys of the complete blocks of a prompt."""
        keys, _ = block_keys(self.scopes[scope_id], self.descriptor, tokens)
        return tuple(key.hex() for key in keys)
