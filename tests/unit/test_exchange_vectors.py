"""Requests and answers, octet by octet: what the vectors say is what is sent, understood and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsp_core.answers import problem_response, read_outcome
from kvsp_core.bodies import decode, encode
from kvsp_core.errors import RemoteProtocolError
from kvsp_core.heads import (
    Fields,
    Request,
    request_fields,
    request_from_fields,
    response_fields,
    response_from_fields,
)
from kvsp_core.messages import ReshardMessage, decode_reshard
from kvsp_core.problems import PROBLEM_TYPES, Problem
from kvsp_core.registries import JSON_MEDIA_TYPE
from kvsp_core.resources import Refusal, RoleName, Router, request_for, resource_of
from kvsp_core.roles.role import BodyArrived, ReceiveBody, RequestReceived, Respond
from kvsp_core.roles.serving import Desk

FILE = Path(__file__).resolve().parents[1] / "vectors" / "exchanges.json"
VECTORS: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8"))
BY_NAME = {case["name"]: case for case in VECTORS["requests"]}


def octets_of(case: dict[str, Any]) -> bytes:
    return bytes.fromhex(case["body_hex"]) if "body_hex" in case else case["body"].encode()


def fields_of(case: dict[str, Any]) -> Fields:
    return [(name.encode(), value.encode()) for name, value in case["fields"].items()]


def head_of(case: dict[str, Any]) -> Request:
    path, _, query = case["target"].partition("?")
    return request_from_fields(case["method"], path, query, fields_of(case), has_body=bool(octets_of(case)))


def read_body(case: dict[str, Any], kind: Any) -> object:
    if kind is ReshardMessage:
        return decode_reshard(octets_of(case))
    return decode(kind, octets_of(case))


@pytest.mark.requirement("HT-1", "HT-8", "HT-9")
@pytest.mark.parametrize("case", VECTORS["requests"], ids=lambda case: case["name"])
def test_a_request_is_understood_and_sent_alike(case: dict[str, Any]) -> None:
    head = head_of(case)
    operation = Router([RoleName(case["role"])]).route(head)
    assert not isinstance(operation, Refusal)
    row = resource_of(operation)
    body: Any = None
    length = None
    if octets_of(case) and row.body_type == JSON_MEDIA_TYPE:
        body = read_body(case, row.body)
        assert encode(body) == octets_of(case)
    elif octets_of(case):
        length = len(octets_of(case))
    request, octets = request_for(operation, body, length=length)
    assert octets == (b"" if length else octets_of(case))
    target = request.path + (f"?{request.query}" if request.query else "")
    assert (request.method, target) == (case["method"], case["target"])
    sent = dict(request_fields(request))
    expected = {name: value for name, value in fields_of(case) if name != b"repr-digest"}
    assert sent == expected


@pytest.mark.requirement("HT-4", "HT-5", "BR-2", "BR-3")
@pytest.mark.parametrize("case", VECTORS["answers"], ids=lambda case: f"{case['to']}-{case['status']}")
def test_an_answer_is_understood_and_sent_alike(case: dict[str, Any]) -> None:
    asked = BY_NAME[case["to"]]
    response = response_from_fields(case["status"], fields_of(case), has_body=True)
    assert dict(response_fields(response)) == dict(fields_of(case))
    assert read_outcome(response, octets_of(case)) is None
    operation = Router([RoleName(asked["role"])]).route(head_of(asked))
    assert not isinstance(operation, Refusal)
    kind: Any = resource_of(operation).answer
    if kind is not None:
        assert encode(read_body(case, kind)) == octets_of(case)


@pytest.mark.requirement("PR-1", "HT-4", "HT-5")
@pytest.mark.parametrize("case", VECTORS["problems"], ids=lambda case: case["type"])
def test_a_problem_is_understood_and_sent_alike(case: dict[str, Any]) -> None:
    response, octets = problem_response(Problem(PROBLEM_TYPES[case["type"]], "in plain words"))
    assert octets == octets_of(case)
    assert response.status == case["status"]
    assert dict(response_fields(response)) == dict(fields_of(case))
    read = response_from_fields(case["status"], fields_of(case), has_body=True)
    assert read_outcome(read, octets) == Problem(PROBLEM_TYPES[case["type"]], "in plain words")


def refusal(case: dict[str, Any]) -> Respond | str:
    """Return how a desk that allows everything answers, or why the head cannot even be read."""
    desk = Desk([RoleName(case["role"])], lambda client, operation: None)
    try:
        head = head_of(case)
    except RemoteProtocolError as error:
        return str(error)
    asked, effects = desk.take(RequestReceived(1, "https://c.example/", head))
    if effects and isinstance(effects[0], ReceiveBody):
        asked, effects = desk.take(BodyArrived(1, octets_of(case)))
    assert asked is None
    (effect,) = effects
    assert isinstance(effect, Respond)
    return effect


@pytest.mark.requirement("HT-4", "HT-5", "HT-8")
@pytest.mark.parametrize(
    "case", VECTORS["refused"], ids=lambda case: f"{case['name']}: {case['refused']['reason']}"
)
def test_a_refusal_has_its_status_and_names_the_member(case: dict[str, Any]) -> None:
    expected = case["refused"]
    answer = refusal(case)
    if isinstance(answer, str):
        assert expected["status"] == 400
        assert answer.startswith(f"{expected['member']}: ")
        return
    assert answer.response.status == expected["status"]
    assert ", ".join(answer.response.allow) == expected["allow"]
    assert (b"cache-control", b"no-store") in response_fields(answer.response)
    assert answer.response.content_type == "application/problem+json"
    assert isinstance(answer.body, bytes)
    document = json.loads(answer.body)
    assert document["type"] == "about:blank"
    if expected["member"]:
        assert document["detail"].startswith(f"{expected['member']}: ")
    for secret in ("9ca9d8b60f37", "6d1c6481cd42", "6f1d0a9e", "1296"):
        assert secret not in document.get("detail", "")
