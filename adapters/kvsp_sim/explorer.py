"""Every interleaving of a small cluster of the shipped roles, breadth first.

A global state is: the state of each node, the set of the messages that may still arrive (any of them at any
time, any number of times, or never), what the safety properties remember, and what is left of the budgets
for crashes, failing calls and timers. Everything in it is interned as a small number, and what an event does
to a node is computed once for each state of the node, however many global states contain it; so most of the
work is looking up.

What can make no difference any more is left out of the state, so that fewer are told apart:

- An answer to a call that is over, and a part of a stream that has been taken: nobody takes it.
- A GET that has arrived, or whose call is over: it changes nothing, and of several answers one would be
  taken, so it is enough that the GET arrives when that one is made.
- Once no crash can come, a node that only asks, waits for one answer and can take the next part of it, does
  so before anything else happens: nothing that others do can take that part away, and what they do is the
  same before it and after. Whether the call fails instead is tried too.
- Once no crash can come, a write becomes durable at once: waiting for it is a delay of the messages that are
  held back for it, and each message may be late anyway.

Where there are users, nothing is tried any more once all have got their end.

A violation comes with the shortest way to it. So does an end at which a user still waits: in a state where
nothing more can happen, the calls that users wait for time out and the timers of the nodes go off, budgets or
not, until the user has an end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import attrs

from kvsp_core.errors import KVSPError
from kvsp_sim.explored_node import (
    Begin,
    CallLost,
    Crash,
    Event,
    ExploredNode,
    MessageArrives,
    PeerCrashed,
    Pending,
    Persisted,
    Timer,
)
from kvsp_sim.facts import Fact, LineSeen, TokenDelivered
from kvsp_sim.messages import Answer, Message, Question
from kvsp_sim.properties import Properties
from kvsp_sim.property import Violation
from kvsp_sim.snapshot import copied
from kvsp_sim.wire import request_line

__all__ = ["Bounds", "Exploration", "Finding", "explore"]


@attrs.frozen(kw_only=True)
class Bounds:
    """How often, in one timeline, something may happen that is not the arrival of a message.

    With a crash the calls to the node that crashed may fail, and between nodes that a partition separates
    any call may. `losses` are calls that fail beside these.
    """

    crashes: int = 0
    partitions: int = 0
    losses: int = 0
    timers: int | None = 0
    """None: any number."""


@attrs.frozen
class Finding:
    """A violation and the shortest way to it, as text."""

    violation: Violation
    steps: tuple[str, ...]


@attrs.frozen
class Exploration:
    """What was explored."""

    states: int
    transitions: int
    depth: int
    complete: bool
    finding: Finding | None


Left: TypeAlias = tuple[int, int, int, int | None, int]
"""Crashes, partitions, losses and timers that are left, and between which nodes there is a partition."""

State: TypeAlias = tuple[int, ...]
"""The numbers of the nodes' states, of the messages, of what the properties remember and of what is left."""

Done: TypeAlias = tuple[int, tuple[int, ...], tuple[Fact, ...]]
"""The state of a node after an event, the messages it sent, and facts."""


class _Broken:
    """The outcome of an event that breaks a property, or a role."""

    def __init__(self, violation: Violation) -> None:
        self.violation = violation


