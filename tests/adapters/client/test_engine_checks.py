"""The checks for engines pass for the fake engine, and fail for engines that get something wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvsp_client import PrefixKeys
from kvsp_client.testing import FAKE_MODEL, CachedEngine, EngineChecks, FakeEngine, Run, Served


class TestFakeEngine(EngineChecks):
    block_tokens = FAKE_MODEL.block_tokens

    def make_engine(self, served: Served, *, index_uri: str, holder_uri: str) -> CachedEngine:
        return FakeEngine(served.credentials, served.scope, index_uri=index_uri, holder_uri=holder_uri)


class NeverLoads(FakeEngine):
    def _load(self, keys: PrefixKeys, memory: object) -> int:
        return 0


class TakesWhatItDoesNotHave(FakeEngine):
    def _load(self, keys: PrefixKeys, memory: object) -> int:
        return len(keys)


class NeverCloses(FakeEngine):
    def run(self, tokens: Sequence[int]) -> Run:
        found = super().run(tokens)
        self._client.lookup(PrefixKeys.of(self._scope, FAKE_MODEL, []))
        return found

    def close(self) -> None:
        LEFT.append(self)


LEFT: list[FakeEngine] = []


@pytest.mark.parametrize(
    ("engine", "check"),
    [
        (NeverLoads, "test_what_one_engine_stored_another_loads"),
        (TakesWhatItDoesNotHave, "test_what_one_engine_stored_another_loads"),
        (TakesWhatItDoesNotHave, "test_an_index_that_nobody_serves_leads_to_computing"),
        (NeverCloses, "test_nothing_is_left_after_closing"),
    ],
)
def test_an_engine_that_is_wrong_fails(engine: type[FakeEngine], check: str) -> None:
    class Checks(TestFakeEngine):
        wait_s = 0.3

        def make_engine(self, served: Served, *, index_uri: str, holder_uri: str) -> CachedEngine:
            return engine(served.credentials, served.scope, index_uri=index_uri, holder_uri=holder_uri)

    with pytest.raises(AssertionError):
        getattr(Checks(), check)()
    while LEFT:
        FakeEngine.close(LEFT.pop())
