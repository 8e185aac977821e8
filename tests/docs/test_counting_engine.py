"""The engine that the page about the instance shows is served, and goes on from blocks of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters.services.cluster import cluster_with_an_api, free_ports, until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[str]:
    """The API of a cluster in one process, whose instance has the engine of the page."""
    (port,) = free_ports(1)
    cluster = cluster_with_an_api(tmp_path, port)
    cluster.start(program=[sys.executable, str(ROOT / "docs" / "examples" / "counting_engine.py")])
    yield f"http://127.0.0.1:{port}/v1/completions"
    assert cluster.stop() == 0, cluster.log


def ask(api: str, prompt: list[int], count: int) -> dict[str, Any]:
    answer = httpx.post(api, json={"prompt": prompt, "max_tokens": count, "temperature": 0}, timeout=60)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_an_engine_of_ones_own_is_served_and_goes_on_from_its_blocks(api: str) -> None:
    prompt = list(range(3, 43))
    first = ask(api, prompt, 20)
    assert cached(first) == 0
    again: list[dict[str, Any]] = []

    def is_cached() -> bool:
        again.append(ask(api, prompt, 20))
        return cached(again[-1]) == 32

    assert until(is_cached, 20), "the blocks of the first answer are used for the second"
    assert again[-1]["choices"][0]["text"] == first["choices"][0]["text"]
    assert first["usage"]["completion_tokens"] == 20
