"""Replica records by the million, packed: what the replica index keeps them in.

Block keys lie in *chunks* of up to 512, in the order in which they came, which is mostly the order of a
prompt. So a prefix is found by one dictionary lookup for each chunk and compared as octets. What many records
share (holder, descriptor, scope, residency ...) is a `Kind`, kept and encoded once. Of each chunk, a `Column`
holds what the records of one kind have of their own, as rows in arrays: digest, size, expiry, layer digests.

The order of keys is a matter of speed alone. Whatever it is, the answers are the same; where a lookup finds a
prefix in many pieces, the keys are moved together in the order of the lookup, a bounded number at a time.

Nothing here is an object for each record, so the garbage collector has little to look at.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush, nsmallest
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import msgspec

from kvsp_core.records import ReplicaRecord, Residency

__all__ = ["KEY_OCTETS", "Column", "Kind", "KindKey", "PackedReplicas", "Segment", "Space"]

KEY_OCTETS: Final = 32
_SLOTS: Final = 512
_GONE: Final = bytes(KEY_OCTETS)  # never a block key, so a slot that holds it matches nothing
_MOVED: Final = ("", None)  # the owner of keys that were moved together
_BUCKET_MS: Final = 1000  # how closely columns are sorted by when their first record expires
# A prefix in more than a few pieces that are shorter than this on average is moved together, so many records
# of it at a time.
_FEW_PIECES: Final = 4
_PIECE_KEYS: Final = 16
_MOVED_RECORDS: Final = 1024
# What things count for in the room of a client, about what they take in memory.
_RECORD_BYTES: Final = 256
_KIND_BYTES: Final = 2048


class Space(NamedTuple):
    """Where records are comparable: one descriptor, one scope."""

    compat_id: str
    scope_id: str


class KindKey(NamedTuple):
    """What makes a kind of record: all that its records share."""

    client: str
    """Who published, and whose record limit they count against."""
    holder_id: str
    holder: str
    space: Space
    codec: int
    residency: tuple[Residency, ...]
    moqt_namespace: str | None
    by_layer: bool
    """Whether the records have layer digests."""


class Kind:
    """A kind of record, with its part of the JSON of each, encoded once, and the number of its records."""

    __slots__ = ("end", "head", "holder_id", "key", "records", "space", "tail")

    def __init__(self, key: KindKey) -> None:
        self.key = key
        self.holder_id = key.holder_id
        self.space = key.space
        self.records = 0
        self.head = (
            f'","compat_id":"{key.space.compat_id}","scope_id":"{key.space.scope_id}",'
            f'"holder":{_json(key.holder)},"codec":{key.codec},"size":'
        )
        namespace = f',"moqt_namespace":{_json(key.moqt_namespace)}' if key.moqt_namespace is not None else ""
        residency = [
            {"tier": entry.tier, "layers": entry.layers}
            | ({} if entry.read_mbit_per_s is None else {"read_mbit_per_s": entry.read_mbit_per_s})
            for entry in key.residency
        ]
        self.tail = f',"residency":{_json(residency)},"ttl_ms":'
        self.end = namespace + "}"


class Column:
    """The records of one kind whose keys lie in one chunk: a row for each, by ascending slot."""

    __slots__ = (
        "bucket",
        "chunk",
        "digests",
        "earliest_ms",
        "expiries_ms",
        "kind",
        "layers",
        "sizes",
        "slots",
    )

    def __init__(self, chunk: Chunk, kind: Kind) -> None:
        self.chunk = chunk
        self.kind = kind
        self.slots = array("H")
        self.digests = bytearray()
        self.sizes = array("Q")
        self.expiries_ms = array("q")
        self.layers: list[bytes] | None = [] if kind.key.by_layer else None
        # No record of the column expires before this; a refresh need not raise it.
        self.earliest_ms = 0
        self.bucket = 0

    def row_of(self, slot: int) -> int:
        """Return the row of a slot, or -1."""
        slots = self.slots
        row = slot - slots[0]
        if not 0 <= row < len(slots) or slots[row] != slot:  # not one stretch of slots: search
            row = bisect_left(slots, slot)
            if row == len(slots) or slots[row] != slot:
                return -1
        return row

    def digest(self, row: int) -> bytes:
        """Return the replica digest of a row."""
        return bytes(self.digests[row * KEY_OCTETS : (row + 1) * KEY_OCTETS])

    def digest_text(self, row: int) -> str:
        """Return the replica digest of a row as records state it."""
        return "sha-256:" + self.digests[row * KEY_OCTETS : (row + 1) * KEY_OCTETS].hex()

    def layer_digests(self, row: int) -> tuple[str, ...] | None:
        """Return the layer digests of a row, or None where the kind has none."""
        if self.layers is None:
            return None
        layers = self.layers[row].hex()
        return tuple(layers[at : at + 2 * KEY_OCTETS] for at in range(0, len(layers), 2 * KEY_OCTETS))

    def row_bytes(self, row: int) -> int:
        """Return the room that a row takes."""
        return _RECORD_BYTES + (len(self.layers[row]) if self.layers is not None else 0)

    def insert(self, slot: int, digest: bytes, size: int, expiry_ms: int, layers: bytes) -> None:
        """Add the row of a slot that has none."""
        slots = self.slots
        if not slots or slot > slots[-1]:
            slots.append(slot)
            self.digests += digest
            self.sizes.append(size)
            self.expiries_ms.append(expiry_ms)
            if self.layers is not None:
                self.layers.append(layers)
            return
        row = bisect_left(slots, slot)
        slots.insert(row, slot)
        self.digests[row * KEY_OCTETS : row * KEY_OCTETS] = digest
        self.sizes.insert(row, size)
        self.expiries_ms.insert(row, expiry_ms)
        if self.layers is not None:
            self.layers.insert(row, layers)

    def cut(self, first: int, end: int) -> None:
        """Take out the rows from `first` to before `end`."""
        del self.slots[first:end]
        del self.digests[first * KEY_OCTETS : end * KEY_OCTETS]
        del self.sizes[first:end]
        del self.expiries_ms[first:end]
        if self.layers is not None:
            del self.layers[first:end]

    def extend(self, slots: Iterable[int], source: Column, first: int, end: int) -> None:
        """Add rows of another column of this kind at slots that follow all of this one's."""
        self.slots.extend(slots)
        self.digests += source.digests[first * KEY_OCTETS : end * KEY_OCTETS]
        self.sizes += source.sizes[first:end]
        self.expiries_ms += source.expiries_ms[first:end]
        if self.layers is not None and source.layers is not None:
            self.layers += source.layers[first:end]

    def stretches(self, first_slot: int, end_slot: int, now_ms: int) -> Iterator[tuple[int, int, int]]:
        """Go through what is unexpired of these slots: stretches of consecutive ones, with the first row."""
        slots, expiries_ms = self.slots, self.expiries_ms
        start = row = bisect_left(slots, first_slot)
        end = bisect_left(slots, end_slot, row)
        while row < end:
            if expiries_ms[row] <= now_ms:
                start = row = row + 1
                continue
            row += 1
            if row == end or slots[row] != slots[row - 1] + 1 or expiries_ms[row] <= now_ms:
                yield slots[start], slots[row - 1] + 1, start
                start = row


