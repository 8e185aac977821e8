"""Limits that have to agree with each other."""

from __future__ import annotations

import pytest

from kvsp_core import limits
from kvsp_core.roles.instance import InstanceSettings


@pytest.mark.requirement("MG-1")
def test_a_resume_has_the_time_that_loading_and_asking_for_the_prompt_take() -> None:
    assert limits.RESUME_DEADLINE_MS > limits.RESUME_LOAD_MS + limits.PROMPT_WAIT_MS


@pytest.mark.requirement("OP-4")
def test_a_front_end_still_waits_for_a_placement_whose_index_is_silent() -> None:
    assert limits.PLACEMENT_CALL_MS >= limits.PLACEMENT_WAIT_MS + limits.LOOKUP_TIMEOUT_MS
    assert limits.MAX_PLACEMENT_MS >= 2 * limits.PLACEMENT_CALL_MS


def test_a_call_that_a_role_makes_for_another_ends_before_the_other_has_given_up() -> None:
    assert limits.LOOKUP_TIMEOUT_MS < limits.CALL_TIMEOUT_MS
    settings = InstanceSettings(base_uri="https://a/", controller_uri="", index_uris=(), epoch=1)
    assert settings.shard_load_ms <= limits.RESHARD_DEADLINE_MS
    assert (
        limits.RESUME_LOAD_MS + limits.PROMPT_WAIT_MS < limits.RESUME_DEADLINE_MS < limits.MAX_SESSION_IDLE_MS
    )
    assert settings.session_kept_ms > limits.OUTPUT_SILENCE_MS + limits.CALL_TIMEOUT_MS


def test_an_engine_that_hangs_is_noticed_well_before_anybody_gives_the_session_up() -> None:
    settings = InstanceSettings(base_uri="https://a/", controller_uri="", index_uris=(), epoch=1)
    assert settings.engine_silence_ms == limits.ENGINE_SILENCE_MS
    assert limits.ENGINE_SILENCE_MS * limits.MAX_ENGINE_FAILURES < limits.MAX_SESSION_IDLE_MS


@pytest.mark.requirement("CP-1")
def test_copies_outlive_the_failure_of_their_instance_and_the_resume_elsewhere() -> None:
    settings = InstanceSettings(base_uri="https://a/", controller_uri="", index_uris=(), epoch=1)
    # Renewed at a third of its time, a lease has two thirds left at least.
    assert settings.copy_lease_ms * 2 // 3 >= limits.RESUME_DEADLINE_MS
    assert settings.copy_lease_ms > settings.status_ttl_ms + limits.RESUME_DEADLINE_MS
