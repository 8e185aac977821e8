"""A scope that the policy says is purged, and blocks past their retention, are deleted while roles run."""

from __future__ import annotations

import hashlib

import attrs
import pytest

from kvsp_core.bodies import decode
from kvsp_core.errors import LocalProtocolError
from kvsp_core.ext_messages import OutputRequest
from kvsp_core.messages import LeaseGranted, LeaseRenewal, ResumeRequest
from kvsp_core.resources import GetBlock, PlaceRequest, RenewLease, ResumeSession, StreamOutput
from kvsp_core.roles import engine
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.holdings import TierLimits
from kvsp_core.roles.role import BlockName, CallFailed, Drop, Respond, Send
from kvsp_core.roles.work import Numbers
from tests.unit.roles import holder_kit as kit
from tests.unit.roles import instance_world as instances
from tests.unit.roles import test_controller as controllers
from tests.unit.roles import test_controller_maps as maps
from tests.unit.roles.holder_kit import ALICE, BOB, COMPAT, OTHER_SCOPE, SCOPE, Loop, container, problem_of
from tests.unit.roles.test_instance import KEYS, PROMPT, checkpoint

K = [hashlib.sha256(bytes([i])).hexdigest() for i in range(4)]
NAMES = [BlockName(COMPAT, SCOPE, key) for key in K]
SIZE = len(container())


def without(policy: Policy, scope_id: str) -> Policy:
    """Return a policy in which this scope is purged."""
    scopes = {**policy._scopes, scope_id: ScopeRules(purged=True)}
    return Policy(policy._roles, scopes)


def purge(loop: Loop) -> None:
    loop.holder.policy = without(kit.POLICY, SCOPE)
    loop.do(loop.holder.purge(loop.now_ms))


def two_tiers() -> Loop:
    tiers = {
        "host": TierLimits(capacity_bytes=8 * SIZE),
        "local-storage": TierLimits(capacity_bytes=8 * SIZE),
    }
    before = ("local-storage", NAMES[2], container())
    loop = Loop(tiers=tiers).start(before)
    loop.at(1002)  # the grace of what was there at the start is over
    return loop


# A holder


@pytest.mark.requirement("SE-4", "PB-3")
def test_a_purge_deletes_a_scope_in_all_tiers_and_withdraws_its_records() -> None:
    loop = two_tiers()
    loop.put(K[0])
    loop.put(K[1], client=BOB, scope=OTHER_SCOPE)
    loop.index_answers()
    assert loop.listed == {COMPAT, *K[:3]} - {COMPAT}
    purge(loop)
    assert loop.tiers == {"host": {BlockName(COMPAT, OTHER_SCOPE, K[1]): container()}, "local-storage": {}}
    assert sorted(loop.index_answers()) == sorted([("DELETE", K[0]), ("DELETE", K[2])])
    assert problem_of(loop.ask(GetBlock(COMPAT, SCOPE, K[0]))) == "kvsp-scope-denied 403"
    assert loop.get(K[1], client=BOB, scope=OTHER_SCOPE).status == 200
    purge(loop)  # again is nothing
    assert loop.holder._blocks.holdings.used_bytes == SIZE


@pytest.mark.requirement("LE-2", "LE-1")
def test_a_leased_block_stays_until_its_lease_ends_which_is_not_renewed() -> None:
    loop = Loop().start()
    loop.put(K[0])
    loop.index_answers()
    granted = loop.lease(K[0], ttl_ms=500)
    assert isinstance(granted.body, bytes)
    lease = decode(LeaseGranted, granted.body).lease
    purge(loop)
    assert loop.index_answers() == [("DELETE", K[0])], "nobody else is to find it"
    assert NAMES[0] in loop.tiers["host"]
    for _ in range(2):
        assert problem_of(loop.ask(RenewLease(lease), LeaseRenewal(ttl_ms=500))) == "kvsp-not-found 404"
    loop.at(499)
    assert NAMES[0] in loop.tiers["host"]
    loop.at(502)
    assert loop.tiers["host"] == {}
    assert loop.calls == {}


@pytest.mark.requirement("LE-2", "SE-1")
def test_a_lease_is_not_renewed_by_who_was_put_out_of_its_scope_and_holds_until_it_expires() -> None:
    loop = Loop(blocks=1).start()
    loop.put(K[0])
    loop.index_answers()
    granted = loop.lease(K[0], ttl_ms=500)
    assert isinstance(granted.body, bytes)
    lease = decode(LeaseGranted, granted.body).lease
    rules = kit.POLICY.scope(SCOPE)
    out = attrs.evolve(rules, read=rules.read - {ALICE})
    loop.holder.policy = Policy(kit.POLICY._roles, {**kit.POLICY._scopes, SCOPE: out})
    loop.do(loop.holder.purge(loop.now_ms))
    assert problem_of(loop.ask(RenewLease(lease), LeaseRenewal(ttl_ms=900))) == "kvsp-not-found 404"
    assert loop.put(K[1], client=BOB) == 507
    loop.at(502)
    assert loop.put(K[1], client=BOB) == 201
    loop.holder.policy = kit.POLICY
    assert problem_of(loop.ask(RenewLease(lease), LeaseRenewal(ttl_ms=900))) == "kvsp-not-found 404"


