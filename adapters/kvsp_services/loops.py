"""What a driver needs of a loop, on asyncio and on trio: time, timers, and work in threads."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import sniffio
from anyio.abc import TaskGroup

from kvsp_services.ports import Loop

__all__ = ["AsyncioLoop", "TrioLoop", "Workers", "open_loop"]

_WORKERS: Final = 4


class Workers:
    """Threads for work that takes its time. Work of the same order goes to the same thread, so it keeps
    its turn."""

    def __init__(self, count: int = _WORKERS) -> None:
        self._threads = [ThreadPoolExecutor(1, f"kvsp-work-{number}") for number in range(count)]

    def submit(self, order: object, work: Callable[[], None]) -> None:
        """Run work in the thread of its order."""
        self._threads[hash(order) % len(self._threads)].submit(work)

    def close(self) -> None:
        """End after what has been submitted."""
        for thread in self._threads:
            thread.shutdown()


class AsyncioLoop:
    """The running loop of asyncio, or of uvloop; see `ports.Loop`."""

    def __init__(self, workers: Workers) -> None:
        self._loop = asyncio.get_running_loop()
        self._workers = workers
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}

    def now_ms(self) -> int:
        """Return the monotonic time."""
        return int(self._loop.time() * 1000)

    def call_at(self, deadline_ms: int | None, call: Callable[[], None]) -> None:
        """Call when the time has come, or earlier."""
        if deadline_ms is None:
            return
        deadline = deadline_ms / 1000
        timer = self._timers.get(call)
        if timer is not None:
            if timer.when() <= deadline:
                return
            timer.cancel()
        self._timers[call] = self._loop.call_at(deadline, self._fire, call)

    def _fire(self, call: Callable[[], None]) -> None:
        del self._timers[call]
        call()

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        """Call in the loop's thread, soon; after the loop has closed, not at all."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def in_thread(self, order: object, work: Callable[[], None]) -> None:
        """Run in another thread."""
        self._workers.submit(order, work)


class TrioLoop:
    """The running loop of trio; see `ports.Loop`. Its timers live in a nursery of the caller's."""

    def __init__(self, nursery: Any, workers: Workers) -> None:
        import trio

        self._trio: Any = trio
        self._nursery = nursery
        self._workers = workers
        self._token = trio.lowlevel.current_trio_token()
        self._timers: dict[Callable[[], None], tuple[float, Any]] = {}

    def now_ms(self) -> int:
        """Return the monotonic time."""
        return int(self._trio.current_time() * 1000)

    def call_at(self, deadline_ms: int | None, call: Callable[[], None]) -> None:
        """Call when the time has come, or earlier."""
        if deadline_ms is None:
            return
        deadline = deadline_ms / 1000
        if call in self._timers:
            earlier, scope = self._timers[call]
            if earlier <= deadline:
                return
            scope.cancel()
        scope = self._trio.CancelScope()
        self._timers[call] = (deadline, scope)
        self._nursery.start_soon(self._wait, deadline, scope, call)

    async def _wait(self, deadline: float, scope: Any, call: Callable[[], None]) -> None:
        with scope:
            await self._trio.sleep_until(deadline)
        if not scope.cancelled_caught:
            del self._timers[call]
            call()

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        """Call in the loop's thread, soon; after the loop has ended, not at all."""
        try:
            self._token.run_sync_soon(call)
        except self._trio.RunFinishedError:
            return

    def in_thread(self, order: object, work: Callable[[], None]) -> None:
        """Run in another thread."""
        self._workers.submit(order, work)


@asynccontextmanager
async def open_loop() -> AsyncIterator[tuple[Loop, Any, TaskGroup]]:
    """Open what drivers need of the loop that is running, asyncio or trio: its port, a network, tasks.

    All of it ends with the block.
    """
    on_trio = sniffio.current_async_library() == "trio"
    # Only the pump that is used is imported, so that the other one's packages need not be there.
    pump = importlib.import_module("kvsp_trio" if on_trio else "kvsp_asyncio")
    workers = Workers()
    try:
        async with pump.open_network() as network, anyio.create_task_group() as tasks:
            try:
                yield TrioLoop(tasks, workers) if on_trio else AsyncioLoop(workers), network, tasks
            finally:
                tasks.cancel_scope.cancel()
    finally:
        workers.close()
