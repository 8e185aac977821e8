"""What a role has under way: the calls and jobs it waits for, and the effects it gathers.

A role numbers its calls, jobs and buffers; `Work` does, and remembers for each what it is for, as a frozen
value of the role's choosing. When it ends, the role takes that value back and goes on. Two roles that share
a base URI (an instance and the holder of its tiers) share one `Numbers`, so that a completion belongs to one
of them only.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvsp_core.resources import Operation, request_for, resource_of
from kvsp_core.roles.role import (
    AnswerForm,
    BlockBody,
    Call,
    CancelCall,
    Effect,
    FreeBuffer,
    Observe,
)

__all__ = ["Numbers", "Work"]


@attrs.define
class Numbers:
    """The counters of a role, or of several under one base URI."""

    calls: int = 0
    jobs: int = 0
    buffers: int = 0


class Work:
    """Gathers the effects of one input, and keeps what is under way from input to input."""

    def __init__(self, numbers: Numbers | None = None) -> None:
        self.numbers = numbers or Numbers()
        self.calls: dict[int, Any] = {}
        """Call -> what it is for."""
        self.jobs: dict[int, Any] = {}
        """Job -> what it is for."""
        self._effects: list[Effect] = []

    def emit(self, *effects: Effect) -> None:
        """Add effects, in order."""
        self._effects += effects

    def take(self) -> tuple[Effect, ...]:
        """Return the effects gathered since the last time."""
        effects, self._effects = tuple(self._effects), []
        return effects

    # Calls, jobs, buffers

    def call(
        self,
        base_uri: str,
        operation: Operation,
        body: object = None,
        *,
        purpose: Any,
        timeout_ms: int,
        form: AnswerForm = AnswerForm.DOCUMENT,
        buffer: int | None = None,
        block: BlockBody | None = None,
        length: int | None = None,
        cause: str | None = None,
    ) -> int:
        """Send a typed request to a peer and remember what for; return the number of the call.

        `buffer` takes in a block; `block`, with its `length` in octets, sends one. `cause` is the
        ``traceparent`` of the request that it is made for.
        """
        request, octets = request_for(operation, body, length=length)
        self.numbers.calls += 1
        number = self.numbers.calls
        self.calls[number] = purpose
        self.emit(
            Call(
                call_id=number,
                base_uri=base_uri,
                request=request,
                body=octets if block is None else block,
                timeout_ms=timeout_ms,
                form=form,
                buffer=buffer,
                limit_bytes=None if buffer is None else resource_of(operation).answer_limit_bytes,
                traceparent=cause,
            )
        )
        return number

    def cancel(self, call: int) -> None:
        """Give a call up."""
        if self.calls.pop(call, None) is not None:
            self.emit(CancelCall(call))

    def job(self, purpose: Any) -> int:
        """Return the number of a new job, and remember what it is for."""
        self.numbers.jobs += 1
        self.jobs[self.numbers.jobs] = purpose
        return self.numbers.jobs

    def new_buffer(self) -> int:
        """Return the number of a new buffer."""
        self.numbers.buffers += 1
        return self.numbers.buffers

    def free(self, buffer: int) -> None:
        """Give a buffer back."""
        self.emit(FreeBuffer(buffer))

    def observe(self, name: str, value: int = 1, **labels: str) -> None:
        """Count something."""
        self.emit(Observe(name, value, tuple(labels.items())))
