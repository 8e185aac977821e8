"""What a lookup in the replica index found (protocol section "Lookup"; requirements LK-1, LK-2, LK-4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Final

from kvsp_core.errors import LocalProtocolError
from kvsp_core.machines.packed_replicas import KEY_OCTETS, Column, PackedReplicas, Segment
from kvsp_core.records import ReplicaRecord, Residency

__all__ = ["Match", "Source"]

_PIECES_JOINED: Final = 2000  # strings, so that pieces of an answer are neither many nor large


class Source:
    """A replica as the estimates see it; nothing is copied."""

    __slots__ = ("_column", "_row")

    def __init__(self, column: Column, row: int) -> None:
        self._column = column
        self._row = row

    @property
    def holder(self) -> str:
        """The base URI of who has it."""
        return self._column.kind.key.holder

    @property
    def digest(self) -> str:
        """The digest of the replica."""
        return self._column.digest_text(self._row)

    @property
    def size(self) -> int:
        """Octets of all K and V sections."""
        return self._column.sizes[self._row]

    @property
    def layer_digests(self) -> tuple[str, ...] | None:
        """One for each layer of the block, or None."""
        return self._column.layer_digests(self._row)

    @property
    def residency(self) -> tuple[Residency, ...]:
        """Which layers are in which tier."""
        return self._column.kind.key.residency


class Match:
    """What a lookup of `keys` found, as it was at `now_ms`; its JSON has at most about `most_bytes`.

    It reads rows of `packed`, so use it before anything changes there: later it raises `LocalProtocolError`.
    """

    def __init__(
        self,
        keys: Sequence[str],
        segments: list[Segment],
        now_ms: int,
        most_bytes: int,
        packed: PackedReplicas,
    ) -> None:
        self._keys = keys
        self._segments = segments
        self._now_ms = now_ms
        self._most_bytes = most_bytes
        self._packed = packed
        self._generation = packed.generation
        self.requested = len(keys)
        self.matched = sum(segment.length for segment in segments)
        """The number of leading keys with at least one unexpired replica."""

    def replicas(self) -> list[tuple[ReplicaRecord, ...]]:
        """Return the records of each matched key, with the time that remains."""
        self._check()
        record = self._packed.record
        return [
            tuple(record(column, row + i, self._now_ms) for column, row in segment.replicas)
            for segment in self._segments
            for i in range(segment.length)
        ]

    def sources(self) -> list[tuple[Source, ...]]:
        """Return what the estimates of `kvsp_core.machines.placement` need of the records of each key."""
        self._check()
        return [
            tuple(Source(column, row + i) for column, row in segment.replicas)
            for segment in self._segments
            for i in range(segment.length)
        ]

    def json(self, targets: bytes = b"") -> bytes:
        """Return the answer's body. `targets` is the JSON of the member of that name, or empty.

        Where it would be longer than the limit, replicas are left out, down to one for each key, and then
        keys at the end.
        """
        self._check()
        return b"".join(self._pieces(targets))

    def _pieces(self, targets: bytes) -> Iterator[bytes]:
        most_replicas, most_keys = self._fit()
        start = f'{{"matched":{min(self.matched, most_keys)},"blocks":['
        pieces = [start]
        for segment in self._segments:
            length = min(segment.length, most_keys - segment.at)
            if length <= 0:
                break
            keys = self._keys[segment.at : segment.at + length]
            parts: list[Iterable[str]] = [repeat('{"block_key":"'), keys, repeat('","replicas":[')]
            for column, row in segment.replicas[:most_replicas]:
                parts += _record_parts(column, row, keys, self._now_ms)
                parts.append(repeat(","))
            parts[-1] = repeat("]},")
            pieces += chain.from_iterable(zip(*parts, strict=False))
            if len(pieces) > _PIECES_JOINED:
                last = pieces.pop()
                yield "".join(pieces).encode()
                pieces = [last]
        pieces[-1] = pieces[-1].removesuffix(",")
        pieces.append(f'],"targets":{targets.decode()}}}' if targets else "]}")
        yield "".join(pieces).encode()

    def _check(self) -> None:
        if self._generation != self._packed.generation:
            raise LocalProtocolError("the index has changed since this lookup; use a match at once")

    def _fit(self) -> tuple[int, int]:
        """Return how many replicas of each key, and how many keys, the answer has room for."""
        most = max((len(segment.replicas) for segment in self._segments), default=1)
        while most > 1:
            if sum(_answer_size(segment, most) for segment in self._segments) <= self._most_bytes:
                break
            most -= 1
        left_bytes, keys = self._most_bytes, 0
        for segment in self._segments:
            fitting = min(segment.length, left_bytes * segment.length // _answer_size(segment, most))
            keys += fitting
            left_bytes -= _answer_size(segment, most)
            if fitting < segment.length:
                break
        return most, keys


def _record_parts(column: Column, row: int, keys: Sequence[str], now_ms: int) -> list[Iterable[str]]:
    """Return the JSON of a record of each key as pieces: where they differ one for each, else repeated."""
    end = row + len(keys)
    kind = column.kind
    digests = column.digests[row * KEY_OCTETS : end * KEY_OCTETS].hex()
    parts: list[Iterable[str]] = [
        repeat('{"block_key":"'),
        keys,
        repeat(kind.head),
        map(str, column.sizes[row:end]),
        repeat(',"digest":"sha-256:'),
        [digests[at : at + 2 * KEY_OCTETS] for at in range(0, len(digests), 2 * KEY_OCTETS)],
    ]
    if column.layers is not None:
        parts += [repeat('","layer_digests":["'), map(_quoted, column.layers[row:end]), repeat('"]')]
    else:
        parts.append(repeat('"'))
    ttls_ms = [str(expiry_ms - now_ms) for expiry_ms in column.expiries_ms[row:end]]
    return [*parts, repeat(kind.tail), ttls_ms, repeat(kind.end)]


_QUOTE: Final = '"'
_BETWEEN: Final = '","'


def _quoted(layers: bytes) -> str:
    return layers.hex(_QUOTE, KEY_OCTETS).replace(_QUOTE, _BETWEEN)


def _answer_size(segment: Segment, most_replicas: int) -> int:
    """Return about how long the JSON of a segment is."""
    size = 100 + sum(_record_size(column, row) for column, row in segment.replicas[:most_replicas])
    return segment.length * size


def _record_size(column: Column, row: int) -> int:
    """Return about how long the JSON of a record is."""
    layers = 0 if column.layers is None else len(column.layers[row]) // KEY_OCTETS
    return len(column.kind.head) + len(column.kind.tail) + 200 + 67 * layers
