"""What the API takes: bodies of OpenAI's form, and of vLLM's extensions of it, read and checked.

A member is served, or asks for what is done anyway (`NEUTRAL`), or cannot change the answer
(`WITHOUT_EFFECT`). Everything else is refused, known or not: an answer that was made in another way than was
asked for is wrong, and nobody would see it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

import attrs
from starlette.responses import JSONResponse

from kvsp_core.strict_json import shown_name

__all__ = [
    "NEUTRAL",
    "SERVED",
    "WITHOUT_EFFECT",
    "Asked",
    "GenerationRequest",
    "Reader",
    "Refusal",
    "TextSink",
    "Tokenizer",
]

MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 200
DEFAULT_MAX_TOKENS: Final = 256

SERVED: Final = frozenset(
    {
        "model",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "stream",
        "stream_options",
    }
)
"""Members that are done as asked, beside ``prompt`` or ``messages``."""
WITHOUT_EFFECT: Final = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "parallel_tool_calls",
        "priority",
        "request_id",
    }
)
"""Members that change no answer of this server, whatever they say."""
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        # OpenAI's
        "n": (1,),
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "logit_bias": ({},),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "response_format": ({"type": "text"},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "store": (False,),
        # vLLM's
        "top_k": (0, -1),
        "min_p": (0,),
        "repetition_penalty": (1,),
        "length_penalty": (1,),
        "use_beam_search": (False,),
        "ignore_eos": (False,),
        "min_tokens": (0,),
        "stop_token_ids": ([],),
        "include_stop_str_in_output": (False,),
        "bad_words": ([],),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "add_special_tokens": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template_kwargs": ({},),
        "documents": ([],),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
    }
)
"""Members that are not supported, each with the values that ask for nothing; null asks for nothing too."""
_STREAM_OPTIONS: Final = MappingProxyType({"continuous_usage_stats": (False,)})
_OF_STREAM: Final = frozenset({"include_usage", "include_obfuscation"})
_OF_MESSAGE: Final = frozenset({"role", "content", "name"})


@attrs.frozen(kw_only=True)
class GenerationRequest:
    """What the front-end role is asked for."""

    prompt: tuple[int, ...] = attrs.field(repr=False)
    method: str
    params: Mapping[str, float | int]
    seed: int = attrs.field(repr=False)
    traceparent: str | None = None
    """What the request belongs to."""


@attrs.frozen(kw_only=True)
class Asked:
    """One request, read and checked."""

    chat: bool
    generation: GenerationRequest
    stops: tuple[str, ...]
    stream: bool
    usage_in_stream: bool


class TextSink(Protocol):
    """Tokens in, text out."""

    def push(self, token: int) -> str:
        """Take a token in; return the text that is now certain."""
        ...

    def finish(self) -> str:
        """Return the text that was held back."""
        ...


class Tokenizer(Protocol):
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


class Refusal(Exception):
    """A request that is answered with an error of OpenAI's form."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.response = JSONResponse(
            {"error": {"message": message, "type": kind, "param": param, "code": None}}, status
        )


