"""A holder under clients, faults and an index that may not answer: it keeps its word and comes to rest."""

from __future__ import annotations

import hashlib

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kvsp_core.bodies import decode
from kvsp_core.messages import LeaseGranted
from kvsp_core.problems import DIGEST_MISMATCH, Problem
from kvsp_core.resources import GetBlock, ReleaseLease
from kvsp_core.roles.holdings import TierLimits
from kvsp_core.roles.role import BlockName, JobFault
from tests.property.models import EndingModel
from tests.unit.roles.holder_kit import ALICE, BOB, COMPAT, SCOPE, Loop, container

SIZE = len(container())
CAPACITY = {"host": 4, "local-storage": 3}
KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(10)]
NAMES = {key: BlockName(COMPAT, SCOPE, key) for key in KEYS}

keys = st.sampled_from(KEYS)
clients = st.sampled_from((ALICE, BOB))


class Model(EndingModel):
    def __init__(self) -> None:
        super().__init__()
        tiers = {tier: TierLimits(capacity_bytes=n * SIZE) for tier, n in CAPACITY.items()}
        self.loop = Loop(tiers=tiers).start()
        self.arriving: list[tuple[int, bytes]] = []
        self.reading: list[int] = []
        self.promised: dict[str, tuple[str, set[str], int]] = {}  # lease -> client, keys, until
        self.fill = 0
        self.failures = 0

    # Clients

    @rule(key=keys, client=clients)
    def begin_put(self, key: str, client: str) -> None:
        self.fill = (self.fill + 1) % 251
        number = self.loop.begin_put(key, container(self.fill), client=client)
        if number in self.loop.answers:
            assert self.loop.answers[number].response.status in (412, 503, 507)
            self.loop.end(number)
        else:
            self.arriving.append((number, container(self.fill)))

    @rule(data=st.data(), how=st.sampled_from(("whole", "whole", "whole", "gone", "wrong")))
    def end_put(self, data: st.DataObject, how: str) -> None:
        if not self.arriving:
            return
        number, octets = self.arriving.pop(data.draw(st.integers(0, len(self.arriving) - 1)))
        if how == "whole":
            self.loop.send_block(number, octets)
        elif how == "wrong":
            self.loop.cut_off(number, Problem(DIGEST_MISMATCH))
        self.loop.end(number, complete=how != "gone", sent_bytes=0)

    @rule(key=keys, layers=st.sampled_from((None, (0, 0), (1, 1))))
    def begin_get(self, key: str, layers: tuple[int, int] | None) -> None:
        self.loop.ask(GetBlock(COMPAT, SCOPE, key, layers=layers))
        self.reading.append(self.loop.last_request)

    @rule(data=st.data())
    def end_get(self, data: st.DataObject) -> None:
        if self.reading:
            number = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
            self.loop.end(number, complete=data.draw(st.booleans()), sent_bytes=0)

    @rule(wanted=st.lists(keys, min_size=1, max_size=3), client=clients, ttl_ms=st.integers(1, 1100))
    def lease(self, wanted: list[str], client: str, ttl_ms: int) -> None:
        answer = self.loop.lease(*wanted, client=client, ttl_ms=ttl_ms)
        if answer.response.status == 201:
            assert isinstance(answer.body, bytes)
            granted = decode(LeaseGranted, answer.body)
            until_ms = self.loop.now_ms + granted.ttl_ms
            self.promised[granted.lease] = client, set(wanted), until_ms
        self.loop.end(self.loop.last_request)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.promised:
            lease = data.draw(st.sampled_from(sorted(self.promised)))
            client, _, _ = self.promised.pop(lease)
            self.loop.ask(ReleaseLease(lease), client=client)

    # The world

    @rule(ms=st.one_of(st.integers(0, 5), st.integers(0, 900)))
    def time_passes(self, ms: int) -> None:
        self.loop.at(self.loop.now_ms + ms)

    @rule(how=st.sampled_from(("answers", "answers", "is silent", "hears", "fails")))
    def index(self, how: str) -> None:
        if how == "answers":
            self.loop.index_answers()
        elif how == "fails":
            self.loop.index_fails()
        else:
            self.loop.index_is_silent(hears=how == "hears")

    @rule(tier=st.sampled_from(sorted(CAPACITY)), fault=st.sampled_from([None, None, *JobFault]))
    def tier_fails(self, tier: str, fault: JobFault | None) -> None:
        self.loop.faults.pop(tier, None)
        if fault is not None:
            self.loop.faults[tier] = fault

    @rule(key=keys)
    def octets_rot(self, key: str) -> None:
        for tier in self.loop.tiers.values():
            if NAMES[key] in tier:
                tier[NAMES[key]] = container(255)

    @rule(slow=st.booleans())
    def jobs_take_long(self, slow: bool) -> None:
        if slow:
            self.loop.hold_jobs = True
        else:
            self.loop.let_jobs_end()

    # What always holds

    def forget_faulty(self) -> None:
        """A fault ends the promise for its block, and for no other."""
        faulty = {key for key, name in NAMES.items() if self.loop.holder.tier_of(name) is None}
        for _, wanted, _ in self.promised.values():
            wanted -= faulty

    @invariant()
    def no_tier_takes_more_than_it_may(self) -> None:
        for tier, blocks in self.loop.tiers.items():
            assert len(blocks) <= CAPACITY[tier]

    @invariant()
    def what_is_leased_is_there(self) -> None:
        if self.loop.observed.get("kvsp_holder_digest_failures", 0) > self.failures:
            self.failures = self.loop.observed["kvsp_holder_digest_failures"]
            self.forget_faulty()
        for _, wanted, until_ms in self.promised.values():
            if self.loop.now_ms <= until_ms:
                for key in wanted:
                    tier = self.loop.holder.tier_of(NAMES[key])
                    assert tier is not None
                    assert NAMES[key] in self.loop.tiers[tier]

    @invariant()
    def what_is_held_is_in_its_tier(self) -> None:
        for name in NAMES.values():
            tier = self.loop.holder.tier_of(name)
            assert tier is None or name in self.loop.tiers[tier]

    def at_end(self) -> None:
        """Once the faults stop, every exchange ends, every buffer is given back and the index is right."""
        self.loop.faults.clear()
        for number, _ in self.arriving:
            self.loop.end(number, complete=False, sent_bytes=0)
        self.loop.let_jobs_end()
        for number in self.reading:
            self.loop.end(number)
        assert self.loop.buffers == {}
        for _ in range(40):
            self.loop.index_answers()
            deadline_ms = self.loop.holder.next_deadline_ms()
            if deadline_ms is not None:
                self.loop.at(max(self.loop.now_ms, deadline_ms))
        self.loop.index_answers()
        held = {key for key, name in NAMES.items() if self.loop.holder.tier_of(name) is not None}
        assert {key for key in KEYS if key in self.loop.listed} == held
        assert {name for tier in self.loop.tiers.values() for name in tier} == {NAMES[key] for key in held}


TestHolderModel = Model.TestCase
