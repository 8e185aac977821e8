"""The explorer sees every order of events, and says the shortest way to what is wrong."""

from __future__ import annotations

import pytest

from kvsp_core.heads import Request, Response
from kvsp_core.roles.role import (
    AnswerReceived,
    BodyArrived,
    Call,
    CallFailed,
    Effect,
    Input,
    Persist,
    Put,
    ReceiveBody,
    RequestReceived,
    Respond,
    Stored,
    TimerFired,
)
from kvsp_core.roles.work import Numbers
from kvsp_sim.explored_node import ExploredNode, Outcome, without_call
from kvsp_sim.explorer import Bounds, Exploration, Search, explore
from kvsp_sim.messages import Answer, Question
from kvsp_sim.node_events import CallLost, MessageArrives, Persisted, Unheard
from kvsp_sim.properties import Properties
from kvsp_sim.witness import Witness

LEDGER = "https://ledger.example/"
WRITER = "https://writer.example/"


class Ledger:
    """Records a checkpoint, and tells whether it has one. `hasty` answers before it is durable."""

    base_uri = LEDGER

    def __init__(self, stored: Stored, *, hasty: bool = False) -> None:
        self.known = "s" in stored.get("sessions", {})
        self.hasty = hasty

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        return ()

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        match item:
            case RequestReceived(request_id, _, Request(method="GET")):
                known = b'{"state": "running", "output_offset": 1}'
                status, body = (200, known) if self.known else (404, b"")
                return (Respond(request_id, Response(status=status), body),)
            case RequestReceived(request_id):
                return (ReceiveBody(request_id, 100),)
            case BodyArrived(request_id, body):
                self.known = True
                effects = (Persist((Put("sessions", "s", body),)), Respond(request_id, Response(status=200)))
                return effects[::-1] if self.hasty else effects
        return ()

    def next_deadline_ms(self) -> int | None:
        return None


class Writer:
    """Writes a checkpoint, and asks for the session once that was acknowledged; tries again on failure."""

    base_uri = WRITER

    def __init__(self) -> None:
        self.acknowledged = False
        self.calls = 0
        self.due_ms: int | None = None

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        return self.call()

    def call(self) -> tuple[Effect, ...]:
        self.calls += 1
        if self.acknowledged:
            request, body = Request(method="GET", path="ext/sessions/s"), b""
        else:
            request = Request(method="PUT", path="sessions/s/checkpoint")
            body = b'{"epoch": 1, "generated": [1], "scope_id": "s"}'
        return (Call(call_id=self.calls, base_uri=LEDGER, request=request, body=body, timeout_ms=100),)

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        match item:
            case AnswerReceived() if not self.acknowledged:
                self.acknowledged = True
                return self.call()
            case CallFailed():
                self.due_ms = now_ms + 50
            case TimerFired():
                self.due_ms = None
                return self.call()
        return ()

    def next_deadline_ms(self) -> int | None:
        return self.due_ms


class Door(Ledger):
    """Refuses to open while it is locked, and changes nothing then."""

    def __init__(self) -> None:
        self.locked = True

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        match item:
            case RequestReceived(request_id, _, Request(path="door/open")):
                assert self.locked, "it was opened by a late question"
                return (Respond(request_id, Response(status=409), b""),)
            case RequestReceived(request_id):
                self.locked = False
                return (Respond(request_id, Response(status=200), b""),)
        return ()


class Visitor(Writer):
    """Wants the door open, and unlocks it where that failed."""

    def call(self) -> tuple[Effect, ...]:
        path = "door/unlock" if self.calls else "door/open"
        self.calls += 1
        request = Request(method="PUT", path=path)
        return (Call(call_id=self.calls, base_uri=LEDGER, request=request, body=b"", timeout_ms=100),)

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        return self.call() if isinstance(item, CallFailed) and self.calls == 1 else ()


class Forwarder(Ledger):
    """Notes each request, and sends it on once that is durable; answers when all it sent on were answered."""

    def __init__(self) -> None:
        self.numbers = Numbers()
        self.sent_on: dict[int, str] = {}
        self.unanswered: list[int] = []

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        match item:
            case RequestReceived(request_id, _, request):
                self.unanswered.append(request_id)
                self.numbers.calls += 1
                number = self.numbers.calls
                self.sent_on[number] = request.path
                on = Call(call_id=number, base_uri=WRITER, request=request, body=b"", timeout_ms=100)
                return (Persist((Put("forwarded", request.path, b""),)), on)
            case AnswerReceived(call_id) | CallFailed(call_id):
                del self.sent_on[call_id]
                if not self.sent_on:
                    unanswered, self.unanswered = self.unanswered, []
                    return tuple(Respond(each, Response(status=200), b"") for each in unanswered)
        return ()


