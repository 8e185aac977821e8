"""The configuration of a process: which roles it runs, and with what (``kvsp serve CONFIG.toml``).

Every key is known and typed; a mistake is named with its key. Paths are relative to the file's directory.
Sizes are octets, durations milliseconds, as the keys say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from kvsp_client.model_dir import DEFAULT_BLOCK_TOKENS
from kvsp_core.errors import KVSPError
from kvsp_core.identity import parse_base_uri
from kvsp_services.documents import DocumentError, read_toml
from kvsp_services.logs import LogFormat, LogLevel

__all__ = [
    "Config",
    "ControllerSection",
    "FrontEndSection",
    "HolderSection",
    "IndexSection",
    "InstanceSection",
    "LinkSection",
    "LogSection",
    "LoopName",
    "ModelSection",
    "MonitoringSection",
    "RoleSection",
    "ScopeSection",
    "TierSection",
    "read_config",
    "with_limits_of",
]

LoopName: TypeAlias = Literal["trio", "asyncio", "uvloop"]

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
DEFAULT_MONITORING_PORT: Final = 9464


class MonitoringSection(msgspec.Struct, frozen=True, kw_only=True):
    """``[monitoring]``: where /health, /ready and /metrics are served, in plain HTTP."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: _Port = DEFAULT_MONITORING_PORT


class LogSection(msgspec.Struct, frozen=True, kw_only=True):
    """``[log]``."""

    level: LogLevel = "info"
    format: LogFormat = "json"


class ScopeSection(msgspec.Struct, frozen=True, kw_only=True):
    """``[[scopes]]``: a scope whose key this process holds (instances and front ends; never an index)."""

    key_file: str
    shared: bool = False


class TierSection(msgspec.Struct, frozen=True, kw_only=True):
    """``[[holder.tiers]]``, the fastest first: host memory, or a directory of sealed files."""

    tier: Literal["host", "local-storage"]
    capacity_bytes: _Count
    read_mbit_per_s: _Count | None = None
    directory: str | None = None
    retention_ms: _Count | None = None


class RoleSection(msgspec.Struct, frozen=True, kw_only=True):
    """What every role has: its base URI, its certificate, and where it listens."""

    base_uri: str
    certificate_file: str
    key_file: str
    listen: str | None = None
    """``HOST:PORT``; by default those of the base URI."""

    @property
    def address(self) -> tuple[str, int]:
        """The host and port to listen on."""
        parts = urlsplit(f"//{self.listen}" if self.listen else self.base_uri)
        return parts.hostname or "", parts.port if parts.port is not None else 443


class IndexSection(RoleSection, frozen=True, kw_only=True):
    """``[index]``."""

    max_ttl_ms: _Count = 3_600_000
    max_lookup_keys: _Count = 8192


class HolderSection(RoleSection, frozen=True, kw_only=True):
    """``[holder]``. Without an index nothing is published."""

    index: list[str] = []
    """The base URI of the index, or of each of its parts (OP-3); the same for all that share it."""
    tiers: list[TierSection]
    record_ttl_ms: _Count = 600_000
    max_lease_ttl_ms: _Count = 60_000
    """Instances ask for leases of up to 60,000 ms; where less is granted, for so long, 1,000 at least."""
    lease_quota_bytes: _Count = 64 << 30


class ModelSection(RoleSection, frozen=True, kw_only=True):
    """What roles have that know the model. All use the same values, or they share nothing (CD-8)."""

    controller: str
    model_dir: str
    model: str | None = None
    """Its name; by default that of the directory."""
    block_tokens: _Count = DEFAULT_BLOCK_TOKENS
    kv_dtype: str | None = None
    """By default that of the weights."""


class LinkSection(msgspec.Struct, frozen=True, kw_only=True):
    """``[[instance.links]]``: what is known of the way to a holder; placement estimates with it."""

    holder: str
    mbit_per_s: int
    rtt_us: int = 0


