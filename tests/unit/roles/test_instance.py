"""The instance role as playbooks: what comes in, what must come out."""

from __future__ import annotations

import attrs
import pytest

from kvsp_core.block_keys import block_keys
from kvsp_core.bodies import decode
from kvsp_core.ext_messages import AttendRequest, OutputEnd, OutputRequest
from kvsp_core.index_parts import IndexParts
from kvsp_core.limits import MAX_CONCURRENT_LOADS, MAX_LEASE_TTL_MS
from kvsp_core.messages import (
    DirectiveStatus,
    FetchRange,
    LeaseRequest,
    LookupRequest,
    PrefetchBlock,
    PrefetchDirective,
    ReshardAbort,
    ReshardCommit,
    ReshardPlan,
    ResumeRequest,
    StateChange,
    StatusAnswer,
)
from kvsp_core.problems import (
    INCOMPATIBLE,
    NOT_FOUND,
    STALE_EPOCH,
    TOO_LARGE,
    Problem,
)
from kvsp_core.records import InstanceStatus, SessionCheckpoint
from kvsp_core.resources import (
    Attend,
    ChangeState,
    CreateLease,
    GetBlock,
    GetDirective,
    Lookup,
    PrefetchBlocks,
    RecordCheckpoint,
    ReleaseLease,
    ReportStatus,
    ReshardGroup,
    ResumeSession,
    StoreBlock,
    StreamOutput,
)
from kvsp_core.roles import engine
from kvsp_core.roles.authorization import Policy
from kvsp_core.roles.role import (
    BlockName,
    CancelCall,
    JobDone,
    JobFailed,
    JobFault,
    OutputReady,
    ReadBlock,
    ReceiveBody,
    RequestEnded,
)
from tests.unit.roles.instance_world import (
    CACHE,
    FE,
    HEADER,
    HOLDER,
    ME,
    MODEL,
    PC,
    SCOPE,
    SESSION,
    SHARED,
    B,
    World,
    digests_of,
    key_of,
    sampler,
)

PROMPT = tuple(range(100, 110))
KEYS = key_of(PROMPT)


def directive(*keys: str, name: str = "d1", **changes: object) -> PrefetchDirective:
    members: dict[str, object] = {
        "directive": name,
        "request_ref": "ref",
        "scope_id": SCOPE.scope_id,
        "compat_id": MODEL.compat_id,
        "blocks": tuple(PrefetchBlock(block_key=key, sources=(HOLDER,)) for key in keys),
        "deadline_ms": 500,
        "lease_ms": 2000,
    }
    return PrefetchDirective(**(members | changes))  # type: ignore[arg-type]


def checkpoint(
    generated: tuple[int, ...], *, epoch: int = 1, deterministic: bool = True
) -> SessionCheckpoint:
    return SessionCheckpoint(
        session=SESSION,
        epoch=1,
        compat_id=MODEL.compat_id,
        scope_id=SCOPE.scope_id,
        prompt_blocks=tuple(KEYS),
        prompt_tail=PROMPT[2 * B :],
        generated=generated,
        output_offset=len(generated),
        sampler=sampler(),
    )


# Status and lifecycle


@pytest.mark.requirement("ST-1", "ST-3")
def test_it_reports_itself_at_once_and_again_within_a_third_of_its_ttl() -> None:
    world = World(status_ttl_ms=3000)
    ((_, first),) = world.calls(ReportStatus)
    assert first.call.base_uri == PC
    assert isinstance(first.call.body, bytes)
    status = decode(InstanceStatus, first.call.body)
    assert (status.instance, status.epoch, status.state, status.seq) == (ME, 7, "active", 1)
    world.answer_status()
    deadline = world.role.next_deadline_ms()
    assert deadline is not None
    assert deadline <= world.now_ms + 1000
    world.later(1000)
    assert len(world.calls(ReportStatus)) == 1


@pytest.mark.requirement("LC-3", "LC-4")
def test_a_drained_instance_completes_its_sessions_refuses_new_ones_and_sleeps() -> None:
    world = World()
    first = world.begin(PROMPT)
    world.acknowledge_checkpoints()
    world.run_jobs()
    request, _ = world.ask(PC, ChangeState(), StateChange(state="draining"))
    assert decode(StatusAnswer, world.answered(request).body).state == "draining"  # type: ignore[arg-type]
    refused = world.begin(PROMPT, session="6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a12")
    assert world.status_of(refused) == 409
    world.do(engine.TokensDecoded(world.sequence(), 0, (5,)))
    world.do(engine.SequenceEnded(world.sequence(), "stop"))
    world.acknowledge_checkpoints()
    assert world.output(first) == [5]
    request, _ = world.ask(PC, ChangeState(), StateChange(state="sleeping"))
    assert world.status_of(request) == 200


