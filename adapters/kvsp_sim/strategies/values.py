"""Strategies for names, keys and containers, and for octets that something happened to on the way."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvsp_core.container import ContainerHeader, encode_container
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.registries import ELEMENT_TYPES

__all__ = [
    "any_json",
    "containers",
    "descriptors",
    "json_values",
    "mutated",
    "scopes",
    "splits",
    "tokens",
]

digests = st.binary(min_size=32, max_size=32).map(lambda octets: "sha-256:" + octets.hex())
scopes = st.binary(min_size=32, max_size=80).map(Scope)
tokens = st.integers(0, 2**32 - 1) | st.integers(0, 3) | st.sampled_from((2**31 - 1, 2**31, 2**32 - 1))

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not 2**53 <= abs(x) < 1e21)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
"""JSON values that a descriptor may hold under a name of a later version."""


@st.composite
def descriptors(draw: st.DrawFn) -> CompatibilityDescriptor:
    """Return descriptors of small models, with and without adapters, parameters and further members."""
    theta = draw(st.integers(1, 10**9))
    return CompatibilityDescriptor(
        model=draw(st.text(min_size=1, max_size=8)),
        model_digest=draw(digests),
        tokenizer_digest=draw(digests),
        adapters=tuple(draw(st.lists(digests, max_size=2))),
        layers=draw(st.integers(1, 5)),
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 4)),
        kv_dtype=draw(st.sampled_from(sorted(ELEMENT_TYPES))),
        positional=draw(
            st.sampled_from(("none", "rope", f"rope;theta={theta}", f"rope;theta={theta},scaling=yarn"))
        ),
        block_tokens=draw(st.integers(1, 5)),
        other_members=draw(st.dictionaries(st.text(max_size=8).map("ext_".__add__), json_values, max_size=2)),
    )


@st.composite
def containers(
    draw: st.DrawFn,
) -> tuple[CompatibilityDescriptor | None, ContainerHeader, list[tuple[bytes, bytes]], bytes]:
    """Return a descriptor or none, a header that fits it, the sections of its layers, and the container."""
    made_with = draw(st.none() | descriptors())
    if made_with is None:
        sizes = st.tuples(st.integers(0, 40), st.integers(0, 40))
        header = ContainerHeader(
            codec=draw(st.integers(1, 0xFFFF)),
            first_layer=draw(st.integers(0, 2**32 - 10)),
            token_count=draw(st.integers(1, 2**32 - 1)),
            sections=tuple(draw(st.lists(sizes, min_size=1, max_size=6))),
        )
    else:
        first = draw(st.integers(0, made_with.layers - 1))
        count = draw(st.integers(1, made_with.layers - first))
        header = ContainerHeader.for_layers(made_with, first_layer=first, layer_count=count)
    layers = [
        (draw(st.binary(min_size=k, max_size=k)), draw(st.binary(min_size=v, max_size=v)))
        for k, v in header.sections
    ]
    return made_with, header, layers, b"".join(encode_container(header, layers))


@st.composite
def mutated(draw: st.DrawFn, octets: bytes) -> bytes:
    """Return the octets with up to three things happened to them: changed, lost, repeated, added, cut off."""
    changed = bytearray(octets)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(changed)))
        end = draw(st.integers(start, min(len(changed), start + 20)))
        match draw(st.integers(0, 4)):
            case 0 if start < len(changed):
                changed[start] = draw(st.integers(0, 255))
            case 1:
                del changed[start:end]
            case 2:
                changed[start:start] = changed[start:end]
            case 3:
                changed[start:start] = draw(st.binary(min_size=1, max_size=12))
            case _:
                del changed[start:]
    return bytes(changed)


@st.composite
def splits(draw: st.DrawFn, octets: bytes) -> list[bytes]:
    """Return the octets in pieces, empty ones included."""
    cuts = sorted(draw(st.lists(st.integers(0, len(octets)), max_size=12)))
    return [octets[start:end] for start, end in zip([0, *cuts], [*cuts, len(octets)], strict=True)]


def any_json() -> st.SearchStrategy[Any]:
    """Return values that JSON can and cannot carry, for readers that have to refuse some."""
    return json_values | st.floats() | st.integers() | st.binary(max_size=4) | st.complex_numbers()
