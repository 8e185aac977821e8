"""What a connection tells: the events that `next_event` returns."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from kvsp_core.heads import Request, Response

__all__ = [
    "BodyEnded",
    "ConnectionEnded",
    "ContinueReceived",
    "DataPlaced",
    "DataReceived",
    "DoubtChanged",
    "Established",
    "Event",
    "ExchangeEnded",
    "GoingAway",
    "OutputReady",
    "RequestReceived",
    "ResponseReceived",
]


@attrs.frozen
class Established:
    """Both ends have shown their certificates, and requests may go.

    A client that the server does not accept learns that by `ConnectionEnded` only: under TLS 1.3 its own part
    of the handshake is over first, so it is really connected when the first answer has come.
    """

    principal: str
    """The URI name of the peer's certificate."""


@attrs.frozen
class RequestReceived:
    """The head of a request has come. `ended` tells that there is no body, `traceparent` what it says that it
    belongs to."""

    stream_id: int
    request: Request = attrs.field(repr=False)
    ended: bool
    traceparent: str | None = None


@attrs.frozen
class ContinueReceived:
    """The server wants the body of a request that was sent with ``Expect: 100-continue``."""

    stream_id: int


@attrs.frozen
class ResponseReceived:
    """The head of a response has come. `ended` tells that there is no body."""

    stream_id: int
    response: Response = attrs.field(repr=False)
    ended: bool


@attrs.frozen
class DataReceived:
    """Octets of a body. `data` is valid until the next event is asked for: use or copy it before.

    They count against the peer's window until `acknowledge` says that they have been dealt with.
    """

    stream_id: int
    data: memoryview = attrs.field(repr=False)


@attrs.frozen
class DataPlaced:
    """Octets of a body that were put where `receive_into` said. They too wait for `acknowledge`."""

    stream_id: int
    size_bytes: int


@attrs.frozen
class BodyEnded:
    """The body of a request or a response is whole, and as long as its content-length said."""

    stream_id: int


@attrs.frozen
class OutputReady:
    """There is room again after a `send_data` that reported pressure."""

    stream_id: int


@attrs.frozen
class ExchangeEnded:
    """An exchange is over: the one last event of each.

    `complete` says that the answer went out whole (server) or came in whole (client); `sent_bytes` counts
    the body octets that went out. Otherwise `reason` says in plain words what happened, and `unprocessed`
    that the server has certainly not acted on the request, so that it can be sent again.
    """

    stream_id: int
    complete: bool
    sent_bytes: int
    reason: str = ""
    unprocessed: bool = False


@attrs.frozen
class GoingAway:
    """The peer takes no new exchanges on this connection; those under way go on."""


@attrs.frozen
class DoubtChanged:
    """A server was asked whether it is there and has let some time pass, or has been heard of since.

    `in_doubt` of the connection says which.
    """


@attrs.frozen
class ConnectionEnded:
    """The connection is over, the last event. What `data_to_send` still has is to be sent, then closed.

    `reason` says in plain words why; it is empty where it ended in order.
    """

    reason: str


Event: TypeAlias = (
    Established
    | RequestReceived
    | ContinueReceived
    | ResponseReceived
    | DataReceived
    | DataPlaced
    | BodyEnded
    | OutputReady
    | ExchangeEnded
    | GoingAway
    | DoubtChanged
    | ConnectionEnded
)
