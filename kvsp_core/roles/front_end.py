"""The front end: it turns a prompt into one sample of output tokens, whatever happens to the instances.

A program gives it `Generate`; it asks the controller where (decision W31), streams the tokens from there, and
gives each index out once, in order (CP-4, MG-4). When a stream ends without its end, or is silent for too
long, it asks the controller who owns the session and takes the output up again at the next index, so that its
client does not notice (decision W20); where the engine has failed, it asks it to move the session. It sends
the prompt with a session that has not begun, and again where an instance asks for it with 428. Once the end
is delivered it closes the session.

It serves no resource itself and keeps nothing durable: sessions of a front end that is gone run out.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final, TypeAlias, assert_never

import attrs

from kvsp_core.answers import read_answer, read_outcome
from kvsp_core.block_keys import block_keys
from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.ext_messages import (
    OutputEnd,
    OutputRequest,
    OutputToken,
    PlacementAnswer,
    PlacementRequest,
    ScopedPrefix,
    SessionInfo,
    SessionMove,
    decode_output_line,
)
from kvsp_core.heads import Response
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_core.limits import (
    CALL_TIMEOUT_MS,
    MAX_AVOIDED_INSTANCES,
    MAX_ENGINE_FAILURES,
    MAX_FRONT_END_RETRY_MS,
    MAX_GENERATIONS,
    MAX_PLACEMENT_MS,
    MAX_SESSION_IDLE_MS,
    OUTPUT_SILENCE_MS,
    PLACEMENT_CALL_MS,
)
from kvsp_core.machines import assembly as out
from kvsp_core.machines.alarms import Alarms
from kvsp_core.problems import INCOMPATIBLE, INVALID_STATE, UNKNOWN_RESOURCE, Problem
from kvsp_core.records import Sampler
from kvsp_core.resources import (
    DeleteSession,
    GetSession,
    MoveSession,
    Operation,
    PlaceRequest,
    RoleName,
    StreamOutput,
)
from kvsp_core.roles.authorization import Policy, authorize
from kvsp_core.roles.role import (
    AnswerForm,
    AnswerReceived,
    BodyArrived,
    BodyFailed,
    CallFailed,
    Effect,
    Input,
    LineReceived,
    RequestEnded,
    RequestReceived,
    StreamEnded,
    StreamStarted,
    TimerFired,
)
from kvsp_core.roles.serving import Desk
from kvsp_core.roles.work import Work

__all__ = [
    "Abandon",
    "FrontEnd",
    "FrontEndEffect",
    "FrontEndInput",
    "Generate",
    "GenerationEnded",
    "GenerationFailed",
    "GenerationPlaced",
    "TokenReady",
]


# Inputs and effects of its own ------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Generate:
    """Generate output for a prompt. The program numbers its generations.

    `shared` says, for each shared scope, how many leading tokens of the prompt are public in it (decision
    W24). `max_tokens` and `stop` are in `sampler.params`. Calls that are made for it carry `traceparent`.
    """

    generation: int
    scope_id: str = attrs.field(repr=False)
    prompt: tuple[int, ...] = attrs.field(repr=False)
    sampler: Sampler
    shared: tuple[tuple[str, int], ...] = attrs.field(default=(), repr=False)
    traceparent: str | None = None


@attrs.frozen
class Abandon:
    """Nobody wants this generation any more."""

    generation: int


FrontEndInput: TypeAlias = Input | Generate | Abandon


@attrs.frozen
class GenerationPlaced:
    """A generation has its instance; so many tokens of its prompt come from caches."""

    generation: int
    cached_tokens: int


@attrs.frozen
class TokenReady:
    """The next output token of a generation."""

    generation: int
    index: int
    token: int = attrs.field(repr=False)


@attrs.frozen
class GenerationEnded:
    """A generation has its last token: ``stop``, ``length``. Nothing follows."""

    generation: int
    reason: str


@attrs.frozen
class GenerationFailed:
    """A generation cannot go on: an HTTP status and a plain reason. Nothing follows."""

    generation: int
    status: int
    detail: str


FrontEndEffect: TypeAlias = Effect | GenerationPlaced | TokenReady | GenerationEnded | GenerationFailed


# States of a generation -------------------------------------------------------------------------------------


class _Stage(Enum):
    PLACING = "placing"
    STREAMING = "streaming"
    ASKING = "asking"
    """The controller is asked who owns the session."""
    CLOSING = "closing"
    """The client has its end; the controller is told so."""


_NO_INSTANCE: Final = "no instance takes the request"
_NO_ANSWER: Final = "the controller does not answer"
_REFUSED: Final = "the engine does not serve this: it is too long, or asks for what the engine does not do"


@attrs.define(repr=False)
class _Generation:
    asked: Generate
    began_ms: int
    since_ms: int
    """When it last got anywhere."""
    unplaced_since_ms: int | None
    """Since when no instance has taken it; None while one has."""
    stage: _Stage = _Stage.PLACING
    call: int | None = None
    failures: int = 0
    """Calls in a row that led nowhere."""
    engine_failures: int = 0
    """Times in a row that an engine ended it with an error."""
    failed_epoch: int | None = None
    """In which the last of those was, after a token: another instance is to go on."""
    avoid: tuple[str, ...] = ()
    """Instances that have failed on it before there was a token, or had no room for it."""
    unplaced: str = _NO_INSTANCE
    """Why the last attempt to place it led nowhere."""
    cached_tokens: int | None = 0
    """What the placement found in caches; None once the program was told."""
    session: str = ""
    epoch: int = 0
    instance: str = ""
    request_ref: str | None = None
    prompt_wanted: bool = True
    output: out.OutputAssembly = attrs.field(factory=out.OutputAssembly)

    @property
    def number(self) -> int:
        """The number that the program gave it."""
        return self.asked.generation


_CLOSE_ATTEMPTS: Final = 5
_NOBODY: Final = -1  # what a call is for whose answer does not matter
_FIRST_RETRY_MS: Final = 100
_MAX_RETRY_AFTER_S: Final = 30  # a controller that says to come back later than that is not believed


# The role ---------------------------------------------------------------------------------------------------


class FrontEnd:
    """The front end at one base URI, for one model.

    `scopes` are those whose keys it holds, shared ones included. `controller` is the controller's base URI.
    Durations in milliseconds: `placement_call_ms` for the answer to a placement, longer than a controller
    takes for one (`ControllerSettings.placement_wait_ms`), `call_ms` for any other, `silence_ms` between two
    lines of a stream, `placement_ms` for all attempts to place a request, `patience_ms` without a token until
    it is given up.
    """

    def __init__(
        self,
        *,
        base_uri: str,
        policy: Policy,
        controller: str,
        descriptor: CompatibilityDescriptor,
        scopes: Iterable[Scope],
        max_generations: int = MAX_GENERATIONS,
        call_ms: int = CALL_TIMEOUT_MS,
        placement_call_ms: int = PLACEMENT_CALL_MS,
        silence_ms: int = OUTPUT_SILENCE_MS,
        placement_ms: int = MAX_PLACEMENT_MS,
        patience_ms: int = MAX_SESSION_IDLE_MS,
    ) -> None:
        self.base_uri = base_uri
        self.policy = policy
        self._controller = controller
        self._descriptor = descriptor
        self._scopes = {scope.scope_id: scope for scope in scopes}
        self._max_generations = max_generations
        self._call_ms = call_ms
        self._placement_call_ms = placement_call_ms
        self._silence_ms = silence_ms
        self._placement_ms = placement_ms
        self._patience_ms = patience_ms
        self._generations: dict[int, _Generation] = {}
        self._retries: Alarms[int] = Alarms()  # of the generations that wait to try again
        self._work = Work()
        self._own: list[FrontEndEffect] = []
        self._desk = Desk([RoleName.FRONT_END], self._allow)

    def start(self, now_ms: int) -> tuple[FrontEndEffect, ...]:
        """Begin: there is nothing to do."""
        return ()

    def next_deadline_ms(self) -> int | None:
        """Return when the front end next wants `TimerFired`, or None."""
        return self._retries.next_ms()

    def handle(self, item: FrontEndInput, now_ms: int) -> tuple[FrontEndEffect, ...]:
        """Take one input in; return what is to be done."""
        match item:
            case Generate():
                self._generate(item, now_ms)
            case Abandon(number):
                self._abandon(number)
            case StreamStarted(call_id):
                self._stream_started(call_id, now_ms)
            case LineReceived(call_id, line):
                self._line(call_id, line, now_ms)
            case AnswerReceived(call_id, response, body):
                self._answered(call_id, response, body, now_ms)
            case CallFailed(call_id) | StreamEnded(call_id):
                self._call_failed(call_id, now_ms)
            case TimerFired():
                self._tick(now_ms)
            case RequestReceived() | BodyArrived() | BodyFailed() | RequestEnded():
                _, effects = self._desk.take(item)
                return effects
            case _:
                pass  # a front end has no jobs and takes no blocks
        own, self._own = self._own, []
        return (*own, *self._work.take())

    def _allow(self, client: str, operation: Operation) -> Problem | None:
        return authorize(self.policy, client, operation)

    # Beginning

    def _generate(self, asked: Generate, now_ms: int) -> None:
        number = asked.generation
        if number in self._generations:
            raise LocalProtocolError(f"generation {number} is under way already; number each anew")
        unknown = {asked.scope_id, *(scope_id for scope_id, _ in asked.shared)} - self._scopes.keys()
        if unknown:
            raise LocalProtocolError("the front end has no key of that scope; give it to its constructor")
        if not asked.prompt:
            raise LocalProtocolError("a prompt has at least one token")
        if len(self._generations) >= self._max_generations:
            self._own.append(GenerationFailed(number, 503, "too many generations are under way"))
            return
        generation = self._generations[number] = _Generation(asked, now_ms, now_ms, now_ms)
        self._place(generation)

    def _place(self, generation: _Generation) -> None:
        asked = generation.asked
        parts = ((asked.scope_id, len(asked.prompt)), *asked.shared)
        request = PlacementRequest(
            compat_id=self._descriptor.compat_id,
            prefixes=tuple(self._prefix(asked.prompt[:count], scope_id) for scope_id, count in parts),
            token_count=len(asked.prompt),
            deterministic=asked.sampler.deterministic,
            avoid=generation.avoid,
        )
        generation.stage = _Stage.PLACING
        self._call(generation, self._controller, PlaceRequest(), request)

    def _prefix(self, tokens: tuple[int, ...], scope_id: str) -> ScopedPrefix:
        keys, _ = block_keys(self._scopes[scope_id], self._descriptor, tokens)
        return ScopedPrefix(scope_id=scope_id, block_keys=tuple(key.hex() for key in keys))

    def _placed(self, generation: _Generation, answer: PlacementAnswer, now_ms: int) -> None:
        generation.session, generation.epoch = answer.session, answer.epoch
        generation.instance, generation.request_ref = answer.instance, answer.request_ref
        generation.since_ms = now_ms
        chosen = [cost for cost in answer.candidates if cost.instance == answer.instance]
        generation.cached_tokens = sum(cost.resident_tokens + cost.fetched_tokens for cost in chosen)
        self._attach(generation)

    # Streaming

    def _attach(self, generation: _Generation) -> None:
        """Ask the owner for the output from the next index on."""
        asked, begins = generation.asked, generation.prompt_wanted
        request = OutputRequest(
            from_index=generation.output.next_index,
            epoch=generation.epoch,
            compat_id=self._descriptor.compat_id if begins else None,
            scope_id=asked.scope_id if begins else None,
            prompt=asked.prompt if begins else None,
            sampler=asked.sampler if begins else None,
            request_ref=generation.request_ref,
        )
        generation.stage = _Stage.STREAMING
        self._call(generation, generation.instance, StreamOutput(generation.session), request)

    def _stream_started(self, call_id: int, now_ms: int) -> None:
        generation = self._of(call_id)
        if generation is not None and generation.stage is _Stage.STREAMING:
            if generation.cached_tokens is not None:
                self._own.append(GenerationPlaced(generation.number, generation.cached_tokens))
                generation.cached_tokens = None
            if not generation.failures:  # streams that begin and bring no token lead nowhere
                generation.since_ms = now_ms
            generation.unplaced_since_ms = None
            generation.prompt_wanted = generation.output.next_index == 0

    def _line(self, call_id: int, line: bytes, now_ms: int) -> None:
        generation = self._of(call_id)
        if generation is None:
            return
        try:
            said = decode_output_line(line)
        except RemoteProtocolError:
            said = None
        if said is None or said.epoch > generation.epoch:
            # An instance serves the epoch that it was asked for; of a later one the controller tells.
            self._cut(generation, now_ms)
        elif said.epoch < generation.epoch:
            pass  # of an instance that was failed over from (MG-3)
        elif isinstance(said, OutputToken):
            self._take(generation, out.TokenArrived(said.index, said.epoch, said.token), now_ms)
        elif said.refused and not generation.output.next_index:
            self._fail(generation, 400, said.detail or _REFUSED)
        elif said.end == "error":
            self._engine_failed(generation, said, now_ms)
        else:
            self._take(generation, out.EndArrived(said.end, said.index, said.epoch), now_ms)
        if generation.stage is _Stage.STREAMING and now_ms - generation.since_ms >= self._patience_ms:
            self._fail(generation, 504, "nobody goes on with the output")

    def _engine_failed(self, generation: _Generation, said: OutputEnd, now_ms: int) -> None:
        """The engine cannot go on. Before the first token the request is placed elsewhere; after it the
        controller moves the session. Neither is tried for long: what fails everywhere is of the request."""
        generation.engine_failures += 1
        if generation.engine_failures >= MAX_ENGINE_FAILURES:
            detail = said.detail or "the engine failed on it"
            self._fail(generation, 502, f"{generation.engine_failures} attempts failed: {detail}")
        elif generation.output.next_index:
            generation.failed_epoch = generation.epoch
            self._cut(generation, now_ms)
        else:
            self._hang_up(generation)
            self._place_elsewhere(generation, now_ms)

    def _take(self, generation: _Generation, event: out.Event, now_ms: int) -> None:
        for effect in generation.output.handle(event, now_ms):
            match effect:
                case out.Deliver(index, token):
                    generation.since_ms, generation.failures = now_ms, 0
                    generation.engine_failures, generation.failed_epoch = 0, None
                    generation.prompt_wanted = False
                    self._own.append(TokenReady(generation.number, index, token))
                case out.Finished(reason):
                    self._own.append(GenerationEnded(generation.number, reason))
                    self._close(generation)
                case out.Contradicted(detail):
                    self._fail(generation, 502, detail)
                case out.AskAgain():
                    self._ask(generation, now_ms)
                case _:
                    assert_never(effect)

    # Taking up again

    def _ask(self, generation: _Generation, now_ms: int) -> None:
        """Ask the controller to move the session, or who owns it; later, where that led nowhere before."""
        self._hang_up(generation)
        generation.stage = _Stage.ASKING
        generation.failures += 1
        if generation.failures > 1:
            self._retry(generation, now_ms)
        else:
            self._ask_now(generation)

    def _ask_now(self, generation: _Generation) -> None:
        session = generation.session
        if generation.failed_epoch is None:
            self._call(generation, self._controller, GetSession(session))
        else:
            move = SessionMove(epoch=generation.failed_epoch)
            self._call(generation, self._controller, MoveSession(session), move)

    def _informed(self, generation: _Generation, info: SessionInfo, now_ms: int) -> None:
        if info.state == "failed":
            self._fail(generation, 502, info.detail or "the session has failed")
        elif info.state in ("finished", "cancelled"):
            self._fail(generation, 502, "the session was ended by somebody else")
        elif info.instance is None:
            self._retry(generation, now_ms)
        else:
            generation.failed_epoch = None
            if (info.instance, info.epoch) != (generation.instance, generation.epoch):
                generation.instance, generation.epoch = info.instance, info.epoch
                self._work.observe("kvsp_front_end_reattached")
            # Once a session has begun it goes on from its checkpoint: with the prompt an instance that has
            # not heard of that yet would begin it anew.
            generation.prompt_wanted = info.state == "placed"
            self._attach(generation)

    # Ends

    def _close(self, generation: _Generation) -> None:
        """Tell the controller that the session is over; the client has its end already."""
        self._hang_up(generation)
        generation.stage, generation.failures = _Stage.CLOSING, 0
        if generation.session:
            self._call(generation, self._controller, DeleteSession(generation.session))
        else:
            self._forget(generation)

    def _fail(self, generation: _Generation, status: int, detail: str) -> None:
        self._own.append(GenerationFailed(generation.number, status, detail))
        self._close(generation)

    def _abandon(self, number: int) -> None:
        generation = self._generations.get(number)
        if generation is not None and generation.stage is not _Stage.CLOSING:
            self._close(generation)

    def _forget(self, generation: _Generation) -> None:
        del self._generations[generation.number]
        self._retries.set(generation.number, None)

    # Calls and what becomes of them

    def _call(
        self, generation: _Generation, base_uri: str, operation: Operation, body: object = None
    ) -> None:
        self._retries.set(generation.number, None)
        streams = isinstance(operation, StreamOutput)
        timeout_ms = self._placement_call_ms if isinstance(operation, PlaceRequest) else self._call_ms
        generation.call = self._work.call(
            base_uri,
            operation,
            body,
            purpose=generation.number,
            timeout_ms=self._silence_ms if streams else timeout_ms,
            form=AnswerForm.LINES if streams else AnswerForm.DOCUMENT,
            cause=generation.asked.traceparent,
        )

    def _hang_up(self, generation: _Generation) -> None:
        """Give up the call that is under way for a generation, where one is."""
        if generation.call is not None:
            self._work.cancel(generation.call)
            generation.call = None

    def _of(self, call_id: int) -> _Generation | None:
        """Return the generation that a call is for; None where it has been given up."""
        generation = self._generations.get(self._work.calls.get(call_id, _NOBODY))
        return generation if generation is not None and generation.call == call_id else None

    def _ended(self, call_id: int) -> _Generation | None:
        """Return the generation whose call has ended; None where it has been given up."""
        generation = self._of(call_id)
        self._work.calls.pop(call_id, None)
        if generation is not None:
            generation.call = None
        return generation

    def _answered(self, call_id: int, response: Response, body: bytes, now_ms: int) -> None:
        generation = self._ended(call_id)
        if generation is None:
            return
        try:
            match generation.stage:
                case _Stage.PLACING:
                    placed = read_answer(PlacementAnswer, response, body)
                    if isinstance(placed, Problem):
                        self._refused(generation, placed, now_ms, response.retry_after_s)
                    else:
                        self._placed(generation, placed, now_ms)
                case _Stage.ASKING:
                    info = read_answer(SessionInfo, response, body)
                    if isinstance(info, Problem):
                        self._refused(generation, info, now_ms, response.retry_after_s)
                    else:
                        self._informed(generation, info, now_ms)
                case _Stage.STREAMING:
                    problem = read_outcome(response, body)
                    self._not_streamed(generation, problem, now_ms)
                case _Stage.CLOSING:
                    if response.status // 100 == 5:
                        self._led_nowhere(generation, now_ms)
                    else:
                        self._forget(generation)
        except RemoteProtocolError as error:
            self._fail(generation, 502, f"an answer is not as the protocol says: {error}")

    def _refused(
        self,
        generation: _Generation,
        problem: Problem,
        now_ms: int,
        retry_after_s: int | None,
    ) -> None:
        """The controller has refused to place or to tell: try again where that may help."""
        if problem.type == UNKNOWN_RESOURCE and generation.failed_epoch is not None:
            # A controller of before 0.2 moves the sessions of instances that fail, and no others.
            generation.failed_epoch = None
            self._ask_now(generation)
            return
        if problem.status // 100 != 5:
            self._fail(generation, 502, f"the controller refused: {problem.detail or problem.type.title}")
            return
        generation.unplaced = _NO_INSTANCE
        self._led_nowhere(generation, now_ms)
        again_ms = self._retries.of(generation.number)
        if retry_after_s is not None and again_ms is not None:
            wished_ms = now_ms + 1000 * min(retry_after_s, _MAX_RETRY_AFTER_S)
            self._retries.set(generation.number, max(again_ms, wished_ms))

    def _not_streamed(self, generation: _Generation, problem: Problem | None, now_ms: int) -> None:
        """The instance does not stream: it wants the prompt, has no room for it, or is not the owner."""
        status = problem.status if problem is not None else 200
        has_begun = generation.output.next_index > 0
        if status == 428 and not generation.prompt_wanted:
            generation.prompt_wanted = True
            self._attach(generation)
        elif problem is not None and problem.type in (INVALID_STATE, INCOMPATIBLE) and not has_begun:
            self._place_again(generation, now_ms)
        elif status == 503 and generation.prompt_wanted and not has_begun:
            self._place_elsewhere(generation, now_ms)
        elif status in (400, 403, 413, 415):
            self._fail(generation, 502, "the instance refused the request")
        else:
            self._cut(generation, now_ms)

    def _place_elsewhere(self, generation: _Generation, now_ms: int) -> None:
        """Nothing has begun yet, and the instance cannot begin it: another may."""
        avoid = dict.fromkeys((*generation.avoid, generation.instance))
        generation.avoid = tuple(avoid)[-MAX_AVOIDED_INSTANCES:]
        self._place_again(generation, now_ms)

    def _place_again(self, generation: _Generation, now_ms: int) -> None:
        """Nothing has begun yet: end the session, without waiting for it, and place the request anew."""
        self._work.call(
            self._controller,
            DeleteSession(generation.session),
            purpose=_NOBODY,
            timeout_ms=self._call_ms,
            cause=generation.asked.traceparent,
        )
        generation.session, generation.stage = "", _Stage.PLACING
        # The epochs of the next session begin anew.
        generation.output, generation.prompt_wanted = out.OutputAssembly(), True
        if generation.unplaced_since_ms is None:
            generation.unplaced_since_ms = now_ms
        generation.unplaced = _NO_INSTANCE
        self._led_nowhere(generation, now_ms)

    def _call_failed(self, call_id: int, now_ms: int) -> None:
        generation = self._ended(call_id)
        if generation is None:
            return
        if generation.stage is _Stage.STREAMING:
            self._cut(generation, now_ms)
        else:
            generation.unplaced = _NO_ANSWER
            self._led_nowhere(generation, now_ms)

    def _cut(self, generation: _Generation, now_ms: int) -> None:
        """A stream is over without its end, or did not begin: the assembly says from where to go on."""
        self._take(generation, out.StreamCut(), now_ms)

    # Trying again

    def _led_nowhere(self, generation: _Generation, now_ms: int) -> None:
        generation.failures += 1
        self._retry(generation, now_ms)

    def _retry(self, generation: _Generation, now_ms: int) -> None:
        """Do the stage's call again after a while that doubles, spread over the generations; or give up."""
        if generation.stage is _Stage.CLOSING:
            if generation.failures >= _CLOSE_ATTEMPTS:
                self._forget(generation)  # the session runs out by itself
                return
        elif generation.stage is _Stage.PLACING:
            assert generation.unplaced_since_ms is not None
            unplaced_for_ms = now_ms - generation.unplaced_since_ms
            if unplaced_for_ms >= self._placement_ms or now_ms - generation.began_ms >= self._patience_ms:
                self._fail(generation, 503, generation.unplaced)
                return
        elif now_ms - generation.since_ms >= self._patience_ms:
            self._fail(generation, 504, "nobody goes on with the output")
            return
        delay_ms = min(_FIRST_RETRY_MS << min(generation.failures, 10), MAX_FRONT_END_RETRY_MS)
        generation.call = None
        spread_ms = delay_ms * (generation.number % 16) // 16
        self._retries.set(generation.number, now_ms + delay_ms + spread_ms)

    def _tick(self, now_ms: int) -> None:
        for number in self._retries.take_due(now_ms):
            generation = self._generations[number]
            match generation.stage:
                case _Stage.PLACING:
                    self._place(generation)
                case _Stage.ASKING:
                    self._ask_now(generation)
                case _Stage.CLOSING:
                    self._call(generation, self._controller, DeleteSession(generation.session))
                case _Stage.STREAMING:
                    raise AssertionError("a stream is not waited for: it is there or asked about")
