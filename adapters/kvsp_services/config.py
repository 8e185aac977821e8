"""The configuration of a process: which roles it runs, and with what (``kvsp serve CONFIG.toml``).

Every key is known and typed; a mistake is named with its key. Paths are relative to the file's directory.
Sizes are octets, durations milliseconds, as the keys say. What stands under a class or a key is what
docs/configuration.md says of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from kvsp_client.model_dir import DEFAULT_BLOCK_TOKENS
from kvsp_client.typed import Amount, Count
from kvsp_core.errors import KVSPError
from kvsp_core.identity import parse_base_uri
from kvsp_core.limits import ENGINE_SILENCE_MS
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

_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
DEFAULT_MONITORING_PORT: Final = 9464


class MonitoringSection(msgspec.Struct, frozen=True, kw_only=True):
    """Where /health, /ready and /metrics are served, in plain HTTP."""

    enabled: bool = True
    """Whether it is served."""
    host: str = "127.0.0.1"
    """Whoever reaches it may read it: it asks for no certificate."""
    port: _Port = DEFAULT_MONITORING_PORT
    """A process each: two on one machine need two ports. 0 takes a free one, which the log names."""


class LogSection(msgspec.Struct, frozen=True, kw_only=True):
    """Logs go to standard error."""

    level: LogLevel = "info"
    """`debug` has every request and every call."""
    format: LogFormat = "json"
    """`text` is for people."""


class ScopeSection(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant whose key the process holds. Instances and front ends need it; an index must not have any."""

    key_file: str
    """The Scope Key: at least 32 octets, or 64 hex digits; readable by its owner only."""
    shared: bool = False
    """Public among its readers. A front end asks in its first scope that is not shared."""


class TierSection(msgspec.Struct, frozen=True, kw_only=True):
    """Where blocks are kept, the fastest first."""

    tier: Literal["host", "local-storage"]
    """Host memory, or sealed files in a directory, which need `storage_key_file`."""
    capacity_bytes: Count
    """Of blocks. What is too much moves to the next tier, and is evicted from the last."""
    read_mbit_per_s: Count | None = None
    """How fast the tier is read, as its records say; placement estimates with it."""
    directory: str | None = None
    """Of `local-storage`, and of that only."""
    retention_ms: Count | None = None
    """How long a block may be in the tier, at most; without it, until it is evicted."""


class RoleSection(msgspec.Struct, frozen=True, kw_only=True):
    """What the section of every role has."""

    base_uri: str
    """Its name and address, `https://.../`; the one in its certificate and in the policy."""
    certificate_file: str
    """PEM. SIGHUP reads it again, and its key."""
    key_file: str
    """Of the certificate; PEM."""
    listen: str | None = None
    """`HOST:PORT`; by default those of the base URI."""

    @property
    def address(self) -> tuple[str, int]:
        """The host and port to listen on."""
        parts = urlsplit(f"//{self.listen}" if self.listen else self.base_uri)
        return parts.hostname or "", parts.port if parts.port is not None else 443


class IndexSection(RoleSection, frozen=True, kw_only=True):
    """Knows who holds which block."""

    max_ttl_ms: Count = 3_600_000
    """The longest time for which a record is kept without a refresh."""
    max_lookup_keys: Count = 8192
    """Block keys in one lookup. Who asks for more is refused (413), asks in smaller pieces from then on, and
    tries larger ones again now and then."""


class HolderSection(RoleSection, frozen=True, kw_only=True):
    """A cache server: keeps blocks that others store at it."""

    index: list[str] = []
    """Base URI of the index, or of each of its parts (OP-3), the same for all that share it. Without one
    nothing is published."""
    tiers: list[TierSection]
    record_ttl_ms: Count = 600_000
    """For how long its records hold; they are refreshed before."""
    max_lease_ttl_ms: Count = 60_000
    """The longest lease, and for how long a holder that starts evicts nothing of what it finds. Instances ask
    for up to 60,000, and go by what is granted, 1,000 at least. Once it is lower, a restart may cut leases
    short that were granted before."""
    lease_quota_bytes: Count = 64 << 30
    """What one client may have leased."""


class ModelSection(RoleSection, frozen=True, kw_only=True):
    """What roles have beside that which know the model. All use the same values, or share nothing (CD-8)."""

    controller: str
    """Base URI of the controller."""
    model_dir: str
    """The model's directory, of the Hugging Face kind."""
    model: str | None = None
    """Its name; by default that of the directory."""
    block_tokens: Count = DEFAULT_BLOCK_TOKENS
    """Tokens of a block."""
    kv_dtype: str | None = None
    """Element type of the cache; by default that of the weights."""


