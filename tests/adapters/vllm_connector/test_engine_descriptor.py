"""What a vLLM engine shares, and what it refuses to."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kvsp_client.model_dir import descriptor_of_directory
from kvsp_client.scopes import salted_scope
from kvsp_client.vllm.engine_descriptor import (
    NotShared,
    Sharing,
    check_expressible,
    describe_engine,
)
from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import Scope
from tests.adapters.vllm_connector import fakes

_numbers = itertools.count(1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return fakes.model_directory(tmp_path / "some-model")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenant.key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


@pytest.mark.requirement("CD-7", "CD-3")
def test_an_engine_of_another_maker_derives_the_same(directory: Path) -> None:
    found = describe_engine(fakes.engine(directory))
    assert found == descriptor_of_directory(directory, block_tokens=4)
    assert found.positional == "rope;theta=100000"
    assert (found.model, found.kv_dtype, found.block_tokens) == ("some-model", "bf16", 4)


@pytest.mark.requirement("CD-5")
@pytest.mark.parametrize(
    ("changed", "member"),
    [
        ({"dtype": "torch.float32"}, "kv_dtype"),
        ({"cache_dtype": "float16"}, "kv_dtype"),
        ({"block_size": 16}, "block_tokens"),
        ({"hf_overrides": {"rope_theta": 500000.0}}, "positional"),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}}, "positional"),
        ({"hf_overrides": {"rope_theta": 500000.0}}, "run_with"),
        ({"hf_overrides": {"num_experts_per_tok": 1}}, "run_with"),
        ({"hf_overrides": {"rms_norm_eps": 0.1}}, "run_with"),
        ({"hf_overrides": {"rms_norm_eps": 0.1}}, "config"),
    ],
)
def test_what_changes_the_values_changes_the_descriptor(
    directory: Path, changed: dict[str, Any], member: str
) -> None:
    plain, other = (
        describe_engine(fakes.engine(directory)),
        describe_engine(fakes.engine(directory, **changed)),
    )
    assert plain.members().get(member) != other.members()[member]
    assert plain.compat_id != other.compat_id


@pytest.mark.requirement("CD-5")
def test_the_longest_context_decides_on_the_factors_of_longrope(tmp_path: Path) -> None:
    """vLLM takes one list of factors for all of a run."""
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    directory = fakes.model_directory(
        tmp_path / "phi", rope_scaling=rope, original_max_position_embeddings=64
    )
    short, same, long = (
        describe_engine(fakes.engine(directory, max_model_len=longest)) for longest in (32, 64, 65)
    )
    assert short == same != long
    unknown = fakes.model_directory(tmp_path / "phi-of-unknown-length", rope_scaling=rope)
    with pytest.raises(LocalProtocolError, match="original_max_position_embeddings"):
        describe_engine(fakes.engine(unknown))


def test_other_weights_in_the_same_place_are_another_model(directory: Path) -> None:
    before = describe_engine(fakes.engine(directory))
    (directory / "model.safetensors").write_bytes(b"other weights")
    assert describe_engine(fakes.engine(directory)).model_digest != before.model_digest


@pytest.mark.requirement("CD-6")
def test_one_model_of_another_configuration_is_another_model(tmp_path: Path, key_file: Path) -> None:
    """The weights are the same. The error names what differs."""
    one, other = (
        describe_engine(
            fakes.engine(fakes.model_directory(tmp_path / name / "model", rms_norm_eps=epsilon, **more))
        )
        for name, epsilon, more in (("a", 1e-5, {"scale": None}), ("b", 1e-6, {}))
    )
    assert one.model_digest == other.model_digest
    with pytest.raises(LocalProtocolError, match=r"^config.rms_norm_eps: this engine has 1e-06, the deploy"):
        Sharing(other, key_file, [one])


@pytest.mark.requirement("CD-6")
def test_a_member_that_is_null_differs_from_one_that_is_not_there(tmp_path: Path, key_file: Path) -> None:
    one, other = (
        describe_engine(fakes.engine(fakes.model_directory(tmp_path / name / "model", **more)))
        for name, more in (("a", {"sliding_window": None}), ("b", {}))
    )
    with pytest.raises(LocalProtocolError, match=r"^config.sliding_window: this engine has nothing, the d"):
        Sharing(other, key_file, [one])


def test_files_of_mistrals_own_format_are_refused(directory: Path) -> None:
    """vLLM prefers them, where it is not told which to read."""
    (directory / "consolidated.safetensors").write_bytes(b"weights")
    with pytest.raises(LocalProtocolError, match="--config-format hf"):
        describe_engine(fakes.engine(directory))
    describe_engine(fakes.engine(directory, config_format="hf", load_format="safetensors"))


def test_weight_files_of_one_name_are_refused(directory: Path) -> None:
    """A digest over files knows each by its name."""
    index = {"weight_map": {"x": "a/w.safetensors", "y": "b/w.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LocalProtocolError, match="one name"):
        describe_engine(fakes.engine(directory))


def test_what_full_attention_caches_is_shared(directory: Path) -> None:
    check_expressible(fakes.engine(directory), fakes.caches())


@pytest.mark.requirement("CD-5")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"use_mla": True}, "latent"),
        ({"is_hybrid": True}, "not attention"),
        ({"runner_type": "pooling"}, "runner"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"cache_dtype": "fp8"}, "scales"),
        ({"cache_dtype": "fp8_e5m2"}, "scales"),
        ({"hf_overrides": lambda config: config}, "hf_overrides"),
        ({"quantization": "fp8"}, "quantization fp8"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "draft"),
        ({"load_format": "dummy"}, "load_format dummy"),
        ({"hf_config_path": "/elsewhere"}, "hf_config_path"),
        ({"config_format": "mistral"}, "config_format mistral"),
        ({"weight_transfer_config": SimpleNamespace(backend="nccl")}, "weight_transfer_config"),
        ({"async_scheduling": True}, "--no-async-scheduling"),
    ],
)
def test_an_engine_that_cannot_be_described_is_refused(
    directory: Path, changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(LocalProtocolError, match=reason) as refused:
        check_expressible(fakes.engine(directory, **changed), fakes.caches())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ([fakes.spec(sliding_window=1024)], "window"),
        ([fakes.spec(attention_chunk_size=8192)], "chunk"),
        ([fakes.spec(non_causal=True)], "causal"),
        ([fakes.spec(head_size_v=4)], "dimensions"),
        ([fakes.MLAAttentionSpec(head_size=6)], "MLAAttentionSpec"),
        ([fakes.spec(), fakes.spec()], "2 groups"),
        ([SimpleNamespace(kv_cache_specs={"a": fakes.spec(), "b": fakes.spec(sliding_window=8)})], "window"),
    ],
)
def test_caches_that_are_not_of_all_tokens_are_refused(
    directory: Path, specs: list[Any], reason: str
) -> None:
    with pytest.raises(LocalProtocolError, match=reason):
        check_expressible(fakes.engine(directory), fakes.caches(*specs))


def test_speculation_without_a_draft_model_is_no_matter(directory: Path) -> None:
    config = fakes.engine(directory, speculative_config=SimpleNamespace(method="ngram"))
    check_expressible(config, fakes.caches())


def test_quantized_weights_that_are_in_the_files_are_shared(tmp_path: Path) -> None:
    directory = fakes.model_directory(tmp_path / "awq", quantization_config={"quant_method": "awq"})
    check_expressible(fakes.engine(directory, quantization="awq"), fakes.caches())


# Requests


@pytest.fixture
def sharing(directory: Path, key_file: Path) -> Sharing:
    return Sharing(describe_engine(fakes.engine(directory)), key_file)


def test_a_plain_request_has_the_tenants_scope(sharing: Sharing) -> None:
    assert sharing.of(fakes.request()) == (Scope(bytes(range(32))), sharing.descriptor)


@pytest.mark.requirement("SK-1", "SK-6")
def test_a_cache_salt_has_a_scope_of_its_own(sharing: Sharing) -> None:
    scopes = [sharing.of(fakes.request(cache_salt=salt))[0].scope_id for salt in (None, "a", "b")]
    assert len(set(scopes)) == 3
    assert scopes[1] == salted_scope(bytes(range(32)), "a").scope_id


@pytest.mark.parametrize(
    ("changed", "label"),
    [
        ({"mm_features": ["an image"]}, "multimodal"),
        ({"prompt_embeds": object()}, "prompt-embeddings"),
        ({"prompt_token_ids": None}, "prompt-embeddings"),
        ({"pooling_params": object()}, "pooling"),
    ],
)
def test_a_request_whose_tokens_do_not_say_all_is_not_shared(
    sharing: Sharing, changed: dict[str, Any], label: str
) -> None:
    with pytest.raises(NotShared) as refused:
        sharing.of(fakes.request(**changed))
    assert refused.value.label == label


def adapter(
    tmp_path: Path, weights: bytes = b"lora", config: bytes = b"{}", **members: Any
) -> SimpleNamespace:
    directory = tmp_path / f"adapter-{weights.hex()}-{config.hex()}"
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    (directory / "adapter_config.json").write_bytes(config)
    given = {
        "lora_name": "x",
        "lora_int_id": next(_numbers),
        "lora_path": str(directory),
        "load_inplace": False,
    }
    return SimpleNamespace(**given | members)


@pytest.mark.requirement("CD-3", "CD-5")
def test_adapters_are_told_apart_by_their_files(sharing: Sharing, tmp_path: Path) -> None:
    requests = [
        fakes.request(lora_request=lora)
        for lora in (
            None,
            adapter(tmp_path),
            adapter(tmp_path, b"other weights"),
            adapter(tmp_path, config=b'{"lora_alpha": 8}'),
        )
    ]
    assert len({sharing.of(request)[1].compat_id for request in requests}) == 4
    again = fakes.request(lora_request=adapter(tmp_path, lora_name="y"))
    assert sharing.of(again)[1] == sharing.of(requests[1])[1]


def test_an_adapter_whose_files_have_changed_is_not_shared(sharing: Sharing, tmp_path: Path) -> None:
    """vLLM computes with what it has loaded; under another number it loads what is there now."""
    lora = adapter(tmp_path)
    before = sharing.of(fakes.request(lora_request=lora))[1]
    (Path(lora.lora_path) / "adapter_model.safetensors").write_bytes(b"weights of later on")
    with pytest.raises(NotShared, match="changed"):
        sharing.of(fakes.request(lora_request=lora))
    lora.lora_int_id = next(_numbers)
    assert sharing.of(fakes.request(lora_request=lora))[1] != before


def test_what_vllm_loaded_is_kept_of_so_many_adapters(
    sharing: Sharing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that were used last, so that one in use cannot change unseen."""
    monkeypatch.setattr("kvsp_client.vllm.engine_descriptor._LOADED", 2)
    one, *others = (adapter(tmp_path, weights) for weights in (b"one", b"two", b"three", b"four"))
    for other in others:
        for lora in (one, other):
            sharing.of(fakes.request(lora_request=lora))
    assert list(sharing._loaded) == [one.lora_int_id, others[-1].lora_int_id]
    (Path(one.lora_path) / "adapter_model.safetensors").write_bytes(b"weights of later on")
    for _ in range(2):
        with pytest.raises(NotShared, match="changed"):
            sharing.of(fakes.request(lora_request=one))


