"""Connections to one service, and the calls that use and await them: reuse, reconnecting, backoff; no I/O.

A pump opens a connection where `wants_dial` says so, reports what came of it, and hands on its events. What a
call is told are the events of its exchange, `ExchangeEnded` last and once, whatever happens to connections.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

import attrs

from kvsp_core.heads import Request
from kvsp_h2.events import (
    ConnectionEnded,
    DoubtChanged,
    Established,
    Event,
    ExchangeEnded,
    GoingAway,
    OutputReady,
    ResponseReceived,
)
from kvsp_h2.frames import Buffer
from kvsp_h2.http2 import ClientConnection
from kvsp_h2.limits import WireLimits

__all__ = ["Call", "Link", "Pool", "PoolLimits"]

_ATTEMPTS: Final = 3
"""How often a request is sent at most, where no server has acted on it before."""
_KEPT_BYTES: Final = 1 << 20
"""Of a body that goes out as fast as it is handed over; more is not kept to be sent again."""


@attrs.frozen(kw_only=True)
class PoolLimits:
    """Bounds of the calls to one service, with their defaults."""

    max_connections: int = 4
    """Connections at a time; one more is opened when those there are take no further requests. As many
    again may be there whose peer does not show that it is, or that only let end what is under way."""

    max_waiting: int = 1024
    """Calls that wait for a connection; one more fails at once."""

    backoff_ms: int = 100
    """Wait after a first failure to connect; doubled with each, and jittered by half either way."""

    max_backoff_ms: int = 10_000
    """Longest wait, before jitter."""


class Link(Protocol):
    """A connection as the pump that drives it offers it."""

    @property
    def http(self) -> ClientConnection:
        """The HTTP/2 connection."""

    def flush(self) -> None:
        """Send what there is to send."""


class Call:
    """A request, and what becomes of it. Once it is over, its methods do nothing."""

    __slots__ = (
        "_attempts",
        "_blind",
        "_expects",
        "_kept",
        "_kept_bytes",
        "_link",
        "_on_event",
        "_pieces",
        "_pool",
        "_request",
        "_stream_id",
        "_traceparent",
    )

    def __init__(
        self,
        pool: Pool,
        request: Request,
        on_event: Callable[[Event], None],
        *,
        expect_continue: bool,
        traceparent: str | None,
    ) -> None:
        self._pool = pool
        self._request = request
        self._on_event = on_event
        self._expects = expect_continue
        self._traceparent = traceparent
        self._pieces: list[tuple[Buffer, bool]] = []
        """The body as long as it may have to be sent, or sent again."""
        self._kept = True
        """Whether all of the body that was handed over is kept; it is not where it comes bit by bit."""
        self._kept_bytes = 0
        self._link: Link | None = None
        self._stream_id = self._attempts = 0
        self._blind = False
        """Whether it was sent before the server had said how many requests it takes."""

    def send_data(self, data: Buffer, *, end: bool = False) -> bool:
        """Send octets of the body, which are not copied; return whether there is room for more.

        Where there is not, `OutputReady` will say when there is.
        """
        if self._link is None:
            self._pieces.append((data, end))
            return False
        if self._expects:
            self._let_go()  # the server was asked first, and would have to be asked again
        if self._kept:
            self._pieces.append((data, end))
            self._kept_bytes += memoryview(data).nbytes
        room = self._link.http.send_data(self._stream_id, data, end=end)
        if room and not end and self._kept_bytes > _KEPT_BYTES:
            self._let_go()
        self._link.flush()
        return room

    @property
    def sent_bytes(self) -> int:
        """How many octets of the body have gone out, as long as the call is under way."""
        return 0 if self._link is None else self._link.http.sent_bytes(self._stream_id)

    def acknowledge(self, count: int) -> None:
        """Say that octets of the answer's body have been dealt with."""
        if self._link is not None:
            self._link.http.acknowledge(self._stream_id, count)
            self._link.flush()

    def receive_into(self, free: Callable[[], memoryview]) -> None:
        """Have octets of the answer's body put straight where `free` says; see `Connection.receive_into`.

        For use once the head of the answer has come.
        """
        if self._link is not None:
            self._link.http.receive_into(self._stream_id, free)

    def cancel(self) -> None:
        """Give the call up; nothing more of it is told."""
        self._on_event = _ignore
        if self._link is not None:
            self._link.http.reset(self._stream_id)
            self._link.flush()
        else:
            self._pool.forget(self)

    def start(self, link: Link) -> int:
        """Send the request on a connection; return its stream."""
        (first, end), *rest = self._pieces
        self._attempts += 1
        self._link, self._blind = link, not link.http.settled
        self._stream_id = link.http.request(
            self._request, first, end=end, expect_continue=self._expects, traceparent=self._traceparent
        )
        room = True
        for data, last in rest:
            room = link.http.send_data(self._stream_id, data, end=last)
            end = last
        if room and not end and rest:
            self._let_go()
            self._on_event(OutputReady(self._stream_id))
        return self._stream_id

    def _let_go(self) -> None:
        """Keep the body no longer: its owner hands it over bit by bit, as there is room."""
        self._kept, self._kept_bytes = False, 0
        self._pieces.clear()

    def receive(self, event: Event) -> bool:
        """Pass an event on; return False where the call is to be made again instead."""
        if isinstance(event, ExchangeEnded):
            refused = event.unprocessed and self._link is not None and not self._link.http.spent
            if refused and self._blind:
                # One too many, which nobody could know then; on this connection it is known from now on.
                self._attempts -= 1
            self._link = None
            whole = self._kept and self._pieces[-1][1]
            if event.unprocessed and whole and self._attempts < _ATTEMPTS and self._on_event is not _ignore:
                return False
        elif isinstance(event, OutputReady):
            self._let_go()
        self._on_event(event)
        return True

    def fail(self, reason: str) -> None:
        """End a call that was not sent."""
        self._on_event(ExchangeEnded(0, False, 0, reason, unprocessed=True))


