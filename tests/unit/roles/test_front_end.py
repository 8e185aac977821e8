"""The front end, told as conversations: what it asks, what it is answered, what its client gets."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from kvsp_core.answers import empty_response, json_response, lines_response, problem_response
from kvsp_core.block_keys import block_keys
from kvsp_core.bodies import decode, encode
from kvsp_core.errors import LocalProtocolError
from kvsp_core.ext_messages import (
    CandidateCost,
    OutputEnd,
    OutputRequest,
    OutputToken,
    PlacementAnswer,
    PlacementRequest,
    SessionInfo,
    SessionMove,
)
from kvsp_core.heads import Request, Response
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.limits import MAX_AVOIDED_INSTANCES
from kvsp_core.problems import (
    BAD_REQUEST,
    CONFLICT,
    FORBIDDEN,
    INVALID_STATE,
    NOT_FOUND,
    PRECONDITION_REQUIRED,
    STALE_EPOCH,
    UNAVAILABLE,
    UNKNOWN_RESOURCE,
    Problem,
    ProblemType,
)
from kvsp_core.records import Sampler
from kvsp_core.roles.authorization import Policy
from kvsp_core.roles.controller import ControllerSettings
from kvsp_core.roles.controller_placement import PlacementSettings
from kvsp_core.roles.front_end import (
    Abandon,
    FrontEnd,
    FrontEndInput,
    Generate,
    GenerationEnded,
    GenerationFailed,
    GenerationPlaced,
    TokenReady,
)
from kvsp_core.roles.role import (
    AnswerForm,
    AnswerReceived,
    Call,
    CallFailed,
    CancelCall,
    LineReceived,
    Observe,
    RequestReceived,
    Respond,
    StreamEnded,
    StreamStarted,
    TimerFired,
)

PC = "https://pc.example/kvsp/"
ONE, TWO = "https://ii1.example/kvsp/", "https://ii2.example/kvsp/"
SESSION = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
SCOPE, SHARED = Scope(bytes(range(32))), Scope(bytes(range(1, 33)))
DESCRIPTOR = CompatibilityDescriptor(
    model="m",
    model_digest="sha-256:" + "00" * 32,
    tokenizer_digest="sha-256:" + "11" * 32,
    layers=2,
    kv_heads=1,
    head_dim=4,
    kv_dtype="fp32",
    positional="rope",
    block_tokens=4,
)
PROMPT = tuple(range(10))
GREEDY = Sampler(method="greedy", params={"max_tokens": 4}, seed=0, step=0, deterministic=True)


class Client:
    """A front end, its time, and what it has under way; every step returns what its client gets."""

    def __init__(self, **options: Any) -> None:
        self.now_ms = 1000
        self.front_end = FrontEnd(
            base_uri="https://fe.example/kvsp/",
            policy=Policy({}),
            controller=PC,
            descriptor=DESCRIPTOR,
            scopes=[SCOPE, SHARED],
            **options,
        )
        assert self.front_end.start(self.now_ms) == ()
        self.calls: list[Call] = []
        self.cancelled: list[int] = []
        self.observed: list[str] = []

    def put(self, item: FrontEndInput) -> list[object]:
        got: list[object] = []
        for effect in self.front_end.handle(item, self.now_ms):
            match effect:
                case Call():
                    self.calls.append(effect)
                case CancelCall(number):
                    self.cancelled.append(number)
                case Observe(name):
                    self.observed.append(name)
                case _:
                    got.append(effect)
        return got

    def generate(self, number: int = 1, **changes: Any) -> list[object]:
        asked = Generate(generation=number, scope_id=SCOPE.scope_id, prompt=PROMPT, sampler=GREEDY)
        return self.put(attrs.evolve(asked, **changes))

    @property
    def call(self) -> Call:
        return self.calls[-1]

    def says(self) -> str:
        return f"{self.call.request.method} {self.call.base_uri}{self.call.request.path}"

    def output_request(self) -> OutputRequest:
        assert self.says().endswith("/output")
        assert isinstance(self.call.body, bytes)
        return decode(OutputRequest, self.call.body)

    def answer(self, message: object, status: int = 200) -> list[object]:
        return self.put(AnswerReceived(self.call.call_id, *json_response(message, status)))

    def refuse(self, kind: ProblemType, retry_after_s: int | None = None) -> list[object]:
        return self.put(
            AnswerReceived(self.call.call_id, *problem_response(Problem(kind), retry_after_s=retry_after_s))
        )

    def fail(self) -> list[object]:
        return self.put(CallFailed(self.call.call_id, "timed out"))

    def wait(self) -> list[object]:
        deadline_ms = self.front_end.next_deadline_ms()
        assert deadline_ms is not None
        assert deadline_ms > self.now_ms
        self.now_ms = deadline_ms
        return self.put(TimerFired())

    def line(self, message: object) -> list[object]:
        return self.put(LineReceived(self.call.call_id, encode(message)))

    def tokens(self, *tokens: int, first: int = 0, epoch: int = 1) -> list[object]:
        got = []
        for index, token in enumerate(tokens, first):
            got += self.line(OutputToken(index=index, epoch=epoch, token=token))
        return got

    def end(self, index: int, epoch: int = 1, reason: str = "stop") -> list[object]:
        return self.line(OutputEnd(end=reason, index=index, epoch=epoch))

    def started(self) -> list[object]:
        return self.put(StreamStarted(self.call.call_id, lines_response()))


def placed(instance: str = ONE, session: str = SESSION) -> PlacementAnswer:
    cost = CandidateCost(
        instance=ONE,
        wait_us=0,
        fetch_us=5,
        resident_tokens=4,
        fetched_tokens=4,
        recomputed_tokens=2,
        explanation="x",
    )
    return PlacementAnswer(session=session, epoch=1, instance=instance, request_ref="r7", candidates=(cost,))


def info(
    state: str = "running", epoch: int = 2, instance: str | None = TWO, detail: str | None = None
) -> SessionInfo:
    return SessionInfo(
        session=SESSION, state=state, epoch=epoch, instance=instance, output_offset=0, detail=detail
    )


def streaming(**options: Any) -> Client:
    client = Client(**options)
    assert client.generate() == []
    assert client.answer(placed(), 201) == []
    assert client.started() == [GenerationPlaced(1, 8)]
    return client


# The undisturbed run


@pytest.mark.requirement("OP-4")
def test_a_placement_is_waited_for_as_long_as_a_controller_waits_for_an_instance() -> None:
    client = Client()
    client.generate()
    waits_ms = ControllerSettings(placement=PlacementSettings(index_uris=())).placement_wait_ms
    assert client.call.timeout_ms > waits_ms
    client.answer(placed(), 201)
    client.started()
    client.put(StreamEnded(client.call.call_id))
    assert client.says().startswith("GET")
    assert client.call.timeout_ms < waits_ms  # it tells at once, or not at all


def test_a_prompt_is_placed_by_its_keys_and_streamed_from_its_instance() -> None:
    client = Client()
    assert client.generate(shared=((SHARED.scope_id, 9),)) == []
    assert client.says() == f"POST {PC}ext/placements"
    assert isinstance(client.call.body, bytes)
    request = decode(PlacementRequest, client.call.body)
    keys = tuple(key.hex() for key in block_keys(SCOPE, DESCRIPTOR, PROMPT)[0])
    public = tuple(key.hex() for key in block_keys(SHARED, DESCRIPTOR, PROMPT[:9])[0])
    assert [(p.scope_id, p.block_keys) for p in request.prefixes] == [
        (SCOPE.scope_id, keys),
        (SHARED.scope_id, public),
    ]
    assert (request.token_count, request.deterministic) == (10, True)

    assert client.answer(placed(), 201) == []
    assert client.says() == f"POST {ONE}ext/sessions/{SESSION}/output"
    assert client.call.form is AnswerForm.LINES
    asked = client.output_request()
    assert (asked.from_index, asked.epoch, asked.request_ref) == (0, 1, "r7")
    assert (asked.prompt, asked.sampler, asked.scope_id) == (PROMPT, GREEDY, SCOPE.scope_id)

    assert client.started() == [GenerationPlaced(1, 8)]
    assert client.tokens(7, 8) == [TokenReady(1, 0, 7), TokenReady(1, 1, 8)]
    assert client.end(2) == [GenerationEnded(1, "stop")]
    assert client.says() == f"DELETE {PC}ext/sessions/{SESSION}"
    assert client.put(AnswerReceived(client.call.call_id, *empty_response())) == []
    assert client.front_end.next_deadline_ms() is None
    assert client.generate() == []  # the number is free again


@pytest.mark.requirement("SE-5")
def test_no_prompt_token_or_scope_shows() -> None:
    asked = Generate(generation=1, scope_id=SCOPE.scope_id, prompt=(271828,), sampler=GREEDY)
    assert "271828" not in repr(asked)
    assert SCOPE.scope_id not in repr(asked)
    assert "8" not in repr(TokenReady(1, 0, 8))


@pytest.mark.requirement("HT-8")
def test_a_front_end_serves_no_resource() -> None:
    request = Request(method="GET", path="ext/sessions")
    (effect,) = Client().put(RequestReceived(1, PC, request))
    assert isinstance(effect, Respond)
    assert effect.response.status == 404


# Failover


@pytest.mark.requirement("CP-4", "MG-4", "MG-1")
@pytest.mark.parametrize("cut", [StreamEnded, lambda call: CallFailed(call, "cut off")])
def test_a_cut_stream_is_taken_up_again_where_the_session_is_now(cut: Any) -> None:
    client = streaming()
    client.tokens(7, 8)
    assert client.put(cut(client.call.call_id)) == []
    assert client.says() == f"GET {PC}ext/sessions/{SESSION}"
    assert client.answer(info("resuming")) == []
    assert client.says() == f"POST {TWO}ext/sessions/{SESSION}/output"
    again = client.output_request()
    assert (again.from_index, again.epoch, again.prompt, again.sampler) == (2, 2, None, None)
    assert client.started() == []
    # What the new instance repeats is not given out again; what follows is.
    assert client.tokens(8, 9, first=1, epoch=2) == [TokenReady(1, 2, 9)]
    assert client.end(3, epoch=2) == [GenerationEnded(1, "stop")]
    assert client.observed == ["kvsp_front_end_reattached"]


@pytest.mark.requirement("MG-3", "CP-4")
def test_what_still_comes_of_an_old_stream_is_nobodys() -> None:
    client = streaming()
    old = client.call.call_id
    client.put(StreamEnded(old))
    client.answer(info())
    assert client.put(LineReceived(old, encode(OutputToken(index=0, epoch=1, token=7)))) == []
    assert client.put(CallFailed(old, "late")) == []
    assert client.tokens(5, epoch=2) == [TokenReady(1, 0, 5)]
    assert client.tokens(6, first=1, epoch=1) == []


@pytest.mark.requirement("MG-4")
def test_a_token_that_contradicts_what_was_given_out_ends_it_with_an_error() -> None:
    client = streaming()
    client.tokens(7)
    (failed,) = client.tokens(8)
    assert isinstance(failed, GenerationFailed)
    assert failed.status == 502
    assert "two values" in failed.detail
    assert client.says() == f"DELETE {PC}ext/sessions/{SESSION}"


def test_an_unreadable_line_ends_the_stream_like_a_cut() -> None:
    for line in (b"{}", b"["):
        client = streaming()
        stream = client.call.call_id
        assert client.put(LineReceived(stream, line)) == []
        assert client.cancelled == [stream]
        assert client.says() == f"GET {PC}ext/sessions/{SESSION}"


def test_while_nobody_has_the_session_it_asks_again_ever_more_seldom() -> None:
    client = streaming()
    client.put(StreamEnded(client.call.call_id))
    gaps = []
    for _ in range(8):
        assert client.answer(info("resuming", instance=None)) == []
        before_ms = client.now_ms
        assert client.wait() == []
        gaps.append(client.now_ms - before_ms)
        assert client.says() == f"GET {PC}ext/sessions/{SESSION}"
    assert gaps == sorted(gaps)
    assert gaps[-1] <= 2 * 2000
    client.answer(info())
    assert client.output_request().from_index == 0


def test_a_controller_that_is_away_is_asked_until_it_is_back() -> None:
    client = streaming()
    client.tokens(7)
    client.put(StreamEnded(client.call.call_id))
    assert client.fail() == []
    assert client.wait() == []
    assert client.refuse(UNAVAILABLE, retry_after_s=3) == []
    before_ms = client.now_ms
    assert client.wait() == []
    assert client.now_ms - before_ms >= 3000
    client.answer(info())
    assert client.says() == f"POST {TWO}ext/sessions/{SESSION}/output"


def test_an_instance_that_takes_every_stream_and_cuts_it_is_not_asked_in_a_hot_loop() -> None:
    client = streaming()
    for _ in range(6):
        client.put(StreamEnded(client.call.call_id))
        if client.front_end.next_deadline_ms() is not None:
            client.wait()
        client.answer(info())
        client.started()
    assert client.now_ms > 1000 + 1600


def fails(client: Client, detail: str | None = None, epoch: int = 1) -> list[object]:
    """The engine fails on the request."""
    return client.line(OutputEnd(end="error", index=0, epoch=epoch, detail=detail))


def test_a_request_on_which_an_engine_fails_is_placed_elsewhere_a_few_times() -> None:
    client = streaming()
    for instance, avoided in ((TWO, (ONE,)), ("https://ii3.example/kvsp/", (ONE, TWO))):
        stream = client.call.call_id
        assert fails(client) == []
        assert stream in client.cancelled
        assert client.says() == f"DELETE {PC}ext/sessions/{SESSION}"
        client.wait()
        assert client.says() == f"POST {PC}ext/placements"
        assert isinstance(client.call.body, bytes)
        assert decode(PlacementRequest, client.call.body).avoid == avoided
        client.answer(placed(instance), 201)
        assert client.output_request().prompt == PROMPT
        client.started()
    (failed,) = fails(client, "the prompt is too long")
    assert failed == GenerationFailed(1, 502, "3 attempts failed: the prompt is too long")
    assert client.now_ms < 2_000


def test_what_an_engine_refuses_is_refused_and_goes_nowhere_else() -> None:
    client = streaming()
    (failed,) = client.line(OutputEnd(end="error", index=0, epoch=1, refused=True))
    assert isinstance(failed, GenerationFailed)
    assert failed.status == 400
    assert "too long" in failed.detail
    assert client.says() == f"DELETE {PC}ext/sessions/{SESSION}"


def test_what_an_engine_has_begun_and_another_refuses_goes_on_elsewhere() -> None:
    client = streaming()
    client.tokens(7)
    assert client.line(OutputEnd(end="error", index=1, epoch=1, refused=True)) == []
    assert moves(client) == 1


def moves(client: Client) -> int:
    """The controller is asked to have another instance go on; return in place of which epoch."""
    assert client.says() == f"POST {PC}ext/sessions/{SESSION}/move"
    assert isinstance(client.call.body, bytes)
    return decode(SessionMove, client.call.body).epoch


@pytest.mark.requirement("MG-1", "MG-4")
def test_an_answer_whose_engine_fails_between_two_tokens_goes_on_at_another_instance() -> None:
    client = streaming()
    client.tokens(7)
    assert fails(client) == []
    assert moves(client) == 1
    client.fail()
    client.wait()
    assert moves(client) == 1  # until the controller says that it is so
    assert client.answer(info(epoch=2, instance=None)) == []
    client.wait()
    assert moves(client) == 1
    assert client.answer(info(epoch=2, instance=TWO)) == []
    request = client.output_request()
    assert (request.from_index, request.epoch, request.prompt) == (1, 2, None)
    client.started()
    assert client.tokens(8, first=1, epoch=2) == [TokenReady(1, 1, 8)]
    client.put(StreamEnded(client.call.call_id))
    assert client.says() == f"GET {PC}ext/sessions/{SESSION}"  # a stream that breaks is no engine's failure


def test_a_controller_that_moves_no_sessions_is_asked_who_owns_them() -> None:
    """One of a version before that was there, while a deployment is brought up to date."""
    client = streaming()
    client.tokens(7)
    for _ in range(2):
        assert fails(client) == []
        if client.says() != f"POST {PC}ext/sessions/{SESSION}/move":
            client.wait()
        assert moves(client) == 1
        unknown = Problem(UNKNOWN_RESOURCE, "there is no such resource below this base URI")
        assert client.put(AnswerReceived(client.call.call_id, *problem_response(unknown))) == []
        assert client.says() == f"GET {PC}ext/sessions/{SESSION}"
        client.answer(info(epoch=1, instance=ONE))
        assert client.output_request().from_index == 1
        client.started()
    assert fails(client) == [GenerationFailed(1, 502, "3 attempts failed: the engine failed on it")]


def test_an_answer_on_which_engine_after_engine_fails_is_given_up_with_the_reason() -> None:
    client = streaming()
    client.tokens(7)
    for epoch in (1, 2):
        assert fails(client, epoch=epoch) == []
        client.wait() if epoch > 1 else None
        assert moves(client) == epoch
        assert client.answer(info(epoch=epoch + 1, instance=TWO)) == []
        client.started()
    assert fails(client, epoch=3) == [GenerationFailed(1, 502, "3 attempts failed: the engine failed on it")]
    assert client.says() == f"DELETE {PC}ext/sessions/{SESSION}"


def test_what_the_controller_says_of_a_request_reaches_the_client() -> None:
    client = Client()
    client.generate()
    (failed,) = client.put(
        AnswerReceived(client.call.call_id, *problem_response(Problem(CONFLICT, "no class of instances")))
    )
    assert failed == GenerationFailed(1, 502, "the controller refused: no class of instances")


def test_the_prompt_goes_with_a_session_that_may_not_have_begun() -> None:
    client = streaming()
    client.put(StreamEnded(client.call.call_id))
    client.answer(info("placed", epoch=2))
    assert client.output_request().prompt == PROMPT


@pytest.mark.parametrize("state", ["resuming", "running"])
def test_a_session_that_has_begun_is_not_begun_anew_where_it_is_resumed(state: str) -> None:
    # The instance may hear of the front end before it hears of the resume.
    client = streaming()
    client.put(StreamEnded(client.call.call_id))
    client.answer(info(state, epoch=2))
    again = client.output_request()
    assert (again.from_index, again.prompt, again.sampler) == (0, None, None)


@pytest.mark.requirement("MG-2")
def test_an_instance_that_has_lost_the_prompt_gets_it() -> None:
    client = streaming()
    client.tokens(7)
    client.put(StreamEnded(client.call.call_id))
    client.answer(info())
    assert client.output_request().prompt is None
    assert client.refuse(PRECONDITION_REQUIRED) == []
    again = client.output_request()
    assert (again.prompt, again.from_index) == (PROMPT, 1)
    client.started()
    assert client.tokens(8, first=1, epoch=2) == [TokenReady(1, 1, 8)]


@pytest.mark.parametrize("kind", [STALE_EPOCH, NOT_FOUND, UNAVAILABLE])
def test_an_instance_that_is_not_the_owner_any_more_makes_it_ask(kind: ProblemType) -> None:
    client = streaming()
    client.put(StreamEnded(client.call.call_id))
    client.answer(info())
    assert client.refuse(kind) == []
    if not client.says().startswith("GET"):
        client.wait()
    assert client.says() == f"GET {PC}ext/sessions/{SESSION}"


# Ends that are not the end


@pytest.mark.parametrize(
    ("state", "detail"),
    [
        ("failed", "no instance could resume"),
        ("finished", "ended by somebody else"),
        ("cancelled", "somebody"),
    ],
)
def test_a_session_that_is_over_fails_with_its_reason(state: str, detail: str) -> None:
    client = streaming()
    client.put(StreamEnded(client.call.call_id))
    (failed,) = client.answer(info(state, instance=None, detail="no instance could resume"))
    assert isinstance(failed, GenerationFailed)
    assert detail in failed.detail


def test_a_session_the_controller_does_not_know_fails() -> None:
    client = streaming()
    client.put(StreamEnded(client.call.call_id))
    (failed,) = client.refuse(NOT_FOUND)
    assert isinstance(failed, GenerationFailed)
    assert failed.status == 502


@pytest.mark.parametrize("kind", [BAD_REQUEST, FORBIDDEN])
def test_an_instance_that_refuses_the_request_itself_is_not_asked_again(kind: ProblemType) -> None:
    client = Client()
    client.generate()
    client.answer(placed(), 201)
    (failed,) = client.refuse(kind)
    assert isinstance(failed, GenerationFailed)


def test_without_a_token_for_too_long_it_gives_up() -> None:
    client = streaming(patience_ms=5000)
    client.put(StreamEnded(client.call.call_id))
    got: list[object] = []
    while not got:
        got = client.fail() or client.wait()
    assert got == [GenerationFailed(1, 504, "nobody goes on with the output")]
    assert 6000 <= client.now_ms < 11_000


def test_streams_that_begin_and_bring_no_token_do_not_keep_it_waiting_for_ever() -> None:
    client = streaming(patience_ms=5000)
    got: list[object] = []
    while not got:
        got = client.put(StreamEnded(client.call.call_id))
        if not got and client.front_end.next_deadline_ms() is not None:
            client.wait()
        if not got:
            client.answer(info())
            client.started()
    assert got == [GenerationFailed(1, 504, "nobody goes on with the output")]
    assert 6000 <= client.now_ms < 11_000


def test_a_stream_that_goes_on_without_anything_new_is_given_up() -> None:
    client = streaming(patience_ms=5000)
    client.tokens(7)
    for _ in range(4):
        client.now_ms += 1000
        assert client.tokens(7) == []
    client.now_ms += 1000
    assert client.tokens(7) == [GenerationFailed(1, 504, "nobody goes on with the output")]
    assert client.says() == f"DELETE {PC}ext/sessions/{SESSION}"


@pytest.mark.requirement("MG-3", "MG-4")
@pytest.mark.parametrize("last", ["token", "end", "error"])
def test_an_epoch_that_nobody_has_begun_is_not_believed(last: str) -> None:
    client = streaming()
    client.tokens(7)
    if last == "token":
        assert client.tokens(8, first=1, epoch=9) == []
    else:
        assert client.end(1, epoch=9, reason=last) == []
    assert client.says() == f"GET {PC}ext/sessions/{SESSION}"
    client.answer(info())
    client.started()
    assert client.tokens(8, first=1, epoch=2) == [TokenReady(1, 1, 8)]


@pytest.mark.requirement("MG-3")
@pytest.mark.parametrize("last", ["token", "stop", "error"])
def test_what_is_said_in_an_epoch_that_is_over_is_nothing(last: str) -> None:
    client = streaming()
    client.put(StreamEnded(client.call.call_id))
    client.answer(info())
    client.started()
    if last == "token":
        assert client.tokens(6) == []
    else:
        assert client.end(0, reason=last) == []
    assert client.tokens(7, epoch=2) == [TokenReady(1, 0, 7)]


# Placement


def test_a_placement_is_tried_for_a_while() -> None:
    client = Client(placement_ms=5000)
    client.generate()
    assert client.refuse(UNAVAILABLE) == []
    client.wait()
    assert client.says() == f"POST {PC}ext/placements"
    got: list[object] = []
    while not got:
        got = client.refuse(UNAVAILABLE) or client.wait()
    assert got == [GenerationFailed(1, 503, "no instance takes the request")]
    assert client.front_end.next_deadline_ms() is None


def test_a_controller_that_does_not_answer_is_said_to_be_what_is_wrong() -> None:
    client = Client(placement_ms=5000)
    client.generate()
    assert client.refuse(UNAVAILABLE) == []
    got: list[object] = []
    while not got:
        got = client.wait() or client.fail()
    assert got == [GenerationFailed(1, 503, "the controller does not answer")]


def test_a_placement_that_is_refused_for_good_fails_at_once() -> None:
    client = Client()
    client.generate()
    (failed,) = client.refuse(FORBIDDEN)
    assert isinstance(failed, GenerationFailed)


def test_an_instance_that_began_to_drain_is_left_for_another() -> None:
    client = Client()
    client.generate()
    client.answer(placed(), 201)
    assert client.refuse(INVALID_STATE) == []
    assert client.says() == f"DELETE {PC}ext/sessions/{SESSION}"
    assert client.put(AnswerReceived(client.call.call_id, *empty_response())) == []
    client.wait()
    assert client.says() == f"POST {PC}ext/placements"
    client.answer(placed(TWO, SESSION.replace("6", "7")), 201)
    assert client.started() == [GenerationPlaced(1, 0)]


def test_a_session_that_is_placed_anew_begins_with_its_own_epochs() -> None:
    client = streaming()
    client.put(StreamEnded(client.call.call_id))
    client.answer(info("placed"))
    client.started()
    assert client.tokens(9, first=1, epoch=2) == []
    client.put(StreamEnded(client.call.call_id))
    client.wait()
    client.answer(info(epoch=3))
    client.refuse(INVALID_STATE)
    client.wait()
    client.answer(placed(TWO, SESSION.replace("6", "7")), 201)
    assert client.output_request().prompt == PROMPT
    client.started()
    assert client.tokens(7, 8) == [TokenReady(1, 0, 7), TokenReady(1, 1, 8)]


def test_an_instance_without_room_is_left_for_another() -> None:
    client = Client(placement_ms=10**6)
    client.generate()
    names = [f"https://ii{number}.example/kvsp/" for number in range(MAX_AVOIDED_INSTANCES + 2)]
    for place, name in enumerate(names):
        client.answer(placed(name), 201)
        assert client.refuse(UNAVAILABLE) == []
        client.wait()
        assert client.says() == f"POST {PC}ext/placements"
        assert isinstance(client.call.body, bytes)
        asked = decode(PlacementRequest, client.call.body)
        assert asked.avoid == tuple(names[: place + 1][-MAX_AVOIDED_INSTANCES:])


def until(client: Client, end: str) -> None:
    """Let time pass until the last call is such a one."""
    while not client.says().endswith(end):
        assert client.wait() == []


def moved_without_room(client: Client, waited_ms: int) -> list[object]:
    """A request waits for its first token, its instance is lost, and the one that takes over has no room."""
    for _ in range(waited_ms // 10_000):
        client.now_ms += 10_000
        client.fail()
        until(client, SESSION)
        client.answer(info("placed", epoch=1, instance=ONE))
        client.started()
    client.fail()
    until(client, SESSION)
    client.answer(info("placed", instance=TWO))
    return client.refuse(UNAVAILABLE)


def test_a_request_that_has_waited_for_long_is_placed_anew_like_any_other() -> None:
    client = streaming(placement_ms=30_000)
    assert moved_without_room(client, 60_000) == []
    anew_ms = client.now_ms
    until(client, "ext/placements")
    while not (got := client.refuse(UNAVAILABLE)):
        client.wait()
    assert got == [GenerationFailed(1, 503, "no instance takes the request")]
    assert 30_000 <= client.now_ms - anew_ms < 60_000


def test_a_request_is_not_placed_anew_for_ever() -> None:
    client = streaming(placement_ms=30_000, patience_ms=120_000)
    got: list[object] = []
    while not got:
        got = moved_without_room(client, 30_000)
        if not got:
            until(client, "ext/placements")
            client.answer(placed(ONE), 201)
            client.started()
    assert got == [GenerationFailed(1, 503, "no instance takes the request")]
    assert client.now_ms < 200_000


def test_a_session_that_is_placed_anew_where_one_has_failed_is_another_one() -> None:
    client = streaming()
    assert fails(client) == []
    client.wait()
    client.answer(placed(ONE), 201)  # the only instance there is
    client.started()
    client.put(StreamEnded(client.call.call_id))
    until(client, SESSION)
    assert client.answer(info("placed", epoch=1, instance=ONE)) == []
    client.started()
    assert client.tokens(7) == [TokenReady(1, 0, 7)]


def test_answers_that_are_not_as_they_should_be_fail_it() -> None:
    client = Client()
    client.generate()
    head = Response(status=201, content_type="text/html")
    (failed,) = client.put(AnswerReceived(client.call.call_id, head, b"<p>"))
    assert isinstance(failed, GenerationFailed)
    assert "content-type" in failed.detail


# Ending


def test_what_is_abandoned_is_cancelled_and_closed() -> None:
    client = streaming()
    stream = client.call.call_id
    assert client.put(Abandon(1)) == []
    assert client.cancelled == [stream]
    assert client.says() == f"DELETE {PC}ext/sessions/{SESSION}"
    assert client.put(Abandon(1)) == []
    assert client.put(Abandon(99)) == []
    waiting = Client()
    waiting.generate()
    assert waiting.put(Abandon(1)) == []
    assert waiting.cancelled == [1]


def test_closing_is_tried_a_few_times_and_then_left_to_time() -> None:
    client = streaming()
    client.end(0)
    before = len(client.calls)
    client.refuse(UNAVAILABLE)
    client.wait()
    while client.fail() == [] and client.front_end.next_deadline_ms() is not None:
        client.wait()
    assert len(client.calls) - before == 4
    client = streaming()
    client.end(0)
    client.refuse(NOT_FOUND)
    assert client.front_end.next_deadline_ms() is None


# Misuse and limits


def test_misuse_changes_nothing() -> None:
    client = Client()
    client.generate()
    for changes, said in (
        ({}, "under way already"),
        ({"generation": 2, "prompt": ()}, "at least one token"),
        ({"generation": 2, "scope_id": "00" * 16}, "no key of that scope"),
        ({"generation": 2, "shared": (("00" * 16, 4),)}, "no key of that scope"),
    ):
        with pytest.raises(LocalProtocolError, match=said):
            client.generate(**{"generation": 1, **changes})
    assert len(client.calls) == 1


def test_too_many_generations_are_refused() -> None:
    client = Client(max_generations=1)
    client.generate()
    assert client.generate(2) == [GenerationFailed(2, 503, "too many generations are under way")]
    assert len(client.calls) == 1


def test_generations_that_fail_together_do_not_come_back_together() -> None:
    client = Client()
    deadlines = set()
    for number in range(8):
        client.generate(number)
        client.fail()
    for _ in range(8):
        deadlines.add(client.front_end.next_deadline_ms())
        client.wait()
        client.put(Abandon(len(deadlines) - 1))
    assert len(deadlines) == 8


def test_completions_of_what_is_unknown_are_no_ops() -> None:
    client = Client()
    assert client.put(TimerFired()) == []
    assert client.put(CallFailed(5, "x")) == []
    assert client.put(LineReceived(5, b"{}")) == []
    assert client.put(AnswerReceived(5, Response(status=200), json.dumps({}).encode())) == []
