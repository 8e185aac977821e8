"""Requests to roles and their answers, for tools that run from a shell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from kvsp_client.errors import Refused
from kvsp_client.loop_thread import LoopThread, release, shared_loop
from kvsp_client.wire import Answer, Progress, Wire
from kvsp_core.answers import read_outcome
from kvsp_core.identity import parse_base_uri
from kvsp_core.resources import Operation
from kvsp_h2 import Credentials
from kvsp_h2.pool import PoolLimits

__all__ = ["Asker", "ask", "ask_for", "expect_success"]

T = TypeVar("T")

TIMEOUT_MS: Final = 30_000
"""Time in which nothing of a request or its answer moves."""
_LIMITS: Final = PoolLimits(max_backoff_ms=500)
"""Somebody waits for the answer."""


class Asker:
    """Asks roles with one certificate, over connections that are kept. A context; safe in several threads."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def __enter__(self) -> Asker:
        self._loop: LoopThread = shared_loop()
        self._wire = Wire(self._loop.network, self._credentials, pool_limits=_LIMITS)
        return self

    def __exit__(self, *exception: object) -> None:
        release(self._loop)

    def ask(
        self,
        base_uri: str,
        operation: Operation,
        body: object = None,
        pieces: Sequence[memoryview] = (),
        progress: Progress | None = None,
    ) -> Answer:
        """Make a request to the role at a base URI and return its answer, whatever it is.

        `pieces` is a body that is a container; `progress` hears how the answer comes in. Raises `Unavailable`
        where there is no answer, `KVSPError` where that is no base URI.
        """
        parse_base_uri(base_uri)
        return self._loop.call(
            self._wire.ask,
            base_uri,
            operation,
            body,
            timeout_ms=TIMEOUT_MS,
            while_it_moves=True,
            pieces=pieces,
            progress=progress,
        )

    def ask_for(self, kind: type[T], base_uri: str, operation: Operation, body: object = None) -> T:
        """Make a request and return the message its answer holds. Raises `Refused` and `Unavailable`."""
        parse_base_uri(base_uri)
        found: T = self._loop.call(
            self._wire.ask_for,
            kind,
            base_uri,
            operation,
            body,
            timeout_ms=TIMEOUT_MS,
            while_it_moves=True,
        )
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
    """Raise `Refused` where an answer is a refusal."""
    problem = read_outcome(answer.response, answer.body)
    if problem is not None:
        raise Refused(base_uri, problem)
