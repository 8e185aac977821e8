"""Memory for prefixes that is used again."""

from __future__ import annotations

from kvsp_client.memory import MemoryPool
from tests.adapters.client.scripted import MODEL

BLOCK = 2 * MODEL.layers * MODEL.section_bytes(MODEL.block_tokens)


def test_the_smallest_memory_that_is_large_enough_is_used_again() -> None:
    pool = MemoryPool(10 * BLOCK)
    small, large = pool.take(MODEL, 2), pool.take(MODEL, 5)
    pool.give_back(large)
    pool.give_back(small)
    again = pool.take(MODEL, 1)
    assert again.octets is small.octets
    assert (again.blocks, again.layer(0)[0].shape) == (
        1,
        (MODEL.block_tokens, MODEL.kv_heads, MODEL.head_dim),
    )
    assert pool.take(MODEL, 2).octets.nbytes == 2 * BLOCK, "more than twice as large is too large"
    assert pool.take(MODEL, 3).octets is large.octets
    assert pool.take(MODEL, 3).octets.nbytes == 3 * BLOCK


def test_so_much_memory_is_kept_and_no_more() -> None:
    pool = MemoryPool(10 * BLOCK)
    given = [pool.take(MODEL, blocks) for blocks in (4, 6, 3)]
    for memory in given:
        pool.give_back(memory)
    assert pool.take(MODEL, 6).octets is given[1].octets
    assert pool.take(MODEL, 3).octets is given[2].octets
    assert pool.take(MODEL, 3).octets is not given[0].octets
    pool.give_back(pool.take(MODEL, 11))
    assert pool.take(MODEL, 1).octets.nbytes == BLOCK
