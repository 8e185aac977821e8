"""Makes the test vectors of requests and answers: what goes over the wire, octet by octet.

Written from the protocol's text and the decisions, like generate.py, which calls it; imports nothing of this
project.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

KEYS = [
    "9ca9d8b60f37f84726a27deb4cdc0d075714607a131632c2366e30b99fb1163b",
    "653275884ca44f8945fd4c902611c467394b73656e64c78d8522648cb75aefc1",
]
COMPAT = "5ed5c2f238839655d7c4029e12b7f31caf9e7421f4edb4057feee6dab760ee0f"
SCOPE = "6d1c6481cd428737da312c089db3832a"
H1, II7, II9 = "https://h1.example/kvsp/", "https://ii7.example/kvsp/", "https://ii9.example/kvsp/"
SESSION = "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11"
DIRECTIVE = "a2b7c9e0-1f3d-4c1a-8f5b-6d2e9a7c3b10"
JSON, BLOCK, PROBLEM = "application/kvsp+json", "application/kvsp-block", "application/problem+json"
NO_STORE = {"cache-control": "no-store"}


def name_of(base_uri: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(base_uri.encode()).digest()).decode().rstrip("=")


def text(members: Any) -> str:
    return json.dumps(members, separators=(",", ":"))


def digest_field(octets: bytes) -> str:
    return "sha-256=:" + base64.b64encode(hashlib.sha256(octets).digest()).decode() + ":"


# A block of one layer, four tokens, sections of 8 octets: K all 01, V all 02.
CONTAINER = bytes.fromhex("4b56423101000001000000000000000100000004") + (8).to_bytes(8, "big") * 2
CONTAINER += b"\x01" * 8 + b"\x02" * 8
LAYER_DIGEST = hashlib.sha256(CONTAINER[-16:]).hexdigest()
RECORD: dict[str, Any] = {
    "block_key": KEYS[0],
    "compat_id": COMPAT,
    "scope_id": SCOPE,
    "holder": H1,
    "codec": 1,
    "size": 16,
    "digest": "sha-256:" + hashlib.sha256(bytes.fromhex(LAYER_DIGEST)).hexdigest(),
    "layer_digests": [LAYER_DIGEST],
    "residency": [{"tier": "host", "layers": [0, 0], "read_mbit_per_s": 400000}],
    "ttl_ms": 600000,
}
STATUS: dict[str, Any] = {
    "instance": II7,
    "epoch": 12,
    "state": "active",
    "running": 18,
    "queued": 3,
    "batch_size": 32,
    "kv_utilization": 0.71,
    "prefill_tokens_per_s": 42000,
    "decode_tokens_per_s": 3100,
    "links": [{"holder": H1, "mbit_per_s": 200000, "rtt_us": 12}],
    "requested_state": None,
    "ttl_ms": 3000,
}
CHECKPOINT: dict[str, Any] = {
    "session": SESSION,
    "epoch": 1,
    "compat_id": COMPAT,
    "scope_id": SCOPE,
    "prompt_blocks": KEYS,
    "prompt_tail": [374, 264],
    "generated": [1296, 315, 279],
    "output_offset": 3,
    "sampler": {"method": "top-p", "params": {"p": 0.9}, "seed": 7, "step": 3, "deterministic": False},
}
REPLICA_PATH = f"replicas/{name_of(H1)}/{KEYS[0]}"
BLOCK_PATH = f"blocks/{COMPAT}/{SCOPE}/{KEYS[0]}"


def request(name: str, role: str, method: str, target: str, body: Any = None, **more: Any) -> dict[str, Any]:
    """A request below the base URI of its role; `body` is a JSON value or the octets of a container."""
    fields: dict[str, str] = {}
    octets = b"" if body is None else body if isinstance(body, bytes) else text(body).encode()
    if body is not None:
        fields["content-type"] = BLOCK if isinstance(body, bytes) else JSON
        fields["content-length"] = str(len(octets))
    made = {"name": name, "role": role, "method": method, "target": target, "fields": fields | more}
    return made | ({"body_hex": octets.hex()} if isinstance(body, bytes) else {"body": octets.decode()})


def answer(to: str, status: int, body: Any = None, **more: str) -> dict[str, Any]:
    """An answer to the request of this name."""
    fields = dict(NO_STORE)
    octets = b"" if body is None else text(body).encode()
    if body is not None:
        fields["content-type"] = JSON
    fields["content-length"] = str(len(octets))
    return {"to": to, "status": status, "fields": fields | more, "body": octets.decode()}


def requests() -> list[dict[str, Any]]:
    plan = {
        "map": "c3f8e1",
        "from": 4,
        "to": 5,
        "deadline_ms": 200,
        "retain": [[0, 32768]],
        "fetch": [{"tokens": [32768, 49152], "from": II9}],
        "release": [],
    }
    directive = {
        "directive": DIRECTIVE,
        "request_ref": "opaque-value-from-PC",
        "scope_id": SCOPE,
        "compat_id": COMPAT,
        "blocks": [{"block_key": KEYS[0], "sources": [H1]}],
        "layer_order": "ascending",
        "deadline_ms": 50,
        "lease_ms": 2000,
    }
    lookup = {"scope_id": SCOPE, "compat_id": COMPAT, "block_keys": KEYS, "targets": [II7, II9]}
    digest = digest_field(CONTAINER)
    return [
        request("lookup", "index", "POST", "lookup", lookup),
        request("publish", "index", "PUT", REPLICA_PATH, RECORD),
        request("withdraw", "index", "DELETE", REPLICA_PATH),
        request("withdraw on behalf", "index", "DELETE", REPLICA_PATH, {"digest": RECORD["digest"]}),
        request("retrieve", "holder", "GET", BLOCK_PATH),
        request("retrieve layers", "holder", "GET", BLOCK_PATH + "?layers=0-0&codec=1"),
        request("ask for the head", "holder", "HEAD", BLOCK_PATH),
        request(
            "store", "holder", "PUT", BLOCK_PATH, CONTAINER, **{"if-none-match": "*", "repr-digest": digest}
        ),
        request("lease", "holder", "POST", "leases", {"block_keys": KEYS, "ttl_ms": 2000}),
        request("renew", "holder", "PUT", "leases/x7Kq", {"ttl_ms": 2000}),
        request("release", "holder", "DELETE", "leases/x7Kq"),
        request("status", "controller", "PUT", f"instances/{name_of(II7)}/status", STATUS),
        request("checkpoint", "controller", "PUT", f"sessions/{SESSION}/checkpoint", CHECKPOINT),
        request("prefetch", "instance", "POST", "prefetch", directive),
        request("directive", "instance", "GET", f"prefetch/{DIRECTIVE}"),
        request(
            "resume",
            "instance",
            "POST",
            f"sessions/{SESSION}/resume",
            {"epoch": 2, "checkpoint": CHECKPOINT},
        ),
        request("reshard", "instance", "POST", "reshard", plan),
        request("reshard commit", "instance", "POST", "reshard", {"map": "c3f8e1", "commit": 5}),
        request("reshard abort", "instance", "POST", "reshard", {"map": "c3f8e1", "abort": 5}),
        request("change the state", "instance", "PUT", "state", {"state": "draining"}),
    ]


def answers() -> list[dict[str, Any]]:
    found = {
        "matched": 1,
        "blocks": [{"block_key": KEYS[0], "replicas": [RECORD | {"ttl_ms": 599000}]}],
        "targets": [{"instance": II7, "fetch_us": 13, "recompute_us": 95}],
    }
    block = {
        "cache-control": "private, immutable, max-age=599",
        "content-type": BLOCK,
        "content-length": str(len(CONTAINER)),
        "repr-digest": digest_field(CONTAINER),
    }
    loaded = {
        "directive": DIRECTIVE,
        "state": "partial",
        "loaded": [KEYS[0]],
        "request_ref": "opaque-value-from-PC",
    }
    return [
        answer("lookup", 200, found),
        answer("lookup", 200, {"matched": 0, "blocks": []}),
        answer("publish", 201, {"ttl_ms": 600000}),
        answer("publish", 200, {"ttl_ms": 600000}),
        answer("withdraw", 204),
        {"to": "retrieve", "status": 200, "fields": block, "body_hex": CONTAINER.hex()},
        {"to": "ask for the head", "status": 200, "fields": block, "body": ""},
        answer("store", 201),
        answer("lease", 201, {"lease": "x7Kq", "ttl_ms": 2000}, location="leases/x7Kq"),
        answer("renew", 200, {"lease": "x7Kq", "ttl_ms": 2000}),
        answer("release", 204),
        answer("status", 200, {"state": "draining"}),
        answer("checkpoint", 200, {"epoch": 1, "output_offset": 3}),
        answer("prefetch", 202, location=f"prefetch/{DIRECTIVE}"),
        answer("directive", 200, loaded),
        answer("resume", 202),
        answer("reshard", 200),
        answer("change the state", 200, {"state": "draining"}),
    ]


PROBLEMS = [
    ("kvsp-not-found", "Block, lease, session, or directive unknown", 404),
    ("kvsp-scope-denied", "Client not authorized for the scope", 403),
    ("kvsp-incompatible", "Compatibility ID mismatch", 409),
    ("kvsp-lease-quota", "Lease quota exceeded", 429),
    ("kvsp-stale-epoch", "Epoch older than current", 409),
    ("kvsp-invalid-state", "Operation not allowed in the instance state", 409),
    ("kvsp-digest-mismatch", "Stored data does not match its digest", 422),
    ("kvsp-plan-conflict", "Reshard plan does not match the current map version", 409),
    ("kvsp-layers-unavailable", "Requested layers not held", 404),
]


def problems() -> list[dict[str, Any]]:
    made = []
    for suffix, title, status in PROBLEMS:
        uri = "https://iana.org/assignments/kvsp#" + suffix
        body = text({"type": uri, "title": title, "status": status, "detail": "in plain words"})
        fields = NO_STORE | {"content-type": PROBLEM, "content-length": str(len(body))}
        made.append({"type": suffix, "status": status, "fields": fields, "body": body})
    return made


def refused() -> list[dict[str, Any]]:
    """Requests that are refused whoever makes them, with the status and, for 400, the member at fault."""
    sent = {made["name"]: made for made in requests()}

    def case(name: str, status: int, reason: str, member: str = "", allow: str = "", **change: Any) -> Any:
        wrong = {"status": status, "reason": reason, "member": member, "allow": allow}
        made = sent[name] | change
        if "body" in change:
            made |= {"fields": made["fields"] | {"content-length": str(len(made["body"].encode()))}}
        return made | {"refused": wrong}

    def fields(name: str, **change: str) -> dict[str, str]:
        return sent[name]["fields"] | {field.replace("_", "-"): value for field, value in change.items()}

    lease = json.loads(sent["lease"]["body"])
    lookup = json.loads(sent["lookup"]["body"])
    return [
        case("lookup", 404, "no such resource", target="look-up"),
        case("lookup", 404, "no such resource: the path is exact", target="lookup/"),
        case("retrieve", 404, "a resource of another role", role="index"),
        case("lookup", 405, "the resource has other methods", allow="POST", method="PUT"),
        case("retrieve", 405, "the resource has other methods", allow="GET, HEAD, PUT", method="DELETE"),
        case("change the state", 405, "methods are case sensitive", allow="PUT", method="put"),
        case(
            "retrieve",
            400,
            "hex is lowercase",
            "block_key",
            target=BLOCK_PATH.replace(KEYS[0], KEYS[0].upper()),
        ),
        case(
            "retrieve",
            400,
            "a Scope ID is 32 digits",
            "scope_id",
            target=BLOCK_PATH.replace(SCOPE, SCOPE * 2),
        ),
        case("retrieve", 400, "first layer after last", "layers", target=BLOCK_PATH + "?layers=2-1"),
        case("retrieve", 400, "not two layers", "layers", target=BLOCK_PATH + "?layers=2"),
        case("retrieve", 400, "a codec is a number", "codec", target=BLOCK_PATH + "?codec=raw"),
        case("publish", 400, "not a holder-id", "holder_id", target=f"replicas/h1/{KEYS[0]}"),
        case("checkpoint", 400, "a session is a UUID", "session", target="sessions/1/checkpoint"),
        case("lookup", 415, "another media type", fields=fields("lookup", content_type="application/json")),
        case("store", 415, "block data has its own media type", fields=fields("store", content_type=JSON)),
        case("lookup", 415, "no body is sent compressed", fields=fields("lookup", content_encoding="gzip")),
        case("renew", 413, "more than the resource takes", fields=fields("renew", content_length="1000000")),
        case(
            "store",
            400,
            "a digest is 32 octets",
            "repr-digest",
            fields=fields("store", repr_digest="sha-256=:AAAA:"),
        ),
        case("lookup", 400, "not JSON", body='{"scope_id"'),
        case("lookup", 400, "not an object", body="[]"),
        case(
            "lookup",
            400,
            "a member is missing",
            "compat_id",
            body=text({"scope_id": SCOPE, "block_keys": []}),
        ),
        case(
            "lookup",
            400,
            "a key is 64 digits",
            "block_keys[1]",
            body=text(lookup | {"block_keys": [KEYS[0], "x"]}),
        ),
        case("lease", 400, "an integer has no fraction", "ttl_ms", body=text(lease | {"ttl_ms": 2000.0})),
        case("lease", 400, "an integer is no string", "ttl_ms", body=text(lease | {"ttl_ms": "2000"})),
        case("lease", 400, "an integer is not true", "ttl_ms", body=text(lease | {"ttl_ms": True})),
        case("lease", 400, "a lease holds for a time", "ttl_ms", body=text(lease | {"ttl_ms": 0})),
        case("lease", 400, "a lease names blocks", "block_keys", body=text(lease | {"block_keys": []})),
        case(
            "publish",
            400,
            "layer ranges overlap",
            "residency",
            body=text(RECORD | {"layer_digests": [LAYER_DIGEST] * 2, "residency": RECORD["residency"] * 2}),
        ),
        case(
            "checkpoint",
            400,
            "not all output tokens",
            "output_offset",
            body=text(CHECKPOINT | {"output_offset": 2}),
        ),
        case(
            "status",
            400,
            "utilisation is a share",
            "kv_utilization",
            body=text(STATUS | {"kv_utilization": 1.5}),
        ),
        case("reshard", 400, "plan, commit or abort", body=text({"map": "c3f8e1", "commit": 5, "abort": 5})),
        case(
            "reshard", 400, "versions go up", "to", body=sent["reshard"]["body"].replace('"to":5', '"to":4')
        ),
        case(
            "resume",
            400,
            "in a member of a member",
            "checkpoint.prompt_tail[0]",
            body=text({"epoch": 2, "checkpoint": CHECKPOINT | {"prompt_tail": [-1]}}),
        ),
    ]


def exchanges() -> dict[str, Any]:
    return {"requests": requests(), "answers": answers(), "problems": problems(), "refused": refused()}
