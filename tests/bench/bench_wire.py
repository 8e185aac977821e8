"""TLS 1.3 and HTTP/2 beside nginx, h2load, curl, hypercorn, httpx and the h2 library as it comes.

Processes on both ends share the machine, so megabytes a second are compared within one run, in turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvsp_services.demo.cluster import free_ports
from kvsp_services.pki import init_ca, issue
from tests.bench import Row, left_out, row, tool
from tests.bench.wire_server import BLOCKS, CLIENT_URI, LOOKUP, path_of

__all__ = ["rows"]

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = int(os.environ.get("KVSP_WIRE_ROUNDS", "5"))
MIB2 = BLOCKS["2m"]
NGINX = """
worker_processes 1; daemon off; error_log {folder}/error.log; pid {folder}/nginx.pid;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; keepalive_requests 100000000; {paths}
  server {{
    listen 127.0.0.1:{open} ssl http2; {certificate} root {folder}/www;
    location /kvsp/lookup {{ return 200 "{answer}"; }}
  }}
  server {{
    listen 127.0.0.1:{mutual} ssl http2; {certificate} root {folder}/www;
    ssl_client_certificate {folder}/ca.pem; ssl_verify_client on;
  }}
}}
"""
DOCUMENT = json.dumps(LOOKUP).encode()


class Bench:
    """A folder with certificates and files, and the servers in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.ports: dict[str, int] = {}
        init_ca(folder)
        issue(folder, uri=CLIENT_URI, name="client")

    def start(self, name: str, *arguments: str) -> None:
        """Start one of our servers."""
        ports = free_ports(2)
        self.ports[name], self.ports[f"{name}_index"] = ports
        for port in ports:
            uri = f"https://localhost:{port}/kvsp/"
            issue(self.folder, uri=uri, name=f"server{port}", hosts=["127.0.0.1"])
        kind, *options = arguments
        module = [sys.executable, "-m", "tests.bench.wire_server", kind]
        self._run(name, [*module, *map(str, ports), str(self.folder), *options])
        wait_for(ports[0])

    def start_nginx(self, path: str) -> None:
        """Start nginx with the same files."""
        www = self.folder / "www" / "kvsp"
        for size, size_bytes in BLOCKS.items():
            (www / path_of(size)).parent.mkdir(parents=True, exist_ok=True)
            (www / path_of(size)).write_bytes(os.urandom(1 << 20) * (size_bytes >> 20))
        self.ports["nginx"], self.ports["mutual_nginx"] = free_ports(2)
        issue(self.folder, uri="https://localhost/", name="nginx")
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        configuration = NGINX.format(
            folder=self.folder,
            open=self.ports["nginx"],
            mutual=self.ports["mutual_nginx"],
            answer=DOCUMENT.decode().replace('"', '\\"'),
            paths=" ".join(f"{kind}_temp_path {self.folder}/{kind};" for kind in kinds),
            certificate=f"ssl_protocols TLSv1.3; ssl_certificate {self.folder}/nginx.pem;"
            f" ssl_certificate_key {self.folder}/nginx.key;",
        )
        (self.folder / "nginx.conf").write_text(configuration)
        if os.getuid() == 0:
            for found in (self.folder, *self.folder.rglob("*")):
                found.chmod(0o755 if found.is_dir() else 0o644)
        self._run("nginx", [path, "-c", str(self.folder / "nginx.conf")])
        wait_for(self.ports["nginx"])

    def _run(self, name: str, command: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'adapters'}"}
        with (self.folder / f"{name}.log").open("w") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, text=True
            )

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(10)

    # What is measured -----------------------------------------------------------------------------------

    def h2load(self, server: str, path: str, count: int, *, body: bool = False, streams: int = 4) -> float:
        """Return requests a second."""
        command = ["h2load", "-n", str(count), "-c1", "-m", str(streams), "-w30", "-W30"]
        if body:
            (self.folder / "body.json").write_bytes(DOCUMENT)
            command += ["-d", str(self.folder / "body.json"), "-H", "content-type: application/kvsp+json"]
        command.append(f"https://localhost:{self.ports[server]}/kvsp/{path}")
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        succeeded = re.search(rf"status codes: {count} 2xx", said)
        rate = re.search(r"([\d.]+) req/s", said)
        if succeeded is None or rate is None:
            raise RuntimeError(f"h2load and {server}: {said[-500:]}")
        return float(rate[1])

    def client(self, kind: str, server: str, count: int, *options: str) -> tuple[float, float]:
        """Return octets a second and CPU seconds a gigabyte of a client of ours or of others."""
        command = [sys.executable, "-m", "tests.bench.wire_client", kind, str(self.ports[server])]
        command += [str(self.folder), path_of("2m"), str(count), "4", *options]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'adapters'}"}
        said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
        wall, cpu, octets = map(float, said.stdout.split())
        return octets / wall, cpu / octets * 1e9

    def curl_and_digest(self, count: int) -> float:
        """Return octets a second of curl piped into a digest, as a careful user of nginx would do."""
        folder = self.folder
        urls = f"https://localhost:{self.ports['mutual_nginx']}/kvsp/{path_of('2m')}?[1-{count}]"
        curl = ["curl", "-s", "--http2", "--cacert", folder / "ca.pem", "--cert", folder / "client.pem"]
        started = time.perf_counter()
        with subprocess.Popen([*curl, "--key", folder / "client.key", urls], stdout=subprocess.PIPE) as fetch:
            digest = ["openssl", "dgst", "-sha256"]
            subprocess.run(digest, stdin=fetch.stdout, stdout=subprocess.DEVNULL, check=True)
        if fetch.returncode:
            raise RuntimeError(f"curl failed: {fetch.returncode}")
        return count * MIB2 / (time.perf_counter() - started)

    def handshakes(self, server: str, count: int) -> float:
        """Return mutual handshakes a second of one client, each until the server has spoken."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        context.check_hostname = False
        context.load_cert_chain(self.folder / "client.pem", self.folder / "client.key")
        context.set_alpn_protocols(["h2"])
        opening = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
        started = time.perf_counter()
        for _ in range(count):
            with socket.create_connection(("127.0.0.1", self.ports[server])) as sock:
                connection = context.wrap_socket(sock)
                connection.sendall(opening)
                connection.recv(1)
        return count / (time.perf_counter() - started)

    def resident_bytes(self, server: str) -> int:
        """Return the memory a server has."""
        status = Path(f"/proc/{self.processes[server].pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def connect(self, server: str) -> ssl.SSLSocket:
        """Open a connection and say what a client says first."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        context.check_hostname = False
        context.load_cert_chain(self.folder / "client.pem", self.folder / "client.key")
        context.set_alpn_protocols(["h2"])
        connection = context.wrap_socket(socket.create_connection(("127.0.0.1", self.ports[server])))
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        connection.recv(1)
        return connection


