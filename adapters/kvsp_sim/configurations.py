"""The small clusters that `kvsp explore` goes through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import attrs

from kvsp_core.records import Shard
from kvsp_sim.explored_node import ExploredNode
from kvsp_sim.explorer import Bounds
from kvsp_sim.host import Start
from kvsp_sim.properties import Properties
from kvsp_sim.reshard_group import BLOCK_TOKENS, Coordinator, Member, PlainEngine
from kvsp_sim.witness import Witness

__all__ = ["CONFIGURATIONS", "Configuration"]


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


def _reshard(members: int) -> tuple[Sequence[ExploredNode], Properties]:
    properties = Properties()
    witness = Witness(properties)
    coordinator = "https://controller/"
    names = [f"https://member{number}/" for number in range(members)]

    def coordinate(start: Start) -> Coordinator:
        return Coordinator(start, coordinator, _maps(names))

    def take_part(name: str, start: Start) -> Member:
        return Member(start, name, coordinator)

    nodes = [ExploredNode(coordinator, coordinate, witness=witness, can_crash=True)]
    nodes += [
        ExploredNode(
            name,
            partial(take_part, name),
            witness=witness,
            can_crash=True,
            engine=lambda _: PlainEngine(),
        )
        for name in names
    ]
    return nodes, properties


CONFIGURATIONS: Final[Mapping[str, Configuration]] = MappingProxyType(
    {
        "reshard": Configuration(
            about="a group that reshards twice, its controller and its members crashing",
            bounds=Bounds(crashes=1),
            members=3,
            build=_reshard,
        ),
    }
)
