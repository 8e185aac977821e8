"""A Llama-architecture model on numpy whose results do not depend on how the work was split.

A matrix product differs in its last bits with its shape, so a token recomputed in a prefill would not equal
the same token decoded alone. Here every product has one fixed shape, whatever the split:

- activations are tiles of 16 positions, a token's row being its position modulo 16; unused rows are zero
- attention works on one tile, one KV head and one block of 64 keys at a time: one product gives the scores,
  another the weighted sum, whose last column is the sum of the weights
- the maximum runs over all visible keys; block results are added in ascending order
- K and V are rounded to the cache's element type when they are written

With the BLAS kernel and thread count fixed (see `numerics_fingerprint`), prefill, split prefill, decoding
and continuing from imported blocks give equal octets and equal logits. K is kept after rotary encoding in
half-split order (decision W8), so an exported block and an imported one are the same octets.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs
import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvsp_engines.weights import LlamaConfig, ModelError, load_config, load_weights

__all__ = [
    "Array",
    "Forward",
    "KVCache",
    "Llama",
    "Partial",
    "RemoteQuery",
    "merge_partials",
    "numerics_fingerprint",
]

Array: TypeAlias = npt.NDArray[np.float32]

TILE: Final = 16
"""Positions in a tile of activations."""
KEYS: Final = 64
"""Keys in one attention product."""
TILES_AT_ONCE: Final = 8
"""Query tiles whose scores are in memory together; it bounds memory and changes no bit."""
ELEMENTS: Final[dict[str, Any]] = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


def numerics_fingerprint() -> str:
    """Name what decides the last bits of a result here: numpy's version and the instructions that it computes
    functions with, BLAS kernel and threads.

    Instances of equal fingerprints form the class among which a deterministic session may resume (CP-6).
    """
    from threadpoolctl import threadpool_info

    pools = [
        f"{pool['internal_api']}-{pool.get('version')}-{pool.get('architecture')}-{pool['num_threads']}"
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    ]
    return " ".join([f"numpy-{np.__version__}", *_function_kernels(), *sorted(pools)])


def _function_kernels() -> list[str]:
    """Return with which instructions numpy computes exponentials, as far as it says (from version 2.1 on)."""
    try:
        from numpy.lib.introspect import opt_func_info
    except ImportError:
        return []
    exponential = opt_func_info(func_name="^exp$", signature="float32").get("exp", {})
    return sorted({str(kernel["current"]) for kernel in exponential.values()})


@attrs.frozen
class Partial:
    """Attention over a part of the keys: `output` [queries, heads, head_dim], normalised over that part,
    and `lse` [queries, heads], the log of the sum of exponentials.
    """

    output: Array
    lse: Array


def merge_partials(partials: Sequence[Partial]) -> Partial:
    """Combine attention over disjoint parts of the keys into attention over all of them.

    A part in which a query sees no key has an `lse` of minus infinity and no weight.
    """
    lse = np.stack([part.lse for part in partials])
    top = lse.max(0)
    safe = np.where(np.isfinite(top), top, np.float32(0))
    weights = np.exp(lse - safe)
    total = weights.sum(0)
    output = sum(
        (part.output * weight[..., None] for part, weight in zip(partials, weights, strict=True)),
        start=np.zeros_like(partials[0].output),
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return Partial(
            np.where(total[..., None] > 0, output / total[..., None], np.float32(0)), safe + np.log(total)
        )


class KVCache:
    """The keys and values of one sequence, or of one shard of it: positions from `start` on."""

    def __init__(self, config: LlamaConfig, dtype: str, *, start: int = 0) -> None:
        if dtype not in ELEMENTS:
            raise ModelError(
                f"kv_dtype {dtype!r} is not one this engine keeps; use one of {', '.join(ELEMENTS)}"
            )
        if start % KEYS:
            raise ModelError(f"a shard starts at a multiple of {KEYS} tokens, not at {start}")
        self.config = config
        self.element = ELEMENTS[dtype]
        self.start = start
        self.end = start
        """Positions [start, end) are filled."""
        self._keys: Array = np.zeros((config.layers, config.kv_heads, 0, config.head_dim), np.float32)
        self._values: Array = np.zeros((config.layers, config.kv_heads, 0, config.head_dim + 1), np.float32)

    def reserve(self, end: int) -> None:
        """Make room for positions below `end`, in whole key blocks; what is there stays."""
        need = -(-(end - self.start) // KEYS) * KEYS
        have = self._keys.shape[2]
        if need <= have:
            return
        room = min(max(need, 2 * have), -(-(self.config.context - self.start) // KEYS) * KEYS)
        if end > self.config.context:
            raise ModelError(f"{end} tokens do not fit the model's context of {self.config.context}")
        shape = (self.config.layers, self.config.kv_heads, room)
        keys = np.zeros((*shape, self.config.head_dim), np.float32)
        values = np.zeros((*shape, self.config.head_dim + 1), np.float32)
        values[..., -1] = 1
        keys[:, :, :have] = self._keys
        values[:, :, :have] = self._values
        self._keys, self._values = keys, values

    def write(self, layer: int, position: int, keys: Array, values: Array) -> None:
        """Set K and V [tokens, kv_heads, head_dim] of a layer from a position on, rounded to the element
        type.
        """
        low = position - self.start
        high = low + keys.shape[0]
        self._keys[layer, :, low:high] = self._rounded(keys).swapaxes(0, 1)
        self._values[layer, :, low:high, :-1] = self._rounded(values).swapaxes(0, 1)

    def _rounded(self, values: Array) -> Array:
        if self.element == np.float32:
            return values
        return values.astype(self.element).astype(np.float32)

    def blocks(self, layer: int, count: int) -> tuple[Array, Array]:
        """Return the first `count` key blocks of a layer as views: K [count, kv_heads, head_dim, 64] and V
        with its column of ones [count, kv_heads, 64, head_dim + 1].
        """
        kv_heads, head_dim = self.config.kv_heads, self.config.head_dim
        keys = self._keys[layer, :, : count * KEYS].reshape(kv_heads, count, KEYS, head_dim)
        values = self._values[layer, :, : count * KEYS].reshape(kv_heads, count, KEYS, head_dim + 1)
        return keys.transpose(1, 0, 3, 2), values.transpose(1, 0, 2, 3)

    def export_layer(self, layer: int, tokens: tuple[int, int]) -> tuple[bytes, bytes]:
        """Return the K and V sections of positions [a, b) of a layer, in layout "kvsp-layout-1"."""
        low, high = tokens[0] - self.start, tokens[1] - self.start
        keys = self._keys[layer, :, low:high].swapaxes(0, 1)
        values = self._values[layer, :, low:high, :-1].swapaxes(0, 1)
        return keys.astype(self.element).tobytes(), values.astype(self.element).tobytes()

    def import_layer(self, layer: int, position: int, keys: memoryview, values: memoryview) -> None:
        """Take the K and V sections of a layer in, from a position on. `end` is the caller's to move."""
        shape = (-1, self.config.kv_heads, self.config.head_dim)
        k = np.frombuffer(keys, self.element).reshape(shape).astype(np.float32)
        v = np.frombuffer(values, self.element).reshape(shape).astype(np.float32)
        self.reserve(position + k.shape[0])
        self.write(layer, position, k, v)


