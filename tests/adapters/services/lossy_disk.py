"""A disk that loses power: it knows which writes SQLite has synchronised, and what a cut would leave.

`RecordingDisk` puts a layer between SQLite and its files, through SQLite's own interface for that (a VFS),
and mirrors each file as it would be found after a power cut: what was synchronised is there, and of later
writes any part may be. What SQLite does is seen, and what is written to its files by `os.pwrite`; files that
others write are not mirrored.

A synchronisation can be made to fail, as Linux does it: what was to be written stays readable, and is not
written any more, whatever is synchronised later.
"""

from __future__ import annotations

import _sqlite3
import ctypes
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["RecordingDisk", "supported"]

_OK = 0
_SYNC_FAILED = 10 | 4 << 8  # SQLITE_IOERR_FSYNC


class _Methods(ctypes.Structure):
    """sqlite3_io_methods up to xSync; the rest is copied as it is."""

    _fields_ = [
        ("iVersion", ctypes.c_int),
        ("xClose", ctypes.c_void_p),
        ("xRead", ctypes.c_void_p),
        ("xWrite", ctypes.c_void_p),
        ("xTruncate", ctypes.c_void_p),
        ("xSync", ctypes.c_void_p),
        ("rest", ctypes.c_void_p * 13),
    ]


class _File(ctypes.Structure):
    _fields_ = [("pMethods", ctypes.POINTER(_Methods))]


class _VFS(ctypes.Structure):
    _fields_ = [
        ("iVersion", ctypes.c_int),
        ("szOsFile", ctypes.c_int),
        ("mxPathname", ctypes.c_int),
        ("pNext", ctypes.c_void_p),
        ("zName", ctypes.c_char_p),
        ("pAppData", ctypes.c_void_p),
        ("xOpen", ctypes.c_void_p),
        ("xDelete", ctypes.c_void_p),
        ("rest", ctypes.c_void_p * 14),
    ]


# The name is passed on as the pointer it came as: SQLite keeps it, to name the file's index in shared memory.
_OPEN = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
)
_DELETE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)
_WRITE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_TRUNCATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_SYNC = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)

_Change = Callable[[bytearray], None]


def _library() -> Any:
    """Return the SQLite that the module sqlite3 of this Python uses, or None where it shows no interface."""
    try:
        library = ctypes.CDLL(_sqlite3.__file__)
        library.sqlite3_vfs_find.restype = ctypes.POINTER(_VFS)
        library.sqlite3_vfs_find.argtypes = [ctypes.c_char_p]
        library.sqlite3_vfs_register.argtypes = [ctypes.POINTER(_VFS), ctypes.c_int]
        library.sqlite3_vfs_unregister.argtypes = [ctypes.POINTER(_VFS)]
    except (AttributeError, OSError):
        return None
    return library


def supported() -> bool:
    """Return whether this Python's SQLite can be looked into."""
    return _library() is not None


def _written(octets: bytes, offset: int) -> _Change:
    def change(content: bytearray) -> None:
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(octets)] = octets

    return change


def _truncated(size: int) -> _Change:
    def change(content: bytearray) -> None:
        del content[size:]

    return change


