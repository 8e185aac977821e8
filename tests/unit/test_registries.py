"""The registries: what the protocol defines, and how a program adds to it without disturbing others."""

from __future__ import annotations

import pickle

import attrs
import pytest

from kvsp_core.errors import LocalProtocolError
from kvsp_core.problems import PROBLEM_TYPES
from kvsp_core.registries import (
    BLOCK_MEDIA_TYPE,
    CODECS,
    ELEMENT_TYPES,
    INSTANCE_STATES,
    JSON_MEDIA_TYPE,
    POSITIONAL_ENCODINGS,
    STORAGE_TIERS,
    Codec,
    ElementType,
    Registry,
    StorageTier,
    tier_rank,
)


@pytest.mark.requirement("RG-1")
@pytest.mark.parametrize(
    ("registry", "contents"),
    [
        (CODECS, [1]),
        (ELEMENT_TYPES, ["bf16", "fp16", "fp32", "fp8-e4m3", "fp8-e5m2"]),
        (POSITIONAL_ENCODINGS, ["none", "rope"]),
        (STORAGE_TIERS, ["device", "host", "local-storage", "remote-memory", "remote-storage"]),
        (INSTANCE_STATES, ["active", "draining", "failed", "sleeping"]),
    ],
    ids=lambda value: getattr(value, "title", ""),
)
def test_initial_contents(registry: Registry[object, object], contents: list[object]) -> None:
    assert sorted(registry) == contents  # type: ignore[type-var]


@pytest.mark.requirement("RG-1")
def test_problem_types_are_a_registry_too() -> None:
    assert len(PROBLEM_TYPES) == 9


@pytest.mark.requirement("RG-1")
def test_element_sizes() -> None:
    sizes = {name: kind.size_bytes for name, kind in ELEMENT_TYPES.items()}
    assert sizes == {"bf16": 2, "fp16": 2, "fp32": 4, "fp8-e4m3": 1, "fp8-e5m2": 1}


@pytest.mark.requirement("RG-2")
def test_media_types() -> None:
    assert (JSON_MEDIA_TYPE, BLOCK_MEDIA_TYPE) == ("application/kvsp+json", "application/kvsp-block")


@pytest.mark.requirement("RG-1", "KC-6")
def test_an_entry_is_added_to_a_new_registry_only() -> None:
    mine = Codec(value=0xFF00, name="my-codec", description="for private use")
    extended = CODECS.with_entry(mine.value, mine)
    assert extended[0xFF00] is mine
    assert 0xFF00 not in CODECS
    assert extended != CODECS


@pytest.mark.requirement("RG-1")
def test_an_entry_is_never_replaced() -> None:
    with pytest.raises(LocalProtocolError, match="registered already"):
        CODECS.with_entry(1, Codec(value=1, name="other", description=""))


def test_a_registry_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        CODECS[2] = CODECS[1]  # type: ignore[index]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        CODECS.title = "mine"  # type: ignore[misc]
    entries = {1: "one"}
    registry = Registry("numbers", entries)
    entries[2] = "two"
    assert 2 not in registry


def test_a_registry_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(STORAGE_TIERS)) == STORAGE_TIERS


@pytest.mark.requirement("RG-1")
@pytest.mark.parametrize("name", ["", "Raw", "raw_2", "a" * 33, "caf\u00e9", "raw\n"])
def test_names_are_lowercase_letters_digits_and_hyphens(name: str) -> None:
    with pytest.raises(LocalProtocolError, match="1 to 32 lowercase letters"):
        Codec(value=2, name=name, description="")
    with pytest.raises(LocalProtocolError, match="1 to 32 lowercase letters"):
        ElementType(name=name, size_bytes=1, dtype="int8", description="")


@pytest.mark.requirement("RG-1")
@pytest.mark.parametrize("value", [0, -1, 0x10000])
def test_codec_values_have_sixteen_bits_and_zero_is_reserved(value: int) -> None:
    with pytest.raises(LocalProtocolError, match=r"not within 1\.\.65535"):
        Codec(value=value, name="mine", description="")


def test_tiers_from_fast_to_slow_and_unknown_ones_slowest() -> None:
    names = ["remote-storage", "tape", "host", "device", "local-storage", "remote-memory"]
    assert sorted(names, key=tier_rank) == [
        *("device", "host", "remote-memory", "local-storage", "remote-storage"),
        "tape",
    ]
    tape = StorageTier(name="tape", rank=9, description="")
    assert tier_rank("tape", STORAGE_TIERS.with_entry("tape", tape)) == 9


def test_a_registry_shows_itself_in_one_line() -> None:
    assert repr(STORAGE_TIERS) == "<Registry KVSP Storage Tiers: 5 entries>"
