"""What an exploration met, as small numbers: states of each node, messages, and what the properties remember.

What an event does to a node is computed once for each state of the node, and what facts do to the properties
once for what they remember, however many global states contain it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from kvsp_core.errors import KVSPError
from kvsp_sim.explored_node import ExploredNode, without_call
from kvsp_sim.facts import Fact
from kvsp_sim.messages import Answer, Message, Question
from kvsp_sim.node_events import Event, MessageArrives
from kvsp_sim.properties import Properties
from kvsp_sim.property import Violation
from kvsp_sim.snapshot import copied

__all__ = ["Broken", "Done", "Interned", "MessageSpace", "NodeSpace", "PropertySpace", "bits", "reachable"]

Done: TypeAlias = tuple[int, tuple[int, ...], tuple[Fact, ...]]
"""The state of a node after an event, the messages it sent, and facts."""


class Broken:
    """The outcome of an event that breaks a property, or a role."""

    def __init__(self, violation: Violation) -> None:
        self.violation = violation


def bits(numbers: int) -> Iterator[int]:
    """Go through the numbers of the bits that are set."""
    while numbers:
        lowest = numbers & -numbers
        numbers ^= lowest
        yield lowest.bit_length() - 1


def reachable(numbers: Iterable[int], after: Mapping[int, set[int]]) -> set[int]:
    """Return the states that come from these on, themselves included, where each has others after it."""
    met, left = set(numbers), list(numbers)
    while left:
        more = after.get(left.pop(), set()) - met
        met |= more
        left += more
    return met


class Interned:
    """Values by number."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.all: list[Any] = []

    def number(self, value: Hashable) -> int:
        """Return the number of a value."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.all)
            self.all.append(value)
        return number


class NodeSpace:
    """The states of one node that were met, and what each event does in each."""

    def __init__(self, messages: MessageSpace) -> None:
        self._messages = messages
        self._numbers: dict[Hashable, int] = {}
        self.nodes: list[ExploredNode] = []
        self.own: list[list[Event]] = []
        self.open: list[dict[int, int]] = []
        """The calls that are open, by the number of their question: how many parts of the answer came."""
        self.asked: list[int] = []
        """Bits of the questions that are being answered."""
        self.persisting: list[bool] = []
        self.waiting: list[bool] = []
        self._outcomes: dict[tuple[int, Event | int], Done | Broken | None] = {}

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
            asked = {self._messages.number(each.question) for each in node.requests.values()}
            self.asked.append(sum(1 << question for question in asked))
            self.open.append(
                {self._messages.number(each.question): each.parts for each in node.calls.values()}
            )
        return number

    def outcome(self, number: int, event: Event | int) -> Done | Broken | None:
        """Return what comes of an event; None where nothing is done.

        `event` may be the number of a message that arrives.
        """
        key = (number, event)
        if key not in self._outcomes:
            self._outcomes[key] = self._compute(number, event)
        return self._outcomes[key]

    def moves(self) -> dict[int, set[int]]:
        """Return the states that were met next after each."""
        after: dict[int, set[int]] = {}
        for (number, _), outcome in self._outcomes.items():
            if isinstance(outcome, tuple):
                after.setdefault(number, set()).add(outcome[0])
        return after

    def _compute(self, number: int, event: Event | int) -> Done | Broken | None:
        if isinstance(event, int):
            message = self._messages.all[event]
            if not self.nodes[number].takes(message):
                return None
            event = MessageArrives(message)
        node = self.nodes[number].copy()
        try:
            outcome = node.apply(event)
        except Violation as violation:
            return Broken(violation)
        except (KVSPError, AssertionError) as error:
            return Broken(Violation(type(error).__name__, f"{node.name} broke: {error}"))
        sent = tuple(self._messages.number(message) for message in outcome.messages)
        return self.number(node), sent, outcome.facts


class MessageSpace:
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
        self.repeatable = 0
        """Bits of the questions that arrive at once where they change nothing."""
        self.lates = 0
        """Bits of those questions whose call is over, without their call."""
        self._late: dict[int, int] = {}
        self.answers: dict[int, int] = {}
        """Question -> bits of the answers to it."""
        self.about: list[tuple[int, int, int]] = []
        """For each message: the place of who asked, the number of the question, the part (-1: itself)."""

    def number(self, message: Message) -> int:
        """Return the number of a message."""
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
        target, source = self._place.get(message.target), self._place.get(message.source)
        safe = message.request.method == "GET"
        if safe:
            self.safe |= 1 << number
        if safe or (target is not None and self._nodes[target].arrives_once(message)):
            self.once |= 1 << number
        # Where many ask, each for answers of its own, it is fewer states to tell apart when a GET arrives.
        asks = source is not None and self._nodes[source].only_asks
        if target is not None and (asks if safe else not self.once >> number & 1):
            self.repeatable |= 1 << number
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
        return sum(1 << answer for answer in bits(answers) if self.about[answer][2] < parts)

    def target(self, question: int) -> int:
        """Return the place of the node to which a question goes, or -1."""
        message = self.all[question]
        assert isinstance(message, Question)
        return self._place.get(message.target, -1)

    def late(self, question: int) -> int:
        """Return the number of a question as it may still arrive when its call is over: without the call."""
        late = self._late.get(question)
        if late is None:
            late, message = question, self.all[question]
            assert isinstance(message, Question)
            if not self.once & 1 << question and self.about[question][0] >= 0:
                late = self.number(without_call(message))
                self.lates |= 1 << late
            self._late[question] = late
        return late


class PropertySpace:
    """What the properties remember, numbered."""

    def __init__(self, properties: Properties) -> None:
        self._numbers: dict[Hashable, int] = {properties.freeze(): 0}
        self.all = [properties]
        self._outcomes: dict[tuple[int, tuple[Fact, ...]], int | Broken] = {}

    def outcome(self, number: int, facts: tuple[Fact, ...]) -> int | Broken:
        """Return what the properties remember once they have seen facts, by number."""
        if not facts:
            return number
        key = (number, facts)
        found = self._outcomes.get(key)
        if found is None:
            found = self._outcomes[key] = self._compute(number, facts)
        return found

    def _compute(self, number: int, facts: tuple[Fact, ...]) -> int | Broken:
        properties = copied(self.all[number])
        try:
            for fact in facts:
                properties.observe(fact)
        except Violation as violation:
            return Broken(violation)
        key = properties.freeze()
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.all)
            self.all.append(properties)
        return found
