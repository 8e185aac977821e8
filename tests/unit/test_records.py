"""The records of the protocol: its examples, what is refused, and what a refusal says."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from kvsp_core.bodies import decode, encode, parse
from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.limits import MAX_PARAMETERS_BYTES
from kvsp_core.records import (
    InstanceStatus,
    ReplicaRecord,
    Sampler,
    SessionCheckpoint,
    Shard,
    ShardMap,
)
from kvsp_core.validation import moqt_fields, moqt_namespace

KEY = "9ca9d8b60f37f84726a27deb4cdc0d075714607a131632c2366e30b99fb1163b"
COMPAT = "5ed5c2f238839655d7c4029e12b7f31caf9e7421f4edb4057feee6dab760ee0f"
SCOPE = "6d1c6481cd428737da312c089db3832a"

REPLICA = {
    "block_key": KEY,
    "compat_id": COMPAT,
    "scope_id": SCOPE,
    "holder": "https://h1.example/kvsp/",
    "codec": 1,
    "size": 2097152,
    "digest": "sha-256:" + "0" * 64,
    "layer_digests": [f"{layer:064x}" for layer in range(32)],
    "residency": [
        {"tier": "device", "layers": [0, 15]},
        {"tier": "host", "layers": [16, 31], "read_mbit_per_s": 400000},
    ],
    "ttl_ms": 600000,
}
STATUS = {
    "instance": "https://ii7.example/kvsp/",
    "epoch": 12,
    "state": "active",
    "running": 18,
    "queued": 3,
    "batch_size": 32,
    "kv_utilization": 0.71,
    "prefill_tokens_per_s": 42000,
    "decode_tokens_per_s": 3100,
    "links": [{"holder": "https://h1.example/kvsp/", "mbit_per_s": 200000, "rtt_us": 12}],
    "requested_state": None,
    "ttl_ms": 3000,
}
CHECKPOINT = {
    "session": "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11",
    "epoch": 1,
    "compat_id": COMPAT,
    "scope_id": SCOPE,
    "prompt_blocks": [KEY, KEY],
    "prompt_tail": [374, 264],
    "generated": [1296, 315, 279],
    "output_offset": 3,
    "sampler": {"method": "top-p", "params": {"p": 0.9}, "seed": 7, "step": 3, "deterministic": False},
}
EXAMPLES: tuple[tuple[type, dict[str, Any]], ...] = (
    (ReplicaRecord, REPLICA),
    (InstanceStatus, STATUS),
    (SessionCheckpoint, CHECKPOINT),
)


def octets(members: dict[str, Any]) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()


def changed(document: dict[str, Any], member: str, value: object) -> bytes:
    """Return the document with the member at a path replaced, or taken out where the value is `...`."""
    copy: Any = json.loads(json.dumps(document))
    *way, last = [int(step) if step.isdigit() else step for step in member.split("/")]
    place = copy
    for step in way:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return octets(copy)


@pytest.mark.requirement("RR-2", "RR-5", "RR-6")
@pytest.mark.parametrize(("kind", "document"), EXAMPLES, ids=lambda p: getattr(p, "__name__", ""))
def test_the_examples_of_the_protocol_read_and_write_to_the_same_octets(
    kind: type, document: dict[str, Any]
) -> None:
    record = decode(kind, octets(document))
    assert {name: getattr(record, name) is not None for name in document if name != "requested_state"}
    assert encode(record) == octets(document)
    assert decode(kind, encode(record)) == record
    assert hash(record) == hash(decode(kind, octets(document)))


@pytest.mark.requirement("RR-2", "RR-5", "RR-6")
@pytest.mark.parametrize(
    ("kind", "document", "member"),
    [
        (kind, document, name)
        for kind, document in EXAMPLES
        for name in document
        if name not in ("layer_digests", "requested_state")
    ],
)
def test_a_missing_member_is_named(kind: type, document: dict[str, Any], member: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(kind, changed(document, member, ...))
    assert caught.value.member == member
    assert str(caught.value) == f"{member}: is missing"


@pytest.mark.requirement("RR-2", "RR-5", "RR-6")
@pytest.mark.parametrize(
    ("kind", "document", "place", "value", "member"),
    [
        (ReplicaRecord, REPLICA, "block_key", KEY.upper(), "block_key"),
        (ReplicaRecord, REPLICA, "block_key", KEY[:-1], "block_key"),
        (ReplicaRecord, REPLICA, "block_key", KEY[:-1] + "\n", "block_key"),
        (ReplicaRecord, REPLICA, "block_key", "é" * 64, "block_key"),
        (ReplicaRecord, REPLICA, "block_key", 7, "block_key"),
        (ReplicaRecord, REPLICA, "compat_id", KEY + "0", "compat_id"),
        (ReplicaRecord, REPLICA, "scope_id", KEY, "scope_id"),
        (ReplicaRecord, REPLICA, "scope_id", SCOPE[:-2] + "  ", "scope_id"),
        (ReplicaRecord, REPLICA, "digest", KEY, "digest"),
        (ReplicaRecord, REPLICA, "digest", "sha-512:" + KEY, "digest"),
        (ReplicaRecord, REPLICA, "layer_digests/31", KEY[:-1], "layer_digests[31]"),
        (ReplicaRecord, REPLICA, "layer_digests/2", None, "layer_digests[2]"),
        (ReplicaRecord, REPLICA, "layer_digests", [], "layer_digests"),
        (ReplicaRecord, REPLICA, "layer_digests", [KEY] * 31, "layer_digests"),
        (ReplicaRecord, REPLICA, "holder", "http://h1.example/kvsp/", "holder"),
        (ReplicaRecord, REPLICA, "holder", "https://h1.example/kvsp", "holder"),
        (ReplicaRecord, REPLICA, "holder", "https://h1.example/../", "holder"),
        (ReplicaRecord, REPLICA, "holder", "https://h1.example:65536/", "holder"),
        (ReplicaRecord, REPLICA, "codec", 0, "codec"),
        (ReplicaRecord, REPLICA, "codec", 65536, "codec"),
        (ReplicaRecord, REPLICA, "size", -1, "size"),
        (ReplicaRecord, REPLICA, "size", 2**53, "size"),
        (ReplicaRecord, REPLICA, "size", 4.0, "size"),
        (ReplicaRecord, REPLICA, "size", "4", "size"),
        (ReplicaRecord, REPLICA, "size", True, "size"),
        (ReplicaRecord, REPLICA, "ttl_ms", 0, "ttl_ms"),
        (ReplicaRecord, REPLICA, "residency", [], "residency"),
        (ReplicaRecord, REPLICA, "residency/0/tier", "Device", "residency[0].tier"),
        (ReplicaRecord, REPLICA, "residency/0/tier", "", "residency[0].tier"),
        (ReplicaRecord, REPLICA, "residency/0/layers", [0, 16], "residency"),
        (ReplicaRecord, REPLICA, "residency/1/layers", [16, 32], "layer_digests"),
        (ReplicaRecord, REPLICA, "residency/1/layers", [17, 16], "residency[1].layers"),
        (ReplicaRecord, REPLICA, "residency/1/layers", [-1, 16], "residency[1].layers[0]"),
        (ReplicaRecord, REPLICA, "residency/1/layers", [16], "residency[1].layers"),
        (ReplicaRecord, REPLICA, "residency/1/layers", [16, 2**32], "residency[1].layers[1]"),
        (ReplicaRecord, REPLICA, "residency/1/layers", ..., "residency[1].layers"),
        (ReplicaRecord, REPLICA, "residency/1/read_mbit_per_s", -1, "residency[1].read_mbit_per_s"),
        (InstanceStatus, STATUS, "instance", "https://ii7.example/?x/", "instance"),
        (InstanceStatus, STATUS, "epoch", -1, "epoch"),
        (InstanceStatus, STATUS, "state", "ACTIVE", "state"),
        (InstanceStatus, STATUS, "running", -1, "running"),
        (InstanceStatus, STATUS, "queued", 1.5, "queued"),
        (InstanceStatus, STATUS, "kv_utilization", 1.01, "kv_utilization"),
        (InstanceStatus, STATUS, "kv_utilization", -0.01, "kv_utilization"),
        (InstanceStatus, STATUS, "links/0/holder", "h1", "links[0].holder"),
        (InstanceStatus, STATUS, "links/0/rtt_us", -1, "links[0].rtt_us"),
        (InstanceStatus, STATUS, "links", STATUS["links"] * 2, "links"),  # type: ignore[operator]
        (InstanceStatus, STATUS, "requested_state", "", "requested_state"),
        (InstanceStatus, STATUS, "ttl_ms", 0, "ttl_ms"),
        (InstanceStatus, STATUS, "compat_ids", [COMPAT, "x"], "compat_ids[1]"),
        (InstanceStatus, STATUS, "seq", -1, "seq"),
        (SessionCheckpoint, CHECKPOINT, "session", "6f1d0a9e2c554d7e9a0e5b7f2f9f6a11", "session"),
        (SessionCheckpoint, CHECKPOINT, "epoch", -1, "epoch"),
        (SessionCheckpoint, CHECKPOINT, "prompt_blocks/1", "x", "prompt_blocks[1]"),
        (SessionCheckpoint, CHECKPOINT, "prompt_tail/0", -1, "prompt_tail[0]"),
        (SessionCheckpoint, CHECKPOINT, "prompt_tail/1", 2**32, "prompt_tail[1]"),
        (SessionCheckpoint, CHECKPOINT, "generated/2", True, "generated[2]"),
        (SessionCheckpoint, CHECKPOINT, "output_offset", 2, "output_offset"),
        (SessionCheckpoint, CHECKPOINT, "output_offset", 4, "output_offset"),
        (SessionCheckpoint, CHECKPOINT, "generated", [1, 2, 3, 4], "output_offset"),
        (SessionCheckpoint, CHECKPOINT, "sampler/step", -1, "sampler.step"),
        (SessionCheckpoint, CHECKPOINT, "sampler/seed", 2**64, "sampler.seed"),
        (SessionCheckpoint, CHECKPOINT, "sampler/params", [], "sampler.params"),
        (SessionCheckpoint, CHECKPOINT, "sampler/params", {"stop": [2**53]}, "sampler.params.stop[0]"),
        (SessionCheckpoint, CHECKPOINT, "sampler/deterministic", 1, "sampler.deterministic"),
        (SessionCheckpoint, CHECKPOINT, "sampler/method", "", "sampler.method"),
    ],
)
def test_a_wrong_member_is_named_by_its_path_and_its_value_is_not_shown(
    kind: type, document: dict[str, Any], place: str, value: object, member: str
) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(kind, changed(document, place, value))
    assert caught.value.member == member
    assert KEY[:12] not in str(caught.value)


def test_a_value_that_a_program_builds_is_checked_like_one_that_is_read() -> None:
    record = decode(ReplicaRecord, octets(REPLICA))
    with pytest.raises(LocalProtocolError, match="ttl_ms: expected an integer from 1 to"):
        attrs.evolve(record, ttl_ms=0)
    with pytest.raises(LocalProtocolError, match="residency: expected an array"):
        attrs.evolve(record, residency=list(record.residency))


@pytest.mark.parametrize(
    "lengths",
    [(63, 65, 32, 72), (64, 64, 24, 72), (64, 64, 33, 71), (65, 64, 31, 72), (64, 62, 34, 72)],
)
def test_lengths_that_make_up_for_each_other_are_wrong_all_the_same(lengths: tuple[int, ...]) -> None:
    """The digest without its prefix, too: as long as one with it."""
    names = ("block_key", "compat_id", "scope_id", "digest")
    document = REPLICA | {name: "a" * length for name, length in zip(names, lengths, strict=True)}
    with pytest.raises(RemoteProtocolError, match="lowercase hex digits, found a string of another form"):
        decode(ReplicaRecord, octets(document))


@pytest.mark.requirement("RR-1")
@pytest.mark.parametrize(("kind", "document"), EXAMPLES, ids=lambda p: getattr(p, "__name__", ""))
def test_unknown_members_are_ignored_and_names_are_case_sensitive(
    kind: type, document: dict[str, Any]
) -> None:
    record = decode(kind, octets(document))
    assert decode(kind, octets({"new": {"x": [1, None]}, **document, "Epoch": "x", "SIZE": []})) == record
    name = next(iter(document))
    with pytest.raises(RemoteProtocolError, match=f"{name}: is missing"):
        decode(kind, octets({n.upper() if n == name else n: v for n, v in document.items()}))


@pytest.mark.requirement("RR-1")
def test_of_a_repeated_name_the_last_value_counts() -> None:
    body = octets(STATUS)
    assert decode(InstanceStatus, body[:-1] + b',"epoch":13}').epoch == 13
    assert decode(InstanceStatus, b'{"epoch":"x",' + body[1:]).epoch == 12
    with pytest.raises(RemoteProtocolError, match="epoch: expected an integer, found a string"):
        decode(InstanceStatus, body[:-1] + b',"epoch":"x"}')


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not a JSON document: Input data was truncated"),
        (b"null", "expected an object, found null"),
        (b"[]", "expected an object, found an array"),
        (b"{} {}", "not a JSON document: trailing characters"),
        (b'{"codec":NaN}', "not a JSON document: invalid character"),
        (b"\xff", "not a JSON document"),
        (b'{"holder":"\xff"}', "not a JSON document"),
        (b'{"holder":"\\ud800"}', "not a JSON document"),
        (b'{"x":' + b"[" * 1_000_000, "nests too deep"),
        (b'{"x":' * 1_000_000, "nests too deep"),
        (b'{"size":' + b"1" * 100_000 + b"}", "size: integer value out of range"),
    ],
    ids=range(11),
)
def test_what_is_not_a_document_is_refused_in_plain_words(body: bytes, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        decode(ReplicaRecord, body)


def test_a_refusal_is_short_however_deep_the_document_is() -> None:
    with pytest.raises(RemoteProtocolError, match="number out of range") as refused:
        parse(b"[" * 600 + b"1e999" + b"]" * 600)
    assert len(str(refused.value)) < 300


@pytest.mark.requirement("RR-3")
def test_a_replica_that_lacks_layers_needs_layer_digests() -> None:
    whole = {name: value for name, value in REPLICA.items() if name != "layer_digests"}
    assert decode(ReplicaRecord, octets(whole)).layer_digests is None
    for first, second in (([1, 15], [16, 31]), ([0, 14], [16, 31])):
        residency = [{"tier": "device", "layers": first}, {"tier": "host", "layers": second}]
        assert decode(ReplicaRecord, octets({**REPLICA, "residency": residency}))
        with pytest.raises(RemoteProtocolError, match=r"layer_digests: is missing"):
            decode(ReplicaRecord, octets({**whole, "residency": residency}))


@pytest.mark.requirement("RR-2")
def test_residency_may_come_in_any_order_and_say_less_than_all_layers() -> None:
    residency = [{"tier": "host", "layers": [20, 31]}, {"tier": "new-tier", "layers": [0, 3]}]
    record = decode(ReplicaRecord, octets({**REPLICA, "residency": residency}))
    assert record.has_layers(0, 3)
    assert record.has_layers(21, 30)
    assert not record.has_layers(3, 4)
    assert not record.has_layers(0, 31)
    whole = decode(ReplicaRecord, octets(REPLICA))
    assert whole.has_layers(0, 31)
    assert whole.has_layers(10, 20)
    assert not whole.has_layers(0, 32)


@pytest.mark.requirement("KC-5")
def test_a_record_tells_whether_its_digests_agree() -> None:
    record = decode(ReplicaRecord, octets(REPLICA))
    assert not record.digests_agree()
    digest = "sha-256:a2f43f53b9d3cb7c8a1e1e2d7cfc1ccdc2d80c5d23da7d0a7a0ea2bbd3c3f3c1"
    assert not attrs.evolve(record, digest=digest).digests_agree()
    assert attrs.evolve(record, layer_digests=None).digests_agree()


MOQT = {**REPLICA, "holder": "moqt://relay.example:4443/live?x=1", "moqt_namespace": "AWEBYgFjAWQBZQ"}


@pytest.mark.requirement("RR-4")
def test_a_moqt_holder_has_a_namespace_of_five_fields() -> None:
    record = decode(ReplicaRecord, octets(MOQT))
    assert moqt_fields(record.moqt_namespace or "") == (b"a", b"b", b"c", b"d", b"e")
    assert json.loads(encode(record)) == MOQT
    fields = (b"\0", b"kvsp", bytes(255), b"\xff", b"x")
    assert moqt_fields(moqt_namespace(fields)) == fields


@pytest.mark.requirement("RR-4")
@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("holder", "moqt:relay.example"),
        ("holder", "moqt://user@relay.example/"),
        ("holder", "moqt://relay.example/#x"),
        ("holder", "moqt://relay.example/ x"),
        ("holder", "quic://relay.example/"),
        ("moqt_namespace", ...),
        ("moqt_namespace", ""),
        ("moqt_namespace", "AWEBYgFjAWQBZQ=="),
        ("moqt_namespace", "AWEBYgFjAWQBZR"),
        ("moqt_namespace", "AWEBYgFjAWQBZQA"),
        ("moqt_namespace", "AWEBYgFjAWQ"),
        ("moqt_namespace", "AWEBYgFjAWQBZQFm"),
        ("moqt_namespace", "AWEBYgFjAWQCZQ"),
        ("moqt_namespace", "AWEBYgFjAWQAZQ"),
        ("moqt_namespace", "AWEBYgFjAWQ+"),
        ("moqt_namespace", "A"),
    ],
)
def test_a_wrong_moqt_holder_or_namespace_is_refused(member: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(ReplicaRecord, changed(MOQT, member, value))
    assert caught.value.member == member


@pytest.mark.requirement("RR-4")
def test_a_namespace_goes_with_a_moqt_holder_only() -> None:
    with pytest.raises(RemoteProtocolError, match="moqt_namespace: is given only where"):
        decode(ReplicaRecord, octets({**REPLICA, "moqt_namespace": "AWEBYgFjAWQBZQ"}))


@pytest.mark.requirement("RR-5")
def test_states_and_tiers_newer_than_this_program_are_carried() -> None:
    assert decode(InstanceStatus, changed(STATUS, "state", "hibernating")).state == "hibernating"
    asked = decode(InstanceStatus, changed(STATUS, "requested_state", "sleeping"))
    assert asked.requested_state == "sleeping"
    assert decode(InstanceStatus, changed(STATUS, "requested_state", ...)).requested_state is None


@pytest.mark.requirement("RR-6")
def test_a_session_is_one_uuid_however_it_is_spelled() -> None:
    upper = decode(SessionCheckpoint, changed(CHECKPOINT, "session", str(CHECKPOINT["session"]).upper()))
    assert upper == decode(SessionCheckpoint, octets(CHECKPOINT))


def test_our_own_members_show_only_where_they_say_something() -> None:
    status = decode(InstanceStatus, octets(STATUS))
    assert b"seq" not in encode(status)
    assert json.loads(encode(attrs.evolve(status, seq=4, compat_ids=(COMPAT,))))["seq"] == 4


@pytest.mark.requirement("SE-5")
@pytest.mark.parametrize(("kind", "document"), EXAMPLES, ids=lambda p: getattr(p, "__name__", ""))
def test_no_key_token_or_session_shows_in_a_representation(kind: type, document: dict[str, Any]) -> None:
    shown = repr(decode(kind, octets(document)))
    for secret in (KEY, COMPAT, SCOPE, "1296", "374", "6f1d0a9e", "0.9"):
        assert secret not in shown


def shards(*bounds: tuple[int, int]) -> tuple[Shard, ...]:
    return tuple(Shard(tokens=b, instance=f"https://ii{i}.example/") for i, b in enumerate(bounds))


@pytest.mark.requirement("RS-1")
def test_a_shard_map_covers_its_context_without_gap_or_overlap() -> None:
    assert ShardMap(map="c3f8", version=4, shards=shards((0, 32768), (32768, 65536))).version == 4
    for bounds in ((1, 2),), ((0, 2), (3, 4)), ((0, 2), (1, 4)):
        with pytest.raises(LocalProtocolError, match=r"shards\[\d\]\.tokens: expected a range that starts"):
            ShardMap(map="c3f8", version=4, shards=shards(*bounds))
    assert ShardMap(map="c3f8", version=0, shards=()).shards == ()
    with pytest.raises(LocalProtocolError, match="tokens: expected the start of a half-open range"):
        shards((4, 4))
    with pytest.raises(LocalProtocolError, match="map: expected letters, digits"):
        ShardMap(map="../x", version=4, shards=shards((0, 1)))


def test_parameters_of_a_sampler_are_limited_before_they_are_looked_through() -> None:
    wide = {str(number): number for number in range(MAX_PARAMETERS_BYTES // 8)}
    with pytest.raises(LocalProtocolError, match=r"^params: expected at most 65536 octets"):
        Sampler(method="top-p", params=wide, seed=1, step=0, deterministic=False)
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"deeper": deep}
    with pytest.raises(LocalProtocolError, match=r"nests at most"):
        Sampler(method="top-p", params=deep, seed=1, step=0, deterministic=False)
