"""Secrets are read from files of their owner only, raw or in hex, and never quoted; what is written is there
whole or not at all."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from kvsp_client.files import file_pieces, read_scope, read_secret, replacing
from kvsp_core.errors import LocalProtocolError

KEY = bytes(range(32))


def secret_file(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    "content",
    [
        KEY,
        KEY.hex().encode(),
        KEY.hex().upper().encode(),
        KEY.hex().encode() + b"\n",
        KEY.hex().encode() + b"\r\n",
    ],
)
def test_a_key_is_raw_or_hex(tmp_path: Path, content: bytes) -> None:
    path = secret_file(tmp_path / "key", content)
    assert read_secret(path) == KEY
    assert read_scope(path).scope_id == "6d1c6481cd428737da312c089db3832a"


def test_raw_octets_are_not_stripped(tmp_path: Path) -> None:
    content = b"\n" + bytes(range(200, 231)) + b" "
    assert read_secret(secret_file(tmp_path / "key", content)) == content


@pytest.mark.requirement("SE-5")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622, 0o777])
def test_a_key_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path / "key", KEY, mode)
    with pytest.raises(LocalProtocolError, match=r"chmod 600"):
        read_secret(path)


@pytest.mark.requirement("SK-1", "SK-5")
@pytest.mark.parametrize("content", [b"", KEY[:31], KEY[:31].hex().encode(), b"tenant-key-in-words"])
def test_a_short_key_is_refused_without_quoting_it(tmp_path: Path, content: bytes) -> None:
    path = secret_file(tmp_path / "key", content)
    with pytest.raises(LocalProtocolError) as caught:
        read_scope(path)
    assert str(path) in str(caught.value)
    assert "tenant-key" not in str(caught.value)


def test_a_large_file_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(LocalProtocolError, match="no key"):
        read_secret(secret_file(tmp_path / "key", bytes(5000)))


def test_pieces_join_to_the_file(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    path = tmp_path / "weights"
    path.write_bytes(content)
    pieces = list(file_pieces(path))
    assert len(pieces) == 3
    assert b"".join(pieces) == content


def test_a_disk_that_is_full_is_said_of_a_file() -> None:
    full = pytest.raises(OSError, match=r"No space left on device: '/dev/full'")
    with full, replacing(Path("/dev/full"), b"x"):
        pass


def test_files_take_the_place_of_others_together_or_not_at_all(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.write_bytes(b"old")
    with replacing(one, b"new", mode=0o600), replacing(other, b"new"):
        assert one.read_bytes() == other.read_bytes() == b"old"
    assert one.read_bytes() == other.read_bytes() == b"new"
    assert one.stat().st_mode & 0o777 == 0o600
    with (
        pytest.raises(FileNotFoundError, match=r"missing/other'$"),
        replacing(one, b"newer"),
        replacing(tmp_path / "missing" / "other", b"newer"),
    ):
        pass
    assert one.read_bytes() == b"new"
    assert sorted(tmp_path.iterdir()) == [one, other]


def test_a_disk_that_is_full_leaves_a_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/one'$"), replacing(path, b"new" * 10):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_leads_where_it_led_and_a_pipe_stays_one(tmp_path: Path) -> None:
    there, link, pipe = tmp_path / "there", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(there)
    for content in (b"first", b"second"):
        with replacing(link, content):
            pass
        assert link.is_symlink()
        assert there.read_bytes() == content
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDWR), "r+b", buffering=0) as reader:
        with replacing(pipe, b"said"):
            pass
        assert reader.read(4) == b"said"
    assert pipe.is_fifo()
    assert len(list(tmp_path.iterdir())) == 3
