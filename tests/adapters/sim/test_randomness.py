"""What a seed decides: the same draws everywhere, and streams that do not disturb one another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsp_sim.clock import Clock
from kvsp_sim.randomness import Randomness
from tests.hash_seeds import printed


def test_draws_are_known() -> None:
    random = Randomness(1).split("network", 2)
    drawn = (random.below(1000), random.between(5, 7), random.pick("abc"), random.octets(4).hex())
    assert drawn == (173, 6, "b", "16928327")


def test_draws_do_not_depend_on_the_hash_seed() -> None:
    program = "from kvsp_sim.randomness import Randomness; print(Randomness(3).split('a').octets(16).hex())"
    assert len({printed(program, seed) for seed in ("0", "1")}) == 1


def test_one_stream_does_not_move_another() -> None:
    one, other = Randomness(1), Randomness(1)
    one.below(10)
    assert one.split("x").octets(8) == other.split("x").octets(8)
    assert one.split("x").octets(8) != one.split("y").octets(8)


def test_draws_stay_in_their_bounds() -> None:
    random = Randomness(4)
    assert {random.between(3, 5) for _ in range(200)} == {3, 4, 5}
    assert all(10 <= random.spread(10, 1000) <= 1000 for _ in range(200))
    assert sorted(random.shuffled(range(20))) == list(range(20))
    assert not random.chance(0.0)
    assert random.octets(0) == b""


@given(st.integers(-(10**9), 10**9), st.integers(-20_000, 20_000), st.integers(0, 10**12))
def test_a_clock_says_when_it_will_show_a_time(offset_ms: int, drift_ppm: int, world_us: int) -> None:
    clock = Clock(offset_ms, drift_ppm)
    shown = clock.read(world_us)
    due = clock.when(shown)
    assert due <= world_us
    assert clock.read(due) == shown
    assert clock.read(due - 1) < shown
