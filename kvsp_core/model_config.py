"""A Compatibility Descriptor derived from a model's configuration and files (requirements CD-3 and CD-7).

The configuration is a parsed ``config.json`` of the Hugging Face kind; whoever calls reads the files. RoPE
parameters always go into `positional`, and those that its registered syntax has no place for into a member of
our own, ``rope_scaling``. Another one, ``config``, has all the rest of the configuration, but for what surely
changes no key and no value: weights say what is computed with, not how, and an epsilon, an activation or a
number of heads that differs gives other blocks. Both are part of the identity: engines that run one model
differently never take each other's blocks. What a descriptor cannot express is refused, never left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import rfc8785

from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.identity import CompatibilityDescriptor, digest_of_files
from kvsp_core.registries import INITIAL_REGISTRIES, Registries
from kvsp_core.strict_json import Json, frozen_json, kind_of, thawed_json

__all__ = ["derive_descriptor"]

_ELEMENT_TYPES: Final = (
    ("bfloat16", "bf16"),
    ("float16", "fp16"),
    ("float32", "fp32"),
    ("float8_e4m3fn", "fp8-e4m3"),
    ("float8_e5m2", "fp8-e5m2"),
)
_FULL_ATTENTION: Final = "full_attention"
_LAYER_KINDS: Final = ("layer_types", "layers_block_type")
_WINDOW: Final = ("sliding_window", "use_sliding_window", "max_window_layers")
_ROPE: Final = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

_STATED_ELSEWHERE: Final = frozenset(
    {"num_hidden_layers", "num_key_value_heads", "head_dim", "dtype", "torch_dtype", *_ROPE, *_LAYER_KINDS}
)
"""What members of the protocol and ``rope_scaling`` say, in any of its forms, or what is refused where it is
not the same for all."""
_OTHER_MODALITIES: Final = frozenset({"text_config", "vision_config", "audio_config"})
"""Parts that tokens do not pass through; that of the text is looked into."""
_WITHOUT_EFFECT: Final = frozenset(
    {
        # where the files come from, and who wrote them
        "_name_or_path",
        "transformers_version",
        # which tokens begin, end and fill a text: tokens are what a block is named by
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        # what else is returned, or kept
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        # training
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
    }
)
"""What changes no key and no value of a model that runs."""
_LONGEST_VALUE: Final = 256
"""Octets of a member of ``config``; of what is longer the digest is taken."""


def derive_descriptor(
    config: Mapping[str, object],
    *,
    model: str,
    weights: Mapping[str, Iterable[bytes]],
    tokenizer: Iterable[bytes],
    block_tokens: int,
    kv_dtype: str | None = None,
    positional: str | None = None,
    adapters: Iterable[str] = (),
    registries: Registries = INITIAL_REGISTRIES,
) -> CompatibilityDescriptor:
    """Return the descriptor of a model that runs with `config`.

    `weights` gives for the name of each weight file its octets in pieces, `tokenizer` those of the tokenizer
    file; both are read once and never held whole. `adapters` are digests in the order of application.
    `kv_dtype` and `positional` replace what the configuration says or leaves open.

    Raises `LocalProtocolError`, naming the member of the configuration, for what is missing, mistyped, or
    cannot be expressed in a descriptor.
    """
    text = _text_config(config)
    _refuse_inexpressible(text)
    heads = _size(text, "num_attention_heads")
    rope = _rope_parameters(text)
    theta, scaling = rope.pop("rope_theta", None), rope.pop("rope_type")
    return CompatibilityDescriptor(
        model=model,
        model_digest=digest_of_files(weights),
        tokenizer_digest=digest_of_files({"tokenizer": tokenizer}),
        adapters=tuple(adapters),
        layers=_size(text, "num_hidden_layers"),
        kv_heads=_size(text, "num_key_value_heads") if text.get("num_key_value_heads") is not None else heads,
        head_dim=_head_dim(text, heads),
        kv_dtype=kv_dtype if kv_dtype is not None else _element_type(text),
        positional=_positional(theta, scaling) if positional is None else positional,
        block_tokens=block_tokens,
        other_members=({"rope_scaling": rope} if rope else {}) | _the_rest(config, text),
        registries=registries,
    )


def _text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the configuration of the text model, which those of several modalities hold apart."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and "num_hidden_layers" not in config else config


def _refuse_inexpressible(config: Mapping[str, object]) -> None:
    def refuse(member: str, reason: str) -> None:
        raise LocalProtocolError(f"model configuration, {member}: {reason}; a descriptor cannot express this")

    if config.get("kv_lora_rank") is not None:
        refuse("kv_lora_rank", "the cache holds latent vectors, not K and V of each head")
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        refuse("sliding_window", "attention is limited to a window")
    for member in _LAYER_KINDS:
        kinds = config.get(member)
        full = isinstance(kinds, (list, tuple)) and all(kind == _FULL_ATTENTION for kind in kinds)
        if kinds is not None and not full:
            refuse(member, "some layers are not full attention")


def _the_rest(config: Mapping[str, object], text: Mapping[str, object]) -> dict[str, Json]:
    """Return the member that has all that may change keys and values and is said nowhere else."""
    left_out = _STATED_ELSEWHERE | _OTHER_MODALITIES | _WITHOUT_EFFECT
    if text.get("use_sliding_window") is False:
        left_out |= set(_WINDOW)
    if text.get("rope_parameters") and text.get("rope_scaling"):  # the first was read in its place
        left_out -= {"rope_scaling"}
    rest = {name: _shown(name, value) for name, value in {**config, **text}.items() if name not in left_out}
    return {"config": rest} if rest else {}


def _shown(name: str, value: object) -> Json:
    """Return a value of the configuration as the descriptor has it. A member that is not there is another
    thing than one that is null: an engine puts its default in the place of the first."""
    try:
        known = frozen_json(value, name)
        octets = rfc8785.dumps(thawed_json(known))  # type: ignore[arg-type]
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"model configuration, {error}") from None
    return known if len(octets) <= _LONGEST_VALUE else digest_of_files({name: [octets]})


def _size(config: Mapping[str, object], member: str) -> int:
    value = config.get(member)
    if type(value) is not int or value < 1:
        raise LocalProtocolError(
            f"model configuration, {member}: expected an integer of at least 1, found {kind_of(value)}"
        )
    return value


def _head_dim(config: Mapping[str, object], heads: int) -> int:
    if config.get("head_dim") is not None:
        return _size(config, "head_dim")
    hidden = _size(config, "hidden_size")
    if hidden % heads:
        raise LocalProtocolError("model configuration, hidden_size: not a multiple of num_attention_heads")
    return hidden // heads


def _element_type(config: Mapping[str, object]) -> str:
    found = config.get("dtype") or config.get("torch_dtype")
    name = found.removeprefix("torch.") if isinstance(found, str) else None
    for dtype, element_type in _ELEMENT_TYPES:
        if name == dtype:
            return element_type
    known = ", ".join(dtype for dtype, _ in _ELEMENT_TYPES)
    raise LocalProtocolError(f"model configuration, dtype: expected one of {known}; or say which kv_dtype")


def _rope_parameters(config: Mapping[str, object]) -> dict[str, Json]:
    """Return what the configuration says of RoPE, the same whether it follows the older or the newer form."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(stated, Mapping) or any(isinstance(value, Mapping) for value in stated.values()):
        raise LocalProtocolError(
            "model configuration, rope_parameters: they differ by layer; a descriptor cannot express this"
        )
    parameters = {name: value for name, value in stated.items() if value is not None}
    former_name = parameters.pop("type", "default")
    parameters.setdefault("rope_type", former_name)
    for name in ("rope_theta", "partial_rotary_factor"):
        if config.get(name) is not None:
            parameters.setdefault(name, config[name])
    if parameters.get("partial_rotary_factor") == 1:
        del parameters["partial_rotary_factor"]
    return parameters


def _positional(theta: Json, scaling: Json) -> str:
    if theta is None:
        raise LocalProtocolError(
            "model configuration, rope_theta: is missing; say positional='rope' for a model that runs with "
            "its default, or 'none' for one that keeps K without positions"
        )
    base = 0
    if isinstance(theta, (int, float)) and not isinstance(theta, bool) and math.isfinite(theta):
        base = int(theta)
    if base < 1 or base != theta:
        raise LocalProtocolError(
            "model configuration, rope_theta: a descriptor takes whole numbers from 1 on"
        )
    positional = f"rope;theta={base}"
    return positional if scaling == "default" else f"{positional},scaling={scaling}"
