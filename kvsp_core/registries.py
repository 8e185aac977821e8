"""The registries of the protocol with their initial contents (section "KVSP Registries", requirements RG-1,
RG-2).

A `Registry` is a value: adding an entry gives a new registry, which the embedder hands to whatever reads
with it, so two embedders in one process never disturb each other. `Registries` bundles the ones that
reading depends on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Generic, TypeVar

import attrs

from kvsp_core.errors import LocalProtocolError

__all__ = [
    "BLOCK_MEDIA_TYPE",
    "CODECS",
    "ELEMENT_TYPES",
    "INITIAL_REGISTRIES",
    "INSTANCE_STATES",
    "JSON_MEDIA_TYPE",
    "LAYOUT_1",
    "POSITIONAL_ENCODINGS",
    "PROBLEM_MEDIA_TYPE",
    "RAW_CODEC",
    "STORAGE_TIERS",
    "Codec",
    "ElementType",
    "InstanceState",
    "PositionalEncoding",
    "Registries",
    "Registry",
    "StorageTier",
    "tier_rank",
]

Key = TypeVar("Key")
Entry = TypeVar("Entry")

JSON_MEDIA_TYPE: Final = "application/kvsp+json"
"""The media type of every body that is neither block data nor a problem."""

BLOCK_MEDIA_TYPE: Final = "application/kvsp-block"
"""The media type of a KV block container."""

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"
"""The media type of a refusal (RFC 9457)."""

LAYOUT_1: Final = "kvsp-layout-1"
"""The layout of codec raw: token slowest, dimension fastest, little endian, K after positional encoding."""


def _read_only(entries: Mapping[Key, Entry]) -> Mapping[Key, Entry]:
    return MappingProxyType(dict(entries))


@attrs.frozen(eq=False, repr=False)
class Registry(Mapping[Key, Entry], Generic[Key, Entry]):
    """An immutable table of registered names or numbers and what each stands for."""

    title: str
    _entries: Mapping[Key, Entry] = attrs.field(converter=_read_only)

    def __getitem__(self, key: Key) -> Entry:
        return self._entries[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<Registry {self.title}: {len(self)} entries>"

    def __reduce__(self) -> tuple[object, ...]:
        return Registry, (self.title, dict(self._entries))

    def with_entry(self, key: Key, entry: Entry) -> Registry[Key, Entry]:
        """Return a registry that has one entry more. A key that is already there is an error."""
        if key in self._entries:
            raise LocalProtocolError(f"{self.title}: {key!r} is registered already; choose another")
        return Registry(self.title, {**self._entries, key: entry})


def _check_name(instance: object, attribute: object, name: str) -> None:
    if re.fullmatch(r"[a-z0-9-]{1,32}", name, re.ASCII) is None:
        raise LocalProtocolError(
            f"{type(instance).__name__} {name!r}: a name is 1 to 32 lowercase letters, digits or '-'"
        )


def _raw_section_bytes(elements: int, element_bytes: int) -> int:
    return elements * element_bytes


@attrs.frozen(kw_only=True)
class Codec:
    """How the K and V sections of a container are encoded.

    `section_bytes` returns the octets of one section that holds the given number of elements of the given
    size, so that a decoder can refuse a section of another size; None where a codec's sections vary in
    size. Values from 0xFF00 on are for private use; 0 is reserved.
    """

    value: int
    name: str = attrs.field(validator=_check_name)
    description: str
    section_bytes: Callable[[int, int], int] | None = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.value <= 0xFFFF:
            raise LocalProtocolError(f"codec {self.name!r}: value {self.value} is not within 1..65535")


@attrs.frozen(kw_only=True)
class ElementType:
    """An element type of stored caches. `dtype` names the numpy or ml_dtypes type of the same octets."""

    name: str = attrs.field(validator=_check_name)
    size_bytes: int
    dtype: str
    description: str


@attrs.frozen(kw_only=True)
class PositionalEncoding:
    """A positional encoding: `parameter_syntax` is the regular expression of what may follow the ``;``.

    An empty syntax means that the encoding has no parameters.
    """

    name: str = attrs.field(validator=_check_name)
    parameter_syntax: str = ""
    description: str


@attrs.frozen(kw_only=True)
class StorageTier:
    """A class of storage at a holder. A lower `rank` is faster."""

    name: str = attrs.field(validator=_check_name)
    rank: int
    description: str


@attrs.frozen(kw_only=True)
class InstanceState:
    """A state that an inference instance reports or is asked to be in."""

    name: str = attrs.field(validator=_check_name)
    description: str


RAW_CODEC: Final = 0x0001
"""The value of codec ``raw``."""

CODECS: Final[Registry[int, Codec]] = Registry(
    "KVSP Codecs",
    {
        RAW_CODEC: Codec(
            value=RAW_CODEC,
            name="raw",
            description="uncompressed elements in layout kvsp-layout-1",
            section_bytes=_raw_section_bytes,
        )
    },
)

ELEMENT_TYPES: Final[Registry[str, ElementType]] = Registry(
    "KVSP Element Types",
    {
        kind.name: kind
        for kind in (
            ElementType(name="bf16", size_bytes=2, dtype="bfloat16", description="bfloat16"),
            ElementType(name="fp16", size_bytes=2, dtype="float16", description="IEEE 754 binary16"),
            ElementType(name="fp32", size_bytes=4, dtype="float32", description="IEEE 754 binary32"),
            ElementType(
                name="fp8-e4m3", size_bytes=1, dtype="float8_e4m3fn", description="8 bits, 4 of exponent"
            ),
            ElementType(
                name="fp8-e5m2", size_bytes=1, dtype="float8_e5m2", description="8 bits, 5 of exponent"
            ),
        )
    },
)

POSITIONAL_ENCODINGS: Final[Registry[str, PositionalEncoding]] = Registry(
    "KVSP Positional Encodings",
    {
        "rope": PositionalEncoding(
            name="rope",
            parameter_syntax=r"theta=[1-9][0-9]*(?:,scaling=[A-Za-z0-9][A-Za-z0-9._-]*)?",
            description="rotary position embedding",
        ),
        "none": PositionalEncoding(name="none", description="K as projected, without positions"),
    },
)

STORAGE_TIERS: Final[Registry[str, StorageTier]] = Registry(
    "KVSP Storage Tiers",
    {
        tier.name: tier
        for tier in (
            StorageTier(name="device", rank=0, description="accelerator memory"),
            StorageTier(name="host", rank=1, description="host memory, pinned memory included"),
            StorageTier(name="remote-memory", rank=2, description="disaggregated memory pool"),
            StorageTier(name="local-storage", rank=3, description="storage attached to the holder"),
            StorageTier(name="remote-storage", rank=4, description="networked storage"),
        )
    },
)

INSTANCE_STATES: Final[Registry[str, InstanceState]] = Registry(
    "KVSP Instance States",
    {
        state.name: state
        for state in (
            InstanceState(name="active", description="serves and accepts sessions"),
            InstanceState(name="draining", description="completes its sessions and accepts none"),
            InstanceState(name="sleeping", description="has no session and waits to be woken"),
            InstanceState(name="failed", description="its status record has expired"),
        )
    },
)


def tier_rank(name: str, tiers: Mapping[str, StorageTier] = STORAGE_TIERS) -> int:
    """Return how slow a tier is, 0 being the fastest. A tier that is not registered counts as the slowest."""
    tier = tiers.get(name)
    return tier.rank if tier is not None else max((known.rank for known in tiers.values()), default=0) + 1


@attrs.frozen(kw_only=True)
class Registries:
    """The registries that reading depends on. An embedder that registers more hands its own bundle around."""

    codecs: Registry[int, Codec] = CODECS
    element_types: Registry[str, ElementType] = ELEMENT_TYPES
    positional_encodings: Registry[str, PositionalEncoding] = POSITIONAL_ENCODINGS


INITIAL_REGISTRIES: Final = Registries()
"""The registries with the contents the protocol defines."""
