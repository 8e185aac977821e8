"""The client for threads: `BlockingClient` does what `Client` does, on a loop in a thread of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

import attrs

from kvsp_client.client import Client, index_parts
from kvsp_client.errors import ClientClosed
from kvsp_client.fetch import Fetch, FetchResult
from kvsp_client.lease import HolderLease, Lease
from kvsp_client.loop_thread import LoopThread, Running, release, shared_loop
from kvsp_client.memory import Sections
from kvsp_client.settings import ClientSettings
from kvsp_client.stats import ClientStats
from kvsp_client.store import StoreResult
from kvsp_core.prefix import Prefix, PrefixKeys
from kvsp_h2 import Credentials

__all__ = ["BlockingClient", "BlockingFetch", "BlockingJob", "BlockingLease"]

T = TypeVar("T")

_NOT_OVER: Final = "it is not there after {} s; wait again, or cancel"


@attrs.define
class _Opened:
    """A client on the loop of this process."""

    pid: int
    loop: LoopThread
    client: Client
    context: Any

    def begin(self, work: Callable[..., Awaitable[T]], *arguments: Any, **options: Any) -> Running[T]:
        """Begin to do something in the loop."""
        with self._errors():
            return self.loop.begin(work, *arguments, **options)

    def call(self, work: Callable[..., Awaitable[T]], *arguments: Any, **options: Any) -> T:
        """Do something in the loop, and wait for it; see `LoopThread.call`."""
        with self._errors():
            return self.loop.call(work, *arguments, **options)

    def check_process(self) -> None:
        """Raise `ClientClosed` in a process that was forked from the one it was opened in."""
        if self.pid != os.getpid():
            raise ClientClosed("this was begun in another process; begin it anew in this process")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Say in the client's own words that its loop does not run, here or any more."""
        self.check_process()
        try:
            yield
        except CancelledError:
            raise ClientClosed("the client was closed") from None
        except RuntimeError:
            if self.client.closed:
                raise ClientClosed("the client was closed") from None
            raise


class BlockingClient:
    """Finds, fetches, stores and leases blocks; its methods may be called in any thread, several at once.

    It takes the arguments of `Client`, and opens when it is first used. All clients of a process share one
    loop in one thread and, with the same certificate, their connections. In a process that was forked from
    this one it opens anew. `close` it, or use it in a ``with`` statement.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        index: str | Sequence[str],
        settings: ClientSettings | None = None,
    ) -> None:
        self.index = index
        self.settings = settings or ClientSettings()
        index_parts(index)  # a mistake is said here, not where the client is first used
        self._credentials = credentials
        self._lock = threading.Lock()
        self._opened: _Opened | None = None
        self._closed = False
        self._pid = os.getpid()
        self._jobs: set[BlockingJob[Any]] = set()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> _Opened:
        if self._pid != os.getpid():
            # The lock may have been held by a thread that is not in this process.
            self._lock, self._opened, self._pid = threading.Lock(), None, os.getpid()
            self._jobs = set()
        with self._lock:
            if self._closed:
                raise ClientClosed("the client was closed; make another one")
            if self._opened is None:
                self._opened = self._start()
            return self._opened

    def _start(self) -> _Opened:
        loop = shared_loop()

        async def make() -> Client:
            return Client(
                self._credentials,
                index=self.index,
                settings=self.settings,
                wire=loop.wire(self._credentials),
            )

        try:
            client = loop.portal.call(make)
            context = loop.portal.wrap_async_context_manager(client)
            context.__enter__()
        except BaseException:
            release(loop)
            raise
        return _Opened(os.getpid(), loop, client, context)

    def close(self) -> None:
        """Give up what is under way, and close; twice is as good as once."""
        if self._pid != os.getpid():
            self._closed = True
            return
        with self._lock:
            opened, self._opened, self._closed = self._opened, None, True
        if opened is not None:
            for job in tuple(self._jobs):
                job.cancel()
            try:
                opened.context.__exit__(None, None, None)
            finally:
                release(opened.loop)

    def lookup(self, keys: PrefixKeys, *others: PrefixKeys) -> Prefix:
        """Return the longest prefix that the index knows replicas of; see `Client.lookup`."""
        opened = self._open()
        return opened.call(opened.client.lookup, keys, *others)

    def fetch(self, prefix: Prefix, sections: Sections, *, deadline_ms: int | None = None) -> FetchResult:
        """Fetch a prefix into the caller's memory and return what has come; see `Client.fetch`."""
        opened = self._open()
        return opened.call(opened.client.fetch, prefix, sections, deadline_ms=deadline_ms)

    def start_fetch(
        self, prefix: Prefix, sections: Sections, *, deadline_ms: int | None = None
    ) -> BlockingFetch:
        """Begin to fetch a prefix and return at once; `cancel` it where its result is not waited for."""
        opened = self._open()

        async def start() -> Fetch:
            return opened.client.start_fetch(prefix, sections, deadline_ms=deadline_ms)

        return BlockingFetch(opened, opened.call(start))

    def store(
        self, holder: str, keys: PrefixKeys, sections: Sections, *, deadline_ms: int | None = None
    ) -> StoreResult:
        """Store blocks from the caller's memory at a holder; see `Client.store`."""
        return self.start_store(holder, keys, sections, deadline_ms=deadline_ms).wait()

    def start_store(
        self, holder: str, keys: PrefixKeys, sections: Sections, *, deadline_ms: int | None = None
    ) -> BlockingJob[StoreResult]:
        """Begin to store blocks and return at once; the caller's memory is read until the job is done."""
        opened = self._open()
        running = opened.begin(opened.client.store, holder, keys, sections, deadline_ms=deadline_ms)
        job = BlockingJob(running)
        self._jobs.add(job)
        running.future.add_done_callback(lambda _: self._jobs.discard(job))
        return job

    @contextmanager
    def lease(self, holder: str, keys: PrefixKeys, *, ttl_ms: int = 30_000) -> Iterator[BlockingLease]:
        """Keep blocks at a holder from being evicted while the block runs; see `Client.lease`."""
        opened = self._open()
        with _entered(opened, opened.client.lease(holder, keys, ttl_ms=ttl_ms)) as lease:
            yield BlockingLease(opened, lease)

    @contextmanager
    def lease_prefix(self, prefix: Prefix, *, ttl_ms: int = 30_000) -> Iterator[BlockingLease]:
        """Keep the blocks of a prefix at each of its holders; see `Client.lease_prefix`."""
        opened = self._open()
        with _entered(opened, opened.client.lease_prefix(prefix, ttl_ms=ttl_ms)) as lease:
            yield BlockingLease(opened, lease)

    def stats(self) -> ClientStats:
        """Return what the client has done so far, counted; in a forked process, since the fork."""
        opened = self._open()

        async def stats() -> ClientStats:
            return opened.client.stats()

        return opened.call(stats)