class Chunk:
    """Up to 512 block keys, and a column for each kind of record that some of them have."""

    __slots__ = ("columns", "keys", "live", "number", "owner", "slot_hint", "uses")

    def __init__(self, number: int, owner: Owner) -> None:
        self.number = number
        self.owner = owner
        self.keys = bytearray()
        self.columns: dict[str, tuple[Column, ...]] = {}  # by holder-id
        self.uses = array("I")  # how many records each slot has
        self.live = 0  # how many slots have any
        self.slot_hint = 0  # the slot after the one asked for last

    def slot_of(self, key: bytes) -> int:
        """Return the slot of a key that lies here: mostly the one after that of the key before it."""
        keys = self.keys
        place = self.slot_hint * KEY_OCTETS
        if not keys.startswith(key, place):
            place = keys.find(key)
            while place % KEY_OCTETS:
                place = keys.find(key, place + 1)
        slot = place // KEY_OCTETS
        self.slot_hint = slot + 1
        return slot

    def column_of(self, kind: Kind) -> Column | None:
        """Return the column of a kind, or None."""
        return next((c for c in self.columns.get(kind.holder_id, ()) if c.kind is kind), None)

    def run_length(self, slot: int, keys: bytes, at: int) -> int:
        """Return how many keys from `slot` on equal those of `keys` from position `at` on; the first does."""
        own = self.keys
        start, offset = slot * KEY_OCTETS, at * KEY_OCTETS
        most = min(len(own) - start, len(keys) - offset)
        if most == KEY_OCTETS or not own.startswith(
            keys[offset + KEY_OCTETS : offset + 2 * KEY_OCTETS], start + KEY_OCTETS
        ):
            return 1
        if own.startswith(keys[offset : offset + most], start):
            return most // KEY_OCTETS
        same, step = 2 * KEY_OCTETS, KEY_OCTETS
        while own.startswith(keys[offset + same : offset + same + step], start + same):
            same, step = same + step, step * 2
        while step > KEY_OCTETS:
            step //= 2
            if own.startswith(keys[offset + same : offset + same + step], start + same):
                same += step
        return same // KEY_OCTETS


