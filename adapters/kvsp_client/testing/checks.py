"""Checks of an engine's integration: subclass `EngineChecks`; a test runner runs its ``test_`` methods."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from kvsp_client.testing.served import Served, serve_cache

__all__ = ["CachedEngine", "EngineChecks", "Run"]

NOBODY: Final = "https://127.0.0.1:1/kvsp/"
"""A base URI at which nobody answers."""


@attrs.frozen(kw_only=True)
class Run:
    """What came of a prompt: an output that depends on all of it, and how many tokens were loaded."""

    output: object
    loaded_tokens: int


class CachedEngine(ABC):
    """An engine with its integration, as the checks see it. One begins without any cache of its own."""

    @abstractmethod
    def run(self, tokens: Sequence[int]) -> Run:
        """Compute a prompt, loading what of it is found and storing what is not.

        The output is compared with ``==``: where an engine's last bits vary, return something that does not,
        such as the tokens it would choose.
        """

    @abstractmethod
    def flush(self) -> None:
        """Wait until what was computed is stored, or has failed to be."""

    @abstractmethod
    def close(self) -> None:
        """End, with all threads and connections."""


class EngineChecks(ABC):
    """What an integration has to do, whatever happens to index and holders.

    `block_tokens` is that of the engine's descriptor, `tokens` a prompt of at least four blocks whose length
    is no multiple of it, and `wait_s` how long a holder may take to publish what it was given.
    """

    block_tokens: int = 16
    wait_s: float = 10.0

    @abstractmethod
    def make_engine(self, served: Served, *, index_uri: str, holder_uri: str) -> CachedEngine:
        """Return an engine that uses this index and stores at this holder, with `served.credentials` in
        `served.scope`."""

    @property
    def tokens(self) -> list[int]:
        """The prompt of the checks."""
        return [10 + number % 90 for number in range(4 * self.block_tokens + self.block_tokens // 2)]

    @property
    def whole_blocks(self) -> int:
        """How many of its tokens are in complete blocks."""
        return len(self.tokens) // self.block_tokens * self.block_tokens

    def test_what_one_engine_stored_another_loads(self) -> None:
        """The second engine loads all complete blocks, or all but the last, and its output is the same."""
        with serve_cache() as served:
            first = self._run(served)
            assert first.loaded_tokens == 0, f"nothing was stored, and {first.loaded_tokens} tokens loaded"
            second = self._run_until(served, lambda run: run.loaded_tokens >= self._enough)
            assert second.output == first.output, "the output differs from that without a cache"

    def test_only_the_shared_prefix_is_loaded(self) -> None:
        """A prompt that differs from some block on loads no more than what is before."""
        with serve_cache() as served:
            self._run(served)
            self._run_until(served, lambda run: run.loaded_tokens >= self._enough)
            other = list(self.tokens)
            other[2 * self.block_tokens] += 1
            shared = self._run(served, other)
            alone = self._run(served, other, index_uri=NOBODY)
            assert 0 < shared.loaded_tokens <= 2 * self.block_tokens
            assert shared.output == alone.output, "the output is not that of computing everything"

    def test_an_index_that_nobody_serves_leads_to_computing(self) -> None:
        """Without an index everything is computed, and the output is right."""
        with serve_cache() as served:
            first = self._run(served)
            alone = self._run(served, index_uri=NOBODY)
            assert (alone.loaded_tokens, alone.output) == (0, first.output)

    def test_a_holder_that_died_leads_to_computing(self) -> None:
        """Blocks that the index still names, at a holder that is gone, are computed."""
        with serve_cache() as served:
            first = self._run(served)
            self._run_until(served, lambda run: run.loaded_tokens >= self._enough)
            served.stop_serving(served.cache_uri)
            after = self._run(served)
            assert (after.loaded_tokens, after.output) == (0, first.output)

    def test_a_holder_without_room_harms_nobody(self) -> None:
        """Where nothing can be stored, computing goes on."""
        with serve_cache(capacity_bytes=1) as served:
            first = self._run(served)
            second = self._run(served)
            assert (second.loaded_tokens, second.output) == (0, first.output)

    def test_nothing_is_left_after_closing(self) -> None:
        """The engine ends its threads."""
        with serve_cache() as served:
            before = {thread.ident for thread in threading.enumerate()}
            self._run(served)
            left = [thread.name for thread in threading.enumerate() if thread.ident not in before]
            assert not [name for name in left if name.startswith("kvsp-client")], left

    @property
    def _enough(self) -> int:
        """All complete blocks, but for the last where an engine computes its own last token."""
        return self.whole_blocks - self.block_tokens

    def _run(
        self, served: Served, tokens: Sequence[int] | None = None, *, index_uri: str | None = None
    ) -> Run:
        engine = self.make_engine(
            served, index_uri=index_uri or served.index_uri, holder_uri=served.cache_uri
        )
        try:
            run = engine.run(self.tokens if tokens is None else tokens)
            engine.flush()
            return run
        finally:
            engine.close()

    def _run_until(self, served: Served, check: Callable[[Run], bool]) -> Run:
        """Run the prompt until something is so: a holder publishes what it is given, soon."""
        pause, waited_s = threading.Event(), 0.0
        while not check(run := self._run(served)):
            assert waited_s < self.wait_s, (
                f"only {run.loaded_tokens} of {self.whole_blocks} tokens were loaded"
            )
            pause.wait(0.1)
            waited_s += 0.1
        return run
