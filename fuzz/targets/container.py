"""The container decoder: any octets, in any split, give the same events, in bounded memory."""

from __future__ import annotations

from kvsp_core.container import (
    BlockArrived,
    BlockRefused,
    ContainerHeader,
    HeaderArrived,
    IncomingBlock,
    LayerArrived,
    encode_container,
    layer_digest,
)

MAX_SIZE_BYTES = 1 << 16
LIMIT_REQUESTED = 1 << 17


def _container(layers: int, section: int, *, first: int = 0, tokens: int = 4) -> bytes:
    header = ContainerHeader(
        codec=1, first_layer=first, token_count=tokens, sections=((section, section),) * layers
    )
    return b"".join(encode_container(header, [(bytes([n]) * section, b"v" * section) for n in range(layers)]))


SEEDS = (
    b"\x00" + _container(2, 8),
    b"\x07" + _container(1, 0, first=3),
    b"\x03" + _container(3, 64, first=1, tokens=1) + b"trailing",
    b"\x05" + _container(2, 32)[:-1],
    b"\x01KVB1\x02",
)


def _events(data: bytes, step: int) -> tuple[list[object], IncomingBlock]:
    def acquire(size: int) -> bytearray:
        assert size <= MAX_SIZE_BYTES, "memory was asked for beyond the limit"
        return bytearray(size)

    block = IncomingBlock(acquire=acquire, max_size_bytes=MAX_SIZE_BYTES, with_sha256=True)
    events: list[object] = []
    for start in range(0, len(data), step):
        events += block.receive_data(data[start : start + step])
        if block.ended:
            return events, block
    return events + list(block.receive_eof()), block


def one_input(data: bytes) -> None:
    """Decode whole and in small pieces; compare; check what is claimed of what arrived."""
    octets = data[1:]
    step = (data[0] if data else 0) % 23 + 1
    events, block = _events(octets, len(octets) or 1)
    assert _events(octets, step)[0] == events, "the split changed the events"
    end = events[-1]
    assert isinstance(end, BlockArrived | BlockRefused)
    layers = [event for event in events if isinstance(event, LayerArrived)]
    if isinstance(end, BlockArrived):
        assert isinstance(events[0], HeaderArrived)
        assert [event.layer for event in layers] == list(end.header.layers)
        for event in layers:
            assert event.digest == layer_digest(*block.layer(event.layer))
        again = b"".join(encode_container(end.header, [block.layer(event.layer) for event in layers]))
        assert again == octets, "what was decoded does not encode to the same octets"
