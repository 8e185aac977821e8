"""Shards of a long context that compute in place: an instance holds some of its blocks and answers what
queries see of them (requirement SC-1, decision W32).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsp_core.bodies import encode
from kvsp_core.errors import LocalProtocolError
from kvsp_core.ext_messages import AttendAnswer
from kvsp_engines.llama import KEYS, KVCache, Llama, Partial, merge_partials

__all__ = ["Shards"]


class Shards:
    """The KV of one shard map that is held here, in the pieces it was loaded in."""

    def __init__(self, model: Llama) -> None:
        self._model = model
        self._pieces: dict[int, tuple[int, Sequence[tuple[bytes, bytes]]]] = {}
        """First token of a piece -> the token behind it, and its layers."""
        self._caches: dict[tuple[int, int], KVCache] = {}
        """Ranges as they were asked for, ready to be attended over."""

    def load(
        self, tokens: tuple[int, int], layers: Sequence[tuple[bytes | memoryview, bytes | memoryview]]
    ) -> None:
        """Hold the KV of these tokens."""
        config = self._model.config
        if len(layers) != config.layers:
            raise LocalProtocolError(f"a block has {config.layers} layers, not {len(layers)}")
        width = config.kv_heads * config.head_dim * self._model.new_cache().element.itemsize
        if any(len(part) != (tokens[1] - tokens[0]) * width for layer in layers for part in layer):
            raise LocalProtocolError(f"the block does not hold {tokens[1] - tokens[0]} tokens of this model")
        self._pieces[tokens[0]] = (tokens[1], [(bytes(keys), bytes(values)) for keys, values in layers])
        self._caches.clear()

    def drop(self, tokens: tuple[int, int]) -> bool:
        """Free the pieces within these tokens; return whether nothing is left."""
        for start in [s for s, (end, _) in self._pieces.items() if tokens[0] <= s and end <= tokens[1]]:
            del self._pieces[start]
        self._caches.clear()
        return not self._pieces

    def attend(self, layer: int, ranges: Sequence[tuple[int, int]], queries: bytes) -> bytes:
        """Return attention of later queries [queries, heads, head_dim] over these ranges, as the body of an
        answer. Over none of them it has no weight."""
        config = self._model.config
        shape = (-1, config.heads, config.head_dim)
        if not 0 <= layer < config.layers or len(queries) % (4 * config.heads * config.head_dim):
            raise LocalProtocolError(f"queries are those of a layer below {config.layers}, fp32 {shape}")
        asked = np.frombuffer(queries, np.dtype("<f4")).reshape(shape)
        with np.errstate(over="ignore", invalid="ignore"):  # whoever asks with infinities gets what they give
            parts = [
                self._model.partial_attention(self._cache(tokens), layer, asked, tokens) for tokens in ranges
            ]
            nothing = Partial(np.zeros_like(asked), np.full(asked.shape[:2], -np.inf, np.float32))
            found = merge_partials(parts) if parts else nothing
        return encode(
            AttendAnswer(
                output=found.output.astype("<f4").tobytes(),
                log_sum_exp=found.lse.astype("<f4").tobytes(),
                ranges=tuple(ranges),
            )
        )

    def _cache(self, tokens: tuple[int, int]) -> KVCache:
        """Return the KV of a range in one place."""
        cache = self._caches.get(tokens)
        if cache is None:
            cache = self._model.new_cache(start=tokens[0] // KEYS * KEYS)
            position = tokens[0]
            while position < tokens[1]:
                if position not in self._pieces:
                    raise LocalProtocolError(f"tokens from {position} on of the shard are not loaded")
                end, layers = self._pieces[position]
                for number, (keys, values) in enumerate(layers):
                    cache.import_layer(number, position, memoryview(keys), memoryview(values))
                position = end
            cache.end = position
            self._caches[tokens] = cache
        return cache
