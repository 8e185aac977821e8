"""Certificates for tests: an authority, a server for localhost, a client, and some that are not in order."""

from __future__ import annotations

import datetime
from pathlib import Path

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

    def credentials(
        self, issued: Issued, *, authority: Path | None = None, require_client_certificate: bool = True
    ) -> Credentials:
        return Credentials(
            issued.certificate,
            issued.key,
            authority or self.authority.certificate,
            require_client_certificate=require_client_certificate,
        )
