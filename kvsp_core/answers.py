"""Answers of the roles, made and read: one place for servers and clients.

Made: a head and a body for a record or message, a block, a problem, or nothing. Read: the message an answer
holds, or the problem it reports; a status that is not known counts for its class (HT-6).
Requirements HT-4 to HT-6 and BR-2, BR-3; decision W10.
"""

from __future__ import annotations

from typing import TypeVar

from kvsp_core.bodies import decode, encode
from kvsp_core.errors import RemoteProtocolError
from kvsp_core.heads import LINES_MEDIA_TYPE, Response, media_type
from kvsp_core.problems import Problem, problem_document, problem_of
from kvsp_core.registries import BLOCK_MEDIA_TYPE, JSON_MEDIA_TYPE, PROBLEM_MEDIA_TYPE

__all__ = [
    "block_response",
    "empty_response",
    "json_response",
    "lines_response",
    "problem_response",
    "read_answer",
    "read_outcome",
]

T = TypeVar("T")


# Made by servers --------------------------------------------------------------------------------------------


def json_response(
    message: object, status: int = 200, *, location: str | None = None
) -> tuple[Response, bytes]:
    """Return the answer that carries a record or message, or the JSON octets of one."""
    octets = message if isinstance(message, bytes) else encode(message)
    head = Response(
        status=status, content_type=JSON_MEDIA_TYPE, content_length=len(octets), location=location
    )
    return head, octets


def empty_response(status: int = 204, *, location: str | None = None) -> tuple[Response, bytes]:
    """Return an answer without a body."""
    return Response(status=status, location=location), b""


def problem_response(
    problem: Problem, *, allow: tuple[str, ...] = (), retry_after_s: int | None = None
) -> tuple[Response, bytes]:
    """Return the answer that reports a problem (HT-4)."""
    octets = problem_document(problem)
    head = Response(
        status=problem.status,
        content_type=PROBLEM_MEDIA_TYPE,
        content_length=len(octets),
        allow=allow,
        retry_after_s=retry_after_s,
    )
    return head, octets


def block_response(*, size_bytes: int, repr_digest: str, ttl_ms: int) -> Response:
    """Return the head of an answer to GET or HEAD of a block.

    `size_bytes` and `repr_digest` (hex32) are those of the container that is sent. `ttl_ms` is what remains
    of the replica's record: how long a client may keep the block for itself (BR-2, BR-3).
    """
    return Response(
        status=200,
        content_type=BLOCK_MEDIA_TYPE,
        content_length=size_bytes,
        max_age_s=max(0, ttl_ms) // 1000,
        repr_digest=repr_digest,
    )


def lines_response() -> Response:
    """Return the head of an answer that streams output, one JSON document a line."""
    return Response(status=200, content_type=LINES_MEDIA_TYPE, content_length=None)


# Read by clients --------------------------------------------------------------------------------------------


def read_answer(kind: type[T], response: Response, octets: bytes) -> T | Problem:
    """Return the message of this class that a successful answer holds, or the problem of any other.

    Raises `RemoteProtocolError` where an answer reports success but does not hold the message.
    """
    problem = read_outcome(response, octets)
    if problem is not None:
        return problem
    if media_type(response.content_type) != JSON_MEDIA_TYPE:
        raise RemoteProtocolError(f"expected {JSON_MEDIA_TYPE}", member="content-type")
    return decode(kind, octets)


def read_outcome(response: Response, octets: bytes) -> Problem | None:
    """Return None where an answer reports success, whatever it holds, or the problem it reports.

    Redirections are not followed: a role is where its base URI says.
    """
    if response.is_success:
        return None
    return problem_of(response.status, octets)