class _Interned:
    """Values by number."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.all: list[Any] = []

    def number(self, value: Hashable) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.all)
            self.all.append(value)
        return number


class _NodeSpace:
    """The states of one node that were met, and what each event does in each."""

    def __init__(self, messages: _Messages) -> None:
        self._messages = messages
        self._numbers: dict[Hashable, int] = {}
        self.nodes: list[ExploredNode] = []
        self.own: list[list[Event]] = []
        self.open: list[dict[int, int]] = []
        """The calls that are open, by the number of their question: how many parts of the answer came."""
        self.persisting: list[bool] = []
        self.waiting: list[bool] = []
        self._outcomes: dict[tuple[int, Event | int], Done | _Broken | None] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    def number(self, node: ExploredNode) -> int:
        """Return the number of a node's state."""
        key = node.freeze()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.nodes)
            self.nodes.append(node)
            self.own.append(node.own_events())
            self.persisting.append(node.persisting is not None)
            self.waiting.append(bool(node.waiting))
            self.open.append(
                {self._messages.number(each.question): each.parts for each in node.calls.values()}
            )
        return number

    def outcome(self, number: int, event: Event | int) -> Done | _Broken | None:
        """Return what comes of an event; None where nothing is done.

        `event` may be the number of a message that arrives.
        """
        key = (number, event)
        if key not in self._outcomes:
            self._outcomes[key] = self._compute(number, event)
        return self._outcomes[key]

    def _compute(self, number: int, event: Event | int) -> Done | _Broken | None:
        if isinstance(event, int):
            message = self._messages.all[event]
            if not self.nodes[number].takes(message):
                return None
            event = MessageArrives(message)
        node = self.nodes[number].copy()
        try:
            outcome = node.apply(event)
        except Violation as violation:
            return _Broken(violation)
        except (KVSPError, AssertionError) as error:
            return _Broken(Violation(type(error).__name__, f"{node.name} broke: {error}"))
        sent = tuple(self._messages.number(message) for message in outcome.messages)
        return self.number(node), sent, outcome.facts


class _Messages:
    """All messages met, numbered, and which of them go to which node."""

    def __init__(self, nodes: Sequence[ExploredNode]) -> None:
        self._nodes = nodes
        self._place = {node.base_uri: place for place, node in enumerate(nodes)}
        self._numbers: dict[Message, int] = {}
        self.all: list[Message] = []
        self.to: list[int] = [0] * len(nodes)  # bits of the messages to each node
        self.once = 0
        """Bits of those that arrive once."""
        self.safe = 0
        """Bits of the questions that change nothing."""
        self.answers: dict[int, int] = {}
        """Question -> bits of the answers to it."""
        self.about: list[tuple[int, int, int]] = []
        """For each message: the place of who asked, the number of the question, the part (-1: itself)."""

    def number(self, message: Message) -> int:
        number = self._numbers.get(message)
        if number is not None:
            return number
        if isinstance(message, Answer):
            question = self.number(message.question)
            number = self._new(message, message.question.source)
            self.answers[question] |= 1 << number
            self.about.append((self._place.get(message.question.source, -1), question, message.part))
            return number
        number = self._new(message, message.target)
        self.answers[number] = 0
        self.about.append((self._place.get(message.source, -1), number, -1))
        if message.request.method == "GET":
            self.safe |= 1 << number
            self.once |= 1 << number
        target = self._place.get(message.target)
        if target is not None and self._nodes[target].arrives_once(message):
            self.once |= 1 << number
        return number

    def _new(self, message: Message, target: str) -> int:
        number = self._numbers[message] = len(self.all)
        self.all.append(message)
        place = self._place.get(target)
        if place is not None:
            self.to[place] |= 1 << number
        return number

    def over(self, question: int, parts: int | None) -> int:
        """Return the bits of what nobody takes any more: of a call that is over (None), or that has got so
        many parts of its answer.
        """
        answers = self.answers[question]
        if parts is None:
            return answers | (self.safe & 1 << question)
        taken, left = 0, answers
        while left:
            lowest = left & -left
            left ^= lowest
            if self.about[lowest.bit_length() - 1][2] < parts:
                taken |= lowest
        return taken


class _PropertySpace:
    """What the properties remember, numbered."""

    def __init__(self, properties: Properties) -> None:
        self._numbers: dict[Hashable, int] = {properties.freeze(): 0}
        self._all = [properties]
        self._outcomes: dict[tuple[int, tuple[Fact, ...]], int | _Broken] = {}

    def outcome(self, number: int, facts: tuple[Fact, ...]) -> int | _Broken:
        if not facts:
            return number
        key = (number, facts)
        found = self._outcomes.get(key)
        if found is None:
            found = self._outcomes[key] = self._compute(number, facts)
        return found

    def _compute(self, number: int, facts: tuple[Fact, ...]) -> int | _Broken:
        properties = copied(self._all[number])
        try:
            for fact in facts:
                properties.observe(fact)
        except Violation as violation:
            return _Broken(violation)
        key = properties.freeze()
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._all)
            self._all.append(properties)
        return found


