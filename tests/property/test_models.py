"""A model's end is looked at where a run came to it, and only there."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import get_state_machine_test, rule

from tests.property.models import EndingModel

LONG = bytes(4000)


class Taking(EndingModel):
    """A model that is half changed while its rule draws."""

    taken = 0

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        self.taken += 1
        data.draw(st.binary(min_size=64, max_size=64))
        self.taken -= 1

    def at_end(self) -> None:
        assert not self.taken, "half changed"
        raise AssertionError("the end was looked at")


def run(octets: bytes) -> None:
    options = settings(stateful_step_count=3, database=None, suppress_health_check=list(HealthCheck))
    get_state_machine_test(Taking, settings=options).hypothesis.fuzz_one_input(octets)


def test_the_end_of_a_whole_run_is_looked_at() -> None:
    with pytest.raises(AssertionError, match="the end was looked at"):
        run(LONG)


@pytest.mark.parametrize("length", range(0, 80, 8))
def test_a_run_cut_off_in_a_rule_shows_nothing(length: int) -> None:
    run(LONG[:length])
