"""An OpenAI-compatible HTTP API in front of a front-end role, so that people's own clients work.

It is no part of KVSP. ``/v1/completions`` and ``/v1/chat/completions``, whole or streamed, and
``/v1/models``; what a client asks for and this server does not do is refused, never ignored, where ignoring
it would change the answer.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeAlias

import anyio
import anyio.to_thread
import attrs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvsp_services.openai_requests import Asked, GenerationRequest, Reader, Refusal, Tokenizer
from kvsp_services.request_log import request_id_of

__all__ = [
    "Ended",
    "Failed",
    "Generate",
    "GenerationEvent",
    "GenerationRequest",
    "Started",
    "Token",
    "make_app",
]

MAX_BODY_BYTES: Final = 4 << 20
MAX_BODIES_BYTES: Final = 64 << 20
"""All bodies that are being received or read; what is more costs large ones."""
MAX_BODY_PIECES: Final = 1 << 16
"""Chunks of one body: what each costs has nothing to do with how little is in it."""
LARGE_BODY_BYTES: Final = 32 << 10
"""From here on a body is turned into tokens in a thread."""
LARGE_BODIES: Final = 2
"""So many at a time: what a body holds takes many times its octets while it is read."""
BODY_S: Final = 60.0
"""How long a body may take to arrive."""
CLIENT_GONE: Final = 499
"""What nobody receives."""


@attrs.frozen
class Started:
    """The request was placed: so many of its prompt tokens come from caches."""

    cached_tokens: int


@attrs.frozen
class Token:
    """The next output token."""

    token: int = attrs.field(repr=False)


@attrs.frozen
class Ended:
    """The output is complete: ``stop`` or ``length``."""

    reason: str


@attrs.frozen
class Failed:
    """The output cannot go on: an HTTP status and a plain reason."""

    status: int
    detail: str


GenerationEvent: TypeAlias = Started | Token | Ended | Failed
Generate: TypeAlias = Callable[
    [GenerationRequest], AbstractAsyncContextManager[AsyncIterator[GenerationEvent]]
]
"""Starts a generation; leaving the context cancels what is left of it."""


def make_app(
    *,
    model: str,
    text: Tokenizer,
    generate: Generate,
    context_tokens: int,
    vocabulary: int,
    belongs_to: Callable[[str | None], str],
) -> Starlette:
    """Return the application. `model` is the name it serves, `context_tokens` the most tokens of prompt and
    answer, `vocabulary` how many different ones there are. `belongs_to` takes the field ``traceparent`` of a
    request and returns what it belongs to, whose trace id the client is told as ``x-request-id``.
    """
    reader = Reader(model, text, context_tokens, vocabulary)
    api = _Api(model, text, generate, reader, belongs_to)
    return Starlette(
        exception_handlers={HTTPException: _refused},
        routes=[
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/models", api.models, methods=["GET"]),
        ],
    )


async def _refused(request: Request, error: Exception) -> Response:
    """Answer for another path or method in the form of every other error."""
    assert isinstance(error, HTTPException)
    response = Refusal(
        error.status_code,
        f"{error.detail}; this server has /v1/completions, /v1/chat/completions and /v1/models",
    ).response
    response.headers.update(error.headers or {})
    return response


@attrs.define(eq=False)
class _Api:
    _model: str
    _text: Tokenizer
    _generate: Generate
    _reader: Reader
    _belongs_to: Callable[[str | None], str]
    _held_bytes: int = 0
    _turns: anyio.CapacityLimiter = attrs.field(factory=lambda: anyio.CapacityLimiter(LARGE_BODIES))

    async def models(self, request: Request) -> Response:
        """Answer the list of models: one."""
        entry = {"id": self._model, "object": "model", "created": 0, "owned_by": "kvsp"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def completions(self, request: Request) -> Response:
        """Answer a completion of a prompt."""
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        belongs_to = self._belongs_to(request.headers.get("traceparent"))
        try:
            asked = await self._asked(request, chat, belongs_to)
            answer = self._streamed(asked) if asked.stream else self._whole(asked)
            response = await _while_connected(request, answer)
        except Refusal as refusal:
            response = refusal.response
        except ClientDisconnect:
            response = Response(status_code=CLIENT_GONE)
        response.headers["x-request-id"] = request_id_of(belongs_to) or ""
        return response

    # Reading

    async def _asked(self, request: Request, chat: bool, belongs_to: str) -> Asked:
        # A page of a foreign site may send anything else, and what has no type, without asking.
        unstated = "" if "origin" in request.headers else "application/json"
        kind = request.headers.get("content-type", unstated).partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refusal(415, "the body must be of type application/json; say so in content-type")
        octets = bytearray()
        try:
            await self._receive(request, octets)
            if len(octets) < LARGE_BODY_BYTES:
                return self._reader.read(octets, chat, belongs_to)
            # Tokens of a long text take seconds, in which others want to be served.
            read, turns = self._reader.read, self._turns
            return await anyio.to_thread.run_sync(read, octets, chat, belongs_to, limiter=turns)
        finally:
            self._held_bytes -= len(octets)

    async def _receive(self, request: Request, octets: bytearray) -> None:
        """Add the body to octets, which count as held from then on."""
        said = f"the body has more than {MAX_BODY_BYTES} octets"
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
            raise Refusal(413, said)
        pieces = 0
        with anyio.move_on_after(BODY_S):
            async for piece in request.stream():
                pieces += bool(piece)
                if pieces > MAX_BODY_PIECES:
                    raise Refusal(413, f"the body has more than {MAX_BODY_PIECES} chunks; send larger ones")
                octets += piece
                self._held_bytes += len(piece)
                if len(octets) > MAX_BODY_BYTES:
                    raise Refusal(413, said)
                if self._held_bytes > MAX_BODIES_BYTES and len(octets) >= LARGE_BODY_BYTES:
                    raise Refusal(503, "too much is being received; ask again")
            return
        raise Refusal(408, f"the body did not come within {BODY_S:g} s")

    # Answering

    async def _whole(self, asked: Asked) -> Response:
        pieces: list[str] = []
        answer = _Answer(self._model, asked)
        async for piece in self._pieces(asked, answer):
            pieces.append(piece)
        return JSONResponse(answer.whole("".join(pieces)))

    async def _streamed(self, asked: Asked) -> Response:
        answer = _Answer(self._model, asked)
        pieces = self._pieces(asked, answer)
        # The first piece decides between an error and a stream.
        first = await anext(pieces, "")

        async def events() -> AsyncGenerator[str, None]:
            try:
                yield answer.event(first, role=True)
                async for piece in pieces:
                    if piece:
                        yield answer.event(piece)
                yield answer.event("", finish=True)
                if asked.usage_in_stream:
                    yield answer.usage_event()
            except Refusal as refusal:
                yield f"data: {bytes(refusal.response.body).decode()}\n\n"
            yield "data: [DONE]\n\n"

        return _Stream(events(), pieces)

    async def _pieces(self, asked: Asked, answer: _Answer) -> AsyncGenerator[str, None]:
        """Yield the text of the answer as it becomes certain; `answer` counts along."""
        sink = self._text.stream()
        cutter = _StopCutter(asked.stops)
        async with self._generate(asked.generation) as events:
            async for event in events:
                match event:
                    case Started(cached_tokens):
                        answer.cached_tokens = cached_tokens
                    case Token(token):
                        answer.output_tokens += 1
                        yield cutter.push(sink.push(token))
                        if cutter.stopped:
                            return
                    case Ended(reason):
                        last = cutter.push(sink.finish()) + cutter.finish()
                        answer.finish_reason = "stop" if cutter.stopped else reason
                        yield last
                        return
                    case Failed(status, detail):
                        raise Refusal(status, detail)
        raise Refusal(502, "the answer broke off; ask again")


class _Stream(StreamingResponse):
    """Events as they come. However the response ends, begun or not, the generation behind it is left."""

    def __init__(self, events: AsyncGenerator[str, None], pieces: AsyncGenerator[str, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._generators = (events, pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.leave()

    async def leave(self) -> None:
        """Give up what has not been sent."""
        with anyio.CancelScope(shield=True):
            for generator in self._generators:
                await generator.aclose()


class _StopCutter:
    """Cuts text before the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        text = self._held + piece
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = max(
            (
                size
                for stop in self._stops
                for size in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:size])
            ),
            default=0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return "" if self.stopped else held


