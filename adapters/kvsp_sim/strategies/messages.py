"""Strategies for every record and message, for typed requests, and for documents with a fault.

`records` and `messages` map each class to its strategy. Keys, holders and instances are drawn from small
pools as well as at large, so that they meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from kvsp_core import ext_messages as ext
from kvsp_core import messages as m
from kvsp_core import records as r
from kvsp_core import resources as res
from kvsp_core.identity import component_id
from kvsp_core.registries import INSTANCE_STATES, STORAGE_TIERS
from kvsp_core.validation import moqt_namespace

__all__ = [
    "altered",
    "base_uris",
    "checkpoints",
    "digests",
    "hex16",
    "hex32",
    "json_objects",
    "messages",
    "operations",
    "records",
    "replica_records",
    "samplers",
    "statuses",
    "uuids",
]

_MOST: Final = 2**53 - 1

hex32 = st.binary(min_size=32, max_size=32).map(bytes.hex) | st.sampled_from(("0a" * 32, "0b" * 32))
hex16 = st.binary(min_size=16, max_size=16).map(bytes.hex) | st.sampled_from(("0c" * 16, "0d" * 16))
digests = hex32.map("sha-256:".__add__)
uuids = st.uuids().map(str)
base_uris = st.sampled_from(
    (
        "https://h1.example/kvsp/",
        "https://h2.example:8443/",
        "https://[2001:db8::1]:65535/a/b/",
        "https://H.example/a.b/%7E/",
    )
)
moqt_uris = st.sampled_from(("moqt://relay.example", "moqt://[::1]:4443/live?x=1"))
holders = base_uris | moqt_uris
names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,12}[a-z0-9])?", fullmatch=True)
states = st.sampled_from(sorted(INSTANCE_STATES)) | names
tiers = st.sampled_from(sorted(STORAGE_TIERS)) | names
identifiers = st.from_regex(r"[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,20}", fullmatch=True)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
counts = st.integers(0, _MOST) | st.integers(0, 3)
durations_ms = st.integers(1, _MOST) | st.integers(1, 3)
epochs = st.integers(0, 3) | counts
tokens = st.integers(0, 2**32 - 1) | st.sampled_from((0, 2**31 - 1, 2**31, 2**32 - 1))


def tuples(
    of: st.SearchStrategy[Any], most: int = 4, least: int = 0, **more: Any
) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return short tuples of what another strategy gives."""
    return st.lists(of, min_size=least, max_size=most, **more).map(tuple)


json_objects = st.dictionaries(
    texts,
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-_MOST, _MOST)
        | st.floats(allow_nan=False, allow_infinity=False)
        | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


# Records ----------------------------------------------------------------------------------------------------

residencies = st.builds(
    r.Residency,
    tier=tiers,
    layers=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=2).map(lambda pair: tuple(sorted(pair))),
    read_mbit_per_s=st.none() | counts,
)


@st.composite
def replica_records(draw: st.DrawFn, block_key: str | None = None) -> r.ReplicaRecord:
    """Draw a record of up to eight layers, of which some or all are resident, in any order of tiers."""
    layers = draw(st.integers(1, 8))
    edges = sorted(draw(st.sets(st.integers(0, layers), min_size=2, max_size=5)))
    ranges = [(start, end - 1) for start, end in itertools.pairwise(edges)]
    kept = draw(st.lists(st.sampled_from(ranges), min_size=1, unique=True))
    whole = kept == ranges and ranges[0][0] == 0
    by_layer = not whole or draw(st.booleans())
    moqt = draw(st.booleans())
    return r.ReplicaRecord(
        block_key=block_key or draw(hex32),
        compat_id=draw(hex32),
        scope_id=draw(hex16),
        holder=draw(moqt_uris if moqt else base_uris),
        codec=draw(st.integers(1, 0xFFFF)),
        size=draw(counts),
        digest=draw(digests),
        layer_digests=tuple(draw(st.lists(hex32, min_size=layers, max_size=layers))) if by_layer else None,
        residency=tuple(
            r.Residency(tier=draw(tiers), layers=pair, read_mbit_per_s=draw(st.none() | counts))
            for pair in kept
        ),
        ttl_ms=draw(durations_ms),
        moqt_namespace=moqt_namespace(
            draw(st.lists(st.binary(min_size=1, max_size=255), min_size=5, max_size=5))
        )
        if moqt
        else None,
    )


