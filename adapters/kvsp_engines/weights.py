"""Model directories in the Hugging Face layout, read without copying: config.json and safetensors files.

Weight files are memory-mapped, so that several instance processes on one machine share one copy in the page
cache.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvsp_core.errors import KVSPError

__all__ = ["MAPPED_FILE", "LlamaConfig", "ModelError", "load_config", "load_weights", "map_weights"]

MAPPED_FILE: Final = "kvsp-fp32.mapped"
"""A derived file beside the model's own: the same weights in fp32, ready to be mapped.

It has another ending, since every *.safetensors file belongs to the model and its digest."""

_DTYPES: Final[Mapping[str, Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class ModelError(KVSPError):
    """A model directory cannot be used: what is wrong with it, and what to do, in one line."""


@attrs.frozen(kw_only=True)
class LlamaConfig:
    """The shape of a Llama-architecture model, from its config.json."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocabulary: int
    context: int
    rms_epsilon: float
    rope_theta: float
    stop_tokens: frozenset[int] = frozenset()

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @classmethod
    def from_members(cls, members: Mapping[str, Any]) -> LlamaConfig:
        """Read the parsed config.json; a model this engine would compute wrongly is a `ModelError`."""
        if members.get("model_type") != "llama":
            raise ModelError(f"model_type is {members.get('model_type')!r}; this engine runs 'llama' models")
        for member in ("attention_bias", "mlp_bias"):
            if members.get(member):
                raise ModelError(f"{member} is set; this engine has no biases")
        if members.get("hidden_act", "silu") != "silu":
            raise ModelError(f"hidden_act is {members['hidden_act']!r}; this engine computes 'silu'")
        if members.get("sliding_window") is not None:
            raise ModelError("sliding_window is set; this engine attends to all tokens")
        if members.get("quantization_config") is not None:
            raise ModelError("quantization_config is set; this engine has no quantized weights")
        try:
            return cls._checked(members)
        except KeyError as error:
            raise ModelError(f"config.json has no member {error}") from None
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise ModelError(f"config.json has a member of another type than it should: {error}") from None

    @classmethod
    def _checked(cls, members: Mapping[str, Any]) -> LlamaConfig:
        rope = members.get("rope_parameters") or {}
        if members.get("rope_scaling") or rope.get("rope_type", "default") != "default":
            raise ModelError("the model scales its rotary positions; this engine does not")
        if any(each.get("partial_rotary_factor") not in (None, 1) for each in (members, rope)):
            raise ModelError("partial_rotary_factor is set; this engine rotates all dimensions")
        heads = int(members["num_attention_heads"])
        eos = members.get("eos_token_id")
        found = cls(
            layers=int(members["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(members.get("num_key_value_heads") or heads),
            head_dim=int(members.get("head_dim") or members["hidden_size"] // heads),
            hidden=int(members["hidden_size"]),
            inner=int(members["intermediate_size"]),
            vocabulary=int(members["vocab_size"]),
            context=int(members["max_position_embeddings"]),
            rms_epsilon=float(members["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or members.get("rope_theta") or 10000.0),
            stop_tokens=frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos]),
        )
        sizes = (found.layers, found.kv_heads, found.head_dim, found.hidden, found.vocabulary, found.context)
        if min(heads, found.inner, *sizes) < 1 or heads % found.kv_heads or found.head_dim % 2:
            raise ModelError(
                "config.json: its sizes are from 1 on, num_attention_heads is a multiple of"
                " num_key_value_heads, and head_dim is even"
            )
        return found

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the names of all tensors of the model, and the shape of each."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
        }
        return {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocabulary, self.hidden),
        } | {
            f"model.layers.{number}.{name}.weight": shape
            for number in range(self.layers)
            for name, shape in layer.items()
        }


def load_config(directory: Path) -> LlamaConfig:
    """Read config.json of a model directory."""
    try:
        members = json.loads((directory / "config.json").read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{directory} has no config.json; make one with: kvsp model prepare {directory}"
        ) from None
    except ValueError as error:
        raise ModelError(f"{directory}/config.json is not JSON: {error}") from None
    return LlamaConfig.from_members(members)


def load_weights(directory: Path, config: LlamaConfig) -> dict[str, npt.NDArray[np.float32]]:
    """Map the tensors of the model that config.json tells of; weights of any other are a `ModelError`.

    Where there is no output matrix, it is that of the embedding.
    """
    weights, expected = map_weights(directory), config.tensors()
    weights.setdefault("lm_head.weight", weights.get("model.embed_tokens.weight", np.empty(0, np.float32)))
    for name, shape in expected.items():
        found = weights.get(name)
        if found is None or found.shape != shape:
            has = "have none" if found is None else f"have {list(found.shape)}"
            raise ModelError(
                f"{directory}: by config.json {name} is {list(shape)}, and the weights {has};"
                " both have to be of one model"
            )
    unused = weights.keys() - expected.keys()
    if strange := min((name for name in unused if not name.endswith(".rotary_emb.inv_freq")), default=None):
        raise ModelError(f"{directory}: the weights have {strange}, which this engine does not compute with")
    return weights


def map_weights(directory: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Map every tensor of a model directory as fp32, by name.

    The derived fp32 file is used where it is there; otherwise the model's own files, converted in memory.
    """
    derived = directory / MAPPED_FILE
    files = [derived] if derived.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{directory} has no *.safetensors file; make one with: kvsp model prepare {directory}"
        )
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for file in files:
        for name, tensor in _map_file(file).items():
            weights[name] = tensor if tensor.dtype == np.float32 else tensor.astype(np.float32)
    return weights


def _map_file(file: Path) -> dict[str, npt.NDArray[Any]]:
    """Map one safetensors file: 8 octets of header length, a JSON header, then the tensors."""
    try:
        with file.open("rb") as handle:
            mapped = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        start = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8:start])
        header.pop("__metadata__", None)
        return {
            name: np.frombuffer(
                mapped,
                _DTYPES[entry["dtype"]],
                count=int(np.prod(entry["shape"], dtype=np.int64)),
                offset=start + entry["data_offsets"][0],
            ).reshape(entry["shape"])
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is not a safetensors file this engine reads: {error}") from None
