"""A whole connection without I/O: HTTP/2 under TLS, driven like either of them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from kvsp_h2.connection import Connection
from kvsp_h2.events import ConnectionEnded, Established, Event
from kvsp_h2.http2 import WANTS_HTTP2, ClientConnection, ServerConnection, http1_refusal
from kvsp_h2.limits import WireLimits
from kvsp_h2.tls import Credentials, Peer, TLSConnection, TLSFailure

__all__ = ["SCRATCH_BYTES", "SecureConnection", "secure_client", "secure_server"]

HTTP = TypeVar("HTTP", bound=Connection)

SCRATCH_BYTES: Final = 256 << 10
"""Memory for octets just decrypted: more would not fit into a processor's cache, less means more events."""

_WANTS_TLS: Final = http1_refusal("400 Bad Request", "This service wants TLS 1.3.")

_NOTHING: Final = memoryview(b"")


class SecureConnection(Generic[HTTP]):
    """HTTP/2 over TLS: ciphertext and time in, events and ciphertext out.

    The first event is `Established`, or `ConnectionEnded` where the handshake fails; from then on `http` is
    what takes requests or answers. Octets are decrypted as events are asked for, so `next_event` is to be
    called until there is none.

    What one peer can set off at a time is bounded, so that others have their turn: beyond that much,
    `next_event` and `data_to_send` have nothing, the deadline is at once, and `handle_timer` goes on. Nothing
    more is to be received while `input_waits`.

    It lasts no longer than the peer's certificate is valid: then it is closed in order, and who wants to go
    on has to show another one.

    `scratch` is memory for decrypted octets; connections may share it whose events are each dealt with before
    anything else is asked of any of them.
    """

    def __init__(
        self,
        tls: TLSConnection,
        begin: Callable[[int], HTTP],
        now_ms: int,
        *,
        limits: WireLimits,
        is_server: bool,
        scratch: memoryview | None = None,
    ) -> None:
        self._tls = tls
        self._begin: Callable[[int], HTTP] = begin
        self._is_server = is_server
        self._scratch = memoryview(bytearray(SCRATCH_BYTES)) if scratch is None else scratch
        self._events: deque[Event] = deque()
        self._due_ms: int | None = now_ms + limits.handshake_ms
        self._limits = limits
        self._clear_text: bytes | None = None
        """What a peer that does not speak TLS is told, instead of anything else."""
        self._ended = self._dropped = self._closed_tls = False
        self._undecrypted = self._eof = False
        self._put_off = _NOTHING
        """Decrypted octets that wait for the next turn."""
        self._room = limits.turn_bytes
        """Octets that may still go out in this turn."""
        self._now_ms = now_ms
        self._expires_ms: int | None = None
        """When the peer's certificate is valid no more, where that is still to come."""
        self._heard = False
        """Whether the peer has sent anything under TLS: until then it may still refuse our certificate."""
        self.http: HTTP | None = None
        """The HTTP/2 connection, once the handshake is complete."""
        if not is_server:
            self._tls.handshake()

    @property
    def peer(self) -> Peer | None:
        """Who the peer is, once the handshake is complete."""
        return self._tls.peer

    @property
    def ended(self) -> bool:
        """Whether the connection is over: send what `data_to_send` still has, then close."""
        return self._ended or (self.http is not None and self.http.ended)

    @property
    def dropped(self) -> bool:
        """Whether even that is not worth waiting for."""
        return self._dropped or (self.http is not None and self.http.dropped)

    def receive_data(self, data: bytes | bytearray | memoryview, now_ms: int) -> None:
        """Take ciphertext."""
        if self.ended:
            return
        try:
            self._tls.receive_data(data)
            if self.http is None:
                if self._tls.peer is None:
                    return
                self._establish(now_ms)
            self._undecrypted, self._now_ms = True, now_ms
            self._begin_turn()
        except TLSFailure as failure:
            self._fail(str(failure), now_ms)

    def receive_eof(self, now_ms: int) -> None:
        """Take the end of what the peer sends; what came before it and waits is told first."""
        if self.http is not None and self._undecrypted and not self.http.ended:
            self._eof, self._now_ms = True, now_ms
            self.http.frames_left = sys.maxsize
        elif self.http is not None:
            self.http.receive_eof(now_ms)
        elif not self._ended:
            self._end("the connection was closed by the peer", now_ms)

    def next_event(self) -> Event | None:
        """Return what happened next, or None where nothing is left to tell."""
        if self._events:
            return self._events.popleft()
        if self.http is None:
            return None
        while (event := self.http.next_event()) is None and self._undecrypted and not self.input_waits:
            self._decrypt(self.http)
        return event

    @property
    def input_waits(self) -> bool:
        """Whether what has come waits for the next turn, and nothing more is to be received before."""
        http = self.http
        return self._undecrypted and http is not None and http.frames_left <= 0 and not http.ended

    def data_to_send(self) -> bytes:
        """Return the ciphertext to send next, some 256 KiB at most; empty where there is none."""
        if self._clear_text is not None:
            octets, self._clear_text = self._clear_text, b""
            return octets
        if self.http is not None and not self._closed_tls and (self._room > 0 or self.http.ended):
            octets = self.http.data_to_send()
            if octets:
                self._room -= len(octets)
                self._tls.write(octets)
            elif self.http.ended:
                self._closed_tls = True
                self._tls.close()
        return self._tls.data_to_send()

    def next_deadline_ms(self) -> int | None:
        """Return when `handle_timer` is next to be called: 0 where that is at once, None where nothing is
        pending."""
        if self.http is None:
            return self._due_ms
        if self.input_waits or self._room <= 0:
            return 0
        due_ms = self.http.next_deadline_ms()
        return due_ms if due_ms is None or self._expires_ms is None else min(due_ms, self._expires_ms)

    def handle_timer(self, now_ms: int) -> None:
        """Do what is due. Calling too early changes nothing."""
        if self.http is not None:
            self._now_ms = now_ms
            self._begin_turn()
            if self._expires_ms is not None and now_ms >= self._expires_ms:
                self._expires_ms = None
                self.http.shutdown(now_ms)
            self.http.handle_timer(now_ms)
        elif self._due_ms is not None and now_ms >= self._due_ms:
            if self._ended:
                self._dropped, self._due_ms = True, None
            else:
                self._fail("it did not complete the handshake in time", now_ms)

    def shutdown(self, now_ms: int) -> None:
        """Close in order: take nothing new, let what is under way end."""
        if self.http is not None:
            self.http.shutdown(now_ms)
        elif not self._ended:
            self._end("", now_ms)

    def _establish(self, now_ms: int) -> None:
        peer = self._tls.peer
        assert peer is not None
        if not self._tls.speaks_http2:
            if self._is_server:
                self._tls.write(WANTS_HTTP2)
            raise TLSFailure("it does not speak HTTP/2")
        self.http = self._begin(now_ms)
        if self._tls.valid_ms is not None:
            self._expires_ms = now_ms + self._tls.valid_ms
        self._events.append(Established(peer.principal))

    def _begin_turn(self) -> None:
        if self.http is not None:
            self.http.frames_left = self._limits.turn_frames
        self._room = self._limits.turn_bytes

    def _decrypt(self, http: HTTP) -> None:
        """Decrypt some of what has come for HTTP/2, whose events are told before the next."""
        if http.ended:  # `scratch` is another's now where this one ended out of turn
            self._undecrypted, self._put_off = False, _NOTHING
            return
        tls = self._tls
        dry = False
        try:
            if self._put_off:
                self._pass_on(http, self._put_off)
            elif (place := http.place()) is not None:
                count = tls.read_into(place)
                dry = count < place.nbytes
                if count:
                    http.receive_placed(count, self._now_ms)
            else:
                scratch = self._scratch
                if http.step_by_step:
                    count = tls.read_record_into(scratch)
                    dry = not count
                else:
                    count = tls.read_into(scratch)
                    dry = count < scratch.nbytes
                if count:
                    self._heard = True
                    self._pass_on(http, scratch[:count])
        except TLSFailure as failure:
            self._undecrypted = False
            self._fail(str(failure), self._now_ms)
            return
        if http.ended:
            self._undecrypted = False
        elif dry and not self._put_off:
            self._undecrypted = False
            if tls.eof or self._eof:
                http.receive_eof(self._now_ms)

    def _pass_on(self, http: HTTP, octets: memoryview) -> None:
        """Give decrypted octets to HTTP/2; keep what waits for the next turn."""
        taken = http.receive_data(octets, self._now_ms)
        if taken < octets.nbytes:
            rest = octets[taken:]
            self._put_off = rest if octets is self._put_off else memoryview(bytes(rest))
        elif self._put_off:
            self._put_off = _NOTHING

    def _fail(self, reason: str, now_ms: int) -> None:
        """End the connection for what the peer did to TLS; nothing can be encrypted for it any more."""
        self._closed_tls = True
        if self._is_server and "without TLS" in reason:
            self._clear_text = _WANTS_TLS
        if self.http is None:
            self._end(f"the peer was refused: {reason}", now_ms)
        elif self._heard:
            self.http.abort("the peer broke the protocol of TLS", now_ms)
        else:
            self.http.abort(f"the peer refused us: {reason}", now_ms)

    def _end(self, reason: str, now_ms: int) -> None:
        self._ended = True
        self._due_ms = now_ms + self._limits.close_ms
        self._tls.close()
        self._events.append(ConnectionEnded(reason))


def secure_server(
    credentials: Credentials,
    base_uri: str,
    now_ms: int,
    *,
    limits: WireLimits | None = None,
    scratch: memoryview | None = None,
) -> SecureConnection[ServerConnection]:
    """Return the server's end of a connection to the role at `base_uri`."""
    bounds = limits or WireLimits()

    def begin(established_ms: int) -> ServerConnection:
        connection = ServerConnection(base_uri, established_ms, bounds)
        connection.greet()
        return connection

    return SecureConnection(
        credentials.accept(), begin, now_ms, limits=bounds, is_server=True, scratch=scratch
    )


def secure_client(
    credentials: Credentials,
    base_uri: str,
    now_ms: int,
    *,
    limits: WireLimits | None = None,
    scratch: memoryview | None = None,
) -> SecureConnection[ClientConnection]:
    """Return the client's end of a connection to the role at `base_uri`."""
    bounds = limits or WireLimits()

    def begin(established_ms: int) -> ClientConnection:
        return ClientConnection(base_uri, established_ms, bounds)

    return SecureConnection(
        credentials.dial(base_uri), begin, now_ms, limits=bounds, is_server=False, scratch=scratch
    )