links = st.builds(r.Link, holder=base_uris, mbit_per_s=counts, rtt_us=counts)
statuses = st.builds(
    r.InstanceStatus,
    instance=base_uris,
    epoch=epochs,
    state=states,
    running=counts,
    queued=counts,
    batch_size=counts,
    kv_utilization=st.floats(0, 1),
    prefill_tokens_per_s=counts,
    decode_tokens_per_s=counts,
    links=tuples(links, unique_by=lambda link: link.holder),
    requested_state=st.none() | states,
    ttl_ms=durations_ms,
    compat_ids=tuples(hex32, 2),
    seq=st.none() | counts,
    numerics=st.none() | texts,
    failing=st.none() | st.booleans(),
)
samplers = st.builds(
    r.Sampler,
    method=texts,
    params=json_objects,
    seed=st.integers(-(2**63), 2**64 - 1),
    step=counts,
    deterministic=st.booleans(),
)


@st.composite
def checkpoints(draw: st.DrawFn) -> r.SessionCheckpoint:
    """Draw a checkpoint of a short session."""
    generated = draw(tuples(tokens, 6))
    return r.SessionCheckpoint(
        session=draw(uuids),
        epoch=draw(epochs),
        compat_id=draw(hex32),
        scope_id=draw(hex16),
        prompt_blocks=draw(tuples(hex32)),
        prompt_tail=draw(tuples(tokens)),
        generated=generated,
        output_offset=len(generated),
        sampler=draw(samplers),
    )


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """Draw ranges of token positions, half open, ascending and apart."""
    edges = sorted(draw(st.sets(st.integers(0, 2**32), max_size=8)))
    return tuple(zip(edges[::2], edges[1::2], strict=False))


@st.composite
def shard_maps(draw: st.DrawFn) -> r.ShardMap:
    """Draw a map of up to four shards."""
    edges = [0, *sorted(draw(st.sets(st.integers(1, 2**32), max_size=4)))]
    pairs = list(itertools.pairwise(edges))
    return r.ShardMap(
        map=draw(identifiers),
        version=draw(counts),
        shards=tuple(r.Shard(tokens=pair, instance=draw(base_uris)) for pair in pairs),
    )


records: Final[Mapping[type, st.SearchStrategy[Any]]] = {
    r.Residency: residencies,
    r.ReplicaRecord: replica_records(),
    r.Link: links,
    r.InstanceStatus: statuses,
    r.Sampler: samplers,
    r.SessionCheckpoint: checkpoints(),
    r.Shard: st.builds(
        r.Shard, tokens=st.sampled_from(((0, 1), (0, 32768), (32768, 2**32))), instance=base_uris
    ),
    r.ShardMap: shard_maps(),
}
"""A strategy for each record."""


# Messages ---------------------------------------------------------------------------------------------------


@st.composite
def matched_blocks(draw: st.DrawFn) -> m.MatchedBlock:
    """Draw a block with one or two replicas."""
    key = draw(hex32)
    return m.MatchedBlock(block_key=key, replicas=draw(tuples(replica_records(key), 2, 1)))


@st.composite
def lookup_answers(draw: st.DrawFn) -> m.LookupAnswer:
    """Draw the answer to a lookup."""
    blocks = draw(tuples(matched_blocks(), 2))
    estimates = st.builds(m.TargetEstimate, instance=base_uris, fetch_us=counts, recompute_us=counts)
    return m.LookupAnswer(matched=len(blocks), blocks=blocks, targets=draw(tuples(estimates, 2)))


