"""Leases are renewed while they are held and given back in the end, however it comes."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from kvsp_client import Client, ClientClosed, Refused
from kvsp_client.testing import Served
from tests.adapters.client.scripted import ScriptedHolder, content, keys_of, prefix_of
from tests.adapters.client.worlds import KINDS, found, play

KEEP, RENEW, RELEASE = "POST leases", "PUT leases", "DELETE leases"


async def until(holder: ScriptedHolder, start: str, count: int) -> None:
    """Wait until a holder was asked something so often."""
    assert await anyio.to_thread.run_sync(lambda: holder.wait_for(lambda: holder.count(start) >= count))


@pytest.mark.requirement("LE-2")
def test_a_lease_renews_itself_and_is_given_back(kind: str, served: Served) -> None:
    holder, keys = ScriptedHolder(served, 1), keys_of(served, f"lease {kind}", 2)

    async def scenario(client: Client) -> None:
        async with client.lease(holder.uri, keys, ttl_ms=3000) as lease:
            assert lease.held
            await until(holder, RENEW, 2)
            assert lease.held
            assert holder.count(RELEASE) == 0
        await until(holder, RELEASE, 1)
        assert not lease.held
        assert holder.count(KEEP) == 1
        stats = client.stats()
        assert (stats.leases_granted, stats.leases_lost) == (1, 0)

    play(kind, served, scenario)


def test_a_lease_is_given_back_where_the_holding_task_is_cancelled(kind: str, served: Served) -> None:
    holder, keys = ScriptedHolder(served, 1), keys_of(served, f"cancelled {kind}", 2)
    holder.lease_ttl_ms = 60_000

    async def scenario(client: Client) -> None:
        with anyio.CancelScope() as scope:
            async with client.lease(holder.uri, keys):
                scope.cancel()
                await anyio.sleep_forever()
        await until(holder, RELEASE, 1)

    play(kind, served, scenario)


def test_a_lease_that_is_given_up_at_once_harms_nobody(kind: str, served: Served) -> None:
    """The client's other tasks go on."""
    holder, keys = ScriptedHolder(served, 1), keys_of(served, f"at once {kind}", 2)

    async def scenario(client: Client) -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with client.lease(holder.uri, keys):
                raise AssertionError("this is cancelled before")
        await anyio.lowlevel.checkpoint()
        assert len(await client.lookup(keys)) == 0

    play(kind, served, scenario)


def test_a_lease_that_was_not_asked_for_when_its_client_closes_is_not_granted(
    kind: str, served: Served
) -> None:
    holder, keys = ScriptedHolder(served, 1), keys_of(served, f"closing {kind}", 1)
    entered: list[bool] = []

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            client = Client(served.credentials, index=served.index_uri)
            await client.__aenter__()

            async def hold() -> None:
                with pytest.raises(ClientClosed):
                    async with client.lease(holder.uri, keys):
                        entered.append(True)

            tasks.start_soon(hold)
            await anyio.lowlevel.checkpoint()
            await client.__aexit__(None, None, None)

    backend, options = KINDS[kind]
    anyio.run(main, backend=backend, backend_options=options)
    assert not entered


def test_a_lease_that_is_granted_too_late_is_given_back(kind: str, served: Served) -> None:
    holder, keys = ScriptedHolder(served, 1), keys_of(served, f"late {kind}", 2)
    holder.lease_ttl_ms, holder.hold_leases = 60_000, True

    async def scenario(client: Client) -> None:
        async with anyio.create_task_group() as tasks:

            async def hold() -> None:
                async with client.lease(holder.uri, keys):
                    raise AssertionError("it was not granted")

            tasks.start_soon(hold)
            await until(holder, KEEP, 1)
            tasks.cancel_scope.cancel()
        assert holder.count(RELEASE) == 0
        await anyio.to_thread.run_sync(holder.go_on)
        await until(holder, RELEASE, 1)

    play(kind, served, scenario)


def test_a_refused_lease_is_an_error_and_a_lost_one_shows(kind: str, served: Served) -> None:
    holder, keys = ScriptedHolder(served, 1), keys_of(served, f"lost {kind}", 2)

    async def scenario(client: Client) -> None:
        holder.grant = False
        with pytest.raises(Refused, match="404"):
            async with client.lease(holder.uri, keys):
                pass
        holder.grant = True
        async with client.lease(holder.uri, keys, ttl_ms=3000) as lease:
            holder.grant = False
            await until(holder, KEEP, 3)  # a renewal was refused, and then a new lease
            while not client.stats().leases_lost:
                await anyio.sleep(0.01)
            assert not lease.held
        assert holder.count(RELEASE) == 0, "there is nothing to give back"
        stats = client.stats()
        assert (stats.leases_granted, stats.leases_refused, stats.leases_lost) == (1, 1, 1)

    play(kind, served, scenario)


@pytest.mark.requirement("LE-1")
def test_a_prefix_is_leased_at_each_of_its_holders(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"prefix {kind}", 3), content(3)
    first, second = ScriptedHolder(served, 1), ScriptedHolder(served, 2)
    first.lease_ttl_ms, second.grant = 60_000, False

    async def scenario(client: Client) -> None:
        prefix = prefix_of(keys, (first.uri, stored), (second.uri, stored))
        async with client.lease_prefix(prefix, ttl_ms=60_000) as lease:
            assert lease.held
            assert lease.holders == (first.uri,)
        await until(first, RELEASE, 1)
        assert second.count(RELEASE) == 0

    play(kind, served, scenario)


def test_a_holder_that_does_not_answer_keeps_nobody_from_asking_the_next(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"together {kind}", 1), content(1)
    slow, other = ScriptedHolder(served, 1), ScriptedHolder(served, 2)
    slow.lease_ttl_ms = other.lease_ttl_ms = 60_000
    slow.hold_leases = True

    async def scenario(client: Client) -> None:
        prefix = prefix_of(keys, (slow.uri, stored), (other.uri, stored))
        async with anyio.create_task_group() as tasks:

            async def go_on() -> None:
                await until(slow, KEEP, 1)
                await until(other, KEEP, 1)
                await anyio.to_thread.run_sync(slow.go_on)

            tasks.start_soon(go_on)
            async with client.lease_prefix(prefix, ttl_ms=60_000) as lease:
                assert lease.holders == (slow.uri, other.uri)

    play(kind, served, scenario)


@pytest.mark.requirement("LE-2")
def test_a_real_holder_grants_and_releases(kind: str, served: Served) -> None:
    keys, stored = keys_of(served, f"real {kind}", 2), content(2)

    async def scenario(client: Client) -> None:
        await client.store(served.cache_uris[0], keys, stored.sections)
        prefix = await found(client, keys)
        async with client.lease_prefix(prefix, ttl_ms=20_000) as lease:
            assert lease.held
        with pytest.raises(Refused):
            async with client.lease(served.cache_uris[0], keys_of(served, "not held", 1)):
                pass

    play(kind, served, scenario)
