"""Reads a container into sections that lie wherever their reader wants them, with a single copy.

`kvsp_core.container.IncomingBlock` takes a container into one piece of memory. An engine wants the K and V
sections of each layer in memory of its own instead: `ScatteredBlock` puts every octet there as it comes, and
tells the same, of layers that came together at once. Protocol section "KV Block Container"; requirements
KC-2, KC-3 and KC-5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final, TypeAlias

import attrs

from kvsp_core.container import BlockArrived, BlockRefused, HeaderArrived, replica_digest
from kvsp_core.container_header import FIXED_BYTES, ContainerError, ContainerHeader, HeaderReader
from kvsp_core.errors import LocalProtocolError
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.limits import MAX_CONTAINER_BYTES
from kvsp_core.problems import BAD_REQUEST, Problem

__all__ = ["LayersArrived", "ScatteredBlock", "ScatteredEvent", "SectionsOf"]

SectionsOf: TypeAlias = Callable[[int], tuple[memoryview, memoryview]]
"""Returns the memory for the K and the V section of a layer: writable octets, as many as the section has."""


@attrs.frozen
class LayersArrived:
    """Layers are complete, `first` and those after it; their digests are hex32."""

    first: int
    digests: tuple[str, ...]


ScatteredEvent: TypeAlias = HeaderArrived | LayersArrived | BlockArrived | BlockRefused

_NOWHERE: Final = memoryview(b"")
_TRAILING: Final = Problem(BAD_REQUEST, "octets follow the end that the header states")


class ScatteredBlock:
    """Takes the octets of a container in any split, each to its section's memory.

    `sections_of` is asked for the memory of each layer before its first octet is there. What is written there
    is to be used once `LayersArrived` says so and its digest is the right one. A container in another `codec`
    is refused. The other arguments and events, and the errors, are those of `IncomingBlock`, with the digest
    of the container always computed; memory that does not have the size of its section is a
    `LocalProtocolError`.
    """

    def __init__(
        self,
        sections_of: SectionsOf,
        *,
        descriptor: CompatibilityDescriptor | None = None,
        codec: int | None = None,
        layers: range | None = None,
        size_bytes: int | None = None,
        max_size_bytes: int = MAX_CONTAINER_BYTES,
    ) -> None:
        self._sections_of = sections_of
        self._reader = HeaderReader(
            descriptor=descriptor, codec=codec, layers=layers, declared=size_bytes, room=max_size_bytes
        )
        self._staged = bytearray()
        self._sha256 = hashlib.sha256()
        self._layer_hash = hashlib.sha256()
        self._digests: list[str] = []
        self._rooms = (_NOWHERE, _NOWHERE)
        """The memory of the layer that is arriving."""
        self._filled = self._missing = 0
        """How many octets of it have come, and are still to come."""
        self._over = False
        self.header: ContainerHeader | None = None

    @property
    def layer_digests(self) -> tuple[str, ...]:
        """The digests of the layers that have arrived, in order, computed from the octets that came."""
        return tuple(self._digests)

    def receive_data(self, data: bytes | bytearray | memoryview) -> tuple[ScatteredEvent, ...]:
        """Take the next octets; return what they complete."""
        self._check_open()
        octets = memoryview(data).cast("B")
        events: list[ScatteredEvent] = []
        before = len(self._digests)
        if self.header is None:
            try:
                octets = self._receive_header(octets, events)
            except ContainerError as error:
                return (*events, self._refused(error.problem))
        if self.header is not None and octets:
            octets = self._receive_sections(self.header, octets)
        if self.header is not None and len(self._digests) > before:
            events.append(LayersArrived(self.header.first_layer + before, tuple(self._digests[before:])))
        if octets:
            events.append(self._refused(_TRAILING))
        return tuple(events)

    def receive_eof(self) -> tuple[ScatteredEvent, ...]:
        """Say that no more octets will come; return `BlockArrived`, or `BlockRefused` if some are missing."""
        self._check_open()
        header = self.header
        if header is None or len(self._digests) < len(header.sections):
            expected = "its header" if header is None else f"its {header.size_bytes} octets"
            return (self._refused(Problem(BAD_REQUEST, f"the container ends within {expected}")),)
        self._over = True
        return (BlockArrived(header, replica_digest(self._digests), self._sha256.digest()),)

    def _check_open(self) -> None:
        if self._over:
            raise LocalProtocolError("this container has ended; read the next with a new ScatteredBlock")

    def _refused(self, problem: Problem) -> BlockRefused:
        self._over = True
        self._rooms, self._missing = (_NOWHERE, _NOWHERE), 0
        return BlockRefused(problem)

    def _receive_header(self, octets: memoryview, events: list[ScatteredEvent]) -> memoryview:
        """Take octets of the header; return those after it."""
        while octets and self.header is None:
            missing = max(FIXED_BYTES, self._reader.header_bytes) - len(self._staged)
            self._staged += octets[:missing]
            octets = octets[missing:]
            self.header = self._reader.read(memoryview(self._staged))
        if self.header is not None:
            self._sha256.update(self._staged)
            events.append(HeaderArrived(self.header))
            self._begin_layer(self.header)
        return octets

    def _receive_sections(self, header: ContainerHeader, octets: memoryview) -> memoryview:
        """Take octets of layers; return those after the last."""
        self._sha256.update(octets)
        at, size = 0, octets.nbytes
        while at < size and self._missing:
            piece = octets[at : at + self._missing]
            count = piece.nbytes
            at += count
            self._layer_hash.update(piece)
            self._place(piece, count)
            self._filled += count
            self._missing -= count
            if not self._missing:
                self._end_layer()
                self._begin_layer(header)
        return octets[at:]

    def _place(self, piece: memoryview, count: int) -> None:
        """Copy octets of a layer to where they belong."""
        (k_room, v_room), start = self._rooms, self._filled
        middle = k_room.nbytes
        end = start + count
        if start < middle < end:
            k_room[start:] = piece[: middle - start]
            v_room[: end - middle] = piece[middle - start :]
        elif end <= middle:
            k_room[start:end] = piece
        else:
            v_room[start - middle : end - middle] = piece

    def _begin_layer(self, header: ContainerHeader) -> None:
        """Get the memory of the next layer; one whose sections are empty is complete at once."""
        while not self._missing and (number := len(self._digests)) < len(header.sections):
            layer, sizes = header.first_layer + number, header.sections[number]
            k_room, v_room = self._rooms = self._sections_of(layer)
            if (k_room.nbytes, v_room.nbytes) != sizes:
                raise LocalProtocolError(
                    f"layer {layer}: its sections have {sizes} octets, the memory given has another size"
                )
            self._filled, self._missing = 0, k_room.nbytes + v_room.nbytes
            if not self._missing:
                self._end_layer()

    def _end_layer(self) -> None:
        self._digests.append(self._layer_hash.hexdigest())
        self._layer_hash = hashlib.sha256()
