"""From text to tokens and back: tokenizer.json and the chat template of a model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvsp_engines.weights import ModelError

__all__ = ["TextCodec", "TextStream"]

_LONGEST_CHARACTER: Final = 8
"""Tokens in which a character is complete, if it ever is: twice as many as one has octets."""


class TextCodec:
    """The tokenizer and chat template of a model directory."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            members = json.loads((directory / "tokenizer_config.json").read_bytes())
            self._variables = {name: _token(members.get(name)) for name in ("bos_token", "eos_token")}
            self._template = _template(members.get("chat_template"))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelError(f"{directory} has no tokenizer this engine reads: {error}") from None

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, special tokens in it recognised. Raises `ValueError` where it is not
        Unicode."""
        text.encode()  # the tokenizer's own error for half a surrogate pair is another in each version
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens of a conversation, up to where the assistant's answer begins. Raises `ValueError`
        where the model's template does not take it."""
        if self._template is None:
            raise ValueError("the model has no chat template")
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._variables)
        except Exception as error:  # whatever its program makes of what it was not written for
            raise ValueError(f"the chat template refuses it: {error}") from None
        return self.encode(text)

    def stream(self) -> TextStream:
        """Return a stream that turns the tokens of one answer into text."""
        return TextStream(self)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens left out."""
        return str(self._tokenizer.decode(list(tokens)))


def _token(value: Any) -> Any:
    """Return the text of a special token, which some files say with more about it."""
    return value.get("content") if isinstance(value, Mapping) else value


def _template(value: Any) -> Any:
    """Return the chat template, the one named ``default`` where there are several; None where there is
    none."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if isinstance(value, list):
        value = {each["name"]: each["template"] for each in value}.get("default")
    if not value:
        return None
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(value)


class TextStream:
    """Turns tokens that arrive one by one into text, holding back octets of a character that is not
    complete.

    A token's text depends on what is before it, such as a space at the beginning of a word. So it is the text
    of two pieces less that of the first, and the work for each token does not grow with the output.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        """The last tokens whose text was returned, and those whose text was not yet."""
        self._returned = 0

    def push(self, token: int) -> str:
        """Take one token in; return the text that is now certain, often empty."""
        self._tokens.append(token)
        text = self._codec.decode(self._tokens)
        if text.endswith("\ufffd") and len(self._tokens) - self._returned < _LONGEST_CHARACTER:
            return ""
        return self._take(text)

    def finish(self) -> str:
        """Return what was held back, incomplete characters replaced."""
        return self._take(self._codec.decode(self._tokens)) if self._tokens else ""

    def _take(self, text: str) -> str:
        piece = text[len(self._codec.decode(self._tokens[: self._returned])) :]
        del self._tokens[: self._returned]
        self._returned = len(self._tokens)
        return piece
