"""Sessions at an instance that are overtaken, aborted, or lose what was loaded for them."""

from __future__ import annotations

import attrs
import pytest

from kvsp_core.bodies import decode
from kvsp_core.ext_messages import OutputRequest
from kvsp_core.messages import LookupRequest, ResumeRequest
from kvsp_core.resources import GetBlock, Lookup, ResumeSession, StreamOutput
from kvsp_core.roles import engine
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.role import CancelCall, JobFailed, JobFault, OutputReady, ReadBlock, RequestEnded, Send
from tests.unit.roles.instance_world import (
    CACHE,
    FE,
    HOLDER,
    MODEL,
    PC,
    POLICY,
    SCOPE,
    SESSION,
    B,
    World,
    sampler,
)
from tests.unit.roles.test_instance import KEYS, PROMPT, checkpoint

OTHERS = [f"6f1d0a9e-2c55-4d7e-9a0e-0000000000{number:02}" for number in range(60)]


def resume(world: World, epoch: int = 2, generated: tuple[int, ...] = ()) -> int | None:
    body = ResumeRequest(epoch=epoch, checkpoint=checkpoint(generated))
    return world.status_of(world.ask(PC, ResumeSession(SESSION), body)[0])


def attach(world: World, *, epoch: int, from_index: int = 0, prompt: tuple[int, ...] | None = None) -> int:
    body = OutputRequest(from_index=from_index, epoch=epoch, prompt=prompt)
    return world.ask(FE, StreamOutput(SESSION), body)[0]


def begin_anew(world: World, epoch: int) -> int:
    body = OutputRequest(
        from_index=0,
        epoch=epoch,
        compat_id=MODEL.compat_id,
        scope_id=SCOPE.scope_id,
        prompt=PROMPT,
        sampler=sampler(),
    )
    return world.ask(FE, StreamOutput(SESSION), body)[0]


def ended(world: World) -> int:
    """Serve a session to its end, with a block still in the engine and a stream that is slow; return it."""
    request = world.begin(PROMPT)
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.do(engine.BlockComputed(world.sequence(), 0))
    many = tuple(range(600))
    world.do(engine.TokensDecoded(world.sequence(), 0, many))
    world.do(engine.SequenceEnded(world.sequence(), "stop"))
    for _ in range(20):
        world.acknowledge_checkpoints()
    assert len(world.output(request)) < len(many)
    assert engine.Abort(world.sequence()) not in world.seen
    return request


# A newer epoch


@pytest.mark.requirement("MG-3")
@pytest.mark.parametrize("how", ["resumed", "begun"])
def test_a_newer_epoch_of_a_session_that_is_over_cuts_its_stream_and_frees_its_place(how: str) -> None:
    world = World(batch_size=1)
    stream = ended(world)
    sequence = world.sequence()
    if how == "resumed":
        assert resume(world, 2) == 202
    else:
        assert world.status_of(begin_anew(world, 2)) == 200
    assert Send(stream, b"", end=True) in world.seen
    assert engine.Abort(sequence) in world.seen
    sent = world.output(stream)
    world.do(OutputReady(stream))
    assert world.output(stream) == sent
    world.load(*KEYS)
    world.run_jobs()
    assert world.role._sessions.running == 1
    assert len(world.of(engine.StartSequence)) == 2


def test_a_session_is_forgotten_with_its_place_in_the_engine() -> None:
    world = World(batch_size=1, session_kept_ms=1000)
    ended(world)
    world.later(1000)
    assert engine.Abort(world.sequence()) in world.seen
    assert world.role._sessions.running == 0


def test_an_instance_takes_so_many_sessions_and_goes_on_with_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvsp_core.roles.instance_sessions.MAX_INSTANCE_SESSIONS", 1)
    world = World()
    ended(world)
    assert world.status_of(world.begin(PROMPT, session=OTHERS[0])) == 503
    assert world.role._sessions.get(OTHERS[0]) is None
    assert resume(world, 2) == 202