@st.composite
def reshard_plans(draw: st.DrawFn) -> m.ReshardPlan:
    """Draw a plan whose ranges are dealt out to what is kept, loaded, assigned and released."""
    dealt: dict[str, list[tuple[int, int]]] = {"retain": [], "fetch": [], "assign": [], "release": []}
    for pair in draw(ranges()):
        dealt[draw(st.sampled_from(sorted(dealt)))].append(pair)
    version = draw(st.integers(0, _MOST - 1))
    of_ours = draw(st.booleans())
    return m.ReshardPlan(
        map=draw(identifiers),
        from_=version,
        to=draw(st.integers(version + 1, _MOST)),
        deadline_ms=draw(durations_ms),
        retain=tuple(dealt["retain"]),
        fetch=tuple(m.FetchRange(tokens=pair, from_=draw(base_uris)) for pair in dealt["fetch"]),
        release=tuple(dealt["release"]),
        assign=tuple(dealt["assign"]),
        compat_id=draw(hex32) if of_ours else None,
        scope_id=draw(hex16) if of_ours else None,
        block_keys=draw(tuples(hex32)) if of_ours else (),
    )


@st.composite
def output_requests(draw: st.DrawFn) -> ext.OutputRequest:
    """Draw a request for output: of a new session, one that goes on, or one asked for its prompt."""
    is_new = draw(st.booleans())
    has_prompt = is_new or draw(st.booleans())
    return ext.OutputRequest(
        from_index=draw(counts),
        epoch=draw(epochs),
        compat_id=draw(hex32) if is_new else None,
        scope_id=draw(hex16) if is_new else None,
        prompt=draw(tuples(tokens, 6, 1)) if has_prompt else None,
        sampler=draw(samplers) if is_new else None,
        request_ref=draw(st.none() | texts),
    )


_whole_floats = st.binary(min_size=1, max_size=6).map(lambda octets: octets * 4)


@st.composite
def split_requests(draw: st.DrawFn) -> ext.SplitRequest:
    """Splits of short contexts."""
    keys = draw(tuples(hex32))
    block_tokens = draw(st.integers(1 if keys else 2, 64))  # a context without complete blocks has a token
    least = max(1, len(keys) * block_tokens)
    return ext.SplitRequest(
        compat_id=draw(hex32),
        scope_id=draw(hex16),
        block_keys=keys,
        block_tokens=block_tokens,
        token_count=draw(st.integers(least, (len(keys) + 1) * block_tokens - 1)),
        instances=draw(st.lists(base_uris, min_size=1, max_size=3, unique=True).map(tuple)),
    )


_prefixes = st.builds(ext.ScopedPrefix, scope_id=hex16, block_keys=tuples(hex32))
_candidates = st.builds(
    ext.CandidateCost,
    instance=base_uris,
    refused=st.none() | texts,
    cost_us=st.none() | counts,
    wait_us=counts,
    fetch_us=counts,
    recompute_us=st.none() | counts,
    resident_tokens=counts,
    fetched_tokens=counts,
    recomputed_tokens=counts,
    explanation=texts,
)
_misses = st.builds(ext.MissedBlocks, blocks=st.sampled_from(((0, 1), (3, 9))), reason=texts)
_sessions = st.builds(
    ext.SessionInfo,
    session=uuids,
    state=names,
    epoch=epochs,
    instance=st.none() | base_uris,
    output_offset=counts,
    detail=st.none() | texts,
)
_instances = st.builds(
    ext.InstanceInfo,
    instance=base_uris,
    state=states,
    wanted_state=st.none() | states,
    epoch=epochs,
    sessions=counts,
    status=st.none() | statuses,
)
_directive_blocks = tuples(
    st.builds(m.PrefetchBlock, block_key=hex32, sources=tuples(holders, 2)),
    least=1,
    unique_by=lambda block: block.block_key,
)
_references = st.none() | texts

