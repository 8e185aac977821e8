"""The API of a front end when its process has no descriptors left, or more connect to it than it may have."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

DESCRIPTORS = 64
PROGRAM = f"""
import os, resource, sys
import anyio
from kvsp_services import http1

taken = []

async def app(scope, receive, send):
    try:
        while scope["path"] == "/take":
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    while scope["path"] == "/give" and taken:
        os.close(taken.pop())
    await send({{"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}})
    await send({{"type": "http.response.body", "body": b"ok"}})

async def main():
    await http1.serve(
        app,
        host="127.0.0.1",
        port=0,
        key="front_end.api_port",
        listening=lambda port: print(port, flush=True),
        stopping=anyio.Event().wait,
    )

http1.IDLE_S = 600  # nothing here is closed for having been idle, however slow the machine
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
anyio.run(main, backend=sys.argv[1])
"""


@pytest.fixture(params=["asyncio", "trio"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    command = [sys.executable, "-c", PROGRAM, request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
            assert server.poll() is None
        finally:
            server.kill()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def answered(client: socket.socket, path: str = "/") -> bool:
    client.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    said = b""
    while not said.endswith(b"\r\n\r\nok") and (more := client.recv(1000)):
        said += more
    return said.startswith(b"HTTP/1.1 200")


def test_the_api_answers_while_more_connect_than_may_have_files_open(port: int) -> None:
    """Those that have said nothing for longest make room."""
    idle = [connect(port) for _ in range(2 * DESCRIPTORS)]
    assert idle[0].recv(1) == b""
    with connect(port) as client:
        assert answered(client)
    for connection in idle:
        connection.close()
    with connect(port) as client:
        assert answered(client)


def test_the_api_answers_again_after_it_had_no_descriptor_left(port: int) -> None:
    with connect(port) as client, connect(port) as other:
        assert answered(client, "/take")
        with connect(port) as late:
            late.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert answered(other)
            assert answered(client, "/give")
            assert late.recv(12) == b"HTTP/1.1 200"
