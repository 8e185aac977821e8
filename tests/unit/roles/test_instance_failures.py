"""What an instance does when its peers, its tiers or its engine do not do their part."""

from __future__ import annotations

import json

import attrs
import pytest

from kvsp_core.bodies import decode
from kvsp_core.ext_messages import AttendRequest, OutputEnd, OutputRequest, OutputToken
from kvsp_core.limits import CALL_TIMEOUT_MS, MAX_ENGINE_FAILURES, UNREACHABLE_MS
from kvsp_core.machines.prefetch import PrefetchLimits
from kvsp_core.messages import (
    FetchRange,
    LeaseGranted,
    LeaseRequest,
    LookupAnswer,
    MatchedBlock,
    PrefetchBlock,
    ReshardCommit,
    ResumeRequest,
    StateChange,
    StatusAnswer,
)
from kvsp_core.problems import LEASE_QUOTA, NOT_FOUND, STALE_EPOCH, UNAVAILABLE, Problem
from kvsp_core.records import InstanceStatus
from kvsp_core.resources import (
    Attend,
    ChangeState,
    CreateLease,
    GetBlock,
    Lookup,
    PrefetchBlocks,
    ReleaseLease,
    RenewLease,
    ReportStatus,
    ReshardGroup,
    ResumeSession,
    StoreBlock,
    StreamOutput,
)
from kvsp_core.roles import engine
from kvsp_core.roles.role import (
    CancelCall,
    FreeBuffer,
    JobDone,
    JobFailed,
    JobFault,
    LayerArrived,
    ReadBlock,
    RequestEnded,
    Respond,
)
from tests.unit.roles.instance_world import (
    CACHE,
    FE,
    HOLDER,
    ME,
    PC,
    SESSION,
    B,
    World,
    digests_of,
    key_of,
    record_of,
)
from tests.unit.roles.test_instance import KEYS, PROMPT, checkpoint, directive, plan


def state_of(world: World, name: str = "d1") -> str:
    status = world.role._prefetches.table.status(name)
    assert status is not None
    return status.state


def begun(**settings: object) -> World:
    world = World(**settings)
    world.begin(PROMPT)
    world.run_jobs()
    world.acknowledge_checkpoints()
    return world


# Loads


@pytest.mark.requirement("PF-6")
def test_a_lookup_lease_or_fetch_that_fails_is_a_source_that_failed() -> None:
    world = World()
    world.ask(PC, PrefetchBlocks(), directive(KEYS[0]))
    world.fail(world.calls(Lookup)[0][0])
    assert state_of(world) == "failed"
    world.ask(PC, PrefetchBlocks(), directive(KEYS[0], name="d2"))
    world.answer(world.calls(Lookup)[0][0], Problem(UNAVAILABLE, "busy"))
    assert state_of(world, "d2") == "failed"
    for name, end in (("d3", "fail"), ("d4", "refuse"), ("d5", "nonsense")):
        world.ask(PC, PrefetchBlocks(), directive(KEYS[0], name=name))
        world.answer_lookups(KEYS[0])
        ((number, _),) = world.calls(CreateLease)
        if end == "fail":
            world.fail(number)
            world.later(UNREACHABLE_MS)
        else:
            answer = Problem(NOT_FOUND, "none") if end == "refuse" else StatusAnswer(state="active")
            world.answer(number, answer)
        assert state_of(world, name) == "failed"
    for name, status in (("d6", 404), ("d7", None)):
        world.ask(PC, PrefetchBlocks(), directive(KEYS[0], name=name))
        world.answer_lookups(KEYS[0])
        world.grant_leases()
        ((number, _),) = world.calls(GetBlock)
        if status is None:
            world.fail(number)
        else:
            world.answer(number, Problem(NOT_FOUND, "gone"))
        assert state_of(world, name) == "failed"
    assert world.beside.held() == set()


