"""A role in somebody's running loop, asyncio's or trio's: `serve_role`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from kvsp_core.errors import KVSPError
from kvsp_core.roles.role import Role
from kvsp_h2 import Credentials, WireLimits
from kvsp_services.driver import Committer, Driver
from kvsp_services.loops import open_loop
from kvsp_services.pki import check_certificate
from kvsp_services.stores.blocks import BlockTier
from kvsp_services.stores.durable import NoStore
from kvsp_services.wire import ServedRole, ServicePeers

__all__ = ["serve_role"]


@asynccontextmanager
async def serve_role(
    role: Role,
    credentials: Credentials,
    *,
    host: str | None = None,
    port: int | None = None,
    tiers: Mapping[str, BlockTier] | None = None,
    committer: Committer | None = None,
    limits: WireLimits | None = None,
) -> AsyncIterator[ServedRole]:
    """Serve a role on the loop that is running, as long as the block lasts.

    It listens on the host and port of its base URI unless others are given, and calls its peers with the
    same certificate. What it makes durable goes to `committer`; without one nothing outlives the block.
    `tiers` are those of a holder, by name, and stay the caller's to close. When the block ends, exchanges
    under way end first. Where the role cannot go on, the block is cancelled, and `KVSPError` says why.

    Raises `PKIError` for a certificate that has expired or names another role, whose peers would refuse it,
    and `OSError` where it cannot listen.
    """
    trouble: list[Exception] = []
    inside: list[Exception] = []
    where = urlsplit(role.base_uri)
    check_certificate(Path(credentials.files[0]), role.base_uri)
    try:
        async with open_loop() as (loop, network, tasks):

            def failed(error: Exception) -> None:
                trouble.append(error)
                tasks.cancel_scope.cancel()

            peers = ServicePeers.of_network(network, credentials)
            driver = Driver(role, loop, peers, committer=committer or NoStore(), tiers=tiers, failed=failed)
            served = ServedRole(driver)
            driver.start()
            try:
                await network.listen(
                    credentials,
                    role.base_uri,
                    served.on_event,
                    host=host or where.hostname or "",
                    port=(where.port or 443) if port is None else port,
                    limits=limits,
                )
                yield served
                await network.close()
            except Exception as error:
                inside.append(error)
                raise
            finally:
                driver.stop()
    except BaseExceptionGroup:
        if not inside:
            raise
    if inside:
        raise inside[0]  # as it was, outside of the groups that loops put errors into
    if trouble:
        raise KVSPError(f"the role at {role.base_uri} cannot go on: {trouble[0]}") from trouble[0]
