"""``kvsp pki``: a development authority and the certificates of roles."""

from __future__ import annotations

from pathlib import Path

import click

from kvsp_services.cli.options import Checked
from kvsp_services.pki import check_host, check_name, check_principal, init_ca
from kvsp_services.pki import issue as issue_certificate

__all__ = ["pki"]


class _Principal(Checked):
    name = "URI"

    def check(self, value: str) -> None:
        check_principal(value)


class _Host(Checked):
    name = "HOST"

    def check(self, value: str) -> None:
        check_host(value)


class _Name(Checked):
    name = "NAME"

    def check(self, value: str) -> None:
        check_name(value)


_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.group()
def pki() -> None:
    """Make certificates for trying things out. A deployment uses those of its own authority."""


@pki.command(short_help="Make an authority in a directory.")
@click.argument("directory", type=_DIRECTORY)
def init(directory: Path) -> None:
    """Make an authority in DIRECTORY: ca.pem, which everybody trusts, and ca.key, which nobody else gets."""
    click.echo(init_ca(directory).certificate)


@pki.command(short_help="Issue a certificate from an authority.")
@click.argument("directory", type=_DIRECTORY)
@click.option(
    "--uri",
    required=True,
    type=_Principal(),
    help="The principal: a role's base URI, or a client's spiffe:// ID.",
)
@click.option("--name", type=_Name(), help="How the files are called; by default after the URI.")
@click.option(
    "--days", type=click.IntRange(1, 36_500), default=90, show_default=True, help="How long it is valid."
)
@click.option(
    "--host", "hosts", type=_Host(), multiple=True, help="A further DNS name or IP address of the server."
)
def issue(directory: Path, uri: str, name: str | None, days: int, hosts: tuple[str, ...]) -> None:
    """Issue a certificate from the authority in DIRECTORY; prints the paths of certificate and key."""
    issued = issue_certificate(directory, uri=uri, name=name, hosts=hosts, days=days)
    click.echo(f"{issued.certificate}\n{issued.key}")
