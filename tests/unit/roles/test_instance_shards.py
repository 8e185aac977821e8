"""What an instance keeps of shard maps, and how it brings ranges into its engine."""

from __future__ import annotations

import json

import pytest

from kvsp_core.ext_messages import AttendRequest
from kvsp_core.limits import MAX_SHARD_BLOCK_KEYS, MAX_SHARD_RANGES
from kvsp_core.messages import FetchRange, ReshardAbort, ReshardCommit
from kvsp_core.resources import Attend, GetBlock, Lookup, ReleaseLease, ReshardGroup, request_for
from kvsp_core.roles import engine
from kvsp_core.roles.instance_shards import Shards
from kvsp_core.roles.role import (
    BlockName,
    BodyArrived,
    CancelCall,
    FreeBuffer,
    JobDone,
    JobFailed,
    JobFault,
    ReadBlock,
    RequestReceived,
)
from tests.unit.roles.instance_world import HEADER, HOLDER, ME, MODEL, PC, SCOPE, B, World, digests_of, key_of
from tests.unit.roles.test_instance import KEYS, plan

LONG = tuple(range(200, 200 + 10 * B))
LONG_KEYS = key_of(LONG)
FETCH = (FetchRange(tokens=(0, 2 * B), from_=HOLDER),)


def shards(world: World) -> Shards:
    return world.role._shards


def abort(world: World, map_id: str, version: int = 5) -> int | None:
    return world.status_of(world.ask(PC, ReshardGroup(), ReshardAbort(map=map_id, abort=version))[0])


def owner(world: World, keys: list[str]) -> None:
    """Let the instance own a range whose blocks are in its tiers."""
    world.beside.hold(*keys)
    span = ((0, len(keys) * B),)
    world.ask(PC, ReshardGroup(), plan(0, 1, assign=span, block_keys=tuple(keys)))
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=1))


def read(world: World, job: ReadBlock) -> None:
    world.do(JobDone(job.job_id, header=HEADER, layer_digests=digests_of(job.name.block_key)))


def loaded_owner(world: World) -> None:
    """Make the instance own the whole context, with its blocks in the engine."""
    owner(world, KEYS)
    for job in world.of(ReadBlock):
        read(world, job)
        world.do(JobDone(world.of(engine.LoadShard)[-1].job_id))


# What is remembered


@pytest.mark.requirement("RS-6")
def test_a_late_plan_is_refused_also_of_a_map_that_was_only_aborted() -> None:
    world = World()
    assert abort(world, "m") == 200
    late, _ = world.ask(PC, ReshardGroup(), plan(4, 5, fetch=FETCH))
    assert world.status_of(late) == 409


def test_maps_that_nothing_is_held_of_are_remembered_up_to_a_limit_and_take_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvsp_core.roles.instance_shards.MAX_INSTANCE_SHARD_MAPS", 1)
    monkeypatch.setattr("kvsp_core.roles.instance_shards.MAX_REMEMBERED_SHARD_MAPS", 3)
    world = World()
    for number in range(9):
        assert abort(world, f"m{number}") == 200
    assert list(shards(world)._shards) == ["m6", "m7", "m8"]
    taken, _ = world.ask(PC, ReshardGroup(), plan(0, 1, assign=((0, 8),)))
    assert world.status_of(taken) == 200
    full, _ = world.ask(PC, ReshardGroup(), plan(0, 1, assign=((0, 8),), map="other"))
    assert world.status_of(full) == 503
    assert abort(world, "another") == 200
    assert list(shards(world)._shards) == ["m7", "m8", "m", "another"]


def test_a_plan_that_is_refused_leaves_nothing() -> None:
    world = World()
    refused, _ = world.ask(PC, ReshardGroup(), plan(4, 5, retain=((0, 8),)))
    assert world.status_of(refused) == 409
    wrong, _ = world.ask(PC, ReshardGroup(), plan(4, 5, fetch=FETCH, compat_id="ee" * 32))
    assert world.status_of(wrong) == 409
    assert not shards(world)._shards
    assert world.role._lifecycle.sessions == 0


