"""The numpy engine's arithmetic: equal octets and equal logits however the work is split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsp_core.model_config import derive_descriptor
from kvsp_engines.llama import (
    Array,
    Forward,
    KVCache,
    Llama,
    Partial,
    RemoteQuery,
    merge_partials,
    numerics_fingerprint,
)
from kvsp_engines.prepare import prepare_tiny
from kvsp_engines.weights import LlamaConfig, ModelError, map_weights

TOKENS = 150


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    prepare_tiny(path)
    return path


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def model(directory: Path, request: pytest.FixtureRequest) -> Llama:
    return Llama(directory, kv_dtype=request.param)


def prompt(model: Llama) -> list[int]:
    return np.random.default_rng(3).integers(3, model.config.vocabulary, TOKENS).tolist()


def octets(model: Llama, cache: KVCache, end: int) -> list[tuple[bytes, bytes]]:
    return [cache.export_layer(layer, (0, end)) for layer in range(model.config.layers)]


def drive(steps: Forward, answer: Callable[[RemoteQuery], Partial]) -> Array:
    query = next(steps)
    while True:
        try:
            query = steps.send(answer(query))
        except StopIteration as done:
            return done.value


@pytest.mark.parametrize("split", [1, 15, 16, 17, 63, 64, 65, 100, 149])
@pytest.mark.requirement("CP-6")
def test_a_split_prefill_changes_no_bit(model: Llama, split: int) -> None:
    tokens = prompt(model)
    whole, parts = model.new_cache(), model.new_cache()
    logits = model.forward(whole, tokens, all_logits=True)
    first = model.forward(parts, tokens[:split], all_logits=True)
    second = model.forward(parts, tokens[split:], all_logits=True)
    assert np.array_equal(np.concatenate([first, second]), logits)
    assert octets(model, parts, TOKENS) == octets(model, whole, TOKENS)


@pytest.mark.requirement("CP-6")
def test_decoding_from_imported_blocks_equals_a_prefill(model: Llama) -> None:
    tokens = prompt(model)
    whole = model.new_cache()
    logits = model.forward(whole, tokens, all_logits=True)
    loaded = model.new_cache()
    for layer, (keys, values) in enumerate(octets(model, whole, 96)):
        loaded.import_layer(layer, 0, memoryview(keys), memoryview(values))
    loaded.end = 96
    for position in range(96, TOKENS):
        assert np.array_equal(model.forward(loaded, [tokens[position]]), logits[position])
    assert octets(model, loaded, TOKENS) == octets(model, whole, TOKENS)


def test_what_lies_behind_the_end_of_a_cache_is_never_read(model: Llama) -> None:
    tokens = prompt(model)
    clean, dirty = model.new_cache(), model.new_cache()
    model.forward(dirty, [5] * TOKENS)
    dirty.end = 0
    assert np.array_equal(model.forward(dirty, tokens[:90]), model.forward(clean, tokens[:90]))


def test_attention_merged_over_shards_equals_attention_over_the_whole(directory: Path) -> None:
    model = Llama(directory, kv_dtype="fp32")
    tokens = prompt(model)
    expected = model.forward(model.new_cache(), tokens)
    first, second = model.new_cache(), model.new_cache(start=64)
    model.forward(first, tokens[:64])

    def over_two_halves(query: RemoteQuery) -> Partial:
        halves = [(0, 32), (32, 64)]
        return merge_partials(
            [model.partial_attention(first, query.layer, query.queries, half) for half in halves]
        )

    logits = drive(model.forward_shard(second, tokens[64:]), over_two_halves)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_shard_that_a_query_does_not_see_has_no_weight(directory: Path) -> None:
    model = Llama(directory)
    cache = model.new_cache()
    model.forward(cache, prompt(model)[:64])
    queries = np.ones((3, model.config.heads, model.config.head_dim), np.float32)
    some = model.partial_attention(cache, 0, queries, (0, 64))
    none = model.partial_attention(cache, 0, queries, (0, 0))
    assert np.array_equal(merge_partials([some, none]).output, some.output)


def test_the_context_is_a_limit(model: Llama) -> None:
    with pytest.raises(ModelError, match="do not fit"):
        model.new_cache().reserve(model.config.context + 1)


@pytest.mark.parametrize(
    ("member", "value", "says"),
    [
        ("model_type", "mamba", "runs 'llama' models"),
        ("attention_bias", True, "no biases"),
        ("hidden_act", "gelu", "'silu'"),
        ("rope_scaling", {"type": "linear"}, "rotary positions"),
        ("hidden_size", None, "hidden_size"),
        ("sliding_window", 64, "all tokens"),
        ("quantization_config", {"bits": 4}, "quantized"),
        ("partial_rotary_factor", 0.5, "rotates all"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "rotates all"),
        ("rope_parameters", "default", "another type"),
        ("vocab_size", "many", "another type"),
        ("vocab_size", [1], "another type"),
        ("rms_norm_eps", "small", "another type"),
        ("hidden_size", float("inf"), "another type"),
        ("eos_token_id", [[2]], "another type"),
        ("num_key_value_heads", 3, "a multiple"),
        ("num_hidden_layers", 0, "from 1 on"),
    ],
)
def test_a_model_the_engine_would_compute_wrongly_is_refused(member: str, value: object, says: str) -> None:
    members: dict[str, object] = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 16,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    assert LlamaConfig.from_members(members).kv_heads == 4
    if value is None:
        del members[member]
    else:
        members[member] = value
    with pytest.raises(ModelError, match=says):
        LlamaConfig.from_members(members)


def test_the_base_is_the_one_that_the_descriptor_states() -> None:
    members = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 500000.0},
        "dtype": "float32",
    }
    stated = derive_descriptor(
        members, model="m", weights={"w": [b""]}, tokenizer=[b""], block_tokens=16
    ).positional
    assert stated == f"rope;theta={LlamaConfig.from_members(members).rope_theta:.0f}"


def test_the_fingerprint_names_the_arithmetic() -> None:
    assert f"numpy-{np.__version__}" in numerics_fingerprint()


@pytest.mark.parametrize(
    ("member", "value", "says"),
    [
        ("num_hidden_layers", 3, "model.layers.2.*have none"),
        ("num_hidden_layers", 1, "have model.layers.1.*does not compute with"),
        ("num_key_value_heads", 4, r"k_proj.weight is \[64, 64\], and the weights have \[32, 64\]"),
        ("intermediate_size", 64, "both have to be of one model"),
        ("vocab_size", 100, "embed_tokens"),
    ],
)
def test_weights_of_another_model_than_config_json_tells_of_are_refused(
    member: str, value: int, says: str, tmp_path: Path
) -> None:
    prepare_tiny(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {member: value}))
    with pytest.raises(ModelError, match=says):
        Llama(tmp_path)


def test_weights_that_are_empty_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="is not a safetensors file"):
        map_weights(tmp_path)
