"""Streams as a link of trio's pump wants them: received into shared memory, sent as far as goes without
waiting."""

from __future__ import annotations

import socket
from contextlib import suppress

import trio

from kvsp_h2.frames import Buffer
from kvsp_h2.pumping import RECEIVE_BYTES

__all__ = ["AnyStream", "LoopSocket"]


class LoopSocket:
    """A socket that is read and written as far as goes without waiting."""

    def __init__(self, stream: trio.SocketStream, memory: memoryview) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = socket.socket(fileno=stream.socket.detach())
        self._socket.setblocking(False)
        self._memory = memory
        self._waited = True

    async def receive(self) -> Buffer:
        """Return what arrives, in memory that all sockets share: no other task runs before it is dealt
        with."""
        if not self._waited:
            await trio.lowlevel.checkpoint()
        self._waited = False
        while True:
            try:
                return self._memory[: self._socket.recv_into(self._memory)]
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._socket)
                self._waited = True

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