@pytest.mark.requirement("PF-6", "MG-2")
def test_a_holder_that_gave_no_answer_is_passed_over_for_a_while() -> None:
    """A dead instance is the first source of all its blocks: none of the others waits for it again."""
    world = World(prefetch=PrefetchLimits(concurrent_loads=1))
    both = (HOLDER, CACHE)

    def lookup(name: str, *keys: str) -> None:
        blocks = tuple(PrefetchBlock(block_key=key, sources=both) for key in keys)
        world.ask(PC, PrefetchBlocks(), attrs.evolve(directive(*keys, name=name), blocks=blocks))
        ((number, _),) = world.calls(Lookup)
        matched = tuple(
            MatchedBlock(block_key=key, replicas=tuple(record_of(key, holder) for holder in both))
            for key in keys
        )
        world.answer(number, LookupAnswer(matched=len(matched), blocks=matched))

    def asked() -> list[str]:
        return [each.call.base_uri for _, each in world.calls(CreateLease)]

    lookup("d1", *KEYS[:2])
    assert asked() == [HOLDER]
    world.fail(world.calls(CreateLease)[0][0])
    for _ in KEYS[:2]:
        assert asked() == [CACHE]
        world.grant_leases()
        world.serve_blocks()
    assert state_of(world) == "complete"
    world.later(UNREACHABLE_MS)
    lookup("d2", "ee" * 32)
    assert asked() == [HOLDER]


@pytest.mark.requirement("OP-4", "MG-2")
def test_loads_do_without_an_index_that_kept_one_of_them_waiting() -> None:
    world = World()
    world.ask(PC, PrefetchBlocks(), directive(KEYS[0], deadline_ms=60_000))
    world.now_ms += CALL_TIMEOUT_MS
    world.fail(world.calls(Lookup)[0][0])
    world.ask(PC, PrefetchBlocks(), directive(KEYS[0], name="d2"))
    assert (world.calls(Lookup), state_of(world, "d2")) == ([], "failed")
    world.later(UNREACHABLE_MS)
    world.ask(PC, PrefetchBlocks(), directive(KEYS[0], name="d3"))
    world.fail(world.calls(Lookup)[0][0])  # at once: the next may be luckier
    world.ask(PC, PrefetchBlocks(), directive(KEYS[0], name="d4"))
    world.answer_lookups(KEYS[0])
    assert world.calls(CreateLease)


@pytest.mark.requirement("PF-4")
def test_at_the_deadline_a_fetch_is_given_up_and_its_buffer_free() -> None:
    world = World()
    world.ask(PC, PrefetchBlocks(), directive(KEYS[0]))
    world.answer_lookups(KEYS[0])
    world.grant_leases()
    ((number, each),) = world.calls(GetBlock)
    buffer = each.call.buffer
    assert buffer is not None
    world.do(LayerArrived(buffer, 0, digests_of(KEYS[0])[0]))
    effects = world.later(500)
    assert CancelCall(number) in effects
    assert FreeBuffer(buffer) in effects
    assert state_of(world) == "partial"


def test_a_layer_of_nobody_knows_what_is_the_holders_affair() -> None:
    world = World()
    world.do(LayerArrived(99, 0, "ab" * 32))
    assert world.beside.handled == [LayerArrived(99, 0, "ab" * 32)]


def test_where_there_is_no_room_nothing_is_loaded() -> None:
    world = World()
    world.beside.full = True
    world.ask(PC, PrefetchBlocks(), directive(KEYS[0]))
    world.load(KEYS[0])
    assert state_of(world) == "failed"


@pytest.mark.requirement("PF-5", "SE-3")
def test_one_directive_too_many_is_told_to_come_back() -> None:
    world = World(prefetch=PrefetchLimits(pending_directives=1))
    world.ask(PC, PrefetchBlocks(), directive(KEYS[0]))
    request, _ = world.ask(PC, PrefetchBlocks(), directive(KEYS[0], name="d2"))
    response = world.answered(request).response
    assert (response.status, response.retry_after_s) == (503, 1)


# Copies


