"""The client for engines and tools, on asyncio and on trio."""

from __future__ import annotations

import copy
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from types import TracebackType
from typing import Any

import anyio
from anyio.abc import TaskGroup

from kvsp_client.errors import ClientClosed, ClientError, Refused, Unavailable
from kvsp_client.fetch import Avoided, Fetch, FetchResult
from kvsp_client.lease import HolderLease, Lease
from kvsp_client.memory import Sections
from kvsp_client.settings import ClientSettings
from kvsp_client.stats import ClientStats
from kvsp_client.store import Store, StoreResult
from kvsp_client.wire import Wire, open_network
from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.index_parts import IndexParts
from kvsp_core.lookup_size import LookupSize
from kvsp_core.messages import LookupAnswer, LookupRequest
from kvsp_core.prefix import Prefix, PrefixKeys
from kvsp_core.records import ReplicaRecord
from kvsp_core.resources import Lookup, PutDescriptor
from kvsp_core.validation import check_base_uri
from kvsp_h2 import Credentials

__all__ = ["Client", "index_parts"]


def index_parts(index: str | Sequence[str]) -> IndexParts:
    """Return the parts of an index as a caller names them. Raises `LocalProtocolError` where one is no base
    URI, or there is none."""
    parts = IndexParts(index)
    if not parts:
        raise LocalProtocolError("index: name the base URI of the index, or of each of its parts")
    return parts


