"""Bodies that come in: the windows that the peer is given, and when they are opened again (RFC 9113, 6.9)."""

from __future__ import annotations

from h2.errors import ErrorCodes

from kvsp_h2.exchange import Exchange
from kvsp_h2.frames import Fault, window_update
from kvsp_h2.limits import WireLimits
from kvsp_h2.sending import DEFAULT_WINDOW

__all__ = ["Windows"]


class Windows:
    """What the peer may send on a connection, and on each stream of it."""

    def __init__(self, limits: WireLimits) -> None:
        self._connection_bytes = limits.connection_window_bytes
        self._stream_bytes = limits.stream_window_bytes
        self.left = limits.connection_window_bytes
        """Octets that the peer may still send on all streams together."""
        self.credit = 0
        """Octets dealt with that the peer was not told of."""

    def first_update(self) -> bytes:
        """Return the frame that opens the window of the connection; every peer begins with a small one."""
        more = self._connection_bytes - DEFAULT_WINDOW
        return window_update(0, more) if more else b""

    def take(self, frame_length: int) -> None:
        """Take note of a DATA frame on any stream. Raises `Fault` where the peer may not send it."""
        if frame_length > self.left:
            raise Fault(ErrorCodes.FLOW_CONTROL_ERROR, "more octets than the window of the connection allows")
        self.left -= frame_length

    def take_on_stream(self, exchange: Exchange, frame_length: int) -> None:
        """Do so on the stream of an exchange."""
        if frame_length > exchange.window:
            raise Fault(ErrorCodes.FLOW_CONTROL_ERROR, "more octets than the window of the stream allows")
        exchange.window -= frame_length

    def give_back(self, exchange: Exchange | None, count: int) -> bytes:
        """Count octets dealt with; return frames that tell the peer, once a quarter of a window has come
        together."""
        updates = b""
        self.credit += count
        if self.credit * 4 >= self._connection_bytes:
            updates = window_update(0, self.credit)
            self.left += self.credit
            self.credit = 0
        if exchange is None or exchange.body_ended:
            return updates
        exchange.credit += count
        if exchange.credit * 4 < self._stream_bytes:
            return updates
        expected = exchange.expected
        if expected is not None and expected - exchange.received <= exchange.window:
            return updates
        updates += window_update(exchange.stream_id, exchange.credit)
        exchange.window += exchange.credit
        exchange.credit = 0
        return updates
