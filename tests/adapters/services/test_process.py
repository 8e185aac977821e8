"""``kvsp serve`` as users run it: a process, real signals, and somebody else's HTTP client."""

from __future__ import annotations

import datetime
import errno
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import anyio
import httpx
import pytest
import structlog

from kvsp_core.errors import KVSPError
from kvsp_core.identity import component_id
from kvsp_core.machines.lifecycle import RefuseStatus
from kvsp_services import process as process_module
from kvsp_services.certificate_watch import CertificateWatch
from kvsp_services.pki import Validity, issue
from kvsp_services.process import Process
from tests.adapters.services.cluster import Cluster, until
from tests.unit.roles import instance_world

SCOPE = "6d1c6481cd428737da312c089db3832a"
COMPAT = "c" * 64
KEY = "b" * 64
HOLDER = "https://h1.example/kvsp/"
READER = "spiffe://example/reader"


POLICY = f"""
[principals]
"{HOLDER}" = ["holder"]
"{READER}" = ["holder"]
[scopes.{SCOPE}]
read = ["{READER}"]
publish = ["{HOLDER}"]
"""


class Deployment(Cluster):
    """An index in a process of its own, with certificates for it and its clients."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, {"index": ""}, POLICY)
        for name, uri in (("holder", HOLDER), ("reader", READER)):
            issue(directory, uri=uri, name=name)

    def client(self, name: str) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.directory / "ca.pem"))
        context.load_cert_chain(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        return httpx.Client(http1=False, http2=True, verify=context, base_url=self.uris["index"], timeout=60)

    def reload(self, event: str) -> None:
        """Send SIGHUP, and wait until the log says what came of it."""
        assert self.process is not None
        before = self.log.count(f'"event": "{event}"')
        self.process.send_signal(signal.SIGHUP)
        assert until(lambda: self.log.count(f'"event": "{event}"') == before + 1)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path)
    yield made
    made.kill()


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
    deployment.start("--loop", loop)
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
        assert deployment.metric("kvsp_index_lookup_hits_total") == 1
        assert deployment.metric("kvsp_connections") == 2
        assert deployment.metric('kvsp_request_duration_seconds_count{role="index"}') == 6
        assert deployment.stop() == 0
    events = [json.loads(line)["event"] for line in deployment.log.splitlines()]
    assert events[-2:] == ["draining", "safe to stop"]


@pytest.mark.requirement("SE-1")
def test_a_principal_taken_out_of_the_policy_is_refused_after_a_reload(deployment: Deployment) -> None:
    deployment.start()
    policy = deployment.directory / "policy.toml"
    with deployment.client("reader") as reader:
        assert look_up(reader).status_code == 200
        policy.write_text("[principals")
        deployment.reload("not reloaded")
        assert look_up(reader).status_code == 200, "what cannot be read changes nothing"
        policy.write_text(POLICY.replace(f'read = ["{READER}"]', ""))
        deployment.reload("reloaded")
        assert look_up(reader).status_code == 403


@pytest.mark.requirement("PB-2", "LK-4")
def test_limits_hold_anew_after_a_reload_and_other_changes_wait_for_a_restart(deployment: Deployment) -> None:
    deployment.start()
    path = deployment.config
    text = path.read_text()
    with deployment.client("holder") as holder, deployment.client("reader") as reader:
        assert publish(holder).json()["ttl_ms"] == 60_000
        path.write_text(text.replace("[index]\n", "[index]\nmax_ttl_ms = 5000\nmax_lookup_keys = 0\n"))
        deployment.reload("not reloaded")
        assert publish(holder).json()["ttl_ms"] == 60_000, "what is not right changes nothing"
        changed = text.replace("[index]\n", "[index]\nmax_ttl_ms = 5000\nmax_lookup_keys = 1\n")
        changed = changed.replace("port = ", "host = '127.0.0.2'\nport = ")
        assert '"event": "request"' not in deployment.log
        changed += '[log]\nlevel = "debug"\n'
        path.write_text('descriptor_files = ["ca.pem"]\n' + changed)
        deployment.reload("reloaded")
        assert '"keys": "descriptor_files monitoring.host"' in deployment.log
        assert publish(holder).json()["ttl_ms"] == 5000
        assert until(lambda: '"operation": "PublishReplica"' in deployment.log)
        several = json.dumps(LOOKUP | {"block_keys": [KEY, "a" * 64]})
        assert reader.post("lookup", content=several, headers=JSON).status_code == 413


@pytest.mark.requirement("HT-2")
def test_a_new_certificate_is_used_after_a_reload(deployment: Deployment) -> None:
    deployment.start()
    port = httpx.URL(deployment.uris["index"]).port

    def shown() -> bytes:
        context = ssl.create_default_context(cafile=str(deployment.directory / "ca.pem"))
        context.load_cert_chain(deployment.directory / "reader.pem", deployment.directory / "reader.key")
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", port or 0)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            return secure.getpeercert(binary_form=True) or b""

    before = shown()
    expiry = deployment.metric("kvsp_certificate_expiry_timestamp_seconds")
    issue(deployment.directory, uri=deployment.uris["index"], name="index", days=5_000)
    deployment.reload("reloaded")
    assert shown() != before
    assert deployment.metric("kvsp_certificate_expiry_timestamp_seconds") > expiry


def test_a_certificate_that_is_about_to_expire_is_said(deployment: Deployment) -> None:
    now = datetime.datetime.now(datetime.UTC)
    begun = now - datetime.timedelta(hours=23)
    issue(deployment.directory, uri=deployment.uris["index"], name="index", days=1, now=begun)
    deployment.start()
    assert until(lambda: '"event": "certificate expires soon"' in deployment.log)
    assert '"days_left": 0' in deployment.log
    left_s = deployment.metric("kvsp_certificate_expiry_timestamp_seconds") - now.timestamp()
    assert left_s == pytest.approx(55 * 60, abs=1)


@pytest.mark.requirement("HT-2")
def test_a_certificate_that_no_client_would_accept_is_not_served_with(deployment: Deployment) -> None:
    directory = deployment.directory
    good = (directory / "index.pem").read_bytes(), (directory / "index.key").read_bytes()
    old = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=800)
    issue(directory, uri=deployment.uris["index"], name="index", now=old)
    done = run(str(deployment.config))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "index.pem: it has expired on 20" in done.stderr
    issue(directory, uri=READER, name="index")
    assert (
        f"index.pem: it names {READER} and not {deployment.uris['index']}"
        in run(str(deployment.config)).stderr
    )
    for name, octets in zip(("index.pem", "index.key"), good, strict=True):
        (directory / name).write_bytes(octets)
    deployment.start()
    issue(directory, uri=READER, name="index")
    deployment.reload("not reloaded")
    with deployment.client("reader") as reader:
        assert look_up(reader).status_code == 200


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda d: (d / "data").write_text(""),
            "[controller]: {d}/data: File exists; it has to be a directory",
        ),
        (
            lambda d: (d / "blocks").write_text(""),
            "[holder]: {d}/blocks: File exists; it has to be a directory",
        ),
        (
            lambda d: (
                (d / "data").mkdir() or (d / "data" / "controller.sqlite").write_bytes(b"no database" * 999)
            ),
            "{d}/data/controller.sqlite: file is not a database; put a backup in its place",
        ),
    ],
    ids=["data", "tier", "damaged"],
)
def test_what_is_wrong_with_a_directory_or_database_is_one_line(
    tmp_path: Path, change: Callable[[Path], object], said: str
) -> None:
    tier = '[[holder.tiers]]\ntier = "local-storage"\ncapacity_bytes = 1000000\ndirectory = "blocks"\n'
    cluster = Cluster(tmp_path, {"holder": tier, "controller": "index = []"}, POLICY)
    change(tmp_path)
    done = run(str(cluster.config))
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert done.returncode == 1
    assert len(lines) == 1
    assert said.format(d=tmp_path) in lines[0]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvsp_services.cli", "serve", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_a_port_that_is_taken_is_said_in_one_line(deployment: Deployment) -> None:
    port = httpx.URL(deployment.uris["index"]).port
    with socket.create_server(("127.0.0.1", port or 0)):
        done = run(str(deployment.config))
    assert done.returncode == 1
    (last,) = [line for line in done.stderr.splitlines() if line.startswith("kvsp: ")]
    assert "cannot listen on 127.0.0.1" in last


def test_a_configuration_can_be_checked_without_running(deployment: Deployment) -> None:
    done = run(str(deployment.config), "--check")
    assert (done.returncode, done.stdout) == (0, f"{deployment.config}: runs index\n")


def test_a_front_end_is_ready_once_its_api_takes_connections() -> None:
    from kvsp_services.running_role import RunningRole

    role = object.__new__(RunningRole)
    role.trouble, role.listener, role.api_listens, role.role = None, None, False, None
    assert role.unready == "not listening yet"
    role.listener = object()
    assert role.unready == "not listening yet"
    role._api_listens()
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    role.certificate = CertificateWatch(Validity(now - day, now + day), None)
    role.role = None
    assert role.unready is None
    role.role = instance = instance_world.World().role
    assert role.unready is None
    instance._live(RefuseStatus(instance._lifecycle._seq), 0)
    assert role.unready is not None
    assert "a later start of it" in role.unready
    role.certificate.renew(Validity(now - 2 * day, now - day))
    assert role.unready == "its certificate has expired"
    role.trouble = "being rebuilt"
    assert role.unready == "being rebuilt"


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (True, {"event": "safe to stop", "log_level": "info"}),
        (False, {"event": "stopped with work left", "roles": "instance", "log_level": "warning"}),
    ],
)
def test_a_process_that_was_hurried_does_not_say_that_it_is_safe(done: bool, said: dict[str, str]) -> None:
    role = SimpleNamespace(name="instance", begin_to_stop=lambda: None, is_safe_to_stop=done, listener=None)
    with structlog.testing.capture_logs() as logs:
        process = object.__new__(Process)
        process.roles, process.hurried, process._log = [role], True, structlog.get_logger()  # type: ignore[list-item]
        anyio.run(process.drain)
        process.say_end()
    assert logs == [said]


A_FILE_OF_OTHERS = PermissionError(errno.EACCES, "Permission denied", "storage.key")


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
@pytest.mark.parametrize("error", [A_FILE_OF_OTHERS, KVSPError("wrong"), KeyboardInterrupt()], ids=repr)
def test_what_is_said_in_a_line_leaves_the_groups_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, loop: str, error: BaseException
) -> None:
    with pytest.raises(type(error)) as raised:
        fail_with(error, loop, monkeypatch)
    assert raised.value is error


def test_an_error_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BaseExceptionGroup):
        fail_with(OSError(errno.EIO, "of no file"), "trio", monkeypatch)


def fail_with(error: BaseException, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: object) -> None:
        async with anyio.create_task_group():
            raise error

    monkeypatch.setattr(process_module, "_serve", failing)
    process_module.serve(SimpleNamespace(loop=loop))  # type: ignore[arg-type]
