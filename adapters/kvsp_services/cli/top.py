"""``kvsp top``: instances, sessions and the index, as they change."""

from __future__ import annotations

import time
from typing import Final

import click
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvsp_client.errors import ClientError
from kvsp_core.ext_messages import IndexInfo, InstanceListing, LeaseListing, SessionListing
from kvsp_core.resources import DescribeIndex, ListInstances, ListLeases, ListSessions
from kvsp_h2 import Credentials
from kvsp_services.asking import ask_for
from kvsp_services.cli.connection import with_credentials
from kvsp_services.cli.operator import INSTANCE_HEADS, instance_row
from kvsp_services.cli.options import controller_option, holders_option, index_option

__all__ = ["table", "top"]

_WIDE: Final = 1000
"""Columns of what goes into a file or a pipe: nothing is folded there."""


def table(title: str, heads: tuple[str, ...], rows: list[tuple[object, ...]]) -> Table:
    """Return a table that folds what is too wide for it. Brackets, as of an address, stay as they are."""
    made = Table(title=escape(title), title_justify="left", expand=False)
    for head in heads:
        made.add_column(head, overflow="fold")
    for row in rows:
        made.add_row(*(escape(str(cell)) for cell in row))
    return made


def _view(
    credentials: Credentials, controller: str, index_uris: tuple[str, ...], holders: tuple[str, ...]
) -> tuple[Group, bool]:
    """Return what is shown now, and whether all answered; of a role that did not it is said in its place."""
    parts: list[Table | Text] = []
    try:
        found = ask_for(InstanceListing, credentials, controller, ListInstances()).instances
        parts.append(table("Instances", INSTANCE_HEADS, [instance_row(info) for info in found]))
        listed = ask_for(SessionListing, credentials, controller, ListSessions()).sessions
        states: dict[str, int] = {}
        for session in listed:
            states[session.state] = states.get(session.state, 0) + 1
        parts.append(table("Sessions", ("state", "sessions"), sorted(states.items())))
    except ClientError as error:
        parts.append(Text(str(error), style="red"))
    for uri in index_uris:
        try:
            info = ask_for(IndexInfo, credentials, uri, DescribeIndex())
            rows: list[tuple[object, ...]] = [(holder.holder, holder.records) for holder in info.holders]
            title = f"Index{f' at {uri}' if len(index_uris) > 1 else ''}: {info.size_bytes / 1e6:.1f} MB"
            parts.append(table(title, ("holder", "records"), rows))
        except ClientError as error:
            parts.append(Text(str(error), style="red"))
    for holder_uri in holders:
        try:
            leases = ask_for(LeaseListing, credentials, holder_uri, ListLeases())
            rows = [(lease.client, lease.blocks, lease.size_bytes, lease.ttl_ms) for lease in leases.leases]
            title = f"Leases at {holder_uri}: {leases.leased_share * 100:.0f} %"
            parts.append(table(title, ("client", "blocks", "octets", "ms left"), rows))
        except ClientError as error:
            parts.append(Text(str(error), style="red"))
    return Group(*parts), not any(isinstance(part, Text) for part in parts)


@click.command()
@controller_option
@index_option(required=False)
@holders_option
@click.option("--interval", type=click.FloatRange(min=0.2), default=2.0, show_default=True, help="Seconds.")
@click.option(
    "--once",
    is_flag=True,
    help="Show it once, and end, as into a file or a pipe; exit 1 where a role did not answer.",
)
@with_credentials
def top(
    credentials: Credentials,
    controller: str,
    index_uris: tuple[str, ...],
    holders: tuple[str, ...],
    interval: float,
    once: bool,
) -> int:
    """Show a cluster as it changes, until Ctrl-C."""
    console = Console()
    if not console.is_terminal:
        once, console.width = True, _WIDE
    if once:
        view, answered = _view(credentials, controller, index_uris, holders)
        console.print(view)
        return 0 if answered else 1
    with Live(_view(credentials, controller, index_uris, holders)[0], console=console, screen=True) as live:
        while True:
            time.sleep(interval)
            live.update(_view(credentials, controller, index_uris, holders)[0])