@pytest.mark.requirement("CP-1")
def test_copies_that_fail_are_done_without_and_leases_that_fail_are_asked_for_again() -> None:
    world = begun(copy_holder=CACHE, copy_lease_ms=900)
    for index in (0, 1):
        world.do(engine.BlockComputed(world.sequence(), index))
    world.run_jobs()
    first, second = world.calls(StoreBlock)
    world.fail(first[0])
    world.answer(second[0], status=201)
    ((lease, _),) = world.calls(CreateLease)
    world.fail(lease)
    world.later(300)
    world.grant_leases()
    world.later(700)
    ((renewal, _),) = world.calls(RenewLease)
    world.answer(renewal, Problem(NOT_FOUND, "gone"))
    ((lease, _),) = world.calls(CreateLease)
    world.answer(lease, Problem(NOT_FOUND, "gone"))
    assert not world.calls(CreateLease)


@pytest.mark.requirement("CP-1")
def test_a_holder_of_copies_that_does_not_answer_keeps_no_block_in_the_engine() -> None:
    world = World(copy_holder=CACHE)
    prompt = tuple(range(14 * B))
    keys = key_of(prompt)
    world.begin(prompt)
    world.run_jobs()
    world.acknowledge_checkpoints()
    for index in range(10):
        world.do(engine.BlockComputed(world.sequence(), index))
    world.run_jobs()
    puts = world.calls(StoreBlock)
    assert (len(puts), len(world.of(engine.ExportBlock))) == (4, 4)
    world.fail(puts[0][0])
    world.run_jobs()
    assert world.beside.held() == set(keys[:10])
    assert len(world.calls(StoreBlock)) == 3
    for number, _ in puts[1:]:
        world.fail(number)
    for index in (10, 11):
        world.do(engine.BlockComputed(world.sequence(), index))
        world.run_jobs()
        assert [each.operation.block_key for _, each in world.calls(StoreBlock)] == [keys[10]]  # type: ignore[attr-defined]
    world.answer(world.calls(StoreBlock)[0][0], status=201)
    for index in (12, 13):
        world.do(engine.BlockComputed(world.sequence(), index))
    world.run_jobs()
    assert len(world.calls(StoreBlock)) == 2
    buffers = {export.buffer for export in world.of(engine.ExportBlock)}
    freed = [each.buffer for each in world.of(FreeBuffer) if each.buffer in buffers]
    assert len(freed) == len(set(freed)) == 12


@pytest.mark.requirement("CP-1", "LE-3")
def test_copies_are_leased_for_as_long_as_their_holder_grants() -> None:
    world = begun(copy_holder=CACHE, copy_lease_ms=9_000)

    def refuse(kind: type, longest_ms: int) -> None:
        ((number, _),) = world.calls(kind)
        world.answer(number, Problem(LEASE_QUOTA, "", longest_ms))

    def asked(kind: type) -> list[int]:
        return [json.loads(each.call.body)["ttl_ms"] for _, each in world.calls(kind)]  # type: ignore[arg-type]

    world.do(engine.BlockComputed(world.sequence(), 0))
    world.run_jobs()
    world.answer(world.calls(StoreBlock)[0][0], status=201)
    assert asked(CreateLease) == [9_000]
    refuse(CreateLease, 3_000)
    assert asked(CreateLease) == [3_000]
    world.answer(world.calls(CreateLease)[0][0], LeaseGranted(lease="L", ttl_ms=3_000), 201)
    world.later(1_000)
    assert asked(RenewLease) == [3_000]
    refuse(RenewLease, 1_500)
    assert asked(RenewLease) == [1_500]
    refuse(RenewLease, 1_500)  # it cannot be meant
    assert not world.calls(RenewLease)
    world.later(500)
    assert asked(RenewLease) == [1_500]


def leases_at(world: World, gone: set[str]) -> tuple[list[int], set[str]]:
    """Answer leases as a holder that lacks these blocks; return how many each named, and what is leased."""
    sizes: list[int] = []
    leased: set[str] = set()
    while found := world.calls(CreateLease):
        ((number, each),) = found
        assert isinstance(each.call.body, bytes)
        keys = decode(LeaseRequest, each.call.body).block_keys
        sizes.append(len(keys))
        if gone.intersection(keys):
            world.answer(number, Problem(NOT_FOUND, "gone"))
        else:
            leased.update(keys)
            world.grant_leases()
    return sizes, leased


