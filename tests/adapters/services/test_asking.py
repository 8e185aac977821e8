"""A tool waits as long as octets move, however long that takes, and gives up after a time of silence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import trio
import trio.testing

from kvsp_client.errors import Unavailable
from kvsp_client.wire import Wire
from kvsp_core.heads import Response
from kvsp_core.messages import LeaseGranted
from kvsp_core.resources import CreateLease, GetBlock, StoreBlock
from kvsp_h2 import DataReceived, Event, ExchangeEnded, ResponseReceived
from kvsp_services.asking import Asker

URI = "https://h1.example/kvsp/"
OF = ("c" * 64, "aa" * 16, "b" * 64)
GRANTED = b'{"lease":"%b","ttl_ms":5}' % (b"1" * 32)


class Slow:
    """A call to a peer that takes or sends an octet every 20 s; after `stops` of them it does nothing."""

    def __init__(self, on_event: Callable[[Event], None], sends: int, answer: bytes, stops: int) -> None:
        self.sent_bytes = 0
        self._on_event = on_event
        self._sends = sends
        self._answer = answer
        self._stops = stops

    async def run(self) -> None:
        steps: list[Callable[[], None]] = [self._take] * self._sends
        head = Response(status=200, content_length=len(self._answer), content_type="application/kvsp+json")
        steps.append(lambda: self._on_event(ResponseReceived(1, head, False)))
        steps += [
            partial(self._on_event, DataReceived(1, memoryview(self._answer)[at : at + 1]))
            for at in range(len(self._answer))
        ]
        for number, step in enumerate(steps):
            if number == self._stops:
                return
            await trio.sleep(20)
            step()
        self._on_event(ExchangeEnded(1, True, 0))

    def _take(self) -> None:
        self.sent_bytes += 1

    def acknowledge(self, count: int) -> None:
        """Nothing waits for that."""

    def cancel(self) -> None:
        """Nothing is left to do."""


class SlowAsker(Asker):
    """Asks a slow peer; `took_s` is how long that took, by a clock that jumps."""

    def __init__(self, *, sends: int = 0, answer: bytes = b"", stops: int = -1) -> None:
        super().__init__(MagicMock())
        self.took_s = 0.0
        self._peer = partial(Slow, sends=sends, answer=answer, stops=stops)
        self._wire = Wire(MagicMock(service=lambda *_, **__: self), MagicMock())
        self._loop = MagicMock(call=self._run)

    def call(
        self, request: object, body: object, *, on_event: Callable[[Event], None], **options: Any
    ) -> Slow:
        slow = self._peer(on_event)
        self._nursery.start_soon(slow.run)
        return slow

    def _run(self, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        async def run() -> Any:
            async with trio.open_nursery() as self._nursery:
                try:
                    return await work(*arguments, **options)
                except Unavailable as error:
                    return error
                finally:
                    self.took_s = clock.current_time() - began_s
                    self._nursery.cancel_scope.cancel()

        clock = trio.testing.MockClock(autojump_threshold=0)
        began_s = clock.current_time()
        found = trio.run(run, clock=clock)
        if isinstance(found, Unavailable):
            raise found
        return found


def test_an_answer_may_take_as_long_as_it_comes() -> None:
    asker = SlowAsker(answer=bytes(20))
    assert asker.ask(URI, GetBlock(*OF)).body == bytes(20)
    assert asker.took_s == pytest.approx(420)


def test_a_body_may_take_as_long_as_it_goes() -> None:
    asker = SlowAsker(sends=20)
    told: list[tuple[int, int | None]] = []
    asker.ask(URI, StoreBlock(*OF), pieces=(memoryview(bytes(20)),), progress=lambda *step: told.append(step))
    assert asker.took_s == pytest.approx(420)
    assert sorted(set(told)) == [(count, 20) for count in range(21)]


def test_a_message_may_take_as_long_as_it_comes() -> None:
    assert SlowAsker(answer=GRANTED).ask_for(LeaseGranted, URI, CreateLease()).ttl_ms == 5


@pytest.mark.parametrize(
    ("sends", "stops", "took_s", "why"),
    [
        (0, 0, 30, "did not answer within 30 s"),
        (0, 4, 110, "sent nothing more for 30 s"),
        (9, 5, 130, "did not answer within 30 s"),
    ],
)
def test_silence_has_an_end(sends: int, stops: int, took_s: float, why: str) -> None:
    asker = SlowAsker(sends=sends, answer=bytes(20), stops=stops)
    with pytest.raises(Unavailable, match=f"^{URI} {why}$"):
        asker.ask(URI, GetBlock(*OF))
    assert asker.took_s == pytest.approx(took_s, abs=0.2)


def test_where_the_time_is_for_everything_nobody_was_silent() -> None:
    asker = SlowAsker(answer=bytes(20))
    with pytest.raises(Unavailable, match=f"^{URI} did not answer within 50 s$"):
        asker._run(asker._wire.ask, URI, GetBlock(*OF), timeout_ms=50_000)
    assert asker.took_s == pytest.approx(50)
