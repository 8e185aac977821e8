"""How long the client waits, by a clock that jumps: for holders that keep silent, and for long lookups."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import trio
import trio.testing

from kvsp_client import Client, ClientSettings, Prefix, PrefixKeys, PrefixMemory
from kvsp_client.errors import Refused
from kvsp_client.fetch import Avoided, Fetch
from kvsp_client.stats import ClientStats
from kvsp_core.answers import block_response
from kvsp_core.identity import Scope
from kvsp_core.index_parts import IndexParts
from kvsp_core.lookup_size import LookupSize
from kvsp_core.messages import LookupAnswer, LookupRequest, MatchedBlock
from kvsp_core.problems import TOO_LARGE, Problem
from kvsp_h2 import BodyEnded, DataReceived, Event, ExchangeEnded, ResponseReceived
from tests.adapters.client.scripted import MODEL, content, octets, prefix_of, record_of

GOOD, SILENT, INDEX = (f"https://{name}.example/" for name in ("good", "silent", "index"))
KEYS = PrefixKeys.of(Scope(bytes(32)), MODEL, range(2 * MODEL.block_tokens))
STORED = content(2)


def now_ms() -> int:
    return int(trio.current_time() * 1000)


def play(work: Callable[[], Awaitable[Any]]) -> Any:
    return trio.run(work, clock=trio.testing.MockClock(autojump_threshold=0))


def answer(on_event: Callable[[Event], None], block: int) -> None:
    """Serve a block, as it is stored."""
    outgoing = octets(STORED, block)
    body = b"".join(outgoing.pieces)
    head = block_response(size_bytes=len(body), repr_digest=outgoing.sha256().hex(), ttl_ms=1000)
    on_event(ResponseReceived(1, head, False))
    on_event(DataReceived(1, memoryview(body)))
    on_event(BodyEnded(1))
    on_event(ExchangeEnded(1, True, 0))


@pytest.mark.parametrize("first_has", [1, 2])
def test_a_call_that_begins_late_leaves_time_for_the_next_holder(first_has: int) -> None:
    """Also where the calls before it had all of the time, since their blocks have no other replica."""

    async def soon(on_event: Callable[[Event], None], block: int) -> None:
        await trio.sleep(0.01)
        answer(on_event, block)

    async def run() -> int:
        async with trio.open_nursery() as nursery:

            def call(holder: str, operation: Any, *, on_event: Callable[[Event], None]) -> Any:
                if holder == GOOD:
                    block = KEYS.keys.index(operation.block_key)
                    nursery.start_soon(soon, on_event, block)
                return MagicMock()

            both = prefix_of(KEYS, (SILENT, STORED), (GOOD, STORED)).replicas[1]
            first = prefix_of(KEYS, (GOOD, STORED), (SILENT, STORED)).replicas[0][:first_has]
            fetch = Fetch(
                MagicMock(now_ms=now_ms, call=call),
                Prefix(keys=KEYS, replicas=(first, both)),
                PrefixMemory(MODEL, 2).sections,
                index=IndexParts(INDEX),
                settings=ClientSettings(concurrent_fetches=1, stall_ms=5000),
                stats=ClientStats(),
                avoided=Avoided(1000),
                deadline_ms=3000,
            )
            await fetch.run()
        return fetch.outcome().blocks

    assert play(run) == 2


def test_a_lookup_of_several_requests_has_one_time_for_all() -> None:
    given: list[int] = []

    async def ask_for(
        kind: object, part: str, operation: object, share: LookupRequest, *, timeout_ms: int
    ) -> LookupAnswer:
        given.append(timeout_ms)
        await trio.sleep(4)
        block = KEYS.keys.index(share.block_keys[0])
        found = MatchedBlock(block_key=share.block_keys[0], replicas=(record_of(KEYS, block, STORED, GOOD),))
        return LookupAnswer(matched=1, blocks=(found,))

    async def run() -> int:
        client = Client(MagicMock(), index=INDEX, settings=ClientSettings(call_timeout_ms=5000))
        client._wire, client._pid = MagicMock(now_ms=now_ms, ask_for=ask_for), os.getpid()
        client._lookup_size = LookupSize(1)
        return len(await client.lookup(KEYS))

    assert play(run) == 2
    assert given == [5000, 1000]


@pytest.mark.requirement("LK-4")
def test_an_index_that_takes_fewer_keys_is_asked_for_fewer_from_then_on() -> None:
    asked: list[int] = []

    async def ask_for(
        kind: object, part: str, operation: object, share: LookupRequest, *, timeout_ms: int
    ) -> LookupAnswer:
        asked.append(len(share.block_keys))
        if len(share.block_keys) > most:
            raise Refused(part, Problem(TOO_LARGE))
        block = KEYS.keys.index(share.block_keys[0])
        found = MatchedBlock(block_key=share.block_keys[0], replicas=(record_of(KEYS, block, STORED, GOOD),))
        return LookupAnswer(matched=1, blocks=(found,))

    async def run() -> list[int]:
        client = Client(MagicMock(), index=INDEX)
        client._wire, client._pid = MagicMock(now_ms=now_ms, ask_for=ask_for), os.getpid()
        return [len(await client.lookup(KEYS)) for _ in range(9)]

    most = 1
    assert play(run) == [2] * 9
    assert asked == [2, *(1,) * 16, 2, 1, 1], "now and then it is asked for more again"
    most = 0
    with pytest.raises(Refused):
        play(run)
