"""Certificates for tests: an authority, a server for localhost, a client, and some that are not in order."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvsp_h2 import Credentials
from kvsp_services.pki import Issued, init_ca, issue

SERVER_URI = "https://localhost/kvsp/"
CLIENT_URI = "spiffe://kvsp.example/client"


class Certificates:
    """An authority in a folder, and what it has issued."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = init_ca(folder)
        self.server = issue(folder, uri=SERVER_URI, name="server", hosts=["127.0.0.1"])
        self.client = issue(folder, uri=CLIENT_URI, name="client")

    def expired(self, uri: str) -> Issued:
        long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=30)
        return issue(self.folder, uri=uri, name="expired", days=1, now=long_ago)

    def with_names(self, names: bytes) -> Issued:
        """Return a certificate whose only URI name is these octets, whatever they are."""
        authority = x509.load_pem_x509_certificate(self.authority.certificate.read_bytes())
        signing = serialization.load_pem_private_key(self.authority.key.read_bytes(), None)
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        uri = bytes((0x30, len(names) + 2, 0x86, len(names))) + names
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(authority.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(
                x509.UnrecognizedExtension(x509.ExtensionOID.SUBJECT_ALTERNATIVE_NAME, uri), critical=False
            )
            .sign(signing, hashes.SHA256())  # type: ignore[arg-type]
        )
        issued = Issued(self.folder / "odd.pem", self.folder / "odd.key")
        pem, no = serialization.Encoding.PEM, serialization.NoEncryption()
        issued.certificate.write_bytes(certificate.public_bytes(pem))
        issued.key.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no))
        return issued

    def credentials(
        self, issued: Issued, *, authority: Path | None = None, require_client_certificate: bool = True
    ) -> Credentials:
        return Credentials(
            issued.certificate,
            issued.key,
            authority or self.authority.certificate,
            require_client_certificate=require_client_certificate,
        )