class BlockingFetch:
    """A prefix on its way into memory; see `Fetch`. Its methods may be called in any thread."""

    def __init__(self, opened: _Opened, fetch: Fetch) -> None:
        self._opened = opened
        self._fetch = fetch

    @property
    def done(self) -> bool:
        """Whether nothing more comes: `result` returns at once."""
        if self._opened.pid != os.getpid():
            return self._fetch.done
        with self._fetch.turn:  # so that it is not said while the last octets are being put in place
            return self._fetch.done

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> int:
        """Wait until a layer is usable, and return of how many leading blocks; see `Fetch.wait_layer`.

        Raises `TimeoutError` where that takes longer.
        """
        return self._wait(lambda: self._fetch.usable(layer), timeout_s)

    def result(self, timeout_s: float | None = None) -> FetchResult:
        """Wait for the end, and return what there is. Raises `TimeoutError` where that takes longer."""
        return self._wait(lambda: self._fetch.outcome() if self.done else None, timeout_s)

    def cancel(self) -> None:
        """Fetch no more; once this returns, nothing is written to the memory any more."""

        async def cancel() -> None:
            self._fetch.cancel()

        if not self.done:
            self._opened.call(cancel)

    def _wait(self, look: Callable[[], T | None], timeout_s: float | None) -> T:
        """Wait until there is something to see."""
        self._opened.check_process()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._fetch.turn:
            while (found := look()) is None:
                left_s = None if until is None else until - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError(_NOT_OVER.format(timeout_s))
                self._fetch.turn.wait(left_s)
        return found


class BlockingJob(Generic[T]):
    """Something under way in the client's thread."""

    def __init__(self, running: Running[T]) -> None:
        self._running = running
        self._pid = os.getpid()

    @property
    def done(self) -> bool:
        """Whether it is over; in a process that was forked from the one it was begun in it is."""
        return self._pid != os.getpid() or self._running.over.is_set()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the end, and return what came of it. Raises `TimeoutError` where that takes longer."""
        with self._errors():
            try:
                return self._running.future.result(timeout_s)
            except TimeoutError:
                if self._running.future.done():  # by now, or with a `TimeoutError` of its own
                    return self._running.future.result()
                raise TimeoutError(_NOT_OVER.format(timeout_s)) from None

    def wait(self) -> T:
        """Wait for the end, and return what came of it. Where the wait is interrupted, it is given up, and
        over before this raises."""
        with self._errors():
            return self._running.wait()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        if self._pid != os.getpid():
            raise ClientClosed("this job was begun in another process; begin one in this process")
        try:
            yield
        except CancelledError:
            raise ClientClosed("the job was cancelled, or the client closed") from None

    def cancel(self) -> None:
        """Give it up; it is over when it is `done`."""
        if self._pid == os.getpid():
            self._running.future.cancel()


class BlockingLease:
    """A lease that renews itself in the client's thread."""

    def __init__(self, opened: _Opened, lease: HolderLease | Lease) -> None:
        self._opened = opened
        self._lease = lease

    @property
    def held(self) -> bool:
        """Whether the holders have promised to keep the blocks now."""

        async def held() -> bool:
            return self._lease.held

        return self._opened.call(held)


@contextmanager
def _entered(opened: _Opened, context: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Be in an asynchronous context, and leave it also where entering it was interrupted.

    In a process that is forked meanwhile, and once the client is closed, there is nothing to leave.
    """
    stack = AsyncExitStack()
    try:
        yield opened.call(stack.enter_async_context, context)
    finally:
        if opened.pid == os.getpid():
            with suppress(ClientClosed):
                opened.call(stack.aclose)
