"""What a client can be told about time and how much to do at a time."""

from __future__ import annotations

import attrs

from kvsp_core.limits import CALL_TIMEOUT_MS

__all__ = ["ClientSettings"]


def _positive(settings: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise ValueError(f"{attribute.name}: expected at least 1")


@attrs.frozen(kw_only=True)
class ClientSettings:
    """Bounds of a client, with their defaults. Durations are in milliseconds."""

    concurrent_fetches: int = attrs.field(default=64, validator=_positive)
    """Blocks of one prefix that are on their way at a time."""

    concurrent_stores: int = attrs.field(default=8, validator=_positive)
    """Blocks that are being stored at a time by one call; a holder takes in 64 of all its clients."""

    call_timeout_ms: int = attrs.field(default=CALL_TIMEOUT_MS, validator=_positive)
    """Time for the answer to a lookup of a prefix in one scope, to a lease or a descriptor."""

    stall_ms: int = attrs.field(default=5_000, validator=_positive)
    """Time without any octet of a block after which its holder is given up and the next one asked."""

    avoid_ms: int = attrs.field(default=10_000, validator=_positive)
    """Time for which a holder that failed is asked last."""

    close_ms: int = attrs.field(default=2_000, validator=_positive)
    """Time for closing connections in order, and for giving back a lease."""
