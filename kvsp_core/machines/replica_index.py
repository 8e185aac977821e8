"""The replica index: who holds which block, for how long, and which prefix of a prompt is held at all.

Holders publish records of what they serve and withdraw them; clients look up the keys of a prompt (protocol
sections "Publishing and Withdrawing Replicas" and "Lookup", requirements PB-1, PB-2, LK-1, LK-3, LK-4). The
index is advisory soft state: a record that is not refreshed expires, so what went wrong is forgotten within
one TTL. A lookup sees one descriptor and one scope, and nothing of any other.

A record is named by its holder's holder-id and its block key, so a holder has one record for a key. Who may
publish, withdraw and look up is for the role to decide.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Sequence
from enum import Enum
from typing import Final, TypeAlias, assert_never, get_args

import attrs

from kvsp_core.errors import LocalProtocolError
from kvsp_core.ext_messages import HolderInfo, IndexInfo
from kvsp_core.identity import component_id
from kvsp_core.limits import (
    MAX_INDEX_BYTES,
    MAX_INDEX_BYTES_PER_CLIENT,
    MAX_LOOKUP_ANSWER_BYTES,
    MAX_LOOKUP_KEYS,
    MAX_QUARANTINED,
    MAX_REPLICA_TTL_MS,
    MAX_REPLICAS_PER_KEY,
    QUARANTINE_MS,
)
from kvsp_core.machines.alarms import TimerFired
from kvsp_core.machines.packed_replicas import KEY_OCTETS, Column, KindKey, PackedReplicas, Space
from kvsp_core.machines.replica_match import Match
from kvsp_core.machines.table import Table, refuse, to
from kvsp_core.problems import BAD_REQUEST, CONFLICT, NOT_FOUND, STORAGE_FULL, TOO_LARGE, Problem
from kvsp_core.records import ReplicaRecord

__all__ = [
    "TABLE",
    "Effect",
    "Event",
    "Expired",
    "Found",
    "FrozenIndex",
    "Lookup",
    "Publish",
    "Published",
    "RecordKind",
    "Refused",
    "ReplicaIndex",
    "TimerFired",
    "Withdraw",
    "Withdrawn",
]


class RecordKind(Enum):
    """What the index knows of a holder and a block key."""

    UNKNOWN = "unknown"
    LISTED = "listed"
    QUARANTINED = "quarantined"
    """Withdrawn because its octets were bad: that digest is not accepted again for some time."""


# Events


@attrs.frozen(kw_only=True)
class Publish:
    """A client publishes or refreshes a record, under the holder-id and block key of the request's path."""

    client: str
    holder_id: str
    block_key: str = attrs.field(repr=False)
    record: ReplicaRecord


@attrs.frozen(kw_only=True)
class Withdraw:
    """A record is withdrawn; with a `digest`, only where the record states it, and because it is bad."""

    holder_id: str
    block_key: str = attrs.field(repr=False)
    digest: str | None = attrs.field(default=None, repr=False)


@attrs.frozen(kw_only=True)
class Lookup:
    """A client asks which leading keys of a prompt are held. Replicas at `holders` (base URIs) come first."""

    compat_id: str = attrs.field(repr=False)
    scope_id: str = attrs.field(repr=False)
    block_keys: Sequence[str] = attrs.field(repr=False)
    holders: tuple[str, ...] = ()


Event: TypeAlias = Publish | Withdraw | Lookup | TimerFired


# Effects


@attrs.frozen(kw_only=True)
class Published:
    """Answer a publication: the record is new or was refreshed, and is kept for `ttl_ms`."""

    created: bool
    ttl_ms: int


@attrs.frozen(kw_only=True)
class Withdrawn:
    """Answer a withdrawal: the record is gone."""


@attrs.frozen(kw_only=True)
class Found:
    """Answer a lookup with this."""

    match: Match = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class Refused:
    """Answer with this problem; nothing has changed."""

    problem: Problem


@attrs.frozen(kw_only=True)
class Expired:
    """So many records were not refreshed in time and are gone."""

    records: int


Effect: TypeAlias = Published | Withdrawn | Found | Refused | Expired


# What is legal

_K = RecordKind

