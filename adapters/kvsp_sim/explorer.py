"""Every interleaving of a small cluster of the shipped roles, breadth first.

A global state is: the state of each node, the set of the messages that may still arrive (any of them at any
time, any number of times, or never), what the safety properties remember, and what is left of the budgets
for crashes, failing calls and timers. Everything in it is a small number (see `kvsp_sim.numbered`), so most
of the work is looking up.

What can make no difference any more is left out of the state, so that fewer are told apart:

- An answer to a call that is over, and a part of a stream that has been taken: nobody takes it.
- Of a question whose call is over, the call: it may still arrive, and who asked does not listen any more.
- The number that a role gave a call: it counts as what it asks, wherever it is kept, and a question has
  a number of its own only among those that ask the same and are open. In which order calls were made makes no
  difference, as roles tell calls apart by their numbers and do nothing else with them.
- Of a request that is being answered when its call is over, the call: nobody takes the answer, least of all a
  later call that asks the same.
- Such a late question, once it would change nothing at its node. Whether it would have changed something
  later is looked at in the end, for every state that the node came to; if so, all is explored once more, and
  the question stays.
- When a question arrives that may arrive again and changes nothing at its node: it arrives at once, as any
  answer may be late and may never arrive. A GET of a node that only asks has all the answers it may get.
- Once no crash can come, a node that only asks, waits for one answer and can take the next part of it, does
  so before anything else happens: nothing that others do can take that part away, and what they do is the
  same before it and after. Whether the call fails instead is tried too.
- Once no crash can come, a write becomes durable at once: waiting for it is a delay of the messages that are
  held back for it, and each message may be late anyway.

Where there are users, nothing is tried any more once all have got their end.

A violation comes with the shortest way to it. So does an end at which somebody still waits, a user for output
or a program for its reshards: in a state where nothing can happen but faults and the arrival of late
questions, the calls of who waits time out and the timers of the nodes go off, budgets or not, until nobody
waits. Time then passes the same at all nodes, so that none stands still while another tries again and again;
but for nodes that only ask, whose timers go off first, and which give up after a while. Once all is explored,
a state from which what has to happen leads to no end in any order is a violation too: all goes round there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

import attrs

from kvsp_sim.explored_node import ExploredNode
from kvsp_sim.facts import LineSeen, TokenDelivered
from kvsp_sim.messages import Message, Question
from kvsp_sim.node_events import (
    Begin,
    CallLost,
    Crash,
    Event,
    Passed,
    PeerCrashed,
    Pending,
    Persisted,
    Timer,
    Unheard,
)
from kvsp_sim.numbered import Broken, Interned, MessageSpace, NodeSpace, PropertySpace, bits, reachable
from kvsp_sim.properties import Properties
from kvsp_sim.property import Violation
from kvsp_sim.wire import request_line

__all__ = ["Bounds", "Exploration", "Finding", "Search", "explore"]


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
    crash_last: bool = False
    """Whether a crash comes after all partitions: the last one waits for them."""
    switches: int | None = None
    """How often a node acts out of turn; None: any number. Turns go round, and a node keeps its own while
    something has arrived for it or is under way in it. Faults know no turns, nor does what happens where
    nobody has one."""


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


class Left(NamedTuple):
    """What is left of the budgets, between which nodes there is a partition, and who acts (-1: anybody)."""

    crashes: int
    partitions: int
    losses: int
    timers: int | None
    switches: int | None
    parted: int = 0
    acts: int = -1


State: TypeAlias = tuple[int, ...]
"""The numbers of the nodes' states, of the messages, of what the properties remember and of what is left."""


_BUDGETS: Final = 4
"""So many members of `Left` are budgets for faults and timers."""

_FIRST_LOOK: Final = 4_000
"""At so many states it is first looked whether questions were left out that matter, and again at four times
as many each time: what is then begun anew costs less."""

_OF_A_STREAM: Final = (LineSeen, TokenDelivered)

_T = TypeVar("_T")


def _unbroken(outcome: _T | Broken) -> _T:
    """Return an outcome that is to be expected at the beginning."""
    if isinstance(outcome, Broken):
        raise outcome.violation
    return outcome


