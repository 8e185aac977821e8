"""The tier in files: blocks sealed with AES-256-GCM (requirements SE-4 and SE-5).

A file is named by a keyed hash of what it holds, in a directory for each scope. It is sealed layer by layer
under a key of its own, its name and the place in it authenticated, so a torn, altered or swapped file is
noticed, dropped and reported as corrupt. Files are not synchronised one by one: an orderly stop
synchronises all of them and says so in a marker, and without that marker every file is read and checked
before it counts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import FileIO
from itertools import islice, takewhile
from pathlib import Path
from typing import Final

import attrs
import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvsp_client.files import replacing
from kvsp_core.container_header import ContainerHeader
from kvsp_core.roles.role import BlockName, JobFault, StoredBlock
from kvsp_services.stores.blocks import BlockFault, part_of
from kvsp_services.stores.sealing import SALT_BYTES, TAG_BYTES, Sealer, StorageError, derive_key, hidden_name

__all__ = ["FileTier", "is_tier"]

_MAGIC: Final = b"KVSPblk\x01"
_LENGTH: Final = struct.Struct(">I")
_PREFIX_BYTES: Final = len(_MAGIC) + SALT_BYTES + _LENGTH.size
_MAX_SEALED_HEADER_BYTES: Final = 1 << 24
_CLEAN: Final = "clean-stop"
_UNFINISHED: Final = ".part"
_FAULTS: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), JobFault.FULL),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN), JobFault.BUSY),
}
"""What errors of the system say of a tier; of others, that it does not work."""
_KEY_CHECK: Final = "key-check"
_LOCK: Final = "lock"


class _Header(msgspec.Struct, array_like=True):
    """What stands in the sealed header of a file."""

    compat_id: str
    scope_id: str
    block_key: str
    codec: int
    first_layer: int
    token_count: int
    sections: tuple[tuple[int, int], ...]
    layer_digests: tuple[str, ...]
    repr_digest: str
    stored_at_ms: int

    @classmethod
    def of(cls, block: StoredBlock, stored_at_ms: int) -> _Header:
        name, header = block.name, block.header
        return cls(
            compat_id=name.compat_id,
            scope_id=name.scope_id,
            block_key=name.block_key,
            codec=header.codec,
            first_layer=header.first_layer,
            token_count=header.token_count,
            sections=header.sections,
            layer_digests=block.layer_digests,
            repr_digest=block.repr_digest,
            stored_at_ms=stored_at_ms,
        )

    def block(self) -> StoredBlock:
        header = ContainerHeader(
            codec=self.codec,
            first_layer=self.first_layer,
            token_count=self.token_count,
            sections=self.sections,
        )
        name = BlockName(self.compat_id, self.scope_id, self.block_key)
        return StoredBlock(name, header, self.layer_digests, self.repr_digest)


class _TornError(Exception):
    """A file is shorter than it says, or not one of ours."""


_DAMAGED: Final = (InvalidTag, msgspec.MsgspecError, _TornError)


def is_tier(directory: Path) -> bool:
    """Return whether a directory has been that of a tier."""
    return (directory / _KEY_CHECK).is_file()


class FileTier:
    """Blocks in files below a directory that only the owner can read, at most `capacity_bytes` of sections.

    What was stored longer than `retention_ms` ago is deleted at the start, and named by `aged` later on, for
    the role to delete; `wall_clock_ms` tells the time that ages are counted by, since they go on while the
    process does not.
    """

    blocking = True

    def __init__(
        self,
        directory: Path,
        storage_key: bytes,
        capacity_bytes: int,
        *,
        retention_ms: int | None = None,
        wall_clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._directory = directory
        self._storage_key = storage_key
        self._names = derive_key(storage_key, "names of blocks")
        self._capacity_bytes = capacity_bytes
        self._retention_ms = retention_ms
        self._wall_clock_ms = wall_clock_ms
        self._lock = threading.Lock()
        self._held: dict[str, tuple[int, int, BlockName]] = {}
        """For each file its octets of sections, when and under which name they came; the oldest first."""
        self._in_use = -1
        self.used_bytes = 0
        self.damaged = 0
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_key()

    def _check_key(self) -> None:
        """Refuse a key that these files were not made with: else all of them would look damaged.

        The note that tells may be damaged or gone itself; then the blocks tell.
        """
        path, sealer = self._directory / _KEY_CHECK, Sealer(derive_key(self._storage_key, _KEY_CHECK))
        with suppress(StorageError, FileNotFoundError):
            sealer.open(path.read_bytes(), b"")
            return
        blocks = [found for found in self._directory.glob("*/*/*") if found.suffix != _UNFINISHED]
        if blocks and not any(map(self._opens, blocks)):
            raise StorageError(
                f"{self._directory} does not open with this storage key; give the key it was made with"
            )
        with replacing(path, sealer.seal(b"", b""), mode=0o600):
            pass

    def _opens(self, path: Path) -> bool:
        try:
            self._checked(path, str(path.relative_to(self._directory)), thorough=False)
        except (*_DAMAGED, ValueError, OSError):
            return False
        return True

    def lock(self) -> None:
        """Have the directory for this tier alone, until `close`. Raises `StorageError` where another has it:
        it would delete what this one is writing, and go on publishing what this one deletes."""
        descriptor = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise StorageError(
                f"{self._directory} is in use by another process; stop that, or name another directory"
            ) from None
        self._in_use = descriptor

    def unlock(self) -> None:
        """Let others have the directory; once is enough."""
        descriptor, self._in_use = self._in_use, -1
        if descriptor >= 0:
            os.close(descriptor)

    # Storing

    def store(self, block: StoredBlock, data: memoryview) -> bool:
        """Seal a block into a file, whole or not at all."""
        file, now_ms = self._file(block.name), self._wall_clock_ms()
        with self._lock:
            added = data.nbytes - self._size(file)
            if self.used_bytes + added > self._capacity_bytes:
                raise BlockFault(JobFault.FULL)
            self.used_bytes += added  # before it is written, so that several writers cannot exceed it
        try:
            self._write(file, block, data, now_ms)
        except BaseException as error:
            with self._lock:
                self.used_bytes -= added
            if isinstance(error, OSError):
                raise _fault_of(error) from error
            raise
        with self._lock:
            self._held.pop(file, None)
            self._held[file] = (data.nbytes, now_ms, block.name)
        return False

    def _write(self, file: str, block: StoredBlock, data: memoryview, now_ms: int) -> None:
        path = self._directory / file
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.urandom(4).hex()}{_UNFINISHED}")
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb", buffering=0) as output:
                for piece in self._sealed(file, block, data, now_ms):
                    _write_all(output, piece)
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def _sealed(self, file: str, block: StoredBlock, data: memoryview, now_ms: int) -> Iterator[bytes]:
        salt = os.urandom(SALT_BYTES)
        cipher = self._cipher(salt)
        header = msgspec.msgpack.encode(_Header.of(block, now_ms))
        sealed = cipher.encrypt(_nonce(0), header, file.encode())
        yield _MAGIC + salt + _LENGTH.pack(len(sealed)) + sealed
        start = 0
        for number, sizes in enumerate(block.header.sections, 1):
            end = start + sum(sizes)
            yield cipher.encrypt(_nonce(number), data[start:end], file.encode())
            start = end

    # Reading

    def read(
        self, name: BlockName, layers: tuple[int, int] | None, acquire: Callable[[int], memoryview]
    ) -> tuple[StoredBlock, memoryview]:
        """Open a block; a file that is not what was stored is dropped."""
        file = self._file(name)
        try:
            with (self._directory / file).open("rb", buffering=0) as opened:
                return self._read(file, opened.fileno(), layers, acquire)
        except FileNotFoundError:
            self._forget(file)
            raise BlockFault(JobFault.MISSING) from None
        except _DAMAGED:
            self._remove(file)
            raise BlockFault(JobFault.CORRUPT) from None
        except OSError as error:
            raise _fault_of(error) from error

    def _read(
        self, file: str, descriptor: int, layers: tuple[int, int] | None, acquire: Callable[[int], memoryview]
    ) -> tuple[StoredBlock, memoryview]:
        cipher, header, position = self._read_header(file, descriptor)
        block = header.block()
        part, first, before = part_of(block.header, layers)
        position += before + first * TAG_BYTES
        data = acquire(part.data_bytes)[: part.data_bytes]
        filled = 0
        for number, sizes in enumerate(part.sections, first + 1):
            size = sum(sizes)
            octets = _read_exactly(descriptor, position, size + TAG_BYTES)
            cipher.decrypt_into(_nonce(number), octets, file.encode(), data[filled : filled + size])
            filled += size
            position += size + TAG_BYTES
        return attrs.evolve(block, header=part), data

    def _read_header(self, file: str, descriptor: int) -> tuple[AESGCM, _Header, int]:
        prefix = _read_exactly(descriptor, 0, _PREFIX_BYTES)
        (length,) = _LENGTH.unpack_from(prefix, _PREFIX_BYTES - _LENGTH.size)
        if not prefix.startswith(_MAGIC) or length > _MAX_SEALED_HEADER_BYTES:
            raise _TornError
        cipher = self._cipher(prefix[len(_MAGIC) : len(_MAGIC) + SALT_BYTES])
        sealed = _read_exactly(descriptor, _PREFIX_BYTES, length)
        header = msgspec.msgpack.decode(cipher.decrypt(_nonce(0), sealed, file.encode()), type=_Header)
        return cipher, header, _PREFIX_BYTES + length

    # Removing

    def drop(self, name: BlockName) -> None:
        """Remove a block, if it is there."""
        self._remove(self._file(name))

    def _remove(self, file: str) -> None:
        try:
            (self._directory / file).unlink(missing_ok=True)
        except OSError:
            return  # the disk does not work; the next start, or the next read, sees what is there
        self._forget(file)

    def _forget(self, file: str) -> None:
        with self._lock:
            self.used_bytes -= self._size(file)
            self._held.pop(file, None)

    def _size(self, file: str) -> int:
        return self._held[file][0] if file in self._held else 0

    def purge(self, scope_id: str) -> int:
        """Remove every block of a scope and return how many there were."""
        directory = self._directory / self._scope(scope_id)
        doomed = [path for path in directory.glob("*/*") if path.suffix != _UNFINISHED]
        for path in doomed:
            self._remove(str(path.relative_to(self._directory)))
        shutil.rmtree(directory, ignore_errors=True)
        return len(doomed)

    def aged(self, at_most: int) -> tuple[BlockName, ...]:
        """Return what is past its retention."""
        if self._retention_ms is None:
            return ()
        now_ms = self._wall_clock_ms()
        oldest_ms = now_ms - self._retention_ms
        with self._lock:
            # The clock was set back: how old such blocks are is not known, and none behind them would be due.
            while self._held and (first := next(iter(self._held.items())))[1][1] > now_ms:
                file, (size, _, name) = first
                del self._held[file]
                self._held[file] = (size, now_ms, name)
            old = takewhile(lambda held: held[1] < oldest_ms, self._held.values())
            return tuple(name for _, _, name in islice(old, at_most))

    # Starting and stopping

    def catalogue(self) -> tuple[StoredBlock, ...]:
        """Return the blocks that are whole, and remove whatever else is there.

        After an orderly stop a file counts if its header opens and its size is right; after any other all
        of it is read.
        """
        marker = self._directory / _CLEAN
        thorough = not marker.exists()
        found = []
        for path in [p for p in self._directory.glob("*/*/*") if p.is_file()]:
            file = str(path.relative_to(self._directory))
            try:
                header = self._checked(path, file, thorough)
            except (*_DAMAGED, ValueError):
                self.damaged += not path.name.endswith(_UNFINISHED)
                self._remove(file)
            except OSError:
                continue  # it cannot be read now; perhaps it can at the next start
            else:
                found.append((header.stored_at_ms, file, header.block()))
        marker.unlink(missing_ok=True)
        found.sort(key=lambda entry: entry[0])
        self._held = {file: (block.header.data_bytes, at_ms, block.name) for at_ms, file, block in found}
        self.used_bytes = sum(size for size, _, _ in self._held.values())
        for name in self.aged(len(self._held)):
            self.drop(name)
        return tuple(block for _, file, block in found if file in self._held)

    def _checked(self, path: Path, file: str, thorough: bool) -> _Header:
        with path.open("rb", buffering=0) as opened:
            cipher, header, position = self._read_header(file, opened.fileno())
            sizes = [sum(pair) + TAG_BYTES for pair in header.sections]
            whole = os.fstat(opened.fileno()).st_size == position + sum(sizes)
            if not whole or self._file(header.block().name) != file:
                raise _TornError
            for number, size in enumerate(sizes, 1) if thorough else ():
                octets = _read_exactly(opened.fileno(), position, size)
                cipher.decrypt(_nonce(number), octets, file.encode())
                position += size
            return header

    def close(self) -> None:
        """Write everything out, then leave the marker that says so, and let others have the directory."""
        os.sync()
        try:
            descriptor = os.open(self._directory / _CLEAN, os.O_WRONLY | os.O_CREAT, 0o600)
            os.fsync(descriptor)
            os.close(descriptor)
        except OSError:
            pass  # without the marker the next start reads everything, which is what a broken disk needs
        self.unlock()

    # Names and keys

    def _scope(self, scope_id: str) -> str:
        return hidden_name(self._names, scope_id).hex()

    def _file(self, name: BlockName) -> str:
        """Return the path of a block's file below the directory."""
        file = hidden_name(self._names, name.compat_id, name.scope_id, name.block_key).hex()
        return f"{self._scope(name.scope_id)}/{file[:2]}/{file}"

    def _cipher(self, salt: bytes) -> AESGCM:
        return AESGCM(derive_key(self._storage_key, "block", salt))


def _fault_of(error: OSError) -> BlockFault:
    return BlockFault(_FAULTS.get(error.errno or 0, JobFault.BROKEN))


def _nonce(number: int) -> bytes:
    """Return the nonce of a part of a file: its number, since every file has a key of its own."""
    return number.to_bytes(12, "big")


def _read_exactly(descriptor: int, position: int, size: int) -> bytes:
    octets = os.pread(descriptor, size, position)
    while len(octets) < size:
        more = os.pread(descriptor, size - len(octets), position + len(octets))
        if not more:
            raise _TornError
        octets += more
    return octets


def _write_all(output: FileIO, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[output.write(view) :]
