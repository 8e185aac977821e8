"""Plan how a context that is split over several instances is split anew (section "Sequence-Sharded Caches and
Resharding"; RS-1, RS-2, decision W21).

Plain functions over shard maps. `divide` chooses the new map: every instance keeps as much of what it holds
as its new share allows, so no other map with these shares moves fewer tokens. `compare` says, for two maps,
what each member retains, fetches, computes anew and releases, and how many tokens move.

Data moves in whole blocks, so every boundary is a multiple of B but the end of the context. The tokens after
the last complete block have no block key: they stay where they are, or the new owner of the end computes
them again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import attrs

from kvsp_core.errors import LocalProtocolError
from kvsp_core.records import Shard, ShardMap

__all__ = [
    "MemberPlan",
    "Plan",
    "Range",
    "Transfer",
    "Transition",
    "compare",
    "divide",
    "intersect",
    "joined",
    "subtract",
    "token_count",
]

Range: TypeAlias = tuple[int, int]
"""Token positions, half open: ``(first, end)``."""


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the same positions as ascending ranges that do not touch."""
    result: list[Range] = []
    for first, end in sorted(ranges):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        elif first < end:
            result.append((first, end))
    return tuple(result)


def subtract(ranges: Iterable[Range], taken: Iterable[Range]) -> tuple[Range, ...]:
    """Return the positions of `ranges` that are not in `taken`, in time linear in both but for sorting."""
    result: list[Range] = []
    holes = joined(taken)
    place = 0
    for first, end in joined(ranges):
        while place < len(holes) and holes[place][1] <= first:
            place += 1
        while place < len(holes) and holes[place][0] < end:
            hole_first, hole_end = holes[place]
            if first < hole_first:
                result.append((first, hole_first))
            first = hole_end
            if hole_end > end:
                break  # the next range may lie in it too
            place += 1
        if first < end:
            result.append((first, end))
    return tuple(result)


def intersect(ranges: Iterable[Range], others: Iterable[Range]) -> tuple[Range, ...]:
    """Return the positions that both have."""
    kept = joined(ranges)
    return subtract(kept, subtract(kept, others))


def token_count(ranges: Iterable[Range]) -> int:
    """Return how many positions the ranges hold."""
    return sum(end - first for first, end in ranges)


@attrs.frozen
class Transfer:
    """A range that a member loads from the instance that holds it now."""

    tokens: Range
    source: str


@attrs.frozen(kw_only=True)
class MemberPlan:
    """What one member does to come from one map to the next."""

    instance: str
    retain: tuple[Range, ...] = ()
    fetch: tuple[Transfer, ...] = ()
    assign: tuple[Range, ...] = ()
    """Owned anew with nothing to fetch: the member computes them."""
    release: tuple[Range, ...] = ()


@attrs.frozen(kw_only=True)
class Plan:
    """A plan as it goes to a member: from one version to another, acknowledged within `deadline_ms` of its
    arrival."""

    version: int
    to: int
    deadline_ms: int
    member: MemberPlan


@attrs.frozen(kw_only=True)
class Transition:
    """The step from one map to the next: the plan of each member of either, and what it costs.

    A member whose data is lost and that gets nothing new has no plan.
    """

    target: ShardMap
    plans: tuple[MemberPlan, ...]
    moved_tokens: int
    """Tokens whose KV goes from one instance to another."""
    computed_tokens: int
    """Tokens whose KV is computed by their new owner: a first assignment, a lost range, a tail that changed
    hands."""
    retained_tokens: int


def _ranges_of(shards: Iterable[Shard]) -> dict[str, tuple[Range, ...]]:
    owned: dict[str, list[Range]] = {}
    for shard in shards:
        owned.setdefault(shard.instance, []).append(shard.tokens)
    return {instance: joined(ranges) for instance, ranges in owned.items()}


def _grown(current: ShardMap, length: int) -> tuple[Shard, ...]:
    """Return the shards of a map whose open end has grown to `length` tokens since it was made."""
    if not current.shards:
        return ()
    last = current.shards[-1]
    if length < last.tokens[1]:
        raise LocalProtocolError("a context does not shrink: the new map ends before the current one")
    return (*current.shards[:-1], Shard(tokens=(last.tokens[0], length), instance=last.instance))


def compare(
    current: ShardMap, target: ShardMap, *, block_tokens: int, lost: Collection[str] = ()
) -> Transition:
    """Work out what each member of either map retains, fetches, computes and releases (RS-1, RS-2).

    `lost` names the members whose data is gone though the current map assigns ranges to them. A target
    without shards ends the map: everybody releases. Raises `LocalProtocolError` where a boundary of the
    target inside the context is no multiple of `block_tokens`, or the target is shorter than the current
    map.
    """
    length = target.shards[-1].tokens[1] if target.shards else 0
    shards = _grown(current, length) if target.shards else current.shards
    for shard in target.shards[1:]:
        if shard.tokens[0] % block_tokens:
            raise LocalProtocolError("a shard begins inside a block; choose multiples of block_tokens")
    have = {member: ranges for member, ranges in _ranges_of(shards).items() if member not in lost}
    want = _ranges_of(target.shards)
    complete = ((0, length - length % block_tokens),)
    plans = []
    for member in dict.fromkeys((*have, *want)):
        held, wanted = have.get(member, ()), want.get(member, ())
        needed = subtract(wanted, held)
        fetch = [
            Transfer(tokens, source)
            for source, ranges in have.items()
            for tokens in intersect(intersect(needed, complete), ranges)
        ]
        plans.append(
            MemberPlan(
                instance=member,
                retain=intersect(held, wanted),
                fetch=tuple(sorted(fetch, key=lambda transfer: transfer.tokens)),
                assign=subtract(needed, (transfer.tokens for transfer in fetch)),
                release=subtract(held, wanted),
            )
        )
    return Transition(
        target=target,
        plans=tuple(plans),
        moved_tokens=sum(token_count(t.tokens for t in plan.fetch) for plan in plans),
        computed_tokens=sum(token_count(plan.assign) for plan in plans),
        retained_tokens=sum(token_count(plan.retain) for plan in plans),
    )


