"""Makes the test vectors of descriptors, keys, containers and component identifiers.

This is a second implementation on purpose: it is written from the protocol's text, imports nothing of this
project, and is as plain as can be.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import struct
import sys
from pathlib import Path
from typing import Any

from exchanges import exchanges

HERE = Path(__file__).resolve().parent

PUBLISHED: dict[str, Any] = {
    "model": "example-model",
    "model_digest": "sha-256:254e528c669a2084c9727298cacb83e8854e0a6ff80e2bf18096b9dce0f7ebda",
    "tokenizer_digest": "sha-256:9f42a7a29dca3063ad26d7be7fe6a930fa38afb1a703e4f7ff538db4e133b19c",
    "layers": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "kv_dtype": "bf16",
    "positional": "rope",
    "block_tokens": 4,
    "layout": "kvsp-layout-1",
}
PUBLISHED_ID = "5ed5c2f238839655d7c4029e12b7f31caf9e7421f4edb4057feee6dab760ee0f"
ADAPTERS = ["sha-256:" + "1a" * 32, "sha-256:" + "2b" * 32]
SMALL = PUBLISHED | {"layers": 3, "kv_heads": 1, "head_dim": 2, "kv_dtype": "fp16", "block_tokens": 2}
"""A block of SMALL has 3 layers with sections of 2 tokens x 1 head x 2 elements x 2 octets = 8 octets."""


def canonical(members: dict[str, Any]) -> str:
    """RFC 8785 for members without numbers that have a fraction and without names beyond ASCII."""
    return json.dumps(members, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def compat_id(canonical_form: str) -> str:
    return hashlib.sha256(b"KVSP-COMPAT-1" + b"\x00" + canonical_form.encode()).hexdigest()


# Descriptors --------------------------------------------------------------------------------------


def valid_descriptors() -> list[dict[str, Any]]:
    documents = {
        "published": PUBLISHED,
        "small": SMALL,
        "one adapter": PUBLISHED | {"adapters": ADAPTERS[:1]},
        "two adapters": PUBLISHED | {"adapters": ADAPTERS},
        "two adapters in the other order": PUBLISHED | {"adapters": ADAPTERS[::-1]},
        "theta": PUBLISHED | {"positional": "rope;theta=500000"},
        "theta and scaling": PUBLISHED | {"positional": "rope;theta=500000,scaling=llama3"},
        "no positions": PUBLISHED | {"positional": "none"},
        "another layout": PUBLISHED | {"layout": "example-layout-7"},
        "largest sizes": PUBLISHED | {"layers": 2**32 - 1, "block_tokens": 2**32 - 1},
        "member of a later version": PUBLISHED | {"zz_later": {"b": [1, True, None], "a": "x"}},
        "member names are case sensitive": PUBLISHED | {"Layers": 7},
        "model beyond ASCII": PUBLISHED | {"model": 'caf\u00e9 \u20ac \U0001f600 "quoted" \\ / \t\x7f'},
    }
    made = [
        {"name": name, "document": json.dumps(document), "canonical": canonical(document)}
        for name, document in documents.items()
    ]
    # By hand where Python's own writer differs from RFC 8785: numbers as ECMAScript writes them, names in
    # the order of their UTF-16 units (a name outside the basic plane comes before U+FB33).
    text = canonical(PUBLISHED)
    numbers = "[1e21,1e-7,4.50,2e-3,1E30,0.000001,-0.0,10.0,333333333.33333329]"
    made.append(
        {
            "name": "numbers of a later version",
            "document": text[:-1] + ',"zz":' + numbers + "}",
            "canonical": text[:-1] + ',"zz":[1e+21,1e-7,4.5,0.002,1e+30,0.000001,0,10,333333333.3333333]}',
        }
    )
    made.append(
        {
            "name": "names in UTF-16 order",
            "document": text[:-1] + ',"\ufb33":1,"\U0001f600":2,"\u20ac":3}',
            "canonical": text[:-1] + ',"\u20ac":3,"\U0001f600":2,"\ufb33":1}',
        }
    )
    for entry in made:
        entry["compat_id"] = compat_id(entry["canonical"])
    return made


def invalid_descriptors() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []

    def refuse(name: str, document: str, member: str, reason: str) -> None:
        made.append({"name": name, "document": document, "member": member, "reason": reason})

    def wrong(member: str, value: Any, reason: str, at: str = "") -> None:
        shown = json.dumps(value)
        name = f"{member} is {shown if len(shown) < 40 else shown[:37] + '...'}"
        refuse(name, json.dumps(PUBLISHED | {member: value}), at or member, reason)

    for member in PUBLISHED:
        rest = {name: value for name, value in PUBLISHED.items() if name != member}
        refuse(f"{member} is missing", json.dumps(rest), member, "every descriptor states it")
        wrong(member, None, "null is no value of it")
    for member in ("model", "kv_dtype", "positional", "layout"):
        wrong(member, 7, "not a string")
        wrong(member, "", "empty")
    for member in ("layers", "kv_heads", "head_dim", "block_tokens"):
        for value in (0, -1, 2**32, 4.0, "4", True, [4]):
            wrong(member, value, "not an integer from 1 to 2^32-1")
    for member in ("model_digest", "tokenizer_digest"):
        good = PUBLISHED[member]
        for value in (good.upper(), good[8:], good[:-1], good + "0", "sha-512:" + good[8:], good + "\n", 7):
            wrong(member, value, "not 'sha-256:' and 64 lowercase hex digits")
    wrong("adapters", [], "an empty array is not allowed; leave the member out")
    wrong("adapters", ADAPTERS[0], "not an array")
    wrong("adapters", [ADAPTERS[0], "sha-256:xyz"], "not a digest", at="adapters[1]")
    wrong("kv_dtype", "BF16", "not registered")
    for value in (
        "rotary",
        "ROPE",
        "rope ",
        "none;theta=1",
        "rope;",
        "rope;theta",
        "rope;theta=",
        "rope;theta=1.5",
    ):
        wrong("positional", value, "not of the registered syntax")
    for value in (
        "rope;theta=1e6",
        "rope;theta=-1",
        "rope;scaling=yarn",
        "rope;theta=1,scaling=",
        "rope;theta=1,",
    ):
        wrong("positional", value, "not of the registered syntax")
    text = canonical(PUBLISHED)
    refuse("a member twice", text[:-1] + ',"layers":32}', "layers", "a member is given twice")
    refuse("a member twice, differing", text[:-1] + ',"layers":33}', "layers", "a member is given twice")
    refuse("a nested member twice", text[:-1] + ',"zz":{"a":1,"a":1}}', "a", "a member is given twice")
    for number in ("NaN", "Infinity", "-Infinity"):
        refuse(f"{number}", text[:-1] + f',"zz":{number}}}', "zz", f"{number} is not JSON")
    refuse("1e400", text[:-1] + ',"zz":[1e400]}', "zz[0]", "too large for a double")
    refuse("1e20", text[:-1] + ',"zz":1e20}', "zz", "its canonical form is an integer beyond 2^53-1")
    for number in (2**53, -(2**53), 10**40):
        refuse(f"integer {number}", text[:-1] + f',"zz":{number}}}', "zz", "beyond 2^53-1")
    refuse("half a surrogate pair", text[:-1] + ',"zz":"\\ud800"}', "zz", "not Unicode text")
    refuse("half a surrogate pair in a name", text[:-1] + ',"\\ud800":1}', "", "not Unicode text")
    refuse("nested too deep", text[:-1] + ',"zz":' + "[" * 100 + "]" * 100 + "}", "", "nests too deep")
    for name, document in (("empty", ""), ("cut off", text[:-1]), ("two documents", text + text)):
        refuse(name, document, "", "not a JSON document")
    for document in ("null", "true", "7", '"text"', "[]", f"[{text}]"):
        refuse(f"{document[:6]} is no object", document, "", "not a JSON object")
    refuse("byte order mark", "\ufeff" + text, "", "not JSON")
    made.append(
        {
            "name": "UTF-16",
            "document_hex": text.encode("utf-16").hex(),
            "member": "",
            "reason": "JSON is UTF-8",
        }
    )
    return made


# Keys ---------------------------------------------------------------------------------------------


def scope_id(scope_key: bytes) -> str:
    return hashlib.sha256(b"KVSP-SCOPE-1" + b"\x00" + scope_key).digest()[:16].hex()


def block_key(scope_key: bytes, compat: str, parent: bytes, tokens: list[int]) -> bytes:
    message = b"KVSP-BLOCK-1" + b"\x00" + bytes.fromhex(compat) + parent
    for token in tokens:
        message += struct.pack(">I", token)
    return hmac.new(scope_key, message, hashlib.sha256).digest()


def block_keys() -> dict[str, Any]:
    cases: list[dict[str, Any]] = []

    def case(
        name: str, scope_key: bytes, tokens: list[int], block_tokens: int = 4, parent: bytes | None = None
    ) -> None:
        descriptor = PUBLISHED | {"block_tokens": block_tokens}
        compat = compat_id(canonical(descriptor))
        previous, keys = parent or bytes(32), []
        complete = len(tokens) - len(tokens) % block_tokens
        for start in range(0, complete, block_tokens):
            previous = block_key(scope_key, compat, previous, tokens[start : start + block_tokens])
            keys.append(previous.hex())
        cases.append(
            {
                "name": name,
                "scope_key": scope_key.hex(),
                "scope_id": scope_id(scope_key),
                "descriptor": descriptor,
                "parent": parent.hex() if parent is not None else None,
                "tokens": tokens,
                "keys": keys,
                "tail": tokens[complete:],
            }
        )

    counting = bytes(range(32))
    published = [128000, 791, 6460, 374, 264, 1296, 315, 279]
    case("published", counting, published)
    case("published, third block", counting, [*published, 1, 2, 3, 4])
    first = block_key(counting, PUBLISHED_ID, bytes(32), published[:4])
    case("published, continued from its first key", counting, published[4:], parent=first)
    case("no token", counting, [])
    case("less than a block", counting, [1, 2, 3])
    case("40 tokens at B = 16", counting, list(range(40)), block_tokens=16)
    case("B = 1", counting, [5, 6, 7], block_tokens=1)
    case(
        "boundaries of the width of a token", counting, [0, 1, 127, 128, 255, 256, 32767, 32768, 65535, 65536]
    )
    case("boundaries of 31 and 32 bits", counting, [2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
    case("all zero", counting, [0] * 8)
    case("another scope", bytes(32), published)
    case("scope key of 64 octets", bytes(range(64)), published)
    case("scope key of 65 octets, which HMAC hashes first", bytes(range(65)), published)
    case("scope key of 200 octets", bytes(range(200)), published)
    case("long", counting, [(7919 * i * i) % 128000 for i in range(1000)], block_tokens=16)
    refused = [-1, -(2**31), 2**32, 2**63, 2**64, 1.0, True, False, None, "1", [1]]
    return {"cases": cases, "not_tokens": refused, "short_scope_keys": ["", "00" * 31]}


# Containers ---------------------------------------------------------------------------------------


def header(
    layers: list[tuple[int, int]],
    *,
    magic: bytes = b"KVB1",
    version: int = 1,
    flags: int = 0,
    codec: int = 1,
    first: int = 0,
    count: int | None = None,
    tokens: int = 2,
) -> bytes:
    count = len(layers) if count is None else count
    fixed = magic + struct.pack(">BBHIII", version, flags, codec, first, count, tokens)
    return fixed + b"".join(struct.pack(">QQ", k, v) for k, v in layers)


def sections(first: int, count: int, size: int = 8) -> list[tuple[bytes, bytes]]:
    return [
        (
            bytes((16 * layer + i) % 256 for i in range(size)),
            bytes((128 + layer + i) % 256 for i in range(size)),
        )
        for layer in range(first, first + count)
    ]


def container(first: int = 0, count: int = 3, size: int = 8, **fields: Any) -> bytes:
    data = sections(first, count, size)
    head = header([(len(k), len(v)) for k, v in data], first=first, **fields)
    return head + b"".join(k + v for k, v in data)


def digests(layers: list[tuple[bytes, bytes]]) -> list[str]:
    return [hashlib.sha256(k + v).hexdigest() for k, v in layers]


def valid_containers() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []

    def accept(name: str, octets: bytes, first: int, layers: list[tuple[bytes, bytes]], **other: Any) -> None:
        each = digests(layers)
        made.append(
            {
                "name": name,
                "container": octets.hex(),
                "codec": 1,
                "token_count": 2,
                "first_layer": first,
                "sections": [[len(k), len(v)] for k, v in layers],
                "layer_digests": each,
                "digest": "sha-256:" + hashlib.sha256(b"".join(bytes.fromhex(d) for d in each)).hexdigest(),
                "context": {},
            }
            | other
        )

    whole = {"descriptor": SMALL}
    accept("a whole block", container(), 0, sections(0, 3), context=whole)
    accept("a range of layers", container(1, 2), 1, sections(1, 2), context=whole | {"layers": [1, 2]})
    accept("the last layer", container(2, 1), 2, sections(2, 1), context=whole)
    accept("without a descriptor", container(), 0, sections(0, 3))
    private = container(codec=0xFF01)
    accept("a codec for private use", private, 0, sections(0, 3), codec=0xFF01, context=whole)
    uneven = [(b"abc", b""), (b"", b"defgh"), (b"", b"")]
    octets = header([(3, 0), (0, 5), (0, 0)], codec=7) + b"abcdefgh"
    accept("sections of any size in another codec", octets, 0, uneven, codec=7, context=whole)
    last = header([(1, 1)], first=2**32 - 1) + b"kv"
    accept("the last layer there can be", last, 2**32 - 1, [(b"k", b"v")])
    return made


def invalid_containers() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    good = container()

    def refuse(
        name: str,
        octets: bytes,
        after: int | None,
        reason: str,
        status: int = 400,
        kind: str = "about:blank",
        **context: Any,
    ) -> None:
        made.append(
            {
                "name": name,
                "container": octets.hex(),
                "refused_after": after,
                "status": status,
                "problem": kind,
                "reason": reason,
                "context": context,
            }
        )

    fit = {"status": 409, "kind": "kvsp-incompatible", "descriptor": SMALL}
    large = {"status": 413}
    refuse("first octet", b"LVB1" + good[4:], 1, "not the magic")
    refuse("magic KVB2", b"KVB2" + good[4:], 4, "not the magic")
    refuse("an HTML page", b"<html>", 1, "not the magic")
    for version in (0, 2, 255):
        refuse(f"version {version}", container(version=version), 5, "the version is not 1")
    for flags in (1, 0x80):
        refuse(f"flags {flags}", container(flags=flags), 6, "flags are reserved")
    refuse("codec 0", container(codec=0), 8, "codec 0 is reserved")
    refuse("no layer", header([]), 16, "a container holds at least one layer")
    refuse("2^32-1 layers", header([], count=2**32 - 1), 13, "more layers than allowed", **large)
    refuse("more layers than there are numbers", header([(1, 1)] * 2, first=2**32 - 1), 16, "beyond 2^32-1")
    refuse("no token", container(tokens=0), 20, "a block has tokens")
    refuse("K of 2^64-1 octets", header([(2**64 - 1, 1)]), 21, "larger than allowed", **large)
    refuse("V of 2^64-1 octets", header([(1, 2**64 - 1)]), 29, "larger than allowed", **large)
    refuse("sum of lengths beyond 2^64", header([(2**63, 2**63)]), 21, "larger than allowed", **large)
    refuse("an octet too many", good + b"\0", len(good) + 1, "octets follow the end")
    for length in (0, 3, 4, 19, 20, 21, 67, 68, len(good) - 1):
        refuse(f"cut off after {length}", good[:length], None, "the container ends too soon")
    refuse("layers beyond the model", container(1, 3), 16, "more layers than the model has", **fit)
    refuse("first layer beyond the model", container(3, 1), 12, "more layers than the model has", **fit)
    refuse("another token count", container(tokens=3), 20, "not the tokens of a block", **fit)
    refuse("K of another size", header([(9, 8)] * 3), 28, "not the size of a section", **fit)
    refuse("V of another size", header([(8, 264)] * 3), 35, "not the size of a section", **fit)
    refuse(
        "a later layer of another size",
        header([(8, 8), (8, 8), (8, 7)]),
        68,
        "not the size of a section",
        **fit,
    )
    refuse("other layers than asked for", container(0, 2), 12, "not the layers asked for", layers=[1, 2])
    refuse("fewer layers than asked for", container(1, 1), 16, "not the layers asked for", layers=[1, 2])
    refuse("declared shorter", good, 68, "not the size declared", declared_bytes=len(good) - 1)
    refuse("declared longer", good, 68, "not the size declared", declared_bytes=len(good) + 1)
    refuse(
        "declared shorter, sizes known",
        good,
        16,
        "not the size declared",
        declared_bytes=84,
        descriptor=SMALL,
    )
    right = digests(sections(0, 3))
    for layer, end in enumerate((84, 100, 116)):
        spoilt = bytearray(good)
        spoilt[end - 1] ^= 1
        refuse(
            f"a flipped bit in layer {layer}",
            bytes(spoilt),
            end,
            "a layer does not match its digest",
            status=422,
            kind="kvsp-digest-mismatch",
            layer_digests=right,
        )
    refuse(
        "a layer that the record does not list",
        good,
        len(good),
        "a layer does not match its digest",
        status=422,
        kind="kvsp-digest-mismatch",
        layer_digests=right[:2],
    )
    return made


# Records ------------------------------------------------------------------------------------------

HEX = "9ca9d8b60f37f84726a27deb4cdc0d075714607a131632c2366e30b99fb1163b"
RECORDS: dict[str, dict[str, Any]] = {
    "Replica Record": {
        "block_key": HEX,
        "compat_id": PUBLISHED_ID,
        "scope_id": "6d1c6481cd428737da312c089db3832a",
        "holder": "https://h1.example/kvsp/",
        "codec": 1,
        "size": 2097152,
        "digest": "sha-256:" + HEX,
        "layer_digests": [HEX] * 32,
        "residency": [
            {"tier": "device", "layers": [0, 15]},
            {"tier": "host", "layers": [16, 31], "read_mbit_per_s": 400000},
        ],
        "ttl_ms": 600000,
    },
    "Instance Status Record": {
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
    },
    "Session Checkpoint": {
        "session": "6f1d0a9e-2c55-4d7e-9a0e-5b7f2f9f6a11",
        "epoch": 1,
        "compat_id": PUBLISHED_ID,
        "scope_id": "6d1c6481cd428737da312c089db3832a",
        "prompt_blocks": [HEX, HEX],
        "prompt_tail": [374, 264],
        "generated": [1296, 315, 279],
        "output_offset": 3,
        "sampler": {"method": "top-p", "params": {"p": 0.9}, "seed": 7, "step": 3, "deterministic": False},
    },
}


def records() -> dict[str, Any]:
    replica, status, checkpoint = RECORDS
    sampler = RECORDS[checkpoint]["sampler"]
    changes: list[tuple[str, str, dict[str, Any]]] = [
        (replica, "block_key", {"block_key": HEX.upper()}),
        (replica, "scope_id", {"scope_id": HEX}),
        (replica, "digest", {"digest": HEX}),
        (replica, "holder", {"holder": "http://h1.example/kvsp/"}),
        (replica, "codec", {"codec": 1.0}),
        (replica, "codec", {"codec": True}),
        (replica, "size", {"size": -1}),
        (replica, "ttl_ms", {"ttl_ms": 0}),
        (replica, "residency", {"residency": [{"tier": "host", "layers": [0, 9]}] * 2}),
        (replica, "residency[0].layers", {"residency": [{"tier": "host", "layers": [5, 4]}]}),
        (replica, "layer_digests[1]", {"layer_digests": [HEX, "x"]}),
        (replica, "layer_digests", {"layer_digests": [HEX] * 31}),
        (status, "instance", {"instance": "https://ii7.example"}),
        (status, "epoch", {"epoch": "12"}),
        (status, "kv_utilization", {"kv_utilization": 1.5}),
        (status, "ttl_ms", {"ttl_ms": None}),
        (status, "links[0].rtt_us", {"links": [RECORDS[status]["links"][0] | {"rtt_us": -1}]}),
        (checkpoint, "session", {"session": "not-a-uuid"}),
        (checkpoint, "generated[1]", {"generated": [1, 2**32, 3]}),
        (checkpoint, "prompt_tail[0]", {"prompt_tail": [True]}),
        (checkpoint, "output_offset", {"output_offset": 2}),
        (checkpoint, "sampler.step", {"sampler": sampler | {"step": 3.5}}),
    ]
    invalid = [
        {"record": record, "member": member, "document": RECORDS[record] | change}
        for record, member, change in changes
    ]
    for record, document in RECORDS.items():
        optional = ("layer_digests", "requested_state")
        for member in document.keys() - set(optional):
            rest = {name: value for name, value in document.items() if name != member}
            invalid.append({"record": record, "member": member, "document": rest})
    invalid.sort(key=lambda entry: json.dumps([entry["record"], entry["member"], entry["document"]]))
    valid = [{"record": record, "document": document} for record, document in RECORDS.items()]
    valid += [{"record": record, "document": RECORDS[record] | {"later": [{}]}} for record in RECORDS]
    return {"valid": valid, "invalid": invalid}


# Components ---------------------------------------------------------------------------------------


def components() -> dict[str, Any]:
    uris = (
        *(
            "https://h1.example/kvsp/",
            "https://ii7.example/kvsp/",
            "https://h1.example/",
            "https://h1.example:443/",
        ),
        *(
            "https://H1.example/kvsp/",
            "https://192.0.2.7:8443/a/b/c/",
            "https://[2001:db8::1]:8443/",
            "https://h/%41/",
        ),
    )
    valid = [
        {
            "uri": uri,
            "component_id": base64.urlsafe_b64encode(hashlib.sha256(uri.encode()).digest())
            .decode()
            .rstrip("="),
        }
        for uri in uris
    ]
    invalid = (
        *(
            "",
            "h1.example/",
            "http://h1.example/",
            "HTTPS://h1.example/",
            "https://",
            "https:///",
            "https://h1.example",
        ),
        *(
            "https://h1.example/kvsp",
            "https://h1.example/?q=1/",
            "https://h1.example/#f/",
            "https://u@h1.example/",
        ),
        *(
            "https://u:p@h1.example/",
            "https://h1.example:0/",
            "https://h1.example:65536/",
            "https://h1.example:/",
        ),
        *(
            "https://h1.example:8a/",
            "https://h1 .example/",
            "https://h1.example/a b/",
            "https://h1.example/%4/",
        ),
        *(
            "https://h1.example/a/../b/",
            "https://h1.example/./",
            "https://[2001:db8::g]/",
        ),
        *(
            "https://[::1/",
            "https://h1.example/\u00e9/",
            "https://caf\u00e9.example/",
            "https://h1.example/\n",
        ),
        *(" https://h1.example/", "moqt://h1.example/", "https://h1.example/" + "a/" * 2000),
    )
    return {"valid": valid, "invalid": list(invalid)}


def main() -> int:
    made = {
        "descriptors.json": {"valid": valid_descriptors(), "invalid": invalid_descriptors()},
        "block_keys.json": block_keys(),
        "containers.json": {"valid": valid_containers(), "invalid": invalid_containers()},
        "components.json": components(),
        "records.json": records(),
        "exchanges.json": exchanges(),
    }
    stale = []
    for name, content in made.items():
        text = json.dumps(content, indent=1, ensure_ascii=True) + "\n"
        if "--check" in sys.argv[1:]:
            stale += [name] * ((HERE / name).read_text(encoding="utf-8") != text)
        else:
            (HERE / name).write_text(text, encoding="utf-8")
    print("\n".join(f"{name} is not what generate.py makes" for name in stale) or "up to date")
    return len(stale)


if __name__ == "__main__":
    sys.exit(main())
