"""What ``kv_connector_extra_config`` may say, each key known and typed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvsp_core.errors import KVSPError, LocalProtocolError
from kvsp_core.identity import parse_base_uri

__all__ = ["Settings", "read_settings"]

_Count = Annotated[int, msgspec.Meta(ge=1)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The connector's settings; paths are relative to where vLLM was started."""

    index: str
    """Base URI of the index that is asked."""
    cache_server: str
    """Base URI of the holder that new blocks are stored at."""
    certificate_file: str
    key_file: str
    authorities_file: str
    scope_key_file: str
    """The Scope Key of the tenant, at least 32 octets; requests with a cache salt get scopes derived from
    it."""
    model: str | None = None
    """The model's name in descriptors, the same for all who share; by default the name of its directory."""
    model_dir: str | None = None
    """Where the model's files are, if not where vLLM's model says."""
    descriptor_files: tuple[str, ...] = ()
    """Descriptors of what is shared in this deployment. Where any are named, an engine whose own
    descriptor is
    none of them does not start, and a request with an adapter that none of them has is not shared."""
    lookup_timeout_ms: _Count = 1_000
    """How long a request may wait for the index; the prompt is computed then."""
    load_timeout_ms: _Count = 5_000
    """How long a batch may wait for blocks; what has not come is computed then."""
    store_queue_bytes: _Count = 512 << 20
    """Copies of blocks that wait to be stored; beyond that blocks are not stored."""


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """Return the settings in ``kv_connector_extra_config``.

    Raises `LocalProtocolError`, one line with the key, for what is missing, unknown or mistyped, and for a
    file that is not there.
    """
    try:
        found = msgspec.convert(dict(extra), Settings, strict=True)
    except msgspec.ValidationError as error:
        raise _mistake(str(error)) from None
    for key in ("index", "cache_server"):
        try:
            parse_base_uri(getattr(found, key), member=key)
        except KVSPError as error:
            raise _mistake(str(error)) from None
    named = [
        (k, getattr(found, k)) for k in ("certificate_file", "key_file", "authorities_file", "scope_key_file")
    ]
    named += [(f"descriptor_files[{n}]", file) for n, file in enumerate(found.descriptor_files)]
    for key, file in named:
        if not Path(file).is_file():
            raise _mistake(f"{key}: there is no file {file}")
    return found


def _mistake(what: str) -> LocalProtocolError:
    return LocalProtocolError(f"kv_connector_extra_config: {what}")
