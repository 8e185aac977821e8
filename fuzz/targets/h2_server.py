"""The server's HTTP/2, behind TLS: any frames, in any split, give the same events; what it says is frames.

The application answers nothing before all octets have come, so that the split cannot matter.
"""

from __future__ import annotations

import struct

from kvsp_core.heads import Response
from kvsp_h2.events import ConnectionEnded, ExchangeEnded, RequestReceived
from kvsp_h2.frames import PREFACE, window_update
from kvsp_h2.http2 import ServerConnection
from kvsp_h2.limits import WireLimits

from ._frames import frame, play_both

_LIMITS = WireLimits(
    max_streams=8,
    stream_window_bytes=65_535,
    connection_window_bytes=65_535,
    control_burst=40,
    resets_burst=8,
)
_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


_GET = (
    _literal(b":method", b"GET")
    + _literal(b":scheme", b"https")
    + _literal(b":authority", b"h")
    + _literal(b":path", b"/kvsp/x")
)
_PUT = _GET.replace(b"GET", b"PUT") + _literal(b"content-length", b"5")
SEEDS = (
    b"\x00" + frame(1, 5, 1, _GET) + frame(1, 4, 3, _PUT) + frame(0, 1, 3, b"hello"),
    b"\x01" + frame(1, 0, 1, _GET[:20]) + frame(9, 4, 1, _GET[20:]) + frame(3, 0, 1, b"\x00\x00\x00\x08"),
    b"\x02" + frame(1, 4, 1, _PUT) + frame(0, 8, 1, b"\x03hel\x00\x00\x00") + frame(0, 1, 1, b"lo"),
    b"\x03" + frame(4, 0, 0, b"\x00\x04\x00\x00\x00\x10") + frame(6, 0, 0, bytes(8)) + window_update(0, 9),
    b"\x04" + frame(1, 0x25, 1, b"\x00\x00\x00\x00\x10" + _GET) + frame(7, 0, 0, bytes(8)),
    b"\x05" + frame(1, 4, 1, _PUT) + frame(1, 5, 1, _literal(b"t", b"v")) + frame(99, 7, 5, b"?"),
    b"\x05" + frame(1, 4, 1, _PUT) + frame(0, 9, 1, b"\x00hello") + frame(1, 0xC, 3, b"\x02" + _PUT + b"??"),
    b"\x01" + frame(1, 4, 1, _PUT) + frame(0, 8, 1, b"\x02he") + frame(0, 8, 1, b"\x03llo"),
    b"\x03" + frame(1, 4, 1, _PUT) + frame(0, 8, 1, b"\x05hell"),
    b"\x06" + frame(1, 4, 1, _PUT) + frame(0, 0, 1, b"hell") + frame(0, 1, 1, b"much too long"),
)


def _open() -> ServerConnection:
    return ServerConnection("https://h/kvsp/", 0, _LIMITS)


def one_input(data: bytes) -> None:
    """Take frames whole and in small pieces; compare; answer what was asked; read what is said."""
    events, _, connection = play_both(_open, PREFACE + _SETTINGS, data)
    asked = {event.stream_id for event in events if isinstance(event, RequestReceived)}
    over = [event.stream_id for event in events if isinstance(event, ExchangeEnded)]
    assert len(over) == len(set(over)), "an exchange ended twice"
    assert asked >= set(over), "an exchange ended that nobody was told of"
    ends = [event for event in events if isinstance(event, ConnectionEnded)]
    assert ends == events[-1:] or not ends, "something was told after the end"
    assert not ends or asked == set(over), "an exchange outlived its connection"
    for stream_id in asked:
        connection.respond(stream_id, Response(status=200, content_length=100_000), bytes(100_000))
    check_said(connection)


def check_said(connection: ServerConnection) -> None:
    """Check that what a connection says is whole frames, none larger than a peer allows at first."""
    said = bytearray()
    while octets := connection.data_to_send():
        said += octets
        while connection.next_event() is not None:
            pass
    at = 0
    while at < len(said):
        high, low, kind, _, _ = struct.unpack_from(">HBBBL", said, at)
        assert kind in (0, 1, 3, 4, 6, 7, 8, 9), "a frame of a kind that we do not send"
        at += 9 + (high << 8 | low)
    assert at == len(said), "what was said ends within a frame"
