"""The KV block container: its header, what writes it and what reads it, without a copy.

Protocol section "KV Block Container"; requirements KC-1 to KC-3, KC-5 and KC-6, decision W6. A container
holds a contiguous range of layers of one block:

- `ContainerHeader` is the header as a value
- `encode_container` yields the pieces to send as the layers come; `OutgoingBlock` has them over buffers
- `IncomingBlock` takes the octets in any split, into a buffer of the caller's, and tells of each layer with
  its digest as soon as it is complete; `decode_container` reads a container that is there as a whole
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import attrs

from kvsp_core.container_header import (
    FIXED_BYTES,
    ContainerError,
    ContainerHeader,
    HeaderReader,
)
from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.limits import MAX_CONTAINER_BYTES
from kvsp_core.problems import BAD_REQUEST, DIGEST_MISMATCH, TOO_LARGE, Problem

__all__ = [
    "BlockArrived",
    "BlockEvent",
    "BlockRefused",
    "ContainerError",
    "ContainerHeader",
    "HeaderArrived",
    "IncomingBlock",
    "LayerArrived",
    "OutgoingBlock",
    "decode_container",
    "encode_container",
    "layer_digest",
    "replica_digest",
]

# Digests ------------------------------------------------------------------------------------------


def layer_digest(k_section: bytes | memoryview, v_section: bytes | memoryview) -> str:
    """Return the digest of a layer, hex32: SHA-256 of its K and then its V section (KC-5)."""
    digest = hashlib.sha256(k_section)
    digest.update(v_section)
    return digest.hexdigest()


def replica_digest(layer_digests: Iterable[str]) -> str:
    """Return the digest of a replica, ``sha-256:`` and hex32, from the digests of all its layers (KC-5)."""
    return "sha-256:" + hashlib.sha256(bytes.fromhex("".join(layer_digests))).hexdigest()


# Writing ------------------------------------------------------------------------------------------


def encode_container(
    header: ContainerHeader, layers: Iterable[tuple[bytes | memoryview, bytes | memoryview]]
) -> Iterator[bytes | memoryview]:
    """Yield the pieces of a container: the header, then K and V of each layer as `layers` gives them.

    A layer is asked for when its turn comes, and no piece is copied. Raises `LocalProtocolError` where a
    section or the number of layers is not what the header says.
    """
    yield header.encode()
    given = iter(layers)
    for layer, sizes in zip(header.layers, header.sections, strict=True):
        sections = next(given, None)
        if sections is None:
            raise LocalProtocolError(
                f"layer {layer} is missing: the header says {len(header.sections)} layers"
            )
        for section, size in zip(sections, sizes, strict=True):
            found = memoryview(section).nbytes
            if found != size:
                raise LocalProtocolError(
                    f"layer {layer}: a section has {found} octets, the header says {size}"
                )
            yield section
    if next(given, None) is not None:
        raise LocalProtocolError(f"too many layers: the header says {len(header.sections)}")


class OutgoingBlock:
    """A container over the caller's buffers: `pieces` are sent in order, and nothing is copied.

    `layers` gives the K and V section of each layer of `header`. Raises `LocalProtocolError` where they do
    not fit.
    """

    def __init__(
        self, header: ContainerHeader, layers: Sequence[tuple[bytes | memoryview, bytes | memoryview]]
    ) -> None:
        self.header = header
        self.pieces = tuple(memoryview(piece).cast("B") for piece in encode_container(header, layers))

    @classmethod
    def from_container(
        cls, container: bytes | bytearray | memoryview, layers: range | None = None
    ) -> OutgoingBlock:
        """Return a stored container as it is, or the part of it that holds a range of its layers (BR-1).

        Raises `ContainerError` where the stored octets are not a container, `LocalProtocolError` where the
        range is not within it.
        """
        octets = memoryview(container).cast("B").toreadonly()
        header = _whole_header(octets)
        kept = header.layers if layers is None else layers
        if not kept or kept.step != 1 or kept.start not in header.layers or kept.stop > header.layers.stop:
            raise LocalProtocolError("the layers asked for are not all in the stored container")
        sections = tuple(
            (octets[start:middle], octets[middle:end]) for start, middle, end in _bounds(header)
        )[kept.start - header.first_layer : kept.stop - header.first_layer]
        sizes = tuple((k.nbytes, v.nbytes) for k, v in sections)
        return cls(attrs.evolve(header, first_layer=kept.start, sections=sizes), sections)

    @property
    def size_bytes(self) -> int:
        """The octets of all pieces together."""
        return self.header.size_bytes

    def layer_digests(self) -> tuple[str, ...]:
        """Return the digest of each layer, computed now from its octets (KC-5)."""
        sections = self.pieces[1:]
        return tuple(layer_digest(k, v) for k, v in zip(sections[::2], sections[1::2], strict=True))

    def sha256(self) -> bytes:
        """Return the SHA-256 of the container, computed now: what Repr-Digest carries (BR-2)."""
        digest = hashlib.sha256()
        for piece in self.pieces:
            digest.update(piece)
        return digest.digest()


# Reading ------------------------------------------------------------------------------------------


@attrs.frozen
class HeaderArrived:
    """The header is complete and allowed."""

    header: ContainerHeader


@attrs.frozen
class LayerArrived:
    """A layer is complete, and its digest, hex32, is the expected one where one was given."""

    layer: int
    digest: str


@attrs.frozen
class BlockArrived:
    """The container ended where its header says, all layers given.

    `digest` is that of a replica of these layers: where they are all layers of the block, it is to equal the
    record's. `sha256` is that of the container, where it was asked for.
    """

    header: ContainerHeader
    digest: str
    sha256: bytes | None = attrs.field(default=None, repr=False)


@attrs.frozen
class BlockRefused:
    """The container is not as the protocol says. Layers told of before are not to be used."""

    problem: Problem


BlockEvent: TypeAlias = HeaderArrived | LayerArrived | BlockArrived | BlockRefused


_NO_ROOM: Final = Problem(TOO_LARGE, "the container is larger than the memory for it")
_TRAILING: Final = Problem(BAD_REQUEST, "octets follow the end that the header states")


class IncomingBlock:
    """Takes the octets of a container in any split and tells of each layer as it completes (KC-2, KC-3).

    Octets go straight into memory: `free` is where the next ones belong, `received` says how many have
    come, and `receive_data` does both for octets that are elsewhere. `receive_eof` says that no more will
    come.

    Arguments, all optional:

    - `buffer`: writable memory for the whole container, header included. Without it `acquire` is asked once
      for the container's size, after the header has been checked; by default that is a fresh bytearray.
    - `descriptor`: what the block was made with. Layers, token count and section sizes must fit it.
    - `layers`: the layers asked for; others are refused.
    - `layer_digests`: the digest of every layer of the block, hex32; a layer with another one is refused.
    - `size_bytes`: the size the sender declared (Content-Length).
    - `max_size_bytes`: a larger container is refused as soon as its header shows it.
    - `with_sha256`: whether to compute the digest of the container too, for Repr-Digest.

    What a peer sent wrongly is a `BlockRefused`, at the earliest octet that shows it, and is the last
    event; the same octets give the same events however they are split. Raises `ContainerError` where the
    declared size is refused already, and `LocalProtocolError` for calls after the last event.
    """

    def __init__(
        self,
        *,
        buffer: bytearray | memoryview | None = None,
        acquire: Callable[[int], bytearray | memoryview] = bytearray,
        descriptor: CompatibilityDescriptor | None = None,
        layers: range | None = None,
        layer_digests: Sequence[str] | None = None,
        size_bytes: int | None = None,
        max_size_bytes: int = MAX_CONTAINER_BYTES,
        with_sha256: bool = False,
    ) -> None:
        own = None if buffer is None else memoryview(buffer).cast("B")[:max_size_bytes]
        room = max_size_bytes if own is None else own.nbytes
        self._reader = HeaderReader(descriptor=descriptor, layers=layers, declared=size_bytes, room=room)
        self._octets = memoryview(bytearray(FIXED_BYTES)) if own is None else own
        self._staged = own is None
        self._acquire = acquire
        self._expected = None if layer_digests is None else tuple(layer_digests)
        self._sha256 = hashlib.sha256() if with_sha256 else None
        self._layer_hash = hashlib.sha256()
        self._digests: list[str] = []
        self._bounds: tuple[tuple[int, int, int], ...] = ()
        self._filled = 0
        self._hashed = 0
        self._over = False
        self.header: ContainerHeader | None = None

    @property
    def ended(self) -> bool:
        """Whether the last event has been given."""
        return self._over

    @property
    def free(self) -> memoryview:
        """The memory where the next octets belong; empty once the container is complete."""
        return self._octets[self._filled :]

    def received(self, count: int) -> tuple[BlockEvent, ...]:
        """Say that `free` has been filled with `count` octets; return what that completes."""
        self._check_open()
        if not 0 <= count <= self._octets.nbytes - self._filled:
            raise LocalProtocolError(f"{count} octets do not fit into the memory given")
        self._filled += count
        events: list[BlockEvent] = []
        try:
            if self.header is None:
                self._read_header(events)
            if self.header is not None:
                self._read_layers(self.header, events)
        except ContainerError as error:
            events.append(self._refused(error.problem))
        return tuple(events)

    def receive_data(self, data: bytes | bytearray | memoryview) -> tuple[BlockEvent, ...]:
        """Take the next octets, copying them to where they belong; return what that completes."""
        self._check_open()
        events: tuple[BlockEvent, ...] = ()
        octets = memoryview(data).cast("B")
        while octets and not self._over:
            free = self.free
            if not free:
                return (*events, self._refused(_NO_ROOM if self.header is None else _TRAILING))
            count = min(free.nbytes, octets.nbytes)
            free[:count] = octets[:count]
            octets = octets[count:]
            events += self.received(count)
        return events

    def receive_eof(self) -> tuple[BlockEvent, ...]:
        """Say that no more octets will come; return `BlockArrived`, or `BlockRefused` if some are missing."""
        self._check_open()
        if self.header is None or self._filled < self.header.size_bytes:
            expected = "its header" if self.header is None else f"its {self.header.size_bytes} octets"
            detail = f"the container ends after {self._filled} octets, within {expected}"
            return (self._refused(Problem(BAD_REQUEST, detail)),)
        self._over = True
        sha256 = self._sha256.digest() if self._sha256 is not None else None
        return (BlockArrived(self.header, replica_digest(self._digests), sha256),)

    def layer(self, layer: int) -> tuple[memoryview, memoryview]:
        """Return the K and V section of a layer that has arrived, read-only and without a copy."""
        index = -1 if self.header is None else layer - self.header.first_layer
        if not 0 <= index < len(self._digests):
            raise LocalProtocolError(f"layer {layer} has not arrived")
        start, middle, end = self._bounds[index]
        octets = self._octets.toreadonly()
        return octets[start:middle], octets[middle:end]

    @property
    def container(self) -> memoryview:
        """The octets of the container so far, read-only and without a copy."""
        return self._octets[: self._filled].toreadonly()

    def _check_open(self) -> None:
        if self._over:
            raise LocalProtocolError("this container has ended; read the next with a new IncomingBlock")

    def _read_header(self, events: list[BlockEvent]) -> None:
        header = self._reader.read(self._octets[: self._filled])
        if header is None:
            if self._staged and self._filled == self._octets.nbytes:
                self._move_to(memoryview(bytearray(self._reader.header_bytes)))
            return
        size = header.size_bytes
        if self._staged:
            memory = memoryview(self._acquire(size)).cast("B")
            if memory.nbytes < size:
                raise LocalProtocolError(f"{size} octets of memory were asked for, {memory.nbytes} given")
            self._move_to(memory)
            self._staged = False
        self._octets = self._octets[: max(size, self._filled)]
        self._bounds = tuple(_bounds(header))
        self._hashed = header.header_bytes
        if self._sha256 is not None:
            self._sha256.update(self._octets[: self._hashed])
        self.header = header
        events.append(HeaderArrived(header))

    def _move_to(self, memory: memoryview) -> None:
        memory[: self._filled] = self._octets[: self._filled]
        self._octets = memory

    def _read_layers(self, header: ContainerHeader, events: list[BlockEvent]) -> None:
        filled, digests, bounds = self._filled, self._digests, self._bounds
        while len(digests) < len(bounds):
            layer, (_, _, end) = header.first_layer + len(digests), bounds[len(digests)]
            upto = min(end, filled)
            if upto > self._hashed:
                fresh = self._octets[self._hashed : upto]
                self._layer_hash.update(fresh)
                if self._sha256 is not None:
                    self._sha256.update(fresh)
                self._hashed = upto
            if filled < end:
                return
            digest = self._layer_hash.hexdigest()
            self._layer_hash = hashlib.sha256()
            if self._expected is not None and self._expected[layer : layer + 1] != (digest,):
                raise ContainerError(DIGEST_MISMATCH, f"layer {layer} does not match its digest")
            digests.append(digest)
            events.append(LayerArrived(layer, digest))
        if filled > header.size_bytes:
            events.append(self._refused(_TRAILING))

    def _refused(self, problem: Problem) -> BlockRefused:
        self._over = True
        self._octets = memoryview(b"")
        self._filled = 0
        self._digests = []
        return BlockRefused(problem)


def decode_container(
    container: bytes | bytearray | memoryview,
    *,
    descriptor: CompatibilityDescriptor | None = None,
    max_size_bytes: int = MAX_CONTAINER_BYTES,
) -> tuple[ContainerHeader, tuple[str, ...]]:
    """Return the header and the layer digests of a container that is there as a whole; it is not copied.

    Raises `ContainerError`, with the reason, where it is none or does not fit the descriptor.
    """
    octets = memoryview(container).cast("B")
    block = IncomingBlock(
        buffer=octets, descriptor=descriptor, size_bytes=octets.nbytes, max_size_bytes=max_size_bytes
    )
    events = block.received(octets.nbytes)
    if not block.ended:
        events += block.receive_eof()
    if isinstance(events[-1], BlockRefused):
        raise ContainerError(events[-1].problem.type, events[-1].problem.detail)
    assert isinstance(events[0], HeaderArrived)
    return events[0].header, tuple(event.digest for event in events if isinstance(event, LayerArrived))


def _whole_header(octets: memoryview) -> ContainerHeader:
    header = HeaderReader(declared=octets.nbytes, room=octets.nbytes).read(octets)
    if header is None:
        raise ContainerError(BAD_REQUEST, "the container ends within its header")
    return header


def _bounds(header: ContainerHeader) -> Iterator[tuple[int, int, int]]:
    """Go through the layers of a container: where K starts, where V starts, where V ends."""
    start = header.header_bytes
    for k_bytes, v_bytes in header.sections:
        yield start, start + k_bytes, start + k_bytes + v_bytes
        start += k_bytes + v_bytes