@pytest.mark.requirement("LC-1")
def test_an_instance_without_sessions_and_shards_asks_to_sleep_after_a_while() -> None:
    def reported(world: World) -> InstanceStatus:
        ((_, call),) = world.calls(ReportStatus)
        assert isinstance(call.call.body, bytes)
        return decode(InstanceStatus, call.call.body)

    world = World(sleep_after_ms=1500, status_ttl_ms=3000)
    world.begin(PROMPT)
    world.run_jobs()
    world.acknowledge_checkpoints()
    for _ in range(4):
        assert reported(world).requested_state is None
        world.answer_status()
        world.later(1000)
    world.do(engine.SequenceEnded(world.sequence(), "stop"))
    world.answer_status()
    world.later(1000)
    assert reported(world).requested_state is None
    world.answer_status()
    world.later(1000)
    assert reported(world).requested_state == "sleeping"
    world.answer_status("draining")
    assert reported(world).state == "sleeping"


@pytest.mark.requirement("ST-4")
def test_an_instance_that_a_later_incarnation_has_replaced_stops_without_a_word() -> None:
    world = World()
    request = world.begin(PROMPT)
    world.run_jobs()
    ((status, _),) = world.calls(ReportStatus)
    effects = world.answer(status, Problem(STALE_EPOCH, "a later one is known"))
    assert any(isinstance(effect, engine.Abort) for effect in effects)
    assert world.lines(request) == []
    assert not world.calls(ReportStatus)
    assert world.beside.fenced
    assert world.role.is_fenced


@pytest.mark.requirement("PB-3")
def test_told_to_stop_it_ends_its_sessions_then_withdraws_its_records_and_says_when_it_is_safe() -> None:
    world = World()
    world.begin(PROMPT)
    world.take(world.role.stop(world.now_ms))
    world.acknowledge_checkpoints()
    world.run_jobs()
    assert not world.beside.stopping
    world.do(engine.SequenceEnded(world.sequence(), "stop"))
    assert world.beside.stopping
    assert not world.role.safe_to_stop
    world.beside.safe_to_stop = True
    assert world.role.safe_to_stop


# Sessions


@pytest.mark.requirement("CP-3", "MG-4")
def test_tokens_of_a_random_sampler_go_out_when_a_checkpoint_covers_them_and_not_before() -> None:
    world = World()
    request = world.begin(PROMPT, deterministic=False)
    world.run_jobs()
    start = world.of(engine.StartSequence)[0]
    assert (start.tokens, start.cached_tokens, start.known_from) == (PROMPT, 0, 0)
    (opening,) = world.acknowledge_checkpoints()
    assert (opening.output_offset, opening.prompt_blocks, opening.prompt_tail) == (0, tuple(KEYS), PROMPT[8:])
    world.do(engine.TokensDecoded(start.sequence, 0, (1, 2)))
    assert world.output(request) == []
    (covering,) = world.acknowledge_checkpoints()
    assert (covering.generated, covering.sampler.step) == ((1, 2), 2)
    assert world.output(request) == [1, 2]


@pytest.mark.requirement("CP-1")
def test_tokens_of_a_deterministic_sampler_wait_for_the_first_checkpoint_only() -> None:
    world = World()
    request = world.begin(PROMPT)
    world.run_jobs()
    world.do(engine.TokensDecoded(world.sequence(), 0, (1,)))
    assert world.output(request) == []
    world.acknowledge_checkpoints()
    assert world.output(request) == [1]
    world.do(OutputReady(request))
    world.do(engine.TokensDecoded(world.sequence(), 1, (2,)))
    assert world.output(request) == [1, 2]
    world.do(engine.SequenceEnded(world.sequence(), "length"))
    world.acknowledge_checkpoints()
    assert world.lines(request)[-1] == OutputEnd(end="length", index=2, epoch=1)
    assert engine.Abort(world.sequence()) in world.seen


@pytest.mark.requirement("OP-1")
def test_what_is_held_already_goes_into_the_engine_in_order() -> None:
    world = World()
    world.beside.hold(*KEYS)
    world.begin(PROMPT)
    assert [read.name.block_key for read in world.of(ReadBlock)] == KEYS
    assert set(world.beside.kept) == {read.name for read in world.of(ReadBlock)}
    world.run_jobs()
    assert [each.index for each in world.of(engine.ImportBlock)] == [0, 1]
    assert world.of(engine.StartSequence)[0].cached_tokens == 8
    assert world.observed("kvsp_cached_tokens") == [8]
    assert world.observed("kvsp_recomputed_tokens") == [len(PROMPT) - 8]
    assert world.beside.kept == {}


