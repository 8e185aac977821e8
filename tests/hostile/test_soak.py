"""A cluster at the highest rate this machine holds leaves nothing behind."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import pytest

from kvsp_client.loop_thread import release, shared_loop
from kvsp_client.testing.served import Served, serve_cache
from kvsp_client.wire import Wire
from kvsp_core.container import ContainerHeader, encode_container
from kvsp_core.resources import GetBlock, StoreBlock
from tests.hostile.soak import soak

HEADER = ContainerHeader(codec=1, first_layer=0, token_count=16, sections=((64, 64),) * 2)
COMPAT = "cd" * 32


@pytest.mark.requirement("LE-1", "PB-2")
@pytest.mark.verify
def test_a_minute_of_new_prompts(tmp_path: Path) -> None:
    section = soak(tmp_path, 1200 if os.environ.get("KVSP_PROFILE") == "long" else 60)
    print(section.markdown())
    assert section.held, section.markdown()


@pytest.mark.requirement("LE-1", "PB-2")
def test_some_seconds_of_new_prompts(tmp_path: Path) -> None:
    section = soak(tmp_path, 4)
    assert section.held, section.markdown()


@pytest.mark.requirement("PB-2")
def test_blocks_that_come_and_go_leave_no_object_behind() -> None:
    drawn, count = random.Random(1), 150
    block_bytes = HEADER.size_bytes

    def churn(served: Served, wire: Wire) -> int:
        """Store and fetch many times what there is room for; return how many objects there are then."""
        for _ in range(count):
            key = drawn.randbytes(32).hex()
            layers = [(drawn.randbytes(64), drawn.randbytes(64)) for _ in HEADER.sections]
            pieces = tuple(map(memoryview, encode_container(HEADER, layers)))
            store = StoreBlock(COMPAT, served.scope.scope_id, key)
            fetch = GetBlock(COMPAT, served.scope.scope_id, key)
            stored = loop.call(wire.ask, served.cache_uri, store, timeout_ms=30_000, pieces=pieces)
            fetched = loop.call(wire.ask, served.cache_uri, fetch, timeout_ms=30_000)
            assert (stored.response.status, fetched.response.status) == (201, 200)
        gc.collect()
        return len(gc.get_objects())

    with serve_cache(capacity_bytes=10 * block_bytes) as served:
        loop = shared_loop()
        try:
            wire = Wire(loop.network, served.credentials)
            churn(served, wire)
            before = churn(served, wire)
            grown = churn(served, wire) - before
        finally:
            release(loop)
    assert grown < count // 2, f"{grown} objects more after {count} blocks"