class Client:
    """Finds, fetches, stores and leases blocks; used in ``async with``, which opens and closes it.

    `index` is the base URI of the index, or those of its parts (OP-3). Its methods may be called by any tasks
    of the loop it was opened in. All its connections are in one pool, opened as they are needed and again
    where they are lost. In a process that was forked from this one it refuses to work: open one there.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        index: str | Sequence[str],
        settings: ClientSettings | None = None,
        wire: Wire | None = None,
    ) -> None:
        """`wire` are connections to use together with other clients; without it the client has its own."""
        self.index = index
        self._parts = index_parts(index)
        self.settings = settings or ClientSettings()
        self._credentials = credentials
        self._shared = wire
        self._wire: Wire | None = None
        self._tasks: TaskGroup | None = None
        self._stack = AsyncExitStack()
        self._pid = 0
        self._stats = ClientStats()
        self._avoided = Avoided(self.settings.avoid_ms)
        self._lookup_size = LookupSize()
        self._described: set[tuple[str, str]] = set()
        self._fetches: set[Fetch] = set()
        self._leases: set[HolderLease] = set()

    async def __aenter__(self) -> Client:
        if self._tasks is not None:
            raise ClientClosed("a client is opened once; make another one")
        async with AsyncExitStack() as stack:
            wire = self._shared
            if wire is None:
                network = await stack.enter_async_context(open_network())
                stack.push_async_callback(self._close_network, network)
                wire = Wire(network, self._credentials)
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            self._wire = wire
            self._pid = os.getpid()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._tasks is not None
        self._wire = None
        for fetch in tuple(self._fetches):
            fetch.cancel()
        for lease in tuple(self._leases):
            lease.release()
        self._tasks.cancel_scope.cancel()
        await self._stack.aclose()  # which is not shown the caller's error: it would wrap it

    async def _close_network(self, network: Any) -> None:
        try:
            with anyio.move_on_after(self.settings.close_ms / 1000):
                await network.close()
        finally:
            network.abort()

    @property
    def closed(self) -> bool:
        """Whether it was opened and closed again."""
        return self._tasks is not None and self._wire is None

    def _open(self) -> Wire:
        if self._wire is None:
            raise ClientClosed("the client is not open; use it within: async with Client(...) as client")
        if self._pid != os.getpid():
            raise ClientClosed("the client was opened in another process; open one in this process")
        return self._wire

    # Lookup ----------------------------------------------------------------------------------------------

    async def lookup(self, keys: PrefixKeys, *others: PrefixKeys) -> Prefix:
        """Return the longest prefix that the index knows replicas of.

        Several `keys` are the same tokens' in several scopes, such as a tenant's own and a shared one: the
        longest prefix found wins, the earlier among equals. Raises `Unavailable` and `Refused`; a scope that
        is refused is left out where another one is not.
        """
        wire = self._open()
        found: list[Prefix] = []
        refusal: ClientError | None = None
        for each in (keys, *others):
            if each.descriptor.block_tokens != keys.descriptor.block_tokens:
                raise LocalProtocolError("prefixes are compared in blocks of one size")
            try:
                found.append(await self._look_up(wire, each))
            except ClientError as error:
                refusal = refusal or error
                self._stats.lookup_failures += 1
        if not found:
            assert refusal is not None
            raise refusal
        longest = max(found, key=len)
        self._stats.looked_up_blocks += len(keys)
        self._stats.matched_blocks += len(longest)
        return longest

    async def _look_up(self, wire: Wire, keys: PrefixKeys) -> Prefix:
        replicas: list[tuple[ReplicaRecord, ...]] = []
        due_ms = wire.now_ms() + self.settings.call_timeout_ms  # for all of them, where they are several
        while len(replicas) < len(keys):
            request = keys.part(len(replicas)).lookups(self._lookup_size.most)[0]
            asked = len(request.block_keys)
            self._stats.lookups += 1
            try:
                answers = await self._ask_parts(wire, request, max(1, due_ms - wire.now_ms()))
            except Refused as error:
                if error.problem.status != 413 or asked == 1:
                    raise
                self._lookup_size = self._lookup_size.after_refusal(asked)
                continue
            self._lookup_size = self._lookup_size.after_answer(asked)
            try:
                blocks = self._parts.joined(request, answers)
            except RemoteProtocolError as error:
                raise Unavailable(
                    f"{', '.join(answers)}: its answer is not as the protocol says: {error}"
                ) from None
            replicas += blocks
            if len(blocks) < asked:
                break
        return Prefix(keys=keys.part(0, len(replicas)), replicas=tuple(replicas))

    async def _ask_parts(
        self, wire: Wire, request: LookupRequest, timeout_ms: int
    ) -> dict[str, LookupAnswer]:
        """Ask each part of the index for its share, all at once. Raises what the first that fails raises."""
        answers: dict[str, LookupAnswer] = {}
        refusals: list[ClientError] = []

        async def ask(part: str, share: LookupRequest) -> None:
            try:
                answers[part] = await wire.ask_for(LookupAnswer, part, Lookup(), share, timeout_ms=timeout_ms)
            except ClientError as error:
                refusals.append(error)

        shares = self._parts.shares(request)
        async with anyio.create_task_group() as tasks:
            for part, share in shares.items():
                tasks.start_soon(ask, part, share)
        if refusals:
            raise refusals[0]
        return answers

    # Fetch -----------------------------------------------------------------------------------------------

    def _fetch(self, prefix: Prefix, sections: Sections, deadline_ms: int | None) -> Fetch:
        return Fetch(
            self._open(),
            prefix,
            sections,
            index=self._parts,
            settings=self.settings,
            stats=self._stats,
            avoided=self._avoided,
            deadline_ms=deadline_ms,
        )

    async def fetch(
        self, prefix: Prefix, sections: Sections, *, deadline_ms: int | None = None
    ) -> FetchResult:
        """Fetch a prefix into the caller's memory and return what has come, at the latest at the deadline.

        Where a holder fails, the next one is asked. What cannot be had is told by the result; an error of
        `sections` is raised.
        """
        fetch = self._fetch(prefix, sections, deadline_ms)
        await self._run(fetch)
        return await fetch.result()

    @asynccontextmanager
    async def fetching(
        self, prefix: Prefix, sections: Sections, *, deadline_ms: int | None = None
    ) -> AsyncIterator[Fetch]:
        """Fetch a prefix while its first layers are used already; at the end of the block it is given up."""
        fetch = self.start_fetch(prefix, sections, deadline_ms=deadline_ms)
        try:
            yield fetch
        finally:
            fetch.cancel()

    def start_fetch(self, prefix: Prefix, sections: Sections, *, deadline_ms: int | None = None) -> Fetch:
        """Begin to fetch a prefix and return at once; who calls this calls `Fetch.cancel` in the end."""
        fetch = self._fetch(prefix, sections, deadline_ms)
        assert self._tasks is not None
        self._tasks.start_soon(self._run, fetch)
        return fetch

    async def _run(self, fetch: Fetch) -> None:
        self._fetches.add(fetch)
        try:
            await fetch.run()
        finally:
            self._fetches.discard(fetch)

    # Store -----------------------------------------------------------------------------------------------

    async def store(
        self, holder: str, keys: PrefixKeys, sections: Sections, *, deadline_ms: int | None = None
    ) -> StoreResult:
        """Store blocks from the caller's memory at a holder, which then publishes them.

        `sections` is called when a block's turn comes, and the octets are copied then. What the holder does
        not take is told by the result; an error of `sections` is raised.
        """
        check_base_uri(holder, "holder")
        wire = self._open()
        begun_ms = wire.now_ms()
        with anyio.move_on_after(None if deadline_ms is None else deadline_ms / 1000):
            await self._describe(wire, holder, keys)
        if deadline_ms is not None:
            deadline_ms -= wire.now_ms() - begun_ms
        store = Store(wire, holder, keys, sections, settings=self.settings, stats=self._stats)
        return await store.run(deadline_ms)

    async def _describe(self, wire: Wire, holder: str, keys: PrefixKeys) -> None:
        """Make the descriptor known to a holder, once (decision W30). Holders of others need not know it."""
        described = (holder, keys.descriptor.compat_id)
        if described in self._described:
            return
        operation, timeout_ms = PutDescriptor(keys.descriptor.compat_id), self.settings.call_timeout_ms
        with suppress(Unavailable):
            answer = await wire.ask(holder, operation, keys.descriptor.canonical_json, timeout_ms=timeout_ms)
            if answer.response.is_success:
                self._described.add(described)

    # Leases ----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(
        self, holder: str, keys: PrefixKeys, *, ttl_ms: int = 30_000
    ) -> AsyncIterator[HolderLease]:
        """Keep blocks at a holder from being evicted while the block runs.

        The lease is renewed at a third of `ttl_ms` and given back in the end, also where that comes by
        cancellation. Raises `Refused` and `Unavailable` where it is not granted; `HolderLease.held` tells
        whether it is still.
        """
        check_base_uri(holder, "holder")
        with self._leasing(holder, keys.keys, ttl_ms) as lease:
            await lease.granted()
            yield lease

    @asynccontextmanager
    async def lease_prefix(self, prefix: Prefix, *, ttl_ms: int = 30_000) -> AsyncIterator[Lease]:
        """Keep the blocks of a prefix at each of its holders, asked together; one that refuses is left
        out."""
        with ExitStack() as stack:
            asked = [
                stack.enter_context(self._leasing(holder, prefix.keys_at(holder), ttl_ms))
                for holder in prefix.holders
                if holder.startswith("https://")
            ]
            granted = []
            for lease in asked:
                with suppress(Refused, Unavailable):
                    await lease.granted()
                    granted.append(lease)
            yield Lease(granted)

    @contextmanager
    def _leasing(self, holder: str, block_keys: tuple[str, ...], ttl_ms: int) -> Iterator[HolderLease]:
        """Ask for a lease and renew it while the block runs."""
        wire = self._open()
        lease = HolderLease(wire, holder, block_keys, ttl_ms, settings=self.settings, stats=self._stats)
        assert self._tasks is not None
        self._tasks.start_soon(lease.run)
        self._leases.add(lease)
        try:
            yield lease
        finally:
            self._leases.discard(lease)
            lease.release()

    # What happened ---------------------------------------------------------------------------------------

    def stats(self) -> ClientStats:
        """Return what the client has done so far, counted."""
        return copy.deepcopy(self._stats)
