"""What both ends of an HTTP/2 connection share: windows, exchanges, timeouts and limits; no I/O.

`kvsp_h2.http2` makes a server and a client of it. The library ``h2`` keeps the settings of both ends and
answers SETTINGS and PING; its HPACK is behind `kvsp_h2.heads`. Everything that comes with each request, and
the octets of bodies above all, is dealt with here, under the checks that ``h2`` would make: it takes a
fraction of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar, Final

from h2 import events as h2_events
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError

from kvsp_core.errors import LocalProtocolError
from kvsp_h2.events import (
    BodyEnded,
    ConnectionEnded,
    DataPlaced,
    DataReceived,
    DoubtChanged,
    Event,
    ExchangeEnded,
    GoingAway,
    OutputReady,
)
from kvsp_h2.exchange import Budget, Exchange, Lingering, Past
from kvsp_h2.fields import Malformed, check_trailers
from kvsp_h2.frames import (
    GOAWAY,
    HEAD_BYTES,
    PUSH_PROMISE,
    RST_STREAM,
    WINDOW_UPDATE,
    Buffer,
    Fault,
    FrameReader,
    code_name,
    goaway,
    header_frames,
    rst_stream,
)
from kvsp_h2.heads import HeadDecoder, HeadEncoder, ReceivedHead
from kvsp_h2.limits import WireLimits
from kvsp_h2.liveness import Liveness, Verdict
from kvsp_h2.sending import Sender
from kvsp_h2.state import start_protocol
from kvsp_h2.windows import Windows

__all__ = ["DRAIN_PING", "HIGHEST_STREAM", "Connection"]

HIGHEST_STREAM: Final = 2**31 - 1
_OUTPUT_BYTES: Final = 256 << 10
"""About what `data_to_send` returns at a time."""
_WORTH_PLACING_BYTES: Final = 32 << 10
"""Data of a frame from which on it is put where it belongs instead of being passed on."""
DRAIN_PING: Final = b"drain..."
_ALIVE_PING: Final = b"alive..."
_SMALL_INCREMENT: Final = 1024


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
        self._encoder = HeadEncoder()
        self._decoder = HeadDecoder(self._h2.decoder)
        self._sender = Sender()
        self._reader = FrameReader(self, limits)
        self._greeting = b""
        """What has not been said yet and goes before anything else."""
        self._windows = Windows(limits)
        self._control = bytearray(self._h2.data_to_send() + self._windows.first_update())
        self._events: deque[Event] = deque()
        self._exchanges: dict[int, Exchange] = {}
        self._past = Past()
        self._lingering = Lingering(limits.max_streams)
        self._opened_here = self._opened_there = 0
        """The highest streams that we and the peer have opened."""
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
        self._idle_since_ms = now_ms
        self._life = Liveness(now_ms, limits, doubts=self._CLIENT)
        self._under_way = self._reader.under_way
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

    @property
    def frames_left(self) -> int:
        """Frames that are still read before others are to have their turn: as many as come, where nobody
        sets it."""
        return self._reader.frames_left

    @frames_left.setter
    def frames_left(self, count: int) -> None:
        self._reader.frames_left = count

    def receive_data(self, data: Buffer, now_ms: int) -> int:
        """Take octets from the peer. What it does wrong ends the exchange or the connection, as an event.

        Returns how many were taken: all, unless `frames_left` is used up; the rest is to be given again.
        """
        view = memoryview(data)
        taken = view.nbytes
        if self._ended:
            return taken
        self._now_ms = now_ms
        if self._life.hear(now_ms):
            self._events.append(DoubtChanged())
        try:
            taken = self._read(view)
        except Fault as fault:
            self._end(fault.reason, fault.code)
        if (under_way := self._reader.under_way) != self._under_way:
            self._under_way = under_way
            self._head_due_ms = now_ms + self._limits.head_ms if under_way else None
        self._collect()
        return taken

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
        self._now_ms = now_ms
        if self._life.hear(now_ms):
            self._events.append(DoubtChanged())
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

    def _read(self, view: memoryview) -> int:
        return self._reader.receive(view)

    # What goes out ---------------------------------------------------------------------------------------

    def data_to_send(self) -> bytes:
        """Return the octets to send next, some 256 KiB at most; empty where there are none."""
        parts: list[Buffer] = []
        self._take_control(parts)
        room = 0 if self._ended else _OUTPUT_BYTES
        while room > HEAD_BYTES and (exchange := self._sender.next_turn()) is not None:
            room -= self._sender.put_into_frames(exchange, room, parts)
            if exchange.pressed and exchange.out_bytes <= self._limits.send_queue_bytes // 2:
                exchange.pressed = False
                if not exchange.out_end:
                    self._events.append(OutputReady(exchange.stream_id))
            if exchange.out_end and not exchange.out_bytes:
                self._output_ended(exchange)
            else:
                self._sender.queue(exchange)
            self._take_control(parts)
        return b"".join(parts)

    def _take_control(self, parts: list[Buffer]) -> None:
        if self._control:
            if self._greeting:  # nothing precedes SETTINGS, not even GOAWAY (RFC 9113, 3.4)
                parts.append(self._greeting)
                self._greeting = b""
            parts.append(bytes(self._control))
            self._control.clear()

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
        self._sender.queue(exchange)
        exchange.pressed = exchange.out_bytes >= self._limits.send_queue_bytes
        return not exchange.pressed

    def sent_bytes(self, stream_id: int) -> int:
        """Return how many octets of a body have gone out; 0 where the exchange is over."""
        exchange = self._exchanges.get(stream_id)
        return 0 if exchange is None else exchange.sent_bytes

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
        self._windows.take(frame_length)
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
        self._windows.take_on_stream(exchange, frame_length)
        exchange.received += length
        expected = exchange.expected
        if expected is not None and (exchange.received > expected or (ends and exchange.received < expected)):
            self._give_credit(None, overhead)
            self._break_off(exchange, ErrorCodes.PROTOCOL_ERROR, "a body has not the length its head said")
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
            self._end_body(exchange)

    def _refuse_data(self, stream_id: int, exchange: Exchange | None) -> None:
        """Answer DATA on a stream that takes none."""
        self._incoming = None
        if exchange is not None:
            self._break_off(exchange, ErrorCodes.STREAM_CLOSED, "octets came after the end of a body")
            return
        if self._is_idle(stream_id):
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "DATA on a stream that was never opened")
        if not self._past.was_reset(stream_id):
            self._count_chatter()
            self._control += rst_stream(stream_id, ErrorCodes.STREAM_CLOSED)

    def _end_body(self, exchange: Exchange) -> None:
        exchange.body_ended = True
        self._events.append(BodyEnded(exchange.stream_id))

    def _give_credit(self, exchange: Exchange | None, count: int) -> None:
        self._control += self._windows.give_back(exchange, count)

    # Other frames that come in ---------------------------------------------------------------------------

    def frame_skipped(self) -> None:
        """Count a frame that brings nothing."""
        self._count_chatter()

    def frame_arrives(self, kind: int, stream_id: int, frame: Buffer) -> None:
        """Deal with any other frame, or have h2 do it."""
        octets = memoryview(frame)
        if kind == WINDOW_UPDATE:
            self._receive_window(stream_id, _number(octets[9:13]) & HIGHEST_STREAM)
        elif kind == RST_STREAM:
            self._receive_reset(stream_id, _number(octets[9:13]))
        elif kind == GOAWAY:
            self._receive_goaway(_number(octets[9:13]) & HIGHEST_STREAM, _number(octets[13:17]))
        elif kind == PUSH_PROMISE:
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "nobody may push here")
        else:
            self._let_h2_receive(frame)

    def _let_h2_receive(self, frame: Buffer) -> None:
        """Give SETTINGS or PING to h2, and take what it says."""
        try:
            events = self._h2.receive_data(frame)
        except ProtocolError as error:
            self._h2.clear_outbound_data_buffer()
            raise Fault(ErrorCodes(error.error_code), "a frame is not as HTTP/2 allows") from None
        for event in events:
            match event:
                case h2_events.RemoteSettingsChanged():
                    self._count_chatter()
                    self._receive_settings()
                case h2_events.PingReceived() | h2_events.SettingsAcknowledged():
                    self._count_chatter()
                case h2_events.PingAckReceived(ping_data=data):
                    if data == DRAIN_PING and self._goaway_due_ms is not None:
                        self._stop_accepting()
                case _:
                    pass

    def block_arrives(self, stream_id: int, block: bytes, ends: bool) -> None:
        """Decode a header block, which has to be done whatever its stream is (RFC 9113, 4.3)."""
        head, trace = self._decoder.decode(block)
        exchange = self._exchanges.get(stream_id)
        if exchange is None:
            self._receive_first_block(stream_id, head, trace, ends)
        elif exchange.body_ended:
            self._break_off(exchange, ErrorCodes.STREAM_CLOSED, "fields came after the end of a message")
        elif exchange.head_received:
            self._receive_trailers(exchange, head, ends)
        else:
            self._receive_response_block(exchange, head, ends)

    def _receive_first_block(
        self, stream_id: int, head: ReceivedHead, trace: bytes | None, ends: bool
    ) -> None:
        """Take a header block on a stream that has no exchange; `trace` is a ``traceparent`` that ends it."""
        was_reset = self._past.was_reset(stream_id)
        if self._is_idle(stream_id) or was_reset is None:
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "HEADERS on a stream that they cannot open")
        if not was_reset:
            raise Fault(ErrorCodes.STREAM_CLOSED, "HEADERS on a stream that has ended")
        self._count_chatter()
        if ends:
            self._lingering.discard(stream_id)

    def _receive_response_block(self, exchange: Exchange, head: ReceivedHead, ends: bool) -> None:
        """Take a header block before the head of the peer's message; servers have none such."""

    def _receive_window(self, stream_id: int, increment: int) -> None:
        """Let what waited for room have its turn (RFC 9113, 6.9)."""
        if not increment:
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "a window is opened by nothing")
        if increment < _SMALL_INCREMENT:
            self._count_chatter()
        if not stream_id:
            self._sender.open_window(increment)
        elif (exchange := self._exchanges.get(stream_id)) is not None:
            try:
                self._sender.open_stream_window(exchange, increment)
            except Fault as fault:
                self._break_off(exchange, fault.code, f"the peer broke the protocol: {fault.code.name}")
        elif self._is_idle(stream_id):
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that was never opened")

    def _receive_settings(self) -> None:
        self._settled = True
        theirs = self._h2.remote_settings
        self._sender.largest = self._h2.max_outbound_frame_size
        self._sender.change_initial_window(theirs.initial_window_size, self._exchanges.values())

    def _receive_trailers(self, exchange: Exchange, head: ReceivedHead, ends: bool) -> None:
        """End a body by its trailers; what they say is nobody's business here."""
        try:
            check_trailers(head.headers)
            if not ends:
                raise Malformed("fields came in the middle of a message")
            if exchange.expected is not None and exchange.received != exchange.expected:
                raise Malformed("a body has not the length its head said")
        except Malformed as error:
            self._break_off(exchange, ErrorCodes.PROTOCOL_ERROR, str(error))
        else:
            self._end_body(exchange)

    def _receive_reset(self, stream_id: int, code: int) -> None:
        """End an exchange that the peer gave up."""
        if self._is_idle(stream_id):
            raise Fault(ErrorCodes.PROTOCOL_ERROR, "RST_STREAM on a stream that was never opened")
        exchange = self._exchanges.get(stream_id)
        if exchange is None:
            if not self._lingering.discard(stream_id):
                self._count_chatter()
            return
        self._count_reset()
        exchange.was_reset = True
        refused = self._CLIENT and code == ErrorCodes.REFUSED_STREAM and not exchange.head_received
        self._finish(exchange, reason=f"reset by the peer: {code_name(code)}", unprocessed=refused)

    def _receive_goaway(self, last_stream_id: int, code: int) -> None:
        if self._peer_left:
            self._count_chatter()
        else:
            self._peer_left = True
            self._events.append(GoingAway())
        if code:
            self._parting_words = f"the peer ended the connection: {code_name(code)}"
        if self._CLIENT:
            for exchange in [e for i, e in self._exchanges.items() if i > last_stream_id]:
                reason = self._parting_words or "the server is going away"
                # Who has begun to answer has acted on it, whatever it says.
                self._finish(exchange, reason=reason, unprocessed=not exchange.head_received)
        if not self._exchanges:
            self._end(self._parting_words)

    def _count_chatter(self) -> None:
        if not self._chatter.spend(self._now_ms):
            raise Fault(ErrorCodes.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def _count_reset(self) -> None:
        if not self._resets.spend(self._now_ms):
            raise Fault(ErrorCodes.ENHANCE_YOUR_CALM, "too many exchanges given up")

    # Exchanges -------------------------------------------------------------------------------------------

    def _open(self, stream_id: int) -> Exchange:
        """Open a stream and an exchange on it."""
        exchange = Exchange(stream_id, self._limits.stream_window_bytes, self._sender.initial_window)
        self._exchanges[stream_id] = exchange
        if self._look_due_ms is None:
            self._look_due_ms = self._now_ms + self._limits.idle_body_ms
        return exchange

    def _is_idle(self, stream_id: int) -> bool:
        """Return whether a stream was never opened by whom its number belongs to."""
        return stream_id > (self._opened_here if stream_id % 2 == self._CLIENT else self._opened_there)

    def _send_head(self, exchange: Exchange, block: bytes, *, end: bool) -> None:
        """Send the head of our message; nothing follows it where `end` is true."""
        self._control += header_frames(exchange.stream_id, block, self._sender.largest, end=end)
        exchange.head_sent = True
        exchange.out_end = exchange.out_ended = end

    def _output_ended(self, exchange: Exchange) -> None:
        """Note that the last octet of our message is in its frame."""
        exchange.out_ended = True

    def _abandon(self, exchange: Exchange, code: ErrorCodes, reason: str) -> None:
        """Reset a stream from our side and end its exchange."""
        self._reset_stream(exchange, code)
        self._finish(exchange, reason=reason)

    def _break_off(self, exchange: Exchange, code: ErrorCodes, reason: str) -> None:
        """Do so because the peer broke the protocol, which it may do as often as it may give up exchanges."""
        self._abandon(exchange, code, reason)
        self._count_reset()

    def _reset_stream(self, exchange: Exchange, code: ErrorCodes) -> None:
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
        self._past.add(exchange.stream_id, exchange.was_reset)
        self._sender.forget(exchange)
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
        self._last_accepted = self._opened_there
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
            self._control += goaway(self._opened_there, code)
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

    @property
    def in_doubt(self) -> bool:
        """Whether a server was asked if it is there, and has let some time pass since."""
        return self._life.in_doubt

    def next_deadline_ms(self) -> int | None:
        """Return when `handle_timer` is next to be called; None where nothing is pending."""
        if self._ended:
            return None if self._dropped else self._drop_due_ms
        due = self._life.next_deadline_ms()
        if not self._exchanges:
            due = min(due, self._idle_since_ms + self._limits.idle_ms)
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
        if self._ended:
            return
        verdict = self._life.look(now_ms)
        if verdict is Verdict.ASK:
            self._h2.ping(_ALIVE_PING)
        elif verdict is Verdict.DOUBT:
            self._events.append(DoubtChanged())
        elif verdict is Verdict.GIVE_UP:
            self._end("the peer does not answer")
        if not self._exchanges and now_ms >= self._idle_since_ms + self._limits.idle_ms:
            self.shutdown(now_ms)

    def _collect(self) -> None:
        """Take over what h2 has to send; give up a peer that asks for much and reads nothing."""
        self._control += self._h2.data_to_send()
        if len(self._control) > self._limits.max_control_bytes and not self._ended:
            self._end("the peer does not read")
            self._dropped = True


def _number(octets: memoryview) -> int:
    return int.from_bytes(octets, "big")
