"""The replica index beside a plain dict of objects, Redis, and the RadixTree of ai-dynamo-runtime.

All of them find the same prefix of 8,192 keys among a million records of four holders. The dict is asked key
by key, with scope and expiry checked; Redis by one MGET, which checks neither; the RadixTree by 64-bit
numbers, and it keeps neither scope, expiry nor digests.
"""

from __future__ import annotations

import gc
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import msgspec

from kvsp_core.machines.replica_index import Found, Lookup, Publish, ReplicaIndex
from kvsp_core.machines.replica_match import Match
from kvsp_core.records import ReplicaRecord
from tests.bench import ROUNDS, Row, interleaved, left_out, row, tool
from tests.bench.index_load import COMPAT, SCOPE, publications

__all__ = ["rows"]

RECORDS = 1_000_000
PREFIX = 8192
RECORD_BYTES, LAYER_RECORD_BYTES = 220, 1250  # packed, without and with 32 layer digests


@attrs.define
class Entry:
    """What a plain implementation would keep."""

    record: ReplicaRecord
    expiry_ms: int


def rows() -> Iterator[Row]:
    """Measure memory in processes of its own, then speed among a million records."""
    yield from memory_rows()
    index = ReplicaIndex(client_bytes=1 << 40, total_bytes=1 << 40)
    plain: dict[str, tuple[Entry, ...]] = {}
    prefix: list[Publish] = []
    chains: list[str] = []  # keys, joined: a list of a million strings would slow the collector down
    filling_s = 0.0
    empty_pause_ms = gc_pause_ms()
    for events in publications(RECORDS):
        started = time.process_time()
        for event in events:
            index.handle(event, 0)
        filling_s += time.process_time() - started
        if not prefix:
            prefix = events
            empty_pause_ms = gc_pause_ms()
        chains.append("".join(event.block_key for event in events))
        del events, event
    yield row("index.publish_new", filling_s / RECORDS * 1e6, "us")
    pause_ms = max(0.0, gc_pause_ms() - empty_pause_ms)
    keys = [chain[at : at + 64] for chain in chains for at in range(0, len(chain), 64)]
    listed_pause_ms = gc_pause_ms()
    for event in prefix:
        plain[event.block_key] = (Entry(event.record, 600_000),)
    for key in keys[PREFIX:]:
        plain[key] = (Entry(prefix[0].record, 600_000),)
    plain_pause_ms = gc_pause_ms() - listed_pause_ms
    yield row("index.gc_pause_1m_records", pause_ms, "ms")
    yield row("index.gc_pause_1m_records.vs_objects", pause_ms / plain_pause_ms, "ratio", at_most=0.1)
    yield from lookup_rows(index, plain, [event.block_key for event in prefix], keys)
    yield from answer_rows(index, prefix)
    yield from refresh_rows(index, plain, prefix)


def gc_pause_ms() -> float:
    """Return how long the garbage collector stops everything."""
    times = []
    for _ in range(5):
        started = time.process_time()
        gc.collect()
        times.append(time.process_time() - started)
    return min(times) * 1e3


def memory_rows() -> Iterator[Row]:
    for name, records, layers, packed, share in (
        ("index.bytes_per_record", RECORDS, 0, RECORD_BYTES, 1.2),
        ("index.bytes_per_record.32_layers", RECORDS // 5, 32, LAYER_RECORD_BYTES, 1.4),
    ):
        command = [sys.executable, "-m", "tests.bench.index_load", str(records), str(layers)]
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        yield row(name, float(done.stdout), "octets", at_most=packed * share)


def looked_up(index: ReplicaIndex, keys: list[str]) -> Match:
    (found,) = index.handle(Lookup(compat_id=COMPAT, scope_id=SCOPE, block_keys=keys), 1000)
    assert isinstance(found, Found)
    assert found.match.matched == PREFIX
    return found.match


def lookup_rows(
    index: ReplicaIndex, plain: dict[str, tuple[Entry, ...]], prefix: list[str], keys: list[str]
) -> Iterator[Row]:
    def in_dict(wanted: list[str]) -> None:
        blocks = []
        for key in wanted:
            live = [
                entry.record
                for entry in plain.get(key, ())
                if entry.expiry_ms > 1000
                and entry.record.scope_id == SCOPE
                and entry.record.compat_id == COMPAT
            ]
            if not live:
                break
            blocks.append(live)
        assert len(blocks) == PREFIX

    candidates: dict[str, Callable[[list[str]], object]] = {
        "index": lambda wanted: looked_up(index, wanted),
        "dict": in_dict,
    }
    with redis_holding(keys) as mget, radix_tree_holding(keys) as find:
        if mget is not None:
            candidates["redis"] = mget
        if find is not None:
            candidates["radix"] = find
        times = lookup_times(candidates, prefix)
    lookup = times["index"]
    yield row("index.lookup_8192", lookup * 1e3, "ms")
    yield row("index.lookup_8192.vs_dict", lookup / times["dict"], "ratio", at_most=0.25)
    if "redis" in times:
        yield row("index.lookup_8192.vs_redis_mget", lookup / times["redis"], "ratio", at_most=0.05)
    else:
        yield left_out("index.lookup_8192.vs_redis_mget", "redis-server is not installed")
    if "radix" in times:
        yield row("index.lookup_8192.vs_radix_tree", lookup / times["radix"], "ratio")
    else:
        yield left_out("index.lookup_8192.vs_radix_tree", "ai-dynamo-runtime is not installed")


def lookup_times(candidates: dict[str, Callable[[list[str]], object]], prefix: list[str]) -> dict[str, float]:
    """Return the median seconds of each, asked with keys as a request brings them, freshly decoded."""
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(2 * ROUNDS):
        for name, run in candidates.items():
            wanted = fresh(prefix)
            started = time.perf_counter()
            run(wanted)
            taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in taken.items()}


