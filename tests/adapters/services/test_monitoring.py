"""A process says on its own port whether it is alive and ready, and what it counted."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack

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
    assert httpx.post(f"http://127.0.0.1:{process.server.port}/ready").status_code == 405
    head = httpx.head(f"http://127.0.0.1:{process.server.port}/ready")
    assert (head.status_code, head.text) == (200, "")


def test_clients_that_go_away_are_not_worth_a_line(
    process: Process, capfd: pytest.CaptureFixture[str]
) -> None:
    for said in (b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", process.server.port)) as client:
            client.sendall(said)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    assert process.get("/ready").status_code == 200
    process.server.close()
    assert capfd.readouterr() == ("", "")


def test_slow_clients_take_no_thread_each_and_keep_nobody_out(process: Process) -> None:
    assert process.get("/ready").status_code == 200
    threads = threading.active_count()
    with ExitStack() as opened:
        for _ in range(200):
            client = socket.create_connection(("127.0.0.1", process.server.port), timeout=60)
            opened.enter_context(client).sendall(b"GET /ready HTTP/1.1\r\n")
        assert process.get("/ready").text == "ok\n"
        assert threading.active_count() <= threads  # one of another test may have ended


def test_it_stops_though_a_client_has_not_said_all(process: Process) -> None:
    with socket.create_connection(("127.0.0.1", process.server.port), timeout=60) as client:
        client.sendall(b"GET /ready HTTP/1.1\r\n")
        assert process.get("/ready").status_code == 200
        process.server.close()
        assert client.recv(1) == b""


def test_a_page_of_a_foreign_site_that_leads_its_name_here_reads_nothing(process: Process) -> None:
    uri = f"http://127.0.0.1:{process.server.port}/metrics"
    assert httpx.get(uri, headers={"host": "foreign.example"}).status_code == 421


def test_a_port_that_is_taken_is_said_in_one_line(process: Process) -> None:
    with pytest.raises(LocalProtocolError, match=r"or set monitoring\.port") as caught:
        MonitoringServer(process.metrics, alive=lambda: None, ready=lambda: None, port=process.server.port)
    assert "\n" not in str(caught.value)
