"""``kvsp status``, ``sessions``, ``drain``, ``wake``, ``index`` and ``leases``: what operators look at and do
(decision W33).
"""

from __future__ import annotations

import click

from kvsp_core.ext_messages import IndexInfo, InstanceInfo, InstanceListing, LeaseListing, SessionListing
from kvsp_core.identity import component_id
from kvsp_core.messages import StateChange, StatusAnswer
from kvsp_core.resources import ChangeInstanceState, DescribeIndex, ListInstances, ListLeases, ListSessions
from kvsp_h2 import Credentials
from kvsp_services.asking import ask_for
from kvsp_services.cli.connection import as_json_option, show_json, show_table, with_credentials

__all__ = ["drain", "index", "leases", "sessions", "status", "wake"]

_controller = click.option("--controller", envvar="KVSP_CONTROLLER", required=True, help="Its base URI.")


def instance_row(info: InstanceInfo) -> tuple[object, ...]:
    """Return what is shown of an instance."""
    state = info.state if info.wanted_state in (None, info.state) else f"{info.state} -> {info.wanted_state}"
    report = info.status
    if report is None:
        return (info.instance, state, info.epoch, info.sessions, "-", "-", "-")
    filled = f"{report.kv_utilization * 100:.0f}"
    return (info.instance, state, info.epoch, info.sessions, report.running, report.queued, filled)


INSTANCE_HEADS = ("instance", "state", "epoch", "sessions", "running", "queued", "cache %")


@click.command()
@_controller
@as_json_option
@with_credentials
def status(credentials: Credentials, controller: str, as_json: bool) -> None:
    """Show the instances of a controller."""
    listing = ask_for(InstanceListing, credentials, controller, ListInstances())
    if as_json:
        show_json(listing)
    else:
        show_table(INSTANCE_HEADS, map(instance_row, listing.instances))


@click.command()
@_controller
@as_json_option
@with_credentials
def sessions(credentials: Credentials, controller: str, as_json: bool) -> None:
    """Show the sessions of a controller."""
    listing = ask_for(SessionListing, credentials, controller, ListSessions())
    if as_json:
        show_json(listing)
        return
    rows = [(s.session, s.state, s.epoch, s.instance or "-", s.output_offset) for s in listing.sessions]
    show_table(("session", "state", "epoch", "instance", "tokens"), rows)


def _change(credentials: Credentials, controller: str, instance: str, state: str, as_json: bool) -> None:
    operation = ChangeInstanceState(component_id(instance))
    answer = ask_for(StatusAnswer, credentials, controller, operation, StateChange(state=state))
    if as_json:
        show_json(answer)
    else:
        click.echo(f"{instance}: {answer.state}")


@click.command()
@click.argument("instance")
@_controller
@as_json_option
@with_credentials
def drain(credentials: Credentials, controller: str, instance: str, as_json: bool) -> None:
    """Let an INSTANCE (its base URI) finish its sessions and fall asleep."""
    _change(credentials, controller, instance, "draining", as_json)


@click.command()
@click.argument("instance")
@_controller
@as_json_option
@with_credentials
def wake(credentials: Credentials, controller: str, instance: str, as_json: bool) -> None:
    """Wake a sleeping INSTANCE (its base URI), or end its draining."""
    _change(credentials, controller, instance, "active", as_json)


@click.command()
@click.option("--index", "index_uri", envvar="KVSP_INDEX", required=True, help="Its base URI.")
@as_json_option
@with_credentials
def index(credentials: Credentials, index_uri: str, as_json: bool) -> None:
    """Show what an index holds."""
    info = ask_for(IndexInfo, credentials, index_uri, DescribeIndex())
    if as_json:
        show_json(info)
        return
    show_table(("holder", "records"), [(holder.holder, holder.records) for holder in info.holders])
    click.echo(f"{info.records} records in {info.size_bytes / 1e6:.1f} MB")


@click.command()
@click.option("--holder", envvar="KVSP_HOLDER", required=True, help="Its base URI.")
@as_json_option
@with_credentials
def leases(credentials: Credentials, holder: str, as_json: bool) -> None:
    """Show the leases at a holder."""
    listing = ask_for(LeaseListing, credentials, holder, ListLeases())
    if as_json:
        show_json(listing)
        return
    rows = [(n.client, n.blocks, n.size_bytes, n.ttl_ms) for n in listing.leases]
    show_table(("client", "blocks", "octets", "ms left"), rows)
    click.echo(f"{listing.leased_share * 100:.0f} % of the holder's octets are leased")
