"""Text of tokens as they come, and the forms in which models say how a conversation is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from kvsp_engines.text import TextCodec, TextStream
from kvsp_engines.weights import ModelError


def a_text_codec(directory: Path, **config: object) -> TextCodec:
    """Make one of a tokenizer of sentencepiece's kind, in which a word begins with its space."""
    words = [
        "<unk>",
        "\u2581Hello",
        "\u2581world",
        "\n",
        "\u2581\u2581deep",
        "<0xE2>",
        "<0x82>",
        "<0xAC>",
        "H",
    ]
    tokenizer = Tokenizer(BPE({word: n for n, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return TextCodec(directory)


@pytest.mark.parametrize(
    "tokens",
    [[1, 3, 2, 3, 4], [1, 2, 2], [5, 6, 7, 2], [5, 6], [5, 6, 2, 2], [5] * 30 + [1], [1, 5, 2, 7, 6, 5, 1]],
    ids=str,
)
def test_streamed_text_is_that_of_all_tokens(tmp_path: Path, tokens: list[int]) -> None:
    codec = a_text_codec(tmp_path)
    stream = TextStream(codec)
    assert "".join(map(stream.push, tokens)) + stream.finish() == codec.decode(tokens)


def test_the_work_for_a_token_does_not_grow_with_the_output(tmp_path: Path) -> None:
    codec = a_text_codec(tmp_path)
    longest = 0

    class Counted:
        def decode(self, tokens: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(tokens))
            return codec.decode(tokens)

    stream = TextStream(cast(TextCodec, Counted()))
    for token in [1] * 200 + [5] * 200:
        stream.push(token)
    assert longest < 20


def test_chat_templates_in_their_other_forms(tmp_path: Path) -> None:
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ bos_token }}"}]
    codec = a_text_codec(tmp_path, chat_template=templates, bos_token={"content": "H"})
    assert codec.encode_chat([]) == (8,)
    with pytest.raises(ValueError, match="no chat template"):
        a_text_codec(tmp_path).encode_chat([])
    with pytest.raises(ValueError, match="refuses it"):
        a_text_codec(tmp_path, chat_template="{{ messages[0] + 1 }}").encode_chat([{"role": "user"}])
    with pytest.raises(ModelError, match="has no tokenizer this engine reads"):
        a_text_codec(tmp_path, chat_template="{% if %}")
