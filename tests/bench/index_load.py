"""What the benchmarks of the replica index look things up in: many records of several holders.

``python -m tests.bench.index_load RECORDS LAYERS`` prints the octets each record takes in a process of its
own.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from collections.abc import Iterator

from kvsp_core.identity import component_id
from kvsp_core.machines.replica_index import Publish, ReplicaIndex
from kvsp_core.records import ReplicaRecord, Residency

__all__ = ["COMPAT", "HOLDERS", "HOLDER_IDS", "SCOPE", "publication", "publications"]

COMPAT, SCOPE = "c0" * 32, "5c" * 16
HOLDERS = tuple(f"https://h{i}.example/kvsp/" for i in range(4))
HOLDER_IDS = tuple(map(component_id, HOLDERS))
RESIDENCY = (
    Residency(tier="device", layers=(0, 15)),
    Residency(tier="host", layers=(16, 31), read_mbit_per_s=400_000),
)
CHAIN_KEYS = 8192


def publication(holder: int, key: str, layers: int = 0, ttl_ms: int = 600_000) -> Publish:
    """Return the publication of a record of random octets."""
    octets = os.urandom(32 * layers)
    record = ReplicaRecord(
        block_key=key,
        compat_id=COMPAT,
        scope_id=SCOPE,
        holder=HOLDERS[holder],
        codec=1,
        size=2_097_152,
        digest="sha-256:" + (hashlib.sha256(octets).hexdigest() if layers else os.urandom(32).hex()),
        layer_digests=tuple(octets[i : i + 32].hex() for i in range(0, len(octets), 32)) or None,
        residency=RESIDENCY,
        ttl_ms=ttl_ms,
    )
    return Publish(
        client=HOLDERS[holder], holder_id=HOLDER_IDS[holder], block_key=record.block_key, record=record
    )


def publications(records: int, layers: int = 0) -> Iterator[list[Publish]]:
    """Go through the publications of prompts of one holder after another."""
    for start in range(0, records, CHAIN_KEYS):
        holder = start // CHAIN_KEYS % len(HOLDERS)
        count = min(CHAIN_KEYS, records - start)
        yield [publication(holder, os.urandom(32).hex(), layers) for _ in range(count)]


def resident_bytes() -> int:
    """Return the memory of this process."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(records: int, layers: int) -> None:
    """Fill an index and print the octets a record takes."""
    index = ReplicaIndex(client_bytes=1 << 40, total_bytes=1 << 40)
    before = resident_bytes()
    for events in publications(records, layers):
        for event in events:
            index.handle(event, 0)
    del events
    print((resident_bytes() - before) / records)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