@pytest.mark.requirement("SK-4")
def test_a_public_prefix_comes_from_a_shared_scope_and_is_copied_under_the_sessions_own_keys() -> None:
    world = World(copy_holder=CACHE)
    shared = [key.hex() for key in block_keys(SHARED, MODEL, PROMPT)[0]]
    world.beside.tiers[BlockName(MODEL.compat_id, SHARED.scope_id, shared[0])] = "host"
    world.begin(PROMPT)
    world.run_jobs()
    assert world.of(engine.StartSequence)[0].cached_tokens == B
    ((_, put),) = world.calls(StoreBlock)
    assert put.operation == StoreBlock(MODEL.compat_id, SCOPE.scope_id, KEYS[0])


def test_the_last_token_is_always_computed() -> None:
    world = World()
    world.beside.hold(*KEYS)
    world.begin(PROMPT[:8])
    world.run_jobs()
    assert world.of(engine.StartSequence)[0].cached_tokens == 4


def reading() -> tuple[World, ReadBlock, ReadBlock]:
    """A session has begun whose two blocks are here and are being read."""
    world = World()
    world.beside.hold(*KEYS)
    world.begin(PROMPT)
    first, second = world.of(ReadBlock)
    world.answered_jobs.update((first.job_id, second.job_id))
    return world, first, second


def test_a_block_that_is_lost_on_the_way_is_computed() -> None:
    world, first, second = reading()
    world.do(JobFailed(first.job_id, JobFault.CORRUPT))
    world.do(JobDone(second.job_id, header=None))
    assert world.of(engine.StartSequence)[0].cached_tokens == 0
    assert world.beside.kept == {}
    assert KEYS[0] not in world.beside.held()


def test_a_block_that_is_found_lost_when_nobody_waits_for_it_any_more_is_not_held() -> None:
    world, first, second = reading()
    world.do(JobFailed(first.job_id, JobFault.CORRUPT))
    assert world.of(engine.StartSequence)[0].cached_tokens == 0
    world.do(JobFailed(second.job_id, JobFault.CORRUPT))
    assert world.beside.held() == set()


def test_a_block_that_cannot_be_read_right_now_is_computed_and_stays() -> None:
    world, first, second = reading()
    world.do(JobFailed(first.job_id, JobFault.BUSY))
    world.do(JobFailed(second.job_id, JobFault.BUSY))
    assert world.of(engine.StartSequence)[0].cached_tokens == 0
    assert world.beside.held() == set(KEYS)


@pytest.mark.requirement("BR-5")
def test_a_block_that_is_not_what_was_stored_never_reaches_the_engine() -> None:
    world, first, second = reading()
    world.do(JobDone(second.job_id, header=HEADER, layer_digests=digests_of("rotten")))
    world.do(JobDone(first.job_id, header=HEADER, layer_digests=digests_of(KEYS[0])))
    world.run_jobs()
    assert [each.index for each in world.of(engine.ImportBlock)] == [0]
    assert world.of(engine.StartSequence)[0].cached_tokens == B
    assert world.beside.held() == {KEYS[0]}


def test_more_sessions_than_the_engine_takes_wait_their_turn() -> None:
    world = World(batch_size=1)
    world.begin(PROMPT)
    world.run_jobs()
    world.begin(PROMPT, session="6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a12")
    assert len(world.of(engine.StartSequence)) == 1
    world.acknowledge_checkpoints()
    world.do(engine.SequenceEnded(1, "stop"))
    assert len(world.of(engine.StartSequence)) == 2


@pytest.mark.requirement("MG-3")
def test_a_refused_checkpoint_ends_the_session_here_without_an_end_line() -> None:
    world = World()
    request = world.begin(PROMPT)
    world.run_jobs()
    world.acknowledge_checkpoints()
    for number in range(4):
        world.do(engine.TokensDecoded(world.sequence(), number, (number,)))
    ((number, _),) = world.calls(RecordCheckpoint)
    effects = world.answer(number, Problem(STALE_EPOCH, "epoch"))
    assert engine.Abort(world.sequence()) in effects
    assert not any(isinstance(line, OutputEnd) for line in world.lines(request))


def test_a_checkpoint_without_an_answer_is_sent_again() -> None:
    world = World()
    world.begin(PROMPT)
    ((number, _),) = world.calls(RecordCheckpoint)
    world.fail(number)
    deadline = world.role.next_deadline_ms()
    assert deadline is not None
    world.later(5000)
    assert len(world.calls(RecordCheckpoint)) == 1


