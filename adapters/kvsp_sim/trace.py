"""The record of a simulation: a hash over everything delivered to roles, and the last of it as text."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, TextIO

from kvsp_core.roles.role import (
    AnswerReceived,
    BlockReceived,
    BodyArrived,
    Call,
    CallFailed,
    Effect,
    Input,
    JobFailed,
    LineReceived,
    Observe,
    Persist,
    RequestReceived,
    Respond,
    Send,
)
from kvsp_sim.wire import request_line

__all__ = ["Event", "Trace"]

_KEPT: Final = 60
"""How many of the last events a failure shows."""


class Event:
    """An input that was delivered to a role, and the effects it had."""

    __slots__ = ("effects", "host", "item", "now_us")

    def __init__(self, now_us: int, host: str, item: Any) -> None:
        self.now_us = now_us
        self.host = host
        self.item = item
        self.effects: tuple[Effect, ...] = ()

    def __str__(self) -> str:
        done = "; ".join(describe_effect(effect) for effect in self.effects if type(effect) is not Observe)
        what = describe_input(self.item)
        return f"{self.now_us / 1e6:11.6f} s  {self.host:<12} {what}" + (f"  =>  {done}" if done else "")


class Trace:
    """What was delivered to roles, in order. Lines of text are made only when somebody looks."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._last: deque[Event] = deque(maxlen=_KEPT)
        self._out = out

    def note(self, mark: bytes, event: Event) -> None:
        """Add an event; `mark` is what stands for its host in the hash."""
        item = event.item
        kind = type(item)
        octets = b""
        if kind is BodyArrived or kind is AnswerReceived:
            octets = item.body
        elif kind is LineReceived:
            octets = item.line
        self._hash.update(b"%d %b %b %b\n" % (event.now_us, mark, kind.__name__.encode(), octets))
        if self._out is not None and self._last:
            self._out.write(f"{self._last[-1]}\n")
        self._last.append(event)

    def hexdigest(self) -> str:
        """Return the hash of everything so far."""
        return self._hash.hexdigest()

    def lines(self) -> Iterator[str]:
        """Go through the last events, as text."""
        return map(str, self._last)

    def close(self) -> None:
        """Write the last event."""
        if self._out is not None and self._last:
            self._out.write(f"{self._last[-1]}\n")


def describe_input(item: Input) -> str:
    """Return an input as a reader of a trace wants it: what it is about, and no confidential value."""
    match item:
        case RequestReceived(request_id, client, request):
            return f"request {request_id} from {client}: {request_line(request)}"
        case BodyArrived(request_id, body):
            return f"request {request_id}: body of {len(body)} octets"
        case AnswerReceived(call_id, response, body):
            return f"call {call_id}: answer {response.status}, {len(body)} octets"
        case BlockReceived(call_id, _, header):
            return f"call {call_id}: block of layers {header.layers.start}-{header.layers.stop - 1}"
        case LineReceived(call_id):
            return f"call {call_id}: line"
        case CallFailed(call_id, reason):
            return f"call {call_id} failed: {reason}"
        case JobFailed(job_id, fault):
            return f"job {job_id} failed: {fault.value}"
        case _:
            return repr(item)


def describe_effect(effect: Effect) -> str:
    """Return an effect as a reader of a trace wants it."""
    match effect:
        case Call(call_id=call_id, base_uri=base_uri, request=request):
            return f"call {call_id} to {base_uri}: {request_line(request)}"
        case Respond(request_id, response):
            return f"answer {request_id}: {response.status}"
        case Send(request_id, data, end):
            return f"send {len(data)} octets on {request_id}" + (", end" if end else "")
        case Persist(writes):
            return f"persist {', '.join(f'{type(write).__name__} {write.table}' for write in writes)}"
        case _:
            return repr(effect)
