"""Roles made from a configuration: what each needs, put together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import attrs

from kvsp_client.files import read_descriptor, read_scope
from kvsp_client.model_dir import descriptor_of_directory
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.machines.fleet import Fleet
from kvsp_core.machines.lease import LeaseTable
from kvsp_core.machines.replica_index import ReplicaIndex
from kvsp_core.records import Link
from kvsp_core.roles.authorization import Policy
from kvsp_core.roles.controller import Controller, ControllerSettings
from kvsp_core.roles.controller_placement import PlacementSettings
from kvsp_core.roles.descriptors import Descriptors
from kvsp_core.roles.front_end import FrontEnd
from kvsp_core.roles.holder import Holder
from kvsp_core.roles.holdings import TierLimits
from kvsp_core.roles.index import Index
from kvsp_core.roles.instance import Instance, InstanceSettings
from kvsp_core.roles.role import Role, Stored
from kvsp_core.roles.work import Numbers
from kvsp_services.config import (
    Config,
    ControllerSection,
    FrontEndSection,
    HolderSection,
    IndexSection,
    InstanceSection,
    ModelSection,
    RoleSection,
    TierSection,
)
from kvsp_services.stores.block_files import FileTier
from kvsp_services.stores.blocks import BlockTier, MemoryTier
from kvsp_services.stores.sealing import read_storage_key_file

__all__ = [
    "Materials",
    "make_role",
    "make_tiers",
    "read_descriptors",
    "read_model",
    "read_scopes",
    "read_storage_key",
]


@attrs.frozen(kw_only=True)
class Materials:
    """What roles are made from.

    `stored` is what the role's store holds, `model` the descriptor of a section's model directory, and
    `epoch` is greater than at every start before (ST-3).
    """

    config: Config
    policy: Policy
    descriptors: tuple[CompatibilityDescriptor, ...]
    scopes: tuple[Scope, ...]
    model: CompatibilityDescriptor | None
    stored: Stored
    now_ms: int
    epoch: int
    fleet: Fleet | None = None
    """What a controller knows of instances, shared with an index in the same process."""
    numerics: str | None = None
    """What the engine of an instance says of its numerics."""
    random_bytes: Callable[[int], bytes] = os.urandom

    def known_descriptors(self) -> Descriptors:
        """Return the descriptors a role begins with."""
        known = Descriptors()
        for descriptor in (*self.descriptors, *([self.model] if self.model else ())):
            known.add(descriptor)
        return known


def make_role(section: RoleSection, materials: Materials) -> Role:
    """Return the role of a section of the configuration, as it was when it last made something durable."""
    match section:
        case IndexSection():
            return _make_index(section, materials)
        case HolderSection():
            return _make_holder(section, materials)
        case InstanceSection():
            return _make_instance(section, materials)
        case ControllerSection():
            return _make_controller(section, materials)
        case FrontEndSection():
            return _make_front_end(section, materials)
        case _:
            raise AssertionError("there are no other sections")


def set_limits(role: Role, section: RoleSection) -> None:
    """Have a role that runs keep within the limits of its section from now on."""
    match role, section:
        case Index(), IndexSection():
            role.limit(max_ttl_ms=section.max_ttl_ms, max_lookup_keys=section.max_lookup_keys)
        case Holder() | Instance(), HolderSection() | InstanceSection():
            role.limit(
                max_lease_ttl_ms=section.max_lease_ttl_ms,
                lease_quota_bytes=section.lease_quota_bytes,
                replica_ttl_ms=section.record_ttl_ms,
            )
        case Controller(), ControllerSection():
            role.limit(
                min_active=section.min_active,
                prefetch=section.prefetch,
                open_by_checkpoint=section.open_by_checkpoint,
            )
        case _:
            pass


def _make_index(section: IndexSection, materials: Materials) -> Index:
    table = ReplicaIndex(max_ttl_ms=section.max_ttl_ms, max_keys=section.max_lookup_keys)
    return Index(
        base_uri=section.base_uri,
        policy=materials.policy,
        replica_index=table,
        fleet=materials.fleet,
        descriptors=materials.known_descriptors(),
    )


def _make_holder(section: HolderSection, materials: Materials, numbers: Numbers | None = None) -> Holder:
    leases = LeaseTable(
        random_bytes=materials.random_bytes,
        now_ms=materials.now_ms,
        max_ttl_ms=section.max_lease_ttl_ms,
        quota_bytes=section.lease_quota_bytes,
    )
    return Holder(
        base_uri=section.base_uri,
        policy=materials.policy,
        tiers={
            tier.tier: TierLimits(capacity_bytes=tier.capacity_bytes, read_mbit_per_s=tier.read_mbit_per_s)
            for tier in section.tiers
        },
        random_bytes=materials.random_bytes,
        now_ms=materials.now_ms,
        index_uris=tuple(section.index),
        replica_ttl_ms=section.record_ttl_ms,
        lease_table=leases,
        descriptors=materials.known_descriptors(),
        numbers=numbers,
    )


def _make_instance(section: InstanceSection, materials: Materials) -> Instance:
    assert materials.model is not None
    numbers = Numbers()
    beside = HolderSection(
        base_uri=section.base_uri,
        certificate_file=section.certificate_file,
        key_file=section.key_file,
        index=section.index,
        tiers=section.tiers,
        record_ttl_ms=section.record_ttl_ms,
        max_lease_ttl_ms=section.max_lease_ttl_ms,
        lease_quota_bytes=section.lease_quota_bytes,
    )
    settings = InstanceSettings(
        base_uri=section.base_uri,
        controller_uri=section.controller,
        index_uris=tuple(section.index),
        epoch=materials.epoch,
        copy_holder=section.copies_to,
        batch_size=section.max_sequences,
        prefill_tokens_per_s=section.prefill_tokens_per_s,
        decode_tokens_per_s=section.decode_tokens_per_s,
        links=tuple(
            Link(holder=link.holder, mbit_per_s=link.mbit_per_s, rtt_us=link.rtt_us) for link in section.links
        ),
        numerics=materials.numerics,
        status_ttl_ms=section.status_ttl_ms,
        report_to_index=section.report_to_index,
        sleep_after_ms=section.sleep_after_ms,
        engine_silence_ms=section.engine_silence_ms,
    )
    return Instance(
        settings,
        models={materials.model.compat_id: materials.model},
        scopes={scope.scope_id: scope for scope in materials.scopes},
        blocks=_make_holder(beside, materials, numbers),
        numbers=numbers,
        policy=materials.policy,
        random_bytes=materials.random_bytes,
        now_ms=materials.now_ms,
    )


def _make_controller(section: ControllerSection, materials: Materials) -> Controller:
    placement = PlacementSettings(
        index_uris=tuple(section.index),
        classes=section.classes,
        descriptors={descriptor.compat_id: descriptor for descriptor in materials.descriptors},
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


def _make_front_end(section: FrontEndSection, materials: Materials) -> Role:
    assert materials.model is not None
    front_end = FrontEnd(
        base_uri=section.base_uri,
        policy=materials.policy,
        controller=section.controller,
        descriptor=materials.model,
        scopes=materials.scopes,
    )
    return cast(Role, front_end)  # its own inputs and effects are `Generations`'


def make_tiers(sections: list[TierSection], storage_key: bytes | None) -> dict[str, BlockTier]:
    """Return the tiers of a role by their names. Raises `StorageError` where another process has one's
    directory."""
    tiers: dict[str, BlockTier] = {}
    for section in sections:
        if section.directory is None:
            tiers[section.tier] = MemoryTier(section.capacity_bytes, retention_ms=section.retention_ms)
        else:
            assert storage_key is not None, "the configuration was checked for this"
            tier = FileTier(
                Path(section.directory),
                storage_key,
                section.capacity_bytes,
                retention_ms=section.retention_ms,
            )
            tier.lock()
            tiers[section.tier] = tier
    return tiers


def read_descriptors(config: Config) -> tuple[CompatibilityDescriptor, ...]:
    """Return the descriptors whose files the configuration names."""
    return tuple(read_descriptor(Path(file)) for file in config.descriptor_files)


def read_storage_key(config: Config) -> bytes | None:
    """Return the storage key, or None where there is none."""
    return read_storage_key_file(Path(config.storage_key_file)) if config.storage_key_file else None


def read_scopes(config: Config) -> tuple[Scope, ...]:
    """Return the scopes whose keys the process holds, those that are not shared first."""
    ordered = sorted(config.scopes, key=lambda scope: scope.shared)
    return tuple(read_scope(Path(scope.key_file)) for scope in ordered)


def read_model(section: RoleSection) -> CompatibilityDescriptor | None:
    """Return the descriptor of the model a section names, from its files; None where it names none."""
    if not isinstance(section, ModelSection):
        return None
    return descriptor_of_directory(
        Path(section.model_dir),
        model=section.model,
        block_tokens=section.block_tokens,
        kv_dtype=section.kv_dtype,
    )
