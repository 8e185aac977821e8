"""The worlds that the contract of the pumps is tried in: each loop over sockets, and trio over memory."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import attrs
import trio
import trio.testing

import kvsp_asyncio
import kvsp_trio
from kvsp_core.heads import Request, Response
from kvsp_h2 import (
    BodyEnded,
    ContinueReceived,
    Credentials,
    DataReceived,
    Event,
    ExchangeEnded,
    OutputReady,
    RequestReceived,
    ResponseReceived,
    WireLimits,
)
from kvsp_h2.pool import Call, Pool, PoolLimits
from kvsp_services.pki import Issued, issue
from tests.adapters.certificates import CLIENT_URI, Certificates

Scenario = Callable[["World"], Awaitable[None]]


@attrs.frozen
class Kind:
    """A loop and what connections run over."""

    name: str
    backend: str
    options: dict[str, Any] = attrs.field(factory=dict)
    in_memory: bool = False


KINDS = (
    Kind("asyncio", "asyncio"),
    Kind("uvloop", "asyncio", {"use_uvloop": True}),
    Kind("trio", "trio"),
    Kind("trio-memory", "trio", in_memory=True),
)


class Serving:
    """A small service: echoes bodies, answers blocks, refuses, and is told what to do by paths."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.digests: dict[tuple[int, int], Any] = {}
        self.paths: dict[tuple[int, int], str] = {}
        self.links: list[Any] = []
        self.block = bytes(range(256)) * 4096
        self.held: list[tuple[Any, int]] = []
        self.is_deaf = False
        """Whether octets of bodies wait to be acknowledged; then `unread` has them."""
        self.unread: list[Callable[[], None]] = []

    def on_event(self, link: Any, event: Event) -> None:
        http = link.http if link.connection.http is not None else None
        self.events.append(event)
        if link not in self.links:
            self.links.append(link)
        match event:
            case RequestReceived(stream_id, request, ended):
                self.begin(link, http, stream_id, request, ended)
            case DataReceived(stream_id, data):
                if (id(link), stream_id) in self.digests:
                    self.digests[id(link), stream_id].update(data)
                if self.is_deaf:
                    self.unread.append(partial(_acknowledge, link, stream_id, len(data)))
                else:
                    http.acknowledge(stream_id, len(data))
            case BodyEnded(stream_id) if (id(link), stream_id) in self.digests:
                digest = self.digests.pop((id(link), stream_id)).hexdigest().encode()
                http.respond(stream_id, Response(status=201, content_length=64), digest)
            case _:
                pass

    def begin(self, link: Any, http: Any, stream_id: int, request: Request, ended: bool) -> None:
        match request.path:
            case "raise":
                raise RuntimeError("a bug in the service")
            case "hold":
                self.held.append((link, stream_id))
            case "refuse":
                http.respond(stream_id, Response(status=413, content_length=0))
            case "half":
                http.respond(stream_id, Response(status=200, content_length=100), b"x" * 50, end=False)
                self.held.append((link, stream_id))
            case _ if ended:
                http.respond(stream_id, Response(status=200, content_length=len(self.block)), self.block)
            case _:
                self.digests[id(link), stream_id] = hashlib.sha256()
                http.accept_body(stream_id)


def _acknowledge(link: Any, stream_id: int, count: int) -> None:
    link.http.acknowledge(stream_id, count)
    link.flush()


