"""Strategies for replicas of a block and for prefetch directives, over so few that they meet.

A block has two versions, as engines that differ in last bits make them; `layer_digests` gives the digests of
each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hypothesis import strategies as st

from kvsp_core.container import replica_digest
from kvsp_core.machines.prefetch import Submit
from kvsp_core.messages import PrefetchBlock, PrefetchDirective
from kvsp_core.records import ReplicaRecord, Residency

__all__ = [
    "BLOCK_KEYS",
    "BLOCK_TOKENS",
    "COMPAT_ID",
    "HOLDERS",
    "LAYERS",
    "SCOPE_ID",
    "directives",
    "layer_digests",
    "replicas",
    "submits",
]

LAYERS = 4
BLOCK_TOKENS = 16
COMPAT_ID, SCOPE_ID = "22" * 32, "33" * 16
HOLDERS = tuple(f"https://h{n}.example/kvsp/" for n in (1, 2, 3))
BLOCK_KEYS = tuple(hashlib.sha256(b"%d" % n).hexdigest() for n in range(6))


def layer_digests(version: str) -> tuple[str, ...]:
    """Return the digests of the layers of a version of a block."""
    return tuple(hashlib.sha256(f"{version}{layer}".encode()).hexdigest() for layer in range(LAYERS))


@st.composite
def replicas(
    draw: st.DrawFn, block_key: str = BLOCK_KEYS[0], holders: Sequence[str] = HOLDERS
) -> ReplicaRecord:
    """Draw a replica of a block: of either version, whole or in part, with layer digests or without."""
    digests = layer_digests(draw(st.sampled_from(["a", "b"])))
    first, last = draw(st.sampled_from([(0, 3), (0, 3), (0, 1), (2, 3), (1, 2), (0, 0)]))
    whole = (first, last) == (0, LAYERS - 1)
    return ReplicaRecord(
        block_key=block_key,
        compat_id=COMPAT_ID,
        scope_id=SCOPE_ID,
        holder=draw(st.sampled_from(holders)),
        codec=1,
        size=4096,
        digest=replica_digest(digests),
        layer_digests=None if whole and draw(st.booleans()) else digests,
        residency=(Residency(tier="host", layers=(first, last)),),
        ttl_ms=1000,
    )


@st.composite
def directives(draw: st.DrawFn, name: str = "d") -> PrefetchDirective:
    """Draw a directive over some of the blocks."""
    keys = draw(st.lists(st.sampled_from(BLOCK_KEYS), min_size=1, max_size=4, unique=True))
    return PrefetchDirective(
        directive=name,
        request_ref=draw(st.sampled_from([None, "r1", "r2"])),
        scope_id=SCOPE_ID,
        compat_id=COMPAT_ID,
        blocks=tuple(
            PrefetchBlock(
                block_key=key,
                sources=tuple(draw(st.lists(st.sampled_from(HOLDERS), max_size=2, unique=True))),
            )
            for key in keys
        ),
        layer_order="ascending",
        deadline_ms=draw(st.integers(1, 300)),
        lease_ms=draw(st.integers(1, 300)),
    )


@st.composite
def submits(draw: st.DrawFn, name: str = "d", held: frozenset[str] = frozenset()) -> Submit:
    """Draw the arrival of a directive where these blocks are held already."""
    message = draw(directives(name))
    return Submit(
        directive=message,
        held=held & {block.block_key for block in message.blocks},
        layers=LAYERS,
        block_tokens=BLOCK_TOKENS,
    )
