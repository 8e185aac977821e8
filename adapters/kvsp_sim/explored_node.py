"""One process of an exploration: the shipped role, and a loop around it that leaves all choices open.

What the loop of `kvsp_sim.host` decides by chance or time is an `Event` here. The state of a node can be
copied and frozen; its clock moves only when a timer fires, to that timer's deadline.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Container, Hashable, Mapping
from itertools import count
from types import MappingProxyType
from typing import ClassVar, Final, Protocol

import attrs

from kvsp_core.container_header import ContainerHeader
from kvsp_core.heads import Request, Response
from kvsp_core.roles.engine import EngineCommand
from kvsp_core.roles.role import (
    AnswerForm,
    AnswerReceived,
    BlockArrived,
    BlockName,
    BlockReceived,
    BodyArrived,
    Call,
    CallFailed,
    CancelCall,
    Drop,
    Effect,
    FreeBuffer,
    Input,
    JobDone,
    JobFailed,
    JobFault,
    LayerArrived,
    LineReceived,
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
    Stored,
    StreamEnded,
    StreamStarted,
    TimerFired,
)
from kvsp_core.roles.work import Numbers
from kvsp_sim.blocks import described
from kvsp_sim.disk import apply_write, catalogue
from kvsp_sim.facts import Fact
from kvsp_sim.host import WALL_CLOCK_MS, RoleFactory, Start
from kvsp_sim.messages import Answer, Message, Question
from kvsp_sim.node_events import (
    Begin,
    CallLost,
    Crash,
    Event,
    MessageArrives,
    Passed,
    PeerCrashed,
    Pending,
    Persisted,
    Timer,
    Unheard,
)
from kvsp_sim.property import Property
from kvsp_sim.snapshot import CallNumber, copied, frozen
from kvsp_sim.wire import request_on_wire, response_on_wire
from kvsp_sim.witness import Witness

__all__ = [
    "ExploredNode",
    "Outcome",
    "without_call",
]


@attrs.frozen
class Outcome:
    """What came of an event: messages sent, and facts for the properties."""

    messages: tuple[Message, ...]
    facts: tuple[Fact, ...]


@attrs.define
class _OpenCall:
    call: Call
    question: Question
    parts: int = 0  # how many parts of a streamed answer have come
    broken: bool = False  # whether the peer has crashed since


@attrs.define
class _OpenRequest:
    question: Question
    parts: int = 0


class _Leg:
    """A request as the witness wants to see it."""

    heard: Final = True

    def __init__(self, node: ExploredNode, question: Question) -> None:
        self.server = node
        self.client = question.source
        self.request, self.body = question.request, question.body


def without_call(question: Question) -> Question:
    """Return a question as it is when its call is over."""
    return attrs.evolve(question, call_id=0, life=0)


def _unnumbered(effect: Effect) -> Effect:
    """Return an effect without the number of the call that it makes."""
    return attrs.evolve(effect, call_id=0) if isinstance(effect, Call) else effect


def _number_of(question: Question, taken: Container[int]) -> int:
    """Return a number for a request that does not say which others came before it, but for those that are
    `taken`: a request may come again while one that nobody waits for any more is being answered.
    """
    request = question.request
    head = f"{question.source} {question.life} {question.call_id} {request.method} {request.path}"
    hashed = hashlib.blake2b(head.encode() + question.body, digest_size=6)
    while (number := int.from_bytes(hashed.digest(), "big")) in taken:
        hashed.update(b"again")
    return number


class Engine(Protocol):
    """What carries out the commands of an instance."""

    def execute(self, command: EngineCommand) -> None:
        """Carry out a command."""
        ...


@attrs.define
class Shelf:
    """A tier that works: containers by name, none forgotten."""

    blocks: dict[BlockName, bytes]
    forgotten: ClassVar[frozenset[BlockName]] = frozenset()


class CountedOctets:
    """Octets that are random to nobody: the node's name and how many were drawn before."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._drawn = 0

    def __call__(self, count: int) -> bytes:
        """Return `count` octets."""
        self._drawn += 1
        return hashlib.shake_128(b"%b/%d" % (self._name.encode(), self._drawn)).digest(count)


