"""A program that is cancelled, at whatever step, leaves no task, socket, call or lease behind."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from typing import Any

import anyio
import pytest

from kvsp_client import Client, PrefixMemory
from kvsp_client.testing import Served
from tests.adapters.client.scripted import MODEL, ScriptedHolder, content, keys_of, prefix_of
from tests.adapters.client.worlds import KINDS
from tests.adapters.pumps.test_cancellation import Steps, count
from tests.adapters.pumps.worlds import open_descriptors

STEPS = (*range(1, 24, 2), *range(24, 90, 9), *range(90, 400, 60))


async def scenario(client: Client, holder: ScriptedHolder, name: str) -> None:
    """Use all of it, one thing within the other."""
    keys, stored = keys_of(holder.served, name, 3), content(3)
    await client.store(holder.served.cache_uris[0], keys, stored.sections)
    await client.lookup(keys)
    prefix = prefix_of(keys, (holder.uri, stored))
    async with client.lease_prefix(prefix), client.fetching(prefix, PrefixMemory(MODEL, 3).sections) as fetch:
        await fetch.wait_layer(0)
        await client.fetch(prefix, PrefixMemory(MODEL, 3).sections, deadline_ms=30)


def play_and_cancel(kind: str, holder: ScriptedHolder, at: int) -> bool:
    """Run the scenario, cancelled at a step; return whether it was cut off before its end."""
    steps = Steps(at)
    ended = False

    async def main() -> None:
        nonlocal ended
        with anyio.CancelScope() as scope:
            steps.scope = scope
            if kind != "trio":
                count(asyncio.get_running_loop(), steps)
            served = holder.served
            async with Client(served.credentials, index=served.index_uri) as client:
                await scenario(client, holder, "to be cancelled")
                ended = True
        steps.scope = None
        await anyio.sleep(0)
        if kind != "trio":
            assert asyncio.all_tasks() == {asyncio.current_task()}

    backend, options = KINDS[kind]
    all_options: dict[str, Any] = dict(options)
    if kind == "trio":
        all_options["instruments"] = [steps]
    anyio.run(main, backend=backend, backend_options=all_options)
    return not ended


def test_nothing_is_left_behind_whenever_it_is_cancelled(kind: str, served: Served) -> None:
    keys = keys_of(served, "to be cancelled", 3)
    holder = ScriptedHolder(served, 1).serve(keys, content(3))
    holder.fault, holder.faulty, holder.lease_ttl_ms = "stall", [2], 60_000
    gc.collect()
    before = open_descriptors()
    cut = [play_and_cancel(kind, holder, at) for at in STEPS]
    assert sum(cut) > 12, "it was cancelled at many steps before its end"
    gc.collect()
    # The roles share this process and close their ends in their own time.
    patience = time.monotonic() + 30
    while sockets(open_descriptors() - before) - served_sockets(served):
        assert time.monotonic() < patience, "sockets are left"


def sockets(found: set[str]) -> set[str]:
    return {each.split(":", 1)[1] for each in found if "socket" in each}


def served_sockets(served: Served) -> set[str]:
    """Return the sockets of the roles, which are in this process too."""
    found: set[str] = set()
    for listener in served.do(lambda: list(served._listeners.values())):
        for link in served.do(lambda listener=listener: list(listener.links)):
            found.update(_named(link.fileno()))
        for sock in served.do(lambda listener=listener: list(listener.server.sockets)):
            found.update(_named(sock.fileno()))
    for part in served._network._parts:
        for link in tuple(part.links):
            found.update(_named(link.fileno()))
    return found


def _named(descriptor: int) -> set[str]:
    """Return the name of a descriptor that may be closed at any moment."""
    try:
        return {os.readlink(f"/proc/self/fd/{descriptor}")}
    except OSError:
        return set()


@pytest.mark.parametrize("at", [2, 6, 12, 30])
def test_the_clients_own_exit_shows_the_callers_error_as_it_is(kind: str, at: int, served: Served) -> None:
    async def main() -> None:
        async with Client(served.credentials, index=served.index_uri) as client:
            await client.lookup(keys_of(served, "error", at))
            raise KeyError("mine")

    backend, options = KINDS[kind]
    with pytest.raises(KeyError, match="mine"):
        anyio.run(main, backend=backend, backend_options=options)
