"""How many keys an index is asked for at a time: fewer once it has refused, more again after a while."""

from __future__ import annotations

import pytest

from kvsp_core.lookup_size import LookupSize


def answered(size: LookupSize, keys: int, times: int) -> LookupSize:
    for _ in range(times):
        size = size.after_answer(keys)
    return size


@pytest.mark.requirement("LK-4")
def test_half_of_what_was_refused_is_asked_for_and_more_again_after_a_while() -> None:
    size = LookupSize(10).after_refusal(9)
    assert size.most == 4
    assert answered(size, 4, 15).most == 4
    size = answered(size, 4, 16)
    assert size.most == 8
    assert answered(size, 8, 16) == LookupSize(10)
    assert answered(LookupSize(10), 10, 100) == LookupSize(10)


def test_only_lookups_of_as_many_keys_as_may_be_asked_for_tell_that_more_might_do() -> None:
    size = LookupSize(10).after_refusal(10)
    assert answered(size, 4, 100) == size
    assert answered(size, 10, 16).most == 10, "some were on their way before it was refused"


def test_a_refusal_makes_it_never_larger_and_counts_anew() -> None:
    size = answered(LookupSize(10).after_refusal(10), 5, 15).after_refusal(10)
    assert size == LookupSize(10).after_refusal(10)
    assert size.after_refusal(2).most == 1
    assert size.after_refusal(2).after_refusal(10).most == 1