messages: Final[Mapping[type, st.SearchStrategy[Any]]] = {
    m.PublishAnswer: st.builds(m.PublishAnswer, ttl_ms=durations_ms),
    m.Withdrawal: st.builds(m.Withdrawal, digest=st.none() | digests),
    m.LookupRequest: st.builds(
        m.LookupRequest,
        scope_id=hex16,
        compat_id=hex32,
        block_keys=tuples(hex32),
        targets=tuples(base_uris, unique=True),
        holders=tuples(holders),
    ),
    m.MatchedBlock: matched_blocks(),
    m.TargetEstimate: st.builds(m.TargetEstimate, instance=base_uris, fetch_us=counts, recompute_us=counts),
    m.LookupAnswer: lookup_answers(),
    m.LeaseRequest: st.builds(m.LeaseRequest, block_keys=tuples(hex32, least=1), ttl_ms=durations_ms),
    m.LeaseGranted: st.builds(m.LeaseGranted, lease=texts, ttl_ms=durations_ms),
    m.LeaseRenewal: st.builds(m.LeaseRenewal, ttl_ms=durations_ms),
    m.StatusAnswer: st.builds(m.StatusAnswer, state=states),
    m.CheckpointRecorded: st.builds(m.CheckpointRecorded, epoch=epochs, output_offset=counts),
    m.StateChange: st.builds(m.StateChange, state=states),
    m.PrefetchBlock: st.builds(m.PrefetchBlock, block_key=hex32, sources=tuples(holders, 2)),
    m.PrefetchDirective: st.builds(
        m.PrefetchDirective,
        directive=identifiers,
        request_ref=_references,
        scope_id=hex16,
        compat_id=hex32,
        blocks=_directive_blocks,
        layer_order=st.none() | st.just("ascending") | names,
        deadline_ms=durations_ms,
        lease_ms=durations_ms,
    ),
    m.DirectiveStatus: st.builds(
        m.DirectiveStatus, directive=identifiers, state=names, loaded=tuples(hex32), request_ref=_references
    ),
    m.ResumeRequest: st.builds(m.ResumeRequest, epoch=epochs, checkpoint=checkpoints()),
    m.FetchRange: st.builds(m.FetchRange, tokens=st.just((0, 32768)), from_=base_uris),
    m.ReshardPlan: reshard_plans(),
    m.ReshardCommit: st.builds(m.ReshardCommit, map=identifiers, commit=durations_ms),
    m.ReshardAbort: st.builds(m.ReshardAbort, map=identifiers, abort=durations_ms),
    ext.ScopedPrefix: _prefixes,
    ext.PlacementRequest: st.builds(
        ext.PlacementRequest,
        compat_id=hex32,
        prefixes=tuples(_prefixes, 2, 1, unique_by=lambda prefix: prefix.scope_id),
        token_count=st.integers(1, 2**32 - 1),
        deterministic=st.booleans(),
    ),
    ext.CandidateCost: _candidates,
    ext.MissedBlocks: _misses,
    ext.PlacementAnswer: st.builds(
        ext.PlacementAnswer,
        session=uuids,
        epoch=epochs,
        instance=base_uris,
        request_ref=texts,
        candidates=tuples(_candidates, 2),
        misses=tuples(_misses, 2),
    ),
    ext.SessionInfo: _sessions,
    ext.SessionMove: st.builds(ext.SessionMove, epoch=epochs),
    ext.OutputRequest: output_requests(),
    ext.OutputToken: st.builds(ext.OutputToken, index=counts, epoch=epochs, token=tokens),
    ext.OutputEnd: st.builds(ext.OutputEnd, end=names, index=counts, epoch=epochs, detail=st.none() | texts),
    ext.AttendRequest: st.builds(
        ext.AttendRequest, version=counts, layer=st.integers(0, 2**32 - 1), queries=_whole_floats
    ),
    ext.AttendAnswer: st.builds(ext.AttendAnswer, output=_whole_floats, log_sum_exp=_whole_floats),
    ext.InstanceInfo: _instances,
    ext.InstanceListing: st.builds(ext.InstanceListing, instances=tuples(_instances, 2)),
    ext.SessionListing: st.builds(ext.SessionListing, sessions=tuples(_sessions, 2)),
    ext.HolderInfo: st.builds(ext.HolderInfo, holder=holders, records=counts),
    ext.IndexInfo: st.builds(
        ext.IndexInfo,
        records=counts,
        size_bytes=counts,
        holders=tuples(st.builds(ext.HolderInfo, holder=holders, records=counts), 2),
    ),
    ext.LeaseInfo: st.builds(ext.LeaseInfo, client=texts, blocks=counts, size_bytes=counts, ttl_ms=counts),
    ext.LeaseListing: st.builds(
        ext.LeaseListing,
        leases=tuples(
            st.builds(ext.LeaseInfo, client=texts, blocks=counts, size_bytes=counts, ttl_ms=counts), 2
        ),
        leased_share=st.floats(0, 1),
    ),
    ext.SplitRequest: split_requests(),
    ext.ShardMapInfo: st.builds(
        ext.ShardMapInfo,
        version=counts,
        planned=counts,
        state=names,
        shards=shard_maps().map(lambda shard_map: shard_map.shards),
    ),
}
"""A strategy for each message, ours included."""


