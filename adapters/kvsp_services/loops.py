"""What a driver needs of a loop, on asyncio and on trio: time, timers, and work in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

__all__ = ["AsyncioLoop", "TrioLoop", "Workers"]

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
