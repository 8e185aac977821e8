"""Who gets in: certificates and protocols of every wrong kind, over real sockets, at a served role."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import httpx
import pytest

from kvsp_client.errors import Unavailable
from kvsp_core.resources import DescribeIndex
from kvsp_h2 import Credentials
from kvsp_services.asking import ask
from kvsp_services.pki import init_ca, issue
from tests.adapters.services.cluster import Cluster, until

SCOPE, OTHER_SCOPE = "6d" * 16, "7e" * 16
READER = "spiffe://example/reader"
STRANGER = "spiffe://example/stranger"
POLICY = f"""
[principals]
"{READER}" = ["holder"]
"spiffe://example/operator" = ["operator"]
[scopes.{SCOPE}]
read = ["{READER}"]
[scopes.{OTHER_SCOPE}]
read = ["spiffe://example/operator"]
"""
NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("served"), {"index": ""}, POLICY)
    issue(made.directory, uri=READER, name="reader")
    made.start()
    yield made
    made.kill()


def context(served: Cluster, certificate: Path | None, alpn: tuple[str, ...] = ("h2",)) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(served.directory / "ca.pem"))
    if certificate is not None:
        made.load_cert_chain(certificate, certificate.with_suffix(".key"))
    if alpn:
        made.set_alpn_protocols(list(alpn))
    return made


def octets_from(served: Cluster, made: ssl.SSLContext) -> bytes:
    """Connect, ask for the index, and return all that the server ever says above TLS."""
    uri = httpx.URL(served.uris["index"])
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    headers = [(":method", "GET"), (":scheme", "https"), (":path", "/kvsp/ext/index")]
    client.send_headers(1, [*headers, (":authority", uri.netloc.decode())], end_stream=True)
    said = b""
    with socket.create_connection(("127.0.0.1", uri.port or 0), timeout=30) as plain:
        try:
            with made.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                secure.sendall(client.data_to_send())
                while b"\x00\x00\x00\x01" not in said[9:] and (octets := secure.recv(65536)):
                    said += octets
        except (ssl.SSLError, ConnectionError):
            pass
    return said


def test_a_client_in_order_is_answered(served: Cluster) -> None:
    assert octets_from(served, context(served, served.directory / "reader.pem"))


def nothing(folder: Path) -> Path | None:
    return None


def self_signed(folder: Path) -> Path:
    (folder / "own").mkdir()
    return init_ca(folder / "own").certificate


def foreign(folder: Path) -> Path:
    init_ca(folder / "foreign")
    return issue(folder / "foreign", uri=READER, name="reader").certificate


def expired(folder: Path) -> Path:
    return issue(folder, uri=READER, name="old", days=1, now=NOW - datetime.timedelta(days=30)).certificate


def not_yet_valid(folder: Path) -> Path:
    return issue(folder, uri=READER, name="new", now=NOW + datetime.timedelta(days=30)).certificate


@pytest.mark.requirement("HT-2", "SE-1")
@pytest.mark.parametrize("kind", [nothing, self_signed, foreign, expired, not_yet_valid])
def test_certificates_that_are_not_in_order_get_no_octet(
    served: Cluster, tmp_path: Path, kind: Callable[[Path], Path | None]
) -> None:
    for name in ("ca.pem", "ca.key"):
        shutil.copy(served.directory / name, tmp_path)
    assert octets_from(served, context(served, kind(tmp_path))) == b""


@pytest.mark.requirement("HT-2")
def test_tls_1_2_gets_no_octet(served: Cluster) -> None:
    made = context(served, served.directory / "reader.pem")
    made.maximum_version = ssl.TLSVersion.TLSv1_2
    assert octets_from(served, made) == b""


@pytest.mark.requirement("HT-2")
@pytest.mark.parametrize("alpn", [(), ("http/1.1",), ("h2c", "http/1.0")])
def test_other_protocols_are_told_which_one_it_is(served: Cluster, alpn: tuple[str, ...]) -> None:
    said = octets_from(served, context(served, served.directory / "reader.pem", alpn))
    assert said == b"" or said.startswith(b"HTTP/1.1 505 ")


@pytest.mark.requirement("HT-2")
@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")
def test_early_data_is_not_accepted(served: Cluster, tmp_path: Path) -> None:
    """A second connection that resumes the first may send no early data: no ticket allows any."""
    port = httpx.URL(served.uris["index"]).port
    folder = served.directory
    session, early = tmp_path / "session", tmp_path / "early"
    early.write_bytes(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-CAfile", str(folder / "ca.pem")]
    command += ["-cert", str(folder / "reader.pem"), "-key", str(folder / "reader.key"), "-alpn", "h2"]
    command += ["-tls1_3", "-ign_eof"]

    def run(*more: str) -> str:
        with subprocess.Popen(
            [*command, *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"not HTTP/2, which ends the connection\r\n" * 3)
            process.stdin.flush()
            said = process.stdout.read().decode(errors="replace")
            process.stdin.close()
        return said

    first = run("-sess_out", str(session))
    assert "TLSv1.3" in first, first
    assert "Max Early Data: " not in first.replace("Max Early Data: 0", "")
    if session.exists() and session.stat().st_size:
        second = run("-sess_in", str(session), "-early_data", str(early))
        assert "Early data was accepted" not in second


def client(served: Cluster, name: str) -> httpx.Client:
    made = context(served, served.directory / f"{name}.pem", ())
    return httpx.Client(http1=False, http2=True, verify=made, base_url=served.uris["index"], timeout=60)


def look_up(known: httpx.Client, scope: str) -> httpx.Response:
    body = {"compat_id": "c" * 64, "scope_id": scope, "block_keys": ["b" * 64]}
    return known.post("lookup", json=body, headers={"content-type": "application/kvsp+json"})


@pytest.mark.requirement("SE-1", "LK-3")
def test_the_right_authority_is_not_enough(served: Cluster) -> None:
    issue(served.directory, uri=STRANGER, name="stranger")
    with client(served, "reader") as reader, client(served, "stranger") as stranger:
        assert look_up(reader, SCOPE).status_code == 200
        for answer in (look_up(reader, OTHER_SCOPE), look_up(reader, "8f" * 16)):
            assert (answer.status_code, answer.json()["type"].rsplit("#")[-1]) == (403, "kvsp-scope-denied")
        for path in ("ext/index", "ext/descriptors/" + "c" * 64):
            assert stranger.get(path).status_code == 403
        assert look_up(stranger, SCOPE).status_code == 403


@pytest.mark.requirement("SE-1")
@pytest.mark.parametrize("names", [0, 2], ids=["no URI name", "two URI names"])
def test_a_certificate_without_one_uri_name_is_nobody(served: Cluster, names: int, tmp_path: Path) -> None:
    with client(served, nameless(served.directory, names)) as nobody:
        assert look_up(nobody, SCOPE).status_code == 403


def nameless(folder: Path, count: int) -> str:
    """Issue a certificate with so many URI names, which `issue` does not."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    ca_key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    pattern = x509.load_pem_x509_certificate((folder / "reader.pem").read_bytes())
    uris = [READER, "spiffe://example/operator"][:count]
    names = [x509.UniformResourceIdentifier(uri) for uri in uris] or [x509.DNSName("reader.example")]
    builder = x509.CertificateBuilder(
        issuer_name=ca.subject,
        subject_name=pattern.subject,
        public_key=pattern.public_key(),  # type: ignore[arg-type]
        serial_number=x509.random_serial_number(),
        not_valid_before=NOW - datetime.timedelta(hours=1),
        not_valid_after=NOW + datetime.timedelta(hours=1),
    ).add_extension(x509.SubjectAlternativeName(names), critical=False)
    made = builder.sign(ca_key, hashes.SHA256())  # type: ignore[arg-type]
    name = f"uris-{count}"
    (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    shutil.copy(folder / "reader.key", folder / f"{name}.key")
    return name


@pytest.mark.requirement("SE-1")
def test_who_is_taken_out_of_the_policy_is_refused_on_the_connection_there_is(served: Cluster) -> None:
    assert served.process is not None
    policy = served.directory / "policy.toml"
    with client(served, "reader") as reader:
        assert look_up(reader, SCOPE).status_code == 200
        policy.write_text('[principals]\n"spiffe://example/operator" = ["operator"]\n')
        served.process.send_signal(1)
        assert until(lambda: look_up(reader, SCOPE).status_code == 403)
        policy.write_text(POLICY)
        served.process.send_signal(1)
        assert until(lambda: look_up(reader, SCOPE).status_code == 200)


# A client and the wrong server


class Recorder:
    """A TLS server that takes any client of the authority and notes what is said to it above TLS."""

    def __init__(self, folder: Path, name: str, listener: socket.socket) -> None:
        self.heard = b""
        self.connections = 0
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
        self._context.load_verify_locations(folder / "ca.pem")
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._context.set_alpn_protocols(["h2"])
        self._listener = listener
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # of the listener, when it is closed
            while True:
                plain, _ = self._listener.accept()
                self.connections += 1
                with (
                    contextlib.suppress(OSError),
                    self._context.wrap_socket(plain, server_side=True) as secure,
                ):
                    secure.settimeout(30)
                    while octets := secure.recv(65536):
                        self.heard += octets

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30)


