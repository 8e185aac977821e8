"""A process says on its own port whether it is alive and ready, and what it counted."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from kvsp_core.errors import LocalProtocolError
from kvsp_core.roles.role import Observe
from kvsp_services.metrics import Metrics
from kvsp_services.monitoring import MonitoringServer


class Process:
    def __init__(self) -> None:
        self.trouble: str | None = None
        self.metrics = Metrics()
        self.server = MonitoringServer(self.metrics, alive=lambda: None, ready=lambda: self.trouble)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.server.port}{path}")


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.server.close()


def test_alive_and_ready(process: Process) -> None:
    assert process.get("/health").status_code == 200
    assert process.get("/ready").text == "ok\n"
    process.trouble = "the index has not answered yet"
    answer = process.get("/ready")
    assert (answer.status_code, answer.text) == (503, "the index has not answered yet\n")
    assert process.get("/health").status_code == 200


@pytest.mark.requirement("OP-1")
def test_metrics_are_served_in_prometheus_format(process: Process) -> None:
    process.metrics.observe(Observe("digest_failures", 2))
    answer = process.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "kvsp_digest_failures_total 2.0" in answer.text


def test_anything_else_is_not_found_and_says_what_is(process: Process) -> None:
    answer = process.get("/secrets")
    assert answer.status_code == 404
    assert "/ready" in answer.text
    assert httpx.post(f"http://127.0.0.1:{process.server.port}/ready").status_code == 501
    head = httpx.head(f"http://127.0.0.1:{process.server.port}/ready")
    assert (head.status_code, head.text) == (200, "")


def test_a_client_that_goes_away_is_not_worth_a_line(
    process: Process, capfd: pytest.CaptureFixture[str]
) -> None:
    def answering() -> list[threading.Thread]:
        found = [each for each in threading.enumerate() if "process_request_thread" in each.name]
        return [each for each in found if each.is_alive()]

    with socket.create_connection(("127.0.0.1", process.server.port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        while not answering():
            pass
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    for thread in answering():
        thread.join()
    assert capfd.readouterr() == ("", "")


def test_without_descriptors_it_waits_before_it_tries_again(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the processor from the roles meanwhile: the connection stays there to be accepted."""
    paused, accept = threading.Event(), ThreadingHTTPServer.get_request

    def fail(server: ThreadingHTTPServer) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    def pause(seconds: float) -> None:
        monkeypatch.setattr(ThreadingHTTPServer, "get_request", accept)
        paused.set()

    monkeypatch.setattr(ThreadingHTTPServer, "get_request", fail)
    monkeypatch.setattr(time, "sleep", pause)
    with socket.create_connection(("127.0.0.1", process.server.port)) as client:
        assert paused.wait(60)
        client.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.0 200"


def test_a_port_that_is_taken_is_said_in_one_line(process: Process) -> None:
    with pytest.raises(LocalProtocolError, match="choose another port") as caught:
        MonitoringServer(process.metrics, alive=lambda: None, ready=lambda: None, port=process.server.port)
    assert "\n" not in str(caught.value)