def test_an_adapter_whose_files_say_nothing_is_not_shared(sharing: Sharing, tmp_path: Path) -> None:
    for lora in (
        adapter(tmp_path, load_inplace=True),
        SimpleNamespace(lora_name="x", lora_int_id=1, lora_path=str(tmp_path), load_inplace=False),
    ):
        with pytest.raises(NotShared) as refused:
            sharing.of(fakes.request(lora_request=lora))
        assert refused.value.label == "adapter"


@pytest.mark.requirement("CD-8")
@pytest.mark.parametrize(
    ("changed", "member"),
    [({"kv_dtype": "fp32"}, "kv_dtype"), ({"block_tokens": 16}, "block_tokens"), ({"model": "y"}, "model")],
)
def test_an_engine_that_the_deployment_does_not_know_is_an_error_that_names_the_member(
    directory: Path, key_file: Path, changed: dict[str, Any], member: str
) -> None:
    own = describe_engine(fakes.engine(directory))
    Sharing(own, key_file, [own])
    with pytest.raises(LocalProtocolError, match=rf"^{member}: this engine has .* descriptor says"):
        Sharing(own, key_file, [attrs.evolve(own, **changed)])


@pytest.mark.requirement("CD-8")
def test_an_adapter_that_the_deployment_does_not_know_is_named(
    directory: Path, key_file: Path, tmp_path: Path
) -> None:
    own = describe_engine(fakes.engine(directory))
    known = Sharing(own, key_file).of(fakes.request(lora_request=adapter(tmp_path)))[1]
    sharing = Sharing(own, key_file, [known])
    assert sharing.of(fakes.request(lora_request=adapter(tmp_path)))[1] == known
    for lora in (None, adapter(tmp_path, b"unknown")):
        with pytest.raises(NotShared, match=r"^adapters: this engine has "):
            sharing.of(fakes.request(lora_request=lora))
