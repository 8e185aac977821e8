"""Real processes for tests: configurations, certificates, start, kill and stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from kvsp_core.identity import Scope
from kvsp_engines.prepare import prepare_tiny
from kvsp_services.demo.cluster import free_ports
from kvsp_services.pki import init_ca, issue

__all__ = ["OPERATOR", "Cluster", "cluster_with_an_api", "free_ports", "until"]

TIMEOUT_S = 120
"""For whatever should come soon: the machine may be busy."""
SERVE = (sys.executable, "-m", "kvsp_services.demo.member", "serve")
OPERATOR = "spiffe://example/operator"
KEY = bytes(range(32))
POLICY = f"""
[principals]
"{{index}}" = ["index"]
"{{controller}}" = ["controller"]
"{{instance}}" = ["instance", "holder"]
"{{front_end}}" = ["front-end"]
[scopes.{Scope(KEY).scope_id}]
read = ["{{controller}}", "{{instance}}", "{{front_end}}"]
write = ["{{instance}}"]
publish = ["{{instance}}"]
"""


def until(check: Callable[[], bool], seconds: float = TIMEOUT_S) -> bool:
    """Wait until something is so; return whether it came to be."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Cluster:
    """Roles in one process, each under a base URI of its own, and an operator's certificate."""

    def __init__(self, directory: Path, sections: Mapping[str, str], policy: str) -> None:
        """`sections` are the lines of each role's section beyond what all have; ``{index}`` and so on in them
        and in the policy stand for base URIs.
        """
        *ports, self.monitoring_port = free_ports(len(sections) + 1)
        self.directory = directory
        self.uris = {
            name: f"https://127.0.0.1:{port}/kvsp/" for name, port in zip(sections, ports, strict=True)
        }
        self.process: subprocess.Popen[str] | None = None
        init_ca(directory)
        for name, uri in (*self.uris.items(), ("operator", OPERATOR)):
            issue(directory, uri=uri, name=name)
        key = directory / "storage.key"
        key.write_bytes(bytes(range(100, 132)))
        key.chmod(0o600)
        (directory / "policy.toml").write_text(policy.format(**self.uris))
        written = "".join(
            f'[{name}]\nbase_uri = "{self.uris[name]}"\n'
            f'certificate_file = "{name}.pem"\nkey_file = "{name}.key"\n{lines.format(**self.uris)}\n'
            for name, lines in sections.items()
        )
        self.config = directory / "kvsp.toml"
        self.config.write_text(
            'authorities_file = "ca.pem"\npolicy_file = "policy.toml"\nstorage_key_file = "storage.key"\n'
            f"[monitoring]\nport = {self.monitoring_port}\n{written}"
        )

    @property
    def certificate(self) -> str:
        """The operator's certificate."""
        return str(self.directory / "operator.pem")

    def start(self, *options: str, program: Sequence[str] = SERVE) -> None:
        """Start the process, and wait until it is ready."""
        command = [*program, str(self.config), *options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with (
            (self.directory / "serve.log").open("ab") as log,
            (self.directory / "serve.out").open("ab") as out,
        ):
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=log, text=True, env=environment
            )
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self.monitoring_port}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        self.kill()
        raise AssertionError(self.log)

    @property
    def log(self) -> str:
        """What the process has logged so far."""
        return (self.directory / "serve.log").read_text()

    def metric(self, line: str) -> float:
        """Return a value from /metrics, by all that comes before it on its line; 0 where it is not there."""
        text = httpx.get(f"http://127.0.0.1:{self.monitoring_port}/metrics").text
        found = [row for row in text.splitlines() if row.startswith(line + " ")]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0

    def kill(self) -> None:
        """End the process at once."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self._wait()

    def stop(self) -> int:
        """Stop the process in order and return its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def _wait(self) -> int:
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            return self.process.wait(TIMEOUT_S)
        finally:
            self.process.stdin.close()  # by which it would end, too


def cluster_with_an_api(directory: Path, api_port: int, instance: str = "") -> Cluster:
    """Return an index, a controller, an instance with the tiny model and a front end with its API, all in one
    process. `instance` are further lines of the instance's section.
    """
    prepare_tiny(directory / "model")
    (directory / "tenant.key").write_bytes(KEY)
    (directory / "tenant.key").chmod(0o600)
    knows = 'model_dir = "model"\ncontroller = "{controller}"\n'
    tier = '[[instance.tiers]]\ntier = "host"\ncapacity_bytes = 10_000_000'
    scope = '[[scopes]]\nkey_file = "tenant.key"'
    sections = {
        "index": "",
        "controller": 'index = ["{index}"]',
        "instance": f'{knows}index = ["{{index}}"]\n{instance}\n{tier}',
        "front_end": f"{knows}api_port = {api_port}\n{scope}",
    }
    return Cluster(directory, sections, POLICY)
