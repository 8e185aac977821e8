"""The Compatibility Descriptor of a model directory of the Hugging Face kind (requirements CD-3 and CD-7)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvsp_client.files import file_pieces
from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.model_config import derive_descriptor

__all__ = ["DEFAULT_BLOCK_TOKENS", "descriptor_of_directory", "model_files", "weight_files"]

DEFAULT_BLOCK_TOKENS: Final = 16
_INDEX: Final = "model.safetensors.index.json"
_DERIVED: Final = "kvsp-"
"""Files that `kvsp model prepare` derives from the weights begin so; they are no weight files."""


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files: those its index names, or every safetensors file."""
    index = directory / _INDEX
    if index.exists():
        names = _object(index).get("weight_map")
        if not isinstance(names, Mapping) or not names:
            raise LocalProtocolError(f"{index} names no weight files in weight_map")
        files = [directory / str(name) for name in sorted({str(name) for name in names.values()})]
        if len({path.name for path in files}) < len(files):
            raise LocalProtocolError(f"{index}: several weight files have one name, by which they are known")
        if missing := next((path for path in files if not path.is_file()), None):
            raise LocalProtocolError(f"{index} names {missing.name}, which is not there")
        return files
    found = sorted(p for p in directory.glob("*.safetensors") if not p.name.startswith(_DERIVED))
    if not found:
        raise LocalProtocolError(f"{directory} has no *.safetensors files; name the directory of a model")
    return found


def model_files(directory: Path) -> tuple[Mapping[str, object], list[Path], Path]:
    """Return what config.json of a model directory says, its weight files, and its tokenizer's file.

    Raises `LocalProtocolError` where one of them is not there, or config.json holds no JSON object.
    """
    config, tokenizer = directory / "config.json", directory / "tokenizer.json"
    for path in (config, tokenizer):
        if not path.is_file():
            raise LocalProtocolError(f"{directory} has no {path.name}; name the directory of a model")
    return _object(config), weight_files(directory), tokenizer


def descriptor_of_directory(
    directory: Path,
    *,
    model: str | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    kv_dtype: str | None = None,
) -> CompatibilityDescriptor:
    """Return the descriptor of the model in a directory; its files are read once, in pieces.

    `model` is by default the name of the directory. All parties have to use the same (CD-8), and the same
    `block_tokens` and `kv_dtype`.
    """
    config, weights, tokenizer = model_files(directory)
    return derive_descriptor(
        config,
        model=model if model is not None else directory.resolve().name,
        weights={path.name: file_pieces(path) for path in weights},
        tokenizer=file_pieces(tokenizer),
        block_tokens=block_tokens,
        kv_dtype=kv_dtype,
    )


def _object(path: Path) -> Mapping[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise LocalProtocolError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, Mapping):
        raise LocalProtocolError(f"{path}: expected a JSON object")
    return found
