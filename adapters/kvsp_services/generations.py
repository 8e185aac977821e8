"""Between the API for people's own clients and the front-end role: generations in, tokens out."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import structlog
from anyio.streams.memory import MemoryObjectSendStream

from kvsp_core.heads import is_traceparent
from kvsp_core.records import Sampler
from kvsp_core.roles import front_end as roles
from kvsp_services.driver import Driver
from kvsp_services.logs import REQUEST_ID
from kvsp_services.openai_api import Ended, Failed, GenerationEvent, GenerationRequest, Started, Token
from kvsp_services.request_log import OVERLOADED, new_traceparent, request_id_of

__all__ = ["Generations"]

_GIVEN_UP: Final = "given up"


class Generations:
    """The generations of one front end. `driver` is what drives its role; a rebuilt one takes its place.

    `scope_id` is the scope that requests are in. The end of each is logged; at level debug only where it was
    refused with 503, for which there is no bound: `refused` is called for each of those.
    """

    def __init__(self, scope_id: str, refused: Callable[[], None] = lambda: None) -> None:
        self.driver: Driver | None = None
        self._scope_id = scope_id
        self._refused = refused
        self._last = 0
        self._log = structlog.get_logger(role="front_end")
        self._streams: dict[int, MemoryObjectSendStream[GenerationEvent]] = {}

    def belongs_to(self, traceparent: str | None) -> str:
        """Return what a request belongs to: what it says, where that is well formed, or a trace that begins
        here."""
        if traceparent is not None and traceparent.isascii() and is_traceparent(traceparent.encode()):
            return traceparent
        return new_traceparent() if self.driver is None else self.driver.new_traceparent()

    @asynccontextmanager
    async def generate(self, asked: GenerationRequest) -> AsyncIterator[AsyncIterator[GenerationEvent]]:
        """Start a generation; leaving the context gives up what is left of it. Who leaves it without an
        error has all that was wanted, as when a stop string has come."""
        self._last += 1
        number = self._last
        # No more events come than tokens were asked for, so this needs no bound of its own.
        events, received = anyio.create_memory_object_stream[GenerationEvent](math.inf)
        self._streams[number] = events
        sampler = Sampler(
            method=asked.method,
            params=dict(asked.params),
            seed=asked.seed,
            step=0,
            deterministic=asked.method == "greedy",
        )
        generate = roles.Generate(
            generation=number,
            scope_id=self._scope_id,
            prompt=asked.prompt,
            sampler=sampler,
            traceparent=asked.traceparent,
        )
        counted = _Counted(received)
        began = time.monotonic()
        self._tell(generate)
        try:
            async with received:
                yield counted
            counted.left()
        finally:
            if self._streams.pop(number, None) is not None:
                self._tell(roles.Abandon(number))
            if counted.overloaded:
                self._refused()
            say = self._log.debug if counted.overloaded else self._log.info
            say(
                "generation",
                outcome=counted.outcome,
                tokens=counted.tokens,
                took_ms=int(1000 * (time.monotonic() - began)),
                **{REQUEST_ID: request_id_of(asked.traceparent)},
            )

    def _tell(self, item: Any) -> None:
        if self.driver is None or self.driver.stopped:
            self.fail_all()
        else:
            self.driver.handle(item)

    def deliver(self, effect: object) -> None:
        """Take what the role gives out."""
        match effect:
            case roles.GenerationPlaced(number, cached_tokens):
                self._send(number, Started(cached_tokens))
            case roles.TokenReady(number, _, token):
                self._send(number, Token(token))
            case roles.GenerationEnded(number, reason):
                self._send(number, Ended(reason), last=True)
            case roles.GenerationFailed(number, status, detail):
                self._send(number, Failed(status, detail), last=True)
            case _:
                raise AssertionError(f"a front end gives out no {type(effect).__name__}")

    def _send(self, number: int, event: GenerationEvent, *, last: bool = False) -> None:
        stream = self._streams.pop(number, None) if last else self._streams.get(number)
        if stream is None:
            return
        try:
            stream.send_nowait(event)
        except anyio.BrokenResourceError:
            return  # its client has gone, which ends the generation
        if last:
            stream.close()

    def fail_all(self) -> None:
        """Say of every generation that it is over: the role that had them is gone."""
        for number in tuple(self._streams):
            self._send(number, Failed(503, "the front end is being restarted; ask again"), last=True)


class _Counted:
    """The events of a generation, as they are taken: how many tokens, and how it ended."""

    def __init__(self, events: AsyncIterator[GenerationEvent]) -> None:
        self._events = events
        self.tokens = 0
        self.outcome = _GIVEN_UP
        self.overloaded = False

    def __aiter__(self) -> AsyncIterator[GenerationEvent]:
        return self

    async def __anext__(self) -> GenerationEvent:
        event = await anext(self._events)
        match event:
            case Token():
                self.tokens += 1
            case Ended(reason):
                self.outcome = reason
            case Failed(status, detail):
                self.outcome = f"{status} {detail}"
                self.overloaded = status == OVERLOADED
            case _:
                pass
        return event

    def left(self) -> None:
        """Take note that no more events are wanted."""
        if self.outcome == _GIVEN_UP:
            self.outcome = "stop"
