"""What every pump does, whatever its loop and whatever it runs over."""

from __future__ import annotations

import hashlib
import logging
import socket
import ssl
from contextlib import suppress
from typing import Any

import anyio
import pytest

from kvsp_client.wire import Wire
from kvsp_core.resources import StoreBlock
from kvsp_h2 import (
    ConnectionEnded,
    ContinueReceived,
    Established,
    ExchangeEnded,
    OutputReady,
    RequestReceived,
    ServerConnection,
    WireLimits,
)
from kvsp_h2.frames import PREFACE
from tests.adapters.certificates import CLIENT_URI, Certificates
from tests.adapters.h2.pair import headers, request_block, settings
from tests.adapters.pumps.worlds import KINDS, Kind, Scenario, World, play


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def run(kind: Kind, certificates: Certificates, scenario: Scenario) -> None:
    play(kind, certificates, scenario)


async def begin(world: World, **limits: int) -> None:
    await world.listen(limits=WireLimits(**limits))
    world.connect_to(limits=WireLimits(**limits))


def test_a_call_is_answered(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        outcome = await world.fetch("block")
        assert outcome.status == 200
        assert outcome.body == world.serving.block
        assert outcome.end.complete
        assert world.serving.events[0] == Established(CLIENT_URI)

    run(kind, certificates, scenario)


def test_large_bodies_go_both_ways_at_once(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        body = bytes(3_000_000) + b"end"
        outcomes = [world.call("store", body) for _ in range(3)] + [world.call("block") for _ in range(3)]
        for outcome in outcomes:
            await outcome.done.wait()
        digest = hashlib.sha256(body).hexdigest().encode()
        assert [bytes(o.body) for o in outcomes] == [digest] * 3 + [world.serving.block] * 3

    run(kind, certificates, scenario)


def test_a_body_can_be_streamed_under_pressure(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        pieces = [bytes([i]) * 700_000 for i in range(12)]
        outcome = world.call("store", feed=list(pieces))
        outcome.more()
        await outcome.done.wait()
        assert bytes(outcome.body) == hashlib.sha256(b"".join(pieces)).hexdigest().encode()
        assert OutputReady in map(type, outcome.events)

    run(kind, certificates, scenario)


def test_an_early_answer_ends_a_large_body(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await begin(world, stream_window_bytes=65_535, connection_window_bytes=65_535)
        outcomes = [world.call("refuse", bytes(8_000_000)) for _ in range(8)]
        for outcome in outcomes:
            await outcome.done.wait()
            assert outcome.status == 413
            assert outcome.end.complete
        assert (await world.fetch("block")).end.complete

    run(kind, certificates, scenario)


def test_eight_large_bodies_through_narrow_windows_all_get_their_early_answer(
    kind: Kind, certificates: Certificates
) -> None:
    async def scenario(world: World) -> None:
        narrow = {"stream_window_bytes": 65_535, "connection_window_bytes": 65_535}
        await begin(world, **narrow)
        refused = [world.call("refuse", bytes(8_000_000)) for _ in range(8)]
        with anyio.fail_after(60):
            for outcome in refused:
                await outcome.done.wait()
            stored = await world.fetch("store", bytes(300_000))
        assert [outcome.status for outcome in refused] == [413] * 8
        assert all(outcome.end.complete for outcome in refused)
        assert stored.status == 201, "the connection goes on"

    run(kind, certificates, scenario)


def test_a_body_waits_until_it_is_wanted(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        wanted = await world.fetch("store", feed=[b"a", b"b"], expect_continue=True)
        assert isinstance(wanted.events[0], ContinueReceived)
        assert bytes(wanted.body) == hashlib.sha256(b"ab").hexdigest().encode()
        unwanted = await world.fetch("refuse", feed=[b"a"], expect_continue=True)
        assert unwanted.status == 413
        assert unwanted.feed == [b"a"]

    run(kind, certificates, scenario)


def test_calls_share_a_connection_until_it_is_full(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await begin(world, max_streams=3)
        await world.fetch("block")
        held = [world.call("hold") for _ in range(7)]
        await wait_until(lambda: len(world.serving.held) == 7)
        assert len({id(link) for link, _ in world.serving.held}) == 3
        for link, stream_id in world.serving.held:
            link.http.reset(stream_id)
            link.flush()
        for outcome in held:
            await outcome.done.wait()
            assert outcome.end.reason == "reset by the peer: CANCEL"

    run(kind, certificates, scenario)


def test_calls_beyond_every_limit_wait_or_fail(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await world.listen(limits=WireLimits(max_streams=1))
        world.connect_to(max_connections=1, max_waiting=2)
        first = world.call("block")
        await first.done.wait()
        held = [world.call("hold")]
        await wait_until(lambda: bool(world.serving.held))
        held += [world.call("block"), world.call("block")]
        over = world.call("block")
        assert over.end.reason == "too many calls wait for this service"
        link, stream_id = world.serving.held[0]
        link.http.reset(stream_id)
        link.flush()
        for outcome in held:
            await outcome.done.wait()
        assert [o.end.complete for o in held] == [False, True, True]

    run(kind, certificates, scenario)


def test_a_call_can_be_given_up(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        early = world.call("block")
        assert early.call is not None
        early.call.cancel()
        held = world.call("hold")
        await wait_until(lambda: bool(world.serving.held))
        assert held.call is not None
        held.call.cancel()
        held.call.cancel()
        await wait_until(lambda: ended(world))
        assert (early.events, held.events) == ([], [])
        assert (await world.fetch("block")).end.complete

    def ended(world: World) -> bool:
        return any(isinstance(e, ExchangeEnded) and not e.complete for e in world.serving.events)

    run(kind, certificates, scenario)


def test_a_server_that_stops_lets_calls_finish(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        held = world.call("hold")
        await wait_until(lambda: bool(world.serving.held))
        world.listener.shutdown()
        await anyio.sleep(0.05)
        link, stream_id = world.serving.held[0]
        from kvsp_core.heads import Response

        link.http.respond(stream_id, Response(status=200, content_length=4), b"done")
        link.flush()
        await held.done.wait()
        assert held.end.complete
        assert bytes(held.body) == b"done"
        await wait_until(lambda: not world.listener.links)
        assert world.serving.events[-1] == ConnectionEnded("")

    run(kind, certificates, scenario)


def test_a_lost_connection_fails_its_calls(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        half = world.call("half")
        await half.answered.wait()
        world.serving.held[0][0].abort()
        await half.done.wait()
        assert not half.end.complete
        assert half.end.reason == "the connection was closed by the peer"
        assert (await world.fetch("block")).end.complete, "the next call opens another"

    run(kind, certificates, scenario)


def test_a_service_that_is_not_there_fails_calls_and_is_found_later(
    kind: Kind, certificates: Certificates
) -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        world.listener.abort()
        await anyio.sleep(0.01)
        outcome = await world.fetch("block")
        assert outcome.end.unprocessed
        assert outcome.end.reason == "the service cannot be reached"
        again = await world.fetch("block")  # after a wait
        assert again.end.unprocessed
        await world.listen()
        assert (await world.fetch("block")).end.complete

    run(kind, certificates, scenario)


def test_a_peer_that_is_not_accepted_fails_calls_with_the_reason(
    kind: Kind, certificates: Certificates, foreign: Certificates
) -> None:
    async def scenario(world: World) -> None:
        await world.listen()
        world.connect_to(
            credentials=foreign.credentials(
                foreign.client, authority=world.certificates.authority.certificate
            )
        )
        outcome = await world.fetch("block")
        assert outcome.end.reason == "the peer refused us: it does not accept our certificate"
        world.connect_to(credentials=foreign.credentials(foreign.client))
        outcome = await world.fetch("block")
        assert outcome.end.reason.startswith("the peer was refused: its certificate is not accepted")

    run(kind, certificates, scenario)


def test_silence_is_noticed(kind: Kind, certificates: Certificates) -> None:
    """Timers of the connections are kept: a body that stops, and a connection nobody uses."""

    async def scenario(world: World) -> None:
        await begin(world, idle_body_ms=60, idle_ms=100)
        stuck = world.call("store", feed=[b"half", b"never"])
        assert stuck.call is not None
        stuck.call.send_data(stuck.feed.pop())
        stuck.feed.clear()
        await stuck.done.wait()
        assert stuck.end.reason in ("reset by the peer: CANCEL", "the peer let nothing move for too long")
        await wait_until(lambda: not world.listener.links)
        assert world.serving.events[-1] == ConnectionEnded("")

    run(kind, certificates, scenario)


def test_an_error_of_the_service_costs_one_connection(
    kind: Kind, certificates: Certificates, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        with caplog.at_level(logging.ERROR):
            outcome = await world.fetch("raise")
        assert not outcome.end.complete
        assert (await world.fetch("block")).end.complete

    run(kind, certificates, scenario)
    assert "a bug in the service" in caplog.text + capfd.readouterr().err


def test_an_error_of_ours_costs_one_connection(
    kind: Kind,
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(connection: ServerConnection, view: memoryview) -> memoryview:
        monkeypatch.undo()
        raise RuntimeError("a bug in the connection")

    async def scenario(world: World) -> None:
        await begin(world)
        with caplog.at_level(logging.ERROR):
            monkeypatch.setattr(ServerConnection, "_read_preface", fail)
            assert not (await world.fetch("block")).end.complete
        assert (await world.fetch("block")).end.complete

    run(kind, certificates, scenario)
    assert "a bug in the connection" in caplog.text + capfd.readouterr().err


def test_a_service_that_is_forgotten_is_not_dialed_any_more(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        given_up = world.call("block")
        world.network.forget(world.pool)
        await given_up.done.wait()
        world.connect_to()
        assert (await world.fetch("block")).end.complete
        assert sum(isinstance(event, Established) for event in world.serving.events) == 1

    run(kind, certificates, scenario)


@pytest.mark.parametrize("path", ["hold", "half", "block"])
@pytest.mark.parametrize("farewell", [True, False], ids=["close-notify", "none"])
def test_a_client_that_ends_what_it_sends_is_let_go(
    kind: Kind, certificates: Certificates, caplog: pytest.LogCaptureFixture, path: str, farewell: bool
) -> None:
    """Whether it takes leave as TLS has it or not, and whether it reads or not."""
    if kind.in_memory:
        pytest.skip("it is about sockets")

    def leave(port: int, context: ssl.SSLContext) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
            client = context.wrap_socket(raw, server_hostname="localhost", suppress_ragged_eofs=True)
            head = request_block(path=f"/kvsp/{path}")
            client.sendall(PREFACE + settings((4, 2**31 - 1)) + headers(1, head))
            client.recv(1)
            if farewell:
                with suppress(OSError):  # an answer may be under way instead of the other farewell
                    client.unwrap()
            else:
                client.shutdown(socket.SHUT_WR)
                with suppress(OSError):
                    while client.recv(1 << 16):
                        pass
            client.close()

    async def scenario(world: World) -> None:
        await world.listen(limits=WireLimits(close_ms=200))
        context = ssl.create_default_context(cafile=str(certificates.authority.certificate))
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(certificates.client.certificate, certificates.client.key)
        with anyio.fail_after(20):
            await anyio.to_thread.run_sync(leave, world.listener.port, context)
        await wait_until(lambda: not world.listener.links)
        assert isinstance(world.serving.events[-1], ConnectionEnded)
        told = [event for event in world.serving.events if isinstance(event, RequestReceived | ExchangeEnded)]
        assert len(told) % 2 == 0, "what began has ended"

    with caplog.at_level(logging.WARNING):
        run(kind, certificates, scenario)
    assert caplog.text == ""


def test_connections_beyond_the_limit_are_closed(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await world.listen(max_connections=1)
        world.connect_to()
        assert (await world.fetch("block")).end.complete
        world.connect_to()
        outcome = await world.fetch("block")
        assert not outcome.end.complete
        assert outcome.end.unprocessed

    run(kind, certificates, scenario)


@pytest.mark.requirement("SE-3")
def test_silent_connections_keep_nobody_out(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await world.listen(max_connections=4)
        world.connect_to()
        assert (await world.fetch("block")).end.complete
        silent = [await world.connect_silently() for _ in range(6)]
        await wait_until(lambda: len(world.listener.links) == 4)
        world.connect_to()
        assert (await world.fetch("block")).end.complete, "a newcomer is let in"
        assert len(world.listener.links) == 4
        let_in = [link for link in world.serving.links if link.connection.http is not None]
        assert [link.connection.ended for link in let_in] == [False, False], "those who are in stay"
        for stream in silent:
            await stream.aclose()

    run(kind, certificates, scenario)


def test_a_slow_reader_stops_nobody_else(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await begin(world, stream_window_bytes=65_535)
        slow = world.call("block")
        slow.slow = True
        await slow.answered.wait()
        for _ in range(3):
            assert (await world.fetch("block")).body == world.serving.block
        assert len(slow.body) == 65_535
        slow.slow = False
        assert slow.call is not None
        slow.call.acknowledge(65_535)
        await slow.done.wait()
        assert slow.body == world.serving.block

    run(kind, certificates, scenario)


@pytest.mark.requirement("SE-3")
def test_others_have_their_turn_before_all_that_one_has_sent_is_read(
    kind: Kind, certificates: Certificates
) -> None:
    """Another one's request, made when the first of a hundred is read, is told of before the last is."""

    async def scenario(world: World) -> None:
        await begin(world, turn_frames=4)
        many = world.pool
        assert (await world.fetch("block")).end.complete
        world.connect_to()
        assert (await world.fetch("block")).end.complete
        other, told, tell = world.pool, list[str](), world.serving.on_event

        def on_event(link: Any, event: Any) -> None:
            if isinstance(event, RequestReceived):
                if not told:
                    world.pool = other
                    world.call("hold", method="HEAD")
                told.append(event.request.method)
            tell(link, event)

        world.serving.on_event = on_event  # type: ignore[method-assign]
        for link in world.listener.links:
            link._on_event = on_event
        world.pool = many
        for _ in range(100):
            world.call("hold")
        await wait_until(lambda: len(told) == 101)
        assert told.index("HEAD") < 90
        for link, stream_id in world.serving.held:
            link.http.reset(stream_id)
            link.flush()

    run(kind, certificates, scenario)


def test_closing_waits_for_what_is_under_way(kind: Kind, certificates: Certificates) -> None:
    async def scenario(world: World) -> None:
        await begin(world)
        kept.append(world.call("half"))
        kept.append(world)
        await wait_until(lambda: bool(world.serving.held))
        link, stream_id = world.serving.held[0]
        await started(world, finish, link, stream_id)

    def finish(link: Any, stream_id: int) -> None:
        link.http.send_data(stream_id, b"y" * 50, end=True)
        link.flush()

    kept: list[Any] = []
    run(kind, certificates, scenario)
    outcome, world = kept
    assert outcome.end.complete
    late = world.call("block")
    assert late.end.reason == "this service is not called any more"
    assert bytes(outcome.body) == b"x" * 50 + b"y" * 50


async def started(world: World, function: Any, *arguments: Any) -> None:
    """Have something done a moment later, when the scenario is over."""
    if world.kind.backend == "trio":
        import trio

        async def later() -> None:
            await trio.sleep(0.05)
            function(*arguments)

        world.network.nursery.start_soon(later)
    else:
        world.network.loop.call_later(0.05, function, *arguments)


async def wait_until(condition: Any) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.002)


def test_what_has_been_sent_of_a_body_is_told_while_it_goes(kind: Kind, certificates: Certificates) -> None:
    """And no more than that: what waits for the peer has not been sent."""
    window, size = 65_535, 150_000

    async def scenario(world: World) -> None:
        await begin(world, stream_window_bytes=window, connection_window_bytes=window)
        serving = world.serving
        serving.is_deaf = True
        wire = Wire(world.network, world.client_credentials())
        wire._pools[world.base_uri] = world.pool
        told: list[tuple[int, int | None]] = []

        def progress(done_bytes: int, size_bytes: int | None) -> None:
            told.append((done_bytes, size_bytes))
            if told[-3:] == [told[-1]] * 3:  # it waits for the peer: let that read on
                unread, serving.unread = serving.unread, []
                for acknowledge in unread:
                    acknowledge()

        block = StoreBlock("c" * 64, "aa" * 16, "b" * 64)
        answer = await wire.ask(
            world.base_uri, block, timeout_ms=60_000, pieces=(memoryview(bytes(size)),), progress=progress
        )
        assert answer.response.status == 201
        sent = [done for done, _ in told]
        assert sent == sorted(sent)
        assert sent[0] == 0
        assert sent.count(window) >= 3
        assert len({done for done in sent if window < done < size}) >= 1
        assert {of for _, of in told} == {size}

    run(kind, certificates, scenario)
