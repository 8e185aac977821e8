"""The authorization table once more, over the wire: every resource, role, relation and permission, asked of
processes that serve all roles.
"""

from __future__ import annotations

import itertools
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvsp_client.model_dir import descriptor_of_directory
from kvsp_core.identity import CompatibilityDescriptor, component_id
from kvsp_core.problems import PROBLEM_BASE_URI
from kvsp_core.resources import RESOURCES, Resource, RoleName
from kvsp_core.roles.authorization import Permission, Relation, authorize
from kvsp_engines.prepare import prepare_tiny
from kvsp_services.pki import issue
from kvsp_services.policy import read_policy
from tests.adapters.services.cluster import Cluster
from tests.unit.roles.test_authorization import MEMBERS, OTHER_SCOPE, SCOPE, typed

DELEGATED, THIRD = "https://delegated.example/kvsp/", "https://third.example/kvsp/"
SERVING = {
    RoleName.INDEX: "index",
    RoleName.HOLDER: "holder",
    RoleName.INSTANCE: "instance",
    RoleName.CONTROLLER: "controller",
}
PERMISSIONS = (None, *Permission)


def name_of(role: RoleName, permission: Permission | None) -> str:
    return f"{role.value}-{permission.value if permission else 'none'}"


def uri_of(role: RoleName, permission: Permission | None) -> str:
    return f"https://{name_of(role, permission)}.example/kvsp/"


PRINCIPALS = list(itertools.product(RoleName, PERMISSIONS))


def policy() -> str:
    lines = ["[principals]"]
    lines += [f'"{uri_of(role, permission)}" = ["{role.value}"]' for role, permission in PRINCIPALS]
    own = {"index": "index", "holder": "holder", "controller": "controller", "instance": "instance"}
    lines += [f'"{{{name}}}" = ["{role}"]' for name, role in own.items()]
    for scope, names in ((SCOPE, Permission), (OTHER_SCOPE, ())):
        lines.append(f"[scopes.{scope}]")
        for permission in names:
            who = ", ".join(f'"{uri_of(role, permission)}"' for role in RoleName)
            lines.append(f"{permission.value} = [{who}]")
    lines += ["[delegates]"]
    lines += [f'"{uri_of(role, permission)}" = ["{DELEGATED}"]' for role, permission in PRINCIPALS]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompatibilityDescriptor]:
    directory = tmp_path_factory.mktemp("model")
    prepare_tiny(directory)
    return directory, descriptor_of_directory(directory)


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, model: tuple[Path, CompatibilityDescriptor]
) -> Iterator[Cluster]:
    tier = '[[{0}.tiers]]\ntier = "host"\ncapacity_bytes = 1000000\n'
    sections = {
        "index": "",
        "holder": 'index = ["{index}"]\n' + tier.format("holder"),
        "instance": f'index = ["{{index}}"]\ncontroller = "{{controller}}"\nmodel_dir = "{model[0]}"\n'
        + tier.format("instance"),
        "controller": 'index = ["{index}"]',
    }
    made = Cluster(tmp_path_factory.mktemp("served"), sections, policy())
    for role, permission in PRINCIPALS:
        issue(made.directory, uri=uri_of(role, permission), name=name_of(role, permission))
    made.start()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def clients(served: Cluster) -> Iterator[dict[tuple[RoleName, Permission | None], httpx.Client]]:
    made = {}
    for principal in PRINCIPALS:
        context = ssl.create_default_context(cafile=str(served.directory / "ca.pem"))
        stem = served.directory / name_of(*principal)
        context.load_cert_chain(stem.with_suffix(".pem"), stem.with_suffix(".key"))
        made[principal] = httpx.Client(http1=False, http2=True, verify=context, timeout=60)
    yield made
    for known in made.values():
        known.close()


def body_of(row: Resource, scope: str, named: str, compat_id: str) -> object:
    """Return a body that says this scope, for the requests whose body does."""
    block = {"compat_id": MEMBERS["compat_id"], "scope_id": scope, "block_key": MEMBERS["block_key"]}
    match row.operation.__name__:
        case "Lookup":
            return {**block, "block_keys": [MEMBERS["block_key"]]}
        case "PublishReplica":
            tier = {"tier": "host", "layers": [0, 0]}
            more = {"holder": named, "codec": 1, "size": 8, "digest": "sha-256:" + "0" * 64}
            return {**block, **more, "residency": [tier], "ttl_ms": 1000}
        case "PlaceRequest":
            prefix = {"scope_id": scope, "block_keys": [MEMBERS["block_key"]]}
            return {"compat_id": compat_id, "prefixes": [prefix], "token_count": 20}
        case _:
            return None


def path_of(row: Resource, named: str, scope: str) -> str:
    members = {**MEMBERS, "scope_id": scope}
    ids = {"holder_id": component_id(named), "instance_id": component_id(named)}
    return row.path.format(**members, **ids)


JUDGED_BY_BODY = ("Lookup", "PublishReplica", "PlaceRequest")
ROWS = [row for row in RESOURCES if SERVING.keys() & set(row.roles)]


@pytest.mark.requirement("SE-1", "BR-7", "PB-1", "LK-3", "PF-5")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.method}-{row.path}")
def test_every_cell_of_the_table_over_the_wire(
    served: Cluster,
    model: tuple[Path, CompatibilityDescriptor],
    clients: dict[tuple[RoleName, Permission | None], httpx.Client],
    row: Resource,
) -> None:
    known = read_policy(served.directory / "policy.toml")
    serving = served.uris[SERVING[next(role for role in row.roles if role in SERVING)]]
    allowed = refused = 0
    for principal, client in clients.items():
        me = uri_of(*principal)
        relations = {Relation.ITSELF: me, Relation.DELEGATE: DELEGATED, Relation.ANYBODY: THIRD}
        if "{holder_id}" not in row.path and "{instance_id}" not in row.path:
            relations = {Relation.ANYBODY: THIRD}
        for named, scope in itertools.product(relations.values(), (SCOPE, OTHER_SCOPE)):
            body = body_of(row, scope, named, model[1].compat_id)
            if scope == OTHER_SCOPE and body is None and "{scope_id}" not in row.path:
                continue  # the same request again
            operation = typed(row, named)
            if "{scope_id}" in row.path:
                operation = type(operation)(MEMBERS["compat_id"], scope, MEMBERS["block_key"])  # type: ignore[call-arg]
            by_body = scope if row.operation.__name__ in JUDGED_BY_BODY else None
            problem = authorize(known, me, operation) or authorize(known, me, operation, scope_id=by_body)
            content = None if body is None else json.dumps(body)
            answer = client.request(
                row.method,
                serving + path_of(row, named, scope),
                content=content,
                headers={"content-type": row.body_type} if content or row.method in ("PUT", "POST") else {},
            )
            cell = f"{principal} {named} {scope}: {answer.status_code}"
            if problem is None:
                allowed += 1
                assert answer.status_code not in (401, 403), cell
            else:
                refused += 1
                assert answer.status_code == problem.status, cell
                if row.method != "HEAD":
                    said = answer.json().get("type", "about:blank").removeprefix(PROBLEM_BASE_URI)
                    assert said == (problem.type.suffix or "about:blank"), cell
    assert allowed
    assert refused
