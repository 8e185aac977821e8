"""A client that is cancelled, at whatever checkpoint, leaves nothing at a holder: no exchange, no read, no
lease, no half a block in its files.
"""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import kvsp_asyncio
import kvsp_trio
from kvsp_core.container_header import ContainerHeader
from kvsp_core.heads import Request
from kvsp_core.resources import RoleName
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.holder import Holder
from kvsp_core.roles.holdings import TierLimits
from kvsp_h2 import Credentials, DataReceived, Event, ExchangeEnded, ResponseReceived
from kvsp_services.embedding import serve_role
from kvsp_services.pki import init_ca, issue
from kvsp_services.stores.block_files import FileTier
from tests.adapters.pumps.test_cancellation import Steps, run_counted
from tests.adapters.pumps.worlds import KINDS, Kind, open_descriptors

CLIENT = "spiffe://example/client"
COMPAT, SCOPE, KEY = "c" * 64, "a" * 32, "b" * 64
HEADER = ContainerHeader(codec=1, token_count=16, sections=((48 << 10, 48 << 10),) * 4)
CONTAINER = HEADER.encode() + os.urandom(HEADER.data_bytes)
LEASE_MS = 300
"""Short: one that was granted to a client which is gone runs out by itself."""
BLOCK = f"blocks/{COMPAT}/{SCOPE}/{KEY}"


class Client:
    """Calls one after the other, each awaited."""

    def __init__(self, network: Any, credentials: Credentials, uri: str) -> None:
        self.pool = network.service(credentials, uri)

    async def ask(self, method: str, path: str, body: bytes = b"", **fields: Any) -> tuple[int, bytes]:
        done, answer = anyio.Event(), bytearray()
        status = 0

        def on_event(event: Event) -> None:
            nonlocal status
            if isinstance(event, ResponseReceived):
                status = event.response.status
            elif isinstance(event, DataReceived):
                answer.extend(event.data)
                call.acknowledge(len(event.data))
            elif isinstance(event, ExchangeEnded):
                done.set()

        head = Request(method=method, path=path, content_length=len(body), **fields)
        call = self.pool.call(head, body, on_event=on_event)
        try:
            await done.wait()
        finally:
            call.cancel()
        return status, bytes(answer)

    async def work(self) -> None:
        """Store a block, lease it, fetch it and let it go."""
        media = {"content_type": "application/kvsp-block", "if_none_match": "*"}
        assert (await self.ask("PUT", BLOCK, CONTAINER, **media))[0] == 201
        wanted = json.dumps({"block_keys": [KEY], "ttl_ms": LEASE_MS}).encode()
        status, lease = await self.ask("POST", "leases", wanted, content_type="application/kvsp+json")
        assert status == 201
        assert await self.ask("GET", BLOCK) == (200, CONTAINER)
        released, _ = await self.ask("DELETE", f"leases/{json.loads(lease)['lease']}")
        assert released in (204, 404), "it may have run out on a busy machine"


class Place:
    """A holder's base URI and certificates."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.uri = f"https://127.0.0.1:{port}/kvsp/"
        self.folder = folder
        init_ca(folder)
        issue(folder, uri=self.uri, name="holder")
        issue(folder, uri=CLIENT, name="client")

    def credentials(self, name: str) -> Credentials:
        return Credentials(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.folder / "ca.pem")

    def tier(self, number: int) -> FileTier:
        return FileTier(self.folder / f"blocks{number}", bytes(range(32)), 1 << 30)

    def holder(self) -> Holder:
        return Holder(
            base_uri=self.uri,
            policy=Policy({CLIENT: [RoleName.INSTANCE]}, {SCOPE: ScopeRules(read={CLIENT}, write={CLIENT})}),
            tiers={"local-storage": TierLimits(capacity_bytes=1 << 30)},
            random_bytes=os.urandom,
            now_ms=0,
        )


async def until(check: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not check():
            await anyio.sleep(0.005)


def play(kind: Kind, place: Place, steps: Steps) -> int:
    """Have a client do its work, cut off at a step; return how many blocks the holder's files have then."""
    module: Any = kvsp_trio if kind.backend == "trio" else kvsp_asyncio
    tier = place.tier(steps.at)

    async def main() -> None:
        holder = place.holder()
        async with serve_role(holder, place.credentials("holder"), tiers={"local-storage": tier}) as served:
            await until(lambda: not holder._loading)
            with anyio.CancelScope() as scope:
                steps.scope = scope
                async with module.open_network() as network:
                    await Client(network, place.credentials("client"), place.uri).work()
            steps.scope = None
            await until(lambda: served.connections == 0)
            await until(lambda: not (holder._arrivals._arriving or holder._reading))
            assert not served.driver._requests
            assert not served.driver._calls
            assert not served.driver._buffers
            leases = holder._blocks.lease_table
            await until(lambda: not leases.listing(served.driver._loop.now_ms()))

    run_counted(kind, steps, main)
    tier.close()
    again = place.tier(steps.at)
    found = again.catalogue()
    for block in found:
        _, data = again.read(block.name, None, lambda size: memoryview(bytearray(size)))
        assert block.header.encode() + bytes(data) == CONTAINER
    again.close()
    assert not list((place.folder / f"blocks{steps.at}").rglob("*.part"))
    return len(found)


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.in_memory], ids=lambda kind: kind.name)
def test_nothing_is_left_at_a_holder_whenever_its_client_is_cancelled(kind: Kind, tmp_path: Path) -> None:
    place = Place(tmp_path)
    whole = Steps(0)
    assert play(kind, place, whole) == 1
    gc.collect()
    before = open_descriptors()
    kept = [play(kind, place, Steps(at)) for at in range(1, whole.count + 1)]
    assert kept[0] == 0
    assert kept[-1] == 1
    gc.collect()
    assert open_descriptors() == before