class LinkSection(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the way to a holder. Placement estimates with it, and the instance measures it."""

    holder: str
    """Base URI."""
    mbit_per_s: Amount
    """0 is not known."""
    rtt_us: Amount = 0
    """Of a small call, there and back."""


class InstanceSection(ModelSection, frozen=True, kw_only=True):
    """Computes, and holds what it computed."""

    index: list[str]
    """Base URI of the index, or of each of its parts (OP-3), the same for all that share it."""
    copies_to: str | None = None
    """Base URI of the holder that gets copies of generated blocks, so that they survive the instance."""
    tiers: list[TierSection] = []
    max_sequences: Count = 8
    """Sessions that are computed at a time; others wait."""
    status_ttl_ms: Count = 3_000
    """After this time without a report the controller holds it for failed."""
    record_ttl_ms: Count = 600_000
    """As a holder's: an instance is the holder of its tiers."""
    max_lease_ttl_ms: Count = 60_000
    """As a holder's."""
    lease_quota_bytes: Count = 64 << 30
    """As a holder's."""
    report_to_index: bool = False
    """Whether it reports to the index too, for estimates for `targets`; an index in the process of the
    controller has them from there."""
    sleep_after_ms: Count | None = None
    """After this time without sessions and shards it asks to sleep; never, where this is left out (LC-1)."""
    engine_silence_ms: Count = ENGINE_SILENCE_MS
    """After this time without a word from an engine that has work, it counts as hung
    ([what to choose](instance.md#an-engine-that-hangs))."""
    prefill_tokens_per_s: Amount = 0
    """What placement goes by until the instance has measured it; 0 is not known."""
    decode_tokens_per_s: Amount = 0
    """The same, of generated tokens."""
    links: list[LinkSection] = []


class ControllerSection(RoleSection, frozen=True, kw_only=True):
    """Decides which instance answers, and keeps the sessions."""

    index: list[str]
    """Base URI of the index, or of each of its parts; `[]` has none, and everything counts as not cached."""
    classes: dict[str, str] = {}
    """For an instance's base URI the name of the class within which results are equal to the last bit
    (CP-6); by default instances say so themselves."""
    min_active: Count = 1
    """Instances that stay awake, whatever they ask."""
    prefetch: bool = True
    """Whether the instance that is to serve a request is told ahead what to load."""
    open_by_checkpoint: bool = False
    """Whether a first checkpoint in epoch 1 opens its session (decision W19)."""


class FrontEndSection(ModelSection, frozen=True, kw_only=True):
    """What programs ask, by an API of OpenAI's kind, in plain HTTP, which is no part of KVSP."""

    api_host: str = "127.0.0.1"
    """Whoever reaches it may ask."""
    api_port: _Port = 8000
    """0 takes a free one, which the log names."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """These keys stand before the first section."""

    authorities_file: str
    """Whose certificates count; PEM. SIGHUP reads it again."""
    policy_file: str
    """Who may do what (below). SIGHUP reads it again."""
    data_dir: str = ""
    """Where durable state is kept; by default `data` beside the file."""
    storage_key_file: str | None = None
    """Seals what is stored, at least 32 octets; a controller and tiers on disk need it."""
    descriptor_files: list[str] = []
    """Compatibility Descriptors that the roles begin with; others are learnt."""
    loop: LoopName = "trio"
    """What the process runs on."""
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
    _check_hosts(path, config)
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
    links = getattr(section, "links", ())
    uris += [(f"links[{number}].holder", link.holder) for number, link in enumerate(links)]
    uris += [(f"classes.{instance!r}", instance) for instance in getattr(section, "classes", ())]
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


def _check_hosts(path: Path, config: Config) -> None:
    """Check that what is listened on can be the name or address of a host."""
    hosts = [("monitoring.host", config.monitoring.host)]
    hosts += [(f"{name}.listen", section.address[0]) for name, section in config.roles.items()]
    if config.front_end is not None:
        hosts.append(("front_end.api_host", config.front_end.api_host))
    for key, host in hosts:
        try:
            octets = host.encode("idna")
        except UnicodeError:
            octets = b"\0"
        if b"\0" in octets:
            raise DocumentError(f"{path}: {key}: expected the name or address of a host, such as 127.0.0.1")


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
        if isinstance(section, ModelSection):
            named.append((f"{name}.model_dir", section.model_dir))
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
    if config.front_end is not None and not config.scopes:
        raise DocumentError(f"{path}: scopes: a front end asks in one; add [[scopes]] with its key_file")
    if config.index is not None and config.scopes and config.instance is None and config.front_end is None:
        raise DocumentError(
            f"{path}: scopes: an index must not have Scope Keys; no other role here needs any, so remove them"
        )
