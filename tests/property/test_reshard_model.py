"""Resharding under every disorder: messages late, twice, in any order or never, and crashes of everybody.

Network and disk are the simplest there are: a message once sent may arrive at any later time, any number of
times, and what is persisted is there after a crash. What must hold is said by `kvsp_sim.properties.OneOwner`,
and here.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kvsp_core.machines import reshard, reshard_member
from kvsp_core.machines.reshard_plan import Plan, divide, intersect, joined, subtract
from kvsp_core.records import ShardMap
from kvsp_sim import facts
from kvsp_sim.properties import OneOwner
from kvsp_sim.strategies.reshard import BLOCK_TOKENS, MEMBERS, member_events
from tests.property.models import EndingModel

MAP = "m"


@attrs.frozen
class Message:
    """To a member (`kind` plan, commit, abort), or its answer (`ok` set)."""

    kind: str
    member: str
    version: int
    plan: Plan | None = None
    ok: bool | None = None


class Resharding(EndingModel):
    """A coordinator and three members, and whoever disturbs them."""

    def __init__(self) -> None:
        super().__init__()
        self.property = OneOwner()
        self.now_ms = 0
        self.length = 26
        self.coordinator: reshard.State = reshard.Stable(map=ShardMap(map=MAP, version=0, shards=()))
        self.durable = reshard.ReshardRecord(
            phase=reshard.Phase.STABLE, map=self.coordinator.map, highest=0, lost=(), members=()
        )
        self.members: dict[str, reshard_member.State] = dict.fromkeys(MEMBERS, reshard_member.Outside())
        self.loaded: dict[str, bool] = dict.fromkeys(MEMBERS, False)
        # Members that have crashed and of whose crash the coordinator has not heard.
        self.unnoticed: set[str] = set()
        self.network: list[Message] = []

    # The coordinator

    def coordinate(self, event: reshard.Event, persist_fails_after: int | None = None) -> None:
        self.coordinator, effects = reshard.transition(self.coordinator, event, self.now_ms)
        self.execute(effects, persist_fails_after)

    def execute(self, effects: Iterable[reshard.Effect], persist_fails_after: int | None = None) -> None:
        """Carry effects out in order; where persisting fails, nothing after it happens and all is rebuilt."""
        for effect in effects:
            match effect:
                case reshard.PersistRecord(record):
                    if persist_fails_after == 0:
                        self.recover_coordinator()
                        return
                    persist_fails_after = None if persist_fails_after is None else persist_fails_after - 1
                    self.durable = record
                case reshard.Prepare(member, plan):
                    ranges = plan.member
                    self.property.observe(
                        facts.PlanSent(
                            map_id=MAP,
                            version=plan.to,
                            member=member,
                            retain=ranges.retain,
                            fetch=tuple(transfer.tokens for transfer in ranges.fetch),
                            release=ranges.release,
                            assign=ranges.assign,
                        )
                    )
                    self.network.append(Message("plan", member, plan.to, plan))
                case reshard.Commit(member, version):
                    self.property.observe(facts.DecisionSent(map_id=MAP, version=version, commit=True))
                    self.network.append(Message("commit", member, version))
                case reshard.Abort(member, version):
                    self.property.observe(facts.DecisionSent(map_id=MAP, version=version, commit=False))
                    self.network.append(Message("abort", member, version))
                case reshard.Committed() | reshard.Aborted() | reshard.RangesLost():
                    pass

    def recover_coordinator(self) -> None:
        self.coordinator, effects = reshard.recover(self.durable)
        self.execute(effects)

    # A member

    def take_part(self, member: str, event: reshard_member.Event, at_hand: Message | None = None) -> None:
        before = self.members[member]
        self.members[member], effects = reshard_member.transition(before, event, self.now_ms)
        for effect in effects:
            match effect:
                case reshard_member.Answer(problem):
                    assert at_hand is not None
                    self.answer(member, at_hand.kind, at_hand.version, problem is None)
                case reshard_member.AnswerWaiting(version, problem):
                    self.answer(member, "plan", version, problem is None)
                case reshard_member.Release(ranges):
                    for tokens in ranges:
                        self.property.observe(facts.RangeDropped(map_id=MAP, member=member, tokens=tokens))
                case reshard_member.Adopt(ranges=ranges):
                    # Whoever is given the end of the context computes what was drawn since it was planned.
                    end = self.coordinator.map.shards[-1].tokens[1]
                    if end < self.length and ranges and ranges[-1][1] == end:
                        self.take_part(member, reshard_member.Appended(end, self.length))
                case _:
                    pass

    def answer(self, member: str, kind: str, version: int, ok: bool) -> None:
        if ok and kind == "plan":
            self.property.observe(facts.PlanAccepted(map_id=MAP, version=version, member=member))
        if ok and kind in ("commit", "abort"):
            self.property.observe(
                facts.DecisionTaken(map_id=MAP, version=version, member=member, commit=kind == "commit")
            )
        self.network.append(Message(kind, member, version, ok=ok))

    def deliver(self, message: Message) -> None:
        match message:
            case Message("plan", member, _, plan, None):
                assert plan is not None
                self.take_part(member, reshard_member.PlanReceived(plan), message)
            case Message("commit", member, version, _, None):
                self.take_part(member, reshard_member.CommitReceived(version), message)
            case Message("abort", member, version, _, None):
                self.take_part(member, reshard_member.AbortReceived(version), message)
            case Message("plan", member, version, _, bool(ok)):
                self.coordinate(reshard.PlanAnswered(member, version, ok))
            case Message("commit", member, version, _, bool(ok)):
                self.coordinate(reshard.CommitAnswered(member, version, ok))
            case Message("abort", member, version):
                self.coordinate(reshard.AbortAnswered(member, version))

    # What can happen

    @initialize(order=st.permutations(MEMBERS), count=st.integers(1, 3))
    def first_map(self, order: list[str], count: int) -> None:
        self.begin(order[:count], None)
        self.calm_down()

    @property
    def owed(self) -> set[str]:
        """Who has not acknowledged a decision."""
        return {one.instance for one in self.coordinator.owed}

    @precondition(lambda self: isinstance(self.coordinator, reshard.Stable))
    @rule(
        members=st.lists(st.sampled_from(MEMBERS), min_size=1, unique=True), fails=st.sampled_from([None, 0])
    )
    def begin(self, members: list[str], fails: int | None) -> None:
        members = [member for member in members if member not in self.owed]
        if not members:
            return
        shards = divide(
            self.coordinator.map,
            self.length,
            members,
            block_tokens=BLOCK_TOKENS,
            lost=self.coordinator.lost,
        )
        self.coordinate(
            reshard.Begin(shards=shards, block_tokens=BLOCK_TOKENS, deadline_ms=200),
            persist_fails_after=fails,
        )

    @precondition(lambda self: self.network)
    @rule(data=st.data(), again=st.booleans())
    def message_arrives(self, data: st.DataObject, again: bool) -> None:
        place = data.draw(st.integers(0, len(self.network) - 1))
        message = self.network[place] if again else self.network.pop(place)
        self.deliver(message)

    @precondition(lambda self: self.network)
    @rule()
    def last_message_arrives(self) -> None:
        self.deliver(self.network.pop())

    @rule(member=st.sampled_from(MEMBERS), version=st.integers(1, 9))
    def call_fails(self, member: str, version: int) -> None:
        self.coordinate(reshard.CallFailed(member, version))

    @rule(member=st.sampled_from(MEMBERS), works=st.booleans())
    def load_ends(self, member: str, works: bool) -> None:
        state = self.members[member]
        if not isinstance(state, reshard_member.Loading):
            return
        version = state.plan.to
        if not works:
            self.take_part(member, reshard_member.LoadFailed(version))
            return
        for transfer in state.plan.member.fetch:
            self.property.observe(facts.RangeLoaded(map_id=MAP, member=member, tokens=transfer.tokens))
        self.take_part(member, reshard_member.Loaded(version))

    @rule(later_ms=st.sampled_from([1, 100, 200, 500]))
    def time_passes(self, later_ms: int) -> None:
        self.now_ms += later_ms
        self.coordinate(reshard.TimerFired())
        for member in MEMBERS:
            self.take_part(member, reshard_member.TimerFired())

    @rule()
    def coordinator_crashes(self) -> None:
        self.recover_coordinator()

    @rule(member=st.sampled_from(MEMBERS))
    def member_crashes(self, member: str) -> None:
        self.members[member] = reshard_member.Outside()
        self.property.observe(facts.MemberRestarted(member=member))
        self.unnoticed.add(member)

    @rule(member=st.sampled_from(MEMBERS))
    def loss_is_noticed(self, member: str) -> None:
        if member in self.unnoticed:
            self.unnoticed.remove(member)
            self.coordinate(reshard.MemberLost(member))

    @rule(member=st.sampled_from(MEMBERS))
    def member_is_wrongly_taken_for_lost(self, member: str) -> None:
        self.coordinate(reshard.MemberLost(member))

    @rule(member=st.sampled_from(MEMBERS))
    def lost_member_is_back(self, member: str) -> None:
        self.coordinate(reshard.MemberBack(member))

    @rule(member=st.sampled_from(MEMBERS))
    def step_is_computed(self, member: str) -> None:
        state, version = self.members[member], self.coordinator.map.version
        if reshard_member.refuse_step(state, version) is not None:
            return
        assert not isinstance(state, reshard_member.Outside)
        mapped = joined(s.tokens for s in self.coordinator.map.shards if s.instance == member)
        self.property.observe(
            facts.StepServed(
                map_id=MAP, version=version, member=member, ranges=intersect(state.ranges, mapped)
            )
        )

    @rule(count=st.integers(1, 5))
    def tokens_are_appended(self, count: int) -> None:
        version = self.coordinator.map.version
        for member, state in self.members.items():
            if reshard_member.refuse_step(state, version) is not None:
                continue
            if reshard_member.may_append(state, self.length):
                self.take_part(member, reshard_member.Appended(self.length, self.length + count))
                self.length += count
                return

    # What must hold

    @invariant()
    def authority_is_what_is_durable(self) -> None:
        assert self.coordinator.map == self.durable.map

    @invariant()
    def every_range_is_held_by_its_owner_or_known_to_be_lost_or_about_to_be_found_lost(self) -> None:
        version = self.coordinator.map.version
        for shard in self.coordinator.map.shards:
            owner, state = shard.instance, self.members[shard.instance]
            if owner in self.coordinator.lost or owner in self.unnoticed:
                continue
            if isinstance(self.coordinator, reshard.Committing) and owner in self.coordinator.waiting:
                continue
            assert not isinstance(state, reshard_member.Outside), "an owner holds nothing, and nobody knows"
            assert state.version == version
            assert subtract((shard.tokens,), state.ranges) == ()

    @invariant()
    def nobody_else_computes_with_an_owners_range(self) -> None:
        version = self.coordinator.map.version
        serving = [s for s in self.members.values() if reshard_member.refuse_step(s, version) is None]
        held = [r for s in serving if not isinstance(s, reshard_member.Outside) for r in s.ranges]
        assert sum(end - first for first, end in held) == sum(end - first for first, end in joined(held))

    # In the end

    def calm_down(self) -> None:
        """Nothing fails any more: every call is answered, every load works, every crash is noticed."""
        for member in sorted(self.unnoticed):
            self.loss_is_noticed(member)
        for _ in range(60):
            if isinstance(self.coordinator, reshard.Stable) and not self.owed:
                return
            asked = [m for m in self.network if m.ok is None]
            self.network = []
            for member in MEMBERS:
                owed = (one.version for one in self.coordinator.owed)
                for version in (self.coordinator.highest, self.coordinator.map.version, *owed):
                    self.coordinate(reshard.CallFailed(member, version))
            for message in asked:
                self.deliver(message)
            for member in MEMBERS:
                self.load_ends(member, True)
            for message in [m for m in self.network if m.ok is not None]:
                self.deliver(message)
            self.network = [m for m in self.network if m.ok is None]
            self.time_passes(100)
        raise AssertionError(f"the reshard does not end: {self.coordinator}")

    def at_end(self) -> None:
        self.calm_down()
        for _ in range(4):
            self.begin(list(MEMBERS), None)
            self.calm_down()
            if len({s.instance for s in self.coordinator.map.shards}) == 3 and not self.coordinator.lost:
                break
        else:
            raise AssertionError("no reshard succeeds although nothing fails")
        assert not any(self.property.left_behind(member) for member in MEMBERS)
        self.every_range_is_held_by_its_owner_or_known_to_be_lost_or_about_to_be_found_lost()


TestResharding = Resharding.TestCase


@given(events=st.lists(member_events(), max_size=20))
def test_whatever_a_member_is_sent_it_answers_and_its_versions_only_rise(
    events: list[reshard_member.Event],
) -> None:
    state: reshard_member.State = reshard_member.Outside()
    for event in events:
        before = state
        state, effects = reshard_member.transition(state, event, 0)
        assert state.highest >= before.highest
        asked = isinstance(event, reshard_member.CommitReceived | reshard_member.AbortReceived)
        assert sum(isinstance(effect, reshard_member.Answer) for effect in effects) == asked or not asked
        assert reshard_member.thaw(reshard_member.freeze(state, 3), 3) == state
        assert hash(state) == hash(state)
