"""The driver of a role: it hands in what happens and carries out what the role wants done, on any loop.

It holds no decision of the protocol. All its methods are called in the loop's thread, and none of them waits.

- **Durability is a barrier**: what follows a `Persist` is held back until that is durable, while
  further writes already join the next sync. If one fails, nothing more is done: the role has to be rebuilt
  from its store.
- **Bulk octets** go from the connection into pooled memory, through the container decoder, and from there to
  connections, tiers and the engine, without a copy in between.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvsp_core.errors import KVSPError
from kvsp_core.roles import engine as engines
from kvsp_core.roles.role import (
    BlockBody,
    Call,
    CancelCall,
    Drop,
    Effect,
    FreeBuffer,
    Input,
    JobDone,
    JobFailed,
    JobFault,
    Load,
    Observe,
    OutputReady,
    Persist,
    ReadBlock,
    ReceiveBlock,
    ReceiveBody,
    RequestEnded,
    RequestReceived,
    Respond,
    Role,
    Send,
    Store,
    TimerFired,
    Write,
)
from kvsp_services.buffers import BlockBuffer, BufferPool
from kvsp_services.calls import OutgoingCall
from kvsp_services.ports import EnginePort, Incoming, Loop, Peers
from kvsp_services.request_log import RequestLog, new_traceparent
from kvsp_services.requests import IncomingRequest
from kvsp_services.stores.blocks import BlockTier
from kvsp_services.tier_jobs import TierJobs, block_done

if TYPE_CHECKING:
    from kvsp_core.roles.engine import EngineCommand, EngineEvent
    from kvsp_engines.engine import LayerOctets

__all__ = ["Committer", "Driver"]


class Committer(Protocol):
    """What makes writes durable; see `stores.durable.GroupCommitter`."""

    def submit(self, writes: Sequence[Write], done: Callable[[Exception | None], None]) -> None:
        """Take a batch in, and later call `done`, in any thread."""
        ...


class Driver:
    """Drives one role. `start` begins; the pump then says what happens, until `stop`.

    `deliver` takes the effects that a role has of its own, as a front end has; such a role has no engine.
    `log` is told of requests and calls that have ended.
    `failed` is called once, with the error, when the role can no longer be driven: a write could not be made
    durable, or the role itself raised. Exchanges and calls have then been given up.
    """

    def __init__(
        self,
        role: Role,
        loop: Loop,
        peers: Peers,
        *,
        committer: Committer,
        tiers: Mapping[str, BlockTier] | None = None,
        engine: EnginePort | None = None,
        pool: BufferPool | None = None,
        observe: Callable[[Observe], None] = lambda observed: None,
        deliver: Callable[[object], None] | None = None,
        log: RequestLog | None = None,
        failed: Callable[[Exception], None],
    ) -> None:
        self.role = role
        self._loop = loop
        self._peers = peers
        self._committer = committer
        self._jobs = TierJobs(tiers or {}, loop, self.handle, log)
        self._engine = engine
        self._pool = pool or BufferPool()
        self._observe = observe
        self._deliver = deliver
        self._log = log
        self._failed = failed
        self.failed_for: str | None = None
        """What the request belongs to in whose course the role has failed."""
        self._requests: dict[int, IncomingRequest] = {}
        self._numbers: dict[int, int] = {}
        self._last_request = 0
        self._calls: dict[int, OutgoingCall] = {}
        self._last_over: Call | None = None
        self._deadlines: list[tuple[int, int]] = []
        self._timer_ms: int | None = None
        """The deadline that the loop was last told."""
        self._buffers: dict[int, BlockBuffer] = {}
        self._inputs: deque[Input] = deque()
        self._of_engine: deque[tuple[Input, BlockBuffer | None]] = deque()
        """What the engine did, in order, with the buffer that each is done with; its thread adds to it."""
        self._running = False
        self._held: deque[tuple[int, Effect]] = deque()
        self._submitted = 0
        self._durable = 0
        self.stopped = False

    # Inputs and effects

    def start(self) -> None:
        """Begin: the role's first effects."""
        self._guarded(self.role.start)
        self._set_timer()

    def let(self, step: Callable[[int], tuple[Effect, ...]]) -> None:
        """Let the role do something that is no input, such as beginning to stop; `step` gets the time."""
        if not self.stopped:
            self._guarded(step)
            self._set_timer()

    def handle(self, item: Input) -> None:
        """Hand one input to the role, after those that came before, and carry out what it wants.

        What the engine did goes first, one thing at a time: a token waits for one of the blocks that a read
        from a connection has brought, not for all of them.
        """
        if self.stopped:
            return
        self._inputs.append(item)
        self._take_inputs()

    def _take_inputs(self) -> None:
        if self._running:
            return  # an effect led to this input; the loop below takes it when its turn comes
        self._running = True
        try:
            if self._of_engine:
                item, buffer = self._of_engine.popleft()
                if buffer is not None:
                    buffer.free()
                self._inputs.appendleft(item)
            while self._inputs and not self.stopped:
                self._guarded(self.role.handle, self._inputs.popleft())
        finally:
            self._running = False
        self._set_timer()

    def _guarded(self, step: Callable[..., tuple[Effect, ...]], *item: Input) -> None:
        """Let the role take a step, with the time that it is, and carry out what it wants."""
        try:
            for effect in step(*item, self._loop.now_ms()):
                self._order(effect)
        except Exception as error:
            self.failed_for = self._traceparent_of(item[0]) if item else None
            self._fail(error)

    def _traceparent_of(self, item: Input) -> str | None:
        """Return what the request belongs to that an input is about, or the call, where it is known."""
        if request := self._requests.get(getattr(item, "request_id", 0)):
            return request.traceparent
        number = getattr(item, "call_id", 0)
        call = self._calls[number].call if number in self._calls else self._last_over
        return call.traceparent if call is not None and call.call_id == number else None

    def _order(self, effect: Effect) -> None:
        """Carry an effect out, or hold it back behind what is not durable yet."""
        if isinstance(effect, Persist):
            self._submitted += 1
            self._committer.submit(effect.writes, partial(self._told_durable, self._submitted))
        elif self._held or self._submitted > self._durable:
            self._held.append((self._submitted, effect))
        else:
            self._execute(effect)

    def _told_durable(self, number: int, error: Exception | None) -> None:
        self._loop.call_soon_threadsafe(partial(self._now_durable, number, error))

    def _now_durable(self, number: int, error: Exception | None) -> None:
        if self.stopped:
            return
        if error is not None:
            self._fail(error)
            return
        self._durable = number
        try:
            while self._held and self._held[0][0] <= self._durable:
                self._execute(self._held.popleft()[1])
        except Exception as raised:
            self._fail(raised)
        self._set_timer()

    def _fail(self, error: Exception) -> None:
        if not self.stopped:
            self.stop()
            self._failed(error)

    def stop(self) -> None:
        """Give up every exchange and call, and do nothing more."""
        self.stopped = True
        self._loop.call_at(None, self._timer)
        self._held.clear()
        self._inputs.clear()
        for call in list(self._calls.values()):
            call.cancel()
        for request in list(self._requests.values()):
            request.exchange.cancel()

    # Timers

    def _set_timer(self) -> None:
        if self.stopped:
            return
        deadline = self.role.next_deadline_ms()
        while self._deadlines and self._deadlines[0][1] not in self._calls:
            heapq.heappop(self._deadlines)
        if self._deadlines and (deadline is None or self._deadlines[0][0] < deadline):
            deadline = self._deadlines[0][0]
        if deadline != self._timer_ms:
            self._timer_ms = deadline
            self._loop.call_at(deadline, self._timer)

    def _timer(self) -> None:
        self._timer_ms = None
        now_ms = self._loop.now_ms()
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, number = heapq.heappop(self._deadlines)
            call = self._calls.get(number)
            if call is None:
                continue
            if call.deadline_ms > now_ms:  # it was heard of since
                heapq.heappush(self._deadlines, (call.deadline_ms, number))
            else:
                call.time_out()
        self.handle(TimerFired())

    # Requests that come in

    def request_received(self, exchange: Incoming, *, ended: bool) -> None:
        """Take in the head of a request; `ended` tells that it has no body."""
        if self.stopped:
            exchange.cancel()
            return
        self._last_request += 1
        number = self._last_request
        self._numbers[id(exchange)] = number
        traceparent = self._request_begins(number, exchange)
        self._requests[number] = IncomingRequest(
            number,
            exchange,
            self.handle,
            ended=ended,
            traceparent=traceparent,
            began_ms=self._loop.now_ms(),
        )
        self.handle(RequestReceived(number, exchange.client, exchange.request, traceparent))

    def _request_begins(self, number: int, exchange: Incoming) -> str:
        """Return what a request belongs to, as what is done for it is to say."""
        return exchange.traceparent or self.new_traceparent()

    def new_traceparent(self) -> str:
        """Return what a request belongs to that begins here."""
        return new_traceparent()

    def data_received(self, exchange: Incoming, data: memoryview) -> None:
        """Take in octets of a request's body; they are not looked at after this returns."""
        if request := self._request_of(exchange):
            request.data_received(data)

    def data_placed(self, exchange: Incoming, size_bytes: int) -> None:
        """Take note of octets of a request's body that were put where they belong."""
        if request := self._request_of(exchange):
            request.data_placed(size_bytes)

    def body_ended(self, exchange: Incoming) -> None:
        """Take note that a request's body is whole."""
        if request := self._request_of(exchange):
            request.body_ended()

    def output_ready(self, exchange: Incoming) -> None:
        """Take note that a response has room again."""
        if self._request_of(exchange):
            self.handle(OutputReady(self._numbers[id(exchange)]))

    def exchange_ended(self, exchange: Incoming, *, complete: bool, sent_bytes: int) -> None:
        """Take note that an exchange is over, whole or not."""
        number = self._numbers.pop(id(exchange), 0)
        if request := self._requests.pop(number, None):
            request.over()
            if self._log is not None:
                self._log.request_over(
                    exchange.request,
                    request.traceparent,
                    request.status,
                    began_ms=request.began_ms,
                    now_ms=self._loop.now_ms(),
                )
            self.handle(RequestEnded(number, complete, sent_bytes))

    def _request_of(self, exchange: Incoming) -> IncomingRequest | None:
        return self._requests.get(self._numbers.get(id(exchange), 0))

    # Carrying out effects

    def _execute(self, effect: Effect) -> None:
        match effect:
            case ReceiveBody() | ReceiveBlock() | Respond() | Send():
                if request := self._requests.get(effect.request_id):
                    self._answer(request, effect)
            case Call():
                self._call(effect)
            case CancelCall(call_id=number):
                if call := self._calls.get(number):
                    call.cancel()
            case Store(buffer=number):
                self._jobs.begin(effect, self._buffers[number])
            case ReadBlock(buffer=number):
                self._jobs.begin(effect, self._new_buffer(number))
            case Load():
                self._jobs.begin(effect, None)
            case Drop():
                self._jobs.drop(effect)
            case FreeBuffer(buffer=number):
                if buffer := self._buffers.pop(number, None):
                    buffer.free()
            case Observe():
                self._observe(effect)
            case Persist():
                raise AssertionError("a Persist is never carried out here")
            case _ if self._deliver is not None:
                self._deliver(effect)
            case _:
                self._command(effect)

    def _answer(self, request: IncomingRequest, effect: ReceiveBody | ReceiveBlock | Respond | Send) -> None:
        match effect:
            case ReceiveBody():
                request.receive_document(effect)
            case ReceiveBlock():
                request.receive_block(effect, self._new_buffer(effect.buffer))
            case Respond(body=body):
                request.respond(effect, self._buffers[body.buffer] if isinstance(body, BlockBody) else None)
            case Send():
                request.send(effect)

    def _new_buffer(self, number: int) -> BlockBuffer:
        buffer = self._buffers[number] = BlockBuffer(self._pool)
        return buffer

    def _call(self, effect: Call) -> None:
        block = self._buffers[effect.body.buffer] if isinstance(effect.body, BlockBody) else None
        target = self._new_buffer(effect.buffer) if effect.buffer is not None else None
        call = OutgoingCall(effect, self, self._loop, sends=block, target=target)
        self._calls[effect.call_id] = call
        heapq.heappush(self._deadlines, (call.deadline_ms, effect.call_id))
        call.begin(self._peers)

    def call_over(self, call_id: int) -> None:
        """Forget a call that has ended."""
        over = self._calls.pop(call_id, None)
        if over is None:
            return
        self._last_over = call = over.call
        if self._log is None:
            return
        response = over.response
        self._log.call_over(
            call.base_uri,
            call.request,
            call.traceparent,
            None if response is None else response.status,
            over.failure,
            began_ms=over.began_ms,
            now_ms=self._loop.now_ms(),
        )

    # The engine

    def _command(self, command: EngineCommand) -> None:
        if self._engine is None:
            raise KVSPError(f"{type(command).__name__}: this role has no engine")
        layers: Sequence[LayerOctets] = ()
        if isinstance(command, (engines.ImportBlock, engines.LoadShard)):
            buffer = self._buffers[command.buffer]
            buffer.use()
            layers = buffer.layers()
        elif isinstance(command, engines.ExportBlock):
            self._new_buffer(command.buffer).use()
        self._engine.submit(command, layers)

    def engine_events(self, events: Sequence[EngineEvent]) -> None:
        """Take in what the engine did; called in any thread."""
        for event in events:
            self._engine_did(event)

    def engine_broken(self, error: Exception) -> None:
        """Take note that the engine cannot go on; called in any thread."""
        self._loop.call_soon_threadsafe(partial(self._fail, error))

    def engine_job_over(
        self, command: EngineCommand, result: Sequence[LayerOctets] | bytes | KVSPError, block_tokens: int
    ) -> None:
        """Take in what became of a command that is a job; called in the engine's thread, which also hashes
        what is exported.
        """
        job = getattr(command, "job_id", None)
        if job is None:
            if isinstance(result, KVSPError):
                self._loop.call_soon_threadsafe(partial(self._fail, result))
            return
        buffer = self._buffers.get(command.buffer) if hasattr(command, "buffer") else None
        outcome: JobDone | JobFailed
        if isinstance(result, KVSPError):
            outcome = JobFailed(job, JobFault.BROKEN)
        elif (
            isinstance(command, engines.ExportBlock) and buffer is not None and not isinstance(result, bytes)
        ):
            buffer.fill_from_layers(result, block_tokens)
            outcome = block_done(job, buffer)
        else:
            outcome = JobDone(job, data=result if isinstance(result, bytes) else b"")
        self._engine_did(outcome, buffer)

    def _engine_did(self, item: Input, buffer: BlockBuffer | None = None) -> None:
        self._of_engine.append((item, buffer))
        self._loop.call_soon_threadsafe(self._take_engine)

    def _take_engine(self) -> None:
        if self._of_engine:  # else an input from elsewhere has taken it along
            self._take_inputs()
