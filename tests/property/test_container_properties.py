"""Containers: any octets in any split give the same events, and a fault shows at its earliest octet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    layer_digest,
    replica_digest,
)
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_sim.strategies.values import containers, mutated, splits

Made = tuple[CompatibilityDescriptor | None, ContainerHeader, list[tuple[bytes, bytes]], bytes]


def read(block: IncomingBlock, pieces: list[bytes]) -> list[BlockEvent]:
    """Feed pieces, in turn by copy and straight into the free memory, and return all events."""
    events: list[BlockEvent] = []
    for turn, piece in enumerate(pieces):
        while piece and not block.ended and turn % 2 and block.free:
            count = min(len(block.free), len(piece))
            block.free[:count] = piece[:count]
            events += block.received(count)
            piece = piece[count:]
        if piece and not block.ended:
            events += block.receive_data(piece)
        if block.ended:
            return events
    return [*events, *block.receive_eof()]


@pytest.mark.requirement("KC-1", "KC-3", "KC-5")
@given(made=containers(), data=st.data())
def test_what_is_written_is_read_in_any_split(made: Made, data: st.DataObject) -> None:
    descriptor, header, layers, container = made
    digests = [layer_digest(k, v) for k, v in layers]
    memory = data.draw(st.sampled_from([None, bytearray(len(container)), bytearray(len(container) + 9)]))
    block = IncomingBlock(
        buffer=memory,
        descriptor=descriptor,
        layers=data.draw(st.sampled_from([None, header.layers])),
        size_bytes=data.draw(st.sampled_from([None, len(container)])),
    )
    events = read(block, data.draw(splits(container)))
    told = [LayerArrived(layer, digest) for layer, digest in zip(header.layers, digests, strict=True)]
    assert events == [HeaderArrived(header), *told, BlockArrived(header, replica_digest(digests))]
    assert [block.layer(layer) for layer in header.layers] == layers
    assert block.container == container


@pytest.mark.requirement("KC-2", "KC-3")
@given(made=containers(), data=st.data())
def test_spoilt_octets_give_the_same_events_in_any_split(made: Made, data: st.DataObject) -> None:
    descriptor, _, _, container = made
    spoilt = data.draw(mutated(container))
    known = data.draw(st.sampled_from([None, descriptor]))
    declared = data.draw(st.sampled_from([None, len(container), len(spoilt)]))

    def events(pieces: list[bytes]) -> list[BlockEvent]:
        return read(IncomingBlock(descriptor=known, size_bytes=declared, max_size_bytes=10_000), pieces)

    whole = events([spoilt])
    assert whole == events([spoilt[at : at + 1] for at in range(len(spoilt))])
    assert whole == events(data.draw(splits(spoilt)))
    kinds = [type(event) for event in whole]
    assert kinds[-1] in (BlockArrived, BlockRefused)
    assert BlockArrived not in kinds[:-1]
    assert BlockRefused not in kinds[:-1]


@pytest.mark.requirement("KC-2")
@given(octets=st.binary(max_size=120) | st.binary(max_size=120).map(b"KVB1\x01\x00\x00\x01".__add__))
def test_any_octets_are_a_container_or_refused(octets: bytes) -> None:
    try:
        header, digests = decode_container(octets, max_size_bytes=10_000)
    except ContainerError:
        with pytest.raises(ContainerError):
            OutgoingBlock.from_container(octets)
    else:
        assert len(digests) == len(header.layers)
        assert b"".join(OutgoingBlock.from_container(octets).pieces) == octets


def completed(prefix: bytes) -> bytes:
    """Return a container that begins with a prefix, made in the plainest way: with the smallest fields."""
    header = (prefix + b"KVB1\x01\x00\x00\x00"[len(prefix) :])[:8] + prefix[8:]
    if len(prefix) < 8 and header[6:8] == b"\0\0":
        header = header[:7] + b"\x01" + header[8:]
    header = header.ljust(12, b"\0")
    for end in (16, 20):  # the layer count and the token count are at least 1
        if len(header) < end:
            header = header.ljust(end, b"\0")
            if not any(header[end - 4 : end]):
                header = header[:-1] + b"\x01"
    layers = min(int.from_bytes(header[12:16], "big"), 10_000)
    header = header.ljust(20 + 16 * layers, b"\0")
    data = sum(int.from_bytes(header[at : at + 8], "big") for at in range(20, 20 + 16 * layers, 8))
    return header.ljust(20 + 16 * layers + min(data, 200_000), b"\0")


@pytest.mark.requirement("KC-2")
@given(made=containers(), data=st.data())
def test_a_header_is_refused_at_the_first_octet_that_rules_every_container_out(
    made: Made, data: st.DataObject
) -> None:
    spoilt = data.draw(mutated(made[3]))
    block = IncomingBlock(max_size_bytes=100_000)
    for count in range(1, len(spoilt) + 1):
        block.receive_data(spoilt[count - 1 : count])
        if block.ended:
            break
    if not block.ended or block.header is not None:
        return
    possible = completed(spoilt[: count - 1])
    assert possible.startswith(spoilt[: count - 1])
    assert isinstance(read(IncomingBlock(max_size_bytes=100_000), [possible])[-1], BlockArrived)
    with pytest.raises(ContainerError):
        decode_container(completed(spoilt[:count]), max_size_bytes=100_000)