def rows() -> Iterator[Row]:
    """Yield the figures of the wire."""
    nginx = tool("nginx") or shutil.which("nginx", path="/usr/sbin")
    missing = [name for name in ("h2load", "curl", "openssl") if tool(name) is None]
    if nginx is None or missing:
        yield left_out("wire", f"needs {', '.join(missing) or 'nginx'}")
        return
    with tempfile.TemporaryDirectory(prefix="kvsp-wire-") as name:
        bench = Bench(Path(name))
        Path(name).chmod(0o755)
        try:
            bench.start_nginx(nginx)
            bench.start("open", "uvloop", "--anybody")
            yield from served_rows(bench)
            yield from small_rows(bench)
            yield from fetched_rows(bench)
            yield from memory_rows(bench)
        finally:
            bench.stop()


def served_rows(bench: Bench) -> Iterator[Row]:
    """Blocks from our server and from nginx to h2load."""
    for name, count in (("2m", 300), ("64m", 10)):
        size = BLOCKS[name]

        def ours(count: int = count, name: str = name) -> float:
            return bench.h2load("open", path_of(name), count)

        def theirs(count: int = count, name: str = name) -> float:
            return bench.h2load("nginx", path_of(name), count)

        rate = medians({"ours": ours, "nginx": theirs})
        note = f"{rate['ours'] * size / 1e6:,.0f} and {rate['nginx'] * size / 1e6:,.0f} MB/s"
        yield row(
            f"wire.server.{name}ib.vs_nginx", rate["ours"] / rate["nginx"], "ratio", at_least=0.95, note=note
        )


def small_rows(bench: Bench) -> Iterator[Row]:
    """Small POST requests with JSON both ways."""
    bench.start("hypercorn", "hypercorn")
    rate = medians(
        {
            "ours": lambda: bench.h2load("open_index", "lookup", 6000, body=True, streams=16),
            "hypercorn": lambda: bench.h2load("hypercorn", "lookup", 2000, body=True, streams=16),
            "nginx": lambda: bench.h2load("nginx", "lookup", 20_000, streams=16),
        }
    )
    note = f"{rate['ours']:,.0f} and {rate['hypercorn']:,.0f} requests/s"
    yield row("wire.post.vs_hypercorn", rate["ours"] / rate["hypercorn"], "ratio", at_least=2.0, note=note)
    note = f"{rate['nginx']:,.0f} requests/s, a static answer to GET"
    yield row("wire.post.vs_nginx", rate["ours"] / rate["nginx"], "ratio", at_least=0.1, note=note)


