"""Sealing: AES-256-GCM over what goes to disk, and names that tell nothing (requirements SE-4 and SE-5).

A storage key never encrypts anything itself. Each file has a key of its own, derived with HKDF-SHA-256 from
the storage key, a purpose and the file's random salt, so files cannot be mistaken for one another and a
nonce counts for its file only.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvsp_client.files import read_secret
from kvsp_core.errors import KVSPError, LocalProtocolError

__all__ = [
    "NONCE_BYTES",
    "SALT_BYTES",
    "TAG_BYTES",
    "Sealer",
    "StorageError",
    "derive_key",
    "hidden_name",
    "read_storage_key_file",
]

SALT_BYTES: Final = 16
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
MIN_STORAGE_KEY_BYTES: Final = 32


class StorageError(KVSPError):
    """Storage does not do what it must: it cannot be read or written, or what it holds is not what was
    stored."""


def read_storage_key_file(path: Path) -> bytes:
    """Return the storage key in a file, as `read_secret` does. Raises `LocalProtocolError` where it is too
    short."""
    key = read_secret(path)
    if len(key) < MIN_STORAGE_KEY_BYTES:
        raise LocalProtocolError(
            f"{path}: a storage key has at least {MIN_STORAGE_KEY_BYTES} random octets, found {len(key)}"
        )
    return key


def derive_key(storage_key: bytes, purpose: str, salt: bytes = b"") -> bytes:
    """Return a key of 32 octets for one purpose and, where given, one file."""
    if len(storage_key) < MIN_STORAGE_KEY_BYTES:
        raise LocalProtocolError(f"a storage key has at least {MIN_STORAGE_KEY_BYTES} octets")
    return HKDF(SHA256(), 32, salt or None, f"KVSP storage: {purpose}".encode()).derive(storage_key)


def hidden_name(key: bytes, *parts: str) -> bytes:
    """Return 16 octets that stand for these names and tell nothing of them to who lacks the key."""
    return hmac.digest(key, "\0".join(parts).encode(), "sha256")[:16]


class Sealer:
    """Seals and opens octets under one derived key; `context` is authenticated with them and not stored."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def seal(self, plaintext: bytes, context: bytes) -> bytes:
        """Return a random nonce, the encrypted octets and their tag."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, plaintext, context)

    def open(self, sealed: bytes, context: bytes) -> bytes:
        """Return what was sealed. Raises `StorageError` where it was altered, or sealed for something
        else."""
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context)
        except (InvalidTag, ValueError):
            raise StorageError("what was read is not what was stored, or not with this key") from None
