"""TLS 1.3 with certificates on both sides: who gets in, who does not, and what either is told."""

from __future__ import annotations

import contextlib
import datetime
import errno
import ssl
from pathlib import Path
from shutil import copyfile

import pytest

from kvsp_h2 import (
    ConnectionEnded,
    Credentials,
    CredentialsError,
    Established,
    Peer,
    WireLimits,
    secure_client,
    secure_server,
)
from kvsp_services.pki import issue
from tests.adapters.certificates import CLIENT_URI, SERVER_URI, Certificates
from tests.adapters.h2.pair import GET, Pair, ok


def join(
    server: Credentials, client: Credentials, *, base_uri: str = SERVER_URI, split: int | None = None
) -> Pair:
    pair = Pair(
        server=secure_server(server, SERVER_URI, 0), client=secure_client(client, base_uri, 0), split=split
    )
    pair.run()
    return pair


def ends(pair: Pair) -> tuple[str, str]:
    """Return why the server and why the client ended, each empty where it did not."""
    reasons = []
    for end in (pair.server, pair.client):
        found = end.of(ConnectionEnded)
        reasons.append(found[0].reason if found else "")  # type: ignore[union-attr]
    return reasons[0], reasons[1]


@pytest.mark.requirement("HT-2", "HT-3")
@pytest.mark.parametrize("split", [None, 1, 100, 5000])
def test_both_ends_know_each_other_and_speak(certificates: Certificates, split: int | None) -> None:
    pair = join(
        certificates.credentials(certificates.server),
        certificates.credentials(certificates.client),
        split=split,
    )
    assert pair.server.events == [Established(CLIENT_URI)]
    assert pair.client.events == [Established(SERVER_URI)]
    assert pair.server.connection.peer == Peer(uris=(CLIENT_URI,))  # type: ignore[union-attr]
    stream_id = pair.exchange(GET)
    pair.serving.respond(stream_id, ok(100_000), bytes(100_000))
    pair.run()
    assert pair.client.bodies[stream_id] == bytes(100_000)
    pair.calling.shutdown(0)
    pair.run()
    assert ends(pair) == ("", "")
    assert pair.server.events[-1] == pair.client.events[-1] == ConnectionEnded("")


def test_more_ciphertext_at_once_than_memory_for_it(certificates: Certificates) -> None:
    pair = join(certificates.credentials(certificates.server), certificates.credentials(certificates.client))
    stream_id = pair.exchange(GET)
    pair.serving.respond(stream_id, ok(900_000), bytes(900_000))
    octets = b""
    while more := pair.server.connection.data_to_send():
        octets += more
    pair.client.connection.receive_data(octets, 0)
    pair.client.drain()
    assert pair.client.bodies[stream_id] == bytes(900_000)


@pytest.mark.requirement("HT-2")
def test_tls_1_2_is_refused(certificates: Certificates) -> None:
    for side in ("server", "client"):
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if side == "client" else ssl.PROTOCOL_TLS_SERVER)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.load_verify_locations(certificates.authority.certificate)
        old.load_cert_chain(certificates.client.certificate, certificates.client.key)
        old.check_hostname = False
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        peer = old.wrap_bio(incoming, outgoing, server_side=side == "server")
        ours = (
            secure_server(certificates.credentials(certificates.server), SERVER_URI, 0)
            if side == "client"
            else secure_client(certificates.credentials(certificates.client), SERVER_URI, 0)
        )
        with pytest.raises(ssl.SSLError):  # noqa: PT012
            for _ in range(4):
                incoming.write(ours.data_to_send())
                try:
                    peer.do_handshake()
                except ssl.SSLWantReadError:
                    ours.receive_data(outgoing.read(), 0)
        ours.receive_data(outgoing.read(), 0)
        assert ours.next_event() == ConnectionEnded("the peer was refused: it does not offer TLS 1.3")
        assert ours.ended


