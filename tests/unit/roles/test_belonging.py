"""Calls that a role makes for a request say what the request belongs to; those of its own accord say nothing
(decision W34)."""

from __future__ import annotations

from typing import TypeVar

import pytest

from kvsp_core.answers import empty_response, json_response
from kvsp_core.ext_messages import OutputRequest
from kvsp_core.machines.prefetch import PrefetchLimits
from kvsp_core.messages import FetchRange, ReshardPlan, ResumeRequest
from kvsp_core.resources import (
    CreateLease,
    EndShardMap,
    GetBlock,
    Lookup,
    PlaceRequest,
    PrefetchBlocks,
    RecordCheckpoint,
    ReleaseLease,
    ReportStatus,
    ReshardGroup,
    ResumeSession,
    RoleName,
    Router,
    SplitContext,
    StoreBlock,
    StreamOutput,
)
from kvsp_core.roles import engine
from kvsp_core.roles.role import AnswerReceived, Call
from tests.unit.roles import test_controller as controller
from tests.unit.roles import test_controller_maps as maps
from tests.unit.roles.instance_world import CACHE, FE, HOLDER, PC, SESSION, B, World, key_of
from tests.unit.roles.test_front_end import Client, info, placed
from tests.unit.roles.test_instance import KEYS, PROMPT, checkpoint, directive, plan

T = TypeVar("T")
ONE, TWO, THREE = (f"00-{digit * 32}-{digit * 16}-01" for digit in "123")


# The front end


def test_all_that_a_front_end_asks_for_a_generation_belongs_to_it() -> None:
    client = Client()
    client.generate(1, traceparent=ONE)
    client.generate(2, traceparent=TWO)
    client.put(AnswerReceived(client.calls[0].call_id, *json_response(placed(), 201)))
    client.fail()  # the stream: it asks who owns the session
    client.answer(info())
    client.started()
    client.end(0, epoch=2)
    client.put(AnswerReceived(client.call.call_id, *empty_response()))
    resources = [(call.request.method, call.request.path.rsplit("/", 1)[-1]) for call in client.calls]
    assert resources == [
        ("POST", "placements"),
        ("POST", "placements"),
        ("POST", "output"),
        ("GET", SESSION),
        ("POST", "output"),
        ("DELETE", SESSION),
    ]
    assert [call.traceparent for call in client.calls] == [ONE, TWO, ONE, ONE, ONE, ONE]


# The controller


def test_what_a_controller_asks_for_a_placement_belongs_to_that_whoever_is_answered_first() -> None:
    talk = controller.Talk()
    talk.report(controller.A)
    talk.index_answers = False
    talk.replicas = {controller.KEYS[0]: (controller.replica(controller.KEYS[0]),)}
    for talk.traceparent in (ONE, TWO):
        talk.send(controller.FE, PlaceRequest(), controller.placement())
    first, second = (call for call in talk.calls.values() if call.base_uri == controller.IS)
    assert (first.traceparent, second.traceparent) == (ONE, TWO)
    talk.look_up(second)
    assert talk.call_to(controller.A, "prefetch").traceparent == TWO


def test_a_session_that_moves_belongs_to_what_was_placed_and_after_a_restart_to_who_wrote_it_last() -> None:
    talk = controller.Talk()
    talk.traceparent = ONE
    controller.failing(talk, 5)
    assert talk.call_to(controller.B, "resume").traceparent == ONE
    talk = controller.Talk()
    talk.report(controller.A)
    session = talk.place()
    talk.restart()
    talk.report(controller.A)
    talk.traceparent = TWO
    talk.write(session, 5)
    talk.traceparent = THREE
    talk.pass_time(2000)
    talk.report(controller.B)
    talk.pass_time(1001)
    assert talk.call_to(controller.B, "resume").traceparent == TWO


def test_a_checkpoint_that_is_refused_says_nothing_of_what_its_session_belongs_to() -> None:
    talk = controller.Talk()
    talk.report(controller.A)
    talk.traceparent = ONE
    session = talk.place()
    talk.write(session, 5)
    talk.traceparent = TWO
    assert talk.write(session, 5, 6, epoch=2) == "409"
    talk.report(controller.B)
    assert talk.write(session, 5, 6, client=controller.B) == "403"
    talk.traceparent = THREE
    talk.pass_time(2000)
    talk.report(controller.B)
    talk.pass_time(1001)
    assert talk.call_to(controller.B, "resume").traceparent == ONE


def test_all_calls_of_a_split_that_is_asked_for_belong_to_that_and_its_repair_to_nothing() -> None:
    group = maps.Group()
    group.controller.policy = maps.OPERATED
    group.traceparent = ONE
    assert group.ask(maps.OPERATOR, SplitContext("m1"), maps.request(maps.A, maps.B))[0] == 202
    group.traceparent = TWO
    for _ in range(2):  # the plans, the commits
        assert [call.traceparent for call in group.calls.values()] == [ONE, ONE]
        group.answer_all()
    group.report(maps.B, epoch=2, ttl_ms=60_000)
    assert set(map(type, group.told().values())) == {ReshardPlan}
    assert {call.traceparent for call in group.calls.values()} == {None}
    group.answer_all()
    group.answer_all()
    group.traceparent = THREE
    assert group.ask(maps.OPERATOR, EndShardMap("m1"))[0] == 202
    group.answer_all(503)  # the plans are refused, so the change is given up
    assert {call.traceparent for call in group.calls.values()} == {THREE}


# The instance


