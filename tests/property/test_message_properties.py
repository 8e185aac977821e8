"""Every record and message: read back as written, whatever its members; and only documented errors."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsp_core import ext_messages
from kvsp_core import messages as message_module
from kvsp_core import records as record_module
from kvsp_core.bodies import decode, encode
from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.ext_messages import decode_output_line
from kvsp_core.messages import decode_reshard
from kvsp_core.problems import PROBLEM_TYPES, Problem, blank, problem_document, problem_of
from kvsp_core.records import ReplicaRecord
from kvsp_core.resources import RESOURCES, Operation, Refusal, Request, RoleName, Router, request_for
from kvsp_sim.strategies.messages import altered, json_objects, messages, operations, records, replica_records
from kvsp_sim.strategies.values import mutated

KINDS = {**records, **messages}


# There are many kinds, so each gets a share of the examples.
SHARE = settings(max_examples=max(8, settings.default.max_examples // 25))


def kinds() -> Any:
    return pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def test_every_record_and_message_has_a_strategy() -> None:
    declared = {
        value
        for module in (record_module, message_module, ext_messages)
        for value in (getattr(module, name) for name in module.__all__)
        if isinstance(value, type)
    }
    assert declared == set(KINDS)


@kinds()
@SHARE
@given(data=st.data())
def test_what_is_written_is_read_back_and_written_alike(kind: type, data: st.DataObject) -> None:
    value = data.draw(KINDS[kind])
    octets = encode(value)
    again = decode(kind, octets)
    assert again == value
    assert hash(again) == hash(value)
    assert encode(again) == octets
    shuffled = json.loads(octets)
    names = data.draw(st.permutations(list(shuffled)))
    assert decode(kind, json.dumps({name: shuffled[name] for name in names}, indent=1).encode()) == value


@kinds()
@SHARE
@given(data=st.data())
def test_unknown_members_change_nothing(kind: type, data: st.DataObject) -> None:
    value = data.draw(KINDS[kind])
    known = {field.name.rstrip("_") for field in attrs.fields(kind)}
    more = {name: item for name, item in data.draw(json_objects).items() if name not in known}
    more |= {name.upper(): None for name in known} | {f"{name}_": 7 for name in known}
    assert decode(kind, json.dumps(json.loads(encode(value)) | more).encode()) == value


@kinds()
@SHARE
@given(data=st.data())
def test_a_document_with_a_fault_gives_a_value_or_the_documented_error(
    kind: type, data: st.DataObject
) -> None:
    octets = encode(data.draw(KINDS[kind]))
    faulty = data.draw(altered(octets) | mutated(octets) | st.binary(max_size=60))
    try:
        value = decode(kind, faulty)
    except RemoteProtocolError as error:
        value, said = None, str(error)
    else:
        said = ""
        assert decode(kind, encode(value)) == value
    assert "\n" not in said
    assert len(said) < 1000


@given(data=st.data())
def test_reading_is_as_strict_as_building(data: st.DataObject) -> None:
    """What the types of a Replica Record check, and what its converters check, is the same."""
    record = data.draw(replica_records())
    member, value = data.draw(
        st.tuples(
            st.sampled_from(("codec", "size", "ttl_ms")),
            st.sampled_from((-1, 0, 1, 65535, 65536, 2**53 - 1, 2**53)),
        )
        | st.tuples(
            st.just("layer_digests"),
            st.sampled_from((("0" * 63, "0" * 65), ("0" * 64, "0" * 64), ("0" * 128,))),
        )
    )
    read: ReplicaRecord | None
    built: ReplicaRecord | None
    try:
        built = attrs.evolve(record, **{member: value})
    except LocalProtocolError:
        built = None
    try:
        read = decode(ReplicaRecord, json.dumps(json.loads(encode(record)) | {member: value}).encode())
    except RemoteProtocolError:
        read = None
    assert read == built


@given(
    st.binary(max_size=80) | st.sampled_from((b"{}", b'{"to":1}', b'{"commit":1,"map":"m"}', b'{"end":1}'))
)
def test_reshard_messages_and_output_lines_are_told_apart_or_refused(octets: bytes) -> None:
    for read in (decode_reshard, decode_output_line):
        with contextlib.suppress(RemoteProtocolError):
            read(octets)


ALL_ROLES = Router(RoleName)


@pytest.mark.requirement("HT-1", "HT-8")
@given(operations)
def test_a_typed_request_arrives_as_it_was_sent(operation: Operation) -> None:
    request, body = request_for(operation)
    assert body == b""
    assert ALL_ROLES.route(request) == operation
    assert request.path.isascii()
    assert "//" not in request.path


@given(
    st.sampled_from(("GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "get", "")),
    st.lists(
        st.sampled_from(sorted({part for row in RESOURCES for part in row.path.split("/") if part[0] != "{"}))
        | st.text(max_size=5)
        | st.sampled_from(("%ff", "%2F", "..", ".", "%", "0a" * 32, "0c" * 16)),
        max_size=5,
    ).map("/".join),
    st.text(max_size=10) | st.sampled_from(("layers=0-1&codec=1", "layers=1-0", "codec=%31", "layers=%ff")),
)
def test_any_path_has_a_meaning_or_a_refusal(method: str, path: str, query: str) -> None:
    found = ALL_ROLES.route(Request(method=method, path=path, query=query))
    if isinstance(found, Refusal):
        assert found.problem.status in (400, 404, 405)
        assert bool(found.allow) == (found.problem.status == 405)


@pytest.mark.requirement("PR-1")
@given(
    st.sampled_from(sorted(PROBLEM_TYPES.values(), key=lambda kind: kind.suffix))
    | st.integers(400, 599).map(blank),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60).map(str.strip),
)
def test_a_problem_arrives_as_it_was_sent(kind: Any, detail: str) -> None:
    problem = Problem(kind, detail)
    assert problem_of(problem.status, problem_document(problem)) == problem


@pytest.mark.requirement("HT-6")
@given(st.integers(100, 999), st.binary(max_size=60) | json_objects.map(lambda o: json.dumps(o).encode()))
def test_any_status_and_body_is_a_problem(status: int, body: bytes) -> None:
    problem = problem_of(status, body)
    assert problem.status // 100 == status // 100
    assert problem.detail.isascii()
