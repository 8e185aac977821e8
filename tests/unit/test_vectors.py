"""Every value that the protocol publishes, and those that this project adds, are reproduced (TV-1)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvsp_core.block_keys import BlockKeyChain, block_keys
from kvsp_core.bodies import decode, encode
from kvsp_core.container import (
    BlockArrived,
    BlockEvent,
    BlockRefused,
    HeaderArrived,
    IncomingBlock,
    LayerArrived,
    OutgoingBlock,
)
from kvsp_core.errors import KVSPError, LocalProtocolError, RemoteProtocolError
from kvsp_core.identity import CompatibilityDescriptor, Scope, component_id, parse_base_uri
from kvsp_core.records import InstanceStatus, ReplicaRecord, SessionCheckpoint

VECTORS = Path(__file__).resolve().parents[1] / "vectors"


def load(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))


def named(cases: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in cases]


DESCRIPTORS, KEYS, CONTAINERS = map(load, ("descriptors", "block_keys", "containers"))
COMPONENTS, RECORDS = map(load, ("components", "records"))


@pytest.mark.requirement("TV-1")
def test_the_files_are_what_their_generator_makes() -> None:
    made = subprocess.run(
        [sys.executable, VECTORS / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (made.returncode, made.stdout) == (0, "up to date\n")


# Published by the protocol itself, word for word -------------------------------------------------------


@pytest.mark.requirement("TV-1", "CD-5", "SK-1", "SK-2")
def test_published_values() -> None:
    descriptor = CompatibilityDescriptor.from_members(KEYS["cases"][0]["descriptor"])
    assert descriptor.compat_id == "5ed5c2f238839655d7c4029e12b7f31caf9e7421f4edb4057feee6dab760ee0f"
    scope = Scope(bytes(range(32)))
    assert scope.scope_id == "6d1c6481cd428737da312c089db3832a"
    keys, tail = block_keys(scope, descriptor, [128000, 791, 6460, 374, 264, 1296, 315, 279])
    assert [key.hex() for key in keys] == [
        "9ca9d8b60f37f84726a27deb4cdc0d075714607a131632c2366e30b99fb1163b",
        "653275884ca44f8945fd4c902611c467394b73656e64c78d8522648cb75aefc1",
    ]
    assert tail == ()


@pytest.mark.requirement("TV-1", "KC-1")
def test_published_container_header() -> None:
    section = bytes(8192)
    block = IncomingBlock()
    published = bytes.fromhex(
        "4b 56 42 31 01 00 00 01 00 00 00 00 00 00 00 02 00 00 00 04"
        "00 00 00 00 00 00 20 00 00 00 00 00 00 00 20 00"
        "00 00 00 00 00 00 20 00 00 00 00 00 00 00 20 00"
    )
    (arrived,) = block.receive_data(published)
    assert isinstance(arrived, HeaderArrived)
    header = arrived.header
    assert (header.codec, header.layers, header.token_count) == (1, range(2), 4)
    assert header.sections == ((8192, 8192), (8192, 8192))
    assert header.encode() == published
    assert bytes(OutgoingBlock(header, [(section, section)] * 2).pieces[0]) == published


# Descriptors --------------------------------------------------------------------------------------


@pytest.mark.requirement("TV-1", "CD-1", "CD-2", "CD-3", "CD-4", "CD-5", "CD-8")
@pytest.mark.parametrize("case", named(DESCRIPTORS["valid"]))
def test_descriptor(case: dict[str, Any]) -> None:
    descriptor = CompatibilityDescriptor.from_json(case["document"].encode())
    assert descriptor.canonical_json.decode() == case["canonical"]
    assert descriptor.compat_id == case["compat_id"]


@pytest.mark.requirement("CD-1", "CD-2", "CD-3", "CD-4")
@pytest.mark.parametrize("case", named(DESCRIPTORS["invalid"]))
def test_descriptor_refused(case: dict[str, Any]) -> None:
    octets = (
        bytes.fromhex(case["document_hex"]) if "document_hex" in case else case["document"].encode("utf-8")
    )
    with pytest.raises(RemoteProtocolError) as refused:
        CompatibilityDescriptor.from_json(octets)
    assert refused.value.member == case["member"]


def test_descriptors_differ_from_each_other() -> None:
    assert len({case["compat_id"] for case in DESCRIPTORS["valid"]}) == len(DESCRIPTORS["valid"])


# Keys ---------------------------------------------------------------------------------------------


@pytest.mark.requirement("TV-1", "SK-1", "SK-2", "SK-3")
@pytest.mark.parametrize("case", named(KEYS["cases"]))
def test_block_keys(case: dict[str, Any]) -> None:
    scope = Scope(bytes.fromhex(case["scope_key"]))
    assert scope.scope_id == case["scope_id"]
    descriptor = CompatibilityDescriptor.from_members(case["descriptor"])
    parent = None if case["parent"] is None else bytes.fromhex(case["parent"])
    keys, tail = block_keys(scope, descriptor, case["tokens"], parent=parent)
    assert ([key.hex() for key in keys], list(tail)) == (case["keys"], case["tail"])


@pytest.mark.requirement("SK-3")
@pytest.mark.parametrize("value", KEYS["not_tokens"], ids=repr)
def test_not_a_token(value: Any) -> None:
    chain = BlockKeyChain(
        Scope(bytes(32)), CompatibilityDescriptor.from_members(KEYS["cases"][0]["descriptor"])
    )
    with pytest.raises(LocalProtocolError, match=r"^tokens\[1\]: "):
        chain.feed([7, value])


@pytest.mark.requirement("SK-1")
@pytest.mark.parametrize("key", KEYS["short_scope_keys"])
def test_short_scope_key(key: str) -> None:
    with pytest.raises(LocalProtocolError, match="at least 32"):
        Scope(bytes.fromhex(key))


# Containers ---------------------------------------------------------------------------------------


def block_for(context: dict[str, Any]) -> IncomingBlock:
    members, layers = context.get("descriptor"), context.get("layers")
    return IncomingBlock(
        descriptor=None if members is None else CompatibilityDescriptor.from_members(members),
        layers=None if layers is None else range(layers[0], layers[1] + 1),
        layer_digests=context.get("layer_digests"),
        size_bytes=context.get("declared_bytes"),
    )


@pytest.mark.requirement("TV-1", "KC-1", "KC-3", "KC-5", "KC-6")
@pytest.mark.parametrize("case", named(CONTAINERS["valid"]))
def test_container(case: dict[str, Any]) -> None:
    block = block_for(case["context"])
    octets = bytes.fromhex(case["container"])
    first, *layers = block.receive_data(octets)
    assert isinstance(first, HeaderArrived)
    header = first.header
    assert (header.codec, header.token_count) == (case["codec"], case["token_count"])
    assert header.first_layer == case["first_layer"]
    assert [list(sizes) for sizes in header.sections] == case["sections"]
    assert layers == [
        LayerArrived(case["first_layer"] + i, digest) for i, digest in enumerate(case["layer_digests"])
    ]
    assert block.receive_eof() == (BlockArrived(header, case["digest"]),)
    assert b"".join(OutgoingBlock.from_container(octets).pieces) == octets


@pytest.mark.requirement("KC-2", "KC-4", "KC-5")
@pytest.mark.parametrize("case", named(CONTAINERS["invalid"]))
def test_container_refused_at_the_earliest_octet(case: dict[str, Any]) -> None:
    block = block_for(case["context"])
    octets = bytes.fromhex(case["container"])
    events: list[BlockEvent] = []
    refused_after = None
    for count in range(1, len(octets) + 1):
        events += block.receive_data(octets[count - 1 : count])
        if block.ended:
            refused_after = count
            break
    else:
        events += block.receive_eof()
    assert refused_after == case["refused_after"]
    last = events[-1]
    assert isinstance(last, BlockRefused)
    assert (last.problem.status, last.problem.type.suffix or "about:blank") == (
        case["status"],
        case["problem"],
    )
    assert last.problem.detail


# Records ------------------------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    "Replica Record": ReplicaRecord,
    "Instance Status Record": InstanceStatus,
    "Session Checkpoint": SessionCheckpoint,
}


def record_cases(cases: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(case, id=f"{case['record']}-{case.get('member', 'valid')}") for case in cases]


@pytest.mark.requirement("TV-1", "RR-1", "RR-2", "RR-5", "RR-6")
@pytest.mark.parametrize("case", record_cases(RECORDS["valid"]))
def test_record(case: dict[str, Any]) -> None:
    read = decode(KINDS[case["record"]], json.dumps(case["document"]).encode())
    known = {name: value for name, value in case["document"].items() if name != "later"}
    assert json.loads(encode(read)) == known


@pytest.mark.requirement("RR-2", "RR-5", "RR-6")
@pytest.mark.parametrize("case", record_cases(RECORDS["invalid"]))
def test_record_refused(case: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        decode(KINDS[case["record"]], json.dumps(case["document"]).encode())
    assert refused.value.member == case["member"]


# Components ---------------------------------------------------------------------------------------


@pytest.mark.requirement("HT-7")
@pytest.mark.parametrize("case", COMPONENTS["valid"], ids=lambda case: case["uri"])
def test_component_id(case: dict[str, str]) -> None:
    assert parse_base_uri(case["uri"]).uri == case["uri"]
    assert component_id(case["uri"]) == case["component_id"]


@pytest.mark.parametrize("uri", COMPONENTS["invalid"], ids=lambda uri: uri[:40] or "empty")
def test_not_a_base_uri(uri: str) -> None:
    with pytest.raises(KVSPError):
        parse_base_uri(uri)
