"""Strategies for the events of an instance's lifecycle and of a controller's fleet."""

from __future__ import annotations

from hypothesis import strategies as st

from kvsp_core.machines import fleet, lifecycle
from kvsp_core.records import InstanceStatus

__all__ = ["INSTANCES", "fleet_events", "lifecycle_events", "statuses"]

INSTANCES = ("https://one.example/", "https://two.example/")

_instances = st.sampled_from(INSTANCES)
_states = st.sampled_from(["active", "draining", "sleeping", "failed", "resting"])


def lifecycle_events(seqs: st.SearchStrategy[int]) -> st.SearchStrategy[lifecycle.Event]:
    """Return events of an instance's lifecycle; answers are to statuses of the numbers given."""
    return st.one_of(
        st.just(lifecycle.OpenSession()),
        st.just(lifecycle.CloseSession()),
        st.builds(lifecycle.ChangeState, _states),
        st.builds(lifecycle.ReportLoad, st.sampled_from([0.0, 0.04, 0.5, 1.0])),
        st.builds(lifecycle.ReceiveStatusAnswer, seqs, _states),
        st.builds(lifecycle.FailStatus, seqs),
        st.builds(lifecycle.RefuseStatus, seqs),
        st.just(lifecycle.Stop()),
        st.just(lifecycle.TimerFired()),
    )


def statuses() -> st.SearchStrategy[InstanceStatus]:
    """Return status records of two instances, of few epochs and numbers, so that they meet."""
    return st.builds(
        InstanceStatus,
        instance=_instances,
        epoch=st.integers(1, 4),
        state=_states,
        running=st.just(0),
        queued=st.just(0),
        batch_size=st.just(8),
        kv_utilization=st.just(0.5),
        prefill_tokens_per_s=st.just(1000),
        decode_tokens_per_s=st.just(100),
        links=st.just(()),
        requested_state=st.sampled_from([None, "sleeping"]),
        ttl_ms=st.integers(1, 400),
        seq=st.none() | st.integers(0, 20),
    )


def fleet_events() -> st.SearchStrategy[fleet.Event]:
    """Return events of a controller's fleet, unknown instances included; restoring is for the start only."""
    return st.one_of(
        st.builds(fleet.ReceiveStatus, statuses(), st.booleans()),
        st.builds(fleet.ReceiveStatus, statuses(), st.booleans()),
        st.builds(fleet.DrainInstance, _instances),
        st.builds(fleet.WakeInstance, _instances),
        st.builds(fleet.EndStateRequest, _instances, st.booleans()),
        st.just(fleet.TimerFired()),
    )
