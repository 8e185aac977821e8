"""What operators ask of a controller's shard maps: split a context, split it anew, end it, look at it
(decision W33).

When a group is resized is a matter of policy, which the protocol leaves open. These requests let a program
that has one say so over the network; the calls to the members are `controller_maps`'.
"""

from __future__ import annotations

from typing import Final

from kvsp_core.errors import LimitExceeded
from kvsp_core.ext_messages import SplitRequest
from kvsp_core.machines.reshard_plan import divide
from kvsp_core.problems import CONFLICT, INVALID_STATE, NOT_FOUND, TOO_LARGE, UNAVAILABLE, Problem
from kvsp_core.records import ShardMap
from kvsp_core.resources import EndShardMap, GetShardMap, SplitContext
from kvsp_core.roles.authorization import Policy, authorize
from kvsp_core.roles.controller_maps import ShardMaps
from kvsp_core.roles.controller_store import MapContext
from kvsp_core.roles.role import Respond
from kvsp_core.roles.serving import Asked, answer, done, refuse

__all__ = ["serve_shards"]

_NO_MAP: Final = Problem(
    NOT_FOUND, "no such shard map; it has ended, or was never made: a first split may have been refused"
)
_UNDER_WAY: Final = Problem(CONFLICT, "a change of this map is under way; ask again when it is over")
_OTHER_CONTEXT: Final = Problem(CONFLICT, "the map splits another context; name this one with another map")
_FULL: Final = Problem(UNAVAILABLE, "the controller keeps as many shard maps as it can; end some")


def serve_shards(maps: ShardMaps, asked: Asked, policy: Policy, now_ms: int) -> Respond:
    """Return the answer to a request of an operator, once the change that it asks for has begun.

    A change is answered with 202 as soon as its plans are on their way; GET tells what has become of it.
    """
    operation = asked.operation
    assert isinstance(operation, SplitContext | GetShardMap | EndShardMap)
    if isinstance(operation, SplitContext):
        assert isinstance(asked.body, SplitRequest)
        problem = authorize(policy, asked.client, operation, scope_id=asked.body.scope_id)
        problem = problem or _split(maps, operation.map, asked.body, now_ms, asked.traceparent)
        status = 200 if maps.is_stable(operation.map) else 202
    else:
        known = maps.get(operation.map) is not None
        problem, status = None if known else _NO_MAP, 200
        if known and isinstance(operation, EndShardMap):
            problem = _end(maps, operation.map, now_ms, asked.traceparent)
            if problem is None:
                return done(asked.request_id, 202)
    if problem is not None:
        return refuse(asked.request_id, problem)
    return answer(asked.request_id, maps.info(operation.map), status)


def _split(
    maps: ShardMaps, map_id: str, request: SplitRequest, now_ms: int, cause: str | None
) -> Problem | None:
    """Begin to split a context as asked; return why not, where it cannot be. As it is already: do nothing."""
    current = maps.get(map_id)
    if current is None:
        if maps.is_full:
            return _FULL
        current = ShardMap(map=map_id, version=0, shards=())
    else:
        if not maps.is_stable(map_id):
            return _UNDER_WAY
        if not _continues(maps.context(map_id), request):
            return _OTHER_CONTEXT
    end = current.shards[-1].tokens[1] if current.shards else 0
    if request.token_count < end:
        return Problem(CONFLICT, f"token_count: a context does not shrink; this one has {end} tokens")
    made_of = MapContext(
        compat_id=request.compat_id,
        scope_id=request.scope_id,
        block_keys=request.block_keys,
        block_tokens=request.block_tokens,
    )
    if (unfit := maps.unfit(map_id, request.instances, made_of)) is not None:
        detail = (
            f"instances: {unfit} is not active, has no part in the scope or the model, or has not "
            "acknowledged the last change of this map"
        )
        return Problem(INVALID_STATE, detail)
    lost = maps.lost(map_id)
    shards = divide(
        current, request.token_count, request.instances, block_tokens=request.block_tokens, lost=lost
    )
    if shards == current.shards and not lost:
        return None
    try:
        maps.begin(map_id, shards, made_of, now_ms, cause)
    except LimitExceeded as error:
        return Problem(TOO_LARGE, str(error))
    return None


def _continues(context: MapContext, request: SplitRequest) -> bool:
    """Return whether a request is for the context that a map splits, grown at its end or as it was."""
    common = min(len(context.block_keys), len(request.block_keys))
    return (
        (context.compat_id, context.scope_id) == (request.compat_id, request.scope_id)
        and context.block_tokens == request.block_tokens
        and context.block_keys[:common] == request.block_keys[:common]
    )


def _end(maps: ShardMaps, map_id: str, now_ms: int, cause: str | None) -> Problem | None:
    if not maps.is_stable(map_id):
        return _UNDER_WAY
    maps.begin(map_id, (), maps.context(map_id), now_ms, cause)
    return None
