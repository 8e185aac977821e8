"""The Compatibility Descriptor of a vLLM engine and of each of its requests (requirements CD-1, CD-3 and
CD-7).

Derived from the model's own files, with what vLLM was told to run them with, so that an engine of another
maker gets the same one from the same directory. What a descriptor cannot express is refused with its
reason: blocks are rather computed twice than shared wrongly. vLLM's objects are read by attribute and
nothing of vLLM is imported.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs

from kvsp_client.files import file_pieces, read_secret
from kvsp_client.model_dir import weight_files
from kvsp_client.scopes import salted_scope
from kvsp_core.errors import KVSPError, LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor, Scope, digest_of_files
from kvsp_core.model_config import derive_descriptor

__all__ = ["NotShared", "Sharing", "check_expressible", "describe_engine"]

_ELEMENT_TYPES: Final = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}
_FROM_SAFETENSORS: Final = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
)
"""Load formats in which vLLM reads the weights that the descriptor has the digest of."""
_ADAPTERS: Final = 1024
"""Adapters whose descriptors are kept; those of others are derived again."""
_LOADED: Final = 1 << 16
"""Adapters of which it is known what vLLM loaded: far more than it has in memory at a time."""
_FULL_ATTENTION: Final = "FullAttentionSpec"
_WITHOUT_WEIGHTS: Final = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculation that have no layers of their own."""

FileState: TypeAlias = tuple[str, int, int]
"""A file's path, size and time of change, which tell one state of it from another."""


class NotShared(Exception):
    """Blocks of a request are neither looked up nor stored: the reason, as a counter's label, and in
    words."""

    def __init__(self, label: str, reason: str) -> None:
        super().__init__(reason)
        self.label = label


# The engine ---------------------------------------------------------------------------------------


def check_expressible(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise `LocalProtocolError` where the caches of an engine are nothing that a descriptor can name."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config

    def refuse(option: str, reason: str) -> None:
        raise LocalProtocolError(f"KVSP cannot share the cache of this engine: {option}: {reason}")

    if model.use_mla:
        refuse("model", "multi-head latent attention keeps latent vectors, not K and V of each head")
    if model.is_hybrid:
        refuse("model", "some layers are not attention, and their state has no blocks")
    if model.runner_type != "generate":
        refuse("runner", "only engines that generate keep K and V that depend on the prefix alone")
    for option in ("tensor", "pipeline", "decode_context", "prefill_context"):
        if getattr(parallel, f"{option}_parallel_size", 1) > 1:
            reason = "each worker has a part of a block, and parts are not put together"
            refuse(f"{option}_parallel_size", reason)
    if cache.cache_dtype != "auto" and cache.cache_dtype not in _ELEMENT_TYPES:
        refuse(
            f"kv_cache_dtype {cache.cache_dtype}", "its values need scales, which a descriptor cannot express"
        )
    if callable(model.hf_overrides):
        refuse("hf_overrides", "what a function changes cannot be known; give a dictionary")
    if getattr(model, "hf_config_path", None) not in (None, model.model):
        refuse("hf_config_path", "the configuration is not the one that is beside the weights")
    if getattr(model, "config_format", "auto") not in ("auto", "hf"):
        refuse(f"config_format {model.config_format}", "the configuration is not read from config.json")
    load_format = str(vllm_config.load_config.load_format)
    if load_format not in _FROM_SAFETENSORS:
        refuse(f"load_format {load_format}", "the weights are not read from the model's safetensors files")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        refuse("weight_transfer_config", "weights that are replaced while it runs are not those in the files")
    if vllm_config.scheduler_config.async_scheduling:
        refuse(
            "async_scheduling",
            "after a load that failed vLLM would go on with the step it has scheduled already;"
            " run it with --no-async-scheduling",
        )
    if model.quantization is not None and "quantization_config" not in _json(
        _model_directory(model) / "config.json"
    ):
        refuse(
            f"quantization {model.quantization}",
            "the weights that are computed with are not those in the files",
        )
    speculation = getattr(vllm_config, "speculative_config", None)
    if speculation is not None and speculation.method not in _WITHOUT_WEIGHTS:
        refuse(
            f"speculative method {speculation.method}", "the draft model's layers are not those of the model"
        )
    _check_groups(kv_cache_config, refuse)


def _check_groups(kv_cache_config: Any, refuse: Any) -> None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        refuse("model", f"its layers fall into {len(groups)} groups with caches of different kinds")
    spec = groups[0].kv_cache_spec
    # Layers that differ only by name come as a spec of several: each of them is looked at.
    for each in getattr(spec, "kv_cache_specs", {"": spec}).values():
        if type(each).__name__ != _FULL_ATTENTION or getattr(each, "non_causal", False):
            refuse(
                "model", f"its caches are of kind {type(each).__name__}, not causal attention over all tokens"
            )
        if getattr(each, "sliding_window", None) is not None:
            refuse("sliding_window", "attention is limited to a window")
        if getattr(each, "attention_chunk_size", None) is not None:
            refuse("attention_chunk_size", "attention is limited to a chunk")
        if getattr(each, "head_size_v", each.head_size) != each.head_size:
            refuse("model", "its values have other dimensions than its keys")


def describe_engine(
    vllm_config: Any, *, name: str | None = None, directory: Path | None = None
) -> CompatibilityDescriptor:
    """Return the descriptor of an engine without adapters.

    `name` is the model's, by default what vLLM was given: the name of the directory, or the whole name on
    the hub. `directory` is where its files are. The weights are read once in a process.

    Raises `LocalProtocolError` for files that are missing and for what cannot be expressed.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    files = directory if directory is not None else _model_directory(model)
    if name is None:
        name = Path(model.model).resolve().name if Path(model.model).is_dir() else model.model
    config = {**_json(files / "config.json"), **(model.hf_overrides or {})}
    formats = (getattr(model, "config_format", "auto"), str(vllm_config.load_config.load_format))
    if "auto" in formats and any(files.glob("consolidated*.safetensors")):
        raise LocalProtocolError(
            f"{files} has files of Mistral's own format too, which vLLM prefers and no descriptor is derived"
            " from; run it with --config-format hf --load-format safetensors"
        )
    kind = str(model.dtype).removeprefix("torch.") if cache.cache_dtype == "auto" else cache.cache_dtype
    if kind not in _ELEMENT_TYPES:
        raise LocalProtocolError(f"dtype {kind}: KVSP has no element type for it")
    tokenizer = _tokenizer_file(model, files)
    descriptor = _derived(
        json.dumps(config, sort_keys=True),
        name,
        cache.block_size,
        _ELEMENT_TYPES[kind],
        tuple(_identity(path) for path in weight_files(files)),
        _identity(tokenizer),
    )
    told = _told(model, config)
    others = {**descriptor.other_members, "run_with": told} if told else descriptor.other_members
    return attrs.evolve(descriptor, other_members=others)


def _told(model: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what may change the values in the cache and is not in the model's files: it goes into a member
    of ours.

    Overrides are all of it, since vLLM does not heed each of them: RoPE's base keeps the value of the files.
    """
    told = dict(model.hf_overrides or {})
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        # vLLM takes one list of factors for all of a run, by the longest context that it is to serve.
        trained = rope.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings"
        )
        if trained is None:
            raise LocalProtocolError(
                "model configuration, original_max_position_embeddings: is missing, and decides which"
                " factors of longrope are used"
            )
        told["longrope"] = "long" if model.max_model_len > trained else "short"
    return told


