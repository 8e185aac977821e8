"""An engine that hangs: what the instance notices, and what it does about it."""

from __future__ import annotations

import pytest

from kvsp_core.bodies import decode
from kvsp_core.ext_messages import AttendRequest, OutputEnd, OutputRequest, OutputToken
from kvsp_core.limits import MAX_ENGINE_FAILURES
from kvsp_core.messages import FetchRange, ReshardCommit, StateChange
from kvsp_core.records import InstanceStatus
from kvsp_core.resources import (
    Attend,
    ChangeState,
    RecordCheckpoint,
    ReportStatus,
    ReshardGroup,
    StoreBlock,
    StreamOutput,
)
from kvsp_core.roles import engine
from kvsp_core.roles.engine_watch import EngineWatch
from kvsp_core.roles.role import FreeBuffer, JobDone, JobFailed, JobFault, Observe
from tests.unit.roles.instance_world import CACHE, FE, HEADER, HOLDER, ME, PC, SESSION, World, sampler
from tests.unit.roles.test_instance import KEYS, PROMPT, plan

SILENCE_MS = 5_000
PROBE = 0


def begun(**settings: object) -> tuple[World, int]:
    """Return an instance whose engine runs a sequence, and the request that streams its output."""
    world = World(engine_silence_ms=SILENCE_MS, **settings)
    request = world.begin(PROMPT)
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.do(engine.Prefilled(world.sequence()))
    return world, request


def reports_failing(world: World) -> bool:
    """Have the status under way answered, and the next one sent; return what that says."""
    world.answer_status()
    if not world.calls(ReportStatus):
        world.later(1_000)
    ((_, status),) = world.calls(ReportStatus)
    assert isinstance(status.call.body, bytes)
    return bool(decode(InstanceStatus, status.call.body).failing)


def ended(world: World, request: int) -> list[OutputEnd]:
    return [line for line in world.lines(request) if isinstance(line, OutputEnd)]


def silences(world: World) -> int:
    return len(world.observed("kvsp_engine_silences"))


# What happens


@pytest.mark.requirement("MG-1", "PL-2")
def test_the_output_of_an_engine_that_hangs_ends_as_if_it_had_failed() -> None:
    world, request = begun()
    sequence = world.sequence()
    world.do(engine.TokensDecoded(sequence, 0, (5,)))
    world.later(SILENCE_MS - 1)
    assert ended(world, request) == []
    world.later(1)
    assert ended(world, request) == [OutputEnd(end="error", index=1, epoch=1)]
    assert engine.Abort(sequence) in world.seen
    assert len(world.observed("kvsp_engine_failures")) == silences(world) == 1
    world.acknowledge_checkpoints()
    assert reports_failing(world), "one sequence is enough"
    world.later(100 * SILENCE_MS)
    assert reports_failing(world)
    assert silences(world) == 1


def test_what_it_says_late_of_what_was_ended_is_ignored_and_it_is_alive_again() -> None:
    world, request = begun()
    sequence = world.sequence()
    world.later(SILENCE_MS)
    world.do(engine.TokensDecoded(sequence, 0, (5,)))
    world.do(engine.BlockComputed(sequence, 0))
    world.do(engine.SequenceEnded(sequence, "length"))
    assert ended(world, request) == [OutputEnd(end="error", index=0, epoch=1)]
    assert world.of(engine.ExportBlock) == []
    assert not world.role.engine_is_silent
    assert not reports_failing(world)
    second = world.begin(PROMPT, session=SESSION[:-1] + "2")
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.do(engine.TokensDecoded(world.sequence(), 0, (6,)))
    assert world.output(second) == [6]


def test_an_engine_that_is_silent_has_something_to_say_to_as_soon_as_it_can() -> None:
    """All that it owed was aborted, so it would have no cause to report anything."""
    world, _ = begun()
    world.later(SILENCE_MS)
    (probe,) = [start for start in world.of(engine.StartSequence) if start.sequence == PROBE]
    assert (probe.tokens, probe.sampler.params) == ((0,), {"max_tokens": 1})
    world.do(engine.Prefilled(PROBE))
    assert not reports_failing(world)
    world.do(engine.TokensDecoded(PROBE, 0, (1,)))
    before = world.of(engine.Abort).count(engine.Abort(PROBE))
    world.do(engine.SequenceEnded(PROBE, "length"))
    assert world.of(engine.Abort).count(engine.Abort(PROBE)) == before + 1
    world.later(100 * SILENCE_MS)
    assert silences(world) == 1


def test_an_engine_that_hangs_on_the_probe_gets_a_new_one() -> None:
    world, _ = begun()
    world.later(SILENCE_MS)
    world.do(engine.Prefilled(PROBE))
    world.later(SILENCE_MS)
    assert silences(world) == 2
    commands = [c for c in world.seen if isinstance(c, engine.Abort | engine.StartSequence)]
    last = [c for c in commands if c.sequence == PROBE][-2:]
    assert [type(command) for command in last] == [engine.Abort, engine.StartSequence]