class _Answer:
    """The documents of one answer, in OpenAI's forms."""

    def __init__(self, model: str, asked: Asked) -> None:
        self._chat = asked.chat
        self._prompt_tokens = len(asked.generation.prompt)
        self._common = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self.cached_tokens = 0
        self.output_tokens = 0
        self.finish_reason = "stop"

    def whole(self, text: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish_reason, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        kind = "chat.completion" if self._chat else "text_completion"
        return self._common | {"object": kind, "choices": [choice], "usage": self._usage()}

    def event(self, text: str, *, role: bool = False, finish: bool = False) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish_reason if finish else None}
        if self._chat:
            choice["delta"] = ({"role": "assistant"} if role else {}) | ({} if finish else {"content": text})
        else:
            choice["text"] = text
        return self._line([choice])

    def usage_event(self) -> str:
        return self._line([], usage=self._usage())

    def _line(self, choices: list[dict[str, Any]], **more: object) -> str:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        document = self._common | {"object": kind, "choices": choices} | more
        return f"data: {json.dumps(document)}\n\n"

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self._prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def _while_connected(request: Request, answer: Coroutine[None, None, Response]) -> Response:
    """Return the answer, or give up making it as soon as its client has gone."""
    refusal: Refusal | None = None
    made: Response | None = None
    gone = False
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            nonlocal gone
            while (await request.receive())["type"] != "http.disconnect":
                pass
            gone = True
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        try:
            made = await answer
        except Refusal as error:
            refusal = error
        tasks.cancel_scope.cancel()
    if gone or made is None:
        if isinstance(made, _Stream):  # nobody would tell it again that there is nobody
            await made.leave()
        made = Response(status_code=CLIENT_GONE)
    if refusal is not None:
        raise refusal
    return made
