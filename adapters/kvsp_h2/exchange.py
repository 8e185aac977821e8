"""One exchange on a stream, and what a connection keeps for all of them: budgets, heads, streams that
linger."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from h2.stream import H2Stream
from hpack import Encoder

from kvsp_h2.fields import HeaderList

__all__ = ["Budget", "Exchange", "HeadEncoder", "Lingering"]

_KEPT_BLOCKS: Final = 32


class Budget:
    """How many things a peer may still make us do: a burst, refilled by time."""

    __slots__ = ("_burst", "_left", "_per_s", "_since_ms")

    def __init__(self, burst: int, per_s: int, now_ms: int) -> None:
        self._burst = self._left = burst * 1000
        self._per_s = per_s
        self._since_ms = now_ms

    def spend(self, now_ms: int) -> bool:
        """Take one; return whether there was one."""
        self._left = min(self._burst, self._left + (now_ms - self._since_ms) * self._per_s)
        self._since_ms = now_ms
        if self._left < 1000:
            return False
        self._left -= 1000
        return True


class Exchange:
    """One request and its response on a stream: how far both have got."""

    __slots__ = (
        "body_ended",
        "credit",
        "expected",
        "free",
        "gone",
        "head_received",
        "head_sent",
        "method",
        "moved",
        "out",
        "out_bytes",
        "out_end",
        "out_ended",
        "pressed",
        "queued",
        "received",
        "sent_bytes",
        "state",
        "stream_id",
        "unacknowledged",
        "untold",
        "wants_continue",
        "was_reset",
        "window",
    )

    def __init__(self, stream_id: int, state: H2Stream, window: int) -> None:
        self.stream_id = stream_id
        self.state = state
        self.method = ""
        self.gone = False
        """Whether it is over; calls for it do nothing any more."""
        self.untold = False
        """Whether nobody was told of it: it was refused here."""
        self.was_reset = False
        # What comes in: octets the peer may still send, octets that count but were not acknowledged,
        # octets acknowledged that the peer was not told of.
        self.window = window
        self.unacknowledged = 0
        self.credit = 0
        self.head_received = self.body_ended = self.wants_continue = False
        self.expected: int | None = None
        self.free: Callable[[], memoryview] | None = None
        """Says where octets belong, where the application has said so."""
        self.received = 0
        # What goes out.
        self.head_sent = self.out_end = self.out_ended = False
        self.out: deque[memoryview] = deque()
        self.out_bytes = self.sent_bytes = 0
        self.queued = self.pressed = False
        self.moved = True
        """Whether octets moved since the timer last looked."""

    @property
    def waits_for_peer(self) -> bool:
        """Whether the next octet is the peer's to send, or to make room for."""
        return self.out_bytes > 0 or (self.head_received and not self.body_ended and not self.unacknowledged)

    @property
    def has_output(self) -> bool:
        """Whether there is something to put into frames."""
        return self.out_bytes > 0 or (self.out_end and not self.out_ended)


class HeadEncoder:
    """Encodes header lists and keeps the last blocks, since HPACK in Python is most of the cost of a small
    message. Huffman's code is left out: it would cost both ends more than the octets it saves.

    Values stay out of the compression tables of both ends: a block means the same each time it is sent.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._blocks: dict[tuple[tuple[bytes, bytes], ...], bytes] = {}

    def encode(self, headers: HeaderList) -> bytes:
        """Return a header block."""
        key = tuple(headers)
        block = None if self._encoder.header_table.resized else self._blocks.get(key)
        if block is None:
            resized = self._encoder.header_table.resized
            block = self._encoder.encode([(name, value, True) for name, value in headers], huffman=False)
            if len(self._blocks) >= _KEPT_BLOCKS:
                self._blocks.clear()
            if not resized:  # else it begins with the new size, which is said once
                self._blocks[key] = block
        return block


class Lingering:
    """Streams that were answered before their request was whole, each with when it is to be cut off."""

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._due_ms: OrderedDict[int, int] = OrderedDict()

    @property
    def due_ms(self) -> int | None:
        """When the next is to be cut off."""
        return next(iter(self._due_ms.values())) if self._due_ms else None

    def add(self, stream_id: int, due_ms: int) -> None:
        """Let a stream linger; times only go up."""
        self._due_ms[stream_id] = due_ms

    def discard(self, stream_id: int) -> None:
        """Forget a stream that has ended by itself."""
        self._due_ms.pop(stream_id, None)

    def take_due(self, now_ms: int) -> list[int]:
        """Return, and forget, the streams whose time is over, and the oldest of those that are too many."""
        taken = []
        while self._due_ms:
            stream_id, due_ms = next(iter(self._due_ms.items()))
            if now_ms < due_ms and len(self._due_ms) <= self._at_most:
                break
            del self._due_ms[stream_id]
            taken.append(stream_id)
        return taken
