"""The small clusters that `kvsp explore` goes through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import attrs

from kvsp_core.limits import MAX_RESUME_ATTEMPTS
from kvsp_core.records import Shard
from kvsp_sim.deployment import BLOCK_BYTES
from kvsp_sim.explored_node import ExploredNode
from kvsp_sim.explorer import Bounds
from kvsp_sim.host import Start
from kvsp_sim.lease_group import HOLDER, TIER, LeaseClient, RoomSeeker, lease_holder, lease_policy
from kvsp_sim.properties import LeasesHold, Properties
from kvsp_sim.reshard_group import BLOCK_TOKENS, MAP, RESHARD_EFFECTS, Coordinator, Member, PlainEngine
from kvsp_sim.reshard_roles_group import TIER as ROLES_TIER
from kvsp_sim.reshard_roles_group import ReshardGroup, ShardEngine, begin_resharding
from kvsp_sim.retrieval_group import (
    HOLDERS,
    LOADER,
    RETRIEVAL_EFFECTS,
    Loader,
    part_holder,
    want_a_block,
)
from kvsp_sim.session_group import ABSENT, CONTROLLER, FRONT_END, USER_EFFECTS, SessionGroup, ask, epoch_of
from kvsp_sim.witness import Witness

__all__ = ["CONFIGURATIONS", "Configuration"]


_ONCE: Final = ("ext/placements", "ext/sessions/", "leases")
"""Where a POST makes something new: a placement, a stream, a lease."""


@attrs.frozen(kw_only=True)
class Configuration:
    """A cluster to explore: what it is, its usual bounds, and how it is built for so many members."""

    about: str
    bounds: Bounds
    members: int
    build: Callable[[int], tuple[Sequence[ExploredNode], Properties]]


def _maps(members: Sequence[str]) -> tuple[tuple[Shard, ...], ...]:
    """Return a map in which the first two members have half each, and one in which the last takes a part."""
    half = 2 * BLOCK_TOKENS
    first, second, last = members[0], members[1 % len(members)], members[-1]
    halves = (Shard(tokens=(0, half), instance=first), Shard(tokens=(half, 2 * half), instance=second))
    moved = (
        Shard(tokens=(0, half), instance=first),
        Shard(tokens=(half, half + BLOCK_TOKENS), instance=last),
        Shard(tokens=(half + BLOCK_TOKENS, 2 * half), instance=second),
    )
    return halves, moved


def _crashing(crashes: str, names: Sequence[str]) -> str | None:
    """Return which of a map's members crashes: the one that gains a range, or the one that loses it."""
    return {"gains": names[-1], "loses": names[1 % len(names)]}.get(crashes)


def _reshard(crashes: str, members: int) -> tuple[Sequence[ExploredNode], Properties]:
    properties = Properties(timed=False)
    witness = Witness(properties)
    coordinator = "https://controller/"
    names = [f"https://member{number}/" for number in range(members)]

    def coordinate(start: Start) -> Coordinator:
        return Coordinator(start, coordinator, _maps(names))

    def take_part(name: str, start: Start) -> Member:
        return Member(start, name, coordinator)

    nodes = [
        ExploredNode(
            coordinator,
            coordinate,
            witness=witness,
            can_crash=crashes == "controller",
            own_effects=RESHARD_EFFECTS,
        )
    ]
    nodes[0].waiting = frozenset({MAP})
    nodes += [
        ExploredNode(
            name,
            partial(take_part, name),
            witness=witness,
            can_crash=name == _crashing(crashes, names),
            engine=lambda _: PlainEngine(),
        )
        for name in names
    ]
    return nodes, properties


def _session(
    crashes: str,
    members: int,
    output: int = 2,
    lives: int | None = None,
    attempts: int = MAX_RESUME_ATTEMPTS,
) -> tuple[Sequence[ExploredNode], Properties]:
    properties = Properties(timed=False)
    witness = Witness(properties)
    group = SessionGroup(tuple(f"https://instance{number}/" for number in range(members)), output, attempts)
    nodes = [
        ExploredNode(
            CONTROLLER,
            group.controller,
            witness=witness,
            can_crash=crashes == "controller",
            once=_ONCE,
            renews=epoch_of,
        )
    ]
    nodes += [
        ExploredNode(
            name,
            partial(group.instance, name),
            witness=witness,
            can_crash=crashes == "instances",
            lives=lives,
            engine=group.engine,
            waits=frozenset({"_draw"}),
            once=_ONCE,
            absent=frozenset({ABSENT}),
            patient=True,
            renews=epoch_of,
            parts_from=(CONTROLLER, FRONT_END) if name == group.instances[0] else (),
        )
        for name in group.instances
    ]
    nodes.append(
        ExploredNode(
            FRONT_END,
            group.front_end,  # type: ignore[arg-type]
            witness=witness,
            once=_ONCE,
            own_effects=USER_EFFECTS,
            begin=partial(ask, group.output),
            only_asks=True,
            patient=True,
        )
    )
    return nodes, properties


def _reshard_roles(crashes: str, members: int) -> tuple[Sequence[ExploredNode], Properties]:
    properties = Properties(timed=False)
    witness = Witness(properties)
    group = ReshardGroup(tuple(f"https://member{number}/" for number in range(members)))
    nodes = [
        ExploredNode(
            CONTROLLER,
            group.controller,
            witness=witness,
            can_crash=crashes == "controller",
            begin=begin_resharding,
            once=_ONCE,
            own_effects=RESHARD_EFFECTS,
        ),
    ]
    nodes += [
        ExploredNode(
            name,
            partial(group.instance, name),
            witness=witness,
            can_crash=name == _crashing(crashes, group.members),
            tiers=(ROLES_TIER,),
            blocks=group.held(name),
            surviving=(ROLES_TIER,),
            engine=ShardEngine,
            once=_ONCE,
            absent=frozenset({ABSENT}),
            known=group.index,
        )
        for name in group.members
    ]
    return nodes, properties


