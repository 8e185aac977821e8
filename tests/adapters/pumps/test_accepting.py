"""Many who connect at once are let in a few at a time, so that those who are served have their turn."""

from __future__ import annotations

import asyncio
import asyncio.constants
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import pytest

from kvsp_asyncio import open_network
from tests.adapters.certificates import SERVER_URI, Certificates
from tests.adapters.pumps.worlds import KINDS, Kind, World, play

MANY = 200


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_turn_of_the_loop_lets_few_in(certificates: Certificates, loop: str) -> None:
    runner = asyncio.run if loop == "asyncio" else pytest.importorskip("uvloop").run

    async def accept() -> list[int]:
        credentials = certificates.credentials(certificates.server)
        async with open_network() as network:
            listener = await network.listen(credentials, SERVER_URI, lambda *_: None)
            # All wait in the system before the loop turns: it has to hold that many.
            clients = [
                socket.create_connection(("127.0.0.1", listener.port), timeout=60) for _ in range(MANY)
            ]
            counts = [0]
            while counts[-1] < MANY:
                await asyncio.sleep(0)
                counts.append(len(listener.links))
            for client in clients:
                client.close()
        return [after - before for before, after in pairwise(counts)]

    assert max(runner(accept())) <= 32


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.in_memory], ids=lambda kind: kind.name)
def test_where_the_system_has_no_room_for_more_those_who_are_there_are_served(
    kind: Kind, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And others again once it has."""
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.01)

    async def scenario(world: World) -> None:
        await world.listen()
        world.connect_to(max_connections=1)
        assert (await world.fetch("block")).status == 200
        clients = [socket.socket() for _ in range(3)]
        with no_more_files():
            for client in clients:
                client.setblocking(False)
                with suppress(BlockingIOError):
                    client.connect(("127.0.0.1", world.listener.port))
            for _ in range(3):
                assert (await world.fetch("block")).status == 200
        world.connect_to()
        assert (await world.fetch("block")).status == 200
        for client in clients:
            client.close()

    play(kind, certificates, scenario)


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fileno in held:
            os.close(fileno)
