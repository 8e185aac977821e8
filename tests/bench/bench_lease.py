"""The lease table beside a plain dict of expiry times, which promises nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from kvsp_core.machines.lease import AddBlock, CreateLease, LeaseGranted, LeaseTable, ReleaseLease, RenewLease
from tests.bench import Row, interleaved, row

__all__ = ["rows"]

LEASES = 2000
BLOCKS = 64


def rows() -> Iterator[Row]:
    """Time a lease of 64 blocks from creation over one renewal to release, among 100,000 blocks."""
    numbers = count(1)
    table = LeaseTable(random_bytes=lambda n: next(numbers).to_bytes(n, "big"), now_ms=0)
    names = [f"block-{i:06d}" for i in range(100_000)]
    for name in names:
        table.handle(AddBlock(block=name, size_bytes=1 << 21), 0)
    wanted = [tuple(names[(i * 37 + j) % len(names)] for j in range(BLOCKS)) for i in range(LEASES)]

    def leases() -> None:
        for blocks in wanted:
            (granted,) = table.handle(CreateLease(client="c", blocks=blocks, ttl_ms=2000), 0)
            assert isinstance(granted, LeaseGranted)
            table.handle(RenewLease(client="c", lease=granted.lease, ttl_ms=3000), 10)
            table.handle(ReleaseLease(client="c", lease=granted.lease), 20)

    def plain() -> None:
        for blocks in wanted:
            until = dict.fromkeys(blocks, 2000)
            for block in blocks:
                until[block] = 3010
            for block in blocks:
                del until[block]

    def evictable() -> None:
        for name in names:
            table.may_evict(name, 30)

    times = interleaved({"leases": leases, "plain": plain, "evictable": evictable})
    per_lease_us = times["leases"] / LEASES * 1e6
    yield row("lease.create_renew_release_64_blocks", per_lease_us, "us")
    yield row("lease.create_renew_release_64_blocks.vs_dict", times["leases"] / times["plain"], "ratio")
    yield row("lease.may_evict", times["evictable"] / len(names) * 1e9, "ns")
