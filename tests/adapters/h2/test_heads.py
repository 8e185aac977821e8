"""Heads that come or go again are not decoded or encoded again, and mean the same as if they were."""

from __future__ import annotations

import pytest
from hpack import Decoder, HPACKError
from hypothesis import example, given
from hypothesis import strategies as st

from kvsp_core.heads import Response
from kvsp_h2 import ServerConnection
from kvsp_h2.frames import Fault
from kvsp_h2.heads import HeadDecoder, HeadEncoder
from tests.adapters.h2.pair import Raw, block, headers, ok, request_block, settings

TRACES = (b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"00-" + b"c" * 32 + b"-" + b"d" * 16 + b"-00")

# Representations of RFC 7541, section 6, few enough that they meet again: of both tables, with and without
# indexing, never indexed, new sizes of the table that evict or do not, and octets that are no representation.
pieces = st.sampled_from(
    [
        b"\x82",
        b"\x84",
        b"\xbe",  # the newest entry of the dynamic table
        b"\xbf",
        b"\x40\x01a\x01b",
        b"\x40\x01a\x01c",
        b"\x7e\x01d",  # the name of the newest entry, indexed again
        b"\x00\x01a\x01b",
        b"\x10\x01a\x01b",
        b"\x10\x0btraceparent\x37" + TRACES[0],
        b"\x10\x0btraceparent\x37" + TRACES[1],
        b"\x10\x0btraceparent\x37" + bytes(55),
        b"\x10\x01a\x45\x10\x0btraceparent\x37" + TRACES[0],  # in a value
        b"\x10\x0btraceparent\x49junk\x10\x0btraceparent\x37" + TRACES[0],  # in a value of its own
        b"\x0f\x2f\x01e",  # the name of the newest entry, not indexed
        b"\x40\x01k\x7f\xe1\x1f" + bytes(4192),  # an entry larger than the table, which it clears
    ]
)
sizes = st.sampled_from(
    [b"", b"", b"", b"", b"", b"", b"\x20", b"\x3f\x01", b"\x3f\x21", b"\x3f\xe1\x1f", b"\x3f\xe2\x1f"]
)
blocks = st.builds(
    lambda size, found: size + b"".join(found), sizes, st.lists(pieces, min_size=1, max_size=3)
)


def meant(decoder: HeadDecoder, octets: bytes) -> list[tuple[bytes, bytes]]:
    """Return the whole header list of a block."""
    head, trace = decoder.decode(octets)
    return head.headers if trace is None else [*head.headers, (b"traceparent", trace)]


def begun() -> HeadEncoder:
    """Return an encoder that has said already that it keeps no table."""
    encoder = HeadEncoder()
    assert encoder.encode([])[:1] == b"\x20"
    return encoder


few = st.lists(blocks, min_size=2, max_size=5)
SHAM = b"\x10\x01a\x45\x10\x0btraceparent\x37" + TRACES[0]


@example([b"\x10\x0btraceparent\x37" + TRACES[0] + SHAM] * 2)  # one that is, and one that only looks so
@given(few.flatmap(lambda found: st.lists(st.sampled_from(found), min_size=2, max_size=40)))
def test_blocks_mean_what_hpack_says(sent: list[bytes]) -> None:
    reference = Decoder()
    tested = HeadDecoder(Decoder())
    for octets in [b"\x40\x01y\x01y\x40\x01z\x01z", *sent]:
        try:
            expected = reference.decode(octets, raw=True)
        except HPACKError:
            with pytest.raises(Fault):
                tested.decode(octets)
            return
        assert meant(tested, octets) == expected


def test_a_block_that_comes_again_is_not_decoded_again() -> None:
    decoder = HeadDecoder(Decoder())
    octets = block((":method", "GET"), (":path", "/kvsp/x"))
    assert decoder.decode(octets)[0] is decoder.decode(octets)[0]


def test_blocks_that_differ_in_the_traceparent_that_ends_them_are_decoded_once() -> None:
    decoder, encoder = HeadDecoder(Decoder()), begun()
    headers = [(b":method", b"GET"), (b":path", b"/kvsp/x"), (b"a", b"b")]
    first, second = (decoder.decode(encoder.encode(headers, trace.decode())) for trace in TRACES)
    assert (first[1], second[1]) == TRACES
    assert first[0] is second[0]
    assert first[0].headers == headers
    assert decoder.decode(encoder.encode(headers)) != second
    reference = Decoder().decode(encoder.encode(headers, TRACES[0].decode()), raw=True)
    assert reference == [*headers, (b"traceparent", TRACES[0])]


