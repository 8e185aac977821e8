"""Tiers keep blocks whole or not at all, and a damaged file is a miss, never wrong data."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp_core.container_header import ContainerHeader
from kvsp_core.roles.role import BlockName, JobFault, StoredBlock
from kvsp_services.stores import block_files
from kvsp_services.stores.block_files import FileTier
from kvsp_services.stores.blocks import BlockFault, BlockTier, MemoryTier, RangeDigests
from kvsp_services.stores.sealing import StorageError

KEY = bytes(range(32))
LAYERS, SECTION_BYTES = 4, 96
SECTIONS = tuple((SECTION_BYTES, SECTION_BYTES + layer) for layer in range(LAYERS))
HEADER = ContainerHeader(codec=1, token_count=16, sections=SECTIONS)


def named(number: int, scope: str = "aa") -> BlockName:
    return BlockName("c" * 64, scope * 16, f"{number:064x}")


def octets_of(number: int) -> bytes:
    return random.Random(number).randbytes(HEADER.data_bytes)


def block_of(number: int, scope: str = "aa") -> StoredBlock:
    digests = tuple(hashlib.sha256(bytes([number, layer])).hexdigest() for layer in range(LAYERS))
    return StoredBlock(named(number, scope), HEADER, digests, hashlib.sha256(octets_of(number)).hexdigest())


def acquire(size: int) -> memoryview:
    return memoryview(bytearray(size + 7))  # pooled memory may be larger than what was asked for


def put(tier: BlockTier, *numbers: int, scope: str = "aa") -> None:
    for number in numbers:
        tier.store(block_of(number, scope), memoryview(octets_of(number)))


def fault_of(call: Callable[[], object]) -> JobFault:
    with pytest.raises(BlockFault) as caught:
        call()
    return caught.value.fault


CAPACITY = 10 * HEADER.data_bytes


@pytest.fixture(params=["memory", "files"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> BlockTier:
    if request.param == "memory":
        return MemoryTier(CAPACITY)
    made = FileTier(tmp_path / "blocks", KEY, CAPACITY)
    made.catalogue()
    return made


def file_tier(tmp_path: Path, **options: object) -> FileTier:
    return FileTier(tmp_path / "blocks", KEY, CAPACITY, **options)  # type: ignore[arg-type]


def files_of(tmp_path: Path) -> list[Path]:
    return sorted(p for p in (tmp_path / "blocks").glob("*/*/*") if p.is_file())


# Every tier ---------------------------------------------------------------------------------------


def test_a_block_comes_back_whole(tier: BlockTier) -> None:
    put(tier, 1, 2)
    block, data = tier.read(named(2), None, acquire)
    assert block == block_of(2)
    assert data == octets_of(2)


@pytest.mark.requirement("BR-1")
@given(first=st.integers(0, LAYERS - 1), count=st.integers(1, LAYERS))
def test_a_range_of_layers_comes_back(
    tmp_path_factory: pytest.TempPathFactory, first: int, count: int
) -> None:
    last = min(first + count, LAYERS) - 1
    before = sum(map(sum, SECTIONS[:first]))
    for tier in (MemoryTier(CAPACITY), file_tier(tmp_path_factory.mktemp("tier"))):
        put(tier, 1)
        block, data = tier.read(named(1), (first, last), acquire)
        assert list(block.header.layers) == list(range(first, last + 1))
        assert data == octets_of(1)[before : before + block.header.data_bytes]
        assert block.layer_digests == block_of(1).layer_digests


def test_layers_that_are_not_there_are_missing(tier: BlockTier) -> None:
    put(tier, 1)
    assert fault_of(lambda: tier.read(named(1), (2, LAYERS), acquire)) is JobFault.MISSING
    assert fault_of(lambda: tier.read(named(2), None, acquire)) is JobFault.MISSING


def test_storing_again_replaces(tier: BlockTier) -> None:
    put(tier, 1, 1, 1)
    assert tier.read(named(1), None, acquire)[1] == octets_of(1)
    assert tier.used_bytes == HEADER.data_bytes  # type: ignore[attr-defined]


def test_what_does_not_fit_is_refused_and_nothing_is_lost(tier: BlockTier) -> None:
    put(tier, *range(10))
    assert fault_of(lambda: put(tier, 10)) is JobFault.FULL
    put(tier, 3)  # replacing needs no room
    tier.drop(named(0))
    put(tier, 10)
    assert tier.read(named(10), None, acquire)[1] == octets_of(10)


def test_a_dropped_block_is_gone_and_dropping_again_is_nothing(tier: BlockTier) -> None:
    put(tier, 1)
    tier.drop(named(1))
    tier.drop(named(1))
    assert fault_of(lambda: tier.read(named(1), None, acquire)) is JobFault.MISSING
    assert tier.used_bytes == 0  # type: ignore[attr-defined]


@pytest.mark.requirement("SE-4")
def test_a_purge_takes_one_scope_and_no_other(tier: BlockTier) -> None:
    put(tier, 1, 2)
    put(tier, 1, scope="bb")
    assert tier.purge("aa" * 16) == 2
    assert fault_of(lambda: tier.read(named(1), None, acquire)) is JobFault.MISSING
    assert tier.read(named(1, "bb"), None, acquire)[1] == octets_of(1)
    put(tier, 1)
    assert tier.purge("cc" * 16) == 0


@pytest.mark.requirement("SE-4")
def test_a_tier_in_memory_names_what_is_past_its_retention() -> None:
    now_ms = [1000]
    tier = MemoryTier(CAPACITY, retention_ms=100, clock_ms=lambda: now_ms[0])
    put(tier, 1, 2)
    now_ms[0] += 60
    put(tier, 3, 1)
    assert tier.aged(10) == ()
    now_ms[0] += 41
    assert tier.aged(10) == (named(2),)
    now_ms[0] += 60
    assert tier.aged(2) == (named(2), named(3))
    assert MemoryTier(CAPACITY).aged(10) == ()


# Files --------------------------------------------------------------------------------------------


@pytest.mark.requirement("SE-4", "SE-5")
def test_files_show_neither_content_nor_names_and_are_the_owners_only(tmp_path: Path) -> None:
    tier = file_tier(tmp_path)
    put(tier, 1)
    (file,) = files_of(tmp_path)
    content = file.read_bytes()
    assert octets_of(1)[:32] not in content
    for secret in (named(1).block_key, named(1).scope_id, named(1).compat_id):
        assert secret not in str(file)
        assert secret.encode() not in content
        assert bytes.fromhex(secret) not in content
    for path in [tmp_path / "blocks", file, tmp_path / "blocks" / "key-check"]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_blocks_are_there_after_an_orderly_stop(tmp_path: Path) -> None:
    tier = file_tier(tmp_path)
    put(tier, 3, 1, 2)
    tier.close()
    again = file_tier(tmp_path)
    assert {block.name for block in again.catalogue()} == {named(1), named(2), named(3)}
    assert again.used_bytes == 3 * HEADER.data_bytes
    assert again.read(named(3), None, acquire)[1] == octets_of(3)


def damage(path: Path, how: str, position: int) -> None:
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[position % len(content)] ^= 1
    elif how == "cut":
        del content[position % len(content) :]
    elif how == "zero":
        content[position % len(content) :] = bytes(len(content) - position % len(content))
    else:
        content += b"more"
    path.write_bytes(content)


@pytest.mark.requirement("SE-4")
@given(how=st.sampled_from(["flip", "cut", "zero", "grow"]), position=st.integers(0, 10_000))
def test_a_damaged_file_is_never_wrong_data(
    tmp_path_factory: pytest.TempPathFactory, how: str, position: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("tier")
    tier = file_tier(tmp_path)
    put(tier, 1)
    (file,) = files_of(tmp_path)
    before = file.read_bytes()
    damage(file, how, position)
    changed = file.read_bytes() != before
    restarted = FileTier(tmp_path / "blocks", KEY, CAPACITY)
    copy = file.read_bytes()
    assert (restarted.catalogue() == ()) is changed, "without an orderly stop every octet is checked"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(copy)
    if changed and how != "grow":  # what follows the end is not read; the next start notices it
        assert fault_of(lambda: tier.read(named(1), None, acquire)) is JobFault.CORRUPT
        assert not file.exists()
        assert fault_of(lambda: tier.read(named(1), None, acquire)) is JobFault.MISSING
    else:
        assert tier.read(named(1), None, acquire)[1] == octets_of(1)


def test_swapped_files_are_noticed(tmp_path: Path) -> None:
    tier = file_tier(tmp_path)
    put(tier, 1, 2)
    first, second = files_of(tmp_path)
    first_content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(first_content)
    assert fault_of(lambda: tier.read(named(1), None, acquire)) is JobFault.CORRUPT
    assert file_tier(tmp_path).catalogue() == ()


def test_after_an_orderly_stop_sizes_are_checked_and_content_when_it_is_read(tmp_path: Path) -> None:
    tier = file_tier(tmp_path)
    put(tier, 1, 2)
    tier.close()
    first, second = files_of(tmp_path)
    damage(first, "cut", 500)
    damage(second, "flip", second.stat().st_size - 1)
    again = file_tier(tmp_path)
    (left,) = again.catalogue()
    assert again.damaged == 1
    assert fault_of(lambda: again.read(left.name, None, acquire)) is JobFault.CORRUPT


def test_the_marker_of_an_orderly_stop_comes_after_everything_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = file_tier(tmp_path)
    put(tier, 1)
    marker = tmp_path / "blocks" / "clean-stop"
    seen = []
    monkeypatch.setattr(os, "sync", lambda: seen.append(marker.exists()))
    tier.close()
    assert seen == [False]
    assert marker.exists()


def test_an_orderly_stop_counts_once(tmp_path: Path) -> None:
    tier = file_tier(tmp_path)
    put(tier, 1)
    tier.close()
    file_tier(tmp_path).catalogue()
    damage(files_of(tmp_path)[0], "flip", 600)
    assert file_tier(tmp_path).catalogue() == ()


def test_unfinished_files_are_removed(tmp_path: Path) -> None:
    tier = file_tier(tmp_path)
    put(tier, 1)
    (file,) = files_of(tmp_path)
    unfinished = file.with_name(file.name + ".0a1b2c3d.part")
    unfinished.write_bytes(file.read_bytes()[:100])
    again = file_tier(tmp_path)
    assert len(again.catalogue()) == 1
    assert again.damaged == 0
    assert files_of(tmp_path) == [file]


def test_another_storage_key_is_refused_and_deletes_nothing(tmp_path: Path) -> None:
    put(file_tier(tmp_path), 1)
    with pytest.raises(StorageError, match="storage key"):
        FileTier(tmp_path / "blocks", bytes(32), CAPACITY)
    assert len(files_of(tmp_path)) == 1


@pytest.mark.parametrize("damage", [b"", b"x" * 60, None])
def test_a_damaged_note_of_the_key_costs_nothing_and_lets_no_other_key_in(
    tmp_path: Path, damage: bytes | None
) -> None:
    def hurt() -> None:
        note = tmp_path / "blocks" / "key-check"
        note.unlink()
        if damage is not None:
            note.write_bytes(damage)

    for number in (1, 2):
        put(file_tier(tmp_path), number)
    files_of(tmp_path)[0].write_bytes(b"torn")
    hurt()
    with pytest.raises(StorageError, match="storage key"):
        FileTier(tmp_path / "blocks", bytes(32), CAPACITY)
    assert len(file_tier(tmp_path).catalogue()) == 1
    with pytest.raises(StorageError, match="storage key"):
        FileTier(tmp_path / "blocks", bytes(32), CAPACITY)
    purged = file_tier(tmp_path)
    for block in purged.catalogue():
        purged.drop(block.name)
    hurt()
    FileTier(tmp_path / "blocks", bytes(32), CAPACITY)  # there is nothing that it could not open


@pytest.mark.requirement("SE-4")
def test_retention_deletes_also_what_aged_while_nothing_ran(tmp_path: Path) -> None:
    now_ms = [1_000_000]
    options = {"retention_ms": 1000, "wall_clock_ms": lambda: now_ms[0]}
    tier = file_tier(tmp_path, **options)
    put(tier, 1)
    now_ms[0] += 600
    put(tier, 2)
    now_ms[0] += 500
    assert tier.aged(10) == (named(1),)
    tier.drop(named(1))
    assert fault_of(lambda: tier.read(named(1), None, acquire)) is JobFault.MISSING
    tier.close()
    now_ms[0] += 600
    assert file_tier(tmp_path, **options).catalogue() == ()
    assert files_of(tmp_path) == []


@pytest.mark.requirement("SE-4")
def test_a_clock_that_is_set_back_keeps_nothing_longer_than_twice(tmp_path: Path) -> None:
    """What was stored while it was ahead holds up nothing that came later."""
    now_ms = [1_000_000]
    tier = file_tier(tmp_path, retention_ms=1000, wall_clock_ms=lambda: now_ms[0])
    put(tier, 1)
    now_ms[0] = 10_000
    put(tier, 2)
    assert tier.aged(10) == ()
    now_ms[0] += 1001
    assert set(tier.aged(10)) == {named(1), named(2)}


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.ENOSPC, JobFault.FULL),
        (errno.EROFS, JobFault.BROKEN),
        (errno.EIO, JobFault.BROKEN),
        (errno.EMFILE, JobFault.BUSY),
    ],
)
def test_a_disk_that_fails_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fault: JobFault
) -> None:
    tier = file_tier(tmp_path)
    put(tier, 1)
    written = []

    def fail(output: object, piece: bytes) -> None:
        if written:
            raise OSError(number, os.strerror(number))
        written.append(piece)

    monkeypatch.setattr(block_files, "_write_all", fail)
    assert fault_of(lambda: put(tier, 2)) is fault
    monkeypatch.undo()
    assert len(files_of(tmp_path)) == 1
    assert tier.used_bytes == HEADER.data_bytes
    put(tier, 2)


def test_room_that_was_taken_is_given_back_where_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = file_tier(tmp_path)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(block_files, "_write_all", fail)
    with pytest.raises(MemoryError):
        put(tier, 1)
    assert (tier.used_bytes, files_of(tmp_path)) == (0, [])


@pytest.mark.parametrize(
    ("number", "fault"),
    [(errno.EIO, JobFault.BROKEN), (errno.EMFILE, JobFault.BUSY), (errno.ENOMEM, JobFault.BUSY)],
)
def test_a_file_that_cannot_be_read_is_a_miss_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fault: JobFault
) -> None:
    tier = file_tier(tmp_path)
    put(tier, 1)

    def fail(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(block_files, "_read_exactly", fail)
    assert fault_of(lambda: tier.read(named(1), None, acquire)) is fault
    assert file_tier(tmp_path).catalogue() == ()
    monkeypatch.undo()
    assert len(file_tier(tmp_path).catalogue()) == 1


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_blocks as t
tier = t.FileTier(Path(sys.argv[1]) / "blocks", t.KEY, 10**9)
tier.catalogue()
for number in range(100000):
    t.put(tier, number % 200)
    print(number, flush=True)
"""


