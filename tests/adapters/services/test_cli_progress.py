"""The bar of a transfer is on standard error, where that is a terminal, and nowhere else."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvsp_client.wire import Progress, Wire
from kvsp_core.heads import Response
from kvsp_core.resources import GetBlock
from kvsp_h2 import DataReceived, Event, ExchangeEnded, ResponseReceived
from kvsp_services.cli.progress import progress_bar

BLOCK = GetBlock("c" * 64, "aa" * 16, "b" * 64)


class Pool:
    """The connections to a peer that answers with six octets in two pieces."""

    def call(
        self, request: object, body: object, *, on_event: Callable[[Event], None], **options: Any
    ) -> Any:
        def answer() -> None:
            on_event(ResponseReceived(1, Response(status=200, content_length=6), False))
            on_event(DataReceived(1, memoryview(b"abc")))
            on_event(DataReceived(1, memoryview(b"def")))
            on_event(ExchangeEnded(1, True, 0))

        asyncio.get_running_loop().call_soon(answer)
        return MagicMock()


def test_the_progress_of_an_answer_is_told_as_it_comes() -> None:
    told: list[tuple[int, int | None]] = []

    async def ask(progress: Progress | None) -> bytes:
        wire = Wire(MagicMock(service=lambda *_, **__: Pool()), MagicMock())
        answer = await wire.ask("https://h1.example/kvsp/", BLOCK, timeout_ms=60_000, progress=progress)
        return answer.body

    assert asyncio.run(ask(lambda done, size: told.append((done, size)))) == b"abcdef"
    assert told == [(3, 6), (6, 6)]
    assert asyncio.run(ask(None)) == b"abcdef"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("fetching") as progress:
        progress(3_000_000, 6_000_000)
    assert "fetching" in terminal.getvalue()
    assert "3.0/6.0 MB" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_no_bar_where_json_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress_bar("fetching", shown=False) as progress:
        progress(3, 6)
    assert terminal.getvalue() == ""


def test_no_bar_in_a_file_or_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", plain := io.StringIO())
    with progress_bar("fetching") as progress:
        progress(3, 6)
    assert plain.getvalue() == ""
