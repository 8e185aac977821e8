"""The API of a front end listens, and says where it cannot; no generation outlives its role unheard."""

from __future__ import annotations

import socket
import time
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
import structlog
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kvsp_core.errors import KVSPError
from kvsp_services import http1
from kvsp_services.generations import Generations
from kvsp_services.metrics import Metrics
from kvsp_services.openai_api import Failed, GenerationEvent, GenerationRequest
from kvsp_services.running_role import MAX_REBUILDS, RunningRole

APP = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it_listens_until_it_is_to_stop(backend: str) -> None:
    ports: list[int] = []

    async def main() -> None:
        listening, stopping = anyio.Event(), anyio.Event()

        def listens(port: int) -> None:
            ports.append(port)
            listening.set()

        serve = partial(
            http1.serve,
            APP,
            host="127.0.0.1",
            port=0,
            key="front_end.api_port",
            listening=listens,
            stopping=stopping.wait,
        )
        async with anyio.create_task_group() as tasks, httpx.AsyncClient() as client:
            tasks.start_soon(serve)
            with anyio.fail_after(60):
                await listening.wait()
                assert (await client.get(f"http://127.0.0.1:{ports[0]}/")).text == "here"
            stopping.set()

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_port_that_is_taken_is_one_line(backend: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said: list[int] = []
        serve = partial(
            http1.serve,
            APP,
            host="127.0.0.1",
            port=port,
            key="front_end.api_port",
            listening=said.append,
            stopping=anyio.sleep_forever,
        )
        with pytest.raises(
            KVSPError, match=rf"api_port: cannot listen on 127.0.0.1:{port}: Address already in use; stop"
        ):
            anyio.run(serve, backend=backend)
        assert not said


def test_generations_of_a_role_that_failed_end_at_once() -> None:
    """Those who wait would wait for ever: the role that is built anew knows nothing of them."""
    generations = Generations("0f" * 16)
    generations.driver = SimpleNamespace(stopped=False, handle=lambda item: None)  # type: ignore[assignment]
    gave_up: list[str] = []
    role: Any = RunningRole.__new__(RunningRole)
    role.served = None
    role.name, role.generations, role._log = "front_end", generations, structlog.get_logger()
    role._process = SimpleNamespace(metrics=Metrics(), give_up=gave_up.append)
    role._rebuilt = deque([time.monotonic()] * MAX_REBUILDS)
    asked = GenerationRequest(prompt=(1, 2), method="greedy", params={}, seed=0, traceparent="")

    async def main() -> list[GenerationEvent]:
        async with generations.generate(asked) as events:
            role._failed(ValueError("for a test"))
            with anyio.fail_after(30):
                return [event async for event in events]

    (event,) = anyio.run(main)
    assert isinstance(event, Failed)
    assert event.status == 503
    assert gave_up
