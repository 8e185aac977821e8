"""Roles made from a configuration: what each needs, put together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import attrs

from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.machines.fleet import Fleet
from kvsp_core.machines.replica_index import ReplicaIndex
from kvsp_core.roles.authorization import Policy
from kvsp_core.roles.controller import Controller, ControllerSettings
from kvsp_core.roles.controller_placement import PlacementSettings
from kvsp_core.roles.index import Index
from kvsp_core.roles.role import Role, Stored
from kvsp_services.config import Config, ControllerSection, IndexSection, RoleSection, TierSection
from kvsp_services.files import read_secret
from kvsp_services.stores.block_files import FileTier
from kvsp_services.stores.blocks import BlockTier, MemoryTier

__all__ = ["Materials", "make_role", "make_tiers", "read_descriptors", "read_storage_key"]


@attrs.frozen(kw_only=True)
class Materials:
    """What roles are made from. `stored` is what the role's store holds."""

    config: Config
    policy: Policy
    descriptors: tuple[CompatibilityDescriptor, ...]
    stored: Stored
    fleet: Fleet | None = None
    """What a controller knows of instances, shared with an index in the same process."""
    random_bytes: Callable[[int], bytes] = os.urandom


def make_role(name: str, section: RoleSection, materials: Materials) -> Role:
    """Return the role of a section of the configuration, as it was when it last made something durable."""
    if isinstance(section, IndexSection):
        return _make_index(section, materials)
    if isinstance(section, ControllerSection):
        return _make_controller(section, materials)
    raise LocalProtocolError(f"[{name}]: this version does not run that role")


def _make_index(section: IndexSection, materials: Materials) -> Index:
    table = ReplicaIndex(max_ttl_ms=section.max_ttl_ms, max_keys=section.max_lookup_keys)
    return Index(
        base_uri=section.base_uri, policy=materials.policy, replica_index=table, fleet=materials.fleet
    )


def _make_controller(section: ControllerSection, materials: Materials) -> Controller:
    placement = PlacementSettings(
        index_uris=tuple(section.index),
        classes=section.classes,
        descriptors={model.compat_id: model for model in materials.descriptors},
    )
    return Controller(
        base_uri=section.base_uri,
        policy=materials.policy,
        settings=ControllerSettings(
            placement=placement,
            min_active=section.min_active,
            prefetch=section.prefetch,
            open_by_checkpoint=section.open_by_checkpoint,
        ),
        random_bytes=materials.random_bytes,
        stored=materials.stored,
        fleet=materials.fleet,
    )


def make_tiers(sections: list[TierSection], storage_key: bytes | None) -> dict[str, BlockTier]:
    """Return the tiers of a role by their names."""
    tiers: dict[str, BlockTier] = {}
    for section in sections:
        if section.directory is None:
            tiers[section.tier] = MemoryTier(section.capacity_bytes)
        else:
            assert storage_key is not None, "the configuration was checked for this"
            tiers[section.tier] = FileTier(
                Path(section.directory),
                storage_key,
                section.capacity_bytes,
                retention_ms=section.retention_ms,
            )
    return tiers


def read_descriptors(config: Config) -> tuple[CompatibilityDescriptor, ...]:
    """Return the descriptors whose files the configuration names."""
    return tuple(CompatibilityDescriptor.from_json(Path(f).read_bytes()) for f in config.descriptor_files)


def read_storage_key(config: Config) -> bytes | None:
    """Return the storage key, or None where there is none."""
    return read_secret(Path(config.storage_key_file)) if config.storage_key_file else None
