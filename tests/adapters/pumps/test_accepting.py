"""Many who connect at once are let in a few at a time, so that those who are served have their turn."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise

import pytest

from kvsp_asyncio import open_network
from tests.adapters.certificates import SERVER_URI, Certificates

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