def test_a_front_end_that_comes_back_gets_the_output_from_where_it_wants() -> None:
    world = World()
    first = world.begin(PROMPT)
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.do(engine.TokensDecoded(world.sequence(), 0, (1, 2, 3)))
    world.do(RequestEnded(first, False, 0))
    again, _ = world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=1, epoch=1))
    assert world.output(again) == [2, 3]


def test_the_output_of_an_ended_session_can_be_had_for_a_while() -> None:
    world = World(session_kept_ms=1000)
    world.begin(PROMPT)
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.do(engine.TokensDecoded(world.sequence(), 0, (1,)))
    world.do(engine.SequenceEnded(world.sequence(), "stop"))
    world.acknowledge_checkpoints()
    again, _ = world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=0, epoch=1))
    assert world.output(again) == [1]
    world.later(1000)
    gone, _ = world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=0, epoch=1))
    assert world.status_of(gone) == 404


@pytest.mark.parametrize(
    ("change", "status"), [({"compat_id": "ee" * 32}, 409), ({"scope_id": "ee" * 16}, 404)]
)
def test_a_session_of_another_model_or_scope_is_refused(change: dict[str, str], status: int) -> None:
    world = World()
    members = {
        "from_index": 0,
        "epoch": 1,
        "compat_id": MODEL.compat_id,
        "scope_id": SCOPE.scope_id,
        "prompt": PROMPT,
        "sampler": sampler(),
    }
    body = OutputRequest(**(members | change))  # type: ignore[arg-type]
    request, _ = world.ask(FE, StreamOutput(SESSION), body)
    assert world.status_of(request) == status
    unknown, _ = world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=0, epoch=1))
    assert world.status_of(unknown) == 404


# Copies


@pytest.mark.requirement("CP-1")
def test_blocks_that_are_computed_are_kept_here_and_copied_and_leased_elsewhere() -> None:
    world = World(copy_holder=CACHE, copy_lease_ms=3000)
    world.begin(PROMPT)
    world.run_jobs()
    world.acknowledge_checkpoints()
    for index in (0, 1):
        world.do(engine.BlockComputed(world.sequence(), index))
    world.run_jobs()
    assert world.beside.held() == set(KEYS)
    puts = world.calls(StoreBlock)
    assert [each.operation.block_key for _, each in puts] == KEYS  # type: ignore[attr-defined]
    world.answer(puts[0][0], status=201)
    world.answer(puts[1][0], status=412)
    leases = world.calls(CreateLease)
    assert {each.call.base_uri for _, each in leases} == {CACHE}
    world.grant_leases()
    world.grant_leases()
    world.later(700)
    from kvsp_core.resources import RenewLease

    assert world.calls(RenewLease)
    world.do(engine.SequenceEnded(world.sequence(), "stop"))
    assert len(world.calls(ReleaseLease)) == 2


def test_the_last_blocks_leave_the_engine_before_the_sequence_does() -> None:
    world = World()
    world.begin(PROMPT)
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.do(engine.BlockComputed(world.sequence(), 0))
    world.do(engine.SequenceEnded(world.sequence(), "stop"))
    assert engine.Abort(world.sequence()) not in world.seen
    world.run_jobs()
    assert engine.Abort(world.sequence()) in world.seen
    assert world.beside.held() == {KEYS[0]}


# Prefetch


@pytest.mark.requirement("PF-1", "PF-3", "PF-7", "OP-1")
def test_a_directive_is_loaded_leased_published_and_can_be_read() -> None:
    world = World()
    request, _ = world.ask(PC, PrefetchBlocks(), directive(*KEYS))
    assert world.status_of(request) == 202
    assert world.answered(request).response.location == "prefetch/d1"
    ((_, lookup),) = world.calls(Lookup)
    assert decode(LookupRequest, lookup.call.body).holders == (HOLDER,)  # type: ignore[arg-type]
    world.answer_lookups(*KEYS)
    ((_, lease),) = world.calls(CreateLease)
    assert decode(LeaseRequest, lease.call.body).block_keys == tuple(KEYS)  # type: ignore[arg-type]
    world.load(*KEYS)
    assert world.beside.held() == set(KEYS)
    assert len(world.calls(ReleaseLease)) == 1
    assert world.observed("kvsp_fetched_tokens") == [4, 4]
    request, _ = world.ask(PC, GetDirective("d1"))
    status = decode(DirectiveStatus, world.answered(request).body)  # type: ignore[arg-type]
    assert (status.state, status.loaded, status.request_ref) == ("complete", tuple(KEYS), "ref")
    unknown, _ = world.ask(PC, GetDirective("other"))
    assert world.status_of(unknown) == 404


