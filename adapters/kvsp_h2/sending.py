"""Bodies that go out: exchanges take turns, within the windows that the peer gives (RFC 9113, 6.9)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from h2.errors import ErrorCodes

from kvsp_h2.exchange import Exchange
from kvsp_h2.frames import HEAD_BYTES, Buffer, Fault, data_head

__all__ = ["DEFAULT_WINDOW", "Sender"]

DEFAULT_WINDOW: Final = 65_535
_DEFAULT_FRAME: Final = 16_384
_LARGEST_WINDOW: Final = 2**31 - 1
_TURN_BYTES: Final = 128 << 10
"""What one exchange may send before it is the next one's turn."""


class Sender:
    """What the peer lets us send, and whose turn it is to send it."""

    def __init__(self) -> None:
        self.largest = _DEFAULT_FRAME
        """Octets of payload that the peer takes in a frame."""
        self.initial_window = DEFAULT_WINDOW
        """The window that a stream begins with."""
        self._window = DEFAULT_WINDOW
        self._ready: deque[Exchange] = deque()
        self._starved: dict[Exchange, None] = {}
        """Exchanges with output that wait for the window of the connection."""

    def queue(self, exchange: Exchange) -> None:
        """Give an exchange a turn, where it has output and its peer has room for it."""
        if exchange.queued or not exchange.has_output:
            return
        if exchange.out_bytes and exchange.send_window <= 0:
            return
        exchange.queued = True
        self._ready.append(exchange)

    def next_turn(self) -> Exchange | None:
        """Return the exchange whose turn it is; it takes none before it is queued again."""
        while self._ready:
            exchange = self._ready.popleft()
            if exchange.out_bytes and self._window <= 0:
                self._starved[exchange] = None
                continue
            exchange.queued = False
            if not exchange.gone:
                return exchange
        return None

    def forget(self, exchange: Exchange) -> None:
        """Let go of an exchange that is over, so that a peer which opens no window is not waited for."""
        self._starved.pop(exchange, None)

    def put_into_frames(self, exchange: Exchange, room: int, parts: list[Buffer]) -> int:
        """Append DATA frames as far as room, windows and what there is go; return the octets of frames."""
        if self._ready:
            room = min(room, _TURN_BYTES)
        out, stream_id, largest = exchange.out, exchange.stream_id, self.largest
        # Heads count too, so that what goes out at a time fills records of TLS evenly.
        heads_bytes = -(-room // (largest + HEAD_BYTES)) * HEAD_BYTES
        count = min(room - heads_bytes, exchange.out_bytes, self._window, exchange.send_window)
        if count <= 0:
            if exchange.out_end and not exchange.out_bytes:
                parts.append(data_head(stream_id, 0, True))
            return 0
        last = exchange.out_end and count == exchange.out_bytes
        full = data_head(stream_id, largest, False) if count > largest else b""
        piece, at, left = out.popleft(), 0, count
        while left:
            length = largest if left > largest else left
            left -= length
            parts.append(
                full if left and length == largest else data_head(stream_id, length, last and not left)
            )
            while (rest := piece.nbytes - at) < length:
                parts.append(piece[at:])
                length -= rest
                piece, at = out.popleft(), 0
            parts.append(piece[at : at + length])
            at += length
        if at < piece.nbytes:
            out.appendleft(piece[at:])
        self._window -= count
        exchange.send_window -= count
        exchange.out_bytes -= count
        exchange.sent_bytes += count
        exchange.moved = True
        return count + heads_bytes

    # Windows that the peer opens. All of these may raise `Fault`.

    def open_window(self, increment: int) -> None:
        """Let the exchanges that waited for the window of the connection have their turn."""
        self._window = _opened(self._window, increment)
        self._ready.extend(self._starved)
        self._starved.clear()

    def open_stream_window(self, exchange: Exchange, increment: int) -> None:
        """Let an exchange that waited for its own window have its turn."""
        exchange.send_window = _opened(exchange.send_window, increment)
        self.queue(exchange)

    def change_initial_window(self, size: int, exchanges: Iterable[Exchange]) -> None:
        """Change the windows of all streams by what a new initial window differs from the old one."""
        increment, self.initial_window = size - self.initial_window, size
        for exchange in exchanges:
            self.open_stream_window(exchange, increment)


def _opened(window: int, increment: int) -> int:
    if window + increment > _LARGEST_WINDOW:
        raise Fault(ErrorCodes.FLOW_CONTROL_ERROR, "a window is larger than it may be")
    return window + increment
