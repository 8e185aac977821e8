"""An engine that is not what the deployment shares is an error that names the member, not a cache that
misses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvsp_client.model_dir import descriptor_of_directory
from tests.vllm.conftest import PYTHON
from tests.vllm.kit import Baseline, Deployment, Engine, EngineFailed, prompt_tokens


@pytest.fixture
def known(fp32: Path, tmp_path: Path) -> Path:
    """Return the file of the descriptor that the deployment shares."""
    path = tmp_path / "descriptor.json"
    path.write_bytes(descriptor_of_directory(fp32, block_tokens=32).canonical_json)
    return path


def test_another_dtype(
    model_dir: Callable[[str], Path], known: Path, deployment: Deployment, logs: Path
) -> None:
    options = deployment.options(model_dir("bf16"), descriptor_files=[str(known)])
    with (
        Engine(PYTHON, options, logs / "another-dtype.log") as engine,
        pytest.raises(
            EngineFailed, match=r"^kv_dtype: this engine has bf16, the deployment's descriptor says fp32"
        ),
    ):
        engine.wait_ready()


def test_another_block_size(fp32: Path, known: Path, deployment: Deployment, logs: Path) -> None:
    options = deployment.options(fp32, descriptor_files=[str(known)]) | {"block_size": 64}
    with (
        Engine(PYTHON, options, logs / "another-block-size.log") as engine,
        pytest.raises(
            EngineFailed, match=r"^block_tokens: this engine has 64, the deployment's descriptor says 32"
        ),
    ):
        engine.wait_ready()


def test_another_adapter(
    fp32: Path, known: Path, deployment: Deployment, baseline: Baseline, logs: Path, tmp_path: Path
) -> None:
    """Requests with an adapter that the deployment does not know are served, and not shared; others are."""
    lora = adapter(fp32, tmp_path / "adapter")
    prompt = prompt_tokens(fp32, 272)
    log = logs / "another-adapter.log"
    log.unlink(missing_ok=True)
    options = deployment.options(fp32, descriptor_files=[str(known)]) | {
        "enable_lora": True,
        "max_lora_rank": 8,
    }
    with Engine(PYTHON, options, log) as engine:
        adapted = engine.wait_ready().generate(prompt, tokens=8, lora=str(lora))["results"][0]
        assert adapted["finish"] == "length"
        deployment.settle(engine)
        assert engine.ask("counters")["own"] == {"not_shared_descriptor": 1}
        plain = engine.generate(prompt, tokens=8)["results"][0]
        assert plain["cached"] == 0
        deployment.settle(engine)
        assert engine.ask("counters")["own"]["stored_blocks"] == 8
    assert plain["tokens"] == baseline.both(prompt, 8)[0]["tokens"]
    assert "adapters: this engine has ['sha-256:" in log.read_text()


def adapter(model_dir: Path, directory: Path) -> Path:
    """Write a LoRA adapter of random weights."""
    config = json.loads((model_dir / "config.json").read_text())
    random, hidden, rank = np.random.Generator(np.random.PCG64(1)), config["hidden_size"], 4
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = random.standard_normal((rank, hidden), np.float32) / 8
        weights[f"{name}.lora_B.weight"] = random.standard_normal((hidden, rank), np.float32) / 8
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    members = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(members))
    return directory