class Pool:
    """The calls to the service at one base URI.

    `jitter` returns a number from 0 to 1 each time it is asked. `wake` is called where a connection may be
    wanted, now or later: the pump then asks `wants_dial` and `next_deadline_ms`.
    """

    def __init__(
        self,
        base_uri: str,
        jitter: Callable[[], float],
        *,
        limits: PoolLimits | None = None,
        wire_limits: WireLimits | None = None,
    ) -> None:
        self.base_uri = base_uri
        self.wire_limits = wire_limits or WireLimits()
        self.wake: Callable[[], None] = _nothing
        self._jitter = jitter
        self._limits = limits or PoolLimits()
        self._waiting: OrderedDict[Call, None] = OrderedDict()
        self._links: dict[Link, dict[int, Call]] = {}
        self._unproven: set[Link] = set()
        """Connections that have not brought an answer yet."""
        self._closed = ""
        self._dialing = 0
        self._failures = 0
        self._dial_at_ms: int | None = None

    def call(
        self,
        request: Request,
        body: Buffer = b"",
        *,
        on_event: Callable[[Event], None],
        end: bool = True,
        expect_continue: bool = False,
        traceparent: str | None = None,
    ) -> Call:
        """Make a request; `on_event` is told what becomes of it. Where `end` is false, more of the body
        follows; `traceparent` says what the request belongs to.

        A request that no server has acted on is sent again by itself, while its body is all here.
        """
        call = Call(self, request, on_event, expect_continue=expect_continue, traceparent=traceparent)
        call.send_data(body, end=end)
        full = len(self._waiting) >= self._limits.max_waiting
        if full or self._closed:
            call.fail(self._closed or "too many calls wait for this service")
            return call
        self._waiting[call] = None
        self._assign()
        self.wake()
        return call

    def forget(self, call: Call) -> None:
        """Give up a call that was not sent."""
        self._waiting.pop(call, None)

    @property
    def is_idle(self) -> bool:
        """Whether it has neither calls that wait nor connections."""
        return not (self._waiting or self._links or self._dialing)

    # Connections -----------------------------------------------------------------------------------------

    def wants_dial(self, now_ms: int) -> bool:
        """Return whether to open a connection now, and count on it: `dial_failed` or its events must
        follow."""
        if not self._waiting or self._dialing or len(self._links) >= 2 * self._limits.max_connections:
            return False
        if self._useful() >= self._limits.max_connections:
            return False
        if self._dial_at_ms is not None and now_ms < self._dial_at_ms:
            return False
        self._dialing += 1
        return True

    def next_deadline_ms(self) -> int | None:
        """Return when `wants_dial` is to be asked again; None where time does not matter."""
        return self._dial_at_ms if self._waiting and not self._dialing else None

    def dial_failed(self, reason: str, now_ms: int) -> None:
        """Say that no connection came to be. Calls that waited for it fail."""
        self._dialing -= 1
        self._back_off(now_ms)
        if not self._useful():
            self._fail_waiting(reason)
        self.wake()

    def receive(self, link: Link, event: Event, now_ms: int) -> None:
        """Take an event of a connection that was dialed for this pool."""
        match event:
            case Established():
                self._dialing -= 1
                self._links[link] = {}
                self._unproven.add(link)
                self._assign()
                self.wake()
            case DoubtChanged() | GoingAway():
                self._assign()
                self.wake()
            case ConnectionEnded():
                self._lose(link, event.reason, now_ms)
            case _ if (stream_id := getattr(event, "stream_id", None)) is not None:
                self._pass_on(link, stream_id, event)
            case _:
                pass

    def close(self, reason: str) -> None:
        """Fail what waits, and every later call."""
        self._closed = reason
        self._fail_waiting(reason)

    def _fail_waiting(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, OrderedDict()
        for call in waiting:
            call.fail(reason)

    def _lose(self, link: Link, reason: str, now_ms: int) -> None:
        if self._links.pop(link, None) is None:
            self.dial_failed(reason or "the connection was closed", now_ms)
        elif link in self._unproven:
            # Gone before it brought any answer: under TLS 1.3 that may well be a refusal.
            self._unproven.discard(link)
            self._back_off(now_ms)
        self.wake()

    def _pass_on(self, link: Link, stream_id: int, event: Event) -> None:
        calls = self._links.get(link, {})
        call = calls.get(stream_id)
        if call is None:
            return
        if isinstance(event, ResponseReceived):
            self._unproven.discard(link)
            self._failures, self._dial_at_ms = 0, None
        over = isinstance(event, ExchangeEnded)
        if over:
            del calls[stream_id]
        if not call.receive(event):
            self._waiting[call] = None
            self._waiting.move_to_end(call, last=False)
        if over and self._waiting:
            self._assign()
            self.wake()

    def _back_off(self, now_ms: int) -> None:
        wait_ms = min(self._limits.backoff_ms << min(self._failures, 20), self._limits.max_backoff_ms)
        self._failures += 1
        self._dial_at_ms = now_ms + int(wait_ms * (0.5 + self._jitter()))

    def _useful(self) -> int:
        """Return how many connections take requests, or will. What is sent on one in doubt may wait long."""
        return sum(not (link.http.in_doubt or link.http.spent) for link in self._links)

    def _assign(self) -> None:
        """Send what waits on the connections that take it."""
        for link, calls in tuple(self._links.items()):
            if link.http.in_doubt:
                continue
            sent = False
            while self._waiting and link.http.can_request:
                call, _ = self._waiting.popitem(last=False)
                calls[call.start(link)] = call
                sent = True
            if sent:
                link.flush()


def _nothing() -> None:
    """Take note of nothing."""


def _ignore(event: Event) -> None:
    """Take the events of a call that was given up."""
