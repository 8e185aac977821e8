"""Clusters whose calls go as octets of HTTP/2: the same properties, and those of the wire itself."""

from __future__ import annotations

import struct
from collections import Counter
from typing import TypeAlias

import pytest

from kvsp_core.heads import Request, Response
from kvsp_h2.events import (
    BodyEnded,
    DataReceived,
    Event,
    ExchangeEnded,
    RequestReceived,
    ResponseReceived,
)
from kvsp_h2.frames import PREFACE
from kvsp_h2.http2 import ClientConnection
from kvsp_h2.limits import WireLimits
from kvsp_sim.octets import End, Link
from kvsp_sim.property import Violation
from kvsp_sim.randomness import Randomness
from kvsp_sim.simulate import Options, run_seed
from kvsp_sim.streams import NotingClient, Said, Streams
from tests.adapters.h2.pair import block, frame, headers, settings
from tests.adapters.sim.toy import REGISTER, Toy, run_with_faults
from tests.hash_seeds import printed

SEEDS = 3
MORE_SEEDS = 33
CHUNK = 10

REQUEST = Request(method="PUT", path="value")
RESPONSE = Response(status=200)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_seed_holds(seed: int) -> None:
    outcome = run_seed(seed, Options(wire="h2", steps=1_000))
    assert outcome.failure is None, f"\n{outcome}"


@pytest.mark.verify
@pytest.mark.parametrize("first", range(SEEDS, MORE_SEEDS, CHUNK))
def test_more_seeds_hold(first: int) -> None:
    for seed in range(first, first + CHUNK):
        outcome = run_seed(seed, Options(wire="h2"))
        assert outcome.failure is None, f"\n{outcome}"


@pytest.mark.parametrize("seed", [1])
def test_where_nothing_goes_wrong_no_call_fails(seed: int) -> None:
    """With servers that allow few streams and close what is idle at once, a call may be refused too often."""
    outcome = run_seed(seed, Options(wire="h2", faults="none"))
    assert outcome.failure is None, f"\n{outcome}"
    assert outcome.counts["requests served"] == outcome.counts["requests"] > 0
    assert outcome.counts.get("calls failed", 0) == 0


def test_a_seed_gives_one_history_under_any_hash_seed() -> None:
    program = (
        "from kvsp_sim.simulate import *; o = run_seed(5, Options(wire='h2', steps=500)); "
        "print(o.trace_hash, o.steps, o.failure)"
    )
    assert len({printed(program, seed) for seed in ("0", "1")}) == 1


# The wire itself


def streams(*, body: bytes = b"12", answer: bytes = b"3456") -> Streams:
    """Return a connection on whose one stream these were given, whole."""
    noted = Streams(Counter())
    noted.give_head(1, REQUEST)
    noted.give(1, body, by_client=True, end=True)
    noted.give_head(1, RESPONSE)
    noted.give(1, answer, by_client=False, end=True)
    return noted


ARRIVING: tuple[tuple[bool, Event], ...] = (
    (False, RequestReceived(1, REQUEST, False)),
    (False, DataReceived(1, memoryview(b"1"))),
    (False, DataReceived(1, memoryview(b"2"))),
    (False, BodyEnded(1)),
    (False, ExchangeEnded(1, True, 4)),
    (True, ResponseReceived(1, RESPONSE, False)),
    (True, DataReceived(1, memoryview(b"3456"))),
    (True, BodyEnded(1)),
    (True, ExchangeEnded(1, True, 2)),
)


def test_what_arrives_as_it_was_given_is_right() -> None:
    noted = streams()
    for at_client, event in ARRIVING:
        noted.check(event, at_client=at_client)


@pytest.mark.parametrize(
    ("number", "event"),
    [
        (0, RequestReceived(1, Request(method="PUT", path="other"), False)),
        (0, RequestReceived(1, REQUEST, True)),
        (2, DataReceived(1, memoryview(b"1"))),
        (2, BodyEnded(1)),
        (4, ExchangeEnded(1, True, 3)),
        (5, ResponseReceived(1, Response(status=404), False)),
        (6, DataReceived(1, memoryview(b"3465"))),
        (7, DataReceived(1, memoryview(b"7"))),
        (6, ExchangeEnded(1, True, 2)),
    ],
)
def test_what_arrives_otherwise_is_found(number: int, event: Event) -> None:
    noted = streams()
    for at_client, before in ARRIVING[:number]:
        noted.check(before, at_client=at_client)
    with pytest.raises(Violation, match="octets_arrive_as_given"):
        noted.check(event, at_client=ARRIVING[number][0])


def test_an_event_after_the_end_of_an_exchange_is_found() -> None:
    noted = streams()
    for at_client, event in ARRIVING:
        noted.check(event, at_client=at_client)
    with pytest.raises(Violation, match="after the end"):
        noted.check(BodyEnded(1), at_client=True)


def test_a_request_that_is_acted_on_twice_is_found() -> None:
    told: Counter[str] = Counter()
    for number in (1, 2):
        noted = Streams(told)
        noted.give_head(1, REQUEST)
        if number == 1:
            noted.check(RequestReceived(1, REQUEST, False), at_client=False)
        else:
            with pytest.raises(Violation, match="a_call_arrives_once"):
                noted.check(RequestReceived(1, REQUEST, False), at_client=False)


