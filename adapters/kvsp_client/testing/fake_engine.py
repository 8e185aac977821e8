"""An engine that computes nothing of use, and the whole of an integration: the example for real ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvsp_client import (
    BlockingClient,
    BlockingJob,
    ClientError,
    LayersWithdrawn,
    Prefix,
    PrefixKeys,
    PrefixMemory,
    StoreResult,
)
from kvsp_client.testing.checks import CachedEngine, Run
from kvsp_core.identity import CompatibilityDescriptor, Scope
from kvsp_h2 import Credentials

__all__ = ["FAKE_MODEL", "FakeEngine"]

FAKE_MODEL: Final = CompatibilityDescriptor.from_members(
    {
        "model": "fake",
        "model_digest": "sha-256:" + "0" * 64,
        "tokenizer_digest": "sha-256:" + "0" * 64,
        "layers": 3,
        "kv_heads": 2,
        "head_dim": 8,
        "kv_dtype": "fp32",
        "positional": "none",
        "block_tokens": 16,
        "layout": "kvsp-layout-1",
    }
)


class FakeEngine(CachedEngine):
    """Its K and V of a token are numbers made of all tokens up to it, its output a digest of all of them."""

    def __init__(self, credentials: Credentials, scope: Scope, *, index_uri: str, holder_uri: str) -> None:
        self._client = BlockingClient(credentials, index=index_uri)
        self._scope = scope
        self._holder_uri = holder_uri
        self._jobs: list[BlockingJob[StoreResult]] = []

    def run(self, tokens: Sequence[int]) -> Run:
        """Load what is found, layer by layer; compute the rest; store what is new."""
        keys = PrefixKeys.of(self._scope, FAKE_MODEL, tokens)
        memory = PrefixMemory(FAKE_MODEL, len(keys))
        loaded = self._load(keys, memory)
        for layer in range(FAKE_MODEL.layers):
            for section in memory.layer(layer):
                for position in range(loaded * FAKE_MODEL.block_tokens, keys.tokens):
                    section[position] = _computed(tokens[: position + 1], layer)
        self._store(keys.part(loaded), memory, loaded)
        digest = hashlib.sha256(repr(list(tokens[keys.tokens :])).encode())
        for layer in range(FAKE_MODEL.layers):
            for section in memory.layer(layer):
                digest.update(np.ascontiguousarray(section).tobytes())
        return Run(output=digest.hexdigest(), loaded_tokens=loaded * FAKE_MODEL.block_tokens)

    def _load(self, keys: PrefixKeys, memory: PrefixMemory) -> int:
        """Return how many leading blocks are loaded. What cannot be had is computed: that is no error."""
        try:
            prefix: Prefix = self._client.lookup(keys)
            fetch = self._client.start_fetch(prefix, memory.sections, deadline_ms=10_000)
            try:
                for layer in range(FAKE_MODEL.layers):
                    fetch.wait_layer(layer)  # and here an engine computes with that layer
            except LayersWithdrawn:
                pass  # what was computed is void: the result says from where on to compute again
            return fetch.result().blocks
        except ClientError:
            return 0

    def _store(self, keys: PrefixKeys, memory: PrefixMemory, first: int) -> None:
        """Store blocks beside what goes on. This memory does not change any more, so it is not copied."""
        if not len(keys):
            return

        def sections(block: int, layer: int) -> tuple[memoryview, memoryview]:
            return memory.sections(first + block, layer)

        self._jobs.append(self._client.start_store(self._holder_uri, keys, sections))

    def flush(self) -> None:
        """Wait until what was computed is stored, or not."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def close(self) -> None:
        """End."""
        self._client.close()


def _computed(tokens: Sequence[int], layer: int) -> float:
    """Return the number of a position in a layer: it depends on every token before."""
    digest = hashlib.sha256(repr((layer, list(tokens))).encode()).digest()
    return int.from_bytes(digest[:2], "big") / 256