_OF_A_STREAM: Final = (LineSeen, TokenDelivered)

_T = TypeVar("_T")


def _unbroken(outcome: _T | _Broken) -> _T:
    """Return an outcome that is to be expected at the beginning."""
    if isinstance(outcome, _Broken):
        raise outcome.violation
    return outcome


class _Search:
    def __init__(self, nodes: Sequence[ExploredNode], properties: Properties, bounds: Bounds) -> None:
        self.names = [node.name for node in nodes]
        self._count = len(nodes)
        self._nodes = nodes
        self.messages = _Messages(nodes)
        self.spaces = [_NodeSpace(self.messages) for _ in nodes]
        self._properties = _PropertySpace(properties)
        self._sets = _Interned()
        self._lefts = _Interned()
        left = self._lefts.number((*attrs.astuple(bounds), 0))
        self.first: State = self._begun(nodes, left)
        self._have_users = [p for p in range(self._count) if self.spaces[p].waiting[self.first[p]]]
        self._only_ask = [place for place, node in enumerate(nodes) if node.only_asks]
        self.reached: dict[State, tuple[State, int, Event | int] | None] = {self.first: None}

    # Beginning

    def _begun(self, nodes: Sequence[ExploredNode], left: int) -> State:
        """Start the nodes; where one waits to begin, let them first say what they say when they start, each
        message arriving once, in the order in which they were sent.
        """
        numbers, sent, properties = [], 0, 0
        for node, space in zip(nodes, self.spaces, strict=True):
            outcome = node.start()
            for message in outcome.messages:
                sent |= 1 << self.messages.number(message)
            properties = _unbroken(self._properties.outcome(properties, outcome.facts))
            numbers.append(space.number(node))
        state: State = (*numbers, self._sets.number(sent), properties, left)
        beginning = [place for place, node in enumerate(nodes) if node.begin is not None]
        if beginning:
            state = self._settled(state)
        for place in beginning:
            after = self._after(state, place, Begin(), left)
            state = state if after is None else _unbroken(after)
        return state

    def _settled(self, state: State) -> State:
        arrived, count, left = 0, self._count, state[-1]
        while True:
            busy = [place for place in range(count) if self.spaces[place].persisting[state[place]]]
            waiting = self._sets.all[state[count]] & ~arrived
            if busy:
                after = self._after(state, busy[0], Persisted(), left)
            elif waiting:
                lowest = waiting & -waiting
                arrived |= lowest
                place = next((place for place in range(count) if lowest & self.messages.to[place]), None)
                after = None if place is None else self._after(state, place, lowest.bit_length() - 1, left)
            else:
                return state
            state = state if after is None else _unbroken(after)

    # Going on

    def next_states(self, state: State) -> Iterator[tuple[State | _Broken, int, Event | int]]:
        """Go through what may happen next: the state then, at which node, and what."""
        count, spaces = self._count, self.spaces
        if self._have_users and not any(spaces[place].waiting[state[place]] for place in self._have_users):
            return
        left = self._lefts.all[state[-1]]
        if not left[0]:
            for place in range(count):
                if spaces[place].persisting[state[place]]:
                    after = self._after(state, place, Persisted(), state[-1])
                    if after is not None:
                        yield after, place, Persisted()
                    return
            for place in self._only_ask:
                if self._gets_a_token(state, place):
                    yield from self._next_at(state, place, left)
                    return
        for place in range(count):
            yield from self._next_at(state, place, left)

    def _next_at(
        self, state: State, place: int, left: Left
    ) -> Iterator[tuple[State | _Broken, int, Event | int]]:
        number = state[place]
        for event in self.spaces[place].own[number]:
            for after_left in self._costs(place, number, event, left):
                after = self._after(state, place, event, self._lefts.number(after_left))
                if after is not None:
                    yield after, place, event
        arriving = self._sets.all[state[self._count]] & self.messages.to[place]
        while arriving:
            lowest = arriving & -arriving
            arriving ^= lowest
            message = lowest.bit_length() - 1
            after = self._after(state, place, message, state[-1])
            if after is not None:
                yield after, place, message

    def _gets_a_token(self, state: State, place: int) -> bool:
        """Return whether a node that only asks can take a part of the one answer it waits for, and no fact
        comes of that but that a user gets a token.
        """
        space, number = self.spaces[place], state[place]
        if len(space.open[number]) != 1 or not all(type(event) is CallLost for event in space.own[number]):
            return False
        ((question, _),) = space.open[number].items()
        arriving = self._sets.all[state[self._count]] & self.messages.answers[question]
        if not arriving or arriving & (arriving - 1):
            return False
        outcome = space.outcome(number, arriving.bit_length() - 1)
        return isinstance(outcome, tuple) and all(type(fact) in _OF_A_STREAM for fact in outcome[2])

    def _costs(self, place: int, number: int, event: Event, left: Left) -> tuple[Left, ...]:
        """Return what is left after an event, for each budget that allows it."""
        crashes, partitions, losses, timers, parted = left
        kind = type(event)
        if kind is Crash:
            return ((crashes - 1, partitions, losses, timers, parted),) if crashes else ()
        if kind is Timer:
            if self._nodes[place].patient:
                return ()
            if timers is None:
                return (left,)
            return ((crashes, partitions, losses, timers - 1, parted),) if timers else ()
        if kind is not CallLost:
            return (left,)
        call = self.spaces[place].nodes[number].calls[event.call_id]  # type: ignore[union-attr]
        pair = self._pair(place, call.question.target)
        if call.broken or parted & pair:
            return (left,)
        allowed = []
        if partitions and pair:
            allowed.append((crashes, partitions - 1, losses, timers, parted | pair))
        if losses:
            allowed.append((crashes, partitions, losses - 1, timers, parted))
        return tuple(allowed)

    def _pair(self, place: int, target: str) -> int:
        """Return the bit that stands for a pair of nodes, or 0 where no partition comes between them."""
        other = self.names.index(target) if target in self.names else place
        parted = self.names[other] in self._nodes[place].parts_from
        if not parted and self.names[place] not in self._nodes[other].parts_from:
            return 0
        low, high = sorted((place, other))
        return 1 << (low * self._count + high)

    def _after(self, state: State, place: int, event: Event | int, left: int) -> State | _Broken | None:
        """Return the state after an event, or None where it changes nothing."""
        count, spaces = self._count, self.spaces
        outcome = spaces[place].outcome(state[place], event)
        if outcome is None or isinstance(outcome, _Broken):
            return outcome
        number, more, facts = outcome
        nodes = list(state[:count])
        before = nodes[place]
        nodes[place] = number
        sent_before = sent = self._sets.all[state[count]]
        if isinstance(event, int):
            sent &= ~(self.messages.once & 1 << event)
        if number != before:
            sent = self._without(sent, place, before, number)
        for message in more:
            if self._may_be_taken(nodes, message):
                sent |= 1 << message
        if type(event) is Crash:
            for other, space in enumerate(spaces):
                if other != place:
                    told = space.outcome(nodes[other], PeerCrashed(self.names[place]))
                    assert isinstance(told, tuple)
                    nodes[other] = told[0]
        properties = self._properties.outcome(state[count + 1], facts)
        if isinstance(properties, _Broken):
            return properties
        number_sent = state[count] if sent == sent_before else self._sets.number(sent)
        after = (*nodes, number_sent, properties, left)
        return None if after == state else after

    def _without(self, sent: int, place: int, before: int, after: int) -> int:
        """Return the messages without those that a node's change makes pointless."""
        was, now = self.spaces[place].open[before], self.spaces[place].open[after]
        if was != now:
            for question, parts in was.items():
                if now.get(question) != parts:
                    sent &= ~self.messages.over(question, now.get(question))
        return sent

    def _may_be_taken(self, nodes: Sequence[int], message: int) -> bool:
        place, question, part = self.messages.about[message]
        if part < 0 or place < 0:
            return part < 0
        parts = self.spaces[place].open[nodes[place]].get(question)
        return parts is not None and part >= parts

    # Ends

    def last_states(self, state: State) -> Iterator[tuple[State | _Broken, int, Event | int]]:
        """Go through what happens where nothing more can, while a user waits: time passes."""
        nodes = [self.spaces[place].nodes[state[place]] for place in range(self._count)]
        if not any(node.waiting for node in nodes):
            return
        places = sorted(range(self._count), key=lambda place: not nodes[place].waiting)
        for kind in (CallLost, Timer):
            for place in places:
                for event in self.spaces[place].own[state[place]]:
                    if isinstance(event, kind):
                        after = self._after(state, place, event, state[-1])
                        if after is not None:
                            yield after, place, event
                            return
        waiting = next(node for node in nodes if node.waiting)
        yield _Broken(Violation("users_get_an_end", f"a user of {waiting.name} waits for ever")), 0, Timer()

    # Telling

    def way_to(self, state: State) -> list[str]:
        """Return what happened on the way to a state."""
        steps = []
        step = self.reached[state]
        while step is not None:
            before, place, event = step
            steps.append(self.describe(before, place, event))
            step = self.reached[before]
        return steps[::-1]

    def describe(self, state: State, place: int, event: Event | int) -> str:
        """Return an event in a state for a reader."""
        name = self.names[place]
        if isinstance(event, int):
            return f"{name} gets {_describe_message(self.messages.all[event])}"
        match event:
            case Timer():
                return f"{name}: its timer fires"
            case Persisted():
                return f"{name}: what it persists is durable"
            case Crash(durable):
                return f"{name} crashes and restarts" + (", its last write durable" if durable else "")
            case CallLost(call_id):
                question = self.spaces[place].nodes[state[place]].calls[call_id].question
                what = request_line(question.request)
                return f"{name}: call {question.call_id} to {question.target} fails ({what})"
            case Pending(index):
                return f"{name}: job {index} of those under way is done"
            case _:
                return f"{name}: {event}"


