"""An OpenAI-compatible HTTP API in front of a front-end role, so that people's own clients work.

It is no part of KVSP. ``/v1/completions`` and ``/v1/chat/completions``, whole or streamed, and
``/v1/models``; what a client asks for and this server does not do is refused, never ignored, where ignoring
it would change the answer.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias

import anyio
import anyio.to_thread
import attrs
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvsp_services.request_log import request_id_of

__all__ = [
    "Ended",
    "Failed",
    "Generate",
    "GenerationEvent",
    "GenerationRequest",
    "Started",
    "Text",
    "TextSink",
    "Token",
    "make_app",
]

MAX_BODY_BYTES: Final = 4 << 20
LARGE_BODY_BYTES: Final = 32 << 10
"""From here on a body is turned into tokens in a thread."""
MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 200
DEFAULT_MAX_TOKENS: Final = 256
CLIENT_GONE: Final = 499
"""What nobody receives."""
_PLAIN: Final[Mapping[str, object]] = MappingProxyType(
    {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "suffix": "",
        "logprobs": None,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "response_format": {"type": "text"},
        "tools": [],
        "functions": [],
    }
)
"""Members that would change the answer and are not supported, each with the value that asks for nothing."""


@attrs.frozen(kw_only=True)
class GenerationRequest:
    """What the front-end role is asked for."""

    prompt: tuple[int, ...] = attrs.field(repr=False)
    method: str
    params: Mapping[str, float | int]
    seed: int = attrs.field(repr=False)
    traceparent: str | None = None
    """What the request belongs to."""


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


class TextSink(Protocol):
    """Tokens in, text out."""

    def push(self, token: int) -> str:
        """Take a token in; return the text that is now certain."""
        ...

    def finish(self) -> str:
        """Return the text that was held back."""
        ...


class Text(Protocol):
    """A tokenizer and chat template. Both ways to tokens raise `ValueError` where there is none."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens of a conversation."""
        ...

    def stream(self) -> TextSink:
        """Return a sink for one answer."""
        ...


