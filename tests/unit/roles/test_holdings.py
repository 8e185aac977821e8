"""What a holder's tiers take, and which of their blocks go first."""

from __future__ import annotations

import hashlib

import pytest

from kvsp_core.container_header import ContainerHeader
from kvsp_core.errors import LocalProtocolError
from kvsp_core.roles.holdings import Holdings, TierLimits, id_of
from kvsp_core.roles.role import BlockName, StoredBlock

HEADER = ContainerHeader(codec=1, token_count=1, sections=((4, 4),))
SIZE = HEADER.size_bytes


def block(name: str, scope: str = "5c" * 16) -> StoredBlock:
    key = hashlib.sha256(name.encode()).hexdigest()
    return StoredBlock(BlockName("c0" * 32, scope, key), HEADER, (key,), key)


def holdings(*names: str, room: int = 4) -> Holdings:
    held = Holdings({"host": TierLimits(capacity_bytes=room * SIZE)})
    for name in names:
        held.add(name, block(name), "host")
        held.reserve("host", SIZE)
        held.set_evictable(name, True)
    return held


def evicted(held: Holdings, count: int) -> list[str]:
    """Evict so many blocks and return them in their order."""
    gone = []
    wanted = held.free_bytes("host") + count * SIZE
    for name in held.victims("host", wanted):
        held.remove(name)
        held.release("host", SIZE)
        gone.append(name)
    return gone


def test_the_block_freed_longest_ago_goes_first() -> None:
    held = holdings("a", "b", "c")
    held.set_evictable("a", False)
    held.set_evictable("a", True)
    assert len(held) == 3
    assert evicted(held, 3) == ["b", "c", "a"]
    assert (len(held), held.used_bytes) == (0, 0)


def test_what_has_lost_its_prefix_goes_before_what_is_older() -> None:
    held = holdings("a", "x", "b", "c")
    held.in_order(("a", "b", "c"))
    assert evicted(held, 4) == ["a", "b", "c", "x"]


def test_the_order_that_was_seen_last_counts() -> None:
    held = holdings("a", "x", "b", "c")
    held.in_order(("a", "b"))
    held.in_order(("a", "b"))
    held.in_order(("a", "c"))
    assert evicted(held, 2) == ["a", "c"]
    again = holdings("a", "b", "x", "c")
    again.in_order(("a", "c"))
    again.in_order(("b", "c"))
    assert evicted(again, 4) == ["a", "b", "c", "x"]


def test_what_is_not_held_or_follows_itself_teaches_nothing() -> None:
    held = holdings("a", "b")
    held.in_order(("a", "a", "elsewhere", "b"))
    assert evicted(held, 2) == ["a", "b"]


def test_a_block_that_may_not_go_stays_also_when_its_prefix_is_gone() -> None:
    held = holdings("a", "b", "c")
    held.in_order(("a", "b"))
    held.set_evictable("b", False)
    assert evicted(held, 3) == ["a", "c"]
    held.set_evictable("unknown", True)


def test_room_counts_what_can_be_evicted() -> None:
    held = holdings("a", "b", room=2)
    assert held.room_for(2 * SIZE) == "host"
    held.set_evictable("a", False)
    assert held.room_for(SIZE) == "host"
    assert held.room_for(SIZE + 1) is None
    assert held.room_for(3 * SIZE) is None


def test_a_key_may_stand_for_blocks_of_several_scopes() -> None:
    held = Holdings({"host": TierLimits(capacity_bytes=SIZE)})
    both = [block("a"), block("a", "0e" * 16)]
    for stored in both:
        held.add(id_of(stored.name), stored, "host")
    key = both[0].name.block_key
    assert held.with_key(key) == tuple(id_of(stored.name) for stored in both)
    held.remove(id_of(both[0].name))
    assert held.with_key(key) == (id_of(both[1].name),)
    held.remove(id_of(both[1].name))
    assert held.with_key(key) == ()


def test_misuse_is_refused() -> None:
    held = holdings("a", room=1)
    with pytest.raises(LocalProtocolError, match="held already"):
        held.add("a", block("a"), "host")
    with pytest.raises(LocalProtocolError, match="to be evicted was not"):
        list(held.victims("host", SIZE))


def test_tiers_are_asked_from_the_fastest_on() -> None:
    limits = TierLimits(capacity_bytes=SIZE)
    held = Holdings({"tape": limits, "local-storage": limits, "host": limits})
    assert held.tiers == ("host", "local-storage", "tape")


def test_of_uses_only_the_order_counts_in_what_is_frozen() -> None:
    once, often, other = holdings("a", "b"), holdings("a", "b"), holdings("b", "a")
    for name in ("a", "b"):
        often.set_evictable(name, False)
        often.set_evictable(name, True)
    assert often.freeze(0) == once.freeze(5)
    assert other.freeze(0) != once.freeze(0)
    evicted(often, 1)
    assert often.freeze(0) != once.freeze(0)