@attrs.frozen
class Reader:
    """Reads bodies for one model."""

    _model: str
    _text: Tokenizer
    _context_tokens: int
    _vocabulary: int

    def read(self, octets: bytes | bytearray, chat: bool, belongs_to: str) -> Asked:
        """Return what a body asks for. Raises `Refusal`. Takes seconds for a long text."""
        body = _json_object(octets)
        if body.get("model") not in (None, self._model):
            raise Refusal(404, f"no such model; this server has {self._model}", "model")
        _check_members(body, SERVED | {"messages" if chat else "prompt"}, WITHOUT_EFFECT, NEUTRAL)
        sampling = self._sampling(body)
        stops, stream, usage = _stops(body), _flag(body, "stream"), _usage_in_stream(body)
        prompt = self._conversation(body) if chat else self._prompt(body)
        if not prompt:
            raise Refusal(400, "there are no tokens to go on from", "messages" if chat else "prompt")
        if len(prompt) >= self._context_tokens:
            raise Refusal(
                400, f"the prompt has {len(prompt)} tokens, the context {self._context_tokens}", "prompt"
            )
        sampling["max_tokens"] = int(min(sampling["max_tokens"], self._context_tokens - len(prompt)))
        return Asked(
            chat=chat,
            generation=GenerationRequest(
                prompt=prompt,
                method="top-p" if "p" in sampling else "greedy",
                params=sampling,
                seed=int(_number(body, "seed", secrets.randbits(63), -(2**63), 2**63 - 1, whole=True)),
                traceparent=belongs_to,
            ),
            stops=stops,
            stream=stream,
            usage_in_stream=usage,
        )

    def _sampling(self, body: Mapping[str, Any]) -> dict[str, float | int]:
        given = body.get("max_completion_tokens") is not None
        name = "max_completion_tokens" if given else "max_tokens"
        most = _number(body, name, DEFAULT_MAX_TOKENS, 1, self._context_tokens, whole=True)
        temperature, p = _number(body, "temperature", 1, 0, 2), _number(body, "top_p", 1, 0.000001, 1)
        drawn = {"p": p, "temperature": temperature} if temperature > 0 else {}
        return {"max_tokens": most} | drawn

    def _prompt(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            if not all(0 <= token < self._vocabulary for token in prompt):
                raise Refusal(400, f"a token is from 0 to {self._vocabulary - 1}", "prompt")
            return tuple(prompt)
        if not isinstance(prompt, str) or not prompt:
            raise Refusal(400, "prompt must be a text or an array of tokens", "prompt")
        try:
            return self._text.encode(prompt)
        except ValueError:
            raise Refusal(400, "prompt is not a text that has tokens", "prompt") from None

    def _conversation(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refusal(400, "messages must be an array with at least one message", "messages")
        plain = [_message(index, message) for index, message in enumerate(messages)]
        try:
            return self._text.encode_chat(plain)
        except ValueError:
            raise Refusal(400, "messages are not what the model's template takes", "messages") from None


def _message(index: int, message: object) -> dict[str, str]:
    where = f"messages[{index}]"
    members = message if isinstance(message, dict) else {}
    role, content, name = members.get("role"), members.get("content"), members.get("name")
    if isinstance(content, list):
        texts = [part["text"] for part in content if _is_text(part)]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(role, str) or not isinstance(content, str) or not isinstance(name, str | None):
        raise Refusal(400, f"{where} must have a role and a text", "messages")
    for member, value in members.items():
        if member not in _OF_MESSAGE and value not in (None, []):
            raise Refusal(400, f"{where}.{shown_name(member)} is not supported; leave it out", "messages")
    return {"role": role, "content": content} | ({} if name is None else {"name": name})


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _check_members(
    body: Mapping[str, Any],
    served: frozenset[str],
    without_effect: frozenset[str],
    neutral: Mapping[str, tuple[object, ...]],
    where: str = "",
) -> None:
    """Refuse what would change the answer and is not done, and what is not known here."""
    for name, value in body.items():
        if value is None or name in served or name in without_effect:
            continue
        if not any(_equal(value, each) for each in neutral.get(name, ())):
            said = "is not supported" if name in neutral else "is not known here"
            raise Refusal(400, f"{where}{shown_name(name)} {said}; leave it out", shown_name(name))


def _equal(one: object, other: object) -> bool:
    """Return whether two values of JSON are the same: 1 and 1.0 are, 1 and true are not."""
    return isinstance(one, bool) is isinstance(other, bool) and one == other


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stops = body.get("stop")
    stops = [] if stops is None else [stops] if isinstance(stops, str) else stops
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in stops)
    ):
        said = f"stop must be a string or at most {MAX_STOPS} strings, of 1 to {MAX_STOP_CHARS} characters"
        raise Refusal(400, said, "stop")
    return tuple(stops)


def _usage_in_stream(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise Refusal(400, "stream_options must be an object", "stream_options")
    _check_members(options, _OF_STREAM, frozenset(), _STREAM_OPTIONS, "stream_options.")
    return _flag(options, "include_usage")


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise Refusal(400, f"{name} must be true or false", name)
    return bool(value)


def _json_object(octets: bytes | bytearray) -> Mapping[str, Any]:
    try:
        body = json.loads(octets)
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise Refusal(400, "the body must be a JSON object")
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
        raise Refusal(400, f"{name} must be {kind} from {low:g} to {high:g}", name)
    return value
