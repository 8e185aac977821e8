"""The loop of the simulation keeps what roles are promised, and one seed gives one history."""

from __future__ import annotations

from collections import Counter

import pytest

from kvsp_core.roles.role import AnswerReceived, CallFailed
from kvsp_sim.clock import Clock
from kvsp_sim.deployment import WIRES
from kvsp_sim.trace import Trace
from kvsp_sim.world import World
from tests.adapters.sim.toy import Client, Register, Toy, run_with_faults
from tests.hash_seeds import printed


def register_of(toy: Toy) -> Register:
    assert isinstance(toy.register.role, Register)
    return toy.register.role


def client_of(toy: Toy) -> Client:
    assert isinstance(toy.client.role, Client)
    return toy.client.role


def heard(toy: Toy, kind: type) -> list[int]:
    return [item.call_id for item in client_of(toy).heard if type(item) is kind]


# Time


def test_what_is_due_together_happens_in_the_order_asked_for() -> None:
    world, happened = World(1), []
    world.at(5, happened.append, "b")
    world.at(3, happened.append, "a")
    world.at(5, happened.append, "c")
    world.run(until_us=9)
    assert happened == ["a", "b", "c"]
    assert world.now_us == 9


# Calls


@pytest.mark.parametrize("wire", WIRES)
def test_calls_are_answered(wire: str) -> None:
    toy = Toy(wire=wire)
    toy.world.run(until_us=1_005_000)
    assert heard(toy, AnswerReceived) == list(range(1, client_of(toy).sent + 1))
    assert register_of(toy).value == client_of(toy).sent
    assert len(register_of(toy).ended) == client_of(toy).sent


@pytest.mark.parametrize("wire", WIRES)
def test_an_answer_waits_until_what_it_rests_on_is_durable(wire: str) -> None:
    toy = Toy(wire=wire)
    toy.storage_faults.least_us = toy.storage_faults.most_us = 40_000
    toy.world.run(until_us=30_000)
    assert register_of(toy).value == 1
    assert heard(toy, AnswerReceived) == []
    toy.register.process.crash()
    toy.world.run(until_us=40_000)
    toy.register.process.start()
    assert heard(toy, AnswerReceived) == []


@pytest.mark.parametrize("wire", WIRES)
def test_persisting_that_fails_discards_the_role(wire: str) -> None:
    """Nothing is answered, though a restart may find what was written."""
    toy = Toy(wire=wire)
    toy.storage_faults.persist_fails = 1.0
    toy.world.run(until_us=30_000)
    assert toy.register.life > 1
    assert heard(toy, AnswerReceived) == []


def test_a_call_to_nobody_or_to_one_who_is_down_fails() -> None:
    toy = Toy()
    toy.register.process.crash()
    toy.world.run(until_us=30_000)
    assert [i.reason for i in client_of(toy).heard if type(i) is CallFailed] == ["no connection"] * 2


def test_a_call_times_out_by_the_callers_clock() -> None:
    toy = Toy(client_clock=Clock(drift_ppm=1_000_000))  # twice as fast
    toy.cluster.network.block("client", "register")
    toy.world.run(until_us=5_000 + 24_000)
    assert heard(toy, CallFailed) == []
    toy.world.run(until_us=5_000 + 27_000)
    assert heard(toy, CallFailed) == [1]


def test_a_blocked_direction_holds_requests_back_and_gives_them_later() -> None:
    toy = Toy()
    toy.cluster.network.block("client", "register")
    toy.world.run(until_us=200_000)
    assert register_of(toy).value == 0
    toy.cluster.network.unblock("client", "register")
    toy.world.run(until_us=201_000)
    assert register_of(toy).value > 1
    answered_late = set(heard(toy, AnswerReceived)) & set(heard(toy, CallFailed))
    assert not answered_late


def test_answers_can_be_blocked_while_requests_pass() -> None:
    toy = Toy()
    toy.cluster.network.block("register", "client")
    toy.world.run(until_us=200_000)
    assert register_of(toy).value > 10
    assert heard(toy, AnswerReceived) == []


@pytest.mark.parametrize("wire", WIRES)
def test_a_paused_process_takes_in_afterwards_what_came(wire: str) -> None:
    toy = Toy(wire=wire)
    toy.register.process.pause()
    toy.world.run(until_us=100_000)
    assert register_of(toy).value == 0
    toy.register.process.proceed()
    toy.world.run(until_us=110_000)
    assert register_of(toy).value > 5


def test_a_witness_sees_what_is_done_for_a_client_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, seen = Toy(), []
    monkeypatch.setattr(toy.cluster.witness, "responded", lambda leg, effect, body: seen.append(leg))
    toy.register.process.pause()
    toy.world.run(until_us=200_000)
    gone = len(heard(toy, CallFailed))
    assert gone > 10
    toy.register.process.proceed()
    toy.world.run(until_us=400_000)
    assert sum(not leg.exchange.open for leg in seen) >= gone


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_call_ends_once_and_nothing_acknowledged_is_lost(seed: int, wire: str) -> None:
    toy = run_with_faults(seed, wire=wire)
    ends = Counter(heard(toy, AnswerReceived) + heard(toy, CallFailed))
    assert set(ends.values()) <= {1}
    known = [int(item.body) for item in client_of(toy).heard if type(item) is AnswerReceived]
    toy.register.process.crash()
    toy.register.process.start()
    assert register_of(toy).value >= max(known, default=0)
    assert toy.register.requests.keys() == register_of(toy).requests.keys()


def test_a_request_can_arrive_twice() -> None:
    received: Counter[tuple[int, int]] = Counter()
    for seed in range(5):
        toy = run_with_faults(seed, faults=("breaks",))
        received += Counter((seed, number) for number in register_of(toy).received)
    assert max(received.values()) > 1


# One seed, one history


@pytest.mark.parametrize("wire", WIRES)
def test_a_seed_gives_one_history_and_another_seed_another(wire: str) -> None:
    def history(seed: int) -> str:
        trace = Trace()
        run_with_faults(seed, trace, wire=wire)
        return trace.hexdigest()

    assert history(3) == history(3)
    assert history(3) != history(4)


def test_a_seed_gives_the_same_history_under_any_hash_seed() -> None:
    program = (
        "from tests.adapters.sim.toy import run_with_faults; from kvsp_sim.trace import Trace; t = Trace(); "
        "run_with_faults(3, t); print(t.hexdigest())"
    )
    assert len({printed(program, seed) for seed in ("0", "1", "2")}) == 1