@pytest.mark.requirement("HT-2")
def test_a_client_without_a_certificate_is_refused(certificates: Certificates) -> None:
    context = ssl.create_default_context(cafile=str(certificates.authority.certificate))
    context.set_alpn_protocols(["h2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    server = secure_server(certificates.credentials(certificates.server), SERVER_URI, 0)
    for _ in range(2):
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        server.receive_data(outgoing.read(), 0)
        incoming.write(server.data_to_send())
    assert server.next_event() == ConnectionEnded("the peer was refused: it has no certificate")
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
        client.read(1)


@pytest.mark.requirement("HT-2")
@pytest.mark.parametrize("whose", ["client", "server"])
def test_a_connection_is_closed_in_order_when_a_certificate_expires(
    certificates: Certificates, whose: str
) -> None:
    """It is closed by who may not trust the other any more; what is under way ends as it should."""
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=23)
    uri = {"client": CLIENT_URI, "server": SERVER_URI}[whose]
    issued = issue(certificates.folder, uri=uri, name="brief", days=1, now=yesterday)
    limits = WireLimits(idle_ms=10**9, idle_body_ms=10**9, drain_ms=10**9)
    server, client = (
        certificates.credentials(issued if whose == side else getattr(certificates, side))
        for side in ("server", "client")
    )
    pair = Pair(
        server=secure_server(server, SERVER_URI, 0, limits=limits),
        client=secure_client(client, SERVER_URI, 0, limits=limits),
    )
    pair.run()
    pair.later(50 * 60_000)
    stream_id = pair.exchange(GET)
    assert pair.calling.can_request
    pair.later(15 * 60_000)
    assert not pair.calling.can_request
    pair.serving.respond(stream_id, ok(2), b"ok")
    pair.run()
    assert pair.client.bodies[stream_id] == b"ok"
    assert pair.server.events[-1] == pair.client.events[-1] == ConnectionEnded("")


@pytest.mark.requirement("HT-2")
def test_certificates_of_another_authority_are_refused(
    certificates: Certificates, foreign: Certificates
) -> None:
    stranger = foreign.credentials(foreign.client, authority=certificates.authority.certificate)
    server, client = ends(join(certificates.credentials(certificates.server), stranger))
    assert server.startswith("the peer was refused: its certificate is not accepted: ")
    assert client == "the peer refused us: it does not accept our certificate"
    imposter = foreign.credentials(foreign.server, authority=certificates.authority.certificate)
    server, client = ends(join(imposter, certificates.credentials(certificates.client)))
    assert client.startswith("the peer was refused: its certificate is not accepted: ")
    assert server == "the peer was refused: it does not accept our certificate"


@pytest.mark.requirement("HT-2")
def test_expired_certificates_are_refused(certificates: Certificates) -> None:
    old = certificates.expired(SERVER_URI)
    server, client = ends(join(certificates.credentials(certificates.server), certificates.credentials(old)))
    assert server == "the peer was refused: its certificate is not accepted: certificate has expired"
    assert client == "the peer refused us: our certificate has expired"
    server, client = ends(join(certificates.credentials(old), certificates.credentials(certificates.client)))
    assert client == "the peer was refused: its certificate is not accepted: certificate has expired"


@pytest.mark.requirement("HT-2")
@pytest.mark.parametrize(
    ("base_uri", "reason"),
    [
        (
            "https://elsewhere.example/kvsp/",
            "Hostname mismatch, certificate is not valid for 'elsewhere.example'.",
        ),
        ("https://127.0.0.2/kvsp/", "IP address mismatch, certificate is not valid for '127.0.0.2'."),
        ("https://localhost/other/", "it is another service than the one that was meant"),
        ("https://localhost:8443/kvsp/", "it is another service than the one that was meant"),
        ("https://127.0.0.1/kvsp/", "it is another service than the one that was meant"),
    ],
)
def test_a_client_checks_that_it_reached_whom_it_meant(
    certificates: Certificates, base_uri: str, reason: str
) -> None:
    pair = join(
        certificates.credentials(certificates.server),
        certificates.credentials(certificates.client),
        base_uri=base_uri,
    )
    assert ends(pair)[1].endswith(reason)
    assert pair.client.of(Established) == []


def test_a_server_without_a_uri_name_is_known_by_its_address_alone(
    certificates: Certificates, tmp_path: Path
) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    read = x509.load_pem_x509_certificate(certificates.server.certificate.read_bytes())
    authority = x509.load_pem_x509_certificate(certificates.authority.certificate.read_bytes())
    key = serialization.load_pem_private_key(certificates.authority.key.read_bytes(), None)
    plain = (
        x509.CertificateBuilder()
        .subject_name(read.subject)
        .issuer_name(authority.subject)
        .public_key(read.public_key())
        .serial_number(7)
        .not_valid_before(read.not_valid_before_utc)
        .not_valid_after(read.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())  # type: ignore[arg-type]
    )
    path = tmp_path / "plain.pem"
    path.write_bytes(plain.public_bytes(serialization.Encoding.PEM))
    server = Credentials(path, certificates.server.key, certificates.authority.certificate)
    pair = join(server, certificates.credentials(certificates.client), base_uri="https://localhost:9/x/")
    assert pair.client.events == [Established("")]


def test_several_uri_names_are_nobody_in_particular() -> None:
    assert Peer(uris=("https://a.example/", "https://b.example/")).principal == ""
    assert Peer().principal == ""


def test_certificates_are_replaced_while_running(certificates: Certificates, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("role.pem", "role.key", "ca.pem")]
    for path, source in zip(
        paths,
        (certificates.server.certificate, certificates.server.key, certificates.authority.certificate),
        strict=True,
    ):
        copyfile(source, path)
    server = Credentials(*map(str, paths))
    client = certificates.credentials(certificates.client)
    first = join(server, client)
    renewed = issue(certificates.folder, uri="https://localhost/renewed/", name="renewed")
    paths[0].write_text("nonsense")
    with pytest.raises(CredentialsError, match=r"role\.pem and .*role\.key: not in PEM form"):
        server.reload()
    assert ends(join(server, client)) == ("", ""), "what cannot be read changes nothing"
    copyfile(renewed.certificate, paths[0])
    with pytest.raises(CredentialsError, match="do not belong together"):
        server.reload()
    copyfile(renewed.key, paths[1])
    spoilt = tmp_path / "spoilt.pem"
    copyfile(renewed.certificate, spoilt)
    other = Credentials(spoilt, *paths[1:])
    spoilt.write_text("nonsense")
    with pytest.raises(CredentialsError, match=r"spoilt\.pem"):
        Credentials.reload_all([server, other])
    assert ends(join(server, client)) == ("", ""), "where one of several cannot be read none changes"
    server.reload()
    assert ends(join(server, client))[1].endswith("it is another service than the one that was meant")
    first.exchange(GET)
    assert len(first.server.events) == 2, "open connections go on"


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_files_that_are_missing_are_named(certificates: Certificates, missing: int) -> None:
    paths = [certificates.server.certificate, certificates.server.key, certificates.authority.certificate]
    paths[missing] = Path("/nowhere/x.pem")
    with pytest.raises(CredentialsError, match=r"/nowhere/x\.pem: there is no such file"):
        Credentials(*paths)


@pytest.mark.parametrize("method", ["load_cert_chain", "load_verify_locations"])
def test_files_that_may_not_be_read_are_said_to_be_so(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(ssl.SSLContext, method, refuse)
    mine = certificates.server
    with pytest.raises(CredentialsError, match="not readable by this user"):
        Credentials(mine.certificate, mine.key, certificates.authority.certificate)


# Peers that speak something else
# ------------------------------------------------------------------------------


def test_http_without_tls_is_told_so(certificates: Certificates) -> None:
    server = secure_server(certificates.credentials(certificates.server), SERVER_URI, 0)
    server.receive_data(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", 0)
    assert server.next_event() == ConnectionEnded("the peer was refused: it speaks HTTP without TLS")
    assert server.data_to_send().startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert server.data_to_send() == b""
    assert server.ended


@pytest.mark.parametrize(
    "octets", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00" * 50, b"SSH-2.0-OpenSSH_9.2\r\n"]
)
def test_anything_else_is_refused_at_once(certificates: Certificates, octets: bytes) -> None:
    server = secure_server(certificates.credentials(certificates.server), SERVER_URI, 0)
    server.receive_data(octets, 0)
    assert isinstance(server.next_event(), ConnectionEnded)
    assert server.ended


@pytest.mark.requirement("HT-3")
@pytest.mark.parametrize("protocols", [[], ["http/1.1"]])
def test_http_2_is_agreed_on_by_alpn(certificates: Certificates, protocols: list[str]) -> None:
    context = ssl.create_default_context(cafile=str(certificates.authority.certificate))
    context.load_cert_chain(certificates.client.certificate, certificates.client.key)
    if protocols:
        context.set_alpn_protocols(protocols)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    server = secure_server(certificates.credentials(certificates.server), SERVER_URI, 0)
    for _ in range(2):
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        server.receive_data(outgoing.read(), 0)
        while octets := server.data_to_send():
            incoming.write(octets)
    assert client.read(4096).startswith(b"HTTP/1.1 505 HTTP Version Not Supported\r\n")
    assert server.next_event() == ConnectionEnded("the peer was refused: it does not speak HTTP/2")


# Silence, and the end
# -----------------------------------------------------------------------------------------


def test_a_handshake_that_does_not_go_on_is_given_up(certificates: Certificates) -> None:
    limits = WireLimits(handshake_ms=3_000, close_ms=500)
    server = secure_server(certificates.credentials(certificates.server), SERVER_URI, 1_000, limits=limits)
    assert server.next_deadline_ms() == 4_000
    server.handle_timer(3_999)
    assert not server.ended
    server.handle_timer(4_000)
    assert server.ended
    assert server.next_event() == ConnectionEnded(
        "the peer was refused: it did not complete the handshake in time"
    )
    assert not server.dropped
    assert server.next_deadline_ms() == 4_500
    server.handle_timer(4_500)
    assert server.dropped
    assert server.next_deadline_ms() is None


def test_a_peer_that_goes_away_during_the_handshake(certificates: Certificates) -> None:
    client = secure_client(certificates.credentials(certificates.client), SERVER_URI, 0)
    client.receive_eof(5)
    assert client.next_event() == ConnectionEnded("the connection was closed by the peer")
    assert client.next_event() is None
    client.receive_data(b"late", 6)
    client.receive_eof(7)
    assert client.next_event() is None


def test_octets_changed_on_the_way_end_the_connection(certificates: Certificates) -> None:
    pair = join(certificates.credentials(certificates.server), certificates.credentials(certificates.client))
    pair.calling.request(GET)
    octets = bytearray(pair.client.connection.data_to_send())
    octets[-1] ^= 1
    pair.server.connection.receive_data(octets, 0)
    pair.server.drain()
    assert pair.server.events[1:] == [ConnectionEnded("the peer broke the protocol of TLS")]


@pytest.mark.requirement("HT-2")
def test_a_certificate_whose_names_are_no_text_is_refused(certificates: Certificates) -> None:
    odd = certificates.credentials(certificates.with_names(b"spiffe://\xff\xfe"))
    pair = join(certificates.credentials(certificates.server), odd)
    assert ends(pair)[0] == "the peer was refused: the names of its certificate cannot be read"
    pair = join(odd, certificates.credentials(certificates.client))
    assert ends(pair)[1] != ""
