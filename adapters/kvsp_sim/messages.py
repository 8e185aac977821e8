"""What nodes of an exploration send each other: each message exists once, however often it arrives."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from kvsp_core.heads import Request, Response

__all__ = ["Answer", "Message", "Question"]


@attrs.frozen
class Question:
    """A request: the caller, in which of its lives, its call, and what it says."""

    source: str
    target: str
    life: int
    call_id: int
    request: Request
    body: bytes


@attrs.frozen
class Answer:
    """A part of an answer to a question: the whole, or number `part` of a stream."""

    question: Question
    part: int
    response: Response | None
    data: bytes
    end: bool


Message: TypeAlias = Question | Answer