def test_a_block_that_is_read_or_kept_goes_when_it_is_not_any_more() -> None:
    loop = Loop(numbers=Numbers()).start()
    for key in K[:2]:
        loop.put(key)
    loop.index_answers()
    loop.holder.keep(NAMES[1])
    loop.ask(GetBlock(COMPAT, SCOPE, K[0]))
    reading = loop.last_request
    purge(loop)
    assert set(loop.tiers["host"]) == set(NAMES[:2])
    loop.end(reading)
    assert set(loop.tiers["host"]) == {NAMES[1]}
    loop.holder.let_go(NAMES[1])
    loop.at(loop.now_ms)
    assert loop.tiers["host"] == {}


def test_what_arrives_while_its_scope_is_purged_does_not_stay() -> None:
    loop = Loop().start()
    number = loop.begin_put(K[0], container())
    purge(loop)
    loop.send_block(number, container())
    loop.end(number)
    assert loop.tiers["host"] == {}
    assert loop.index_answers() in ([], [("PUT", COMPAT), ("PUT", K[0]), ("DELETE", K[0])])
    assert loop.listed == set()


def test_what_is_found_at_the_start_is_purged_too() -> None:
    loop = Loop()
    loop.holder.policy = without(kit.POLICY, SCOPE)
    loop.start(("host", NAMES[0], container()))
    loop.index_answers()
    loop.at(1002)
    assert loop.tiers["host"] == {}


@pytest.mark.requirement("SE-4", "PB-3")
def test_what_a_tier_has_kept_for_long_enough_is_withdrawn_and_deleted() -> None:
    loop = two_tiers()
    loop.put(K[0])
    loop.index_answers()
    loop.do(loop.holder.expire("local-storage", (NAMES[2], NAMES[0], NAMES[1]), loop.now_ms))
    assert loop.tiers == {"host": {NAMES[0]: container()}, "local-storage": {}}
    assert loop.index_answers() == [("DELETE", K[2])]
    loop.lease(K[0], ttl_ms=500)
    loop.do(loop.holder.expire("host", NAMES[:1], loop.now_ms))
    assert problem_of(loop.lease(K[0])) == "kvsp-not-found 404"
    assert loop.get(K[0]).status == 200, "who has a lease may read on"
    loop.at(loop.now_ms + 502)
    assert loop.tiers["host"] == {}
    assert Drop(NAMES[1], "local-storage") in loop.log, "what is not held is dropped once more"


# A controller


@pytest.mark.requirement("SE-4")
def test_sessions_of_a_purged_scope_are_deleted_from_the_store() -> None:
    talk = controllers.Talk()
    talk.report(controllers.A)
    placed = talk.place()
    talk.write(placed, 5, 6)
    talk.controller.policy = without(controllers.POLICY, controllers.SCOPE)
    talk.take(talk.controller.purge(talk.now_ms))
    for table in ("sessions", "prompts", "outputs"):
        assert talk.store.tables[table] == {}
    assert talk.write(placed, 5, 6, 7) == "kvsp-scope-denied"
    talk.report(controllers.A, epoch=2)
    talk.pass_time(60_000)
    assert talk.store.tables["sessions"] == {}


def test_a_request_that_waits_is_not_placed_in_a_scope_that_was_purged() -> None:
    talk = controllers.Talk()
    waiting = talk.send(controllers.FE, PlaceRequest(), controllers.placement())
    talk.controller.policy = without(controllers.POLICY, controllers.SCOPE)
    talk.take(talk.controller.purge(talk.now_ms))
    talk.report(controllers.A)
    assert talk.answers[waiting][0].status == 403
    assert talk.store.tables.get("sessions", {}) == {}


