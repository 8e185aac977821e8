"""Two tenants with the same prompts: nothing that one can see shows what the other does.

Over the wire, octet for octet, at an index and a holder; and in the roles, function by function: a request
for what another tenant has is answered on the same path as one for what nobody has.
"""

from __future__ import annotations

import json
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from kvsp_core.block_keys import block_keys
from kvsp_core.container_header import ContainerHeader
from kvsp_core.identity import CompatibilityDescriptor, Scope, component_id
from kvsp_core.messages import LeaseRenewal, LeaseRequest, LookupRequest, Withdrawal
from kvsp_core.resources import (
    CreateLease,
    GetBlock,
    HeadBlock,
    Lookup,
    Operation,
    ReleaseLease,
    RenewLease,
    WithdrawReplica,
    request_for,
)
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.index import Index
from kvsp_core.roles.role import BodyArrived, ReceiveBody, RequestReceived
from kvsp_services.pki import issue
from tests.adapters.services.cluster import Cluster, until
from tests.adapters.services.test_cache_server import DESCRIPTOR
from tests.unit.roles import holder_kit as kit
from tests.unit.roles import test_index as index_kit

MODEL = CompatibilityDescriptor.from_members(DESCRIPTOR)
TENANTS = {"one": Scope(bytes(range(32))), "two": Scope(bytes(range(50, 82)))}
TOKENS = tuple(range(100, 112))
KEYS = {name: [key.hex() for key in block_keys(scope, MODEL, TOKENS)[0]] for name, scope in TENANTS.items()}
JSON = {"content-type": "application/kvsp+json"}
NOBODYS_KEY = "99" * 32
POLICY = '[principals]\n"{holder}" = ["holder"]\n' + "".join(
    f'"spiffe://example/{name}" = ["instance"]\n' for name in TENANTS
)
for name, scope in TENANTS.items():
    permissions = "".join(f'{what} = ["spiffe://example/{name}"]\n' for what in ("read", "write", "withdraw"))
    POLICY += f'[scopes.{scope.scope_id}]\n{permissions}publish = ["{{holder}}"]\n'
SECTIONS = {
    "index": "",
    "holder": 'index = ["{index}"]\n[[holder.tiers]]\ntier = "host"\ncapacity_bytes = 1000000\n',
}


