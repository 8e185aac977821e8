"""Which members of a request are served, which are refused, and which may say anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvsp_services.openai_requests import NEUTRAL, SERVED, WITHOUT_EFFECT, Asked, Reader, Refusal
from tests.adapters.services.test_openai_api import Letters

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
MESSAGE = {"role": "user", "content": "Hi"}
ASKS_FOR_MORE: Mapping[str, Any] = {
    "n": 2,
    "best_of": 2,
    "echo": True,
    "suffix": "end",
    "logprobs": 0,
    "top_logprobs": 1,
    "logit_bias": {"5": 100},
    "presence_penalty": -1,
    "frequency_penalty": 0.5,
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "reasoning_effort": "high",
    "verbosity": "low",
    "store": True,
    "top_k": 1,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "length_penalty": 0.5,
    "use_beam_search": True,
    "ignore_eos": True,
    "min_tokens": 1,
    "stop_token_ids": [2],
    "include_stop_str_in_output": True,
    "bad_words": ["no"],
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "add_special_tokens": True,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template_kwargs": {"thinking": True},
    "documents": [{"text": "x"}],
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}


def read(chat: bool = False, **members: Any) -> Asked:
    """Read a request for a small model."""
    body = ({"messages": [MESSAGE]} if chat else {"prompt": "x"}) | members
    return Reader("m", Letters(), 100, 0x110000).read(json.dumps(body).encode(), chat, "")


def refusal(chat: bool = False, **members: Any) -> dict[str, Any]:
    """Return the error that a request is answered with."""
    with pytest.raises(Refusal) as refused:
        read(chat, **members)
    assert refused.value.response.status_code == 400
    error: dict[str, Any] = json.loads(bytes(refused.value.response.body))["error"]
    return error


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", NEUTRAL)
def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(name: str, chat: bool) -> None:
    for value in (None, *NEUTRAL[name]):
        assert read(chat, **{name: value}).generation.params["max_tokens"]
    error = refusal(chat, **{name: ASKS_FOR_MORE[name]})
    assert error["param"] == name
    assert error["message"] == f"{name} is not supported; leave it out"


@pytest.mark.parametrize(
    "members",
    [{"n": True}, {"n": 0}, {"echo": 0}, {"presence_penalty": False}, {"min_p": False}, {"tools": {}}],
    ids=str,
)
def test_what_is_merely_equal_in_python_does_not_ask_for_nothing(members: dict[str, Any]) -> None:
    assert "is not supported" in refusal(**members)["message"]


def test_numbers_that_are_equal_ask_for_nothing_in_either_form() -> None:
    read(n=1.0, presence_penalty=0.0, repetition_penalty=1, top_k=-1.0)


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_what_changes_no_answer_may_say_anything(name: str) -> None:
    for value in (None, "x", 7, {"a": [1]}):
        read(**{name: value})


@pytest.mark.parametrize("name", sorted(SERVED))
def test_null_is_as_good_as_leaving_a_member_out(name: str) -> None:
    assert read(**{name: None}).generation.params == read().generation.params


@pytest.mark.parametrize("name", ["guided_json", "of_next_year", "messages", "cache_salt", "\ud83d" * 99])
def test_what_is_not_known_is_refused(name: str) -> None:
    """Also what holds half a surrogate pair, which no answer could carry, or is very long."""
    error = refusal(**{name: 1})
    assert error["message"].endswith(" is not known here; leave it out")
    assert len(error["message"]) < 300
    read(**{name: None})


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"stream": "false"}, "stream must be true or false"),
        ({"stream": 1}, "stream must be true or false"),
        ({"stream_options": True}, "stream_options must be an object"),
        ({"stream_options": {"include_usage": "no"}}, "include_usage must be true or false"),
        (
            {"stream_options": {"continuous_usage_stats": True}},
            "continuous_usage_stats is not",
        ),
        ({"stream_options": {"more": 1}}, "stream_options.more is not known here"),
        ({"stop": 0}, "stop must be"),
        ({"stop": False}, "stop must be"),
        ({"stop": {}}, "stop must be"),
        ({"max_tokens": 10**400}, "max_tokens must be"),
        ({"max_tokens": -1}, "max_tokens must be"),
        ({"max_tokens": 101}, "max_tokens must be"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": 0, "top_p": 2}, "top_p must be"),
        ({"top_p": 0}, "top_p must be"),
        ({"seed": 2**63}, "seed must be"),
        ({"seed": 0.5}, "seed must be"),
        ({"presence_penalty": float("nan")}, "presence_penalty is not supported"),
        ({"prompt": [True]}, "prompt must be"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": {"text": "x"}}, "prompt must be"),
        ({"prompt": [[1]]}, "prompt must be"),
    ],
    ids=str,
)
def test_what_is_mistyped_is_refused(members: dict[str, Any], says: str) -> None:
    assert says in refusal(**members)["message"]


@pytest.mark.parametrize(
    "message",
    [
        "Hi",
        None,
        {},
        {"role": "user"},
        {"role": 1, "content": "Hi"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text", "text": {"a": 1}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["Hi"]},
        {"role": "user", "content": "Hi", "name": 7},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "content": "Hi", "prefix": True},
    ],
    ids=str,
)
def test_a_message_that_is_not_a_role_and_a_text_is_refused(message: object) -> None:
    error = refusal(chat=True, messages=[MESSAGE, message])
    assert error["param"] == "messages"
    assert error["message"].startswith("messages[1]")


def test_a_message_as_an_answer_brought_it_is_taken() -> None:
    empty = {"refusal": None, "annotations": [], "tool_calls": None, "audio": None}
    asked = read(chat=True, messages=[{"role": "assistant", "content": "Hi", **empty}])
    assert bytes(asked.generation.prompt) == b"assistant:Hi;"


@pytest.mark.parametrize("chat", [False, True])
def test_what_has_no_tokens_is_refused(chat: bool) -> None:
    class Nothing(Letters):
        def encode(self, text: str) -> tuple[int, ...]:
            return ()

    body = json.dumps({"messages": [MESSAGE]} if chat else {"prompt": "x"}).encode()
    with pytest.raises(Refusal, match="there are no tokens"):
        Reader("m", Nothing(), 100, 256).read(body, chat, "")


def test_the_newer_bound_counts_only_where_it_is_there() -> None:
    both = {"max_completion_tokens": None, "max_tokens": 5}
    assert read(**both).generation.params["max_tokens"] == 5
    both["max_completion_tokens"] = 7
    assert read(**both).generation.params["max_tokens"] == 7


def test_the_page_names_every_member() -> None:
    served, refused, without = PAGE.read_text().split("\n## ")[1:4]
    for names, section in ((SERVED, served), (NEUTRAL, refused), (WITHOUT_EFFECT, without)):
        assert [name for name in sorted(names) if f"`{name}`" not in section] == []
