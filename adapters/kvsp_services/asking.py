"""One request to a role and its answer, for tools that run from a shell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, TypeVar

import attrs

from kvsp_core.answers import read_answer, read_outcome
from kvsp_core.errors import KVSPError
from kvsp_core.heads import Response
from kvsp_core.problems import Problem
from kvsp_core.resources import Operation, request_for
from kvsp_h2 import Credentials
from kvsp_services.ports import Peers

__all__ = ["Answer", "AskError", "ask", "ask_for", "ask_over"]

T = TypeVar("T")

TIMEOUT_S: Final = 30


class AskError(KVSPError):
    """A role did not answer, or refused."""


@attrs.frozen
class Answer:
    """What a role answered."""

    response: Response
    body: bytes = attrs.field(repr=False)


class _Collected:
    """Takes in one answer; see `ports.OutgoingListener`."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.response: Response | None = None
        self.body = bytearray()

    def response_received(self, response: Response) -> None:
        self.response = response

    def data_placed(self, size_bytes: int) -> None:
        """Nothing is: it is not asked for."""

    def data_received(self, data: memoryview) -> None:
        self.body += data

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
) -> Answer:
    """Make a request over connections that there are, on asyncio. Raises `AskError` or `TimeoutError`."""
    length = sum(piece.nbytes for piece in pieces) if pieces else None
    request, octets = request_for(operation, body, length=length)
    collected = _Collected()
    async with asyncio.timeout(TIMEOUT_S):
        peers.call(base_uri, request, pieces or ((octets,) if octets else ()), collected)
        await collected.over
    assert collected.response is not None
    return Answer(collected.response, bytes(collected.body))


async def _ask(
    credentials: Credentials, base_uri: str, operation: Operation, body: object, pieces: Sequence[memoryview]
) -> Answer:
    import kvsp_asyncio
    from kvsp_services.wire import ServicePeers

    async with kvsp_asyncio.open_network() as network:
        peers = ServicePeers.of_network(network, credentials)
        return await ask_over(peers, base_uri, operation, body, pieces)


def ask(
    credentials: Credentials,
    base_uri: str,
    operation: Operation,
    body: object = None,
    pieces: Sequence[memoryview] = (),
) -> Answer:
    """Make a request to the role at a base URI and return its answer, whatever it is.

    `pieces` is a body that is a container. Raises `AskError` where there is no answer.
    """
    try:
        return asyncio.run(_ask(credentials, base_uri, operation, body, pieces))
    except TimeoutError:
        raise AskError(f"{base_uri} did not answer within {TIMEOUT_S} s") from None
    except AskError as error:
        raise AskError(f"{base_uri}: {error}") from None


def ask_for(
    kind: type[T], credentials: Credentials, base_uri: str, operation: Operation, body: object = None
) -> T:
    """Make a request and return the message its answer holds. Raises `AskError` where it is refused."""
    answer = ask(credentials, base_uri, operation, body)
    found = read_answer(kind, answer.response, answer.body)
    if isinstance(found, Problem):
        raise AskError(f"{base_uri}: {said(found)}")
    return found


def expect_success(base_uri: str, answer: Answer) -> None:
    """Raise `AskError` where an answer is a refusal."""
    problem = read_outcome(answer.response, answer.body)
    if problem is not None:
        raise AskError(f"{base_uri}: {said(problem)}")


def said(problem: Problem) -> str:
    """Return a problem in one line."""
    return f"{problem.status} {problem.detail or problem.type.title}"