def test_after_kill_9_every_block_is_whole_or_gone(tmp_path: Path) -> None:
    chance = random.Random(3)
    for _ in range(4):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
            assert writer.stdout is not None
            for _ in range(chance.randrange(20, 400)):
                writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
        tier = FileTier(tmp_path / "blocks", KEY, 10**9)
        catalogue = tier.catalogue()
        assert catalogue
        assert tier.damaged == 0, "a file appears under its name when it is whole"
        for block in catalogue:
            assert tier.read(block.name, None, acquire)[1] == octets_of(int(block.name.block_key, 16))


@pytest.mark.requirement("BR-2")
def test_the_digest_of_a_range_is_computed_once(tier: BlockTier) -> None:
    put(tier, 1, 2)
    ranges = RangeDigests(at_most=2)
    block, data = tier.read(named(1), (1, 2), acquire)
    expected = hashlib.sha256(block.header.encode() + bytes(data)).hexdigest()
    assert ranges.of(block, data) == expected
    assert ranges.of(block, memoryview(b"not looked at")) == expected
    other, others = tier.read(named(2), (1, 2), acquire)
    assert ranges.of(other, others) != expected, "another block has digests of its own"
    replaced = attrs.evolve(block, repr_digest="0" * 64)
    assert ranges.of(replaced, others) != expected, "so has another block under the same name"
    assert ranges.of(block, others) != expected, "and the oldest are forgotten"