# Loading


@pytest.mark.requirement("RS-5")
def test_what_an_aborted_plan_loads_is_given_up() -> None:
    world = World()
    world.ask(PC, ReshardGroup(), plan(4, 5, fetch=FETCH))
    world.answer_lookups(*KEYS)
    world.grant_leases()
    fetches = world.calls(GetBlock)
    assert len(fetches) == 2
    assert abort(world, "m") == 200
    for number, each in fetches:
        assert CancelCall(number) in world.seen
        assert FreeBuffer(each.call.buffer or 0) in world.seen
    assert len(world.calls(ReleaseLease)) == 1
    assert world.role._loads.table.pending == 0
    assert world.beside.kept == {}


def test_blocks_go_into_the_engine_a_few_at_a_time() -> None:
    world = World()
    owner(world, LONG_KEYS)
    for done in range(len(LONG_KEYS)):
        reads = world.of(ReadBlock)
        assert len(reads) - done <= 4
        read(world, reads[done])
        world.do(JobDone(world.of(engine.LoadShard)[-1].job_id))
    assert [load.tokens for load in world.of(engine.LoadShard)] == [
        (B * number, B * number + B) for number in range(len(LONG_KEYS))
    ]
    assert len([each for each in world.seen if isinstance(each, FreeBuffer)]) == len(LONG_KEYS)
    asked, _ = world.ask(ME, Attend("m"), AttendRequest(version=1, layer=0, queries=b"\0" * 32))
    assert world.status_of(asked) is None


def test_a_block_that_is_lost_on_the_way_is_looked_for_again() -> None:
    world = World()
    owner(world, KEYS)
    first, second = world.of(ReadBlock)
    world.do(JobFailed(first.job_id, JobFault.CORRUPT))
    read(world, second)
    world.do(JobDone(world.of(engine.LoadShard)[-1].job_id))
    assert not world.calls(Lookup)
    world.later(1000)
    world.load(KEYS[0])
    read(world, world.of(ReadBlock)[-1])
    world.do(JobDone(world.of(engine.LoadShard)[-1].job_id))
    asked, _ = world.ask(ME, Attend("m"), AttendRequest(version=1, layer=0, queries=b"\0" * 32))
    assert world.status_of(asked) is None
    assert shards(world).next_deadline_ms() is None


def test_what_nobody_has_is_looked_for_less_and_less_often() -> None:
    world = World()
    world.ask(PC, ReshardGroup(), plan(0, 1, assign=((0, 4),)))
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=1))
    waits = []
    for _ in range(4):
        world.answer_lookups()
        deadline = shards(world).next_deadline_ms()
        assert deadline is not None
        waits.append(deadline - world.now_ms)
        world.later(waits[-1])
    assert waits == [1000, 2000, 4000, 8000]


def test_a_map_that_is_let_go_of_while_it_loads_leaves_nothing_behind() -> None:
    world = World()
    owner(world, LONG_KEYS)
    reads = world.of(ReadBlock)
    read(world, reads[0])
    read(world, reads[1])
    first, second = world.of(engine.LoadShard)
    world.do(JobDone(first.job_id))
    world.ask(PC, ReshardGroup(), plan(1, 2, release=((0, 10 * B),), block_keys=tuple(LONG_KEYS)))
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=2))
    world.do(JobDone(second.job_id))
    for job in world.of(ReadBlock)[2:]:
        read(world, job)
    assert [each.tokens for each in world.of(engine.DropShard)] == [(0, 4), (4, 8)]
    assert len(world.of(engine.LoadShard)) == 2
    assert world.beside.kept == {}
    assert not shards(world)._moving
    assert shards(world)._shards["m"].keys == ()
    assert BlockName(MODEL.compat_id, SCOPE.scope_id, LONG_KEYS[0]) in world.beside.tiers


# The context