class RecordingDisk:
    """Installs itself as the disk of SQLite while it is a context."""

    def __init__(self) -> None:
        self.synced: dict[str, bytearray] = {}
        self.unsynced: dict[str, list[_Change]] = {}
        self.opened: set[str] = set()
        self.syncs = 0
        self.drop_syncs = self.fail_syncs = False
        self._paths: dict[int, str] = {}
        self._kept: list[object] = []

    def __enter__(self) -> RecordingDisk:
        self._library = _library()
        self._real = self._library.sqlite3_vfs_find(None)
        self._vfs = _VFS.from_buffer_copy(self._real.contents)
        self._vfs.zName = b"recording"
        self._vfs.xOpen = self._keep(_OPEN(self._open))
        self._vfs.xDelete = self._keep(_DELETE(self._delete))
        assert self._library.sqlite3_vfs_register(ctypes.byref(self._vfs), 1) == _OK
        self._pwrite, self._fsync = os.pwrite, os.fsync
        os.pwrite, os.fsync = self._on_pwrite, self._on_fsync
        return self

    def __exit__(self, *_: object) -> None:
        os.pwrite, os.fsync = self._pwrite, self._fsync
        self._library.sqlite3_vfs_unregister(ctypes.byref(self._vfs))
        self._library.sqlite3_vfs_register(self._real, 1)

    def cut(self, source: Path, target: Path, chance: random.Random | None = None) -> None:
        """Write the files of a directory as a power cut now would leave them into another.

        Of writes that were not synchronised none are there, or some, by chance.
        """
        for path, synced in self.synced.items():
            if Path(path).parent != source:
                continue
            content = bytearray(synced)
            for change in self.unsynced[path]:
                if chance is not None and chance.random() < 0.5:
                    change(content)
            (target / Path(path).name).write_bytes(content)

    def _on_pwrite(self, descriptor: int, octets: bytes, offset: int) -> int:
        written = self._pwrite(descriptor, octets, offset)
        if (changes := self.unsynced.get(os.readlink(f"/proc/self/fd/{descriptor}"))) is not None:
            changes.append(_written(octets[:written], offset))
        return written

    def _on_fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        if (path := os.readlink(f"/proc/self/fd/{descriptor}")) in self.unsynced:
            self._synchronise(path)

    def _synchronise(self, path: str) -> None:
        self.syncs += 1
        for change in self.unsynced[path]:
            change(self.synced[path])
        self.unsynced[path] = []

    def _keep(self, callback: Any) -> int | None:
        self._kept.append(callback)
        return ctypes.cast(callback, ctypes.c_void_p).value

    def _open(self, _vfs: int, name: int | None, file: int, flags: int, out: int) -> int:
        status = _OPEN(self._real.contents.xOpen)(
            ctypes.addressof(self._real.contents), name, file, flags, out
        )
        opened = _File.from_address(file)
        if status != _OK or name is None or not opened.pMethods:
            return int(status)
        path = ctypes.string_at(name).decode()
        self._paths[file] = path
        self.opened.add(path)
        self.synced.setdefault(path, bytearray(Path(path).read_bytes()))
        self.unsynced.setdefault(path, [])
        opened.pMethods = ctypes.pointer(self._methods(opened.pMethods.contents))
        return _OK

    def _methods(self, real: _Methods) -> _Methods:
        write, truncate, sync = _WRITE(real.xWrite), _TRUNCATE(real.xTruncate), _SYNC(real.xSync)

        def on_write(file: int, octets: int, size: int, offset: int) -> int:
            self.unsynced[self._paths[file]].append(_written(ctypes.string_at(octets, size), offset))
            return int(write(file, octets, size, offset))

        def on_truncate(file: int, size: int) -> int:
            self.unsynced[self._paths[file]].append(_truncated(size))
            return int(truncate(file, size))

        def on_sync(file: int, flags: int) -> int:
            if self.fail_syncs:
                self.unsynced[self._paths[file]] = []
                return _SYNC_FAILED
            status = int(sync(file, flags))
            if status == _OK and not self.drop_syncs:
                self._synchronise(self._paths[file])
            return status

        copy = _Methods.from_buffer_copy(real)
        copy.xWrite = self._keep(_WRITE(on_write))
        copy.xTruncate = self._keep(_TRUNCATE(on_truncate))
        copy.xSync = self._keep(_SYNC(on_sync))
        self._kept.append(copy)
        return copy

    def _delete(self, _vfs: int, name: bytes, sync_directory: int) -> int:
        delete = _DELETE(self._real.contents.xDelete)
        status = delete(ctypes.addressof(self._real.contents), name, sync_directory)
        if status == _OK:
            self.synced.pop(name.decode(), None)
            self.unsynced.pop(name.decode(), None)
        return int(status)
