"""TLS 1.3 with certificates on both sides, over memory instead of sockets (requirements HT-2, HT-3).

Inside, OpenSSL draws randomness and reads the wall clock, which is read once more here for how long a
certificate stays valid; nothing else of `kvsp_h2` does either. A principal is the URI name of a certificate.
A client checks the server's DNS or IP name and, where the server has URI names, that one is the base URI it
meant (decision W22). Sessions are not resumed: whoever connects shows its certificate.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import attrs

from kvsp_core.errors import KVSPError

__all__ = ["ALPN", "Credentials", "CredentialsError", "Peer", "TLSConnection", "TLSFailure"]

ALPN: Final = "h2"

_UNREADABLE: Final = "not readable by this user"
_REASONS: Final = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not accepted",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate",
    "UNSUPPORTED_PROTOCOL": "it does not offer TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it does not offer TLS 1.3",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "HTTP_REQUEST": "it speaks HTTP without TLS",
    "HTTPS_PROXY_REQUEST": "it speaks HTTP without TLS",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it wants a certificate from us",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not accept our certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not accept our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it does not accept our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our certificate has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "our certificate was revoked",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it does not accept our certificate",
    "TLSV1_ALERT_NO_APPLICATION_PROTOCOL": "it does not speak HTTP/2",
}


class CredentialsError(KVSPError):
    """Certificate, key or authorities cannot be used: which file, and why."""


class TLSFailure(Exception):
    """The peer is not who it should be, or does not speak TLS 1.3 as it should: why, in plain words."""


@attrs.frozen
class Peer:
    """Who is at the other end: the names of its certificate."""

    uris: tuple[str, ...] = ()
    dns_names: tuple[str, ...] = ()

    @property
    def principal(self) -> str:
        """The URI name; empty where there is none or where there are several: such a peer may do nothing."""
        return self.uris[0] if len(self.uris) == 1 else ""


class Credentials:
    """A role's certificate and key, and the authorities whose certificates it accepts, from PEM files.

    `reload` reads the files again, `renew` where they have changed; connections that are open go on with what
    they began with. Without `require_client_certificate` a server takes anybody: for tests and measurements
    only.
    Raises `CredentialsError`.
    """

    def __init__(
        self,
        certificate: str | Path,
        key: str | Path,
        authorities: str | Path,
        *,
        require_client_certificate: bool = True,
    ) -> None:
        self._files = (Path(certificate), Path(key), Path(authorities))
        self._require = require_client_certificate
        self._state = self._look()
        self._server, self._client = self._load()

    def reload(self) -> None:
        """Use what the files hold now for new connections; where that cannot be used, nothing changes."""
        self.reload_all([self])

    @staticmethod
    def reload_all(several: Iterable[Credentials]) -> None:
        """Do so for all of these; where the files of one cannot be used, nothing changes for any."""
        for credentials, state, (server, client) in [(one, one._look(), one._load()) for one in several]:
            credentials._state, credentials._server, credentials._client = state, server, client

    def renew(self) -> None:
        """Do so where the files are not those that were read; where they cannot be used, nothing changes."""
        if self._look() != self._state:
            self.reload()

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of certificate, key and authorities."""
        return tuple(map(str, self._files))

    def accept(self) -> TLSConnection:
        """Return the server's end of a new connection."""
        return TLSConnection(self._server, server_side=True)

    def dial(self, base_uri: str) -> TLSConnection:
        """Return the client's end of a new connection to the role at a base URI."""
        return TLSConnection(self._client, server_side=False, base_uri=base_uri)

    def _look(self) -> tuple[object, ...]:
        """Return what tells one state of the files from another."""
        found: list[object] = []
        for path in self._files:
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((path, status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server.num_tickets = 0
        server.verify_mode = ssl.CERT_REQUIRED if self._require else ssl.CERT_NONE
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.set_alpn_protocols([ALPN])
            self._load_files(context)
        return server, client

    def _load_files(self, context: ssl.SSLContext) -> None:
        certificate, key, authorities = self._files
        for path in self._files:
            if not path.is_file():
                raise CredentialsError(f"{path}: there is no such file")
        try:
            context.load_verify_locations(authorities)
        except (ssl.SSLError, OSError) as error:
            why = "not certificates in PEM form" if not isinstance(error, PermissionError) else _UNREADABLE
            raise CredentialsError(f"{authorities}: {why}") from error
        try:
            context.load_cert_chain(certificate, key)
        except (ssl.SSLError, OSError) as error:
            why = "they do not belong together" if "MISMATCH" in str(error) else "not in PEM form"
            if isinstance(error, PermissionError):
                why = _UNREADABLE
            raise CredentialsError(f"{certificate} and {key}: {why}") from error


class TLSConnection:
    """One end of a TLS connection: ciphertext in and out on one side, plain octets on the other.

    Every method but `data_to_send` and `close` may raise `TLSFailure`, after which `data_to_send` still has
    what the peer is to be told.
    """

    def __init__(self, context: ssl.SSLContext, *, server_side: bool, base_uri: str | None = None) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._base_uri = base_uri
        name = urlsplit(base_uri).hostname if base_uri is not None else None
        self._object = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=name
        )
        self.peer: Peer | None = None
        """Who the peer is, once the handshake is complete."""
        self.valid_ms: int | None = None
        """How long the peer's certificate was still valid when the handshake was complete; None where it has
        none."""
        self.eof = False
        """Whether the peer has ended what it sends, as TLS says it should."""

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take ciphertext, and go on with the handshake while there is one."""
        self._incoming.write(data)
        if self.peer is None:
            self.handshake()

    def handshake(self) -> None:
        """Do what can be done of the handshake; a client begins with this."""
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            raise TLSFailure(_reason(error)) from None
        try:
            certificate = self._object.getpeercert()
        except ValueError:  # names that are no text
            raise TLSFailure("the names of its certificate cannot be read") from None
        self.peer = _peer(certificate)
        if certificate:
            self.valid_ms = int(1000 * (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()))
        if self._base_uri is not None and self.peer.uris and self._base_uri not in self.peer.uris:
            raise TLSFailure("it is another service than the one that was meant")

    @property
    def speaks_http2(self) -> bool:
        """Whether both ends agreed on HTTP/2."""
        return self._object.selected_alpn_protocol() == ALPN

    def read_into(self, memory: memoryview) -> int:
        """Decrypt what has come into memory, as much as there is room for; return the number of octets."""
        filled, size = 0, memory.nbytes
        while filled < size and (count := self.read_record_into(memory[filled:])):
            filled += count
        return filled

    def read_record_into(self, memory: memoryview) -> int:
        """Decrypt what one record holds, as much as there is room for; return the number of octets."""
        read: Callable[[int, memoryview], int] = cast(Any, self._object.read)
        try:
            count = 0 if self.eof else read(memory.nbytes, memory)
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLZeroReturnError:
            count = 0
        except ssl.SSLError as error:
            raise TLSFailure(_reason(error)) from None
        if not count:
            self.eof = True
        return count

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt octets."""
        try:
            self._object.write(data)
        except ssl.SSLError as error:
            raise TLSFailure(_reason(error)) from None

    def data_to_send(self) -> bytes:
        """Return the ciphertext to send next; empty where there is none."""
        return self._outgoing.read()

    def close(self) -> None:
        """Tell the peer that no more octets will come."""
        # It wants the peer's farewell, or there was no connection: nothing to wait for either way.
        with contextlib.suppress(ssl.SSLError):
            self._object.unwrap()


def _peer(certificate: dict[str, Any] | None) -> Peer:
    names = (certificate or {}).get("subjectAltName", ())
    return Peer(
        uris=tuple(value for kind, value in names if kind == "URI"),
        dns_names=tuple(value for kind, value in names if kind == "DNS"),
    )


def _reason(error: ssl.SSLError) -> str:
    reason = _REASONS.get(error.reason or "", "it broke the protocol of TLS")
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_message:
        return f"{reason}: {error.verify_message}"
    return reason