TABLE: Final = Table(
    "replica record",
    states=tuple(RecordKind),
    events=get_args(Event),
    cells={
        _K.UNKNOWN: {
            Publish: to(_K.LISTED, _K.UNKNOWN),
            Withdraw: refuse(NOT_FOUND),
            Lookup: to(_K.UNKNOWN),
            TimerFired: to(_K.UNKNOWN),
        },
        _K.LISTED: {
            Publish: to(_K.LISTED),
            Withdraw: to(_K.UNKNOWN, _K.QUARANTINED, _K.LISTED),
            Lookup: to(_K.LISTED),
            TimerFired: to(_K.LISTED, _K.UNKNOWN, _K.QUARANTINED),
        },
        _K.QUARANTINED: {
            Publish: to(_K.LISTED, _K.QUARANTINED),
            Withdraw: refuse(NOT_FOUND),
            Lookup: to(_K.QUARANTINED),
            TimerFired: to(_K.QUARANTINED, _K.UNKNOWN),
        },
    },
)

_SWEPT_COLUMNS: Final = 64  # at each timer, so that one call stays short; the rest follows at once
_NO_RECORD: Final = Problem(NOT_FOUND, "no such record; it was withdrawn or has expired")
_OTHER_REPLICA: Final = Problem(NOT_FOUND, "digest: the record states another replica; it stays")
_FULL: Final = Problem(STORAGE_FULL, "no room for more records of this client; withdraw some")
_QUARANTINED: Final = Problem(
    CONFLICT, "digest: this replica was withdrawn as bad; store the block anew or publish it later"
)


# What happens


@attrs.frozen(kw_only=True)
class FrozenIndex:
    """All that a `ReplicaIndex` holds, as a hashable value; times are what remains."""

    records: tuple[tuple[str, str, ReplicaRecord], ...] = attrs.field(repr=False)
    """Holder-id, publishing client and record, whose `ttl_ms` is what remains."""
    quarantine: tuple[tuple[str, bytes, bytes, int], ...] = attrs.field(repr=False)


