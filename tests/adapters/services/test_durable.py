"""What a role persists is there again: after kill -9, after a power cut, and only with the right key."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import sqlite3
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp_core.errors import LocalProtocolError
from kvsp_core.roles.role import Append, Delete, Put, Write
from kvsp_services.stores import durable
from kvsp_services.stores.durable import DurableStore, GroupCommitter, StoreReplaced, back_up
from kvsp_services.stores.sealing import StorageError
from tests.adapters.services.lossy_disk import RecordingDisk, supported

KEY = bytes(range(32))
OWNER = "https://controller.example/kvsp/"


def open_store(path: Path, key: bytes = KEY, owner: str = OWNER) -> DurableStore:
    store = DurableStore(path, key, owner)
    store.load()
    return store


def reopened(path: Path) -> dict[str, dict[str, bytes]]:
    with closing(DurableStore(path, KEY, OWNER)) as store:
        return store.load()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.sqlite"


def test_a_new_store_is_empty(path: Path) -> None:
    assert reopened(path) == {}


def test_values_logs_and_deletions_come_back(path: Path) -> None:
    store = open_store(path)
    store.commit([[Put("map", "a", b"1"), Put("map", "b", b"2"), Append("log", "s", 0, b"abc")]])
    store.commit([[Put("map", "a", b"3"), Delete("map", "b"), Append("log", "s", 3, b"def")]])
    store.close()
    assert reopened(path) == {"map": {"a": b"3"}, "log": {"s": b"abcdef"}}


@pytest.mark.parametrize(
    ("offset", "expected"), [(0, b"xy"), (1, b"axy"), (3, b"abcxy"), (4, b"abcdxy"), (6, b"abcdefxy")]
)
def test_an_append_replaces_what_stood_from_there(path: Path, offset: int, expected: bytes) -> None:
    store = open_store(path)
    store.commit([[Append("log", "s", 0, b"abc"), Append("log", "s", 3, b"def")]])
    store.commit([[Append("log", "s", offset, b"xy")]])
    store.close()
    assert reopened(path)["log"]["s"] == expected


def test_an_append_beyond_the_end_changes_nothing(path: Path) -> None:
    store = open_store(path)
    store.commit([[Append("log", "s", 0, b"abc")]])
    with pytest.raises(LocalProtocolError, match="3 octets"):
        store.commit([[Put("map", "a", b"1"), Append("log", "s", 4, b"d")]])
    store.close()
    assert reopened(path) == {"log": {"s": b"abc"}}


names = st.sampled_from(["a", "b"])
writes = st.one_of(
    st.builds(Put, st.just("t"), names, st.binary(max_size=8)),
    st.builds(Append, st.just("t"), names, st.integers(0, 12), st.binary(max_size=8)),
    st.builds(Delete, st.just("t"), names),
)


def applied(model: dict[str, bytes], write: Write) -> None:
    match write:
        case Put(key=key, value=value):
            model[key] = value
        case Append(key=key, offset=offset, value=value):
            kept = model.get(key, b"")
            if offset <= len(kept):
                model[key] = kept[:offset] + value
        case Delete(key=key):
            model.pop(key, None)


@given(batches=st.lists(st.lists(writes, max_size=4), max_size=8), reopen=st.booleans())
def test_any_writes_give_what_a_dictionary_gives(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Write]], reopen: bool
) -> None:
    path = tmp_path_factory.mktemp("store") / "state.sqlite"
    store = open_store(path)
    model: dict[str, bytes] = {}
    for batch in batches:
        legal = []
        for write in batch:
            if isinstance(write, Append) and write.offset > len(model.get(write.key, b"")):
                continue
            legal.append(write)
            applied(model, write)
        store.commit([legal])
        if reopen:
            store.close()
            store = open_store(path)
    store.close()
    found = reopened(path).get("t", {})
    assert {k: v for k, v in found.items() if v} == {k: v for k, v in model.items() if v}


# Who may open it ----------------------------------------------------------------------------------


def test_another_key_is_refused_plainly(path: Path) -> None:
    open_store(path).close()
    with pytest.raises(StorageError, match="storage key"):
        open_store(path, key=bytes(32))


def test_another_owner_is_refused(path: Path) -> None:
    open_store(path).close()
    with pytest.raises(StorageError, match="belongs to"):
        open_store(path, owner="https://other.example/kvsp/")


def test_a_second_process_is_refused_until_the_first_has_closed(path: Path) -> None:
    store = open_store(path)
    with pytest.raises(StorageError, match="in use"):
        open_store(path)
    store.close()
    open_store(path).close()


def test_a_database_of_another_program_is_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE theirs (x)")
    with pytest.raises(StorageError, match="another program"):
        open_store(path)


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"this is a letter to my aunt" * 100)
    with pytest.raises(StorageError, match=r"state\.sqlite"):
        open_store(path)


@pytest.mark.requirement("SE-5")
def test_files_are_the_owners_only_and_show_nothing(path: Path) -> None:
    store = open_store(path)
    session = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
    store.commit([[Append("sessions", session, 0, b"token text")]])
    for file in path.parent.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file.name
        content = file.read_bytes()
        assert session.encode() not in content
        assert b"token text" not in content
    store.close()


def test_an_altered_row_is_noticed(path: Path) -> None:
    store = open_store(path)
    store.commit([[Put("map", "a", b"1"), Put("map", "b", b"2")]])
    store.close()
    with sqlite3.connect(path) as database:
        first, second = database.execute("SELECT name, sealed FROM piece").fetchall()
        database.execute("UPDATE piece SET sealed = ? WHERE name = ?", (first[1], second[0]))
    with pytest.raises(StorageError, match="not what was stored"):
        reopened(path)


# Versions and backups -----------------------------------------------------------------------------


def test_an_older_version_is_migrated_after_a_backup(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(path)
    store.commit([[Put("map", "a", b"1")]])
    store.close()
    step = "CREATE TABLE later (x)"
    monkeypatch.setattr(durable, "MIGRATIONS", (*durable.MIGRATIONS, step))
    assert reopened(path) == {"map": {"a": b"1"}}
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (2,)
    monkeypatch.undo()
    with pytest.raises(StorageError, match="update it"):
        open_store(path)
    assert reopened(path.with_name("state.sqlite.version-1")) == {"map": {"a": b"1"}}


def test_a_migration_that_fails_leaves_the_file_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(path)
    store.commit([[Put("map", "a", b"1")]])
    store.close()
    step = "CREATE TABLE later (x); INSERT INTO nowhere VALUES (1)"
    monkeypatch.setattr(durable, "MIGRATIONS", (*durable.MIGRATIONS, step))
    with pytest.raises(StorageError, match="nowhere"):
        open_store(path)
    monkeypatch.undo()
    assert reopened(path) == {"map": {"a": b"1"}}


def test_what_is_deleted_leaves_nothing_behind(path: Path) -> None:
    with closing(open_store(path)) as store:
        for number in range(200):
            name = f"s{number}"
            store.commit([[Put("map", name, b"1"), Append("log", name, 0, b"abc")]])
            store.commit([[Delete("map", name), Delete("log", name)]])
        assert not store._lengths
        assert store.load() == {}


@pytest.mark.requirement("CP-2")
@pytest.mark.parametrize("suffix", ["", "-wal"])
@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_told_once_the_file_is_not_where_it_was(path: Path, suffix: str, replaced: bool) -> None:
    store = open_store(path)
    store.commit([[Put("map", "a", b"1")]])
    file = path.with_name(path.name + suffix)
    octets = file.read_bytes()
    file.rename(path.with_name("away"))
    if replaced:
        file.write_bytes(octets)
    with pytest.raises(StoreReplaced, match=r"replaced while it was in use|is gone; put a backup"):
        store.commit([[Put("map", "b", b"2")]])
    store.close()


def left_by_a_crash(path: Path, directory: Path) -> Path:
    """Copy what is on disk while a store is in use, as kill -9 leaves it, to a directory of its own."""
    directory.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        shutil.copy(file, directory)
    return directory / path.name


def test_a_directory_that_was_copied_with_its_log_opens(path: Path, tmp_path: Path) -> None:
    with closing(open_store(path)) as store:
        store.commit([[Put("map", "a", b"1")]])
        copied = left_by_a_crash(path, tmp_path / "copied")
    assert copied.with_name("state.sqlite-wal").stat().st_size
    assert reopened(copied) == {"map": {"a": b"1"}}


@pytest.mark.requirement("CP-2")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("closed_file", [False, True])
def test_a_file_is_not_opened_with_the_log_of_another(
    path: Path, tmp_path: Path, in_place: bool, closed_file: bool
) -> None:
    backup = tmp_path / "backup"
    with closing(open_store(path)) as store:
        store.commit([[Put("map", "a", b"1")]])
        if not closed_file:
            back_up(path, backup)
    if closed_file:
        shutil.copy(path, backup)
    with closing(open_store(path)) as store:
        store.commit([[Put("map", str(number), bytes(5000))] for number in range(9)])
        left = left_by_a_crash(path, tmp_path / "left")
    if in_place:
        shutil.copyfile(backup, left)  # as cp does: it stays the same file
    else:
        backup.rename(left)
    log = left.with_name("state.sqlite-wal")
    octets = log.read_bytes()
    for _ in range(2):
        with pytest.raises(StorageError, match=r"has replaced; .* remove .*-wal and .*-shm"):
            reopened(left)
        with pytest.raises(StorageError, match="has replaced"):
            back_up(left, tmp_path / "mixed")
    assert log.read_bytes() == octets
    assert not (tmp_path / "mixed").exists()
    log.unlink()
    left.with_name("state.sqlite-shm").unlink()
    assert reopened(left) == {"map": {"a": b"1"}}


def journal_of(page: bytes, pages: int) -> bytes:
    """Return a rollback journal that gives a file back its first page and its size, as SQLite writes it."""
    nonce = 12_345
    checksum = (nonce + sum(page[len(page) - 200 : 0 : -200])) & 0xFFFFFFFF
    head = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + struct.pack(">5L", 1, nonce, pages, 512, len(page))
    return head.ljust(512, b"\0") + struct.pack(">L", 1) + page + struct.pack(">L", checksum)


@pytest.mark.requirement("CP-2")
def test_a_file_is_not_opened_with_a_rollback_journal(path: Path, tmp_path: Path) -> None:
    """SQLite would make the file as small as the one the journal comes from."""
    open_store(tmp_path / "other").close()
    other = (tmp_path / "other").read_bytes()
    with closing(open_store(path)) as store:
        store.commit([[Put("map", str(number), bytes(5000))] for number in range(9)])
    octets = path.read_bytes()
    journal = path.with_name("state.sqlite-journal")
    journal.write_bytes(journal_of(other[:4096], len(other) // 4096))
    for _ in range(2):
        with pytest.raises(StorageError, match=r"has replaced; .* remove state\.sqlite-journal$"):
            reopened(path)
        with pytest.raises(StorageError, match="has replaced"):
            back_up(path, tmp_path / "mixed")
    assert path.read_bytes() == octets
    journal.unlink()
    assert len(reopened(path)["map"]) == 9


@pytest.mark.requirement("CP-2")
def test_a_backup_put_in_place_of_a_store_in_use_is_not_mixed_with_it(path: Path, tmp_path: Path) -> None:
    store = open_store(path)
    store.commit([[Put("map", "a", b"1")]])
    back_up(path, tmp_path / "backup")
    (tmp_path / "backup").rename(path)
    with pytest.raises(StoreReplaced):
        store.commit([[Put("map", str(number), bytes(5000))] for number in range(9)])
    store.close()
    with pytest.raises(StorageError, match="has replaced"):
        reopened(path)


@pytest.mark.requirement("CP-2")
@pytest.mark.parametrize("kept", [".lock", "-wal"])
def test_a_file_that_is_gone_is_not_made_anew(path: Path, kept: str) -> None:
    with closing(open_store(path)) as store:
        store.commit([[Put("map", "a", b"1")]])
        octets = path.with_name(path.name + "-wal").read_bytes()
    path.unlink()
    path.with_name(path.name + ".lock").unlink()
    left = path.with_name(path.name + kept)
    left.write_bytes(octets)
    for _ in range(2):
        with pytest.raises(StorageError, match=rf"is gone; put .* or remove .*{kept} to begin empty"):
            open_store(path)
        assert not path.exists()
    left.unlink()
    assert reopened(path) == {}


@pytest.mark.requirement("CP-2")
def test_a_file_that_was_emptied_is_not_taken_for_a_new_one(path: Path, tmp_path: Path) -> None:
    with closing(open_store(path)) as store:
        store.commit([[Put("map", "a", b"1")]])
        back_up(path, tmp_path / "backup")
    for _ in range(2):
        path.write_bytes(b"")
        with pytest.raises(StorageError, match=r"is empty, .*put a backup .* or remove .*\.lock to begin"):
            open_store(path)
        assert path.stat().st_size == 0
        with pytest.raises(StorageError, match="nothing to back up"):
            back_up(path, tmp_path / "another")
        path.write_bytes((tmp_path / "backup").read_bytes())
        assert reopened(path) == {"map": {"a": b"1"}}
    path.write_bytes(b"")
    path.with_name(path.name + ".lock").unlink()
    assert reopened(path) == {}


@pytest.mark.requirement("CP-2")
def test_a_store_of_an_older_program_is_protected_once_it_was_opened(path: Path) -> None:
    open_store(path).close()
    path.with_name(path.name + ".lock").write_bytes(b"")
    assert reopened(path) == {}
    path.write_bytes(b"")
    with pytest.raises(StorageError, match="is empty"):
        open_store(path)


def test_a_first_start_that_was_killed_before_there_was_a_store_is_no_store(path: Path) -> None:
    path.write_bytes(b"")
    path.with_name(path.name + ".lock").write_bytes(b"")
    assert reopened(path) == {}


def test_a_store_that_fails_to_open_lets_go_of_its_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: DurableStore) -> list[tuple[int, int]]:
        raise StorageError("Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(DurableStore, "_identify", fails)
        with pytest.raises(StorageError, match="Input/output"):
            open_store(path)
    open_store(path).close()


def test_a_backup_is_taken_while_the_store_is_in_use(path: Path) -> None:
    store = open_store(path)
    store.commit([[Put("map", "a", b"1")]])
    target = path.with_name("copy.sqlite")
    back_up(path, target)
    store.commit([[Put("map", "a", b"2")]])
    store.close()
    assert reopened(target) == {"map": {"a": b"1"}}
    assert target.stat().st_mode & 0o077 == 0
    with pytest.raises(StorageError, match="exists"):
        back_up(path, target)


def test_a_backup_is_of_the_file_with_that_name(tmp_path: Path) -> None:
    path, target = tmp_path / "state?mode=rwc#%41.sqlite", tmp_path / "copy.sqlite"
    with closing(open_store(path)) as store:
        store.commit([[Put("map", "a", b"1")]])
        back_up(path, target)
    assert reopened(target) == {"map": {"a": b"1"}}
    assert not (tmp_path / "state").exists()


def test_a_backup_has_its_name_once_it_is_whole(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is killed leaves nothing that looks like a backup, and another one can be made."""
    open_store(path).close()
    target = tmp_path / "copy.sqlite"

    def killed(*_: object, **__: object) -> None:
        os._exit(9)

    pid = os.fork()
    if not pid:
        try:
            monkeypatch.setattr(os, "link", killed)
            back_up(path, target)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert not target.exists()
    back_up(path, target)
    assert [file.name for file in tmp_path.glob("copy.sqlite*")] == ["copy.sqlite"]
    assert reopened(target) == {}


