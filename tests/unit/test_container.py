"""Containers: written piece by piece, read octet by octet, checked before anything is believed."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from kvsp_core import limits
from kvsp_core.container import (
    BlockArrived,
    BlockEvent,
    BlockRefused,
    ContainerError,
    ContainerHeader,
    HeaderArrived,
    IncomingBlock,
    LayerArrived,
    OutgoingBlock,
    decode_container,
    encode_container,
    layer_digest,
    replica_digest,
)
from kvsp_core.errors import LocalProtocolError
from kvsp_core.problems import BAD_REQUEST, DIGEST_MISMATCH, INCOMPATIBLE, TOO_LARGE, ProblemType
from kvsp_core.registries import CODECS, Codec, Registries
from tests.unit.test_identity import descriptor

MODEL = descriptor(layers=3, kv_heads=1, head_dim=2, kv_dtype="fp16", block_tokens=2)
LAYERS = [(bytes(range(16 * n, 16 * n + 8)), bytes(range(16 * n + 8, 16 * n + 16))) for n in range(3)]
HEADER = ContainerHeader.for_layers(MODEL)
CONTAINER = b"".join(encode_container(HEADER, LAYERS))
DIGESTS = tuple(hashlib.sha256(k + v).hexdigest() for k, v in LAYERS)


def read(block: IncomingBlock, octets: bytes, size: int = 1 << 30) -> list[BlockEvent]:
    events: list[BlockEvent] = []
    for start in range(0, len(octets), size):
        events += block.receive_data(octets[start : start + size])
        if block.ended:
            return events
    return [*events, *block.receive_eof()]


def refusal(octets: bytes, **arguments: Any) -> BlockRefused:
    last = read(IncomingBlock(**arguments), octets)[-1]
    assert isinstance(last, BlockRefused)
    return last


def refused_as(octets: bytes, **arguments: Any) -> ProblemType:
    return refusal(octets, **arguments).problem.type


# Headers ------------------------------------------------------------------------------------------


@pytest.mark.requirement("KC-1")
def test_a_header_knows_its_sizes() -> None:
    assert HEADER.layers == range(3)
    assert HEADER.sections == ((8, 8),) * 3
    assert (HEADER.header_bytes, HEADER.data_bytes, HEADER.size_bytes) == (68, 48, 116)
    assert len(HEADER.encode()) == 68
    part = ContainerHeader.for_layers(MODEL, first_layer=1, layer_count=2)
    assert (part.layers, part.token_count) == (range(1, 3), 2)


@pytest.mark.requirement("KC-1")
@pytest.mark.parametrize(
    "wrong",
    [
        {"codec": 0},
        {"codec": 0x10000},
        {"first_layer": -1},
        {"first_layer": 2**32},
        {"first_layer": 2**32 - 1},
        {"token_count": 0},
        {"token_count": 2**32},
        {"sections": ()},
        {"sections": ((0, -1), (0, 0))},
        {"sections": ((0, 2**64), (0, 0))},
    ],
    ids=str,
)
def test_a_header_that_cannot_be_written_is_not_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match="container"):
        ContainerHeader(**({"codec": 1, "token_count": 2, "sections": ((8, 8), (8, 8))} | wrong))


@pytest.mark.requirement("KC-6")
def test_a_codec_without_a_fixed_size_needs_its_sections() -> None:
    with pytest.raises(LocalProtocolError, match="give them one by one"):
        ContainerHeader.for_layers(MODEL, codec=0xFF00)


# Writing ------------------------------------------------------------------------------------------


@pytest.mark.requirement("KC-1")
def test_pieces_come_as_the_layers_do_and_are_not_copied() -> None:
    made: list[int] = []

    def layers() -> Iterator[tuple[bytes, bytes]]:
        for layer, sections in enumerate(LAYERS):
            made.append(layer)
            yield sections

    pieces = encode_container(HEADER, layers())
    assert bytes(next(pieces)) == HEADER.encode()
    assert made == []
    assert next(pieces) is LAYERS[0][0]
    assert made == [0]
    assert next(pieces) is LAYERS[0][1]
    assert [*pieces] == [LAYERS[1][0], LAYERS[1][1], LAYERS[2][0], LAYERS[2][1]]


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (LAYERS[:2], "layer 2 is missing"),
        ([*LAYERS, LAYERS[0]], "too many layers"),
        ([(b"short", b"12345678")] * 3, "layer 0: a section has 5 octets, the header says 8"),
    ],
)
def test_layers_that_do_not_fit_the_header_are_refused(layers: Any, reason: str) -> None:
    with pytest.raises(LocalProtocolError, match=reason):
        list(encode_container(HEADER, layers))
    with pytest.raises(LocalProtocolError, match=reason):
        OutgoingBlock(HEADER, layers)


@pytest.mark.requirement("KC-1", "KC-5")
def test_an_outgoing_block_is_the_callers_memory() -> None:
    memory = [(bytearray(k), memoryview(bytearray(v))) for k, v in LAYERS]
    block = OutgoingBlock(HEADER, memory)  # type: ignore[arg-type]
    assert b"".join(block.pieces) == CONTAINER
    assert block.size_bytes == len(CONTAINER)
    assert block.layer_digests() == DIGESTS
    assert block.sha256() == hashlib.sha256(CONTAINER).digest()
    memory[0][0][0] ^= 1
    assert block.layer_digests() != DIGESTS


@pytest.mark.requirement("KC-1")
@pytest.mark.parametrize("asked", [range(3), range(1), range(1, 3), range(2, 3)], ids=str)
def test_a_range_of_layers_is_cut_out_of_a_stored_container(asked: range) -> None:
    part = OutgoingBlock.from_container(CONTAINER, asked)
    assert part.header.layers == asked
    assert read(IncomingBlock(descriptor=MODEL, layers=asked), b"".join(part.pieces))[1:-1] == [
        LayerArrived(layer, DIGESTS[layer]) for layer in asked
    ]
    again = OutgoingBlock.from_container(b"".join(part.pieces))
    assert again.header == part.header


@pytest.mark.parametrize("asked", [range(0), range(4), range(3, 4), range(0, 3, 2), range(2, 0, -1)], ids=str)
def test_a_range_that_is_not_stored_cannot_be_cut_out(asked: range) -> None:
    with pytest.raises(LocalProtocolError, match="not all in the stored container"):
        OutgoingBlock.from_container(CONTAINER, asked)


@pytest.mark.parametrize("stored", [b"", CONTAINER[:30], CONTAINER[:-1], CONTAINER + b"x", b"x" + CONTAINER])
def test_what_is_stored_has_to_be_a_container(stored: bytes) -> None:
    with pytest.raises(ContainerError):
        OutgoingBlock.from_container(stored)


# Digests ------------------------------------------------------------------------------------------


@pytest.mark.requirement("KC-5")
def test_a_layer_digest_covers_k_then_v() -> None:
    assert layer_digest(*LAYERS[0]) == DIGESTS[0]
    assert layer_digest(LAYERS[0][1], LAYERS[0][0]) != DIGESTS[0]


@pytest.mark.requirement("KC-5")
def test_a_replica_digest_covers_the_layer_digests_in_order() -> None:
    joined = b"".join(map(bytes.fromhex, DIGESTS))
    assert replica_digest(DIGESTS) == "sha-256:" + hashlib.sha256(joined).hexdigest()
    assert replica_digest(DIGESTS[::-1]) != replica_digest(DIGESTS)


# Reading ------------------------------------------------------------------------------------------

WHOLE = [
    HeaderArrived(HEADER),
    *(LayerArrived(layer, digest) for layer, digest in enumerate(DIGESTS)),
    BlockArrived(HEADER, replica_digest(DIGESTS)),
]


@pytest.mark.requirement("KC-3")
@pytest.mark.parametrize("size", [1, 2, 3, 16, 19, 20, 21, 68, 69, 84, 115, 116, 1000])
def test_any_split_gives_the_same_events(size: int) -> None:
    assert read(IncomingBlock(descriptor=MODEL), CONTAINER, size) == WHOLE
    assert read(IncomingBlock(), CONTAINER, size) == WHOLE
    assert read(IncomingBlock(buffer=bytearray(200)), CONTAINER, size) == WHOLE


@pytest.mark.requirement("KC-3")
def test_a_layer_can_be_used_as_soon_as_its_last_octet_is_there() -> None:
    block = IncomingBlock(descriptor=MODEL)
    assert block.receive_data(CONTAINER[:83]) == (WHOLE[0],)
    with pytest.raises(LocalProtocolError, match="layer 0 has not arrived"):
        block.layer(0)
    assert block.receive_data(CONTAINER[83:84]) == (WHOLE[1],)
    assert block.layer(0) == LAYERS[0]
    with pytest.raises(LocalProtocolError, match="layer 1 has not arrived"):
        block.layer(1)
    assert block.container == CONTAINER[:84]


@pytest.mark.requirement("KC-3")
def test_octets_go_straight_into_the_callers_memory() -> None:
    memory = bytearray(200)
    block = IncomingBlock(buffer=memory, descriptor=MODEL)
    source = memoryview(CONTAINER)
    events: list[BlockEvent] = []
    while source:
        free = block.free[:7]
        free[:] = source[: len(free)]
        events += block.received(len(free))
        source = source[len(free) :]
    assert not block.free
    assert [*events, *block.receive_eof()] == WHOLE
    assert memory[: len(CONTAINER)] == CONTAINER
    k_section, _ = block.layer(1)
    assert (k_section.obj is memory, k_section.readonly, k_section) == (True, True, LAYERS[1][0])


@pytest.mark.requirement("KC-2", "KC-3")
def test_memory_is_asked_for_once_and_only_for_what_the_header_has_shown() -> None:
    asked: list[int] = []
    pool = bytearray(500)

    def acquire(size: int) -> memoryview:
        asked.append(size)
        return memoryview(pool)

    block = IncomingBlock(acquire=acquire, descriptor=MODEL)
    block.receive_data(CONTAINER[:67])
    assert asked == []
    block.receive_data(CONTAINER[67:])
    assert asked == [len(CONTAINER)]
    assert pool[: len(CONTAINER)] == CONTAINER


def test_memory_that_is_too_small_is_the_callers_mistake() -> None:
    block = IncomingBlock(acquire=lambda size: bytearray(size - 1))
    with pytest.raises(LocalProtocolError, match="116 octets of memory were asked for, 115 given"):
        block.receive_data(CONTAINER)


def test_a_container_larger_than_the_callers_memory_is_refused() -> None:
    assert refused_as(CONTAINER, buffer=bytearray(115)) == TOO_LARGE
    assert refused_as(CONTAINER, buffer=bytearray(10)) == TOO_LARGE
    assert refused_as(CONTAINER, max_size_bytes=115) == TOO_LARGE
    assert read(IncomingBlock(max_size_bytes=116), CONTAINER) == WHOLE


def test_more_octets_than_were_free_is_the_callers_mistake() -> None:
    block = IncomingBlock()
    with pytest.raises(LocalProtocolError, match="do not fit"):
        block.received(21)
    with pytest.raises(LocalProtocolError, match="do not fit"):
        block.received(-1)
    assert read(block, CONTAINER) == WHOLE


@pytest.mark.requirement("KC-2")
def test_a_block_takes_nothing_after_its_end() -> None:
    block = IncomingBlock()
    assert read(block, CONTAINER) == WHOLE
    for call in (lambda: block.received(0), lambda: block.receive_data(b"x"), block.receive_eof):
        with pytest.raises(LocalProtocolError, match="has ended"):
            call()
    assert block.layer(2) == LAYERS[2]


@pytest.mark.requirement("KC-2")
def test_a_refused_block_gives_up_what_it_has() -> None:
    block = IncomingBlock()
    assert isinstance(read(block, CONTAINER[:-1])[-1], BlockRefused)
    with pytest.raises(LocalProtocolError, match="has not arrived"):
        block.layer(0)
    assert not block.container
    with pytest.raises(LocalProtocolError, match="has ended"):
        block.receive_data(b"x")


@pytest.mark.requirement("KC-2")
@pytest.mark.parametrize("buffer", [None, 116, 117, 200])
@pytest.mark.parametrize("size", [1, 116, 117])
def test_octets_after_the_end_are_refused(buffer: int | None, size: int) -> None:
    block = IncomingBlock(buffer=None if buffer is None else bytearray(buffer))
    events = read(block, CONTAINER + b"x", size)
    assert events[:-1] == WHOLE[:-1]
    assert isinstance(events[-1], BlockRefused)
    assert events[-1].problem.type == BAD_REQUEST
    assert "follow the end" in events[-1].problem.detail


@pytest.mark.requirement("KC-2")
@pytest.mark.parametrize("length", range(len(CONTAINER)))
def test_a_container_that_is_cut_off_is_refused(length: int) -> None:
    refused = refusal(CONTAINER[:length], descriptor=MODEL)
    assert refused.problem.type == BAD_REQUEST
    assert f"ends after {length} octets" in refused.problem.detail


@pytest.mark.requirement("KC-2")
@pytest.mark.parametrize(
    "claim",
    [
        (2**32 - 1, 0, 0),
        (1025, 0, 0),
        (1, 2**64 - 1, 2**64 - 1),
        (1, 2**63, 2**63),
        (1, 0, 2**40),
        (1024, 2**60, 0),
    ],
    ids=str,
)
def test_a_large_claim_costs_no_memory(claim: tuple[int, int, int]) -> None:
    count, k_bytes, v_bytes = claim
    fixed = CONTAINER[:12] + count.to_bytes(4, "big") + CONTAINER[16:20]
    octets = fixed + (k_bytes.to_bytes(8, "big") + v_bytes.to_bytes(8, "big")) * min(count, 1024)
    asked: list[int] = []
    tracemalloc.start()
    try:
        block = IncomingBlock(acquire=lambda size: asked.append(size) or bytearray(size))  # type: ignore[func-returns-value]
        (refused,) = block.receive_data(octets)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(refused, BlockRefused)
    assert refused.problem.type == TOO_LARGE
    assert asked == []
    assert peak < 200_000


@pytest.mark.requirement("KC-2")
def test_a_block_has_many_layers_but_not_any_number() -> None:
    most = limits.MAX_CONTAINER_LAYERS
    header = ContainerHeader(codec=2, token_count=1, sections=((0, 0),) * most)
    assert len(read(IncomingBlock(), header.encode())) == most + 2
    header = ContainerHeader(codec=2, token_count=1, sections=((0, 0),) * (most + 1))
    assert refused_as(header.encode()) == TOO_LARGE


@pytest.mark.requirement("KC-2")
def test_a_declared_size_is_checked_before_anything_comes() -> None:
    with pytest.raises(ContainerError) as refused:
        IncomingBlock(size_bytes=limits.MAX_CONTAINER_BYTES + 1)
    assert refused.value.problem.type == TOO_LARGE
    assert read(IncomingBlock(size_bytes=116), CONTAINER) == WHOLE
    assert read(IncomingBlock(size_bytes=116, descriptor=MODEL), CONTAINER) == WHOLE
    for declared in (0, 19, 115, 117):
        for model in (None, MODEL):
            assert refused_as(CONTAINER, size_bytes=declared, descriptor=model) == BAD_REQUEST


@pytest.mark.requirement("KC-4")
def test_a_block_has_to_fit_its_descriptor() -> None:
    part = b"".join(OutgoingBlock.from_container(CONTAINER, range(1, 3)).pieces)
    assert isinstance(read(IncomingBlock(descriptor=MODEL), part)[-1], BlockArrived)
    for other in (
        descriptor(layers=2, kv_heads=1, head_dim=2, kv_dtype="fp16", block_tokens=2),
        descriptor(layers=3, kv_heads=1, head_dim=2, kv_dtype="fp32", block_tokens=2),
        descriptor(layers=3, kv_heads=2, head_dim=2, kv_dtype="fp16", block_tokens=2),
        descriptor(layers=3, kv_heads=1, head_dim=4, kv_dtype="fp16", block_tokens=1),
    ):
        assert refused_as(CONTAINER, descriptor=other) == INCOMPATIBLE


@pytest.mark.requirement("KC-6")
def test_another_codec_defines_its_own_sections() -> None:
    half = Codec(value=0xFF07, name="half", description="", section_bytes=lambda elements, _: elements // 2)
    free = Codec(value=0xFF08, name="free", description="")
    codecs = CODECS.with_entry(half.value, half).with_entry(free.value, free)
    model = descriptor(layers=1, kv_heads=2, head_dim=4, block_tokens=2, registries=Registries(codecs=codecs))
    header = ContainerHeader.for_layers(model, codec=0xFF07)
    assert header.sections == ((8, 8),)
    octets = b"".join(encode_container(header, [(b"k" * 8, b"v" * 8)]))
    assert isinstance(read(IncomingBlock(descriptor=model), octets)[-1], BlockArrived)
    short = ContainerHeader(codec=0xFF07, token_count=2, sections=((8, 7),))
    assert refused_as(short.encode(), descriptor=model) == INCOMPATIBLE
    for codec in (0xFF08, 0x1234):
        odd = ContainerHeader(codec=codec, token_count=2, sections=((3, 1),)).encode() + b"abcd"
        assert isinstance(read(IncomingBlock(descriptor=model), odd)[-1], BlockArrived)


@pytest.mark.requirement("KC-3", "KC-5", "BR-4")
def test_a_layer_with_another_digest_is_refused_and_those_before_it_are_told() -> None:
    spoilt = bytearray(CONTAINER)
    spoilt[100] ^= 1
    events = read(IncomingBlock(layer_digests=DIGESTS), bytes(spoilt))
    assert events[:-1] == WHOLE[:3]
    last = events[-1]
    assert isinstance(last, BlockRefused)
    assert (last.problem.type, last.problem.detail) == (DIGEST_MISMATCH, "layer 2 does not match its digest")


@pytest.mark.requirement("KC-3")
def test_layer_digests_are_those_of_the_block_whatever_range_is_read() -> None:
    part = b"".join(OutgoingBlock.from_container(CONTAINER, range(2, 3)).pieces)
    assert isinstance(read(IncomingBlock(layer_digests=list(DIGESTS)), part)[-1], BlockArrived)
    assert refused_as(part, layer_digests=DIGESTS[:1]) == DIGEST_MISMATCH


@pytest.mark.requirement("KC-5", "BR-2")
@pytest.mark.parametrize("size", [1, 30, 1000])
def test_the_digest_of_the_container_is_computed_on_the_way(size: int) -> None:
    last = read(IncomingBlock(with_sha256=True), CONTAINER, size)[-1]
    assert isinstance(last, BlockArrived)
    assert last.sha256 == hashlib.sha256(CONTAINER).digest()


@pytest.mark.requirement("KC-2")
def test_a_container_that_is_there_as_a_whole() -> None:
    for form in (CONTAINER, bytearray(CONTAINER), memoryview(CONTAINER)):
        assert decode_container(form) == (HEADER, DIGESTS)
        assert decode_container(form, descriptor=MODEL) == (HEADER, DIGESTS)
    for broken in (b"", CONTAINER[:-1], CONTAINER + b"x", CONTAINER[:5] + b"\1" + CONTAINER[6:]):
        with pytest.raises(ContainerError) as refused:
            decode_container(broken)
        assert refused.value.problem.type == BAD_REQUEST
    with pytest.raises(ContainerError) as refused:
        decode_container(CONTAINER, max_size_bytes=100)
    assert refused.value.problem.type == TOO_LARGE


@pytest.mark.requirement("SE-5")
def test_events_and_refusals_show_no_octet_of_the_cache() -> None:
    marked = b"".join(encode_container(HEADER, [(b"secretKV", b"secretKV")] * 3))
    shown = repr(read(IncomingBlock(), marked)) + repr(read(IncomingBlock(), marked + b"secret"))
    assert "secret" not in shown
