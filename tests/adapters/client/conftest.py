from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvsp_client.testing import Served, serve_cache
from kvsp_core.identity import Scope
from tests.adapters.client.worlds import KINDS


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    scopes = [Scope(bytes(range(32))), Scope(bytes(range(1, 33)))]
    with serve_cache(caches=3, capacity_bytes=200_000, scopes=scopes) as made:
        yield made
        assert made.failures == []


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)
