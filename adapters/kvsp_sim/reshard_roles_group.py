"""A group that reshards, for the explorer: the shipped controller, and instances with their holders.

The program around the controller goes over to one map after the other, once it has begun, and notes how far
it is. Each instance holds the blocks of its ranges in its local storage, and a
member that gains a range fetches them from the one that has it, as an index says that always answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvsp_core.answers import json_response
from kvsp_core.block_keys import block_keys
from kvsp_core.bodies import decode
from kvsp_core.container import ContainerHeader, replica_digest
from kvsp_core.errors import LocalProtocolError
from kvsp_core.heads import Request, Response
from kvsp_core.machines.fleet import Fleet
from kvsp_core.machines.prefetch import PrefetchLimits
from kvsp_core.messages import LookupAnswer, LookupRequest, MatchedBlock
from kvsp_core.records import ReplicaRecord, Residency, Shard
from kvsp_core.resources import RoleName
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.controller import Controller, ControllerSettings
from kvsp_core.roles.controller_placement import PlacementSettings
from kvsp_core.roles.controller_store import MapContext
from kvsp_core.roles.engine import LoadShard
from kvsp_core.roles.holder import Holder
from kvsp_core.roles.holdings import TierLimits
from kvsp_core.roles.instance import Instance, InstanceSettings
from kvsp_core.roles.role import BlockName, Effect, Input, JobDone, Persist, Put
from kvsp_core.roles.work import Numbers
from kvsp_sim.blocks import described
from kvsp_sim.engine import block_octets
from kvsp_sim.explored_node import ExploredNode
from kvsp_sim.host import Start
from kvsp_sim.reshard_group import MAP, Moved
from kvsp_sim.session_group import ABSENT, CONTROLLER, MODEL, SCOPE
from kvsp_sim.session_properties import extend_history

__all__ = ["ReshardGroup", "ShardEngine", "begin_resharding"]

TIER: Final = "local-storage"
_TTL_MS: Final = 60_000
_DEADLINE_MS: Final = 1_000  # clocks move by timers only: fewer repetitions before it
"""How long a reshard may take to prepare."""


class ShardEngine:
    """An engine that holds whatever range it is told to, at once."""

    def __init__(self, node: ExploredNode) -> None:
        self._node = node

    def execute(self, command: object) -> None:
        """Carry out a command."""
        if isinstance(command, LoadShard):
            self._node.deliver(JobDone(command.job_id))


@attrs.frozen
class _Begin:
    """The program begins."""


def begin_resharding(node: ExploredNode) -> None:
    """Have the program of a controller begin."""
    node.waiting |= {MAP}
    node.deliver(_Begin())  # type: ignore[arg-type]


class _Program(Controller):
    """The controller, and the program that embeds it."""

    def __init__(self, maps: Sequence[tuple[Shard, ...]], context: MapContext, **members: Any) -> None:
        self._maps_to_come = maps
        self._context = context
        self._begun = int(members["stored"].get("begun", {}).get(MAP, b"0"))
        self._has_begun = bool(members["stored"])
        super().__init__(**members)

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        """Go on from what was stored."""
        return (*super().start(now_ms), *self._next_map(now_ms))

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        """Take one input in, and go over to the next map where that is possible."""
        self._has_begun = self._has_begun or isinstance(item, _Begin)
        return (*super().handle(item, now_ms), *self._next_map(now_ms))

    def _next_map(self, now_ms: int) -> tuple[Effect, ...]:
        if not self._has_begun:
            return ()
        if self._begun >= len(self._maps_to_come):
            return (Moved(),) if self._maps.is_stable(MAP) else ()  # type: ignore[return-value]
        try:
            effects = self.reshard(MAP, self._maps_to_come[self._begun], self._context, now_ms)
        except LocalProtocolError:
            return ()  # a change is under way, or an instance has not reported
        self._begun += 1
        return (Persist((Put("begun", MAP, b"%d" % self._begun),)), *effects)


def _record(member: str, name: BlockName, octets: bytes) -> ReplicaRecord:
    """Return the record of a block in the local storage of a member."""
    block = described(0, octets)
    assert block.header is not None
    return ReplicaRecord(
        block_key=name.block_key,
        compat_id=name.compat_id,
        scope_id=name.scope_id,
        holder=member,
        codec=block.header.codec,
        size=block.header.data_bytes,
        digest=replica_digest(block.layer_digests),
        layer_digests=block.layer_digests,
        residency=(Residency(tier=TIER, layers=(0, len(block.layer_digests) - 1)),),
        ttl_ms=_TTL_MS,
    )


@attrs.frozen
class ReshardGroup:
    """How the roles of a group with these members are built: the first two have a half each, and the last
    takes a part of the second one's.
    """

    members: tuple[str, ...]
    policy: Policy = attrs.field(init=False)
    names: tuple[BlockName, ...] = attrs.field(init=False)
    blocks: Mapping[BlockName, bytes] = attrs.field(init=False)
    records: tuple[ReplicaRecord, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        everyone: Any = (CONTROLLER, *self.members)
        principals = {
            CONTROLLER: (RoleName.CONTROLLER,),
            **dict.fromkeys(self.members, (RoleName.INSTANCE, RoleName.HOLDER)),
        }
        policy = Policy(
            principals, {SCOPE.scope_id: ScopeRules(read=everyone, write=everyone, publish=everyone)}
        )
        tokens = tuple(range(3 * MODEL.block_tokens))
        keys, _ = block_keys(SCOPE, MODEL, tokens)
        names = tuple(BlockName(MODEL.compat_id, SCOPE.scope_id, key.hex()) for key in keys)
        blocks, history = {}, b""
        for position, token in enumerate(tokens):
            history = extend_history(history, token)
            block, rest = divmod(position + 1, MODEL.block_tokens)
            if not rest:
                blocks[names[block - 1]] = block_octets(MODEL, history, 0)
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "blocks", MappingProxyType(blocks))
        records = (
            _record(member, name, blocks[name]) for member in self.members for name in self.held(member)
        )
        object.__setattr__(self, "records", tuple(records))

    def maps(self) -> tuple[tuple[Shard, ...], ...]:
        """Return the maps, one after the other."""
        size = MODEL.block_tokens
        first, second, last = self.members[0], self.members[1], self.members[-1]
        halves = (Shard(tokens=(0, size), instance=first), Shard(tokens=(size, 3 * size), instance=second))
        moved = (
            Shard(tokens=(0, size), instance=first),
            Shard(tokens=(size, 2 * size), instance=last),
            Shard(tokens=(2 * size, 3 * size), instance=second),
        )
        return halves, moved

    def held(self, base_uri: str) -> dict[BlockName, bytes]:
        """Return the blocks that a member has at first."""
        mine = {self.members[0]: self.names[:1], self.members[1]: self.names[1:]}
        return {name: self.blocks[name] for name in mine.get(base_uri, ())}

    def index(self, request: Request, body: bytes) -> tuple[Response, bytes] | None:
        """Answer a lookup, as an index does that knows who held what at first, and nothing else."""
        if request.path != "lookup":
            return None
        wanted = decode(LookupRequest, body)
        found = takewhile(
            bool, ([r for r in self.records if r.block_key == key] for key in wanted.block_keys)
        )
        blocks = tuple(MatchedBlock(block_key=each[0].block_key, replicas=tuple(each)) for each in found)
        return json_response(LookupAnswer(matched=len(blocks), blocks=blocks))

    def controller(self, start: Start) -> Controller:
        """Return the controller and its program."""
        placement = PlacementSettings(index_uris=(), descriptors={MODEL.compat_id: MODEL})
        context = MapContext(
            compat_id=MODEL.compat_id,
            scope_id=SCOPE.scope_id,
            block_keys=tuple(name.block_key for name in self.names),
            block_tokens=MODEL.block_tokens,
        )
        return _Program(
            self.maps(),
            context,
            base_uri=CONTROLLER,
            policy=self.policy,
            settings=ControllerSettings(
                placement=placement, prefetch=False, reshard_deadline_ms=_DEADLINE_MS
            ),
            random_bytes=start.random_bytes,
            stored=start.stored,
            fleet=Fleet(warm_up_ms=0),
        )

    def instance(self, base_uri: str, start: Start) -> Instance:
        """Return a member."""
        numbers = Numbers()
        capacity = 3 * ContainerHeader.for_layers(MODEL).size_bytes
        blocks = Holder(
            base_uri=base_uri,
            policy=self.policy,
            tiers={TIER: TierLimits(capacity_bytes=capacity)},
            random_bytes=start.random_bytes,
            now_ms=start.now_ms,
            numbers=numbers,
        )
        settings = InstanceSettings(
            base_uri=base_uri,
            controller_uri=CONTROLLER,
            index_uris=(ABSENT,),
            epoch=start.life,
            status_ttl_ms=_TTL_MS,
            prefetch=PrefetchLimits(),
        )
        return Instance(
            settings,
            models={MODEL.compat_id: MODEL},
            scopes={SCOPE.scope_id: SCOPE},
            blocks=blocks,
            numbers=numbers,
            policy=self.policy,
            random_bytes=start.random_bytes,
            now_ms=start.now_ms,
        )
