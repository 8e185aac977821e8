"""Every limit of the core with its default, and what happens when it is reached.

Machines and roles take these values in their constructors; a deployment overrides what it needs. Sizes are in
octets, durations in milliseconds.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_LOOKUP_KEYS", "MAX_REPLICAS_PER_KEY"]

MAX_LOOKUP_KEYS: Final = 8192
"""Block keys in one lookup; more is 413, and clients split a longer prefix into several lookups (LK-4)."""

MAX_REPLICAS_PER_KEY: Final = 8
"""Replica records returned for one key; further ones are left out of the answer."""