def _retrieval(members: int) -> tuple[Sequence[ExploredNode], Properties]:
    properties = Properties(timed=False)
    witness = Witness(properties)
    holders = tuple(HOLDERS)[:members]
    nodes = [
        ExploredNode(
            LOADER,
            lambda _: Loader(LOADER, holders),
            witness=witness,
            begin=want_a_block,
            own_effects=RETRIEVAL_EFFECTS,
            only_asks=True,
        )
    ]
    nodes += [ExploredNode(name, partial(part_holder, name), witness=witness) for name in holders]
    return nodes, properties


def _lease(members: int) -> tuple[Sequence[ExploredNode], Properties]:
    properties = Properties(timed=False)
    witness = Witness(properties, block_bytes=BLOCK_BYTES)
    names = tuple(f"https://client{number}/" for number in range(members))
    seeker = "https://seeker/"

    def client(number: int, _: Start) -> LeaseClient:
        return LeaseClient(names[number], number=number)

    nodes = [
        ExploredNode(
            HOLDER,
            partial(lease_holder, lease_policy((*names, seeker))),
            witness=witness,
            local=(LeasesHold(),),
            can_crash=True,
            tiers=(TIER,),
            once=_ONCE,
            surviving=(TIER,),
        ),
        ExploredNode(seeker, lambda _: RoomSeeker(seeker), witness=witness, once=_ONCE),
    ]
    nodes += [ExploredNode(names[n], partial(client, n), witness=witness, once=_ONCE) for n in range(members)]
    return nodes, properties


CONFIGURATIONS: Final[Mapping[str, Configuration]] = MappingProxyType(
    {
        "reshard": Configuration(
            about="the machines of a group that reshards twice, its controller crashing before and after its "
            "decision",
            bounds=Bounds(crashes=2),
            members=3,
            build=partial(_reshard, "controller"),
        ),
        "reshard-member": Configuration(
            about="the machines of a group that reshards twice, the member that gains a range crashing",
            bounds=Bounds(crashes=1),
            members=3,
            build=partial(_reshard, "gains"),
        ),
        "reshard-loser": Configuration(
            about="the machines of a group that reshards twice, the member that loses a range crashing",
            bounds=Bounds(crashes=1, switches=0),
            members=3,
            build=partial(_reshard, "loses"),
        ),
        "reshard-roles": Configuration(
            about="the roles of a group that reshards twice",
            bounds=Bounds(),
            members=3,
            build=partial(_reshard_roles, "controller"),
        ),
        "reshard-roles-controller": Configuration(
            about="the roles of a group that reshards twice, its controller crashing before and after its "
            "decision",
            bounds=Bounds(crashes=1, switches=0),
            members=3,
            build=partial(_reshard_roles, "controller"),
        ),
        "reshard-roles-member": Configuration(
            about="the roles of a group that reshards twice, the member that gains a range crashing",
            bounds=Bounds(crashes=1, switches=0),
            members=3,
            build=partial(_reshard_roles, "gains"),
        ),
        "reshard-roles-loser": Configuration(
            about="the roles of a group that reshards twice, the member that loses a range crashing",
            bounds=Bounds(crashes=1, switches=0),
            members=3,
            build=partial(_reshard_roles, "loses"),
        ),
        "session": Configuration(
            about="a session whose instances crash",
            bounds=Bounds(crashes=1),
            members=2,
            build=partial(_session, "instances"),
        ),
        "session-partition": Configuration(
            about="a session whose instance is cut off from its controller or its front end",
            bounds=Bounds(partitions=1, timers=1),
            members=2,
            build=partial(_session, "instances"),
        ),
        "session-controller": Configuration(
            about="a session whose controller crashes",
            bounds=Bounds(crashes=1),
            members=2,
            build=partial(_session, "controller"),
        ),
        "session-failures": Configuration(
            about="a session of one token; an instance crashes, and the first is cut off",
            bounds=Bounds(crashes=1, partitions=1, switches=0),
            members=2,
            build=partial(_session, "instances", output=1, lives=2),
        ),
        "session-second-failure": Configuration(
            about="a session of one token; an instance crashes and the first is cut off, then one crashes "
            "again; given up after two attempts to resume",
            bounds=Bounds(crashes=2, partitions=1, crash_last=True, switches=0),
            members=2,
            build=partial(_session, "instances", output=1, lives=2, attempts=2),
        ),
        "session-crashes": Configuration(
            about="a session of one token, each of whose instances crashes",
            bounds=Bounds(crashes=2, switches=0),
            members=2,
            build=partial(_session, "instances", output=1, lives=2),
        ),
        "lease": Configuration(
            about="clients that lease a block of a holder with room for one, and one that wants the room",
            bounds=Bounds(crashes=1, timers=1),
            members=2,
            build=_lease,
        ),
        "retrieval": Configuration(
            about="the machine that retrieves a block whose layers are at several holders, of two replicas",
            bounds=Bounds(losses=4),
            members=5,
            build=_retrieval,
        ),
    }
)
