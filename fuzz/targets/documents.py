"""Configuration and policy files: any octets are read or refused in one line that names the file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvsp_services.config import read_config
from kvsp_services.documents import DocumentError
from kvsp_services.policy import read_policy

SEEDS = (
    b'[principals]\n"https://h1.example/kvsp/" = ["holder"]\n"spiffe://example/ops" = ["operator"]\n'
    b'[scopes.6d1c6481cd428737da312c089db3832a]\nread = ["https://h1.example/kvsp/"]\nshared = true\n'
    b'[delegates]\n"spiffe://example/ops" = ["https://h2.example/"]\n',
    b'authorities_file = "ca.pem"\npolicy_file = "policy.toml"\nloop = "trio"\n[monitoring]\nport = 1\n'
    b'[index]\nbase_uri = "https://127.0.0.1:8441/kvsp/"\ncertificate_file = "a"\nkey_file = "b"\n',
    b'[holder]\nbase_uri = "https://h/"\n[[holder.tiers]]\ntier = "host"\ncapacity_bytes = 1\n',
    b"a = 1\n[a.b]\n",
)

_FILE = Path(tempfile.gettempdir()) / f"kvsp-fuzz-documents-{os.getpid()}.toml"


def one_input(data: bytes) -> None:
    """Read octets as a policy and as a configuration."""
    _FILE.write_bytes(data)
    try:
        for read in (read_policy, read_config):
            said = ""
            try:
                read(_FILE)
            except DocumentError as error:
                said = str(error)
            assert "\n" not in said
            assert not said or _FILE.name in said
    finally:
        _FILE.unlink()