def test_who_waits_for_a_place_is_told_too_and_so_is_who_comes_later() -> None:
    world, first = begun(batch_size=1)
    second = world.begin(PROMPT, session=SESSION[:-1] + "2")
    started = len(world.of(engine.StartSequence))
    world.acknowledge_checkpoints()
    world.later(SILENCE_MS)
    third = world.begin(PROMPT, session=SESSION[:-1] + "3")
    world.acknowledge_checkpoints()
    for request in (first, second, third):
        assert [end.end for end in ended(world, request)] == ["error"]
    assert len(world.of(engine.StartSequence)) == started + 1, "it is asked for the probe only"
    assert len(world.observed("kvsp_engine_failures")) == MAX_ENGINE_FAILURES
    assert (world.role._sessions.running, world.role._sessions.queued) == (0, 0)


def test_a_session_whose_first_checkpoint_is_under_way_ends_when_that_is_there() -> None:
    world = World(engine_silence_ms=SILENCE_MS)
    request = world.begin(PROMPT)
    world.run_jobs()
    sequence = world.sequence()
    world.later(SILENCE_MS)
    assert engine.Abort(sequence) in world.seen
    world.do(engine.TokensDecoded(sequence, 0, (5,)))  # too late
    assert ended(world, request) == []
    world.acknowledge_checkpoints()
    assert ended(world, request) == [OutputEnd(end="error", index=0, epoch=1)]


def test_tokens_that_no_checkpoint_covers_come_before_the_end() -> None:
    world = World(engine_silence_ms=SILENCE_MS)
    request = world.begin(PROMPT, deterministic=False)
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.do(engine.TokensDecoded(world.sequence(), 0, (5,)))
    world.later(SILENCE_MS)
    for _ in range(2):
        world.acknowledge_checkpoints()
    assert world.lines(request) == [
        OutputToken(index=0, epoch=1, token=5),
        OutputEnd(end="error", index=1, epoch=1),
    ]


# What an engine owes


def test_an_engine_that_reports_anything_at_all_is_not_silent() -> None:
    world, _ = begun()
    world.begin(PROMPT, session=SESSION[:-1] + "2")
    world.run_jobs()
    first = world.of(engine.StartSequence)[0].sequence
    for number in range(4):  # of the second one, whose prompt is long, it says nothing
        world.later(SILENCE_MS - 1)
        world.do(engine.TokensDecoded(first, number, (number,)))
    assert silences(world) == 0


def test_an_engine_without_work_may_be_silent_for_ever() -> None:
    world, _ = begun()
    world.do(engine.SequenceEnded(world.sequence(), "length"))
    world.acknowledge_checkpoints()
    world.later(100 * SILENCE_MS)
    second = world.begin(PROMPT, session=SESSION[:-1] + "2")
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.later(SILENCE_MS - 1)
    assert ended(world, second) == []
    assert silences(world) == 0


def test_of_a_paused_sequence_nothing_is_expected_until_it_may_go_on() -> None:
    world = World(engine_silence_ms=SILENCE_MS)
    request = world.begin(PROMPT, deterministic=False)
    world.run_jobs()
    world.acknowledge_checkpoints()
    for number in range(256):
        world.do(engine.TokensDecoded(world.sequence(), number, (number,)))
    assert world.seen.count(engine.Pause(world.sequence())) == 1
    world.later(10 * SILENCE_MS)
    assert silences(world) == 0
    for _ in range(8):
        world.acknowledge_checkpoints()
    assert engine.Proceed(world.sequence()) in world.seen
    world.later(SILENCE_MS)
    for _ in range(8):
        world.acknowledge_checkpoints()
    assert [end.end for end in ended(world, request)] == ["error"]


@pytest.mark.requirement("MG-1")
def test_a_session_whose_blocks_hang_on_their_way_in_ends_and_its_buffers_stay_the_engines() -> None:
    world = World(engine_silence_ms=SILENCE_MS)
    world.beside.hold(*KEYS)
    request = world.begin(PROMPT)
    for read in list(world.jobs()):
        world.answered_jobs.add(read.job_id)
        world.do(JobDone(read.job_id, header=HEADER, layer_digests=world.digests_for(read)))
    world.acknowledge_checkpoints()
    imports = world.of(engine.ImportBlock)
    assert imports
    world.later(SILENCE_MS)
    assert [end.end for end in ended(world, request)] == ["error"]
    assert world.of(FreeBuffer) == [], "a native call may still read them"
    for each in imports:
        world.do(JobDone(each.job_id))
    assert {each.buffer for each in world.of(FreeBuffer)} == {each.buffer for each in imports}
    assert [start.sequence for start in world.of(engine.StartSequence)] == [PROBE]
    assert world.beside.kept == {}
    assert not world.role.engine_is_silent


