"""What a holder tells the index: publish, refresh at a third of the TTL, withdraw (PB-3, LE-4, OP-3,
decision W12).

`Publisher` keeps for each block what the index should list and what it may list, and has one request on its
way for each block, so that a withdrawal never overtakes the publication before it. So many requests are on
their way to each part of the index at a time: a holder that starts with a million blocks, or an index that
comes back empty, is served at that rate, and a part that does not answer holds up none of the others.
Withdrawals go before publications, new publications before refreshes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

import attrs

from kvsp_core.bodies import decoder
from kvsp_core.errors import RemoteProtocolError
from kvsp_core.heads import Response
from kvsp_core.identity import CompatibilityDescriptor, component_id
from kvsp_core.index_parts import IndexParts
from kvsp_core.limits import (
    MAX_INDEX_CALLS,
    PUBLISH_RETRY_MS,
    PUBLISH_TIMEOUT_MS,
    REPLICA_TTL_MS,
)
from kvsp_core.machines.alarms import Alarms
from kvsp_core.messages import PublishAnswer
from kvsp_core.records import ReplicaRecord
from kvsp_core.resources import Operation, PublishReplica, PutDescriptor, WithdrawReplica
from kvsp_core.roles.work import Work

__all__ = ["DeleteRecord", "IndexCall", "Publisher", "PutRecord", "RecordOf", "TellDescriptor"]

_read_answer: Final = decoder(PublishAnswer)

RecordOf: TypeAlias = Callable[[str, int], ReplicaRecord | None]
"""Makes the record of a block with a TTL, or None where it is not held."""


@attrs.frozen
class PutRecord:
    """A call that publishes the record of a block; a refresh where the index should have it already."""

    block: str = attrs.field(repr=False)
    refresh: bool


@attrs.frozen
class DeleteRecord:
    """A call that withdraws the record of a block."""

    block: str = attrs.field(repr=False)


@attrs.frozen
class TellDescriptor:
    """A call that makes a descriptor known to a part of the index."""

    part: str
    compat_id: str = attrs.field(repr=False)


IndexCall: TypeAlias = PutRecord | DeleteRecord | TellDescriptor
"""What a call to the index is for."""


@attrs.define(repr=False)
class _Entry:
    """A block as the index should see it (`wanted`) and as it may see it (`listed`)."""

    block_key: str
    wanted: bool = True
    changed: bool = True  # the index has not been sent the record as it is now
    listed: bool = False  # a publication was sent, and no withdrawal was acknowledged since
    calling: bool = False
    acknowledged_until_ms: int = 0
    listed_until_ms: int = 0
    retries: int = 0


@attrs.define(repr=False)
class _Part:
    """What goes to one part of the index."""

    calls: int = 0
    """Requests on their way."""
    withdrawals: deque[str] = attrs.Factory(deque)
    publications: deque[str] = attrs.Factory(deque)
    refreshes: deque[str] = attrs.Factory(deque)


class Publisher:
    """Keeps the index informed of the blocks of one holder.

    `record_of` makes the record of a block. `random_bytes` spreads retries, and refreshes after them.
    `index_uris` are the parts of the index; where there is none, nothing is published, and withdrawals are
    over at once.
    """

    def __init__(
        self,
        work: Work,
        *,
        holder: str,
        index_uris: tuple[str, ...],
        record_of: RecordOf,
        descriptor_of: Callable[[str], CompatibilityDescriptor | None],
        random_bytes: Callable[[int], bytes],
        ttl_ms: int = REPLICA_TTL_MS,
    ) -> None:
        self._work = work
        self._holder_id = component_id(holder)
        self._index = IndexParts(index_uris)
        self._record_of = record_of
        self._descriptor_of = descriptor_of
        self._random_bytes = random_bytes
        self.ttl_ms = ttl_ms
        """What records are to be granted; holds from the next refresh on."""
        self._stopped = self._silent = False
        self._entries: dict[str, _Entry] = {}
        self._parts = {uri: _Part() for uri in self._index.uris}
        self._alarms: Alarms[str] = Alarms()  # when each block is to be refreshed or tried again
        self._told: set[tuple[str, str]] = set()  # (part, descriptor it was told of)
        self._withdrawn: list[str] = []
        self._refused: list[str] = []

    # What the holder asks for

    def publish(self, block: str, block_key: str, now_ms: int) -> None:
        """Have the index list a block from now on, with the record it then has."""
        if not self._index or self._stopped:
            return
        entry = self._entries.get(block)
        if entry is None:
            entry = self._entries[block] = _Entry(block_key)
        entry.wanted = entry.changed = True
        self._part_of(entry).publications.append(block)
        self._send(now_ms)

    def withdraw(self, block: str, now_ms: int) -> None:
        """Have the index forget a block; `take_withdrawn` names it when that is over."""
        entry = self._entries.get(block)
        if entry is None:
            self._withdrawn.append(block)
            return
        entry.wanted = False
        entry.retries = 0
        if not entry.listed or (self._silent and not entry.calling):
            self._forget(block)
            return
        self._part_of(entry).withdrawals.append(block)
        self._send(now_ms)

    def try_later(self, block: str, now_ms: int) -> None:
        """Offer a block that the index has refused to it again, later and later."""
        entry = self._entries.get(block)
        if entry is not None and not entry.calling:
            entry.changed = entry.wanted
            self._retry(block, entry, now_ms)

    def withdraw_all(self, now_ms: int) -> None:
        """Have the index forget every block: the process is to end. The blocks stay where they are."""
        self._stopped = True
        for block in tuple(self._entries):
            self.withdraw(block, now_ms)

    def fall_silent(self) -> None:
        """Tell the index nothing more, not even what is withdrawn: the records are somebody else's now."""
        self._stopped = self._silent = True
        for block in [block for block, entry in self._entries.items() if not (entry.wanted or entry.calling)]:
            self._forget(block)

    @property
    def is_idle(self) -> bool:
        """Whether the index lists nothing of this holder, as far as is known, and nothing is under way."""
        over = self._silent or not self._entries
        return over and not any(part.calls for part in self._parts.values())

    def remaining_ms(self, block: str, now_ms: int) -> int:
        """Return how long the index has said to list a block still."""
        entry = self._entries.get(block)
        return 0 if entry is None else max(0, entry.acknowledged_until_ms - now_ms)

    def take_withdrawn(self) -> tuple[str, ...]:
        """Return the blocks whose withdrawal is over since the last time."""
        withdrawn, self._withdrawn = tuple(self._withdrawn), []
        return withdrawn

    def take_refused(self) -> tuple[str, ...]:
        """Return the blocks that the index refuses as bad since the last time (409)."""
        refused, self._refused = tuple(self._refused), []
        return refused

    def next_deadline_ms(self) -> int | None:
        """Return when the next refresh or retry is due, or None."""
        return self._alarms.next_ms()

    # What happens

    def tick(self, now_ms: int) -> None:
        """Send what is due."""
        for block in self._alarms.take_due(now_ms):
            entry = self._entries[block]
            part = self._part_of(entry)
            if not entry.wanted:
                part.withdrawals.append(block)
            elif entry.changed:
                part.publications.append(block)
            else:
                part.refreshes.append(block)
        self._send(now_ms)

    def answered(self, call: IndexCall, response: Response, body: bytes, now_ms: int) -> None:
        """Take the index's answer in."""
        if self._silent:
            self._end(call)
            return
        match call:
            case TellDescriptor(part, compat_id):
                self._parts[part].calls -= 1
                if not response.is_success:
                    self._told.discard((part, compat_id))
            case PutRecord(block, refresh):
                entry = self._returned(block)
                if response.is_success:
                    if refresh and response.status == 201:
                        self._told_nothing(self._index.of(entry.block_key))
                    self._published(block, entry, body, now_ms)
                elif response.status == 409:
                    self._refused.append(block)
                    self._take_up(block, entry)
                else:
                    entry.changed = True
                    self._retry(block, entry, now_ms)
            case DeleteRecord(block):
                entry = self._returned(block)
                if response.is_success or response.status == 404:
                    entry.listed = False
                    entry.acknowledged_until_ms = 0
                    if entry.wanted:
                        self._take_up(block, entry)
                    else:
                        self._forget(block)
                else:
                    self._retry(block, entry, now_ms)
        self._send(now_ms)

    def failed(self, call: IndexCall, now_ms: int) -> None:
        """Take note that a call had no answer: what was sent may have arrived all the same, or may still."""
        if self._silent:
            self._end(call)
            return
        match call:
            case TellDescriptor(part, compat_id):
                self._parts[part].calls -= 1
                self._told.discard((part, compat_id))
            case PutRecord(block) | DeleteRecord(block):
                entry = self._returned(block)
                entry.changed = entry.wanted
                self._retry(block, entry, now_ms)
        self._send(now_ms)

    def _end(self, call: IndexCall) -> None:
        """Take note of the end of a call that nothing follows."""
        if isinstance(call, TellDescriptor):
            self._parts[call.part].calls -= 1
        elif not self._returned(call.block).wanted:
            self._forget(call.block)

    # What that takes

    def _told_nothing(self, part: str) -> None:
        """A part of the index has lost what it knew."""
        self._told = {told for told in self._told if told[0] != part}

    def _returned(self, block: str) -> _Entry:
        entry = self._entries[block]
        entry.calling = False
        self._part_of(entry).calls -= 1
        return entry

    def _part_of(self, entry: _Entry) -> _Part:
        return self._parts[self._index.of(entry.block_key)]

    def _take_up(self, block: str, entry: _Entry) -> None:
        """Go on with what was asked for while a call was on its way."""
        if not entry.wanted:
            self._part_of(entry).withdrawals.append(block)
        elif entry.changed:
            self._part_of(entry).publications.append(block)

    def _published(self, block: str, entry: _Entry, body: bytes, now_ms: int) -> None:
        try:
            ttl_ms = _read_answer(body).ttl_ms
        except RemoteProtocolError:
            ttl_ms = self.ttl_ms
        refresh_ms = max(1, min(ttl_ms, self.ttl_ms) // 3)
        if entry.retries:  # what an outage has bunched is spread again
            refresh_ms = 1 + self._drawn_below(refresh_ms)
        entry.retries = 0
        entry.acknowledged_until_ms = entry.listed_until_ms = now_ms + ttl_ms
        self._alarms.set(block, now_ms + refresh_ms)
        self._take_up(block, entry)

    def _retry(self, block: str, entry: _Entry, now_ms: int) -> None:
        if not entry.wanted and now_ms >= entry.listed_until_ms:
            self._forget(block)  # the record has expired by itself
            return
        delay_ms = PUBLISH_RETRY_MS << min(entry.retries, 6)
        entry.retries += 1
        self._alarms.set(block, now_ms + delay_ms // 2 + self._drawn_below(delay_ms))

    def _drawn_below(self, bound: int) -> int:
        return int.from_bytes(self._random_bytes(4), "big") % bound

    def _forget(self, block: str) -> None:
        del self._entries[block]
        self._alarms.set(block, None)
        self._withdrawn.append(block)

    def _send(self, now_ms: int) -> None:
        """Send as much as may be on its way at a time, but for what a later wish has overtaken."""
        for part in () if self._silent else self._parts.values():
            self._send_to(part, now_ms)

    def _send_to(self, part: _Part, now_ms: int) -> None:
        while part.calls < MAX_INDEX_CALLS:
            if part.withdrawals:
                block = part.withdrawals.popleft()
                entry = self._entries.get(block)
                if entry is not None and not entry.wanted and not entry.calling:
                    self._withdraw(block, entry)
            elif part.publications or part.refreshes:
                refresh = not part.publications
                block = (part.refreshes if refresh else part.publications).popleft()
                entry = self._entries.get(block)
                if entry is not None and entry.wanted and not entry.calling and (refresh or entry.changed):
                    self._put(block, entry, now_ms)
            else:
                return

    def _withdraw(self, block: str, entry: _Entry) -> None:
        part, operation = self._index.of(entry.block_key), WithdrawReplica(self._holder_id, entry.block_key)
        entry.calling = True
        self._call(part, DeleteRecord(block), operation)

    def _put(self, block: str, entry: _Entry, now_ms: int) -> None:
        record = self._record_of(block, self.ttl_ms)
        if record is None:
            return
        part = self._index.of(entry.block_key)
        self._tell_descriptor(part, record.compat_id)
        refresh = not entry.changed
        entry.listed, entry.changed = True, False
        entry.listed_until_ms = max(entry.listed_until_ms, now_ms + self.ttl_ms + PUBLISH_TIMEOUT_MS)
        entry.calling = True
        self._call(part, PutRecord(block, refresh), PublishReplica(self._holder_id, entry.block_key), record)

    def _tell_descriptor(self, part: str, compat_id: str) -> None:
        descriptor = self._descriptor_of(compat_id)
        if descriptor is not None and (part, compat_id) not in self._told:
            self._told.add((part, compat_id))
            operation = PutDescriptor(compat_id)
            self._call(part, TellDescriptor(part, compat_id), operation, descriptor.canonical_json)

    def _call(self, part: str, purpose: IndexCall, operation: Operation, body: object = None) -> None:
        self._parts[part].calls += 1
        self._work.call(part, operation, body, purpose=purpose, timeout_ms=PUBLISH_TIMEOUT_MS)
