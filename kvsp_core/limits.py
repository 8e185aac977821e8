"""Every limit of the core with its default, and what happens when it is reached.

Machines and roles take these values in their constructors; a deployment overrides what it needs. Sizes are in
octets, durations in milliseconds.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "FAULT_WITHDRAWAL_MS",
    "LEASE_QUOTA_BYTES",
    "MAX_BASE_URI_CHARS",
    "MAX_CONTAINER_BYTES",
    "MAX_CONTAINER_LAYERS",
    "MAX_DESCRIPTOR_BYTES",
    "MAX_DESCRIPTOR_DEPTH",
    "MAX_LEASES_PER_CLIENT",
    "MAX_LEASE_TTL_MS",
    "MAX_LOOKUP_KEYS",
    "MAX_REPLICAS_PER_KEY",
]

MAX_LOOKUP_KEYS: Final = 8192
"""Block keys in one lookup; more is 413, and clients split a longer prefix into several lookups (LK-4)."""

MAX_REPLICAS_PER_KEY: Final = 8
"""Replica records returned for one key; further ones are left out of the answer."""

MAX_DESCRIPTOR_BYTES: Final = 64 * 1024
"""Octets of a Compatibility Descriptor; a larger one raises `LimitExceeded` unread."""

MAX_DESCRIPTOR_DEPTH: Final = 32
"""Levels of nesting in a Compatibility Descriptor; a deeper one is refused."""

MAX_BASE_URI_CHARS: Final = 2048
"""Characters of a base URI; a longer one is refused."""

MAX_CONTAINER_BYTES: Final = 256 * 1024 * 1024
"""Octets of a KV block container; one that claims more is 413 as soon as its header shows it."""

MAX_CONTAINER_LAYERS: Final = 4096
"""Layers of a KV block container; one that claims more is 413 as soon as its header shows it."""

MAX_LEASE_TTL_MS: Final = 60_000
"""Longest lease granted at a time; more is kvsp-lease-quota, and a lease can be renewed (LE-3)."""

LEASE_QUOTA_BYTES: Final = 64 << 30
"""Octets one client has under lease at a holder, each block counted once; more is kvsp-lease-quota (LE-3)."""

MAX_LEASES_PER_CLIENT: Final = 4096
"""Leases one client has at a holder at a time; more is kvsp-lease-quota."""

FAULT_WITHDRAWAL_MS: Final = 500
"""How long a holder tries to withdraw a leased block that a fault took, before it breaks the lease (LE-4)."""
