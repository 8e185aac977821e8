"""The prefix of a prompt as a client sees it: the names of its blocks, and what is known of their replicas.

`PrefixKeys` are the block keys of a token sequence in one scope, `Prefix` the leading blocks of it that an
index knows replicas of, each block's replicas in the order in which to try them. Protocol sections "Scopes
and Block Keys", "Lookup" and "Block Retrieval and Storage"; requirements LK-1, LK-4, PB-5; decisions W13,
W24.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import sha256

import attrs

from kvsp_core.block_keys import Tokens, block_keys
from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.limits import MAX_LOOKUP_KEYS
from kvsp_core.messages import LookupAnswer, LookupRequest
from kvsp_core.records import ReplicaRecord
from kvsp_core.registries import tier_rank
from kvsp_core.validation import check_hex, check_hexes

__all__ = ["Prefix", "PrefixKeys", "found_replicas", "in_order"]


@attrs.frozen(kw_only=True)
class PrefixKeys:
    """The names of consecutive blocks of one token sequence, in prefix order.

    `keys` are block keys in hex. Raises `InvalidValue` where they are not, or `scope_id` is no Scope ID.
    """

    descriptor: CompatibilityDescriptor
    scope_id: str
    keys: tuple[str, ...] = attrs.field(repr=False)

    def __attrs_post_init__(self) -> None:
        check_hex(self.scope_id, "scope_id", 32)
        check_hexes(self.keys, "keys")

    @classmethod
    def of(cls, scope: Scope, descriptor: CompatibilityDescriptor, tokens: Tokens) -> PrefixKeys:
        """Return the names of the complete blocks of a token sequence; the tokens after them have none.

        Raises `LocalProtocolError` where a token is not an integer from 0 to 2^32-1.
        """
        found, _ = block_keys(scope, descriptor, tokens)
        return cls(descriptor=descriptor, scope_id=scope.scope_id, keys=tuple(key.hex() for key in found))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def tokens(self) -> int:
        """How many tokens the blocks hold."""
        return len(self.keys) * self.descriptor.block_tokens

    def part(self, start: int, stop: int | None = None) -> PrefixKeys:
        """Return the names of the blocks from `start` up to but not including `stop`."""
        return attrs.evolve(self, keys=self.keys[start:stop])

    def lookups(self, most: int = MAX_LOOKUP_KEYS) -> tuple[LookupRequest, ...]:
        """Return the consecutive lookups that find replicas of these blocks, none of more than `most` (LK-4).

        A lookup is of use only where all blocks of those before it were found.
        """
        return tuple(
            LookupRequest(
                scope_id=self.scope_id,
                compat_id=self.descriptor.compat_id,
                block_keys=self.keys[start : start + most],
            )
            for start in range(0, len(self.keys), most)
        )


@attrs.frozen(kw_only=True)
class Prefix:
    """Leading blocks of a token sequence, and the replicas of each, in the order in which to try them."""

    keys: PrefixKeys
    replicas: tuple[tuple[ReplicaRecord, ...], ...] = attrs.field(repr=False)

    def __attrs_post_init__(self) -> None:
        if len(self.replicas) != len(self.keys):
            raise LocalProtocolError(f"{len(self.keys)} blocks need as many entries of replicas")

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def tokens(self) -> int:
        """How many tokens the blocks hold."""
        return self.keys.tokens

    @property
    def holders(self) -> tuple[str, ...]:
        """The base URIs of the holders of any of it, the most used first choices first."""
        count: dict[str, int] = {}
        for records in self.replicas:
            for rank, record in enumerate(records):
                count[record.holder] = count.get(record.holder, 0) + (rank == 0)
        return tuple(sorted(count, key=lambda holder: -count[holder]))

    def keys_at(self, holder: str) -> tuple[str, ...]:
        """Return the keys of the blocks that a holder has a replica of."""
        return tuple(
            key
            for key, records in zip(self.keys.keys, self.replicas, strict=True)
            if any(record.holder == holder for record in records)
        )

    def part(self, start: int, stop: int | None = None) -> Prefix:
        """Return the blocks from `start` up to but not including `stop`."""
        return Prefix(keys=self.keys.part(start, stop), replicas=self.replicas[start:stop])


def found_replicas(request: LookupRequest, answer: LookupAnswer) -> tuple[tuple[ReplicaRecord, ...], ...]:
    """Return the replicas of each leading block that a lookup found.

    Records of other scopes or models, which no index should return, are left out, and what follows a block
    without any is not used. Raises `RemoteProtocolError` where the blocks are not those asked for, in order.
    """
    found = tuple(block.block_key for block in answer.blocks)
    if found != request.block_keys[: len(found)]:
        raise RemoteProtocolError("expected the leading keys that were asked for, in order", member="blocks")
    blocks: list[tuple[ReplicaRecord, ...]] = []
    for block in answer.blocks:
        fitting = tuple(
            record
            for record in block.replicas
            if (record.scope_id, record.compat_id) == (request.scope_id, request.compat_id)
        )
        if not fitting:
            break
        blocks.append(fitting)
    return tuple(blocks)


def in_order(records: Iterable[ReplicaRecord], *, avoid: Collection[str] = ()) -> tuple[ReplicaRecord, ...]:
    """Return the replicas of one block in the order in which to try them.

    Holders in `avoid`, which have failed lately, come last. Then what is whole comes before parts, what is in
    faster tiers before slower, a higher read rate before a lower; among equals blocks are spread over
    holders, always in the same way.
    """

    def preference(record: ReplicaRecord) -> tuple[bool, bool, int, int, bytes]:
        slowest = max(record.residency, key=lambda entry: tier_rank(entry.tier))
        spread = sha256((record.block_key + record.holder).encode()).digest()
        return (
            record.holder in avoid,
            not record.is_whole,
            tier_rank(slowest.tier),
            -(slowest.read_mbit_per_s or 0),
            spread,
        )

    return tuple(sorted(records, key=preference))
