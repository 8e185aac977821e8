"""The API over sockets, and clients that are clumsy, slow or hostile."""

from __future__ import annotations

import json
import resource
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import h11
import pytest
from anyio.abc import SocketAttribute, SocketStream
from starlette.types import ASGIApp, Receive, Scope, Send

from kvsp_services import http1, openai_api
from kvsp_services.openai_api import Ended, GenerationEvent, GenerationRequest, Started, Token
from tests.adapters.services.test_openai_api import an_app

ENDLESS = "endless"
JSON = {"content-type": "application/json"}


class Api:
    """An API that is served. A prompt "endless" is answered without an end."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.under_way = 0
        self.begun = 0

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[GenerationEvent]]:
        async def play() -> AsyncIterator[GenerationEvent]:
            yield Started(0)
            for letter in "Paris":
                yield Token(ord(letter))
            while bytes(request.prompt) == ENDLESS.encode():
                await anyio.sleep(0.001)
                yield Token(ord("!"))
            yield Ended("stop")

        self.under_way += 1
        self.begun += 1
        try:
            yield play()
        finally:
            self.under_way -= 1

    async def idle(self) -> None:
        """Wait until no generation is under way."""
        while self.under_way:
            await anyio.sleep(0.005)

    async def connect(self) -> Connection:
        return Connection(await anyio.connect_tcp("127.0.0.1", self.port))


class Connection:
    """A client's connection, by the octet where that is wanted."""

    def __init__(self, stream: SocketStream) -> None:
        self.stream = stream
        self.http = h11.Connection(h11.CLIENT)

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] = JSON
    ) -> tuple[int, Any]:
        """Make a request; return the status and what the body holds."""
        if self.http.our_state is h11.DONE:
            self.http.start_next_cycle()
        fields = {"host": "localhost", "content-length": str(len(body))} | headers
        if "transfer-encoding" in fields:
            del fields["content-length"]
        octets = self.http.send(h11.Request(method=method, target=path, headers=list(fields.items()))) or b""
        if body:
            octets += self.http.send(h11.Data(data=body)) or b""
        await self.stream.send(octets + (self.http.send(h11.EndOfMessage()) or b""))
        return await self.answer()

    async def answer(self) -> tuple[int, Any]:
        """Take an answer in."""
        status, body = 0, b""
        while True:
            match self.http.next_event():
                case h11.Response() as response:
                    status = response.status_code
                case h11.Data() as data:
                    body += data.data
                case h11.EndOfMessage():
                    return status, json.loads(body) if body[:1] == b"{" else body
                case h11.ConnectionClosed():
                    raise ConnectionResetError
                case _:
                    self.http.receive_data(await receive(self.stream))


async def receive(stream: SocketStream) -> bytes:
    try:
        return await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return b""


async def rest(stream: SocketStream) -> bytes:
    """Return all that comes until the server closes the connection."""
    said = b""
    while octets := await receive(stream):
        said += octets
    return said


def body(**members: Any) -> bytes:
    return json.dumps({"prompt": "x"} | members).encode()


