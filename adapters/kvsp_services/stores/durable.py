"""Durable state: the values and logs that roles persist, in one SQLite file, many commits to a sync.

A role's `Persist` effect becomes one batch of writes. `GroupCommitter` takes the batches that came in while
the last sync was under way, commits them in one transaction with one sync, and then tells each of them.
SQLite runs in WAL mode with full synchronisation, so a batch that was told is there after kill -9 and after
a power cut.

A value is a log of one piece. Rows are named by a keyed hash and sealed, so the file shows neither sessions
nor tokens. One process has a file at a time; another can back it up while it is in use.

A backup, and a file that was closed in order, need no write-ahead log and say so in their header; a file in
use, or left by a crash, does not. So a log that is found beside the former belongs to another file. So does
a rollback journal beside any file: none is ever written here. The `.lock` beside a file says whether a store
was begun in it, so that one that lost all its octets is not taken for a new one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from kvsp_core.errors import LocalProtocolError
from kvsp_core.roles.role import Append, Delete, Put, Write
from kvsp_services.stores.sealing import SALT_BYTES, Sealer, StorageError, derive_key, hidden_name

__all__ = ["MIGRATIONS", "DurableStore", "GroupCommitter", "NoStore", "StoreReplaced", "back_up"]

APPLICATION_ID: Final = 0x4B565350  # "KVSP"
MIGRATIONS: Final[tuple[str, ...]] = (
    """
    CREATE TABLE fact (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
    CREATE TABLE piece (name BLOB, position INTEGER, sealed BLOB NOT NULL, PRIMARY KEY (name, position))
        WITHOUT ROWID;
    """,
)
"""The statements that lead from each schema version to the next; the version is their number."""

_BUSY_S: Final = 5
_COPIED_BYTES: Final = 1 << 20
_BEGUN: Final = b"a store was begun in the file beside this one\n"
_OWNER_CONTEXT: Final = b"owner"
_WITHOUT_LOG: Final = "PRAGMA journal_mode = MEMORY"
"""Without a log only the header of a file is changed: a rollback journal would protect nothing, and would
destroy a backup that is put in the place of a file after a crash."""
_WRITE_VERSION_AT: Final = 18
"""Where the header of an SQLite file says whether a write-ahead log belongs to it: 2 if so, else 1."""


class StoreReplaced(StorageError):
    """The files of a store are not where they were when it was opened: somebody removed or replaced them.

    Nothing may be opened in their place without an operator having looked.
    """


class DurableStore:
    """One role's durable state in one file. Its methods block; `GroupCommitter` has a thread for them.

    `owner` is the base URI of the role; a file of another role is refused. Raises `StorageError` where the
    file is in use, of a newer version, of another owner, or does not open with the storage key; where it is
    gone, or empty, but was there before; and where the write-ahead log or rollback journal beside it is
    another file's.
    """

    def __init__(self, path: Path, storage_key: bytes, owner: str) -> None:
        self._path = path
        self._files = (path, _beside(path, "-wal"))
        self._identities: list[tuple[int, int]] | None = None
        self._lengths: dict[bytes, int] = {}
        """Of the values and logs there are; of most others nothing is remembered."""
        _make(path)
        with _storage_errors(path):
            self._lock = _lock(path, f"{path} is in use by another process; stop that first")
        try:
            _check_logs(path)
            _check_begun(path, self._lock)
            _write_log_again(path)
            self._database = _connect(path)
        except BaseException:
            os.close(self._lock)
            raise
        try:
            with _storage_errors(path):
                _migrate(self._database, path)
                salt = self._salt()
            self._names = derive_key(storage_key, "names of durable state", salt)
            self._sealer = Sealer(derive_key(storage_key, "durable state", salt))
            self._check_owner(path, owner)
            self._identities = self._identify()
            with _storage_errors(path):
                _note_begun(path, self._lock)
        except BaseException:
            self.close()
            raise

    def _identify(self) -> list[tuple[int, int]]:
        """Return which files the names of the database and its log lead to now."""
        with _storage_errors(self._path):
            return [(found.st_dev, found.st_ino) for found in map(os.stat, self._files)]

    def _is_in_place(self) -> bool:
        try:
            return self._identities in (None, self._identify())
        except StorageError:
            return False

    def _salt(self) -> bytes:
        self._database.execute("INSERT OR IGNORE INTO fact VALUES ('salt', ?)", (os.urandom(SALT_BYTES),))
        (salt,) = self._database.execute("SELECT value FROM fact WHERE name = 'salt'").fetchone()
        return bytes(salt)

    def _check_owner(self, path: Path, owner: str) -> None:
        row = self._database.execute("SELECT value FROM fact WHERE name = 'owner'").fetchone()
        if row is None:
            sealed = self._sealer.seal(owner.encode(), _OWNER_CONTEXT)
            self._database.execute("INSERT INTO fact VALUES ('owner', ?)", (sealed,))
            return
        try:
            found = self._sealer.open(row[0], _OWNER_CONTEXT).decode()
        except StorageError:
            raise StorageError(
                f"{path} does not open with this storage key; give the key it was made with"
            ) from None
        if found != owner:
            raise StorageError(f"{path} belongs to {found}, not to {owner}; give each role a file of its own")

    def load(self) -> dict[str, dict[str, bytes]]:
        """Return all that is stored: table, then key, then value or log."""
        stored: dict[str, dict[str, bytes]] = {}
        pieces: dict[bytes, tuple[str, str, list[bytes]]] = {}
        with _storage_errors(self._path):
            rows = self._database.execute("SELECT name, position, sealed FROM piece ORDER BY name, position")
            for name, position, sealed in rows:
                table, key, value = _parted(self._sealer.open(sealed, _context(name, position)))
                pieces.setdefault(name, (table, key, []))[2].append(value)
        self._lengths = {}
        for name, (table, key, values) in pieces.items():
            joined = b"".join(values)
            stored.setdefault(table, {})[key] = joined
            self._lengths[name] = len(joined)
        return stored

    def commit(self, batches: Iterable[Sequence[Write]]) -> None:
        """Make these batches durable, all or none, with one sync.

        Raises `StorageError` where that failed: it is then not known what is stored; discard the store and
        the role, and open them anew. Raises `StoreReplaced` where the file is not where it was.
        """
        try:
            with _storage_errors(self._path):
                self._write(batches)
        finally:
            if not self._is_in_place():  # what was written is where nobody finds it again
                raise StoreReplaced(
                    f"{self._path} was replaced while it was in use; stop a role before that"
                    if self._path.exists()
                    else f"{self._path} is gone; put a backup in its place (kvsp backup makes them)"
                )

    def _write(self, batches: Iterable[Sequence[Write]]) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for batch in batches:
                for write in batch:
                    self._apply(write)
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _apply(self, write: Write) -> None:
        name = hidden_name(self._names, write.table, write.key)
        match write:
            case Put(value=value):
                self._cut(write, name, 0)
                self._add(write, name, 0, value)
            case Append(offset=offset, value=value):
                length = self._length(name)
                if offset > length:
                    raise LocalProtocolError(
                        f"append to {write.table} at {offset}, but {length} octets are there"
                    )
                if offset < length:
                    self._cut(write, name, offset)
                if value:
                    self._add(write, name, offset, value)
            case Delete():
                self._cut(write, name, 0)
                del self._lengths[name]

    def _length(self, name: bytes) -> int:
        """Return the octets under a name, looked up once and then remembered."""
        if name not in self._lengths:
            row = self._database.execute(
                "SELECT position, sealed FROM piece WHERE name = ? ORDER BY position DESC LIMIT 1", (name,)
            ).fetchone()
            opened = _parted(self._sealer.open(row[1], _context(name, row[0]))) if row else None
            self._lengths[name] = row[0] + len(opened[2]) if opened else 0
        return self._lengths[name]

    def _cut(self, write: Write, name: bytes, offset: int) -> None:
        """Remove what stands under a name from an offset on; a piece across it keeps what is before."""
        across = None
        if offset:
            across = self._database.execute(
                "SELECT position, sealed FROM piece WHERE name = ? AND position < ?"
                " ORDER BY position DESC LIMIT 1",
                (name, offset),
            ).fetchone()
        self._database.execute("DELETE FROM piece WHERE name = ? AND position >= ?", (name, offset))
        self._lengths[name] = offset
        if across is not None:
            position, sealed = across
            value = _parted(self._sealer.open(sealed, _context(name, position)))[2]
            self._add(write, name, position, value[: offset - position])

    def _add(self, write: Write, name: bytes, position: int, value: bytes) -> None:
        sealed = self._sealer.seal(_joined(write.table, write.key, value), _context(name, position))
        self._database.execute("INSERT OR REPLACE INTO piece VALUES (?, ?, ?)", (name, position, sealed))
        self._lengths[name] = position + len(value)

    def close(self) -> None:
        """Close the file and let others have it; once is enough."""
        if self._is_in_place():
            with suppress(sqlite3.Error):  # a backup under way, or a full disk: the log then stays
                self._database.execute(_WITHOUT_LOG)
        self._database.close()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def back_up(path: Path, target: Path) -> None:
    """Copy a store to a new file, consistent even while a role is using it; it opens with the same
    storage key. Where that fails there is no such file. Raises `OSError` where it cannot be made."""
    if not path.exists():
        raise StorageError(f"{path} does not exist")
    if path.is_file() and not _holds_something(path):
        raise StorageError(f"{path} is empty; there is nothing to back up")
    _check_logs(path)
    _copy(path, target)


class GroupCommitter:
    """A thread that makes batches durable, as many at once as have come in.

    `submit` never blocks; `done` is called in this thread, in the order of submission, with None or the
    error. After an error everything that was submitted and is submitted later gets that error: what is
    stored is not known any more, and the role is rebuilt from a store opened anew.
    """

    def __init__(self, store: DurableStore) -> None:
        self._store = store
        self._pending: list[tuple[Sequence[Write], Callable[[Exception | None], None]]] = []
        self._wake = threading.Condition()
        self._closing = False
        self._error: Exception | None = None
        self.syncs = 0
        self._thread = threading.Thread(target=self._run, name="kvsp-commit", daemon=True)
        self._thread.start()

    def submit(self, writes: Sequence[Write], done: Callable[[Exception | None], None]) -> None:
        """Take a batch in, all or none of which becomes durable, and later call `done`."""
        with self._wake:
            if self._closing:
                raise LocalProtocolError("the store is closing; nothing more can be submitted")
            self._pending.append((writes, done))
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending or self._closing)
                group, self._pending = self._pending, []
            if not group:
                return
            if self._error is None:
                try:
                    self._store.commit(writes for writes, _ in group)
                    self.syncs += 1
                except Exception as error:
                    self._error = error
            for _, done in group:
                done(self._error)

    def close(self) -> None:
        """Commit what was submitted, then end the thread and close the store."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._store.close()


class NoStore:
    """Where there is no store: a role that wants to make something durable fails."""

    def submit(self, writes: Sequence[Write], done: Callable[[Exception | None], None]) -> None:
        """Refuse a batch."""
        done(StorageError("this role persists state; set storage_key_file in its configuration"))

    def close(self) -> None:
        """Do nothing."""


# The file -----------------------------------------------------------------------------------------


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    """Turn what SQLite raises into `StorageError`, with the file's name."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        damaged = getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
        advice = "; put a backup in its place (kvsp backup makes them)" if damaged else ""
        raise StorageError(f"{path}: {error}{advice}") from error
    except sqlite3.Error as error:
        raise StorageError(f"{path}: {error}") from error
    except OSError as error:
        raise StorageError(f"{error.filename or path}: {error.strerror}") from error


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _make(path: Path) -> None:
    """Make the file where it was never there; it is there before its lock is."""
    with _storage_errors(path):
        left = [_beside(path, ending) for ending in (".lock", "-wal") if _beside(path, ending).exists()]
        if left and not path.exists():  # an empty one would forget what was acknowledged
            raise StorageError(
                f"{path} is gone; put a backup in its place (kvsp backup makes them),"
                f" or remove {' and '.join(map(str, left))} to begin empty"
            )
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def _check_logs(path: Path) -> None:
    """Refuse a file that the log or journal beside it does not belong to: together they are neither.

    Not for a file that this process has open in SQLite, whose locks would be lost.
    """
    with _storage_errors(path):
        if _holds_something(journal := _beside(path, "-journal")):
            left = [journal]
        elif _holds_something(log := _beside(path, "-wal")) and not _has_log(path):
            left = [log, _beside(path, "-shm")]
        else:
            return
    raise StorageError(
        f"{left[0]} belongs to a file that {path.name} has replaced; to go on with {path.name} as it is,"
        f" remove {' and '.join(file.name for file in left)}"
    )


def _write_log_again(path: Path) -> None:
    """Have the log that a crash or a failed sync left on the disk as it is shown.

    Octets that could not be synchronised once are shown by the system, and never written by themselves any
    more: after a power cut the log would end there, and what was told since would be behind it.
    """
    log = _beside(path, "-wal")
    with _storage_errors(path):
        if not _holds_something(log):
            return
        descriptor, position = os.open(log, os.O_RDWR), 0
        try:
            while octets := os.pread(descriptor, _COPIED_BYTES, position):
                position += os.pwrite(descriptor, octets, position)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_begun(path: Path, lock: int) -> None:
    """Refuse an empty file in which a store was begun: whoever emptied it, what was acknowledged is gone."""
    with _storage_errors(path):
        if path.stat().st_size or not os.fstat(lock).st_size:
            return
    raise StorageError(
        f"{path} is empty, and was not before; put a backup in its place (kvsp backup makes them),"
        f" or remove {_beside(path, '.lock')} to begin empty"
    )


def _note_begun(path: Path, lock: int) -> None:
    """Have the lock of a file say from now on, through a power cut too, that a store was begun in it."""
    if os.fstat(lock).st_size:
        return
    os.write(lock, _BEGUN)
    os.fsync(lock)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _holds_something(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _has_log(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(_WRITE_VERSION_AT + 1)[_WRITE_VERSION_AT:] == b"\2"


def _copy(path: Path, target: Path) -> None:
    """Copy a store to a new file, which has its name once it is whole; nothing stays where that fails.

    What is locked meanwhile is a file of its own: where a network drive is copied to, SQLite's locks and
    this one are of a kind, and would keep each other out.
    """
    partial = _beside(target, ".partial")
    try:
        lock = _lock(partial, f"{target} is being made by another process; wait, or name another file")
    except OSError as error:
        raise OSError(error.errno, error.strerror, target) from None
    try:
        if target.exists():
            raise _there_already(target)
        partial.unlink(missing_ok=True)  # of a backup that was killed
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            with _storage_errors(path):
                _copy_rows(path, partial)
                _publish(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    finally:
        _beside(partial, ".lock").unlink(missing_ok=True)
        os.close(lock)


def _publish(partial: Path, target: Path) -> None:
    """Give a whole file its name. One that came meanwhile stays, but where files have one name only."""
    try:
        os.link(partial, target)
    except FileExistsError:
        raise _there_already(target) from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        partial.rename(target)


def _there_already(target: Path) -> StorageError:
    return StorageError(f"{target} exists; name a new file, or move that away")


def _copy_rows(path: Path, partial: Path) -> None:
    with (
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(partial)) as copy,
    ):
        copy.execute(_WITHOUT_LOG)
        source.backup(copy)
        copy.execute(_WITHOUT_LOG)


def _lock(path: Path, busy: str) -> int:
    """Lock the `.lock` beside a file, made where it is missing. Raises `StorageError` where it is `busy`."""
    lock = _beside(path, ".lock")
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise StorageError(busy) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                return descriptor
        os.close(descriptor)  # its owner removed it meanwhile: others would lock another one


def _connect(path: Path) -> sqlite3.Connection:
    with _storage_errors(path):
        database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        if database.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            database.execute(_WITHOUT_LOG)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        return database


def _migrate(database: sqlite3.Connection, path: Path) -> None:
    """Bring the schema to the newest version; a file that holds something already is backed up first."""
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID and tables:
        raise StorageError(f"{path} is a database of another program; name another file")
    if version > len(MIGRATIONS):
        raise StorageError(
            f"{path} is of version {version}, and this program knows {len(MIGRATIONS)}; update it"
        )
    if 0 < version < len(MIGRATIONS):
        _copy(path, _beside(path, f".version-{version}"))
    for number in range(version, len(MIGRATIONS)):
        # A step that fails leaves its transaction open; closing the connection takes it back.
        database.executescript(
            f"BEGIN IMMEDIATE; {MIGRATIONS[number]};"
            f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {number + 1}; COMMIT;"
        )


def _context(name: bytes, position: int) -> bytes:
    return name + position.to_bytes(8, "big")


def _joined(table: str, key: str, value: bytes) -> bytes:
    return b"%b\0%b\0%b" % (table.encode(), key.encode(), value)


def _parted(opened: bytes) -> tuple[str, str, bytes]:
    table, key, value = opened.split(b"\0", 2)
    return table.decode(), key.decode(), value