def _describe_message(message: Message) -> str:
    if isinstance(message, Question):
        what = f"from {message.source} (call {message.call_id}): {request_line(message.request)}"
        octets = message.body
    else:
        question = message.question
        status = f"{message.response.status} " if message.response else ""
        what = f"{status}from {question.target} on call {question.call_id} ({request_line(question.request)})"
        octets = message.data
    text = octets[:200].decode("latin-1").rstrip("\n").replace("\n", " ")
    return f"{what} {text if text.isprintable() else f'{len(octets)} octets'}".rstrip()


MAX_STATES: Final = 5_000_000


def explore(
    nodes: Sequence[ExploredNode],
    properties: Properties,
    bounds: Bounds,
    *,
    max_states: int = MAX_STATES,
    progress: Callable[[int, int], None] | None = None,
) -> Exploration:
    """Explore all states within the bounds, breadth first; stop at the first violation.

    `progress` is told the states so far and the depth, now and then.
    """
    search = _Search(nodes, properties, bounds)
    reached = search.reached
    frontier = deque([search.first])
    depth = transitions = 0
    last_of_level = search.first
    while frontier:
        state = frontier.popleft()
        for next_states in (search.next_states, search.last_states):
            before = transitions
            for after, place, event in next_states(state):
                transitions += 1
                if isinstance(after, _Broken):
                    steps = (*search.way_to(state), search.describe(state, place, event))
                    finding = Finding(after.violation, steps)
                    return Exploration(len(reached), transitions, depth + 1, False, finding)
                if after not in reached:
                    reached[after] = (state, place, event)
                    frontier.append(after)
            if transitions > before:
                break
        if state is last_of_level and frontier:
            depth += 1
            last_of_level = frontier[-1]
            if progress is not None:
                progress(len(reached), depth)
        if len(reached) > max_states:
            return Exploration(len(reached), transitions, depth, False, None)
    return Exploration(len(reached), transitions, depth, True, None)
