"""An index that is split by block key over several base URIs, and which of them a key belongs to (OP-3).

The rule: take the base URIs in the order of their text. Of n of them, a block key whose first 64 bits are the
number k belongs to number floor(k * n / 2^64), counted from 0. Block keys are uniformly distributed, so each
part gets as many. Whoever is configured with the same base URIs, in any order, chooses alike.

A record is published at, and withdrawn from, the part of its key. A lookup asks each part for the keys that
belong to it, in prefix order, and `IndexParts.joined` puts the answers together again: the prefix ends at the
first key that its part does not have. Requirements OP-3, LK-1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from kvsp_core.messages import LookupAnswer, LookupRequest
from kvsp_core.prefix import found_replicas
from kvsp_core.records import ReplicaRecord
from kvsp_core.validation import check_base_uris

__all__ = ["IndexParts"]


def _ordered(uris: str | Iterable[str]) -> tuple[str, ...]:
    return (uris,) if isinstance(uris, str) else tuple(sorted(uris))


@attrs.frozen
class IndexParts:
    """The parts of an index: one base URI for an index in one piece, none where there is no index.

    Raises `InvalidValue` where one is none, or is named twice.
    """

    uris: tuple[str, ...] = attrs.field(converter=_ordered)

    def __attrs_post_init__(self) -> None:
        check_base_uris(self.uris, "index")

    def __bool__(self) -> bool:
        return bool(self.uris)

    def of(self, block_key: str) -> str:
        """Return the base URI of the part that a block key, in hex, belongs to."""
        return self.uris[int(block_key[:16], 16) * len(self.uris) >> 64]

    def shares(self, request: LookupRequest) -> dict[str, LookupRequest]:
        """Return the lookup that each part is to be asked, by base URI; parts without a key are left out."""
        if len(self.uris) == 1:
            return {self.uris[0]: request}
        keys: dict[str, list[str]] = {}
        for key in request.block_keys:
            keys.setdefault(self.of(key), []).append(key)
        return {uri: attrs.evolve(request, block_keys=tuple(share)) for uri, share in keys.items()}

    def joined(
        self, request: LookupRequest, answers: Mapping[str, LookupAnswer]
    ) -> tuple[tuple[ReplicaRecord, ...], ...]:
        """Return the replicas of the leading blocks that the parts know, in the order of the request.

        `answers` are those to all its `shares`. Raises `RemoteProtocolError` where one of them is not about
        the keys that its part was asked for.
        """
        if len(self.uris) == 1:
            return found_replicas(request, answers[self.uris[0]])
        found = {
            uri: iter(found_replicas(share, answers[uri])) for uri, share in self.shares(request).items()
        }
        blocks: list[tuple[ReplicaRecord, ...]] = []
        for key in request.block_keys:
            replicas = next(found[self.of(key)], None)
            if replicas is None:
                break
            blocks.append(replicas)
        return tuple(blocks)
