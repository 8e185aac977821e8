"""Answers and problems as they go over the wire, and as clients take them."""

from __future__ import annotations

import json

import pytest

from kvsp_core.answers import (
    block_response,
    empty_response,
    json_response,
    lines_response,
    problem_response,
    read_answer,
    read_outcome,
)
from kvsp_core.errors import RemoteProtocolError
from kvsp_core.heads import Response, response_fields
from kvsp_core.messages import PublishAnswer
from kvsp_core.problems import (
    BAD_REQUEST,
    CONFLICT,
    LEASE_QUOTA,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    PROBLEM_TYPES,
    UNAVAILABLE,
    Problem,
    ProblemType,
    blank,
    problem_document,
    problem_of,
)

STATUSES = {
    "kvsp-not-found": 404,
    "kvsp-scope-denied": 403,
    "kvsp-incompatible": 409,
    "kvsp-lease-quota": 429,
    "kvsp-stale-epoch": 409,
    "kvsp-invalid-state": 409,
    "kvsp-digest-mismatch": 422,
    "kvsp-plan-conflict": 409,
    "kvsp-layers-unavailable": 404,
}


@pytest.mark.requirement("PR-1")
@pytest.mark.parametrize("suffix", STATUSES)
def test_the_nine_problem_types(suffix: str) -> None:
    response, body = problem_response(Problem(PROBLEM_TYPES[suffix], "block_keys[3]: not held"))
    assert json.loads(body) == {
        "type": f"https://iana.org/assignments/kvsp#{suffix}",
        "title": PROBLEM_TYPES[suffix].title,
        "status": STATUSES[suffix],
        "detail": "block_keys[3]: not held",
    }
    assert response.status == STATUSES[suffix]
    assert sorted(PROBLEM_TYPES) == sorted(STATUSES)


@pytest.mark.requirement("HT-4", "HT-5")
def test_a_problem_is_a_problem_document_that_is_not_stored() -> None:
    response, body = problem_response(Problem(METHOD_NOT_ALLOWED), allow=("GET", "PUT"), retry_after_s=None)
    assert response_fields(response) == [
        (b"cache-control", b"no-store"),
        (b"content-type", b"application/problem+json"),
        (b"content-length", b"%d" % len(body)),
        (b"allow", b"GET, PUT"),
    ]
    assert body == b'{"type":"about:blank","title":"Method Not Allowed","status":405}'


@pytest.mark.requirement("LE-3")
def test_a_lease_that_is_refused_as_too_long_says_how_long_one_may_be() -> None:
    problem = Problem(LEASE_QUOTA, "ttl_ms: at most 5000 ms are granted", 5000)
    assert problem_of(429, problem_document(problem)) == problem
    kind = LEASE_QUOTA.uri.encode()
    for said in (b'"5000"', b"5000.0", b"true", b"null", b"999", b"-1", b"[5000]"):
        document = b'{"type":"' + kind + b'","max_ttl_ms":' + said + b"}"
        assert problem_of(429, document) == Problem(LEASE_QUOTA), said
    assert problem_of(409, b'{"max_ttl_ms":5000}') == Problem(CONFLICT)


def test_load_that_is_shed_says_when_to_come_back() -> None:
    response, _ = problem_response(Problem(UNAVAILABLE), retry_after_s=2)
    assert (response.status, response.retry_after_s) == (503, 2)


@pytest.mark.requirement("HT-4", "HT-5")
def test_a_message_is_kvsp_json_that_is_not_stored() -> None:
    response, body = json_response(PublishAnswer(ttl_ms=5), 201, location="x")
    assert body == b'{"ttl_ms":5}'
    assert response_fields(response) == [
        (b"cache-control", b"no-store"),
        (b"content-type", b"application/kvsp+json"),
        (b"content-length", b"12"),
        (b"location", b"x"),
    ]
    assert json_response(b"{}")[1] == b"{}"
    assert empty_response(202, location="prefetch/d") == (Response(status=202, location="prefetch/d"), b"")