# Typed requests ---------------------------------------------------------------------------------------------

_component_ids = base_uris.map(component_id)
_layers = st.none() | st.sampled_from(((0, 0), (0, 15), (16, 2**32 - 1)))
_codecs = st.none() | st.integers(0, 0xFFFF)
_block_names = {"compat_id": hex32, "scope_id": hex16, "block_key": hex32}
_members: Final[Mapping[type, Mapping[str, st.SearchStrategy[Any]]]] = {
    res.PublishReplica: {"holder_id": _component_ids, "block_key": hex32},
    res.WithdrawReplica: {"holder_id": _component_ids, "block_key": hex32},
    res.GetBlock: {**_block_names, "layers": _layers, "codec": _codecs},
    res.HeadBlock: {**_block_names, "layers": _layers, "codec": _codecs},
    res.StoreBlock: _block_names,
    res.RenewLease: {"lease": texts},
    res.ReleaseLease: {"lease": texts},
    res.ReportStatus: {"instance_id": _component_ids},
    res.RecordCheckpoint: {"session": uuids},
    res.GetDirective: {"directive": identifiers},
    res.ResumeSession: {"session": uuids},
    res.PutDescriptor: {"compat_id": hex32},
    res.GetDescriptor: {"compat_id": hex32},
    res.GetSession: {"session": uuids},
    res.DeleteSession: {"session": uuids},
    res.MoveSession: {"session": uuids},
    res.StreamOutput: {"session": uuids},
    res.Attend: {"map": identifiers},
    res.ChangeInstanceState: {"instance_id": _component_ids},
    res.SplitContext: {"map": identifiers},
    res.GetShardMap: {"map": identifiers},
    res.EndShardMap: {"map": identifiers},
}

operations: st.SearchStrategy[res.Operation] = st.one_of(
    *(st.builds(row.operation, **_members.get(row.operation, {})) for row in res.RESOURCES)
)
"""Typed requests of every resource."""


# Documents that something is wrong with ---------------------------------------------------------------------


@st.composite
def altered(draw: st.DrawFn, octets: bytes) -> bytes:
    """Return a JSON document in which one value is another, of another kind, out of range, or gone."""
    document: Any = msgspec.json.decode(octets)
    place: Any = None
    key: Any = None
    inner = document
    while isinstance(inner, dict | list) and inner and draw(st.integers(0, 3)):
        place = inner
        key = draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
        inner = place[key]
    if place is None:
        return msgspec.json.encode(draw(st.none() | st.integers() | json_objects))
    if draw(st.booleans()):
        place[key] = draw(
            st.sampled_from(
                (None, True, -1, 0, 2**53, 2**64, 2**70, 0.5, 4.0, "", "x", "é" * 64, [], {}, [[]])
            )
            | hex32
            | json_objects
        )
    elif isinstance(place, dict):
        place.pop(key) if draw(st.booleans()) else place.update({f"{key}_": place.pop(key)})
    else:
        place.insert(draw(st.integers(0, len(place))), inner)
    return msgspec.json.encode(document)
