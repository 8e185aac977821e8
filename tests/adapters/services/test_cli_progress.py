"""The bar of a transfer is on standard error, where that is a terminal, and nowhere else."""

from __future__ import annotations

import asyncio
import io
import sys
from typing import Any

import pytest

from kvsp_core.heads import Response
from kvsp_core.resources import GetBlock
from kvsp_services.asking import ask_over
from kvsp_services.cli.progress import progress_bar

BLOCK = GetBlock("c" * 64, "aa" * 16, "b" * 64)


class Peers:
    """A peer that answers with six octets in two pieces."""

    def call(self, base_uri: str, request: object, body: object, listener: Any) -> Any:
        listener.response_received(Response(status=200, content_length=6))
        listener.data_received(memoryview(b"abc"))
        listener.data_received(memoryview(b"def"))
        listener.body_ended()


def test_the_progress_of_an_answer_is_told_as_it_comes() -> None:
    told: list[tuple[int, int | None]] = []
    progress = lambda done, size: told.append((done, size))  # noqa: E731
    answer = asyncio.run(ask_over(Peers(), "https://h1.example/kvsp/", BLOCK, progress=progress))
    assert answer.body == b"abcdef"
    assert told == [(3, 6), (6, 6)]
    assert asyncio.run(ask_over(Peers(), "https://h1.example/kvsp/", BLOCK)).body == b"abcdef"


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


def test_no_bar_in_a_file_or_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", plain := io.StringIO())
    with progress_bar("fetching") as progress:
        progress(3, 6)
    assert plain.getvalue() == ""
