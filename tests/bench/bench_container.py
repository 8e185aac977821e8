"""Containers: decoding beside plain SHA-256 over the same octets, and the memory it takes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from kvsp_core.container import ContainerHeader, IncomingBlock, decode_container, encode_container
from kvsp_core.identity import CompatibilityDescriptor
from tests.bench import Row, interleaved, peak_bytes, row

__all__ = ["rows"]

FRAME_BYTES = 16 * 1024


def descriptor() -> CompatibilityDescriptor:
    """Return the descriptor of a model whose blocks have 2 MiB: 32 layers, 8 heads of 128, bf16, B = 16."""
    digest = "sha-256:" + hashlib.sha256(b"").hexdigest()
    return CompatibilityDescriptor(
        model="bench",
        model_digest=digest,
        tokenizer_digest=digest,
        layers=32,
        kv_heads=8,
        head_dim=128,
        kv_dtype="bf16",
        positional="rope",
        block_tokens=16,
    )


def rows() -> Iterator[Row]:
    """Yield the figures of containers."""
    made_with = descriptor()
    header = ContainerHeader.for_layers(made_with)
    section = bytes(range(256)) * (made_with.section_bytes(16) // 256)
    container = b"".join(encode_container(header, [(section, section)] * 32))
    frames = [container[at : at + FRAME_BYTES] for at in range(0, len(container), FRAME_BYTES)]
    pool = bytearray(header.size_bytes)

    def decode_frames(memory: bytearray | None = pool) -> IncomingBlock:
        block = IncomingBlock(descriptor=made_with, buffer=memory)
        for frame in frames:
            block.receive_data(frame)
        block.receive_eof()
        return block

    times = interleaved(
        {
            "sha256": lambda: [hashlib.sha256(container).digest() for _ in range(10)],
            "decode": lambda: [decode_container(container, descriptor=made_with) for _ in range(10)],
            "frames": lambda: [decode_frames() for _ in range(10)],
        },
        rounds=15,
    )
    yield row("container.decode_2mib.vs_sha256", times["decode"] / times["sha256"], "ratio", at_most=1.15)
    yield row(
        "container.decode_2mib_in_frames.vs_sha256",
        times["frames"] / times["sha256"],
        "ratio",
        note="16 KiB at a time, copied into a pooled buffer",
    )
    peak = peak_bytes(lambda: decode_frames(None)) - len(container)
    yield row("container.decode_2mib.memory_beyond_container", peak / 2**20, "MiB", at_most=1.0)
