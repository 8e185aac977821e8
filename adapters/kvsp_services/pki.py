"""A development certificate authority and role certificates (requirement HT-2, decision W22).

Each role has one certificate. Its principal is the one URI subject alternative name: the role's base URI,
or a SPIFFE ID. DNS and IP names let clients check the server's address too. Keys are readable by their
owner only.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import attrs
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvsp_client.files import replacing
from kvsp_core.errors import KVSPError
from kvsp_core.identity import parse_base_uri

__all__ = [
    "CA_CERTIFICATE",
    "CA_KEY",
    "Issued",
    "PKIError",
    "Validity",
    "check_certificate",
    "check_host",
    "check_name",
    "check_principal",
    "init_ca",
    "issue",
]

CA_CERTIFICATE: Final = "ca.pem"
CA_KEY: Final = "ca.key"
_HOST: Final = re.compile(r"(?=.{1,253}\Z)([A-Za-z0-9_]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.|\Z))+")
_CA_DAYS: Final = 3650
_LEAF_DAYS: Final = 365
_WARN_AT_MOST: Final = datetime.timedelta(days=30)
_CLOCK_SKEW: Final = datetime.timedelta(minutes=5)


class PKIError(KVSPError):
    """A certificate cannot be made: why, and what to do."""


@attrs.frozen
class Validity:
    """From when until when a certificate is valid."""

    since: datetime.datetime
    until: datetime.datetime

    @property
    def warn_from(self) -> datetime.datetime:
        """When it is time to issue another one: in the last fifth of its time, and in the last 30 days."""
        return self.until - min((self.until - self.since) / 5, _WARN_AT_MOST)


def check_certificate(path: Path, base_uri: str) -> Validity:
    """Check that a role can be reached with a certificate, however it was made; return how long it can.

    Raises `PKIError` where it has expired, or names other URIs than the role's base URI: its clients would
    refuse it.
    """
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    except ValueError as error:
        raise PKIError(f"{path}: not a certificate in PEM form: {error}") from None
    until = certificate.not_valid_after_utc
    if until < datetime.datetime.now(datetime.UTC):
        raise PKIError(f"{path}: it has expired on {until:%Y-%m-%d}; issue it anew")
    if uris and base_uri not in uris:
        raise PKIError(f"{path}: it names {', '.join(uris)} and not {base_uri}; issue one for that URI")
    return Validity(certificate.not_valid_before_utc, until)


@attrs.frozen
class Issued:
    """Where a new certificate and its key were written."""

    certificate: Path
    key: Path


def init_ca(directory: Path, *, now: datetime.datetime | None = None) -> Issued:
    """Make a certificate authority in a directory: ca.pem and ca.key. One that is there stays as it is."""
    certificate_path, key_path = directory / CA_CERTIFICATE, directory / CA_KEY
    if certificate_path.exists() or key_path.exists():
        raise PKIError(
            f"{directory} has a certificate authority already; name another directory, or remove it"
        )
    directory.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "KVSP development CA")])
    start = (now or datetime.datetime.now(datetime.UTC)) - _CLOCK_SKEW
    certificate = (
        _builder(name, name, key.public_key(), start, _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _write(certificate, key, certificate_path, key_path)


def issue(
    directory: Path,
    *,
    uri: str,
    name: str | None = None,
    hosts: Sequence[str] = (),
    days: int = _LEAF_DAYS,
    now: datetime.datetime | None = None,
) -> Issued:
    """Issue a role's certificate from the authority in a directory: NAME.pem and NAME.key beside it.

    `uri` is the principal; the host of an ``https`` URI becomes a DNS or IP name, and `hosts` adds more.
    `name` is the files' name, by default host, port and path. A certificate of that name is replaced.
    """
    check_principal(uri)
    for host in hosts:
        check_host(host)
    parts = urlsplit(uri)
    assert parts.hostname is not None
    try:
        ca = x509.load_pem_x509_certificate((directory / CA_CERTIFICATE).read_bytes())
        ca_key = serialization.load_pem_private_key((directory / CA_KEY).read_bytes(), None)
    except FileNotFoundError:
        raise PKIError(
            f"{directory} has no certificate authority; make one with: kvsp pki init {directory}"
        ) from None
    except ValueError:
        raise PKIError(
            f"{directory}/{CA_CERTIFICATE} or {CA_KEY} is not a PEM file; make them anew"
        ) from None
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise PKIError(f"{directory}/{CA_KEY} is not an elliptic-curve key; make the authority anew")
    key = ec.generate_private_key(ec.SECP256R1())
    all_hosts = ([parts.hostname] if parts.scheme == "https" else []) + list(hosts)
    names = [x509.UniformResourceIdentifier(uri), *map(_host_name, dict.fromkeys(all_hosts))]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, (name or parts.hostname)[:64])])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    start = (now or datetime.datetime.now(datetime.UTC)) - _CLOCK_SKEW
    certificate = (
        _builder(subject, ca.subject, key.public_key(), start, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    port = [str(parts.port)] if parts.port else []
    stem = name or "-".join([parts.hostname, *port, *filter(None, parts.path.split("/"))])
    check_name(stem)
    return _write(certificate, key, directory / f"{stem}.pem", directory / f"{stem}.key")


def check_principal(uri: str) -> None:
    """Raise `PKIError` where this can be no principal: neither an ``https`` base URI nor a SPIFFE ID."""
    expected = "expected an https base URI, such as https://h1.example/kvsp/, or a SPIFFE ID"
    try:
        parts = urlsplit(uri)
        _ = parts.port, x509.UniformResourceIdentifier(uri)  # which raise where there can be none
    except ValueError:
        raise PKIError(expected) from None
    if parts.scheme == "https":
        try:
            parse_base_uri(uri)
        except KVSPError as error:
            raise PKIError(str(error)) from None
    elif parts.scheme != "spiffe" or not parts.hostname:
        raise PKIError(expected)


def check_name(name: str) -> None:
    """Raise `PKIError` where this cannot be the name of the files."""
    if name != Path(name).name or not name:
        raise PKIError(f"{name!r} cannot be a file name; give --name a plain word")


def check_host(host: str) -> None:
    """Raise `PKIError` where this is neither an IP address nor a DNS name."""
    if _HOST.fullmatch(host):
        return
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise PKIError("expected a DNS name or an IP address") from None


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    start: datetime.datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=days))
    )


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(
    certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, certificate_path: Path, key_path: Path
) -> Issued:
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    with replacing(key_path, secret, mode=0o600), replacing(certificate_path, public):
        pass  # both are written before either takes the place of what was there
    return Issued(certificate_path, key_path)