def test_what_is_loaded_for_a_directive_belongs_to_it_and_not_to_that_which_made_room() -> None:
    world = World()
    others = key_of(tuple(range(500, 510)))
    for world.traceparent, name, keys in ((ONE, "d1", KEYS), (TWO, "d2", others)):
        world.ask(PC, PrefetchBlocks(), directive(*keys, name=name))
    world.load(*KEYS, *others)
    of_first = {call.traceparent for call, operation in made(world, GetBlock) if operation.block_key in KEYS}
    of_second = {
        call.traceparent for call, operation in made(world, GetBlock) if operation.block_key in others
    }
    assert (of_first, of_second) == ({ONE}, {TWO})
    for kind in (Lookup, CreateLease):
        assert [call.traceparent for call, _ in made(world, kind)] == [ONE, TWO], kind
    assert {call.traceparent for call, _ in made(world, ReleaseLease)} == {None}
    assert not world.role._prefetches._causes


def test_the_same_directive_again_changes_nothing_of_what_it_belongs_to() -> None:
    world = World()
    for world.traceparent in (ONE, TWO):
        world.ask(PC, PrefetchBlocks(), directive(*KEYS))
    world.load(*KEYS)
    assert {call.traceparent for call, _ in made(world, GetBlock)} == {ONE}
    world.traceparent = TWO
    world.ask(PC, PrefetchBlocks(), directive(*KEYS))
    assert not world.role._prefetches._causes


def test_of_a_directive_that_is_refused_nothing_is_kept() -> None:
    world = World(prefetch=PrefetchLimits(directive_blocks=1))
    world.traceparent = ONE
    request, _ = world.ask(PC, PrefetchBlocks(), directive(*KEYS))
    assert world.status_of(request) == 413
    assert not world.role._prefetches._causes


def test_checkpoints_and_copies_of_a_session_belong_to_who_asks_for_its_output() -> None:
    world = World(copy_holder=CACHE)
    world.traceparent = ONE
    world.begin(PROMPT)
    world.traceparent = None
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.do(engine.BlockComputed(world.sequence(), 0))
    world.run_jobs()
    ((number, _),) = world.calls(StoreBlock)
    world.answer(number, status=201)
    for kind in (RecordCheckpoint, StoreBlock, CreateLease):
        assert [call.traceparent for call, _ in made(world, kind)] == [ONE], kind
    assert {call.traceparent for call, _ in made(world, ReportStatus)} == {None}


def test_what_is_loaded_for_a_session_that_moves_belongs_to_it() -> None:
    world = World()
    world.traceparent = ONE
    world.ask(PC, ResumeSession(SESSION), ResumeRequest(epoch=2, checkpoint=checkpoint((1, 2, 3))))
    world.traceparent = None
    world.load(*key_of((*PROMPT, 1, 2, 3)), holder=CACHE)
    world.run_jobs()
    world.acknowledge_checkpoints()
    for kind in (Lookup, CreateLease, GetBlock, RecordCheckpoint):
        assert {call.traceparent for call, _ in made(world, kind)} == {ONE}, kind


def test_a_resume_that_is_refused_says_nothing_of_what_its_session_belongs_to() -> None:
    world = World()
    for world.traceparent, epoch, tokens, status in (
        (ONE, 2, (1, 2, 3), 202),
        (TWO, 1, (1,), 409),
        (THREE, 2, (1, 2), 409),
    ):
        body = ResumeRequest(epoch=epoch, checkpoint=checkpoint(tokens))
        request, _ = world.ask(PC, ResumeSession(SESSION), body)
        assert world.status_of(request) == status
    world.load(*key_of((*PROMPT, 1, 2, 3)), holder=CACHE)
    world.run_jobs()
    world.acknowledge_checkpoints()
    assert {call.traceparent for call, _ in made(world, RecordCheckpoint)} == {ONE}


@pytest.mark.parametrize("loaded", [False, True])
def test_a_request_for_output_that_is_refused_says_nothing_either(loaded: bool) -> None:
    """One of another epoch, and one that brings another prompt."""
    world = World()
    world.traceparent = ONE
    world.ask(PC, ResumeSession(SESSION), ResumeRequest(epoch=2, checkpoint=checkpoint((1, 2, 3))))
    world.traceparent = TWO
    for epoch, prompt in ((1, None), (2, (*PROMPT, 9))):
        body = OutputRequest(from_index=0, epoch=epoch, prompt=prompt)
        request, _ = world.ask(FE, StreamOutput(SESSION), body)
        assert world.status_of(request) == 409
    world.traceparent = THREE if loaded else None
    if loaded:
        world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=0, epoch=2))
    world.load(*key_of((*PROMPT, 1, 2, 3)), holder=CACHE)
    world.run_jobs()
    world.acknowledge_checkpoints()
    expected = {THREE} if loaded else {ONE}
    assert {call.traceparent for call, _ in made(world, RecordCheckpoint)} == expected


def made(world: World, kind: type[T]) -> list[tuple[Call, T]]:
    """Return all calls that were made for this, answered or not."""
    router = Router(RoleName)
    routed = [(call, router.route(call.request)) for call in world.of(Call)]
    return [(call, operation) for call, operation in routed if isinstance(operation, kind)]


def test_what_is_loaded_for_a_reshard_belongs_to_its_plan() -> None:
    world = World()
    world.traceparent = ONE
    world.ask(PC, ReshardGroup(), plan(4, 5, fetch=(FetchRange(tokens=(0, 2 * B), from_=HOLDER),)))
    world.traceparent = TWO
    world.load(*KEYS)
    for kind in (Lookup, CreateLease, GetBlock):
        assert {call.traceparent for call, _ in made(world, kind)} == {ONE}, kind
