"""KVSP: the KV Cache Storage Protocol as pure values and state machines.

Nothing in this package reads a clock, draws entropy, does I/O, starts a thread or logs.

Here are the values: names, keys, containers, records and the errors of all of them. Imported by themselves
are `kvsp_core.layout` (numpy views of sections), `kvsp_core.messages` and `kvsp_core.resources` (requests and
answers), `kvsp_core.machines` and `kvsp_core.roles`, and the function `kvsp_core.block_keys.block_keys`,
which would hide its module here.
"""

from __future__ import annotations

from kvsp_core.block_keys import BlockKeyChain
from kvsp_core.bodies import decode, encode
from kvsp_core.container import (
    BlockArrived,
    BlockEvent,
    BlockRefused,
    ContainerError,
    ContainerHeader,
    HeaderArrived,
    IncomingBlock,
    LayerArrived,
    OutgoingBlock,
    decode_container,
    encode_container,
    layer_digest,
    replica_digest,
)
from kvsp_core.errors import KVSPError, LimitExceeded, LocalProtocolError, RemoteProtocolError
from kvsp_core.identity import (
    BaseURI,
    CompatibilityDescriptor,
    Scope,
    component_id,
    digest_of_files,
    parse_base_uri,
)
from kvsp_core.model_config import derive_descriptor
from kvsp_core.problems import Problem, ProblemType
from kvsp_core.records import (
    InstanceStatus,
    Link,
    ReplicaRecord,
    Residency,
    Sampler,
    SessionCheckpoint,
    Shard,
    ShardMap,
)
from kvsp_core.registries import Codec, ElementType, PositionalEncoding, Registries, Registry, StorageTier

__all__ = [
    "BaseURI",
    "BlockArrived",
    "BlockEvent",
    "BlockKeyChain",
    "BlockRefused",
    "Codec",
    "CompatibilityDescriptor",
    "ContainerError",
    "ContainerHeader",
    "ElementType",
    "HeaderArrived",
    "IncomingBlock",
    "InstanceStatus",
    "KVSPError",
    "LayerArrived",
    "LimitExceeded",
    "Link",
    "LocalProtocolError",
    "OutgoingBlock",
    "PositionalEncoding",
    "Problem",
    "ProblemType",
    "Registries",
    "Registry",
    "RemoteProtocolError",
    "ReplicaRecord",
    "Residency",
    "Sampler",
    "Scope",
    "SessionCheckpoint",
    "Shard",
    "ShardMap",
    "StorageTier",
    "component_id",
    "decode",
    "decode_container",
    "derive_descriptor",
    "digest_of_files",
    "encode",
    "encode_container",
    "layer_digest",
    "parse_base_uri",
    "replica_digest",
]
