"""What the tests with vLLM share: engines in processes, a served index and cache server, prompts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import httpx

from kvsp_client.scopes import salted_scope
from kvsp_core.ext_messages import IndexInfo
from kvsp_core.identity import Scope
from kvsp_core.resources import DescribeIndex
from kvsp_h2 import Credentials
from kvsp_services.asking import ask_for
from kvsp_services.pki import init_ca, issue
from tests.adapters.services.cluster import free_ports, until

__all__ = [
    "ROOT",
    "SALT",
    "SCOPE_KEY",
    "Baseline",
    "Deployment",
    "Engine",
    "EngineFailed",
    "Server",
    "plain_options",
    "prompt_tokens",
]

ROOT: Final = Path(__file__).resolve().parents[2]
ENGINE: Final = "spiffe://example/vllm"
OPERATOR: Final = "spiffe://example/operator"
SCOPE_KEY: Final = bytes(range(32))
SALT: Final = "a salt"


class EngineFailed(Exception):
    """An engine did not start: what it says."""


def prompt_tokens(model_dir: Path, count: int, *, skip: int = 0) -> list[int]:
    """Return so many tokens of a text, from the one numbered `skip` on."""
    from tokenizers import Tokenizer

    text = (ROOT / "LICENSE").read_text() + "\n".join(
        (ROOT / "docs" / name).read_text()
        for name in ("decisions.md", "operations.md", "wire.md", "deployment.md")
    )
    tokens: list[int] = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text).ids
    assert len(tokens) >= skip + count
    return tokens[skip : skip + count]


class Engine:
    """A vLLM engine in a process; a context that ends it."""

    def __init__(self, python: str, options: Mapping[str, Any], log: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")])}
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [python, str(ROOT / "tests" / "vllm" / "engine.py"), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
            bufsize=1,
        )

    def wait_ready(self) -> Engine:
        """Wait until it runs. Raises `EngineFailed`."""
        first = self.receive()
        if "error" in first:
            raise EngineFailed(first["error"])
        return self

    def send(self, do: str, **members: Any) -> None:
        """Give a command, without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **members}) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(f"the engine ended; see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **members: Any) -> dict[str, Any]:
        """Give a command and return its answer."""
        self.send(do, **members)
        return self.receive()

    def generate(self, *prompts: list[int], tokens: int = 16, salt: str | None = None, **more: Any) -> Any:
        """Generate for prompts together."""
        given = [{"prompt_token_ids": each} | ({"cache_salt": salt} if salt else {}) for each in prompts]
        return self.ask("generate", prompts=given, tokens=tokens, **more)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(60 if error is None else 5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


class Baseline:
    """What an engine without a connector says of prompts, each asked once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def both(self, prompt: list[int], tokens: int) -> tuple[Any, Any]:
        """Return the results computed afresh, and with vLLM's own cache of the prefix."""
        name = (tokens, *prompt)
        if name not in self._known:
            self._engine.ask("forget")
            fresh, warm = (self._engine.generate(prompt, tokens=tokens)["results"][0] for _ in range(2))
            self._known[name] = (fresh, warm)
        return self._known[name]


class Server:
    """A process of ``kvsp serve`` with one role."""

    def __init__(self, directory: Path, name: str, section: str) -> None:
        port, self.monitoring_port = free_ports(2)
        self.uri = f"https://127.0.0.1:{port}/{name}/"
        self._directory = directory
        self._name = name
        self._section = section
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, *lines: str) -> None:
        """Write its configuration."""
        (self._directory / f"{self._name}.toml").write_text(
            'authorities_file = "ca.pem"\npolicy_file = "policy.toml"\n'
            f"[monitoring]\nport = {self.monitoring_port}\n"
            f'[{self._section}]\nbase_uri = "{self.uri}"\n'
            f'certificate_file = "{self._name}.pem"\nkey_file = "{self._name}.key"\n'
            + "\n".join(lines)
            + "\n"
        )

    def start(self) -> None:
        """Start, and wait until it is ready."""
        command = [
            sys.executable,
            "-m",
            "kvsp_services.cli",
            "serve",
            str(self._directory / f"{self._name}.toml"),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")])}
        with (self._directory / f"{self._name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        assert until(self._ready), (self._directory / f"{self._name}.log").read_text()

    def _ready(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.monitoring_port}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Deployment:
    """An index and a cache server, each a process, and what an engine needs to use them."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self._stored: dict[Engine, int] = {}
        self.index = Server(directory, "index", "index")
        self.cache = Server(directory, "cache", "holder")
        init_ca(directory)
        for name, uri in (
            ("index", self.index.uri),
            ("cache", self.cache.uri),
            ("engine", ENGINE),
            ("operator", OPERATOR),
        ):
            issue(directory, uri=uri, name=name)
        key = directory / "tenant.key"
        key.touch(0o600)
        key.write_bytes(SCOPE_KEY)
        self.index.write()
        self.cache.write(
            f'index = ["{self.index.uri}"]',
            "[[holder.tiers]]",
            'tier = "host"',
            f"capacity_bytes = {4 << 30}",
        )
        lines = [
            "[principals]",
            f'"{self.index.uri}" = ["index"]',
            f'"{self.cache.uri}" = ["holder"]',
            f'"{ENGINE}" = ["instance"]',
            f'"{OPERATOR}" = ["operator"]',
        ]
        for scope in (Scope(SCOPE_KEY), salted_scope(SCOPE_KEY, SALT)):
            lines += [
                f"[scopes.{scope.scope_id}]",
                f'read = ["{ENGINE}", "{self.cache.uri}"]',
                f'write = ["{ENGINE}"]',
                f'publish = ["{self.cache.uri}"]',
            ]
        (directory / "policy.toml").write_text("\n".join(lines) + "\n")

    def settings(self) -> dict[str, Any]:
        """Return what an engine is told of this deployment."""
        files = {
            "certificate_file": "engine.pem",
            "key_file": "engine.key",
            "authorities_file": "ca.pem",
            "scope_key_file": "tenant.key",
        }
        settings = {"index": self.index.uri, "cache_server": self.cache.uri}
        return settings | {key: str(self.directory / file) for key, file in files.items()}

    def options(self, model_dir: Path, **extra: Any) -> dict[str, Any]:
        """Return the options of an engine that uses this deployment."""
        patient = {"lookup_timeout_ms": 60_000, "load_timeout_ms": 120_000}  # the machine may be busy
        return plain_options(model_dir) | {
            "kv_transfer_config": {
                "kv_connector": "KVSPConnector",
                "kv_connector_module_path": "kvsp_client.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": self.settings() | patient | extra,
            }
        }

    def settle(self, engine: Engine) -> None:
        """Wait until all that an engine computed is stored, and in the index."""
        self._stored[engine] = engine.ask("settle")["stored_blocks"]
        assert until(lambda: self.records() >= sum(self._stored.values()))

    def records(self) -> int:
        """Return how many replicas the index knows."""
        folder = self.directory
        operator = Credentials(folder / "operator.pem", folder / "operator.key", folder / "ca.pem")
        return ask_for(IndexInfo, operator, self.index.uri, DescribeIndex()).records

    def __enter__(self) -> Deployment:
        self.index.start()
        self.cache.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.cache.kill()
        self.index.kill()


def plain_options(model_dir: Path) -> dict[str, Any]:
    """Return the options of an engine without a connector."""
    dtype = json.loads((model_dir / "config.json").read_text())[
        "torch_dtype"
    ]  # vLLM's own choice is never fp32
    return {"model": str(model_dir), "dtype": dtype, "max_model_len": 4608}