class Search:
    """The states of some nodes within some bounds, as far as they were `reached`."""

    def __init__(
        self,
        nodes: Sequence[ExploredNode],
        properties: Properties,
        bounds: Bounds,
        before: Search | None = None,
    ) -> None:
        """`before` is a search of the same that left questions out which mattered: here they stay."""
        self.names = [node.name for node in nodes]
        self._count = len(nodes)
        self._nodes = nodes
        self.messages: MessageSpace = MessageSpace(nodes) if before is None else before.messages
        self.spaces: list[NodeSpace] = (
            [NodeSpace(self.messages) for _ in nodes] if before is None else before.spaces
        )
        self.properties: PropertySpace = PropertySpace(properties) if before is None else before.properties
        self._kept: set[int] = set() if before is None else before._kept | before.mattered()
        self._left_out: dict[tuple[int, int], set[int]] = {}
        self._crash_last = bounds.crash_last
        self._sets = Interned()
        self._lefts = Interned()
        left = self._lefts.number(
            Left(bounds.crashes, bounds.partitions, bounds.losses, bounds.timers, bounds.switches)
        )
        self.first: State = self._begun(nodes, left)
        self._only_ask = [place for place, node in enumerate(nodes) if node.only_asks]
        self._have_users = [p for p in self._only_ask if self.spaces[p].waiting[self.first[p]]]
        self.reached: dict[State, tuple[State, int, Event | int] | None] = {self.first: None}
        self._somebody_waits = bool(self._waiting(self.first))
        self._before: dict[State, list[State]] = {}
        """Where somebody waits: from which states one comes to a state by what has to happen."""

    # Beginning

    def _begun(self, nodes: Sequence[ExploredNode], left: int) -> State:
        """Start the nodes; where one waits to begin, let them first say what they say when they start, each
        message arriving once, in the order in which they were sent.
        """
        numbers, sent, properties = [], 0, 0
        for node, space in zip([node.copy() for node in nodes], self.spaces, strict=True):
            outcome = node.start()
            for message in outcome.messages:
                sent |= 1 << self.messages.number(message)
            properties = _unbroken(self.properties.outcome(properties, outcome.facts))
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

    def run(self, max_states: int, progress: Callable[[int, int], None] | None = None) -> Exploration:
        """Explore, breadth first; stop at the first violation, at so many states, or where it has turned out
        that questions were left out which matter.
        """
        reached = self.reached
        look_at = _FIRST_LOOK
        frontier = deque([self.first])
        depth = transitions = 0
        last_of_level = self.first
        while frontier:
            state = frontier.popleft()
            for next_states in (self.next_states, self.last_states):
                has_to_happen = False
                for after, place, event in next_states(state):
                    transitions += 1
                    has_to = not self.may_not_happen(state, after, event)
                    has_to_happen = has_to_happen or has_to
                    if isinstance(after, Broken):
                        steps = (*self.way_to(state), self.describe(state, place, event))
                        finding = Finding(after.violation, steps)
                        return Exploration(len(reached), transitions, depth + 1, False, finding)
                    if after not in reached:
                        reached[after] = (state, place, event)
                        frontier.append(after)
                    if has_to and self._somebody_waits:
                        self._before.setdefault(after, []).append(state)
                if has_to_happen:
                    break
            if state is last_of_level and frontier:
                depth += 1
                last_of_level = frontier[-1]
                if progress is not None:
                    progress(len(reached), depth)
            looks = len(reached) >= look_at
            look_at *= 4 if looks else 1
            if len(reached) > max_states or (looks and self.mattered()):
                return Exploration(len(reached), transitions, depth, False, None)
        return Exploration(len(reached), transitions, depth, True, None)

    # Going on

    def next_states(self, state: State) -> Iterator[tuple[State | Broken, int, Event | int]]:
        """Go through what may happen next: the state then, at which node, and what."""
        count, spaces = self._count, self.spaces
        if self._have_users and not any(spaces[place].waiting[state[place]] for place in self._have_users):
            return
        left = self._lefts.all[state[-1]]
        if not left.crashes:
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
        if left.switches is None:
            for place in range(count):
                yield from self._next_at(state, place, left)
        else:
            yield from self._next_in_turn(state, left)

    def _next_in_turn(self, state: State, left: Left) -> Iterator[tuple[State | Broken, int, Event | int]]:
        """Go through what may happen next where it is bounded how often somebody acts out of turn."""
        count = self._count
        around = [place % count for place in range(max(0, left.acts), max(0, left.acts) + count)]
        turn = next((place for place in around if self._is_busy(state, place)), None)
        for place in around:
            switches = left.switches - (turn is not None and place != turn)  # type: ignore[operator]
            if switches >= 0:
                yield from self._next_at(state, place, left._replace(switches=switches, acts=place))
            else:
                yield from self._next_at(state, place, left, only_faults=True)

    def _is_busy(self, state: State, place: int) -> bool:
        """Return whether something has arrived for a node, or is under way in it."""
        space, number = self.spaces[place], state[place]
        if any(type(event) in (Persisted, Pending) for event in space.own[number]):
            return True
        arriving = self._sets.all[state[self._count]] & self.messages.to[place] & ~self.messages.lates
        return any(self._after(state, place, message, state[-1]) is not None for message in bits(arriving))

    def _next_at(
        self, state: State, place: int, left: Left, *, only_faults: bool = False
    ) -> Iterator[tuple[State | Broken, int, Event | int]]:
        number = state[place]
        for event in self.spaces[place].own[number]:
            for after_left in self._costs(place, number, event, left):
                if only_faults and after_left is left:
                    continue
                after = self._after(state, place, event, self._lefts.number(after_left))
                if after is not None:
                    yield after, place, event
        if only_faults:
            return
        number_left = self._lefts.number(left)
        for message in bits(self._sets.all[state[self._count]] & self.messages.to[place]):
            after = self._after(state, place, message, number_left)
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
        kind = type(event)
        if kind is Crash:
            due = left.crashes > (1 if self._crash_last and left.partitions else 0)
            return (left._replace(crashes=left.crashes - 1),) if due else ()
        if kind is Timer:
            if self._nodes[place].patient:
                return ()
            if left.timers is None:
                return (left,)
            return (left._replace(timers=left.timers - 1),) if left.timers else ()
        if kind is not CallLost:
            return (left,)
        call = self.spaces[place].nodes[number].calls[event.call_id]  # type: ignore[union-attr]
        pair = self._pair(place, call.question.target)
        if call.broken or left.parted & pair:
            return (left,)
        allowed = []
        if left.partitions and pair:
            allowed.append(left._replace(partitions=left.partitions - 1, parted=left.parted | pair))
        if left.losses:
            allowed.append(left._replace(losses=left.losses - 1))
        return tuple(allowed)

    def _pair(self, place: int, target: str) -> int:
        """Return the bit that stands for a pair of nodes, or 0 where no partition comes between them."""
        other = self.names.index(target) if target in self.names else place
        parted = self.names[other] in self._nodes[place].parts_from
        if not parted and self.names[place] not in self._nodes[other].parts_from:
            return 0
        low, high = sorted((place, other))
        return 1 << (low * self._count + high)

    def _after(self, state: State, place: int, event: Event | int, left: int) -> State | Broken | None:
        """Return the state after an event, or None where it changes nothing."""
        count, spaces = self._count, self.spaces
        outcome = spaces[place].outcome(state[place], event)
        if outcome is None or isinstance(outcome, Broken):
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
            self._stop_hearing(nodes, place, before)
        for message in more:
            if self._may_be_taken(nodes, message):
                sent |= 1 << message
        if type(event) is Crash:
            for other, space in enumerate(spaces):
                if other != place:
                    told = space.outcome(nodes[other], PeerCrashed(self.names[place]))
                    assert isinstance(told, tuple)
                    nodes[other] = told[0]
        properties = self.properties.outcome(state[count + 1], facts)
        if isinstance(properties, Broken):
            return properties
        sent = self._settle(sent, nodes, properties)
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
                if question not in now and sent & 1 << question:
                    sent ^= 1 << question
                    sent |= 1 << self.messages.late(question)
        return sent

    def _stop_hearing(self, nodes: list[int], place: int, before: int) -> None:
        """Bring about what the ends of a node's calls mean where their questions are being answered."""
        now = self.spaces[place].open[nodes[place]]
        for question in self.spaces[place].open[before]:
            asked = self.messages.target(question)
            if question in now or asked < 0:
                continue
            if self.spaces[asked].asked[nodes[asked]] >> question & 1:
                message = self.messages.all[question]
                assert isinstance(message, Question)
                outcome = self.spaces[asked].outcome(nodes[asked], Unheard(message))
                assert isinstance(outcome, tuple)
                nodes[asked] = outcome[0]

    def _settle(self, sent: int, nodes: Sequence[int], properties: int) -> int:
        """Return the messages once the questions have arrived that change nothing at their node: with their
        answers, and without those whose call is over. `mattered` looks whether they stay so.
        """
        messages = self.messages
        for message in bits(sent & messages.repeatable):
            place = messages.target(message)
            if not self._is_inert(place, nodes[place], message, properties):
                continue
            if not messages.lates & 1 << message:
                outcome = self.spaces[place].outcome(nodes[place], message)
                assert isinstance(outcome, tuple)
                for answer in outcome[1]:
                    if self._may_be_taken(nodes, answer):
                        sent |= 1 << answer
            elif message not in self._kept:
                sent ^= 1 << message
                self._left_out.setdefault((place, message), set()).add(nodes[place])
        return sent

    def _is_inert(self, place: int, number: int, message: int, properties: int) -> bool:
        """Return whether a late question changes nothing at its node, nor in what the properties remember."""
        outcome = self.spaces[place].outcome(number, message)
        if outcome is None or isinstance(outcome, Broken) or outcome[0] != number:
            return False
        if any(self.messages.about[each][1] != message for each in outcome[1]):
            return False
        return self.properties.outcome(properties, outcome[2]) == properties

    def mattered(self) -> set[int]:
        """Return the late questions that were left out and would have changed something later."""
        found = set()
        for place in {place for place, _ in self._left_out}:
            after = self.spaces[place].moves()
            met: dict[int, set[int]] = {}
            for state in self.reached:
                met.setdefault(state[place], set()).add(state[self._count + 1])
            for (where, message), numbers in self._left_out.items():
                if where == place and not all(
                    self._is_inert(place, number, message, properties)
                    for number in reachable(numbers, after)
                    for properties in met.get(number, ())
                ):
                    found.add(message)
        return found

    def _may_be_taken(self, nodes: Sequence[int], message: int) -> bool:
        place, question, part = self.messages.about[message]
        if part < 0 or place < 0:
            return part < 0
        parts = self.spaces[place].open[nodes[place]].get(question)
        return parts is not None and part >= parts

    # Ends

    def may_not_happen(self, before: State, after: State | Broken, event: Event | int) -> bool:
        """Return whether an event is a fault, or the arrival of a late question: it may never happen."""
        if isinstance(event, int):
            return bool(self.messages.lates >> event & 1)
        if isinstance(after, Broken):
            return False
        was: Left = self._lefts.all[before[-1]]
        now: Left = self._lefts.all[after[-1]]
        return was[:_BUDGETS] != now[:_BUDGETS]

    def last_states(self, state: State) -> Iterator[tuple[State | Broken, int, Event | int]]:
        """Go through what happens where nothing more has to, while somebody waits: time passes."""
        nodes = [self.spaces[place].nodes[state[place]] for place in range(self._count)]
        if not any(node.waiting for node in nodes):
            return
        places = sorted(range(self._count), key=lambda place: not nodes[place].waiting)
        for place in places:
            for event in self.spaces[place].own[state[place]]:
                if isinstance(event, CallLost):
                    after = self._after(state, place, event, state[-1])
                    if after is not None:
                        yield after, place, event
                        return
        for wait_ms, place in self._timers(state):
            after = self._after(self._later(state, wait_ms), place, Timer(), state[-1])
            if after is not None:
                yield after, place, Timer()
                return
        waiting = next(node for node in nodes if node.waiting)
        yield Broken(Violation("everything_ends", f"somebody waits for ever at {waiting.name}")), 0, Timer()

    def _waiting(self, state: State) -> list[int]:
        return [place for place, space in enumerate(self.spaces) if space.waiting[state[place]]]

    def ends(self) -> list[State]:
        """Return the states in which nobody waits."""
        return [state for state in self.reached if not self._waiting(state)]

    def stuck(self) -> Finding | None:
        """Return where somebody waits and nothing that has to happen comes to an end, in no order: it goes
        round for ever. To be asked once all was explored.
        """
        if not self._somebody_waits:
            return None
        ends = self.ends()
        come_to_one = set(ends)
        while ends:
            for state in self._before.get(ends.pop(), ()):
                if state not in come_to_one:
                    come_to_one.add(state)
                    ends.append(state)
        first = next((state for state in self.reached if state not in come_to_one), None)
        if first is None:
            return None
        waiting = [self.names[place] for place in self._waiting(first)]
        said = f"somebody waits for ever at {waiting[0]}, while the same happens again and again"
        return Finding(Violation("everything_ends", said), tuple(self.way_to(first)))

    def _timers(self, state: State) -> list[tuple[int, int]]:
        """Return which timers may go off next, the first first: after how long, and at which node.

        Those of nodes that only ask come before any other's and at once: they give up after a while.
        """
        timers = []
        for place, space in enumerate(self.spaces):
            wait_ms = space.nodes[state[place]].due_in_ms()
            if wait_ms is not None:
                timers.append((place not in self._only_ask, wait_ms, place))
        return [(wait_ms if shared else 0, place) for shared, wait_ms, place in sorted(timers)]

    def _later(self, state: State, wait_ms: int) -> State:
        """Return a state once time has passed, the same at all nodes."""
        if not wait_ms:
            return state
        later = list(state)
        for place, space in enumerate(self.spaces):
            outcome = space.outcome(state[place], Passed(wait_ms))
            assert isinstance(outcome, tuple)
            later[place] = outcome[0]
        return tuple(later)

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

    `progress` is told the states so far and the depth, now and then. Where it turns out at the end that late
    questions were left out that would have changed something, all is explored once more with them.
    """
    search = Search(nodes, properties, bounds)
    while True:
        explored = search.run(max_states, progress)
        if explored.finding is not None or explored.states > max_states:
            return explored
        if not search.mattered():
            finding = search.stuck()
            return explored if finding is None else attrs.evolve(explored, complete=False, finding=finding)
        search = Search(nodes, properties, bounds, search)
