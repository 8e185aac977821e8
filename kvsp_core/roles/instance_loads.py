"""Carries out what a table of prefetch directives asks: lookups, leases and fetches at peers, blocks into
tiers here.

An instance has two such tables, so that what a resumed session waits for does not queue behind prefetch
directives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import assert_never

import attrs

from kvsp_core.answers import read_answer, read_outcome
from kvsp_core.container_header import ContainerHeader
from kvsp_core.errors import RemoteProtocolError
from kvsp_core.identity import CompatibilityDescriptor, component_id
from kvsp_core.index_parts import IndexParts
from kvsp_core.limits import MAX_LEASE_TTL_MS, MAX_MEASURED_LINKS, UNREACHABLE_MS
from kvsp_core.machines import prefetch, prefetch_load, retrieval, shared_leases
from kvsp_core.machines.prefetch import PrefetchTable
from kvsp_core.machines.shared_leases import SharedLeases
from kvsp_core.messages import (
    LeaseGranted,
    LeaseRequest,
    LookupAnswer,
    LookupRequest,
    PrefetchBlock,
    PrefetchDirective,
    Withdrawal,
)
from kvsp_core.problems import Problem
from kvsp_core.resources import CreateLease, GetBlock, Lookup, ReleaseLease, WithdrawReplica
from kvsp_core.roles.authorization import Policy
from kvsp_core.roles.instance_meter import Meter
from kvsp_core.roles.instance_settings import InstanceSettings
from kvsp_core.roles.local_blocks import BlockAdded, BlockGone, BlockNotAdded, LocalBlocks, News
from kvsp_core.roles.role import (
    AnswerForm,
    AnswerReceived,
    BlockName,
    BlockReceived,
    CallFailed,
    LayerArrived,
    StoredBlock,
)
from kvsp_core.roles.work import Work

__all__ = ["Loads", "Purpose"]


@attrs.frozen
class _LookupFor:
    table: str
    directive: str
    part: str
    asked_ms: int


@attrs.frozen
class _LeaseFor:
    table: str
    request: int
    holder: str
    asked_ms: int


@attrs.frozen
class _FetchFor:
    table: str
    job: int
    fetch: int
    buffer: int
    holder: str
    asked_ms: int


@attrs.frozen
class _Notice:
    """A call whose answer changes nothing: a lease given back, a bad replica reported."""

    table: str


Purpose = _LookupFor | _LeaseFor | _FetchFor | _Notice
"""What a call of a table is for; `table` names it."""


@attrs.define
class _Lookup:
    """A lookup on its way to the parts of the index."""

    request: LookupRequest
    calls: dict[str, int] = attrs.Factory(dict)
    """Part -> the call it has not answered."""
    answers: dict[str, LookupAnswer] = attrs.Factory(dict)


@attrs.frozen(kw_only=True)
class _Received:
    buffer: int
    header: ContainerHeader
    layer_digests: tuple[str, ...] = attrs.field(repr=False)
    repr_digest: str = attrs.field(repr=False)


class Loads:
    """One table of directives, and what it has under way. `name` tells its calls from those of others.

    `policy` returns whose blocks may be used now (SE-2).
    """

    def __init__(
        self,
        name: str,
        work: Work,
        blocks: LocalBlocks,
        meter: Meter,
        *,
        settings: InstanceSettings,
        table: PrefetchTable,
        policy: Callable[[], Policy],
    ) -> None:
        self.name = name
        self.table = table
        self._work = work
        self._blocks = blocks
        self._meter = meter
        self._index = IndexParts(settings.index_uris)
        self._settings = settings
        self._policy = policy
        self._lookups: dict[str, _Lookup] = {}
        self._fetches: dict[tuple[int, int], int] = {}  # (job, fetch) -> call
        self._fetching: dict[int, _FetchFor] = {}  # buffer -> for what
        self._received: dict[int, _Received] = {}  # job -> the verified block
        self._stores: dict[int, int] = {}  # ticket -> job
        self._pinned: dict[str, BlockName] = {}
        self._causes: dict[str, str | None] = {}  # directive -> the request that it is for
        self._ended: list[prefetch.Ended] = []
        self._leases = SharedLeases()
        # Holders and parts of the index that gave no answer, the longest ago first, and until when they are
        # passed over.
        self._unreachable_until_ms: dict[str, int] = {}
        # What the table is to be told next: of leases that loads asked for, of lookups that cannot be made.
        self._news: deque[prefetch.LoadReport | prefetch.LookupFailed] = deque()

    def handle(self, event: prefetch.Event, now_ms: int) -> tuple[prefetch.Effect, ...]:
        """Let something happen to the table; return how it answers a directive that was submitted."""
        answers = self._take(event, now_ms)
        answers += self._tell_table(now_ms)
        return tuple(answers)

    def _tell_table(self, now_ms: int) -> list[prefetch.Effect]:
        """Tell the table what has become of leases and lookups at once, and give back what nobody needs."""
        answers: list[prefetch.Effect] = []
        while self._news:
            answers += self._take(self._news.popleft(), now_ms)
        self._lease(self._leases.release_unwanted(self.table.is_wanted), now_ms)
        return answers

    def _take(self, event: prefetch.Event, now_ms: int) -> list[prefetch.Effect]:
        self._forget_unreachable(now_ms)
        answers: list[prefetch.Effect] = []
        for effect in self.table.handle(event, now_ms):
            match effect:
                case prefetch.Accepted() | prefetch.Rejected():
                    answers.append(effect)
                case prefetch.Ended(directive):
                    self._causes.pop(directive, None)
                    self._ended.append(effect)
                case _:
                    self._carry_out(effect, now_ms)
        return answers

    def begin(
        self,
        name: str,
        sources: Mapping[str, tuple[str, ...]],
        *,
        model: CompatibilityDescriptor,
        scope_id: str,
        duration_ms: int,
        now_ms: int,
        cause: str | None = None,
    ) -> bool:
        """Load blocks for the instance's own use, as a directive of this name that pins them for as long.

        `sources` gives for each key who has it; whoever has it where that names nobody; `cause` is the
        request that it is for. Returns whether it was taken; `take_ended` says when it is over.
        """
        message = PrefetchDirective(
            directive=name,
            scope_id=scope_id,
            compat_id=model.compat_id,
            blocks=tuple(PrefetchBlock(block_key=key, sources=of) for key, of in sources.items()),
            deadline_ms=duration_ms,
            lease_ms=duration_ms,
        )
        (answer,) = self.submit(message, model, now_ms, any_source=True, cause=cause)
        return isinstance(answer, prefetch.Accepted)

    def submit(
        self,
        message: PrefetchDirective,
        model: CompatibilityDescriptor,
        now_ms: int,
        *,
        any_source: bool = False,
        cause: str | None = None,
    ) -> tuple[prefetch.Effect, ...]:
        """Take in a directive, for the request `cause`; return how it is answered."""
        names = (BlockName(message.compat_id, message.scope_id, block.block_key) for block in message.blocks)
        event = prefetch.Submit(
            directive=message,
            held=frozenset(name.block_key for name in names if self._blocks.tier_of(name) is not None),
            layers=model.layers,
            block_tokens=model.block_tokens,
            producers=self._policy().producers(message.scope_id) or None,
            any_source=any_source,
        )
        is_new = self.table.status(message.directive) is None
        if is_new:
            self._causes[message.directive] = cause
        answers = self.handle(event, now_ms)
        if is_new and not any(isinstance(answer, prefetch.Accepted) for answer in answers):
            self._causes.pop(message.directive, None)
        return answers

    def _cause_of(self, block_key: str) -> str | None:
        message = self.table.message_of(block_key)
        return None if message is None else self._causes.get(message.directive)

    def withdraw(self, name: str, now_ms: int) -> None:
        """Stop a directive whose outcome nobody waits for."""
        self.handle(prefetch.Withdraw(name), now_ms)

    def take_ended(self) -> tuple[prefetch.Ended, ...]:
        """Return the directives that have ended since the last time."""
        ended, self._ended = tuple(self._ended), []
        return ended

    # Effects of the table

    def _carry_out(self, effect: prefetch.Effect, now_ms: int) -> None:
        match effect:
            case prefetch.Lookup(directive, block_keys, holders):
                self._look_up(directive, block_keys, holders, now_ms)
            case prefetch.CancelLookup(directive):
                self._stop_looking_up(directive)
            case prefetch.LoadRequest(job, key, of_load):
                self._for_load(job, key, of_load, now_ms)
            case prefetch.Pin(key):
                name = self._name_of(key)
                assert name is not None
                self._pinned[key] = name
                self._blocks.keep(name)
            case prefetch.Unpin(key):
                self._blocks.let_go(self._pinned.pop(key))
            case _:
                pass  # The holder publishes what it is given.

    def _name_of(self, block_key: str) -> BlockName | None:
        message = self.table.message_of(block_key)
        return None if message is None else BlockName(message.compat_id, message.scope_id, block_key)

    def _look_up(
        self, directive: str, block_keys: tuple[str, ...], holders: tuple[str, ...], now_ms: int
    ) -> None:
        if not self._index or any(self._index.of(key) in self._unreachable_until_ms for key in block_keys):
            self._news.append(prefetch.LookupFailed(directive))
            return
        message = self.table.message_of(block_keys[0])
        assert message is not None
        body = LookupRequest(
            scope_id=message.scope_id, compat_id=message.compat_id, block_keys=block_keys, holders=holders
        )
        lookup = self._lookups[directive] = _Lookup(body)
        for part, share in self._index.shares(body).items():
            lookup.calls[part] = self._work.call(
                part,
                Lookup(),
                share,
                purpose=_LookupFor(self.name, directive, part, now_ms),
                timeout_ms=self._settings.call_timeout_ms,
                cause=self._causes.get(directive),
            )

    def _stop_looking_up(self, directive: str) -> None:
        lookup = self._lookups.pop(directive, None)
        for call in lookup.calls.values() if lookup is not None else ():
            self._work.cancel(call)

    def _for_load(self, job: int, key: str, effect: prefetch_load.Effect, now_ms: int) -> None:
        match effect:
            case prefetch_load.AcquireLease(holder) if holder in self._unreachable_until_ms:
                refused = prefetch_load.LeaseRefused(holder, None)
                self._news.append(prefetch.LoadReport(job, refused))
            case prefetch_load.AcquireLease(holder, ttl_ms):
                # Longer is granted nowhere, and what takes longer has a new lease asked for on the way.
                ttl_ms = min(ttl_ms, MAX_LEASE_TTL_MS)
                ahead: tuple[str, ...] = ()
                if not self._leases.is_served(holder, key, now_ms):
                    ahead = self.table.next_from(job, holder, self._leases.room_at(holder))
                want = shared_leases.Want(load=job, holder=holder, block_key=key, ttl_ms=ttl_ms, ahead=ahead)
                self._lease(self._leases.handle(want, now_ms), now_ms)
            case prefetch_load.ReleaseLease(holder):
                self._lease(self._leases.handle(shared_leases.Done(job, holder), now_ms), now_ms)
            case prefetch_load.Fetch():
                self._fetch(job, key, effect, now_ms)
            case prefetch_load.CancelFetch(fetch):
                if (call := self._fetches.pop((job, fetch), None)) is not None:
                    purpose = self._work.calls[call]
                    self._work.cancel(call)
                    self._forget_buffer(purpose.buffer)
            case prefetch_load.ReportBad(holder, digest):
                self._work.observe("kvsp_digest_failures")
                operation = WithdrawReplica(component_id(holder), key)
                self._notify(self._index.of(key), operation, Withdrawal(digest=digest))
            case prefetch_load.Store():
                self._store(job, key, now_ms)
            case _:
                pass

    def _lease(self, effects: Iterable[shared_leases.Effect], now_ms: int) -> None:
        """Do what the leases that loads share want."""
        for effect in effects:
            match effect:
                case shared_leases.Ask(request, holder, block_keys, ttl_ms):
                    self._work.call(
                        holder,
                        CreateLease(),
                        LeaseRequest(block_keys=block_keys, ttl_ms=ttl_ms),
                        purpose=_LeaseFor(self.name, request, holder, now_ms),
                        timeout_ms=self._settings.call_timeout_ms,
                        cause=self._cause_of(block_keys[0]),
                    )
                case shared_leases.GiveBack(holder, lease):
                    self._notify(holder, ReleaseLease(lease))
                case shared_leases.Granted(job, holder, lease):
                    granted = prefetch_load.LeaseGranted(holder, lease)
                    self._news.append(prefetch.LoadReport(job, granted))
                case shared_leases.Refused(job, holder, status):
                    refused = prefetch_load.LeaseRefused(holder, status)
                    self._news.append(prefetch.LoadReport(job, refused))
                case _:
                    assert_never(effect)

    def _notify(
        self, base_uri: str, operation: ReleaseLease | WithdrawReplica, body: Withdrawal | None = None
    ) -> None:
        timeout_ms = self._settings.call_timeout_ms
        self._work.call(base_uri, operation, body, purpose=_Notice(self.name), timeout_ms=timeout_ms)

    def _fetch(self, job: int, key: str, fetch: prefetch_load.Fetch, now_ms: int) -> None:
        name = self._name_of(key)
        assert name is not None
        buffer = self._work.new_buffer()
        purpose = _FetchFor(self.name, job, fetch.fetch, buffer, fetch.holder, now_ms)
        self._fetching[buffer] = purpose
        self._fetches[job, fetch.fetch] = self._work.call(
            fetch.holder,
            GetBlock(name.compat_id, name.scope_id, key, layers=fetch.layers, codec=fetch.codec),
            purpose=purpose,
            timeout_ms=self._settings.fetch_timeout_ms,
            form=AnswerForm.BLOCK,
            buffer=buffer,
            cause=self._cause_of(key),
        )

    def _store(self, job: int, key: str, now_ms: int) -> None:
        name, received = self._name_of(key), self._received[job]
        assert name is not None
        self._work.observe("kvsp_fetched_tokens", received.header.token_count)
        block = StoredBlock(name, received.header, received.layer_digests, received.repr_digest)
        ticket, effects = self._blocks.add(block, received.buffer, now_ms)
        self._stores[ticket] = job
        self._work.emit(*effects)

    def _forget_buffer(self, buffer: int) -> None:
        self._fetching.pop(buffer, None)
        self._work.free(buffer)

    # What comes of it

    def layer_arrived(self, item: LayerArrived, now_ms: int) -> bool:
        """Take a layer in, where it is of a fetch of this table."""
        purpose = self._fetching.get(item.buffer)
        if purpose is None:
            return False
        arrived = retrieval.LayersArrived(purpose.fetch, item.layer, (item.digest,))
        self._report(purpose.job, prefetch_load.Fetched(arrived), now_ms)
        return True

    def completed(
        self, purpose: Purpose, item: AnswerReceived | BlockReceived | CallFailed, now_ms: int
    ) -> None:
        """Take in how a call of this table has ended."""
        match purpose:
            case _LookupFor():
                # What fails sooner can be tried again.
                if now_ms - purpose.asked_ms >= self._settings.call_timeout_ms:
                    self._note_reachable(purpose.part, item, now_ms)
                if (event := self._looked_up(purpose, item)) is not None:
                    self._stop_looking_up(purpose.directive)
                    self.handle(event, now_ms)
            case _LeaseFor(request=request, holder=holder):
                self._note_reachable(holder, item, now_ms)
                if isinstance(item, AnswerReceived):
                    self._meter.answered(holder, now_ms - purpose.asked_ms)
                self._lease(self._leases.handle(_lease_outcome(request, item), now_ms), now_ms)
                self._tell_table(now_ms)
            case _FetchFor(holder=holder):
                self._note_reachable(holder, item, now_ms)
                self._fetched(purpose, item, now_ms)
            case _Notice():
                pass

    def _note_reachable(
        self, peer: str, item: AnswerReceived | BlockReceived | CallFailed, now_ms: int
    ) -> None:
        """Take note whether a holder or a part of the index answers. One that does not is passed over for a
        while: each block would wait for it anew, and all that a dead instance held would come too late."""
        self._unreachable_until_ms.pop(peer, None)
        if isinstance(item, CallFailed):
            self._unreachable_until_ms[peer] = now_ms + UNREACHABLE_MS
            self._forget_unreachable(now_ms)

    def _forget_unreachable(self, now_ms: int) -> None:
        """Ask those again whose time is over, or, where there are many, who was passed over first."""
        known = self._unreachable_until_ms
        while known and (known[first := next(iter(known))] <= now_ms or len(known) > MAX_MEASURED_LINKS):
            del known[first]

    def _looked_up(
        self, purpose: _LookupFor, item: AnswerReceived | BlockReceived | CallFailed
    ) -> prefetch.LookupAnswered | prefetch.LookupFailed | None:
        """Take the answer of a part in; return what to tell the table once all have come, or one has not."""
        directive = purpose.directive
        lookup = self._lookups[directive]
        del lookup.calls[purpose.part]
        if not isinstance(item, AnswerReceived):
            return prefetch.LookupFailed(directive)
        try:
            answer = read_answer(LookupAnswer, item.response, item.body)
            if isinstance(answer, Problem):
                return prefetch.LookupFailed(directive, too_long=item.response.status == 413)
            lookup.answers[purpose.part] = answer
            if lookup.calls:
                return None
            found = self._index.joined(lookup.request, lookup.answers)
        except RemoteProtocolError:
            return prefetch.LookupFailed(directive)
        # A block whose layers are at several holders would have to be put together: it is computed.
        policy = self._policy()
        records = (tuple(r for r in policy.trusted(replicas) if r.is_whole) for replicas in found)
        return prefetch.LookupAnswered(directive, tuple(records))

    def _fetched(
        self, purpose: _FetchFor, item: AnswerReceived | BlockReceived | CallFailed, now_ms: int
    ) -> None:
        job, fetch, buffer = purpose.job, purpose.fetch, purpose.buffer
        self._fetches.pop((job, fetch), None)
        self._fetching.pop(buffer, None)
        event: retrieval.BlockEnded | retrieval.Refused | retrieval.FetchFailed
        match item:
            case BlockReceived():
                size_bytes, elapsed_ms = item.header.size_bytes, now_ms - purpose.asked_ms
                self._meter.fetched(purpose.holder, size_bytes, elapsed_ms)
                self._received[job] = _Received(
                    buffer=buffer,
                    header=item.header,
                    layer_digests=item.layer_digests,
                    repr_digest=item.response.repr_digest or "",
                )
                event = retrieval.BlockEnded(
                    fetch=fetch,
                    header=item.header,
                    layer_digests=item.layer_digests,
                    repr_digest_valid=item.repr_digest_valid,
                )
            case AnswerReceived(response=response):
                event = retrieval.Refused(fetch, response.status)
            case CallFailed():
                event = retrieval.FetchFailed(fetch)
        self._report(job, prefetch_load.Fetched(event), now_ms)
        if job not in self._stores.values():
            self._received.pop(job, None)
            self._work.free(buffer)

    def take_news(self, news: News, now_ms: int) -> None:
        """Take in what the holder beside says of a block."""
        match news:
            case BlockAdded(ticket) | BlockNotAdded(ticket):
                job = self._stores.pop(ticket, None)
                if job is not None:
                    added = isinstance(news, BlockAdded)
                    self._work.free(self._received.pop(job).buffer)
                    stored = prefetch_load.Stored() if added else prefetch_load.StoreFailed()
                    self._report(job, stored, now_ms)
            case BlockGone(name):
                self.handle(prefetch.Evicted(name.block_key), now_ms)
                # The table has forgotten its pin with the block, and will not undo it.
                if (pinned := self._pinned.pop(name.block_key, None)) is not None:
                    self._blocks.let_go(pinned)

    def _report(self, job: int, event: prefetch_load.Event, now_ms: int) -> None:
        self.handle(prefetch.LoadReport(job, event), now_ms)


def _lease_outcome(
    request: int, item: AnswerReceived | BlockReceived | CallFailed
) -> shared_leases.Answered | shared_leases.Unanswered:
    if not isinstance(item, AnswerReceived):
        return shared_leases.Unanswered(request)
    if (problem := read_outcome(item.response, item.body)) is not None:
        status = item.response.status
        return shared_leases.Answered(request=request, status=status, max_ttl_ms=problem.max_ttl_ms)
    try:
        granted = read_answer(LeaseGranted, item.response, item.body)
    except RemoteProtocolError:
        return shared_leases.Unanswered(request)
    assert isinstance(granted, LeaseGranted)
    return shared_leases.Answered(
        request=request, status=item.response.status, lease=granted.lease, ttl_ms=granted.ttl_ms
    )
