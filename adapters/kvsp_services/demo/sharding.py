"""A context split over instances, and split anew; the demonstration says when, as a policy would.

The controller is asked as by any operator. The next token is computed here, as by an instance: its queries
go to the members that hold the context, and what they answer is merged.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence

import numpy as np

from kvsp_core.block_keys import block_keys
from kvsp_core.errors import KVSPError
from kvsp_core.ext_messages import AttendAnswer, AttendRequest, ShardMapInfo
from kvsp_core.machines.reshard_plan import Transition, compare
from kvsp_core.records import ShardMap
from kvsp_core.resources import Attend, GetShardMap, HeadBlock, StoreBlock
from kvsp_engines.llama import KEYS, Array, Llama, Partial, merge_partials
from kvsp_services.asking import expect_success
from kvsp_services.buffers import BlockBuffer, BufferPool
from kvsp_services.demo.cluster import Cluster

__all__ = ["SharedContext"]


class SharedContext:
    """A context whose blocks are at the cache server at first, and its shard map.

    `tokens` are cut to a multiple of what the engine computes at once; what follows is the `tail`, whose
    logits are computed over the shards.
    """

    def __init__(self, cluster: Cluster, tokens: Sequence[int], patience_s: float) -> None:
        self._cluster = cluster
        self._patience_s = patience_s
        model = cluster.descriptor
        self._model = Llama(cluster.model_dir, kv_dtype=model.kv_dtype)
        unit = max(KEYS, model.block_tokens)
        self.length = (len(tokens) - 1) // unit * unit
        self._tokens = tuple(tokens)
        keys, _ = block_keys(cluster.scope, model, self._tokens[: self.length])
        self.keys = tuple(key.hex() for key in keys)
        self.map = ShardMap(map=os.urandom(16).hex(), version=0, shards=())

    def store(self) -> Array:
        """Compute the context here and store its blocks at the cache server; return the logits of the token
        after the tail.
        """
        cluster, model = self._cluster, self._cluster.descriptor
        cache = self._model.new_cache()
        logits = self._model.forward(cache, self._tokens)
        holder, pool = cluster.uris["cache"], BufferPool()
        for index, key in enumerate(self.keys):
            tokens = (index * model.block_tokens, (index + 1) * model.block_tokens)
            buffer = BlockBuffer(pool)
            buffer.fill_from_layers(
                [cache.export_layer(layer, tokens) for layer in range(model.layers)], model.block_tokens
            )
            pieces = [memoryview(piece) for piece in buffer.pieces()]
            operation = StoreBlock(model.compat_id, cluster.scope.scope_id, key)
            expect_success(holder, self._cluster.as_("alpha").ask(holder, operation, pieces=pieces))
            buffer.free()
        return logits

    def held(self, names: Sequence[str]) -> dict[str, int]:
        """Return how many blocks of the context each member holds."""
        cluster, compat_id = self._cluster, self._cluster.descriptor.compat_id
        found = dict.fromkeys(names, 0)
        for name in names:
            for key in self.keys:
                operation = HeadBlock(compat_id, cluster.scope.scope_id, key)
                answer = self._cluster.as_("alpha").ask(cluster.uris[name], operation)
                found[name] += answer.response.is_success
        return found

    # Splitting

    def split(self, names: Sequence[str]) -> Transition:
        """Have the context split over these members, from a shell as an operator does it; return what the
        planner counts."""
        cluster, before = self._cluster, self.map
        folder = cluster.directory
        tokens = folder / "context.json"
        tokens.write_text(json.dumps(self._tokens[: self.length]))
        cluster.shell(
            *("reshard", before.map, *(cluster.uris[name] for name in names)),
            *("--controller", cluster.uris["controller"], "--tokens", str(tokens)),
            *("--descriptor", str(folder / "descriptor.json")),
            *("--scope-key-file", str(folder / "tenant.key")),
        )
        info = cluster.operator.ask_for(ShardMapInfo, cluster.uris["controller"], GetShardMap(before.map))
        self.map = ShardMap(map=before.map, version=info.version, shards=info.shards)
        return compare(before, self.map, block_tokens=cluster.descriptor.block_tokens)

    def end(self) -> None:
        """Have the members let go of the context."""
        self._cluster.shell(
            "reshard", self.map.map, "--end", "--controller", self._cluster.uris["controller"]
        )

    # Computing over the shards

    def logits(self) -> Array:
        """Compute the tail, everything before it at the members, and return its logits."""
        cache = self._model.new_cache(start=self.length)
        steps = self._model.forward_shard(cache, self._tokens[self.length :])
        query = next(steps)
        members = dict.fromkeys(shard.instance for shard in self.map.shards)
        while True:
            request = AttendRequest(
                version=self.map.version,
                layer=query.layer,
                queries=query.queries.astype("<f4").tobytes(),
            )
            parts = [self._attend(member, request, query.queries.shape) for member in members]
            try:
                query = steps.send(merge_partials(parts))
            except StopIteration as done:
                logits: Array = done.value
                return logits

    def _attend(self, member: str, request: AttendRequest, shape: tuple[int, ...]) -> Partial:
        operation = Attend(self.map.map)
        until = time.monotonic() + self._patience_s
        while True:
            try:
                answer = self._cluster.as_("alpha").ask_for(AttendAnswer, member, operation, request)
            except KVSPError:  # its range may still be on its way into the engine
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
                continue
            output = np.frombuffer(answer.output, "<f4").reshape(shape)
            return Partial(output, np.frombuffer(answer.log_sum_exp, "<f4").reshape(shape[:2]))

    def shares(self) -> Mapping[str, int]:
        """Return how many tokens each member has by the map."""
        found: dict[str, int] = {}
        for shard in self.map.shards:
            name = self._cluster.name_of(shard.instance)
            found[name] = found.get(name, 0) + shard.tokens[1] - shard.tokens[0]
        return found

    def octets_of(self, tokens: int) -> int:
        """Return how many octets the KV of so many tokens has."""
        model = self._cluster.descriptor
        width = 2 if model.kv_dtype in ("bf16", "fp16") else 4
        return tokens * 2 * model.layers * model.kv_heads * model.head_dim * width
