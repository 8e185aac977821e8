"""Heads that come or go again are not decoded or encoded again, and mean the same as if they were."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import given
from hypothesis import strategies as st

from kvsp_core.heads import Response
from kvsp_h2.frames import Fault
from kvsp_h2.heads import HeadDecoder, HeadEncoder
from tests.adapters.h2.pair import block

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


few = st.lists(blocks, min_size=2, max_size=5)


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
        assert tested.decode(octets).headers == expected


def test_a_block_that_comes_again_is_not_decoded_again() -> None:
    decoder = HeadDecoder(Decoder())
    octets = block((":method", "GET"), (":path", "/kvsp/x"))
    assert decoder.decode(octets) is decoder.decode(octets)


def test_the_same_octets_mean_something_else_once_the_table_has_changed() -> None:
    decoder = HeadDecoder(Decoder())
    decoder.decode(b"\x40\x01a\x01b")
    assert decoder.decode(b"\xbe").headers == [(b"a", b"b")]
    decoder.decode(b"\x40\x01c\x01d")
    assert decoder.decode(b"\xbe").headers == [(b"c", b"d")]


def test_the_same_octets_change_the_table_once_they_fit_into_it() -> None:
    decoder = HeadDecoder(Decoder())
    decoder.decode(b"\x20\x82")  # nothing fits into the table
    decoder.decode(b"\x40\x01a\x01b")
    decoder.decode(b"\x3f\xe1\x1f\x82")
    decoder.decode(b"\x40\x01a\x01b")
    assert decoder.decode(b"\xbe").headers == [(b"a", b"b")]


def test_what_is_kept_is_bounded() -> None:
    decoder = HeadDecoder(Decoder())
    for number in range(10_000):
        decoder.decode(block(("name", str(number))))
    assert len(decoder._kept) <= 32
    octets = block(("name", "v" * 4000))
    assert decoder.decode(octets) is not decoder.decode(octets)


def test_answers_that_go_again_have_the_same_block() -> None:
    encoder = Encoder()
    tested = HeadEncoder(encoder)
    reader = Decoder()
    answers = [Response(status=200, content_length=n) for n in (1, 2, 1, 2, 1)]
    for round_ in range(2):
        for answer in answers:
            assert reader.decode(tested.encode_response(answer), raw=True) == [
                (b":status", b"200"),
                (b"cache-control", b"no-store"),
                (b"content-length", b"%d" % answer.content_length),
            ]
        if not round_:
            encoder.header_table_size = 1000  # which the next block says, and no other
            assert tested.encode_response(answers[0])[:1] == b"\x3f"
            assert tested.encode_response(answers[0])[:1] != b"\x3f"
            reader.decode(b"\x3f\xc9\x07")