class Segment(NamedTuple):
    """Consecutive keys of a lookup that the same columns hold in consecutive rows."""

    at: int
    """The position of the first key in the lookup."""
    length: int
    replicas: tuple[tuple[Column, int], ...]
    """Each column with the row of the first key."""


Owner: TypeAlias = tuple[str, Space | None]
"""Whose new keys a chunk takes: a holder's of a space, or those that are moved together."""

_STAND_IN_KEYS: Final = b"".join(number.to_bytes(KEY_OCTETS, "big") for number in range(_SLOTS))
_STAND_IN_KEY: Final = (_SLOTS // 2).to_bytes(KEY_OCTETS, "big")


def _stand_in() -> Chunk:
    """Return a full chunk with a column that has no row for any slot."""
    space = Space("", "")
    nobody = KindKey("", "", "", space, 0, (), None, by_layer=False)
    chunk = Chunk(-1, ("", space))
    chunk.keys += _STAND_IN_KEYS
    column = Column(chunk, Kind(nobody))
    column.slots.append(0xFFFF)  # no slot of any chunk
    chunk.columns[""] = (column,)
    return chunk


Run: TypeAlias = tuple[int, int, Chunk, int]
"""Keys that lie together: position of the first in the lookup, how many, and where."""


class PackedReplicas:
    """Replica records by holder-id and block key. Keys and digests are raw octets; expiry is in ms."""

    def __init__(self) -> None:
        self._where: dict[bytes, int] = {}  # the number of each key's chunk
        self._chunks: dict[int, Chunk] = {}
        self._next_chunk = 0
        self._kinds: dict[KindKey, Kind] = {}
        self._spaces: dict[Space, int] = {}  # and how many kinds are in it
        # The chunk to which the next new key of a holder is appended, or of keys that are moved together.
        self._open: dict[Owner, Chunk] = {}
        # Columns by when their first record may expire; a column is looked at when its bucket comes up.
        self._buckets: dict[int, list[Column]] = {}
        self._bucket_heap: list[int] = []
        self._stand_in = _stand_in()
        self.records = 0
        self.total_bytes = 0
        """The room that all records take, about what they take in memory."""
        self.used_bytes: dict[str, int] = {}
        """The same of each client's."""
        self.generation = 0
        """Rises when anything is changed or moved: what was found before may be in other rows since."""

    @property
    def keys(self) -> int:
        """The number of different block keys."""
        return len(self._where)

    def records_by_holder(self) -> dict[str, int]:
        """Return how many records each holder has."""
        counts: dict[str, int] = {}
        for key, kind in self._kinds.items():
            counts[key.holder] = counts.get(key.holder, 0) + kind.records
        return counts

    # One record

    def find(self, holder_id: str, key: bytes) -> tuple[Column, int] | None:
        """Return the record of a holder for a key, expired or not, as its column and row.

        What is not there is looked for in a chunk that stands for it: whoever may not know whether a record
        exists must not learn it from the time that this takes.
        """
        number = self._where.get(key)
        chunk = self._stand_in if number is None else self._chunks[number]
        slot = chunk.slot_of(_STAND_IN_KEY if number is None else key)
        for column in chunk.columns.get(holder_id) or self._stand_in.columns[""]:
            row = column.row_of(slot)
            if row >= 0:
                return column, row
        return None

    def needed_bytes(self, kind_key: KindKey, layers: bytes) -> int:
        """Return the room that a record would take."""
        return _RECORD_BYTES + len(layers) + (0 if kind_key in self._kinds else _KIND_BYTES)

    def insert(
        self, key: bytes, kind_key: KindKey, digest: bytes, size: int, expiry_ms: int, layers: bytes
    ) -> None:
        """Add a record. The holder must have none for this key."""
        self.generation += 1
        self._charge(kind_key.client, self.needed_bytes(kind_key, layers))
        kind = self._kinds.get(kind_key)
        if kind is None:
            kind = self._kinds[kind_key] = Kind(kind_key)
            self._spaces[kind.space] = self._spaces.get(kind.space, 0) + 1
        chunk, slot = self._place(key, (kind.holder_id, kind.space))
        column = chunk.column_of(kind) or self._new_column(chunk, kind)
        column.insert(slot, digest, size, expiry_ms, layers)
        chunk.uses[slot] += 1
        kind.records += 1
        self.records += 1
        self._expires_at(column, expiry_ms)

    def set_expiry(self, column: Column, row: int, expiry_ms: int) -> None:
        """Let a record expire at another time."""
        self.generation += 1
        column.expiries_ms[row] = expiry_ms
        if expiry_ms < column.earliest_ms:
            self._expires_at(column, expiry_ms)

    def remove(self, column: Column, row: int) -> None:
        """Take a record out."""
        self._remove_rows(column, row, row + 1)
        self._tidy(column.chunk)

    def record(self, column: Column, row: int, now_ms: int) -> ReplicaRecord:
        """Return a record with the time that remains."""
        kind = column.kind.key
        slot = column.slots[row]
        return ReplicaRecord(
            block_key=column.chunk.keys[slot * KEY_OCTETS : (slot + 1) * KEY_OCTETS].hex(),
            compat_id=kind.space.compat_id,
            scope_id=kind.space.scope_id,
            holder=kind.holder,
            codec=kind.codec,
            size=column.sizes[row],
            digest=column.digest_text(row),
            layer_digests=column.layer_digests(row),
            residency=kind.residency,
            moqt_namespace=kind.moqt_namespace,
            ttl_ms=column.expiries_ms[row] - now_ms,
        )

    def all_records(self, now_ms: int) -> Iterator[tuple[str, str, ReplicaRecord]]:
        """Go through all unexpired records, with holder-id and publishing client: for `freeze`."""
        for chunk in self._chunks.values():
            for columns in chunk.columns.values():
                for column in columns:
                    for row in range(len(column.slots)):
                        if column.expiries_ms[row] > now_ms:
                            kind = column.kind.key
                            yield kind.holder_id, kind.client, self.record(column, row, now_ms)

    # A prefix

    def match(
        self, keys: bytes, space: Space, *, named: Sequence[str], most_replicas: int, now_ms: int
    ) -> list[Segment]:
        """Return the leading keys that have an unexpired record in the space, with at most so many for each.

        Records of the holders `named` come first, then those that have been here longest.
        """
        segments: list[Segment] = []
        if space not in self._spaces:
            return segments
        runs = self._runs(keys)
        if len(runs) > _FEW_PIECES and len(runs) * _PIECE_KEYS > sum(run[1] for run in runs):
            self._move_together(runs)
            runs = self._runs(keys)
        for at, count, chunk, slot in runs:
            found = _cover(chunk, (slot, slot + count), space, named, most_replicas, now_ms)
            matched = 0
            for first_slot, end_slot, replicas in found:
                segments.append(Segment(at + first_slot - slot, end_slot - first_slot, replicas))
                matched += end_slot - first_slot
            if matched < count:
                break
        return segments

    def _runs(self, keys: bytes) -> list[Run]:
        """Return where the leading keys that are known at all lie."""
        runs: list[Run] = []
        where, chunks = self._where, self._chunks
        at, total = 0, len(keys) // KEY_OCTETS
        while at < total:
            key = keys[at * KEY_OCTETS : (at + 1) * KEY_OCTETS]
            number = where.get(key)
            if number is None:
                break
            chunk = chunks[number]
            slot = chunk.slot_of(key)
            count = chunk.run_length(slot, keys, at)
            runs.append((at, count, chunk, slot))
            at += count
        return runs

    # Time

    def next_expiry_ms(self) -> int | None:
        """Return when to `sweep` next, or None where nothing expires."""
        return self._bucket_heap[0] * _BUCKET_MS if self._bucket_heap else None

    def sweep(self, now_ms: int, most_columns: int) -> int:
        """Take out what has expired, looking at no more than so many columns; return how many records."""
        removed = 0
        while self._bucket_heap and self._bucket_heap[0] * _BUCKET_MS <= now_ms and most_columns > 0:
            number = self._bucket_heap[0]
            bucket = self._buckets[number]
            while bucket and most_columns > 0:
                column = bucket.pop()
                if column.bucket == number:
                    removed += self._sweep_column(column, now_ms)
                    most_columns -= 1
            if not bucket:
                heappop(self._bucket_heap)
                del self._buckets[number]
        return removed

    def _sweep_column(self, column: Column, now_ms: int) -> int:
        column.bucket = 0
        if not column.slots:
            return 0
        column.earliest_ms = min(column.expiries_ms)
        if column.earliest_ms > now_ms:
            self._schedule(column)
            return 0
        before = row = len(column.slots)
        while row:
            end = row
            while row and column.expiries_ms[row - 1] <= now_ms:
                row -= 1
            if row < end:
                self._remove_rows(column, row, end)
            else:
                row -= 1
        removed = before - len(column.slots)
        if column.slots:
            column.earliest_ms = min(column.expiries_ms)
            self._schedule(column)
        self._tidy(column.chunk)
        return removed

    def _expires_at(self, column: Column, expiry_ms: int) -> None:
        if not column.bucket or expiry_ms < column.earliest_ms:
            column.earliest_ms = expiry_ms
        self._schedule(column)

    def _schedule(self, column: Column) -> None:
        """Have the column looked at soon after its earliest expiry."""
        number = column.earliest_ms // _BUCKET_MS + 1
        if column.bucket and column.bucket <= number:
            return
        column.bucket = number
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = []
            heappush(self._bucket_heap, number)
        bucket.append(column)

    # Where keys lie

    def _place(self, key: bytes, owner: Owner) -> tuple[Chunk, int]:
        """Return where a key lies; a new one is appended to the owner's open chunk."""
        number = self._where.get(key)
        if number is not None:
            chunk = self._chunks[number]
            return chunk, chunk.slot_of(key)
        chunk = self._open_chunk(owner)
        slot = len(chunk.uses)
        chunk.keys += key
        chunk.uses.append(0)
        chunk.live += 1
        self._where[key] = chunk.number
        return chunk, slot

    def _open_chunk(self, owner: Owner) -> Chunk:
        chunk = self._open.get(owner)
        if chunk is None or len(chunk.uses) == _SLOTS:
            chunk = self._open[owner] = self._chunks[self._next_chunk] = Chunk(self._next_chunk, owner)
            self._next_chunk += 1
        return chunk

    def _new_column(self, chunk: Chunk, kind: Kind) -> Column:
        column = Column(chunk, kind)
        chunk.columns[kind.holder_id] = (*chunk.columns.get(kind.holder_id, ()), column)
        return column

    def _remove_rows(self, column: Column, first: int, end: int) -> None:
        """Take rows out, and the keys that then have no record."""
        self.generation += 1
        chunk, kind = column.chunk, column.kind
        uses = chunk.uses
        for slot in column.slots[first:end]:
            uses[slot] -= 1
            if not uses[slot]:
                self._forget_key(chunk, slot)
        freed_bytes = sum(column.row_bytes(row) for row in range(first, end))
        column.cut(first, end)
        if not column.slots:
            self._drop_column(column)
        kind.records -= end - first
        self.records -= end - first
        if not kind.records:
            freed_bytes += _KIND_BYTES
            del self._kinds[kind.key]
            self._spaces[kind.space] -= 1
            if not self._spaces[kind.space]:
                del self._spaces[kind.space]
        self._charge(kind.key.client, -freed_bytes)

    def _charge(self, client: str, size_bytes: int) -> None:
        self.total_bytes += size_bytes
        self.used_bytes[client] = self.used_bytes.get(client, 0) + size_bytes
        if not self.used_bytes[client]:
            del self.used_bytes[client]

    def _forget_key(self, chunk: Chunk, slot: int) -> None:
        start = slot * KEY_OCTETS
        del self._where[bytes(chunk.keys[start : start + KEY_OCTETS])]
        chunk.keys[start : start + KEY_OCTETS] = _GONE
        chunk.live -= 1

    def _drop_column(self, column: Column) -> None:
        columns, holder_id = column.chunk.columns, column.kind.holder_id
        columns[holder_id] = tuple(c for c in columns[holder_id] if c is not column)
        if not columns[holder_id]:
            del columns[holder_id]

    def _tidy(self, chunk: Chunk) -> None:
        """Give up a chunk without keys, and move the rest of one that is nearly empty elsewhere."""
        if chunk.live * 4 >= len(chunk.uses) or chunk.number not in self._chunks:
            return
        if self._open.get(chunk.owner) is chunk:
            del self._open[chunk.owner]
        for slot in [slot for slot, uses in enumerate(chunk.uses) if uses]:
            self._move(chunk, slot, 1)
        del self._chunks[chunk.number]

    # Moving keys together

    def _move_together(self, runs: list[Run]) -> None:
        """Move the first keys that lie in short pieces so that they lie in the order of the lookup."""
        budget = _MOVED_RECORDS
        emptied: dict[int, Chunk] = {}
        for _, count, chunk, slot in runs:
            if count >= _PIECE_KEYS or not all(chunk.uses[slot : slot + count]):
                continue  # long enough, or moved already since the lookup names keys twice
            if budget < count:
                break
            budget -= count * max(1, len(chunk.columns))
            self._move(chunk, slot, count)
            emptied[chunk.number] = chunk
        for chunk in emptied.values():
            self._tidy(chunk)

    def _move(self, chunk: Chunk, slot: int, count: int) -> None:
        """Move keys with all their records to the end of the open chunk of moved keys."""
        while count:
            target = self._open_chunk(_MOVED)
            part = min(count, _SLOTS - len(target.uses))
            self._move_within(chunk, slot, part, target)
            slot, count = slot + part, count - part

    def _move_within(self, chunk: Chunk, slot: int, count: int, target: Chunk) -> None:
        self.generation += 1
        new_slot = len(target.uses)
        shift = new_slot - slot
        for columns in tuple(chunk.columns.values()):
            for column in columns:
                first = bisect_left(column.slots, slot)
                end = bisect_left(column.slots, slot + count, first)
                if first == end:
                    continue
                goal = target.column_of(column.kind) or self._new_column(target, column.kind)
                goal.extend((s + shift for s in column.slots[first:end]), column, first, end)
                self._expires_at(goal, min(column.expiries_ms[first:end]))
                column.cut(first, end)
                if not column.slots:
                    self._drop_column(column)
        start, stop = slot * KEY_OCTETS, (slot + count) * KEY_OCTETS
        target.keys += chunk.keys[start:stop]
        target.uses += chunk.uses[slot : slot + count]
        target.live += count
        for i in range(count):
            key = bytes(chunk.keys[start + i * KEY_OCTETS : start + (i + 1) * KEY_OCTETS])
            self._where[key] = target.number
            chunk.uses[slot + i] = 0
        chunk.keys[start:stop] = bytes(stop - start)
        chunk.live -= count


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _columns(chunk: Chunk, space: Space, named: Sequence[str]) -> list[Column]:
    """Return the columns of a space, those of the named holders first."""
    groups = list(chunk.columns.values())
    if named:
        first = [chunk.columns[holder_id] for holder_id in named if holder_id in chunk.columns]
        groups = first + [group for group in groups if group not in first]
    return [column for group in groups for column in group if column.kind.space == space]


Cover: TypeAlias = tuple[int, int, tuple[tuple[Column, int], ...]]
"""A stretch of slots, and the columns that have records of all of it, with the row of the first slot."""


def _cover(
    chunk: Chunk, slots: tuple[int, int], space: Space, named: Sequence[str], most: int, now_ms: int
) -> list[Cover]:
    """Return what covers these slots, from the first on up to a slot that has no unexpired record."""
    first, end = slots
    columns = _columns(chunk, space, named)
    whole: list[tuple[Column, int]] = []
    for column in columns:
        row = column.row_of(first)
        last = row + end - first - 1
        if row < 0 or last >= len(column.slots) or column.slots[last] != end - 1:
            break
        if column.earliest_ms <= now_ms:
            column.earliest_ms = min(column.expiries_ms)  # refreshes may have left it too early
            if column.earliest_ms <= now_ms:
                break
        whole.append((column, row))
        if len(whole) == most:
            return [(first, end, tuple(whole))]
    else:
        return [(first, end, tuple(whole))] if whole else []
    return _cover_in_parts(columns, first, end, most, now_ms)


def _cover_in_parts(columns: list[Column], first: int, end: int, most: int, now_ms: int) -> list[Cover]:
    """Cut the slots into stretches over which the same columns have records."""
    begins: dict[int, list[tuple[int, Column, int]]] = {}
    ends: dict[int, list[int]] = {}
    for order, column in enumerate(columns):
        for start, stop, row in column.stretches(first, end, now_ms):
            begins.setdefault(start, []).append((order, column, row))
            ends.setdefault(stop, []).append(order)
    active: dict[int, tuple[Column, int]] = {}  # by the order of the columns, with row minus slot
    found: list[Cover] = []
    edges = sorted({first, end, *begins, *ends})
    for start, stop in pairwise(edges):
        for order in ends.get(start, ()):
            del active[order]
        for order, column, row in begins.get(start, ()):
            active[order] = column, row - start
        if not active:
            break
        chosen = [active[order] for order in nsmallest(most, active)]
        found.append((start, stop, tuple((column, shift + start) for column, shift in chosen)))
    return found
