"""The API of a front end listens, and says in one line where it cannot."""

from __future__ import annotations

import socket
from functools import partial

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kvsp_core.errors import KVSPError
from kvsp_services.generations import serve_api
from tests.adapters.services.cluster import free_ports

APP = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it_listens_until_it_is_to_stop(backend: str) -> None:
    (port,) = free_ports(1)

    async def main() -> None:
        listening, stopping = anyio.Event(), anyio.Event()
        serve = partial(
            serve_api, APP, host="127.0.0.1", port=port, listening=listening.set, stopping=stopping.wait
        )
        async with anyio.create_task_group() as tasks, httpx.AsyncClient() as client:
            tasks.start_soon(partial(serve, on_trio=backend == "trio"))
            with anyio.fail_after(60):
                await listening.wait()
                assert (await client.get(f"http://127.0.0.1:{port}/")).text == "here"
            stopping.set()

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_port_that_is_taken_is_one_line(backend: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said: list[str] = []
        serve = partial(
            serve_api,
            APP,
            host="127.0.0.1",
            port=port,
            listening=lambda: said.append("listening"),
            stopping=anyio.sleep_forever,
        )
        with pytest.raises(
            KVSPError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use; stop"
        ):
            anyio.run(partial(serve, on_trio=backend == "trio"), backend=backend)
        assert not said