@functools.lru_cache(maxsize=8)
def _derived(
    config: str,
    name: str,
    block_tokens: int,
    kv_dtype: str,
    weights: tuple[FileState, ...],
    tokenizer: FileState,
) -> CompatibilityDescriptor:
    """Derive a descriptor; kept, since both sides of the connector need it and reading weights takes a
    second a gigabyte."""
    return derive_descriptor(
        json.loads(config),
        model=name,
        weights={Path(path).name: file_pieces(Path(path)) for path, _, _ in weights},
        tokenizer=file_pieces(Path(tokenizer[0])),
        block_tokens=block_tokens,
        kv_dtype=kv_dtype,
    )


def _model_directory(model: Any) -> Path:
    """Return where the model's files are: the directory vLLM was given, or the local copy of what it
    names."""
    given = Path(model.model)
    if given.is_dir():
        return given
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except Exception as error:
        raise LocalProtocolError(
            f"model_dir: the files of {model.model} are not here ({type(error).__name__}); say where they are"
        ) from None


def _tokenizer_file(model: Any, files: Path) -> Path:
    given = Path(model.tokenizer) if model.tokenizer and Path(model.tokenizer).is_dir() else files
    path = given / "tokenizer.json"
    if not path.is_file():
        raise LocalProtocolError(f"{given} has no tokenizer.json, whose digest is a part of the descriptor")
    return path


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise LocalProtocolError(f"{path}: there is no such file; say model_dir") from None
    except ValueError as error:
        raise LocalProtocolError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise LocalProtocolError(f"{path}: expected a JSON object")
    return found


def _identity(path: Path) -> FileState:
    try:
        status = path.stat()
    except OSError:
        raise LocalProtocolError(f"{path}: there is no such file") from None
    return str(path), status.st_size, status.st_mtime_ns


# Its requests -------------------------------------------------------------------------------------