@pytest.mark.requirement("CP-1")
def test_a_copy_that_is_gone_does_not_cost_the_others_their_lease() -> None:
    world = World(copy_holder=CACHE, copy_lease_ms=900)
    prompt = tuple(range(20 * B))
    keys = key_of(prompt)
    world.begin(prompt)
    world.run_jobs()
    world.acknowledge_checkpoints()
    for index in range(len(keys)):
        world.do(engine.BlockComputed(world.sequence(), index))
    for _ in keys:
        world.run_jobs()
        for number, _ in world.calls(StoreBlock):
            world.answer(number, status=201)
    sizes, leased = leases_at(world, {keys[0], keys[11]})
    assert leased == set(keys) - {keys[0], keys[11]}
    world.later(300)
    for number, _ in world.calls(RenewLease):
        world.answer(number, Problem(NOT_FOUND, "gone"))
    sizes, leased = leases_at(world, {keys[3]})
    assert leased == set(keys) - {keys[0], keys[3], keys[11]}
    world.later(300)
    for number, _ in world.calls(RenewLease):
        world.answer(number, Problem(NOT_FOUND, "gone"))
    sizes, leased = leases_at(world, set(keys))  # it has lost everything, which a few questions show
    assert leased == set()
    assert sizes[-8:] == [1] * 8
    assert len(sizes) < 14
    assert not world.calls(CreateLease)


@pytest.mark.requirement("CP-1")
def test_leases_are_renewed_as_long_as_the_session_lives() -> None:
    world = begun(copy_holder=CACHE, copy_lease_ms=900)
    world.do(engine.BlockComputed(world.sequence(), 0))
    world.run_jobs()
    world.answer(world.calls(StoreBlock)[0][0], status=201)
    world.grant_leases()
    for _ in range(3):
        world.later(700)
        ((renewal, _),) = world.calls(RenewLease)
        world.answer(renewal)
    world.later(700)
    for _ in range(3):  # from now on the holder grants less than was asked for
        ((renewal, _),) = world.calls(RenewLease)
        world.answer(renewal, LeaseGranted(lease="L", ttl_ms=300))
        world.later(150)


@pytest.mark.requirement("CP-1")
@pytest.mark.parametrize("moves", [False, True], ids=["the session has ended", "it goes on elsewhere"])
def test_a_lease_that_is_granted_late_is_given_back_where_nobody_needs_the_copies(moves: bool) -> None:
    world = begun(copy_holder=CACHE)
    world.do(engine.BlockComputed(world.sequence(), 0))
    world.run_jobs()
    world.answer(world.calls(StoreBlock)[0][0], status=201)
    assert len(world.calls(CreateLease)) == 1
    if moves:
        ((status, _),) = world.calls(ReportStatus)
        world.answer(status, Problem(STALE_EPOCH, "a later one is known"))
    else:
        world.do(engine.SequenceEnded(world.sequence(), "stop"))
    world.grant_leases()
    assert len(world.calls(ReleaseLease)) == (0 if moves else 1)
    assert world.role._copies._kept == {}


def test_a_block_that_does_not_come_out_of_the_engine_is_done_without() -> None:
    world = begun()
    world.do(engine.BlockComputed(world.sequence(), 0))
    (export,) = world.of(engine.ExportBlock)
    world.answered_jobs.add(export.job_id)
    effects = world.do(JobFailed(export.job_id, JobFault.MISSING))
    assert FreeBuffer(export.buffer) in effects
    assert world.beside.held() == set()


# Sessions


def test_an_engine_that_fails_every_sequence_is_reported_until_it_draws_a_token() -> None:
    world = World(batch_size=4)
    world.answer_status()

    def begins_and_fails(number: int) -> None:
        world.begin(PROMPT, session=SESSION[:-1] + str(number))
        world.run_jobs()
        world.do(engine.SequenceEnded(world.sequence(), "error"))

    def reports() -> bool | None:
        ((_, status),) = world.calls(ReportStatus)
        assert isinstance(status.call.body, bytes)
        return decode(InstanceStatus, status.call.body).failing

    for number in range(MAX_ENGINE_FAILURES):
        assert world.calls(ReportStatus) == []
        begins_and_fails(number)
    assert reports()
    world.answer_status()
    world.begin(PROMPT, session=SESSION[:-1] + "9")
    world.run_jobs()
    world.do(engine.TokensDecoded(world.sequence(), 0, (5,)))
    assert reports() is None
    assert len(world.observed("kvsp_engine_failures")) == MAX_ENGINE_FAILURES


