"""Shard maps at the controller: split, split anew, given up, repaired when a member is lost, restarted."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest

from kvsp_core.answers import problem_response
from kvsp_core.bodies import decode
from kvsp_core.errors import LimitExceeded, LocalProtocolError
from kvsp_core.ext_messages import ShardMapInfo, SplitRequest
from kvsp_core.heads import Response
from kvsp_core.limits import MAX_SHARD_BLOCK_KEYS, MAX_SHARD_RANGES, RESHARD_CALLS, RESHARD_DEADLINE_MS
from kvsp_core.messages import ReshardAbort, ReshardCommit, ReshardMessage, ReshardPlan, decode_reshard
from kvsp_core.problems import PLAN_CONFLICT, Problem, problem_of
from kvsp_core.records import Shard
from kvsp_core.resources import EndShardMap, GetShardMap, RoleName, SplitContext
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.controller_maps import CommitCall
from kvsp_core.roles.controller_store import MapContext
from kvsp_core.roles.role import AnswerReceived, Call, CallFailed, Persist, Respond
from kvsp_core.validation import InvalidValue
from tests.unit.roles.test_controller import (
    COMPAT,
    FE,
    KEYS,
    OPERATOR,
    OTHER_SCOPE,
    POLICY,
    SCOPE,
    A,
    B,
    C,
    Talk,
)

CONTEXT = MapContext(compat_id=COMPAT, scope_id=SCOPE, block_keys=KEYS, block_tokens=16)


def shards(*owners: str) -> tuple[Shard, ...]:
    """Each owner gets 16 tokens, in this order."""
    return tuple(
        Shard(tokens=(16 * place, 16 * place + 16), instance=owner) for place, owner in enumerate(owners)
    )


class Group(Talk):
    """A controller and the members of one map."""

    def __init__(self) -> None:
        super().__init__()
        for instance in (A, B, C):
            self.report(instance, ttl_ms=60_000)

    def split(self, *owners: str) -> None:
        self.take(self.controller.reshard("m1", shards(*owners), CONTEXT, self.now_ms))

    def told(self) -> dict[str, ReshardMessage]:
        return {
            call.base_uri: decode_reshard(call.body)  # type: ignore[arg-type]
            for call in self.calls.values()
            if call.request.path == "reshard"
        }

    def answer_all(self, status: int = 200) -> None:
        for call in tuple(self.calls.values()):
            if call.request.path == "reshard":
                self.reply(call, status=status)

    def owners(self) -> list[str]:
        current = self.controller.shard_map("m1")
        assert current is not None
        return [shard.instance for shard in current.shards]

    def version(self) -> int:
        current = self.controller.shard_map("m1")
        assert current is not None
        return current.version


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def split(group: Group) -> Group:
    group.split(A, B)
    group.answer_all()
    group.answer_all()
    assert (group.owners(), group.version()) == ([A, B], 1)
    return group


@pytest.mark.requirement("RS-1", "RS-4")
def test_a_context_is_split_when_all_members_have_acknowledged(group: Group) -> None:
    group.split(A, B)
    plans = group.told()
    assert {instance: plan.assign for instance, plan in plans.items() if isinstance(plan, ReshardPlan)} == {
        A: ((0, 16),),
        B: ((16, 32),),
    }
    assert group.owners() == []
    first, second = list(group.calls.values())
    group.reply(first)
    assert group.owners() == []
    group.effects.clear()
    group.reply(second)
    assert group.owners() == [A, B]
    assert isinstance(group.effects[0], Persist)  # the decision, before the first commit
    assert set(map(type, group.told().values())) == {ReshardCommit}
    group.answer_all()
    assert group.told() == {}


@pytest.mark.requirement("RS-2")
def test_what_stays_is_not_moved(split: Group) -> None:
    split.split(A, B, C)
    told = split.told()
    assert isinstance(told[A], ReshardPlan)
    assert (told[A].retain, told[A].fetch) == (((0, 16),), ())
    assert isinstance(told[C], ReshardPlan)
    assert (told[C].from_, told[C].to, told[C].compat_id) == (1, 2, COMPAT)


@pytest.mark.requirement("RS-5")
@pytest.mark.parametrize("how", ["refused", "late"])
def test_a_change_that_a_member_does_not_acknowledge_is_given_up_by_all(split: Group, how: str) -> None:
    split.split(A, C)
    if how == "refused":
        split.reply(next(call for call in split.calls.values() if call.base_uri == C), status=409)
    else:
        split.pass_time(RESHARD_DEADLINE_MS)
    assert [m for m in split.told().values() if isinstance(m, ReshardAbort)]
    assert split.owners() == [A, B]
    split.answer_all()
    split.split(A, C)
    told = split.told()[C]
    assert isinstance(told, ReshardPlan)
    assert told.to == 3  # a version is never used twice


def test_one_change_at_a_time_and_only_to_instances_that_may_take_work(group: Group) -> None:
    with pytest.raises(LocalProtocolError, match="not active"):
        group.split("https://nobody.example/")
    group.split(A)
    with pytest.raises(LocalProtocolError, match="Begin is not allowed"):
        group.split(A, B)


@pytest.mark.requirement("RS-6")
@pytest.mark.parametrize("durable", range(5))
def test_a_lost_range_finds_an_owner_however_much_of_its_loss_was_durable_at_a_crash(
    split: Group, durable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, count = split.store.write, itertools.count()
    with monkeypatch.context() as crashing:
        crashing.setattr(split.store, "write", lambda effect: next(count) < durable and write(effect))
        split.report(B, epoch=2, ttl_ms=60_000)
        assert next(count) > 2
    split.restart()
    for instance in (A, B, C):
        split.report(instance, epoch=2 if instance == B else 1, ttl_ms=60_000)
    for _ in range(6):  # a repair that was begun before is given up first
        split.answer_all()
        split.pass_time(5_000)
    assert split.version() > 1
    assert B not in split.controller._maps.lost("m1")


@pytest.mark.requirement("SK-6", "RS-6")
def test_an_instance_without_a_part_in_the_scope_gets_no_ranges(split: Group) -> None:
    readers = {SCOPE: ScopeRules(read=[A, B])}
    split.controller.policy = Policy({name: [RoleName.INSTANCE] for name in (A, B, C)}, readers)
    with pytest.raises(LocalProtocolError, match="no part in the scope"):
        split.split(A, B, C)
    split.report(B, epoch=2, ttl_ms=60_000)  # it has lost its range, and C, which holds none, must not get it
    assert C not in split.told()
    split.answer_all()
    assert C not in split.owners()


def put_out(group: Group, *instances: str) -> None:
    """Have the policy put these, and no others, out of the scope."""
    rules = POLICY.scope(SCOPE)
    readers = attrs.evolve(rules, read=rules.read - set(instances))
    group.controller.policy = Policy(POLICY._roles, {**POLICY._scopes, SCOPE: readers})
    group.take(group.controller.purge(group.now_ms))


def left_behind(group: Group, instance: str) -> None:
    """Have a member answer as one does that the map went on without."""
    for call in [each for each in group.calls.values() if each.base_uri == instance]:
        del group.calls[call.call_id]
        group.give(AnswerReceived(call.call_id, *problem_response(Problem(PLAN_CONFLICT))))


@pytest.mark.requirement("RS-6", "SE-1")
def test_the_ranges_of_a_member_that_is_put_out_of_the_scope_go_to_another(split: Group) -> None:
    put_out(split, B)
    told = split.told()
    assert B not in told
    assert isinstance(told[C], ReshardPlan)
    assert (told[C].assign, told[C].fetch) == (((16, 32),), ()), "it would get nothing from who is out"
    split.answer_all()
    assert split.told()[B] == ReshardCommit(map="m1", commit=2), "which has it let go of what it has"
    left_behind(split, B)
    split.answer_all()
    assert (split.owners(), split.told()) == ([A, C], {})
    put_out(split)
    split.split(A, B)


@pytest.mark.requirement("RS-6", "SE-1")
@pytest.mark.parametrize("how", ["planned", "committed", "restarted"])
def test_a_member_that_is_put_out_of_the_scope_gets_no_ranges_by_a_change_under_way(
    split: Group, how: str
) -> None:
    split.split(A, B, C)
    if how == "committed":
        split.answer_all()
    policy = Policy(POLICY._roles, {**POLICY._scopes, SCOPE: ScopeRules(read=[A, B])})
    if how == "restarted":
        split.restart(policy)
        for instance in (A, B, C):
            split.report(instance, ttl_ms=60_000)
    else:
        put_out(split, C)
    for _ in range(4):
        left_behind(split, C)
        split.answer_all()
        split.pass_time(500)
    assert split.told() == {}
    assert C not in split.owners()
    assert len(split.owners()) == (3 if how == "committed" else 2)


@pytest.mark.requirement("RS-6", "SE-1")
def test_ranges_of_a_member_that_is_out_of_the_scope_wait_for_one_that_can_take_them(split: Group) -> None:
    put_out(split, A, B, C)
    assert (split.told(), split.owners()) == ({}, [A, B])
    put_out(split, A)
    assert {name: plan.assign for name, plan in split.told().items() if isinstance(plan, ReshardPlan)} == {
        B: ((0, 16),),
        C: ((16, 32),),
    }


@pytest.mark.requirement("RS-6", "SE-1")
def test_a_member_that_is_out_of_the_scope_does_not_stay_because_it_still_has_its_ranges(
    split: Group,
) -> None:
    put_out(split, B)
    split.reply(split.call_to(C, "reshard"), status=409)
    assert split.told()[B] == ReshardCommit(map="m1", commit=1), "it is asked, and has them"
    split.answer_all()
    split.pass_time(500)
    assert B not in split.told()
    split.answer_all()
    left_behind(split, B)
    split.answer_all()
    assert B not in split.owners()


@pytest.mark.requirement("RS-6", "SE-1")
def test_a_context_is_not_split_over_a_member_that_is_out_of_the_scope(split: Group) -> None:
    for instance in (A, C):
        split.report(instance, state="draining", ttl_ms=60_000)
    put_out(split, B)
    with pytest.raises(LocalProtocolError, match="no part in the scope"):
        split.split(A, B)


def test_there_are_only_so_many_maps(group: Group) -> None:
    with pytest.raises(LimitExceeded, match="shards"):
        group.split(*[A] * (MAX_SHARD_RANGES + 1))
    many = attrs.evolve(CONTEXT, block_keys=KEYS[:1] * (MAX_SHARD_BLOCK_KEYS + 1))
    with pytest.raises(LimitExceeded, match="blocks"):
        group.controller.reshard("m1", shards(A), many, group.now_ms)
    group.controller._maps._max_maps = 0
    with pytest.raises(LimitExceeded):
        group.split(A)


@pytest.mark.requirement("RS-6")
def test_the_ranges_of_a_lost_member_go_to_another_which_computes_them(split: Group) -> None:
    split.report(B, epoch=2, state="draining", ttl_ms=60_000)
    told = split.told()
    assert isinstance(told[C], ReshardPlan)
    assert (told[C].assign, told[C].fetch) == (((16, 32),), ())
    split.answer_all()
    split.answer_all()
    assert (split.owners(), split.version()) == ([A, C], 2)


@pytest.mark.requirement("RS-6")
def test_ranges_wait_for_an_instance_that_can_take_them(split: Group) -> None:
    for instance in (A, C):
        split.report(instance, state="draining", ttl_ms=60_000)
    split.report(B, epoch=2, state="draining", ttl_ms=60_000)
    assert split.told() == {}
    split.report(C, epoch=2, ttl_ms=60_000)
    assert isinstance(split.told()[C], ReshardPlan)


@pytest.mark.requirement("RS-6")
def test_a_repair_that_is_refused_is_tried_again_after_a_while(split: Group) -> None:
    split.report(B, epoch=2, state="draining", ttl_ms=60_000)
    split.answer_all(409)
    for call in tuple(split.calls.values()):
        if call.base_uri == B:  # it is asked whether it still has its ranges
            del split.calls[call.call_id]
            response, octets = problem_response(Problem(PLAN_CONFLICT))
            split.give(AnswerReceived(call.call_id, response, octets))
    split.answer_all()
    assert split.told() == {}
    split.pass_time(500)
    assert isinstance(split.told()[C], ReshardPlan)


@pytest.mark.requirement("RS-6")
@pytest.mark.parametrize("how", ["refused", "silent", "late"])
def test_an_instance_that_takes_no_range_does_not_keep_it_from_another(split: Group, how: str) -> None:
    split.report(B, epoch=2, state="draining", ttl_ms=600_000)
    asked = []
    for _ in range(3):
        told = split.told()
        (takes,) = (name for name, plan in told.items() if isinstance(plan, ReshardPlan) and plan.assign)
        asked.append(takes)
        for call in tuple(split.calls.values()):
            if call.base_uri == takes and how == "refused":
                split.reply(call, status=503)
            elif call.base_uri == takes and how == "silent":
                split.give(CallFailed(split.calls.pop(call.call_id).call_id, "no answer"))
            elif call.base_uri != takes:
                split.reply(call)
        for instance in (A, C):
            split.report(instance, ttl_ms=60_000)
        split.pass_time(RESHARD_DEADLINE_MS)
        for call in tuple(split.calls.values()):
            if call.base_uri == B:  # it is asked whether it still has its range
                del split.calls[call.call_id]
                split.give(AnswerReceived(call.call_id, *problem_response(Problem(PLAN_CONFLICT))))
        split.answer_all()
        split.pass_time(500)
    assert asked == [C, A, C]
    split.answer_all()
    split.answer_all()
    assert split.owners() == [A, A]


@pytest.mark.requirement("RS-6")
def test_a_member_that_takes_plans_and_refuses_their_commits_is_not_asked_without_end(split: Group) -> None:
    split.report(B, epoch=2, state="draining", ttl_ms=60_000)
    for takes in (C, A):
        plans = {name: told for name, told in split.told().items() if isinstance(told, ReshardPlan)}
        assert [name for name, plan in plans.items() if plan.assign] == [takes]
        split.answer_all()
        for call in tuple(split.calls.values()):
            if call.base_uri == takes == C:
                del split.calls[call.call_id]
                split.give(AnswerReceived(call.call_id, *problem_response(Problem(PLAN_CONFLICT))))
            else:
                split.reply(call)
        assert split.told() == {}
        split.pass_time(500)
    assert split.owners() == [A, A]


@pytest.mark.requirement("RS-6")
def test_a_member_that_says_its_range_is_gone_may_have_it_again(group: Group) -> None:
    group.split(A, C)
    group.answer_all()
    group.answer_all()
    group.report(A, state="draining", ttl_ms=60_000)
    group.report(C, epoch=2, ttl_ms=60_000)
    asked = []
    for _ in range(2):
        (takes,) = (n for n, told in group.told().items() if isinstance(told, ReshardPlan) and told.assign)
        asked.append(takes)
        for call in tuple(group.calls.values()):
            group.reply(call, status=503 if call.base_uri == B else 200)
        for call in tuple(group.calls.values()):
            if call.base_uri == C and takes == B:  # it is asked whether it still has its range
                del group.calls[call.call_id]
                group.give(AnswerReceived(call.call_id, *problem_response(Problem(PLAN_CONFLICT))))
            else:
                group.reply(call)
        group.pass_time(500)
    assert asked == [B, C]
    assert group.owners() == [A, C]


@pytest.mark.requirement("RS-6")
def test_a_commit_is_repeated_until_it_is_answered(group: Group) -> None:
    group.split(A)
    group.answer_all()
    (call,) = group.calls.values()
    group.give(CallFailed(group.calls.pop(call.call_id).call_id, "no connection"))
    group.pass_time(500)
    assert group.told() == {A: ReshardCommit(map="m1", commit=1)}


@pytest.mark.requirement("RS-6")
def test_a_restarted_controller_tells_its_decision_again_and_gives_up_what_it_had_not_decided(
    split: Group,
) -> None:
    split.split(A, C)
    split.restart()
    assert set(map(type, split.told().values())) == {ReshardAbort}
    split.answer_all()
    assert split.owners() == [A, B]
    for instance in (A, B, C):
        split.report(instance, ttl_ms=60_000)
    split.split(A, C)
    split.answer_all()
    split.restart()
    assert set(map(type, split.told().values())) == {ReshardCommit}
    assert (split.owners(), split.version()) == ([A, C], 3)


def test_a_map_without_shards_is_over_and_forgotten(split: Group) -> None:
    split.split()
    split.answer_all()
    split.answer_all()
    assert split.controller.shard_map("m1") is None
    assert split.store.tables["maps"] == {}
    calls = [effect for effect in split.effects if isinstance(effect, Call)]
    split.report(A, epoch=2, ttl_ms=60_000)
    assert [effect for effect in split.effects if isinstance(effect, Call)] == calls


def test_an_answer_that_comes_after_the_end_of_a_map_is_nothing(split: Group) -> None:
    split.split()
    split.answer_all()
    late = next(iter(split.calls.values()))
    split.controller._maps._end("m1")
    split.reply(late)
    assert split.controller.shard_map("m1") is None


def test_a_member_that_is_overloaded_is_told_again(group: Group) -> None:
    group.split(A)
    group.answer_all()
    group.answer_all(503)
    assert group.told() == {}
    group.pass_time(500)
    assert group.told() == {A: ReshardCommit(map="m1", commit=1)}


@pytest.mark.requirement("RS-6")
def test_a_member_that_does_not_answer_is_called_less_and_less_often(group: Group) -> None:
    group.split(A)
    group.answer_all()
    gaps = []
    for _ in range(7):
        (call,) = group.calls.values()
        group.give(CallFailed(group.calls.pop(call.call_id).call_id, "no connection"))
        asked_ms = group.now_ms
        while not group.told():
            group.report(A, ttl_ms=60_000)
            group.pass_time(250)
        gaps.append(group.now_ms - asked_ms)
    assert gaps == [500, 1_000, 2_000, 4_000, 8_000, 8_000, 8_000]


def test_a_first_split_that_is_given_up_keeps_its_version(group: Group) -> None:
    group.split(A)
    group.answer_all(409)
    group.answer_all()
    group.split(A)
    told = group.told()[A]
    assert isinstance(told, ReshardPlan)
    assert (told.from_, told.to) == (0, 2)


# What operators ask for


def request(*instances: str, **changed: Any) -> SplitRequest:
    asked = SplitRequest(
        compat_id=COMPAT,
        scope_id=SCOPE,
        block_keys=KEYS[:2],
        block_tokens=16,
        token_count=32,
        instances=instances,
    )
    return attrs.evolve(asked, **changed)


def info(group: Group) -> ShardMapInfo:
    status, body = group.ask(OPERATOR, GetShardMap("m1"))
    assert status == 200
    return decode(ShardMapInfo, body)


@pytest.fixture
def operated(group: Group) -> Group:
    """A controller whose operator may read in the scope."""
    group.controller.policy = OPERATED
    return group


OPERATED = Policy(
    {
        OPERATOR: [RoleName.OPERATOR],
        FE: [RoleName.FRONT_END],
        **{i: [RoleName.INSTANCE] for i in (A, B, C)},
    },
    {SCOPE: ScopeRules(read=[OPERATOR, A, B, C]), OTHER_SCOPE: ScopeRules(read=[FE])},
)


@pytest.mark.requirement("RS-1", "RS-2")
def test_an_operator_splits_a_context_splits_it_anew_and_ends_it(operated: Group) -> None:
    split = SplitContext("m1")
    operated.effects.clear()
    status, body = operated.ask(OPERATOR, split, request(A, B))
    assert (status, decode(ShardMapInfo, body)) == (
        202,
        ShardMapInfo(version=0, planned=1, state="preparing", shards=()),
    )
    kinds = [type(effect) for effect in operated.effects]
    assert kinds.index(Persist) < kinds.index(Respond)  # what is answered is durable
    assert operated.ask(OPERATOR, split, request(A, B, C))[0] == 409  # one change at a time
    operated.answer_all()
    assert info(operated).state == "committing"
    operated.answer_all()
    assert (info(operated).state, operated.owners()) == ("stable", [A, B])

    assert operated.ask(OPERATOR, split, request(A, B))[0] == 200  # as it is already
    assert operated.told() == {}

    assert operated.ask(OPERATOR, split, request(A))[0] == 202
    plan = operated.told()[A]
    assert isinstance(plan, ReshardPlan)
    assert [fetch.from_ for fetch in plan.fetch] == [B]  # what A holds stays where it is
    operated.answer_all()
    operated.answer_all()
    assert (info(operated).version, operated.owners()) == (2, [A])

    assert operated.ask(OPERATOR, EndShardMap("m1"))[0] == 202
    assert operated.ask(OPERATOR, EndShardMap("m1"))[0] == 409
    operated.answer_all()
    operated.answer_all()
    assert operated.ask(OPERATOR, GetShardMap("m1"))[0] == 404
    assert operated.ask(OPERATOR, EndShardMap("m1"))[0] == 404


def test_a_first_split_that_was_given_up_leaves_no_map_and_binds_nobody(operated: Group) -> None:
    operated.ask(OPERATOR, SplitContext("m1"), request(A, block_keys=KEYS[2:4]))
    operated.answer_all(status=409)
    assert info(operated).state == "aborting"
    operated.answer_all()
    assert operated.ask(OPERATOR, GetShardMap("m1"))[0] == 404
    assert operated.ask(OPERATOR, EndShardMap("m1"))[0] == 404
    operated.restart()
    operated.controller.policy = OPERATED
    assert operated.ask(OPERATOR, GetShardMap("m1"))[0] == 404
    operated.report(A, ttl_ms=60_000)
    assert operated.ask(OPERATOR, SplitContext("m1"), request(A))[0] == 202  # with other keys
    told = operated.told()[A]
    assert isinstance(told, ReshardPlan)
    assert (told.to, told.block_keys) == (2, KEYS[:2])


def test_what_is_kept_of_split_contexts_that_are_over_makes_room_for_others(operated: Group) -> None:
    operated.controller._maps._max_maps = 1
    operated.ask(OPERATOR, SplitContext("m1"), request(A))
    assert operated.ask(OPERATOR, SplitContext("m2"), request(A))[0] == 503
    operated.answer_all(status=409)
    operated.answer_all()
    assert operated.ask(OPERATOR, SplitContext("m2"), request(A))[0] == 202
    assert list(operated.store.tables["maps"]) == ["m2"]


def test_a_growth_that_was_given_up_leaves_the_context_as_it_was(operated: Group) -> None:
    operated.ask(OPERATOR, SplitContext("m1"), request(A))
    operated.answer_all()
    operated.answer_all()
    wrong = request(A, B, token_count=64, block_keys=(*KEYS[:2], "ee" * 32, "ee" * 32))
    assert operated.ask(OPERATOR, SplitContext("m1"), wrong)[0] == 202
    operated.answer_all(status=409)
    operated.answer_all()
    operated.answer_all()
    right = request(A, B, token_count=64, block_keys=KEYS[:4])
    assert operated.ask(OPERATOR, SplitContext("m1"), right)[0] == 202
    operated.answer_all()
    operated.restart()  # after the decision, before the commits were answered
    operated.controller.policy = OPERATED
    operated.answer_all()
    for instance in (A, B):
        operated.report(instance, ttl_ms=60_000)
    assert operated.ask(OPERATOR, SplitContext("m1"), wrong)[0] == 409
    assert operated.ask(OPERATOR, SplitContext("m1"), right)[0] == 200


@pytest.mark.requirement("RS-6")
def test_a_member_that_comes_back_is_told_what_was_decided_without_it(split: Group) -> None:
    for instance in (A, C):
        split.report(instance, ttl_ms=60_000)
    split.pass_time(59_000)
    for instance in (A, C):
        split.report(instance, ttl_ms=60_000)
    split.pass_time(2_000)  # B has failed: its range goes to C
    for _ in range(2):
        for call in tuple(split.calls.values()):
            if call.base_uri == B:
                split.give(CallFailed(split.calls.pop(call.call_id).call_id, "no connection"))
        split.answer_all()
    assert split.owners() == [A, C]
    split.pass_time(10_000)
    assert split.told() == {}  # it is not called while it is away
    split.restart()
    for instance in (A, C):
        split.report(instance, ttl_ms=60_000)
    assert split.told() == {B: ReshardCommit(map="m1", commit=2)}
    split.report(B, ttl_ms=60_000)  # in the same incarnation
    for call in tuple(split.calls.values()):
        split.give(CallFailed(split.calls.pop(call.call_id).call_id, "no connection"))
    assert split.told() == {}
    split.pass_time(500)
    assert split.told() == {B: ReshardCommit(map="m1", commit=2)}
    with pytest.raises(LocalProtocolError, match="not acknowledged"):
        split.split(A, B)
    (call,) = split.calls.values()
    del split.calls[call.call_id]
    response, octets = problem_response(Problem(PLAN_CONFLICT))
    split.give(AnswerReceived(call.call_id, response, octets))
    split.pass_time(500)
    assert split.told() == {}
    split.split(A, B)


@pytest.mark.requirement("RS-6")
def test_a_map_that_has_ended_is_kept_until_all_have_heard(split: Group) -> None:
    split.split()
    split.answer_all()  # decided
    lost = next(call for call in split.calls.values() if call.base_uri == B)
    split.give(CallFailed(split.calls.pop(lost.call_id).call_id, "no connection"))
    split.answer_all()
    split.report(B, epoch=2, ttl_ms=60_000)
    assert split.controller.shard_map("m1") is None
    assert split.told() == {B: ReshardCommit(map="m1", commit=2)}
    split.answer_all()
    assert split.store.tables["maps"] == {}


@pytest.mark.requirement("RS-6")
def test_a_dead_owner_that_is_asked_does_not_hold_up_the_repair(split: Group) -> None:
    split.pass_time(59_000)
    for instance in (A, C):
        split.report(instance, ttl_ms=60_000)
    split.pass_time(2_000)
    split.answer_all(409)  # C refuses the range of B, so all owners are asked what they hold
    for call in tuple(split.calls.values()):
        if call.base_uri == B:
            split.give(CallFailed(split.calls.pop(call.call_id).call_id, "no connection"))
    split.answer_all()
    split.pass_time(500)
    assert isinstance(split.told()[C], ReshardPlan)


@pytest.mark.requirement("SE-1", "LC-2")
def test_a_split_that_cannot_be_is_refused_and_changes_nothing(operated: Group) -> None:
    operated.split(A, B)
    operated.answer_all()
    operated.answer_all()
    for asked, expected in (
        (request("https://nobody.example/"), "kvsp-invalid-state"),
        (request(A, token_count=16, block_keys=KEYS[:1]), "409"),  # a context does not shrink
        (request(A, scope_id=OTHER_SCOPE), "kvsp-scope-denied"),
        (request(A, block_keys=KEYS[2:4]), "409"),
        (request(A, compat_id="ee" * 32), "409"),
        (request(A, block_tokens=8, block_keys=KEYS), "409"),
    ):
        problem = problem_of(*operated.ask(OPERATOR, SplitContext("m1"), asked))
        assert expected in (str(problem.status), problem.type.suffix), asked
    for client in (FE, A):
        assert operated.ask(client, SplitContext("m1"), request(A))[0] == 403
        assert operated.ask(client, GetShardMap("m1"))[0] == 403
        assert operated.ask(client, EndShardMap("m1"))[0] == 403
    operated.controller._maps._max_maps = 1
    assert operated.ask(OPERATOR, SplitContext("m2"), request(A))[0] == 503
    keys = MAX_SHARD_BLOCK_KEYS + 1
    long = request(A, token_count=16 * keys, block_keys=(*KEYS, *("ee" * 32,) * (keys - len(KEYS))))
    assert operated.ask(OPERATOR, SplitContext("m1"), long)[0] == 413
    assert operated.told() == {}
    assert (operated.owners(), operated.version()) == ([A, B], 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"block_keys": KEYS[:1]},
        {"instances": ()},
        {"instances": (A, A)},
        {"token_count": 0},
        {"block_tokens": 0},
    ],
)
def test_what_a_split_says_of_a_context_has_to_fit_together(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        attrs.evolve(request(A), **changed)


def _heedless(group: Group, instance: str, status: int | None, *, times: int = RESHARD_CALLS) -> None:
    """Have all do what they are told but this one, which answers so or not at all, and goes on reporting."""
    for _ in range(times):
        while not any(
            call.base_uri == instance and call.request.path == "reshard" for call in group.calls.values()
        ):
            for other in (A, B, C):
                group.report(other, ttl_ms=60_000)
            group.pass_time(250)
        for call in tuple(group.calls.values()):
            if call.base_uri != instance:
                group.reply(call)
            elif status is None:
                group.give(CallFailed(group.calls.pop(call.call_id).call_id, "timed out"))
            else:
                group.reply(call, status=status)


@pytest.mark.requirement("RS-6")
@pytest.mark.parametrize("status", [400, 403, 404, 503, None])
def test_a_member_that_reports_and_never_takes_its_commit_holds_nothing_up(
    group: Group, status: int | None
) -> None:
    group.split(A, B)
    group.answer_all()
    _heedless(group, B, status, times=RESHARD_CALLS - 1)
    assert not group.controller._maps.is_stable("m1")
    _heedless(group, B, status, times=1)
    assert group.controller._maps.is_stable("m1")
    assert group.owners() == [A, B]
    with pytest.raises(LocalProtocolError, match="not acknowledged"):
        group.split(A, B)
    group.pass_time(500)  # its range goes to another
    plan = group.told()[C]
    assert isinstance(plan, ReshardPlan)
    assert plan.assign == ((16, 32),)
    for _ in range(2):
        for call in tuple(group.calls.values()):
            if call.base_uri != B:
                group.reply(call)
    assert group.owners() == [A, C]
    _heedless(group, B, status, times=1)
    group.report(B, ttl_ms=60_000)
    group.pass_time(8_000)
    assert group.told() == {B: ReshardCommit(map="m1", commit=2)}  # it is still told
    group.answer_all()
    group.split(A, B)


@pytest.mark.requirement("RS-6")
def test_a_member_that_reports_and_never_aborts_holds_nothing_up(split: Group) -> None:
    split.split(A, B, C)
    split.reply(next(call for call in split.calls.values() if call.base_uri == C), status=409)
    _heedless(split, B, None)
    assert split.controller._maps.is_stable("m1")
    assert split.owners() == [A, A]  # C has refused a plan


@pytest.mark.requirement("RS-6")
def test_nothing_ends_the_wait_after_a_commit_that_was_refused(split: Group) -> None:
    split.report(B, epoch=2, state="draining", ttl_ms=60_000)
    split.answer_all()  # the plans
    late = [call for call in split.calls.values() if call.base_uri == A]
    for call in tuple(split.calls.values()):
        if call.base_uri == C:
            del split.calls[call.call_id]
            split.give(AnswerReceived(call.call_id, *problem_response(Problem(PLAN_CONFLICT))))
        else:
            split.reply(call)
    assert split.controller._maps.is_stable("m1")
    assert len(late) == 1
    split.pass_time(499)
    for call in late:  # what the network repeats
        split.controller._maps.handle(
            CommitCall("m1", A, 2), AnswerReceived(call.call_id, Response(status=200), b""), split.now_ms
        )
    split.report(C, state="draining", ttl_ms=60_000)
    split.report(C, ttl_ms=60_000)
    assert split.told() == {}
    split.pass_time(1)
    assert isinstance(split.told()[A], ReshardPlan)
