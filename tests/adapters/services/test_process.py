"""``kvsp serve`` as users run it: a process, real signals, and somebody else's HTTP client."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvsp_core.identity import component_id
from kvsp_services.pki import init_ca, issue

SCOPE = "6d1c6481cd428737da312c089db3832a"
COMPAT = "c" * 64
KEY = "b" * 64
HOLDER = "https://h1.example/kvsp/"
READER = "spiffe://example/reader"


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


POLICY = f"""
[principals]
"{HOLDER}" = ["holder"]
"{READER}" = ["holder"]
[scopes.{SCOPE}]
read = ["{READER}"]
publish = ["{HOLDER}"]
"""


class Deployment:
    """An index in a process of its own, with certificates for it and its clients."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        port, self.monitoring_port = free_ports(2)
        self.base_uri = f"https://127.0.0.1:{port}/kvsp/"
        init_ca(directory)
        for name, uri in (("index", self.base_uri), ("holder", HOLDER), ("reader", READER)):
            issue(directory, uri=uri, name=name)
        (directory / "policy.toml").write_text(POLICY)
        self.config = directory / "kvsp.toml"
        self.config.write_text(
            'authorities_file = "ca.pem"\npolicy_file = "policy.toml"\n'
            f"[monitoring]\nport = {self.monitoring_port}\n"
            f'[index]\nbase_uri = "{self.base_uri}"\n'
            'certificate_file = "index.pem"\nkey_file = "index.key"\n'
        )
        self.process: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvsp_services.cli", "serve", str(self.config), *options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self.monitoring_port}/ready").status_code == 200:
                    return self.process
            except httpx.TransportError:
                time.sleep(0.05)
        self.process.kill()
        raise AssertionError(self.process.communicate()[1])

    def client(self, name: str) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.directory / "ca.pem"))
        context.load_cert_chain(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        return httpx.Client(http1=False, http2=True, verify=context, base_url=self.base_uri)

    def logged(self) -> list[dict[str, object]]:
        assert self.process is not None
        return [json.loads(line) for line in self.process.communicate(timeout=30)[1].splitlines()]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.communicate()


RECORD = {
    "block_key": KEY,
    "compat_id": COMPAT,
    "scope_id": SCOPE,
    "holder": HOLDER,
    "codec": 1,
    "size": 100,
    "digest": "sha-256:" + "d" * 64,
    "residency": [{"tier": "host", "layers": [0, 31]}],
    "ttl_ms": 60_000,
}
LOOKUP = {"compat_id": COMPAT, "scope_id": SCOPE, "block_keys": [KEY]}
JSON = {"content-type": "application/kvsp+json"}


def publish(client: httpx.Client) -> httpx.Response:
    path = f"replicas/{component_id(HOLDER)}/{KEY}"
    return client.put(path, content=json.dumps(RECORD), headers=JSON)


def look_up(client: httpx.Client) -> httpx.Response:
    return client.post("lookup", content=json.dumps(LOOKUP), headers=JSON)


@pytest.mark.requirement("HT-3", "PB-1", "LK-1", "SE-1")
@pytest.mark.parametrize("loop", ["trio", "asyncio", "uvloop"])
def test_an_index_serves_strangers_clients_and_stops_in_order(deployment: Deployment, loop: str) -> None:
    process = deployment.start("--loop", loop)
    with deployment.client("holder") as holder, deployment.client("reader") as reader:
        assert publish(holder).status_code == 201
        assert publish(holder).status_code == 200
        assert publish(reader).status_code == 403
        answer = look_up(reader)
        assert answer.http_version == "HTTP/2"
        assert answer.json()["matched"] == 1
        assert answer.headers["cache-control"] == "no-store"
        assert look_up(holder).status_code == 403
        assert reader.get("nowhere").status_code == 404
        metrics = httpx.get(f"http://127.0.0.1:{deployment.monitoring_port}/metrics").text
        assert "kvsp_index_lookup_hits_total 1.0" in metrics
        assert "kvsp_connections 2.0" in metrics
        process.send_signal(signal.SIGTERM)
        events = deployment.logged()
    assert process.returncode == 0
    assert [event["event"] for event in events[-2:]] == ["draining", "safe to stop"]


@pytest.mark.requirement("SE-1")
def test_a_principal_taken_out_of_the_policy_is_refused_after_a_reload(deployment: Deployment) -> None:
    process = deployment.start()
    policy = deployment.directory / "policy.toml"
    with deployment.client("reader") as reader:
        assert look_up(reader).status_code == 200
        policy.write_text("[principals")
        process.send_signal(signal.SIGHUP)
        policy_again = POLICY.replace(f'read = ["{READER}"]', "")
        time.sleep(0.3)
        assert look_up(reader).status_code == 200, "what cannot be read changes nothing"
        policy.write_text(policy_again)
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 10
        while look_up(reader).status_code != 403 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert look_up(reader).status_code == 403
    process.send_signal(signal.SIGTERM)
    events = [event["event"] for event in deployment.logged()]
    assert "not reloaded" in events
    assert "reloaded" in events


@pytest.mark.requirement("HT-2")
def test_a_new_certificate_is_used_after_a_reload(deployment: Deployment) -> None:
    process = deployment.start()

    def serial() -> bytes:
        context = ssl.create_default_context(cafile=str(deployment.directory / "ca.pem"))
        context.load_cert_chain(deployment.directory / "reader.pem", deployment.directory / "reader.key")
        context.set_alpn_protocols(["h2"])
        port = httpx.URL(deployment.base_uri).port
        with (
            socket.create_connection(("127.0.0.1", port or 0)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            return secure.getpeercert(binary_form=True) or b""

    before = serial()
    issue(deployment.directory, uri=deployment.base_uri, name="index")
    process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 10
    while serial() == before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert serial() != before


def test_a_port_that_is_taken_is_said_in_one_line(deployment: Deployment) -> None:
    port = httpx.URL(deployment.base_uri).port
    with socket.create_server(("127.0.0.1", port or 0)):
        command = [sys.executable, "-m", "kvsp_services.cli", "serve", str(deployment.config)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=60, check=False
        )
    assert done.returncode == 1
    (last,) = [line for line in done.stderr.splitlines() if line.startswith("kvsp: ")]
    assert "cannot listen on 127.0.0.1" in last


def test_a_configuration_can_be_checked_without_running(deployment: Deployment) -> None:
    command = [sys.executable, "-m", "kvsp_services.cli", "serve", str(deployment.config), "--check"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"{deployment.config}: runs index\n")