def test_an_engine_that_refuses_requests_is_not_failing() -> None:
    world = World()
    world.answer_status()
    for number in range(2 * MAX_ENGINE_FAILURES):
        request = world.begin(PROMPT, session=SESSION[:-1] + str(number))
        world.run_jobs()
        world.acknowledge_checkpoints()
        world.do(engine.SequenceEnded(world.sequence(), "refused"))
        assert world.lines(request) == [OutputEnd(end="error", index=0, epoch=1, refused=True)]
    assert world.calls(ReportStatus) == []
    assert world.observed("kvsp_engine_failures") == []
    assert len(world.observed("kvsp_engine_refusals")) == 2 * MAX_ENGINE_FAILURES


@pytest.mark.requirement("MG-2", "MG-3")
def test_a_session_whose_engine_has_failed_can_come_back_in_its_next_epoch() -> None:
    world = begun()
    world.do(engine.TokensDecoded(world.sequence(), 0, (5,)))
    world.do(engine.SequenceEnded(world.sequence(), "error"))
    world.acknowledge_checkpoints()
    before = world.sequence()
    resumed = attrs.evolve(checkpoint((5,)), epoch=2)
    request, _ = world.ask(PC, ResumeSession(SESSION), ResumeRequest(epoch=2, checkpoint=resumed))
    assert world.status_of(request) == 202
    world.load(*KEYS)
    world.run_jobs()
    world.acknowledge_checkpoints()
    assert world.sequence() > before
    stream, _ = world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=1, epoch=2))
    world.do(engine.TokensDecoded(world.sequence(), 1, (6,)))
    assert world.lines(stream) == [OutputToken(index=1, epoch=2, token=6)]


def test_an_import_that_the_engine_refuses_ends_the_prefix_before_it() -> None:
    world = World()
    world.beside.hold(*KEYS)
    world.begin(PROMPT)
    for read, key in zip(list(world.jobs()), KEYS, strict=True):
        world.answered_jobs.add(read.job_id)
        from tests.unit.roles.instance_world import HEADER

        world.do(JobDone(read.job_id, header=HEADER, layer_digests=digests_of(key)))
    for number, each in enumerate(world.of(engine.ImportBlock)):
        world.answered_jobs.add(each.job_id)
        world.do(JobDone(each.job_id) if number == 0 else JobFailed(each.job_id, JobFault.BROKEN))
    assert world.of(engine.StartSequence)[0].cached_tokens == 4


@pytest.mark.requirement("CP-3")
def test_the_engine_pauses_where_too_many_tokens_are_not_covered() -> None:
    world = World()
    world.begin(PROMPT, deterministic=False)
    world.run_jobs()
    world.acknowledge_checkpoints()
    for number in range(1024):
        world.do(engine.TokensDecoded(world.sequence(), number, (number,)))
    assert engine.Pause(world.sequence()) in world.seen
    for _ in range(64):
        world.acknowledge_checkpoints()
    assert engine.Proceed(world.sequence()) in world.seen


def test_an_answer_to_a_checkpoint_that_says_nothing_is_tried_again() -> None:
    from kvsp_core.resources import RecordCheckpoint

    world = World()
    world.begin(PROMPT)
    ((number, _),) = world.calls(RecordCheckpoint)
    world.answer(number, StatusAnswer(state="active"))
    world.later(10_000)
    assert len(world.calls(RecordCheckpoint)) == 1


def test_a_front_end_that_leaves_while_it_waits_is_not_answered() -> None:
    world = World()
    world.ask(PC, ResumeSession(SESSION), ResumeRequest(epoch=2, checkpoint=checkpoint((1,))))
    waiting, _ = world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=0, epoch=2))
    world.do(RequestEnded(waiting, False, 0))
    world.load(*key_of((*PROMPT, 1)), holder=CACHE)
    world.run_jobs()
    assert [e for e in world.of(Respond) if e.request_id == waiting] == []
    assert len(world.of(engine.StartSequence)) == 1


