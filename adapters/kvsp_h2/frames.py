"""Frames of HTTP/2: octets in any split in, control frames and pieces of DATA out (RFC 9113, section 4).

What can be said of a frame without knowing its stream is checked here, at its first nine octets: its size,
its place in a header block, that SETTINGS come first. So the memory that a peer can make us hold is bounded
by the largest control frame. DATA is passed on as it comes; unknown frames are skipped.
"""

from __future__ import annotations

import struct
import sys
from typing import Final, Protocol, TypeAlias

from h2.errors import ErrorCodes

from kvsp_h2.limits import WireLimits

__all__ = [
    "CONTINUATION",
    "DATA",
    "END_STREAM",
    "GOAWAY",
    "HEADERS",
    "HEAD_BYTES",
    "PREFACE",
    "PUSH_PROMISE",
    "RST_STREAM",
    "WINDOW_UPDATE",
    "Buffer",
    "Fault",
    "FrameReader",
    "FrameReceiver",
    "code_name",
    "data_head",
    "goaway",
    "header_frames",
    "rst_stream",
    "window_update",
]

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

_HEAD: Final = struct.Struct(">HBBBL")
_WINDOW_UPDATE: Final = struct.Struct(">HBBBLL")
_GOAWAY: Final = struct.Struct(">HBBBLLL")
_FIXED_LENGTH: Final = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_GOAWAY_BYTES: Final = 8
_ON_STREAMS: Final = frozenset((DATA, HEADERS, PRIORITY, RST_STREAM, PUSH_PROMISE, CONTINUATION))
_ON_CONNECTION: Final = frozenset((SETTINGS, PING, GOAWAY))
_CODES: Final = frozenset(int(code) for code in ErrorCodes)


def code_name(code: int) -> str:
    """Return what RFC 9113, 7 calls the error code of an RST_STREAM or GOAWAY frame."""
    return ErrorCodes(code).name if code in _CODES else "an unknown code"


def data_head(stream_id: int, length: int, ends: bool) -> bytes:
    """Return the nine octets before the payload of a DATA frame."""
    return _HEAD.pack(length >> 8, length & 255, DATA, ends, stream_id)


def header_frames(stream_id: int, block: bytes, largest: int, *, end: bool) -> bytes:
    """Return a header block as HEADERS and, where it is larger than a frame may be, CONTINUATION frames."""
    size = len(block)
    if size <= largest:
        return _HEAD.pack(size >> 8, size & 255, HEADERS, END_HEADERS | end, stream_id) + block
    pieces = [block[at : at + largest] for at in range(0, size, largest)]
    frames = []
    for number, piece in enumerate(pieces):
        kind = CONTINUATION if number else HEADERS
        flags = (END_HEADERS if number == len(pieces) - 1 else 0) | (END_STREAM if end and not number else 0)
        frames += [_HEAD.pack(len(piece) >> 8, len(piece) & 255, kind, flags, stream_id), piece]
    return b"".join(frames)