def fresh(keys: list[str]) -> list[str]:
    """Return the keys as strings that nothing has hashed yet."""
    decoded: list[str] = msgspec.json.decode(msgspec.json.encode(keys))
    return decoded


def answer_rows(index: ReplicaIndex, prefix: list[Publish]) -> Iterator[Row]:
    keys = [event.block_key for event in prefix]
    match = looked_up(index, keys)
    records = [event.record for event in prefix]

    def by_objects() -> None:
        blocks = [{"block_key": r.block_key, "replicas": [attrs.evolve(r, ttl_ms=5)]} for r in records]
        msgspec.json.encode({"matched": len(blocks), "blocks": blocks})

    times = interleaved({"ours": match.json, "objects": by_objects})
    yield row("index.answer_8192", times["ours"] * 1e3, "ms", note=f"{len(match.json()):,} octets")
    yield row("index.answer_8192.vs_objects", times["ours"] / times["objects"], "ratio", at_most=0.5)


def refresh_rows(
    index: ReplicaIndex, plain: dict[str, tuple[Entry, ...]], prefix: list[Publish]
) -> Iterator[Row]:
    requests = [fresh([event.block_key for event in prefix]) for _ in range(2 * ROUNDS)]
    bodies = [msgspec.json.encode(event.record) for event in prefix]

    def refresh() -> None:
        for event in prefix:
            index.handle(event, 2000)

    def assign() -> None:
        for key, event in zip(requests.pop(), prefix, strict=True):
            plain[key] = (Entry(event.record, 2000 + event.record.ttl_ms),)

    def packed() -> None:
        for event in prefix:
            column, at = index.packed.find(event.holder_id, bytes.fromhex(event.block_key)) or (None, 0)
            if column is not None:
                index.packed.set_expiry(column, at, 700_000)

    def decode() -> None:
        for body in bodies:
            msgspec.json.decode(body, type=ReplicaRecord)

    times = interleaved({"refresh": refresh, "assign": assign, "packed": packed, "decode": decode})
    yield row("index.refresh", times["refresh"] / PREFIX * 1e6, "us")
    yield row("index.refresh.vs_dict_assignment", times["refresh"] / times["assign"], "ratio", at_most=5)
    yield row("index.refresh_of_expiry.vs_dict_assignment", times["packed"] / times["assign"], "ratio")
    yield row("index.refresh.vs_decoding_the_record", times["refresh"] / times["decode"], "ratio")


# Others


@contextmanager
def redis_holding(keys: list[str]) -> Iterator[Callable[[list[str]], None] | None]:
    """Start a Redis of our own on a Unix socket, fill it, and give what asks it for many keys at once."""
    server = tool("redis-server")
    if server is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/socket"
        options = [
            "--port",
            "0",
            "--unixsocket",
            path,
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            directory,
        ]
        process = subprocess.Popen([server, *options], stdout=subprocess.DEVNULL)
        try:
            connection = _connected(path)
            _fill(connection, keys)

            def mget(wanted: list[str]) -> None:
                connection.sendall(_command([b"MGET", *(bytes.fromhex(key) for key in wanted)]))
                _read(connection, 7 + PREFIX * (6 + RECORD_BYTES + 2))

            yield mget
            connection.close()
        finally:
            process.terminate()
            process.wait()


def _connected(path: str) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _command(parts: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _read(connection: socket.socket, size: int) -> None:
    while size > 0:
        received = connection.recv(min(size, 1 << 20))
        if not received:
            raise ConnectionError("Redis closed the connection")
        size -= len(received)


def _fill(connection: socket.socket, keys: list[str]) -> None:
    for start in range(0, len(keys), 1000):
        pairs = [
            part for key in keys[start : start + 1000] for part in (bytes.fromhex(key), bytes(RECORD_BYTES))
        ]
        connection.sendall(_command([b"MSET", *pairs]))
        _read(connection, len("+OK\r\n"))


@contextmanager
def radix_tree_holding(keys: list[str]) -> Iterator[Callable[[list[str]], object] | None]:
    """Fill a RadixTree with the same chains, named by 64-bit numbers, and give what looks the first up."""
    try:
        from dynamo.llm import RadixTree
    except ImportError:
        yield None
        return
    tree = RadixTree()
    numbers = [int(key[:15], 16) for key in keys]
    for start in range(0, len(numbers), PREFIX):
        blocks = [{"block_hash": n, "tokens_hash": n} for n in numbers[start : start + PREFIX]]
        event = {"event_id": start, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
        tree.apply_event(start // PREFIX % 4, json.dumps(event).encode())
    wanted = numbers[:PREFIX]
    assert max(tree.find_matches(wanted).scores.values()) == PREFIX
    yield lambda _: tree.find_matches(wanted).scores
