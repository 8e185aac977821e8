"""A cluster of KVSP roles on this machine, each a process of its own, over mutual TLS.

Everything it needs, it makes: certificates, policy, keys and a configuration for each process, in a directory
of its own. Processes are started, killed and asked as an operator would.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final

import attrs

from kvsp_client.files import read_scope
from kvsp_client.model_dir import descriptor_of_directory
from kvsp_core.errors import KVSPError
from kvsp_core.ext_messages import IndexInfo, InstanceListing, LeaseListing, SessionListing
from kvsp_core.identity import CompatibilityDescriptor, Scope, component_id
from kvsp_core.messages import LookupAnswer, LookupRequest, StateChange, StatusAnswer
from kvsp_core.resources import (
    ChangeInstanceState,
    DescribeIndex,
    ListInstances,
    ListLeases,
    ListSessions,
    Lookup,
)
from kvsp_h2 import Credentials
from kvsp_services.asking import Asker
from kvsp_services.pki import init_ca, issue

__all__ = ["INSTANCES", "Cluster", "Member", "free_ports"]

_DRAWN: Final = random.SystemRandom()

INSTANCES: Final = ("alpha", "beta", "gamma")
_ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "index": ("index",),
    "controller": ("controller",),
    "cache": ("holder",),
    **dict.fromkeys(INSTANCES, ("instance", "holder")),
    "front": ("front-end",),
    "operator": ("operator",),
}
"""Who is what, as the policy says it."""
_START_S: Final = 120.0
_ANSWER_S: Final = 30.0
_KVSP: Final = (sys.executable, "-m", "kvsp_services.cli")
_MEMBER: Final = (sys.executable, "-m", "kvsp_services.demo.member")
_MEMORY_BYTES: Final = 1 << 30


@attrs.define
class Member:
    """One process of the cluster."""

    name: str
    base_uri: str
    host: str
    port: int
    monitoring_port: int
    config: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def ready(self) -> bool:
        """Return whether it says that it is ready."""
        try:
            with urllib.request.urlopen(
                f"http://{self.host}:{self.monitoring_port}/ready", timeout=_ANSWER_S
            ) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def exposition(self) -> str:
        """Return its metrics as they are exposed."""
        with urllib.request.urlopen(
            f"http://{self.host}:{self.monitoring_port}/metrics", timeout=_ANSWER_S
        ) as answer:
            text: str = answer.read().decode()
        return text

    def metrics(self) -> dict[str, float]:
        """Return its counters, summed over their labels."""
        found: dict[str, float] = {}
        for line in self.exposition().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found


class Cluster:
    """Index, controller, cache server, three instances and a front end.

    A context: entering starts all of them, leaving stops them; none of them outlives this process, however
    that ends. `model_dir` is the model they serve.
    """

    def __init__(self, directory: Path, model_dir: Path, *, loop: str = "trio", status_ttl_ms: int = 3000):
        self.directory = directory
        self.model_dir = model_dir.resolve()
        self._loop = loop
        self._status_ttl_ms = status_ttl_ms
        ports = iter(free_ports(2 * len(_ROLES) + 1))
        self.members: dict[str, Member] = {}
        self.uris: dict[str, str] = {}
        for name in _ROLES:
            if name == "operator":
                self.uris[name] = "spiffe://demo.example/operator"
                continue
            port, monitoring = next(ports), next(ports)
            self.uris[name] = f"https://{self.host(name)}:{port}/{name}/"
            self.members[name] = Member(
                name,
                self.uris[name],
                self.host(name),
                port,
                monitoring,
                directory / f"{name}.toml",
                directory / f"{name}.log",
            )
        self.api_port = next(ports)
        self.api_url = f"http://127.0.0.1:{self.api_port}/v1"
        self.descriptor: CompatibilityDescriptor = descriptor_of_directory(self.model_dir)
        self.scope: Scope
        self._asking, self._askers, self._kept = threading.Lock(), dict[str, Asker](), ExitStack()
        self._prepare()

    # What it is made of; clusters of another kind may want some of it otherwise

    def host(self, name: str) -> str:
        """Return the address that a member listens on."""
        return "127.0.0.1"

    def command(self, member: Member) -> list[str]:
        """Return what runs a member."""
        return [*_MEMBER, "serve", str(member.config)]

    def _prepare(self) -> None:
        directory = self.directory
        directory.mkdir(parents=True, exist_ok=True)
        init_ca(directory)
        for name, uri in self.uris.items():
            issue(directory, uri=uri, name=name)
        for key in ("tenant.key", "storage.key"):
            with os.fdopen(
                os.open(directory / key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                file.write(os.urandom(32))
        self.scope = read_scope(directory / "tenant.key")
        (directory / "descriptor.json").write_bytes(self.descriptor.canonical_json)
        (directory / "policy.toml").write_text(self._policy())
        for name, member in self.members.items():
            member.config.write_text(self.common(member) + self.section(name))

    def _policy(self) -> str:
        def listed(names: Iterable[str]) -> str:
            return "[" + ", ".join(f'"{self.uris[name]}"' for name in names) + "]"

        lines = ["[principals]"]
        lines += [
            f'"{self.uris[name]}" = {list(roles)!r}'.replace("'", '"') for name, roles in _ROLES.items()
        ]
        lines += [f"[scopes.{self.scope.scope_id}]"]
        lines += [f"read = {listed([*INSTANCES, 'controller', 'front', 'operator'])}"]
        lines += [f"write = {listed(INSTANCES)}"]
        lines += [f"publish = {listed([*INSTANCES, 'cache'])}"]
        lines += [f"withdraw = {listed(INSTANCES)}"]
        return "\n".join(lines) + "\n"

    def common(self, member: Member) -> str:
        """Return what of a member's configuration comes before its section."""
        stores = member.name == "controller"
        scoped = member.name in (*INSTANCES, "front")
        return (
            'authorities_file = "ca.pem"\npolicy_file = "policy.toml"\n'
            f'data_dir = "data-{member.name}"\nloop = "{self._loop}"\n'
            'descriptor_files = ["descriptor.json"]\n'
            + ('storage_key_file = "storage.key"\n' if stores else "")
            + f'[monitoring]\nhost = "{member.host}"\nport = {member.monitoring_port}\n'
            + '[log]\nformat = "json"\nlevel = "info"\n'
            + ('[[scopes]]\nkey_file = "tenant.key"\n' if scoped else "")
        )

    def section(self, name: str) -> str:
        """Return a member's section of its configuration."""
        section = {"cache": "holder", "front": "front_end"}.get(
            name, "instance" if name in INSTANCES else name
        )
        lines = [
            f"[{section}]",
            f'base_uri = "{self.uris[name]}"',
            f'certificate_file = "{name}.pem"',
            f'key_file = "{name}.key"',
        ]
        index, model = f'index = ["{self.uris["index"]}"]', f'model_dir = "{self.model_dir}"'
        host_tier = f'[[{section}.tiers]]\ntier = "host"\ncapacity_bytes = {_MEMORY_BYTES}'
        match section:
            case "holder":
                lines += [index, host_tier]
            case "controller":
                lines += [index]
            case "instance":
                lines += [index, model, f'controller = "{self.uris["controller"]}"']
                lines += [f'copies_to = "{self.uris["cache"]}"', f"status_ttl_ms = {self._status_ttl_ms}"]
                lines += ["prefill_tokens_per_s = 200", "decode_tokens_per_s = 10", host_tier]
                for other in ("cache", *INSTANCES):
                    if other != name:
                        lines += [f'[[instance.links]]\nholder = "{self.uris[other]}"\nmbit_per_s = 1000']
            case "front_end":
                lines += [model, f'controller = "{self.uris["controller"]}"', f"api_port = {self.api_port}"]
        return "\n".join(lines) + "\n"

    # Its processes

    def __enter__(self) -> Cluster:
        self._lifeline, self._held = os.pipe()
        try:
            for name in self.members:
                self.launch(name)
            for name in self.members:
                self.wait_ready(name)
            self.wait_active(INSTANCES)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def launch(self, name: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start a process, with these environment variables besides those there are."""
        member = self.members[name]
        with member.log.open("ab") as log:
            member.process = subprocess.Popen(
                self.command(member),
                stdin=self._lifeline,  # its other end is held by this process alone
                stdout=log,
                stderr=log,
                env={**_environment(), **environment},
            )

    def wait_ready(self, name: str) -> None:
        """Wait until a process is ready."""
        member = self.members[name]
        until = time.monotonic() + _START_S
        while not member.ready():
            if not member.alive() or time.monotonic() > until:
                last = (member.log.read_text().splitlines() or ["it said nothing"])[-1]
                raise KVSPError(f"{name} did not start: {last}")
            time.sleep(0.05)

    def restart(self, name: str, seconds: float) -> None:
        """Start a process again, and wait until it is ready; an instance also until the controller has heard
        of its new incarnation."""
        before = self._epoch_of(name) if name in INSTANCES else 0
        self.launch(name)
        self.wait_ready(name)
        if name in INSTANCES:
            wait_until(lambda: self._epoch_of(name) > before, seconds, f"{name} to report")

    def _epoch_of(self, name: str) -> int:
        known = self.instances().instances
        return next((info.epoch for info in known if info.instance == self.uris[name]), 0)

    def wait_active(self, names: Iterable[str], seconds: float = 30) -> float:
        """Wait until the controller holds these instances for active; return how long it took."""
        wanted = {self.uris[name] for name in names}
        return wait_until(
            lambda: wanted <= {i.instance for i in self.instances().instances if i.state == "active"},
            seconds,
            "the instances to be active",
        )

    def kill(self, name: str) -> None:
        """Kill a process, as a power cut would."""
        process = self.members[name].process
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait()

    def terminate(self, name: str, seconds: float) -> tuple[int, str]:
        """Stop a process in order; return its exit status, and the last line of its log."""
        member = self.members[name]
        assert member.process is not None
        member.process.terminate()
        return member.process.wait(seconds), member.log.read_text().splitlines()[-1]

    def close(self) -> None:
        """Stop all processes, in the end by force."""
        self._kept.close()
        running = [m.process for m in self.members.values() if m.process is not None and m.alive()]
        for process in running:
            process.terminate()
        until = time.monotonic() + 3
        for process in running:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for end in (self._lifeline, self._held):
            os.close(end)

    # What an operator sees and does

    def shell(self, *arguments: str) -> str:
        """Run a command of ``kvsp`` as the operator; return what it says. A failure is a `KVSPError`."""
        certificate = ("--certificate", str(self.directory / "operator.pem"))
        done = subprocess.run(
            [*_KVSP, *arguments, *certificate], env=_environment(), capture_output=True, text=True
        )
        if done.returncode:
            raise KVSPError(f"kvsp {arguments[0]}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def as_(self, name: str) -> Asker:
        """Return what asks with the certificate of a member, or of the operator."""
        with self._asking:
            if name not in self._askers:
                folder = self.directory
                credentials = Credentials(folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem")
                self._askers[name] = self._kept.enter_context(Asker(credentials))
            return self._askers[name]

    @property
    def operator(self) -> Asker:
        """What asks as the operator."""
        return self.as_("operator")

    def instances(self) -> InstanceListing:
        """Return the controller's view of the instances."""
        return self.operator.ask_for(InstanceListing, self.uris["controller"], ListInstances())

    def sessions(self) -> SessionListing:
        """Return the controller's sessions."""
        return self.operator.ask_for(SessionListing, self.uris["controller"], ListSessions())

    def index(self) -> IndexInfo:
        """Return how many records the index has, in all and of each holder."""
        return self.operator.ask_for(IndexInfo, self.uris["index"], DescribeIndex())

    def records_of(self, name: str) -> int:
        """Return how many records a holder has at the index."""
        return sum(holder.records for holder in self.index().holders if holder.holder == self.uris[name])

    def idle(self) -> bool:
        """Return whether no session is under way, and every active instance reports that it does nothing."""
        if any(s.state in ("placed", "running", "resuming") for s in self.sessions().sessions):
            return False
        reports = [i.status for i in self.instances().instances if i.state == "active"]
        return all(report is not None and not report.running and not report.queued for report in reports)

    def found(self, keys: Sequence[str]) -> int:
        """Return how many leading blocks of a prefix the index finds."""
        body = LookupRequest(
            compat_id=self.descriptor.compat_id, scope_id=self.scope.scope_id, block_keys=tuple(keys)
        )
        return self.operator.ask_for(LookupAnswer, self.uris["index"], Lookup(), body).matched

    def leases(self, name: str) -> LeaseListing:
        """Return the leases at a holder."""
        return self.operator.ask_for(LeaseListing, self.uris[name], ListLeases())

    def ask_state(self, name: str, state: str) -> str:
        """Ask for a state of an instance, by its controller."""
        operation = ChangeInstanceState(component_id(self.uris[name]))
        change, controller = StateChange(state=state), self.uris["controller"]
        return self.operator.ask_for(StatusAnswer, controller, operation, change).state

    def state_of(self, name: str) -> str:
        """Return the state of an instance as the controller knows it."""
        return next((i.state for i in self.instances().instances if i.instance == self.uris[name]), "unknown")

    def name_of(self, base_uri: str | None) -> str:
        """Return the name of a member by its base URI."""
        return next((name for name, uri in self.uris.items() if uri == base_uri), "nobody")


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> float:
    """Wait until a condition holds; return how long it took. Raises `KVSPError` where it never does."""
    began = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - began
        except KVSPError:
            pass  # who was asked is not there right now
        if time.monotonic() - began > seconds:
            raise KVSPError(f"waited {seconds:.0f} s for {what}, in vain")
        time.sleep(0.05)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface on which nobody listens now.

    They are below those that the system gives to connections, one of which might have it a moment later.
    """
    found: set[int] = set()
    while len(found) < count:
        port = _DRAWN.randrange(10_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return list(found)