@pytest.mark.parametrize("first", ["stream", "block"])
def test_for_a_further_session_an_instance_forgets_what_is_over_and_read_by_nobody(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsp_core.roles.instance_sessions.MAX_INSTANCE_SESSIONS", 1)
    world = World()
    stream = ended(world)
    its_end = RequestEnded(stream, False, 0)
    for over in (its_end, None) if first == "stream" else (None, its_end):
        assert world.status_of(world.begin(PROMPT, session=OTHERS[0])) == 503
        if over is None:
            world.run_jobs()  # its last block comes out of the engine
        else:
            world.do(over)
    assert world.status_of(world.begin(PROMPT, session=OTHERS[0])) == 200
    assert world.status_of(attach(world, epoch=1)) == 404
    assert world.status_of(world.begin(PROMPT, session=OTHERS[1])) == 503  # that one is not over


@pytest.mark.requirement("ST-1")
def test_a_session_that_is_given_up_does_not_count_as_queued() -> None:
    world = World(batch_size=1)
    world.begin(PROMPT)
    world.begin(PROMPT, session=OTHERS[0])
    assert world.role._sessions.queued == 1
    point = attrs.evolve(checkpoint(()), session=OTHERS[0])
    world.ask(PC, ResumeSession(OTHERS[0]), ResumeRequest(epoch=2, checkpoint=point))
    assert world.role._sessions.queued == 0


@pytest.mark.requirement("MG-3")
def test_what_a_former_epoch_was_loading_is_given_up() -> None:
    world = World()
    resume(world, 2)
    world.answer_lookups(*KEYS)
    world.grant_leases()
    fetches = world.calls(GetBlock)
    assert len(fetches) == 2
    resume(world, 3)
    for number, _ in fetches:
        assert CancelCall(number) in world.seen
    assert world.role._loads.table.pending == 1
    assert len(world.role._sessions._loading) == 1


# A prompt that gets lost


def lose_the_prompt(world: World) -> None:
    """Fail the reads of a resumed session's prompt blocks."""
    for job in world.of(ReadBlock):
        world.answered_jobs.add(job.job_id)
        world.do(JobFailed(job.job_id, JobFault.CORRUPT))


@pytest.mark.requirement("MG-2")
def test_where_a_block_of_the_prompt_is_lost_on_its_way_into_the_engine_the_prompt_is_asked_for() -> None:
    world = World()
    resume(world, 2, (1, 2))
    world.load(*KEYS)
    stream = attach(world, epoch=2)
    assert world.status_of(stream) == 200
    (confirming,) = world.acknowledge_checkpoints()
    assert confirming.output_offset == 2
    lose_the_prompt(world)
    assert world.of(engine.StartSequence) == []
    assert Send(stream, b"", end=True) in world.seen
    again = attach(world, epoch=2)
    assert world.status_of(again) == 428
    brought = attach(world, epoch=2, prompt=PROMPT)
    assert world.status_of(brought) == 200
    start = world.of(engine.StartSequence)[0]
    assert (start.tokens, start.known_from, start.cached_tokens) == ((*PROMPT, 1, 2), 0, 0)
    assert [each.epoch for each in world.acknowledge_checkpoints()] == [2]
    assert world.output(brought) == [1, 2]
    world.do(OutputReady(brought))
    world.do(engine.TokensDecoded(start.sequence, 2, (3,)))
    assert world.output(brought) == [1, 2, 3]


def test_a_prompt_that_is_lost_and_not_brought_ends_the_session_here() -> None:
    world = World()
    resume(world, 2, (1, 2))
    world.load(*KEYS)
    lose_the_prompt(world)
    world.later(10_000)
    assert world.status_of(attach(world, epoch=2)) == 404
    assert world.role._lifecycle.sessions == 0


def test_many_prompts_that_are_lost_at_once_are_asked_for_one_after_the_other() -> None:
    world = World(batch_size=1)
    world.begin(PROMPT, session=OTHERS[-1])
    for name in OTHERS[:-1]:
        point = attrs.evolve(checkpoint(()), session=name)
        world.beside.hold(*KEYS)
        world.ask(PC, ResumeSession(name), ResumeRequest(epoch=2, checkpoint=point))
    assert world.role._sessions.queued == len(OTHERS) - 1
    world.beside.tiers.clear()
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.do(engine.SequenceEnded(world.sequence(), "stop"))
    assert world.role._sessions.queued == 0
    assert world.role._sessions.running == 0


def test_the_blocks_of_a_prompt_that_is_not_known_are_kept_until_they_are_in_the_engine() -> None:
    world = World(batch_size=1)
    world.begin(PROMPT, session=OTHERS[0])
    world.run_jobs()
    world.acknowledge_checkpoints()
    resume(world, 2)
    world.load(*KEYS)
    world.later(60_000)
    assert {name.block_key for name in world.beside.kept} == set(KEYS)
    world.do(engine.SequenceEnded(world.sequence(), "stop"))
    world.run_jobs()
    assert world.of(engine.StartSequence)[-1].cached_tokens == 2 * B
    assert world.beside.kept == {}


# Trusted producers


@pytest.mark.requirement("SE-2")
def test_loads_of_a_resume_name_the_producers_of_the_scope() -> None:
    world = World()
    rules = POLICY.scope(SCOPE.scope_id)
    world.role.policy = Policy(
        {who: POLICY.roles(who) for who in (PC, FE, HOLDER, CACHE, "https://ii1.example/kvsp/")},
        {
            SCOPE.scope_id: ScopeRules(
                read=rules.read, write=rules.write, publish=rules.publish, producers=[CACHE]
            )
        },
    )
    resume(world, 2)
    ((_, lookup),) = world.calls(Lookup)
    assert decode(LookupRequest, lookup.call.body).holders == (CACHE,)  # type: ignore[arg-type]
