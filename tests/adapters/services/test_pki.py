"""The development certificate authority: names, key files, and refusals in one line."""

from __future__ import annotations

import datetime
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store

from kvsp_services.pki import PKIError, init_ca, issue

URI = "https://h1.example:8443/kvsp/"


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


@pytest.mark.requirement("HT-2")
def test_a_role_certificate_carries_its_principal_and_its_address(tmp_path: Path) -> None:
    authority = init_ca(tmp_path)
    issued = issue(tmp_path, uri=URI, hosts=["127.0.0.1", "localhost"])
    certificate = load(issued.certificate)
    assert issued.certificate.name == "h1.example-8443-kvsp.pem"
    assert names(certificate).get_values_for_type(x509.UniformResourceIdentifier) == [URI]
    assert names(certificate).get_values_for_type(x509.DNSName) == ["h1.example", "localhost"]
    assert [str(a) for a in names(certificate).get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    store = Store([load(authority.certificate)])
    PolicyBuilder().store(store).build_client_verifier().verify(certificate, [])


def test_a_spiffe_id_is_a_principal_without_an_address(tmp_path: Path) -> None:
    init_ca(tmp_path)
    issued = issue(tmp_path, uri="spiffe://kvsp.example/operator", name="operator")
    found = names(load(issued.certificate))
    assert found.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://kvsp.example/operator"]
    assert found.get_values_for_type(x509.DNSName) == []


@pytest.mark.requirement("SE-5")
def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    for made in (init_ca(tmp_path), issue(tmp_path, uri=URI), issue(tmp_path, uri=URI)):
        assert stat.S_IMODE(made.key.stat().st_mode) == 0o600


def test_an_authority_is_never_overwritten(tmp_path: Path) -> None:
    before = init_ca(tmp_path).certificate.read_bytes()
    with pytest.raises(PKIError, match="already"):
        init_ca(tmp_path)
    assert (tmp_path / "ca.pem").read_bytes() == before


def test_a_certificate_is_valid_for_the_days_asked(tmp_path: Path) -> None:
    init_ca(tmp_path)
    then = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    certificate = load(issue(tmp_path, uri=URI, days=1, now=then).certificate)
    assert certificate.not_valid_after_utc < then + datetime.timedelta(days=1)


@pytest.mark.parametrize(
    ("uri", "name", "says"),
    [
        ("http://h1.example/", None, "expected an https base URI"),
        ("https:///kvsp/", None, "expected https://host/"),
        ("https://h1.example/kvsp", None, "a base URI ends in '/'"),
        (URI, "../escape", "cannot be a file name"),
    ],
)
def test_a_mistake_is_one_plain_line(tmp_path: Path, uri: str, name: str | None, says: str) -> None:
    init_ca(tmp_path)
    with pytest.raises(PKIError, match=says):
        issue(tmp_path, uri=uri, name=name)


def test_without_an_authority_the_command_that_makes_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(PKIError, match="kvsp pki init"):
        issue(tmp_path, uri=URI)
    (tmp_path / "ca.pem").write_text("nonsense")
    (tmp_path / "ca.key").write_text("nonsense")
    with pytest.raises(PKIError, match="not a PEM file"):
        issue(tmp_path, uri=URI)
