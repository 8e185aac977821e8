"""The controller as a playbook: placement, checkpoints, failover, sleep and wake, restarts from its store."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any
from uuid import UUID

import attrs
import pytest

from kvsp_core.answers import problem_response
from kvsp_core.bodies import decode, encode
from kvsp_core.errors import LocalProtocolError
from kvsp_core.ext_messages import (
    InstanceListing,
    PlacementAnswer,
    PlacementRequest,
    ScopedPrefix,
    SessionInfo,
    SessionListing,
    SessionMove,
)
from kvsp_core.heads import Response
from kvsp_core.identity import CompatibilityDescriptor, component_id
from kvsp_core.index_parts import IndexParts
from kvsp_core.machines.session import Owner, SessionTimes
from kvsp_core.messages import (
    CheckpointRecorded,
    LookupAnswer,
    LookupRequest,
    MatchedBlock,
    PrefetchDirective,
    ResumeRequest,
    StateChange,
    StatusAnswer,
)
from kvsp_core.problems import INVALID_STATE, Problem, problem_of
from kvsp_core.records import InstanceStatus, Link, ReplicaRecord, Residency, Sampler, SessionCheckpoint
from kvsp_core.registries import JSON_MEDIA_TYPE
from kvsp_core.resources import (
    ChangeInstanceState,
    DeleteSession,
    GetSession,
    ListInstances,
    ListSessions,
    MoveSession,
    Operation,
    PlaceRequest,
    RecordCheckpoint,
    ReportStatus,
    RoleName,
    request_for,
)
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.controller import Controller, ControllerSettings
from kvsp_core.roles.controller_placement import PlacementSettings
from kvsp_core.roles.role import (
    AnswerReceived,
    Append,
    BodyArrived,
    Call,
    CallFailed,
    CancelCall,
    Delete,
    Effect,
    Input,
    JobDone,
    Observe,
    Persist,
    Put,
    ReceiveBody,
    RequestEnded,
    RequestReceived,
    Respond,
    Stored,
    TimerFired,
)

PC, IS, FE, FE_TOO, OTHER_FE = (
    f"https://{name}.example/kvsp/" for name in ("pc", "is", "fe", "fe2", "other-fe")
)
A, B, C, H = (f"https://{name}.example/kvsp/" for name in ("a", "b", "c", "h"))
OPERATOR = "spiffe://example/operator"
SCOPE, OTHER_SCOPE = "0f" * 16, "1e" * 16
DESCRIPTOR = CompatibilityDescriptor(
    model="m",
    model_digest="sha-256:" + "0" * 64,
    tokenizer_digest="sha-256:" + "1" * 64,
    layers=2,
    kv_heads=1,
    head_dim=8,
    kv_dtype="bf16",
    positional="rope",
    block_tokens=16,
)
COMPAT = DESCRIPTOR.compat_id
KEYS = tuple(f"{number:064x}" for number in range(1, 5))
SPREAD = tuple(f"{number:x}" + 63 * "0" for number in (1, 9, 8, 2))
"""Keys in both parts of an index that has two."""
POLICY = Policy(
    {
        FE: [RoleName.FRONT_END],
        FE_TOO: [RoleName.FRONT_END],
        OTHER_FE: [RoleName.FRONT_END],
        OPERATOR: [RoleName.OPERATOR],
        H: [RoleName.HOLDER],
        **{instance: [RoleName.INSTANCE] for instance in (A, B, C)},
    },
    {
        SCOPE: ScopeRules(read=[FE, FE_TOO, A, B, C], publish=[H, A, B, C]),
        OTHER_SCOPE: ScopeRules(read=[OTHER_FE]),
    },
)
TIMES = SessionTimes(placed_ms=5000, idle_ms=60_000, wait_ms=8000, resume_ms=500, kept_ms=3000, attempts=2)
SAMPLER = Sampler(method="top-p", seed=7, step=0, deterministic=False)


class Store:
    """A store as the loop keeps it: what is persisted is there after a restart."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, bytes]] = {}
        self.written_bytes = 0

    def write(self, effect: Persist) -> None:
        for write in effect.writes:
            table = self.tables.setdefault(write.table, {})
            match write:
                case Put(key=key, value=value):
                    table[key] = value
                    self.written_bytes += len(value)
                case Append(key=key, offset=offset, value=value):
                    table[key] = table.get(key, b"")[:offset] + value
                    self.written_bytes += len(value)
                case Delete(key=key):
                    table.pop(key, None)

    def copied(self) -> Stored:
        return {name: dict(table) for name, table in self.tables.items()}


