"""Certificates that are renewed while a client runs."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from kvsp_client import BlockingClient, Client, Unavailable
from kvsp_client.testing import ENGINE, Served
from kvsp_h2 import Credentials
from kvsp_services.pki import issue
from tests.adapters.client.scripted import keys_of
from tests.adapters.client.worlds import KINDS

LONG_AGO = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=30)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Name a certificate that no other test has."""
    return "".join(letter for letter in request.node.name if letter.isalnum())


def expired(served: Served, name: str) -> Credentials:
    issued = issue(served.directory, uri=ENGINE, name=name, days=1, now=LONG_AGO)
    return served.credentials_of(issued.certificate, issued.key)


def renew(served: Served, name: str) -> None:
    issue(served.directory, uri=ENGINE, name=name)


def test_a_renewed_certificate_is_used_for_new_connections(kind: str, served: Served, name: str) -> None:
    keys = keys_of(served, name, 1)

    async def main() -> None:
        async with Client(expired(served, name), index=served.index_uri) as client:
            with pytest.raises(Unavailable, match="our certificate has expired"):
                await client.lookup(keys)
            renew(served, name)
            with anyio.fail_after(60):
                while not await succeeds(client):
                    await anyio.sleep(0.01)

    async def succeeds(client: Client) -> bool:
        try:
            return len(await client.lookup(keys)) == 0
        except Unavailable:
            return False

    backend, options = KINDS[kind]
    anyio.run(main, backend=backend, backend_options=options)


def test_an_engine_outlives_its_certificate(served: Served, name: str) -> None:
    keys = keys_of(served, name, 1)
    with BlockingClient(expired(served, name), index=served.index_uri) as client:
        with pytest.raises(Unavailable):
            client.lookup(keys)
        renew(served, name)
        assert eventually(lambda: len(client.lookup(keys)) == 0)


def eventually(succeeds: Callable[[], bool]) -> bool:
    """Try until it does; the client waits between attempts to connect."""
    for _ in range(1000):
        try:
            return succeeds()
        except Unavailable:
            pass
    return False


def test_files_that_cannot_be_used_yet_leave_those_of_before(
    served: Served, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate and its key are two files, which somebody replaces one after the other."""
    keys = keys_of(served, name, 1)
    first, second = (issue(served.directory, uri=ENGINE, name=name + each) for each in ("1", "2"))
    certificate, key = tmp_path / "engine.pem", tmp_path / "engine.key"
    certificate.write_bytes(first.certificate.read_bytes())
    key.write_bytes(first.key.read_bytes())
    caplog.set_level(logging.WARNING, "kvsp.client")
    with BlockingClient(served.credentials_of(certificate, key), index=served.index_uri) as client:
        assert len(client.lookup(keys)) == 0
        for _ in range(2):
            certificate.write_bytes(second.certificate.read_bytes())
            served.cut_connections(served.index_uri)
            assert eventually(lambda: len(client.lookup(keys)) == 0)
        said = [record.getMessage() for record in caplog.records if record.name == "kvsp.client"]
        assert len(said) == 1
        assert said[0].endswith("engine.key: they do not belong together")
        key.unlink()
        served.cut_connections(served.index_uri)
        assert eventually(lambda: len(client.lookup(keys)) == 0)
        key.write_bytes(second.key.read_bytes())
        served.cut_connections(served.index_uri)
        assert eventually(lambda: len(client.lookup(keys)) == 0)