def post(octets: bytes, path: str = "/v1/completions", more: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{more}"
    return f"{head}content-length: {len(octets)}\r\n\r\n".encode() + octets


def play(
    loop: str,
    scenario: Callable[[Api], Awaitable[None]],
    app: ASGIApp | None = None,
    host: str = "127.0.0.1",
) -> None:
    """Play a scenario with an API, or another application, that is served on a loop."""

    async def main() -> None:
        api = Api(0)
        listens, stop = anyio.Event(), anyio.Event()

        def listening(port: int) -> None:
            api.port = port
            listens.set()

        async def serve() -> None:
            await http1.serve(
                app or an_app(api.generate),
                host=host,
                port=0,
                key="front_end.api_port",
                listening=listening,
                stopping=stop.wait,
            )

        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                await listens.wait()
                await scenario(api)
                status, _ = await (await api.connect()).ask("GET", "/v1/models")
                assert status == 200, "and it serves as before"
                stop.set()

    anyio.run(main, backend=loop)


@pytest.fixture(params=["asyncio", "trio"])
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_go_away_leave_nothing_under_way(loop: str, stream: bool) -> None:
    async def scenario(api: Api) -> None:
        clients = [await api.connect() for _ in range(20)]
        for client in clients:
            await client.stream.send(post(body(prompt=ENDLESS, stream=stream, max_tokens=90)))
            if stream:
                await client.stream.receive()
        while api.begun < len(clients):
            await anyio.sleep(0.005)
        assert api.under_way == len(clients)
        for client in clients:
            await client.stream.aclose()
        await api.idle()

    play(loop, scenario)


def test_a_client_that_goes_away_in_its_own_body_costs_nothing(loop: str) -> None:
    async def scenario(api: Api) -> None:
        for size in (0, 1, 60_000):
            client = await api.connect()
            await client.stream.send(post(b"x" * 100_000)[: -100_000 + size])
            await client.stream.aclose()
        assert api.begun == 0

    play(loop, scenario)


def test_clients_that_break_off_are_not_worth_a_line(loop: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(api: Api) -> None:
        for octets in (b"nonsense\r\n\r\n", post(body()), post(body(stream=True)), post(b"x" * 9)[:-3], b""):
            for _ in range(20):
                client = await api.connect()
                raw = client.stream.extra(SocketAttribute.raw_socket)
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                await client.stream.send(octets)
                await client.stream.aclose()
        await api.idle()

    play(loop, scenario)
    assert capfd.readouterr() == ("", "")


def test_two_hundred_streams_at_once(loop: str) -> None:
    async def scenario(api: Api) -> None:
        done = 0

        async def one() -> None:
            nonlocal done
            status, said = await (await api.connect()).ask("POST", "/v1/completions", body(stream=True))
            assert status == 200
            assert said.count(b"data: ") == 7
            assert said.endswith(b"data: [DONE]\n\n")
            done += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(one)
        assert (done, api.under_way) == (200, 0)

    play(loop, scenario)


def test_a_connection_is_of_use_after_every_refusal(loop: str) -> None:
    async def scenario(api: Api) -> None:
        client = await api.connect()
        wrong: list[tuple[int, str, str, bytes, dict[str, str]]] = [
            (400, "POST", "/v1/completions", b"{", JSON),
            (400, "POST", "/v1/completions", b"", JSON),
            (400, "POST", "/v1/completions", b'{"prompt": "\\ud800", "\\udfff": 1}', JSON),
            (400, "POST", "/v1/completions", b"[" * 30_000, JSON),
            (400, "POST", "/v1/completions", b'{"a":' * 30_000, JSON),
            (400, "POST", "/v1/completions", b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", JSON),
            (400, "POST", "/v1/completions", b'{"prompt": "x", "temperature": NaN}', JSON),
            (400, "POST", "/v1/completions", b'{"prompt": "x", "top_p": -Infinity}', JSON),
            (400, "POST", "/v1/completions", b'{"prompt": "x", "temperature": 1e999}', JSON),
            (400, "POST", "/v1/chat/completions", b'{"messages": []}', JSON),
            (400, "POST", "/v1/completions", b"\xff\xfe\x00", JSON),
            (400, "POST", "/v1/completions", body(prompt="x" * 200_000), JSON),
            (415, "POST", "/v1/completions", body(), {"content-type": "text/plain"}),
            (415, "POST", "/v1/completions", body(), {"content-type": "application/x-www-form-urlencoded"}),
            (404, "POST", "/v1/completions", body(model="other"), JSON),
            (404, "GET", "/v1/embeddings", b"", {}),
            (404, "GET", "/", b"", {}),
            (405, "GET", "/v1/completions", b"", {}),
            (405, "OPTIONS", "/v1/completions", b"", {}),
            (405, "DELETE", "/v1/models", b"", {}),
        ]
        for status, method, path, octets, headers in wrong:
            found, said = await client.ask(method, path, octets, headers)
            assert found == status, (method, path, octets[:40])
            assert set(said["error"]) == {"message", "type", "param", "code"}
            assert (await client.ask("POST", "/v1/completions", body()))[0] == 200
        assert (await client.ask("HEAD", "/v1/models")) == (200, b"")
        assert api.under_way == 0

    play(loop, scenario)


def test_a_page_of_a_foreign_site_may_not_ask_without_being_allowed_to(loop: str) -> None:
    """A browser asks first where the type is JSON. Where there is none it does not, and says its origin."""

    async def scenario(api: Api) -> None:
        client = await api.connect()
        assert (await client.ask("POST", "/v1/completions", body(), {}))[0] == 200
        foreign = {"origin": "https://foreign.example"}
        assert (await client.ask("POST", "/v1/completions", body(), foreign))[0] == 415
        mine = JSON | {"origin": "https://mine.example"}
        assert (await client.ask("POST", "/v1/completions", body(), mine))[0] == 200

    play(loop, scenario)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost.:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("192.0.2.1", 200),  # no name that leads elsewhere
        ("foreign.example", 421),
        ("foreign.example:8000", 421),
        ("localhost.foreign.example", 421),
        ("127.0.0.1.foreign.example", 421),
        ("[foreign.example]", 421),
        ("[", 421),
        ("", 421),
    ],
)
def test_a_page_of_a_foreign_site_that_leads_its_name_here_is_refused(
    loop: str, host: str, status: int
) -> None:
    """A browser takes what answers by that name for the site itself, and asks nobody."""

    async def scenario(api: Api) -> None:
        client = await api.connect()
        found, said = await client.ask("POST", "/v1/completions", body(), JSON | {"host": host})
        assert (found, api.begun) == (status, status == 200)
        if status != 200:
            assert "localhost" in said["error"]["message"]
        assert (await client.ask("GET", "/v1/models"))[0] == 200

    play(loop, scenario)


def test_the_name_that_is_configured_is_one_to_ask_for(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(api: Api) -> None:
        client = await api.connect()
        for host, status in (("api.example:1", 200), ("foreign.example", 421)):
            assert (await client.ask("GET", "/v1/models", headers={"host": host}))[0] == status

    listen = anyio.create_tcp_listener
    monkeypatch.setattr(
        anyio, "create_tcp_listener", lambda **given: listen(**given | {"local_host": "127.0.0.1"})
    )
    play(loop, scenario, host="API.example")


def test_beyond_the_loopback_interface_any_name_is_one_to_ask_for(loop: str) -> None:
    async def scenario(api: Api) -> None:
        client = await api.connect()
        assert (await client.ask("GET", "/v1/models", headers={"host": "api.example"}))[0] == 200

    play(loop, scenario, host="0.0.0.0")


def test_bodies_in_chunks_and_types_with_parameters_are_taken(loop: str) -> None:
    async def scenario(api: Api) -> None:
        client = await api.connect()
        kinds = ["application/json; charset=utf-8", "Application/JSON"]
        for headers in ({"transfer-encoding": "chunked"}, *({"content-type": kind} for kind in kinds)):
            status, said = await client.ask("POST", "/v1/completions", body(), headers)
            assert (status, said["choices"][0]["text"]) == (200, "Paris")

    play(loop, scenario)


def test_requests_one_after_the_other_without_waiting_are_answered_in_turn(loop: str) -> None:
    async def scenario(api: Api) -> None:
        client = await api.connect()
        await client.stream.send(
            post(b"{") + post(body(stream=True)) + post(body(), more="connection: close\r\n")
        )
        said = await rest(client.stream)
        places = [said.index(part) for part in (b" 400 ", b"event-stream", b"[DONE]", b'"text":"Paris"')]
        assert places == sorted(places)

    play(loop, scenario)


def test_a_body_that_is_too_large_is_refused_before_it_comes(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_api, "MAX_BODY_BYTES", 100_000)

    async def scenario(api: Api) -> None:
        client = await api.connect()
        head = post(b"x" * 10, more="expect: 100-continue\r\n")[:-10]
        await client.stream.send(head.replace(b"length: 10", b"length: 99999999"))
        assert b" 413 " in await rest(client.stream)
        client = await api.connect()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        await client.stream.send(head + 2 * (b"10000\r\n" + b" " * 65536 + b"\r\n"))
        assert b" 413 " in await rest(client.stream), "though it has not ended"

    play(loop, scenario)


def test_a_body_of_very_many_chunks_is_refused(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be small: what costs is each chunk."""
    monkeypatch.setattr(openai_api, "MAX_BODY_PIECES", 100)

    async def scenario(api: Api) -> None:
        head = post(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
        for padding, status in ((b"1\r\n \r\n" * 99, 200), (b"1\r\n \r\n" * 100, 413)):
            client = await api.connect()
            await client.stream.send(head + padding + b"f\r\n%b\r\n0\r\n\r\n" % body())
            assert b" %d " % status in await client.stream.receive()

    play(loop, scenario)


def test_a_body_that_does_not_come_is_not_waited_for(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_api, "BODY_S", 0.05)

    async def scenario(api: Api) -> None:
        client = await api.connect()
        await client.stream.send(post(body())[:-1])
        assert b" 408 " in await rest(client.stream)

    play(loop, scenario)


def test_bodies_together_have_a_bound_that_small_ones_do_not_meet(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_api, "MAX_BODIES_BYTES", 199_900)

    async def scenario(api: Api) -> None:
        async def other(octets: bytes) -> int:
            return (await (await api.connect()).ask("POST", "/v1/completions", octets))[0]

        large, waiting = post(b"x" * 100_000), await api.connect()
        await waiting.stream.send(large[:-1])
        while (status := await other(b"x" * 100_000)) != 503:  # until the first one has come in so far
            assert status == 400
        assert await other(body()) == 200
        await waiting.stream.send(large[-1:])
        assert b" 400 " in await waiting.stream.receive()
        assert await other(b"x" * 100_000) == 400

    play(loop, scenario)


def test_what_a_client_authorizes_itself_with_is_in_no_log(
    loop: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)

    async def scenario(api: Api) -> None:
        client = await api.connect()
        for octets in (body(), b"{"):
            headers = JSON | {"authorization": "Bearer my-secret", "x-api-key": "my-secret"}
            await client.ask("POST", "/v1/completions?key=my-secret", octets, headers)
        await client.stream.send(b"GET my-secret\r\n\r\n")
        await receive(client.stream)

    play(loop, scenario)
    assert "my-secret" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize("kind", ["websocket", "h2c"])
def test_a_client_that_wants_another_protocol_goes_on_in_this_one(loop: str, kind: str) -> None:
    async def scenario(api: Api) -> None:
        client = await api.connect()
        more = f"connection: upgrade, http2-settings\r\nupgrade: {kind}\r\nhttp2-settings: !!\r\n"
        asked = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{more}\r\n".encode()
        await client.stream.send(asked + post(body(), more="connection: close\r\n"))
        said = await rest(client.stream)
        assert said.count(b"HTTP/1.1 200 ") == 2

    play(loop, scenario)


@pytest.mark.parametrize(
    ("octets", "status"),
    [
        (b"GET /v1/models HTTP/2.0\r\nhost: localhost\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET http://[/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: y\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (post(body(), more="content-length: 3\r\n"), 400),
        (post(body(), more="transfer-encoding: chunked\r\n"), 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nx\r\n", 400),
        (b"POST /v1/models HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\na: " + b"a" * 100_000 + b"\r\n\r\n", 431),
    ],
    ids=lambda value: None if isinstance(value, int) else "",
)
def test_what_is_no_request_is_refused_and_costs_its_connection(
    loop: str, octets: bytes, status: int
) -> None:
    async def scenario(api: Api) -> None:
        client = await api.connect()
        await client.stream.send(octets)
        head, _, document = (await rest(client.stream)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in head.lower()
        assert set(json.loads(document)["error"]) == {"message", "type", "param", "code"}

    play(loop, scenario)


@pytest.mark.parametrize("head", [b"HEAD /v1/models HTTP/1.4", b"HEAD http://[ HTTP/1.1"])
def test_what_is_refused_of_a_request_for_a_head_is_a_head(
    loop: str, head: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario(api: Api) -> None:
        client = await api.connect()
        await client.stream.send(head + b"\r\nhost: localhost\r\n\r\n")
        said = await rest(client.stream)
        assert said.startswith(b"HTTP/1.1 ")
        assert said.endswith(b"\r\n\r\n")

    play(loop, scenario)
    assert capfd.readouterr() == ("", "")


def test_a_client_that_goes_away_is_missed_though_it_has_asked_for_very_much_more(loop: str) -> None:
    async def scenario(api: Api) -> None:
        client = await api.connect()
        await client.stream.send(post(body(prompt=ENDLESS)))
        while not api.begun:
            await anyio.sleep(0.005)
        with suppress(anyio.BrokenResourceError):
            await client.stream.send(post(body()) * 10_000)
        await client.stream.aclose()
        await api.idle()

    play(loop, scenario)


def test_a_target_may_name_the_server(loop: str) -> None:
    async def scenario(api: Api) -> None:
        client = await api.connect()
        await client.stream.send(
            b"GET http://localhost/v1/models?a HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        assert (await rest(client.stream)).startswith(b"HTTP/1.1 200 ")

    play(loop, scenario)


def test_an_application_that_fails_costs_one_connection(loop: str) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if scope["path"] == "/fails":
            raise ValueError("for a test")
        await send({"type": "http.response.body", "body": b"ok" if scope["path"] != "/lies" else b"more"})

    async def scenario(api: Api) -> None:
        for path in (b"/fails", b"/lies"):
            client = await api.connect()
            await client.stream.send(b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % path)
            assert await rest(client.stream) == b""

    play(loop, scenario, app)


def test_who_does_not_take_the_answer_is_not_waited_for(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "STALLED_S", 0.05)
    done = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while scope["path"] == "/endless":
                await send({"type": "http.response.body", "body": b"x" * 1_000_000, "more_body": True})
        finally:
            done.set()
        await send({"type": "http.response.body", "body": b"ok"})

    async def scenario(api: Api) -> None:
        client = await api.connect()
        await client.stream.send(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await done.wait()

    play(loop, scenario, app)


@pytest.mark.parametrize(
    ("files", "connections"), [(1_024, 768), (1_048_576, 8_192), (resource.RLIM_INFINITY, 8_192)]
)
def test_a_quarter_of_the_files_is_left_for_the_roles(
    files: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert http1.connections_allowed() == connections


def test_beyond_what_may_be_open_the_oldest_idle_connection_is_closed(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1, "connections_allowed", lambda: 8)

    async def scenario(api: Api) -> None:
        idle = [await api.connect() for _ in range(4)]
        assert (await idle[0].ask("GET", "/v1/models"))[0] == 200, "so it is not the oldest any more"
        busy = [await api.connect() for _ in range(7)]
        for client in busy:
            await client.stream.send(post(body(prompt=ENDLESS, stream=True)))
            await client.stream.receive()
        for client in idle[1:]:
            assert await rest(client.stream) == b""
        status, said = await idle[0].ask("POST", "/v1/completions", body())
        assert (status, said["error"]["type"]) == (503, "server_error"), "as many as may be are under way"
        assert await rest(idle[0].stream) == b""
        for client in busy:
            await client.stream.aclose()
        await api.idle()

    play(loop, scenario)
