"""The OpenAI-compatible API, used with OpenAI's own client over an in-memory transport."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import openai
import pytest
from starlette.applications import Starlette

from kvsp_services.openai_api import (
    Ended,
    Failed,
    Generate,
    GenerationEvent,
    GenerationRequest,
    Started,
    Token,
    make_app,
)
from kvsp_services.openai_requests import TextSink, Tokenizer

ANSWER = "Paris, of course."
TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


class Letters:
    """A tokenizer whose tokens are code points."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def encode_chat(self, messages: Any) -> tuple[int, ...]:
        return self.encode("".join(f"{m['role']}:{m['content']};" for m in messages))

    def stream(self) -> TextSink:
        return LetterSink()


class LetterSink:
    def push(self, token: int) -> str:
        return chr(token)

    def finish(self) -> str:
        return ""


class Backend:
    """Plays events, and remembers what it was asked and whether it was left early."""

    def __init__(self, *events: GenerationEvent) -> None:
        self.events = events or (Started(3), *(Token(ord(c)) for c in ANSWER), Ended("stop"))
        self.asked: list[GenerationRequest] = []
        self.played = 0

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[GenerationEvent]]:
        self.asked.append(request)

        async def play() -> AsyncIterator[GenerationEvent]:
            for event in self.events:
                self.played += 1
                yield event

        yield play()


def an_app(generate: Generate, text: Tokenizer | None = None, vocabulary: int = 0x110000) -> Starlette:
    """Return the application of a small model."""
    return make_app(
        model="m",
        text=text or Letters(),
        generate=generate,
        context_tokens=100,
        vocabulary=vocabulary,
        belongs_to=lambda said: TRACE,
    )


def talk(backend: Backend, use: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        app = an_app(backend.generate)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(
                api_key="-", base_url="http://test/v1", http_client=http, max_retries=0
            )
            return await use(client)

    return asyncio.run(run())


def test_a_conversation_is_answered_whole() -> None:
    backend = Backend()
    answer = talk(
        backend,
        lambda client: client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Capital of France?"}],
            temperature=0,
            max_tokens=30,
        ),
    )
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(ANSWER)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    (asked,) = backend.asked
    assert asked.method == "greedy"
    assert asked.params == {"max_tokens": 30}
    assert bytes(asked.prompt) == b"user:Capital of France?;"


@pytest.mark.parametrize("chat", [True, False])
def test_an_answer_is_streamed_with_usage_at_the_end(chat: bool) -> None:
    backend = Backend()

    async def use(client: openai.AsyncOpenAI) -> tuple[str, Any]:
        common: dict[str, Any] = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
        if chat:
            messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
            stream = await client.chat.completions.create(messages=messages, **common)
        else:
            stream = await client.completions.create(prompt="Hi", **common)
        text, last = "", None
        async for chunk in stream:
            for choice in chunk.choices:
                text += (choice.delta.content if chat else choice.text) or ""
            last = chunk
        return text, last

    text, last = talk(backend, use)
    assert text == ANSWER
    assert last.usage.total_tokens == len(backend.asked[0].prompt) + len(ANSWER)
    assert backend.asked[0].method == "top-p"
    assert backend.asked[0].params["p"] == 1


@pytest.mark.parametrize("stop", [",", ["of c", "zzz"], ["ris"]])
def test_text_stops_before_a_stop_string_and_the_generation_is_left(stop: str | list[str]) -> None:
    backend = Backend()
    answer = talk(backend, lambda client: client.completions.create(model="m", prompt="x", stop=stop))
    first = stop if isinstance(stop, str) else stop[0]
    assert answer.choices[0].text == ANSWER[: ANSWER.index(first)]
    assert answer.choices[0].finish_reason == "stop"
    assert backend.played < len(backend.events)


@pytest.mark.parametrize(("stop", "reason"), [("!?", "stop"), ("!!", "length")])
def test_a_stop_string_that_ends_with_the_answer_is_why_it_ended(stop: str, reason: str) -> None:
    """Its last character comes only when the output is over."""

    class Late(LetterSink):
        def finish(self) -> str:
            return "?"

    class LateText(Letters):
        def stream(self) -> TextSink:
            return Late()

    async def run() -> Any:
        backend = Backend(Started(0), Token(ord("!")), Ended("length"))
        transport = httpx.ASGITransport(an_app(backend.generate, text=LateText()))
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as http:
            answer = await http.post("/v1/completions", json={"prompt": "x", "stop": stop})
            return answer.json()["choices"][0]

    choice = asyncio.run(run())
    assert choice["finish_reason"] == reason
    assert choice["text"] == ("" if reason == "stop" else "!?")


def test_what_could_have_become_a_stop_string_is_given_in_the_end() -> None:
    answer = talk(Backend(), lambda client: client.completions.create(model="m", prompt="x", stop="e.!"))
    assert answer.choices[0].text == ANSWER


