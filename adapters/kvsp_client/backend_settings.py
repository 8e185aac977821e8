"""Settings of the storage backends for SGLang and LMCache, which know no model: they are told."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvsp_client.blocking import BlockingClient
from kvsp_client.files import read_secret
from kvsp_client.memory import Sections
from kvsp_client.model_dir import descriptor_of_directory
from kvsp_client.object_names import named_descriptor
from kvsp_client.settings import ClientSettings
from kvsp_client.store import StoreResult
from kvsp_client.typed import Count, typed
from kvsp_core.errors import KVSPError, LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor, parse_base_uri
from kvsp_core.index_parts import IndexParts
from kvsp_core.prefix import PrefixKeys
from kvsp_h2 import Credentials

__all__ = ["Backend", "BackendSettings", "ChunkSettings", "Deployment", "checked"]

S = TypeVar("S", bound="Deployment")


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Where the index and the cache server are, and who asks them; what every engine's settings have."""

    index: str | list[str]
    """Base URI of the index, or a list of those of its parts (OP-3)."""
    cache_server: str
    """Base URI of the holder that new blocks are stored at; they are loaded from any holder."""
    certificate_file: str
    """Who the engine is; PEM. Renewed in place, it is used by the next connection."""
    key_file: str
    """Of the certificate; PEM."""
    authorities_file: str
    """Whose certificates count; PEM."""
    scope_key_file: str
    """The Scope Key of the tenant, at least 32 octets."""

    def files(self) -> dict[str, str]:
        """Return the files that have to be there, by the key that names each."""
        keys = ("certificate_file", "key_file", "authorities_file", "scope_key_file")
        return {key: getattr(self, key) for key in keys}

    def credentials(self) -> Credentials:
        """Return what the engine shows to peers, and whom it trusts."""
        return Credentials(Path(self.certificate_file), Path(self.key_file), Path(self.authorities_file))


class BackendSettings(Deployment, frozen=True, kw_only=True):
    """A deployment, and what model the blocks are of."""

    model_dir: str
    """The directory of the model that the engine runs."""
    kv_dtype: str | None = None
    """The element type of the engine's cache, if not that of the weights."""
    timeout_ms: Count = 5_000
    """How long a call may take; what has not come by then is a miss."""


class ChunkSettings(BackendSettings, frozen=True, kw_only=True):
    """What LMCache's backend has to know beside that."""

    chunk_tokens: Count = 256
    """LMCache's chunk size."""


def checked(settings: type[S], members: Mapping[str, Any], where: str) -> S:
    """Return settings. Raises `LocalProtocolError`, one line that names the key, for what is missing, unknown
    or mistyped, and for a file that is not there."""
    try:
        found = typed(dict(members), settings)
        for uri in IndexParts(found.index).uris:
            parse_base_uri(uri, member="index")
        parse_base_uri(found.cache_server, member="cache_server")
        for key, file in found.files().items():
            if not Path(file).is_file():
                raise LocalProtocolError(f"{key}: there is no file {file}")
    except KVSPError as error:
        raise LocalProtocolError(f"{where}: {error}") from None
    return found


class Backend:
    """A client, a descriptor and a tenant's key: what both backends are made over.

    `names` says in the descriptor whose names for blocks these are.
    """

    def __init__(self, settings: BackendSettings, *, block_tokens: int, names: str) -> None:
        plain = descriptor_of_directory(
            Path(settings.model_dir), block_tokens=block_tokens, kv_dtype=settings.kv_dtype
        )
        self.descriptor: CompatibilityDescriptor = named_descriptor(plain, names)
        self.section_bytes = self.descriptor.section_bytes(block_tokens)
        self.scope_key = read_secret(Path(settings.scope_key_file))
        self.cache_server = settings.cache_server
        self.timeout_ms = settings.timeout_ms
        self.client = BlockingClient(
            settings.credentials(),
            index=settings.index,
            settings=ClientSettings(call_timeout_ms=settings.timeout_ms),
        )

    def store(self, keys: PrefixKeys, sections: Sections) -> StoreResult:
        """Store blocks at the cache server within `timeout_ms`."""
        return self.client.store(self.cache_server, keys, sections, deadline_ms=self.timeout_ms)

    def load(self, keys: PrefixKeys, sections: Sections) -> int:
        """Find and fetch blocks within `timeout_ms` in all; return how many leading ones have come."""
        until = time.monotonic() + self.timeout_ms / 1000
        prefix = self.client.lookup(keys)
        left_ms = int((until - time.monotonic()) * 1000)
        if left_ms < 1:
            return 0
        return self.client.fetch(prefix, sections, deadline_ms=left_ms).blocks