@pytest.mark.requirement("LK-4")
def test_an_index_that_takes_fewer_keys_at_a_time_is_asked_in_pieces() -> None:
    world = World()
    world.ask(PC, PrefetchBlocks(), directive(*KEYS))
    ((number, _),) = world.calls(Lookup)
    world.answer(number, Problem(TOO_LARGE))
    for asked in KEYS:
        ((number, lookup),) = world.calls(Lookup)
        assert decode(LookupRequest, lookup.call.body).block_keys == (asked,)  # type: ignore[arg-type]
        world.answer_lookup(number, asked)
    world.load(*KEYS)
    assert world.beside.held() == set(KEYS)


@pytest.mark.requirement("PF-3", "PF-6")
def test_a_long_prefix_is_leased_at_once_and_given_back_where_its_directive_ends() -> None:
    world = World()
    keys = key_of(tuple(range(4 * 100)))
    world.ask(PC, PrefetchBlocks(), directive(*keys))
    world.answer_lookups(*keys)
    ((_, lease),) = world.calls(CreateLease)
    assert decode(LeaseRequest, lease.call.body).block_keys == tuple(keys)  # type: ignore[arg-type]
    world.grant_leases()
    for _ in range(5):
        world.serve_blocks()
    assert 0 < len(world.beside.held()) < 100
    assert (world.calls(CreateLease), world.calls(ReleaseLease)) == ([], [])
    world.later(500)  # the directive's deadline
    assert len(world.calls(ReleaseLease)) == 1


@pytest.mark.requirement("PF-3", "LE-3")
def test_no_lease_is_asked_for_that_is_longer_than_holders_grant() -> None:
    world = World()
    world.ask(PC, PrefetchBlocks(), directive(*KEYS, lease_ms=600_000, deadline_ms=600_000))
    world.answer_lookups(*KEYS)
    ((_, lease),) = world.calls(CreateLease)
    assert decode(LeaseRequest, lease.call.body).ttl_ms == MAX_LEASE_TTL_MS  # type: ignore[arg-type]


@pytest.mark.requirement("PF-3")
def test_blocks_of_which_one_is_gone_are_leased_one_by_one() -> None:
    world = World()
    world.ask(PC, PrefetchBlocks(), directive(*KEYS))
    world.answer_lookups(*KEYS)
    ((number, _),) = world.calls(CreateLease)
    world.answer(number, Problem(NOT_FOUND), status=404)
    asked = [decode(LeaseRequest, each.call.body).block_keys for _, each in world.calls(CreateLease)]  # type: ignore[arg-type]
    assert asked == [(key,) for key in KEYS]
    (first, _), *_ = world.calls(CreateLease)
    world.answer(first, Problem(NOT_FOUND), status=404)
    world.grant_leases()
    world.serve_blocks()
    assert world.beside.held() == set(KEYS[1:])


@pytest.mark.requirement("PF-5")
def test_directives_come_from_the_controller_only() -> None:
    world = World()
    for operation, body in (
        (PrefetchBlocks(), directive(*KEYS)),
        (ResumeSession(SESSION), ResumeRequest(epoch=2, checkpoint=checkpoint(()))),
        (ReshardGroup(), ReshardCommit(map="m", commit=1)),
        (ChangeState(), StateChange(state="draining")),
    ):
        request, _ = world.ask(FE, operation, body)
        assert world.status_of(request) == 403
    assert world.of(ReceiveBody) == []


@pytest.mark.requirement("PF-4")
def test_a_request_waits_for_its_directive_and_no_longer_than_its_deadline() -> None:
    world = World()
    world.ask(PC, PrefetchBlocks(), directive(*KEYS))
    world.begin(PROMPT, request_ref="ref")
    world.acknowledge_checkpoints()
    assert world.of(engine.StartSequence) == []
    world.answer_lookups(*KEYS)
    world.later(500)
    assert world.of(engine.StartSequence)[0].cached_tokens == 0


@pytest.mark.requirement("OP-3", "PF-1")
def test_what_is_prefetched_is_looked_up_at_the_parts_of_the_index_that_its_keys_belong_to() -> None:
    parts = IndexParts(("https://is1.example/", "https://is2.example/"))
    world = World(index_uris=parts.uris)
    keys = key_of(tuple(range(200)))
    world.ask(PC, PrefetchBlocks(), directive(*keys))
    asked = {each.call.base_uri: decode(LookupRequest, each.call.body) for _, each in world.calls(Lookup)}  # type: ignore[arg-type]
    assert asked.keys() == {parts.of(key) for key in keys} == set(parts.uris)
    assert all(parts.of(key) == part for part, request in asked.items() for key in request.block_keys)
    (first, _), (second, _) = world.calls(Lookup)
    world.answer_lookup(first, *keys)
    assert world.calls(CreateLease) == []
    world.answer_lookup(second, *keys)
    assert world.calls(CreateLease)


