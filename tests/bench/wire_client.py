"""A client to measure: ``python -m tests.bench.wire_client KIND PORT FOLDER PATH COUNT AT_ONCE [--verify]``.

Prints seconds, CPU seconds and octets. With ``--verify`` every block goes through the receiver of the
services: decoded into pooled memory, SHA-256 of the whole for Repr-Digest and of each layer.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
import time
from pathlib import Path
from typing import Any

import anyio

import kvsp_asyncio
import kvsp_trio
from kvsp_core.heads import Request
from kvsp_h2 import Credentials, DataPlaced, DataReceived, Event, ExchangeEnded, ResponseReceived, WireLimits
from kvsp_services.buffers import BlockBuffer, BufferPool
from kvsp_services.receivers import ContainerReceiver
from tests.bench.wire_plain import PlainClient
from tests.bench.wire_server import LAYERS, run


class Fetching:
    """Fetches a path a number of times, some at a time, into pooled memory."""

    def __init__(self, pool: Any, path: str, count: int, *, verify: bool) -> None:
        self.memory = BufferPool()
        self._pool = pool
        self._request = Request(method="GET", path=path)
        self._left = count
        self._kind = _Verified if verify else _Plain
        self._under_way = 0
        self.received = 0
        self.done = anyio.Event()

    def fetch(self) -> None:
        if not self._left:
            return
        self._left -= 1
        self._under_way += 1
        one = self._kind(self)
        one.call = self._pool.call(self._request, on_event=one.on_event)

    def ended(self, event: ExchangeEnded, received: int) -> None:
        if not event.complete:
            raise SystemExit(f"a block did not come as it should: {event.reason}")
        self.received += received
        self._under_way -= 1
        self.fetch()
        if not self._under_way:
            self.done.set()


class _Plain:
    """A block on its way in, not looked at."""

    call: Any

    def __init__(self, fetching: Fetching) -> None:
        self._fetching = fetching
        self._filled = 0

    def on_event(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            count = event.data.nbytes
            self._view[self._filled : self._filled + count] = event.data
            self._filled += count
            self.call.acknowledge(count)
        elif isinstance(event, ResponseReceived):
            size = event.response.content_length
            assert size is not None
            self._memory = self._fetching.memory.acquire(size)
            self._view = memoryview(self._memory)
            self.call.receive_into(lambda: self._view[self._filled :])
        elif isinstance(event, DataPlaced):
            self._filled += event.size_bytes
            self.call.acknowledge(event.size_bytes)
        elif isinstance(event, ExchangeEnded):
            self._fetching.memory.release(self._memory)
            self._fetching.ended(event, self._filled)


class _Verified:
    """A block on its way in, decoded and verified as the services do it."""

    call: Any

    def __init__(self, fetching: Fetching) -> None:
        self._fetching = fetching
        self._buffer = BlockBuffer(fetching.memory)

    def on_event(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            self._receiver.feed(event.data)
            self.call.acknowledge(event.data.nbytes)
        elif isinstance(event, ResponseReceived):
            self._digest = event.response.repr_digest
            self._receiver = ContainerReceiver(self._buffer, 1 << 30, event.response.content_length)
            self.call.receive_into(lambda: self._receiver.free)
        elif isinstance(event, DataPlaced):
            self._receiver.placed(event.size_bytes)
            self.call.acknowledge(event.size_bytes)
        elif isinstance(event, ExchangeEnded):
            self._receiver.end()
            if self._receiver.sha256 != self._digest or len(self._receiver.layer_digests) != LAYERS:
                raise SystemExit("a block is not what its digest says")
            header = self._buffer.header
            assert header is not None
            self._buffer.free()
            self._fetching.ended(event, header.size_bytes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["asyncio", "uvloop", "trio", "h2", "httpx"])
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("path")
    parser.add_argument("count", type=int)
    parser.add_argument("at_once", type=int)
    parser.add_argument("--verify", action="store_true")
    given = parser.parse_args()
    folder: Path = given.folder
    base_uri = f"https://localhost:{given.port}/kvsp/"
    started: list[float] = []

    def report(received: int) -> None:
        wall, cpu = started
        print(f"{time.perf_counter() - wall:.6f} {time.process_time() - cpu:.6f} {received}", flush=True)

    def start() -> None:
        started[:] = time.perf_counter(), time.process_time()

    async def ours() -> None:
        credentials = Credentials(folder / "client.pem", folder / "client.key", folder / "ca.pem")
        module: Any = kvsp_trio if given.kind == "trio" else kvsp_asyncio
        limits = WireLimits(stream_window_bytes=4 << 20, connection_window_bytes=32 << 20)
        async with module.open_network() as network:
            pool = network.service(credentials, base_uri, limits=limits)
            warm = Fetching(pool, given.path, 1, verify=given.verify)
            warm.fetch()
            await warm.done.wait()
            start()
            fetching = Fetching(pool, given.path, given.count, verify=given.verify)
            for _ in range(given.at_once):
                fetching.fetch()
            await fetching.done.wait()
            report(fetching.received)

    async def plain() -> None:
        context = _context(folder)
        loop = asyncio.get_running_loop()
        start()
        _, protocol = await loop.create_connection(
            lambda: PlainClient("/kvsp/" + given.path, "localhost", given.count, given.at_once),
            "127.0.0.1",
            given.port,
            ssl=context,
            server_hostname="localhost",
        )
        await protocol.done
        report(protocol.received)

    async def with_httpx() -> None:
        import httpx

        received = 0
        async with httpx.AsyncClient(http2=True, http1=False, verify=_context(folder), timeout=60) as client:
            await client.get(base_uri + given.path)
            start()
            left = iter(range(given.count))

            async def worker() -> None:
                nonlocal received
                for _ in left:
                    received += len((await client.get(base_uri + given.path)).content)

            await asyncio.gather(*(worker() for _ in range(given.at_once)))
        report(received)

    run(
        "trio" if given.kind == "trio" else "asyncio" if given.kind in ("asyncio", "httpx") else "uvloop",
        {"h2": plain, "httpx": with_httpx}.get(given.kind, ours),
    )


def _context(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / "client.pem", folder / "client.key")
    context.set_alpn_protocols(["h2"])
    return context


if __name__ == "__main__":
    main()
