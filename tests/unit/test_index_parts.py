"""An index in several parts: which of them a key belongs to, and how their answers are joined."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp_core.errors import RemoteProtocolError
from kvsp_core.index_parts import IndexParts
from kvsp_core.messages import LookupAnswer, LookupRequest, MatchedBlock
from kvsp_core.records import ReplicaRecord, Residency
from kvsp_core.validation import InvalidValue

A, B, C = "https://is-a.example/", "https://is-b.example/", "https://is-c.example/"
COMPAT, SCOPE = "c" * 64, "5" * 32
KEYS = tuple(hashlib.sha256(b"%d" % number).hexdigest() for number in range(3000))


def record(key: str) -> ReplicaRecord:
    return ReplicaRecord(
        block_key=key,
        compat_id=COMPAT,
        scope_id=SCOPE,
        holder="https://h.example/",
        codec=1,
        size=1,
        digest="sha-256:" + "0" * 64,
        residency=(Residency(tier="host", layers=(0, 3)),),
        ttl_ms=1,
    )


def request(*keys: str) -> LookupRequest:
    return LookupRequest(scope_id=SCOPE, compat_id=COMPAT, block_keys=keys)


def answer(asked: LookupRequest, held: set[str]) -> LookupAnswer:
    """What an index, or a part of it, says that holds these records."""
    found = tuple(
        MatchedBlock(block_key=key, replicas=(record(key),))
        for key in itertools.takewhile(held.__contains__, asked.block_keys)
    )
    return LookupAnswer(matched=len(found), blocks=found)


@pytest.mark.requirement("OP-3")
def test_the_rule_cuts_the_keys_into_equal_ranges_in_the_order_of_the_base_uris() -> None:
    parts = IndexParts((C, A, B))
    for key, part in (
        ("0" * 64, A),
        ("5" * 16 + "f" * 48, A),
        ("5" * 15 + "6" + "0" * 48, B),
        ("a" * 16 + "f" * 48, B),
        ("a" * 15 + "b" + "0" * 48, C),
        ("f" * 64, C),
    ):
        assert parts.of(key) == part


@pytest.mark.requirement("OP-3")
def test_whoever_names_the_same_parts_chooses_alike_and_each_gets_as_many_keys() -> None:
    chosen = [IndexParts((A, B, C)).of(key) for key in KEYS]
    assert chosen == [IndexParts((C, B, A)).of(key) for key in KEYS]
    assert all(900 < count < 1100 for count in Counter(chosen).values())


@pytest.mark.requirement("OP-3", "LK-1")
@given(seed=st.integers(0, 2**32), parts=st.integers(1, 5), missing=st.integers(0, 3))
def test_the_parts_together_answer_what_one_index_would(seed: int, parts: int, missing: int) -> None:
    draw = random.Random(seed)
    keys = tuple(draw.sample(KEYS, 40))
    held = set(keys) - set(draw.sample(keys, missing))
    index = IndexParts(f"https://is-{number}.example/" for number in range(parts))
    asked = request(*keys)
    shares = index.shares(asked)
    assert sorted(key for share in shares.values() for key in share.block_keys) == sorted(keys)
    of_each = {uri: {key for key in held if index.of(key) == uri} for uri in index.uris}
    answers = {uri: answer(share, of_each[uri]) for uri, share in shares.items()}
    found = index.joined(asked, answers)
    assert found == tuple((record(key),) for key in itertools.takewhile(held.__contains__, keys))


def test_an_answer_about_other_keys_is_refused() -> None:
    index, asked = IndexParts((A, B)), request("0" * 64, "f" * 64)
    answers = {uri: answer(share, set(KEYS)) for uri, share in index.shares(asked).items()}
    answers[B] = answer(request(KEYS[0]), set(KEYS))
    with pytest.raises(RemoteProtocolError, match="in order"):
        index.joined(asked, answers)


def test_a_part_named_twice_is_refused() -> None:
    with pytest.raises(InvalidValue, match="index: expected each base URI once"):
        IndexParts((A, B, A))
    with pytest.raises(InvalidValue, match=r"index\[0\]"):
        IndexParts("http://is-a.example/")
    assert IndexParts(A).uris == (A,)
    assert not IndexParts(())
