"""TLS 1.3 and HTTP/2 without I/O: octets and time in, events and octets out.

`secure_server` and `secure_client` make whole connections, `kvsp_h2.http2` has HTTP/2 alone and its events,
`kvsp_h2.tls` certificates. The loop around a connection is short::

    connection.receive_data(octets, now_ms)
    while event := connection.next_event():
        ...                                  # connection.http.respond(...)
    while octets := connection.data_to_send():
        ...                                  # then look for events again: sending makes some
    ...                                      # wake up at connection.next_deadline_ms(): handle_timer(now_ms)
"""

from __future__ import annotations

from kvsp_h2.events import (
    BodyEnded,
    ConnectionEnded,
    ContinueReceived,
    DataPlaced,
    DataReceived,
    DoubtChanged,
    Established,
    Event,
    ExchangeEnded,
    GoingAway,
    OutputReady,
    RequestReceived,
    ResponseReceived,
)
from kvsp_h2.http2 import ClientConnection, ServerConnection
from kvsp_h2.limits import WireLimits
from kvsp_h2.secure import SCRATCH_BYTES, SecureConnection, secure_client, secure_server
from kvsp_h2.tls import Credentials, CredentialsError, Peer, TLSConnection, TLSFailure

__all__ = [
    "SCRATCH_BYTES",
    "BodyEnded",
    "ClientConnection",
    "ConnectionEnded",
    "ContinueReceived",
    "Credentials",
    "CredentialsError",
    "DataPlaced",
    "DataReceived",
    "DoubtChanged",
    "Established",
    "Event",
    "ExchangeEnded",
    "GoingAway",
    "OutputReady",
    "Peer",
    "RequestReceived",
    "ResponseReceived",
    "SecureConnection",
    "ServerConnection",
    "TLSConnection",
    "TLSFailure",
    "WireLimits",
    "secure_client",
    "secure_server",
]
