"""Heads to and from header fields: what is written, what is read, and what is left alone."""

from __future__ import annotations

import hashlib

import pytest

from kvsp_core.errors import RemoteProtocolError
from kvsp_core.heads import (
    Fields,
    Request,
    Response,
    media_type,
    request_fields,
    request_from_fields,
    response_fields,
    response_from_fields,
    traceparent_of,
)

EMPTY = hashlib.sha256(b"").hexdigest()
EMPTY_FIELD = b"sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:"


def read(*fields: tuple[bytes, bytes], has_body: bool = True) -> Request:
    return request_from_fields("PUT", "state", "", fields, has_body=has_body)


def answered(*fields: tuple[bytes, bytes]) -> Response:
    return response_from_fields(200, fields, has_body=True)


@pytest.mark.requirement("HT-9")
def test_a_request_uses_standard_fields_only() -> None:
    request = Request(
        method="PUT",
        path="blocks/a/b/c",
        content_type="application/kvsp-block",
        content_length=40,
        if_none_match="*",
        repr_digest=EMPTY,
    )
    assert request_fields(request) == [
        (b"content-type", b"application/kvsp-block"),
        (b"content-length", b"40"),
        (b"repr-digest", EMPTY_FIELD),
        (b"if-none-match", b"*"),
    ]
    assert request_fields(Request(method="GET", path="state")) == []


@pytest.mark.requirement("HT-5", "HT-9")
def test_a_response_is_not_stored_unless_it_is_a_block() -> None:
    assert response_fields(Response(status=404)) == [
        (b"cache-control", b"no-store"),
        (b"content-length", b"0"),
    ]
    block = Response(
        status=200,
        content_type="application/kvsp-block",
        content_length=7,
        max_age_s=60,
        repr_digest=EMPTY,
    )
    assert response_fields(block) == [
        (b"cache-control", b"private, immutable, max-age=60"),
        (b"content-type", b"application/kvsp-block"),
        (b"content-length", b"7"),
        (b"repr-digest", EMPTY_FIELD),
    ]


@pytest.mark.requirement("HT-8")
def test_further_fields_of_a_response() -> None:
    response = Response(
        status=405, content_length=None, location="leases/x", allow=("GET", "PUT"), retry_after_s=3
    )
    assert response_fields(response) == [
        (b"cache-control", b"no-store"),
        (b"location", b"leases/x"),
        (b"allow", b"GET, PUT"),
        (b"retry-after", b"3"),
    ]


def test_what_was_written_is_read() -> None:
    request = Request(
        method="PUT",
        path="state",
        content_type="application/kvsp+json",
        content_encoding="gzip",
        content_length=12,
        if_none_match='"x"',
        content_digest=EMPTY,
        repr_digest="ab" * 32,
    )
    assert read(*request_fields(request)) == request
    response = Response(
        status=200,
        content_type="x/y",
        content_encoding="br",
        content_length=3,
        max_age_s=9,
        location="../x",
        allow=("GET",),
        retry_after_s=0,
        content_digest=EMPTY,
        repr_digest="cd" * 32,
    )
    assert answered(*response_fields(response)) == response


def test_fields_of_others_are_left_alone_and_names_are_read_in_any_case() -> None:
    request = read((b"Content-Type", b" a/b "), (b"kvsp-thing", b"\xff"), (b"accept", b"*/*"))
    assert request == Request(method="PUT", path="state", content_type="a/b", content_length=None)


def test_where_no_octets_follow_there_is_no_length_to_wait_for() -> None:
    assert read((b"content-length", b"40"), has_body=False).content_length == 0
    assert response_from_fields(204, [], has_body=False).content_length == 0


@pytest.mark.parametrize("value", [b"x", b"-1", b"1.0", b"", b"1, 2", b"9" * 20, "\u0661".encode()])
def test_a_length_that_is_no_number_is_refused(value: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="content-length: expected one number"):
        read((b"content-length", value))
    with pytest.raises(RemoteProtocolError):
        answered((b"content-length", value))


