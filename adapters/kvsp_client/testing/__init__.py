"""For tests of whoever uses the client: index and cache servers in the same process, and checks of an
engine's integration, with a fake engine as their example.
"""

from __future__ import annotations

from kvsp_client.testing.checks import CachedEngine, EngineChecks, Run
from kvsp_client.testing.fake_engine import FAKE_MODEL, FakeEngine
from kvsp_client.testing.served import ENGINE, Served, serve_cache

__all__ = [
    "ENGINE",
    "FAKE_MODEL",
    "CachedEngine",
    "EngineChecks",
    "FakeEngine",
    "Run",
    "Served",
    "serve_cache",
]
