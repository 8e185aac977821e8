"""Programs that nobody here wrote, against roles that are served, and our client against their servers."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

import kvsp_asyncio
import kvsp_trio
from kvsp_core.container import ContainerHeader, OutgoingBlock, encode_container
from kvsp_core.heads import Request
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_h2 import Credentials, DataReceived, Event, ExchangeEnded, ResponseReceived
from kvsp_services.demo.cluster import free_ports
from kvsp_services.pki import init_ca, issue
from tests.bench.wire_server import BLOCKS, LOOKUP, path_of

ROOT = Path(__file__).resolve().parents[2]
SCOPE = "6d1c6481cd428737da312c089db3832a"
KEY = "b" * 64
CLIENT = "spiffe://example/client"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

DESCRIPTOR = CompatibilityDescriptor(
    model="m",
    model_digest="sha-256:" + "a" * 64,
    tokenizer_digest="sha-256:" + "b" * 64,
    layers=8,
    kv_heads=4,
    head_dim=64,
    kv_dtype="bf16",
    positional="rope",
    block_tokens=16,
)


def container(seed: int = 7) -> bytes:
    section = bytes((i * seed) & 255 for i in range(DESCRIPTOR.section_bytes(16)))
    return b"".join(encode_container(ContainerHeader.for_layers(DESCRIPTOR), [(section, section)] * 8))


BLOCK = container()
DIGEST = "sha-256=:" + base64.b64encode(hashlib.sha256(BLOCK).digest()).decode() + ":"


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


class Deployment:
    """A holder and an index in a process of their own, as `kvsp serve` runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = free_ports(3)
        self.holder = f"https://127.0.0.1:{ports[0]}/kvsp/"
        self.index = f"https://127.0.0.1:{ports[1]}/kvsp/"
        self.monitoring = f"http://127.0.0.1:{ports[2]}"
        self.block = f"{self.holder}blocks/{DESCRIPTOR.compat_id}/{SCOPE}/{KEY}"
        init_ca(folder)
        for name, uri in (("holder", self.holder), ("index", self.index), ("client", CLIENT)):
            issue(folder, uri=uri, name=name, hosts=["127.0.0.1", "localhost"])
        (folder / "policy.toml").write_text(
            f'[principals]\n"{self.holder}" = ["holder"]\n"{self.index}" = ["index"]\n'
            f'"{CLIENT}" = ["holder", "instance"]\n[scopes.{SCOPE}]\nread = ["{CLIENT}"]\n'
            f'write = ["{CLIENT}"]\npublish = ["{self.holder}", "{CLIENT}"]\n'
        )
        roles = "".join(
            f'[{name}]\nbase_uri = "{uri}"\ncertificate_file = "{name}.pem"\nkey_file = "{name}.key"\n{more}'
            for name, uri, more in (
                ("index", self.index, ""),
                (
                    "holder",
                    self.holder,
                    f'index = ["{self.index}"]\n[[holder.tiers]]\n'
                    'tier = "host"\ncapacity_bytes = 100000000\n',
                ),
            )
        )
        (folder / "kvsp.toml").write_text(
            'authorities_file = "ca.pem"\npolicy_file = "policy.toml"\nloop = "asyncio"\n'
            f"[monitoring]\nport = {ports[2]}\n{roles}"
        )
        command = [sys.executable, "-m", "kvsp_services.cli", "serve", str(folder / "kvsp.toml")]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'adapters'}"}
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(command, stderr=self.log, env=environment)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.monitoring}/ready").status_code == 200:
                    return
            time.sleep(0.05)
        self.stop()
        raise AssertionError((folder / "log").read_text())

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.log.close()

    @property
    def curl(self) -> list[str]:
        folder = self.folder
        certificate = [
            "--cacert",
            f"{folder}/ca.pem",
            "--cert",
            f"{folder}/client.pem",
            "--key",
            f"{folder}/client.key",
        ]
        return ["curl", "-sS", "--max-time", "20", *certificate]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("roles"))
    (made.folder / "block").write_bytes(BLOCK)
    with httpx.Client(verify=context_of(made.folder), http2=True, http1=False) as client:
        url = made.block.replace(KEY, "a" * 64)
        put = client.put(url, content=BLOCK, headers=STORE)
        assert put.status_code == 201, put.text
    yield made
    made.stop()


