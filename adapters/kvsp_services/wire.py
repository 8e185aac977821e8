"""Between a role's driver and its connections: events of exchanges in, responses and calls out.

It works on the networks of both pumps, `kvsp_asyncio` and `kvsp_trio`, which offer the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from kvsp_core.heads import Request, Response
from kvsp_h2 import (
    BodyEnded,
    ConnectionEnded,
    Credentials,
    DataPlaced,
    DataReceived,
    Established,
    Event,
    ExchangeEnded,
    OutputReady,
    RequestReceived,
    ResponseReceived,
    ServerConnection,
)
from kvsp_services.driver import Driver
from kvsp_services.ports import Outgoing, OutgoingListener

__all__ = ["MAX_SERVICES", "ServedRole", "ServicePeers"]

MAX_SERVICES: Final = 4096
"""Base URIs that a role may have called; calls to further ones fail."""


class ServerLink(Protocol):
    """A connection that came in."""

    @property
    def http(self) -> ServerConnection:
        """Its HTTP/2."""
        ...

    def flush(self) -> None:
        """Send what there is to send."""
        ...


class _Exchange:
    """A request on its connection; see `ports.Incoming`."""

    __slots__ = ("_link", "_stream_id", "began", "client", "request", "traceparent")

    def __init__(
        self, link: ServerLink, stream_id: int, client: str, request: Request, traceparent: str | None
    ) -> None:
        self._link = link
        self._stream_id = stream_id
        self.client = client
        self.request = request
        self.traceparent = traceparent
        self.began = time.monotonic()

    def accept_body(self) -> None:
        self._link.http.accept_body(self._stream_id)
        self._link.flush()

    def respond(self, response: Response, body: Sequence[bytes | memoryview], *, end: bool) -> None:
        http, stream_id = self._link.http, self._stream_id
        first, *rest = body or (b"",)
        http.respond(stream_id, response, first, end=end and not rest)
        for number, piece in enumerate(rest, 1):
            http.send_data(stream_id, piece, end=end and number == len(rest))
        self._link.flush()

    def send(self, data: bytes | memoryview, *, end: bool) -> bool:
        room = self._link.http.send_data(self._stream_id, data, end=end)
        self._link.flush()
        return room

    def acknowledge(self, count: int) -> None:
        self._link.http.acknowledge(self._stream_id, count)
        self._link.flush()

    def receive_into(self, free: Callable[[], memoryview]) -> None:
        self._link.http.receive_into(self._stream_id, free)

    def cancel(self) -> None:
        self._link.http.reset(self._stream_id)
        self._link.flush()


class ServedRole:
    """Hands the events of a role's connections to its driver, which may be replaced by another.

    `took` is told how long each request took, in seconds, from its head to the end of its answer.
    """

    def __init__(self, driver: Driver, took: Callable[[float], None] = lambda seconds: None) -> None:
        self.driver = driver
        self._took = took
        self._principals: dict[ServerLink, str] = {}
        self._exchanges: dict[tuple[ServerLink, int], _Exchange] = {}

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._principals)

    def on_event(self, link: ServerLink, event: Event) -> None:
        """Take an event of one of the role's connections."""
        driver = self.driver
        match event:  # the most frequent first
            case DataReceived(stream_id, data):
                if found := self._exchanges.get((link, stream_id)):
                    driver.data_received(found, data)
            case DataPlaced(stream_id, size_bytes):
                if found := self._exchanges.get((link, stream_id)):
                    driver.data_placed(found, size_bytes)
            case RequestReceived(stream_id, request, ended, traceparent):
                client = self._principals.get(link, "")
                exchange = _Exchange(link, stream_id, client, request, traceparent)
                self._exchanges[link, stream_id] = exchange
                driver.request_received(exchange, ended=ended)
            case BodyEnded(stream_id):
                if found := self._exchanges.get((link, stream_id)):
                    driver.body_ended(found)
            case ExchangeEnded(stream_id, complete, sent_bytes):
                if over := self._exchanges.pop((link, stream_id), None):
                    self._took(time.monotonic() - over.began)
                    driver.exchange_ended(over, complete=complete, sent_bytes=sent_bytes)
            case OutputReady(stream_id):
                if found := self._exchanges.get((link, stream_id)):
                    driver.output_ready(found)
            case Established(principal):
                self._principals[link] = principal
            case ConnectionEnded():
                self._principals.pop(link, None)
            case _:
                pass


class _Listening:
    """Passes the events of a call on to its listener."""

    __slots__ = ("_listener",)

    def __init__(self, listener: OutgoingListener) -> None:
        self._listener = listener

    def __call__(self, event: Event) -> None:
        match event:
            case ResponseReceived(_, response, ended):
                self._listener.response_received(response)
                if ended:
                    self._listener.body_ended()
            case DataReceived(_, data):
                self._listener.data_received(data)
            case DataPlaced(_, size_bytes):
                self._listener.data_placed(size_bytes)
            case BodyEnded():
                self._listener.body_ended()
            case ExchangeEnded(complete=False, reason=reason):
                self._listener.failed(reason)
            case _:
                pass


class _NoCall:
    """A call that failed before it began."""

    def acknowledge(self, count: int) -> None:
        """Do nothing."""

    def receive_into(self, free: Callable[[], memoryview]) -> None:
        """Do nothing."""

    def cancel(self) -> None:
        """Do nothing."""


class ServicePeers:
    """The other roles, as services of a network; see `ports.Peers`.

    `open_service` returns what the network offers for a base URI.
    """

    def __init__(self, open_service: Callable[[str], Any]) -> None:
        self._open_service = open_service
        self._services: dict[str, Any] = {}

    @classmethod
    def of_network(cls, network: Any, credentials: Credentials) -> ServicePeers:
        """Return the peers that are reached over a network, with a role's own certificate."""
        return cls(lambda base_uri: network.service(credentials, base_uri))

    def call(
        self,
        base_uri: str,
        request: Request,
        body: Sequence[bytes | memoryview],
        listener: OutgoingListener,
        traceparent: str | None,
    ) -> Outgoing:
        """Send a request to the role at a base URI."""
        service = self._services.get(base_uri)
        if service is None:
            if len(self._services) >= MAX_SERVICES:
                listener.failed("too many services have been called")
                return _NoCall()
            service = self._services[base_uri] = self._open_service(base_uri)
        first, *rest = body or (b"",)
        call = service.call(
            request, first, on_event=_Listening(listener), end=not rest, traceparent=traceparent
        )
        for number, piece in enumerate(rest, 1):
            call.send_data(piece, end=number == len(rest))
        outgoing: Outgoing = call
        return outgoing
