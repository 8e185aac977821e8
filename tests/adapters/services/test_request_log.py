"""What is logged of requests and calls, and the ids that they carry from role to role."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import re
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import httpx
import pytest
import structlog

from kvsp_core.heads import Request, Response, is_traceparent
from kvsp_core.identity import Scope
from kvsp_core.roles.front_end import Generate
from kvsp_core.roles.role import CallFailed, JobFailed, JobFault, ReadBlock, RequestReceived, Respond
from kvsp_engines.prepare import prepare_tiny
from kvsp_services.driver import Driver
from kvsp_services.generations import Generations
from kvsp_services.logs import configure_logs
from kvsp_services.openai_api import Ended, Failed, GenerationEvent, GenerationRequest, Token
from kvsp_services.request_log import MAX_KINDS, QUIET_MS, RequestLog, new_traceparent, request_id_of
from kvsp_services.stores.blocks import BlockFault, BlockTier, MemoryTier
from tests.adapters.services.cluster import OPERATOR, Cluster, free_ports, until
from tests.adapters.services.test_driver import GET, NAME, PEER, TRACE, FakeExchange, World, call
from tests.adapters.services.test_openai_api import an_app

LOOKUP = Request(method="POST", path="lookup", content_type="application/kvsp+json", content_length=9)
ID = request_id_of(TRACE)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers.clear()


class Logged:
    """A driver whose role is a script, and the lines of its log."""

    def __init__(self, *, everything: bool, tiers: Mapping[str, BlockTier] | None = None) -> None:
        self.output = io.StringIO()
        configure_logs("debug" if everything else "info", output=self.output)
        self.world = World()
        self.world.driver = Driver(
            self.world.role,
            self.world.loop,
            self.world.peers,
            committer=self.world.committer,
            tiers=tiers,
            log=RequestLog("index", everything=everything),
            failed=self.world.failures.append,
        )
        self.world.driver.start()

    def serve(self, status: int | None, *, traceparent: str | None = TRACE) -> FakeExchange:
        """Have a request answered with this status, or cut off."""
        world = self.world
        if status is not None:
            world.role.on(RequestReceived, Respond(world.next_request, Response(status=status)))
        exchange = FakeExchange(LOOKUP, traceparent)
        world.driver.request_received(exchange, ended=True)
        world.loop.time_ms += 7
        world.driver.exchange_ended(exchange, complete=status is not None, sent_bytes=0)
        return exchange

    @property
    def lines(self) -> list[dict[str, object]]:
        found = [json.loads(line) for line in self.output.getvalue().splitlines()]
        return [{name: value for name, value in line.items() if name != "timestamp"} for line in found]


def test_every_request_is_a_line_with_its_id_where_everything_is_logged() -> None:
    logged = Logged(everything=True)
    for status in (200, None, 503):
        logged.serve(status)
    common = {"event": "request", "role": "index", "operation": "Lookup", "request_id": ID, "took_ms": 7}
    assert logged.lines == [{**common, "status": s, "level": "debug"} for s in (200, None, 503)]


def test_only_what_could_not_be_answered_is_a_line_otherwise() -> None:
    logged = Logged(everything=False)
    for status in (200, 404, 500, 503, None):
        logged.serve(status)
    assert [(line["status"], line["level"], line["request_id"]) for line in logged.lines] == [
        (500, "warning", ID)
    ]


def test_calls_are_lines_with_the_id_of_the_request_that_they_are_made_for() -> None:
    logged = Logged(everything=True)
    world = logged.world
    world.do(call(1, request=LOOKUP, traceparent=TRACE), call(2, request=LOOKUP))
    (_, first, listener), (_, second, other) = world.peers.calls
    assert (first.traceparent, second.traceparent) == (TRACE, None)
    listener.response_received(Response(status=200))
    listener.body_ended()
    other.failed("no connection")
    common = {"event": "call", "role": "index", "operation": "Lookup", "to": "peer.example", "took_ms": 0}
    assert logged.lines == [
        {**common, "status": 200, "request_id": ID, "level": "debug"},
        {**common, "status": None, "failure": "no connection", "level": "warning"},
    ]


class BrokenTier(MemoryTier):
    """A tier on which nothing can be done, for a reason of the system or a mistake of the program."""

    def __init__(self, error: Exception) -> None:
        super().__init__(1000)
        self.error = error

    def read(self, *_: object) -> NoReturn:
        try:
            raise self.error
        except OSError as error:
            raise BlockFault(JobFault.BROKEN) from error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EROFS, "Read-only file system", "/blocks/secret"), "Read-only file system"),
        (RuntimeError("a token"), r"RuntimeError in test_request_log\.py, line \d+"),
    ],
)
def test_why_a_tier_does_not_work_is_a_warning_and_not_one_for_each_block(
    error: Exception, said: str
) -> None:
    logged = Logged(everything=False, tiers={"host": BrokenTier(error)})
    for number, at_ms in ((1, 0), (2, QUIET_MS - 1), (3, QUIET_MS)):
        logged.world.loop.time_ms = at_ms
        logged.world.do(ReadBlock(number, number, NAME, "host"))
    assert logged.world.role.told(JobFailed) == [JobFailed(n, JobFault.BROKEN) for n in (1, 2, 3)]
    common = {"event": "tier failed", "role": "index", "tier": "host", "level": "warning"}
    lines = logged.lines
    assert all(re.fullmatch(said, line.pop("failure")) for line in lines)
    assert lines == [common, {**common, "left_out": 1}]


def test_a_call_that_a_policy_refuses_is_a_warning() -> None:
    logged = Logged(everything=False)
    for number, status in enumerate((403, 404, 403), 1):
        logged.world.do(call(number, request=LOOKUP))
        listener = logged.world.peers.calls[-1][2]
        listener.response_received(Response(status=status))
        listener.body_ended()
    (line,) = logged.lines
    assert (line["level"], line["status"], line["operation"]) == ("warning", 403, "Lookup")
    assert line["failure"] == "the policy of that role does not allow it"


def test_a_call_that_is_given_up_is_no_failure() -> None:
    logged = Logged(everything=False)
    logged.world.do(call(1, request=LOOKUP))
    logged.world.driver.stop()
    assert logged.lines == []


@pytest.mark.parametrize("everything", [False, True])
def test_of_a_peer_that_is_away_there_is_a_warning_now_and_then(everything: bool) -> None:
    logged = Logged(everything=everything)
    away, other = "https://away.example/kvsp/", "https://other.example/kvsp/"
    numbers = count(1)

    def fail(base_uri: str, request: Request) -> None:
        logged.world.do(call(next(numbers), base_uri=base_uri, request=request))
        logged.world.peers.calls[-1][2].failed("too many calls wait for this service")

    def warned() -> list[tuple[object, object, object]]:
        lines = [line for line in logged.lines if line["level"] == "warning"]
        return [(line["to"], line["operation"], line.get("left_out")) for line in lines]

    for _ in range(100):
        fail(away, LOOKUP)
    fail(away, GET)
    fail(other, LOOKUP)
    first = [
        ("away.example", "Lookup", None),
        ("away.example", "unknown resource", None),
        ("other.example", "Lookup", None),
    ]
    assert warned() == first
    logged.world.loop.time_ms += QUIET_MS - 1
    fail(away, LOOKUP)
    assert warned() == first
    logged.world.loop.time_ms += 1
    fail(away, LOOKUP)
    fail(away, LOOKUP)
    assert warned() == [*first, ("away.example", "Lookup", 100)]
    assert len(logged.lines) == (105 if everything else 4)


def test_of_requests_that_a_role_cannot_answer_there_is_a_warning_now_and_then() -> None:
    logged = Logged(everything=False)
    for _ in range(100):
        logged.serve(500)
    assert len(logged.lines) == 1
    logged.world.loop.time_ms += QUIET_MS
    logged.serve(500)
    assert [line.get("left_out") for line in logged.lines] == [None, 99]


def test_peers_without_end_give_no_warnings_without_end() -> None:
    output = io.StringIO()
    configure_logs(output=output)
    log = RequestLog("index", everything=False)
    for now_ms in (0, QUIET_MS):
        for number in range(2 * MAX_KINDS):
            log.call_over(f"https://h{number}/", LOOKUP, None, None, "away", began_ms=now_ms, now_ms=now_ms)
        assert len(log._quiet._kinds) <= MAX_KINDS + 1
    assert len(output.getvalue().splitlines()) <= 2 * (MAX_KINDS + 1)


@pytest.mark.parametrize("traceparent", [TRACE, None])
def test_a_role_is_told_what_a_request_belongs_to(traceparent: str | None) -> None:
    logged = Logged(everything=True)
    logged.serve(200, traceparent=traceparent)
    logged.serve(200, traceparent=traceparent)
    told = [item.traceparent for item in logged.world.role.told(RequestReceived)]  # type: ignore[union-attr]
    assert all(is_traceparent((said or "").encode()) for said in told)
    assert len(set(told)) == (2 if traceparent is None else 1)
    assert [line["request_id"] for line in logged.lines] == [request_id_of(said) for said in told]


@pytest.mark.parametrize("item", [RequestReceived, CallFailed])
def test_a_role_that_fails_says_in_the_course_of_which_request(item: type) -> None:
    logged = Logged(everything=False)
    world = logged.world
    world.do(call(1, base_uri=PEER, traceparent=TRACE))

    def fail(told: object, now_ms: int) -> tuple[()]:
        if isinstance(told, item):
            raise ValueError("broken")
        return ()

    world.role.handle = fail  # type: ignore[method-assign, assignment]
    if item is RequestReceived:
        logged.serve(None)
    else:
        world.peers.calls[0][2].failed("no connection")
    assert [str(error) for error in world.failures] == ["broken"]
    assert world.driver.failed_for == TRACE


def test_an_id_comes_from_the_source_that_is_given() -> None:
    assert new_traceparent(lambda count: bytes(range(1, count + 1))) == (
        "00-0102030405060708090a0b0c0d0e0f10-1112131415161718-00"
    ), "of what begins here nobody exports a span"
    assert is_traceparent(new_traceparent().encode())


@pytest.mark.parametrize("said", [None, "", "me", TRACE + "é", "é" * 55, "0" * 55, "x" * 100_000])
def test_what_a_client_says_is_taken_where_it_is_well_formed(said: str | None) -> None:
    generations = Generations("scope")
    assert generations.belongs_to(TRACE) == TRACE
    begun = generations.belongs_to(said)
    assert begun != said
    assert is_traceparent(begun.encode())


TOKENS = [Token(ord(letter)) for letter in "Paris, of course."]


@pytest.mark.parametrize(
    ("events", "stop", "level", "outcome"),
    [
        ([*TOKENS, Ended("stop")], None, "info", "stop"),
        ([*TOKENS, Ended("length")], None, "info", "length"),
        ([*TOKENS, Ended("length")], ", of", "info", "stop"),
        ([Failed(502, "broken")], None, "info", "502 broken"),
        ([Failed(503, "full")], None, None, None),
        ([Failed(503, "full")], None, "debug", "503 full"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_how_a_generation_ended_is_logged_but_for_those_of_which_there_is_no_end(
    events: list[GenerationEvent], stop: str | None, level: str | None, outcome: str | None, stream: bool
) -> None:
    output = io.StringIO()
    configure_logs("debug" if level == "debug" else "info", output=output)
    refused: list[int] = []
    generations = Generations("scope", lambda: refused.append(503))

    def handle(item: object) -> None:
        if isinstance(item, Generate):
            for event in events:
                generations._send(item.generation, event, last=not isinstance(event, Token))

    generations.driver = SimpleNamespace(stopped=False, handle=handle)  # type: ignore[assignment]
    app = an_app(generations.generate)

    async def ask() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            body = {"model": "m", "prompt": "x", "stop": stop, "stream": stream}
            return (await client.post("/v1/completions", json=body)).status_code

    failed = [event.status for event in events if isinstance(event, Failed)]
    assert asyncio.run(ask()) == (failed or [200])[0]
    assert refused == [status for status in failed if status == 503]
    lines = [json.loads(line) for line in output.getvalue().splitlines()]
    said = [(line["level"], line["outcome"], line["request_id"]) for line in lines]
    assert said == ([] if level is None else [(level, outcome, ID)])


@pytest.mark.parametrize("error", [GeneratorExit, asyncio.CancelledError])
def test_a_generation_whose_client_goes_is_given_up(error: type[BaseException]) -> None:
    output = io.StringIO()
    configure_logs(output=output)
    generations = Generations("scope")
    generations.driver = SimpleNamespace(stopped=False, handle=lambda item: None)  # type: ignore[assignment]
    asked = GenerationRequest(prompt=(1, 2), method="greedy", params={}, seed=0, traceparent=TRACE)

    async def leave() -> None:
        async with generations.generate(asked):
            raise error

    with pytest.raises(error):
        asyncio.run(leave())
    assert json.loads(output.getvalue())["outcome"] == "given up"


# Over roles

SCOPE_KEY = bytes(range(32))
POLICY = f"""
[principals]
"{{controller}}" = ["controller"]
"{{front_end}}" = ["front-end"]
"{{holder}}" = ["holder"]
"{{index}}" = ["index"]
"{{instance}}" = ["instance", "holder"]
"{OPERATOR}" = ["operator"]
[scopes.{Scope(SCOPE_KEY).scope_id}]
read = ["{OPERATOR}", "{{holder}}", "{{controller}}", "{{front_end}}", "{{instance}}"]
write = ["{{instance}}"]
publish = ["{{holder}}", "{{instance}}"]
"""
TIER = '\n[[{name}.tiers]]\ntier = "host"\ncapacity_bytes = 100000000\n'
SECTIONS = {
    "index": "",
    "controller": 'index = ["{index}"]\n',
    "holder": 'index = ["{index}"]\n' + TIER.format(name="holder"),
    "instance": 'index = ["{index}"]\ncontroller = "{controller}"\nmodel_dir = "model"\n'
    'copies_to = "{holder}"\n' + TIER.format(name="instance"),
    "front_end": 'controller = "{controller}"\nmodel_dir = "model"\napi_port = API_PORT\n'
    '[log]\nlevel = "debug"\n[[scopes]]\nkey_file = "tenant.key"\n',
}


@pytest.mark.requirement("SE-5")
def test_one_request_is_followed_through_the_logs_of_all_roles(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    prepare_tiny(tmp_path / "model")
    (tmp_path / "tenant.key").write_bytes(SCOPE_KEY)
    (tmp_path / "tenant.key").chmod(0o600)
    sections = {name: lines.replace("API_PORT", str(port)) for name, lines in SECTIONS.items()}
    cluster = Cluster(tmp_path, sections, POLICY)
    cluster.start()
    try:
        api = f"http://127.0.0.1:{port}/v1/completions"
        body = {"prompt": "The same text, asked about again. " * 4, "max_tokens": 4, "temperature": 0}
        answers = []
        for traceparent in (TRACE, None):
            head = {} if traceparent is None else {"traceparent": traceparent}
            assert until(lambda: httpx.post(api, json={"prompt": "ready?", "max_tokens": 1}).is_success)
            answers.append(httpx.post(api, json=body, headers=head, timeout=60))
        ids = [answer.headers["x-request-id"] for answer in answers]
        assert all(answer.is_success for answer in answers), [answer.text for answer in answers]
        assert ids[0] == ID
        wanted = {
            ("front_end", "generation", None),
            ("front_end", "call", "PlaceRequest"),
            ("controller", "request", "PlaceRequest"),
            ("controller", "call", "Lookup"),
            ("index", "request", "Lookup"),
            ("instance", "request", "StreamOutput"),
            ("instance", "call", "RecordCheckpoint"),
            ("controller", "request", "RecordCheckpoint"),
            ("controller", "request", "DeleteSession"),
        }
        for asked in ids:
            assert until(lambda asked=asked: wanted <= steps(cluster, asked)), steps(cluster, asked)  # type: ignore[misc]
        copied = {("instance", "call", "StoreBlock"), ("holder", "request", "StoreBlock")}
        assert until(lambda: copied <= steps(cluster, ids[0])), steps(cluster, ids[0])
        reported = [line for line in lines_of(cluster) if line.get("operation") == "ReportStatus"]
        assert not {line.get("request_id") for line in reported} & set(ids)
    finally:
        cluster.stop()


def lines_of(cluster: Cluster) -> list[dict[str, str]]:
    whole = cluster.log.rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


def steps(cluster: Cluster, asked: str) -> set[tuple[str | None, str | None, str | None]]:
    """Return which roles have logged what of a request."""
    found = (line for line in lines_of(cluster) if line.get("request_id") == asked)
    return {(line.get("role"), line.get("event"), line.get("operation")) for line in found}