STORE = {"content-type": "application/kvsp-block", "if-none-match": "*", "repr-digest": DIGEST}


def context_of(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "client.pem", folder / "client.key")
    return context


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


# curl -------------------------------------------------------------------------------------------------------


@needs("curl")
@pytest.mark.requirement("HT-3", "BR-1", "BR-2")
def test_curl_stores_and_fetches_a_block(deployment: Deployment) -> None:
    url = deployment.block.replace(KEY, "c" * 64)
    fields = [part for name, value in STORE.items() for part in ("-H", f"{name}: {value}")]
    said = run(
        [
            *deployment.curl,
            "-T",
            str(deployment.folder / "block"),
            *fields,
            "-w",
            "%{http_code} %{http_version}",
            url,
        ]
    )
    assert said.stdout == "201 2", said
    again = run(
        [
            *deployment.curl,
            "-T",
            str(deployment.folder / "block"),
            *fields,
            "-w",
            "%{http_code}",
            "-o",
            "/dev/null",
            url,
        ]
    )
    assert again.stdout == "412", again
    head = run([*deployment.curl, "-D", "-", "-o", str(deployment.folder / "fetched"), url])
    assert f"repr-digest: {DIGEST}" in head.stdout
    assert (deployment.folder / "fetched").read_bytes() == BLOCK
    part = run(
        [*deployment.curl, "-o", "/dev/null", "-w", "%{http_code} %{size_download}", f"{url}?layers=2-3"]
    )
    assert part.stdout == f"200 {OutgoingBlock.from_container(BLOCK, range(2, 4)).size_bytes}"


@needs("curl")
@pytest.mark.requirement("HT-2")
def test_curl_is_refused_where_it_should_be(deployment: Deployment) -> None:
    nobody = ["curl", "-sS", "--max-time", "20", "--cacert", f"{deployment.folder}/ca.pem", deployment.block]
    assert run(nobody).returncode in (55, 56), "no certificate"
    assert run([*deployment.curl, "--tls-max", "1.2", deployment.block]).returncode == 35
    started = time.monotonic()
    old = run([*deployment.curl, "--http1.1", "-o", "/dev/null", "-w", "%{http_code}", deployment.block])
    assert old.stdout == "505"
    plain = run(
        ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", deployment.block.replace("https", "http")]
    )
    assert plain.stdout == "400"
    assert time.monotonic() - started < 10


@needs("curl")
def test_no_body_is_compressed_even_where_a_client_offers_it(deployment: Deployment) -> None:
    """Decision W23."""
    url = deployment.block.replace(KEY, "a" * 64)
    offers = ["-H", "accept-encoding: gzip, deflate, br, zstd"]
    for wanted in (url, url.replace("a" * 64, "9" * 64)):  # a block, and a problem
        said = run([*deployment.curl, *offers, "-D", "-", "-o", str(deployment.folder / "plain"), wanted])
        assert "content-encoding" not in said.stdout.lower(), said.stdout
        length = (deployment.folder / "plain").stat().st_size
        assert f"content-length: {length}" in said.stdout
    fields = [part for name, value in STORE.items() for part in ("-H", f"{name}: {value}")]
    squeezed = deployment.folder / "block.gz"
    squeezed.write_bytes(gzip.compress(BLOCK))
    target = deployment.block.replace(KEY, "8" * 64)
    put = [*deployment.curl, *fields, "-H", "content-encoding: gzip", "-T", str(squeezed)]
    assert run([*put, "-o", "/dev/null", "-w", "%{http_code}", target]).stdout == "415"
    assert run([*deployment.curl, "-o", "/dev/null", "-w", "%{http_code}", target]).stdout == "404"