@pytest.mark.requirement("OP-3", "PF-4")
def test_a_lookup_that_a_part_of_the_index_does_not_answer_is_given_up_at_the_others() -> None:
    parts = IndexParts(("https://is1.example/", "https://is2.example/"))
    world = World(index_uris=parts.uris)
    world.ask(PC, PrefetchBlocks(), directive(*key_of(tuple(range(200)))))
    (first, _), (second, _) = world.calls(Lookup)
    world.fail(first)
    assert [effect.call_id for effect in world.of(CancelCall)] == [second]


@pytest.mark.requirement("PF-1")
def test_where_there_is_no_index_a_directive_ends_with_what_is_held() -> None:
    world = World(index_uris=())
    world.beside.hold(KEYS[0])
    request, _ = world.ask(PC, PrefetchBlocks(), directive(*KEYS))
    assert world.status_of(request) == 202
    request, _ = world.ask(PC, GetDirective("d1"))
    status = decode(DirectiveStatus, world.answered(request).body)  # type: ignore[arg-type]
    assert (status.state, status.loaded) == ("partial", (KEYS[0],))


@pytest.mark.requirement("PF-2")
def test_a_prefetch_asks_nothing_of_the_engine_and_delays_no_admitted_request() -> None:
    world = World()
    other = tuple(range(50))
    world.ask(PC, PrefetchBlocks(), directive(*key_of(other), request_ref="another"))
    world.answer_lookups(*key_of(other))
    world.begin(PROMPT)
    assert len(world.of(engine.StartSequence)) == 1
    world.load(*key_of(other))
    commands = [effect for effect in world.seen if isinstance(effect, engine.EngineCommand)]
    assert [type(command) for command in commands] == [engine.StartSequence]


@pytest.mark.requirement("PF-2", "PF-4")
@pytest.mark.parametrize("then", ["the request ends", "another waits for them"])
def test_while_a_request_runs_blocks_load_one_by_one_until(then: str) -> None:
    world = World()
    world.begin(PROMPT)
    other = tuple(range(50))
    world.ask(PC, PrefetchBlocks(), directive(*key_of(other), request_ref="another"))
    world.answer_lookups(*key_of(other))
    world.grant_leases()
    assert len(world.calls(GetBlock)) == 1
    if then == "the request ends":
        world.do(engine.SequenceEnded(world.sequence(), "length"))
        world.acknowledge_checkpoints()
    else:
        world.begin(other, session="6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a12", request_ref="another")
        world.acknowledge_checkpoints()
    assert len(world.calls(GetBlock)) == MAX_CONCURRENT_LOADS


@pytest.mark.requirement("PF-3", "PF-4")
def test_the_request_uses_what_its_directive_has_loaded() -> None:
    world = World()
    world.ask(PC, PrefetchBlocks(), directive(*KEYS))
    world.begin(PROMPT, request_ref="ref")
    world.load(*KEYS)
    world.run_jobs()
    assert world.of(engine.StartSequence)[0].cached_tokens == 8
    assert world.beside.kept == {}


@pytest.mark.requirement("BR-5", "BR-8", "OP-1")
def test_a_bad_block_is_reported_to_the_index_and_its_buffer_given_back() -> None:
    from kvsp_core.answers import block_response
    from kvsp_core.resources import WithdrawReplica
    from kvsp_core.roles.role import BlockReceived, FreeBuffer

    world = World()
    world.ask(PC, PrefetchBlocks(), directive(KEYS[0]))
    world.answer_lookups(KEYS[0])
    world.grant_leases()
    ((number, each),) = world.calls(GetBlock)
    del world.open[number]
    head = block_response(size_bytes=1, repr_digest="ab" * 32, ttl_ms=1)
    world.do(BlockReceived(number, head, HEADER, digests_of("wrong"), repr_digest_valid=True))
    assert len(world.calls(WithdrawReplica)) == 1
    assert world.observed("kvsp_digest_failures") == [1]
    assert FreeBuffer(each.call.buffer) in world.seen  # type: ignore[arg-type]
    assert world.beside.held() == set()


@pytest.mark.parametrize(
    ("change", "status"), [({"compat_id": "ee" * 32}, 409), ({"scope_id": "ee" * 16}, 403)]
)
def test_a_directive_for_another_model_or_scope_is_refused(change: dict[str, str], status: int) -> None:
    world = World()
    request, _ = world.ask(PC, PrefetchBlocks(), directive(*KEYS, **change))
    assert world.status_of(request) == status


# Resume