def test_a_length_said_twice_alike_is_one() -> None:
    assert read((b"content-length", b"7"), (b"content-length", b"7")).content_length == 7


@pytest.mark.parametrize(
    ("lines", "digest"),
    [
        ([EMPTY_FIELD], EMPTY),
        ([EMPTY_FIELD.replace(b"U=:", b"U:")], EMPTY),
        ([b"sha-512=:AAAA:, " + EMPTY_FIELD], EMPTY),
        ([b"sha-512=:AAAA:", EMPTY_FIELD + b";q=1"], EMPTY),
        ([b"sha-512=:AAAA:"], None),
    ],
)
def test_digests_are_read_as_a_dictionary_of_algorithms(lines: list[bytes], digest: str | None) -> None:
    fields: Fields = [(b"repr-digest", line) for line in lines]
    assert read(*fields).repr_digest == digest
    assert answered(*fields).repr_digest == digest


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"sha-256",
        b"sha-256=abc",
        b"sha-256=:AAAA:",
        b"sha-256=:A:",
        b"SHA-256=:AAAA:",
        EMPTY_FIELD + b",",
    ],
)
def test_a_malformed_digest_is_an_error_of_a_request_and_none_in_an_answer(value: bytes) -> None:
    for name in ("repr-digest", "content-digest"):
        with pytest.raises(RemoteProtocolError) as caught:
            read((name.encode(), value))
        assert caught.value.member == name
    assert answered((b"repr-digest", value)).repr_digest is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"private, immutable, max-age=60", 60),
        (b"max-age=0", 0),
        (b"Max-Age=5, private", 5),
        (b"s-max-age=60", None),
        (b"no-store, max-age=60", None),
        (b"max-age=x", None),
        (b"", None),
    ],
)
def test_how_long_an_answer_may_be_kept(value: bytes, seconds: int | None) -> None:
    assert answered((b"cache-control", value)).max_age_s == seconds


def test_retry_after_in_seconds_counts_and_a_date_does_not() -> None:
    assert answered((b"retry-after", b"120")).retry_after_s == 120
    assert answered((b"retry-after", b"Wed, 21 Oct 2015 07:28:00 GMT")).retry_after_s is None


def test_a_media_type_is_compared_without_parameters_and_case() -> None:
    assert media_type("Application/KVSP+json; charset=utf-8") == "application/kvsp+json"
    assert media_type(None) == ""


@pytest.mark.requirement("HT-6")
@pytest.mark.parametrize(
    ("status", "success"), [(200, True), (299, True), (199, False), (300, False), (599, False)]
)
def test_success_is_a_class(status: int, success: bool) -> None:
    assert Response(status=status).is_success is success


@pytest.mark.requirement("SE-5")
def test_paths_and_digests_do_not_show() -> None:
    shown = repr(Request(method="GET", path="blocks/abc", repr_digest=EMPTY))
    assert "abc" not in shown
    assert EMPTY not in shown
    assert "abc" not in repr(Response(status=201, location="leases/abc"))


WELL_FORMED = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ([WELL_FORMED], WELL_FORMED.decode()),
        ([], None),
        ([WELL_FORMED.upper()], None),
        ([b"00-short"], None),
        ([b"x" * 5000], None),
        ([WELL_FORMED + b"-more"], None),
        ([WELL_FORMED + b"\n"], None),
        ([b"ff" + WELL_FORMED[2:]], None),
        ([b"00-" + b"0" * 32 + b"-" + b"b" * 16 + b"-01"], None),
        ([b"00-" + b"a" * 32 + b"-" + b"0" * 16 + b"-01"], None),
        ([WELL_FORMED, WELL_FORMED], None),
    ],
)
def test_what_a_request_belongs_to_is_taken_where_it_is_well_formed(
    values: list[bytes], read: str | None
) -> None:
    assert traceparent_of([(b"traceparent", value) for value in values]) == read