@pytest.mark.requirement("SK-6")
@pytest.mark.parametrize(
    "other",
    [
        {"compat_id": "ee" * 32},
        {"scope_id": "ee" * 16},
        {"block_keys": tuple(LONG_KEYS)},
        {"block_keys": tuple(KEYS[:1])},
    ],
    ids=["model", "scope", "keys", "fewer keys"],
)
@pytest.mark.parametrize("again", [False, True], ids=["next", "again"])
def test_a_plan_for_another_context_than_that_of_the_ranges_held_is_refused(
    other: dict[str, object], again: bool
) -> None:
    world = World()
    loaded_owner(world)
    whole = ((0, 2 * B),)
    if again:
        world.ask(PC, ReshardGroup(), plan(1, 2, retain=whole))
    refused, _ = world.ask(PC, ReshardGroup(), plan(1, 2, retain=whole, **other))
    assert world.status_of(refused) == 409
    asked, _ = world.ask(ME, Attend("m"), AttendRequest(version=1, layer=0, queries=b"\0" * 32))
    assert world.status_of(asked) is None
    world.ask(PC, ReshardGroup(), plan(1, 3, release=whole))
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=3))
    assert world.beside.kept == {}
    assert len(world.of(engine.DropShard)) == 2


@pytest.mark.requirement("RS-5")
def test_a_growth_that_was_given_up_and_another_do_not_mix() -> None:
    world = World()
    owner(world, KEYS)
    grown, other = (key_of((*range(100, 100 + 2 * B), *more)) for more in ((1, 2, 3, 4), (5, 6, 7, 8)))
    fetch = (FetchRange(tokens=(2 * B, 3 * B), from_=HOLDER),)
    for version, end in ((2, grown[2]), (3, other[2])):
        keys = (*KEYS, end)
        request, _ = world.ask(
            PC, ReshardGroup(), plan(1, version, retain=((0, 2 * B),), fetch=fetch, block_keys=keys)
        )
        world.load(end)
        assert world.status_of(request) == 200
        if version == 2:
            assert abort(world, "m", 2) == 200
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=3))
    world.later(200)  # what the loads themselves have pinned is let go
    assert {name.block_key for name in world.beside.kept} == {*KEYS, other[2]}


# What does not fit


@pytest.mark.parametrize(
    ("layer", "octets", "member"),
    [(2, 32, "layer"), (2**32 - 1, 32, "layer"), (0, 4, "queries"), (0, 36, "queries")],
)
def test_a_question_that_does_not_fit_the_model_never_reaches_the_engine(
    layer: int, octets: int, member: str
) -> None:
    world = World()
    loaded_owner(world)
    body = AttendRequest(version=1, layer=layer, queries=b"\0" * octets)
    asked, _ = world.ask(ME, Attend("m"), body)
    assert world.status_of(asked) == 400
    assert member.encode() in world.answered(asked).body  # type: ignore[operator]
    assert world.of(engine.Attend) == []


@pytest.mark.requirement("SE-3")
@pytest.mark.parametrize(
    "members",
    [
        {"retain": [[2 * n, 2 * n + 1] for n in range(MAX_SHARD_RANGES + 1)]},
        {"release": [[n, n + 1] for n in range(MAX_SHARD_RANGES)], "assign": [[9999, 10000]]},
        {"block_keys": ["ab" * 32] * (MAX_SHARD_BLOCK_KEYS + 1)},
    ],
    ids=["one array", "all together", "block keys"],
)
def test_a_plan_with_too_much_in_it_is_413(members: dict[str, object]) -> None:
    world = World()
    sent = {"map": "m", "from": 1, "to": 2, "deadline_ms": 5, "retain": [], "fetch": [], "release": []}
    world.requests += 1
    head, _ = request_for(ReshardGroup(), ReshardAbort(map="m", abort=1))
    world.do(RequestReceived(world.requests, PC, head))
    world.do(BodyArrived(world.requests, json.dumps(sent | members).encode()))
    assert world.status_of(world.requests) == 413
    assert not shards(world)._shards
