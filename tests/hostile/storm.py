"""An index that is gone for a while and comes back empty, and hundreds of holders that tell it everything
again: the shipped roles in simulated time.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter

import attrs

from kvsp_core.records import ReplicaRecord, Residency
from kvsp_core.resources import DescribeIndex, RoleName, request_for
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.index import Index
from kvsp_core.roles.publication import Publisher
from kvsp_core.roles.role import BodyArrived, Call, ReceiveBody, RequestReceived, Respond
from kvsp_core.roles.work import Work
from tests.hostile.report import Section

__all__ = ["Storm", "storm"]

INDEX, OPERATOR, SCOPE, COMPAT = "https://index.example/", "spiffe://example/ops", "5c" * 16, "cd" * 32
TRAVEL_MS = 2
BUCKET_MS = 5_000


@attrs.define
class _Holder:
    uri: str
    work: Work
    publisher: Publisher
    timer_ms: int | None = None


class Storm:
    """So many holders with so many blocks each, at one index."""

    def __init__(self, holders: int, blocks: int, ttl_ms: int, seed: int = 1) -> None:
        uris = [f"https://i{number}.example/" for number in range(holders)]
        principals = {uri: [RoleName.HOLDER] for uri in uris} | {OPERATOR: [RoleName.OPERATOR]}
        self._policy = Policy(principals, {SCOPE: ScopeRules(publish=uris)})
        self._random = random.Random(seed)
        self._due: list[tuple[int, int, object]] = []
        self._count = 0
        self.now_ms = 0
        self.index: Index | None = Index(base_uri=INDEX, policy=self._policy)
        self.arrived: Counter[int] = Counter()
        self.sent: Counter[int] = Counter()
        self.holders = [self._holder(uri, blocks, ttl_ms) for uri in uris]
        for holder in self.holders:  # they do not all start at once
            self._at(self._random.randrange(ttl_ms // 3), lambda holder=holder: self._begin(holder, blocks))

    def _holder(self, uri: str, blocks: int, ttl_ms: int) -> _Holder:
        def record_of(block: str, ttl: int) -> ReplicaRecord:
            return ReplicaRecord(
                block_key=block,
                compat_id=COMPAT,
                scope_id=SCOPE,
                holder=uri,
                codec=1,
                size=1024,
                digest="sha-256:" + "00" * 32,
                residency=(Residency(tier="host", layers=(0, 1)),),
                ttl_ms=ttl,
            )

        work = Work()
        publisher = Publisher(
            work,
            holder=uri,
            index_uris=(INDEX,),
            record_of=record_of,
            descriptor_of=lambda compat_id: None,
            random_bytes=self._random.randbytes,
            ttl_ms=ttl_ms,
        )
        return _Holder(uri, work, publisher)

    def _at(self, at_ms: int, act: object) -> None:
        self._count += 1
        heapq.heappush(self._due, (at_ms, self._count, act))

    def _begin(self, holder: _Holder, blocks: int) -> None:
        for _ in range(blocks):
            key = self._random.randbytes(32).hex()
            holder.publisher.publish(key, key, self.now_ms)

    def run(self, until_ms: int) -> None:
        """Let time pass."""
        while self._due and self._due[0][0] <= until_ms:
            self.now_ms, _, act = heapq.heappop(self._due)
            act()  # type: ignore[operator]
            if isinstance(getattr(act, "__defaults__", None), tuple):
                holder = act.__defaults__[0]  # type: ignore[attr-defined]
                self._settle(holder)
        self.now_ms = until_ms

    def _settle(self, holder: _Holder) -> None:
        for effect in holder.work.take():
            if isinstance(effect, Call):
                self.sent[self.now_ms // BUCKET_MS] += 1
                self._at(
                    self.now_ms + TRAVEL_MS, lambda holder=holder, call=effect: self._arrive(holder, call)
                )
        deadline = holder.publisher.next_deadline_ms()
        if deadline is not None and (holder.timer_ms is None or deadline < holder.timer_ms):
            holder.timer_ms = deadline
            self._at(max(deadline, self.now_ms), lambda holder=holder: self._fire(holder))

    def _fire(self, holder: _Holder) -> None:
        holder.timer_ms = None
        holder.publisher.tick(self.now_ms)

    def _arrive(self, holder: _Holder, call: Call) -> None:
        purpose = holder.work.calls.pop(call.call_id)
        if self.index is None:
            holder.publisher.failed(purpose, self.now_ms)
            return
        self.arrived[self.now_ms // BUCKET_MS] += 1
        answer = self._asked(holder.uri, call)
        body = bytes(answer.body)  # type: ignore[arg-type]
        holder.publisher.answered(purpose, answer.response, body, self.now_ms)

    def _asked(self, client: str, call: Call) -> Respond:
        assert self.index is not None
        effects = self.index.handle(RequestReceived(1, client, call.request), self.now_ms)
        if isinstance(effects[0], ReceiveBody):
            effects = self.index.handle(BodyArrived(1, call.body), self.now_ms)  # type: ignore[arg-type]
        (answer,) = [effect for effect in effects if isinstance(effect, Respond)]
        return answer

    def lose_index(self) -> None:
        """Let the index be gone."""
        self.index = None

    def bring_index(self) -> None:
        """Let it be there again, with nothing in it."""
        self.index = Index(base_uri=INDEX, policy=self._policy)

    def records(self) -> int:
        """Return how many records the index has."""
        if self.index is None:
            return 0
        request, octets = request_for(DescribeIndex())
        call = Call(call_id=0, base_uri=INDEX, request=request, body=octets, timeout_ms=1)
        import json

        return int(json.loads(bytes(self._asked(OPERATOR, call).body))["records"])  # type: ignore[arg-type]


def storm(holders: int = 500, blocks: int = 4, ttl_ms: int = 60_000, gone_ms: int = 15_000) -> Section:
    """Lose the index in the middle of things, and see at what rate everything comes back."""
    world = Storm(holders, blocks, ttl_ms)
    lost_ms = 2 * ttl_ms // BUCKET_MS * BUCKET_MS
    back_ms = lost_ms + gone_ms
    world.run(lost_ms)
    total = holders * blocks
    section = Section(
        "storm", ("from the loss", "tried each second", "arrived each second", "records at the index")
    )
    steady = max(world.sent[n] for n in range((lost_ms - ttl_ms // 3) // BUCKET_MS, lost_ms // BUCKET_MS))
    calm = f"{steady * 1000 // BUCKET_MS:,} at most"
    section.rows.append(("before", calm, calm, f"{world.records():,}"))
    if world.records() != total:
        section.broken.append("not all was published before the loss")
    world.lose_index()
    whole_ms = None
    for at_ms in range(lost_ms + BUCKET_MS, back_ms + ttl_ms + 1, BUCKET_MS):
        world.run(at_ms)
        bucket = at_ms // BUCKET_MS - 1
        seconds = f"{(at_ms - BUCKET_MS - lost_ms) // 1000} to {(at_ms - lost_ms) // 1000} s"
        rates = (f"{count[bucket] * 1000 // BUCKET_MS:,}" for count in (world.sent, world.arrived))
        section.rows.append((seconds, *rates, f"{world.records():,}" if world.index else "gone"))
        if whole_ms is None and world.records() == total:
            whole_ms = at_ms - back_ms
        if at_ms == back_ms:
            world.bring_index()
    most = max(world.arrived[n] for n in range(lost_ms // BUCKET_MS, (back_ms + ttl_ms) // BUCKET_MS))
    if whole_ms is None:
        section.broken.append("the index did not get everything back within a TTL")
    section.notes.append(
        f"{holders} holders with {blocks} records each, a TTL of {ttl_ms // 1000} s, refreshed at a third"
        f" of it; the index is gone for {gone_ms // 1000} s and comes back empty. Everything is back"
        f" {(whole_ms or 0) / 1000:.0f} s after that; it gets {most / max(1, steady):.1f} times as many"
        " requests a second as before, at most. What is tried while it is gone mostly never leaves a holder,"
        " whose connections wait before they are tried again. What failed meanwhile is refreshed next after a"
        " drawn part of a third of the TTL. In simulated time, with the shipped roles."
    )
    return section
