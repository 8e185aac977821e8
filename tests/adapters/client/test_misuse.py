"""Wrong use and odd order of calls harm the call that was wrong, and nothing else."""

from __future__ import annotations

import anyio
import pytest

from kvsp_client import BlockingClient, Client, MissReason, PrefixMemory, StoreOutcome
from kvsp_client.testing import Served
from kvsp_core.errors import LocalProtocolError
from tests.adapters.client.scripted import LAYERS, MODEL, ScriptedHolder, content, keys_of, prefix_of
from tests.adapters.client.test_contract import same
from tests.adapters.client.worlds import play


def test_a_fetch_that_is_cancelled_at_once_harms_no_other(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"at once {kind}", 2), content(2)
    holder = ScriptedHolder(served, 1).serve(keys, stored)

    async def scenario(client: Client) -> None:
        prefix = prefix_of(keys, (holder.uri, stored))
        memory = PrefixMemory(MODEL, 2)
        async with client.fetching(prefix, memory.sections) as fetch:
            fetch.cancel()
        assert (await fetch.result()).misses[0].reason is MissReason.CANCELLED
        assert (await client.fetch(prefix, memory.sections)).complete
        assert same(memory, stored)

    play(kind, served, scenario)


@pytest.mark.parametrize(("blocks", "ttl_ms"), [(0, 30_000), (1, 0), (1, -1)])
def test_a_lease_that_cannot_be_asked_for_is_the_callers_mistake(
    kind: str, served: Served, blocks: int, ttl_ms: int
) -> None:
    keys = keys_of(served, f"no lease {kind}", 1)

    async def scenario(client: Client) -> None:
        with pytest.raises(LocalProtocolError):
            async with client.lease(served.cache_uris[0], keys.part(0, blocks), ttl_ms=ttl_ms):
                pass
        assert len(await client.lookup(keys)) == 0, "and nothing else is harmed"

    play(kind, served, scenario)


def test_a_layer_that_is_none_of_the_model_is_the_callers_mistake(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"no layer {kind}", 2), content(2)
    holder = ScriptedHolder(served, 1).serve(keys, stored)

    async def scenario(client: Client) -> None:
        prefix = prefix_of(keys, (holder.uri, stored))
        async with client.fetching(prefix, PrefixMemory(MODEL, 2).sections) as fetch:
            for layer in (-1, LAYERS):
                with pytest.raises(LocalProtocolError, match="layer"):
                    await fetch.wait_layer(layer)

    play(kind, served, scenario)


def test_a_layer_in_use_is_not_overwritten_by_what_is_not_verified(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"in use {kind}", 2), content(2)
    stalls = ScriptedHolder(served, 0).serve(keys, stored)
    stalls.fault = "stall"
    lies = ScriptedHolder(served, 1).serve(keys, content(2, version=7))
    silent = ScriptedHolder(served, 2).serve(keys, stored)
    silent.fault = "silent"

    async def scenario(client: Client) -> None:
        prefix = prefix_of(keys, (stalls.uri, stored), (lies.uri, stored), (silent.uri, stored))
        memory = PrefixMemory(MODEL, 2)
        async with client.fetching(prefix, memory.sections) as fetch:
            assert await fetch.wait_layer(0) == 2
            await anyio.to_thread.run_sync(
                silent.wait_for, lambda: silent.count("GET blocks") == 2, abandon_on_cancel=True
            )
            for found, right in zip(memory.layer(0), stored.layer(0), strict=True):
                assert (found.view("u1") == right.view("u1")).all()

    play(kind, served, scenario, stall_ms=1_000)


def test_time_runs_out_also_while_a_holder_is_told_of_the_model(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"too late {kind}", 2), content(2)
    asked = []
    served.serve_instead(1, lambda link, event: asked.append(event))

    async def scenario(client: Client) -> None:
        with anyio.fail_after(30):
            result = await client.store(served.cache_uris[1], keys, stored.sections, deadline_ms=100)
        assert result.failed == ((0, StoreOutcome.DEADLINE), (1, StoreOutcome.DEADLINE))

    play(kind, served, scenario, call_timeout_ms=60_000)


def test_memory_that_is_read_only_is_the_callers_mistake(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"read-only {kind}", 1), content(1)
    holder = ScriptedHolder(served, 1).serve(keys, stored)
    size = MODEL.section_bytes(MODEL.block_tokens)

    async def scenario(client: Client) -> None:
        with pytest.raises(LocalProtocolError, match="layer 0: its memory is read-only"):
            await client.fetch(
                prefix_of(keys, (holder.uri, stored)), lambda block, layer: (bytes(size), bytes(size))
            )

    play(kind, served, scenario)


def test_a_base_uri_that_is_none_is_the_callers_mistake(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"no uri {kind}", 1), content(1)

    async def scenario(client: Client) -> None:
        for uri in ("cache", served.cache_uris[0].rstrip("/")):
            with pytest.raises(LocalProtocolError, match="holder: a base URI"):
                await client.store(uri, keys, stored.sections)
            with pytest.raises(LocalProtocolError, match="holder: a base URI"):
                async with client.lease(uri, keys):
                    pass

    play(kind, served, scenario)
    for index in ("index", [], [served.index_uri, served.index_uri]):
        with pytest.raises(LocalProtocolError, match="index"):
            BlockingClient(served.credentials, index=index)
