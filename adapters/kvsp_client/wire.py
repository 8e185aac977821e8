"""The connections of a client: one network, one pool of connections for each role, single requests.

The sockets and timers are those of `kvsp_asyncio` and `kvsp_trio`, whichever loop is running.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, TypeVar

import anyio
import attrs
import sniffio

from kvsp_client.certificates import FollowedCredentials
from kvsp_client.errors import Refused, Unavailable
from kvsp_core.answers import read_answer
from kvsp_core.errors import RemoteProtocolError
from kvsp_core.heads import Response
from kvsp_core.problems import Problem
from kvsp_core.resources import Operation, request_for, resource_of
from kvsp_h2 import Credentials, DataReceived, Event, ExchangeEnded, ResponseReceived
from kvsp_h2.pool import Call, Pool, PoolLimits

__all__ = ["Answer", "Exchange", "Progress", "Wire", "open_network"]

T = TypeVar("T")

Progress: TypeAlias = Callable[[int, "int | None"], None]
"""Is told how many octets of a container have gone out, or of an answer's body have come, and of how many,
or None; in the loop's thread."""

_LOOK_S: Final = 0.1
"""Time between looks at how much of a container has been sent."""
MAX_ROLES: Final = 4096
"""Base URIs that one client calls at a time; calls to further ones fail, so that records cannot make it open
more."""


def open_network() -> Any:
    """Return a network for the loop that is running, to be entered: `kvsp_asyncio`'s or `kvsp_trio`'s."""
    pump = importlib.import_module(f"kvsp_{sniffio.current_async_library()}")
    return pump.open_network()


@attrs.frozen
class Answer:
    """What a role answered."""

    response: Response
    body: bytes = attrs.field(repr=False)


class Exchange:
    """Takes in one answer, as a whole; `over` is set at its end."""

    def __init__(self, limit_bytes: int, progress: Progress | None = None) -> None:
        self.over = anyio.Event()
        self.response: Response | None = None
        self.body = bytearray()
        self.failure = ""
        self.call: Call | None = None
        self._limit_bytes = limit_bytes
        self._progress = progress

    def on_event(self, event: Event) -> None:
        """Take an event of the exchange."""
        match event:
            case ResponseReceived(_, response):
                self.response = response
            case DataReceived(_, data):
                self.body += data
                if self._progress is not None and self.response is not None:
                    self._progress(len(self.body), self.response.content_length)
                if self.call is not None:
                    self.call.acknowledge(len(data))
                if len(self.body) > self._limit_bytes:
                    self.failure = f"its answer has more than {self._limit_bytes} octets"
                    self.over.set()
            case ExchangeEnded(complete=complete, reason=reason):
                self.failure = self.failure or ("" if complete else reason or "it did not answer")
                self.over.set()
            case _:
                pass