class Talk:
    """A controller, those who ask it things, and those it calls."""

    def __init__(self, **changes: Any) -> None:
        placement = {"index_uris": (IS,), "descriptors": {COMPAT: DESCRIPTOR}} | changes.pop("placement", {})
        self.settings = ControllerSettings(
            **{"placement": PlacementSettings(**placement), "times": TIMES, "max_resumes": 4} | changes
        )
        self.now_ms = 0
        self.store = Store()
        self.numbers = itertools.count(1)
        self.seq = itertools.count(1)
        self.drawn = itertools.count(1)
        self.effects: list[Effect] = []
        self.replicas: dict[str, tuple[ReplicaRecord, ...]] = {}
        self.index_answers = True
        self.most_keys = 1000
        self.traceparent: str | None = None
        """What requests belong to from now on."""
        self.restart()

    def restart(self, policy: Policy = POLICY) -> None:
        self.calls: dict[int, Call] = {}
        self.answers: dict[int, tuple[Response, bytes]] = {}
        self.controller = Controller(
            base_uri=PC,
            policy=policy,
            settings=self.settings,
            random_bytes=lambda n: hashlib.sha256(next(self.drawn).to_bytes(4, "big")).digest()[:n],
            stored=self.store.copied(),
        )
        self.take(self.controller.start(self.now_ms))

    # The loop

    def take(self, effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
        for effect in effects:
            self.effects.append(effect)
            match effect:
                case Persist():
                    self.store.write(effect)
                case Respond(request_id=number, response=response, body=body):
                    assert number not in self.answers
                    assert isinstance(body, bytes)
                    self.answers[number] = response, body
                case Call():
                    self.calls[effect.call_id] = effect
                case CancelCall(call_id):
                    del self.calls[call_id]
                case _:
                    pass
        while self.index_answers and (calls := [c for c in self.calls.values() if c.base_uri == IS]):
            self.look_up(calls[0])
        return effects

    def give(self, item: Input) -> tuple[Effect, ...]:
        return self.take(self.controller.handle(item, self.now_ms))

    def look_up(self, call: Call) -> None:
        """Answer a lookup as the index would."""
        request = decode(LookupRequest, call.body if isinstance(call.body, bytes) else b"")
        if len(request.block_keys) > self.most_keys:
            self.reply(call, status=413)
            return
        known = list(itertools.takewhile(self.replicas.get, request.block_keys))
        blocks = tuple(MatchedBlock(block_key=key, replicas=self.replicas[key]) for key in known)
        self.reply(call, LookupAnswer(matched=len(blocks), blocks=blocks))

    def reply(self, call: Call, message: object = None, status: int = 200) -> tuple[Effect, ...]:
        octets = b"" if message is None else encode(message)
        head = Response(status=status, content_type=JSON_MEDIA_TYPE, content_length=len(octets))
        del self.calls[call.call_id]
        return self.give(AnswerReceived(call.call_id, head, octets))

    def call_to(self, instance: str, path: str) -> Call:
        (call,) = [c for c in self.calls.values() if c.base_uri == instance and path in c.request.path]
        return call

    def send(self, client: str, operation: Operation, body: object = None) -> int:
        """Ask; return the number of the request, which may be answered later."""
        request, octets = request_for(operation, body)
        number = next(self.numbers)
        effects = self.give(RequestReceived(number, client, request, self.traceparent))
        if effects and isinstance(effects[0], ReceiveBody):
            self.give(BodyArrived(number, octets))
        return number

    def ask(self, client: str, operation: Operation, body: object = None) -> tuple[int, bytes]:
        response, octets = self.answers[self.send(client, operation, body)]
        return response.status, octets

    def pass_time(self, ms: int) -> None:
        """Let time pass, the timer firing whenever it is due."""
        end_ms = self.now_ms + ms
        while (due := self.controller.next_deadline_ms()) is not None and due <= end_ms:
            self.now_ms = max(self.now_ms, due)
            self.give(TimerFired())
        self.now_ms = end_ms

    # What is asked

    def report(self, instance: str, *, epoch: int = 1, state: str = "active", **members: Any) -> str:
        status = InstanceStatus(
            **{
                "instance": instance,
                "epoch": epoch,
                "state": state,
                "running": 0,
                "queued": 0,
                "batch_size": 8,
                "kv_utilization": 0.1,
                "prefill_tokens_per_s": 1000,
                "decode_tokens_per_s": 100,
                "links": (Link(holder=H, mbit_per_s=100_000, rtt_us=10),),
                "ttl_ms": 3000,
                "seq": next(self.seq),
            }
            | members
        )
        code, octets = self.ask(instance, ReportStatus(component_id(instance)), status)
        if code != 200:
            return problem_of(code, octets).type.suffix or str(code)
        return decode(StatusAnswer, octets).state

    def place(self, keys: tuple[str, ...] = KEYS, client: str = FE, **members: Any) -> PlacementAnswer:
        status, octets = self.ask(client, PlaceRequest(), placement(keys, **members))
        assert status == 201, octets
        return decode(PlacementAnswer, octets)

    def write(
        self, placed: PlacementAnswer, *tokens: int, epoch: int = 1, client: str | None = None, **members: Any
    ) -> CheckpointRecorded | str:
        body = attrs.evolve(checkpoint(placed.session, *tokens, epoch=epoch), **members)
        code, octets = self.ask(client or placed.instance, RecordCheckpoint(placed.session), body)
        if code != 200:
            return problem_of(code, octets).type.suffix or str(code)
        return decode(CheckpointRecorded, octets)

    def info(self, placed: PlacementAnswer) -> SessionInfo:
        code, octets = self.ask(FE, GetSession(placed.session))
        assert code == 200, octets
        return decode(SessionInfo, octets)

    def observed(self, name: str) -> list[Observe]:
        return [e for e in self.effects if isinstance(e, Observe) and e.name == name]


def placement(keys: tuple[str, ...] = KEYS, **members: Any) -> PlacementRequest:
    known = {
        "compat_id": COMPAT,
        "prefixes": (ScopedPrefix(scope_id=SCOPE, block_keys=keys),),
        "token_count": 16 * len(keys) + 3,
    }
    return PlacementRequest(**(known | members))


def checkpoint(session: str, *tokens: int, epoch: int = 1) -> SessionCheckpoint:
    return SessionCheckpoint(
        session=session,
        epoch=epoch,
        compat_id=COMPAT,
        scope_id=SCOPE,
        prompt_blocks=KEYS,
        prompt_tail=(1, 2, 3),
        generated=tokens,
        output_offset=len(tokens),
        sampler=attrs.evolve(SAMPLER, step=len(tokens)),
    )


def replica(key: str, holder: str = H) -> ReplicaRecord:
    return ReplicaRecord(
        block_key=key,
        compat_id=COMPAT,
        scope_id=SCOPE,
        holder=holder,
        codec=1,
        size=1024,
        digest="sha-256:" + "cd" * 32,
        residency=(Residency(tier="host", layers=(0, 1)),),
        ttl_ms=60_000,
    )


@pytest.fixture
def talk() -> Talk:
    return Talk()


def index_of(effects: list[Effect], kind: type, **members: Any) -> int:
    return next(
        place
        for place, effect in enumerate(effects)
        if isinstance(effect, kind) and all(getattr(effect, k) == v for k, v in members.items())
    )


# Instances


@pytest.mark.requirement("ST-4")
def test_a_status_of_an_earlier_incarnation_is_discarded_also_after_a_restart(talk: Talk) -> None:
    assert talk.report(A, epoch=5) == "active"
    assert talk.report(A, epoch=4) == "kvsp-stale-epoch"
    talk.restart()
    assert talk.report(A, epoch=4) == "kvsp-stale-epoch"
    assert talk.report(A, epoch=5) == "active"


def test_a_status_for_another_instance_is_refused(talk: Talk) -> None:
    status = InstanceStatus(
        instance=B,
        epoch=1,
        state="active",
        running=0,
        queued=0,
        batch_size=1,
        kv_utilization=0,
        prefill_tokens_per_s=1,
        decode_tokens_per_s=1,
        links=(),
        ttl_ms=3000,
    )
    assert talk.ask(A, ReportStatus(component_id(A)), status)[0] == 400
    assert talk.ask(A, ReportStatus(component_id(B)), status)[0] == 403
    assert talk.ask(FE, ReportStatus(component_id(A)), status)[0] == 403


@pytest.mark.requirement("LC-1")
def test_an_instance_may_sleep_as_long_as_others_are_awake(talk: Talk) -> None:
    talk.report(A)
    assert talk.report(A, requested_state="sleeping") == "active"
    talk.report(B)
    assert talk.report(A, requested_state="sleeping") == "draining"
    assert talk.report(A, state="sleeping") == "sleeping"


def test_new_limits_hold_from_then_on(talk: Talk) -> None:
    talk.report(A)
    talk.controller.limit(min_active=0, prefetch=False, open_by_checkpoint=True)
    talk.replicas = {KEYS[0]: (replica(KEYS[0]),)}
    placed = talk.place()
    assert not [call for call in talk.calls.values() if "prefetch" in call.request.path]
    other = str(UUID(int=7, version=4))
    assert talk.write(attrs.evolve(placed, session=other), 5) == CheckpointRecorded(epoch=1, output_offset=1)
    assert talk.report(A, requested_state="sleeping") == "draining"


@pytest.mark.requirement("LC-2", "LC-5")
def test_an_operator_drains_and_wakes_an_instance(talk: Talk) -> None:
    talk.report(A)
    talk.report(B)
    change = ChangeInstanceState(component_id(A))
    status, octets = talk.ask(OPERATOR, change, StateChange(state="draining"))
    assert (status, decode(StatusAnswer, octets).state) == (200, "draining")
    assert talk.place().instance == B
    talk.reply(talk.call_to(A, "state"), StatusAnswer(state="sleeping"))
    talk.report(A, state="sleeping")
    talk.ask(OPERATOR, change, StateChange(state="active"))
    call = talk.call_to(A, "state")
    assert decode(StateChange, call.body).state == "active"  # type: ignore[arg-type]
    talk.reply(call, StatusAnswer(state="active"))
    talk.report(A)
    assert decode(InstanceListing, talk.ask(OPERATOR, ListInstances())[1]).instances[0].state == "active"


@pytest.mark.requirement("LC-5")
def test_a_state_is_asked_for_until_it_is_reported_unless_the_instance_refuses(talk: Talk) -> None:
    talk.report(A, ttl_ms=60_000)
    change = ChangeInstanceState(component_id(A))
    talk.ask(OPERATOR, change, StateChange(state="draining"))
    call = talk.call_to(A, "state")
    talk.give(CallFailed(talk.calls.pop(call.call_id).call_id, "timed out"))
    talk.pass_time(1000)
    talk.reply(talk.call_to(A, "state"), StatusAnswer(state="draining"))
    assert talk.report(A, state="draining", ttl_ms=60_000) == "draining"
    talk.pass_time(5000)
    assert not talk.calls
    talk.ask(OPERATOR, change, StateChange(state="active"))
    call = talk.call_to(A, "state")
    del talk.calls[call.call_id]
    talk.give(AnswerReceived(call.call_id, *problem_response(Problem(INVALID_STATE, "it is stopping"))))
    talk.report(A, state="draining", ttl_ms=60_000)
    talk.pass_time(5000)
    assert not talk.calls


def test_an_answer_that_cannot_be_read_is_none(talk: Talk) -> None:
    talk.report(A, ttl_ms=60_000)
    talk.ask(OPERATOR, ChangeInstanceState(component_id(A)), StateChange(state="draining"))
    call = talk.call_to(A, "state")
    del talk.calls[call.call_id]
    talk.give(AnswerReceived(call.call_id, Response(status=200, content_type=JSON_MEDIA_TYPE), b"{"))
    talk.pass_time(1000)
    assert talk.call_to(A, "state")


def test_what_an_operator_may_not_ask(talk: Talk) -> None:
    talk.report(A)
    active = StateChange(state="active")
    assert talk.ask(OPERATOR, ChangeInstanceState(component_id(C)), active)[0] == 404
    assert talk.ask(OPERATOR, ChangeInstanceState(component_id(A)), StateChange(state="failed"))[0] == 409
    assert talk.ask(FE, ChangeInstanceState(component_id(A)), active)[0] == 403
    for operation in (ListInstances(), ListSessions()):
        assert talk.ask(FE, operation)[0] == 403


# Placement


@pytest.mark.requirement("PL-2")
def test_a_request_goes_to_the_instance_of_lowest_cost_and_hears_why(talk: Talk) -> None:
    talk.report(A, queued=3)
    talk.report(B)
    talk.report(C, state="draining")
    placed = talk.place()
    assert (placed.instance, placed.epoch) == (B, 1)
    costs = {cost.instance: cost for cost in placed.candidates}
    assert costs[A].cost_us > costs[B].cost_us  # type: ignore[operator]
    assert costs[C].refused == "it is draining, or asked to drain"
    assert [(miss.blocks, miss.reason) for miss in placed.misses] == [((0, 4), "no replica")]


@pytest.mark.requirement("OP-1")
def test_it_is_counted_once_for_each_request_why_blocks_are_missed(talk: Talk) -> None:
    talk.replicas = {KEYS[0]: (replica(KEYS[0]),)}
    waits = talk.send(FE, PlaceRequest(), placement())
    assert talk.observed("kvsp_missed_blocks") == []  # nobody is there; it is looked at again
    talk.report(A)
    assert talk.answers[waits][0].status == 201
    missed = Observe("kvsp_missed_blocks", 3, (("reason", "no replica"),))
    assert talk.observed("kvsp_missed_blocks") == [missed]


def test_a_session_is_durable_before_its_front_end_hears_of_it(talk: Talk) -> None:
    talk.report(A)
    talk.effects.clear()
    placed = talk.place()
    persisted = index_of(talk.effects, Persist)
    assert persisted < index_of(talk.effects, Respond)
    talk.restart()
    assert talk.info(placed).state == "placed"
    assert talk.info(placed).instance == A


@pytest.mark.requirement("PL-1", "LC-2")
def test_the_chosen_instance_is_told_to_load_what_it_does_not_hold(talk: Talk) -> None:
    talk.report(A)
    talk.replicas = {KEYS[0]: (replica(KEYS[0], A), replica(KEYS[0])), KEYS[1]: (replica(KEYS[1]),)}
    placed = talk.place()
    directive = decode(PrefetchDirective, talk.call_to(A, "prefetch").body)  # type: ignore[arg-type]
    assert [block.block_key for block in directive.blocks] == [KEYS[1]]
    assert directive.blocks[0].sources == (H,)
    assert directive.request_ref == placed.request_ref
    assert placed.candidates[0].fetched_tokens == 16


@pytest.mark.requirement("PL-1")
def test_a_block_of_which_the_instance_holds_some_layers_is_loaded_from_the_others(talk: Talk) -> None:
    talk.report(A)
    digests = ("ab" * 32, "cd" * 32)
    part = attrs.evolve(
        replica(KEYS[0], A), layer_digests=digests, residency=(Residency(tier="device", layers=(0, 0)),)
    )
    talk.replicas = {KEYS[0]: (part, attrs.evolve(replica(KEYS[0]), layer_digests=digests))}
    talk.place()
    directive = decode(PrefetchDirective, talk.call_to(A, "prefetch").body)  # type: ignore[arg-type]
    assert [(block.block_key, block.sources) for block in directive.blocks] == [(KEYS[0], (H,))]


@pytest.mark.requirement("OP-4")
def test_without_an_index_everything_is_computed() -> None:
    talk = Talk(placement={"index_uris": ()})
    talk.report(A)
    assert talk.place().candidates[0].recomputed_tokens == 67


def test_a_replica_of_a_holder_that_may_not_publish_does_not_count(talk: Talk) -> None:
    talk.report(A)
    talk.replicas = {KEYS[0]: (replica(KEYS[0], FE),)}
    assert talk.place().candidates[0].fetched_tokens == 0


@pytest.mark.requirement("PF-5")
@pytest.mark.parametrize("taken", [True, False])
def test_whether_a_directive_was_taken_is_counted_and_changes_nothing(talk: Talk, taken: bool) -> None:
    talk.report(A)
    talk.replicas = {KEYS[0]: (replica(KEYS[0]),)}
    placed = talk.place()
    call = talk.call_to(A, "prefetch")
    if taken:
        talk.reply(call, status=202)
    else:
        talk.give(CallFailed(talk.calls.pop(call.call_id).call_id, "timed out"))
    (seen,) = talk.observed("kvsp_prefetch_directives")
    assert seen.labels == (("outcome", "accepted" if taken else "refused"),)
    assert talk.info(placed).state == "placed"


@pytest.mark.parametrize("octets", [b"{", b'{"matched": 1, "blocks": []}'])
def test_an_index_that_answers_nonsense_is_as_good_as_none(octets: bytes) -> None:
    talk = Talk(placement={"index_uris": ("https://is1.example/",)})
    talk.report(A)
    number = talk.send(FE, PlaceRequest(), placement())
    (call,) = talk.calls.values()
    talk.give(AnswerReceived(call.call_id, Response(status=200, content_type=JSON_MEDIA_TYPE), octets))
    assert talk.answers[number][0].status == 201


def test_an_instance_that_computes_with_other_models_is_not_chosen(talk: Talk) -> None:
    talk.report(A, compat_ids=("d" * 64,))
    talk.report(B, queued=9, compat_ids=(COMPAT,))
    placed = talk.place()
    assert placed.instance == B
    assert next(c for c in placed.candidates if c.instance == A).refused == (
        "it does not compute with this model"
    )


def test_long_prefixes_are_looked_up_in_pieces() -> None:
    talk = Talk(placement={"max_lookup_keys": 2})
    talk.report(A)
    talk.replicas = {key: (replica(key),) for key in KEYS[:3]}
    placed = talk.place()
    assert placed.misses[0].blocks == (3, 4)
    lookups = [e for e in talk.effects if isinstance(e, Call) and e.base_uri == IS]
    assert [len(decode(LookupRequest, call.body).block_keys) for call in lookups] == [2, 2]  # type: ignore[arg-type]


@pytest.mark.requirement("LK-4")
def test_an_index_that_takes_fewer_keys_is_asked_for_fewer_from_then_on(talk: Talk) -> None:
    talk.report(A)
    talk.replicas = {key: (replica(key),) for key in KEYS[:3]}
    talk.most_keys = 1
    assert talk.place().misses[0].blocks == (3, 4)
    assert talk.place().misses[0].blocks == (3, 4)
    lookups = [e for e in talk.effects if isinstance(e, Call) and e.base_uri == IS]
    asked = [len(decode(LookupRequest, call.body).block_keys) for call in lookups]  # type: ignore[arg-type]
    assert asked == [4, 2, *(1,) * 8]
    talk.most_keys = 0
    assert talk.place().misses[0].blocks == (0, 4)


@pytest.mark.requirement("LK-4")
def test_an_index_that_takes_more_keys_again_is_asked_for_more_after_a_while(talk: Talk) -> None:
    talk.report(A)
    talk.replicas = {key: (replica(key),) for key in KEYS}
    talk.most_keys = 1
    for _ in range(4):
        talk.place()
    talk.most_keys = 1000
    talk.effects.clear()
    talk.place()
    lookups = [e for e in talk.effects if isinstance(e, Call) and e.base_uri == IS]
    assert [len(decode(LookupRequest, call.body).block_keys) for call in lookups] == [2, 2]  # type: ignore[arg-type]


@pytest.mark.requirement("SK-6")
def test_an_instance_without_a_part_in_the_scope_gets_no_session_of_it(talk: Talk) -> None:
    talk.controller.policy = Policy(
        {FE: [RoleName.FRONT_END], A: [RoleName.INSTANCE], B: [RoleName.INSTANCE]},
        {SCOPE: ScopeRules(read=[FE, B])},
    )
    talk.report(A)
    waiting = talk.send(FE, PlaceRequest(), placement())
    assert waiting not in talk.answers
    talk.report(A, state="sleeping")
    assert not talk.calls  # it is not woken either
    talk.report(B)
    assert talk.answers[waiting][0].status == 201
    assert [talk.place().instance for _ in range(4)] == [B] * 4


def test_of_two_scopes_the_longer_prefix_counts(talk: Talk) -> None:
    shared = "2d" * 16
    policy = Policy(
        {FE: [RoleName.FRONT_END], A: [RoleName.INSTANCE], H: [RoleName.HOLDER]},
        {name: ScopeRules(read=[FE, A], publish=[H], shared=name == shared) for name in (SCOPE, shared)},
    )
    talk.controller.policy = policy
    talk.controller._placements._trusted = policy.trusted
    talk.report(A)
    others = tuple(f"{number:064x}" for number in range(11, 14))
    talk.replicas = {key: (attrs.evolve(replica(key), scope_id=shared),) for key in others}
    talk.replicas[KEYS[0]] = (replica(KEYS[0]),)
    prefixes = (
        ScopedPrefix(scope_id=SCOPE, block_keys=KEYS),
        ScopedPrefix(scope_id=shared, block_keys=others),
    )
    placed = talk.place(prefixes=prefixes)
    assert placed.candidates[0].fetched_tokens == 48
    assert talk.info(placed).state == "placed"
    directive = decode(PrefetchDirective, talk.call_to(A, "prefetch").body)  # type: ignore[arg-type]
    assert directive.scope_id == shared


@pytest.mark.requirement("OP-4")
def test_an_index_that_cannot_be_reached_makes_a_placement_worse_and_not_impossible() -> None:
    talk = Talk(placement={"index_uris": ("https://is1.example/", "https://is2.example/")})
    talk.report(A)
    number = talk.send(FE, PlaceRequest(), placement(SPREAD))
    first, second = talk.calls.values()
    talk.give(CallFailed(talk.calls.pop(first.call_id).call_id, "timed out"))
    assert number not in talk.answers
    talk.reply(second, status=503)
    assert talk.answers[number][0].status == 201


def lose(talk: Talk, part: str, reason: str = "timed out") -> None:
    """Let all calls of a part of the index fail that are under way."""
    for call in [call for call in talk.calls.values() if call.base_uri == part]:
        talk.give(CallFailed(talk.calls.pop(call.call_id).call_id, reason))


@pytest.mark.requirement("OP-4")
def test_placements_do_not_wait_for_an_index_that_was_silent_until_it_answers_again() -> None:
    part = "https://is1.example/"
    talk = Talk(placement={"index_uris": (part,)})
    talk.report(A, ttl_ms=60_000)
    talk.replicas = {key: (replica(key),) for key in KEYS}
    numbers = [talk.send(FE, PlaceRequest(), placement()) for _ in range(2)]
    lose(talk, part)
    assert [talk.answers[number][0].status for number in numbers] == [201, 201]
    (probe,) = talk.calls.values()  # at once, for perhaps only calls were lost
    assert decode(LookupRequest, probe.body).block_keys == KEYS[:1]  # type: ignore[arg-type]
    for _ in range(3):
        assert talk.place().candidates[0].fetched_tokens == 0
        assert [call for call in talk.calls.values() if call.base_uri == part] == [probe]
        lose(talk, part)
        talk.pass_time(4_999)
        assert talk.place().candidates[0].fetched_tokens == 0
        assert part not in {call.base_uri for call in talk.calls.values()}
        talk.pass_time(1)
        (probe,) = (call for call in talk.calls.values() if call.base_uri == part)
    talk.reply(probe, status=503)  # it is there, whatever it says
    number = talk.send(FE, PlaceRequest(), placement())
    (call,) = (call for call in talk.calls.values() if call.base_uri == part)
    talk.look_up(call)
    assert decode(PlacementAnswer, talk.answers[number][1]).candidates[0].fetched_tokens == 64
    talk.pass_time(20_000)
    assert part not in {call.base_uri for call in talk.calls.values()}


@pytest.mark.requirement("OP-3", "OP-4")
def test_of_an_index_a_part_of_which_is_silent_the_prefix_counts_that_the_others_know() -> None:
    first, second = "https://is1.example/", "https://is2.example/"
    talk = Talk(placement={"index_uris": (first, second), "descriptors": {}})
    talk.report(A)
    talk.replicas = {key: (replica(key),) for key in SPREAD}
    number = talk.send(FE, PlaceRequest(), placement(SPREAD))
    lose(talk, second)
    assert number not in talk.answers  # the first part is still asked, also for the model
    for _ in range(2):
        for call in [call for call in talk.calls.values() if call.base_uri == first]:
            if call.request.path == "lookup":
                talk.look_up(call)
            else:
                del talk.calls[call.call_id]
                response = Response(status=200, content_type=JSON_MEDIA_TYPE)
                talk.give(AnswerReceived(call.call_id, response, DESCRIPTOR.canonical_json))
        answer = decode(PlacementAnswer, talk.answers[number][1])
        assert answer.candidates[0].fetched_tokens == 16
        number = talk.send(FE, PlaceRequest(), placement(SPREAD))
        asked = [call for call in talk.calls.values() if call.request.path == "lookup"]
        assert (
            {call.base_uri: decode(LookupRequest, call.body).block_keys for call in asked}
            == {  # type: ignore[arg-type]
                first: SPREAD[:1],
                second: SPREAD[1:2],  # the probe
            }
        )
    before = [call.base_uri for call in talk.calls.values()]
    talk.send(FE, PlaceRequest(), placement((SPREAD[1],), compat_id="ab" * 32))
    assert [call.base_uri for call in talk.calls.values()][len(before) :] == [first]  # for the model


@pytest.mark.requirement("OP-4")
def test_an_answer_to_an_earlier_call_ends_a_silence() -> None:
    part = "https://is1.example/"
    talk = Talk(placement={"index_uris": (part,)})
    talk.report(A)
    for _ in range(2):
        talk.send(FE, PlaceRequest(), placement())
    first, second = talk.calls.values()
    talk.give(CallFailed(talk.calls.pop(first.call_id).call_id, "cut off"))
    talk.look_up(second)
    lose(talk, part)  # the probe
    talk.send(FE, PlaceRequest(), placement())
    assert [call.base_uri for call in talk.calls.values()] == [part]


@pytest.mark.requirement("OP-3", "LK-1")
def test_each_part_of_the_index_is_asked_for_the_keys_that_belong_to_it() -> None:
    parts = IndexParts(("https://is1.example/", "https://is2.example/"))
    talk = Talk(placement={"index_uris": parts.uris})
    talk.report(A)
    talk.replicas = {key: (replica(key),) for key in SPREAD}
    number = talk.send(FE, PlaceRequest(), placement(SPREAD))
    calls = {call.base_uri: call for call in talk.calls.values()}
    for part in reversed(parts.uris):
        assert number not in talk.answers
        asked = decode(LookupRequest, calls[part].body)  # type: ignore[arg-type]
        assert asked.block_keys == tuple(key for key in SPREAD if parts.of(key) == part)
        talk.look_up(calls[part])
    answer = decode(PlacementAnswer, talk.answers[number][1])
    assert answer.candidates[0].fetched_tokens == len(SPREAD) * DESCRIPTOR.block_tokens


def test_an_unknown_model_is_asked_for_and_its_descriptor_not_believed_but_computed() -> None:
    talk = Talk(placement={"index_uris": ("https://is1.example/",), "descriptors": {}})
    talk.report(A)
    number = talk.send(FE, PlaceRequest(), placement(keys=()))
    (call,) = talk.calls.values()
    assert call.request.path == f"ext/descriptors/{COMPAT}"
    del talk.calls[call.call_id]
    octets = DESCRIPTOR.canonical_json
    talk.give(AnswerReceived(call.call_id, Response(status=200, content_type=JSON_MEDIA_TYPE), octets))
    assert talk.answers[number][0].status == 201
    assert talk.controller._placements._descriptors == {COMPAT: DESCRIPTOR}


@pytest.mark.requirement("LK-3", "SE-1")
def test_a_front_end_places_only_in_its_scopes(talk: Talk) -> None:
    talk.report(A)
    status, octets = talk.ask(OTHER_FE, PlaceRequest(), placement())
    assert (status, problem_of(status, octets).type.suffix) == (403, "kvsp-scope-denied")
    assert talk.ask(A, PlaceRequest(), placement())[0] == 403


@pytest.mark.requirement("ST-4")
def test_an_instance_that_is_gone_is_forgotten_once_the_policy_does_not_name_it(talk: Talk) -> None:
    for instance in (A, B):
        talk.report(instance)
    session = talk.place().session
    left = Policy({FE: [RoleName.FRONT_END], OPERATOR: [RoleName.OPERATOR], B: [RoleName.INSTANCE]}, {})

    def known() -> tuple[list[str], list[str]]:
        _, octets = talk.ask(OPERATOR, ListInstances())
        return [info.instance for info in decode(InstanceListing, octets).instances], [
            *talk.store.tables["epochs"]
        ]

    talk.controller.policy = left
    talk.take(talk.controller.purge(talk.now_ms))
    assert known() == ([A, B], [A, B])  # it may still live
    talk.pass_time(2_000)
    assert talk.report(A) == "403"
    talk.report(B)
    talk.pass_time(1_001)
    assert known() == ([B], [B])
    assert talk.controller._sessions.get(session).owner != Owner(A, 1)  # type: ignore[union-attr]
    talk.pass_time(3_000)
    assert known() == ([B], [B])  # it has failed, and may come back
    talk.controller.policy = Policy({OPERATOR: [RoleName.OPERATOR]}, {})
    talk.take(talk.controller.purge(talk.now_ms))
    assert known() == ([], [])
    talk.restart()
    assert talk.report(A) == "active"  # the policy of a new process names it


# Requests for which there is no instance


@pytest.mark.requirement("PL-3")
def test_a_request_waits_for_an_instance_and_gets_it_with_a_directive(talk: Talk) -> None:
    talk.replicas = {KEYS[0]: (replica(KEYS[0]),)}
    number = talk.send(FE, PlaceRequest(), placement())
    assert talk.observed("kvsp_instances_wanted")
    assert number not in talk.answers
    talk.pass_time(2000)
    talk.report(A)
    assert talk.answers[number][0].status == 201
    assert talk.call_to(A, "prefetch")


@pytest.mark.requirement("PL-3", "LC-4")
def test_a_sleeping_instance_is_woken_for_a_request(talk: Talk) -> None:
    talk.report(A, state="sleeping")
    number = talk.send(FE, PlaceRequest(), placement())
    assert decode(StateChange, talk.call_to(A, "state").body).state == "active"  # type: ignore[arg-type]
    talk.report(A)
    assert talk.answers[number][0].status == 201


def test_a_request_that_waits_too_long_is_told_to_try_again(talk: Talk) -> None:
    number = talk.send(FE, PlaceRequest(), placement())
    gone = talk.send(FE, PlaceRequest(), placement())
    talk.give(RequestEnded(gone, complete=False, sent_bytes=0))
    talk.pass_time(9_999)
    assert number not in talk.answers
    talk.pass_time(1)
    assert (talk.answers[number][0].status, talk.answers[number][0].retry_after_s) == (503, 1)
    assert gone not in talk.answers


def test_without_an_index_to_wait_for_too_what_waits_is_placed_a_few_at_a_time() -> None:
    talk = Talk(placement={"index_uris": ()})
    numbers = [talk.send(FE, PlaceRequest(), placement()) for _ in range(11)]
    talk.effects.clear()
    talk.report(A, state="sleeping")
    assert len(talk.observed("kvsp_instances_wanted")) == 4
    talk.report(A)
    steps = []
    while talk.controller.next_deadline_ms() == talk.now_ms:
        steps.append(sum(number in talk.answers for number in numbers))
        talk.give(TimerFired())
    assert steps == [4, 8]
    assert {talk.answers[number][0].status for number in numbers} == {201}


def test_requests_that_waited_are_placed_a_few_at_a_time() -> None:
    talk = Talk(placement={"index_uris": ("https://is1.example/",)})
    for _ in range(6):
        talk.send(FE, PlaceRequest(), placement())
    assert len(talk.calls) == 6
    for call in tuple(talk.calls.values()):
        talk.reply(call, status=503)
    talk.report(A)
    assert len(talk.calls) == 4
    while talk.calls:
        talk.reply(next(iter(talk.calls.values())), status=503)
    assert [talk.answers[number][0].status for number in range(1, 7)] == [201] * 6


@pytest.mark.requirement("PL-3")
def test_one_instance_is_woken_at_a_time(talk: Talk) -> None:
    talk.report(A, state="sleeping")
    talk.report(B, state="sleeping")
    talk.report(C, state="sleeping", compat_ids=("d" * 64,))
    for _ in range(3):
        talk.send(FE, PlaceRequest(), placement())
    assert [call.base_uri for call in talk.calls.values()] == [A]


def test_more_requests_than_can_wait_are_refused_at_once() -> None:
    talk = Talk(max_pending_placements=1)
    talk.send(FE, PlaceRequest(), placement())
    assert talk.ask(FE, PlaceRequest(), placement())[0] == 503


def test_more_sessions_than_can_be_kept_are_refused() -> None:
    talk = Talk(max_sessions=1)
    talk.report(A)
    talk.place()
    assert talk.ask(FE, PlaceRequest(), placement())[0] == 503


# Checkpoints


@pytest.mark.requirement("CP-2")
def test_a_checkpoint_is_durable_before_it_is_acknowledged_and_there_after_a_restart(talk: Talk) -> None:
    talk.report(A)
    placed = talk.place()
    assert talk.write(placed) == CheckpointRecorded(epoch=1, output_offset=0)
    talk.effects.clear()
    assert talk.write(placed, 5, 6) == CheckpointRecorded(epoch=1, output_offset=2)
    assert index_of(talk.effects, Persist) < index_of(talk.effects, Respond)
    talk.restart()
    assert talk.info(placed).output_offset == 2
    assert talk.write(placed, 5, 9) == "409"
    assert talk.write(placed, 5, 6, 7) == CheckpointRecorded(epoch=1, output_offset=3)


@pytest.mark.requirement("CP-2")
def test_what_is_written_for_a_session_does_not_grow_with_the_square_of_its_output(talk: Talk) -> None:
    talk.report(A)
    placed = talk.place()
    tokens = tuple(range(3200))
    talk.write(placed)
    before = talk.store.written_bytes
    for end in range(32, 3201, 32):
        talk.write(placed, *tokens[:end])
    assert talk.store.written_bytes - before < 3200 * 4 + 100 * 1200


@pytest.mark.requirement("SE-1")
def test_who_may_not_write_a_checkpoint(talk: Talk) -> None:
    talk.report(A)
    talk.report(B)
    placed = talk.place()
    other = B if placed.instance == A else A
    assert talk.write(placed, client=other) == "403"
    assert talk.write(placed, client=FE) == "403"
    assert talk.write(placed, scope_id=OTHER_SCOPE) == "kvsp-scope-denied"
    assert talk.write(placed, session="6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11") == "400"
    unknown = attrs.evolve(placed, session="6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11")
    assert talk.write(unknown) == "kvsp-not-found"


def test_a_checkpoint_does_not_tell_whether_there_is_a_session_in_another_scope(talk: Talk) -> None:
    talk.report(A)
    placed = talk.place()
    outside = {scope: ScopeRules(read=[FE, A] if scope == SCOPE else [C]) for scope in (SCOPE, OTHER_SCOPE)}
    talk.controller.policy = Policy(
        {FE: [RoleName.FRONT_END], **{i: [RoleName.INSTANCE] for i in (A, C)}}, outside
    )
    assert talk.write(placed, client=C, scope_id=OTHER_SCOPE) == "kvsp-not-found"


def test_by_policy_a_first_checkpoint_opens_its_session() -> None:
    session = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
    placed = PlacementAnswer(session=session, epoch=1, instance=A, request_ref="r")
    assert Talk().write(placed) == "kvsp-not-found"
    talk = Talk(open_by_checkpoint=True)
    assert talk.write(placed) == "kvsp-not-found"  # nobody knows this instance
    talk.report(A)
    assert talk.write(placed, epoch=2) == "kvsp-not-found"
    assert talk.write(placed) == CheckpointRecorded(epoch=1, output_offset=0)


# Sessions


def test_a_front_end_sees_and_ends_its_sessions_and_no_others(talk: Talk) -> None:
    talk.report(A)
    placed = talk.place()
    talk.write(placed, 1)
    assert talk.ask(OTHER_FE, GetSession(placed.session))[0] == 404
    assert talk.ask(OTHER_FE, DeleteSession(placed.session))[0] == 404
    assert talk.info(placed) == SessionInfo(
        session=placed.session, state="running", epoch=1, instance=A, output_offset=1
    )
    listing = decode(SessionListing, talk.ask(OPERATOR, ListSessions())[1])
    assert listing.sessions == (talk.info(placed),)
    assert talk.ask(FE, DeleteSession(placed.session))[0] == 204
    assert talk.info(placed).state == "finished"
    assert talk.write(placed, 1, 2) == "kvsp-not-found"
    talk.pass_time(3000)
    assert talk.ask(FE, GetSession(placed.session))[0] == 404
    assert not any(talk.store.tables[name] for name in ("sessions", "prompts", "outputs"))


def test_how_long_sessions_take_is_measured(talk: Talk) -> None:
    talk.report(A)
    placed = talk.place()
    talk.write(placed)
    talk.pass_time(2900)
    talk.report(A, queued=1)
    talk.ask(FE, DeleteSession(placed.session))
    assert talk.place().candidates[0].wait_us == 1_000_000 + (2_900_000 - 1_000_000) // 8


# Failover


def failing(talk: Talk, *tokens: int) -> PlacementAnswer:
    """A session at A, which stops reporting while B lives."""
    talk.report(A)
    placed = talk.place()
    talk.write(placed, *tokens)
    talk.pass_time(2000)
    talk.report(B)
    talk.pass_time(1001)
    return placed


@pytest.mark.requirement("MG-1", "ST-2")
def test_a_session_of_a_failed_instance_is_resumed_at_another(talk: Talk) -> None:
    placed = failing(talk, 5, 6)
    call = talk.call_to(B, "resume")
    body = decode(ResumeRequest, call.body)  # type: ignore[arg-type]
    assert body == ResumeRequest(epoch=2, checkpoint=checkpoint(placed.session, 5, 6, epoch=2))
    assert talk.info(placed) == SessionInfo(
        session=placed.session, state="resuming", epoch=2, instance=B, output_offset=2
    )
    talk.reply(call, status=202)
    assert talk.write(placed, 5, 6, epoch=2, client=B) == CheckpointRecorded(epoch=2, output_offset=2)
    assert talk.info(placed).state == "running"
    assert [e.labels for e in talk.observed("kvsp_migrations")] == [(("outcome", "resumed"),)]


@pytest.mark.requirement("MG-3", "CP-2")
def test_nothing_of_the_failed_instance_takes_effect_any_more(talk: Talk) -> None:
    placed = failing(talk, 5)
    assert talk.write(placed, 5, 6, epoch=1, client=A) == "kvsp-stale-epoch"
    talk.report(A)  # it is back in the same epoch, without its sessions
    assert talk.write(placed, 5, 6, epoch=1, client=A) == "kvsp-stale-epoch"
    assert talk.write(placed, 5, 6, epoch=2, client=A) == "403"


def move(talk: Talk, placed: PlacementAnswer, epoch: int, client: str = FE) -> SessionInfo | int:
    code, octets = talk.ask(client, MoveSession(placed.session), SessionMove(epoch=epoch))
    return decode(SessionInfo, octets) if code == 200 else code


@pytest.mark.requirement("MG-1", "MG-3")
def test_a_session_whose_engine_has_failed_goes_on_at_another_instance(talk: Talk) -> None:
    talk.report(A)
    placed = talk.place()
    assert placed.instance == A
    talk.report(B, queued=5)
    talk.write(placed, 5, 6)
    told = move(talk, placed, epoch=1)
    assert isinstance(told, SessionInfo)
    assert (told.state, told.epoch) == ("resuming", 2)
    call = talk.call_to(B, "resume")
    body = decode(ResumeRequest, call.body)  # type: ignore[arg-type]
    assert body == ResumeRequest(epoch=2, checkpoint=checkpoint(placed.session, 5, 6, epoch=2))
    durable = next(e for e in reversed(talk.effects) if isinstance(e, Persist))
    assert talk.effects.index(durable) < talk.effects.index(call)
    assert talk.write(placed, 5, 6, 7, client=A) == "kvsp-stale-epoch"
    talk.reply(call, status=202)
    assert talk.write(placed, 5, 6, epoch=2, client=B) == CheckpointRecorded(epoch=2, output_offset=2)


@pytest.mark.requirement("MG-1")
def test_a_session_is_moved_once_however_often_that_is_asked(talk: Talk) -> None:
    talk.report(A)
    talk.report(B, queued=5)
    placed = talk.place()
    talk.write(placed, 5)
    for _ in range(2):
        move(talk, placed, epoch=1)
    assert talk.info(placed).epoch == 2
    talk.write(placed, 5, epoch=2, client=B)
    move(talk, placed, epoch=1)  # a late one
    assert (talk.info(placed).epoch, talk.info(placed).state) == (2, "running")
    move(talk, placed, epoch=3)
    assert talk.info(placed).epoch == 2


@pytest.mark.requirement("MG-1")
def test_an_engine_that_fails_where_nobody_else_is_gets_its_session_again(talk: Talk) -> None:
    talk.report(A)
    placed = talk.place()
    talk.write(placed, 5)
    move(talk, placed, epoch=1)
    assert decode(ResumeRequest, talk.call_to(A, "resume").body).epoch == 2  # type: ignore[arg-type]


def test_an_instance_whose_engine_fails_is_given_work_only_where_no_other_takes_it(talk: Talk) -> None:
    talk.report(A, failing=True)
    talk.report(B, queued=9)
    placed = talk.place()
    assert placed.instance == B
    why = {cost.instance: cost.refused for cost in placed.candidates}
    assert why == {A: "its engine fails", B: None}
    assert talk.place(avoid=(B,)).instance == B  # it has failed one request, A has failed many
    talk.report(B, failing=True)
    assert talk.place().instance == A  # it may have recovered; nobody else is left
    talk.report(A, failing=False)
    assert talk.place().instance == A


def test_a_healthy_instance_is_woken_where_only_one_is_awake_whose_engine_fails(talk: Talk) -> None:
    talk.report(A)
    talk.report(C)
    assert talk.report(B, state="sleeping", failing=True) == "sleeping"
    assert talk.report(C, requested_state="sleeping") == "draining"
    talk.reply(talk.call_to(C, "state"), StatusAnswer(state="sleeping"))
    talk.report(C, state="sleeping")
    talk.report(A, failing=True)
    assert talk.place().instance == A
    assert decode(StateChange, talk.call_to(C, "state").body).state == "active"  # type: ignore[arg-type]
    assert talk.report(C, state="active") == "active"
    assert talk.place().instance == C
    assert talk.report(C, requested_state="sleeping") == "active"  # whose engine fails counts as no other


def test_for_a_session_that_nobody_takes_over_a_sleeping_instance_is_woken(talk: Talk) -> None:
    talk.report(A)
    placed = talk.place()
    talk.write(placed, 5)
    talk.report(B, state="sleeping", ttl_ms=60_000)
    talk.pass_time(3001)
    assert decode(StateChange, talk.call_to(B, "state").body).state == "active"  # type: ignore[arg-type]
    talk.report(B)
    assert decode(ResumeRequest, talk.call_to(B, "resume").body).epoch == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("client", [FE_TOO, OTHER_FE, A])
def test_a_session_is_moved_for_who_opened_it_only(talk: Talk, client: str) -> None:
    talk.report(A)
    placed = talk.place()
    talk.write(placed, 5)
    assert move(talk, placed, epoch=1, client=client) in (403, 404)
    assert talk.info(placed).epoch == 1
    talk.ask(FE, DeleteSession(placed.session))
    told = move(talk, placed, epoch=1)
    assert isinstance(told, SessionInfo)
    assert told.state == "finished"


@pytest.mark.requirement("MG-1")
def test_the_epoch_of_a_resume_is_durable_before_it_is_sent(talk: Talk) -> None:
    talk.effects.clear()
    placed = failing(talk, 5)
    resume = index_of(talk.effects, Call, base_uri=B)
    persisted = [e for e in talk.effects[:resume] if isinstance(e, Persist)]
    assert b'"epoch":2' in persisted[-1].writes[0].value  # type: ignore[union-attr]
    assert b'"kind":"resuming"' in persisted[-1].writes[0].value  # type: ignore[union-attr]
    talk.restart()
    assert decode(ResumeRequest, talk.call_to(B, "resume").body).epoch == 2  # type: ignore[arg-type]
    assert talk.info(placed).instance == B


@pytest.mark.requirement("MG-1")
@pytest.mark.parametrize("how", ["refused", "unreachable", "silent", "lost"])
def test_an_instance_that_does_not_resume_is_replaced_by_the_next(talk: Talk, how: str) -> None:
    talk.report(C, queued=5)
    placed = failing(talk, 5)
    talk.report(C, queued=5)
    call = talk.call_to(B, "resume")
    match how:
        case "refused":
            talk.reply(call, status=409)
        case "unreachable":
            talk.give(CallFailed(talk.calls.pop(call.call_id).call_id, "no connection"))
        case "silent":
            talk.reply(call, status=202)
            talk.pass_time(500)
        case "lost":
            talk.report(B, epoch=2)
    assert decode(ResumeRequest, talk.call_to(C, "resume").body).epoch == 3  # type: ignore[arg-type]
    assert talk.write(placed, 5, epoch=2, client=B) == "kvsp-stale-epoch"


@pytest.mark.requirement("MG-1")
def test_a_session_that_nobody_resumes_fails_with_a_reason(talk: Talk) -> None:
    placed = failing(talk, 5)
    for _ in range(2):
        talk.reply(talk.call_to(B, "resume"), status=409)
    info = talk.info(placed)
    assert (info.state, info.detail) == ("failed", "no instance has taken the session over in 2 attempts")
    assert [e.labels for e in talk.observed("kvsp_migrations")] == [(("outcome", "failed"),)]


@pytest.mark.requirement("OP-1")
def test_a_session_that_fails_where_it_is_has_not_moved(talk: Talk) -> None:
    talk.report(A)
    placed = talk.place()
    for _ in range(3):
        talk.pass_time(2000)
        talk.report(A)
    assert talk.info(placed).state == "failed"
    assert talk.observed("kvsp_migrations") == []


def test_a_session_waits_for_an_instance_to_come(talk: Talk) -> None:
    talk.report(A)
    placed = talk.place()
    talk.write(placed, 5)
    talk.pass_time(3001)
    assert talk.info(placed) == SessionInfo(
        session=placed.session, state="resuming", epoch=2, output_offset=1
    )
    talk.pass_time(4000)
    talk.report(B)
    assert talk.call_to(B, "resume")
    late = Talk()
    late.report(A)
    placed = late.place()
    late.write(placed, 5)
    late.pass_time(3001 + 8000)
    assert late.info(placed).detail == "no instance could take the session over in time"


def test_an_instance_that_restarts_loses_its_sessions_at_once(talk: Talk) -> None:
    talk.report(A)
    placed = talk.place()
    talk.write(placed, 5)
    talk.report(A, epoch=2)
    # Nobody else is there, so the new incarnation takes it over from its old self.
    assert decode(ResumeRequest, talk.call_to(A, "resume").body).epoch == 2  # type: ignore[arg-type]
    assert talk.info(placed).instance == A


def test_a_crash_between_a_new_incarnation_and_the_failover_of_its_sessions_loses_none(talk: Talk) -> None:
    talk.report(A)
    placed = talk.place()
    talk.write(placed, 5)
    talk.store.tables["epochs"][A] = b"2"  # the controller stopped right after this was durable
    talk.restart()
    assert talk.info(placed).state == "resuming"
    assert talk.info(placed).epoch == 2


@pytest.mark.requirement("MG-1")
def test_many_sessions_that_fail_over_together_do_so_a_few_at_a_time(talk: Talk) -> None:
    talk.report(A)
    placed = [talk.place() for _ in range(10)]
    for one in placed:
        talk.write(one, 5)
    talk.pass_time(2000)
    talk.report(B)
    talk.effects.clear()
    talk.pass_time(1001)
    fenced = next(e for e in talk.effects if isinstance(e, Persist))
    assert len(fenced.writes) == 10
    resumed = set()
    while len(resumed) < 10:
        calls = [call for call in talk.calls.values() if "resume" in call.request.path]
        assert 0 < len(calls) <= 4
        for call in calls:
            body = decode(ResumeRequest, call.body)  # type: ignore[arg-type]
            talk.reply(call, status=202)
            one = next(p for p in placed if p.session == body.checkpoint.session)
            talk.write(one, 5, epoch=2, client=B)
            resumed.add(one.session)
    assert all(talk.info(one).instance == B for one in placed)


def fail_over(talk: Talk, count: int) -> list[PlacementAnswer]:
    """Have so many sessions lose their instance, with another one there that takes none of them."""
    talk.report(A)
    placed = [talk.place() for _ in range(count)]
    for one in placed:
        talk.write(one, 5)
    talk.pass_time(2000)
    talk.report(B)
    talk.pass_time(1001)
    return placed


def resumes(talk: Talk) -> list[str]:
    """Return the sessions that instances are being asked to resume."""
    calls = [call for call in talk.calls.values() if "resume" in call.request.path]
    return [decode(ResumeRequest, call.body).checkpoint.session for call in calls]  # type: ignore[arg-type]


@pytest.mark.requirement("MG-1")
def test_a_session_that_somebody_waits_for_does_not_wait_for_those_nobody_wants(talk: Talk) -> None:
    placed = fail_over(talk, 40)
    assert len(resumes(talk)) == 2
    wanted = placed[-1].session
    assert wanted not in resumes(talk)
    assert talk.info(placed[-1]).state == "resuming"
    assert wanted in resumes(talk)
    talk.ask(OPERATOR, GetSession(placed[20].session))
    assert placed[20].session not in resumes(talk), "who only looks moves nobody"


@pytest.mark.requirement("MG-1")
def test_a_session_in_line_is_not_failed_for_want_of_an_instance(talk: Talk) -> None:
    placed = fail_over(talk, 40)
    for _ in range(18):  # longer than a session may be without an instance, with one second for each two
        talk.pass_time(1000)
        talk.report(B)
    known = decode(SessionListing, talk.ask(OPERATOR, ListSessions())[1]).sessions
    ends = {one.detail for one in known if one.state == "failed"}
    assert ends == {"no instance has taken the session over in 2 attempts"}
    assert talk.info(placed[-1]).state == "resuming"
    assert placed[-1].session in resumes(talk)


@pytest.mark.requirement("CP-6")
def test_a_deterministic_session_moves_only_within_its_class() -> None:
    talk = Talk(placement={"classes": {A: "gpu-x", C: "gpu-x"}})
    talk.report(B)
    talk.report(A, queued=9)
    placed = talk.place(deterministic=True)
    assert placed.instance == A  # B would be cheaper, but nobody could continue for it
    talk.write(placed, 5, sampler=attrs.evolve(SAMPLER, deterministic=True, step=1))
    talk.pass_time(2000)
    talk.report(B)
    talk.pass_time(1001)
    assert talk.info(placed).instance is None
    talk.report(C)
    assert talk.call_to(C, "resume")


# Restarts


def test_a_restarted_controller_gives_each_instance_one_longest_ttl(talk: Talk) -> None:
    talk.report(A)
    placed = talk.place()
    talk.write(placed, 5)
    talk.restart()
    assert talk.info(placed).state == "running"
    talk.report(A)
    talk.pass_time(2999)
    assert talk.info(placed).state == "running"
    talk.restart()
    talk.pass_time(59_000)
    assert talk.info(placed).state == "running"
    talk.pass_time(1_100)
    assert talk.info(placed).state != "running"


@pytest.mark.parametrize(("table", "key"), [("epochs", A), ("sessions", "s"), ("maps", "m")])
def test_a_damaged_store_is_said_to_be_so_and_shows_nothing(talk: Talk, table: str, key: str) -> None:
    talk.store.tables[table] = {key: b"nonsense 4711"}
    with pytest.raises(LocalProtocolError, match=f"a row of '{table}' cannot be read") as error:
        talk.restart()
    assert "4711" not in str(error.value)


def test_a_log_that_ends_too_early_fails_its_session_and_no_other(talk: Talk) -> None:
    talk.report(A)
    placed, other = talk.place(), talk.place()
    for one in (placed, other):
        talk.write(one, 5, 6)
    talk.store.tables["outputs"][placed.session] = b"\0\0\0\5\0"
    talk.restart()
    assert talk.info(placed).detail == "what was stored of the output is damaged"
    assert talk.info(other).state == "running"


def test_an_answer_to_a_resume_of_a_session_that_has_ended_is_nothing(talk: Talk) -> None:
    placed = failing(talk, 5)
    call = talk.call_to(B, "resume")
    talk.ask(FE, DeleteSession(placed.session))
    talk.pass_time(3000)
    talk.effects.clear()
    talk.reply(call, status=409)
    assert not [e for e in talk.effects if not isinstance(e, Persist)]


def test_what_a_controller_has_no_use_for_is_nothing(talk: Talk) -> None:
    assert talk.give(JobDone(1)) == ()
    assert talk.give(CallFailed(99, "late")) == ()


def test_an_empty_store_is_a_new_controller(talk: Talk) -> None:
    talk.restart()
    assert talk.effects == []
    assert talk.controller.next_deadline_ms() is None
    assert talk.give(TimerFired()) == ()


# Requests that are gone, and what belongs to others


def test_a_request_that_is_gone_is_not_placed(talk: Talk) -> None:
    talk.report(A)
    talk.index_answers = False
    number = talk.send(FE, PlaceRequest(), placement())
    (lookup,) = [call for call in talk.calls.values() if call.base_uri == IS]
    talk.give(RequestEnded(number, False, 0))
    assert CancelCall(lookup.call_id) in talk.effects
    head = Response(status=200, content_type=JSON_MEDIA_TYPE)
    late = talk.give(AnswerReceived(lookup.call_id, head, encode(LookupAnswer(matched=0, blocks=()))))
    assert late == ()
    assert talk.store.tables.get("sessions", {}) == {}
    assert len(talk.controller._placements) == 0
    assert number not in talk.answers


def test_the_other_requests_are_placed_all_the_same(talk: Talk) -> None:
    talk.report(A)
    talk.index_answers = False
    gone, stays = (talk.send(FE, PlaceRequest(), placement()) for _ in range(2))
    talk.give(RequestEnded(gone, False, 0))
    talk.index_answers = True
    talk.pass_time(1)
    talk.take(())
    assert talk.answers[stays][0].status == 201
    assert len(talk.store.tables["sessions"]) == 1


@pytest.mark.requirement("SE-1")
@pytest.mark.parametrize("operation", [GetSession, DeleteSession])
def test_a_session_is_told_of_and_ended_for_who_opened_it_and_for_operators(
    talk: Talk, operation: Any
) -> None:
    talk.report(A)
    placed = talk.place()
    unknown = operation("6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11")
    assert talk.ask(FE_TOO, operation(placed.session)) == talk.ask(FE_TOO, unknown)
    talk.restart()
    assert talk.ask(FE_TOO, operation(placed.session))[0] == 404
    assert talk.ask(FE, operation(placed.session))[0] // 100 == 2
    assert talk.ask(OPERATOR, operation(placed.session))[0] // 100 == 2


@pytest.mark.requirement("SE-2")
def test_a_lookup_names_the_trusted_producers_of_the_scope(talk: Talk) -> None:
    talk.report(A)
    rules = attrs.evolve(POLICY.scope(SCOPE), producers=[B, A])
    roles = {FE: [RoleName.FRONT_END], H: [RoleName.HOLDER], FE_TOO: [RoleName.FRONT_END]}
    roles |= {instance: [RoleName.INSTANCE] for instance in (A, B, C)}
    talk.controller.policy = Policy(roles, {SCOPE: rules})
    talk.index_answers = False
    talk.send(FE, PlaceRequest(), placement())
    (lookup,) = [call for call in talk.calls.values() if call.base_uri == IS]
    assert isinstance(lookup.body, bytes)
    assert decode(LookupRequest, lookup.body).holders == (A, B)


def test_descriptors_that_were_learnt_are_kept_up_to_a_limit(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsp_core.roles.controller_placement.MAX_DESCRIPTORS", 2)
    talk.report(A)
    talk.index_answers = False
    models = [attrs.evolve(DESCRIPTOR, model=f"model-{number}") for number in range(3)]
    for model in models:
        talk.send(FE, PlaceRequest(), placement((), compat_id=model.compat_id))
        (call,) = [call for call in talk.calls.values() if call.base_uri == IS]
        del talk.calls[call.call_id]
        head = Response(status=200, content_type=JSON_MEDIA_TYPE)
        talk.give(AnswerReceived(call.call_id, head, model.canonical_json))
    known = talk.controller._placements._descriptors
    assert list(known) == [COMPAT, models[1].compat_id, models[2].compat_id]


@pytest.mark.requirement("CP-6")
@pytest.mark.parametrize("restarted", [False, True])
def test_instances_of_equal_numerics_are_a_class(talk: Talk, restarted: bool) -> None:
    for instance, numerics in ((A, "numpy 2, one thread"), (B, "numpy 1"), (C, "numpy 2, one thread")):
        talk.report(instance, numerics=numerics, queued=0 if instance == A else 5, ttl_ms=5_000)
    placed = talk.place(deterministic=True)
    assert placed.instance == A
    talk.write(placed, 5, sampler=attrs.evolve(SAMPLER, deterministic=True, step=1))
    if restarted:
        talk.restart()  # what A said of itself is known no more
    for instance, numerics in ((B, "numpy 1"), (C, "numpy 2, one thread")):
        talk.report(instance, numerics=numerics, queued=5 if instance == C else 0)
    talk.report(A, epoch=2, numerics="numpy 1")
    assert talk.info(placed).instance == C


@pytest.mark.requirement("CP-6")
def test_a_deterministic_request_that_nobody_can_ever_serve_is_refused_at_once(talk: Talk) -> None:
    talk.report(A)
    problem = problem_of(*talk.ask(FE, PlaceRequest(), placement(deterministic=True)))
    assert problem.status == 409
    assert "no instance says whose results it repeats" in problem.detail
    assert talk.place().instance == A
    talk.report(B, numerics="numpy 2")
    assert talk.place(deterministic=True).instance == B


@pytest.mark.requirement("CP-6")
def test_a_deterministic_request_waits_where_an_instance_that_can_serve_it_may_come() -> None:
    configured = Talk(placement={"classes": {C: "gpu-x"}})
    configured.report(A)
    for talk in (configured, Talk()):  # in the other one nobody is there yet
        number = talk.send(FE, PlaceRequest(), placement(deterministic=True))
        assert number not in talk.answers
        talk.report(C, numerics="numpy 2")
        assert talk.answers[number][0].status == 201


@pytest.mark.requirement("CP-6")
def test_a_deterministic_request_waits_for_an_instance_that_drains_or_sleeps(talk: Talk) -> None:
    talk.report(A, numerics="numpy 2", state="draining")
    talk.report(B)
    number = talk.send(FE, PlaceRequest(), placement(deterministic=True))
    assert number not in talk.answers
    talk.report(A, epoch=2, numerics="numpy 2")
    assert talk.answers[number][0].status == 201
    talk.report(A, epoch=2, numerics="numpy 2", state="draining", compat_ids=("ab" * 32,))
    assert problem_of(*talk.ask(FE, PlaceRequest(), placement(deterministic=True))).status == 409


def test_a_request_goes_to_an_instance_that_it_avoids_only_where_no_other_is_left(talk: Talk) -> None:
    talk.report(A)
    assert talk.place(avoid=(A,)).instance == A
    talk.report(B, queued=5)
    assert talk.place(avoid=(A,)).instance == B