@pytest.fixture
def during_a_backup(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Have something happen, once, when the next backup is about to write its copy."""

    def have(happen: Callable[[], None]) -> None:
        connect = sqlite3.connect

        def connected(name: str | Path, **options: Any) -> sqlite3.Connection:
            if str(name).endswith(".partial"):
                monkeypatch.undo()
                happen()
            return connect(name, **options)

        monkeypatch.setattr(sqlite3, "connect", connected)

    return have


@pytest.mark.requirement("CP-2")
def test_two_backups_to_one_name_do_not_spoil_each_other(
    path: Path, during_a_backup: Callable[[Callable[[], None]], None]
) -> None:
    with closing(open_store(path)) as store:
        store.commit([[Put("map", "a", b"1")]])
    target, refused = path.with_name("copy.sqlite"), []

    def second() -> None:
        with pytest.raises(StorageError, match=r"copy\.sqlite is being made by another process"):
            back_up(path, target)
        refused.append(True)

    during_a_backup(second)
    back_up(path, target)
    assert refused
    assert [file.name for file in path.parent.glob("copy.sqlite*")] == ["copy.sqlite"]
    assert reopened(target) == {"map": {"a": b"1"}}


def test_a_backup_does_not_take_the_name_of_a_file_that_came_meanwhile(
    path: Path, during_a_backup: Callable[[Callable[[], None]], None]
) -> None:
    open_store(path).close()
    target = path.with_name("copy.sqlite")

    def another() -> None:
        target.write_bytes(b"another")

    during_a_backup(another)
    with pytest.raises(StorageError, match=r"copy\.sqlite exists; name a new file"):
        back_up(path, target)
    assert target.read_bytes() == b"another"
    assert [file.name for file in path.parent.glob("copy.sqlite*")] == ["copy.sqlite"]


def test_a_backup_gets_its_name_where_a_file_can_have_but_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on FAT, and on some network drives."""
    open_store(path).close()
    target = path.with_name("copy.sqlite")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    back_up(path, target)
    open_store(target).close()
    assert not list(path.parent.glob("copy.sqlite.partial*"))


def test_a_lock_that_its_owner_removed_counts_for_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One backup opened it while another one still had it, and locks it once that is over."""
    lock, flock = path.with_name("state.sqlite.lock"), fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        lock.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with closing(open_store(path)), pytest.raises(StorageError, match="in use by another process"):
        open_store(path)


def test_a_backup_that_cannot_be_opened_leaves_no_file(path: Path, tmp_path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)
    with pytest.raises(StorageError, match="unable to open"):
        back_up(path, tmp_path / "copy.sqlite")
    assert not list(tmp_path.glob("copy.sqlite*"))


# Many commits, one sync ---------------------------------------------------------------------------


def submit_and_wait(committer: GroupCommitter, batches: Sequence[Sequence[Write]]) -> list[Exception | None]:
    outcomes: list[Exception | None] = []
    all_told = threading.Event()

    def done(error: Exception | None) -> None:
        outcomes.append(error)
        if len(outcomes) == len(batches):
            all_told.set()

    for batch in batches:
        committer.submit(batch, done)
    assert all_told.wait(60)
    return outcomes


def test_many_commits_share_a_sync(path: Path) -> None:
    committer = GroupCommitter(open_store(path))
    outcomes = submit_and_wait(committer, [[Put("map", str(n), b"x")] for n in range(500)])
    committer.close()
    assert outcomes == [None] * 500
    assert committer.syncs < 250
    assert len(reopened(path)["map"]) == 500


def test_after_an_error_nothing_more_is_stored(path: Path) -> None:
    committer = GroupCommitter(open_store(path))
    (first,) = submit_and_wait(committer, [[Append("log", "s", 5, b"gap")]])
    (second,) = submit_and_wait(committer, [[Put("map", "a", b"1")]])
    committer.close()
    assert isinstance(first, LocalProtocolError)
    assert second is first
    assert reopened(path) == {}


def test_what_was_submitted_before_closing_is_stored(path: Path) -> None:
    committer = GroupCommitter(open_store(path))
    committer.submit([Put("map", "a", b"1")], lambda _: None)
    committer.close()
    with pytest.raises(LocalProtocolError, match="closing"):
        committer.submit([Put("map", "b", b"1")], lambda _: None)
    assert reopened(path) == {"map": {"a": b"1"}}


# Crashes ------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from typing import Any
from kvsp_core.roles.role import Append, Put
from kvsp_services.stores.durable import DurableStore, GroupCommitter

store = DurableStore(Path(sys.argv[1]), bytes(range(32)), "https://controller.example/kvsp/")
stored = store.load()
committer = GroupCommitter(store)
start = len(stored.get("log", {}).get("s", b"")) // 4

def told(number):
    def done(error):
        if error is None:
            sys.stdout.write(f"{number}\\n")
            sys.stdout.flush()
    return done

for number in range(start, start + 5000):
    octets = number.to_bytes(4, "big")
    committer.submit([Append("log", "s", number * 4, octets), Put("last", "n", octets)], told(number))
committer.close()
"""


@pytest.mark.requirement("CP-2")
def test_what_was_told_is_there_after_kill_9(path: Path) -> None:
    chance = random.Random(2)
    told = -1
    for _ in range(5):
        command = [sys.executable, "-c", WRITER, str(path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
            assert writer.stdout is not None
            for _ in range(chance.randrange(1, 400)):
                line = writer.stdout.readline()
                told = int(line)
            writer.send_signal(signal.SIGKILL)
            told = max([told, *(int(line) for line in writer.stdout if line.endswith("\n"))])
        stored = reopened(path)
        log = stored["log"]["s"]
        assert len(log) >= (told + 1) * 4
        assert log == b"".join(n.to_bytes(4, "big") for n in range(len(log) // 4))
        assert stored["last"]["n"] == log[-4:], "a batch is all or nothing"


@pytest.fixture
def disk() -> Iterator[RecordingDisk]:
    if not supported():
        pytest.skip("this Python's SQLite is built in and cannot be looked into")
    with RecordingDisk() as disk:
        yield disk


def power_cuts(disk: RecordingDisk, path: Path, rounds: int) -> None:
    """Commit, cut the power after each commit, and look at what the files then hold."""
    chance = random.Random(5)
    with closing(open_store(path)) as store:
        for number in range(rounds):
            store.commit(
                [[Append("log", "s", number, bytes([number % 256])), Put("last", "n", b"%d" % number)]]
            )
            for some in (None, chance):
                found = path.parent / f"after-{number}-{some is not None}"
                found.mkdir()
                disk.cut(path.parent, found, some)
                stored = reopened(found / path.name)
                assert stored["last"]["n"] == b"%d" % number
                assert len(stored["log"]["s"]) == number + 1


@pytest.mark.requirement("CP-2")
def test_what_was_told_is_there_after_a_power_cut(disk: RecordingDisk, path: Path) -> None:
    power_cuts(disk, path, 40)
    assert disk.syncs >= 40


def test_the_power_cut_sees_a_missing_sync(disk: RecordingDisk, path: Path) -> None:
    disk.drop_syncs = True
    with pytest.raises((AssertionError, KeyError, StorageError)):
        power_cuts(disk, path, 40)


@pytest.mark.requirement("CP-2")
def test_what_is_told_after_a_failed_sync_is_there_after_a_power_cut(
    disk: RecordingDisk, path: Path, tmp_path: Path
) -> None:
    """What the system did not write, and says no more of, must not stand between what is stored later."""
    store = open_store(path)
    store.commit([[Put("last", "n", b"1")]])
    disk.fail_syncs = True
    with pytest.raises(StorageError):
        store.commit([[Put("last", "n", b"2")]])
    store.close()
    disk.fail_syncs = False
    with closing(open_store(path)) as again:  # as the role is rebuilt
        shown = again.load()["last"]["n"]
        again.commit([[Put("next", "n", b"3")]])
        found = tmp_path / "found"
        found.mkdir()
        disk.cut(path.parent, found)
        assert reopened(found / path.name) == {"last": {"n": shown}, "next": {"n": b"3"}}


def test_no_rollback_journal_is_written(disk: RecordingDisk, path: Path, tmp_path: Path) -> None:
    for number in range(2):
        with closing(open_store(path)) as store:
            store.commit([[Put("map", "a", b"1")]])
            back_up(path, tmp_path / f"copy{number}")
    endings = {Path(opened).name.partition("-")[2] for opened in disk.opened}
    assert "wal" in endings
    assert "journal" not in endings
