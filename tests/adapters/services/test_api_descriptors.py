"""The API of a front end when more connect to it than its process may have files open."""

from __future__ import annotations

import socket
import subprocess
import sys

DESCRIPTORS = 64
PROGRAM = f"""
import resource
import anyio
from kvsp_services.generations import serve_api

async def app(scope, receive, send):
    await send({{"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}})
    await send({{"type": "http.response.body", "body": b"ok"}})

async def main():
    await serve_api(
        app,
        host="127.0.0.1",
        port=0,
        listening=lambda port: print(port, flush=True),
        stopping=anyio.Event().wait,
    )

resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
anyio.run(main)
"""


def answered(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as asks:
        asks.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        return asks.recv(12) == b"HTTP/1.1 200"


def test_the_api_answers_while_more_connect_than_may_have_files_open() -> None:
    """Those that have said nothing for longest make room."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * DESCRIPTORS)]
            assert idle[0].recv(1) == b""
            assert answered(port)
            for connection in idle:
                connection.close()
            assert answered(port)
        finally:
            server.kill()
