"""A role behind real connections: TLS, HTTP/2, a pump, the driver, tiers and a store, on every loop."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import pytest
import trio

import kvsp_asyncio
import kvsp_trio
from kvsp_core.container_header import ContainerHeader
from kvsp_core.heads import Request, Response
from kvsp_core.roles.role import (
    AnswerForm,
    AnswerReceived,
    BlockArrived,
    BlockBody,
    BlockName,
    BlockReceived,
    BodyArrived,
    BodyFailed,
    Call,
    CallFailed,
    Effect,
    FreeBuffer,
    Input,
    JobDone,
    LineReceived,
    OutputReady,
    Persist,
    Put,
    ReadBlock,
    ReceiveBlock,
    ReceiveBody,
    RequestReceived,
    Respond,
    Send,
    Store,
    StreamEnded,
)
from kvsp_h2 import Credentials
from kvsp_services.demo.cluster import free_ports
from kvsp_services.driver import Driver
from kvsp_services.loops import AsyncioLoop, TrioLoop, Workers
from kvsp_services.pki import init_ca, issue
from kvsp_services.stores.block_files import FileTier
from kvsp_services.stores.durable import DurableStore, GroupCommitter
from kvsp_services.wire import ServedRole, ServicePeers

KEY = bytes(range(32))
NAME = BlockName("c" * 64, "a" * 32, "b" * 64)
SECTION_BYTES = 64 << 10
HEADER = ContainerHeader(codec=1, token_count=16, sections=((SECTION_BYTES, SECTION_BYTES),) * 8)
CONTAINER = HEADER.encode() + bytes(range(256)) * (HEADER.data_bytes // 256)
SHA256 = hashlib.sha256(CONTAINER).hexdigest()
LINES = 200


class Shelf:
    """A role that keeps one block on disk, counts to a number in a stream, and remembers who asked."""

    def __init__(self, base_uri: str) -> None:
        self.base_uri = base_uri
        self.clients: list[str] = []
        self.counting: dict[int, int] = {}

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        return ()

    def next_deadline_ms(self) -> int | None:
        return None

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        match item:
            case RequestReceived(number, client, Request(method="PUT")):
                self.clients.append(client)
                return (ReceiveBlock(number, number, 1 << 22),)
            case BlockArrived(number, buffer):
                return (Store(number, buffer, NAME, "local-storage"),)
            case JobDone(job, header=None):
                write = Persist((Put("shelf", str(job), b"stored"),))
                return (write, Respond(job, Response(status=201)), FreeBuffer(job))
            case RequestReceived(number, _, Request(method="GET", path="block")):
                return (ReadBlock(number, number, NAME, "local-storage"),)
            case JobDone(job, header=header, repr_digest=digest):
                assert header is not None
                head = Response(status=200, content_length=header.size_bytes, repr_digest=digest)
                return (Respond(job, head, BlockBody(job)), FreeBuffer(job))
            case RequestReceived(number, _, Request(method="GET", path="count")):
                self.counting[number] = 0
                return (
                    Respond(number, Response(status=200, content_length=None), streaming=True),
                    *self.next(number),
                )
            case OutputReady(number):
                return self.next(number)
            case RequestReceived(number, _, Request(method="POST")):
                return (ReceiveBody(number, 1000),)
            case BodyArrived(number, body):
                return (Respond(number, Response(status=200, content_length=len(body)), body[::-1]),)
            case BodyFailed(number, problem):
                return (Respond(number, Response(status=problem.status)),)
            case _:
                return ()

    def next(self, number: int) -> tuple[Effect, ...]:
        self.counting[number] += 1
        line = b"%d\n" % self.counting[number]
        return (Send(number, line * 100, end=self.counting[number] == LINES),)


class Visitor:
    """A role that only calls: each call of its list, one after the other."""

    def __init__(self, calls: list[Call]) -> None:
        self.base_uri = "https://127.0.0.1:1/visitor/"
        self.calls = calls
        self.heard: list[Input] = []
        self.done: Callable[[], None] = lambda: None

    def start(self, now_ms: int) -> tuple[Effect, ...]:
        return (self.calls[0],)

    def next_deadline_ms(self) -> int | None:
        return None

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        self.heard.append(item)
        if not isinstance(item, (AnswerReceived, BlockReceived, StreamEnded, CallFailed)):
            return ()
        if len(self.calls) == item.call_id:
            self.done()
            return ()
        return (self.calls[item.call_id],)


@attrs.define
class Party:
    """Everything on one loop, put together as a process does it."""

    network: Any
    loop: Any
    directory: Path
    failures: list[Exception] = attrs.field(factory=list)

    def credentials(self, name: str) -> Credentials:
        return Credentials(
            self.directory / f"{name}.pem", self.directory / f"{name}.key", self.directory / "ca.pem"
        )

    async def serve(self, role: Shelf) -> GroupCommitter:
        committer = GroupCommitter(DurableStore(self.directory / "state.sqlite", KEY, role.base_uri))
        tier = FileTier(self.directory / "blocks", KEY, 1 << 30)
        credentials = self.credentials("shelf")
        driver = Driver(
            role,
            self.loop,
            ServicePeers.of_network(self.network, credentials),
            committer=committer,
            tiers={"local-storage": tier},
            failed=self.failures.append,
        )
        driver.start()
        served = ServedRole(driver)
        port = urlsplit(role.base_uri).port
        await self.network.listen(credentials, role.base_uri, served.on_event, port=port)
        return committer

    def visit(self, visitor: Visitor, credentials: Credentials) -> None:
        driver = Driver(
            visitor,
            self.loop,
            ServicePeers.of_network(self.network, credentials),
            committer=None,  # type: ignore[arg-type]
            failed=self.failures.append,
        )
        driver.start()


def on_trio(party: Callable[[Party], Awaitable[None]], directory: Path) -> None:

    async def main() -> None:
        workers = Workers()
        with trio.fail_after(120):
            async with kvsp_trio.open_network() as network, trio.open_nursery() as nursery:
                await party(Party(network, TrioLoop(nursery, workers), directory))
                nursery.cancel_scope.cancel()
        workers.close()

    trio.run(main)


def on_asyncio(party: Callable[[Party], Awaitable[None]], directory: Path, run: Any = asyncio.run) -> None:

    async def main() -> None:
        workers = Workers()
        async with asyncio.timeout(120), kvsp_asyncio.open_network() as network:
            await party(Party(network, AsyncioLoop(workers), directory))
        workers.close()

    run(main())


def on_uvloop(party: Callable[[Party], Awaitable[None]], directory: Path) -> None:
    uvloop = pytest.importorskip("uvloop")
    on_asyncio(party, directory, uvloop.run)


LOOPS = {"trio": on_trio, "asyncio": on_asyncio, "uvloop": on_uvloop}


def calls_of(base_uri: str) -> list[Call]:
    def call(number: int, method: str, path: str, **options: Any) -> Call:
        body = options.pop("body", b"")
        head = Request(
            method=method, path=path, content_length=len(body), repr_digest=options.pop("digest", None)
        )
        return Call(call_id=number, base_uri=base_uri, request=head, body=body, timeout_ms=60_000, **options)

    return [
        call(1, "PUT", "block", body=CONTAINER, digest=SHA256),
        call(2, "GET", "block", form=AnswerForm.BLOCK, buffer=1),
        call(3, "GET", "count", form=AnswerForm.LINES),
        call(4, "POST", "reverse", body=b"stressed"),
        call(5, "POST", "reverse", body=b"x" * 1001),
        call(6, "PUT", "block", body=CONTAINER, digest="0" * 64),
    ]


@pytest.mark.requirement("HT-1", "HT-2", "HT-3")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_role_is_served_and_called(loop: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    base_uri = f"https://127.0.0.1:{port}/deep/path/kvsp/"
    init_ca(tmp_path)
    issue(tmp_path, uri=base_uri, name="shelf")
    issue(tmp_path, uri="spiffe://example/visitor", name="visitor")
    shelf, visitor = Shelf(base_uri), Visitor(calls_of(base_uri))
    finished: dict[str, Any] = {}

    async def party(party: Party) -> None:
        over = trio.Event() if loop == "trio" else asyncio.Event()
        visitor.done = over.set
        committer = await party.serve(shelf)
        party.visit(visitor, party.credentials("visitor"))
        await over.wait()
        finished.update(failures=party.failures)
        committer.close()

    LOOPS[loop](party, tmp_path)
    assert finished["failures"] == []
    put, block, ended, reversed_, refused, mismatch = [
        item
        for item in visitor.heard
        if isinstance(item, (AnswerReceived, BlockReceived, StreamEnded, CallFailed))
    ]
    assert isinstance(put, AnswerReceived)
    assert put.response.status == 201
    assert isinstance(block, BlockReceived)
    assert block.header == HEADER
    assert block.repr_digest_valid
    assert ended == StreamEnded(3)
    lines = [int(item.line) for item in visitor.heard if isinstance(item, LineReceived)]
    assert lines == [n for n in range(1, LINES + 1) for _ in range(100)]
    assert isinstance(reversed_, AnswerReceived)
    assert reversed_.body == b"desserts"
    assert isinstance(refused, AnswerReceived)
    assert refused.response.status == 413
    assert isinstance(mismatch, AnswerReceived)
    assert mismatch.response.status == 422
    assert shelf.clients == ["spiffe://example/visitor"] * 2
    store = DurableStore(tmp_path / "state.sqlite", KEY, base_uri)
    assert store.load() == {"shelf": {"1": b"stored"}}
    store.close()
