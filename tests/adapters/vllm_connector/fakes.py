"""vLLM's objects, as far as the connector reads them: names and values as vLLM 0.32 has them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs

from kvsp_client import PrefixKeys

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "head_dim": 6,
    "rope_theta": 100000.0,
    "torch_dtype": "bfloat16",
}


@attrs.frozen
class FoundPrefix:
    """A prefix as the client's lookup returns it, without its replicas."""

    keys: PrefixKeys

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, start: int, stop: int) -> FoundPrefix:
        return FoundPrefix(self.keys.part(start, stop))


class FullAttentionSpec(SimpleNamespace):
    """Its name is what is looked at."""


class MLAAttentionSpec(SimpleNamespace):
    """Its name is what is looked at."""


def model_directory(directory: Path, **members: object) -> Path:
    """Write files as a model has them."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | members))
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "tokenizer.json").write_bytes(b"{}")
    return directory


def engine(directory: Path, **changed: Any) -> SimpleNamespace:
    """Return the configuration of an engine; `changed` sets members of its parts, by their names."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": str(directory),
            "tokenizer": str(directory),
            "revision": None,
            "dtype": "torch.bfloat16",
            "use_mla": False,
            "is_hybrid": False,
            "runner_type": "generate",
            "hf_overrides": {},
            "quantization": None,
            "hf_config_path": None,
            "config_format": "auto",
            "max_model_len": 2048,
        },
        "load_config": {"load_format": "auto"},
        "scheduler_config": {"async_scheduling": False},
        "cache_config": {"cache_dtype": "auto", "block_size": 4},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
        },
    }
    speculative = changed.pop("speculative_config", None)
    transfer = changed.pop("weight_transfer_config", None)
    for name, value in changed.items():
        (part,) = (part for part in parts.values() if name in part)
        part[name] = value
    made = SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()})
    made.speculative_config = speculative
    made.weight_transfer_config = transfer
    return made


def spec(**changed: Any) -> FullAttentionSpec:
    """Return the kind of cache that full attention has."""
    members = {"head_size": 6, "sliding_window": None, "attention_chunk_size": None, "non_causal": False}
    return FullAttentionSpec(**(members | changed))


def caches(*specs: Any) -> SimpleNamespace:
    """Return the configuration of caches in groups, one for each spec."""
    groups = [SimpleNamespace(kv_cache_spec=each) for each in specs or (spec(),)]
    return SimpleNamespace(kv_cache_groups=groups)


def request(name: str = "r1", tokens: int = 18, **changed: Any) -> SimpleNamespace:
    """Return a request for so many tokens."""
    members: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": list(range(tokens)),
        "all_token_ids": list(range(tokens)),
        "mm_features": [],
        "prompt_embeds": None,
        "pooling_params": None,
        "lora_request": None,
        "cache_salt": None,
    }
    return SimpleNamespace(**(members | changed))


def step(
    *,
    new: dict[str, tuple[list[int], int]] | None = None,
    running: dict[str, tuple[list[int] | None, int]] | None = None,
    scheduled: dict[str, int] | None = None,
    resumed: set[str] = frozenset(),  # type: ignore[assignment]
    finished: set[str] = frozenset(),  # type: ignore[assignment]
) -> SimpleNamespace:
    """Return what vLLM has scheduled; requests by name, with block numbers and tokens computed before."""
    new, running = new or {}, running or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, (blocks, computed) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(running),
            resumed_req_ids=resumed,
            new_block_ids=[None if blocks is None else (blocks,) for blocks, _ in running.values()],
            num_computed_tokens=[computed for _, computed in running.values()],
        ),
        num_scheduled_tokens=scheduled or {},
        finished_req_ids=finished,
    )