@pytest.mark.requirement("BR-2", "BR-3")
def test_a_block_may_be_kept_as_long_as_its_replica() -> None:
    response = block_response(size_bytes=8, repr_digest="00" * 32, ttl_ms=59_999)
    fields = dict(response_fields(response))
    assert fields[b"cache-control"] == b"private, immutable, max-age=59"
    assert fields[b"content-type"] == b"application/kvsp-block"
    assert fields[b"content-length"] == b"8"
    assert fields[b"repr-digest"] == b"sha-256=:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=:"
    assert block_response(size_bytes=8, repr_digest="00" * 32, ttl_ms=-5).max_age_s == 0


def test_streamed_output_has_no_length_and_is_not_stored() -> None:
    assert response_fields(lines_response()) == [
        (b"cache-control", b"no-store"),
        (b"content-type", b"application/x-ndjson"),
    ]


# Read


@pytest.mark.requirement("HT-6")
@pytest.mark.parametrize("status", [200, 201, 202, 299])
def test_any_status_of_class_2xx_is_success(status: int) -> None:
    response = Response(status=status, content_type="application/kvsp+json; charset=utf-8")
    assert read_answer(PublishAnswer, response, b'{"ttl_ms":5,"new":1}') == PublishAnswer(ttl_ms=5)
    assert read_outcome(response, b"") is None


@pytest.mark.requirement("HT-6")
@pytest.mark.parametrize(
    ("status", "title"),
    [
        (307, "Temporary Redirect"),
        (399, "Redirection"),
        (418, "I'm a Teapot"),
        (499, "Client error"),
        (599, "Server error"),
        (100, "Continue"),
        (999, "Not an HTTP status"),
    ],
)
def test_any_other_status_is_a_problem_of_its_class(status: int, title: str) -> None:
    problem = read_outcome(Response(status=status), b"<html>")
    assert problem == Problem(ProblemType("", title, status))
    assert read_answer(PublishAnswer, Response(status=status), b'{"ttl_ms":5}') == problem


def test_success_that_does_not_hold_what_it_should_is_an_error() -> None:
    with pytest.raises(RemoteProtocolError, match=r"content-type: expected application/kvsp.json"):
        read_answer(PublishAnswer, Response(status=200, content_type="application/json"), b'{"ttl_ms":5}')
    with pytest.raises(RemoteProtocolError, match="ttl_ms: is missing"):
        read_answer(PublishAnswer, Response(status=200, content_type="application/kvsp+json"), b"{}")


@pytest.mark.requirement("PR-1", "HT-6")
@pytest.mark.parametrize(
    ("status", "document", "kind"),
    [
        (404, {"type": NOT_FOUND.uri}, NOT_FOUND),
        (404, {"type": NOT_FOUND.uri, "status": 200, "title": 7}, NOT_FOUND),
        (410, {"type": NOT_FOUND.uri}, NOT_FOUND),
        (500, {"type": NOT_FOUND.uri}, blank(500)),
        (404, {"type": "kvsp-not-found"}, blank(404)),
        (404, {"type": "https://elsewhere.example/#kvsp-not-found"}, blank(404)),
        (404, {"type": NOT_FOUND.uri + "-new"}, blank(404)),
        (404, {"type": None}, blank(404)),
        (404, [], blank(404)),
    ],
)
def test_a_type_counts_where_it_is_known_and_goes_with_the_status(
    status: int, document: object, kind: ProblemType
) -> None:
    assert problem_of(status, json.dumps(document).encode()).type == kind


def test_the_detail_of_a_peer_is_cut_and_printable() -> None:
    said = problem_of(400, json.dumps({"detail": "a\n\x1b[31m\u202eb" + "x" * 1000}).encode())
    assert said.type == BAD_REQUEST
    assert said.detail.startswith("a [31m bxxx")
    assert len(said.detail) == 400
    assert problem_of(400, b'{"detail":' + b"[" * 100_000) == Problem(BAD_REQUEST)


def test_a_document_without_detail_has_no_such_member() -> None:
    assert b"detail" not in problem_document(Problem(NOT_FOUND))
