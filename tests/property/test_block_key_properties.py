"""Block keys against the protocol's formula, over any tokens, forms and splits."""

from __future__ import annotations

import hmac
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp_core.block_keys import BlockKeyChain, block_keys
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_sim.strategies.values import descriptors, tokens


def by_the_formula(key: bytes, made_with: CompatibilityDescriptor, sequence: list[int]) -> list[bytes]:
    size, previous, keys = made_with.block_tokens, bytes(32), []
    for start in range(0, len(sequence) - size + 1, size):
        message = b"KVSP-BLOCK-1\0" + bytes.fromhex(made_with.compat_id) + previous
        for token in sequence[start : start + size]:
            message += token.to_bytes(4, "big")
        previous = hmac.digest(key, message, "sha256")
        keys.append(previous)
    return keys


@pytest.mark.requirement("SK-2", "SK-3")
@given(
    key=st.binary(min_size=32, max_size=100),
    made_with=descriptors(),
    sequence=st.lists(tokens),
    data=st.data(),
)
def test_keys_are_those_of_the_formula_in_any_form_and_split(
    key: bytes, made_with: CompatibilityDescriptor, sequence: list[int], data: st.DataObject
) -> None:
    expected = by_the_formula(key, made_with, sequence)
    scope = Scope(key)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sequence)), max_size=6)))
    chain, keys = BlockKeyChain(scope, made_with), []
    for start, end in zip([0, *cuts], [*cuts, len(sequence)], strict=True):
        part = sequence[start:end]
        forms = (
            part,
            tuple(part),
            iter(part),
            array("Q", part),
            np.array(part, np.uint32),
            np.array(part, ">i8"),
        )
        keys += chain.feed(data.draw(st.sampled_from(forms)))
    assert keys == expected
    assert list(chain.tail) == sequence[len(expected) * made_with.block_tokens :]
    assert chain.parent == (expected[-1] if expected else None)


@pytest.mark.requirement("SK-3")
@given(made_with=descriptors(), sequence=st.lists(tokens, max_size=30), more=st.lists(tokens, max_size=30))
def test_a_chain_continued_is_the_chain_of_the_whole(
    made_with: CompatibilityDescriptor, sequence: list[int], more: list[int]
) -> None:
    scope = Scope(bytes(32))
    first = BlockKeyChain(scope, made_with)
    keys = first.feed(sequence)
    rest, tail = block_keys(scope, made_with, [*first.tail, *more], parent=first.parent)
    assert (keys + rest, tail) == block_keys(scope, made_with, sequence + more)
