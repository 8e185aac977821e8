"""Strategies for replica records and the events of the replica index (`kvsp_core.machines.replica_index`).

Keys are those of a few chains that share prefixes, as prompts do; holders, scopes and digests are drawn from
small pools, so that records meet, replace and quarantine each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hypothesis import strategies as st

from kvsp_core.identity import component_id
from kvsp_core.machines import replica_index as m
from kvsp_core.records import ReplicaRecord, Residency

__all__ = [
    "CHAINS",
    "CLIENTS",
    "HOLDERS",
    "KEYS",
    "SPACES",
    "index_events",
    "lookups",
    "publications",
    "replica_records",
    "residencies",
    "withdrawals",
]

HOLDERS = ("https://h1.example/kvsp/", "https://h2.example/kvsp/", "https://h3.example/")
CLIENTS = (*HOLDERS, "https://pc.example/")


def _hex(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


_TRUNK = tuple(_hex("trunk", i) for i in range(6))
CHAINS = (
    _TRUNK + tuple(_hex("left", i) for i in range(4)),
    _TRUNK[:4] + tuple(_hex("right", i) for i in range(6)),
    _TRUNK[:1] + tuple(_hex("other", i) for i in range(2)),
)
KEYS = tuple(dict.fromkeys(key for chain in CHAINS for key in chain))
SPACES = ((_hex("descriptor"), _hex("scope")[:32]), (_hex("descriptor"), _hex("scope 2")[:32]))
_LAYER_LISTS = tuple(tuple(_hex("layer", n, i) for i in range(4)) for n in range(3))

residencies = st.sampled_from(
    (
        (Residency(tier="host", layers=(0, 3)),),
        (Residency(tier="device", layers=(0, 1)), Residency(tier="host", layers=(2, 3), read_mbit_per_s=9)),
        (Residency(tier="local-storage", layers=(2, 3)),),
    )
)


@st.composite
def replica_records(
    draw: st.DrawFn, keys: Sequence[str] = KEYS, holders: Sequence[str] = HOLDERS
) -> ReplicaRecord:
    """Draw a record that is right in itself, with layer digests or without."""
    compat_id, scope_id = draw(st.sampled_from((SPACES[0], SPACES[0], SPACES[1])))
    residency = draw(residencies)
    layers = draw(st.sampled_from(_LAYER_LISTS))
    by_layer = residency[0].layers[0] > 0 or draw(st.booleans())
    return ReplicaRecord(
        block_key=draw(st.sampled_from(keys)),
        compat_id=compat_id,
        scope_id=scope_id,
        holder=draw(st.sampled_from(holders)),
        codec=1,
        size=draw(st.sampled_from((2048, 4096))),
        digest="sha-256:" + hashlib.sha256(bytes.fromhex("".join(layers))).hexdigest(),
        layer_digests=layers if by_layer else None,
        residency=residency,
        ttl_ms=draw(st.one_of(st.integers(1, 50), st.integers(1, 20_000))),
    )


def publications(records: st.SearchStrategy[ReplicaRecord] | None = None) -> st.SearchStrategy[m.Publish]:
    """Return publications of records, by their holder or on its behalf."""

    def published(record: ReplicaRecord, client: str) -> m.Publish:
        holder_id = component_id(record.holder)
        return m.Publish(client=client, holder_id=holder_id, block_key=record.block_key, record=record)

    return st.builds(published, replica_records() if records is None else records, st.sampled_from(CLIENTS))


def withdrawals(keys: Sequence[str] = KEYS) -> st.SearchStrategy[m.Withdraw]:
    """Return withdrawals of what may or may not be there, some with a digest."""
    digests = ["sha-256:" + hashlib.sha256(bytes.fromhex("".join(x))).hexdigest() for x in _LAYER_LISTS]
    return st.builds(
        m.Withdraw,
        holder_id=st.sampled_from([component_id(holder) for holder in HOLDERS]),
        block_key=st.sampled_from(keys),
        digest=st.one_of(st.none(), st.sampled_from(digests)),
    )


def lookups() -> st.SearchStrategy[m.Lookup]:
    """Return lookups of chains, of parts of them, and of keys in any order."""
    chains = st.sampled_from(CHAINS)
    suffixes = st.tuples(chains, st.integers(0, 6)).map(lambda drawn: drawn[0][drawn[1] :])
    any_order = st.lists(st.sampled_from((*KEYS, "0" * 64)), max_size=8).map(tuple)
    return st.builds(
        lambda space, keys, holders: m.Lookup(
            compat_id=space[0], scope_id=space[1], block_keys=keys, holders=holders
        ),
        st.sampled_from((SPACES[0], SPACES[0], SPACES[1])),
        st.one_of(chains, chains, suffixes, any_order),
        st.lists(st.sampled_from(HOLDERS), max_size=2).map(tuple),
    )


def index_events() -> st.SearchStrategy[m.Event]:
    """Return every kind of event of the index."""
    return st.one_of(publications(), publications(), withdrawals(), lookups(), st.just(m.TimerFired()))
