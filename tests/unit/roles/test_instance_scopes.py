"""What an instance serves belongs to a scope: a client of another finds nothing there."""

from __future__ import annotations

import attrs
import pytest

from kvsp_core.ext_messages import AttendRequest, OutputRequest
from kvsp_core.messages import FetchRange, ReshardCommit
from kvsp_core.resources import Attend, ReshardGroup, RoleName, StreamOutput
from kvsp_core.roles import engine
from kvsp_core.roles.authorization import Policy, ScopeRules
from tests.unit.roles.instance_world import CACHE, FE, HOLDER, ME, PC, SCOPE, SESSION, World, sampler
from tests.unit.roles.test_instance import KEYS, PROMPT, plan

OTHER_FE, OTHER_II, OTHER_SCOPE = "https://fe2.example/", "https://ii9.example/", "0d" * 16
POLICY = Policy(
    {
        PC: [RoleName.CONTROLLER],
        FE: [RoleName.FRONT_END],
        OTHER_FE: [RoleName.FRONT_END],
        OTHER_II: [RoleName.INSTANCE],
        ME: [RoleName.INSTANCE, RoleName.HOLDER],
        HOLDER: [RoleName.HOLDER],
        CACHE: [RoleName.HOLDER],
    },
    {
        SCOPE.scope_id: ScopeRules(read=[FE, ME], write=[ME], publish=[ME, HOLDER, CACHE], withdraw=[ME]),
        OTHER_SCOPE: ScopeRules(read=[OTHER_FE, OTHER_II]),
    },
)


@pytest.mark.requirement("SE-1")
def test_the_output_of_a_session_is_not_there_for_a_front_end_of_another_scope() -> None:
    world = World()
    world.role.policy = POLICY
    mine = world.begin(PROMPT)
    world.run_jobs()
    world.acknowledge_checkpoints()
    world.do(engine.TokensDecoded(world.sequence(), 0, (1, 2)))
    unknown, _ = world.ask(
        OTHER_FE, StreamOutput(SESSION.replace("6", "7")), OutputRequest(from_index=0, epoch=1)
    )
    again = OutputRequest(from_index=0, epoch=1)
    as_its_own = attrs.evolve(
        again,
        compat_id="cd" * 32,
        scope_id=OTHER_SCOPE,
        prompt=PROMPT,
        sampler=sampler(),
    )
    for body in (again, as_its_own):
        request, _ = world.ask(OTHER_FE, StreamOutput(SESSION), body)
        assert world.status_of(request) == 404
        assert world.answered(request).body != b""
        assert world.output(request) == []
    assert world.status_of(unknown) == 404
    world.do(engine.TokensDecoded(world.sequence(), 2, (3,)))
    assert world.output(mine) == [1, 2, 3]


@pytest.mark.requirement("SE-1")
def test_a_shard_does_not_compute_for_an_instance_of_another_scope() -> None:
    world = World()
    world.role.policy = POLICY
    world.ask(PC, ReshardGroup(), plan(4, 5, fetch=(FetchRange(tokens=(0, 8), from_=HOLDER),)))
    world.load(*KEYS)
    world.ask(PC, ReshardGroup(), ReshardCommit(map="m", commit=5))
    world.run_jobs()
    request, _ = world.ask(OTHER_II, Attend("m"), AttendRequest(version=5, layer=0, queries=b"\0" * 4))
    assert world.status_of(request) == 404
    assert world.of(engine.Attend) == []
