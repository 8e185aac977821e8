"""Every interleaving of a small cluster of the shipped roles, breadth first.

A global state is: the state of each node, the set of all messages ever sent (any of them may arrive at any
time, any number of times, or never), what the safety properties remember, and what is left of the budgets
for crashes, lost calls and timers. Everything in it is interned as a small number, and what an event does
to a node is computed once for each state of the node, however many global states contain it; so most of the
work is looking up.

A violation comes with the shortest way to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final, TypeAlias

import attrs

from kvsp_sim.explored_node import (
    CallLost,
    Crash,
    Event,
    ExploredNode,
    MessageArrives,
    Pending,
    Persisted,
    Timer,
)
from kvsp_sim.facts import Fact
from kvsp_sim.messages import Message, Question
from kvsp_sim.properties import Properties, Violation
from kvsp_sim.snapshot import copied
from kvsp_sim.wire import request_line

__all__ = ["Bounds", "Exploration", "Finding", "explore"]


@attrs.frozen(kw_only=True)
class Bounds:
    """How often, in one timeline, something may happen that is not the arrival of a message."""

    crashes: int = 0
    losses: int = 0
    timers: int = 0


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


# nodes, messages as bits, properties, crashes left, losses left, timers left
State: TypeAlias = tuple[tuple[int, ...], int, int, int, int, int]


Done: TypeAlias = tuple[int, int, tuple[Fact, ...]]
"""The state of a node after an event, the messages it sent as bits, and facts."""


class _Broken:
    """The outcome of an event that breaks a property, or a role."""

    def __init__(self, violation: Violation) -> None:
        self.violation = violation


class _NodeSpace:
    """The states of one node that were met, and what each event does in each."""

    def __init__(self, messages: _Messages) -> None:
        self._messages = messages
        self._numbers: dict[Hashable, int] = {}
        self._nodes: list[ExploredNode] = []
        self._own: list[list[Event]] = []
        self._outcomes: dict[tuple[int, Event | int], Done | _Broken | None] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def number(self, node: ExploredNode) -> int:
        """Return the number of a node's state."""
        key = node.freeze()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._nodes)
            self._nodes.append(node)
            self._own.append(node.own_events())
        return number

    def own_events(self, number: int) -> list[Event]:
        return self._own[number]

    def outcome(self, number: int, event: Event | int) -> tuple[int, int, tuple[Fact, ...]] | _Broken | None:
        """Return the next state, the messages sent as bits and the facts; None where nothing is done.

        `event` may be the number of a message that arrives.
        """
        key = (number, event)
        if key not in self._outcomes:
            self._outcomes[key] = self._compute(number, event)
        return self._outcomes[key]

    def _compute(self, number: int, event: Event | int) -> Done | _Broken | None:
        if isinstance(event, int):
            message = self._messages.all[event]
            if not self._nodes[number].takes(message):
                return None
            event = MessageArrives(message)
        node = self._nodes[number].copy()
        try:
            outcome = node.apply(event)
        except Violation as violation:
            return _Broken(violation)
        sent = 0
        for message in outcome.messages:
            sent |= 1 << self._messages.number(message)
        return self.number(node), sent, outcome.facts


class _Messages:
    """All messages met, numbered, and which of them go to which node."""

    def __init__(self, names: Sequence[str]) -> None:
        self._place = {name: place for place, name in enumerate(names)}
        self._numbers: dict[Message, int] = {}
        self.all: list[Message] = []
        self.to: list[int] = [0] * len(names)  # bits of the messages to each node

    def number(self, message: Message) -> int:
        number = self._numbers.get(message)
        if number is None:
            number = self._numbers[message] = len(self.all)
            self.all.append(message)
            target = message.target if isinstance(message, Question) else message.question.source
            place = self._place.get(target)
            if place is not None:
                self.to[place] |= 1 << number
        return number


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


_CRASHES, _LOSSES, _TIMERS = 3, 4, 5


class _Search:
    def __init__(self, nodes: Sequence[ExploredNode], properties: Properties, bounds: Bounds) -> None:
        self._names = [node.name for node in nodes]
        self.messages = _Messages([node.base_uri for node in nodes])
        self._spaces = [_NodeSpace(self.messages) for _ in nodes]
        self._properties = _PropertySpace(properties)
        sent, number, numbers = 0, 0, []
        for node, space in zip(nodes, self._spaces, strict=True):
            outcome = node.start()
            for message in outcome.messages:
                sent |= 1 << self.messages.number(message)
            after = self._properties.outcome(number, outcome.facts)
            if isinstance(after, _Broken):
                raise after.violation
            number = after
            numbers.append(space.number(node))
        self.first: State = (tuple(numbers), sent, number, bounds.crashes, bounds.losses, bounds.timers)
        self.reached: dict[State, tuple[State, int, Event | int] | None] = {self.first: None}
        self.transitions = 0

    def next_states(self, state: State) -> Iterator[tuple[State | _Broken, int, Event | int]]:
        """Go through what may happen next: the state then, at which node, and what."""
        nodes, sent, _, crashes, losses, timers = state
        for place, number in enumerate(nodes):
            space = self._spaces[place]
            for event in space.own_events(number):
                left = (crashes, losses, timers)
                kind = type(event)
                if kind is Crash:
                    left = (crashes - 1, losses, timers)
                elif kind is CallLost:
                    left = (crashes, losses - 1, timers)
                elif kind is Timer:
                    left = (crashes, losses, timers - 1)
                after = self._after(state, place, event, left) if min(left) >= 0 else None
                if after is not None:
                    yield after, place, event
            arriving = sent & self.messages.to[place]
            while arriving:
                lowest = arriving & -arriving
                arriving ^= lowest
                message = lowest.bit_length() - 1
                after = self._after(state, place, message, (crashes, losses, timers))
                if after is not None:
                    yield after, place, message

    def _after(
        self, state: State, place: int, event: Event | int, left: tuple[int, int, int]
    ) -> State | _Broken | None:
        nodes, sent, properties, *_ = state
        outcome = self._spaces[place].outcome(nodes[place], event)
        if outcome is None or isinstance(outcome, _Broken):
            return outcome
        number, more, facts = outcome
        after = self._properties.outcome(properties, facts)
        if isinstance(after, _Broken):
            return after
        return ((*nodes[:place], number, *nodes[place + 1 :]), sent | more, after, *left)

    # Telling

    def way_to(self, state: State) -> list[str]:
        """Return what happened on the way to a state."""
        steps = []
        step = self.reached[state]
        while step is not None:
            before, place, event = step
            steps.append(self.describe(place, event))
            step = self.reached[before]
        return steps[::-1]

    def describe(self, place: int, event: Event | int) -> str:
        """Return an event for a reader."""
        name = self._names[place]
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
                return f"{name}: call {call_id} fails"
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
    text = octets[:200].decode("latin-1")
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
        for after, place, event in search.next_states(state):
            transitions += 1
            if isinstance(after, _Broken):
                steps = (*search.way_to(state), search.describe(place, event))
                finding = Finding(after.violation, steps)
                return Exploration(
                    states=len(reached),
                    transitions=transitions,
                    depth=depth + 1,
                    complete=False,
                    finding=finding,
                )
            if after not in reached:
                reached[after] = (state, place, event)
                frontier.append(after)
        if state is last_of_level and frontier:
            depth += 1
            last_of_level = frontier[-1]
            if progress is not None:
                progress(len(reached), depth)
        if len(reached) > max_states:
            return Exploration(len(reached), transitions, depth, False, None)
    return Exploration(len(reached), transitions, depth, True, None)