def test_the_prompt_may_be_tokens_and_the_seed_is_kept() -> None:
    backend = Backend()
    talk(backend, lambda client: client.completions.create(model="m", prompt=[5, 6], seed=7, top_p=0.5))
    assert backend.asked[0].prompt == (5, 6)
    assert backend.asked[0].seed == 7
    assert backend.asked[0].params["p"] == 0.5


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"model": "other"}, "no such model"),
        ({"prompt": ""}, "prompt must be"),
        ({"prompt": ["a"]}, "prompt must be"),
        ({"prompt": [5, -1]}, "a token is from 0 to 1114111"),
        ({"prompt": [0x110000]}, "a token is from 0 to 1114111"),
        ({"prompt": [10**30]}, "a token is from 0 to 1114111"),
        ({"prompt": "x" * 100}, "the prompt has 100 tokens"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"max_tokens": True}, "max_tokens must be"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number"),
        ({"temperature": 3}, "temperature must be"),
        ({"top_p": "1"}, "top_p must be"),
        ({"stop": ["a"] * 5}, "stop must be"),
        ({"stop": [""]}, "stop must be"),
        ({"stop": "x" * 201}, "stop must be"),
    ],
)
def test_what_cannot_be_done_is_refused(members: dict[str, Any], says: str) -> None:
    backend = Backend()

    async def use(client: openai.AsyncOpenAI) -> None:
        await client.completions.create(**({"model": "m", "prompt": "x"} | members))

    with pytest.raises(openai.APIStatusError, match=says) as error:
        talk(backend, use)
    assert 400 <= error.value.status_code < 500
    assert backend.asked == []


@pytest.mark.parametrize("chat", [True, False])
def test_text_without_tokens_is_refused(chat: bool) -> None:
    """Half a surrogate pair, which JSON can say and no tokenizer takes."""
    backend = Backend()
    asked: dict[str, Any] = {"prompt": "\ud83d"}
    if chat:
        asked = {"messages": [{"role": "user", "content": "\ud83d"}]}

    class Strict(Letters):
        def encode(self, text: str) -> tuple[int, ...]:
            return tuple(text.encode())

    async def run() -> int:
        app = an_app(backend.generate, text=Strict(), vocabulary=256)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test/v1/") as client:
            path = "chat/completions" if chat else "completions"
            return (await client.post(path, content=json.dumps(asked))).status_code

    assert asyncio.run(run()) == 400
    assert not backend.asked


def test_a_long_text_keeps_nobody_waiting() -> None:
    """The tokens of a long text are there only once another's have been asked for."""
    other, waited = threading.Event(), list[bool]()

    class Slow(Letters):
        def encode(self, text: str) -> tuple[int, ...]:
            if len(text) > 1000:
                waited.append(other.wait(30))
                return (1,)
            other.set()
            return super().encode(text)

    async def run() -> None:
        app = an_app(Backend().generate, text=Slow(), vocabulary=256)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test/v1/") as client:
            long = client.post("completions", json={"prompt": "x" * 100_000})
            short = client.post("completions", json={"prompt": "x"})
            assert [answer.status_code for answer in await asyncio.gather(long, short)] == [200, 200]

    asyncio.run(run())
    assert waited == [True]


@pytest.mark.parametrize("stream", [True, False])
def test_a_generation_that_fails_is_an_error(stream: bool) -> None:
    backend = Backend(Failed(503, "no instance is ready; try again"))

    async def use(client: openai.AsyncOpenAI) -> None:
        await client.completions.create(model="m", prompt="x", stream=stream)

    with pytest.raises(openai.InternalServerError, match="no instance is ready"):
        talk(backend, use)


def test_a_stream_that_breaks_off_says_so() -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        async for _ in await client.completions.create(model="m", prompt="x", stream=True):
            pass

    with pytest.raises(openai.APIError, match="broke off"):
        talk(Backend(Started(0), Token(65)), use)


def test_a_client_is_told_the_id_of_its_request() -> None:
    """Whole answers, streams and refusals: OpenAI's client shows it as ``_request_id``."""
    backend = Backend()

    async def use(client: openai.AsyncOpenAI) -> list[str | None]:
        whole = await client.completions.create(model="m", prompt="x")
        streamed = await client.completions.create(model="m", prompt="x", stream=True)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="m", prompt="")
        return [whole._request_id, streamed.response.headers["x-request-id"], refused.value.request_id]

    assert talk(backend, use) == ["1" * 32] * 3
    assert [asked.traceparent for asked in backend.asked] == [TRACE] * 2


@pytest.mark.parametrize("body", [b"{", b"[]", b"[" * 100000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    async def run() -> httpx.Response:
        app = an_app(Backend().generate)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as http:
            return await http.post("/v1/completions", content=body)

    assert asyncio.run(run()).status_code == 400


def test_the_model_is_listed() -> None:
    models = talk(Backend(), lambda client: client.models.list())
    assert [model.id for model in models.data] == ["m"]


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_whose_client_has_gone_is_given_up(stream: bool, loop: str) -> None:
    """Whole answers too, and streams of which nothing has come yet: nobody waits for them any more."""
    left: list[str] = []

    async def run() -> None:
        began = anyio.Event()

        @asynccontextmanager
        async def generate(request: GenerationRequest) -> AsyncIterator[AsyncIterator[GenerationEvent]]:
            async def play() -> AsyncIterator[GenerationEvent]:
                began.set()
                await anyio.sleep_forever()
                yield Started(0)

            try:
                yield play()
            finally:
                left.append("left")

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            await began.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            """Nobody is there."""

        bodies = [json.dumps({"prompt": "x", "stream": stream}).encode()]
        app = an_app(generate)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
        scope |= {"headers": [], "query_string": b""}
        with anyio.fail_after(30):
            await app(scope, receive, send)  # type: ignore[arg-type]

    anyio.run(run, backend=loop)
    assert left == ["left"]