class Tenant:
    """A tenant's client, at both roles."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        context = ssl.create_default_context(cafile=str(cluster.directory / "ca.pem"))
        context.load_cert_chain(cluster.directory / f"{name}.pem", cluster.directory / f"{name}.key")
        self.client = httpx.Client(http1=False, http2=True, verify=context, timeout=60)
        self.uris = cluster.uris
        self.scope_id, self.keys = TENANTS[name].scope_id, KEYS[name]

    def ask(self, method: str, whom: str, path: str, body: object = None, **more: Any) -> httpx.Response:
        if body is not None:
            more |= {"content": json.dumps(body), "headers": JSON}
        return self.client.request(method, self.uris[whom] + path, **more)

    def block(self, method: str, key: str, scope_id: str, **more: Any) -> httpx.Response:
        return self.ask(method, "holder", f"blocks/{MODEL.compat_id}/{scope_id}/{key}", **more)

    def store(self, key: str) -> None:
        header = ContainerHeader.for_layers(MODEL)
        octets = header.encode() + bytes(header.data_bytes)
        kind = {"content-type": "application/kvsp-block", "if-none-match": "*"}
        answer = self.block("PUT", key, self.scope_id, content=octets, headers=kind)
        assert answer.status_code in (201, 204), answer.text

    def look_up(self, keys: list[str], scope_id: str | None = None) -> httpx.Response:
        body = {"compat_id": MODEL.compat_id, "scope_id": scope_id or self.scope_id, "block_keys": keys}
        return self.ask("POST", "index", "lookup", body)

    def matched(self) -> int:
        return int(self.look_up(self.keys).json()["matched"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory: Path = tmp_path_factory.mktemp("tenants")
    (directory / "descriptor.json").write_text(json.dumps(DESCRIPTOR))
    made = Cluster(directory, SECTIONS, POLICY)
    made.config.write_text('descriptor_files = ["descriptor.json"]\n' + made.config.read_text())
    for name in TENANTS:
        issue(directory, uri=f"spiffe://example/{name}", name=name)
    made.start()
    yield made
    made.kill()


def said(answer: httpx.Response) -> tuple[int, bytes, list[tuple[str, str]]]:
    """Return all of an answer."""
    return answer.status_code, answer.content, sorted(answer.headers.items())


@pytest.mark.requirement("SK-1", "SE-1", "LK-3", "BR-7")
def test_two_tenants_with_one_prompt_see_nothing_of_each_other(cluster: Cluster) -> None:
    one, two = Tenant(cluster, "one"), Tenant(cluster, "two")
    assert not set(one.keys) & set(two.keys)
    nothing = said(two.look_up(two.keys))
    labels = exposed(cluster)
    for key in one.keys:
        one.store(key)
    assert until(lambda: one.matched() == len(one.keys))
    lease = one.ask("POST", "holder", "leases", {"block_keys": one.keys, "ttl_ms": 60_000}).json()["lease"]

    # In its own scope the second tenant finds what it found before: nothing, whichever keys it asks for.
    assert said(two.look_up(two.keys)) == nothing
    assert said(two.look_up(one.keys)) == nothing
    # In the other scope all it hears is that it has no business there, as in a scope that does not exist.
    for scope_id in (one.scope_id, "ab" * 16):
        for keys in (one.keys, [NOBODYS_KEY]):
            assert said(two.look_up(keys, scope_id)) == said(two.look_up([NOBODYS_KEY], "cd" * 16))
        for method in ("GET", "HEAD"):
            expected = said(two.block(method, NOBODYS_KEY, "cd" * 16))
            assert said(two.block(method, one.keys[0], scope_id)) == expected
    # What is named without a scope is not there: a lease on blocks, a lease, a replica.
    for path, body in (("leases", {"block_keys": one.keys[:1], "ttl_ms": 1000}),):
        other = {**body, "block_keys": [NOBODYS_KEY]}
        assert said(two.ask("POST", "holder", path, body)) == said(two.ask("POST", "holder", path, other))
    for method, body in (("PUT", {"ttl_ms": 1000}), ("DELETE", None)):
        answers = [two.ask(method, "holder", f"leases/{name}", body) for name in (lease, "A" * len(lease))]
        assert said(answers[0]) == said(answers[1])
        assert answers[0].status_code == 404
    holder = component_id(cluster.uris["holder"])
    gone = [two.ask("DELETE", "index", f"replicas/{holder}/{key}") for key in (one.keys[0], NOBODYS_KEY)]
    assert said(gone[0]) == said(gone[1])
    assert one.matched() == len(one.keys), "and nothing came of it"
    # Metrics have names and labels of their own, not of tenants.
    text = "\n".join(exposed(cluster))
    for secret in (*one.keys, *two.keys, one.scope_id, two.scope_id, lease, MODEL.compat_id):
        assert secret not in text
    assert not any("scope" in line or "tenant" in line for line in exposed(cluster) - labels)


def exposed(cluster: Cluster) -> set[str]:
    """Return the names and labels of all metrics."""
    text = httpx.get(f"http://127.0.0.1:{cluster.monitoring_port}/metrics").text
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}


# The same path


def path_of(act: Callable[[], object]) -> list[str]:
    """Return the functions of the core that are entered while something is done, in order."""
    entered: list[str] = []

    def trace(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and "kvsp_core" in code.co_filename and "attrs generated" not in code.co_filename:
            entered.append(f"{Path(code.co_filename).name}:{code.co_qualname}")

    before = sys.getprofile()
    assert threading.current_thread() is threading.main_thread()
    sys.setprofile(trace)
    try:
        act()
    finally:
        sys.setprofile(before)
    return entered


OTHERS = "ee" * 32


def holder() -> kit.Loop:
    """Return a holder with a block in a scope that ALICE has no part in."""
    loop = kit.Loop().start()
    assert loop.put(OTHERS, client=kit.BOB, scope=kit.OTHER_SCOPE) in (201, 204)
    loop.index_answers()
    return loop


@pytest.mark.requirement("SE-1", "BR-7", "LE-1")
@pytest.mark.parametrize(
    "request_of",
    [
        lambda key: (GetBlock(kit.COMPAT, kit.OTHER_SCOPE, key), None),
        lambda key: (HeadBlock(kit.COMPAT, kit.OTHER_SCOPE, key), None),
        lambda key: (GetBlock(kit.COMPAT, kit.SCOPE, key), None),
        lambda key: (CreateLease(), LeaseRequest(block_keys=(key,), ttl_ms=500)),
    ],
    ids=["GET in the other scope", "HEAD in the other scope", "GET in its own", "a lease"],
)
def test_a_holder_goes_the_same_way_for_what_others_have_and_what_nobody_has(
    request_of: Callable[[str], tuple[Operation, object]],
) -> None:
    paths, answers = [], []
    for key in (OTHERS, NOBODYS_KEY):
        loop = holder()
        paths.append(path_of(lambda loop=loop, key=key: loop.ask(*request_of(key), client=kit.ALICE)))
        answer = loop.answers[loop.last_request]
        answers.append((answer.response, answer.body))
    assert answers[0] == answers[1]
    assert paths[0] == paths[1]


@pytest.mark.requirement("SE-1", "LE-1")
def test_a_holder_goes_the_same_way_for_a_lease_of_another_and_one_that_is_none() -> None:
    for make in (
        lambda lease: (RenewLease(lease), LeaseRenewal(ttl_ms=500)),
        lambda lease: (ReleaseLease(lease), None),
    ):
        paths, answers = [], []
        for known in (True, False):
            loop = holder()
            granted = loop.lease(OTHERS, client=kit.BOB)
            lease = json.loads(bytes(granted.body))["lease"]  # type: ignore[arg-type]
            named = lease if known else "A" * len(lease)
            request = make(named)
            paths.append(path_of(lambda loop=loop, request=request: loop.ask(*request, client=kit.ALICE)))
            answer = loop.answers[loop.last_request]
            answers.append((answer.response, answer.body))
        assert answers[0] == answers[1]
        assert paths[0] == paths[1]


MINE, THEIRS = "spiffe://example/mine", "https://theirs.example/kvsp/"


def index() -> Index:
    """Return an index with a record in a scope that MINE has no part in."""
    policy = Policy(
        {MINE: [kit.RoleName.INSTANCE], THEIRS: [kit.RoleName.HOLDER]},
        {
            kit.SCOPE: ScopeRules(read=[MINE], withdraw=[MINE]),
            kit.OTHER_SCOPE: ScopeRules(read=[THEIRS], publish=[THEIRS], withdraw=[THEIRS]),
        },
    )
    talk = index_kit.Talk()
    talk.index.policy = policy
    known = index_kit.record(OTHERS, THEIRS, scope_id=kit.OTHER_SCOPE)
    assert talk.publish(THEIRS, known) == 201
    return talk.index


def asked(role: Index, operation: Operation, body: object) -> object:
    request, octets = request_for(operation, body)
    effects = role.handle(RequestReceived(1, MINE, request), 0)
    if isinstance(effects[0], ReceiveBody):
        effects = role.handle(BodyArrived(1, octets), 0)
    return effects


@pytest.mark.requirement("SE-1", "LK-3", "BR-8")
@pytest.mark.parametrize("what", ["look up in the other scope", "look up in its own", "withdraw"])
def test_an_index_goes_the_same_way_for_what_others_have_and_what_nobody_has(what: str) -> None:
    paths, answers = [], []
    for key in (OTHERS, NOBODYS_KEY):
        role = index()
        scope_id = kit.OTHER_SCOPE if what == "look up in the other scope" else kit.SCOPE
        compat_id = index_kit.DESCRIPTOR.compat_id
        request: tuple[Operation, object] = (
            Lookup(),
            LookupRequest(scope_id=scope_id, compat_id=compat_id, block_keys=(key,)),
        )
        if what == "withdraw":
            withdrawal = Withdrawal(digest="sha-256:" + "00" * 32)
            request = WithdrawReplica(component_id(THEIRS), key), withdrawal
        made: list[object] = []
        paths.append(
            path_of(lambda role=role, request=request, made=made: made.append(asked(role, *request)))
        )
        answers.append(made)
    assert answers[0] == answers[1]
    assert paths[0] == paths[1]
