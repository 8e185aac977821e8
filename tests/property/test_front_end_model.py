"""The front end against a hostile world: whatever controller and instances do, its client sees one sample.

The sample of a session is fixed: token i is SAMPLE[i]. Honest instances send stretches of it, in any epoch,
again and again; calls fail, streams are cut, answers are refusals. The client of each generation must see a
prefix of the sample, each index once and in order, then at most one end, and nothing after it.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import invariant, rule

from kvsp_core.answers import empty_response, json_response, lines_response, problem_response
from kvsp_core.bodies import decode, encode
from kvsp_core.ext_messages import OutputEnd, OutputRequest, OutputToken, PlacementAnswer, SessionInfo
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.problems import (
    BAD_REQUEST,
    FORBIDDEN,
    INVALID_STATE,
    NOT_FOUND,
    PRECONDITION_REQUIRED,
    STALE_EPOCH,
    UNAVAILABLE,
    Problem,
)
from kvsp_core.records import Sampler
from kvsp_core.resources import (
    DeleteSession,
    GetSession,
    MoveSession,
    PlaceRequest,
    Refusal,
    RoleName,
    Router,
    StreamOutput,
)
from kvsp_core.roles.authorization import Policy
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
    AnswerReceived,
    Call,
    CallFailed,
    CancelCall,
    LineReceived,
    Observe,
    StreamEnded,
    StreamStarted,
    TimerFired,
)
from tests.property.models import EndingModel

PC = "https://pc.example/"
INSTANCES = ("https://ii1.example/", "https://ii2.example/")
SCOPE = Scope(bytes(32))
DESCRIPTOR = CompatibilityDescriptor(
    model="m",
    model_digest="sha-256:" + "00" * 32,
    tokenizer_digest="sha-256:" + "11" * 32,
    layers=1,
    kv_heads=1,
    head_dim=2,
    kv_dtype="fp32",
    positional="rope",
    block_tokens=4,
)
SAMPLE = (11, 12, 13, 14, 15)
SAMPLER = Sampler(method="greedy", seed=0, step=0, deterministic=True)
ROUTER = Router(RoleName)
PROBLEMS = (BAD_REQUEST, FORBIDDEN, INVALID_STATE, NOT_FOUND, PRECONDITION_REQUIRED, STALE_EPOCH, UNAVAILABLE)
picks = st.integers(0, 10**6)


class FrontEndModel(EndingModel):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.front_end = FrontEnd(
            base_uri="https://fe.example/",
            policy=Policy({}),
            controller=PC,
            descriptor=DESCRIPTOR,
            scopes=[SCOPE],
            max_generations=3,
            patience_ms=20_000,
        )
        self.front_end.start(0)
        self.calls: dict[int, tuple[Call, object]] = {}
        self.streams: set[int] = set()
        self.sessions: dict[str, int] = {}  # session -> its epoch
        self.told: dict[str, tuple[str | None, int]] = {}  # who serves it in which epoch, as last told
        self.given: dict[int, list[int]] = {}
        self.over: set[int] = set()
        self.abandoned: set[int] = set()

    def put(self, item: FrontEndInput) -> None:
        for effect in self.front_end.handle(item, self.now_ms):
            match effect:
                case Call(call_id=number):
                    operation = ROUTER.route(effect.request)
                    assert not isinstance(operation, Refusal)
                    self.calls[number] = (effect, operation)
                    if isinstance(operation, StreamOutput):
                        assert isinstance(effect.body, bytes)
                        epoch = decode(OutputRequest, effect.body).epoch
                        assert effect.base_uri in INSTANCES
                        assert (effect.base_uri, epoch) == self.told[operation.session]
                case CancelCall(number):
                    self.calls.pop(number, None)
                    self.streams.discard(number)
                case TokenReady(number, index, token):
                    assert number not in self.over | self.abandoned
                    assert index == len(self.given[number])
                    assert token == SAMPLE[index]
                    self.given[number].append(token)
                case GenerationEnded(number):
                    assert number not in self.over | self.abandoned
                    assert tuple(self.given[number]) == SAMPLE
                    self.over.add(number)
                case GenerationFailed(number):
                    assert number not in self.over | self.abandoned
                    self.over.add(number)
                case GenerationPlaced() | Observe():
                    pass
                case other:
                    raise AssertionError(other)

    def pick(self, choice: int, *kinds: type, streaming: bool = False) -> tuple[int, Any] | None:
        open_calls = [
            (number, operation)
            for number, (_, operation) in sorted(self.calls.items())
            if isinstance(operation, kinds) and (number in self.streams) == streaming
        ]
        return open_calls[choice % len(open_calls)] if open_calls else None

    def close(self, number: int) -> None:
        del self.calls[number]
        self.streams.discard(number)

    @rule()
    def generate(self) -> None:
        number = len(self.given) + 1
        self.given[number] = []
        self.put(
            Generate(generation=number, scope_id=SCOPE.scope_id, prompt=(1, 2, 3, 4, 5), sampler=SAMPLER)
        )

    @rule(choice=picks)
    def abandon(self, choice: int) -> None:
        number = choice % (len(self.given) + 2)
        if choice % 5 == 0:
            self.put(Abandon(number))
            if number in self.given.keys() - self.over:
                self.abandoned.add(number)

    @rule(choice=picks, instance=st.sampled_from(INSTANCES))
    def place(self, choice: int, instance: str) -> None:
        if found := self.pick(choice, PlaceRequest):
            self.close(found[0])
            session = f"6f1d0a9e-2c55-4d7e-9a0e-{len(self.sessions):012x}"
            self.sessions[session] = 1
            self.told[session] = (instance, 1)
            answer = PlacementAnswer(session=session, epoch=1, instance=instance, request_ref="r")
            self.put(AnswerReceived(found[0], *json_response(answer, 201)))

    @rule(choice=picks, instance=st.sampled_from(INSTANCES), moved=st.booleans())
    def help_along(self, choice: int, instance: str, moved: bool) -> None:
        """Whatever is asked for, give it, so that runs get somewhere."""
        self.place(choice, instance)
        self.inform(choice, "running", moved, instance)
        self.accept_stream(choice)
        self.acknowledge_end(choice)

    @rule(choice=picks)
    def accept_stream(self, choice: int) -> None:
        if found := self.pick(choice, StreamOutput):
            self.streams.add(found[0])
            self.put(StreamStarted(found[0], lines_response()))

    @rule(choice=picks, first=st.integers(0, 4), count=st.integers(1, 5), back=st.integers(0, 1))
    def send_tokens(self, choice: int, first: int, count: int, back: int) -> None:
        if found := self.pick(choice, StreamOutput, streaming=True):
            epoch = max(1, self.sessions[found[1].session] - back)
            for index in range(first, min(first + count, len(SAMPLE))):
                if found[0] in self.calls:
                    line = encode(OutputToken(index=index, epoch=epoch, token=SAMPLE[index]))
                    self.put(LineReceived(found[0], line))

    @rule(choice=picks)
    def send_end(self, choice: int) -> None:
        if found := self.pick(choice, StreamOutput, streaming=True):
            end = OutputEnd(end="stop", index=len(SAMPLE), epoch=self.sessions[found[1].session])
            self.put(LineReceived(found[0], encode(end)))

    @rule(choice=picks, index=st.integers(0, 4))
    def fail_engine(self, choice: int, index: int) -> None:
        if found := self.pick(choice, StreamOutput, streaming=True):
            end = OutputEnd(end="error", index=index, epoch=self.sessions[found[1].session])
            self.put(LineReceived(found[0], encode(end)))

    @rule(choice=picks, garbage=st.binary(max_size=6))
    def send_garbage(self, choice: int, garbage: bytes) -> None:
        if found := self.pick(choice, StreamOutput, streaming=True):
            self.put(LineReceived(found[0], garbage))

    @rule(choice=picks)
    def end_stream(self, choice: int) -> None:
        if found := self.pick(choice, StreamOutput, streaming=True):
            self.close(found[0])
            self.put(StreamEnded(found[0]))

    @rule(
        choice=picks,
        state=st.sampled_from(("placed", "running", "resuming", "resuming", "failed", "finished")),
        moved=st.booleans(),
        instance=st.none() | st.sampled_from(INSTANCES),
    )
    def inform(self, choice: int, state: str, moved: bool, instance: str | None) -> None:
        if found := self.pick(choice, GetSession, MoveSession):
            self.close(found[0])
            session = found[1].session
            self.sessions[session] += moved or isinstance(found[1], MoveSession)
            self.told[session] = (instance, self.sessions[session])
            info = SessionInfo(
                session=session,
                state=state,
                epoch=self.sessions[session],
                instance=instance,
                output_offset=0,
            )
            self.put(AnswerReceived(found[0], *json_response(info)))

    @rule(choice=picks, kind=st.sampled_from(PROBLEMS))
    def refuse(self, choice: int, kind: Any) -> None:
        if found := self.pick(choice, PlaceRequest, StreamOutput, GetSession, MoveSession, DeleteSession):
            self.close(found[0])
            self.put(AnswerReceived(found[0], *problem_response(Problem(kind))))

    @rule(choice=picks)
    def acknowledge_end(self, choice: int) -> None:
        if found := self.pick(choice, DeleteSession):
            self.close(found[0])
            self.put(AnswerReceived(found[0], *empty_response()))

    @rule(choice=picks)
    def fail(self, choice: int) -> None:
        found = self.pick(choice, PlaceRequest, StreamOutput, GetSession, MoveSession, DeleteSession)
        if found := found or self.pick(choice, StreamOutput, streaming=True):
            self.close(found[0])
            self.put(CallFailed(found[0], "timed out"))

    @rule(after_ms=st.sampled_from((0, 50, 500, 5000)))
    def wait(self, after_ms: int) -> None:
        self.now_ms += after_ms
        self.put(TimerFired())

    @invariant()
    def what_goes_on_has_a_call_or_a_deadline(self) -> None:
        going_on = set(self.given) - self.over - self.abandoned
        if going_on:
            assert self.calls or self.front_end.next_deadline_ms() is not None

    @invariant()
    def no_deadline_is_left_behind(self) -> None:
        deadline_ms = self.front_end.next_deadline_ms()
        assert deadline_ms is None or deadline_ms > self.now_ms - 5001

    def at_end(self) -> None:
        """Once everything heals, every generation ends and nothing is left."""
        for _ in range(200):
            if not self.calls and self.front_end.next_deadline_ms() is None:
                break
            for number, (_, operation) in sorted(self.calls.items()):
                if number in self.calls:
                    self._heal(number, operation)
            self.now_ms = max(self.now_ms, self.front_end.next_deadline_ms() or 0)
            self.put(TimerFired())
        assert not self.calls
        assert self.front_end.next_deadline_ms() is None
        assert set(self.given) <= self.over | self.abandoned

    def _heal(self, number: int, operation: Any) -> None:
        match operation:
            case PlaceRequest():
                self.place(
                    sorted(n for n, (_, o) in self.calls.items() if isinstance(o, PlaceRequest)).index(
                        number
                    ),
                    INSTANCES[0],
                )
            case GetSession(session) | MoveSession(session):
                self.close(number)
                self.sessions[session] += isinstance(operation, MoveSession)
                epoch = self.sessions[session]
                self.told[session] = (INSTANCES[1], epoch)
                info = SessionInfo(
                    session=session, state="running", epoch=epoch, instance=INSTANCES[1], output_offset=0
                )
                self.put(AnswerReceived(number, *json_response(info)))
            case DeleteSession():
                self.close(number)
                self.put(AnswerReceived(number, *empty_response()))
            case StreamOutput(session):
                if number not in self.streams:
                    self.streams.add(number)
                    self.put(StreamStarted(number, lines_response()))
                epoch = self.sessions[session]
                for index, token in enumerate(SAMPLE):
                    if number in self.calls:
                        self.put(
                            LineReceived(number, encode(OutputToken(index=index, epoch=epoch, token=token)))
                        )
                if number in self.calls:
                    end = OutputEnd(end="stop", index=len(SAMPLE), epoch=epoch)
                    self.put(LineReceived(number, encode(end)))


TestFrontEnd = pytest.mark.requirement("CP-4", "MG-4")(FrontEndModel.TestCase)
