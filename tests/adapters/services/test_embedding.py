"""A role embedded in a running loop: it is served while the block lasts, and leaves nothing behind."""

from __future__ import annotations

import gc
import socket
from pathlib import Path
from typing import Any

import anyio
import pytest

import kvsp_asyncio
import kvsp_trio
from kvsp_core.errors import KVSPError
from kvsp_core.heads import Request
from kvsp_core.resources import RoleName
from kvsp_core.roles.authorization import Policy
from kvsp_core.roles.index import Index
from kvsp_core.roles.role import Effect, Input
from kvsp_h2 import Credentials, Event, ExchangeEnded, ResponseReceived
from kvsp_services.embedding import serve_role
from kvsp_services.pki import PKIError, init_ca, issue
from tests.adapters.pumps.worlds import KINDS, Kind, open_descriptors

CLIENT = "spiffe://example/operator"
SOCKETS = [kind for kind in KINDS if not kind.in_memory]
on_each_loop = pytest.mark.parametrize("kind", SOCKETS, ids=lambda kind: kind.name)


class Place:
    """A base URI with its certificate, and that of a client."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self.uri = f"https://127.0.0.1:{self.port}/kvsp/"
        self.folder = folder
        init_ca(folder)
        issue(folder, uri=self.uri, name="index")
        issue(folder, uri=CLIENT, name="client")

    def credentials(self, name: str) -> Credentials:
        return Credentials(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.folder / "ca.pem")

    def index(self) -> Index:
        return Index(
            base_uri=self.uri, policy=Policy({self.uri: [RoleName.INDEX], CLIENT: [RoleName.OPERATOR]})
        )

    async def ask(self, kind: Kind, path: str) -> list[Event]:
        module: Any = kvsp_trio if kind.backend == "trio" else kvsp_asyncio
        events: list[Event] = []
        done = anyio.Event()

        def on_event(event: Event) -> None:
            events.append(event)
            if isinstance(event, ExchangeEnded):
                done.set()

        with anyio.fail_after(20):
            async with module.open_network() as network:
                pool = network.service(self.credentials("client"), self.uri)
                pool.call(Request(method="GET", path=path), on_event=on_event)
                await done.wait()
        return events


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def run(kind: Kind, main: Any) -> None:
    anyio.run(main, backend=kind.backend, backend_options=dict(kind.options))


@on_each_loop
def test_a_role_is_served_while_the_block_lasts(kind: Kind, place: Place) -> None:
    async def main() -> None:
        async with serve_role(place.index(), place.credentials("index")) as served:
            [answer] = [e for e in await place.ask(kind, "ext/index") if isinstance(e, ResponseReceived)]
            assert answer.response.status == 200
            assert served.connections == 0
        with pytest.raises(OSError, match="connect"):
            await anyio.connect_tcp("127.0.0.1", place.port)

    run(kind, main)
    gc.collect()
    before = open_descriptors()
    run(kind, main)
    gc.collect()
    assert open_descriptors() == before


@on_each_loop
def test_an_error_of_the_block_comes_out_as_it_is(kind: Kind, place: Place) -> None:
    async def main() -> None:
        async with serve_role(place.index(), place.credentials("index")):
            raise LookupError("of the program around it")

    with pytest.raises(LookupError, match="of the program around it"):
        run(kind, main)


@on_each_loop
def test_a_port_that_is_taken_is_said(kind: Kind, place: Place) -> None:
    async def main() -> None:
        async with serve_role(place.index(), place.credentials("index")):
            raise AssertionError("it cannot be served")

    with socket.create_server(("127.0.0.1", place.port)), pytest.raises(OSError, match="in use"):
        run(kind, main)


@on_each_loop
def test_a_certificate_of_another_role_is_said(kind: Kind, place: Place) -> None:
    async def main() -> None:
        async with serve_role(place.index(), place.credentials("client")):
            raise AssertionError("its peers would refuse it")

    with pytest.raises(PKIError, match=rf"client\.pem: it names {CLIENT} and not {place.uri}; issue one"):
        run(kind, main)


class Broken(Index):
    """An index with a bug."""

    def handle(self, item: Input, now_ms: int) -> tuple[Effect, ...]:
        raise RuntimeError("a bug")


@on_each_loop
def test_a_role_that_cannot_go_on_ends_the_block(kind: Kind, place: Place) -> None:
    reached = []

    async def main() -> None:
        role = Broken(base_uri=place.uri, policy=Policy({place.uri: [RoleName.INDEX]}))
        async with serve_role(role, place.credentials("index")):
            await place.ask(kind, "index")
            await anyio.sleep_forever()
        reached.append("the line after the block")

    with pytest.raises(KVSPError, match=r"cannot go on: a bug"):
        run(kind, main)
    assert not reached