class Sharing:
    """Which descriptor and scope each request has, or why it has none.

    `expected` are the descriptors of the deployment, where it names any. Raises `LocalProtocolError`,
    naming the member that differs, where the engine's own is none of them.
    """

    def __init__(
        self,
        descriptor: CompatibilityDescriptor,
        scope_key_file: Path,
        expected: Sequence[CompatibilityDescriptor] = (),
    ) -> None:
        self.descriptor = descriptor
        self._key = read_secret(scope_key_file)
        self._scope = Scope(self._key)
        self._expected = tuple(expected)
        if self._expected and not any(_without_adapters(each) == descriptor for each in self._expected):
            raise LocalProtocolError(_difference(descriptor, self._expected[0]))
        self._adapted: dict[tuple[FileState, ...], CompatibilityDescriptor] = {}
        self._loaded: dict[int, str] = {}
        """The compatibility ID of each of vLLM's adapters when first used; that used last comes last."""

    def of(self, request: Any) -> tuple[Scope, CompatibilityDescriptor]:
        """Return the scope and descriptor of a request. Raises `NotShared`."""
        if request.mm_features:
            raise NotShared("multimodal", "its tokens do not say what images or sounds it has")
        if getattr(request, "prompt_embeds", None) is not None or request.prompt_token_ids is None:
            raise NotShared("prompt-embeddings", "its prompt has embeddings, not tokens")
        if request.pooling_params is not None:
            raise NotShared("pooling", "it does not generate")
        descriptor = (
            self.descriptor if request.lora_request is None else self._with_adapter(request.lora_request)
        )
        if self._expected and descriptor not in self._expected:
            raise NotShared("descriptor", _difference(descriptor, self._expected[0]))
        salt = request.cache_salt
        return (salted_scope(self._key, salt) if salt else self._scope), descriptor

    def _with_adapter(self, lora: Any) -> CompatibilityDescriptor:
        """Return the engine's descriptor with a LoRA adapter, by the digests of its weights and
        configuration."""
        if getattr(lora, "load_inplace", False):
            raise NotShared(
                "adapter", f"adapter {lora.lora_name} is replaced in place, so its files say nothing"
            )
        directory = Path(lora.lora_path)
        try:
            weights = sorted(directory.glob("adapter_model.safetensors"))
            if not weights:
                raise LocalProtocolError(f"{directory} has no adapter_model.safetensors")
            files = (*weights, directory / "adapter_config.json")
            name = tuple(_identity(path) for path in files)
            if name not in self._adapted:
                if len(self._adapted) >= _ADAPTERS:
                    del self._adapted[next(iter(self._adapted))]
                self._adapted[name] = self._derive(weights, files[-1])
            descriptor = self._adapted[name]
            first = self._loaded.pop(lora.lora_int_id, descriptor.compat_id)
            if len(self._loaded) >= _LOADED:
                del self._loaded[next(iter(self._loaded))]
            self._loaded[lora.lora_int_id] = first
            if first != descriptor.compat_id:
                raise LocalProtocolError("its files have changed since vLLM loaded it; load it anew")
            return descriptor
        except (KVSPError, OSError) as error:
            raise NotShared("adapter", f"adapter {lora.lora_name}: {error}") from None

    def _derive(self, weights: Sequence[Path], config: Path) -> CompatibilityDescriptor:
        # What scales an adapter is in its configuration, so that is a part of the identity, as a member of
        # ours.
        configuration = digest_of_files({"adapter_config": file_pieces(config)})
        return attrs.evolve(
            self.descriptor,
            adapters=(digest_of_files({path.name: file_pieces(path) for path in weights}),),
            other_members={**self.descriptor.other_members, "adapter_configs": (configuration,)},
        )


def _without_adapters(descriptor: CompatibilityDescriptor) -> CompatibilityDescriptor:
    others = {name: value for name, value in descriptor.other_members.items() if name != "adapter_configs"}
    return attrs.evolve(descriptor, adapters=(), other_members=others)


def _difference(own: CompatibilityDescriptor, expected: CompatibilityDescriptor) -> str:
    """Return in one line how two descriptors differ: the first member, and both its values."""
    mine, theirs = _flat(own.members()), _flat(expected.members())
    ours = own.other_members.keys() | expected.other_members.keys()
    # The digest last: where the weights are others, something that says more often is as well. What the
    # protocol names comes before what this project adds to it.
    names = sorted(
        mine.keys() | theirs.keys(),
        key=lambda name: (name.endswith("_digest"), name.partition(".")[0] in ours, name),
    )
    for name in names:
        has, wants = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if has != wants:
            return f"{name}: this engine has {has}, the deployment's descriptor says {wants}"
    return "the descriptors are equal"


def _flat(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return members, and those of members that are objects by their paths."""
    found: dict[str, Any] = {}
    for name, value in members.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            found[name] = value
    return found