@pytest.mark.requirement("MG-1", "SE-1")
@pytest.mark.parametrize("restarts", [False, True])
def test_a_session_moves_when_its_instance_is_put_out_of_its_scope(restarts: bool) -> None:
    """Nothing that it sends would be recorded, and its user would wait for a session that stands still."""
    talk = controllers.Talk()
    talk.report(controllers.A)
    placed = talk.place()
    talk.write(placed, 5, 6)
    talk.report(controllers.B)
    rules = controllers.POLICY.scope(controllers.SCOPE)
    without_a = attrs.evolve(rules, read=rules.read - {controllers.A})
    policy = Policy(controllers.POLICY._roles, {**controllers.POLICY._scopes, controllers.SCOPE: without_a})
    if restarts:
        talk.restart(policy)
        talk.report(controllers.B)
    else:
        talk.controller.policy = policy
        talk.take(talk.controller.purge(talk.now_ms))
    info = talk.info(placed)
    assert (info.instance, info.epoch) == (controllers.B, 2)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("under_way", [False, True])
def test_shard_maps_of_a_purged_scope_end(under_way: bool, restarts: bool) -> None:
    group = maps.Group()
    group.split(controllers.A, controllers.B)
    if not under_way:
        group.answer_all()
        group.answer_all()
    policy = without(controllers.POLICY, controllers.SCOPE)
    if restarts:
        group.restart(policy)
    else:
        group.controller.policy = policy
        group.take(group.controller.purge(group.now_ms))
    for _ in range(4):
        group.answer_all()
        group.pass_time(1000)
    assert group.store.tables.get("maps", {}) == {}


# An instance


def test_an_instance_gives_up_the_sessions_of_a_purged_scope() -> None:
    world = instances.World()
    stream = world.begin(PROMPT)
    world.run_jobs()
    world.acknowledge_checkpoints()
    sequence = world.sequence()
    world.role.policy = without(instances.POLICY, instances.SCOPE.scope_id)
    world.take(world.role.purge(world.now_ms))
    assert engine.Abort(sequence) in world.seen
    assert Send(stream, b"", end=True) in world.seen
    assert world.beside.held() == set()
    assert world.beside.kept == {}
    world.do(CallFailed(999, "timed out"))
    world.take(world.role.purge(world.now_ms))


def revoke(world: instances.World, client: str) -> None:
    """Put a client out of the scope."""
    policy, scope_id = instances.POLICY, instances.SCOPE.scope_id
    rules = policy.scope(scope_id)
    out = attrs.evolve(rules, read=rules.read - {client})
    world.role.policy = Policy(policy._roles, {**policy._scopes, scope_id: out})
    world.take(world.role.purge(world.now_ms))


@pytest.mark.requirement("SE-1")
def test_a_stream_ends_when_its_client_is_put_out_of_the_scope_and_the_session_goes_on() -> None:
    world = instances.World()
    stream = world.begin(PROMPT)
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.do(engine.TokensDecoded(world.sequence(), 0, (1, 2)))
    revoke(world, instances.PC)  # of another client
    world.do(engine.TokensDecoded(world.sequence(), 2, (3,)))
    assert world.output(stream) == [1, 2, 3]
    revoke(world, instances.FE)
    assert world.seen[-1] == Send(stream, b"", end=True)
    again, _ = world.ask(instances.FE, StreamOutput(instances.SESSION), OutputRequest(from_index=0, epoch=1))
    assert world.status_of(again) == 404
    world.do(engine.TokensDecoded(world.sequence(), 3, (4,)))
    assert world.output(stream) == [1, 2, 3]
    assert engine.Abort(world.sequence()) not in world.seen
    world.role.policy = instances.POLICY
    again, _ = world.ask(instances.FE, StreamOutput(instances.SESSION), OutputRequest(from_index=3, epoch=1))
    assert world.output(again) == [4]


@pytest.mark.requirement("SE-1")
def test_a_request_for_output_that_waits_is_refused_when_its_client_is_put_out_of_the_scope() -> None:
    world = instances.World()
    resumed = ResumeRequest(epoch=2, checkpoint=checkpoint((1,)))
    world.ask(instances.PC, ResumeSession(instances.SESSION), resumed)
    wanted = OutputRequest(from_index=0, epoch=2)
    request, _ = world.ask(instances.FE, StreamOutput(instances.SESSION), wanted)
    assert world.status_of(request) is None
    revoke(world, instances.FE)
    assert world.status_of(request) == 404
    world.load(*KEYS)
    world.run_jobs()
    world.acknowledge_checkpoints()
    assert world.of(engine.StartSequence)
    assert len([each for each in world.of(Respond) if each.request_id == request]) == 1


# A policy


def test_a_purged_scope_allows_nothing() -> None:
    rules = attrs.evolve(kit.POLICY.scope(SCOPE), purged=True)
    with pytest.raises(LocalProtocolError, match="purged"):
        Policy(kit.POLICY._roles, {SCOPE: rules})
    assert without(kit.POLICY, SCOPE).purged == {SCOPE}
    assert kit.POLICY.purged == frozenset()
    assert kit.POLICY.scope(ALICE) == ScopeRules()
