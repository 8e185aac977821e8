"""What the client promises, on every loop: found, fetched by layer, verified, stored; whoever fails."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from kvsp_client import (
    Client,
    ClientClosed,
    LayersWithdrawn,
    MissReason,
    Prefix,
    PrefixKeys,
    PrefixMemory,
    Refused,
    StoreOutcome,
    Unavailable,
)
from kvsp_client.testing import Served
from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import Scope
from kvsp_core.machines.retrieval import Outcome
from tests.adapters.client.scripted import LAYERS, MODEL, ScriptedHolder, content, keys_of, prefix_of
from tests.adapters.client.worlds import found, play

FAULTS = {
    "missing": (MissReason.GONE, Outcome.MISS),
    "denied": (MissReason.REFUSED, Outcome.REFUSED),
    "busy": (MissReason.UNAVAILABLE, Outcome.UNAVAILABLE),
    "silent": (MissReason.UNAVAILABLE, Outcome.UNAVAILABLE),
    "stall": (MissReason.UNAVAILABLE, Outcome.UNAVAILABLE),
    "cut": (MissReason.UNAVAILABLE, Outcome.UNAVAILABLE),
    "stranger": (MissReason.UNAVAILABLE, Outcome.UNAVAILABLE),
    "malformed": (MissReason.UNAVAILABLE, Outcome.UNAVAILABLE),
    "codec": (MissReason.UNAVAILABLE, Outcome.UNAVAILABLE),
    "corrupt": (MissReason.CORRUPT, Outcome.CORRUPT),
    "undigested": (MissReason.CORRUPT, Outcome.CORRUPT),
}


BRIEFLY_MS = 1_000
"""For how long a holder may be silent where one is. The others are asked in the same run, and a busy machine
is slow too."""


def stall_ms_of(fault: str) -> int:
    """Return for how long a holder may be silent."""
    return BRIEFLY_MS if fault in ("silent", "stall") else 30_000


def same(one: PrefixMemory, other: PrefixMemory, blocks: int | None = None) -> bool:
    end = one.blocks if blocks is None else blocks
    return all(
        np.array_equal(a.view(np.uint8), b.view(np.uint8))
        for block in range(end)
        for layer in range(LAYERS)
        for a, b in zip(one.block(block, layer), other.block(block, layer), strict=True)
    )


@pytest.mark.requirement("BR-4", "BR-6", "LK-1", "KC-4")
def test_what_is_stored_is_found_and_fetched(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"found {kind}", 5), content(5)

    async def scenario(client: Client) -> None:
        assert (await client.store(served.cache_uris[0], keys, stored.sections)).stored == 5
        prefix = await found(client, keys)
        assert prefix.tokens == 20
        assert prefix.holders == (served.cache_uris[0],)
        memory = PrefixMemory(MODEL, 5)
        result = await client.fetch(prefix, memory.sections)
        assert result.complete
        assert (result.blocks, result.tokens, result.misses, result.withdrawn) == (5, 20, (), ())
        assert same(memory, stored)
        k, v = memory.layer(2)
        assert k.shape == v.shape == (20, 2, 8)
        again = await client.store(served.cache_uris[0], keys, stored.sections)
        assert (again.present, again.stored, again.complete) == (5, 0, True)
        stats = client.stats()
        assert (stats.fetched_blocks, stats.matched_blocks % 5, stats.missed_blocks) == (5, 0, {})
        assert stats.stores == {StoreOutcome.STORED: 5, StoreOutcome.PRESENT: 5}

    play(kind, served, scenario)


@pytest.mark.requirement("KC-3")
def test_the_first_layer_is_in_use_while_the_last_is_on_its_way(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"stall {kind}", 3), content(3)
    holder = ScriptedHolder(served, 1).serve(keys, stored)
    holder.fault = "stall"

    async def scenario(client: Client) -> None:
        memory = PrefixMemory(MODEL, 3)
        async with client.fetching(prefix_of(keys, (holder.uri, stored)), memory.sections) as fetch:
            for layer in range(LAYERS - 1):
                assert await fetch.wait_layer(layer) == 3
                assert memory.layer(layer)[0].tobytes() == stored.layer(layer)[0].tobytes()
            assert not fetch.done
            holder.go_on()
            assert [layer async for layer in fetch] == list(range(LAYERS))
            assert (await fetch.result()).complete
        assert same(memory, stored)

    play(kind, served, scenario)


@pytest.mark.requirement("PB-5", "BR-4", "BR-5")
@pytest.mark.parametrize("fault", FAULTS)
def test_where_a_holder_fails_the_next_is_asked(kind: str, fault: str, served: Served) -> None:
    keys, stored, other = keys_of(served, f"next {kind} {fault}", 3), content(3), content(3, 1)
    bad = ScriptedHolder(served, 1).serve(keys, other)
    good = ScriptedHolder(served, 2).serve(keys, stored)
    bad.fault = fault

    async def scenario(client: Client) -> None:
        memory = PrefixMemory(MODEL, 3)
        result = await client.fetch(prefix_of(keys, (bad.uri, other), (good.uri, stored)), memory.sections)
        assert result.complete
        assert same(memory, stored), "no layer of the other replica is left among them"
        assert client.stats().failed_attempts == {FAULTS[fault][1]: 3}

    play(kind, served, scenario, stall_ms=stall_ms_of(fault))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_nobody_has_ends_the_prefix_with_a_reason(kind: str, fault: str, served: Served) -> None:
    keys, stored = keys_of(served, f"reason {kind} {fault}", 4), content(4)
    holder = ScriptedHolder(served, 1).serve(keys, stored)
    holder.fault, holder.faulty = fault, [2]

    async def scenario(client: Client) -> None:
        memory = PrefixMemory(MODEL, 4)
        result = await client.fetch(prefix_of(keys, (holder.uri, stored)), memory.sections)
        assert (result.blocks, result.tokens, result.complete) == (2, 8, False)
        assert [(miss.block, miss.reason) for miss in result.misses] == [
            (2, FAULTS[fault][0]),
            (3, MissReason.AFTER_GAP),
        ]
        assert [attempt.holder for attempt in result.misses[0].attempts] == [holder.uri]
        assert same(memory, stored, 2)
        assert client.stats().missed_blocks == {FAULTS[fault][0]: 1, MissReason.AFTER_GAP: 1}

    play(kind, served, scenario, stall_ms=stall_ms_of(fault))


def test_a_block_without_replicas_is_not_found(kind: str, served: Served) -> None:
    keys = keys_of(served, "none", 2)

    async def scenario(client: Client) -> None:
        memory = PrefixMemory(MODEL, 2)
        result = await client.fetch(Prefix(keys=keys, replicas=((), ())), memory.sections)
        assert [miss.reason for miss in result.misses] == [MissReason.NOT_FOUND, MissReason.AFTER_GAP]
        empty = await client.fetch(Prefix(keys=keys.part(0, 0), replicas=()), memory.sections)
        assert (empty.blocks, empty.complete) == (0, True)

    play(kind, served, scenario)


@pytest.mark.requirement("BR-5")
def test_layers_that_were_taken_and_then_come_otherwise_are_withdrawn(kind: str, served: Served) -> None:
    keys, stored, other = keys_of(served, f"withdrawn {kind}", 2), content(2), content(2, 1)
    bad = ScriptedHolder(served, 1).serve(keys, other)
    good = ScriptedHolder(served, 2).serve(keys, stored)
    bad.fault, bad.faulty = "stall", [1]

    async def scenario(client: Client) -> None:
        memory = PrefixMemory(MODEL, 2)
        prefix = prefix_of(keys, (bad.uri, other), (good.uri, stored))
        async with client.fetching(prefix, memory.sections) as fetch:
            assert await fetch.wait_layer(0) == 2
            with pytest.raises(LayersWithdrawn) as error:
                await fetch.wait_layer(LAYERS - 1)
            assert error.value.blocks == (1,)
            result = await fetch.result()
        assert (result.blocks, result.withdrawn) == (2, (1,))
        for block, expected in ((0, other), (1, stored)):
            for layer in range(LAYERS):
                assert memory.block(block, layer)[1].tobytes() == expected.block(block, layer)[1].tobytes()

    play(kind, served, scenario, stall_ms=BRIEFLY_MS)


def test_layers_that_come_again_the_same_are_not_withdrawn(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"same {kind}", 2), content(2)
    bad = ScriptedHolder(served, 1).serve(keys, stored)
    good = ScriptedHolder(served, 2).serve(keys, stored)
    bad.fault = "stall"

    async def scenario(client: Client) -> None:
        memory = PrefixMemory(MODEL, 2)
        prefix = prefix_of(keys, (bad.uri, stored), (good.uri, stored))
        async with client.fetching(prefix, memory.sections) as fetch:
            assert [layer async for layer in fetch] == list(range(LAYERS))
            result = await fetch.result()
        assert (result.blocks, result.withdrawn) == (2, ())
        assert same(memory, stored)

    play(kind, served, scenario, stall_ms=BRIEFLY_MS)


def test_holders_that_are_gone_do_not_count_as_roles_that_it_calls(
    kind: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client that runs for long could one day call none that is new."""
    monkeypatch.setattr("kvsp_client.wire.MAX_ROLES", 2)
    keys, stored = keys_of(served, f"roles {kind}", 1), content(1)
    good = ScriptedHolder(served, 1).serve(keys, stored)

    async def scenario(client: Client) -> None:
        memory = PrefixMemory(MODEL, 1)
        for number in range(3):
            gone = f"https://127.0.0.1:1/{number}/"
            assert not (await client.fetch(prefix_of(keys, (gone, stored)), memory.sections)).blocks
        assert (await client.fetch(prefix_of(keys, (good.uri, stored)), memory.sections)).complete

    play(kind, served, scenario)


