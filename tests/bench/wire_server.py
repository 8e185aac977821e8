"""A server to measure: ``python -m tests.bench.wire_server KIND PORT FOLDER [--anybody]``.

Ours are real roles behind their driver, as `kvsp serve` runs them: a holder with blocks of 2 and 64 MiB in
host memory, which authorizes who asks and answers with Repr-Digest, and beside it, on the next port, an index
for small requests. FOLDER has the certificates. With ``--anybody`` no client certificate is asked for, since
h2load has none; who has none is then a principal of the policy like any other.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import anyio

import kvsp_asyncio
from kvsp_core.container import ContainerHeader
from kvsp_core.resources import RoleName
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.holder import Holder
from kvsp_core.roles.holdings import TierLimits
from kvsp_core.roles.index import Index
from kvsp_core.roles.role import BlockName, StoredBlock
from kvsp_h2 import Credentials
from kvsp_services.embedding import serve_role
from kvsp_services.stores.blocks import MemoryTier
from tests.bench.wire_plain import PlainServer, asgi_application

__all__ = ["BLOCKS", "CLIENT_URI", "LOOKUP", "path_of", "run"]

CLIENT_URI: Final = "spiffe://bench.example/client"
LAYERS: Final = 32
COMPAT, SCOPE = "c" * 64, "a" * 32
BLOCKS: Final = {"2m": 2 << 20, "64m": 64 << 20}
TIER: Final = "host"
LOOKUP: Final = {"compat_id": COMPAT, "scope_id": SCOPE, "block_keys": [f"{n:064x}" for n in range(14)]}
"""A lookup of 1 KiB, of which the index knows nothing: the answer is short, as is an echo's."""


def path_of(size: str) -> str:
    """Return the path of a block below the base URI."""
    return f"blocks/{COMPAT}/{SCOPE}/{hashlib.sha256(size.encode()).hexdigest()}"


def make_blocks() -> dict[str, tuple[StoredBlock, memoryview]]:
    """Return blocks of random octets, by the paths they are served under."""
    found = {}
    for size, size_bytes in BLOCKS.items():
        section = size_bytes // LAYERS // 2
        header = ContainerHeader(codec=1, token_count=16, sections=((section, section),) * LAYERS)
        data = memoryview(os.urandom(1 << 20) * (size_bytes >> 20)).toreadonly()
        layers = (data[at : at + 2 * section] for at in range(0, size_bytes, 2 * section))
        name = BlockName(COMPAT, SCOPE, path_of(size).rsplit("/", 1)[1])
        whole = hashlib.sha256(header.encode())
        whole.update(data)
        digests = tuple(hashlib.sha256(layer).hexdigest() for layer in layers)
        found[path_of(size)] = StoredBlock(name, header, digests, whole.hexdigest()), data
    return found


class Roles:
    """The holder and the index that are served, and what they let whom do."""

    def __init__(self, base_uri: str, index_uri: str, *, anybody: bool) -> None:
        clients = {CLIENT_URI, ""} if anybody else {CLIENT_URI}
        policy = Policy(
            {client: [RoleName.INSTANCE] for client in clients}, {SCOPE: ScopeRules(read=clients)}
        )
        self.tier = MemoryTier(1 << 30)
        for block, data in make_blocks().values():
            self.tier.store(block, data)
        self.holder = Holder(
            base_uri=base_uri,
            policy=policy,
            tiers={TIER: TierLimits(capacity_bytes=1 << 30)},
            random_bytes=os.urandom,
            now_ms=0,
        )
        self.index = Index(base_uri=index_uri, policy=policy)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["asyncio", "uvloop", "trio", "h2", "hypercorn"])
    parser.add_argument("port", type=int)
    parser.add_argument("index_port", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--anybody", action="store_true")
    given = parser.parse_args()
    folder: Path = given.folder
    if given.kind in ("h2", "hypercorn"):
        blocks = {
            path: memoryview(b"".join((b.header.encode(), d))) for path, (b, d) in make_blocks().items()
        }
        serve_plain(given.kind, given.port, folder, blocks)
        return
    ports = (given.port, given.index_port)
    roles = Roles(*(f"https://localhost:{port}/kvsp/" for port in ports), anybody=given.anybody)
    holder, index = (
        Credentials(
            folder / f"server{port}.pem",
            folder / f"server{port}.key",
            folder / "ca.pem",
            require_client_certificate=not given.anybody,
        )
        for port in ports
    )

    async def serve() -> None:
        async with (
            serve_role(roles.holder, holder, tiers={TIER: roles.tier}, host="127.0.0.1"),
            serve_role(roles.index, index, host="127.0.0.1"),
        ):
            print("ready", flush=True)
            await anyio.sleep_forever()

    run(given.kind, serve)


def run(kind: str, main: Any) -> None:
    """Run a coroutine function on the loop of this name."""
    if kind == "trio":
        import trio

        trio.run(main)
    elif kind == "uvloop":
        kvsp_asyncio.run(main)
    else:
        asyncio.run(main())


def serve_plain(kind: str, port: int, folder: Path, blocks: Mapping[str, memoryview]) -> None:
    """Serve with what others offer, as it comes."""
    if kind == "hypercorn":
        from hypercorn.asyncio import serve
        from hypercorn.config import Config

        config = Config()
        config.bind = [f"127.0.0.1:{port}"]
        config.certfile, config.keyfile = str(folder / f"server{port}.pem"), str(folder / f"server{port}.key")
        config.alpn_protocols = ["h2"]
        config.h2_max_inbound_frame_size = 1 << 20
        config.keep_alive_max_requests = 1 << 30
        config.loglevel = "ERROR"
        print("ready", flush=True)
        run("uvloop", lambda: serve(asgi_application(blocks), config))
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / f"server{port}.pem", folder / f"server{port}.key")
    context.set_alpn_protocols(["h2"])

    async def listen() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: PlainServer(blocks), "127.0.0.1", port, ssl=context)
        print("ready", flush=True)
        async with server:
            await server.serve_forever()

    run("uvloop", listen)


if __name__ == "__main__":
    sys.exit(main())
