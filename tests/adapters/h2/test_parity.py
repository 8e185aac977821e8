"""Frames that h2 does not see are checked as it would check them: given to both, they have the same verdict.

These are DATA, WINDOW_UPDATE and RST_STREAM; `test_heads` does the same for header blocks. Differences are on
purpose: a body whose length is not what its head said ends its stream here, where h2 ends the connection, by
the same code; RST_STREAM on a stream that was never opened ends the connection here, and h2 lets it pass.
"""

from __future__ import annotations

import struct

import h2.config
import h2.connection
import h2.events
import h2.exceptions
from hypothesis import example, given
from hypothesis import strategies as st

from kvsp_h2 import BodyEnded, ConnectionEnded, ExchangeEnded, WireLimits
from kvsp_h2.frames import PREFACE
from tests.adapters.h2.pair import Raw, frame, headers, request_block, settings

NARROW = WireLimits(stream_window_bytes=65_535, connection_window_bytes=65_535, max_frame_bytes=20_000)

frames = st.lists(
    st.tuples(
        st.sampled_from([1, 1, 1, 3, 5, 7]),  # open, open, with a content-length, ended, idle
        st.sampled_from([0, 0, 0, 1, 8, 9]),
        st.one_of(st.integers(0, 40), st.sampled_from([16_384, 19_999, 20_000, 20_001])),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=8,
)
OPENING = (
    PREFACE
    + settings()
    + headers(1, request_block(method="PUT"), end=False)
    + headers(3, request_block(("content-length", "50"), method="PUT"), end=False)
    + headers(5, request_block())
)


def octets_of(found: list[tuple[int, int, int, int]]) -> list[bytes]:
    octets = []
    for stream_id, flags, size, pad in found:
        payload = bytearray(size)
        if flags & 8 and size:
            payload[0] = pad
        octets.append(frame(0, flags, stream_id, bytes(payload)))
    return octets


def verdict_of_h2(sent: list[bytes]) -> tuple[dict[int, int], set[int], int | None]:
    """Return body octets and ended bodies by stream, and the code of the first fault."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    connection.initiate_connection()
    connection.max_inbound_frame_size = 20_000
    connection.receive_data(OPENING)
    bodies: dict[int, int] = {}
    ended: set[int] = set()
    for octets in sent:
        try:
            events = connection.receive_data(octets)
        except h2.exceptions.ProtocolError as error:
            return bodies, ended, int(error.error_code)
        for event in events:
            if isinstance(event, h2.events.DataReceived):
                bodies[event.stream_id] = bodies.get(event.stream_id, 0) + len(event.data)
            elif isinstance(event, h2.events.StreamEnded):
                ended.add(event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                return bodies, ended, int(event.error_code)
    return bodies, ended, None


def verdict_of_ours(sent: list[bytes], split: int | None) -> tuple[dict[int, int], set[int], int | None]:
    raw = Raw(NARROW, greet=False)
    raw.end.slow = True
    raw.send(OPENING)
    code = None
    for octets in sent:
        step = split or len(octets)
        back = []
        for at in range(0, len(octets), step):
            back += raw.send(octets[at : at + step])
        codes = [int.from_bytes(f[3][-4:] if f[0] == 3 else f[3][4:8], "big") for f in back if f[0] in (3, 7)]
        if codes:
            code = codes[0]
            break
    bodies = {i: len(b) for i, b in raw.end.bodies.items() if b}
    return bodies, {e.stream_id for e in raw.end.of(BodyEnded)}, code  # type: ignore[union-attr]


@given(frames, st.sampled_from([None, 1, 7, 1000]))
def test_the_same_frames_have_the_same_verdict(
    found: list[tuple[int, int, int, int]], split: int | None
) -> None:
    sent = octets_of(found)
    if split == 1 and sum(map(len, sent)) > 20_000:
        split = 997
    expected_bodies, expected_ended, expected = verdict_of_h2(sent)
    bodies, ended, code = verdict_of_ours(sent, split)
    assert code == expected
    assert ended == expected_ended - {5}
    expected_bodies = {i: n for i, n in expected_bodies.items() if n}
    if expected is None:
        assert bodies == expected_bodies
    else:
        # We pass octets on as they come, h2 whole frames: the frame at fault may have begun here.
        assert {i: n for i, n in bodies.items() if n <= expected_bodies.get(i, 0) + 20_001} == bodies


def test_the_difference_is_one_of_scope() -> None:
    raw = Raw(greet=False)
    raw.send(OPENING)
    back = raw.send(frame(0, 1, 3, bytes(49)))
    assert back == [(3, 0, 3, struct.pack(">L", 1))]
    assert raw.end.of(ConnectionEnded) == []
    assert raw.end.of(ExchangeEnded)[0].reason == "a body has not the length its head said"  # type: ignore[union-attr]


# Frames that open windows and end streams -----------------------------------------------------------------

LARGE = 2**31 - 65_536  # makes the window a peer begins with as large as may be
moves = st.lists(
    st.one_of(
        st.builds(
            lambda stream_id, increment: frame(8, 0, stream_id, struct.pack(">L", increment)),
            st.sampled_from([0, 0, 1, 1, 3, 5, 7, 2]),
            st.sampled_from([0, 1, 1000, 1 << 20, LARGE, LARGE + 1, 2**31 - 1, 1 << 31]),
        ),
        st.builds(
            lambda stream_id, code: frame(3, 0, stream_id, struct.pack(">L", code)),
            st.sampled_from([1, 3, 5]),
            st.integers(0, 20),
        ),
        st.builds(
            lambda size: settings((4, size)), st.sampled_from([0, 1, 65_535, 1 << 20, 2**31 - 1, 1 << 31])
        ),
    ),
    max_size=12,
)


def windows_of_h2(sent: list[bytes]) -> tuple[dict[int, int], set[int], int | None]:
    """Return the windows of connection and streams, the streams that ended, and the code of a fault."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    connection.initiate_connection()
    connection.receive_data(OPENING)
    ended: set[int] = set()
    code = None
    for octets in sent:
        try:
            events = connection.receive_data(octets)
        except h2.exceptions.ProtocolError as error:
            return {}, ended, int(error.error_code)
        for event in events:
            if isinstance(event, h2.events.StreamReset):
                ended.add(event.stream_id)
                if not event.remote_reset:
                    code = int(event.error_code)
        _ = connection.open_inbound_streams  # counting, it forgets those that ended
    found = {i: s.outbound_flow_control_window for i, s in connection.streams.items() if i not in ended}
    return {0: connection.outbound_flow_control_window, **found}, ended, code


def ended_streams(raw: Raw) -> set[int]:
    """Return the streams that ended each for itself, not with the connection."""
    ends = [event for event in raw.end.events if isinstance(event, ExchangeEnded)]
    return {event.stream_id for event in ends if event.reason.startswith(("reset by", "the peer broke"))}


def windows_of_ours(sent: list[bytes], split: int | None) -> tuple[dict[int, int], set[int], int | None]:
    raw = Raw(greet=False)
    raw.send(OPENING)
    code = None
    for octets in sent:
        back = []
        for at in range(0, len(octets), split or len(octets)):
            back += raw.send(octets[at : at + (split or len(octets))])
        codes = [int.from_bytes(f[3][-4:] if f[0] == 3 else f[3][4:8], "big") for f in back if f[0] in (3, 7)]
        if codes:
            code = codes[0]
        if raw.end.connection.ended:
            return {}, ended_streams(raw), code
    http = raw.end.http
    windows = {i: exchange.send_window for i, exchange in http._exchanges.items()}
    return {0: http._sender._window, **windows}, ended_streams(raw), code


@example([frame(8, 0, 1, struct.pack(">L", n)) for n in (1, LARGE)] + [settings((4, 2**31 - 1))], None)
@given(moves, st.sampled_from([None, 1, 7]))
def test_windows_and_resets_have_the_same_verdict(sent: list[bytes], split: int | None) -> None:
    assert windows_of_ours(sent, split) == windows_of_h2(sent)