@pytest.mark.requirement("HT-2", "SE-1")
@pytest.mark.parametrize(
    ("uri", "hosts"),
    [
        ("https://127.0.0.1:{port}/other/", []),
        ("https://elsewhere.example:{port}/kvsp/", ["127.0.0.1"]),
        ("spiffe://example/index", ["127.0.0.1"]),
        ("https://elsewhere.example:{port}/kvsp/", []),
    ],
    ids=["another role here", "another host's role", "a client's name", "another host"],
)
def test_a_client_says_nothing_to_a_server_that_is_not_whom_it_meant(
    tmp_path: Path, uri: str, hosts: list[str]
) -> None:
    init_ca(tmp_path)
    issue(tmp_path, uri=READER, name="reader")
    listener = socket.create_server(("127.0.0.1", 0))
    issue(tmp_path, uri=uri.format(port=listener.getsockname()[1]), name="server", hosts=hosts)
    recorder = Recorder(tmp_path, "server", listener)
    reader = Credentials(tmp_path / "reader.pem", tmp_path / "reader.key", tmp_path / "ca.pem")
    with pytest.raises(Unavailable):
        ask(reader, f"https://127.0.0.1:{recorder.port}/kvsp/", DescribeIndex())
    recorder.close()
    assert recorder.connections
    assert recorder.heard == b""
