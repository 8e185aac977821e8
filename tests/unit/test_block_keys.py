"""Block keys: a chain of keys over complete blocks, from tokens of any form and in any pieces."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvsp_core.block_keys import KEY_BYTES, BlockKeyChain, block_keys
from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor, Scope
from tests.hash_seeds import printed
from tests.unit.test_identity import descriptor

SCOPE = Scope(bytes(range(32)))
MODEL = descriptor(block_tokens=4)

INTEGER_DTYPES = [
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *(">i2", ">i4", ">i8", ">u2", ">u4", ">u8"),
]


def keys(tokens: Any, made_with: CompatibilityDescriptor = MODEL) -> list[bytes]:
    return block_keys(SCOPE, made_with, tokens)[0]


# Blocks and tails ---------------------------------------------------------------------------------


@pytest.mark.requirement("SK-3")
def test_only_complete_blocks_have_keys() -> None:
    found, tail = block_keys(SCOPE, descriptor(block_tokens=16), range(40))
    assert [len(key) for key in found] == [KEY_BYTES, KEY_BYTES]
    assert tail == tuple(range(32, 40))


@pytest.mark.requirement("SK-3")
def test_a_tail_is_completed_later() -> None:
    chain = BlockKeyChain(SCOPE, MODEL)
    assert chain.feed([1, 2, 3]) == []
    assert (chain.tail, chain.parent) == ((1, 2, 3), None)
    (first,) = chain.feed([4, 5])
    assert (chain.tail, chain.parent) == ((5,), first)
    assert [first, *chain.feed([6, 7, 8, 9])] == keys(range(1, 9))


@pytest.mark.requirement("SK-2")
def test_a_key_depends_on_everything_before_it() -> None:
    plain = keys([1, 2, 3, 4, 5, 6, 7, 8])
    assert keys([9, 2, 3, 4, 5, 6, 7, 8])[1] != plain[1]
    assert keys([1, 2, 3, 4, 5, 6, 7, 9])[0] == plain[0]
    assert len({*plain, *keys([5, 6, 7, 8])}) == 3


@pytest.mark.requirement("SK-2", "SK-4")
def test_keys_of_different_scopes_and_descriptors_are_unrelated() -> None:
    tokens = [1, 2, 3, 4]
    others = [
        block_keys(Scope(bytes(32)), MODEL, tokens)[0],
        keys(tokens, descriptor(block_tokens=4, adapters=("sha-256:" + "0" * 64,))),
        keys(tokens, descriptor(block_tokens=4, kv_dtype="fp16")),
        keys(tokens),
    ]
    assert len({key for (key,) in others}) == 4


@pytest.mark.requirement("SK-3")
def test_a_chain_continues_from_any_earlier_key() -> None:
    tokens = list(range(100, 140))
    found = keys(tokens)
    for blocks, parent in enumerate(found[:-1], start=1):
        assert block_keys(SCOPE, MODEL, tokens[4 * blocks :], parent=parent) == (found[blocks:], ())


@pytest.mark.parametrize("parent", [b"", bytes(31), bytes(33), "00" * 32, 7])
def test_a_parent_is_a_key_of_32_octets(parent: Any) -> None:
    with pytest.raises(LocalProtocolError, match="32 octets"):
        BlockKeyChain(SCOPE, MODEL, parent=parent)


@pytest.mark.requirement("SK-3")
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 100])
def test_the_result_does_not_depend_on_how_tokens_are_split(size: int) -> None:
    tokens = [(7919 * i) % 50021 for i in range(103)]
    chain = BlockKeyChain(SCOPE, MODEL)
    found = [key for start in range(0, 103, size) for key in chain.feed(tokens[start : start + size])]
    assert (found, chain.tail) == block_keys(SCOPE, MODEL, tokens)


@pytest.mark.requirement("SK-2", "SK-3")
@pytest.mark.parametrize("seed", ["0", "1", "4242", "random"])
def test_the_result_does_not_depend_on_the_process(seed: str) -> None:
    program = (
        "from tests.unit.test_block_keys import *; "
        "print([key.hex() for key in keys(range(40))], descriptor().compat_id)"
    )
    assert printed(program, seed) == f"{[key.hex() for key in keys(range(40))]} {descriptor().compat_id}\n"


# Forms of tokens ----------------------------------------------------------------------------------


def generated(tokens: Any) -> Iterator[Any]:
    yield from tokens


class Word(enum.IntEnum):
    FIRST = 1
    SECOND = 2


FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": generated,
    "list of numpy integers": lambda tokens: [numpy_integer(token) for token in tokens],
    "numpy array of objects": lambda tokens: np.array(tokens, dtype=object),
}


def numpy_integer(token: Any) -> Any:
    return np.int64(token) if type(token) is int and -(2**63) <= token < 2**63 else token


@pytest.mark.requirement("SK-3")
@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_the_same_tokens_give_the_same_keys(form: str) -> None:
    tokens = [0, 1, 127, 128, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    assert keys(FORMS[form](tokens)) == keys(array("L", tokens))


@pytest.mark.requirement("SK-3")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [-1, -(2**31), 2**32, 2**40, 2**63, 2**64, -(2**70)], ids=hex)
def test_values_outside_uint32_are_refused_in_every_form(form: str, value: int) -> None:
    chain = BlockKeyChain(SCOPE, MODEL)
    chain.feed([5])
    with pytest.raises(LocalProtocolError, match=r"^tokens\[2\]: expected an integer from 0 to 4294967295$"):
        chain.feed(FORMS[form]([1, 2, value, 3]))
    assert chain.tail == (5,)


@pytest.mark.requirement("SK-3")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "value", [True, False, np.bool_(True), 1.0, np.float64(1), "1", b"1", None, [1], 1j], ids=repr
)
def test_booleans_floats_and_other_things_are_refused_in_every_form(form: str, value: object) -> None:
    tokens: list[Any] = [1, 2, 3]
    holder = FORMS[form]([*tokens, 0])
    if isinstance(holder, np.ndarray):
        holder[3] = value
    else:
        holder = FORMS[form]([*tokens, value])
    with pytest.raises(LocalProtocolError, match=r"^tokens\[3\]: expected an integer, found "):
        keys(holder)


@pytest.mark.requirement("SK-3")
def test_integers_of_other_types_are_integers() -> None:
    assert keys([Word.FIRST, Word.SECOND, np.uint8(3), np.int64(4)]) == keys([1, 2, 3, 4])


@pytest.mark.requirement("SK-3")
@pytest.mark.parametrize("dtype", INTEGER_DTYPES)
@pytest.mark.parametrize("form", ["array", "strided array", "memoryview"])
def test_numpy_arrays_of_every_integer_type(dtype: str, form: str) -> None:
    kind = np.dtype(dtype)
    highest = min(int(np.iinfo(kind).max), 2**32 - 1)
    tokens = [0, 1, highest - 1, highest]
    held = np.array(tokens, dtype=kind)
    if form == "strided array":
        held = np.repeat(held, 3)[::3]
    given = memoryview(held) if form == "memoryview" else held
    assert keys(given) == keys(tokens)
    for value in (-1, 2**32):
        if np.iinfo(kind).min <= value <= np.iinfo(kind).max:
            wrong = np.array([*tokens[:2], value], dtype=kind)
            with pytest.raises(LocalProtocolError, match=r"^tokens\[2\]: expected an integer from 0"):
                keys(memoryview(wrong) if form == "memoryview" else wrong)


@pytest.mark.requirement("SK-3")
@pytest.mark.parametrize("code", "bBhHiIlLqQ")
def test_arrays_and_memoryviews_of_every_integer_type(code: str) -> None:
    tokens = array(code, [1, 2, 3, 100, 5, 6, 7, 8])
    assert keys(tokens) == keys(list(tokens))
    assert keys(memoryview(tokens)) == keys(list(tokens))
    assert keys(memoryview(tokens)[::2]) == keys([1, 3, 5, 7])
    if code.islower():
        with pytest.raises(LocalProtocolError, match=r"^tokens\[1\]: expected an integer from 0"):
            keys(array(code, [1, -1]))


@pytest.mark.requirement("SK-3")
@pytest.mark.parametrize("dtype", ["bool", "float16", "float64", "complex128", "datetime64[s]", "S4", "U4"])
def test_arrays_of_other_types_are_refused_even_when_empty(dtype: str) -> None:
    for held in (np.zeros(4, dtype=dtype), np.zeros(0, dtype=dtype)):
        if len(held) or dtype not in ("datetime64[s]", "U4"):
            with pytest.raises(LocalProtocolError, match="tokens"):
                keys(held)


@pytest.mark.parametrize(
    "tokens",
    ["1234", b"1234", bytearray(4), {1, 2, 3, 4}, {1: 2}, 7, None, 1.5, object()],
    ids=lambda tokens: type(tokens).__name__,
)
def test_what_is_no_sequence_of_tokens(tokens: Any) -> None:
    with pytest.raises(LocalProtocolError, match="tokens are integers in order, found"):
        keys(tokens)


def test_tokens_have_one_dimension() -> None:
    with pytest.raises(LocalProtocolError, match="2 dimensions"):
        keys(np.zeros((2, 4), dtype=np.int32))
    with pytest.raises(LocalProtocolError, match="0 dimensions"):
        keys(np.array(7))


@pytest.mark.parametrize(
    "empty", [[], (), array("I"), array("q"), np.zeros(0, np.int64), memoryview(array("I"))]
)
def test_no_tokens_give_no_keys(empty: Any) -> None:
    assert block_keys(SCOPE, MODEL, empty) == ([], ())


def test_the_callers_tokens_stay_as_they_are() -> None:
    held, words = np.arange(8, dtype=np.uint32), array("I", range(8))
    assert keys(held) == keys(words)
    assert (held.tolist(), words.tolist()) == (list(range(8)), list(range(8)))


def test_a_huge_block_size_costs_nothing() -> None:
    assert block_keys(SCOPE, descriptor(block_tokens=2**32 - 1), [1, 2, 3]) == ([], (1, 2, 3))


def test_a_chain_shows_no_token_and_no_key() -> None:
    chain = BlockKeyChain(SCOPE, MODEL)
    (key,) = chain.feed([777, 777, 777, 777, 777])
    assert repr(chain) == "<BlockKeyChain: 1 tokens in the tail>"
    assert key.hex() not in repr(chain)