class Outcome:
    """What one call was told; `done` is set at its end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.body = bytearray()
        self.call: Call | None = None
        self.done = anyio.Event()
        self.answered = anyio.Event()
        self.feed: list[bytes] = []
        self.slow = False

    def on_event(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            self.body += event.data
            if not self.slow:
                assert self.call is not None
                self.call.acknowledge(len(event.data))
            return
        self.events.append(event)
        if isinstance(event, ResponseReceived):
            self.answered.set()
        if isinstance(event, ContinueReceived | OutputReady):
            self.more()
        if isinstance(event, ExchangeEnded):
            self.done.set()

    def more(self) -> None:
        assert self.call is not None
        while self.feed:
            piece = self.feed.pop()
            if not self.call.send_data(piece, end=not self.feed):
                break

    @property
    def end(self) -> ExchangeEnded:
        last = self.events[-1]
        assert isinstance(last, ExchangeEnded)
        return last

    @property
    def status(self) -> int:
        [response] = [e.response for e in self.events if isinstance(e, ResponseReceived)]
        return response.status


class World:
    """A network with one service and its pool."""

    def __init__(self, network: Any, kind: Kind, certificates: Certificates) -> None:
        self.network = network
        self.kind = kind
        self.certificates = certificates
        self.serving = Serving()
        self.listener: Any = None
        self.pool: Pool
        self.issued: Issued
        self.credentials: Credentials
        self.base_uri = ""
        self.dialed = 0

    async def listen(self, *, limits: WireLimits | None = None, **options: Any) -> None:
        """Begin to serve; again on the same port where it was served before."""
        serve = self.serving.on_event
        if self.listener is not None:
            self.listener = await self.network.listen(
                self.credentials, self.base_uri, serve, port=self.listener.port, limits=limits, **options
            )
            return
        # The certificate names the port, which is known once it listens.
        folder = self.certificates.folder
        first = issue(folder, uri="https://localhost/", name="listening", hosts=["127.0.0.1"])
        self.credentials = self.certificates.credentials(first)
        self.listener = await self.network.listen(
            self.credentials, "https://localhost/kvsp/", serve, limits=limits, **options
        )
        self.base_uri = f"https://localhost:{self.listener.port}/kvsp/"
        self.issued = issue(folder, uri=self.base_uri, name="listening", hosts=["127.0.0.1"])
        self.credentials.reload()

    def client_credentials(self) -> Credentials:
        return self.certificates.credentials(self.certificates.client)

    def connect_to(
        self, *, credentials: Credentials | None = None, limits: WireLimits | None = None, **pool: int
    ) -> None:
        """Make the pool of calls."""
        options: dict[str, Any] = {"connect": self.connect} if self.kind.in_memory else {}
        self.pool = self.network.service(
            credentials or self.client_credentials(),
            self.base_uri,
            limits=limits,
            pool_limits=PoolLimits(**pool),
            **options,
        )

    async def connect(self) -> trio.abc.Stream:
        """Open a connection in memory."""
        self.dialed += 1
        if not self.listener._accepting.cancel_called:
            ours, theirs = trio.testing.memory_stream_pair()
            self.network.nursery.start_soon(self.listener.serve, theirs)
            return ours
        raise ConnectionRefusedError

    async def connect_silently(self) -> anyio.abc.AsyncResource:
        """Open a connection on which nothing is ever said."""
        if self.kind.in_memory:
            return await self.connect()  # type: ignore[return-value]
        return await anyio.connect_tcp("127.0.0.1", self.listener.port)

    def call(self, path: str, body: bytes = b"", *, method: str = "", **options: Any) -> Outcome:
        """Make a call; its body is given at once unless `feed` has pieces of it."""
        outcome = Outcome()
        feed = options.pop("feed", None)
        size = len(body) if feed is None else sum(map(len, feed))
        request = Request(method=method or ("PUT" if size else "GET"), path=path, content_length=size)
        if feed is not None:
            outcome.feed = feed[::-1]
            options["end"] = False
        outcome.call = self.pool.call(request, body, on_event=outcome.on_event, **options)
        return outcome

    async def fetch(self, path: str, body: bytes = b"", **options: Any) -> Outcome:
        """Make a call and wait for its end."""
        outcome = self.call(path, body, **options)
        with anyio.fail_after(20):
            await outcome.done.wait()
        return outcome


@asynccontextmanager
async def open_world(kind: Kind, certificates: Certificates) -> AsyncIterator[World]:
    module: Any = kvsp_asyncio if kind.backend == "asyncio" else kvsp_trio
    async with module.open_network() as network:
        yield World(network, kind, certificates)


def play(kind: Kind, certificates: Certificates, scenario: Scenario) -> None:
    """Play a scenario in a world; in memory, time jumps when everybody waits."""
    options = dict(kind.options)
    if kind.in_memory:
        options["clock"] = trio.testing.MockClock(autojump_threshold=0.01)

    async def main() -> None:
        async with open_world(kind, certificates) as world:
            await scenario(world)

    anyio.run(main, backend=kind.backend, backend_options=options)


def open_descriptors() -> set[str]:
    """Return what files and sockets this process has open."""
    return {f"{p.name}:{p.readlink()}" for p in Path("/proc/self/fd").iterdir() if p.is_symlink()}


__all__ = [
    "CLIENT_URI",
    "KINDS",
    "Kind",
    "Outcome",
    "Serving",
    "World",
    "open_descriptors",
    "open_world",
    "play",
]