def test_a_session_without_blocks_is_resumed_at_once() -> None:
    world = World()
    short = PROMPT[:3]
    body = ResumeRequest(
        epoch=2,
        checkpoint=type(checkpoint(()))(
            session=SESSION,
            epoch=1,
            compat_id=checkpoint(()).compat_id,
            scope_id=checkpoint(()).scope_id,
            prompt_blocks=(),
            prompt_tail=short,
            generated=(),
            output_offset=0,
            sampler=checkpoint(()).sampler,
        ),
    )
    world.ask(PC, ResumeSession(SESSION), body)
    world.run_jobs()
    assert world.of(engine.StartSequence)[0].tokens == short


def full(world: World) -> None:
    """Let the instance have as many loads under way as it takes."""
    table = world.role._loads.table
    table.limits = attrs.evolve(table.limits, pending_directives=0)


@pytest.mark.requirement("MG-2")
def test_a_resume_whose_loads_are_too_many_goes_on_without_them() -> None:
    world = World()
    full(world)
    world.ask(PC, ResumeSession(SESSION), ResumeRequest(epoch=2, checkpoint=checkpoint((1,))))
    asked, _ = world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=0, epoch=2))
    assert world.status_of(asked) == 428


@pytest.mark.requirement("RS-3")
def test_a_plan_whose_loads_are_too_many_is_refused() -> None:
    world = World()
    full(world)
    request, _ = world.ask(PC, ReshardGroup(), plan(4, 5, fetch=(FetchRange(tokens=(0, 8), from_=HOLDER),)))
    assert world.status_of(request) == 409


# Status


def test_a_status_that_is_not_answered_is_sent_again() -> None:
    world = World()
    for answer in (None, StatusAnswer(state="draining")):
        ((number, _),) = world.calls(ReportStatus)
        world.fail(number) if answer is None else world.answer(number, Problem(UNAVAILABLE, "busy"))
        world.later(3000)
        assert len(world.calls(ReportStatus)) == 1


def test_a_state_that_cannot_be_is_refused() -> None:
    world = World()
    request, _ = world.ask(PC, ChangeState(), StateChange(state="failed"))
    assert world.status_of(request) == 409


def test_status_goes_to_an_index_that_runs_apart_too() -> None:
    world = World(report_to_index=True)
    calls = world.calls(ReportStatus)
    assert len({each.call.base_uri for _, each in calls}) == 2
    for number, _ in calls:
        world.answer(number, StatusAnswer(state="active"))


# Shards


@pytest.mark.requirement("RS-4")
def test_a_shard_attends_once_it_is_in_the_engine() -> None:
    world = World()
    world.ask(PC, ReshardGroup(), plan(4, 5, fetch=(FetchRange(tokens=(0, 8), from_=HOLDER),)))
    world.load(*KEYS)
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=5))
    body = AttendRequest(version=5, layer=0, queries=b"\0" * 32)
    early, _ = world.ask(ME, Attend("m"), body)
    assert world.status_of(early) == 503
    world.run_jobs()
    for each in world.of(engine.LoadShard):
        world.do(JobDone(each.job_id))
    stale, _ = world.ask(ME, Attend("m"), AttendRequest(version=4, layer=0, queries=b"\0" * 32))
    assert world.status_of(stale) == 409
    asked, _ = world.ask(ME, Attend("m"), body)
    (command,) = world.of(engine.Attend)
    assert command.ranges == ((0, 8),)
    world.do(JobDone(command.job_id, data=b"{}"))
    assert world.answered(asked).body == b"{}"
    again, _ = world.ask(ME, Attend("m"), body)
    world.do(JobFailed(world.of(engine.Attend)[-1].job_id, JobFault.BROKEN))
    assert world.status_of(again) == 503
    nothing, _ = world.ask(ME, Attend("other"), body)
    assert world.status_of(nothing) in (403, 404)


