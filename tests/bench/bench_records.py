"""What it costs to read and check a record, beside msgspec into the same classes without checks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import attrs
import msgspec

from kvsp_core.bodies import decoder, encode
from kvsp_core.records import ReplicaRecord, Residency
from tests.bench import Row, interleaved, row

__all__ = ["rows"]

LOOPS = 2000


@attrs.frozen(kw_only=True)
class PlainResidency:
    """A Residency without checks."""

    tier: str
    layers: tuple[int, int]
    read_mbit_per_s: int | None = None


@attrs.frozen(kw_only=True)
class PlainRecord:
    """A ReplicaRecord without checks."""

    block_key: str
    compat_id: str
    scope_id: str
    holder: str
    codec: int
    size: int
    digest: str
    layer_digests: tuple[str, ...] | None = None
    residency: tuple[PlainResidency, ...]
    ttl_ms: int
    moqt_namespace: str | None = None


def record() -> ReplicaRecord:
    """Return a record of 32 layers in two tiers: 2.6 kB of JSON."""
    digests = tuple(hashlib.sha256(bytes([layer])).hexdigest() for layer in range(35))
    return ReplicaRecord(
        block_key=digests[32],
        compat_id=digests[33],
        scope_id=digests[34][:32],
        holder="https://h1.example/kvsp/",
        codec=1,
        size=2097152,
        digest="sha-256:" + digests[34],
        layer_digests=digests[:32],
        residency=(
            Residency(tier="device", layers=(0, 15)),
            Residency(tier="host", layers=(16, 31), read_mbit_per_s=400_000),
        ),
        ttl_ms=600_000,
    )


def times(call: Callable[[], object]) -> Callable[[], None]:
    """Return a function that makes this call many times over."""

    def loop() -> None:
        for _ in range(LOOPS):
            call()

    return loop


def rows() -> Iterator[Row]:
    """Measure a Replica Record both ways."""
    checked = record()
    octets = encode(checked)
    read = decoder(ReplicaRecord)
    plain = msgspec.json.Decoder(PlainRecord).decode
    seconds = interleaved(
        {
            "decode": times(lambda: read(octets)),
            "plain": times(lambda: plain(octets)),
            "encode": times(lambda: encode(checked)),
        },
        rounds=21,
    )
    yield row("records.decode_2600_bytes", 1e6 * seconds["decode"] / LOOPS, "us")
    yield row("records.encode_2600_bytes", 1e6 * seconds["encode"] / LOOPS, "us")
    yield row("records.decode.vs_msgspec", seconds["decode"] / seconds["plain"], "ratio", at_most=2.0)
