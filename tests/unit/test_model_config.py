"""Descriptors derived from model configurations: RoPE and types included, the inexpressible refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.model_config import derive_descriptor

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}


def derive(config: dict[str, Any], **other: Any) -> CompatibilityDescriptor:
    arguments = {
        "model": "m",
        "weights": {"model.safetensors": [b"w"]},
        "tokenizer": [b"t"],
        "block_tokens": 16,
    }
    return derive_descriptor(config, **(arguments | other))


@pytest.mark.requirement("CD-7", "CD-1")
def test_a_llama_configuration() -> None:
    made = derive(LLAMA)
    assert (made.layers, made.kv_heads, made.head_dim) == (30, 3, 64)
    assert (made.kv_dtype, made.positional, made.block_tokens) == ("bf16", "rope;theta=100000", 16)
    assert (made.model, made.layout) == ("m", "kvsp-layout-1")
    assert made.other_members == {
        "config": {"model_type": "llama", "num_attention_heads": 9, "hidden_size": 576}
    }


@pytest.mark.requirement("CD-3")
def test_digests_are_of_the_files() -> None:
    read: list[str] = []

    def pieces(name: str, *octets: bytes) -> Iterator[bytes]:
        for piece in octets:
            read.append(name)
            yield piece

    weights = {"b.safetensors": pieces("b", b"3"), "a.safetensors": pieces("a", b"1", b"2")}
    made = derive(LLAMA, weights=weights, tokenizer=pieces("t", b"tok", b"en"))
    assert made.model_digest == "sha-256:" + hashlib.sha256(b"123").hexdigest()
    assert made.tokenizer_digest == "sha-256:" + hashlib.sha256(b"token").hexdigest()
    assert read == ["a", "a", "b", "t", "t"]


@pytest.mark.requirement("CD-7")
def test_rope_parameters_are_always_stated() -> None:
    assert derive(LLAMA | {"rope_theta": 500000}).positional == "rope;theta=500000"
    scaled = derive(LLAMA | {"rope_scaling": SCALED})
    assert scaled.positional == "rope;theta=100000,scaling=llama3"
    assert scaled.other_members["rope_scaling"] == {"factor": 8.0, "low_freq_factor": 1.0}
    assert scaled != derive(LLAMA | {"rope_scaling": SCALED | {"factor": 16.0}})


@pytest.mark.requirement("CD-6", "CD-7")
@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-6},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"num_attention_heads": 18, "head_dim": 64, "num_key_value_heads": 3},
        {"max_position_embeddings": 4096},
        {"architectures": ["MistralForCausalLM"]},
        {"sliding_window": None},
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"a_member_of_next_year": [0.5, {"deep": True}]},
        {"rope_parameters": {"rope_theta": 100000.0}, "rope_scaling": SCALED},
    ],
    ids=str,
)
def test_what_may_change_keys_and_values_is_in_the_identity(change: dict[str, Any]) -> None:
    plain = LLAMA | {"rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "head_dim": 64}
    assert derive(plain | change).compat_id != derive(plain).compat_id
    nested = derive({"text_config": plain | change, "model_type": "of text and images"})
    assert nested.compat_id != derive({"text_config": plain, "model_type": "of text and images"}).compat_id


@pytest.mark.parametrize(
    "change",
    [
        {"eos_token_id": [1, 2]},
        {"use_cache": False},
        {"transformers_version": "9"},
        {"vision_config": {"depth": 9}},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_what_changes_neither_keys_nor_values_is_left_out(change: dict[str, Any]) -> None:
    assert derive(LLAMA | change) == derive(LLAMA)


def test_the_outer_configuration_of_several_modalities_counts_too() -> None:
    outer = {"text_config": LLAMA, "quantization_config": {"bits": 4}}
    assert derive(outer) != derive(outer | {"quantization_config": {"bits": 8}})


@pytest.mark.requirement("CD-1")
def test_a_long_member_is_in_the_descriptor_as_its_digest() -> None:
    layers = [f"model.layers.{n}.mlp" for n in range(1000)]
    made = derive(LLAMA | {"quantization_config": {"modules_to_not_convert": layers}})
    config = made.members()["config"]
    assert isinstance(config, dict)
    assert str(config["quantization_config"]).startswith("sha-256:")
    assert made != derive(LLAMA | {"quantization_config": {"modules_to_not_convert": layers[:-1]}})


@pytest.mark.requirement("CD-7")
def test_older_and_newer_forms_of_a_configuration_give_one_descriptor() -> None:
    rest = {name: value for name, value in LLAMA.items() if not name.startswith("rope")}
    newer = rest | {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}, "dtype": "bfloat16"}
    assert derive(newer) == derive(LLAMA)
    newer["rope_parameters"] = SCALED | {"rope_theta": 100000.0, "mscale": None}
    older = LLAMA | {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}
    assert derive(newer) == derive(older)
    newer["rope_parameters"] = {"rope_theta": 1e5, "rope_type": "default", "partial_rotary_factor": 0.5}
    assert derive(newer) == derive(LLAMA | {"partial_rotary_factor": 0.5})
    assert derive(LLAMA | {"partial_rotary_factor": 1.0}) == derive(LLAMA)


@pytest.mark.requirement("CD-7")
def test_what_the_program_says_replaces_what_the_configuration_leaves_open() -> None:
    rest = {name: value for name, value in LLAMA.items() if name not in ("rope_theta", "torch_dtype")}
    with pytest.raises(LocalProtocolError, match="rope_theta: is missing; say positional="):
        derive(rest, kv_dtype="fp16")
    with pytest.raises(LocalProtocolError, match="dtype: expected one of bfloat16"):
        derive(rest, positional="rope")
    made = derive(rest, kv_dtype="fp8-e4m3", positional="rope", adapters=["sha-256:" + "0" * 64])
    assert (made.kv_dtype, made.positional, len(made.adapters)) == ("fp8-e4m3", "rope", 1)
    scaled = derive(LLAMA | {"rope_scaling": SCALED}, positional="rope;theta=7,scaling=llama3")
    assert scaled.other_members["rope_scaling"] == {"factor": 8.0, "low_freq_factor": 1.0}


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("torch.bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), ("float8_e5m2", "fp8-e5m2")],
)
def test_element_types(dtype: str, kv_dtype: str) -> None:
    assert derive(LLAMA | {"torch_dtype": dtype}).kv_dtype == kv_dtype


def test_geometry_that_a_configuration_leaves_out() -> None:
    rest = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert derive(rest).kv_heads == 9
    assert derive(LLAMA | {"head_dim": 128}).head_dim == 128
    assert derive({"text_config": LLAMA, "vision_config": {}}) == derive(LLAMA)


@pytest.mark.requirement("CD-7")
@pytest.mark.parametrize(
    ("change", "member"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layers_block_type": ["mamba"]}, "layers_block_type"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters"),
        ({"rope_scaling": "llama3"}, "rope_parameters"),
        ({"layer_types": "sliding_attention"}, "layer_types"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"vocab_size": 2**60}, "vocab_size"),
        ({"quantization_config": {"name": "\ud800"}}, "quantization_config.name"),
        ({"rope_theta": 10000.5}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "30"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 1.0}, "num_key_value_heads"),
        ({"hidden_size": 577}, "hidden_size"),
        ({"head_dim": -1}, "head_dim"),
        ({"torch_dtype": "auto"}, "dtype"),
        ({"torch_dtype": 7}, "dtype"),
    ],
    ids=str,
)
def test_what_a_descriptor_cannot_express_is_refused_by_name(change: dict[str, Any], member: str) -> None:
    with pytest.raises(LocalProtocolError, match=f"^model configuration, {member}: "):
        derive(LLAMA | change)


def test_a_window_that_is_not_used_does_not_matter() -> None:
    unused = {"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"] * 30}
    assert derive(LLAMA | unused) == derive(LLAMA)


def test_a_scaling_name_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="positional"):
        derive(LLAMA | {"rope_scaling": {"type": "my scaling"}})