def fetched_rows(bench: Bench) -> Iterator[Row]:
    """Blocks into our client and others; mutual TLS."""
    bench.start("uvloop", "uvloop")
    bench.start("trio", "trio")
    bench.start("h2", "h2")
    cpu: list[float] = []

    def verified() -> float:
        rate, spent = bench.client("uvloop", "uvloop", 150, "--verify")
        cpu.append(spent)
        return rate

    rate = medians(
        {
            "ours": lambda: bench.client("uvloop", "uvloop", 300)[0],
            "nginx": lambda: bench.h2load("nginx", path_of("2m"), 300) * MIB2,
            "h2": lambda: bench.client("h2", "h2", 60)[0],
            "httpx": lambda: bench.client("httpx", "hypercorn", 20)[0],
            "trio": lambda: bench.client("trio", "trio", 200)[0],
            "asyncio": lambda: bench.client("asyncio", "uvloop", 200)[0],
            "verified": verified,
            "curl": lambda: bench.curl_and_digest(150),
        }
    )
    note = f"{rate['ours'] / 1e6:,.0f} MB/s"
    yield row("wire.client.2mib.vs_nginx", rate["ours"] / rate["nginx"], "ratio", at_least=0.85, note=note)
    yield row("wire.client.2mib.vs_plain_h2", rate["ours"] / rate["h2"], "ratio", at_least=2.0)
    yield row("wire.client.2mib.vs_hypercorn_httpx", rate["ours"] / rate["httpx"], "ratio", at_least=7.0)
    note = f"{rate['verified'] / 1e6:,.0f} and {rate['curl'] / 1e6:,.0f} MB/s"
    yield row(
        "wire.client.verified.vs_curl_digest",
        rate["verified"] / rate["curl"],
        "ratio",
        at_least=0.9,
        note=note,
    )
    yield row("wire.client.verified.cpu", statistics.median(cpu), "s/GB", at_most=2.2)
    yield row(
        "wire.trio.vs_asyncio",
        rate["trio"] / rate["ours"],
        "ratio",
        at_least=0.85,
        note="both ends trio, both uvloop",
    )
    yield row(
        "wire.trio.vs_plain_asyncio",
        rate["trio"] / rate["asyncio"],
        "ratio",
        note="client on asyncio's own loop",
    )
    rate = medians(
        {
            "ours": lambda: bench.handshakes("uvloop", 200),
            "nginx": lambda: bench.handshakes("mutual_nginx", 200),
        }
    )
    note = f"{rate['ours']:,.0f} and {rate['nginx']:,.0f} mutual handshakes/s of one client"
    yield row("wire.handshakes.vs_nginx", rate["ours"] / rate["nginx"], "ratio", note=note)


def memory_rows(bench: Bench) -> Iterator[Row]:
    """Memory of a server with many connections."""
    for name, connections, at_most, unit in (("idle", 200, 64, "KiB"), ("slow_64mib", 64, 2048, "KiB")):
        server = f"memory_{name}"
        bench.start(server, "uvloop")
        with contextlib.ExitStack() as stack:
            stack.enter_context(bench.connect(server))
            before = bench.resident_bytes(server)
            opened = [stack.enter_context(bench.connect(server)) for _ in range(connections)]
            if name != "idle":
                for connection in opened:
                    connection.sendall(slow_request(bench.ports[server]))
            time.sleep(1.0)
            each = (bench.resident_bytes(server) - before) / connections / 1024
        yield row(f"wire.memory.{name}", each, unit, at_most=at_most, note=f"a connection, of {connections}")


def slow_request(port: int) -> bytes:
    """Return a GET of 64 MiB with windows as wide as may be, to read nothing of."""
    from hpack import Encoder

    fields = [
        (":method", "GET"),
        (":scheme", "https"),
        (":authority", f"localhost:{port}"),
        (":path", "/kvsp/" + path_of("64m")),
    ]
    block = Encoder().encode(fields)
    wide = (2**31 - 1).to_bytes(4, "big")
    return (
        b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04"
        + wide
        + b"\x00\x00\x04\x08\x00\x00\x00\x00\x00"
        + (2**31 - 70_000).to_bytes(4, "big")
        + bytes((0, 0, len(block), 1, 5, 0, 0, 0, 1))
        + block
    )


def medians(candidates: Mapping[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """Measure the candidates in turn, some rounds over; return the median of each."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, measure in candidates.items():
            found[name].append(measure())
    return {name: statistics.median(values) for name, values in found.items()}


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise RuntimeError(f"no server came up on port {port}")