def window_update(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame."""
    return _WINDOW_UPDATE.pack(0, 4, WINDOW_UPDATE, 0, stream_id, increment)


def rst_stream(stream_id: int, code: int) -> bytes:
    """Return an RST_STREAM frame."""
    return _WINDOW_UPDATE.pack(0, 4, RST_STREAM, 0, stream_id, code)


def goaway(last_stream_id: int, code: int) -> bytes:
    """Return a GOAWAY frame."""
    return _GOAWAY.pack(0, 8, GOAWAY, 0, 0, last_stream_id, code)


Buffer: TypeAlias = bytes | bytearray | memoryview


class Fault(Exception):
    """The peer broke the protocol: the connection ends with this error code."""

    def __init__(self, code: ErrorCodes, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class FrameReceiver(Protocol):
    """Who is told of frames. Every method may raise `Fault`."""

    def data_begins(self, stream_id: int, length: int, frame_length: int, ends: bool) -> None:
        """A DATA frame with `length` octets of data has begun; windows count `frame_length`."""

    def data_arrives(self, octets: memoryview) -> None:
        """Octets of the data of the frame that has begun."""

    def data_is_placed(self, size_bytes: int) -> None:
        """The same, where they are already where they belong."""

    def data_ends(self) -> None:
        """The DATA frame is complete."""

    def block_arrives(self, stream_id: int, block: bytes, ends: bool) -> None:
        """A header block of HEADERS and CONTINUATION frames is complete."""

    def frame_arrives(self, kind: int, stream_id: int, frame: Buffer) -> None:
        """Any other frame is complete; `frame` is all of it."""

    def frame_skipped(self) -> None:
        """A frame that means nothing to us has come and is being skipped."""


class FrameReader:
    """Cuts the octets of a connection into frames."""

    def __init__(self, receiver: FrameReceiver, limits: WireLimits) -> None:
        self._receiver = receiver
        self._limits = limits
        self._partial = bytearray()
        self._wanted = HEAD_BYTES
        """Octets that `_partial` is to hold before it can be looked at again."""
        self._kind = self._stream_id = 0
        self._in_data = False
        self._data_left = self._skip_left = 0
        self._block_stream = self._block_frames = self._block_bytes = 0
        self._block: list[bytes] = []
        self._block_ends = False
        self._started = self._stopped = False
        self._begun = 0
        """Frames and header blocks whose head has come."""
        self.frames_left = sys.maxsize
        """Frames that are still read before others are to have their turn; who gives octets sets it."""

    def stop(self) -> None:
        """Take nothing more: the connection is over."""
        self._stopped = True

    @property
    def under_way(self) -> int:
        """The number of the frame other than DATA, or header block, that has begun and is not complete; 0
        where there is none. The first frame has begun before its first octet."""
        if self._block_stream:
            return self._begun
        if self._partial or not self._started:
            return self._begun + (len(self._partial) < HEAD_BYTES)
        return 0

    @property
    def data_left(self) -> int:
        """Octets of data that are still to come in the DATA frame under way; 0 where there is none."""
        return self._data_left

    def receive_placed(self, size_bytes: int) -> None:
        """Take note of octets of the DATA frame under way that were put where they belong."""
        self._data_left -= size_bytes
        self._receiver.data_is_placed(size_bytes)
        self._end_payload()

    def receive(self, view: memoryview) -> int:
        """Take octets and tell the receiver what they make; return how many were taken: all of them, where
        `frames_left` is enough. Raises `Fault`."""
        at, size = 0, view.nbytes
        while at < size and not self._stopped:
            if self._in_data or self._skip_left:
                at = self._pass_payload(view, at)
            elif self.frames_left <= 0:
                return at
            elif self._partial or size - at < HEAD_BYTES:
                at = self._collect(view, at)
            else:
                wanted = self._begin(view, at)
                if wanted <= HEAD_BYTES:
                    at += self._complete(view[at : at + HEAD_BYTES], wanted)
                elif size - at >= wanted:
                    at += self._complete(view[at : at + wanted], wanted)
                else:
                    self._wanted = wanted
                    self._partial += view[at:]
                    break
        return size

    def _collect(self, view: memoryview, at: int) -> int:
        """Add octets to a frame whose beginning came before."""
        partial = self._partial
        if not partial:
            self._wanted = HEAD_BYTES
        take = min(self._wanted - len(partial), view.nbytes - at)
        partial += view[at : at + take]
        if len(partial) == self._wanted == HEAD_BYTES:
            self._wanted = self._begin(partial, 0)
        if len(partial) >= self._wanted:
            frame = memoryview(bytes(partial))
            partial.clear()
            self._complete(frame, self._wanted)
        return at + take

    def _complete(self, frame: memoryview, wanted: int) -> int:
        """Deal with the octets that `_begin` asked for; return how many were used."""
        if self._kind == DATA:
            return self._begin_data(frame)
        if self._skip_left or wanted < HEAD_BYTES:
            return HEAD_BYTES
        if self._kind in (HEADERS, CONTINUATION):
            self._add_to_block(frame)
        else:
            self._receiver.frame_arrives(self._kind, self._stream_id, frame)
        return wanted

    def _add_to_block(self, frame: memoryview) -> None:
        """Take a HEADERS or CONTINUATION frame; tell of the header block once it is complete."""
        flags = frame[4]
        if self._kind == HEADERS:
            self._block_ends = bool(flags & END_STREAM)
            fragment = _without_extras(frame[HEAD_BYTES:], flags)
        else:
            fragment = frame[HEAD_BYTES:]
        if flags & END_HEADERS:
            block = b"".join((*self._block, fragment))
            self._block.clear()
            self._receiver.block_arrives(self._stream_id, block, self._block_ends)
        else:
            self._block.append(bytes(fragment))

    def _begin(self, octets: Buffer, at: int) -> int:
        """Check the head of a frame; return how many octets of it, head included, are needed to go on."""
        high, low, kind, flags, stream_id = _HEAD.unpack_from(octets, at)
        length: int = high << 8 | low
        stream_id &= 0x7FFFFFFF
        self._kind, self._stream_id = kind, stream_id
        self.frames_left -= 1
        self._begun += kind != CONTINUATION
        if not self._started:
            self._check_first(kind, flags)
        if self._block_stream and (kind != CONTINUATION or stream_id != self._block_stream):
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "a header block was interrupted")
        if length > self._limits.max_frame_bytes:
            raise Fault(ErrorCodes.FRAME_SIZE_ERROR, "a frame is larger than we allow")
        if (kind in _ON_STREAMS and not stream_id) or (kind in _ON_CONNECTION and stream_id):
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "a frame is on a stream where it does not belong")
        if kind == DATA:
            if not flags & PADDED:
                return HEAD_BYTES
            if not length:
                raise Fault(ErrorCodes.FRAME_SIZE_ERROR, "a padded frame has no room for its padding")
            return HEAD_BYTES + 1
        if length != _FIXED_LENGTH.get(kind, length):
            raise Fault(ErrorCodes.FRAME_SIZE_ERROR, "a frame has not the size of its kind")
        if kind > CONTINUATION or kind == PRIORITY:
            self._skip_left = length
            self._receiver.frame_skipped()
            return 0
        if kind in (HEADERS, CONTINUATION, PUSH_PROMISE):
            self._count_block(kind, flags, stream_id, length)
        elif (kind == SETTINGS and flags & ACK and length) or (kind == GOAWAY and length < _GOAWAY_BYTES):
            raise Fault(ErrorCodes.FRAME_SIZE_ERROR, "a frame has not the size of its kind")
        elif kind == SETTINGS and length > 6 * self._limits.max_settings:
            raise Fault(ErrorCodes.ENHANCE_YOUR_CALM, "too many settings in a frame")
        elif kind == GOAWAY and length > self._limits.max_header_block_bytes:
            raise Fault(ErrorCodes.ENHANCE_YOUR_CALM, "a GOAWAY frame is too large")
        return HEAD_BYTES + length

    def _check_first(self, kind: int, flags: int) -> None:
        if kind != SETTINGS or flags & ACK:
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        self._started = True

    def _count_block(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        """Count a frame of a header block, so that the block stays within its limits."""
        if kind == CONTINUATION and not self._block_stream:
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "CONTINUATION without a header block")
        self._block_frames += 1
        self._block_bytes += length
        if (
            self._block_bytes > self._limits.max_header_block_bytes
            or self._block_frames > self._limits.max_header_frames
        ):
            raise Fault(ErrorCodes.ENHANCE_YOUR_CALM, "a header block is too large")
        if flags & END_HEADERS:
            self._block_stream = self._block_frames = self._block_bytes = 0
        else:
            self._block_stream = stream_id

    def _begin_data(self, frame: memoryview) -> int:
        """Begin the DATA frame whose head, and pad length if it has one, is `frame`; return its octets."""
        high, low, _, flags, stream_id = _HEAD.unpack_from(frame)
        length = frame_length = high << 8 | low
        used = HEAD_BYTES
        padding = 0
        if flags & PADDED:
            padding = frame[HEAD_BYTES]
            length -= 1 + padding
            used += 1
            if length < 0:
                raise Fault(ErrorCodes.PROTOCOL_ERROR, "padding is longer than its frame")
        self._receiver.data_begins(stream_id & 0x7FFFFFFF, length, frame_length, bool(flags & END_STREAM))
        self._data_left, self._skip_left = length, padding
        if length or padding:
            self._in_data = True
        else:
            self._receiver.data_ends()
        return used

    def _pass_payload(self, view: memoryview, at: int) -> int:
        """Pass on what is there of the payload of a DATA frame, or skip padding and unknown frames."""
        there = view.nbytes - at
        if self._data_left:
            take = min(self._data_left, there)
            self._data_left -= take
            self._receiver.data_arrives(view[at : at + take])
        else:
            take = min(self._skip_left, there)
            self._skip_left -= take
        self._end_payload()
        return at + take

    def _end_payload(self) -> None:
        if self._in_data and not (self._data_left or self._skip_left):
            self._in_data = False
            self._receiver.data_ends()


def _without_extras(payload: memoryview, flags: int) -> memoryview:
    """Return the header block fragment in the payload of a HEADERS frame (RFC 9113, 6.2)."""
    start = bool(flags & PADDED) + 5 * bool(flags & HAS_PRIORITY)
    if payload.nbytes < start:
        raise Fault(ErrorCodes.FRAME_SIZE_ERROR, "HEADERS have no room for padding or priority")
    end = payload.nbytes - (payload[0] if flags & PADDED else 0)
    if end < start:
        raise Fault(ErrorCodes.PROTOCOL_ERROR, "padding is longer than its frame")
    return payload[start:end]