@pytest.mark.requirement("CP-1")
@pytest.mark.parametrize("over", [False, True], ids=["running", "over"])
def test_blocks_that_hang_on_their_way_out_keep_no_place(over: bool) -> None:
    world, _ = begun(copy_holder=CACHE)
    sequence = world.sequence()
    world.do(engine.BlockComputed(sequence, 0))
    if over:
        world.do(engine.SequenceEnded(sequence, "length"))
        world.acknowledge_checkpoints()
    (export,) = world.of(engine.ExportBlock)
    assert engine.Abort(sequence) not in world.seen
    world.later(SILENCE_MS)
    assert engine.Abort(sequence) in world.seen
    assert len(world.observed("kvsp_engine_failures")) == (0 if over else 1)
    assert world.of(FreeBuffer) == []
    world.do(JobFailed(export.job_id, JobFault.BROKEN))
    assert world.of(FreeBuffer) == [FreeBuffer(export.buffer)]
    assert world.calls(StoreBlock) == []
    assert not world.role.engine_is_silent


def shard(world: World) -> AttendRequest:
    """Have the instance hold a range, which is on its way into the engine; return a question about it."""
    world.ask(PC, ReshardGroup(), plan(4, 5, fetch=(FetchRange(tokens=(0, 8), from_=HOLDER),)))
    world.load(*KEYS)
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=5))
    world.run_jobs()
    return AttendRequest(version=5, layer=0, queries=b"\0" * 32)


@pytest.mark.requirement("RS-4")
def test_a_step_that_hangs_is_answered_and_so_is_one_that_comes_later() -> None:
    world = World(engine_silence_ms=SILENCE_MS)
    question = shard(world)
    for each in world.of(engine.LoadShard):
        world.do(JobDone(each.job_id))
    asked, _ = world.ask(ME, Attend("m"), question)
    world.later(SILENCE_MS)
    later, _ = world.ask(ME, Attend("m"), question)
    assert (world.status_of(asked), world.status_of(later)) == (503, 503)
    (command,) = world.of(engine.Attend)
    world.do(JobDone(command.job_id, data=b"{}"))
    assert world.status_of(asked) == 503
    again, _ = world.ask(ME, Attend("m"), question)
    world.do(JobDone(world.of(engine.Attend)[-1].job_id, data=b"{}"))
    assert world.answered(again).body == b"{}"


def test_a_range_that_hangs_on_its_way_in_is_there_when_the_engine_goes_on() -> None:
    world = World(engine_silence_ms=SILENCE_MS)
    question = shard(world)
    world.later(SILENCE_MS)
    assert reports_failing(world)
    early, _ = world.ask(ME, Attend("m"), question)
    assert world.status_of(early) == 503
    for each in world.of(engine.LoadShard):
        world.do(JobDone(each.job_id))
    world.ask(ME, Attend("m"), question)
    assert len(world.of(engine.Attend)) == 1


def test_an_instance_whose_engine_hangs_drains() -> None:
    world, request = begun()
    world.ask(PC, ChangeState(), StateChange(state="draining"))
    world.later(SILENCE_MS)
    assert [end.end for end in ended(world, request)] == ["error"]
    assert Observe("kvsp_instance_states_entered", 1, (("state", "sleeping"),)) in world.seen


def test_a_session_can_come_back_once_its_output_was_ended() -> None:
    world, request = begun()
    world.later(SILENCE_MS)
    again, _ = world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=0, epoch=1))
    assert ended(world, request) == ended(world, again)
    assert world.calls(RecordCheckpoint) == []


# The watch by itself


def test_silence_counts_from_what_is_owed_for_longest() -> None:
    watch = EngineWatch(100)
    start = engine.StartSequence(sequence=1, tokens=(1,), cached_tokens=0, sampler=sampler())
    watch.told((start, engine.ExportBlock(7, 1, 0, 3)), 10)
    assert watch.next_deadline_ms() == 110
    watch.told((engine.Abort(1),), 20)
    assert watch.next_deadline_ms() == 110
    watch.heard(JobDone(8), 30)  # of a tier
    assert watch.next_deadline_ms() == 110
    watch.heard(JobDone(7), 30)
    assert watch.next_deadline_ms() is None
    watch.told((start,), 90)
    assert watch.next_deadline_ms() == 190
    watch.heard(engine.Prefilled(1), 150)
    assert watch.next_deadline_ms() == 250
    assert not watch.fell_silent(249)
    assert watch.fell_silent(250)
    assert watch.next_deadline_ms() is None
    assert not watch.fell_silent(999)
    watch.told((engine.Proceed(1),), 999)  # it was not paused
    watch.heard(engine.SequenceEnded(1, "stop"), 999)
    assert (watch.silent, watch.next_deadline_ms()) == (False, None)


def test_its_state_is_the_same_at_any_time() -> None:
    states = []
    for began_ms in (0, 1_000):
        watch = EngineWatch(100)
        start = engine.StartSequence(sequence=1, tokens=(1,), cached_tokens=0, sampler=sampler())
        watch.told((start,), began_ms)
        watch.heard(engine.Prefilled(1), began_ms + 10)
        states.append(watch.freeze(began_ms + 30))
    assert states == [(False, (), ((("sequence", 1), 20),))] * 2
