"""What every command that asks a role has in common: certificates, and tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import click

from kvsp_core.bodies import encode
from kvsp_core.errors import KVSPError
from kvsp_h2 import Credentials
from kvsp_services.cli.options import FILE

__all__ = ["as_json_option", "show_json", "show_table", "with_credentials"]

F = TypeVar("F", bound=Callable[..., Any])


def with_credentials(command: F) -> F:
    """Give a command the options for its certificate; it gets them as `credentials`."""

    def called(
        *, certificate: Path, private_key: Path | None, authorities: Path | None, **others: Any
    ) -> Any:
        key = _given_or_beside("--private-key", private_key, certificate.with_suffix(".key"))
        trusted = _given_or_beside("--authorities", authorities, certificate.with_name("ca.pem"))
        return command(credentials=Credentials(certificate, key, trusted), **others)

    options = (
        click.option(
            "--certificate",
            type=FILE,
            envvar="KVSP_CERTIFICATE",
            show_envvar=True,
            required=True,
            help="Who asks: its certificate, a PEM file.",
        ),
        click.option(
            "--private-key",
            type=FILE,
            envvar="KVSP_PRIVATE_KEY",
            show_envvar=True,
            help="Its key, a PEM file. Default: beside the certificate, with its name and .key.",
        ),
        click.option(
            "--authorities",
            type=FILE,
            envvar="KVSP_AUTHORITIES",
            show_envvar=True,
            help="Whom to trust, a PEM file. Default: ca.pem beside the certificate.",
        ),
    )
    for option in reversed(options):  # the last one given is the first one listed
        called = option(called)
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    return called  # type: ignore[return-value]


def _given_or_beside(option: str, given: Path | None, beside: Path) -> Path:
    """Return the file of an option, by default the one beside the certificate."""
    if given is None and not beside.is_file():
        raise KVSPError(f"{beside}: there is no such file beside the certificate; name yours with {option}")
    return given or beside


as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def show_json(message: object) -> None:
    """Print a record or message as JSON, readable."""
    document = json.loads(encode(message)) if attrs.has(type(message)) else message
    click.echo(json.dumps(document, indent=2))


def show_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows in columns that are as wide as they need; numbers to the right."""
    lines = [[str(cell) for cell in row] for row in rows]
    widths = [max([len(head), *(len(line[n]) for line in lines)]) for n, head in enumerate(heads)]
    right = [bool(lines) and all(_is_number(line[n]) for line in lines) for n in range(len(heads))]
    for line in (list(heads), *lines):
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)]
        click.echo("  ".join(cells).rstrip())


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).replace("-", "", 1).isdigit() or text == "-"