@pytest.mark.requirement("MG-2", "CP-5")
def test_a_session_is_resumed_from_its_checkpoint_with_the_blocks_that_survived() -> None:
    world = World()
    generated = (1, 2, 3)
    keys = key_of((*PROMPT, *generated))
    request, _ = world.ask(
        PC, ResumeSession(SESSION), ResumeRequest(epoch=2, checkpoint=checkpoint(generated))
    )
    assert world.status_of(request) == 202
    world.load(*keys, holder=CACHE)
    world.run_jobs()
    start = world.of(engine.StartSequence)[0]
    assert start.cached_tokens == 12
    assert start.known_from == 8
    assert start.tokens[8:] == (*PROMPT[8:], *generated)
    assert start.sampler.step == 3
    (confirming,) = world.acknowledge_checkpoints()
    assert (confirming.epoch, confirming.generated) == (2, generated)
    stream, _ = world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=0, epoch=2))
    assert world.output(stream) == [1, 2, 3]
    world.do(OutputReady(stream))
    world.do(engine.TokensDecoded(start.sequence, 3, (4,)))
    assert world.output(stream) == [1, 2, 3, 4]


@pytest.mark.requirement("MG-2")
def test_where_blocks_of_the_prompt_are_gone_the_front_end_is_asked_for_it() -> None:
    world = World()
    world.ask(PC, ResumeSession(SESSION), ResumeRequest(epoch=2, checkpoint=checkpoint((1, 2))))
    early, _ = world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=2, epoch=2))
    assert world.status_of(early) is None
    world.answer_lookups()
    world.answer_lookups()
    world.answer_lookups()
    assert world.status_of(early) == 428
    wrong, _ = world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=2, epoch=2, prompt=PROMPT[:9]))
    assert world.status_of(wrong) == 409
    right, _ = world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=2, epoch=2, prompt=PROMPT))
    assert world.status_of(right) == 200
    start = world.of(engine.StartSequence)[0]
    assert (start.tokens, start.cached_tokens, start.known_from) == ((*PROMPT, 1, 2), 0, 0)


@pytest.mark.requirement("MG-3")
def test_a_newer_epoch_ends_what_an_older_one_still_does() -> None:
    world = World()
    first = world.begin(PROMPT)
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.do(engine.TokensDecoded(world.sequence(), 0, (1,)))
    old = world.sequence()
    world.ask(PC, ResumeSession(SESSION), ResumeRequest(epoch=2, checkpoint=checkpoint((1,))))
    assert engine.Abort(old) in world.seen
    world.do(engine.TokensDecoded(old, 1, (2,)))
    assert world.output(first) == [1]
    stale, _ = world.ask(PC, ResumeSession(SESSION), ResumeRequest(epoch=1, checkpoint=checkpoint((1,))))
    assert world.status_of(stale) == 409
    late, _ = world.ask(FE, StreamOutput(SESSION), OutputRequest(from_index=0, epoch=1))
    assert world.status_of(late) == 409


def test_the_same_resume_again_is_accepted_again() -> None:
    world = World()
    body = ResumeRequest(epoch=2, checkpoint=checkpoint(()))
    for _ in range(2):
        request, _ = world.ask(PC, ResumeSession(SESSION), body)
        assert world.status_of(request) == 202


def test_a_resume_is_of_the_session_that_its_path_names() -> None:
    world = World()
    other = attrs.evolve(checkpoint(()), session="6f1d0a9e-2c55-4d7e-9a0e-000000000000")
    request, _ = world.ask(PC, ResumeSession(SESSION), ResumeRequest(epoch=2, checkpoint=other))
    assert world.status_of(request) == 400


def test_a_session_that_comes_back_is_not_due_to_be_forgotten() -> None:
    world = World()
    world.begin(PROMPT)
    world.run_jobs()
    ((refused, _),) = world.calls(RecordCheckpoint)
    world.answer(refused, Problem(STALE_EPOCH), 409)
    world.ask(PC, ResumeSession(SESSION), ResumeRequest(epoch=2, checkpoint=checkpoint(())))
    world.load(*KEYS)
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.later(70_000)
    assert world.role._sessions.next_deadline_ms() is None


def test_a_block_that_is_lost_while_it_is_pinned_is_not_kept_for_ever() -> None:
    world = World()
    world.ask(PC, PrefetchBlocks(), directive(KEYS[0]))
    world.load(KEYS[0])
    assert world.beside.kept
    world.beside.lost(BlockName(MODEL.compat_id, SCOPE.scope_id, KEYS[0]), world.now_ms)
    world.later(1)
    assert not world.beside.kept


# Shards


