"""``kvsp status``, ``sessions``, ``drain``, ``wake``, ``index``, ``leases`` and ``reshard``: what operators
look at and do (decision W33).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import BinaryIO

import click

from kvsp_client.files import read_scope
from kvsp_core.bodies import decode, encode
from kvsp_core.errors import KVSPError
from kvsp_core.ext_messages import (
    IndexInfo,
    InstanceInfo,
    InstanceListing,
    LeaseListing,
    SessionListing,
    ShardMapInfo,
    SplitRequest,
)
from kvsp_core.identity import component_id
from kvsp_core.messages import StateChange, StatusAnswer
from kvsp_core.resources import (
    ChangeInstanceState,
    DescribeIndex,
    EndShardMap,
    GetShardMap,
    ListInstances,
    ListLeases,
    ListSessions,
    SplitContext,
)
from kvsp_h2 import Credentials
from kvsp_services.asking import Asker, ask_for, expect_success
from kvsp_services.cli.connection import as_json_option, show_json, show_table, with_credentials
from kvsp_services.cli.options import (
    BASE_URI,
    MAP_NAME,
    controller_option,
    counted,
    descriptor_option,
    holder_option,
    index_option,
    scope_key_option,
    tokens_option,
)
from kvsp_services.cli.values import read_descriptor, read_keys

__all__ = ["drain", "index", "leases", "reshard", "sessions", "status", "wake"]


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
@controller_option
@as_json_option
@with_credentials
def status(credentials: Credentials, controller: str, as_json: bool) -> None:
    """Show the instances of a controller."""
    listing = ask_for(InstanceListing, credentials, controller, ListInstances())
    if as_json:
        show_json(listing)
    else:
        show_table(INSTANCE_HEADS, map(instance_row, listing.instances))


@click.command(short_help="Show the sessions of a controller.")
@controller_option
@as_json_option
@with_credentials
def sessions(credentials: Credentials, controller: str, as_json: bool) -> None:
    """Show the sessions of a controller, and how many tokens of each output it has recorded."""
    listing = ask_for(SessionListing, credentials, controller, ListSessions())
    if as_json:
        show_json(listing)
        return
    rows = [(s.session, s.state, s.epoch, s.instance or "-", s.output_offset) for s in listing.sessions]
    show_table(("session", "state", "epoch", "instance", "recorded"), rows)


def _change(credentials: Credentials, controller: str, instance: str, state: str, as_json: bool) -> None:
    operation = ChangeInstanceState(component_id(instance))
    answer = ask_for(StatusAnswer, credentials, controller, operation, StateChange(state=state))
    if as_json:
        show_json(answer)
    else:
        click.echo(f"{instance}: {answer.state}")


@click.command(short_help="Let an instance finish its sessions and fall asleep.")
@click.argument("instance", type=BASE_URI, metavar="INSTANCE")
@controller_option
@as_json_option
@with_credentials
def drain(credentials: Credentials, controller: str, instance: str, as_json: bool) -> None:
    """Let an INSTANCE (its base URI) finish its sessions and fall asleep."""
    _change(credentials, controller, instance, "draining", as_json)


@click.command(short_help="Wake a sleeping instance, or end its draining.")
@click.argument("instance", type=BASE_URI, metavar="INSTANCE")
@controller_option
@as_json_option
@with_credentials
def wake(credentials: Credentials, controller: str, instance: str, as_json: bool) -> None:
    """Wake a sleeping INSTANCE (its base URI), or end its draining."""
    _change(credentials, controller, instance, "active", as_json)


@click.command(short_help="Show what an index holds.")
@index_option(required=True)
@as_json_option
@with_credentials
def index(credentials: Credentials, index_uris: tuple[str, ...], as_json: bool) -> None:
    """Show what an index holds; of one in several parts, what each does.

    With --json that is an object, or an array of one for each part.
    """
    infos = [ask_for(IndexInfo, credentials, uri, DescribeIndex()) for uri in index_uris]
    if as_json:
        shown = [json.loads(encode(info)) for info in infos]
        show_json(shown if len(shown) > 1 else shown[0])
        return
    for uri, info in zip(index_uris, infos, strict=True):
        if len(infos) > 1:
            click.echo(uri)
        show_table(("holder", "records"), [(holder.holder, holder.records) for holder in info.holders])
        click.echo(f"{counted(info.records, 'record')} in {info.size_bytes / 1e6:.1f} MB")


@click.command()
@holder_option
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


_WAIT_S = 120.0


@click.command(short_help="Split a context over instances, or split it anew.")
@click.argument("map_id", type=MAP_NAME, metavar="MAP")
@click.argument("instances", nargs=-1, type=BASE_URI, metavar="[INSTANCES]...")
@controller_option
@descriptor_option(required=False)
@scope_key_option(required=False)
@tokens_option(required=False)
@click.option("--end", is_flag=True, help="Have the members let go of the context.")
@as_json_option
@with_credentials
def reshard(
    credentials: Credentials,
    map_id: str,
    instances: tuple[str, ...],
    controller: str,
    descriptor: BinaryIO | None,
    scope_key_file: Path | None,
    tokens: BinaryIO | None,
    end: bool,
    as_json: bool,
) -> None:
    """Split a context over INSTANCES (their base URIs), or split it anew, and wait until it is done.

    MAP names the split; without instances the split of that name is shown. What an instance keeps of the
    context does not move. A change that a member refuses is given up: all stays as it was, and the exit
    status is 1.
    """
    if end and instances:
        raise click.UsageError("--end goes without instances")
    with Asker(credentials) as asker:
        if end:
            expect_success(controller, asker.ask(controller, EndShardMap(map_id)))
        elif instances:
            if descriptor is None or scope_key_file is None or tokens is None:
                raise click.UsageError(
                    "a context is told by --descriptor, --scope-key-file and --tokens; give all three"
                )
            request = _split_request(descriptor, scope_key_file, tokens, instances)
            asker.ask_for(ShardMapInfo, controller, SplitContext(map_id), request)
        info = _settled(asker, controller, map_id, ended=end)
    if info is None:
        click.echo(f"{map_id}: ended")
    elif as_json:
        show_json(info)
    else:
        rows = [(*shard.tokens, shard.instance) for shard in info.shards]
        show_table(("first", "end", "instance"), rows)
        click.echo(f"version {info.version}")
    if info is not None and (end or (info.planned > info.version and instances)):
        raise KVSPError(f"{map_id}: a member refused the change; all is as it was")


def _split_request(
    descriptor: BinaryIO, scope_key_file: Path, tokens: BinaryIO, instances: tuple[str, ...]
) -> SplitRequest:
    model, scope = read_descriptor(descriptor), read_scope(scope_key_file)
    keys, context = read_keys(scope, model, tokens)
    return SplitRequest(
        compat_id=model.compat_id,
        scope_id=scope.scope_id,
        block_keys=tuple(key.hex() for key in keys),
        block_tokens=model.block_tokens,
        token_count=len(context),
        instances=instances,
    )


def _settled(asker: Asker, controller: str, map_id: str, *, ended: bool) -> ShardMapInfo | None:
    """Return the map once no change is under way; None where it has ended, as was asked for."""
    until = time.monotonic() + _WAIT_S
    while True:
        answer = asker.ask(controller, GetShardMap(map_id))
        if ended and answer.response.status == 404:
            return None
        expect_success(controller, answer)
        info = decode(ShardMapInfo, answer.body)
        if info.state == "stable":
            return info
        if time.monotonic() > until:
            raise KVSPError(f"{map_id}: still {info.state} after {_WAIT_S:.0f} s; look again later")
        time.sleep(0.1)
