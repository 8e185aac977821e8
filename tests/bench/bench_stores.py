"""What is on disk: commits of the durable store, one at a time and in groups, and blocks in sealed files
beside plain ones.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvsp_core.container_header import ContainerHeader
from kvsp_core.roles.role import BlockName, Put
from kvsp_services.stores.block_files import FileTier
from kvsp_services.stores.blocks import StoredBlock
from kvsp_services.stores.durable import DurableStore
from tests.bench import Row, interleaved, row

__all__ = ["rows"]

WRITES = 64
LAYERS, LAYER_BYTES = 32, 1 << 15  # K and V of a layer: a block of 2 MiB
BLOCKS = 16


def rows() -> Iterator[Row]:
    """Measure in a directory of its own, on whatever disk the system keeps temporary files."""
    with tempfile.TemporaryDirectory() as directory:
        yield from commit_rows(Path(directory))
        yield from file_rows(Path(directory))


def commit_rows(directory: Path) -> Iterator[Row]:
    """A sync for each write, and one for 64 of them, which is what many waiting answers share."""
    store = DurableStore(directory / "role.sqlite", bytes(32), "https://pc.example/")
    value = bytes(600)  # a checkpoint of a session, about
    writes = [(Put("sessions", f"{number:032x}", value),) for number in range(WRITES)]

    def one_by_one() -> None:
        for write in writes:
            store.commit([write])

    times = interleaved(
        {"one": one_by_one, "group": lambda: store.commit(writes)}, rounds=3, clock=time.perf_counter
    )
    store.close()
    yield row("stores.commits_one_by_one", WRITES / times["one"], "1/s", note="each waits for its sync")
    yield row("stores.commits_in_groups_of_64", WRITES / times["group"], "1/s")
    yield row("stores.groups.vs_one_by_one", times["one"] / times["group"], "ratio", at_least=2)


def file_rows(directory: Path) -> Iterator[Row]:
    """Blocks of 2 MiB, sealed layer by layer, and the same octets in plain files; CPU time."""
    header = ContainerHeader(
        codec=1, first_layer=0, token_count=16, sections=((LAYER_BYTES, LAYER_BYTES),) * LAYERS
    )
    data = os.urandom(header.data_bytes)
    digests = tuple(hashlib.sha256(bytes([layer])).hexdigest() for layer in range(LAYERS))
    names = [BlockName("cc" * 32, "aa" * 16, f"{number:064x}") for number in range(BLOCKS)]
    tier = FileTier(directory / "tier", bytes(range(32)), 1 << 40)
    (directory / "plain").mkdir()
    buffer = memoryview(bytearray(header.data_bytes))

    def put() -> None:
        for name in names:
            tier.store(StoredBlock(name, header, digests, "ab" * 32), memoryview(data))

    def get() -> None:
        for name in names:
            tier.read(name, None, lambda size: buffer)

    def put_plain() -> None:
        for number in range(BLOCKS):
            (directory / "plain" / str(number)).write_bytes(data)

    def get_plain() -> None:
        for number in range(BLOCKS):
            with (directory / "plain" / str(number)).open("rb", buffering=0) as file:
                file.readinto(buffer)

    put()
    on_disk = sum(file.stat().st_blocks * 512 for file in (directory / "tier").rglob("*") if file.is_file())
    times = interleaved({"put": put, "get": get, "put plain": put_plain, "get plain": get_plain})
    octets = BLOCKS * len(data)
    yield row("stores.file_put", times["put"] / octets * 1e9, "s/GB")
    yield row("stores.file_put.vs_plain", times["put"] / times["put plain"], "ratio")
    yield row("stores.file_get", times["get"] / octets * 1e9, "s/GB")
    yield row("stores.file_get.vs_plain", times["get"] / times["get plain"], "ratio")
    yield row("stores.on_disk.vs_octets", on_disk / octets, "ratio", at_most=1.02)
    tier.close()
