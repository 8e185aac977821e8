"""The desk: what reaches a role has been routed, authorized and read; everything else has been answered."""

from __future__ import annotations

import json

import pytest

from kvsp_core.bodies import encode
from kvsp_core.heads import Request
from kvsp_core.messages import LeaseRequest, ReshardAbort
from kvsp_core.problems import FORBIDDEN, UNAVAILABLE, Problem
from kvsp_core.resources import (
    CreateLease,
    GetBlock,
    Operation,
    ReleaseLease,
    ReshardGroup,
    RoleName,
    StoreBlock,
)
from kvsp_core.roles.role import (
    BodyArrived,
    BodyFailed,
    Effect,
    ReceiveBody,
    RequestEnded,
    RequestReceived,
    Respond,
)
from kvsp_core.roles.serving import Asked, Desk

CLIENT = "https://ii1.example/kvsp/"
KEY = "ab" * 32
BLOCK = f"blocks/{KEY}/{'0f' * 16}/{KEY}"
LEASE = encode(LeaseRequest(block_keys=(KEY,), ttl_ms=1000))
JSON = "application/kvsp+json"


def desk(problem: Problem | None = None) -> Desk:
    def allow(client: str, operation: Operation) -> Problem | None:
        assert client == CLIENT
        return problem

    return Desk([RoleName.HOLDER, RoleName.INSTANCE], allow)


def request(method: str, path: str, *, length: int | None = 0, media: str | None = None) -> RequestReceived:
    return RequestReceived(
        7, CLIENT, Request(method=method, path=path, content_length=length, content_type=media)
    )


def refused(effects: tuple[Effect, ...]) -> Respond:
    (respond,) = effects
    assert isinstance(respond, Respond)
    assert respond.response.content_type == "application/problem+json"
    assert isinstance(respond.body, bytes)
    assert json.loads(respond.body)["status"] == respond.response.status
    return respond


def test_a_request_without_a_body_is_served_at_once() -> None:
    asked, effects = desk().take(request("GET", BLOCK))
    assert asked is not None
    assert asked.operation == GetBlock(KEY, "0f" * 16, KEY)
    assert (asked.request_id, asked.client, effects) == (7, CLIENT, ())
    assert isinstance(desk().take(request("DELETE", "leases/x"))[0].operation, ReleaseLease)  # type: ignore[union-attr]


def test_a_document_is_taken_in_and_read() -> None:
    machine = desk()
    asked, effects = machine.take(request("POST", "leases", length=len(LEASE), media=JSON))
    assert asked is None
    (receive,) = effects
    assert isinstance(receive, ReceiveBody)
    assert receive.limit_bytes > len(LEASE)
    asked, effects = machine.take(BodyArrived(7, LEASE))
    assert asked == Asked(
        request_id=7,
        client=CLIENT,
        operation=CreateLease(),
        request=asked.request if asked else None,  # type: ignore[arg-type]
        body=LeaseRequest(block_keys=(KEY,), ttl_ms=1000),
    )
    assert effects == ()


def test_a_body_of_several_forms_is_told_apart() -> None:
    machine = desk()
    machine.take(request("POST", "reshard", length=None, media=JSON))
    asked, _ = machine.take(BodyArrived(7, b'{"map": "m", "abort": 5}'))
    assert asked is not None
    assert asked.operation == ReshardGroup()
    assert asked.body == ReshardAbort(map="m", abort=5)


def test_block_data_is_left_to_the_role() -> None:
    media = "application/kvsp-block"
    asked, effects = desk().take(request("PUT", BLOCK, length=4096, media=media))
    assert asked is not None
    assert isinstance(asked.operation, StoreBlock)
    assert effects == ()


@pytest.mark.requirement("HT-8")
def test_an_unknown_path_is_404_and_another_method_405_with_those_there_are() -> None:
    assert refused(desk().take(request("GET", "nowhere"))[1]).response.status == 404
    response = refused(desk().take(request("DELETE", BLOCK))[1]).response
    assert response.status == 405
    assert response.allow == ("GET", "HEAD", "PUT")


@pytest.mark.requirement("SE-1")
def test_a_client_that_may_not_is_refused_before_its_body_is_read() -> None:
    machine = desk(Problem(FORBIDDEN, "holders only"))
    asked, effects = machine.take(request("POST", "leases", length=10**12, media="text/plain"))
    assert asked is None
    assert refused(effects).response.status == 403
    assert machine.take(BodyArrived(7, LEASE)) == (None, ())


@pytest.mark.requirement("HT-4")
@pytest.mark.parametrize(
    ("length", "media", "status"),
    [(10**9, JSON, 413), (10, "text/plain", 415), (10, None, 415), (0, JSON, 400)],
)
def test_a_head_that_is_not_right_is_refused(length: int, media: str | None, status: int) -> None:
    asked, effects = desk().take(request("POST", "leases", length=length, media=media))
    assert asked is None
    assert refused(effects).response.status == status


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"block_keys": [], "ttl_ms": 1}', b'{"block_keys": ["x"], "ttl_ms": 1}']
)
def test_a_body_that_is_not_right_is_400_and_names_the_member(body: bytes) -> None:
    machine = desk()
    machine.take(request("POST", "leases", length=None, media=JSON))
    asked, effects = machine.take(BodyArrived(7, body))
    assert asked is None
    assert refused(effects).response.status == 400


def test_a_body_that_never_came_whole_is_answered_or_forgotten() -> None:
    machine = desk()
    machine.take(request("POST", "leases", length=None, media=JSON))
    _, effects = machine.take(BodyFailed(7, Problem(UNAVAILABLE, "cut off")))
    assert refused(effects).response.status == 503
    assert machine.take(BodyFailed(7, Problem(UNAVAILABLE, "cut off"))) == (None, ())

    machine.take(request("POST", "leases", length=None, media=JSON))
    assert machine.take(RequestEnded(7, False, 0)) == (None, ())
    assert machine.take(BodyArrived(7, LEASE)) == (None, ())


@pytest.mark.requirement("HT-5")
def test_every_answer_of_the_desk_is_not_to_be_stored() -> None:
    for item in (request("GET", "nowhere"), request("DELETE", BLOCK), request("POST", "leases", media=JSON)):
        assert refused(desk().take(item)[1]).response.max_age_s is None


def test_what_cannot_be_served_now_says_when_to_come_back() -> None:
    assert refused(desk(Problem(UNAVAILABLE)).take(request("GET", BLOCK))[1]).response.retry_after_s == 1
    assert refused(desk(Problem(FORBIDDEN)).take(request("GET", BLOCK))[1]).response.retry_after_s is None