SAID = PREFACE + frame(4, 0, 0) + headers(1, b"", end=False) + frame(0, 0, 1, b"xy")


def test_what_may_be_said_is_right() -> None:
    said = Said(by_client=True)
    for octets in (b"", SAID, frame(0, 1, 1) + frame(8, 0, 1, bytes(4)), frame(3, 0, 1, bytes(4))):
        said.check(octets)
    for number, code in enumerate((0, 7, 8, 11)):
        said.check(frame(3, 0, 2 * number + 3, struct.pack(">L", code)))
        said.check(frame(7, 0, 0, struct.pack(">LL", 1, code) + b"words"))


@pytest.mark.parametrize(
    ("octets", "name", "explanation"),
    [
        (frame(3, 0, 1, struct.pack(">L", 1)), "nobody_is_at_fault", "ends a stream with PROTOCOL_ERROR"),
        (
            frame(7, 0, 0, struct.pack(">LL", 1, 3)),
            "nobody_is_at_fault",
            "ends the connection with FLOW_CONTROL_ERROR",
        ),
        (frame(0, 1, 1) + frame(0, 1, 1), "what_is_ended_is_over", "more on stream 1: a frame of kind 0"),
        (headers(3, b"") + headers(3, b""), "what_is_ended_is_over", "more on stream 3: a frame of kind 1"),
        (
            frame(3, 0, 1, bytes(4)) + frame(0, 0, 1, b"z"),
            "what_is_ended_is_over",
            "more on stream 1: a frame of kind 0",
        ),
        (
            frame(3, 0, 1, bytes(4)) + frame(8, 0, 1, bytes(4)),
            "what_is_ended_is_over",
            "more on stream 1: a frame of kind 8",
        ),
    ],
)
def test_what_may_not_be_said_is_found(octets: bytes, name: str, explanation: str) -> None:
    said = Said(by_client=True)
    said.check(SAID)
    with pytest.raises(Violation, match=f"{name}: the client .*{explanation}"):
        said.check(octets)


@pytest.mark.parametrize("of_stream", [True, False])
def test_a_window_that_loses_octets_is_found(of_stream: bool) -> None:
    client = NotingClient(REGISTER, 0, WireLimits())
    client.streams = streams()
    stream_id = client.request(Request(method="GET", path="value"))
    client.receive_data(settings() + headers(stream_id, block((":status", "200")), end=False), 0)
    client.receive_data(frame(0, 0, stream_id, b"12345"), 0)
    if of_stream:
        client._exchanges[stream_id].window -= 1
    else:
        client._windows.left -= 1
    with pytest.raises(Violation, match=r"windows_lose_nothing: .* lost 1 octets"):
        client.receive_data(frame(0, 0, stream_id, b"6"), 0)


# Its faults


Octets: TypeAlias = "dict[tuple[int, bool], bytearray]"
"""Those of a direction of a connection: its number, and whether they go to the server."""


def noted(monkeypatch: pytest.MonkeyPatch) -> tuple[Octets, Octets]:
    """Return what will be written, and what will be read."""
    written: Octets = {}
    read: Octets = {}
    links: list[object] = []

    def note(table: Octets, link: object, direction: bool, octets: bytes) -> None:
        if link not in links:
            links.append(link)
        table.setdefault((links.index(link), direction), bytearray()).extend(octets)

    write, take = End._write, End._read

    def noting_write(end: End, octets: bytes) -> None:
        note(written, end._link, end._is_client, octets)
        write(end, octets)

    def noting_read(end: End, octets: bytes) -> None:
        if not end.host.process.paused:
            note(read, end._link, not end._is_client, octets)
        take(end, octets)

    monkeypatch.setattr(End, "_write", noting_write)
    monkeypatch.setattr(End, "_read", noting_read)
    return written, read


def test_of_a_connection_that_breaks_a_first_part_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    written, read = noted(monkeypatch)
    for seed in range(4):
        run_with_faults(seed, faults=("slow", "breaks", "pause", "block"), wire="h2")
    found = [(octets, read.get(which, b"")) for which, octets in written.items()]
    assert all(octets.startswith(first) for octets, first in found)
    assert any(0 < len(first) < len(octets) for octets, first in found)


def test_a_client_that_stands_still_misses_nothing_of_a_new_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, read = noted(monkeypatch)
    toy = Toy(wire="h2")
    toy.world.run(until_us=10_020)
    toy.client.process.pause()
    toy.world.run(until_us=20_000)
    assert written, "the server has seen the connection"
    assert not read, "the client has not"
    toy.client.process.proceed()
    toy.world.run(until_us=30_000)
    assert read[0, False]
    assert written[0, False].startswith(read[0, False])


def test_what_comes_as_a_connection_goes_on_comes_after_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(wire="h2")
    link = Link(toy.cluster.network.dial("client", "register"), Streams(Counter()))
    http = ClientConnection(REGISTER, 0)
    end = End(toy.client, link, http, print, Randomness(1), is_client=True, room_bytes=1)
    read: list[bytes] = []
    monkeypatch.setattr(end, "_read", read.append)
    monkeypatch.setattr(toy.cluster.network, "stall_us", lambda: 10)
    toy.world.at(10, end.arrive, b"2")
    end.arrive(b"1")
    toy.world.run(until_us=10)
    assert read == [b"1", b"2"]
