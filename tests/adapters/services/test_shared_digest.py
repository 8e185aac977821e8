"""A digest that another thread shares is the right one, whether that thread comes early, late or never."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp_services.loops import Workers
from kvsp_services.receivers import SharedSHA256

OCTETS = memoryview(bytes(range(256)) * 8192)
EXPECTED = hashlib.sha256(OCTETS).digest()
PIECE = 100_000


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_the_thread_may_come_whenever_it_likes(comes: list[bool]) -> None:
    asked: list[Callable[[], None]] = []
    shared = SharedSHA256(lambda order, work: asked.append(work))
    for number, at in enumerate(range(0, len(OCTETS), PIECE)):
        shared.update(OCTETS[at : at + PIECE])
        if asked and comes[number % len(comes)]:
            asked.pop(0)()
    assert shared.digest() == EXPECTED
    for late in asked:
        late()
    assert shared.digest() == EXPECTED


@pytest.mark.requirement("BR-2")
def test_real_threads_share_the_work() -> None:
    workers = Workers()
    try:
        for size in (1, 255, 300_000, len(OCTETS)):
            shared = SharedSHA256(workers.submit)
            for at in range(0, size, PIECE):
                shared.update(OCTETS[at : min(at + PIECE, size)])
            assert shared.digest() == hashlib.sha256(OCTETS[:size]).digest()
    finally:
        workers.close()


def test_a_small_block_needs_no_thread() -> None:
    def in_thread(order: object, work: Callable[[], None]) -> None:
        raise AssertionError("it is not worth it")

    shared = SharedSHA256(in_thread)
    shared.update(memoryview(b"small"))
    assert shared.digest() == hashlib.sha256(b"small").digest()
