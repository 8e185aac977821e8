"""From text to tokens and back: tokenizer.json and the chat template of a model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsp_engines.weights import ModelError

__all__ = ["TextCodec", "TextStream"]


class TextCodec:
    """The tokenizer and chat template of a model directory."""

    def __init__(self, directory: Path) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            members = json.loads((directory / "tokenizer_config.json").read_bytes())
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelError(f"{directory} has no tokenizer this engine reads: {error}") from None
        self._variables = {name: members.get(name) for name in ("bos_token", "eos_token")}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(members.get("chat_template") or "")

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, special tokens in it recognised. Raises `ValueError` where it is not
        Unicode."""
        text.encode()  # the tokenizer's own error for half a surrogate pair is another in each version
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens of a conversation, up to where the assistant's answer begins. Raises `ValueError`
        where the model's template does not take it."""
        from jinja2 import TemplateError

        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._variables)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error}") from None
        return self.encode(text)

    def stream(self) -> TextStream:
        """Return a stream that turns the tokens of one answer into text."""
        return TextStream(self)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens left out."""
        return str(self._tokenizer.decode(list(tokens)))


class TextStream:
    """Turns tokens that arrive one by one into text, holding back octets of a character that is not
    complete.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._shown = ""

    def push(self, token: int) -> str:
        """Take one token in; return the text that is now certain, often empty."""
        self._tokens.append(token)
        text = self._codec.decode(self._tokens)
        if text.endswith("\ufffd"):
            return ""
        piece = text[len(self._shown) :]
        if text.endswith(("\n", " ")):
            # A safe place to start afresh, so that the work does not grow with the square of the output.
            self._tokens.clear()
            self._shown = ""
        else:
            self._shown = text
        return piece

    def finish(self) -> str:
        """Return what was held back, incomplete characters replaced."""
        return self._codec.decode(self._tokens)[len(self._shown) :] if self._tokens else ""