class InstanceSection(ModelSection, frozen=True, kw_only=True):
    """``[instance]``."""

    index: list[str]
    copies_to: str | None = None
    """The holder that gets copies of generated blocks."""
    tiers: list[TierSection] = []
    max_sequences: _Count = 8
    status_ttl_ms: _Count = 3_000
    """After this time without a status the controller holds it for failed."""
    record_ttl_ms: _Count = 600_000
    """This, and the next two, are as a holder's: an instance is the holder of its tiers."""
    max_lease_ttl_ms: _Count = 60_000
    lease_quota_bytes: _Count = 64 << 30
    report_to_index: bool = False
    """Whether its status goes to the index too, for estimates for `targets`; an index in the process of the
    controller has it from there."""
    sleep_after_ms: _Count | None = None
    """After this time without sessions and shards it asks to sleep; never, where this is left out (LC-1)."""
    prefill_tokens_per_s: int = 0
    decode_tokens_per_s: int = 0
    links: list[LinkSection] = []


class ControllerSection(RoleSection, frozen=True, kw_only=True):
    """``[controller]``."""

    index: list[str]
    classes: dict[str, str] = {}
    """For an instance's base URI the class within which results are bit-identical (CP-6)."""
    min_active: _Count = 1
    prefetch: bool = True
    """Whether the instance that is to serve a request is told ahead what to load."""
    open_by_checkpoint: bool = False
    """Whether a first checkpoint in epoch 1 opens its session (decision W19)."""


