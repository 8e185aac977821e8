"""Octets of a body that are decrypted straight to where they belong."""

from __future__ import annotations

import os

import pytest

from kvsp_h2 import (
    DataPlaced,
    DataReceived,
    Event,
    ResponseReceived,
    WireLimits,
    secure_client,
    secure_server,
)
from kvsp_h2.connection import Connection
from kvsp_h2.frames import PREFACE
from kvsp_h2.http2 import ServerConnection
from tests.adapters.certificates import SERVER_URI, Certificates
from tests.adapters.h2.pair import BASE_URI, GET, Pair, frame, headers, ok, put, request_block, settings

LARGE = WireLimits(stream_window_bytes=4 << 20, connection_window_bytes=8 << 20)


class Memory:
    """Memory of an application that takes in a body, whichever way it comes."""

    def __init__(self, http: Connection, stream_id: int, size: int) -> None:
        self.http, self.stream_id = http, stream_id
        self.octets = bytearray(size)
        self.filled = self.placed = 0
        http.receive_into(stream_id, self.free)

    def free(self) -> memoryview:
        return memoryview(self.octets)[self.filled :]

    def take(self, event: Event) -> None:
        if isinstance(event, DataReceived) and event.stream_id == self.stream_id:
            self.free()[: len(event.data)] = event.data
            self.filled += len(event.data)
        elif isinstance(event, DataPlaced) and event.stream_id == self.stream_id:
            self.http.acknowledge(self.stream_id, event.size_bytes)
            self.filled += event.size_bytes
            self.placed += event.size_bytes


@pytest.mark.parametrize("split", [None, 900, 5000, 100_000])
@pytest.mark.parametrize("largest", [16_384, 45_000, 1 << 20])
def test_bodies_arrive_as_they_were_sent_wherever_they_go(
    certificates: Certificates, split: int | None, largest: int
) -> None:
    limits = WireLimits(stream_window_bytes=4 << 20, connection_window_bytes=8 << 20, max_frame_bytes=largest)
    server, client = (certificates.credentials(c) for c in (certificates.server, certificates.client))
    pair = Pair(
        server=secure_server(server, SERVER_URI, 0),
        client=secure_client(client, SERVER_URI, 0, limits=limits),
        split=split,
    )
    pair.run()
    memories: dict[int, Memory] = {}

    def on_event(event: Event) -> None:
        if isinstance(event, ResponseReceived) and event.stream_id != 3:  # which is told of its octets
            assert event.response.content_length is not None
            memories[event.stream_id] = Memory(pair.calling, event.stream_id, event.response.content_length)
        for memory in memories.values():
            memory.take(event)

    pair.client.on_event = on_event
    bodies = {pair.exchange(GET): os.urandom(size) for size in (3_000_000, 700_001, 400_000, 70_000, 5)}
    for stream_id, body in bodies.items():
        pair.serving.respond(stream_id, ok(len(body)), body)
    pair.run()
    assert pair.client.bodies[3] == bodies.pop(3)
    assert {stream_id: bytes(memory.octets) for stream_id, memory in memories.items()} == bodies
    placed = sum(memory.placed for memory in memories.values())
    assert bool(placed) is (largest > 16_384)


class Receiving:
    """A server in the middle of a large frame of a body that it has memory for."""

    def __init__(self, *, size: int = 100_000, padded: bool = False, declared: bool = True) -> None:
        self.http = ServerConnection(BASE_URI, 0, LARGE)
        length = (("content-length", str(size)),) if declared else ()
        self.http.receive_data(
            PREFACE + settings() + headers(1, request_block(*length, method="PUT"), end=False), 0
        )
        self.drain()
        self.memory = Memory(self.http, 1, 1 << 20)
        padding = 10 if padded else 0
        self.http.receive_data(
            frame(0, 0x1 | (0x8 if padded else 0), 1, length=size + (1 + padding if padded else 0))
            + bytes([padding] * padded),
            0,
        )

    def drain(self) -> list[Event]:
        events = []
        while (event := self.http.next_event()) is not None:
            events.append(event)
        return events


def test_memory_is_given_for_what_is_left_of_a_frame() -> None:
    it = Receiving()
    place = it.http.place()
    assert place is not None
    assert place.nbytes == 100_000
    place[:60_000] = b"x" * 60_000
    it.http.receive_placed(60_000, 0)
    assert it.http.place() is None, "the application does not know yet that its memory is filled"
    [event] = it.drain()
    assert event == DataPlaced(1, 60_000)
    it.memory.take(event)
    place = it.http.place()
    assert place is not None
    assert place.nbytes == 40_000
    place[:] = b"y" * 40_000
    it.http.receive_placed(40_000, 0)
    assert [type(event).__name__ for event in it.drain()] == ["DataPlaced", "BodyEnded"]
    assert it.memory.octets[:100_000] == b"x" * 60_000 + b"y" * 40_000


def test_padding_is_nobody_s_memory() -> None:
    it = Receiving(padded=True)
    place = it.http.place()
    assert place is not None
    assert place.nbytes == 100_000
    it.http.receive_placed(100_000, 0)
    assert it.drain() == [DataPlaced(1, 100_000)]
    assert it.http.place() is None
    it.http.receive_data(bytes(10), 0)
    assert [type(event).__name__ for event in it.drain()] == ["BodyEnded"]


def test_an_application_may_have_little_room() -> None:
    it = Receiving()
    it.memory.octets = bytearray(50_000)
    place = it.http.place()
    assert place is not None
    assert place.nbytes == 50_000
    it.memory.octets = bytearray(100)
    assert it.http.place() is None
    it.http.receive_data(bytes(100_000), 0)
    assert [type(event).__name__ for event in it.drain()] == ["DataReceived", "BodyEnded"]


def test_an_exchange_that_is_over_gets_no_octets() -> None:
    it = Receiving()
    it.http.reset(1)
    it.drain()
    assert it.http.place() is None
    it.http.receive_data(bytes(100_000), 0)
    assert it.drain() == []


def test_a_frame_beyond_the_length_of_the_body_is_not_placed() -> None:
    pair = Pair(server_limits=LARGE)
    stream_id = pair.exchange(put(10))
    memory = Memory(pair.serving, stream_id, 1 << 20)
    pair.serving.receive_data(frame(0, 0, stream_id, length=100_000), 0)
    assert pair.serving.place() is None
    assert memory.filled == 0
