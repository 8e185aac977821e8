"""Taking in bodies as they come: documents up to a limit, containers into buffers, and lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvsp_core.container import (
    BlockArrived,
    BlockEvent,
    BlockRefused,
    HeaderArrived,
    IncomingBlock,
    LayerArrived,
)
from kvsp_core.container_header import ContainerError, ContainerHeader
from kvsp_core.problems import BAD_REQUEST, TOO_LARGE, Problem
from kvsp_services.buffers import BlockBuffer

__all__ = ["MAX_LINE_BYTES", "NOWHERE", "ContainerReceiver", "DocumentReceiver", "LineReceiver", "Refusal"]

MAX_LINE_BYTES: Final = 1 << 20
NOWHERE: Final = memoryview(b"")
"""Where octets belong that are not to be put anywhere."""


class Refusal(Exception):
    """A body is not acceptable; `problem` is what to answer."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class DocumentReceiver:
    """Collects a body of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int, declared_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._octets = bytearray()
        if declared_bytes is not None:
            self._check(declared_bytes)

    def _check(self, size: int) -> None:
        if size > self._limit_bytes:
            detail = f"the body has more than the {self._limit_bytes} octets allowed; split the request"
            raise Refusal(Problem(TOO_LARGE, detail))

    def feed(self, data: bytes | memoryview) -> None:
        """Take octets. Raises `Refusal` where they are too many."""
        self._check(len(self._octets) + len(data))
        self._octets += data

    def end(self) -> bytes:
        """Return the body."""
        return bytes(self._octets)


class ContainerReceiver:
    """Decodes a container into a buffer as it arrives, and tells of each layer.

    `sha256` is the digest of the container, hex32, once `end` has returned.
    """

    def __init__(self, buffer: BlockBuffer, limit_bytes: int, declared_bytes: int | None) -> None:
        self._buffer = buffer
        self._digests: list[str] = []
        self.sha256 = ""
        self.header: ContainerHeader | None = None
        try:
            self._block = IncomingBlock(
                acquire=buffer.acquire,
                size_bytes=declared_bytes,
                max_size_bytes=limit_bytes,
                with_sha256=True,
            )
        except ContainerError as error:
            raise Refusal(error.problem) from None

    @property
    def free(self) -> memoryview:
        """The memory where the next octets belong; empty while the header is not read, and at the end."""
        return self._block.free if self._block.header is not None else NOWHERE

    def feed(self, data: bytes | memoryview) -> list[LayerArrived]:
        """Take octets and return the layers they complete. Raises `Refusal`."""
        return self._tell(self._block.receive_data(data))

    def placed(self, size_bytes: int) -> list[LayerArrived]:
        """The same for octets that were put into `free`."""
        return self._tell(self._block.received(size_bytes))

    def _tell(self, events: Sequence[BlockEvent]) -> list[LayerArrived]:
        layers: list[LayerArrived] = []
        for event in events:
            match event:
                case LayerArrived():
                    layers.append(event)
                    self._digests.append(event.digest)
                case HeaderArrived(header):
                    self.header = header
                case BlockRefused(problem):
                    raise Refusal(problem)
                case BlockArrived():
                    pass
        return layers

    def end(self) -> None:
        """Take note that no more octets will come. Raises `Refusal` where some are missing."""
        (event,) = self._block.receive_eof()
        if isinstance(event, BlockRefused):
            raise Refusal(event.problem)
        assert isinstance(event, BlockArrived)
        assert event.sha256 is not None
        self.sha256 = event.sha256.hex()
        data = self._block.container[event.header.header_bytes :]
        self._buffer.fill(event.header, data, tuple(self._digests), self.sha256)

    @property
    def layer_digests(self) -> tuple[str, ...]:
        """The digests of the layers so far."""
        return tuple(self._digests)


class LineReceiver:
    """Splits a body into lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Take octets and return the lines they complete, without their newlines. Raises `Refusal`."""
        self._rest += data
        if b"\n" not in self._rest:
            self._check(len(self._rest))
            return []
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        self._check(len(rest))
        return [line for line in lines if line.strip()]

    def _check(self, size: int) -> None:
        if size > MAX_LINE_BYTES:
            raise Refusal(Problem(BAD_REQUEST, f"a line has more than {MAX_LINE_BYTES} octets"))

    def end(self) -> None:
        """Take note that no more octets will come. Raises `Refusal` where a line was cut off."""
        if self._rest.strip():
            raise Refusal(Problem(BAD_REQUEST, "the last line was cut off"))
