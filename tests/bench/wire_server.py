"""A server to measure: ``python -m tests.bench.wire_server KIND PORT FOLDER [--anybody]``.

It answers GET with a block of 2 or 64 MiB from memory, as a holder does: after a look at who asks, with
Repr-Digest. POST is read as JSON, checked and answered with JSON. FOLDER has the certificates. With
``--anybody`` no client certificate is asked for, since h2load has none.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import ssl
import sys
from pathlib import Path
from typing import Any

import msgspec

import kvsp_asyncio
import kvsp_trio
from kvsp_core.answers import block_response, json_response, problem_response
from kvsp_core.problems import NOT_FOUND, SCOPE_DENIED, Problem
from kvsp_h2 import (
    BodyEnded,
    ConnectionEnded,
    Credentials,
    DataReceived,
    Established,
    Event,
    ExchangeEnded,
    RequestReceived,
)
from tests.bench.wire_plain import PlainServer, asgi_application

CLIENT_URI = "spiffe://bench.example/client"


class Document(msgspec.Struct):
    keys: list[str]
    ttl_ms: int


class Holder:
    """What it serves, and to whom."""

    def __init__(self, *, anybody: bool) -> None:
        self.blocks = {
            f"blocks/{size}m": memoryview(os.urandom(1 << 20) * size).toreadonly() for size in (2, 64)
        }
        self.digests = {path: hashlib.sha256(block).hexdigest() for path, block in self.blocks.items()}
        self.allowed = {"", CLIENT_URI} if anybody else {CLIENT_URI}
        self.principals: dict[Any, str] = {}
        self.bodies: dict[tuple[Any, int], bytearray] = {}

    def on_event(self, link: Any, event: Event) -> None:
        match event:
            case RequestReceived(stream_id, request, _):
                if self.principals.get(link) not in self.allowed:
                    link.http.respond(stream_id, *problem_response(Problem(SCOPE_DENIED)))
                elif request.method == "GET":
                    self.answer_block(link, stream_id, request.path)
                else:
                    self.bodies[link, stream_id] = bytearray()
                    link.http.accept_body(stream_id)
            case DataReceived(stream_id, data):
                self.bodies[link, stream_id] += data
                link.http.acknowledge(stream_id, len(data))
            case BodyEnded(stream_id):
                document = msgspec.json.decode(self.bodies.pop((link, stream_id)), type=Document)
                link.http.respond(stream_id, *json_response(msgspec.json.encode(document)))
            case ExchangeEnded(stream_id):
                self.bodies.pop((link, stream_id), None)
            case Established(principal):
                self.principals[link] = principal
            case ConnectionEnded():
                self.principals.pop(link, None)
            case _:
                pass

    def answer_block(self, link: Any, stream_id: int, path: str) -> None:
        block = self.blocks.get(path)
        if block is None:
            link.http.respond(stream_id, *problem_response(Problem(NOT_FOUND)))
            return
        head = block_response(size_bytes=block.nbytes, repr_digest=self.digests[path], ttl_ms=60_000)
        link.http.respond(stream_id, head, block)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["asyncio", "uvloop", "trio", "h2", "hypercorn"])
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--anybody", action="store_true")
    given = parser.parse_args()
    folder: Path = given.folder
    holder = Holder(anybody=given.anybody)
    if given.kind in ("h2", "hypercorn"):
        serve_plain(given.kind, given.port, folder, holder)
        return
    credentials = Credentials(
        folder / "server.pem",
        folder / "server.key",
        folder / "ca.pem",
        require_client_certificate=not given.anybody,
    )
    base_uri = f"https://localhost:{given.port}/kvsp/"
    module: Any = kvsp_trio if given.kind == "trio" else kvsp_asyncio

    async def serve() -> None:
        async with module.open_network() as network:
            await network.listen(credentials, base_uri, holder.on_event, port=given.port)
            print("ready", flush=True)
            await (trio_forever() if given.kind == "trio" else asyncio.Event().wait())

    run(given.kind, serve)


async def trio_forever() -> None:
    import trio

    await trio.sleep_forever()


def run(kind: str, main: Any) -> None:
    """Run a coroutine function on the loop of this name."""
    if kind == "trio":
        import trio

        trio.run(main)
    elif kind == "uvloop":
        kvsp_asyncio.run(main)
    else:
        asyncio.run(main())


def serve_plain(kind: str, port: int, folder: Path, holder: Holder) -> None:
    """Serve with what others offer, as it comes."""
    if kind == "hypercorn":
        from hypercorn.asyncio import serve
        from hypercorn.config import Config

        config = Config()
        config.bind = [f"127.0.0.1:{port}"]
        config.certfile, config.keyfile = str(folder / "server.pem"), str(folder / "server.key")
        config.alpn_protocols = ["h2"]
        config.h2_max_inbound_frame_size = 1 << 20
        config.keep_alive_max_requests = 1 << 30
        config.loglevel = "ERROR"
        print("ready", flush=True)
        run("uvloop", lambda: serve(asgi_application(holder.blocks), config))
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.set_alpn_protocols(["h2"])

    async def listen() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: PlainServer(holder.blocks), "127.0.0.1", port, ssl=context)
        print("ready", flush=True)
        async with server:
            await server.serve_forever()

    run("uvloop", listen)


if __name__ == "__main__":
    sys.exit(main())
