"""Strategies for shard maps and for the events of the two machines of a reshard.

Members, versions and positions are drawn from small pools, so that events meet.
"""

from __future__ import annotations

from hypothesis import strategies as st

from kvsp_core.machines import reshard, reshard_member
from kvsp_core.machines.reshard_plan import MemberPlan, Plan, Range, Transfer, joined
from kvsp_core.records import Shard, ShardMap

__all__ = [
    "BLOCK_TOKENS",
    "MEMBERS",
    "begins",
    "coordinator_events",
    "instances",
    "member_events",
    "plans",
    "shard_maps",
    "shards",
    "versions",
]

BLOCK_TOKENS = 4
MEMBERS = tuple(f"https://ii{n}.example/kvsp/" for n in (1, 2, 3))

instances = st.sampled_from(MEMBERS)
versions = st.integers(0, 5)


@st.composite
def shards(draw: st.DrawFn, max_blocks: int = 6) -> tuple[Shard, ...]:
    """Draw the shards of a context: whole blocks but for the end, neighbours with different owners or not."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=max_blocks))
    tail = draw(st.integers(0, BLOCK_TOKENS - 1))
    result, first = [], 0
    for place, blocks in enumerate(sizes):
        end = first + blocks * BLOCK_TOKENS + (tail if place == len(sizes) - 1 else 0)
        result.append(Shard(tokens=(first, end), instance=draw(instances)))
        first = end
    return tuple(result)


def shard_maps(version: st.SearchStrategy[int] = versions) -> st.SearchStrategy[ShardMap]:
    """Return maps of one context."""
    return st.builds(ShardMap, map=st.just("m"), version=version, shards=shards())


def begins() -> st.SearchStrategy[reshard.Begin]:
    """Return beginnings of a reshard."""
    return st.builds(
        reshard.Begin,
        shards=shards(),
        block_tokens=st.just(BLOCK_TOKENS),
        deadline_ms=st.integers(1, 500),
    )


def coordinator_events() -> st.SearchStrategy[reshard.Event]:
    """Return events of a coordinator, except its beginnings."""
    return st.one_of(
        st.builds(reshard.PlanAnswered, instances, versions, st.booleans()),
        st.builds(reshard.CommitAnswered, instances, versions, st.booleans()),
        st.builds(reshard.AbortAnswered, instances, versions),
        st.builds(reshard.CallFailed, instances, versions),
        st.builds(reshard.MemberLost, instances),
        st.just(reshard.TimerFired()),
    )


_ranges = st.tuples(st.integers(0, 8), st.integers(1, 4)).map(
    lambda pair: (pair[0] * BLOCK_TOKENS, (pair[0] + pair[1]) * BLOCK_TOKENS)
)


def _some_ranges() -> st.SearchStrategy[tuple[Range, ...]]:
    return st.lists(_ranges, max_size=2).map(joined)


def plans() -> st.SearchStrategy[Plan]:
    """Return plans, most of which do not fit."""
    member = st.builds(
        MemberPlan,
        instance=st.just(MEMBERS[0]),
        retain=_some_ranges(),
        fetch=st.lists(st.builds(Transfer, _ranges, st.just(MEMBERS[1])), max_size=2).map(tuple),
        assign=_some_ranges(),
        release=_some_ranges(),
    )
    return st.builds(Plan, version=versions, to=versions, deadline_ms=st.integers(1, 500), member=member)


def member_events() -> st.SearchStrategy[reshard_member.Event]:
    """Return events of a member, except tokens appended."""
    return st.one_of(
        st.builds(reshard_member.PlanReceived, plans()),
        st.builds(reshard_member.CommitReceived, versions),
        st.builds(reshard_member.AbortReceived, versions),
        st.builds(reshard_member.Loaded, versions),
        st.builds(reshard_member.LoadFailed, versions),
        st.just(reshard_member.TimerFired()),
    )