class _Refusal(Exception):
    """A request that is answered with an error of OpenAI's form."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.response = JSONResponse(
            {"error": {"message": message, "type": kind, "param": param, "code": None}}, status
        )


def make_app(
    *,
    model: str,
    text: Text,
    generate: Generate,
    context_tokens: int,
    vocabulary: int,
    belongs_to: Callable[[str | None], str],
) -> Starlette:
    """Return the application. `model` is the name it serves, `context_tokens` the most tokens of prompt and
    answer, `vocabulary` how many different ones there are. `belongs_to` takes the field ``traceparent`` of a
    request and returns what it belongs to, whose trace id the client is told as ``x-request-id``.
    """
    api = _Api(model, text, generate, context_tokens, vocabulary, belongs_to)
    return Starlette(
        routes=[
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/models", api.models, methods=["GET"]),
        ]
    )


@attrs.frozen(kw_only=True)
class _Asked:
    """One request, read and checked."""

    chat: bool
    generation: GenerationRequest
    stops: tuple[str, ...]
    stream: bool
    usage_in_stream: bool


@attrs.frozen
class _Api:
    _model: str
    _text: Text
    _generate: Generate
    _context_tokens: int
    _vocabulary: int
    _belongs_to: Callable[[str | None], str]

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
            octets = await _body(request)
            if len(octets) < LARGE_BODY_BYTES:
                asked = self._read(octets, chat, belongs_to)
            else:  # tokens of a long text take seconds, in which others want to be served
                asked = await anyio.to_thread.run_sync(self._read, octets, chat, belongs_to)
            answer = self._streamed(asked) if asked.stream else self._whole(asked)
            response = await _while_connected(request, answer)
        except _Refusal as refusal:
            response = refusal.response
        response.headers["x-request-id"] = request_id_of(belongs_to) or ""
        return response

    # Reading

    def _read(self, octets: bytes | bytearray, chat: bool, belongs_to: str) -> _Asked:
        body = _json_object(octets)
        if body.get("model", self._model) != self._model:
            raise _Refusal(404, f"no such model; this server has {self._model}", "model")
        for name, plain in _PLAIN.items():
            if body.get(name, plain) not in (plain, None, False, 0):
                raise _Refusal(400, f"{name} is not supported; leave it out", name)
        prompt = self._prompt(body, chat)
        name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        most = _number(body, name, DEFAULT_MAX_TOKENS, 1, self._context_tokens, whole=True)
        if len(prompt) >= self._context_tokens:
            raise _Refusal(
                400, f"the prompt has {len(prompt)} tokens, the context {self._context_tokens}", "prompt"
            )
        temperature = _number(body, "temperature", 1, 0, 2)
        params: dict[str, float | int] = {"max_tokens": int(min(most, self._context_tokens - len(prompt)))}
        if temperature > 0:
            params |= {"p": _number(body, "top_p", 1, 0.000001, 1), "temperature": temperature}
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        if (
            not isinstance(stops, list)
            or len(stops) > MAX_STOPS
            or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in stops)
        ):
            said = (
                f"stop must be a string or at most {MAX_STOPS} strings, of 1 to {MAX_STOP_CHARS} characters"
            )
            raise _Refusal(400, said, "stop")
        options = body.get("stream_options") or {}
        return _Asked(
            chat=chat,
            generation=GenerationRequest(
                prompt=prompt,
                method="top-p" if temperature > 0 else "greedy",
                params=params,
                seed=int(_number(body, "seed", secrets.randbits(63), -(2**63), 2**63 - 1, whole=True)),
                traceparent=belongs_to,
            ),
            stops=tuple(stops),
            stream=bool(body.get("stream")),
            usage_in_stream=isinstance(options, dict) and bool(options.get("include_usage")),
        )

    def _prompt(self, body: Mapping[str, Any], chat: bool) -> tuple[int, ...]:
        if not chat:
            prompt = body.get("prompt")
            if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
                if not all(0 <= token < self._vocabulary for token in prompt):
                    raise _Refusal(400, f"a token is from 0 to {self._vocabulary - 1}", "prompt")
                return tuple(prompt)
            if not isinstance(prompt, str) or not prompt:
                raise _Refusal(400, "prompt must be a text or an array of tokens", "prompt")
            try:
                return self._text.encode(prompt)
            except ValueError:
                raise _Refusal(400, "prompt is not a text that has tokens", "prompt") from None
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _Refusal(400, "messages must be an array with at least one message", "messages")
        plain = []
        for index, message in enumerate(messages):
            role = message.get("role") if isinstance(message, dict) else None
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list):
                parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
                content = (
                    "".join(str(part.get("text", "")) for part in parts)
                    if len(parts) == len(content)
                    else None
                )
            if not isinstance(role, str) or not isinstance(content, str):
                raise _Refusal(400, f"messages[{index}] must have a role and a text", "messages")
            plain.append({"role": role, "content": content})
        try:
            return self._text.encode_chat(plain)
        except ValueError:
            raise _Refusal(400, "messages are not what the model's template takes", "messages") from None

    # Answering

    async def _whole(self, asked: _Asked) -> Response:
        pieces: list[str] = []
        answer = _Answer(self._model, asked)
        async for piece in self._pieces(asked, answer):
            pieces.append(piece)
        return JSONResponse(answer.whole("".join(pieces)))

    async def _streamed(self, asked: _Asked) -> Response:
        answer = _Answer(self._model, asked)
        pieces = self._pieces(asked, answer)
        # The first piece decides between an error and a stream.
        first = await anext(pieces, "")

        async def events() -> AsyncIterator[str]:
            try:
                yield answer.event(first, role=True)
                async for piece in pieces:
                    if piece:
                        yield answer.event(piece)
                yield answer.event("", finish=True)
                if asked.usage_in_stream:
                    yield answer.usage_event()
            except _Refusal as refusal:
                yield f"data: {bytes(refusal.response.body).decode()}\n\n"
            finally:
                await pieces.aclose()
            yield "data: [DONE]\n\n"

        return StreamingResponse(
            events(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def _pieces(self, asked: _Asked, answer: _Answer) -> AsyncGenerator[str, None]:
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
                        answer.finish_reason = reason
                        yield cutter.push(sink.finish()) + cutter.finish()
                        return
                    case Failed(status, detail):
                        raise _Refusal(status, detail)
        raise _Refusal(502, "the answer broke off; ask again")


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

    def __init__(self, model: str, asked: _Asked) -> None:
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
    refusal: _Refusal | None = None
    response = Response(status_code=CLIENT_GONE)
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        try:
            response = await answer
        except _Refusal as error:
            refusal = error
        tasks.cancel_scope.cancel()
    if refusal is not None:
        raise refusal
    return response


async def _body(request: Request) -> bytearray:
    octets = bytearray()
    async for piece in request.stream():
        octets += piece
        if len(octets) > MAX_BODY_BYTES:
            raise _Refusal(413, f"the body has more than {MAX_BODY_BYTES} octets")
    return octets


def _json_object(octets: bytes | bytearray) -> Mapping[str, Any]:
    try:
        body = json.loads(octets)
    except (ValueError, RecursionError):
        raise _Refusal(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise _Refusal(400, "the body must be a JSON object")
    return body


def _number(
    body: Mapping[str, Any], name: str, default: float, low: float, high: float, *, whole: bool = False
) -> float:
    value = body.get(name)
    if value is None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, int if whole else int | float)
        or not low <= value <= high
    ):
        kind = "a whole number" if whole else "a number"
        raise _Refusal(400, f"{name} must be {kind} from {low:g} to {high:g}", name)
    return value
