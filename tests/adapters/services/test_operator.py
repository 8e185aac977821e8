"""Operators see what a cluster does, from a shell, and so do programs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvsp_services.cli import app
from kvsp_services.pki import init_ca, issue

OPERATOR = "spiffe://example/operator"
SCOPE = "6d1c6481cd428737da312c089db3832a"


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An index and a controller in one process; how an operator reaches them."""
    directory: Path = tmp_path_factory.mktemp("cluster")
    index_port, controller_port, monitoring = free_ports(3)
    uris = {
        "index": f"https://127.0.0.1:{index_port}/kvsp/",
        "controller": f"https://127.0.0.1:{controller_port}/kvsp/",
    }
    init_ca(directory)
    for name, uri in (*uris.items(), ("operator", OPERATOR)):
        issue(directory, uri=uri, name=name)
    (directory / "storage.key").write_bytes(bytes(32))
    (directory / "storage.key").chmod(0o600)
    (directory / "policy.toml").write_text(
        f'[principals]\n"{OPERATOR}" = ["operator"]\n"{uris["controller"]}" = ["controller"]\n'
        f'[scopes.{SCOPE}]\nread = ["{OPERATOR}"]\n'
    )
    sections = "".join(
        f'[{name}]\nbase_uri = "{uri}"\ncertificate_file = "{name}.pem"\nkey_file = "{name}.key"\n'
        for name, uri in uris.items()
    )
    (directory / "kvsp.toml").write_text(
        'authorities_file = "ca.pem"\npolicy_file = "policy.toml"\nstorage_key_file = "storage.key"\n'
        f'[monitoring]\nport = {monitoring}\n{sections}index = ["{uris["index"]}"]\n'
    )
    command = [sys.executable, "-m", "kvsp_services.cli", "serve", str(directory / "kvsp.toml")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        deadline = time.monotonic() + 30
        ready = False
        while not ready and process.poll() is None and time.monotonic() < deadline:
            try:
                ready = httpx.get(f"http://127.0.0.1:{monitoring}/ready").status_code == 200
            except httpx.TransportError:
                time.sleep(0.05)
        assert ready, process.stderr.read() if process.stderr and process.poll() is not None else "not ready"
        yield {**uris, "certificate": str(directory / "operator.pem"), "directory": str(directory)}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def kvsp(capfd: pytest.CaptureFixture[str], cluster: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    status = app.run([*arguments, "--certificate", cluster["certificate"]])
    said, complained = capfd.readouterr()
    return status, said, complained


def test_an_empty_cluster_is_shown(capfd: pytest.CaptureFixture[str], cluster: dict[str, str]) -> None:
    status, said, _ = kvsp(capfd, cluster, "status", "--controller", cluster["controller"])
    assert (status, said.split()[:3]) == (0, ["instance", "state", "epoch"])
    status, said, _ = kvsp(capfd, cluster, "sessions", "--controller", cluster["controller"], "--json")
    assert (status, json.loads(said)) == (0, {"sessions": []})
    status, said, _ = kvsp(capfd, cluster, "index", "--index", cluster["index"])
    assert (status, said.splitlines()[-1].split()[:2]) == (0, ["0", "records"])


def test_top_shows_it_once(capfd: pytest.CaptureFixture[str], cluster: dict[str, str]) -> None:
    where = ("--controller", cluster["controller"], "--index", cluster["index"], "--once")
    status, said, _ = kvsp(capfd, cluster, "top", *where)
    assert status == 0
    assert "Instances" in said
    assert "Index" in said


def test_a_lookup_that_finds_nothing_is_a_no(
    capfd: pytest.CaptureFixture[str], cluster: dict[str, str]
) -> None:
    directory = Path(cluster["directory"])
    key = directory / "tenant.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    (directory / "tokens.json").write_text("[1, 2, 3, 4]")
    (directory / "descriptor.json").write_text(
        json.dumps(
            {
                "model": "m",
                "layers": 2,
                "kv_heads": 1,
                "head_dim": 2,
                "block_tokens": 4,
                "kv_dtype": "fp32",
                "positional": "rope",
                "layout": "kvsp-layout-1",
                "model_digest": "sha-256:" + "1" * 64,
                "tokenizer_digest": "sha-256:" + "2" * 64,
            }
        )
    )
    status, said, _ = kvsp(
        capfd,
        cluster,
        *("lookup", "--index", cluster["index"], "--scope-key-file", str(key)),
        *("--descriptor", str(directory / "descriptor.json"), "--tokens", str(directory / "tokens.json")),
    )
    assert status == 1
    assert "0 of 1 blocks" in said


def test_a_refusal_is_one_line(capfd: pytest.CaptureFixture[str], cluster: dict[str, str]) -> None:
    stranger = "https://ii9.example/kvsp/"
    where = ("--controller", cluster["controller"])
    status, said, complained = kvsp(capfd, cluster, "drain", stranger, *where)
    assert (status, said) == (1, "")
    assert "404" in complained
    status, _, complained = kvsp(capfd, cluster, "status", "--controller", cluster["index"])
    assert status == 1
    assert complained.count("\n") == 1


def test_nobody_there_is_one_line(capfd: pytest.CaptureFixture[str], cluster: dict[str, str]) -> None:
    (port,) = free_ports(1)
    uri = f"https://127.0.0.1:{port}/kvsp/"
    status, _, complained = kvsp(capfd, cluster, "status", "--controller", uri)
    assert status == 1
    assert uri in complained
    assert complained.count("\n") == 1