class ReplicaIndex:
    """Replica records by holder and block key, soft state in memory.

    A TTL is capped at `max_ttl_ms`. `client_bytes` and `total_bytes` bound what records take in memory, for
    each publishing client and for all. All costs are those of a dictionary, or proportional to the number of
    separate pieces in which a prefix was published.
    """

    def __init__(
        self,
        *,
        max_ttl_ms: int = MAX_REPLICA_TTL_MS,
        max_keys: int = MAX_LOOKUP_KEYS,
        max_replicas: int = MAX_REPLICAS_PER_KEY,
        max_answer_bytes: int = MAX_LOOKUP_ANSWER_BYTES,
        client_bytes: int = MAX_INDEX_BYTES_PER_CLIENT,
        total_bytes: int = MAX_INDEX_BYTES,
        quarantine_ms: int = QUARANTINE_MS,
        max_quarantined: int = MAX_QUARANTINED,
    ) -> None:
        self._max_ttl_ms = max_ttl_ms
        self._max_keys = max_keys
        self._max_replicas = max_replicas
        self._max_answer_bytes = max_answer_bytes
        self._client_bytes = client_bytes
        self._total_bytes = total_bytes
        self._quarantine_ms = quarantine_ms
        self._max_quarantined = max_quarantined
        self.packed = PackedReplicas()
        # (holder-id, key) -> digest and until when, earliest first, since each has the same time.
        self._quarantine: dict[tuple[str, bytes], tuple[bytes, int]] = {}
        self._refreshed = Published(created=False, ttl_ms=0)  # the last answer to a refresh, mostly the next

    def limit(self, *, max_ttl_ms: int, max_keys: int) -> None:
        """Grant TTLs and answer lookups within these limits from now on; records there are run on."""
        self._max_ttl_ms, self._max_keys = max_ttl_ms, max_keys

    # Questions

    def kind_of(self, holder_id: str, block_key: str, now_ms: int) -> RecordKind:
        """Return what is known of a holder and a key at this moment."""
        key = unhexlify(block_key)
        if self._listed(holder_id, key, now_ms):
            return RecordKind.LISTED
        _, until_ms = self._quarantine.get((holder_id, key), (b"", now_ms))
        return RecordKind.QUARANTINED if now_ms < until_ms else RecordKind.UNKNOWN

    def record_of(self, holder_id: str, block_key: str, now_ms: int) -> ReplicaRecord | None:
        """Return the record of a holder for a key, with the time that remains."""
        found = self._listed(holder_id, unhexlify(block_key), now_ms)
        return self.packed.record(*found, now_ms) if found else None

    def scope_of(self, holder_id: str, block_key: str, now_ms: int) -> str | None:
        """Return the scope of a holder's record for a key, or None where there is none."""
        found = self._listed(holder_id, unhexlify(block_key), now_ms)
        return found[0].kind.space.scope_id if found else None

    def describe(self) -> IndexInfo:
        """Return how much is held, for operators: expired records count until their memory is freed."""
        holders = sorted(self.packed.records_by_holder().items())
        return IndexInfo(
            records=self.packed.records,
            size_bytes=self.packed.total_bytes,
            holders=tuple(HolderInfo(holder=holder, records=records) for holder, records in holders),
        )

    def next_deadline_ms(self) -> int | None:
        """Return when to send `TimerFired` next, or None. Records may be gone before: expiry is exact."""
        due_ms = self.packed.next_expiry_ms()
        if self._quarantine:
            _, until_ms = next(iter(self._quarantine.values()))
            return until_ms if due_ms is None else min(due_ms, until_ms)
        return due_ms

    # Events

    def handle(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Let an event happen at `now_ms` and return the answer to it."""
        match event:
            case Publish():
                return (self._publish(event, now_ms),)
            case Withdraw():
                return (self._withdraw(event, now_ms),)
            case Lookup():
                return (self._look_up(event, now_ms),)
            case TimerFired():
                return self._sweep(now_ms)
            case _:
                assert_never(event)

    def _publish(self, event: Publish, now_ms: int) -> Effect:
        record = event.record
        key = unhexlify(event.block_key)
        ttl_ms = record.ttl_ms if record.ttl_ms < self._max_ttl_ms else self._max_ttl_ms
        found = self.packed.find(event.holder_id, key)
        if found is None or not _is_same(found[0], found[1], event):
            return self._insert(event, key, now_ms, ttl_ms, found)
        column, row = found
        created = column.expiries_ms[row] <= now_ms
        self.packed.set_expiry(column, row, now_ms + ttl_ms)
        if created:
            return Published(created=True, ttl_ms=ttl_ms)
        if ttl_ms != self._refreshed.ttl_ms:
            self._refreshed = Published(created=False, ttl_ms=ttl_ms)
        return self._refreshed

    def _insert(
        self, event: Publish, key: bytes, now_ms: int, ttl_ms: int, replaced: tuple[Column, int] | None
    ) -> Effect:
        record = event.record
        digest = unhexlify(record.digest[8:])
        refused, until_ms = self._quarantine.get((event.holder_id, key), (b"", 0))
        if refused == digest and now_ms < until_ms:
            return Refused(problem=_QUARANTINED)
        if problem := _fault(event, key):
            return Refused(problem=problem)
        kind = KindKey(
            client=event.client,
            holder_id=event.holder_id,
            holder=record.holder,
            space=Space(record.compat_id, record.scope_id),
            codec=record.codec,
            residency=record.residency,
            moqt_namespace=record.moqt_namespace,
            by_layer=record.layer_digests is not None,
        )
        layers = unhexlify("".join(record.layer_digests or ()))
        if not self._has_room(kind, layers, replaced):
            return Refused(problem=_FULL)
        created = True
        if replaced is not None:
            column, row = replaced
            created = column.expiries_ms[row] <= now_ms
            self.packed.remove(column, row)
        self.packed.insert(key, kind, digest, record.size, now_ms + ttl_ms, layers)
        return Published(created=created, ttl_ms=ttl_ms)

    def _has_room(self, kind: KindKey, layers: bytes, replaced: tuple[Column, int] | None) -> bool:
        """Return whether a record fits within the limits, once the one it replaces is gone."""
        packed = self.packed
        more_bytes = packed.needed_bytes(kind, layers)
        own_bytes = packed.used_bytes.get(kind.client, 0) + more_bytes
        all_bytes = packed.total_bytes + more_bytes
        if replaced is not None:
            column, row = replaced
            all_bytes -= column.row_bytes(row)
            if column.kind.key.client == kind.client:
                own_bytes -= column.row_bytes(row)
        return own_bytes <= self._client_bytes and all_bytes <= self._total_bytes

    def _withdraw(self, event: Withdraw, now_ms: int) -> Effect:
        key = unhexlify(event.block_key)
        found = self._listed(event.holder_id, key, now_ms)
        if found is None:
            return Refused(problem=_NO_RECORD)
        if event.digest is not None:
            digest = unhexlify(event.digest[8:])
            if found[0].digest(found[1]) != digest:
                return Refused(problem=_OTHER_REPLICA)
            self._quarantine.pop((event.holder_id, key), None)
            self._quarantine[event.holder_id, key] = digest, now_ms + self._quarantine_ms
            if len(self._quarantine) > self._max_quarantined:
                del self._quarantine[next(iter(self._quarantine))]
        self.packed.remove(*found)
        return Withdrawn()

    def _look_up(self, event: Lookup, now_ms: int) -> Effect:
        keys = event.block_keys
        if len(keys) > self._max_keys:
            detail = f"block_keys: at most {self._max_keys} keys a lookup; split the prefix into several"
            return Refused(problem=Problem(TOO_LARGE, detail))
        segments = self.packed.match(
            unhexlify("".join(keys)),
            Space(event.compat_id, event.scope_id),
            named=tuple(dict.fromkeys(map(component_id, event.holders))),
            most_replicas=self._max_replicas,
            now_ms=now_ms,
        )
        return Found(match=Match(keys, segments, now_ms, self._max_answer_bytes, self.packed))

    def _sweep(self, now_ms: int) -> tuple[Effect, ...]:
        while self._quarantine:
            place = next(iter(self._quarantine))
            if self._quarantine[place][1] > now_ms:
                break
            del self._quarantine[place]
        expired = self.packed.sweep(now_ms, _SWEPT_COLUMNS)
        if not expired:
            return ()
        return (Expired(records=expired),)

    # Parts

    def _listed(self, holder_id: str, key: bytes, now_ms: int) -> tuple[Column, int] | None:
        found = self.packed.find(holder_id, key)
        return found if found is not None and found[0].expiries_ms[found[1]] > now_ms else None

    # The whole state

    def freeze(self, now_ms: int) -> FrozenIndex:
        """Return all that is held as a hashable value, with what remains of each time."""
        return FrozenIndex(
            records=tuple(
                sorted(self.packed.all_records(now_ms), key=lambda entry: (entry[0], entry[2].block_key))
            ),
            quarantine=tuple(
                (holder_id, key, digest, until_ms - now_ms)
                for (holder_id, key), (digest, until_ms) in self._quarantine.items()
                if now_ms < until_ms
            ),
        )

    def thaw(self, frozen: FrozenIndex, now_ms: int) -> None:
        """Take over the state of another index. This one must be new and hold nothing."""
        if self.packed.records:
            raise LocalProtocolError("an index that holds records cannot take over another's; use a new one")
        for holder_id, client, record in frozen.records:
            publication = Publish(
                client=client, holder_id=holder_id, block_key=record.block_key, record=record
            )
            self.handle(publication, now_ms)
        for holder_id, key, digest, left_ms in frozen.quarantine:
            self._quarantine[holder_id, key] = digest, now_ms + left_ms


def _is_same(column: Column, row: int, event: Publish) -> bool:
    """Return whether a record says what is kept already, but for its TTL.

    Equal digests mean equal layer digests: a list that was accepted once agrees with its digest.
    """
    record, kind = event.record, column.kind.key
    start = row * KEY_OCTETS
    return (
        column.digests[start : start + KEY_OCTETS] == unhexlify(record.digest[8:])
        and column.sizes[row] == record.size
        and kind.client == event.client
        and kind.holder == record.holder
        and kind.space.scope_id == record.scope_id
        and kind.space.compat_id == record.compat_id
        and kind.codec == record.codec
        and kind.residency == record.residency
        and kind.by_layer == (record.layer_digests is not None)
        and kind.moqt_namespace == record.moqt_namespace
        and event.block_key == record.block_key
    )


def _fault(event: Publish, key: bytes) -> Problem | None:
    """Return what is wrong with a publication that the record alone does not show."""
    record = event.record
    if event.block_key != record.block_key:
        return Problem(BAD_REQUEST, "block_key: expected the key in the path")
    if component_id(record.holder) != event.holder_id:
        return Problem(BAD_REQUEST, "holder: expected the base URI whose holder-id is in the path")
    if not any(key):
        return Problem(BAD_REQUEST, "block_key: 32 zero octets stand before the first block and name none")
    if not record.digests_agree():
        return Problem(BAD_REQUEST, "layer_digests: their digest is not that of the replica")
    return None
