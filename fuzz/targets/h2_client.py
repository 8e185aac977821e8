"""The client's HTTP/2, behind TLS: any frames of a server, in any split, give the same events, and every call
ends at most once.
"""

from __future__ import annotations

from kvsp_core.heads import Request
from kvsp_h2.events import ConnectionEnded, ExchangeEnded, ResponseReceived
from kvsp_h2.frames import window_update
from kvsp_h2.http2 import ClientConnection
from kvsp_h2.limits import WireLimits

from ._frames import frame, play_both

_LIMITS = WireLimits(
    stream_window_bytes=65_535, connection_window_bytes=65_535, control_burst=40, resets_burst=8
)
_STREAMS = {1, 3, 5}
_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


_OK = b"\x88"  # :status 200, of the static table
_OK_5 = _OK + b"\x0f\x0d\x015"  # and content-length 5
SEEDS = (
    b"\x00" + frame(1, 4, 1, _OK_5) + frame(0, 1, 1, b"hello") + frame(1, 5, 3, _OK) + frame(1, 5, 5, _OK_5),
    b"\x01" + frame(1, 4, 3, b"\x08\x03100") + frame(1, 4, 3, b"\x8b") + frame(0, 1, 3, b"early"),
    b"\x02" + frame(3, 0, 1, b"\x00\x00\x00\x07") + frame(7, 0, 0, b"\x00\x00\x00\x03" + bytes(4)),
    b"\x03" + frame(4, 0, 0, b"\x00\x03\x00\x00\x00\x01\x00\x05\x00\x00\x40\x00") + window_update(3, 7),
    b"\x04" + frame(1, 4, 1, _OK) + frame(0, 8, 1, b"\x02ab\x00\x00") + frame(1, 5, 1, b"\x00\x01a\x01b"),
    b"\x05" + frame(5, 4, 1, b"\x00\x00\x00\x02" + _OK) + frame(6, 1, 0, bytes(8)),
    b"\x04" + frame(1, 4, 1, _OK_5) + frame(0, 8, 1, b"\x05hell"),
    b"\x06" + frame(1, 4, 1, _OK_5) + frame(0, 0, 1, b"hel") + frame(0, 1, 1, b"lo, and more"),
)


def _open() -> ClientConnection:
    connection = ClientConnection("https://h/kvsp/", 0, _LIMITS)
    connection.request(Request(method="GET", path="a"))
    connection.request(Request(method="PUT", path="b", content_length=100_000), bytes(100), end=False)
    connection.request(Request(method="HEAD", path="c"))
    connection.data_to_send()
    return connection


def one_input(data: bytes) -> None:
    """Take frames whole and in small pieces; compare; look at what became of three requests."""
    events, bodies, connection = play_both(_open, _SETTINGS, data)
    ended = [event for event in events if isinstance(event, ExchangeEnded)]
    over = {event.stream_id for event in ended}
    assert len(ended) == len(over), "a call ended twice"
    assert over <= _STREAMS, "a call ended that nobody made"
    for event in ended:
        heads = [e for e in events if isinstance(e, ResponseReceived) and e.stream_id == event.stream_id]
        assert len(heads) <= 1, "a call was answered twice"
        if event.complete:
            [head] = heads
            length = 0 if event.stream_id == 5 else head.response.content_length
            body = bodies.get(event.stream_id, b"")
            assert length in (None, len(body)), "a body that is not as long as its head says"
    ends = [event for event in events if isinstance(event, ConnectionEnded)]
    assert ends == events[-1:] or not ends, "something was told after the end"
    assert not ends or over == _STREAMS, "a call outlived its connection"
    for stream_id in _STREAMS - over:
        connection.reset(stream_id)
    while connection.data_to_send():
        pass
