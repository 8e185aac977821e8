"""Checks of values that a program builds, and members whose inside only their reader knows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from kvsp_core import validation as v
from kvsp_core.bodies import decode, encode, parse
from kvsp_core.errors import LocalProtocolError, RemoteProtocolError
from kvsp_core.ext_messages import AttendRequest, HolderInfo, IndexInfo, InstanceInfo, LeaseInfo, LeaseListing
from kvsp_core.messages import ReshardPlan
from kvsp_core.records import Sampler

HEX = "ab" * 32


@pytest.mark.parametrize(
    ("check", "value", "said"),
    [
        (lambda x: v.check_integer(x, "m"), 1.0, "a number with a fraction"),
        (lambda x: v.check_integer(x, "m"), True, "true or false"),
        (lambda x: v.check_integer(x, "m", 1, 5), 6, "from 1 to 5, found one out of range"),
        (lambda x: v.check_optional_integer(x, "m"), "1", "a string"),
        (lambda x: v.check_share(x, "m"), 1.5, "a number from 0 to 1"),
        (lambda x: v.check_share(x, "m"), float("nan"), "a number from 0 to 1"),
        (lambda x: v.check_share(x, "m"), True, "a number from 0 to 1"),
        (lambda x: v.check_boolean(x, "m"), 1, "true or false"),
        (lambda x: v.check_text(x, "m"), 7, "expected a string"),
        (lambda x: v.check_text(x, "m"), "", "1 to 1024 characters, found one of 0"),
        (lambda x: v.check_text(x, "m", most=3), "abcd", "1 to 3 characters, found one of 4"),
        (lambda x: v.check_name(x, "m"), "Active", "lowercase letters"),
        (lambda x: v.check_name(x, "m"), "a" * 65, "1 to 64 characters"),
        (lambda x: v.check_name(x, "m"), "-a", "lowercase letters"),
        (lambda x: v.check_identifier(x, "m"), "a/b", "other characters"),
        (lambda x: v.check_identifier(x, "m"), "..", "other characters"),
        (lambda x: v.check_uuid(x, "m"), "x", "expected a UUID"),
        (lambda x: v.check_uuid(x, "m"), 7, "expected a UUID"),
        (
            lambda x: v.check_hex(x, "m"),
            HEX.upper(),
            "64 lowercase hex digits, found a string of another form",
        ),
        (lambda x: v.check_hex(x, "m", 32), HEX, "32 lowercase hex digits"),
        (lambda x: v.check_hex(x, "m"), b"ab" * 32, "64 lowercase hex digits"),
        (lambda x: v.check_digest(x, "m"), HEX, "'sha-256:'"),
        (lambda x: v.check_hexes(x, "m"), [HEX], "an array (a tuple here)"),
        (lambda x: v.check_hexes(x, "m"), (HEX, 7), "m[1]: expected 64"),
        (lambda x: v.check_hexes(x, "m"), (HEX, "\ud800" * 64), "m[1]: expected 64"),
        (lambda x: v.check_hexes(x, "m"), (HEX[:-1], HEX + "a"), "m[0]: expected 64"),
        (lambda x: v.check_array(x, "m", 2), (1,), "at least 2, found 1"),
        (lambda x: v.check_tokens(x, "m"), (1, 2**32), "m[1]: expected an integer from 0"),
        (lambda x: v.check_tokens(x, "m"), (1, -1), "m[1]"),
        (lambda x: v.check_tokens(x, "m"), (1, True), "m[1]"),
        (lambda x: v.check_tokens(x, "m"), (1, 2.0), "m[1]"),
        (lambda x: v.check_tokens(x, "m"), [1], "an array"),
        (lambda x: v.check_base_uri(x, "m"), "https://h/x", "ends in '/'"),
        (lambda x: v.check_base_uri(x, "m"), 7, "expected a base URI"),
        (lambda x: v.check_base_uris(x, "m"), ("https://h/", "https://h/"), "each base URI once"),
        (lambda x: v.check_holder(x, "m"), "moqt://", "expected moqt://host"),
        (lambda x: v.check_holder(x, "m"), 7, "expected a base URI"),
        (lambda x: v.check_octets(x, "m", 4), b"123", "a multiple of 4 octets"),
        (lambda x: v.check_octets(x, "m", 4), b"", "a multiple of 4 octets"),
        (lambda x: v.check_pair(x, "m"), (1, 2, 3), "an array of two integers"),
        (lambda x: v.check_pair(x, "m"), (1, -2), "m[1]"),
        (lambda x: v.check_token_range(x, "m"), (3, 3), "the start of a half-open range"),
        (lambda x: v.check_ranges(x, "m"), ((0, 2), (1, 3)), "m[1]: expected ranges in ascending order"),
        (lambda x: v.moqt_namespace(x), (b"a",) * 4, "5 fields"),
        (lambda x: v.moqt_namespace(x), (b"a",) * 4 + (b"",), "1 to 255 octets"),
        (lambda x: v.Parameters(x, "m"), [1], "m: expected an object, found an array"),
        (lambda x: v.Parameters(x, "m"), {"a": {"b": float("inf")}}, "m.a.b: holds a number"),
        (lambda x: v.Parameters(x, "m"), {"a": "\ud800"}, "m.a: holds"),
    ],
)
def test_what_is_refused_and_what_is_said(check: Callable[[Any], object], value: object, said: str) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        check(value)
    assert said in str(caught.value)
    assert isinstance(caught.value, v.InvalidValue)


@pytest.mark.parametrize(
    "check",
    [
        lambda: v.check_hexes((), "m"),
        lambda: v.check_hexes((HEX,) * 8192, "m"),
        lambda: v.check_tokens((), "m"),
        lambda: v.check_tokens((0, 2**32 - 1), "m"),
        lambda: v.check_base_uri("https://[2001:db8::1]:65535/%7E/a.b/", "m"),
        lambda: v.check_base_uri("https://h/" + "a/" * 1000, "m"),
        lambda: v.check_holder("moqt://relay.example:4443/x?y=1", "m"),
        lambda: v.check_optional_integer(None, "m"),
        lambda: v.check_share(1, "m"),
        lambda: v.check_ranges(((0, 2), (2, 3)), "m"),
    ],
)
def test_what_is_allowed(check: Callable[[], None]) -> None:
    check()


def test_what_is_wrong_in_many_is_found_by_its_place() -> None:
    keys = (HEX,) * 5000 + (HEX.upper(),) + (HEX,) * 100
    with pytest.raises(LocalProtocolError, match=r"^block_keys\[5000\]: "):
        v.check_hexes(keys, "block_keys")


# Parameters


def test_parameters_are_a_mapping_that_cannot_change() -> None:
    given = {"p": 0.9, "stop": [[1, 2], [3]], "nested": {"a": None}}
    parameters = v.Parameters(given)
    given["p"] = 0.1
    assert parameters == {"p": 0.9, "stop": [[1, 2], [3]], "nested": {"a": None}}
    assert parameters != {"p": 0.1}
    assert parameters != 7
    assert dict(parameters) == {"p": 0.9, "stop": ((1, 2), (3,)), "nested": {"a": None}}
    assert parameters["stop"] == ((1, 2), (3,))
    assert len(parameters) == 3
    assert "0.9" not in repr(parameters)
    with pytest.raises(TypeError):
        parameters["p"] = 1  # type: ignore[index]


def test_parameters_are_equal_whatever_the_order_of_their_names() -> None:
    one, other = v.Parameters({"a": 1, "b": 2}), v.Parameters({"b": 2, "a": 1})
    assert one == other
    assert hash(one) == hash(other)
    assert v.Parameters({"a": 1}) != v.Parameters({"a": True})
    assert copy.deepcopy(one) == one
    assert pickle.loads(pickle.dumps(one)) == one


def test_parameters_go_out_as_they_came() -> None:
    body = b'{"method":"m","params":{"z":[1,{"b":[]}],"a":"x"},"seed":1,"step":0,"deterministic":false}'
    assert encode(decode(Sampler, body)) == body


def test_deeply_nested_parameters_are_refused() -> None:
    deep = b'{"method":"m","params":{"z":%b},"seed":1,"step":0,"deterministic":false}'
    with pytest.raises(RemoteProtocolError, match="nests at most 32 levels"):
        decode(Sampler, deep % (b"[" * 40 + b"]" * 40))
    with pytest.raises(RemoteProtocolError, match="nests too deep"):
        decode(Sampler, deep % (b"[" * 100_000 + b"]" * 100_000))


# Messages that are built from plain values


def test_documents_that_are_read_in_two_steps_fail_as_plainly() -> None:
    for octets in (b"[" * 100_000, b"{", b"\xff", b'{"to":' + b"1" * 5000 + b"}"):
        with pytest.raises(RemoteProtocolError):
            parse(octets)
        with pytest.raises(RemoteProtocolError):
            decode(ReshardPlan, octets)


@pytest.mark.parametrize(
    "build",
    [
        lambda: IndexInfo(records=-1, size_bytes=0, holders=()),
        lambda: HolderInfo(holder="h", records=0),
        lambda: LeaseInfo(client="", blocks=0, size_bytes=0, ttl_ms=0),
        lambda: LeaseListing(leases=(), leased_share=2.0),
        lambda: InstanceInfo(instance="https://i/", state="x", wanted_state="X", epoch=0, sessions=0),
        lambda: AttendRequest(version=0, layer=-1, queries=b"1234"),
    ],
)
def test_what_operators_see_is_checked_too(build: Callable[[], object]) -> None:
    with pytest.raises(LocalProtocolError):
        build()
