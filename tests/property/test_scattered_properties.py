"""Reading a container into scattered sections tells the same as reading it into one piece of memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsp_core.container import BlockRefused, IncomingBlock, LayerArrived, encode_container
from kvsp_core.container_header import ContainerError, ContainerHeader
from kvsp_core.errors import LocalProtocolError
from kvsp_core.scattered import LayersArrived, ScatteredBlock

sections = st.lists(st.tuples(st.binary(max_size=12), st.binary(max_size=12)), min_size=1, max_size=4)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Return a container, perhaps cut off, lengthened or with a changed octet, and its sections."""
    layers = draw(sections)
    header = ContainerHeader(codec=1, token_count=1, sections=tuple((len(k), len(v)) for k, v in layers))
    octets = bytearray(b"".join(encode_container(header, layers)))
    match draw(st.integers(0, 3)):
        case 1:
            del octets[draw(st.integers(0, len(octets) - 1)) :]
        case 2:
            octets += draw(st.binary(min_size=1, max_size=5))
        case 3:
            octets[draw(st.integers(0, min(19, len(octets) - 1)))] ^= 1 << draw(st.integers(0, 7))
    return bytes(octets), layers


def kinds(events: list[object]) -> list[object]:
    """Return what is told, layer by layer, and refusals by their type: details may be worded otherwise."""
    told: list[object] = []
    for event in events:
        match event:
            case LayersArrived(first, digests):
                assert digests
                told += [LayerArrived(layer, digest) for layer, digest in enumerate(digests, first)]
            case BlockRefused(problem):
                told.append(problem.type)
            case _:
                told.append(event)
    return told


def feed(block: IncomingBlock | ScatteredBlock, octets: bytes, cuts: list[int]) -> list[object]:
    events: list[object] = []
    start = 0
    for end in (*sorted(cut for cut in cuts if cut < len(octets)), len(octets)):
        events += block.receive_data(octets[start:end])
        start = end
        if events and isinstance(events[-1], BlockRefused):
            return events
    return [*events, *block.receive_eof()]


@pytest.mark.requirement("KC-2", "KC-3", "KC-5")
@given(case=damaged(), cuts=st.lists(st.integers(0, 120)), declares=st.booleans())
def test_both_tell_the_same_of_any_octets_in_any_split(
    case: tuple[bytes, list[tuple[bytes, bytes]]], cuts: list[int], declares: bool
) -> None:
    octets, layers = case
    memory: dict[int, tuple[bytearray, bytearray]] = {}
    header: list[ContainerHeader] = []

    def sections_of(layer: int) -> tuple[memoryview, memoryview]:
        k_bytes, v_bytes = header[0].sections[layer - header[0].first_layer]
        pair = memory[layer] = bytearray(k_bytes), bytearray(v_bytes)
        return memoryview(pair[0]), memoryview(pair[1])

    size = len(octets) if declares else None
    whole = IncomingBlock(size_bytes=size, max_size_bytes=4096, with_sha256=True)
    expected = feed(whole, octets, cuts)
    if whole.header is not None:
        header.append(whole.header)
    scattered = ScatteredBlock(sections_of, size_bytes=size, max_size_bytes=4096)
    found = feed(scattered, octets, [cut // 2 for cut in cuts])
    assert kinds(found) == kinds(expected)
    if not isinstance(found[-1], BlockRefused):
        assert [bytes(k) for k, _ in memory.values()] == [k for k, _ in layers]
        assert [bytes(v) for _, v in memory.values()] == [v for _, v in layers]
    with pytest.raises(LocalProtocolError):
        scattered.receive_data(b"x")


def test_memory_of_another_size_is_the_callers_mistake() -> None:
    header = ContainerHeader(codec=1, token_count=1, sections=((4, 4),))
    octets = b"".join(encode_container(header, [(b"1234", b"5678")]))
    block = ScatteredBlock(lambda layer: (memoryview(bytearray(3)), memoryview(bytearray(4))))
    with pytest.raises(LocalProtocolError, match="layer 0"):
        block.receive_data(octets)
    with pytest.raises(ContainerError):
        ScatteredBlock(lambda layer: (memoryview(b""), memoryview(b"")), size_bytes=9, max_size_bytes=8)


def test_another_codec_is_refused_as_soon_as_it_shows() -> None:
    header = ContainerHeader(codec=0xFF01, token_count=1, sections=((4, 4),))
    octets = b"".join(encode_container(header, [(b"1234", b"5678")]))
    block = ScatteredBlock(lambda layer: (memoryview(b""), memoryview(b"")), codec=1)
    assert block.receive_data(octets[:6]) == ()
    (refused,) = block.receive_data(octets[6:7])
    assert isinstance(refused, BlockRefused)
    assert "not the 1 that was asked for" in refused.problem.detail
