"""Blocks that come into the tiers of a holder: stored by clients, or added by the instance beside it.

Protocol section "Block Retrieval and Storage"; requirements BR-6, BR-7; decisions W9 and W17. A block is
refused from the head of its request where that can be told, received into a buffer, compared with its
descriptor, and written to a tier; then it is held, and its record goes to the index. Two that store one block
at a time have one winner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs

from kvsp_core.container_header import section_bytes
from kvsp_core.limits import MAX_INCOMING_BLOCKS
from kvsp_core.problems import (
    INCOMPATIBLE,
    PRECONDITION_FAILED,
    PRECONDITION_REQUIRED,
    STORAGE_FULL,
    UNAVAILABLE,
    Problem,
)
from kvsp_core.resources import StoreBlock, resource_of
from kvsp_core.roles.descriptors import Descriptors
from kvsp_core.roles.held_blocks import HeldBlocks
from kvsp_core.roles.holdings import id_of
from kvsp_core.roles.local_blocks import BlockAdded, BlockNotAdded
from kvsp_core.roles.role import BlockArrived, BlockName, JobDone, JobFailed, ReceiveBlock, Store, StoredBlock
from kvsp_core.roles.serving import Asked, done, refuse
from kvsp_core.roles.work import Work

__all__ = ["NOT_NOW", "Arrivals", "Storing"]

_REMEMBERED_CLIENTS: Final = 1024  # of which it is known what they stored last
_HELD: Final = Problem(PRECONDITION_FAILED, "a replica of this key is held already, and stays")
_NOT_CONDITIONAL: Final = Problem(PRECONDITION_REQUIRED, "if-none-match: a block is stored with '*' only")
_FULL: Final = Problem(STORAGE_FULL, "no room for the block; what is held is leased or in use")
_BUSY: Final = Problem(UNAVAILABLE, "too much is being stored at a time; try again soon")
_GOING: Final = Problem(UNAVAILABLE, "a replica of this key is just leaving; try again soon")
_NOT_FITTING: Final = Problem(
    INCOMPATIBLE, "the container is not a complete block of this descriptor: all layers, all tokens"
)
NOT_NOW: Final = Problem(UNAVAILABLE, "files or memory are short here; try again soon, or another replica")


@attrs.frozen
class Storing:
    """A block is written to a tier, for a request or for the instance beside this holder."""

    block: str = attrs.field(repr=False)
    stored: StoredBlock
    tier: str
    buffer: int
    request_id: int | None = None
    client: str = ""
    ticket: int = 0


@attrs.frozen
class _Incoming:
    """A block is being sent to this holder."""

    block: str = attrs.field(repr=False)
    name: BlockName
    client: str
    buffer: int


class Arrivals:
    """The blocks on their way into the tiers of one holder, at most `max_incoming` of them from clients.

    `is_purged` says whether blocks of a scope are to be deleted.
    """

    def __init__(
        self,
        work: Work,
        blocks: HeldBlocks,
        descriptors: Descriptors,
        *,
        is_purged: Callable[[str], bool],
        max_incoming: int = MAX_INCOMING_BLOCKS,
    ) -> None:
        self._work = work
        self._blocks = blocks
        self._descriptors = descriptors
        self._is_purged = is_purged
        self._max_incoming = max_incoming
        self._incoming: dict[int, _Incoming] = {}  # by request
        self._arriving: set[str] = set()
        self._last_stored: dict[tuple[str, str, str], str] = {}  # client, descriptor, scope -> block
        self._tickets = 0
        self._news: list[BlockAdded | BlockNotAdded] = []

    def __contains__(self, block: str) -> bool:
        return block in self._arriving

    def take_news(self) -> tuple[BlockAdded | BlockNotAdded, ...]:
        """Return what has become of what was added since the last time."""
        news, self._news = tuple(self._news), []
        return news

    # From clients

    def receive(self, asked: Asked, operation: StoreBlock, now_ms: int) -> None:
        """Serve PUT of a block: have it sent, or refuse it."""
        name = BlockName(operation.compat_id, operation.scope_id, operation.block_key)
        block = id_of(name)
        problem = self._refusal(asked, block, now_ms)
        if problem is not None:
            self._work.emit(refuse(asked.request_id, problem))
            return
        buffer = self._work.new_buffer()
        self._incoming[asked.request_id] = _Incoming(block, name, asked.client, buffer)
        self._arriving.add(block)
        self._work.emit(ReceiveBlock(asked.request_id, buffer, resource_of(operation).limit_bytes))

    def _refusal(self, asked: Asked, block: str, now_ms: int) -> Problem | None:
        """Return why a block is not taken in, as far as the head of the request shows."""
        if asked.request.if_none_match != "*":
            return _NOT_CONDITIONAL
        if block in self._blocks.holdings or block in self._arriving:
            return _HELD
        if not self._blocks.is_absent(block, now_ms):
            return _GOING
        if len(self._incoming) >= self._max_incoming:
            return _BUSY
        length = asked.request.content_length
        if length is not None and self._blocks.holdings.room_for(length) is None:
            return _FULL
        return None

    def arrived(self, item: BlockArrived, now_ms: int) -> None:
        """A block has arrived whole: write it to a tier, or refuse it."""
        incoming = self._incoming.pop(item.request_id, None)
        if incoming is None:
            return
        stored = StoredBlock(incoming.name, item.header, item.layer_digests, item.repr_digest)
        problem = None if self._fits(stored) else _NOT_FITTING
        tier = None if problem else self._blocks.make_room(item.header.size_bytes, now_ms)
        if tier is None:
            self._arriving.discard(incoming.block)
            self._work.free(incoming.buffer)
            self._work.emit(refuse(item.request_id, problem or _FULL))
            return
        storing = Storing(
            incoming.block,
            stored,
            tier,
            incoming.buffer,
            request_id=item.request_id,
            client=incoming.client,
        )
        self._store(storing)

    def give_up(self, request_id: int) -> bool:
        """Keep nothing of a block that did not arrive whole; return whether the request was for one."""
        incoming = self._incoming.pop(request_id, None)
        if incoming is None:
            return False
        self._arriving.discard(incoming.block)
        self._work.free(incoming.buffer)
        return True

    # From the instance beside this holder

    def add(self, stored: StoredBlock, buffer: int, now_ms: int) -> int:
        """Put a verified block from a buffer into a tier; return the ticket that the news will name."""
        self._tickets += 1
        ticket, name = self._tickets, stored.name
        block = id_of(name)
        if block in self._blocks.holdings:
            self._news.append(BlockAdded(ticket, name))
            return ticket
        possible = self._blocks.is_absent(block, now_ms) and block not in self._arriving
        fits = possible and self._fits(stored)
        tier = self._blocks.make_room(stored.header.size_bytes, now_ms) if fits else None
        if tier is None:
            self._news.append(BlockNotAdded(ticket, name))
        else:
            self._arriving.add(block)
            self._store(Storing(block, stored, tier, buffer, ticket=ticket))
        return ticket

    # Into a tier

    def _fits(self, stored: StoredBlock) -> bool:
        """Return whether a container is a complete block of its descriptor, as far as that is known (W9)."""
        header = stored.header
        descriptor = self._descriptors.get(stored.name.compat_id)
        if header.first_layer != 0:
            return False
        if descriptor is None:
            return True
        if len(header.sections) != descriptor.layers or header.token_count != descriptor.block_tokens:
            return False
        size_bytes = section_bytes(descriptor, header.codec, header.token_count)
        return size_bytes is None or set(header.sections) == {(size_bytes, size_bytes)}

    def _store(self, storing: Storing) -> None:
        self._blocks.holdings.reserve(storing.tier, storing.stored.header.size_bytes)
        job = self._work.job(storing)
        self._work.emit(Store(job, storing.buffer, storing.stored.name, storing.tier))

    def job_ended(self, storing: Storing, outcome: JobDone | JobFailed, now_ms: int) -> None:
        """Hold what was written; of what could not be, try the next tier."""
        if isinstance(outcome, JobFailed):
            self._not_written(storing, outcome)
            return
        self._arriving.discard(storing.block)
        self._blocks.hold(storing.block, storing.stored, storing.tier, now_ms)
        self._learn_order(storing)
        self._work.observe("kvsp_holder_blocks_stored", tier=storing.tier)
        if storing.request_id is not None:
            self._work.free(storing.buffer)
            self._work.emit(done(storing.request_id, 201))
        else:
            self._news.append(BlockAdded(storing.ticket, storing.stored.name))
        if self._is_purged(storing.stored.name.scope_id):  # since it was let in
            self._blocks.delete((storing.block,), now_ms)

    def _not_written(self, storing: Storing, failed: JobFailed) -> None:
        """Try the next tier that has room as it is; without one the block is not kept."""
        size_bytes = storing.stored.header.size_bytes
        self._blocks.holdings.release(storing.tier, size_bytes)
        self._work.observe("kvsp_holder_store_failures", tier=storing.tier, fault=failed.fault.value)
        tiers = self._blocks.holdings.tiers
        for tier in tiers[tiers.index(storing.tier) + 1 :]:
            if self._blocks.holdings.free_bytes(tier) >= size_bytes:
                self._store(attrs.evolve(storing, tier=tier))
                return
        self._arriving.discard(storing.block)
        if storing.request_id is not None:
            self._work.free(storing.buffer)
            self._work.emit(refuse(storing.request_id, NOT_NOW if failed.takes_nothing else _FULL))
        else:
            self._news.append(BlockNotAdded(storing.ticket, storing.stored.name))

    def _learn_order(self, storing: Storing) -> None:
        """Take it that what a client stores one after the other is in the order of a prompt."""
        name = storing.stored.name
        place = (storing.client, name.compat_id, name.scope_id)
        before = self._last_stored.pop(place, None)
        if before is not None:
            self._blocks.holdings.in_order((before, storing.block))
        self._last_stored[place] = storing.block
        if len(self._last_stored) > _REMEMBERED_CLIENTS:
            del self._last_stored[next(iter(self._last_stored))]