def test_a_silent_holder_leaves_time_to_ask_the_next(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still but for its share, so that it does not matter how fast the machine is."""
    keys, stored = keys_of(served, "in time", 3), content(3)
    bad, good = ScriptedHolder(served, 1), ScriptedHolder(served, 2).serve(keys, stored)
    bad.serve(keys, stored).fault = "silent"

    async def scenario(client: Client) -> None:
        memory = PrefixMemory(MODEL, 3)
        prefix = prefix_of(keys, (bad.uri, stored), (good.uri, stored))
        assert (await client.fetch(prefix, memory.sections, deadline_ms=400)).complete
        assert same(memory, stored)

    monkeypatch.setattr("kvsp_client.wire.Wire.now_ms", lambda _: 200 if bad.count("GET") >= 3 else 0)
    play("asyncio", served, scenario, stall_ms=30_000)


def test_a_holder_that_was_silent_until_the_deadline_is_asked_last(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"avoided {kind}", 1), content(1)
    bad, good = ScriptedHolder(served, 1), ScriptedHolder(served, 2).serve(keys, stored)
    bad.serve(keys, stored).fault = "silent"

    async def scenario(client: Client) -> None:
        memory = PrefixMemory(MODEL, 1)
        late = await client.fetch(prefix_of(keys, (bad.uri, stored)), memory.sections, deadline_ms=BRIEFLY_MS)
        assert [miss.reason for miss in late.misses] == [MissReason.DEADLINE]
        prefix = prefix_of(keys, (bad.uri, stored), (good.uri, stored))
        assert (await client.fetch(prefix, memory.sections)).complete
        assert bad.count("GET") == 1

    play(kind, served, scenario, stall_ms=30_000, avoid_ms=60_000)


def test_the_deadline_returns_what_is_finished(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"deadline {kind}", 4), content(4)
    holder = ScriptedHolder(served, 1).serve(keys, stored)
    holder.fault, holder.faulty = "stall", [2, 3]

    async def scenario(client: Client) -> None:
        memory = PrefixMemory(MODEL, 4)
        prefix = prefix_of(keys, (holder.uri, stored))
        result = await client.fetch(prefix, memory.sections, deadline_ms=BRIEFLY_MS)
        assert result.blocks == 2
        assert [miss.reason for miss in result.misses] == [MissReason.DEADLINE, MissReason.AFTER_GAP]
        before = memory._octets.copy()
        holder.go_on()
        await client.lookup(keys)
        assert np.array_equal(before, memory._octets), "nothing is written after the end"

    play(kind, served, scenario)


def test_so_many_blocks_are_under_way_and_no_more(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"many {kind}", 30), content(30)
    holder = ScriptedHolder(served, 1).serve(keys, stored)

    async def scenario(client: Client) -> None:
        memory = PrefixMemory(MODEL, 30)
        assert (await client.fetch(prefix_of(keys, (holder.uri, stored)), memory.sections)).complete
        assert 1 < holder.most_at_a_time <= 4
        assert same(memory, stored)

    play(kind, served, scenario, concurrent_fetches=4)


def test_a_lost_connection_is_opened_again(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"again {kind}", 2), content(2)

    async def scenario(client: Client) -> None:
        assert (await client.store(served.cache_uris[0], keys, stored.sections)).complete
        prefix = await found(client, keys)
        memory = PrefixMemory(MODEL, 2)
        for _ in range(3):
            await anyio.to_thread.run_sync(served.cut_connections, served.cache_uris[0])
            while not (await client.fetch(prefix, memory.sections)).complete:
                await anyio.sleep(0.01)
        assert same(memory, stored)

    play(kind, served, scenario)


def test_memory_of_the_wrong_size_is_the_callers_mistake(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"memory {kind}", 2), content(2)
    holder = ScriptedHolder(served, 1).serve(keys, stored)

    async def scenario(client: Client) -> None:
        prefix = prefix_of(keys, (holder.uri, stored))
        with pytest.raises(LocalProtocolError, match="layer 0"):
            await client.fetch(prefix, lambda block, layer: (bytearray(1), bytearray(2)))
        with pytest.raises(KeyError):
            await client.fetch(prefix, lambda block, layer: {}[block])
        with pytest.raises(LocalProtocolError, match="contiguous"):
            await client.store(holder.uri, keys, lambda block, layer: (np.zeros((4, 4)).T, np.zeros((4, 4))))
        with pytest.raises(KeyError):
            await client.store(holder.uri, keys, lambda block, layer: {}[block])
        memory = PrefixMemory(MODEL, 2)
        assert (await client.fetch(prefix, memory.sections)).complete, "and nothing else is harmed"

    play(kind, served, scenario)


@pytest.mark.requirement("BR-6", "BR-7")
def test_what_a_holder_does_not_take_is_told(kind: str, served: Served) -> None:
    big = 400
    keys, stored = keys_of(served, f"full {kind}", big), content(big)
    foreign = PrefixKeys.of(Scope(bytes(32)), MODEL, range(8))

    async def scenario(client: Client) -> None:
        uri = served.cache_uris[0]
        await client.store(uri, keys.part(0, 1), stored.sections)
        prefix = await found(client, keys.part(0, 1))
        refused = await client.store(uri, foreign, stored.sections)
        assert refused.failed[0] == (0, StoreOutcome.REFUSED)
        assert StoreOutcome.NOT_TRIED in refused.outcomes or len(refused.failed) == 2
        async with client.lease_prefix(prefix):
            pass
        nobody = await client.store("https://127.0.0.1:1/kvsp/", keys.part(0, 2), stored.sections)
        assert not nobody.complete
        assert nobody.failed[0] == (0, StoreOutcome.UNAVAILABLE)

    play(kind, served, scenario)


@pytest.mark.requirement("LK-4", "SK-6")
def test_the_longest_of_several_scopes_is_found(kind: str, served: Served) -> None:
    shared = PrefixKeys.of(served.scopes[1], MODEL, range(40_000, 40_016))
    own = PrefixKeys.of(served.scopes[0], MODEL, range(40_000, 40_016))
    stored = content(4)

    async def scenario(client: Client) -> None:
        await client.store(served.cache_uris[0], shared.part(0, 3), stored.sections)
        await client.store(served.cache_uris[0], own.part(0, 1), stored.sections)
        await found(client, shared.part(0, 3))
        await found(client, own.part(0, 1))
        longest = await client.lookup(own, shared)
        assert (len(longest), longest.keys.scope_id) == (3, shared.scope_id)
        foreign = PrefixKeys.of(Scope(bytes(32)), MODEL, range(40_000, 40_016))
        assert len(await client.lookup(foreign, own)) == 1, "a scope that is refused is left out"
        with pytest.raises(Refused, match="403"):
            await client.lookup(foreign)
        assert len(await client.lookup(own.part(0, 0))) == 0

    play(kind, served, scenario)


def test_an_index_that_cannot_be_reached_is_an_error(kind: str, served: Served) -> None:
    async def main() -> None:
        async with Client(served.credentials, index="https://127.0.0.1:1/kvsp/") as client:
            with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
                await client.lookup(keys_of(served, "nobody", 1))

    anyio.run(main, backend="trio" if kind == "trio" else "asyncio")


def test_a_client_that_is_not_open_refuses(kind: str, served: Served) -> None:
    keys = keys_of(served, "closed", 1)

    async def main() -> None:
        client = Client(served.credentials, index=served.index_uri)
        with pytest.raises(ClientClosed):
            await client.lookup(keys)
        async with client:
            await client.lookup(keys)
        for call in (client.lookup(keys), client.store(served.cache_uri, keys, content(1).sections)):
            with pytest.raises(ClientClosed):
                await call
        with pytest.raises(ClientClosed):
            await client.__aenter__()

    anyio.run(main, backend="trio" if kind == "trio" else "asyncio")


def test_closing_gives_up_what_is_under_way(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"closing {kind}", 2), content(2)
    holder = ScriptedHolder(served, 1).serve(keys, stored)
    holder.fault = "stall"

    async def main() -> None:
        async with Client(served.credentials, index=served.index_uri) as client:
            fetch = client.start_fetch(prefix_of(keys, (holder.uri, stored)), PrefixMemory(MODEL, 2).sections)
            await fetch.wait_layer(0)
        result = await fetch.result()
        assert [miss.reason for miss in result.misses] == [MissReason.CANCELLED, MissReason.AFTER_GAP]
        assert result.withdrawn == (0, 1)

    anyio.run(main, backend="trio" if kind == "trio" else "asyncio")


@pytest.mark.requirement("SE-5")
def test_nothing_confidential_shows(served: Served) -> None:
    keys, stored = keys_of(served, "secret", 2), content(2)
    prefix = prefix_of(keys, (served.cache_uri, stored))
    for shown in (repr(keys), repr(prefix), repr(stored)):
        assert not any(key in shown for key in keys.keys)
        assert prefix.replicas[0][0].digest not in shown


def test_a_holder_that_refused_a_descriptor_is_told_it_again(kind: str, served: Served) -> None:
    holder, keys, stored = ScriptedHolder(served, 1), keys_of(served, f"descriptor {kind}", 1), content(1)
    holder.knows_models = False

    async def scenario(client: Client) -> None:
        await client.store(holder.uri, keys, stored.sections)
        holder.knows_models = True
        for _ in range(2):
            await client.store(holder.uri, keys, stored.sections)
        assert holder.count("PUT ext") == 2, "until it took it, and no further"

    play(kind, served, scenario)
