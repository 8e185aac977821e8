"""Requests to roles and their answers, for tools that run from a shell."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import attrs

from kvsp_core.answers import read_answer, read_outcome
from kvsp_core.errors import KVSPError
from kvsp_core.heads import Response
from kvsp_core.problems import Problem
from kvsp_core.resources import Operation, request_for
from kvsp_h2 import Credentials
from kvsp_services.ports import Outgoing, Peers

if TYPE_CHECKING:
    from kvsp_services.wire import ServicePeers

__all__ = ["Answer", "AskError", "Asker", "Progress", "ask", "ask_for", "ask_over"]

T = TypeVar("T")

Progress: TypeAlias = Callable[[int, int | None], None]
"""Is told how many octets of an answer's body have come, and of how many, or None. From another thread."""

TIMEOUT_S: Final = 30
_MAX_BACKOFF_MS: Final = 500


class AskError(KVSPError):
    """A role did not answer, or refused."""


@attrs.frozen
class Answer:
    """What a role answered."""

    response: Response
    body: bytes = attrs.field(repr=False)


class _Collected:
    """Takes in one answer; see `ports.OutgoingListener`."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.response: Response | None = None
        self.body = bytearray()
        self.call: Outgoing | None = None

    def response_received(self, response: Response) -> None:
        self.response = response

    def data_placed(self, size_bytes: int) -> None:
        """Nothing is: it is not asked for."""

    def data_received(self, data: memoryview) -> None:
        self.body += data
        if self._progress is not None and self.response is not None:
            self._progress(len(self.body), self.response.content_length)
        if self.call is not None:
            self.call.acknowledge(len(data))

    def body_ended(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def failed(self, reason: str) -> None:
        if not self.over.done():
            self.over.set_exception(AskError(reason))


async def ask_over(
    peers: Peers,
    base_uri: str,
    operation: Operation,
    body: object = None,
    pieces: Sequence[memoryview] = (),
    progress: Progress | None = None,
) -> Answer:
    """Make a request over connections that there are, on asyncio. Raises `AskError` or `TimeoutError`."""
    length = sum(piece.nbytes for piece in pieces) if pieces else None
    request, octets = request_for(operation, body, length=length)
    collected = _Collected(progress)
    async with asyncio.timeout(TIMEOUT_S):
        sent = pieces or ((octets,) if octets else ())
        collected.call = peers.call(base_uri, request, sent, collected)
        try:
            await collected.over
        except asyncio.CancelledError:
            collected.call.cancel()
            raise
    assert collected.response is not None
    return Answer(collected.response, bytes(collected.body))


class Asker:
    """Asks roles with one certificate, over connections that are kept. A context; safe in several threads."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvsp-asker", daemon=True)
        self._network = AsyncExitStack()

    def __enter__(self) -> Asker:
        self._thread.start()
        try:
            self._peers = self._do(self._open())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._do(self._network.aclose())
        finally:
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> ServicePeers:
        import kvsp_asyncio
        from kvsp_h2.pool import PoolLimits
        from kvsp_services.wire import ServicePeers

        network = await self._network.enter_async_context(kvsp_asyncio.open_network())
        limits = PoolLimits(max_backoff_ms=_MAX_BACKOFF_MS)  # somebody waits for the answer
        return ServicePeers(lambda base_uri: network.service(self._credentials, base_uri, pool_limits=limits))

    def ask(
        self,
        base_uri: str,
        operation: Operation,
        body: object = None,
        pieces: Sequence[memoryview] = (),
        progress: Progress | None = None,
    ) -> Answer:
        """Make a request to the role at a base URI and return its answer, whatever it is.

        `pieces` is a body that is a container; `progress` hears how the answer comes in. Raises `AskError`
        where there is no answer.
        """
        try:
            return self._do(ask_over(self._peers, base_uri, operation, body, pieces, progress))
        except TimeoutError:
            raise AskError(f"{base_uri} did not answer within {TIMEOUT_S} s") from None
        except AskError as error:
            raise AskError(f"{base_uri}: {error}") from None

    def ask_for(self, kind: type[T], base_uri: str, operation: Operation, body: object = None) -> T:
        """Make a request and return the message its answer holds. Raises `AskError` where it is refused."""
        answer = self.ask(base_uri, operation, body)
        found = read_answer(kind, answer.response, answer.body)
        if isinstance(found, Problem):
            raise AskError(f"{base_uri}: {said(found)}")
        return found


def ask(
    credentials: Credentials,
    base_uri: str,
    operation: Operation,
    body: object = None,
    pieces: Sequence[memoryview] = (),
    progress: Progress | None = None,
) -> Answer:
    """Ask once; see `Asker.ask`."""
    with Asker(credentials) as asker:
        return asker.ask(base_uri, operation, body, pieces, progress)


def ask_for(
    kind: type[T], credentials: Credentials, base_uri: str, operation: Operation, body: object = None
) -> T:
    """Ask once for a message; see `Asker.ask_for`."""
    with Asker(credentials) as asker:
        return asker.ask_for(kind, base_uri, operation, body)


def expect_success(base_uri: str, answer: Answer) -> None:
    """Raise `AskError` where an answer is a refusal."""
    problem = read_outcome(answer.response, answer.body)
    if problem is not None:
        raise AskError(f"{base_uri}: {said(problem)}")


def said(problem: Problem) -> str:
    """Return a problem in one line."""
    return f"{problem.status} {problem.detail or problem.type.title}"