@attrs.frozen
class RemoteQuery:
    """What a forward pass over a shard asks of the holders of earlier shards: queries of one layer."""

    layer: int
    queries: Array
    """[queries, heads, head_dim], after rotary encoding and scaling."""


Forward: TypeAlias = Generator[RemoteQuery, Partial | None, Array]


class Llama:
    """The weights of a model and its forward pass."""

    def __init__(self, directory: Path, *, kv_dtype: str = "fp32") -> None:
        self.config = load_config(directory)
        self.kv_dtype = kv_dtype
        self._weights = load_weights(directory, self.config)
        self._head = self._weight("lm_head")
        angles = np.arange(self.config.context)[:, None] / self.config.rope_theta ** (
            np.arange(0, self.config.head_dim, 2) / self.config.head_dim
        )
        self._cos = np.cos(angles).astype(np.float32)
        self._sin = np.sin(angles).astype(np.float32)

    def _weight(self, name: str) -> Array:
        return self._weights[name + ".weight"]

    def new_cache(self, *, start: int = 0) -> KVCache:
        """Return an empty cache for one sequence, or for the shard that starts at this position."""
        return KVCache(self.config, self.kv_dtype, start=start)

    def forward(self, cache: KVCache, tokens: Sequence[int], *, all_logits: bool = False) -> Array:
        """Compute tokens at positions `cache.end` on, and fill the cache with their keys and values.

        Returns the logits [vocabulary] of the last token, or [tokens, vocabulary] of all of them.
        """
        steps = self.forward_shard(cache, tokens, all_logits=all_logits, remote=False)
        try:
            next(steps)
        except StopIteration as done:
            result: Array = done.value
            return result
        raise AssertionError("a pass without remote shards asks nothing")

    def forward_shard(
        self, cache: KVCache, tokens: Sequence[int], *, all_logits: bool = False, remote: bool = True
    ) -> Forward:
        """Like `forward`, for a cache that holds only the last shard of the context: a generator that
        yields the queries of each layer and is sent the merged `Partial` of the earlier shards.
        """
        config = self.config
        first, count = cache.end, len(tokens)
        if not count:
            raise ModelError("there is nothing to compute: give at least one token")
        cache.reserve(first + count)
        low = first // TILE * TILE
        tiles = -(-(first + count - low) // TILE)
        offset = first - low
        embedded = np.zeros((tiles * TILE, config.hidden), np.float32)
        embedded[offset : offset + count] = self._weight("model.embed_tokens")[np.asarray(tokens)]
        x: Array = embedded.reshape(tiles, TILE, config.hidden)
        positions = np.arange(low, low + tiles * TILE)
        for layer in range(config.layers):
            prefix = f"model.layers.{layer}."
            h = self._norm(x, prefix + "input_layernorm")
            queries, keys, values = self._project(prefix, h, positions)
            cache.write(layer, first, keys[offset : offset + count], values[offset : offset + count])
            mixed = self._attend(cache, layer, queries, positions, first + count)
            if remote:
                answer = yield RemoteQuery(layer, queries[offset : offset + count])
                if answer is not None:
                    local = Partial(mixed.output[offset : offset + count], mixed.lse[offset : offset + count])
                    mixed.output[offset : offset + count] = merge_partials([answer, local]).output
            x = x + mixed.output.reshape(tiles, TILE, -1) @ self._weight(prefix + "self_attn.o_proj").T
            h = self._norm(x, prefix + "post_attention_layernorm")
            gate = h @ self._weight(prefix + "mlp.gate_proj").T
            gate = gate / (1 + np.exp(-gate)) * (h @ self._weight(prefix + "mlp.up_proj").T)
            x = x + gate @ self._weight(prefix + "mlp.down_proj").T
        cache.end = first + count
        x = self._norm(x, "model.norm")
        if all_logits:
            return (x @ self._head.T).reshape(tiles * TILE, -1)[offset : offset + count]
        logits: Array = (x[-1] @ self._head.T)[(cache.end - 1) % TILE]
        return logits

    def partial_attention(
        self, cache: KVCache, layer: int, queries: Array, tokens: tuple[int, int]
    ) -> Partial:
        """Attend from queries [queries, heads, head_dim] of later positions over positions [a, b) held in
        the cache.
        """
        count = queries.shape[0]
        padded = np.zeros((-(-count // TILE) * TILE, *queries.shape[1:]), np.float32)
        padded[:count] = queries
        beyond = np.full(padded.shape[0], tokens[1])
        mixed = self._attend(cache, layer, padded, beyond, tokens[1], first_key=tokens[0])
        return Partial(mixed.output[:count], mixed.lse[:count])

    def _norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.config.rms_epsilon))
        normed: Array = x / scale * self._weight(name)
        return normed

    def _project(self, prefix: str, h: Array, positions: npt.NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """Return scaled queries, keys (both rotated) and values, each [positions, heads, head_dim]."""
        config = self.config
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        half = config.head_dim // 2

        def rotate(values: Array) -> Array:
            a, b = values[..., :half], values[..., half:]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        def project(name: str) -> Array:
            product = h @ self._weight(f"{prefix}self_attn.{name}_proj").T
            return product.reshape(len(positions), -1, config.head_dim)

        return rotate(project("q")) * np.float32(config.head_dim**-0.5), rotate(project("k")), project("v")

    def _attend(
        self,
        cache: KVCache,
        layer: int,
        queries: Array,
        positions: npt.NDArray[np.int64],
        end: int,
        *,
        first_key: int | None = None,
    ) -> Partial:
        """Attend causally over the cache's positions below `end`; output [positions, heads, head_dim] and
        its lse.
        """
        config = self.config
        tiles, rows = len(positions) // TILE, config.group * TILE
        blocks = max(1, -(-(end - cache.start) // KEYS))
        keys, values = cache.blocks(layer, blocks)
        key_positions = np.arange(cache.start, cache.start + blocks * KEYS)
        stacked = queries.reshape(tiles, TILE, config.kv_heads, config.group, config.head_dim)
        stacked = np.ascontiguousarray(stacked.transpose(0, 2, 3, 1, 4)).reshape(
            tiles, config.kv_heads, rows, config.head_dim
        )
        output = np.empty_like(stacked)
        lse = np.empty((tiles, config.kv_heads, rows), np.float32)
        for low in range(0, tiles, TILES_AT_ONCE):
            high = min(tiles, low + TILES_AT_ONCE)
            seen = positions[low * TILE : high * TILE].reshape(high - low, 1, 1, 1, TILE, 1)
            visible = min(blocks, int(max(0, seen.max() - cache.start)) // KEYS + 1)
            scores = stacked[low:high, None] @ keys[:visible]
            window = key_positions[: visible * KEYS].reshape(1, visible, 1, 1, 1, KEYS)
            hidden = (window > seen) | (window >= end)
            if first_key is not None:
                hidden |= window < first_key
            grouped = scores.reshape(high - low, visible, config.kv_heads, config.group, TILE, KEYS)
            np.copyto(grouped, -np.inf, where=hidden)
            top = scores.max((1, 4), keepdims=True)
            np.copyto(top, 0, where=np.isneginf(top))
            scores -= top
            np.exp(scores, out=scores)
            sums = scores @ values[:visible]
            total = np.zeros_like(sums[:, 0])
            for block in range(visible):
                total += sums[:, block]
            with np.errstate(divide="ignore", invalid="ignore"):
                output[low:high] = np.where(total[..., -1:] > 0, total[..., :-1] / total[..., -1:], 0)
                lse[low:high] = top[:, 0, :, :, 0] + np.log(total[..., -1])
        return Partial(
            _by_position(output, tiles, config), _by_position(lse[..., None], tiles, config)[..., 0]
        )


def _by_position(values: Array, tiles: int, config: LlamaConfig) -> Array:
    """Turn [tiles, kv_heads, group * 16, n] into [positions, heads, n]."""
    width = values.shape[-1]
    spread = values.reshape(tiles, config.kv_heads, config.group, TILE, width).transpose(0, 3, 1, 2, 4)
    return spread.reshape(tiles * TILE, config.heads, width)
