"""The replica index against a plain dictionary of records that is searched key by key."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvsp_core import bodies
from kvsp_core.machines import packed_replicas
from kvsp_core.machines import replica_index as m
from kvsp_core.problems import CONFLICT, NOT_FOUND, STORAGE_FULL
from kvsp_core.records import ReplicaRecord
from kvsp_sim.strategies import replica_index as draw
from tests.machine_kit import problems_in

MAX_TTL_MS, QUARANTINE_MS, MAX_REPLICAS = 10_000, 400, 2
CLIENT_BYTES = 4 * 2048 + 12 * 256


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks so small that chains span them and moves happen all the time."""
    monkeypatch.setattr(packed_replicas, "_SLOTS", 3)
    monkeypatch.setattr(packed_replicas, "_FEW_PIECES", 2)
    monkeypatch.setattr(packed_replicas, "_MOVED_RECORDS", 6)


@attrs.define
class Entry:
    client: str
    record: ReplicaRecord
    expiry_ms: int


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.entries: dict[tuple[str, str], Entry] = {}
        self.refused: dict[tuple[str, str], tuple[str, int]] = {}

    @initialize()
    def start(self) -> None:
        self.index = m.ReplicaIndex(
            max_ttl_ms=MAX_TTL_MS,
            quarantine_ms=QUARANTINE_MS,
            max_replicas=MAX_REPLICAS,
            client_bytes=CLIENT_BYTES,
        )

    def live(self) -> dict[tuple[str, str], Entry]:
        return {place: entry for place, entry in self.entries.items() if entry.expiry_ms > self.now_ms}

    def remaining(self, entry: Entry) -> ReplicaRecord:
        return attrs.evolve(entry.record, ttl_ms=entry.expiry_ms - self.now_ms)

    @rule(ms=st.one_of(st.integers(0, 30), st.integers(0, 3000)))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    def publishes(self, event: m.Publish) -> None:
        place = event.holder_id, event.block_key
        before = self.index.freeze(self.now_ms)
        (answer,) = self.index.handle(event, self.now_ms)
        digest, until_ms = self.refused.get(place, ("", 0))
        if digest == event.record.digest and self.now_ms < until_ms:
            (problem,) = problems_in((answer,))
            assert problem.type is CONFLICT
            assert self.index.freeze(self.now_ms) == before
            return
        if isinstance(answer, m.Refused):
            assert answer.problem.type is STORAGE_FULL
            mine = [entry for entry in self.entries.values() if entry.client == event.client]
            assert mine, "an empty account has room"
            assert self.index.freeze(self.now_ms) == before
            return
        ttl_ms = min(event.record.ttl_ms, MAX_TTL_MS)
        assert answer == m.Published(created=place not in self.live(), ttl_ms=ttl_ms)
        self.entries[place] = Entry(event.client, event.record, self.now_ms + ttl_ms)

    @rule(event=draw.publications())
    def publish(self, event: m.Publish) -> None:
        self.publishes(event)

    @rule(
        chain=st.sampled_from(draw.CHAINS),
        record=draw.replica_records(),
        order=st.randoms(use_true_random=False),
        shuffled=st.booleans(),
    )
    def publish_a_chain(
        self, chain: tuple[str, ...], record: ReplicaRecord, order: object, shuffled: bool
    ) -> None:
        keys = list(chain)
        if shuffled:
            order.shuffle(keys)  # type: ignore[attr-defined]
        for key in keys:
            holder_id = m.component_id(record.holder)  # type: ignore[attr-defined]
            each = attrs.evolve(record, block_key=key)
            self.publishes(m.Publish(client=record.holder, holder_id=holder_id, block_key=key, record=each))

    @rule(event=draw.withdrawals())
    def withdraw(self, event: m.Withdraw) -> None:
        place = event.holder_id, event.block_key
        before = self.index.freeze(self.now_ms)
        (answer,) = self.index.handle(event, self.now_ms)
        entry = self.live().get(place)
        if entry is None or event.digest not in (None, entry.record.digest):
            (problem,) = problems_in((answer,))
            assert problem.type is NOT_FOUND
            assert self.index.freeze(self.now_ms) == before
            return
        assert answer == m.Withdrawn()
        del self.entries[place]
        if event.digest is not None:
            self.refused[place] = event.digest, self.now_ms + QUARANTINE_MS

    @rule(event=draw.lookups())
    def look_up(self, event: m.Lookup) -> None:
        (found,) = self.index.handle(event, self.now_ms)
        assert isinstance(found, m.Found)
        wanted: list[list[ReplicaRecord]] = []
        for key in event.block_keys:
            held = [
                self.remaining(entry)
                for (_, k), entry in self.live().items()
                if k == key
                and (entry.record.compat_id, entry.record.scope_id) == (event.compat_id, event.scope_id)
            ]
            if not held:
                break
            wanted.append(held)
        match = found.match
        assert match.matched == len(wanted)
        for got, held in zip(match.replicas(), wanted, strict=True):
            assert len(got) == min(len(held), MAX_REPLICAS)
            assert all(replica in held for replica in got)
            assert len({replica.holder for replica in got}) == len(got)
            named = [replica.holder for replica in held if replica.holder in event.holders]
            assert {r.holder for r in got[: len(named)]} <= set(named)
            assert [(s.holder, s.digest) for s in match.sources()[0]]
        body = json.loads(match.json())
        assert body["matched"] == len(wanted)
        assert [block["replicas"] for block in body["blocks"]] == [
            [json.loads(bodies.encode(replica)) for replica in replicas] for replicas in match.replicas()
        ]

    @rule()
    def timer(self) -> None:
        before = self.index.freeze(self.now_ms)
        self.index.handle(m.TimerFired(), self.now_ms)
        assert self.index.freeze(self.now_ms) == before
        for (holder_id, key), entry in self.live().items():
            assert self.index.record_of(holder_id, key, self.now_ms) == self.remaining(entry)
        for place in set(self.entries) - set(self.live()):
            if self.entries[place].expiry_ms <= self.now_ms - 1000:
                assert self.index.packed.find(place[0], bytes.fromhex(place[1])) is None

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        frozen = self.index.freeze(self.now_ms)
        assert {(h, r.block_key): (c, r) for h, c, r in frozen.records} == {
            place: (entry.client, self.remaining(entry)) for place, entry in self.live().items()
        }

    @invariant()
    def room_is_counted_right(self) -> None:
        packed = self.index.packed
        assert sum(packed.used_bytes.values()) == packed.total_bytes
        assert all(used_bytes <= CLIENT_BYTES for used_bytes in packed.used_bytes.values())
        rows = sum(
            len(c.slots) for chunk in packed._chunks.values() for cs in chunk.columns.values() for c in cs
        )
        assert packed.records == rows
        assert packed.keys == sum(chunk.live for chunk in packed._chunks.values())

    @invariant()
    def what_expires_has_a_deadline(self) -> None:
        deadline_ms = self.index.next_deadline_ms()
        if self.live():
            assert deadline_ms is not None
            assert deadline_ms <= max(self.now_ms, min(e.expiry_ms for e in self.live().values())) + 1000


TestReplicaIndexModel = Model.TestCase
