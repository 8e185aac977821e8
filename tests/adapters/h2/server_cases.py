"""What a server of HTTP/2 must do with frames that are odd or wrong: raw sequences and expected reactions.

The cases follow RFC 9113 and RFC 7541 section by section. Each sends frames on a fresh connection, after
preface and SETTINGS unless it brings its own, and says what has to come back. `test_cases.py` runs them on
our server in memory; to point them at any server with TLS:

    python -m tests.adapters.h2.server_cases HOST PORT --path /kvsp/x [--ca CA --certificate C --key K]

It prints what deviates. Where the RFC leaves a choice, such as ending the connection for what only had to
end a stream, `Reaction.allows` takes either.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable

import attrs

from kvsp_h2.frames import PREFACE
from tests.adapters.h2.pair import block, frame, headers, read_frames, settings

NO_ERROR, PROTOCOL, INTERNAL, FLOW, SETTINGS_TIMEOUT, CLOSED, SIZE, REFUSED, CANCEL, COMPRESSION = range(10)
CALM = 11
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END, ENDH, PAD, PRIO = 0x1, 0x4, 0x8, 0x20
Frame = tuple[int, int, int, bytes]


@attrs.frozen
class Reaction:
    """What came back on a connection: the frames, and whether it was closed after them."""

    frames: tuple[Frame, ...]
    closed: bool

    def goaway(self) -> int | None:
        codes = [int.from_bytes(f[3][4:8], "big") for f in self.frames if f[0] == GOAWAY]
        return codes[-1] if codes else None

    def reset(self, stream_id: int) -> int | None:
        codes = [int.from_bytes(f[3], "big") for f in self.frames if f[0] == RST and f[2] == stream_id]
        return codes[0] if codes else None

    def status(self, stream_id: int) -> bool:
        return any(f[0] == HEADERS and f[2] == stream_id for f in self.frames)

    def alive(self) -> bool:
        """Whether the PING that ends every case was answered."""
        return any(f[0] == PING and f[1] & 1 and f[3] == LAST_PING for f in self.frames)


@attrs.frozen
class Expect:
    """One reaction that is right. Codes are those of the error; a stream makes it a stream error."""

    codes: tuple[int, ...] = ()
    stream_id: int = 0
    answered: tuple[int, ...] = ()
    check: Callable[[Reaction], bool] | None = None

    def exact(self, reaction: Reaction) -> bool:
        """Return whether a reaction is what we have chosen to do."""
        if self.check is not None and not self.check(reaction):
            return False
        if not all(reaction.status(i) for i in self.answered):
            return False
        if not self.codes:
            return reaction.alive() and not reaction.goaway()
        if self.stream_id:
            return reaction.alive() and reaction.reset(self.stream_id) in self.codes
        return reaction.goaway() in self.codes and not reaction.alive()

    def allows(self, reaction: Reaction) -> bool:
        """Return whether a reaction is within what the RFC allows any server."""
        if self.exact(reaction):
            return True
        if not self.codes:
            return False
        code = reaction.goaway()
        if reaction.closed and (code is None or code in (*self.codes, PROTOCOL)):
            return True
        found = reaction.reset(self.stream_id) if self.stream_id else None
        # A malformed request may be answered with 400 before, or instead of, the reset (8.1.1).
        return found is not None or (self.stream_id > 0 and reaction.status(self.stream_id))


@attrs.frozen
class Case:
    """Frames, and what is to become of them."""

    section: str
    name: str
    octets: bytes
    expect: Expect
    raw: bool = False
    """Whether the octets begin with what the client says first."""


LAST_PING = b"the end."
CASES: list[Case] = []


def case(section: str, name: str, octets: bytes, expect: Expect, *, raw: bool = False) -> None:
    CASES.append(Case(section, name, octets, expect, raw))


def refused(*codes: int) -> Expect:
    return Expect(codes)


def reset(stream_id: int, *codes: int) -> Expect:
    return Expect(codes or (PROTOCOL,), stream_id)


def answered(*streams: int) -> Expect:
    return Expect(answered=streams)


FINE = Expect()


_target = ["", ""]
"""The path and the authority that the cases are being built for."""


def head(*more: tuple[str, str], method: str = "GET", path: str | None = "@", **instead: str | None) -> bytes:
    """Return the header block of a request; `instead` replaces or leaves out pseudo-fields.

    An ``@`` stands for the path or the authority of the server. What ends in ``?hold`` is best not answered.
    """
    pseudo = {"method": method, "scheme": "https", "authority": "@", "path": path, **instead}
    if pseudo["path"] is not None:
        pseudo["path"] = pseudo["path"].replace("@", _target[0])
    if pseudo["authority"] == "@":
        pseudo["authority"] = _target[1]
    fields = ((n, _target[1] if v == "@authority" else v) for n, v in more)
    return block(*((f":{k}", v) for k, v in pseudo.items() if v is not None), *fields)


def get(stream_id: int = 1, *more: tuple[str, str]) -> bytes:
    return headers(stream_id, head(*more))


def post(stream_id: int = 1, *more: tuple[str, str]) -> bytes:
    return headers(stream_id, head(*more, method="POST"), end=False)


def data(stream_id: int, octets: bytes = b"x", *, end: bool = False) -> bytes:
    return frame(DATA, int(end), stream_id, octets)


def update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW, 0, stream_id, struct.pack(">L", increment))


def rst(stream_id: int, code: int = CANCEL) -> bytes:
    return frame(RST, 0, stream_id, struct.pack(">L", code))


PING8 = frame(PING, 0, 0, b"12345678")
TOO_LARGE = 1 << 20  # more than we allow by one; the runner asks others for what they allow


def compressed(octets: bytes) -> bytes:
    """Return a request whose header block ends with these octets."""
    return headers(1, head() + octets)


def _connection_cases() -> None:
    """Add the cases of sections 3 to 5."""
    # 3.4 Connection preface --------------------------------------------------------------------------

    case("3.4", "no preface", b"\x00" * 30, refused(PROTOCOL), raw=True)
    case(
        "3.4",
        "a preface that is wrong at its end",
        PREFACE[:-1] + b"x" + settings(),
        refused(PROTOCOL),
        raw=True,
    )
    case("3.4", "SETTINGS before the preface", settings() + PREFACE, refused(PROTOCOL), raw=True)
    case("3.4", "PING as first frame", PREFACE + PING8, refused(PROTOCOL), raw=True)
    case("3.4", "a request as first frame", PREFACE + get(), refused(PROTOCOL), raw=True)
    case(
        "3.4", "an acknowledgement as first frame", PREFACE + settings(ack=True), refused(PROTOCOL), raw=True
    )
    case("3.4", "an unknown frame as first frame", PREFACE + frame(0xBB, 0, 0), refused(PROTOCOL), raw=True)
    case(
        "3.4", "preface, SETTINGS and a request together", PREFACE + settings() + get(), answered(1), raw=True
    )

    # 4.1 Frame format --------------------------------------------------------------------------------

    case("4.1", "an unknown frame on the connection", frame(0x16, 0, 0, bytes(8)), FINE)
    case("4.1", "an unknown frame on an idle stream", frame(0x16, 0, 1, bytes(8)) + get(), answered(1))
    case(
        "4.1",
        "an unknown frame within an exchange",
        post() + frame(0x16, 0xFF, 1, b"a") + data(1, end=True),
        answered(1),
    )
    case("4.1", "an empty unknown frame", frame(0xFF, 0xFF, 0), FINE)
    case("4.1", "undefined flags on PING", frame(PING, 0x16, 0, b"12345678"), FINE)
    case("4.1", "undefined flags on HEADERS", frame(HEADERS, END | ENDH | 0x42, 1, head()), answered(1))
    case("4.1", "undefined flags on SETTINGS", frame(SETTINGS, 0xFE, 0), FINE)
    case("4.1", "undefined flags on DATA", post() + frame(DATA, END | 0x46, 1, b"x"), answered(1))
    case("4.1", "the reserved bit set on PING", frame(PING, 0, 1 << 31, b"12345678"), FINE)
    case(
        "4.1", "the reserved bit set on HEADERS", frame(HEADERS, END | ENDH, 1 << 31 | 1, head()), answered(1)
    )

    # 4.2 Frame size ----------------------------------------------------------------------------------

    case(
        "4.2",
        "DATA larger than allowed",
        post() + frame(DATA, END, 1, b"", length=TOO_LARGE + 1),
        refused(SIZE),
    )
    case(
        "4.2",
        "HEADERS larger than allowed",
        frame(HEADERS, END | ENDH, 1, b"", length=TOO_LARGE + 1),
        refused(SIZE),
    )
    case(
        "4.2",
        "an unknown frame larger than allowed",
        frame(0x16, 0, 0, b"", length=TOO_LARGE + 1),
        refused(SIZE),
    )
    case("4.2", "DATA of 16,384 octets", post() + data(1, bytes(16_384), end=True), answered(1))
    for _kind, _name, _size in (
        (PRIORITY, "PRIORITY", 5),
        (RST, "RST_STREAM", 4),
        (PING, "PING", 8),
        (WINDOW, "WINDOW_UPDATE", 4),
    ):
        for _wrong in (_size - 1, _size + 1):
            _stream = 0 if _kind in (PING, WINDOW) else 1
            case(
                "4.2",
                f"{_name} of {_wrong} octets",
                post() + frame(_kind, 0, _stream, bytes(_wrong)),
                refused(SIZE),
            )
    case(
        "4.2", "WINDOW_UPDATE of 5 octets on a stream", post() + frame(WINDOW, 0, 1, bytes(5)), refused(SIZE)
    )
    case("4.2", "SETTINGS of 5 octets", frame(SETTINGS, 0, 0, bytes(5)), refused(SIZE))
    case("4.2", "SETTINGS of 7 octets", frame(SETTINGS, 0, 0, bytes(7)), refused(SIZE))

    # 4.3 Field section compression -------------------------------------------------------------------

    case(
        "4.3",
        "a header block that cannot be decoded",
        frame(HEADERS, END | ENDH, 1, b"\xff\xff\xff"),
        refused(COMPRESSION),
    )
    case("4.3", "an empty header block", frame(HEADERS, END | ENDH, 1), reset(1))
    _open = frame(HEADERS, END, 1, head()[:10])
    case(
        "4.3",
        "DATA within a header block",
        post(1) + frame(HEADERS, END, 3, head()[:10]) + data(1),
        refused(PROTOCOL),
    )
    case("4.3", "PING within a header block", _open + PING8, refused(PROTOCOL))
    case("4.3", "SETTINGS within a header block", _open + settings(), refused(PROTOCOL))
    case("4.3", "PRIORITY within a header block", _open + frame(PRIORITY, 0, 1, bytes(5)), refused(PROTOCOL))
    case("4.3", "RST_STREAM within a header block", _open + rst(1), refused(PROTOCOL))
    case("4.3", "WINDOW_UPDATE within a header block", _open + update(0, 1), refused(PROTOCOL))
    case("4.3", "HEADERS within a header block", _open + get(1), refused(PROTOCOL))
    case("4.3", "HEADERS of another stream within a header block", _open + get(3), refused(PROTOCOL))
    case(
        "4.3",
        "CONTINUATION of another stream",
        _open + frame(CONTINUATION, ENDH, 3, head()[10:]),
        refused(PROTOCOL),
    )
    case("4.3", "an unknown frame within a header block", _open + frame(0x16, 0, 0), refused(PROTOCOL))
    case("4.3", "GOAWAY within a header block", _open + frame(GOAWAY, 0, 0, bytes(8)), refused(PROTOCOL))
    # 5.1 Stream states -------------------------------------------------------------------------------

    case("5.1", "DATA on an idle stream", data(1, end=True), refused(PROTOCOL))
    case("5.1", "RST_STREAM on an idle stream", rst(1), refused(PROTOCOL))
    case("5.1", "WINDOW_UPDATE on an idle stream", update(1, 100), refused(PROTOCOL))
    case("5.1", "CONTINUATION on an idle stream", frame(CONTINUATION, ENDH, 1, head()), refused(PROTOCOL))
    case("5.1", "RST_STREAM on an idle stream of the server", rst(2), refused(PROTOCOL))
    case("5.1", "WINDOW_UPDATE on an idle stream of the server", update(2, 1), refused(PROTOCOL))
    case("5.1", "DATA on an idle stream of the server", data(2), refused(PROTOCOL))
    case("5.1", "PRIORITY on an idle stream", frame(PRIORITY, 0, 1, bytes(5)) + get(), answered(1))
    _held = headers(1, head(path="@?hold"))
    case("5.1", "DATA after the end of a request", _held + data(1), reset(1, CLOSED))
    case("5.1", "HEADERS after the end of a request", _held + headers(1, head()), reset(1, CLOSED))
    case(
        "5.1",
        "CONTINUATION after the end of a request",
        _held + frame(CONTINUATION, ENDH, 1, head()),
        refused(PROTOCOL),
    )
    case("5.1", "WINDOW_UPDATE after the end of a request", _held + update(1, 10), FINE)
    case("5.1", "PRIORITY after the end of a request", _held + frame(PRIORITY, 0, 1, bytes(5)), FINE)
    case("5.1", "RST_STREAM after the end of a request", _held + rst(1), FINE)
    case("5.1", "DATA after our reset", post() + rst(1) + data(1), FINE)
    case("5.1", "HEADERS after our reset", post() + rst(1) + headers(1, head()), FINE)
    case(
        "5.1",
        "CONTINUATION after our reset",
        post() + rst(1) + frame(CONTINUATION, ENDH, 1, head()),
        refused(PROTOCOL),
    )
    case("5.1", "RST_STREAM after our reset", post() + rst(1) + rst(1), FINE)
    case("5.1", "WINDOW_UPDATE after our reset", post() + rst(1) + update(1, 10), FINE)
    case("5.1", "DATA on a stream that has ended", get() + data(1), reset(1, CLOSED))
    case("5.1", "HEADERS on a stream that has ended", get() + headers(1, head()), refused(CLOSED))
    case(
        "5.1",
        "CONTINUATION on a stream that has ended",
        get() + frame(CONTINUATION, ENDH, 1, head()),
        refused(PROTOCOL),
    )
    case("5.1", "WINDOW_UPDATE on a stream that has ended", get() + update(1, 10), answered(1))
    case("5.1", "RST_STREAM on a stream that has ended", get() + rst(1), answered(1))
    case("5.1", "PRIORITY on a stream that has ended", get() + frame(PRIORITY, 0, 1, bytes(5)), answered(1))
    case("5.1.1", "a request on an even stream", get(2), refused(PROTOCOL))
    case("5.1.1", "stream numbers that go down", get(5) + get(3), refused(PROTOCOL))
    case("5.1.1", "stream numbers with gaps", get(5) + get(101), answered(5, 101))
    case("5.1.1", "the highest stream number", get(2**31 - 1), answered(2**31 - 1))
    case("5.1.1", "DATA on a stream that was passed over", get(5) + data(3), reset(3, CLOSED))
    case("5.1.1", "HEADERS on stream 0", frame(HEADERS, END | ENDH, 0, head()), refused(PROTOCOL))
    case(
        "5.1.2",
        "more streams than allowed",
        b"".join(headers(i, head(path="@?hold")) for i in range(1, 261, 2)),
        reset(259, REFUSED),
    )

    case(
        "5.1.2",
        "refused streams do not count",
        b"".join(headers(i, head(path="@?hold")) for i in range(1, 261, 2)) + rst(1) + get(261),
        Expect(answered=(261,), check=lambda r: r.reset(257) == r.reset(259) == REFUSED),
    )

    # 5.3 Priority, 5.5 Extensions --------------------------------------------------------------------

    case(
        "5.3",
        "HEADERS with priority",
        frame(HEADERS, END | ENDH | PRIO, 1, b"\x00\x00\x00\x00\x10" + head()),
        answered(1),
    )
    case(
        "5.3",
        "HEADERS with exclusive priority",
        frame(HEADERS, END | ENDH | PRIO, 3, b"\x80\x00\x00\x01\xff" + head()),
        answered(3),
    )
    case(
        "5.3",
        "HEADERS that depend on themselves",
        frame(HEADERS, END | ENDH | PRIO, 1, b"\x00\x00\x00\x01\x10" + head()),
        answered(1),
    )
    case("5.3", "PRIORITY for an unknown parent", frame(PRIORITY, 0, 3, b"\x00\x00\x00\x63\x10"), FINE)
    case("5.5", "PRIORITY_UPDATE is passed over", frame(0x10, 0, 0, b"\x00\x00\x00\x01u=1"), FINE)
    case("5.5", "an unknown setting", settings((0x99, 7)), FINE)
    case("5.5", "ALTSVC from a client is passed over", frame(0xA, 0, 0, b"\x00\x03abcxyz"), FINE)


def _frame_cases() -> None:
    """Add the cases of section 6."""
    _held = headers(1, head(path="@?hold"))
    _open = frame(HEADERS, END, 1, head()[:10])
    # 6.1 DATA ----------------------------------------------------------------------------------------

    case("6.1", "DATA on stream 0", frame(DATA, 0, 0, b"x"), refused(PROTOCOL))
    case(
        "6.1",
        "padding as long as the frame",
        post() + frame(DATA, END | PAD, 1, b"\x05abcd"),
        refused(PROTOCOL),
    )
    case(
        "6.1",
        "padding longer than the frame",
        post() + frame(DATA, END | PAD, 1, b"\xffabc"),
        refused(PROTOCOL),
    )
    case("6.1", "padding of the whole frame", post() + frame(DATA, END | PAD, 1, b"\x04abcd"), answered(1))
    case("6.1", "padding of no octets", post() + frame(DATA, END | PAD, 1, b"\x00abcd"), answered(1))
    case("6.1", "a padded frame without a pad length", post() + frame(DATA, END | PAD, 1), refused(SIZE))
    case(
        "6.1", "a frame of nothing but a pad length", post() + frame(DATA, END | PAD, 1, b"\x00"), answered(1)
    )
    case("6.1", "empty DATA that ends", post() + data(1, b"", end=True), answered(1))
    case("6.1", "empty DATA that does not end", post() + data(1, b"") * 3 + data(1, end=True), answered(1))

    # 6.2 HEADERS -------------------------------------------------------------------------------------

    case(
        "6.2", "padded HEADERS", frame(HEADERS, END | ENDH | PAD, 1, b"\x03" + head() + bytes(3)), answered(1)
    )
    case(
        "6.2",
        "padding longer than HEADERS",
        frame(HEADERS, END | ENDH | PAD, 1, b"\xff" + head()[:9]),
        refused(PROTOCOL),
    )
    case(
        "6.2",
        "HEADERS without room for padding",
        frame(HEADERS, END | ENDH | PAD, 1),
        refused(SIZE, PROTOCOL),
    )
    case(
        "6.2",
        "HEADERS without room for priority",
        frame(HEADERS, END | ENDH | PRIO, 1, bytes(4)),
        refused(SIZE, PROTOCOL),
    )
    case(
        "6.2",
        "padding and priority together",
        frame(HEADERS, END | ENDH | PAD | PRIO, 1, b"\x02\x00\x00\x00\x00\x10" + head() + bytes(2)),
        answered(1),
    )
    case(
        "6.2",
        "padding that covers priority",
        frame(HEADERS, END | ENDH | PAD | PRIO, 1, b"\x09" + bytes(9)),
        refused(PROTOCOL),
    )

    # 6.3 PRIORITY, 6.4 RST_STREAM --------------------------------------------------------------------

    case("6.3", "PRIORITY on stream 0", frame(PRIORITY, 0, 0, bytes(5)), refused(PROTOCOL))
    case("6.4", "RST_STREAM on stream 0", rst(0), refused(PROTOCOL))
    case("6.4", "RST_STREAM with an unknown code", post() + rst(1, 0x99), FINE)
    case("6.4", "RST_STREAM without an error", post() + rst(1, NO_ERROR), FINE)

    # 6.5 SETTINGS ------------------------------------------------------------------------------------

    case(
        "6.5",
        "SETTINGS are acknowledged",
        settings((3, 10)),
        Expect(check=lambda r: sum(f[:2] == (4, 1) for f in r.frames) == 2),
    )
    case("6.5", "an acknowledgement with octets", frame(SETTINGS, 1, 0, bytes(6)), refused(SIZE))
    case("6.5", "SETTINGS on a stream", frame(SETTINGS, 0, 1), refused(PROTOCOL))
    case("6.5", "an acknowledgement nobody asked for", settings(ack=True) * 2, FINE)
    case("6.5.2", "ENABLE_PUSH of 2", settings((2, 2)), refused(PROTOCOL))
    case("6.5.2", "ENABLE_PUSH of 1", settings((2, 1)), FINE)
    case("6.5.2", "INITIAL_WINDOW_SIZE too large", settings((4, 2**31)), refused(FLOW))
    case("6.5.2", "INITIAL_WINDOW_SIZE as large as may be", settings((4, 2**31 - 1)) + get(), answered(1))
    case("6.5.2", "MAX_FRAME_SIZE too small", settings((5, 16_383)), refused(PROTOCOL))
    case("6.5.2", "MAX_FRAME_SIZE too large", settings((5, 2**24)), refused(PROTOCOL))
    case("6.5.2", "MAX_FRAME_SIZE at both ends", settings((5, 16_384), (5, 2**24 - 1)) + get(), answered(1))
    case("6.5.2", "HEADER_TABLE_SIZE of 0", settings((1, 0)) + get(), answered(1))
    case("6.5.2", "HEADER_TABLE_SIZE as large as may be", settings((1, 2**32 - 1)) + get(), answered(1))
    case(
        "6.5.2",
        "HEADER_TABLE_SIZE of 0 and back, between requests",
        get(1) + settings((1, 0)) + get(3) + settings((1, 4096)) + get(5),
        answered(1, 3, 5),
    )
    case(
        "6.5.2",
        "HEADER_TABLE_SIZE that goes up and down within SETTINGS",
        settings((1, 65_536), (1, 0), (1, 8192)) + get(),
        answered(1),
    )
    case("6.5.2", "MAX_HEADER_LIST_SIZE of 1", settings((6, 1)) + get(), answered(1))
    case("6.5.2", "ENABLE_CONNECT_PROTOCOL of 1", settings((8, 1)) + get(), answered(1))
    case("6.5.2", "MAX_CONCURRENT_STREAMS of 0", settings((3, 0)) + get(), answered(1))
    case("6.5.2", "the same setting twice", settings((4, 1), (4, 65_535)) + get(), answered(1))

    # 6.6 PUSH_PROMISE, 6.7 PING, 6.8 GOAWAY ----------------------------------------------------------

    case(
        "6.6",
        "PUSH_PROMISE from a client",
        frame(PUSH, ENDH, 1, struct.pack(">L", 2) + head()),
        refused(PROTOCOL),
    )
    case(
        "6.6",
        "PUSH_PROMISE within an exchange",
        post() + frame(PUSH, ENDH, 1, struct.pack(">L", 2) + head()),
        refused(PROTOCOL),
    )
    case("6.7", "PING is answered", PING8, Expect(check=lambda r: (PING, 1, 0, b"12345678") in r.frames))
    case(
        "6.7",
        "an answer to no PING",
        frame(PING, 1, 0, b"12345678"),
        Expect(check=lambda r: sum(f[0] == PING for f in r.frames) == 1),
    )
    case("6.7", "PING on a stream", frame(PING, 0, 1, bytes(8)), refused(PROTOCOL))
    case("6.8", "GOAWAY on a stream", frame(GOAWAY, 0, 1, bytes(8)), refused(PROTOCOL))
    case("6.8", "GOAWAY of 7 octets", frame(GOAWAY, 0, 0, bytes(7)), refused(SIZE))
    case(
        "6.6",
        "PUSH_PROMISE on stream 0",
        frame(PUSH, ENDH, 0, struct.pack(">L", 2) + head()),
        refused(PROTOCOL),
    )
    case(
        "6.8",
        "a request after GOAWAY",
        _held + frame(GOAWAY, 0, 0, bytes(8)) + get(3),
        answered(3),
    )
    case(
        "6.8",
        "GOAWAY whose last stream goes up",
        _held + frame(GOAWAY, 0, 0, bytes(8)) + frame(GOAWAY, 0, 0, struct.pack(">LL", 2, 0)),
        FINE,
    )
    case(
        "6.8",
        "GOAWAY with octets for people",
        _held + frame(GOAWAY, 0, 0, struct.pack(">LL", 0, 0) + b"good bye"),
        FINE,
    )
    case("6.8", "GOAWAY while a request is open", _held + frame(GOAWAY, 0, 0, bytes(8)), FINE)

    # 6.9 WINDOW_UPDATE and flow control --------------------------------------------------------------

    case("6.9", "an increment of 0 on the connection", update(0, 0), refused(PROTOCOL))
    case("6.9", "an increment of 0 on a stream", post() + update(1, 0), refused(PROTOCOL))
    case("6.9", "an increment of 0 on a stream that has ended", get() + update(1, 0), refused(PROTOCOL))
    case("6.9", "the reserved bit of an increment", get() + update(0, 1 << 31 | 1), answered(1))
    case("6.9.1", "a window of the connection that overflows", update(0, 2**31 - 1), refused(FLOW))
    case("6.9.1", "a window of a stream that overflows", post() + update(1, 2**31 - 1), reset(1, FLOW))
    case("6.9.1", "increments that add up to too much", update(0, 2**30) * 2, refused(FLOW))
    case(
        "6.9.1",
        "an answer within a window of one octet",
        settings((4, 1)) + get(),
        Expect(answered=(1,), check=lambda r: sum(len(f[3]) for f in r.frames if f[0] == DATA) == 1),
    )
    case(
        "6.9.2",
        "a window that opens by SETTINGS",
        settings((4, 0)) + get() + settings((4, 1)),
        Expect(answered=(1,), check=lambda r: sum(len(f[3]) for f in r.frames if f[0] == DATA) == 1),
    )
    case(
        "6.9.2",
        "a window that was negative opens by WINDOW_UPDATE",
        settings((4, 2)) + get() + settings((4, 0)) + update(1, 3),
        Expect(answered=(1,), check=lambda r: sum(len(f[3]) for f in r.frames if f[0] == DATA) == 3),
    )
    case(
        "6.9.2",
        "SETTINGS that make a window overflow",
        post() + update(1, 2**30) + settings((4, 2**31 - 1)),
        refused(FLOW),
    )

    # 6.10 CONTINUATION -------------------------------------------------------------------------------

    _third = len(head()) // 3
    _pieces = frame(HEADERS, END, 1, head()[:_third]) + frame(CONTINUATION, 0, 1, head()[_third : 2 * _third])
    case(
        "6.10",
        "a block in three frames",
        _pieces + frame(CONTINUATION, ENDH, 1, head()[2 * _third :]),
        answered(1),
    )
    case(
        "6.10",
        "CONTINUATION ends no message",
        frame(HEADERS, 0, 1, head(method="POST")) + frame(CONTINUATION, ENDH | END, 1) + data(1, end=True),
        answered(1),
    )
    case(
        "6.10",
        "an empty CONTINUATION that ends",
        frame(HEADERS, END, 1, head()) + frame(CONTINUATION, ENDH, 1),
        answered(1),
    )
    case(
        "6.10",
        "CONTINUATION on stream 0",
        _open + frame(CONTINUATION, ENDH, 0, head()[10:]),
        refused(PROTOCOL),
    )
    case(
        "6.10",
        "CONTINUATION after a whole block",
        post() + frame(CONTINUATION, ENDH, 1, head()),
        refused(PROTOCOL),
    )
    case(
        "6.10",
        "CONTINUATION after DATA",
        post() + data(1) + frame(CONTINUATION, ENDH, 1, head()),
        refused(PROTOCOL),
    )
    case(
        "6.10",
        "CONTINUATION without end",
        frame(HEADERS, END, 1) + frame(CONTINUATION, 0, 1) * 1000,
        refused(CALM),
    )


def _message_cases() -> None:
    """Add the cases of section 8."""
    # 8.1 Messages ------------------------------------------------------------------------------------

    case(
        "8.1",
        "fields in the middle of a message",
        post() + frame(HEADERS, ENDH, 1, block(("x", "y"))),
        reset(1),
    )
    case("8.1", "trailers", post() + data(1) + frame(HEADERS, END | ENDH, 1, block(("x", "y"))), answered(1))
    case(
        "8.1",
        "trailers with a pseudo-field",
        post() + data(1) + frame(HEADERS, END | ENDH, 1, block((":path", "/"))),
        reset(1),
    )
    case(
        "8.1",
        "trailers with a name in capitals",
        post() + frame(HEADERS, END | ENDH, 1, block(("X", "y"))),
        reset(1),
    )
    _trailers = headers(1, block(("x", "y")))
    case("8.1", "trailers without a body", post() + _trailers, answered(1))
    _whole = headers(1, head(method="POST", path="@?hold"), end=False) + data(1) + _trailers
    case("8.1", "trailers after trailers", _whole + _trailers, reset(1, CLOSED))
    case("8.1", "DATA after trailers", _whole + data(1), reset(1, CLOSED))
    for _field, _value in (("te", "gzip"), ("connection", "close"), ("transfer-encoding", "chunked")):
        case(
            "8.1", f"trailers with {_field}", post() + data(1) + headers(1, block((_field, _value))), reset(1)
        )
    for _length, _body, _name in (("4", b"abc", "less"), ("2", b"abc", "more"), ("4", b"", "nothing")):
        case(
            "8.1.1",
            f"{_name} than the content-length says",
            post(1, ("content-length", _length)) + data(1, _body, end=True),
            reset(1),
        )
    case("8.1.1", "a content-length without a body", headers(1, head(("content-length", "1"))), reset(1))
    case(
        "8.1.1",
        "more than the content-length says, in two frames",
        post(1, ("content-length", "3")) + data(1, b"ab") * 2,
        reset(1),
    )
    case(
        "8.1.1",
        "trailers after too little",
        post(1, ("content-length", "3")) + data(1, b"ab") + headers(1, block(("x", "y"))),
        reset(1),
    )
    case(
        "8.1.1",
        "the content-length that it has",
        post(1, ("content-length", "3")) + data(1, b"abc", end=True),
        answered(1),
    )
    for _length in ("", "-1", "+3", "3, 4", "0x3", "9" * 40, "3.0", "\xb3"):
        case(
            "8.1.1", f"the content-length {_length[:9]!r}", post(1, ("content-length", _length)), answered(1)
        )
    case("8.1.1", "a content-length that is none", post(1, ("content-length", "3x")), answered(1))
    case(
        "8.1.1",
        "two content-lengths that differ",
        post(1, ("content-length", "3"), ("content-length", "4")),
        answered(1),
    )

    # 8.2 Fields, 8.3 Control data --------------------------------------------------------------------

    for _field, _value, _name in (
        ("X-Test", "y", "a name in capitals"),
        ("", "y", "an empty name"),
        ("a:b", "y", "a colon in a name"),
        ("a b", "y", "a space in a name"),
        ("a\x7f", "y", "DEL in a name"),
        ("a\xe9", "y", "a letter outside ASCII in a name"),
        ("a\n", "y", "a line end in a name"),
        ("a", "y\x00z", "NUL in a value"),
        ("a", "y\nz", "LF in a value"),
        ("a", "y\rz", "CR in a value"),
        ("a", " y", "a space before a value"),
        ("a", "y\t", "a tab after a value"),
        ("connection", "close", "connection"),
        ("proxy-connection", "close", "proxy-connection"),
        ("keep-alive", "5", "keep-alive"),
        ("transfer-encoding", "chunked", "transfer-encoding"),
        ("upgrade", "h2c", "upgrade"),
        ("te", "gzip", "te other than trailers"),
        (":status", "200", "a pseudo-field of responses"),
        (":unknown", "x", "an unknown pseudo-field"),
        (":path", "/again", "a second path"),
        (":method", "GET", "a second method"),
        (":scheme", "https", "a second scheme"),
        (":authority", "other", "a second authority"),
        ("host", "elsewhere.example", "a host that is not the authority"),
    ):
        case("8.2" if _field[:1] != ":" else "8.3", _name, get(1, (_field, _value)), reset(1))
    case("8.2", "te: trailers", get(1, ("te", "trailers")), answered(1))
    case("8.2", "an empty value", get(1, ("a", "")), answered(1))
    case("8.2", "letters outside ASCII in a value", get(1, ("a", "\xe9")), answered(1))
    case(
        "8.3",
        "a pseudo-field after other fields",
        headers(1, block((":method", "GET"), ("a", "b"), (":path", "/"))),
        reset(1),
    )
    case(
        "8.3.1",
        "no method",
        headers(1, block((":scheme", "https"), (":authority", "a"), (":path", "/"))),
        reset(1),
    )
    case("8.3.1", "no scheme", headers(1, head(scheme=None)), reset(1))
    case("8.3.1", "an empty scheme", headers(1, head(scheme="")), reset(1))
    case("8.3.1", "a scheme that is none", headers(1, head(scheme="ht tp")), reset(1))
    case("8.3.1", "a fragment in the path", headers(1, head(path="@#part")), reset(1))
    case("8.3.1", "a space in the path", headers(1, head(path="@ x")), reset(1))
    case("8.3.1", "a letter outside ASCII in the path", headers(1, head(path="@\xe9")), reset(1))
    case("8.3.1", "two slashes for a path", headers(1, head(path="//")), answered(1))
    case("8.3.1", "dots in the path", headers(1, head(path="/kvsp/../kvsp/x")), answered(1))
    case("8.3.1", "a method in small letters", headers(1, head(method="get")), answered(1))
    case("8.3.1", "an empty method", headers(1, head(method="")), reset(1))
    case("8.3.1", "no path", headers(1, head(path=None)), reset(1))
    case("8.3.1", "an empty path", headers(1, head(path="")), reset(1))
    case("8.3.1", "a path without a slash", headers(1, head(path="kvsp")), reset(1))
    case("8.3.1", "a star for GET", headers(1, head(path="*")), reset(1))
    case("8.3.1", "a star for OPTIONS", headers(1, head(path="*", method="OPTIONS")), answered(1))
    case("8.3.1", "no authority and no host", headers(1, head(authority=None)), reset(1))
    case(
        "8.3.1",
        "a host instead of an authority",
        headers(1, head(("host", "@authority"), authority=None)),
        answered(1),
    )
    case(
        "8.3.1",
        "two hosts that differ",
        headers(1, head(("host", "@authority"), ("host", "elsewhere.example"), authority=None)),
        reset(1),
    )
    case("8.3.1", "an empty authority", headers(1, head(authority="")), reset(1))
    case("8.3.1", "user information in the authority", headers(1, head(authority="me@example")), reset(1))
    case("8.3.1", "a method that is no token", headers(1, head(method="G T")), reset(1))
    case("8.3.1", "a method nobody knows", headers(1, head(method="PURGE")), answered(1))
    case("8.5", "CONNECT", headers(1, head(method="CONNECT", scheme=None, path=None), end=False), answered(1))
    case("8.5", "CONNECT with a path", headers(1, head(method="CONNECT")), reset(1))


def _compression_cases() -> None:
    """Add the cases of RFC 7541."""
    # RFC 7541 ----------------------------------------------------------------------------------------

    case("HPACK 2.3.3", "index 0", compressed(b"\x80"), refused(COMPRESSION))
    case("HPACK 2.3.3", "an index beyond the tables", compressed(b"\xbe"), refused(COMPRESSION))
    case(
        "HPACK 2.3.3", "an index far beyond the tables", compressed(b"\xff\xff\xff\x0f"), refused(COMPRESSION)
    )
    case("HPACK 2.3.3", "a name index beyond the tables", compressed(b"\x7e\x01a"), refused(COMPRESSION))
    case(
        "HPACK 4.1",
        "a field larger than the table",
        compressed(b"\x40\x01a\x7f\x81\x3f" + b"y" * 8192),
        answered(1),
    )
    case(
        "HPACK 4.2",
        "a table size above the setting",
        headers(1, b"\x3f\xe2\x1f" + head()),
        refused(COMPRESSION),
    )
    case("HPACK 4.2", "a table size after fields", compressed(b"\x20"), refused(COMPRESSION))
    case("HPACK 4.2", "a table size of 0", headers(1, b"\x20" + head()), answered(1))
    case("HPACK 4.2", "two table sizes", headers(1, b"\x20\x3f\xe1\x1f" + head()), answered(1))
    case(
        "HPACK 4.4",
        "an entry that was evicted",
        headers(1, b"\x40\x01a\x01b\x20" + head()),
        refused(COMPRESSION),
    )
    case("HPACK 4.2", "three table sizes", headers(1, b"\x20\x3f\xe1\x1f\x20" + head()), answered(1))
    case(
        "HPACK 4.2",
        "a table size that is cut off",
        frame(HEADERS, END | ENDH, 1, b"\x3f"),
        refused(COMPRESSION),
    )
    case("HPACK 5.1", "an integer without end", compressed(b"\xff" + b"\x80" * 10), refused(COMPRESSION))
    case("HPACK 5.1", "an integer that is cut off", compressed(b"\xff\x80"), refused(COMPRESSION))
    case(
        "HPACK 5.2", "a string longer than its block", compressed(b"\x00\x01a\x7f\x01b"), refused(COMPRESSION)
    )
    case("HPACK 5.2", "a string without its length", compressed(b"\x00\x01a"), refused(COMPRESSION))
    case(
        "HPACK 5.2",
        "Huffman padding of more than 7 bits",
        compressed(b"\x00\x01a\x82\x1f\xff"),
        refused(COMPRESSION),
    )
    case("HPACK 5.2", "Huffman padding with zeros", compressed(b"\x00\x01a\x81\x18"), refused(COMPRESSION))
    case(
        "HPACK 5.2",
        "the end of string within a Huffman string",
        compressed(b"\x00\x01a\x84\xff\xff\xff\xff"),
        refused(COMPRESSION),
    )
    case("HPACK 5.2", "a Huffman string", compressed(b"\x00\x01a\x81\x1f"), answered(1))
    case("HPACK 6.2", "a literal that is indexed and used", compressed(b"\x40\x01a\x01b\xbe"), answered(1))
    case("HPACK 6.2", "a literal that is never indexed", compressed(b"\x10\x01a\x01b"), answered(1))
    case(
        "HPACK 6.2",
        "the table lasts from one block to the next",
        compressed(b"\x40\x01a\x01b") + headers(3, head() + b"\xbe"),
        answered(1, 3),
    )
    case(
        "HPACK 6.2",
        "what was not indexed cannot be used",
        compressed(b"\x00\x01a\x01b\xbe"),
        refused(COMPRESSION),
    )


def build(path: str = "/kvsp/blocks/b1", authority: str = "h1.example") -> list[Case]:
    """Return all cases for a server that answers GET and POST on this path."""
    _target[:] = path, authority
    CASES.clear()
    for add in (_connection_cases, _frame_cases, _message_cases, _compression_cases):
        add()
    return list(CASES)


# Against any server -----------------------------------------------------------------------------------------


def provoke(connect: Callable[[], ssl.SSLSocket], sent: Case) -> Reaction:
    """Send a case to a server and collect what comes back, for half a second of silence at most."""
    with connect() as sock:
        sock.settimeout(0.5)
        octets = b""
        with contextlib.suppress(OSError):
            sock.sendall((b"" if sent.raw else PREFACE + settings()) + sent.octets)
            sock.sendall(frame(PING, 0, 0, LAST_PING))
        try:
            while more := sock.recv(65_536):
                octets += more
                if LAST_PING in octets:
                    sock.settimeout(0.05)
            closed = True
        except TimeoutError:
            closed = False
        except OSError:
            closed = True
    whole = octets if octets[3:4] == b"\x04" else b""
    return Reaction(tuple(read_frames(whole)), closed)


def main() -> int:
    """Run the cases against a server; return how many it fails."""
    parser = argparse.ArgumentParser(description="Send odd and wrong frames to an HTTP/2 server over TLS.")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--path", default="/")
    parser.add_argument("--ca")
    parser.add_argument("--certificate")
    parser.add_argument("--key")
    given = parser.parse_args()
    context = ssl.create_default_context(cafile=given.ca)
    if given.ca is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if given.certificate:
        context.load_cert_chain(given.certificate, given.key)

    def connect() -> ssl.SSLSocket:
        sock = socket.create_connection((given.host, given.port))
        return context.wrap_socket(sock, server_hostname=given.host)

    failed = 0
    cases = build(given.path, f"{given.host}:{given.port}")
    for sent in cases:
        reaction = provoke(connect, sent)
        if not sent.expect.allows(reaction):
            failed += 1
            print(f"{sent.section:<12} {sent.name}: GOAWAY {reaction.goaway()}, closed {reaction.closed}")
    print(f"{len(cases) - failed} of {len(cases)} cases as expected")
    return failed


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