@needs("curl")
def test_curl_gets_an_early_answer_to_a_large_body(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(20_000_000))
    media = ["-H", "content-type: application/kvsp-block"]
    url = deployment.block.replace(KEY, "d" * 64)
    said = run(
        [
            *deployment.curl,
            *media,
            "-T",
            str(tmp_path / "large"),
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            url,
        ]
    )
    assert said.stdout == "428", said


@needs("curl")
@pytest.mark.requirement("HT-8")
def test_curl_uses_the_other_resources(deployment: Deployment) -> None:
    def send(method: str, url: str, document: dict[str, Any] | None = None) -> tuple[int, Any]:
        body = (
            []
            if document is None
            else ["--json", json.dumps(document), "-H", "content-type: application/kvsp+json"]
        )
        said = run([*deployment.curl, "-X", method, *body, "-w", "\n%{http_code}", url])
        text, _, status = said.stdout.rpartition("\n")
        return int(status), json.loads(text) if text else None

    status, lease = send("POST", f"{deployment.holder}leases", {"block_keys": ["a" * 64], "ttl_ms": 5000})
    assert (status, lease["ttl_ms"]) == (201, 5000)
    url = f"{deployment.holder}leases/{lease['lease']}"
    assert send("PUT", url, {"ttl_ms": 6000})[0] == 200
    assert send("DELETE", url)[0] == 204
    assert send("DELETE", url)[0] == 404
    look_up = {"compat_id": DESCRIPTOR.compat_id, "scope_id": SCOPE, "block_keys": ["a" * 64]}
    deadline = time.monotonic() + 10
    while (found := send("POST", f"{deployment.index}lookup", look_up))[1]["matched"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert found[0] == 200
    assert send("POST", f"{deployment.index}nowhere", {})[0] == 404
    assert send("DELETE", f"{deployment.index}lookup")[0] == 405


# Others -----------------------------------------------------------------------------------------------------


@needs("openssl")
@pytest.mark.requirement("HT-2")
def test_openssl_cannot_speak_tls_1_2(deployment: Deployment) -> None:
    where = deployment.holder.split("/")[2]
    said = run(["openssl", "s_client", "-connect", where, "-tls1_2", "-alpn", "h2"], input="")
    assert said.returncode != 0
    assert "alert protocol version" in said.stderr


@needs("nghttp")
def test_nghttp_fetches_a_block(deployment: Deployment) -> None:
    folder = deployment.folder
    url = deployment.block.replace(KEY, "a" * 64)
    command = ["nghttp", f"--cert={folder}/client.pem", f"--key={folder}/client.key", url, url]
    said = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert BLOCK in said.stdout


class Open:
    """A holder and an index without client certificates, which h2load has none of, as the benchmarks serve
    them."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(2)
        self.holder, self.index = (f"https://localhost:{port}/kvsp/" for port in ports)
        init_ca(folder)
        for port, uri in zip(ports, (self.holder, self.index), strict=True):
            issue(folder, uri=uri, name=f"server{port}", hosts=["127.0.0.1"])
        module = [sys.executable, "-m", "tests.bench.wire_server", "asyncio", *map(str, ports), str(folder)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'adapters'}"}
        self.process = subprocess.Popen(
            [*module, "--anybody"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@needs("h2load")
def test_h2load_fetches_blocks_and_looks_keys_up(tmp_path: Path) -> None:
    served = Open(tmp_path)
    (tmp_path / "lookup.json").write_text(json.dumps(LOOKUP))
    try:
        load = ["h2load", "-n", "40", "-c", "4", "-m", "5"]
        blocks = run([*load, served.holder + path_of("2m")])
        asked = ["-d", str(tmp_path / "lookup.json"), "-H", "content-type: application/kvsp+json"]
        lookups = run([*load, *asked, f"{served.index}lookup"])
    finally:
        served.stop()
    for said in (blocks, lookups):
        assert "40 succeeded, 0 failed, 0 errored, 0 timeout" in said.stdout, said
        assert "status codes: 40 2xx" in said.stdout
    sent = re.search(r"traffic: .* \((\d+)\) data$", blocks.stdout, re.MULTILINE)
    assert sent is not None
    assert int(sent[1]) > 40 * BLOCKS["2m"]


NODE_CLIENT = """
const http2 = require('http2'), fs = require('fs'), [, folder, base, get, put, digest] = process.argv;
const read = name => fs.readFileSync(`${folder}/${name}`);
const session = http2.connect(base, {ca: read('ca.pem'), cert: read('client.pem'), key: read('client.key')});
const ask = (headers, body) => new Promise((done, fail) => {
  const stream = session.request(headers); const parts = []; let status;
  stream.on('response', h => status = h[':status']); stream.on('data', d => parts.push(d));
  stream.on('end', () => done([status, Buffer.concat(parts)])); stream.on('error', fail); stream.end(body);
});
(async () => {
  const stored = await ask({':method': 'PUT', ':path': put, 'content-type': 'application/kvsp-block',
    'if-none-match': '*', 'repr-digest': digest}, read('block'));
  const fetched = await Promise.all([1, 2, 3].map(() => ask({':path': get})));
  console.log(JSON.stringify([stored[0], fetched.map(f => [f[0], f[1].equals(read('block'))])]));
  session.close();
})();
"""


@needs("node")
def test_node_stores_and_fetches_a_block(deployment: Deployment) -> None:
    paths = [deployment.block.replace(KEY, c * 64).split("/", 3)[3] for c in "ae"]
    base = "/".join(deployment.holder.split("/")[:3])
    command = [
        "node",
        "-e",
        NODE_CLIENT,
        "--",
        str(deployment.folder),
        base,
        f"/{paths[0]}",
        f"/{paths[1]}",
        DIGEST,
    ]
    said = run(command)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == [201, [[200, True]] * 3]


def test_httpx_stores_and_fetches_blocks_at_once(deployment: Deployment) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(verify=context_of(deployment.folder), http2=True, http1=False) as client:
            keys = [f"{n:064x}" for n in range(20)]

            async def both(key: str) -> None:
                url = deployment.block.replace(KEY, key)
                stored = await client.put(url, content=BLOCK, headers=STORE)
                assert (stored.status_code, stored.http_version) == (201, "HTTP/2")
                assert (await client.get(url)).content == BLOCK

            async with anyio.create_task_group() as group:
                for key in keys:
                    group.start_soon(both, key)

    anyio.run(main)


# Our client against servers of others -----------------------------------------------------------------------


def fetch_all(
    module: Any, folder: Path, base_uri: str, path: str, count: int, body: bytes = b""
) -> list[tuple[int, bytes]]:
    """Make the same request a number of times with our client; return statuses and bodies."""
    results: list[tuple[int, bytes]] = []

    async def main() -> None:
        credentials = Credentials(folder / "client.pem", folder / "client.key", folder / "ca.pem")
        async with module.open_network() as network:
            pool = network.service(credentials, base_uri)
            done = anyio.Event()

            def start() -> None:
                found = bytearray()
                status = 0

                def on_event(event: Event) -> None:
                    nonlocal status
                    if isinstance(event, ResponseReceived):
                        status = event.response.status
                    elif isinstance(event, DataReceived):
                        found.extend(event.data)
                        call.acknowledge(len(event.data))
                    elif isinstance(event, ExchangeEnded):
                        results.append((status if event.complete else 0, bytes(found)))
                        if len(results) == count:
                            done.set()

                request = Request(method="PUT" if body else "GET", path=path, content_length=len(body))
                call = pool.call(request, body, on_event=on_event)

            for _ in range(count):
                start()
            with anyio.fail_after(30):
                await done.wait()

    anyio.run(main, backend="trio" if module is kvsp_trio else "asyncio")
    return results


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
@pytest.mark.parametrize("module", [kvsp_asyncio, kvsp_trio], ids=["asyncio", "trio"])
def test_our_client_fetches_from_nginx(tmp_path: Path, module: Any) -> None:
    assert NGINX is not None
    [port] = free_ports(1)
    init_ca(tmp_path)
    issue(tmp_path, uri="spiffe://example/nginx", name="server", hosts=["localhost"])
    issue(tmp_path, uri=CLIENT, name="client")
    base_uri = f"https://localhost:{port}/kvsp/"
    issue(tmp_path, uri=base_uri, name="server")
    www = tmp_path / "www" / "kvsp"
    www.mkdir(parents=True)
    (www / "block").write_bytes(BLOCK * 10)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; error_log {tmp_path}/error.log; pid {tmp_path}/pid; user root;\n"
        f"events {{}} http {{ access_log off; {temporary} server {{ listen 127.0.0.1:{port} ssl http2;\n"
        f"ssl_protocols TLSv1.3; ssl_certificate {tmp_path}/server.pem;\n"
        f"ssl_certificate_key {tmp_path}/server.key;\n"
        f"ssl_client_certificate {tmp_path}/ca.pem; ssl_verify_client on; root {tmp_path}/www; }} }}\n"
    )
    process = subprocess.Popen([NGINX, "-c", str(tmp_path / "nginx.conf")], stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        assert fetch_all(module, tmp_path, base_uri, "block", 20) == [(200, BLOCK * 10)] * 20
        assert fetch_all(module, tmp_path, base_uri, "nowhere", 1)[0][0] == 404
        assert fetch_all(module, tmp_path, base_uri, "block", 1, bytes(3_000_000))[0][0] == 413
    finally:
        process.terminate()
        process.wait(10)


NODE_SERVER = """
const http2 = require('http2'), fs = require('fs'), crypto = require('crypto');
const [, folder, port] = process.argv;
const read = name => fs.readFileSync(`${folder}/${name}`);
const server = http2.createSecureServer({
  ca: read('ca.pem'), cert: read('server.pem'), key: read('server.key'),
  requestCert: true, rejectUnauthorized: true, minVersion: 'TLSv1.3'});
server.on('stream', (stream, headers) => {
  const digest = crypto.createHash('sha256');
  stream.on('data', d => digest.update(d));
  stream.on('end', () => { stream.respond({':status': 200});
    stream.end(headers[':method'] === 'GET' ? read('block') : digest.digest('hex')); });
});
server.listen(+port, '127.0.0.1');
"""


@needs("node")
@pytest.mark.parametrize("module", [kvsp_asyncio, kvsp_trio], ids=["asyncio", "trio"])
def test_our_client_speaks_with_node(tmp_path: Path, module: Any) -> None:
    [port] = free_ports(1)
    init_ca(tmp_path)
    base_uri = f"https://localhost:{port}/kvsp/"
    issue(tmp_path, uri=base_uri, name="server")
    issue(tmp_path, uri=CLIENT, name="client")
    (tmp_path / "block").write_bytes(BLOCK)
    process = subprocess.Popen(["node", "-e", NODE_SERVER, "--", str(tmp_path), str(port)])
    try:
        wait_for(port)
        assert fetch_all(module, tmp_path, base_uri, "block", 20) == [(200, BLOCK)] * 20
        digest = hashlib.sha256(BLOCK * 8).hexdigest().encode()
        assert fetch_all(module, tmp_path, base_uri, "block", 4, BLOCK * 8) == [(200, digest)] * 4
    finally:
        process.terminate()
        process.wait(10)


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise AssertionError(f"no server came up on port {port}")


@pytest.mark.requirement("BR-1", "BR-2")
def test_a_range_of_layers_has_its_own_digest_and_leaves_the_block_there(deployment: Deployment) -> None:
    url = deployment.block.replace(KEY, "a" * 64)
    with httpx.Client(verify=context_of(deployment.folder), http2=True, http1=False) as client:
        part = client.get(f"{url}?layers=2-3")
        expected = b"".join(OutgoingBlock.from_container(BLOCK, range(2, 4)).pieces)
        assert part.content == expected
        digest = base64.b64encode(hashlib.sha256(expected).digest()).decode()
        assert part.headers["repr-digest"] == f"sha-256=:{digest}:"
        assert client.get(url).content == BLOCK