def divide(
    current: ShardMap,
    length: int,
    members: Sequence[str],
    *,
    block_tokens: int,
    lost: Collection[str] = (),
    blocks: Mapping[str, int] | None = None,
) -> tuple[Shard, ...]:
    """Choose the shards of a context of `length` tokens over `members` so that the fewest tokens move.

    `blocks` says how many complete blocks each member is to hold; without it the shares are equal, and the
    remainder goes to those that already hold more than an equal share. The tail stays with its holder where
    that keeps a block at all. Raises `LocalProtocolError` where the shares do not add up to the context.
    """
    if not members or len(set(members)) != len(members):
        raise LocalProtocolError("a map needs members, each named once")
    if length < 1:
        raise LocalProtocolError("a context without tokens has no shards")
    total = length // block_tokens
    runs = _block_runs(current, length, block_tokens, members, lost)
    held = dict.fromkeys(members, 0)
    for first, end, holder in runs:
        if holder is not None:
            held[holder] += end - first
    share = dict(blocks) if blocks is not None else _equal_shares(total, held)
    if set(share) != set(members) or min(share.values()) < 0 or sum(share.values()) != total:
        raise LocalProtocolError(
            f"the shares of all members must add up to the {total} blocks of the context"
        )
    kept = _without_surplus(runs, {m: held[m] - share[m] for m in members})
    placed = _filled(kept, {m: share[m] - held[m] for m in members})
    if not placed:
        placed = [(0, 0, _tail_holder(current, members, lost))]
    ends = [end * block_tokens for _, end, _ in placed[:-1]] + [length]
    return tuple(
        Shard(tokens=(first * block_tokens, end), instance=holder)
        for (first, _, holder), end in zip(placed, ends, strict=True)
    )


_Run: TypeAlias = tuple[int, int, str | None]
"""Blocks ``[first, end)`` and who holds them; None where nobody does that may keep them."""
_Placed: TypeAlias = tuple[int, int, str]


def _tail_holder(current: ShardMap, members: Sequence[str], lost: Collection[str]) -> str:
    holder = current.shards[-1].instance if current.shards else members[0]
    return holder if holder in members and holder not in lost else members[0]


def _equal_shares(total: int, held: Mapping[str, int]) -> dict[str, int]:
    share, remainder = divmod(total, len(held))
    by_holding = sorted(held, key=lambda member: -held[member])
    return {member: share + (place < remainder) for place, member in enumerate(by_holding)}


def _block_runs(
    current: ShardMap, length: int, block_tokens: int, members: Sequence[str], lost: Collection[str]
) -> list[_Run]:
    """Return who holds each complete block now, as runs that cover the context."""
    runs: list[_Run] = []
    for shard in _grown(current, length):
        keeps = shard.instance in members and shard.instance not in lost
        first, end = (position // block_tokens for position in shard.tokens)
        runs.append((first, end, shard.instance if keeps else None))
    return _merged(runs or [(0, length // block_tokens, None)])


def _merged(runs: Iterable[_Run]) -> list[_Run]:
    result: list[_Run] = []
    for first, end, holder in runs:
        if first == end:
            continue
        if result and result[-1][2] == holder:
            result[-1] = (result[-1][0], end, holder)
        else:
            result.append((first, end, holder))
    return result


def _take(budget: dict[str, int], member: str | None, most: int) -> int:
    """Take up to `most` blocks from what a member may still give or get, and say how many."""
    if member is None or budget.get(member, 0) <= 0:
        return 0
    taken = min(budget[member], most)
    budget[member] -= taken
    return taken


def _without_surplus(runs: Sequence[_Run], surplus: Mapping[str, int]) -> list[_Run]:
    """Take from each member what exceeds its share: from the front for who holds the end of the context, so
    that the tail stays, from the back for the others."""
    tail_holder = runs[-1][2] if runs else None
    from_front = {member: count for member, count in surplus.items() if member == tail_holder}
    from_back = {member: count for member, count in surplus.items() if member != tail_holder}
    forward: list[_Run] = []
    for first, end, holder in runs:
        given = _take(from_front, holder, end - first)
        forward += [(first, first + given, None), (first + given, end, holder)]
    backward: list[_Run] = []
    for first, end, holder in reversed(forward):
        given = _take(from_back, holder, end - first)
        backward += [(end - given, end, None), (first, end - given, holder)]
    return _merged(reversed(backward))


def _filled(runs: Sequence[_Run], needs: dict[str, int]) -> list[_Placed]:
    """Give what nobody keeps to members that need more: to a neighbour first, so that maps stay short."""
    result: list[_Placed] = []
    for place, (first, end, holder) in enumerate(runs):
        if holder is not None:
            result.append((first, end, holder))
            continue
        right = runs[place + 1][2] if place + 1 < len(runs) else None
        to_left = _take(needs, result[-1][2], end - first) if result else 0
        to_right = _take(needs, right, end - first - to_left)
        if to_left:
            result.append((first, first + to_left, result[-1][2]))
        position = first + to_left
        while position < end - to_right:
            neediest = max(needs, key=lambda member: needs[member])
            given = _take(needs, neediest, end - to_right - position)
            result.append((position, position + given, neediest))
            position += given
        if to_right and right is not None:
            result.append((end - to_right, end, right))
    return [(first, end, holder) for first, end, holder in _merged(result) if holder is not None]
