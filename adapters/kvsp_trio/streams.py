"""Streams as a link of trio's pump wants them: received into shared memory, sent as far as goes without
waiting."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final

import trio

from kvsp_h2.frames import Buffer
from kvsp_h2.pumping import RECEIVE_BYTES

__all__ = ["AnyStream", "LoopSocket"]

_READS_AT_A_TIME: Final = 4
"""Reads of a socket before other tasks have their turn: a turn of trio's costs as much as a small read."""


class LoopSocket:
    """A socket that is read and written as far as goes without waiting."""

    def __init__(self, stream: trio.SocketStream, memory: memoryview) -> None:
        with suppress(OSError):  # where the peer is gone already, as reading will tell
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = socket.socket(fileno=stream.socket.detach())
        self._socket.setblocking(False)
        self._memory = memory
        self._reads = _READS_AT_A_TIME

    def receive_now(self) -> Buffer | None:
        """Return what has arrived, in memory that all sockets share: no other task runs before it is dealt
        with. None where there is nothing, or others are to have their turn first: then wait for `receive`."""
        if self._reads >= _READS_AT_A_TIME:
            return None
        try:
            size = self._socket.recv_into(self._memory)
        except BlockingIOError:
            return None
        self._reads += 1
        return self._memory[:size]

    async def receive(self) -> Buffer:
        """Wait for what arrives, and return it as `receive_now` does."""
        if self._reads < _READS_AT_A_TIME:
            await trio.lowlevel.wait_readable(self._socket)
        else:
            await trio.lowlevel.checkpoint()
        self._reads = 0
        while (octets := self.receive_now()) is None:
            await trio.lowlevel.wait_readable(self._socket)
        return octets

    def send_some(self, octets: memoryview) -> int:
        """Send what goes without waiting; return how many octets that was. Errors show in `send`."""
        try:
            return self._socket.send(octets)
        except OSError:
            return 0

    async def send(self, octets: memoryview) -> None:
        """Send the rest."""
        while octets:
            await trio.lowlevel.wait_writable(self._socket)
            with suppress(BlockingIOError):
                octets = octets[self._socket.send(octets) :]

    async def aclose(self) -> None:
        """Close it."""
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()


class AnyStream:
    """Any other stream of trio's, such as those for tests."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream

    def receive_now(self) -> Buffer | None:
        """Return None: it would have to wait."""
        return None

    async def receive(self) -> Buffer:
        """Return what arrives."""
        return await self._stream.receive_some(RECEIVE_BYTES)

    def send_some(self, octets: memoryview) -> int:
        """Send nothing: it would have to wait."""
        return 0

    async def send(self, octets: memoryview) -> None:
        """Send octets."""
        await self._stream.send_all(octets)

    async def aclose(self) -> None:
        """Close it."""
        await trio.aclose_forcefully(self._stream)
