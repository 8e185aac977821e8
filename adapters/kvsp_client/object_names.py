"""Blocks of engines that name them themselves and do not tell the tokens.

SGLang and LMCache hash the tokens of a prefix in their own way and hand a storage backend the hash. A Block
Key is then computed from that hash in place of the tokens, under the Scope Key as ever, and the descriptor
says whose names they are. So such blocks are shared among engines of that kind, and never taken for blocks
named by their tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import attrs

from kvsp_core.block_keys import block_keys
from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.prefix import PrefixKeys

__all__ = ["MEMBER", "named_descriptor", "object_keys"]

MEMBER: Final = "block_names"
"""The member, of our own, in which a descriptor says how its blocks are named."""
_WORDS: Final = 8
"""Words of 32 bits in a digest: they stand in for tokens."""


def named_descriptor(descriptor: CompatibilityDescriptor, names: str) -> CompatibilityDescriptor:
    """Return a descriptor for blocks that are named in the way `names` says.

    Raises `LocalProtocolError` where a block has less than 8 tokens, since a name takes their place.
    """
    if descriptor.block_tokens < _WORDS:
        raise LocalProtocolError(
            f"block_tokens: blocks of {descriptor.block_tokens} tokens are too small; use at least {_WORDS}"
        )
    return attrs.evolve(descriptor, other_members={**descriptor.other_members, MEMBER: names})


def object_keys(scope: Scope, descriptor: CompatibilityDescriptor, names: Iterable[bytes]) -> PrefixKeys:
    """Return the keys of blocks by the engine's own names for them, in order.

    `descriptor` is one that `named_descriptor` made.
    """
    if MEMBER not in descriptor.other_members:
        raise LocalProtocolError("these blocks are named by their tokens; use PrefixKeys.of")
    filling = [0] * (descriptor.block_tokens - _WORDS)
    keys = []
    for name in names:
        digest = hashlib.sha256(name).digest()
        words = [int.from_bytes(digest[4 * n : 4 * n + 4], "big") for n in range(_WORDS)]
        (key,), _ = block_keys(scope, descriptor, words + filling)
        keys.append(key.hex())
    return PrefixKeys(descriptor=descriptor, scope_id=scope.scope_id, keys=tuple(keys))
