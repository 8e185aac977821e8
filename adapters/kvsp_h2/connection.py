"""What both ends of an HTTP/2 connection share: windows, exchanges, timeouts and limits; no I/O.

`kvsp_h2.http2` makes a server and a client of it. The library ``h2`` keeps the states of the connection and
its streams, HPACK and the control frames. DATA frames, which carry all that is large, are written and read
here, under the checks that ``h2`` would make. So are header blocks, for the time it takes ``h2``, and
GOAWAY, since ``h2`` allows nothing after it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import ClassVar, Final, cast

from h2 import events as h2_events
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.stream import H2Stream, StreamInputs
from hpack import HPACKError, OversizedHeaderListError

from kvsp_core.errors import LocalProtocolError
from kvsp_h2.events import (
    BodyEnded,
    ConnectionEnded,
    DataPlaced,
    DataReceived,
    Event,
    ExchangeEnded,
    GoingAway,
    OutputReady,
)
from kvsp_h2.exchange import Budget, Exchange, HeadEncoder, Lingering
from kvsp_h2.fields import HeaderList, Malformed, check_trailers
from kvsp_h2.frames import (
    GOAWAY,
    HEAD_BYTES,
    RST_STREAM,
    Buffer,
    Fault,
    FrameReader,
    data_head,
    goaway,
    header_frames,
    rst_stream,
    window_update,
)
from kvsp_h2.limits import WireLimits
from kvsp_h2.state import start_protocol

__all__ = ["DRAIN_PING", "HIGHEST_STREAM", "Connection"]

_DEFAULT_WINDOW: Final = 65_535
HIGHEST_STREAM: Final = 2**31 - 1
_HEADER_TABLE_BYTES: Final = 4096
_OUTPUT_BYTES: Final = 256 << 10
"""About what `data_to_send` returns at a time."""
_TURN_BYTES: Final = 128 << 10
"""What one exchange may send before it is the next one's turn."""
_WORTH_PLACING_BYTES: Final = 32 << 10
"""Data of a frame from which on it is put where it belongs instead of being passed on."""
_REMEMBERED: Final = 256
"""Streams that are over whose late frames are told from frames that break the protocol."""
DRAIN_PING: Final = b"drain..."
_ALIVE_PING: Final = b"alive..."
_SMALL_INCREMENT: Final = 1024
_CODES: Final = frozenset(int(code) for code in ErrorCodes)