class Insistent(Writer):
    """Asks the same again where that failed, and answers nothing."""

    def call(self) -> tuple[Effect, ...]:
        self.calls += 1
        request = Request(method="PUT", path="a")
        return (Call(call_id=self.calls, base_uri=LEDGER, request=request, body=b"", timeout_ms=100),)

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        return self.call() if isinstance(item, CallFailed) else ()


class Ticker(Ledger):
    """Its timer goes off again and again, `every_ms`, and `breaks` it or changes nothing else."""

    def __init__(self, now_ms: int, every_ms: int, *, breaks: bool = False) -> None:
        self.every_ms = every_ms
        self.due_ms = now_ms + every_ms
        self.breaks = breaks

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        assert not self.breaks
        self.due_ms = now_ms + self.every_ms
        return ()

    def next_deadline_ms(self) -> int | None:
        return self.due_ms


def exploration(*, hasty: bool = False, waits: bool = False, bounds: Bounds) -> Exploration:
    properties = Properties()
    witness = Witness(properties)
    nodes = [
        ExploredNode(
            LEDGER, lambda start: Ledger(start.stored, hasty=hasty), witness=witness, can_crash=True
        ),
        ExploredNode(WRITER, lambda _: Writer(), witness=witness),
    ]
    if waits:
        nodes[1].waiting = frozenset({"a word that it is over"})
    return explore(nodes, properties, bounds)


def test_a_ledger_that_waits_for_its_storage_is_right() -> None:
    explored = exploration(bounds=Bounds(crashes=2, losses=1, timers=1))
    assert explored.finding is None
    assert explored.complete
    assert explored.states > 100
    assert explored.transitions > explored.states


def test_a_ledger_that_answers_before_is_found_on_the_shortest_way() -> None:
    explored = exploration(hasty=True, bounds=Bounds(crashes=1, losses=1, timers=1))
    assert explored.finding is not None
    assert explored.finding.violation.name == "acknowledged_is_kept"
    told = explored.finding.steps
    assert len(told) == 4
    assert told[0].startswith(f"{LEDGER} gets from {WRITER} (call 1): PUT sessions/s/checkpoint")
    assert "https://ledger.example/ crashes and restarts" in told
    assert told[-1].startswith(f"{LEDGER} gets from {WRITER} (call 1): GET ext/sessions/s")


def test_without_a_crash_nobody_can_tell() -> None:
    assert exploration(hasty=True, bounds=Bounds(losses=1, timers=1)).finding is None


def test_who_waits_for_ever_is_found() -> None:
    explored = exploration(waits=True, bounds=Bounds())
    assert explored.finding is not None
    assert str(explored.finding.violation) == f"everything_ends: somebody waits for ever at {WRITER}"


def test_time_passes_the_same_at_all_nodes() -> None:
    properties = Properties()
    witness = Witness(properties)
    nodes = [
        ExploredNode(LEDGER, lambda start: Ticker(start.now_ms, 40), witness=witness),
        ExploredNode(WRITER, lambda start: Ticker(start.now_ms, 100, breaks=True), witness=witness),
    ]
    nodes[0].waiting = frozenset({"that it breaks"})
    explored = explore(nodes, properties, Bounds())
    assert explored.finding is not None
    assert explored.finding.steps == (
        f"{LEDGER}: its timer fires",
        f"{LEDGER}: its timer fires",
        f"{WRITER}: its timer fires",
    )


def test_who_waits_while_all_goes_round_is_found() -> None:
    properties = Properties()
    witness = Witness(properties)
    nodes = [
        ExploredNode(LEDGER, lambda start: Ticker(start.now_ms, 40), witness=witness),
        ExploredNode(WRITER, lambda start: Ticker(start.now_ms, 100), witness=witness),
    ]
    assert explore(nodes, properties, Bounds()).complete
    nodes[0].waiting = frozenset({"that it breaks"})
    explored = explore(nodes, properties, Bounds())
    assert not explored.complete
    assert explored.finding is not None
    said = f"everything_ends: somebody waits for ever at {LEDGER}, while the same happens again and again"
    assert str(explored.finding.violation) == said