class ExploredNode:
    """A role and the loop around it.

    `local` are properties that see this node's facts only, such as those that compare times of its clock. One
    that `can_crash` starts again, until it has had so many `lives`. `tiers` hold `blocks` at first; those in
    `surviving` outlive a crash. What storage and engine do is done at once, but for what the engine does
    under a name in `waits`, which is an event of its own.

    A POST whose path begins with one of `once`, the same for all nodes, arrives once at most: HTTP does not
    send it again by itself, and each arrival makes something new. A call to a peer in `absent` fails at once,
    or has the answer that is `known`: what it is depends on nothing that happens. `renews` says of a call
    what it is about and how late it is: once a later one about the same is open, the role must not care how
    the earlier one ends, and it fails at once.

    `own_effects` says what to do with effects that only this role has. `begin` is called once, when all nodes
    have started and said what they say at first. A node that `only_asks` gets no requests. The timers of one
    that is `patient` go off only where nothing else can happen. A partition may separate it from one of
    `parts_from`.
    """

    def __init__(
        self,
        base_uri: str,
        factory: RoleFactory,
        *,
        witness: Witness,
        local: tuple[Property, ...] = (),
        can_crash: bool = False,
        lives: int | None = None,
        tiers: tuple[str, ...] = (),
        blocks: Mapping[BlockName, bytes] = MappingProxyType({}),
        surviving: tuple[str, ...] = (),
        engine: Callable[[ExploredNode], Engine] | None = None,
        waits: frozenset[str] = frozenset(),
        once: tuple[str, ...] = (),
        absent: frozenset[str] = frozenset(),
        known: Callable[[Request, bytes], tuple[Response, bytes] | None] = lambda _, __: None,
        own_effects: Mapping[type, Callable[..., None]] = MappingProxyType({}),
        begin: Callable[[ExploredNode], None] | None = None,
        only_asks: bool = False,
        patient: bool = False,
        parts_from: tuple[str, ...] = (),
        renews: Callable[[Question], tuple[Hashable, int] | None] = lambda _: None,
        now_ms: int = 1_000,
    ) -> None:
        self.base_uri = base_uri
        self.name = base_uri
        self.now_ms = now_ms
        self.can_crash = can_crash
        self._lives = lives
        self.local = local
        self.life = 0
        self.stored: Stored = {}
        self.role: Role = None  # type: ignore[assignment]  # made when the node starts
        self.calls: dict[int, _OpenCall] = {}
        self.requests: dict[int, _OpenRequest] = {}
        self.buffers: dict[int, bytes] = {}
        self.pending: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self.tiers = {name: Shelf(dict(blocks)) for name in tiers}
        self.engine: Engine | None = None
        self.in_engine: set[tuple[str, tuple[int, int]]] = set()
        self.held: deque[Effect] = deque()
        self.persisting: Persist | None = None
        self._octets = CountedOctets(base_uri)
        self._factory = factory
        self._surviving = surviving
        self._make_engine = engine
        self._waits = waits
        self._once = once
        self._absent = absent
        self._known = known
        self._own_effects = own_effects
        self.begin = begin
        self.only_asks = only_asks
        self.patient = patient
        self.parts_from = parts_from
        self.renews = renews
        self.posts = 0
        """How many requests that arrive once were sent in this life."""
        self.waiting: frozenset[Hashable] = frozenset()
        """Streams whose end a user here waits for."""
        self.witness = witness
        self._messages: list[Message] = []
        self._inputs: deque[Input] = deque()
        self._due: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()

    clock_shift_ms: Final = 0
    """Restarts do not move the clock here."""

    # State

    def copy(self) -> ExploredNode:
        """Return a node in the same state that shares nothing with this one."""
        new = ExploredNode.__new__(ExploredNode)
        new.__dict__.update(self.__dict__)
        changing = (
            self.role, self.stored, self.calls, self.requests, self.buffers, self.pending, self.held,
            self.tiers, self.engine, self.in_engine, self._octets, self.local,
        )  # fmt: skip
        (
            new.role, new.stored, new.calls, new.requests, new.buffers, new.pending, new.held,
            new.tiers, new.engine, new.in_engine, new._octets, new.local,
        ) = copied(changing, owner=self, new_owner=new, renew={Numbers: self._renumbered})  # fmt: skip
        new._messages = []
        new._inputs = deque()
        new._due = deque()
        return new

    def _renumbered(self, numbers: Numbers) -> Numbers:
        """Number calls on from the highest that is open or held back; of others nothing is left."""
        held = (effect.call_id for effect in self.held if isinstance(effect, Call))
        return attrs.evolve(numbers, calls=CallNumber(max((*self.calls, *held), default=0)))

    def freeze(self) -> Hashable:
        """Return the state as a hashable value, in which a call counts as what it asks, and not by the number
        that its role gave it: states that differ in the order in which calls were made are one.
        """
        calls: dict[int, Hashable] = {number: each.question for number, each in self.calls.items()}
        for place, effect in enumerate(self.held):
            if isinstance(effect, Call):
                calls[effect.call_id] = ("held back", place)
        opened = {key: (each.parts, each.broken, _unnumbered(each.call)) for key, each in self.calls.items()}
        held = [
            (CancelCall, effect.call_id) if isinstance(effect, CancelCall) else _unnumbered(effect)
            for effect in self.held
        ]
        state = (
            self.role, self.life, self.stored, opened, self.requests, self.buffers, self.pending, held,
            self.persisting, self.tiers, self.engine, self.in_engine, self._octets, self.posts, self.waiting,
        )  # fmt: skip
        known = frozen(state, self.now_ms, owner=self, calls=calls)
        return known, tuple(one.freeze(self.now_ms) for one in self.local)

    # What may happen

    def own_events(self) -> list[Event]:
        """Return what may happen here without a message."""
        events: list[Event] = []
        if self.persisting is not None:
            events.append(Persisted())
        if self.role.next_deadline_ms() is not None:
            events.append(Timer())
        events += [Pending(index) for index in range(len(self.pending))]
        events += [CallLost(call_id) for call_id in self.calls]
        if self.can_crash and self.life != self._lives:
            events.append(Crash(durable=False))
            if self.persisting is not None:
                events.append(Crash(durable=True))
        return events

    def due_in_ms(self) -> int | None:
        """Return after how long the timer goes off here, or None."""
        deadline_ms = self.role.next_deadline_ms()
        return None if deadline_ms is None else max(0, deadline_ms - self.now_ms)

    def takes(self, message: Message) -> bool:
        """Return whether a message for this node would be looked at: an answer while its call is open, a
        question while no copy of it is being answered.
        """
        if isinstance(message, Question):
            return all(request.question != message for request in self.requests.values())
        return any(
            open_call.question == message.question and open_call.parts == message.part
            for open_call in self.calls.values()
        )

    def arrives_once(self, question: Question) -> bool:
        """Return whether a request for this node arrives once at most."""
        return question.request.method == "POST" and question.request.path.startswith(self._once)

    def apply(self, event: Event) -> Outcome:
        """Let an event happen; return what came of it. Raises `Violation`."""
        self._messages = []
        self._facts: list[Fact] = []
        self.witness.observe = self.observe
        match event:
            case MessageArrives(Question() as question):
                self._ask(question)
            case MessageArrives(Answer() as answer):
                self._answer(answer)
            case Timer():
                deadline_ms = self.role.next_deadline_ms()
                assert deadline_ms is not None
                self.now_ms = max(self.now_ms, deadline_ms)
                self._inputs.append(TimerFired())
            case Pending(index):
                call, arguments = self.pending.pop(index)
                call(*arguments)
            case CallLost(call_id):
                self.calls.pop(call_id)
                self._inputs.append(CallFailed(call_id, "no answer"))
            case Persisted():
                self._persisted()
            case Begin():
                assert self.begin is not None
                self.begin(self)
            case PeerCrashed(peer):
                for open_call in self.calls.values():
                    open_call.broken = open_call.broken or open_call.question.target == peer
            case Unheard(question):
                for request in self.requests.values():
                    if request.question == question:
                        request.question = without_call(question)
            case Passed(ms):
                self.now_ms += ms
            case Crash(durable):
                self._crash(durable)
        self._drain()
        self._let_go()
        return Outcome(tuple(self._messages), tuple(self._facts))

    def _let_go(self) -> None:
        """Let the calls fail that later ones about the same have made pointless."""
        latest: dict[Hashable, int] = {}
        renewed = {call_id: self.renews(each.question) for call_id, each in self.calls.items()}
        for about, number in filter(None, renewed.values()):
            latest[about] = max(number, latest.get(about, number))
        for call_id, said in renewed.items():
            if said is not None and said[1] < latest[said[0]] and self.calls.pop(call_id, None) is not None:
                self._inputs.append(CallFailed(call_id, "no answer"))
                self._drain()

    def start(self) -> Outcome:
        """Start the role for the first time."""
        self._messages = []
        self._facts = []
        self.witness.observe = self.observe
        self._start()
        self._drain()
        return Outcome(tuple(self._messages), tuple(self._facts))

    def observe(self, fact: Fact) -> None:
        """Take note of a fact, for the properties."""
        for one in self.local:
            one.observe(fact)
        self._facts.append(fact)

    # Life

    def _start(self) -> None:
        self.life += 1
        stored = {name: dict(table) for name, table in self.stored.items()}
        if self._make_engine is not None:
            self.engine = self._make_engine(self)
        self.role = self._factory(
            Start(
                stored=stored,
                now_ms=self.now_ms,
                wall_ms=WALL_CLOCK_MS + self.life,
                life=self.life,
                random_bytes=self._octets,
            )
        )
        self.witness.started(self)  # type: ignore[arg-type]
        self._execute(self.role.start(self.now_ms))

    def _crash(self, durable: bool) -> None:
        if durable and self.persisting is not None:
            self._write(self.persisting)
        self.persisting, self.posts = None, 0
        for table in (self.calls, self.requests, self.buffers, self.pending, self.held):
            table.clear()
        for name, shelf in self.tiers.items():
            if name not in self._surviving:
                shelf.blocks.clear()
        self._inputs.clear()
        self._due.clear()
        self.witness.crashed(self)  # type: ignore[arg-type]
        self._start()

    def _write(self, effect: Persist) -> None:
        for write in effect.writes:
            apply_write(self.stored, write)
        self.witness.written(self, effect.writes)  # type: ignore[arg-type]

    def _persisted(self) -> None:
        assert self.persisting is not None
        self._write(self.persisting)
        self.persisting = None
        held, self.held = self.held, deque()
        self._execute(tuple(held))

    # Inputs

    def _ask(self, question: Question) -> None:
        request_id = _number_of(question, self.requests)
        self.requests[request_id] = _OpenRequest(question)
        self._inputs.append(RequestReceived(request_id, question.source, question.request))

    def _answer(self, answer: Answer) -> None:
        call_id = next(key for key, each in self.calls.items() if each.question == answer.question)
        open_call = self.calls[call_id]
        open_call.parts += 1
        if answer.response is not None and not answer.end:
            self._inputs.append(StreamStarted(call_id, answer.response))
            return
        if answer.response is not None:
            del self.calls[call_id]
            if open_call.call.form is AnswerForm.BLOCK and answer.response.is_success:
                self._take_block(open_call.call, answer.response, answer.data)
                return
            self._inputs.append(AnswerReceived(call_id, answer.response, answer.data))
            return
        for line in answer.data.split(b"\n"):
            if line:
                self.witness.line_received(self, open_call.call, line)  # type: ignore[arg-type]
                self._inputs.append(LineReceived(call_id, line))
        if answer.end:
            del self.calls[call_id]
            self._inputs.append(StreamEnded(call_id))

    def _take_block(self, call: Call, response: Response, octets: bytes) -> None:
        assert call.buffer is not None
        header, layer_digests, repr_digest = self._into_buffer(call.buffer, octets)
        valid = response.repr_digest == repr_digest
        self._inputs.append(BlockReceived(call.call_id, response, header, layer_digests, valid))

    def _into_buffer(self, buffer: int, octets: bytes) -> tuple[ContainerHeader, tuple[str, ...], str]:
        """Put a block into a buffer, and tell the role of its layers; return what it says of itself."""
        self.buffers[buffer] = octets
        block = described(0, octets)
        assert block.header is not None
        for layer, digest in zip(block.header.layers, block.layer_digests, strict=True):
            self._inputs.append(LayerArrived(buffer, layer, digest))
        return block.header, block.layer_digests, block.repr_digest

    def deliver(self, item: Input) -> None:
        """Bring the role an input, after those that wait."""
        self._inputs.append(item)

    def later(self, _: int, call: Callable[..., None], *arguments: object) -> None:
        """Have something done: at once, or as an event of its own."""
        if getattr(call, "__name__", "") in self._waits:
            self.pending.append((call, arguments))
        else:
            self._due.append((call, arguments))

    def _drain(self) -> None:
        """Bring the role what it is to have at once: bodies it asks for, ends of requests it answered, and
        what storage and engine do for it.
        """
        while self._inputs or self._due:
            if self._inputs:
                self._execute(self.role.handle(self._inputs.popleft(), self.now_ms))
            else:
                call, arguments = self._due.popleft()
                call(*arguments)

    # Effects

    def _execute(self, effects: tuple[Effect, ...]) -> None:
        effects = tuple(effect for effect in effects if not isinstance(effect, Observe))
        if self.persisting is not None:
            self.held.extend(effects)
            return
        for number, effect in enumerate(effects):
            if isinstance(effect, Persist):
                if self.can_crash:
                    self.persisting = effect
                    self.held.extend(effects[number + 1 :])
                    return
                self._write(effect)
            else:
                self._execute_one(effect)

    def _execute_one(self, effect: Effect) -> None:
        match effect:
            case ReceiveBody(request_id):
                open_request = self.requests[request_id]
                self._inputs.append(BodyArrived(request_id, open_request.question.body))
            case ReceiveBlock(request_id, buffer):
                received = self._into_buffer(buffer, self.requests[request_id].question.body)
                self._inputs.append(BlockArrived(request_id, buffer, *received))
            case Respond(request_id):
                self._respond(effect, self.requests[request_id])
            case Send(request_id, data, end):
                open_request = self.requests[request_id]
                self._messages.append(Answer(open_request.question, 1 + open_request.parts, None, data, end))
                open_request.parts += 1
                if end:
                    self._end(request_id)
                else:
                    self._inputs.append(OutputReady(request_id))
            case Call():
                self._call(effect)
            case CancelCall(call_id):
                self.calls.pop(call_id, None)
            case FreeBuffer(buffer):
                self.buffers.pop(buffer, None)
            case _ if type(effect) in self._own_effects:
                self._own_effects[type(effect)](self, effect)
            case Store() | ReadBlock() | Drop() | Load():
                self._use_tier(effect)
            case _:
                assert self.engine is not None, f"{self.name} has no engine"
                self.witness.commanded(self, effect)  # type: ignore[arg-type]
                self.engine.execute(effect)  # type: ignore[arg-type]

    def _use_tier(self, effect: Store | ReadBlock | Drop | Load) -> None:
        shelf = self.tiers[effect.tier]
        match effect:
            case Store(job_id, buffer, name):
                shelf.blocks[name] = self.buffers[buffer]
                self.deliver(JobDone(job_id))
            case ReadBlock(job_id, buffer, name) if name in shelf.blocks:
                self.buffers[buffer] = shelf.blocks[name]
                self.deliver(described(job_id, shelf.blocks[name]))
            case ReadBlock(job_id):
                self.deliver(JobFailed(job_id, JobFault.MISSING))
            case Drop(name):
                shelf.blocks.pop(name, None)
                self.witness.dropped(self, name)  # type: ignore[arg-type]
            case Load(job_id):
                self.deliver(JobDone(job_id, catalogue=catalogue(shelf.blocks)))

    def _respond(self, effect: Respond, open_request: _OpenRequest) -> None:
        body = effect.body if isinstance(effect.body, bytes) else self.buffers[effect.body.buffer]
        self.witness.responded(_Leg(self, open_request.question), effect, body)  # type: ignore[arg-type]
        response = response_on_wire(effect.response, None if effect.streaming else len(body))
        answer = Answer(open_request.question, 0, response, body, not effect.streaming)
        self._messages.append(answer)
        if not effect.streaming:
            self._end(effect.request_id)

    def _end(self, request_id: int) -> None:
        del self.requests[request_id]
        self._inputs.append(RequestEnded(request_id, True, 1))

    def _call(self, effect: Call) -> None:
        body = effect.body if isinstance(effect.body, bytes) else self.buffers[effect.body.buffer]
        self.witness.called(self, effect, body)  # type: ignore[arg-type]
        if effect.base_uri in self._absent:
            answer = self._known(effect.request, body)
            self._inputs.append(
                CallFailed(effect.call_id, "no such peer")
                if answer is None
                else AnswerReceived(effect.call_id, *answer)
            )
            return
        request = request_on_wire(effect.request, len(body))
        once = request.method == "POST" and request.path.startswith(self._once)
        self.posts += once
        under_way = {each.question for each in self.calls.values()}
        question = next(
            question
            for number in (count(self.posts) if once else count(1))
            if (question := Question(self.base_uri, effect.base_uri, self.life, number, request, body))
            not in under_way
        )
        self.calls[effect.call_id] = _OpenCall(effect, question)
        self._messages.append(question)
