"""The resource table: every row reached, everything else refused, and heads checked before bodies."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest

from kvsp_core import resources as res
from kvsp_core.bodies import encode
from kvsp_core.identity import component_id
from kvsp_core.messages import LeaseRenewal
from kvsp_core.resources import (
    RESOURCES,
    GetBlock,
    HeadBlock,
    Operation,
    Refusal,
    Request,
    Resource,
    RoleName,
    Router,
    StoreBlock,
    check_head,
    request_for,
    resource_of,
)

KEY = "9ca9d8b60f37f84726a27deb4cdc0d075714607a131632c2366e30b99fb1163b"
COMPAT = "5ed5c2f238839655d7c4029e12b7f31caf9e7421f4edb4057feee6dab760ee0f"
SCOPE = "6d1c6481cd428737da312c089db3832a"
SESSION = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
MEMBERS = {
    "compat_id": COMPAT,
    "scope_id": SCOPE,
    "block_key": KEY,
    "holder_id": component_id("https://h1.example/kvsp/"),
    "instance_id": component_id("https://ii7.example/kvsp/"),
    "session": SESSION,
    "lease": "Zm9v",
    "directive": "d1",
    "map": "c3f8e1",
}
BLOCK = f"blocks/{COMPAT}/{SCOPE}/{KEY}"

# What the protocol's table says: role, method, path.
PROTOCOL = {
    ("index", "POST", "lookup"),
    ("index", "PUT", "replicas/{}/{}"),
    ("index", "DELETE", "replicas/{}/{}"),
    ("holder", "GET", "blocks/{}/{}/{}"),
    ("holder", "PUT", "blocks/{}/{}/{}"),
    ("holder", "POST", "leases"),
    ("holder", "PUT", "leases/{}"),
    ("holder", "DELETE", "leases/{}"),
    ("controller", "PUT", "instances/{}/status"),
    ("controller", "PUT", "sessions/{}/checkpoint"),
    ("instance", "POST", "prefetch"),
    ("instance", "GET", "prefetch/{}"),
    ("instance", "POST", "sessions/{}/resume"),
    ("instance", "POST", "reshard"),
    ("instance", "PUT", "state"),
}


def path_of(row: Resource) -> str:
    return re.sub(r"\{(\w+)\}", lambda name: MEMBERS[name[1]], row.path)


def typed(row: Resource) -> Operation:
    names = re.findall(r"\{(\w+)\}", row.path)
    operation: Any = row.operation
    return operation(**{name: MEMBERS[name] for name in names})  # type: ignore[no-any-return]


def rows() -> Any:
    return pytest.mark.parametrize("row", RESOURCES, ids=lambda row: f"{row.method}-{row.path}")


@pytest.mark.requirement("HT-8")
def test_the_table_has_what_the_protocol_has() -> None:
    table = {
        (role.value, row.method, re.sub(r"\{\w+\}", "{}", row.path))
        for row in RESOURCES
        for role in row.roles
    }
    assert table >= PROTOCOL
    ours = {(method, path) for _, method, path in table - PROTOCOL if not path.startswith("ext/")}
    assert ours == {("HEAD", "blocks/{}/{}/{}"), ("PUT", "instances/{}/status")}


@pytest.mark.requirement("HT-1", "HT-8")
@rows()
def test_each_row_is_served_by_its_roles_and_unknown_to_the_others(row: Resource) -> None:
    request = Request(method=row.method, path=path_of(row))
    for role in RoleName:
        found = Router([role]).route(request)
        if role in row.roles:
            assert found == typed(row)
        else:
            assert isinstance(found, Refusal)
            assert found.problem.status == 404


@pytest.mark.requirement("HT-8")
@rows()
def test_a_known_path_with_another_method_is_405_with_those_there_are(row: Resource) -> None:
    router = Router(row.roles)
    allowed = [
        other.method for other in RESOURCES if other.path == row.path and set(row.roles) & set(other.roles)
    ]
    for method in {"GET", "HEAD", "PUT", "POST", "DELETE", "PATCH", "OPTIONS", "TRACE", "get"} - set(allowed):
        found = router.route(Request(method=method, path=path_of(row)))
        assert isinstance(found, Refusal)
        assert found.problem.status == 405
        assert list(found.allow) == allowed


@pytest.mark.requirement("HT-1", "HT-8")
@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/lookup",
        "lookup/",
        "Lookup",
        "lookup/x",
        "kvsp/lookup",
        "blocks",
        f"/{BLOCK}",
        f"{BLOCK}/",
        f"blocks/{COMPAT}/{SCOPE}",
        "leases/a/b",
        "leases//",
        ".well-known/kvsp",
        "ext",
        "ext/",
        "prefetch/d/x",
    ],
)
def test_an_unknown_path_is_404(path: str) -> None:
    found = Router(RoleName).route(Request(method="GET", path=path))
    assert isinstance(found, Refusal)
    assert (found.problem.status, found.problem.type.suffix, found.allow) == (404, "", ())


@pytest.mark.parametrize(
    ("method", "path", "member"),
    [
        ("GET", f"blocks/{COMPAT.upper()}/{SCOPE}/{KEY}", "compat_id"),
        ("GET", f"blocks/{COMPAT}/{KEY}/{KEY}", "scope_id"),
        ("GET", f"blocks/{COMPAT}/{SCOPE}/{KEY[:-1]}", "block_key"),
        ("GET", f"blocks/{COMPAT}/{SCOPE}/", "block_key"),
        ("PUT", f"replicas/h1/{KEY}", "holder_id"),
        ("PUT", "instances/https%3A%2F%2Fii7/status", "instance_id"),
        ("PUT", "sessions/1/checkpoint", "session"),
        ("GET", "prefetch/a%2Fb", "directive"),
        ("GET", "prefetch/%ff", "directive"),
        ("DELETE", "leases/", "lease"),
        ("DELETE", "leases/" + "x" * 257, "lease"),
    ],
)
def test_a_malformed_identifier_is_400_and_not_shown(method: str, path: str, member: str) -> None:
    found = Router(RoleName).route(Request(method=method, path=path))
    assert isinstance(found, Refusal)
    assert found.problem.status == 400
    assert found.problem.detail.startswith(f"{member}: expected")
    assert KEY[:8] not in found.problem.detail


def test_percent_encoding_that_was_not_needed_and_uuids_in_capitals_are_the_same_names() -> None:
    router = Router(RoleName)
    lease = router.route(Request(method="DELETE", path="leases/%5am9v"))
    assert lease == res.ReleaseLease("Zm9v")
    upper = router.route(Request(method="GET", path=f"ext/sessions/{SESSION.upper()}"))
    assert upper == res.GetSession(SESSION)


def test_an_identifier_of_a_peer_is_encoded_where_it_has_to_be() -> None:
    request, _ = request_for(res.ReleaseLease("a/b ?é"))
    assert request.path == "leases/a%2Fb%20%3F%C3%A9"
    assert Router(RoleName).route(request) == res.ReleaseLease("a/b ?é")


@pytest.mark.requirement("BR-1", "HT-9")
@pytest.mark.parametrize(
    ("query", "layers", "codec"),
    [
        ("", None, None),
        ("layers=0-15", (0, 15), None),
        ("layers=3-3&codec=1", (3, 3), 1),
        ("codec=65535", None, 65535),
        ("codec=0", None, 0),
        ("layers=0%2D4294967295", (0, 2**32 - 1), None),
        ("other=1&layers=1-2&layersx=9", (1, 2), None),
    ],
)
def test_layers_and_codec_are_in_the_query(
    query: str, layers: tuple[int, int] | None, codec: int | None
) -> None:
    router = Router([RoleName.HOLDER])
    found = router.route(Request(method="GET", path=BLOCK, query=query))
    assert found == GetBlock(COMPAT, SCOPE, KEY, layers, codec)
    found = router.route(Request(method="HEAD", path=BLOCK, query=query))
    assert found == HeadBlock(COMPAT, SCOPE, KEY, layers, codec)
    assert router.route(Request(method="PUT", path=BLOCK, query=query)) == StoreBlock(COMPAT, SCOPE, KEY)


@pytest.mark.requirement("BR-1")
@pytest.mark.parametrize(
    "query",
    [
        "layers=",
        "layers",
        "layers=1",
        "layers=2-1",
        "layers=a-b",
        "layers=-1-2",
        "layers=1-2-3",
        "layers=1 -2",
        "layers=0-4294967296",
        "layers=+1-2",
        "layers=%ff",
        "layers=0-1&layers=0-1",
        "layers=\u0661-\u0662",
        "codec=",
        "codec=raw",
        "codec=65536",
        "codec=-1",
        "codec=1.0",
        "codec=1&codec=1",
    ],
)
def test_a_malformed_query_is_400(query: str) -> None:
    found = Router([RoleName.HOLDER]).route(Request(method="GET", path=BLOCK, query=query))
    assert isinstance(found, Refusal)
    assert found.problem.status == 400
    assert found.problem.detail.startswith(query[:5] if query[0] == "c" else "layers")


# Heads before bodies


@pytest.mark.requirement("HT-4")
@rows()
def test_a_body_is_taken_in_its_media_type_and_up_to_its_limit(row: Resource) -> None:
    operation = typed(row)
    assert resource_of(operation) is row
    good = Request(
        method=row.method, path="", content_type=row.body_type + "; x=1", content_length=row.limit_bytes or 1
    )
    assert check_head(operation, good) is None
    if not row.limit_bytes:
        return
    for changes, status in (
        ({"content_type": "application/json"}, 415),
        ({"content_type": None}, 415),
        ({"content_encoding": "gzip"}, 415),
        ({"content_length": row.limit_bytes + 1}, 413),
    ):
        problem = check_head(operation, attrs.evolve(good, **changes))
        assert problem is not None
        assert problem.status == status
    assert check_head(operation, attrs.evolve(good, content_encoding="identity", content_length=None)) is None


def test_a_withdrawal_needs_no_body() -> None:
    operation = res.WithdrawReplica(MEMBERS["holder_id"], KEY)
    assert check_head(operation, Request(method="DELETE", path="")) is None
    assert check_head(operation, Request(method="DELETE", path="", content_length=None)) is not None
    assert check_head(res.CreateLease(), Request(method="POST", path="")) is not None


# Calling


def test_a_request_carries_its_message() -> None:
    request, body = request_for(res.RenewLease("Zm9v"), LeaseRenewal(ttl_ms=9))
    assert body == encode(LeaseRenewal(ttl_ms=9))
    assert request == Request(
        method="PUT", path="leases/Zm9v", content_type="application/kvsp+json", content_length=len(body)
    )
    assert request_for(res.CreateLease(), b"{}")[1] == b"{}"


@pytest.mark.requirement("BR-6")
def test_a_block_is_stored_only_where_there_is_none() -> None:
    request, body = request_for(StoreBlock(COMPAT, SCOPE, KEY), length=2097152)
    assert body == b""
    assert request == Request(
        method="PUT",
        path=BLOCK,
        content_type="application/kvsp-block",
        content_length=2097152,
        if_none_match="*",
    )


@pytest.mark.requirement("SE-5")
@rows()
def test_no_key_scope_or_session_shows_in_a_typed_request(row: Resource) -> None:
    shown = repr(typed(row))
    for secret in (KEY, COMPAT, SCOPE, SESSION, "Zm9v"):
        assert secret not in shown
