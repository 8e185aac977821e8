"""Names: what a cache was made with, who may share it, and what a component is called."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import pickle
import re
import traceback
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from kvsp_core.errors import LimitExceeded, LocalProtocolError, RemoteProtocolError
from kvsp_core.identity import (
    BaseURI,
    CompatibilityDescriptor,
    Scope,
    component_id,
    digest_of_files,
    parse_base_uri,
)
from kvsp_core.limits import MAX_DESCRIPTOR_BYTES
from kvsp_core.registries import (
    ELEMENT_TYPES,
    POSITIONAL_ENCODINGS,
    ElementType,
    PositionalEncoding,
    Registries,
)

DIGEST = "sha-256:" + "ab" * 32
MEMBERS: dict[str, Any] = {
    "model": "example-model",
    "model_digest": DIGEST,
    "tokenizer_digest": DIGEST,
    "layers": 2,
    "kv_heads": 2,
    "head_dim": 4,
    "kv_dtype": "bf16",
    "positional": "rope",
    "block_tokens": 4,
    "layout": "kvsp-layout-1",
}


def descriptor(**members: Any) -> CompatibilityDescriptor:
    return CompatibilityDescriptor(**(MEMBERS | members))


# Compatibility Descriptors ------------------------------------------------------------------------


@pytest.mark.requirement("CD-1")
def test_members_are_read_as_they_are_written() -> None:
    read = CompatibilityDescriptor.from_members(MEMBERS)
    assert {name: getattr(read, name) for name in MEMBERS} == MEMBERS
    assert read.members() == MEMBERS
    assert read == descriptor()


@pytest.mark.requirement("CD-1")
@pytest.mark.parametrize("member", MEMBERS)
def test_every_member_is_needed(member: str) -> None:
    rest = {name: value for name, value in MEMBERS.items() if name != member}
    with pytest.raises(RemoteProtocolError, match=rf"^{member}: is missing") as refused:
        CompatibilityDescriptor.from_members(rest)
    assert refused.value.member == member


@pytest.mark.requirement("CD-1")
@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize(
    "value", [None, True, 1.0, [], {}, object(), 1j, b"octets"], ids=lambda v: type(v).__name__
)
def test_mistyped_members_are_named_and_their_values_are_not(member: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        CompatibilityDescriptor.from_members(MEMBERS | {member: value})
    assert refused.value.member == member
    with pytest.raises(LocalProtocolError, match=rf"^{member}: "):
        descriptor(**{member: value})


@pytest.mark.requirement("CD-1")
def test_names_are_case_sensitive() -> None:
    rest = {name: value for name, value in MEMBERS.items() if name != "layers"}
    with pytest.raises(RemoteProtocolError, match=r"^layers: is missing"):
        CompatibilityDescriptor.from_members(rest | {"Layers": 2})


@pytest.mark.requirement("CD-2")
def test_adapters_are_absent_or_in_order() -> None:
    one, other = "sha-256:" + "1" * 64, "sha-256:" + "2" * 64
    assert "adapters" not in descriptor().members()
    applied = descriptor(adapters=[one, other])
    assert applied.adapters == (one, other)
    assert applied.members()["adapters"] == [one, other]
    ids = {d.compat_id for d in (descriptor(), applied, descriptor(adapters=(other, one)))}
    assert len(ids) == 3
    with pytest.raises(RemoteProtocolError, match=r"^adapters: is empty; leave it out"):
        CompatibilityDescriptor.from_members(MEMBERS | {"adapters": []})


@pytest.mark.requirement("CD-4", "CD-5")
def test_parameters_are_part_of_the_identity_as_given() -> None:
    spellings = ["rope", "rope;theta=10000", "rope;theta=500000", "rope;theta=500000,scaling=yarn"]
    made = [descriptor(positional=spelling) for spelling in spellings]
    assert [d.positional for d in made] == spellings
    assert len({d.compat_id for d in made}) == 4


@pytest.mark.requirement("CD-8", "CD-6")
def test_the_model_string_is_compared_octet_by_octet() -> None:
    composed, decomposed = descriptor(model="caf\u00e9"), descriptor(model="cafe\u0301")
    assert composed != decomposed
    assert descriptor(model="Example-Model") != descriptor()
    assert descriptor(model="example-model ") != descriptor()


@pytest.mark.requirement("CD-6")
def test_two_descriptors_are_equal_when_their_ids_are() -> None:
    mine = descriptor(other_members={"b": 1, "a": {"y": 2, "x": [1.0]}})
    theirs = CompatibilityDescriptor.from_members({"a": {"x": [1], "y": 2}, "b": 1, **MEMBERS})
    assert mine == theirs
    assert hash(mine) == hash(theirs)
    assert mine != descriptor()
    assert mine != "another thing"


def test_members_of_a_later_version_are_kept_and_cannot_change() -> None:
    later = {"zz": {"deep": [1, {"x": None}]}}
    read = CompatibilityDescriptor.from_members(MEMBERS | later)
    later["zz"]["deep"].append(2)  # type: ignore[attr-defined]
    assert read.members()["zz"] == {"deep": [1, {"x": None}]}
    with pytest.raises(TypeError):
        read.other_members["zz"]["deep"] = 1  # type: ignore[index]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        read.layers = 3  # type: ignore[misc]


def test_known_members_are_not_given_twice() -> None:
    for member in ("layers", "adapters"):
        with pytest.raises(LocalProtocolError, match="other_members"):
            descriptor(other_members={member: 9})


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))])
def test_copies_are_equal(copied: Any) -> None:
    made = descriptor(other_members={"zz": [1, {"x": 2}]}, adapters=(DIGEST,))
    assert copied(made) == made
    assert copied(made).members() == made.members()


@pytest.mark.requirement("CD-1", "RG-1")
def test_more_element_types_and_encodings_can_be_registered() -> None:
    with pytest.raises(RemoteProtocolError, match=r"^kv_dtype: .*bf16, fp16"):
        CompatibilityDescriptor.from_members(MEMBERS | {"kv_dtype": "int4"})
    mine = Registries(
        element_types=ELEMENT_TYPES.with_entry(
            "int8", ElementType(name="int8", size_bytes=1, dtype="int8", description="")
        ),
        positional_encodings=POSITIONAL_ENCODINGS.with_entry(
            "alibi", PositionalEncoding(name="alibi", parameter_syntax="slopes=[0-9]+", description="")
        ),
    )
    members = MEMBERS | {"kv_dtype": "int8", "positional": "alibi;slopes=8"}
    read = CompatibilityDescriptor.from_members(members, registries=mine)
    assert read.section_bytes(4) == 4 * 2 * 4
    assert pickle.loads(pickle.dumps(read)) == read
    with pytest.raises(RemoteProtocolError, match=r"^positional: .*slopes"):
        CompatibilityDescriptor.from_members(members | {"positional": "alibi;slopes=x"}, registries=mine)


@pytest.mark.requirement("KC-4")
def test_section_size() -> None:
    assert descriptor().section_bytes(4) == 4 * 2 * 4 * 2
    assert descriptor(kv_dtype="fp32").section_bytes(3) == 3 * 2 * 4 * 4


def test_a_descriptor_that_is_too_large_is_not_read() -> None:
    text = b" " * MAX_DESCRIPTOR_BYTES + b"{}"
    with pytest.raises(LimitExceeded):
        CompatibilityDescriptor.from_json(text)
    with pytest.raises(LimitExceeded):
        descriptor(model="m" * MAX_DESCRIPTOR_BYTES)


@pytest.mark.parametrize(
    "document",
    [
        b'{"a":' * 2000 + b"1" + b"}" * 2000,
        b"[" * MAX_DESCRIPTOR_BYTES,
        b'"' + b'\\"' * (MAX_DESCRIPTOR_BYTES // 2 - 1),
        b'{"a":' + b"9" * 15_000 + b"}",
        b"{" + b",".join(b'"%d":0' % i for i in range(1500)) + b"}",
    ],
    ids=["deep objects", "deep arrays", "an open string of quotes", "a long number", "many members"],
)
def test_hostile_documents_are_refused_quickly_and_plainly(document: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        CompatibilityDescriptor.from_json(document)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a name with spaces", '"a name with spaces"'),
        ("two\nlines \x1b[31m", '"two\\nlines \\u001b[31m"'),
        ("x" * 5000, '"' + "x" * 40 + '"'),
        ("\u202e", '"\\u202e"'),
    ],
)
def test_a_name_that_a_peer_chose_is_shown_in_one_short_line(name: str, shown: str) -> None:
    twice = f"{{{json.dumps(name)}:1,{json.dumps(name)}:1}}"
    with pytest.raises(RemoteProtocolError) as refused:
        CompatibilityDescriptor.from_json(twice.encode())
    assert refused.value.member == shown
    with pytest.raises(RemoteProtocolError) as refused:
        CompatibilityDescriptor.from_members(MEMBERS | {name: [0, {name: float("nan")}]})
    assert refused.value.member == f"{shown}[1].{shown}"


def test_members_nested_too_deep_are_refused_whatever_their_form() -> None:
    deep: Any = 1
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(RemoteProtocolError, match="nests at most 32 levels"):
        CompatibilityDescriptor.from_members(MEMBERS | {"zz": deep})
    with pytest.raises(LocalProtocolError, match="nests at most 32 levels"):
        descriptor(other_members={"zz": deep})


def test_documents_come_in_any_kind_of_octets() -> None:
    octets = descriptor().canonical_json
    for form in (octets, bytearray(octets), memoryview(octets)):
        assert CompatibilityDescriptor.from_json(form) == descriptor()


# Digests of files ---------------------------------------------------------------------------------


@pytest.mark.requirement("CD-3")
def test_files_are_taken_in_the_byte_order_of_their_names() -> None:
    files = {"\u00e9.bin": [b"e"], "m-10.bin": [b"c"], "m-2.bin": [b"d"], "Z.bin": [b"a"], "a.bin": [b"b"]}
    assert digest_of_files(files) == "sha-256:" + hashlib.sha256(b"abcde").hexdigest()


@pytest.mark.requirement("CD-3")
def test_files_are_read_piece_by_piece_and_one_after_the_other() -> None:
    log: list[str] = []

    def pieces(name: str) -> Iterator[bytes]:
        for _ in range(3):
            log.append(name)
            yield name.encode()

    assert digest_of_files({"b": pieces("b"), "a": pieces("a")}) == digest_of_files({"x": [b"aaabbb"]})
    assert log == ["a", "a", "a", "b", "b", "b"]


@pytest.mark.requirement("CD-3")
def test_no_file_has_no_digest() -> None:
    with pytest.raises(LocalProtocolError, match="at least one file"):
        digest_of_files({})


# Scopes -------------------------------------------------------------------------------------------

KEY = bytes.fromhex("c0ffee" * 11)
SPELLINGS = (KEY.hex(), repr(KEY)[2:-1], KEY.decode("latin-1"), str(list(KEY))[1:-1])


def shows_the_key(text: str) -> bool:
    return (
        any(spelling in text for spelling in SPELLINGS)
        or re.search("c0.{0,4}ff.{0,4}ee", text, re.I) is not None
    )


@pytest.mark.requirement("SK-1")
@pytest.mark.parametrize("length", [0, 1, 31])
def test_a_short_key_is_refused(length: int) -> None:
    with pytest.raises(LocalProtocolError, match="at least 32 random octets"):
        Scope(bytes(length))


@pytest.mark.requirement("SK-1")
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_key_may_be_any_kind_of_octets(kind: Any) -> None:
    scope = Scope(kind(bytes(range(32))))
    assert scope.scope_id == "6d1c6481cd428737da312c089db3832a"
    with pytest.raises(LocalProtocolError, match="octets, found str"):
        Scope("0" * 64)  # type: ignore[arg-type]


@pytest.mark.requirement("SK-5")
def test_nothing_that_prints_a_scope_prints_its_key() -> None:
    scope = Scope(KEY)
    shown = [repr(scope), str(scope), f"{scope!s:>60}", f"{scope}", repr([scope]), str(vars_of(scope))]
    shown += [repr(getattr(scope, name)) for name in dir(scope) if not name.startswith("__")]
    assert not any(map(shows_the_key, shown))
    assert scope.scope_id in repr(scope)


def vars_of(scope: Scope) -> dict[str, object]:
    return {name: getattr(scope, name) for name in scope.__slots__ if hasattr(scope, name)}


@pytest.mark.requirement("SK-5")
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_scope_cannot_be_pickled(protocol: int) -> None:
    written = io.BytesIO()
    with pytest.raises(LocalProtocolError, match="not pickled"):
        pickle.Pickler(written, protocol).dump([Scope(KEY)])
    assert KEY not in written.getvalue()


@pytest.mark.requirement("SK-5")
def test_a_traceback_with_local_variables_does_not_show_a_refused_key() -> None:
    short = KEY[:31]
    holder = [short]
    del short
    with pytest.raises(LocalProtocolError) as refused:
        Scope(holder[0])
    shown = traceback.TracebackException.from_exception(refused.value, capture_locals=True)
    inner = shown.stack[-1]
    assert inner.filename.endswith("identity.py")
    assert not shows_the_key("".join(str(value) for value in (inner.locals or {}).values()))
    assert not shows_the_key(str(refused.value))


@pytest.mark.requirement("SK-5", "SK-4")
def test_scopes_are_equal_when_their_keys_are() -> None:
    scope = Scope(KEY)
    assert scope == Scope(bytearray(KEY))
    assert hash(scope) == hash(Scope(KEY))
    assert scope != Scope(KEY[:-1] + b"\0")
    assert scope != Scope(KEY + b"\0")
    assert scope != scope.scope_id
    assert copy.copy(scope) is scope
    assert copy.deepcopy(scope) is scope


@pytest.mark.requirement("SK-5")
def test_scopes_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert Scope(KEY) == Scope(KEY)
    assert len(compared) == 1
    assert len(compared[0][0]) == 32


def test_a_scope_cannot_be_changed() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Scope(KEY).scope_id = "0" * 32  # type: ignore[misc]


# Base URIs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "host", "port", "path"),
    [
        ("https://h1.example/kvsp/", "h1.example", 443, "/kvsp/"),
        ("https://h1.example:8443/", "h1.example", 8443, "/"),
        ("https://192.0.2.7:65535/a/b%2Fc/", "192.0.2.7", 65535, "/a/b%2Fc/"),
        ("https://[2001:db8::1]:1/", "2001:db8::1", 1, "/"),
    ],
)
def test_parts_of_a_base_uri(uri: str, host: str, port: int, path: str) -> None:
    parsed = parse_base_uri(uri)
    assert parsed == BaseURI(uri, host, port, path)
    assert str(parsed) == uri


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("http://h1.example/", "starts with 'https://'"),
        ("https://h1.example/kvsp", "ends in '/'"),
        ("https://h1.example/?x=1/", "no query"),
        ("https://h1.example/#x/", "fragment"),
        ("https://user@h1.example/", "user information"),
        ("https://h1.example:70000/", "port"),
        ("https://h1.example/../", r"'\.\.'"),
        ("https://[::zz]/", "characters a URI may have"),
        ("https://[1::2::3]/", "not an IPv6 address"),
        ("https://h1.example/\u00fc/", "characters a URI may have"),
        ("https://h1.example/" + "x" * 3000 + "/", "at most 2048 characters"),
        (7, "found an integer"),
        (None, "found null"),
    ],
)
def test_what_is_no_base_uri_is_refused_with_the_reason(uri: object, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason) as refused:
        parse_base_uri(uri, member="residency[0].holder")
    assert refused.value.member == "residency[0].holder"


@pytest.mark.requirement("HT-7")
def test_component_ids_are_43_path_safe_characters_of_the_exact_string() -> None:
    one, other = component_id("https://h1.example/"), component_id("https://h1.example:443/")
    assert one != other
    assert re.fullmatch("[A-Za-z0-9_-]{43}", one)