def test_a_late_question_that_still_matters_is_kept() -> None:
    properties = Properties()
    witness = Witness(properties)
    nodes = [
        ExploredNode(LEDGER, lambda _: Door(), witness=witness),
        ExploredNode(WRITER, lambda _: Visitor(), witness=witness),
    ]
    explored = explore(nodes, properties, Bounds(losses=1))
    assert explored.finding is not None
    assert "was opened by a late question" in str(explored.finding.violation)
    assert explored.finding.steps[-1].endswith("PUT door/open")


def test_more_budget_is_more_states() -> None:
    few = exploration(bounds=Bounds(crashes=1))
    more = exploration(bounds=Bounds(crashes=1, losses=1, timers=1))
    assert few.states < more.states


# Calls


def forwarder(*, can_crash: bool) -> ExploredNode:
    node = ExploredNode(LEDGER, lambda _: Forwarder(), witness=Witness(Properties()), can_crash=can_crash)
    node.start()
    return node


def asked(path: str) -> Question:
    return Question("https://visitor.example/", LEDGER, 1, 1, Request(method="PUT", path=path), b"")


def after(node: ExploredNode, *events: object) -> tuple[ExploredNode, Outcome]:
    """Go on from a copy at each event, as a search does."""
    for event in events:
        node = node.copy()
        outcome = node.apply(event)  # type: ignore[arg-type]
    return node, outcome


def test_a_call_that_is_held_back_keeps_its_number() -> None:
    first, second = MessageArrives(asked("a")), MessageArrives(asked("b"))
    node, _ = after(forwarder(can_crash=True), first, second)
    assert not node.calls
    node, _ = after(node, Persisted(), Persisted())
    assert isinstance(node.role, Forwarder)
    assert {number: each.question.request.path for number, each in node.calls.items()} == node.role.sent_on
    assert sorted(node.role.sent_on.values()) == ["a", "b"]


@pytest.mark.parametrize("can_crash", [False, True])
def test_in_which_order_calls_were_made_is_no_difference(can_crash: bool) -> None:
    one, _ = after(forwarder(can_crash=can_crash), MessageArrives(asked("z")))  # the role's clock has begun
    ways = [after(one, *(MessageArrives(asked(path)) for path in order))[0] for order in ("ab", "ba")]
    if can_crash:
        ways = [after(way, Persisted(), Persisted(), Persisted())[0] for way in ways]
    for way in ways:
        assert isinstance(way.role, Forwarder)
        way.role.unanswered.sort()
    assert ways[0].freeze() == ways[1].freeze()
    role = ways[0].role
    assert isinstance(role, Forwarder)
    numbers = {path: number for number, path in role.sent_on.items()}
    role.sent_on[numbers["a"]], role.sent_on[numbers["b"]] = "b", "a"
    assert ways[0].freeze() != ways[1].freeze()


def test_nobody_takes_the_answer_to_a_call_that_was_given_up() -> None:
    question = asked("a")
    node, _ = after(forwarder(can_crash=False), MessageArrives(question), Unheard(question))
    assert node.takes(question)
    (number,) = node.calls
    _, outcome = after(node, CallLost(number))
    (answer,) = outcome.messages
    assert isinstance(answer, Answer)
    assert answer.question == without_call(question)


def test_no_call_is_that_of_a_request_of_an_earlier_one() -> None:
    properties = Properties()
    witness = Witness(properties)
    nodes = [
        ExploredNode(LEDGER, lambda _: Forwarder(), witness=witness),
        ExploredNode(WRITER, lambda _: Insistent(), witness=witness),
    ]
    search = Search(nodes, properties, Bounds(losses=2))
    assert search.run(max_states=1_000).complete
    given_up = 0
    for state in search.reached:
        ledger, writer = (space.nodes[state[place]] for place, space in enumerate(search.spaces))
        answered = {each.question for each in ledger.requests.values()}
        calls = {each.question for each in writer.calls.values()}
        given_up += len(answered - calls)
        assert all(question == without_call(question) for question in answered - calls)
    assert given_up
