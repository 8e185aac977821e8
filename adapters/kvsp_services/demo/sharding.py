"""A context split over instances, and split anew; the demonstration decides when, as a policy would.

The coordinator is the core's (`kvsp_core.machines.reshard`), asked with the controller's certificate; its
record is kept in memory only, which a controller never does. The next token is computed here, as by an
instance: its queries go to the members that hold the context, and what they answer is merged.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from kvsp_core.block_keys import block_keys
from kvsp_core.errors import KVSPError
from kvsp_core.ext_messages import AttendAnswer, AttendRequest
from kvsp_core.machines import reshard as m
from kvsp_core.machines.reshard_plan import Plan, Transition, compare, divide
from kvsp_core.messages import FetchRange, ReshardAbort, ReshardCommit, ReshardPlan
from kvsp_core.records import Sampler, ShardMap
from kvsp_core.resources import Attend, HeadBlock, Operation, ReshardGroup, StoreBlock
from kvsp_core.roles.engine import ExportBlock, StartSequence
from kvsp_engines.engine import NumpyEngine
from kvsp_engines.llama import KEYS, Array, Llama, Partial, merge_partials
from kvsp_h2 import Credentials
from kvsp_services.asking import ask, ask_for, expect_success
from kvsp_services.buffers import BlockBuffer, BufferPool
from kvsp_services.demo.cluster import Cluster

__all__ = ["SplitContext"]


class SplitContext:
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
        self.state: m.State = m.Stable(map=ShardMap(map="02" * 16, version=0, shards=()))

    def _certificate(self, name: str) -> Credentials:
        folder = self._cluster.directory
        return Credentials(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem")

    def store(self) -> Array:
        """Compute the context here and store its blocks at the cache server; return the logits of the token
        after the tail.
        """
        cluster, model = self._cluster, self._cluster.descriptor
        engine = NumpyEngine(cluster.model_dir, kv_dtype=model.kv_dtype, block_tokens=model.block_tokens)
        none = Sampler(method="greedy", params={"max_tokens": 0}, seed=0, step=0, deterministic=True)
        engine.execute(StartSequence(sequence=1, tokens=self._tokens, cached_tokens=0, sampler=none))
        while engine.busy():
            engine.step()
        holder, pool = cluster.uris["cache"], BufferPool()
        for index, key in enumerate(self.keys):
            layers = engine.execute(ExportBlock(1, 1, index, 1))
            assert not isinstance(layers, bytes)
            buffer = BlockBuffer(pool)
            buffer.fill_from_layers(layers, model.block_tokens)
            pieces = [memoryview(piece) for piece in buffer.pieces()]
            operation = StoreBlock(model.compat_id, cluster.scope.scope_id, key)
            expect_success(holder, ask(self._certificate("alpha"), holder, operation, pieces=pieces))
            buffer.free()
        return self._model.forward(self._model.new_cache(), self._tokens)

    def held(self, names: Sequence[str]) -> dict[str, int]:
        """Return how many blocks of the context each member holds."""
        cluster, compat_id = self._cluster, self._cluster.descriptor.compat_id
        found = dict.fromkeys(names, 0)
        for name in names:
            for key in self.keys:
                operation = HeadBlock(compat_id, cluster.scope.scope_id, key)
                answer = ask(self._certificate("alpha"), cluster.uris[name], operation)
                found[name] += answer.response.is_success
        return found

    # Splitting

    def split(self, names: Sequence[str]) -> Transition:
        """Split the context over these members; none end the map. Returns what the planner counts."""
        block_tokens = self._cluster.descriptor.block_tokens
        members = [self._cluster.uris[name] for name in names]
        before = self.state.map
        shards = divide(before, self.length, members, block_tokens=block_tokens) if members else ()
        deadline_ms = int(self._patience_s * 1000)
        self._go(m.Begin(shards=shards, block_tokens=block_tokens, deadline_ms=deadline_ms))
        if not isinstance(self.state, m.Stable) or self.state.map.shards != shards:
            raise KVSPError("the members did not agree to the new split")
        return compare(before, self.state.map, block_tokens=block_tokens)

    def _go(self, event: m.Event) -> None:
        """Let the coordinator work until nothing is under way."""
        events: deque[m.Event] = deque([event])
        while events:
            now_ms = time.monotonic_ns() // 1_000_000
            self.state, effects = m.transition(self.state, events.popleft(), now_ms)
            for effect in effects:
                match effect:
                    case m.Prepare(instance, plan):
                        accepted = self._tell(instance, self._plan(plan)) == 200
                        events.append(m.PlanAnswered(instance, plan.to, accepted))
                    case m.Commit(instance, version):
                        status = self._tell(instance, ReshardCommit(map=self.state.map.map, commit=version))
                        events.append(m.CommitAnswered(instance, version, status // 100 == 2))
                    case m.Abort(instance, version):
                        self._tell(instance, ReshardAbort(map=self.state.map.map, abort=version))
                        events.append(m.AbortAnswered(instance, version))
                    case _:
                        pass  # nothing here outlives this process

    def _tell(self, instance: str, message: ReshardPlan | ReshardCommit | ReshardAbort) -> int:
        return ask(self._certificate("controller"), instance, ReshardGroup(), message).response.status

    def _plan(self, plan: Plan) -> ReshardPlan:
        member = plan.member
        return ReshardPlan(
            map=self.state.map.map,
            from_=plan.version,
            to=plan.to,
            deadline_ms=plan.deadline_ms,
            retain=member.retain,
            fetch=tuple(FetchRange(tokens=one.tokens, from_=one.source) for one in member.fetch),
            release=member.release,
            compat_id=self._cluster.descriptor.compat_id,
            scope_id=self._cluster.scope.scope_id,
            block_keys=self.keys,
            assign=member.assign,
        )

    # Computing over the shards

    def logits(self) -> Array:
        """Compute the tail, everything before it at the members, and return its logits."""
        cache = self._model.new_cache(start=self.length)
        steps = self._model.forward_shard(cache, self._tokens[self.length :])
        query = next(steps)
        members = dict.fromkeys(shard.instance for shard in self.state.map.shards)
        while True:
            request = AttendRequest(
                version=self.state.map.version,
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
        operation: Operation = Attend(self.state.map.map)
        until = time.monotonic() + self._patience_s
        while True:
            try:
                answer = ask_for(AttendAnswer, self._certificate("alpha"), member, operation, request)
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
        for shard in self.state.map.shards:
            name = self._cluster.name_of(shard.instance)
            found[name] = found.get(name, 0) + shard.tokens[1] - shard.tokens[0]
        return found

    def octets_of(self, tokens: int) -> int:
        """Return how many octets the KV of so many tokens has."""
        model = self._cluster.descriptor
        width = 2 if model.kv_dtype in ("bf16", "fp16") else 4
        return tokens * 2 * model.layers * model.kv_heads * model.head_dim * width
