"""The thread in which a process that has no loop of its own runs its clients: one loop, one network.

It is started by the first `BlockingClient` and ends with the last. A process that is forked has no such
thread: it begins anew, and lets go of the sockets that it inherited, so that closing them here and there
does not disturb each other.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final, Generic, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from kvsp_client.wire import Wire, open_network
from kvsp_h2 import Credentials

__all__ = ["LoopThread", "Running", "release", "shared_loop"]

T = TypeVar("T")

_CLOSE_S: Final = 2.0


class LoopThread:
    """A loop in a thread, the network on it, and the connections of each certificate."""

    def __init__(self) -> None:
        self._portal_context = start_blocking_portal("asyncio", _loop_options(), name="kvsp-client")
        self.portal: BlockingPortal = self._portal_context.__enter__()
        self._network_context = self.portal.wrap_async_context_manager(_OpenNetwork())
        self.network = self._network_context.__enter__()
        self._wires: dict[tuple[str, ...], Wire] = {}
        self.users = 0

    def wire(self, credentials: Credentials) -> Wire:
        """Return the connections with this certificate; called in the loop's thread."""
        wire = self._wires.get(credentials.files)
        if wire is None:
            wire = self._wires[credentials.files] = Wire(self.network, credentials)
        return wire

    def begin(self, work: Callable[..., Awaitable[T]], *arguments: Any, **options: Any) -> Running[T]:
        """Begin to do something in the loop."""
        return Running(self.portal, work, arguments, options)

    def call(self, work: Callable[..., Awaitable[T]], *arguments: Any, **options: Any) -> T:
        """Do something in the loop, and wait for it; see `Running.wait`."""
        return self.begin(work, *arguments, **options).wait()

    def sockets(self) -> Iterable[int]:
        """Return the file descriptors of its connections."""
        return tuple(self.network.filenos())

    def close(self) -> None:
        """Close the connections in order, and end the thread."""
        self._network_context.__exit__(None, None, None)
        self._portal_context.__exit__(None, None, None)


class Running(Generic[T]):
    """Something under way in the loop."""

    def __init__(
        self,
        portal: BlockingPortal,
        work: Callable[..., Awaitable[T]],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        self.over = over = threading.Event()
        """Whether it has ended, also where it was cancelled: it uses the caller's memory no more."""

        async def run() -> T:
            try:
                return await work(*arguments, **options)
            finally:
                over.set()

        self.future: Future[T] = portal.start_task_soon(run)

    def wait(self) -> T:
        """Return what comes of it. Where the wait is interrupted, it is given up, and over before this
        raises."""
        try:
            return self.future.result()
        except BaseException:
            self.future.cancel()
            self.over.wait()
            raise


class _OpenNetwork:
    """A network that is closed within a bounded time."""

    def __init__(self) -> None:
        self._context: Any = None
        self._network: Any = None

    async def __aenter__(self) -> Any:
        self._context = open_network()
        self._network = await self._context.__aenter__()
        return self._network

    async def __aexit__(self, *error: object) -> None:
        try:
            with anyio.move_on_after(_CLOSE_S):
                await self._network.close()
        finally:
            self._network.abort()
            await self._context.__aexit__(None, None, None)


def _loop_options() -> dict[str, Any]:
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return {}
    return {"use_uvloop": True}


class _Process:
    """What a process has of this; another one after a fork."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: LoopThread | None = None


_process = _Process()
_inherited: list[object] = []
"""What a parent process was using: kept, so that nothing of it is ever closed here."""


def shared_loop() -> LoopThread:
    """Return the loop of this process, started where it is not running, for one more user."""
    with _process.lock:
        if _process.loop is None:
            _process.loop = LoopThread()
        _process.loop.users += 1
        return _process.loop


def release(loop: LoopThread) -> None:
    """Take note that one user of the loop is done; after the last it ends."""
    with _process.lock:
        loop.users -= 1
        if loop.users or loop is not _process.loop:
            return
        _process.loop = None
    loop.close()


def _after_fork() -> None:
    """Begin anew in a child process. Its copies of the parent's sockets become something harmless."""
    global _process
    before, _process = _process, _Process()
    _inherited.append(before)
    if before.loop is None:
        return
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in before.loop.sockets():
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)


os.register_at_fork(after_in_child=_after_fork)
