"""A holder: keeps blocks in its tiers, serves and stores them, leases them, and has the index list them.

Protocol sections "Block Retrieval and Storage", "Leases" and "Publishing and Withdrawing Replicas";
requirements BR-1 to BR-3, BR-6, BR-7, LE-1 to LE-4, PB-3, PB-4; decisions W16, W17, W30 and W33. This file
answers requests; `kvsp_core.roles.arrivals` takes blocks in, `kvsp_core.roles.held_blocks` keeps them.

A cache server is this role alone. An instance has one beside it for its own tiers and drives it by the calls
of `kvsp_core.roles.local_blocks.LocalBlocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias, assert_never

import attrs

from kvsp_core.answers import block_response
from kvsp_core.container_header import ContainerHeader
from kvsp_core.ext_messages import LeaseInfo, LeaseListing
from kvsp_core.limits import MAX_INCOMING_BLOCKS, MAX_LEASE_KEYS, REPLICA_TTL_MS
from kvsp_core.machines import lease as leases
from kvsp_core.machines.lease import LeaseTable
from kvsp_core.messages import LeaseGranted, LeaseRenewal, LeaseRequest
from kvsp_core.problems import (
    LAYERS_UNAVAILABLE,
    NOT_ACCEPTABLE,
    NOT_FOUND,
    TOO_LARGE,
    UNAVAILABLE,
    Problem,
)
from kvsp_core.resources import (
    CreateLease,
    GetBlock,
    GetDescriptor,
    HeadBlock,
    ListLeases,
    Operation,
    PutDescriptor,
    ReleaseLease,
    RenewLease,
    RoleName,
    StoreBlock,
)
from kvsp_core.roles.arrivals import NOT_NOW, Arrivals, Storing
from kvsp_core.roles.authorization import NO_SCOPE, Policy, authorize
from kvsp_core.roles.descriptors import Descriptors
from kvsp_core.roles.held_blocks import HeldBlocks, LeaseEvent
from kvsp_core.roles.holdings import TierLimits, id_of
from kvsp_core.roles.local_blocks import BlockGone, News
from kvsp_core.roles.publication import DeleteRecord, PutRecord, TellDescriptor
from kvsp_core.roles.role import (
    AnswerReceived,
    BlockArrived,
    BlockBody,
    BlockName,
    BodyArrived,
    BodyFailed,
    CallFailed,
    Drop,
    Effect,
    Input,
    JobDone,
    JobFailed,
    Load,
    ReadBlock,
    RequestEnded,
    RequestReceived,
    Respond,
    StoredBlock,
    TimerFired,
)
from kvsp_core.roles.serving import Asked, Desk, answer, done, refuse
from kvsp_core.roles.tier_moves import MoveRead, MoveStore
from kvsp_core.roles.work import Numbers, Work

__all__ = ["Holder"]

_NOT_HELD: Final = Problem(NOT_FOUND, "the block is not held here; continue with another replica")
_NO_LAYERS: Final = Problem(LAYERS_UNAVAILABLE, "layers: not all of them are held here")
_NO_CODEC: Final = Problem(NOT_ACCEPTABLE, "codec: the block is held in another, and is not transcoded here")
_OUT_OF_SCOPE: Final = Problem(
    NOT_FOUND, "a block of the lease is of a scope that is not the client's; the lease ends when it expires"
)
_STOPPING: Final = Problem(UNAVAILABLE, "the holder is about to stop; use another one")
_STARTING: Final = Problem(UNAVAILABLE, "the holder is still finding out what it holds; try again soon")


@attrs.frozen
class _Reading:
    """A block is read from a tier for a request."""

    request_id: int
    block: str = attrs.field(repr=False)
    buffer: int
    layers: tuple[int, int] | None
    head_only: bool


@attrs.frozen
class _Loading:
    """What a tier holds is listed at the start."""

    tier: str


_Purpose: TypeAlias = _Reading | Storing | _Loading | MoveRead | MoveStore


class Holder:
    """A holder under one base URI.

    `tiers` says what it may put where. `index_uris` are the parts of the index that its records go to (OP-3);
    where there is none, nothing is published. `numbers` is shared with another role under the same base URI.
    `random_bytes` gives unguessable octets.
    """

    def __init__(
        self,
        *,
        base_uri: str,
        policy: Policy,
        tiers: Mapping[str, TierLimits],
        random_bytes: Callable[[int], bytes],
        now_ms: int,
        index_uris: tuple[str, ...] = (),
        replica_ttl_ms: int = REPLICA_TTL_MS,
        lease_table: LeaseTable | None = None,
        descriptors: Descriptors | None = None,
        numbers: Numbers | None = None,
        max_incoming: int = MAX_INCOMING_BLOCKS,
    ) -> None:
        self.base_uri = base_uri
        self.policy = policy
        self.descriptors = descriptors or Descriptors()
        self._work = Work(numbers)
        self._alone = numbers is None
        self._blocks = HeldBlocks(
            self._work,
            holder=base_uri,
            tiers=tiers,
            lease_table=lease_table or LeaseTable(random_bytes=random_bytes, now_ms=now_ms),
            index_uris=index_uris,
            replica_ttl_ms=replica_ttl_ms,
            descriptors=self.descriptors,
            random_bytes=random_bytes,
        )
        self._desk = Desk([RoleName.HOLDER], self._allow)
        self._arrivals = Arrivals(
            self._work, self._blocks, self.descriptors, is_purged=self._is_purged, max_incoming=max_incoming
        )
        self._reading: dict[int, bool] = {}  # requests whose read is under way, and whether they have ended
        self._granted: dict[int, tuple[str, str]] = {}  # answers that grant a lease: client and lease
        self._loading = 0
        self._stopping = False

    # The role

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Find out what the tiers hold; until then requests for blocks are put off, and nothing is added to
        a tier by the instance beside this holder."""
        for tier in self._blocks.holdings.tiers:
            self._loading += 1
            self._blocks.holdings.close(tier)
            self._work.emit(Load(self._work.job(_Loading(tier)), tier))
        return self._work.take()

    def stop(self, now_ms: int) -> tuple[Effect, ...]:
        """Be told that the process is to end: take nothing new, withdraw every record (PB-3)."""
        self._stopping = True
        self._blocks.publisher.withdraw_all(now_ms)
        self._blocks.settle(now_ms)
        return self._work.take()

    def fence(self) -> None:
        """Be told that a later incarnation has this base URI: take nothing new, and tell the index nothing,
        since what it lists is the other's."""
        self._stopping = True
        self._blocks.publisher.fall_silent()

    def purge(self, now_ms: int) -> tuple[Effect, ...]:
        """Delete, in every tier, what is held of the scopes that the policy says are purged."""
        purged = self.policy.purged
        self._blocks.delete(self._blocks.holdings.of_scopes(purged) if purged else (), now_ms)
        self._blocks.settle(now_ms)
        return self._work.take()

    def limit(self, *, max_lease_ttl_ms: int, lease_quota_bytes: int, replica_ttl_ms: int) -> None:
        """Grant leases and publish records within these limits from now on."""
        self._blocks.lease_table.limit(max_ttl_ms=max_lease_ttl_ms, quota_bytes=lease_quota_bytes)
        self._blocks.publisher.ttl_ms = replica_ttl_ms

    def expire(self, tier: str, names: Iterable[BlockName], now_ms: int) -> tuple[Effect, ...]:
        """Delete blocks that a tier has kept for as long as it may."""
        for name in names:
            block = id_of(name)
            found = self._blocks.holdings.get(block)
            if found is not None and found[1] == tier:
                self._blocks.delete((block,), now_ms)
            elif block not in self._arrivals and block not in self._blocks.moves:
                self._work.emit(Drop(name, tier))  # it was to be dropped before, and could not be
        self._blocks.settle(now_ms)
        return self._work.take()

    @property
    def safe_to_stop(self) -> bool:
        """Whether the holder was told to stop and no record of it is left at the index."""
        return self._stopping and self._blocks.publisher.is_idle

    def next_deadline_ms(self) -> int | None:
        """Return when the holder next wants `TimerFired`, or None."""
        return self._blocks.next_deadline_ms()

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Take one input in; return what is to be done. What belongs to another role is ignored."""
        match item:
            case RequestReceived() | BodyArrived() | BodyFailed() | RequestEnded():
                self._take_request(item, now_ms)
            case BlockArrived():
                self._arrivals.arrived(item, now_ms)
            case JobDone(job_id) | JobFailed(job_id):
                purpose = self._work.jobs.pop(job_id, None)
                if purpose is not None:
                    self._job_over(purpose, item, now_ms)
            case AnswerReceived(call_id) | CallFailed(call_id):
                self._call_over(call_id, item, now_ms)
            case TimerFired():
                self._blocks.tick(now_ms)
            case _:
                pass
        self._blocks.settle(now_ms)
        if not self._loading and not self._stopping:
            self._blocks.moves.make_free(now_ms)
        if self._alone:
            self.take_news()  # nobody else does
        return self._work.take()

    def _is_purged(self, scope_id: str) -> bool:
        return scope_id in self.policy.purged

    def _allow(self, client: str, operation: Operation) -> Problem | None:
        return authorize(self.policy, client, operation)

    # Requests

    def _take_request(
        self, item: RequestReceived | BodyArrived | BodyFailed | RequestEnded, now_ms: int
    ) -> None:
        if isinstance(item, RequestEnded):
            self._ended(item, now_ms)
        if isinstance(item, BodyFailed) and self._arrivals.give_up(item.request_id):
            self._work.emit(refuse(item.request_id, item.problem))
        asked, effects = self._desk.take(item)
        self._work.emit(*effects)
        if asked is not None:
            self._serve(asked, now_ms)

    def _serve(self, asked: Asked, now_ms: int) -> None:
        match asked.operation:
            case GetBlock() | HeadBlock() | StoreBlock() | CreateLease() if self._loading:
                self._work.emit(refuse(asked.request_id, _STARTING))
            case StoreBlock() | CreateLease() if self._stopping:
                self._work.emit(refuse(asked.request_id, _STOPPING))
            case GetBlock() | HeadBlock():
                self._get(asked, asked.operation, now_ms)
            case StoreBlock():
                self._arrivals.receive(asked, asked.operation, now_ms)
            case CreateLease():
                self._create_lease(asked, now_ms)
            case RenewLease(lease):
                assert isinstance(asked.body, LeaseRenewal)
                if not self._may_renew(asked.client, lease):
                    self._work.emit(refuse(asked.request_id, _OUT_OF_SCOPE))
                    return
                event = leases.RenewLease(client=asked.client, lease=lease, ttl_ms=asked.body.ttl_ms)
                self._lease_answer(asked, event, 200, now_ms)
            case ReleaseLease(lease):
                release = leases.ReleaseLease(client=asked.client, lease=lease)
                self._lease_answer(asked, release, 204, now_ms)
            case ListLeases():
                self._work.emit(answer(asked.request_id, self._listing(now_ms)))
            case GetDescriptor() | PutDescriptor():
                self._work.emit(*self.descriptors.serve(asked))
            case _:
                raise AssertionError("the router gives a holder its own resources only")

    # Retrieval

    def _get(self, asked: Asked, operation: GetBlock | HeadBlock, now_ms: int) -> None:
        name = BlockName(operation.compat_id, operation.scope_id, operation.block_key)
        block = id_of(name)
        found = self._blocks.holdings.get(block)
        problem = _NOT_HELD if found is None else _unavailable(found[0].header, operation)
        if found is None or problem is not None:
            self._work.emit(refuse(asked.request_id, problem or _NOT_HELD))
            return
        stored, tier = found
        head_only = isinstance(operation, HeadBlock)
        whole = operation.layers is None or operation.layers == (0, len(stored.layer_digests) - 1)
        if head_only and whole:
            self._respond_block(asked.request_id, block, stored.header, stored.repr_digest, b"", now_ms)
            return
        if problem := self._blocks.start_read(str(asked.request_id), block, now_ms, uses=not head_only):
            self._work.emit(refuse(asked.request_id, problem))
            return
        self._reading[asked.request_id] = False
        layers = None if whole else operation.layers
        buffer = self._work.new_buffer()
        job = self._work.job(_Reading(asked.request_id, block, buffer, layers, head_only))
        self._work.emit(ReadBlock(job, buffer, name, tier, layers))

    def _read(self, reading: _Reading, outcome: JobDone | JobFailed, now_ms: int) -> None:
        """Answer with what was read. Where it is not what was stored, or the block has gone, it is a miss."""
        ended = self._reading.pop(reading.request_id)
        self._blocks.was_read(reading.block)
        found = self._blocks.holdings.get(reading.block)
        sound = found is not None and isinstance(outcome, JobDone) and _is_sound(found[0], reading, outcome)
        later = isinstance(outcome, JobFailed) and outcome.takes_nothing
        if not ended and sound:
            assert isinstance(outcome, JobDone)
            assert outcome.header is not None
            body = b"" if reading.head_only else BlockBody(reading.buffer)
            self._respond_block(
                reading.request_id, reading.block, outcome.header, outcome.repr_digest, body, now_ms
            )
            self._work.observe(
                "kvsp_holder_read_bytes", 0 if reading.head_only else outcome.header.size_bytes
            )
        elif not ended and found is not None and later:
            self._work.emit(refuse(reading.request_id, NOT_NOW))
        elif not ended:
            self._work.emit(refuse(reading.request_id, _NOT_HELD))
        whole = reading.layers is None and sound
        if not whole or not self._blocks.moves.move_up(reading.block, reading.buffer, now_ms):
            self._work.free(reading.buffer)
        if found is not None and not sound and not later:
            self._work.observe("kvsp_holder_digest_failures")
            self._blocks.lose(reading.block, now_ms)
        if ended:
            self._blocks.end_read(str(reading.request_id), now_ms)

    def _respond_block(
        self,
        request_id: int,
        block: str,
        header: ContainerHeader,
        repr_digest: str,
        body: bytes | BlockBody,
        now_ms: int,
    ) -> None:
        ttl_ms = self._blocks.publisher.remaining_ms(block, now_ms)
        response = block_response(size_bytes=header.size_bytes, repr_digest=repr_digest, ttl_ms=ttl_ms)
        self._work.emit(Respond(request_id, response, body))

    # Leases

    def _create_lease(self, asked: Asked, now_ms: int) -> None:
        request = asked.body
        assert isinstance(request, LeaseRequest)
        if len(request.block_keys) > MAX_LEASE_KEYS:
            detail = f"block_keys: at most {MAX_LEASE_KEYS} in one lease; take several"
            self._work.emit(refuse(asked.request_id, Problem(TOO_LARGE, detail)))
            return
        blocks: list[str] = []
        for key in request.block_keys:
            # What the client may not read is, for it, not held.
            known = self._blocks.holdings.with_key(key) or (key,)
            blocks += [block for block in known if self._may_lease(asked, block)] or [key]
        event = leases.CreateLease(client=asked.client, blocks=tuple(blocks), ttl_ms=request.ttl_ms)
        granted = self._lease_answer(asked, event, 201, now_ms)
        if granted is not None:
            self._granted[asked.request_id] = asked.client, granted
            self._blocks.in_use(blocks)
            self._work.observe("kvsp_leased_blocks", len(blocks))

    def _may_lease(self, asked: Asked, block: str) -> bool:
        # Asked for what nobody has too, so that it takes as long as for what is another tenant's.
        found = self._blocks.holdings.get(block)
        scope_id = found[0].name.scope_id if found is not None else NO_SCOPE
        return authorize(self.policy, asked.client, asked.operation, scope_id=scope_id) is None

    def _may_renew(self, client: str, lease: str) -> bool:
        """Return whether a client has a part still in the scopes of what it leased."""
        found = map(self._blocks.holdings.get, self._blocks.lease_table.blocks_of(client, lease))
        scopes = {each[0].name.scope_id for each in found if each is not None}
        return all(authorize(self.policy, client, CreateLease(), scope_id=each) is None for each in scopes)

    def _lease_answer(self, asked: Asked, event: LeaseEvent, status: int, now_ms: int) -> str | None:
        """Answer with what becomes of a lease; return its name where it was granted."""
        outcome = self._blocks.lease(event, now_ms)
        match outcome:
            case Problem():
                if not isinstance(event, leases.ReleaseLease):  # one that is given back twice is gone
                    self._work.observe("kvsp_lease_rejections", reason=outcome.type.suffix)
                self._work.emit(refuse(asked.request_id, outcome))
                return None
            case leases.LeaseGranted(lease=lease, ttl_ms=ttl_ms):
                location = f"leases/{lease}" if status == 201 else None
                message = LeaseGranted(lease=lease, ttl_ms=ttl_ms)
                self._work.emit(answer(asked.request_id, message, status, location=location))
                return lease
            case None:
                self._work.emit(done(asked.request_id, status))
                return None

    def _listing(self, now_ms: int) -> LeaseListing:
        held = self._blocks.lease_table.listing(now_ms)
        used_bytes = self._blocks.holdings.used_bytes
        leased_bytes = sum(size_bytes for _, _, size_bytes, _ in held)
        return LeaseListing(
            leases=tuple(
                LeaseInfo(client=client, blocks=blocks, size_bytes=size_bytes, ttl_ms=left_ms)
                for client, blocks, size_bytes, left_ms in held
            ),
            leased_share=min(1.0, leased_bytes / used_bytes) if used_bytes else 0.0,
        )

    # What ends

    def _ended(self, item: RequestEnded, now_ms: int) -> None:
        self._arrivals.give_up(item.request_id)
        granted = self._granted.pop(item.request_id, None)
        if granted is not None and not item.complete and not item.sent_bytes:
            client, lease = granted  # the client never heard of it
            self._blocks.lease(leases.ReleaseLease(client=client, lease=lease), now_ms)
        if item.request_id in self._reading:
            self._reading[item.request_id] = True  # what is being read is not dropped before that is over
        else:
            self._blocks.end_read(str(item.request_id), now_ms)

    def _call_over(self, call_id: int, item: AnswerReceived | CallFailed, now_ms: int) -> None:
        purpose = self._work.calls.pop(call_id, None)
        if isinstance(purpose, (PutRecord, DeleteRecord, TellDescriptor)):
            if isinstance(item, AnswerReceived):
                self._blocks.publisher.answered(purpose, item.response, item.body, now_ms)
            else:
                self._blocks.publisher.failed(purpose, now_ms)

    def _job_over(self, purpose: _Purpose, outcome: JobDone | JobFailed, now_ms: int) -> None:
        match purpose:
            case _Reading():
                self._read(purpose, outcome, now_ms)
            case Storing():
                self._arrivals.job_ended(purpose, outcome, now_ms)
            case MoveRead() | MoveStore():
                self._blocks.moves.job_ended(purpose, outcome, now_ms)
            case _Loading(tier):
                self._loading -= 1
                self._blocks.holdings.open(tier)
                catalogue = outcome.catalogue if isinstance(outcome, JobDone) else ()
                for stored in catalogue:
                    if id_of(stored.name) in self._arrivals:  # in a tier that was listed before
                        self._work.emit(Drop(stored.name, tier))
                    else:
                        self._blocks.restore(stored, tier, now_ms)
                self._work.emit(*self.purge(now_ms))
            case _:
                assert_never(purpose)

    # For the instance beside this holder

    def tier_of(self, name: BlockName) -> str | None:
        """Return the tier from which a block can be read whole, or None where it is not held so."""
        found = self._blocks.holdings.get(id_of(name))
        return None if found is None else found[1]

    def is_sound(self, name: BlockName, layer_digests: tuple[str, ...]) -> bool:
        """Return whether a block is held with these layer digests: what was read is what was stored."""
        found = self._blocks.holdings.get(id_of(name))
        return found is not None and found[0].layer_digests == layer_digests

    def keep(self, name: BlockName) -> None:
        """Do not evict a block until `let_go` was called as often. It need not be held yet."""
        self._blocks.keep(id_of(name))

    def let_go(self, name: BlockName) -> None:
        """Undo one `keep`."""
        self._blocks.let_go(id_of(name))

    def add(self, block: StoredBlock, buffer: int, now_ms: int) -> tuple[int, tuple[Effect, ...]]:
        """Put a verified block from a buffer into a tier and publish it; the news names the ticket returned.

        The buffer stays the caller's until then.
        """
        ticket = self._arrivals.add(block, buffer, now_ms)
        self._blocks.settle(now_ms)
        return ticket, self._work.take()

    def lost(self, name: BlockName, now_ms: int) -> tuple[Effect, ...]:
        """Take note that reading a block failed: drop it and withdraw its record."""
        self._blocks.lose(id_of(name), now_ms)
        self._blocks.settle(now_ms)
        return self._work.take()

    def take_news(self) -> tuple[News, ...]:
        """Return what has happened since the last time."""
        return (*self._arrivals.take_news(), *map(BlockGone, self._blocks.take_gone()))


def _unavailable(header: ContainerHeader, operation: GetBlock | HeadBlock) -> Problem | None:
    """Return why a block that is held cannot be given as it is asked for."""
    if operation.codec is not None and operation.codec != header.codec:
        return _NO_CODEC
    if operation.layers is not None and operation.layers[1] >= len(header.sections):
        return _NO_LAYERS
    return None


def _is_sound(stored: StoredBlock, reading: _Reading, outcome: JobDone) -> bool:
    """Return whether what was read is what was stored."""
    first, last = reading.layers or (0, len(stored.layer_digests) - 1)
    return outcome.layer_digests == stored.layer_digests[first : last + 1]