class Wire:
    """Requests to roles over the connections of one network, with one certificate, which may be renewed."""

    def __init__(
        self, network: Any, credentials: Credentials, *, pool_limits: PoolLimits | None = None
    ) -> None:
        self._network = network
        self._credentials = FollowedCredentials(credentials)
        self._pool_limits = pool_limits
        self._pools: dict[str, Pool] = {}

    def now_ms(self) -> int:
        """Return the time of the loop's clock."""
        return int(self._network.now_ms())

    def pool(self, base_uri: str) -> Pool:
        """Return the connections to a role. Raises `Unavailable` where it calls too many roles already."""
        pool = self._pools.get(base_uri)
        if pool is None:
            if len(self._pools) >= MAX_ROLES:
                self._forget_idle()
            if len(self._pools) >= MAX_ROLES:
                raise Unavailable(f"{base_uri}: this client calls {MAX_ROLES} roles already")
            pool = self._pools[base_uri] = self._network.service(
                self._credentials, base_uri, pool_limits=self._pool_limits
            )
        return pool

    def _forget_idle(self) -> None:
        """Let go of the roles that nothing is connected to any more."""
        for base_uri, pool in tuple(self._pools.items()):
            if pool.is_idle:
                self._network.forget(pool)
                del self._pools[base_uri]

    def call(
        self,
        base_uri: str,
        operation: Operation,
        body: object = None,
        *,
        on_event: Callable[[Event], None],
        pieces: Sequence[memoryview | bytes] = (),
    ) -> Call:
        """Make a request; `on_event` is told what becomes of it. `pieces` is a body that is a container.

        The pieces are not copied: they must not change until the exchange has ended.
        """
        length = sum(memoryview(piece).nbytes for piece in pieces) if pieces else None
        request, octets = request_for(operation, body, length=length)
        first, *rest = pieces or (octets,)
        call = self.pool(base_uri).call(request, first, on_event=on_event, end=not rest)
        for number, piece in enumerate(rest, 1):
            call.send_data(piece, end=number == len(rest))
        return call

    async def ask(
        self,
        base_uri: str,
        operation: Operation,
        body: object = None,
        *,
        timeout_ms: int,
        while_it_moves: bool = False,
        pieces: Sequence[memoryview | bytes] = (),
        progress: Progress | None = None,
    ) -> Answer:
        """Make a request and return its answer, whatever it is. Raises `Unavailable` where there is none.

        `timeout_ms` is for all of it, or, `while_it_moves`, for any time in which nothing moves.
        `progress` hears how the answer comes in, or how `pieces` go out, where there are any.
        """
        limit = resource_of(operation).answer_limit_bytes
        exchange = Exchange(limit, None if pieces else progress)
        call = exchange.call = self.call(base_uri, operation, body, on_event=exchange.on_event, pieces=pieces)
        timeout_s = timeout_ms / 1000
        try:
            with anyio.fail_after(timeout_s) as scope:
                if while_it_moves or (pieces and progress is not None):
                    size_bytes = sum(memoryview(piece).nbytes for piece in pieces)
                    async for moved in _watch(exchange, call):
                        if moved and while_it_moves:
                            scope.deadline = anyio.current_time() + timeout_s
                        if pieces and progress is not None and exchange.response is None:
                            progress(call.sent_bytes, size_bytes)
                await exchange.over.wait()
        except TimeoutError:
            was_silent = while_it_moves and exchange.body
            silent = "sent nothing more for" if was_silent else "did not answer within"
            raise Unavailable(f"{base_uri} {silent} {timeout_s:g} s") from None
        finally:
            call.cancel()
        if exchange.failure or exchange.response is None:
            raise Unavailable(f"{base_uri}: {exchange.failure}")
        return Answer(exchange.response, bytes(exchange.body))

    async def ask_for(
        self,
        kind: type[T],
        base_uri: str,
        operation: Operation,
        body: object = None,
        *,
        timeout_ms: int,
        while_it_moves: bool = False,
    ) -> T:
        """Make a request and return the message its answer holds; see `ask` for the time it may take.

        Raises `Refused` and `Unavailable`.
        """
        answer = await self.ask(
            base_uri, operation, body, timeout_ms=timeout_ms, while_it_moves=while_it_moves
        )
        try:
            found = read_answer(kind, answer.response, answer.body)
        except RemoteProtocolError as error:
            raise Unavailable(f"{base_uri}: its answer is not as the protocol says: {error}") from None
        if isinstance(found, Problem):
            raise Refused(base_uri, found)
        return found

    def tell(self, base_uri: str, operation: Operation, body: object = None) -> None:
        """Make a request whose answer changes nothing, and wait for nothing."""
        notice = _Notice()
        with suppress(Unavailable):
            notice.call = self.call(base_uri, operation, body, on_event=notice.on_event)


async def _watch(exchange: Exchange, call: Call) -> AsyncIterator[bool]:
    """Tell from time to time whether anything has moved, until an exchange is over."""
    before = (0, False, 0)
    while not exchange.over.is_set():
        now = (call.sent_bytes, exchange.response is not None, len(exchange.body))
        yield now != before
        before = now
        with anyio.move_on_after(_LOOK_S):
            await exchange.over.wait()


class _Notice:
    """Takes in an answer that nobody looks at."""

    def __init__(self) -> None:
        self.call: Call | None = None

    def on_event(self, event: Event) -> None:
        if isinstance(event, DataReceived) and self.call is not None:
            self.call.acknowledge(len(event.data))
