"""``kvsp backup`` works beside a running role; ``kvsp purge`` in place of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsp_core.container_header import ContainerHeader
from kvsp_core.roles.role import BlockName, Put, StoredBlock
from kvsp_services.assembly import make_tiers
from kvsp_services.cli import app
from kvsp_services.config import TierSection
from kvsp_services.stores.block_files import FileTier
from kvsp_services.stores.blocks import BlockFault
from kvsp_services.stores.durable import DurableStore
from kvsp_services.stores.sealing import StorageError

KEY = bytes(range(32))
OWNER = "https://controller.example/kvsp/"
HEADER = ContainerHeader(codec=1, token_count=1, sections=((8, 8),))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "storage.key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


def test_a_backup_beside_a_running_role(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = DurableStore(tmp_path / "state.sqlite", KEY, OWNER)
    store.commit([[Put("map", "a", b"1")]])
    arguments = ["backup", str(tmp_path / "state.sqlite"), str(tmp_path / "copy.sqlite")]
    assert app.run(arguments) == 0
    assert app.run(arguments) == 1
    assert "exists" in capfd.readouterr().err
    store.close()
    copy = DurableStore(tmp_path / "copy.sqlite", KEY, OWNER)
    assert copy.load() == {"map": {"a": b"1"}}
    copy.close()


@pytest.mark.requirement("SE-4")
def test_a_purge_deletes_what_is_one_tenants(
    tmp_path: Path, key_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tier = FileTier(tmp_path / "blocks", KEY, 10_000)
    names = [BlockName("c" * 64, scope * 16, "b" * 64) for scope in ("aa", "bb")]
    for name in names:
        tier.store(StoredBlock(name, HEADER, ("d" * 64,), "e" * 64), memoryview(bytes(16)))
    call = ["purge", str(tmp_path / "blocks"), "--storage-key-file", str(key_file), "--scope"]
    assert app.run([*call, "aa" * 16]) == 0
    assert capfd.readouterr().out == "1 block deleted\n"
    with pytest.raises(BlockFault):
        tier.read(names[0], None, lambda size: memoryview(bytearray(size)))
    tier.read(names[1], None, lambda size: memoryview(bytearray(size)))
    assert app.run([*call, "tenant-a"]) == 2


def test_a_directory_of_blocks_has_one_user_at_a_time(
    tmp_path: Path, key_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    section = TierSection(tier="local-storage", capacity_bytes=10_000, directory=str(tmp_path / "blocks"))
    (tier,) = make_tiers([section], KEY).values()
    call = ["purge", str(tmp_path / "blocks"), "--storage-key-file", str(key_file), "--scope", "aa" * 16]
    assert app.run(call) == 1, "a holder that runs goes on publishing what is deleted behind its back"
    assert "is in use by another process; stop that" in capfd.readouterr().err
    with pytest.raises(StorageError, match="in use"):
        make_tiers([section], KEY)
    tier.close()
    assert app.run(call) == 0
    make_tiers([section], KEY)["local-storage"].close()


def test_a_storage_key_that_is_none_is_named(
    tmp_path: Path, key_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    FileTier(tmp_path / "blocks", KEY, 10_000)
    key_file.write_bytes(b"short")
    call = ["purge", str(tmp_path / "blocks"), "--storage-key-file", str(key_file), "--scope", "aa" * 16]
    assert app.run(call) == 1
    said = f"{key_file}: a storage key has at least 32 random octets, found 5"
    assert said in capfd.readouterr().err
