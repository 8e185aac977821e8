"""What the targets of HTTP/2 share: frames, and a connection that takes octets in pieces."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeVar

from kvsp_h2.events import ConnectionEnded, DataReceived, Event, ExchangeEnded
from kvsp_h2.frames import PREFACE
from kvsp_h2.http2 import ClientConnection, ServerConnection

__all__ = ["frame", "play_both"]

C = TypeVar("C", ClientConnection, ServerConnection)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2, right or wrong."""
    size = len(payload)
    return struct.pack(">HBBBL", size >> 8, size & 255, kind, flags, stream_id) + payload


def play_both(
    open_connection: Callable[[], C], prelude: bytes, data: bytes
) -> tuple[list[Event], dict[int, bytes], C]:
    """Give a connection octets whole, and another in pieces whose size is the first octet of `data`; compare,
    also with what the frames plainly hold. Nobody is told of what a peer resets in the same octets, so
    streams that it reset are not compared.

    Returns the events, the bodies by stream, and the second connection.
    """
    octets, step = prelude + data[1:], (data[0] if data else 0) % 29 + 1
    whole = _play(open_connection(), octets, 1 << 20)
    connection = open_connection()
    events, bodies = _play(connection, octets, step)
    reset = _reset_by_peer(events)
    assert _without(reset, events, bodies) == _without(reset, *whole), "the split changed the events"
    sent, sound = _bodies(octets[octets.startswith(PREFACE) and len(PREFACE) :])
    for stream_id, body in bodies.items():
        assert sent.get(stream_id, b"").startswith(body), "a body holds what was not sent as one"
    ended = any(isinstance(event, ConnectionEnded) for event in events)
    assert sound or ended, "padding that is longer than its frame was let pass"
    return events, bodies, connection


def _reset_by_peer(events: list[Event]) -> set[int]:
    return {
        event.stream_id
        for event in events
        if isinstance(event, ExchangeEnded) and event.reason.startswith("reset by the peer")
    }


def _without(
    streams: set[int], events: list[Event], bodies: dict[int, bytes]
) -> tuple[list[Event], dict[int, bytes]]:
    """Leave out what concerns these streams."""
    return (
        [event for event in events if getattr(event, "stream_id", 0) not in streams],
        {stream_id: body for stream_id, body in bodies.items() if stream_id not in streams},
    )


def _bodies(octets: bytes) -> tuple[dict[int, bytes], bool]:
    """Read the octets of bodies out of frames, plainly; return whether all padding fits its frame too."""
    bodies: dict[int, bytes] = {}
    at = 0
    while at + 9 <= len(octets):
        high, low, kind, flags, stream_id = struct.unpack_from(">HBBBL", octets, at)
        payload = octets[at + 9 : at + 9 + (high << 8 | low)]
        at += 9 + (high << 8 | low)
        if kind == 0:
            stream_id &= 0x7FFFFFFF
            if flags & 8:
                room = (high << 8 | low) - 1
                if payload and payload[0] > room:
                    return bodies, False
                payload = payload[1 : 1 + room - payload[0]] if payload else b""
            bodies[stream_id] = bodies.get(stream_id, b"") + payload
    return bodies, True


def _play(connection: C, octets: bytes, step: int) -> tuple[list[Event], dict[int, bytes]]:
    events: list[Event] = []
    bodies: dict[int, bytes] = {}
    for start in range(0, len(octets), step):
        connection.receive_data(octets[start : start + step], 0)
        while (event := connection.next_event()) is not None:
            if isinstance(event, DataReceived):
                bodies[event.stream_id] = bodies.get(event.stream_id, b"") + bytes(event.data)
            else:
                events.append(event)
    return events, bodies