def plan(version: int, to: int, **members: object) -> ReshardPlan:
    base: dict[str, object] = {
        "map": "m",
        "from_": version,
        "to": to,
        "deadline_ms": 200,
        "retain": (),
        "fetch": (),
        "release": (),
        "compat_id": MODEL.compat_id,
        "scope_id": SCOPE.scope_id,
        "block_keys": tuple(KEYS),
    }
    return ReshardPlan(**(base | members))  # type: ignore[arg-type]


@pytest.mark.requirement("RS-3", "RS-4")
def test_a_shard_is_fetched_before_the_plan_is_acknowledged_and_computes_after_the_commit() -> None:
    world = World()
    request, _ = world.ask(PC, ReshardGroup(), plan(4, 5, fetch=(FetchRange(tokens=(0, 8), from_=HOLDER),)))
    assert world.status_of(request) is None
    world.load(*KEYS)
    assert world.status_of(request) == 200
    early, _ = world.ask(PC, Attend("m"), AttendRequest(version=5, layer=0, queries=b"\0" * 32))
    assert world.status_of(early) in (403, 404, 409)
    commit, _ = world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=5))
    assert world.status_of(commit) == 200
    world.run_jobs()
    loads = world.of(engine.LoadShard)
    assert [load.tokens for load in loads] == [(0, 4), (4, 8)]
    for load in loads:
        world.do(JobDone(load.job_id))
    drop, _ = world.ask(PC, ReshardGroup(), plan(5, 6, release=((0, 8),)))
    assert world.status_of(drop) == 200
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=6))
    assert [each.tokens for each in world.of(engine.DropShard)] == [(0, 4), (4, 8)]
    world.later(500)
    assert world.beside.kept == {}


@pytest.mark.requirement("RS-5")
def test_what_cannot_be_fetched_in_time_is_a_refusal() -> None:
    world = World()
    request, _ = world.ask(PC, ReshardGroup(), plan(4, 5, fetch=(FetchRange(tokens=(0, 8), from_=HOLDER),)))
    world.answer_lookups(*KEYS)
    world.later(200)
    assert world.status_of(request) == 409
    late, _ = world.ask(PC, ReshardGroup(), ReshardAbort(map="m", abort=5))
    assert world.status_of(late) == 200


@pytest.mark.requirement("RS-3")
def test_what_nobody_has_is_a_refusal_at_once() -> None:
    world = World()
    request, _ = world.ask(PC, ReshardGroup(), plan(4, 5, fetch=(FetchRange(tokens=(0, 8), from_=HOLDER),)))
    world.answer_lookups(KEYS[0])
    world.load(KEYS[0])
    assert world.status_of(request) == 409


def test_an_assigned_range_is_loaded_from_whoever_has_it_after_the_commit() -> None:
    world = World()
    request, _ = world.ask(PC, ReshardGroup(), plan(0, 1, assign=((0, 8),)))
    assert world.status_of(request) == 200
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=1))
    world.load(*KEYS, holder=CACHE)
    world.run_jobs()
    assert [load.tokens for load in world.of(engine.LoadShard)] == [(0, 4), (4, 8)]


def test_plans_for_another_model_are_refused() -> None:
    world = World()
    request, _ = world.ask(PC, ReshardGroup(), plan(0, 1, assign=((0, 8),), compat_id="ee" * 32))
    assert world.status_of(request) == INCOMPATIBLE.status
    unknown, _ = world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=1))
    assert world.status_of(unknown) == 409


# The holder beside


@pytest.mark.requirement("SE-1")
def test_a_new_policy_holds_at_once_for_the_holder_too() -> None:
    world = World()
    nobody = Policy({})
    world.role.policy = nobody
    assert world.beside.policy is nobody
    request, _ = world.ask(PC, PrefetchBlocks(), directive(*KEYS))
    assert world.status_of(request) == 403


def test_requests_for_blocks_are_the_holders() -> None:
    world = World()
    request, _ = world.ask(FE, GetBlock(MODEL.compat_id, SCOPE.scope_id, KEYS[0]))
    assert world.beside.handled[-1].request_id == request
    world.do(RequestEnded(request, True, 1))
    assert world.beside.handled[-1] == RequestEnded(request, True, 1)
    unknown, _ = world.ask(FE, GetDirective("d"))
    assert world.status_of(unknown) in (403, NOT_FOUND.status)


@pytest.mark.requirement("CP-6")
@pytest.mark.parametrize("numerics", ["numpy 2, one thread", None])
def test_a_status_says_what_the_engine_says_of_its_results(numerics: str | None) -> None:
    world = World(numerics=numerics)
    ((_, report),) = world.calls(ReportStatus)
    assert decode(InstanceStatus, report.call.body).numerics == numerics  # type: ignore[arg-type]
    assert (b"numerics" in report.call.body) == (numerics is not None)  # type: ignore[operator]