class Connection:
    """One end of an HTTP/2 connection: octets and time in, events and octets out.

    The caller's loop, after each call that takes `now_ms`, and after answers given in between::

        while event := connection.next_event(): ...
        while octets := connection.data_to_send(): ...
        wake_up_at(connection.next_deadline_ms())

    What was sent may make events too, so the loop goes on until both have nothing. Calls for an exchange
    that is over do nothing: its `ExchangeEnded` may be on its way to the caller.
    """

    _CLIENT: ClassVar[bool]

    def __init__(self, now_ms: int, limits: WireLimits) -> None:
        self._limits = limits
        self._now_ms = now_ms
        self._h2 = start_protocol(limits, client=self._CLIENT)
        self._heads = HeadEncoder(self._h2.encoder)
        self._reader = FrameReader(self, limits)
        self._control = bytearray(self._h2.data_to_send())
        if limits.connection_window_bytes > _DEFAULT_WINDOW:
            self._control += window_update(0, limits.connection_window_bytes - _DEFAULT_WINDOW)
        self._events: deque[Event] = deque()
        self._exchanges: dict[int, Exchange] = {}
        self._over: OrderedDict[int, bool] = OrderedDict()
        """The last streams that are over, and whether by a reset: late frames are then expected."""
        self._lingering = Lingering(limits.max_streams)
        self._ready: deque[Exchange] = deque()
        self._starved: list[Exchange] = []
        """Exchanges with output that wait for the window of the connection."""
        self._window = limits.connection_window_bytes
        self._credit = 0
        self._incoming: Exchange | None = None
        self._incoming_id = 0
        self._frame_ends = False
        self.step_by_step = False
        """Whether it pays to be given octets in small pieces, asking for `place` in between: the last frame
        of data was a large one that could be put where it belongs."""
        self._settled = False
        self._resets = Budget(limits.resets_burst, limits.resets_per_s, now_ms)
        self._chatter = Budget(limits.control_burst, limits.control_per_s, now_ms)
        self._look_due_ms: int | None = None
        self._received_ms = self._idle_since_ms = now_ms
        self._ping_sent_ms: int | None = None
        self._head_due_ms: int | None = now_ms + limits.head_ms
        self._drain_due_ms: int | None = None
        self._goaway_due_ms: int | None = None
        self._drop_due_ms: int | None = None
        self._peer_left = False
        self._parting_words = ""
        """Why the peer left, where it said so."""
        self._last_accepted = HIGHEST_STREAM
        self._stopped = self._ended = self._dropped = False

    # What comes in ---------------------------------------------------------------------------------------

    def receive_data(self, data: Buffer, now_ms: int) -> None:
        """Take octets from the peer. What it does wrong ends the exchange or the connection, as an event."""
        if self._ended:
            return
        self._now_ms = self._received_ms = now_ms
        self._ping_sent_ms = None
        try:
            self._read(memoryview(data))
        except Fault as fault:
            self._end(fault.reason, fault.code)
        if not self._reader.mid_frame:
            self._head_due_ms = None
        elif self._head_due_ms is None:
            self._head_due_ms = now_ms + self._limits.head_ms
        self._collect()

    def place(self) -> memoryview | None:
        """Return memory to put the next octets from the peer into, for `receive_placed` then; None where
        they are to be given to `receive_data`.

        There is none before every event has been told.
        """
        exchange, left = self._incoming, self._reader.data_left
        if left < _WORTH_PLACING_BYTES or exchange is None or exchange.free is None or exchange.gone:
            return None
        if self._events:
            return None
        memory = exchange.free()
        return memory[:left] if memory.nbytes >= _WORTH_PLACING_BYTES else None

    def receive_placed(self, size_bytes: int, now_ms: int) -> None:
        """Take note of so many octets that were put into the memory from `place`."""
        self._now_ms = self._received_ms = now_ms
        self._ping_sent_ms = None
        self._reader.receive_placed(size_bytes)

    def receive_eof(self, now_ms: int) -> None:
        """Take the end of what the peer sends: the connection is over."""
        self._now_ms = now_ms
        if not self._ended:
            in_order = not self._exchanges and (self._peer_left or self._drain_due_ms is not None)
            self._end("" if in_order else "the connection was closed by the peer")

    def abort(self, reason: str, now_ms: int) -> None:
        """End the connection at once, for a reason that lies below HTTP/2."""
        self._now_ms = now_ms
        self._end(reason)

    def next_event(self) -> Event | None:
        """Return what happened next, or None where nothing is left to tell."""
        return self._events.popleft() if self._events else None

    def _read(self, view: memoryview) -> None:
        self._reader.receive(view)

    # What goes out ---------------------------------------------------------------------------------------

    def data_to_send(self) -> bytes:
        """Return the octets to send next, some 256 KiB at most; empty where there are none."""
        parts: list[Buffer] = []
        if self._control:
            parts.append(bytes(self._control))
            self._control.clear()
        room = 0 if self._ended else _OUTPUT_BYTES
        while room > HEAD_BYTES and self._ready:
            exchange = self._ready.popleft()
            exchange.queued = False
            if exchange.gone:
                continue
            if exchange.out_bytes and self._h2.outbound_flow_control_window <= 0:
                exchange.queued = True
                self._starved.append(exchange)
                continue
            room -= self._put_into_frames(exchange, min(room, _TURN_BYTES) if self._ready else room, parts)
            if exchange.out_end and not exchange.out_bytes:
                self._output_ended(exchange)
            else:
                self._queue(exchange)
            if self._control:
                parts.append(bytes(self._control))
                self._control.clear()
        return b"".join(parts)

    def _put_into_frames(self, exchange: Exchange, room: int, parts: list[Buffer]) -> int:
        """Append DATA frames as far as room, windows and what there is go; return the octets of frames."""
        stream, out = exchange.state, exchange.out
        protocol, stream_id = self._h2, exchange.stream_id
        largest = protocol.max_outbound_frame_size
        # Heads count too, so that what goes out at a time fills records of TLS evenly.
        heads_bytes = -(-room // (largest + HEAD_BYTES)) * HEAD_BYTES
        window = min(protocol.outbound_flow_control_window, stream.outbound_flow_control_window)
        count = min(room - heads_bytes, exchange.out_bytes, window)
        if count <= 0:
            if exchange.out_end and not exchange.out_bytes:
                parts.append(data_head(stream_id, 0, True))
            return 0
        last = exchange.out_end and count == exchange.out_bytes
        full = data_head(stream_id, largest, False)
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
        protocol.outbound_flow_control_window -= count
        stream.outbound_flow_control_window -= count
        exchange.out_bytes -= count
        exchange.sent_bytes += count
        exchange.moved = True
        if exchange.pressed and exchange.out_bytes <= self._limits.send_queue_bytes // 2:
            exchange.pressed = False
            if not exchange.out_end:
                self._events.append(OutputReady(exchange.stream_id))
        return count + heads_bytes

    def _queue(self, exchange: Exchange) -> None:
        """Give an exchange a turn, where it has output and its peer has room for it."""
        if exchange.queued or not exchange.has_output:
            return
        if exchange.out_bytes and exchange.state.outbound_flow_control_window <= 0:
            return
        exchange.queued = True
        self._ready.append(exchange)

    def send_data(self, stream_id: int, data: Buffer, *, end: bool = False) -> bool:
        """Queue octets of a body; they are kept, not copied, until they are sent. `end` ends the body.

        Returns whether there is room for more; where there is not, `OutputReady` will say when there is.
        Raises `LocalProtocolError` where the head was not sent, or the body has ended.
        """
        exchange = self._exchanges.get(stream_id)
        if exchange is None:
            return True
        if not exchange.head_sent or exchange.out_end:
            raise LocalProtocolError("a body goes after its head, and nothing after its end")
        octets = memoryview(data).cast("B")
        if octets.nbytes:
            exchange.out.append(octets)
            exchange.out_bytes += octets.nbytes
        exchange.out_end = end
        self._queue(exchange)
        exchange.pressed = exchange.out_bytes >= self._limits.send_queue_bytes
        return not exchange.pressed

    def receive_into(self, stream_id: int, free: Callable[[], memoryview]) -> None:
        """Have octets of a body put straight where `free` says that the next ones belong, as `DataPlaced`.

        `free` is asked again and again, and may have nothing to offer. Octets may come as `DataReceived` all
        the same, where the peer's frames are small.
        """
        if (exchange := self._exchanges.get(stream_id)) is not None:
            exchange.free = free

    def acknowledge(self, stream_id: int, count: int) -> None:
        """Say that octets of a body have been dealt with, so that the peer may send as many more."""
        exchange = self._exchanges.get(stream_id)
        if exchange is None:
            return
        if not 0 <= count <= exchange.unacknowledged:
            raise LocalProtocolError(f"{count} octets acknowledged of {exchange.unacknowledged}")
        exchange.unacknowledged -= count
        self._give_credit(exchange, count)

    def reset(self, stream_id: int, code: ErrorCodes = ErrorCodes.CANCEL) -> None:
        """Give an exchange up; `ExchangeEnded` follows."""
        exchange = self._exchanges.get(stream_id)
        if exchange is not None:
            self._abandon(exchange, code, "given up here")

    # DATA that comes in ----------------------------------------------------------------------------------

    def data_begins(self, stream_id: int, length: int, frame_length: int, ends: bool) -> None:
        """Check a DATA frame as it begins (RFC 9113, 6.1 and 6.9)."""
        if frame_length > self._window:
            raise Fault(ErrorCodes.FLOW_CONTROL_ERROR, "more octets than the window of the connection allows")
        self._window -= frame_length
        overhead = frame_length - length
        exchange = self._exchanges.get(stream_id)
        self._incoming, self._incoming_id, self._frame_ends = exchange, stream_id, ends
        if exchange is None or exchange.body_ended:
            self._refuse_data(stream_id, exchange)
            self._give_credit(None, overhead)
            if not length and not ends:
                self._count_chatter()
            return
        if not exchange.head_received:
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "DATA before the head of its message")
        if frame_length > exchange.window:
            raise Fault(ErrorCodes.FLOW_CONTROL_ERROR, "more octets than the window of the stream allows")
        exchange.window -= frame_length
        exchange.received += length
        expected = exchange.expected
        if expected is not None and (exchange.received > expected or (ends and exchange.received < expected)):
            self._abandon(exchange, ErrorCodes.PROTOCOL_ERROR, "a body has not the length its head said")
            self._give_credit(None, overhead)
            return
        if overhead:
            self._give_credit(exchange, overhead)
        self.step_by_step = exchange.free is not None and length >= _WORTH_PLACING_BYTES
        if length:
            exchange.moved = True
        elif not ends:
            self._count_chatter()

    def data_arrives(self, octets: memoryview) -> None:
        """Pass on octets of a body, or drop those of an exchange that is over."""
        exchange = self._incoming
        if exchange is None or exchange.gone:
            self._give_credit(None, octets.nbytes)
            return
        exchange.unacknowledged += octets.nbytes
        self._events.append(DataReceived(exchange.stream_id, octets))

    def data_is_placed(self, size_bytes: int) -> None:
        """Pass on that octets of a body are where they belong."""
        exchange = self._incoming
        assert exchange is not None, "nobody else gives memory for them"
        exchange.unacknowledged += size_bytes
        self._events.append(DataPlaced(exchange.stream_id, size_bytes))

    def data_ends(self) -> None:
        """End the body where the frame says so."""
        exchange, self._incoming = self._incoming, None
        if self._frame_ends and exchange is None:
            self._lingering.discard(self._incoming_id)
        if self._frame_ends and exchange is not None and not exchange.gone:
            exchange.state.state_machine.process_input(StreamInputs.RECV_END_STREAM)
            self._end_body(exchange)

    def _refuse_data(self, stream_id: int, exchange: Exchange | None) -> None:
        """Answer DATA on a stream that takes none."""
        self._incoming = None
        if exchange is not None:
            self._abandon(exchange, ErrorCodes.STREAM_CLOSED, "octets came after the end of a body")
            return
        if self._is_idle(stream_id):
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "DATA on a stream that was never opened")
        if not self._over.get(stream_id):
            self._count_chatter()
            self._control += rst_stream(stream_id, ErrorCodes.STREAM_CLOSED)

    def _end_body(self, exchange: Exchange) -> None:
        exchange.body_ended = True
        self._events.append(BodyEnded(exchange.stream_id))

    def _give_credit(self, exchange: Exchange | None, count: int) -> None:
        """Count octets dealt with; tell the peer once a quarter of a window has come together."""
        self._credit += count
        if self._credit * 4 >= self._limits.connection_window_bytes:
            self._control += window_update(0, self._credit)
            self._window += self._credit
            self._credit = 0
        if exchange is None or exchange.body_ended:
            return
        exchange.credit += count
        if exchange.credit * 4 < self._limits.stream_window_bytes:
            return
        expected = exchange.expected
        if expected is not None and expected - exchange.received <= exchange.window:
            return
        self._control += window_update(exchange.stream_id, exchange.credit)
        exchange.window += exchange.credit
        exchange.credit = 0

    # Other frames that come in ---------------------------------------------------------------------------

    def frame_skipped(self) -> None:
        """Count a frame that brings nothing."""
        self._count_chatter()

    def frame_arrives(self, kind: int, stream_id: int, frame: Buffer) -> None:
        """Give a control frame to h2, and take what it says."""
        if kind == GOAWAY:
            octets = memoryview(frame)
            last, code = int.from_bytes(octets[9:13], "big"), int.from_bytes(octets[13:17], "big")
            self._receive_goaway(last & HIGHEST_STREAM, code)
            return
        if kind == RST_STREAM:
            self._lingering.discard(stream_id)
            if self._is_idle(stream_id):  # h2 lets that pass
                raise Fault(ErrorCodes.PROTOCOL_ERROR, "RST_STREAM on a stream that was never opened")
        try:
            events = self._h2.receive_data(frame)
        except ProtocolError as error:
            self._h2.clear_outbound_data_buffer()
            raise Fault(ErrorCodes(error.error_code), "a frame is not as HTTP/2 allows") from None
        for event in events:
            self._receive_event(event)

    def block_arrives(self, stream_id: int, block: bytes, ends: bool) -> None:
        """Decode a header block, which has to be done whatever its stream is (RFC 9113, 4.3)."""
        try:
            headers = cast(HeaderList, self._h2.decoder.decode(block, raw=True))
        except OversizedHeaderListError:
            raise Fault(ErrorCodes.ENHANCE_YOUR_CALM, "a header list is too large") from None
        except HPACKError:
            raise Fault(ErrorCodes.COMPRESSION_ERROR, "a header block cannot be decoded") from None
        exchange = self._exchanges.get(stream_id)
        if exchange is None:
            self._receive_first_block(stream_id, headers, ends)
        elif exchange.body_ended:
            self._abandon(exchange, ErrorCodes.STREAM_CLOSED, "fields came after the end of a message")
        elif exchange.head_received:
            self._receive_trailers(exchange, headers, ends)
        else:
            self._receive_response_block(exchange, headers, ends)

    def _receive_first_block(self, stream_id: int, headers: HeaderList, ends: bool) -> None:
        """Take a header block on a stream that has no exchange."""
        if self._is_idle(stream_id) or stream_id not in self._over:
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "HEADERS on a stream that they cannot open")
        if not self._over[stream_id]:
            raise Fault(ErrorCodes.STREAM_CLOSED, "HEADERS on a stream that has ended")
        self._count_chatter()

    def _receive_response_block(self, exchange: Exchange, headers: HeaderList, ends: bool) -> None:
        """Take a header block before the head of the peer's message; servers have none such."""

    def _receive_event(self, event: h2_events.Event) -> None:
        match event:
            case h2_events.WindowUpdated():
                self._receive_window(event.stream_id, event.delta)
            case h2_events.StreamReset():
                self._receive_reset(event)
            case h2_events.RemoteSettingsChanged():
                self._receive_settings()
            case h2_events.PingReceived() | h2_events.SettingsAcknowledged():
                self._count_chatter()
            case h2_events.PingAckReceived():
                if event.ping_data == DRAIN_PING and self._goaway_due_ms is not None:
                    self._stop_accepting()
            case _:
                pass

    def _receive_window(self, stream_id: int, increment: int) -> None:
        """Let what waited for room have its turn."""
        if increment < _SMALL_INCREMENT:
            self._count_chatter()
        if stream_id == 0:
            self._ready.extend(self._starved)
            self._starved.clear()
        elif (exchange := self._exchanges.get(stream_id)) is not None:
            self._queue(exchange)

    def _receive_settings(self) -> None:
        self._count_chatter()
        self._settled = True
        encoder = self._h2.encoder
        if encoder.header_table_size > _HEADER_TABLE_BYTES:
            encoder.header_table_size = _HEADER_TABLE_BYTES
        for exchange in self._exchanges.values():
            self._queue(exchange)

    def _receive_trailers(self, exchange: Exchange, headers: HeaderList, ends: bool) -> None:
        """End a body by its trailers; what they say is nobody's business here."""
        try:
            check_trailers(headers)
            if not ends:
                raise Malformed("fields came in the middle of a message")
            if exchange.expected is not None and exchange.received != exchange.expected:
                raise Malformed("a body has not the length its head said")
        except Malformed as error:
            self._abandon(exchange, ErrorCodes.PROTOCOL_ERROR, str(error))
        else:
            exchange.state.state_machine.process_input(StreamInputs.RECV_END_STREAM)
            self._end_body(exchange)

    def _receive_reset(self, event: h2_events.StreamReset) -> None:
        """End an exchange that the peer gave up, or that h2 reset for what the peer did."""
        self._count_reset()
        exchange = self._exchanges.get(event.stream_id)
        if exchange is None:
            return
        name = ErrorCodes(event.error_code).name if event.error_code in _CODES else "an unknown code"
        if event.remote_reset:
            exchange.was_reset = True
            refused = self._CLIENT and event.error_code == ErrorCodes.REFUSED_STREAM
            self._finish(exchange, reason=f"reset by the peer: {name}", unprocessed=refused)
        else:
            exchange.was_reset = True
            self._finish(exchange, reason=f"the peer broke the protocol: {name}")

    def _receive_goaway(self, last_stream_id: int, code: int) -> None:
        if not self._peer_left:
            self._peer_left = True
            self._events.append(GoingAway())
        name = ErrorCodes(code).name if code in _CODES else "an unknown code"
        if code:
            self._parting_words = f"the peer ended the connection: {name}"
        if self._CLIENT:
            for exchange in [e for i, e in self._exchanges.items() if i > last_stream_id]:
                reason = self._parting_words or "the server is going away"
                self._finish(exchange, reason=reason, unprocessed=True)
        if not self._exchanges:
            self._end(self._parting_words)

    def _count_chatter(self) -> None:
        if not self._chatter.spend(self._now_ms):
            raise Fault(ErrorCodes.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def _count_reset(self) -> None:
        if not self._resets.spend(self._now_ms):
            raise Fault(ErrorCodes.ENHANCE_YOUR_CALM, "too many exchanges given up")

    # Exchanges -------------------------------------------------------------------------------------------

    def _open(self, stream_id: int, sent_or_received: StreamInputs) -> Exchange:
        """Open a stream, as h2 would, and an exchange on it."""
        protocol = self._h2
        stream = H2Stream(
            stream_id,
            protocol.config,
            protocol.local_settings.initial_window_size,
            protocol.remote_settings.initial_window_size,
        )
        stream.state_machine.process_input(sent_or_received)
        protocol.streams[stream_id] = stream
        exchange = Exchange(stream_id, stream, self._limits.stream_window_bytes)
        self._exchanges[stream_id] = exchange
        if self._look_due_ms is None:
            self._look_due_ms = self._now_ms + self._limits.idle_body_ms
        return exchange

    def _is_idle(self, stream_id: int) -> bool:
        """Return whether a stream was never opened by whom its number belongs to."""
        if stream_id % 2 == self._CLIENT:
            return stream_id > self._h2.highest_outbound_stream_id
        return stream_id > self._h2.highest_inbound_stream_id

    def _send_head(self, exchange: Exchange, headers: HeaderList, *, end: bool) -> None:
        """Send the head of our message; nothing follows it where `end` is true."""
        protocol = self._h2
        block = self._heads.encode(headers)
        self._control += header_frames(exchange.stream_id, block, protocol.max_outbound_frame_size, end=end)
        exchange.head_sent = True
        exchange.out_end = exchange.out_ended = end
        if end:
            exchange.state.state_machine.process_input(StreamInputs.SEND_END_STREAM)

    def _output_ended(self, exchange: Exchange) -> None:
        """Note that the last octet of our message is in its frame."""
        exchange.out_ended = True
        exchange.state.state_machine.process_input(StreamInputs.SEND_END_STREAM)

    def _abandon(self, exchange: Exchange, code: ErrorCodes, reason: str) -> None:
        """Reset a stream from our side and end its exchange."""
        self._reset_stream(exchange, code)
        self._finish(exchange, reason=reason)

    def _reset_stream(self, exchange: Exchange, code: ErrorCodes) -> None:
        exchange.state.state_machine.process_input(StreamInputs.SEND_RST_STREAM)
        self._control += rst_stream(exchange.stream_id, code)
        exchange.was_reset = True

    def _finish(
        self, exchange: Exchange, *, complete: bool = False, reason: str = "", unprocessed: bool = False
    ) -> None:
        """End an exchange and tell so."""
        if not exchange.untold:
            ended = ExchangeEnded(exchange.stream_id, complete, exchange.sent_bytes, reason, unprocessed)
            self._events.append(ended)
        self._forget(exchange)

    def _forget(self, exchange: Exchange) -> None:
        del self._exchanges[exchange.stream_id]
        del self._h2.streams[exchange.stream_id]
        self._over[exchange.stream_id] = exchange.was_reset
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        exchange.gone = True
        exchange.out.clear()
        exchange.out_bytes = 0
        self._idle_since_ms = self._now_ms
        self._give_credit(None, exchange.unacknowledged)
        if not self._exchanges and (self._peer_left or self._stopped):
            self._end(self._parting_words)

    # The end ---------------------------------------------------------------------------------------------

    def shutdown(self, now_ms: int) -> None:
        """Close in order: take nothing new, let what is under way end, for `drain_ms` at most."""
        self._now_ms = now_ms
        if self._ended or self._drain_due_ms is not None:
            return
        self._drain_due_ms = now_ms + self._limits.drain_ms
        self._begin_drain()

    def _begin_drain(self) -> None:
        self._stop_accepting()

    def _stop_accepting(self) -> None:
        """Tell the peer the last stream that is served, and hold it to that."""
        self._goaway_due_ms = None
        self._stopped = True
        self._last_accepted = self._h2.highest_inbound_stream_id
        self._control += goaway(self._last_accepted, ErrorCodes.NO_ERROR)
        if not self._exchanges:
            self._end("")

    def _end(self, reason: str, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """End the connection: tell the peer why, and the caller of every exchange that this cuts off."""
        if self._ended:
            return
        self._ended = True
        self._reader.stop()
        if code or not self._stopped:
            self._control += goaway(self._h2.highest_inbound_stream_id, code)
        for exchange in list(self._exchanges.values()):
            self._finish(exchange, reason=reason or "the connection was closed")
        self._drop_due_ms = self._now_ms + self._limits.close_ms
        self._events.append(ConnectionEnded(reason))

    @property
    def ended(self) -> bool:
        """Whether the connection is over: send what `data_to_send` still has, then close."""
        return self._ended

    @property
    def dropped(self) -> bool:
        """Whether even that is not worth waiting for: the peer does not read."""
        return self._dropped

    # Time ------------------------------------------------------------------------------------------------

    def next_deadline_ms(self) -> int | None:
        """Return when `handle_timer` is next to be called; None where nothing is pending."""
        if self._ended:
            return None if self._dropped else self._drop_due_ms
        limits = self._limits
        if self._ping_sent_ms is not None:
            due = self._ping_sent_ms + limits.ping_timeout_ms
        else:
            due = self._received_ms + limits.ping_ms
        if not self._exchanges:
            due = min(due, self._idle_since_ms + limits.idle_ms)
        others = (self._look_due_ms, self._head_due_ms, self._goaway_due_ms, self._drain_due_ms)
        for other in (*others, self._lingering.due_ms):
            if other is not None and other < due:
                due = other
        return due

    def handle_timer(self, now_ms: int) -> None:
        """Do what is due. Calling too early changes nothing."""
        self._now_ms = now_ms
        if self._ended:
            self._dropped = self._dropped or (self._drop_due_ms is not None and now_ms >= self._drop_due_ms)
        elif self._head_due_ms is not None and now_ms >= self._head_due_ms:
            self._end("the peer began something and did not go on in time", ErrorCodes.ENHANCE_YOUR_CALM)
        elif self._drain_due_ms is not None and now_ms >= self._drain_due_ms:
            self._end("the time for closing in order is over")
        else:
            if self._goaway_due_ms is not None and now_ms >= self._goaway_due_ms:
                self._stop_accepting()
            self._cut_off(now_ms)
            self._look_at_exchanges(now_ms)
            self._look_for_life(now_ms)
        self._collect()

    def _linger(self, exchange: Exchange) -> None:
        """Let a client that still sends take note of its answer: some drop it when they are cut off at
        once."""
        exchange.was_reset = True
        self._lingering.add(exchange.stream_id, self._now_ms + self._limits.linger_ms)
        self._cut_off(self._now_ms)

    def _cut_off(self, now_ms: int) -> None:
        """Reset the streams that have lingered long enough (RFC 9113, 8.1)."""
        for stream_id in self._lingering.take_due(now_ms):
            self._control += rst_stream(stream_id, ErrorCodes.NO_ERROR)

    def _look_at_exchanges(self, now_ms: int) -> None:
        """Give up exchanges whose peer has let nothing move since the last look."""
        if self._look_due_ms is None or now_ms < self._look_due_ms:
            return
        for exchange in list(self._exchanges.values()):
            if exchange.waits_for_peer and not exchange.moved:
                self._abandon(exchange, ErrorCodes.CANCEL, "the peer let nothing move for too long")
            exchange.moved = False
        self._look_due_ms = now_ms + self._limits.idle_body_ms if self._exchanges else None

    def _look_for_life(self, now_ms: int) -> None:
        limits = self._limits
        if self._ended:
            return
        if self._ping_sent_ms is not None:
            if now_ms >= self._ping_sent_ms + limits.ping_timeout_ms:
                self._end("the peer does not answer")
        elif now_ms >= self._received_ms + limits.ping_ms:
            self._ping_sent_ms = now_ms
            self._h2.ping(_ALIVE_PING)
        if not self._exchanges and now_ms >= self._idle_since_ms + limits.idle_ms:
            self.shutdown(now_ms)

    def _collect(self) -> None:
        """Take over what h2 has to send; give up a peer that asks for much and reads nothing."""
        self._control += self._h2.data_to_send()
        if len(self._control) > self._limits.max_control_bytes and not self._ended:
            self._end("the peer does not read")
            self._dropped = True