class FrontEndSection(ModelSection, frozen=True, kw_only=True):
    """``[front_end]``: also the API of OpenAI's kind, which is no part of KVSP."""

    api_host: str = "127.0.0.1"
    api_port: _Port = 8000


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A process."""

    authorities_file: str
    policy_file: str
    data_dir: str = ""
    """Where durable state is kept; by default ``data`` beside the file."""
    storage_key_file: str | None = None
    descriptor_files: list[str] = []
    loop: LoopName = "trio"
    monitoring: MonitoringSection = MonitoringSection()
    log: LogSection = LogSection()
    scopes: list[ScopeSection] = []
    index: IndexSection | None = None
    holder: HolderSection | None = None
    instance: InstanceSection | None = None
    controller: ControllerSection | None = None
    front_end: FrontEndSection | None = None

    @property
    def roles(self) -> dict[str, RoleSection]:
        """The roles that the process runs, by the name of their section."""
        names = ("index", "holder", "instance", "controller", "front_end")
        return {name: section for name in names if (section := getattr(self, name)) is not None}


def read_config(path: Path) -> Config:
    """Return the configuration in a file. Raises `DocumentError` with the key of the first mistake."""
    config = read_toml(path, Config)
    if not config.data_dir:
        config = msgspec.structs.replace(config, data_dir=str(path.resolve().parent / "data"))
    if not config.roles:
        raise DocumentError(
            f"{path}: names no role; add [index], [holder], [instance], [controller] or [front_end]"
        )
    for name, section in config.roles.items():
        _check_uris(path, name, section)
    _check_files(path, config)
    _check_apart(path, config)
    return config


LIMITS: Final = {
    "index": ("max_ttl_ms", "max_lookup_keys"),
    "holder": ("record_ttl_ms", "max_lease_ttl_ms", "lease_quota_bytes"),
    "instance": ("record_ttl_ms", "max_lease_ttl_ms", "lease_quota_bytes"),
    "controller": ("min_active", "prefetch", "open_by_checkpoint"),
    "log": ("level",),
}
"""The keys of each section that hold anew after SIGHUP; others need a restart."""


def with_limits_of(config: Config, other: Config) -> tuple[Config, tuple[str, ...]]:
    """Return a configuration with the limits of another one, and the keys in which the two differ still, such
    as ``controller.classes``; a section that only one of them has is one."""
    for name, keys in LIMITS.items():
        mine, others = getattr(config, name), getattr(other, name)
        if mine is not None and others is not None:
            limited = msgspec.structs.replace(mine, **{key: getattr(others, key) for key in keys})
            config = msgspec.structs.replace(config, **{name: limited})
    return config, tuple(_differing(config, other))


def _differing(one: msgspec.Struct, other: msgspec.Struct) -> Iterator[str]:
    for key in one.__struct_fields__:
        mine, others = getattr(one, key), getattr(other, key)
        if isinstance(mine, msgspec.Struct) and type(mine) is type(others):
            yield from (f"{key}.{name}" for name in _differing(mine, others))
        elif mine != others:
            yield key


def _check_uris(path: Path, name: str, section: RoleSection) -> None:
    """Check every base URI of a section, and the address it listens on."""
    uris = [("base_uri", section.base_uri)]
    for key in ("index", "controller", "copies_to"):
        value = getattr(section, key, None)
        if isinstance(value, list):
            uris += [(f"{key}[{number}]", uri) for number, uri in enumerate(value)]
        elif value is not None:
            uris.append((key, value))
    for key, uri in uris:
        try:
            parse_base_uri(uri)
        except KVSPError as error:
            raise DocumentError(f"{path}: {name}.{key}: {error}") from None
    index = getattr(section, "index", ())
    if isinstance(section, InstanceSection) and not index:
        raise DocumentError(f"{path}: {name}.index: name the base URI of the index, or of each of its parts")
    if len(set(index)) < len(index):
        raise DocumentError(f"{path}: {name}.index: names one base URI twice")
    try:
        host, _ = section.address
    except ValueError:
        host = ""
    if not host:
        raise DocumentError(f"{path}: {name}.listen: expected HOST:PORT, such as 127.0.0.1:8441")


def _check_files(path: Path, config: Config) -> None:
    named = [("authorities_file", config.authorities_file), ("policy_file", config.policy_file)]
    named += [(f"descriptor_files[{n}]", file) for n, file in enumerate(config.descriptor_files)]
    named += [(f"scopes[{n}].key_file", scope.key_file) for n, scope in enumerate(config.scopes)]
    if config.storage_key_file is not None:
        named.append(("storage_key_file", config.storage_key_file))
    for name, section in config.roles.items():
        named += [
            (f"{name}.certificate_file", section.certificate_file),
            (f"{name}.key_file", section.key_file),
        ]
    for key, file in named:
        if not Path(file).exists():
            raise DocumentError(f"{path}: {key}: there is no {file}")
    for name, section in config.roles.items():
        for number, tier in enumerate(getattr(section, "tiers", ())):
            if (tier.tier == "host") == (tier.directory is not None):
                need = "needs a directory" if tier.directory is None else "has no directory"
                raise DocumentError(f"{path}: {name}.tiers[{number}]: tier {tier.tier} {need}")


def _check_apart(path: Path, config: Config) -> None:
    """Check that roles do not share an address, and that the storage key is there where something is
    stored."""
    seen: dict[tuple[str, int], str] = {}
    for name, section in config.roles.items():
        other = seen.setdefault(section.address, name)
        if other != name:
            raise DocumentError(
                f"{path}: {name}.listen: {other} listens there already; each role has connections of its own"
            )
    stores = [
        n
        for n, s in config.roles.items()
        if n == "controller" or any(t.directory for t in getattr(s, "tiers", ()))
    ]
    if stores and config.storage_key_file is None:
        raise DocumentError(
            f"{path}: storage_key_file: {stores[0]} stores on disk and needs one;"
            " make it with: (umask 077; head -c 32 /dev/urandom > storage.key)"
        )
    if config.index is not None and config.scopes and config.instance is None and config.front_end is None:
        raise DocumentError(
            f"{path}: scopes: an index must not have Scope Keys; no other role here needs any, so remove them"
        )