@pytest.mark.parametrize(
    "twice", [(b"traceparent", TRACES[1]), (b"traceparent", b"no such thing"), (b"other", b"x")]
)
def test_a_head_is_told_apart_from_its_traceparent_where_that_is_the_only_one(
    twice: tuple[bytes, bytes],
) -> None:
    decoder, encoder = HeadDecoder(Decoder()), begun()
    for _ in range(2):
        head, trace = decoder.decode(encoder.encode([(b"a", b"b"), twice], TRACES[0].decode()))
        assert (trace is None) == (twice[0] == b"traceparent")
        assert len(head.headers) == (3 if trace is None else 2)


def test_a_traceparent_that_holds_what_looks_like_another_is_the_one_it_is() -> None:
    looks_like = b"\x10\x0btraceparent\x37" + TRACES[0]
    octets = b"\x82\x10\x0btraceparent\x49junk" + looks_like
    decoder = HeadDecoder(Decoder())
    for _ in range(2):
        assert meant(decoder, octets) == [(b":method", b"GET"), (b"traceparent", b"junk" + looks_like)]


def test_heads_that_are_kept_apart_from_their_traceparents_are_bounded() -> None:
    decoder, encoder = HeadDecoder(Decoder()), begun()
    for number in range(1000):
        decoder.decode(encoder.encode([(b"name", b"%d" % number)], TRACES[0].decode()))
    assert len(decoder._rests) <= 32


def test_the_same_octets_mean_something_else_once_the_table_has_changed() -> None:
    decoder = HeadDecoder(Decoder())
    decoder.decode(b"\x40\x01a\x01b")
    assert meant(decoder, b"\xbe") == [(b"a", b"b")]
    decoder.decode(b"\x40\x01c\x01d")
    assert meant(decoder, b"\xbe") == [(b"c", b"d")]


def test_the_same_octets_change_the_table_once_they_fit_into_it() -> None:
    decoder = HeadDecoder(Decoder())
    decoder.decode(b"\x20\x82")  # nothing fits into the table
    decoder.decode(b"\x40\x01a\x01b")
    decoder.decode(b"\x3f\xe1\x1f\x82")
    decoder.decode(b"\x40\x01a\x01b")
    assert meant(decoder, b"\xbe") == [(b"a", b"b")]


def test_what_is_kept_is_bounded() -> None:
    decoder = HeadDecoder(Decoder())
    for number in range(10_000):
        decoder.decode(block(("name", str(number))))
    assert len(decoder._kept) <= 32
    octets = block(("name", "v" * 4000))
    assert decoder.decode(octets)[0] is not decoder.decode(octets)[0]


def test_answers_that_go_again_have_the_same_block() -> None:
    tested = HeadEncoder()
    reader = Decoder()
    answers = [Response(status=200, content_length=n) for n in (1, 2, 1, 2, 1)]
    for answer in answers:
        assert reader.decode(tested.encode_response(answer), raw=True) == [
            (b":status", b"200"),
            (b"cache-control", b"no-store"),
            (b"content-length", b"%d" % answer.content_length),
        ]
    assert tested.encode_response(answers[0]) == tested.encode_response(answers[0])


@pytest.mark.requirement("HT-3")
@given(st.lists(st.sampled_from([0, 1, 100, 4095, 4096, 4097, 8192, 2**32 - 1, None]), max_size=12))
@example([8192, 4096, None, 0, None])
@example([0, 0, None])
def test_heads_can_be_read_whatever_table_the_peer_allows(found: list[int | None]) -> None:
    """The peer changes the size of its table, or (None) sends a request; it takes no block that does not
    follow, nor one that names a size beyond what it allows."""
    raw, reader = Raw(), Decoder()
    http = raw.end.http
    assert isinstance(http, ServerConnection)
    stream_id = 1
    for size in [*found, None]:
        if size is not None:
            raw.send(settings((1, size)))
            reader.max_allowed_table_size = size
            continue
        raw.send(headers(stream_id, request_block()))
        http.respond(stream_id, ok())
        [answer] = [f[3] for f in raw.take() if f[0] == 1]
        assert reader.decode(answer, raw=True)[0] == (b":status", b"200")
        stream_id += 2
