"""The bodies of requests and answers: the protocol's examples, ours, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvsp_core.bodies import decode, encode
from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.ext_messages import (
    AttendAnswer,
    AttendRequest,
    OutputEnd,
    OutputRequest,
    OutputToken,
    PlacementRequest,
    decode_output_line,
)
from kvsp_core.limits import MAX_AVOIDED_INSTANCES
from kvsp_core.messages import (
    DirectiveStatus,
    FetchRange,
    LeaseRequest,
    LookupAnswer,
    LookupRequest,
    PrefetchDirective,
    PublishAnswer,
    ReshardAbort,
    ReshardCommit,
    ReshardPlan,
    ResumeRequest,
    StateChange,
    Withdrawal,
    decode_reshard,
)

KEY = "9ca9d8b60f37f84726a27deb4cdc0d075714607a131632c2366e30b99fb1163b"
OTHER_KEY = "653275884ca44f8945fd4c902611c467394b73656e64c78d8522648cb75aefc1"
COMPAT = "5ed5c2f238839655d7c4029e12b7f31caf9e7421f4edb4057feee6dab760ee0f"
SCOPE = "6d1c6481cd428737da312c089db3832a"
H1 = "https://h1.example/kvsp/"
II2 = "https://ii2.example/kvsp/"
RECORD = {
    "block_key": KEY,
    "compat_id": COMPAT,
    "scope_id": SCOPE,
    "holder": H1,
    "codec": 1,
    "size": 4096,
    "digest": "sha-256:" + KEY,
    "residency": [{"tier": "host", "layers": [0, 1]}],
    "ttl_ms": 600,
}
CHECKPOINT = {
    "session": "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11",
    "epoch": 1,
    "compat_id": COMPAT,
    "scope_id": SCOPE,
    "prompt_blocks": [KEY],
    "prompt_tail": [374],
    "generated": [1296, 315],
    "output_offset": 2,
    "sampler": {"method": "greedy", "params": {}, "seed": 0, "step": 2, "deterministic": True},
}
LOOKUP = {"scope_id": SCOPE, "compat_id": COMPAT, "block_keys": [KEY, OTHER_KEY], "targets": [II2]}
FOUND = {
    "matched": 1,
    "blocks": [{"block_key": KEY, "replicas": [RECORD]}],
    "targets": [{"instance": II2, "fetch_us": 120, "recompute_us": 9000}],
}
DIRECTIVE = {
    "directive": "a2b7c9e0-1f3d-4c1a-8f5b-6d2e9a7c3b10",
    "request_ref": "opaque-value-from-PC",
    "scope_id": SCOPE,
    "compat_id": COMPAT,
    "blocks": [{"block_key": KEY, "sources": [H1]}],
    "layer_order": "ascending",
    "deadline_ms": 50,
    "lease_ms": 2000,
}
PLAN = {
    "map": "c3f8e1",
    "from": 4,
    "to": 5,
    "deadline_ms": 200,
    "retain": [[0, 32768]],
    "fetch": [{"tokens": [32768, 49152], "from": II2}],
    "release": [],
}
EXAMPLES: tuple[tuple[type, dict[str, Any]], ...] = (
    (LookupRequest, LOOKUP),
    (LookupAnswer, FOUND),
    (PublishAnswer, {"ttl_ms": 600000}),
    (Withdrawal, {"digest": "sha-256:" + KEY}),
    (LeaseRequest, {"block_keys": [KEY], "ttl_ms": 2000}),
    (PrefetchDirective, DIRECTIVE),
    (
        DirectiveStatus,
        {"directive": "d1", "state": "partial", "loaded": [KEY], "request_ref": "opaque-value-from-PC"},
    ),
    (ResumeRequest, {"epoch": 2, "checkpoint": CHECKPOINT}),
    (ReshardPlan, PLAN),
    (StateChange, {"state": "draining"}),
)


def octets(members: object) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()


@pytest.mark.requirement("LK-1", "PF-1", "RS-1")
@pytest.mark.parametrize(("kind", "document"), EXAMPLES, ids=lambda p: getattr(p, "__name__", ""))
def test_the_examples_read_and_write_to_the_same_octets(kind: type, document: dict[str, Any]) -> None:
    message = decode(kind, octets(document))
    assert encode(message) == octets(document)
    assert KEY[:8] not in repr(message)


@pytest.mark.parametrize(
    ("kind", "document", "member"),
    [
        (LookupRequest, LOOKUP | {"block_keys": [KEY, "x"]}, "block_keys[1]"),
        (LookupRequest, LOOKUP | {"targets": [II2, II2]}, "targets"),
        (LookupRequest, LOOKUP | {"targets": ["ii2"]}, "targets[0]"),
        (LookupRequest, LOOKUP | {"holders": [H1, "ftp://x/"]}, "holders[1]"),
        (LookupAnswer, FOUND | {"matched": 2}, "matched"),
        (LookupAnswer, FOUND | {"blocks": [{"block_key": KEY, "replicas": []}]}, "blocks[0].replicas"),
        (
            LookupAnswer,
            FOUND | {"blocks": [{"block_key": OTHER_KEY, "replicas": [RECORD]}]},
            "blocks[0].replicas[0].block_key",
        ),
        (
            LookupAnswer,
            FOUND | {"blocks": [{"block_key": KEY, "replicas": [RECORD, RECORD | {"codec": 0}]}]},
            "blocks[0].replicas[1].codec",
        ),
        (Withdrawal, {"digest": KEY}, "digest"),
        (LeaseRequest, {"block_keys": [], "ttl_ms": 1}, "block_keys"),
        (LeaseRequest, {"block_keys": [KEY], "ttl_ms": 0}, "ttl_ms"),
        (PrefetchDirective, DIRECTIVE | {"directive": "a/b"}, "directive"),
        (PrefetchDirective, DIRECTIVE | {"blocks": []}, "blocks"),
        (PrefetchDirective, DIRECTIVE | {"blocks": DIRECTIVE["blocks"] * 2}, "blocks"),  # type: ignore[operator]
        (
            PrefetchDirective,
            DIRECTIVE | {"blocks": [{"block_key": KEY, "sources": ["h"]}]},
            "blocks[0].sources[0]",
        ),
        (PrefetchDirective, DIRECTIVE | {"deadline_ms": 0}, "deadline_ms"),
        (
            ResumeRequest,
            {"epoch": 2, "checkpoint": CHECKPOINT | {"output_offset": 1}},
            "checkpoint.output_offset",
        ),
        (ReshardPlan, PLAN | {"to": 4}, "to"),
        (ReshardPlan, PLAN | {"retain": [[8, 8]]}, "retain[0]"),
        (ReshardPlan, PLAN | {"retain": [[8, 16], [0, 8]]}, "retain[1]"),
        (ReshardPlan, PLAN | {"fetch": [{"tokens": [0, 1], "from": "x"}]}, "fetch[0].from"),
        (ReshardPlan, PLAN | {"release": [[40000, 50000]]}, ""),
        (ReshardPlan, PLAN | {"block_keys": [KEY]}, "compat_id"),
        (ReshardPlan, PLAN | {"deadline_ms": 0}, "deadline_ms"),
        (StateChange, {"state": "Draining"}, "state"),
    ],
)
def test_a_wrong_member_is_named_by_its_path(kind: type, document: dict[str, Any], member: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(kind, octets(document))
    assert caught.value.member == member


@pytest.mark.requirement("PF-7")
def test_a_directive_needs_neither_reference_nor_layer_order() -> None:
    members = {name: value for name, value in DIRECTIVE.items() if name not in ("request_ref", "layer_order")}
    directive = decode(PrefetchDirective, octets(members))
    assert directive.request_ref is None
    assert json.loads(encode(directive)) == members


def test_a_body_that_is_ours_in_part_shows_it_only_where_it_says_something() -> None:
    assert b"holders" not in encode(decode(LookupRequest, octets(LOOKUP)))
    assert b"assign" not in encode(decode(ReshardPlan, octets(PLAN)))
    ours = PLAN | {"compat_id": COMPAT, "scope_id": SCOPE, "block_keys": [KEY], "assign": [[49152, 49160]]}
    assert json.loads(encode(decode(ReshardPlan, octets(ours)))) == ours


# Resharding: one resource, three messages


def test_plan_commit_and_abort_are_told_apart_by_their_members() -> None:
    plan = decode_reshard(octets(PLAN))
    assert isinstance(plan, ReshardPlan)
    assert plan.from_ == 4
    assert plan.fetch == (FetchRange(tokens=(32768, 49152), from_=II2),)
    assert decode_reshard(b'{"map":"c3","commit":5}') == ReshardCommit(map="c3", commit=5)
    assert decode_reshard(b'{"map":"c3","abort":5}') == ReshardAbort(map="c3", abort=5)


@pytest.mark.parametrize(
    "members", [{}, [], {"map": "c3", "commit": 5, "abort": 5}, PLAN | {"commit": 5}, {"from": 4}]
)
def test_a_reshard_body_that_is_none_of_the_three_or_more_than_one_is_refused(members: object) -> None:
    with pytest.raises(RemoteProtocolError, match=r"expected (an object|one of the members)"):
        decode_reshard(octets(members))


def test_our_spelling_of_a_name_that_python_reserves_is_not_that_of_the_protocol() -> None:
    spelled = {("from_" if name == "from" else name): value for name, value in PLAN.items()}
    with pytest.raises(RemoteProtocolError, match=r"^from: is missing$"):
        decode_reshard(octets(spelled))
    assert decode_reshard(octets(PLAN | {"from_": "x"})) == decode_reshard(octets(PLAN))


# Output


def test_output_lines_are_tokens_and_one_end() -> None:
    line = b'{"index":3,"epoch":1,"token":1296}'
    token = decode_output_line(line)
    assert token == OutputToken(index=3, epoch=1, token=1296)
    assert encode(token) == line
    assert "1296" not in repr(token)
    assert decode_output_line(b'{"end":"stop","index":4,"epoch":1}') == OutputEnd(
        end="stop", index=4, epoch=1
    )


@pytest.mark.parametrize(
    ("line", "member"),
    [
        (b'{"index":3,"epoch":1}', "token"),
        (b'{"index":3,"epoch":1,"token":4294967296}', "token"),
        (b'{"index":-1,"epoch":1,"token":0}', "index"),
        (b'{"index":3,"epoch":1,"end":""}', "end"),
        (b"[]", ""),
        (b"", ""),
    ],
)
def test_a_line_that_is_neither_is_refused(line: bytes, member: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_output_line(line)
    assert caught.value.member == member


SAMPLER = CHECKPOINT["sampler"]


def test_a_new_session_brings_all_that_belongs_to_it() -> None:
    new = {
        "from_index": 0,
        "epoch": 1,
        "compat_id": COMPAT,
        "scope_id": SCOPE,
        "prompt": [1, 2],
        "sampler": SAMPLER,
    }
    assert json.loads(encode(decode(OutputRequest, octets(new)))) == new
    for member in ("compat_id", "scope_id", "prompt"):
        with pytest.raises(RemoteProtocolError) as caught:
            decode(OutputRequest, octets({name: value for name, value in new.items() if name != member}))
        assert caught.value.member == member
    again = decode(OutputRequest, b'{"from_index":7,"epoch":2}')
    assert (again.from_index, again.prompt, again.sampler) == (7, None, None)
    with pytest.raises(RemoteProtocolError, match="prompt: expected at least 1, found 0"):
        decode(OutputRequest, octets(new | {"prompt": []}))


def test_a_placement_names_each_scope_once() -> None:
    prefix = {"scope_id": SCOPE, "block_keys": [KEY]}
    request = {"compat_id": COMPAT, "prefixes": [prefix], "token_count": 40}
    assert decode(PlacementRequest, octets(request)).deterministic is False
    for wrong, member in (
        ({"prefixes": []}, "prefixes"),
        ({"prefixes": [prefix, prefix]}, "prefixes"),
        ({"token_count": 0}, "token_count"),
        ({"deterministic": 1}, "deterministic"),
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            decode(PlacementRequest, octets(request | wrong))
        assert caught.value.member == member


def test_a_placement_avoids_so_many_instances_at_most() -> None:
    prefix = {"scope_id": SCOPE, "block_keys": [KEY]}
    request = {"compat_id": COMPAT, "prefixes": [prefix], "token_count": 40}
    avoid = [f"https://ii{number}.example/kvsp/" for number in range(MAX_AVOIDED_INSTANCES)]
    assert decode(PlacementRequest, octets(request | {"avoid": avoid})).avoid == tuple(avoid)
    for wrong in ([*avoid, "https://one-more.example/kvsp/"], ["nowhere"], [avoid[0], avoid[0]]):
        with pytest.raises(RemoteProtocolError) as caught:
            decode(PlacementRequest, octets(request | {"avoid": wrong}))
        assert caught.value.member is not None
        assert caught.value.member.startswith("avoid")


# Tensors


def test_tensors_travel_in_base64() -> None:
    request = AttendRequest(version=5, layer=2, queries=b"\0\0\x80\x3f" * 2)
    assert json.loads(encode(request))["queries"] == "AACAPwAAgD8="
    assert decode(AttendRequest, encode(request)) == request
    with pytest.raises(RemoteProtocolError) as caught:
        decode(AttendRequest, b'{"version":5,"layer":2,"queries":"AACAPwA"}')
    assert caught.value.member == "queries"
    with pytest.raises(LocalProtocolError, match="log_sum_exp: expected base64 of a multiple of 4 octets"):
        AttendAnswer(output=b"1234", log_sum_exp=b"123")