@pytest.mark.requirement("RS-6")
@pytest.mark.parametrize("retain", [((0, 8),), ()])
def test_a_step_is_not_answered_after_its_version_is_over(retain: tuple[tuple[int, int], ...]) -> None:
    world = World()
    world.ask(PC, ReshardGroup(), plan(4, 5, fetch=(FetchRange(tokens=(0, 8), from_=HOLDER),)))
    world.load(*KEYS)
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=5))
    world.run_jobs()
    for each in world.of(engine.LoadShard):
        world.do(JobDone(each.job_id))
    asked, _ = world.ask(ME, Attend("m"), AttendRequest(version=5, layer=0, queries=b"\0" * 32))
    (command,) = world.of(engine.Attend)
    world.ask(PC, ReshardGroup(), plan(5, 6, retain=retain, release=() if retain else ((0, 8),)))
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=6))
    world.do(JobDone(command.job_id, data=b"{}"))
    assert world.status_of(asked) == 409


def test_a_shard_attends_over_its_complete_blocks_where_its_end_is_open() -> None:
    world = World()
    open_end = plan(4, 5, fetch=(FetchRange(tokens=(0, 8), from_=HOLDER),), assign=((8, 11),))
    world.ask(PC, ReshardGroup(), open_end)
    world.load(*KEYS)
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=5))
    world.run_jobs()
    for each in world.of(engine.LoadShard):
        world.do(JobDone(each.job_id))
    world.ask(ME, Attend("m"), AttendRequest(version=5, layer=0, queries=b"\0" * 32))
    (command,) = world.of(engine.Attend)
    assert command.ranges == ((0, 8),)


def reading_a_shard() -> tuple[World, ReadBlock, ReadBlock]:
    """A change of a map is committed; the two blocks that it gives are being read."""
    world = World()
    world.ask(PC, ReshardGroup(), plan(4, 5, fetch=(FetchRange(tokens=(0, 8), from_=HOLDER),)))
    world.load(*KEYS)
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=5))
    first, second = world.of(ReadBlock)
    world.answered_jobs.update((first.job_id, second.job_id))
    return world, first, second


def test_a_shard_that_the_engine_does_not_take_or_the_tier_does_not_give_is_not_used() -> None:
    world, first, second = reading_a_shard()
    world.do(JobFailed(first.job_id, JobFault.CORRUPT))
    from tests.unit.roles.instance_world import HEADER

    world.do(JobDone(second.job_id, header=HEADER, layer_digests=digests_of(KEYS[1])))
    (load,) = world.of(engine.LoadShard)
    world.do(JobFailed(load.job_id, JobFault.BROKEN))
    asked, _ = world.ask(ME, Attend("m"), AttendRequest(version=5, layer=0, queries=b"\0" * 32))
    assert world.status_of(asked) == 503
    assert world.beside.held() == {KEYS[1]}


def test_a_block_of_a_shard_that_cannot_be_read_right_now_stays() -> None:
    world, first, second = reading_a_shard()
    world.do(JobFailed(first.job_id, JobFault.BUSY))
    world.do(JobFailed(second.job_id, JobFault.BUSY))
    assert world.of(engine.LoadShard) == []
    assert world.beside.held() == set(KEYS)


def test_a_plan_whose_ranges_are_no_blocks_is_refused() -> None:
    world = World()
    request, _ = world.ask(PC, ReshardGroup(), plan(4, 5, fetch=(FetchRange(tokens=(0, 6), from_=HOLDER),)))
    assert world.status_of(request) == 400
    far, _ = world.ask(PC, ReshardGroup(), plan(4, 5, fetch=(FetchRange(tokens=(0, 80), from_=HOLDER),)))
    assert world.status_of(far) == 400
    scope, _ = world.ask(PC, ReshardGroup(), plan(0, 1, assign=((0, 8),), scope_id="ee" * 16))
    assert world.status_of(scope) in (403, 404)


def test_what_belongs_to_nobody_is_the_holders() -> None:
    world = World()
    world.do(JobDone(77))
    world.do(JobFailed(78, JobFault.BROKEN))
    assert [type(item) for item in world.beside.handled] == [JobDone, JobFailed]
