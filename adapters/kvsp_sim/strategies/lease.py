"""Strategies for the events of the lease table (`kvsp_core.machines.lease`).

Blocks, clients and leases are drawn from small pools, so that events meet.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from kvsp_core.machines import lease as m

__all__ = ["BLOCKS", "CLIENTS", "block_events", "blocks", "clients", "lease_events", "read_events", "ttls_ms"]

BLOCKS = tuple("abcdef")
CLIENTS = ("https://one.example/", "https://two.example/")

blocks = st.sampled_from(BLOCKS)
clients = st.sampled_from(CLIENTS)
ttls_ms = st.integers(1, 1200)


def lease_events(leases: Sequence[str], max_blocks: int = 4) -> st.SearchStrategy[m.Event]:
    """Return events of clients about new leases and about the ones named."""
    names = st.sampled_from([*leases, "unknown"])
    return st.one_of(
        st.builds(
            m.CreateLease,
            client=clients,
            blocks=st.lists(blocks, min_size=1, max_size=max_blocks).map(tuple),
            ttl_ms=ttls_ms,
        ),
        st.builds(m.RenewLease, client=clients, lease=names, ttl_ms=ttls_ms),
        st.builds(m.ReleaseLease, client=clients, lease=names),
    )


def block_events() -> st.SearchStrategy[m.Event]:
    """Return events of the holder about its blocks, illegal ones included."""
    return st.one_of(
        st.builds(m.AddBlock, block=blocks, size_bytes=st.integers(0, 200), restored=st.booleans()),
        st.builds(m.EvictBlock, block=blocks),
        st.builds(m.FailBlock, block=blocks),
        st.builds(m.EndWithdrawal, block=blocks),
        st.just(m.TimerFired()),
    )


def read_events() -> st.SearchStrategy[m.Event]:
    """Return starts and ends of a few reads, illegal ones included."""
    reads = st.sampled_from(("r1", "r2", "r3"))
    return st.one_of(st.builds(m.StartRead, read=reads, block=blocks), st.builds(m.EndRead, read=reads))
