"""The loops on which the client's contract is tried."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from kvsp_client import Client, ClientSettings, Prefix, PrefixKeys
from kvsp_client.testing import Served

__all__ = ["KINDS", "found", "play"]

KINDS = {"asyncio": ("asyncio", {}), "uvloop": ("asyncio", {"use_uvloop": True}), "trio": ("trio", {})}


def play(kind: str, served: Served, scenario: Callable[[Client], Awaitable[None]], **settings: Any) -> None:
    """Play a scenario with a client on a loop."""

    async def main() -> None:
        with anyio.fail_after(120):
            options = ClientSettings(**settings)
            async with Client(served.credentials, index=served.index_uri, settings=options) as client:
                await scenario(client)

    backend, options = KINDS[kind]
    anyio.run(main, backend=backend, backend_options=options)


async def found(client: Client, keys: PrefixKeys) -> Prefix:
    """Look blocks up until all of them are there: a holder publishes what it was given, soon."""
    while len(prefix := await client.lookup(keys)) < len(keys):
        await anyio.sleep(0.01)
    return prefix
