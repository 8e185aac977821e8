"""The boundary of TLS: whatever octets come, an end says so and ends, or waits with a deadline; octets that
were changed on the way are never taken for what was sent.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvsp_core.heads import Request
from kvsp_h2 import (
    ConnectionEnded,
    Credentials,
    DataReceived,
    Established,
    Event,
    SecureConnection,
    secure_client,
    secure_server,
)
from kvsp_services.pki import init_ca, issue

_URI = "https://localhost/kvsp/"
_BODY = b"a block of keys and values " * 40


def _credentials() -> Credentials:
    with tempfile.TemporaryDirectory(prefix="kvsp-fuzz-") as name:
        folder = Path(name)
        authority = init_ca(folder)
        issued = issue(folder, uri=_URI, name="server")
        return Credentials(issued.certificate, issued.key, authority.certificate)


_CREDENTIALS = _credentials()
_HELLO = secure_client(_CREDENTIALS, _URI, 0).data_to_send()
SEEDS = (
    b"\x00" + _HELLO,
    b"\x00" + _HELLO[:200],
    b"\x00GET / HTTP/1.1\r\n\r\n",
    b"\x00PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x01\x15\x03\x03\x00\x02\x02\x28",
    b"\x01\x16\x03\x03\x00\x02\x02\x00",
    b"\x02",
    b"\x02\x00\x80\x01",
    b"\x02\x03\x00\x10",
    b"\x03\x07\x00\x10\x07\x80\x01",
)


def one_input(data: bytes) -> None:
    """Give octets to a server or a client that has just begun, or change octets between two that speak."""
    kind, octets = (data[0] if data else 0) % 4, data[1:]
    if kind == 0:
        _receive(secure_server(_CREDENTIALS, _URI, 0), octets)
    elif kind == 1:
        _receive(secure_client(_CREDENTIALS, _URI, 0), octets)
    else:
        changes = {
            int.from_bytes(octets[at : at + 2], "big"): octets[at + 2] for at in range(0, len(octets) - 2, 3)
        }
        _speak(changes, to_server=kind == 2)


def _events(connection: SecureConnection[object]) -> list[Event]:  # type: ignore[type-var]
    found = []
    while (event := connection.next_event()) is not None:
        found.append(event)
    return found


def _receive(connection: SecureConnection[object], octets: bytes) -> None:  # type: ignore[type-var]
    """Nobody who does not know a key gets through the handshake."""
    connection.data_to_send()
    connection.receive_data(octets, 0)
    events = _events(connection)
    assert not [event for event in events if isinstance(event, Established)], "a stranger was let in"
    assert [ConnectionEnded] * connection.ended == [type(event) for event in events]
    assert len(connection.data_to_send()) < 1 << 16
    due_ms = connection.next_deadline_ms()
    assert due_ms is not None, "it waits without end"
    connection.handle_timer(due_ms)
    _events(connection)
    assert connection.ended


def _speak(changes: dict[int, int], *, to_server: bool) -> None:
    """Store a body; octets at these places of one direction are changed by exclusive or."""
    client, server = secure_client(_CREDENTIALS, _URI, 0), secure_server(_CREDENTIALS, _URI, 0)
    body = bytearray()
    told: list[Event] = []
    at = 0
    for _ in range(12):
        for source, target in ((client, server), (server, client)):
            octets = bytearray(source.data_to_send())
            if (target is server) is to_server:
                for place, mask in changes.items():
                    if at <= place < at + len(octets):
                        octets[place - at] ^= mask
                at += len(octets)
            target.receive_data(bytes(octets), 0)
            while (event := target.next_event()) is not None:
                if target is server and isinstance(event, DataReceived):
                    body += event.data
                elif target is server:
                    told.append(event)
                elif isinstance(event, Established) and client.http is not None:
                    client.http.request(Request(method="PUT", path="x", content_length=len(_BODY)), _BODY)
    assert _BODY.startswith(body), "octets that were changed on the way were taken"
    if not any(changes.values()):
        assert body == _BODY, "nothing was changed, and the body is not there"
    assert sum(isinstance(event, ConnectionEnded) for event in told) <= 1
