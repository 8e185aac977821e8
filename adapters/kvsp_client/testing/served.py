"""An index and cache servers in this process, over mutual TLS, for tests of engines and of the client."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import kvsp_asyncio
from kvsp_core.errors import KVSPError
from kvsp_core.identity import Scope
from kvsp_core.resources import RoleName
from kvsp_core.roles.authorization import Policy, ScopeRules
from kvsp_core.roles.holder import Holder
from kvsp_core.roles.holdings import TierLimits
from kvsp_core.roles.index import Index
from kvsp_core.roles.role import Role
from kvsp_h2 import Credentials
from kvsp_services.driver import Driver
from kvsp_services.loops import AsyncioLoop, Workers
from kvsp_services.pki import init_ca, issue
from kvsp_services.stores.blocks import MemoryTier
from kvsp_services.stores.durable import NoStore
from kvsp_services.wire import ServedRole, ServicePeers

__all__ = ["ENGINE", "Served", "serve_cache"]

T = TypeVar("T")

ENGINE: Final = "spiffe://kvsp.example/engine"
"""The principal of the certificate that `Served.credentials` has."""
_START_S: Final = 60


class Served:
    """What `serve_cache` serves; its attributes say how to reach it.

    `scopes` are those in which the engine may read, store and withdraw; `scope` is the first. `credentials`
    are the engine's, from the files `certificate`, `key` and `authorities`.
    """

    def __init__(self, directory: Path, caches: int, scopes: Sequence[Scope], indexes: int = 1) -> None:
        self.directory = directory
        self.scopes = tuple(scopes)
        self.scope = self.scopes[0]
        self._sockets = [_listening() for _ in range(indexes + caches)]
        uris = [f"https://127.0.0.1:{sock.getsockname()[1]}/kvsp/" for sock in self._sockets]
        self.index_uris = tuple(uris[:indexes])
        self.index_uri = uris[0]
        self.cache_uris = tuple(uris[indexes:])
        self.cache_uri = uris[indexes]
        init_ca(directory)
        self._issued = [issue(directory, uri=uri, name=f"role-{n}") for n, uri in enumerate(uris)]
        engine = issue(directory, uri=ENGINE, name="engine")
        self.certificate, self.key, self.authorities = engine.certificate, engine.key, directory / "ca.pem"
        self.credentials = self.credentials_of(engine.certificate, engine.key)
        self.failures: list[Exception] = []
        """What roles failed with; a test looks whether it is empty."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._network: Any = None
        self._listeners: dict[str, Any] = {}
        self._stop: asyncio.Event | None = None

    def credentials_of(self, certificate: Path, key: Path) -> Credentials:
        """Return credentials with the authority of this service."""
        return Credentials(certificate, key, self.authorities)

    def stop_serving(self, uri: str) -> None:
        """Cut the connections of a role and take no more, as if it had died."""
        self.do(lambda: self._listeners[uri].abort())

    def cut_connections(self, uri: str) -> None:
        """Cut the connections of a role; it takes new ones."""

        def cut() -> None:
            for link in tuple(self._listeners[uri].links):
                link.abort()

        self.do(cut)

    def do(self, work: Callable[[], Any]) -> Any:
        """Do something in the thread of the roles, and return what comes of it."""

        async def call() -> Any:
            return work()

        return self._await(call())

    def serve_instead(self, number: int, on_event: Callable[[Any, Any], None]) -> None:
        """Serve something else in place of a cache server, under its base URI and with its certificate.

        `on_event` is told of each event of each connection, as `kvsp_asyncio` tells them, in the thread of
        the roles.
        """
        uri, issued = self.cache_uris[number], self._issued[len(self.index_uris) + number]
        credentials = self.credentials_of(issued.certificate, issued.key)

        async def listen() -> None:
            self._listeners[uri].abort()
            port = urlsplit(uri).port or 0
            self._listeners[uri] = await self._network.listen(credentials, uri, on_event, port=port)

        self._await(listen())

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START_S)

    def _policy(self) -> Policy:
        may: dict[str, Any] = {
            "read": [ENGINE, *self.cache_uris],
            "write": [ENGINE],
            "publish": self.cache_uris,
            "withdraw": [ENGINE],
        }
        rules = ScopeRules(**may)
        principals: dict[str, list[RoleName]] = {uri: [RoleName.HOLDER] for uri in self.cache_uris}
        principals |= {uri: [RoleName.INDEX] for uri in self.index_uris}
        principals[ENGINE] = [RoleName.INSTANCE]
        return Policy(principals, {scope.scope_id: rules for scope in self.scopes})

    async def run(self, capacity_bytes: int, ready: threading.Event) -> None:
        """Serve until `stop`."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        workers = Workers()
        try:
            async with kvsp_asyncio.open_network() as network:
                self._network = network
                drivers = await self._start(network, workers, capacity_bytes)
                ready.set()
                await self._stop.wait()
                for driver in drivers:
                    driver.stop()
                network.abort()
        finally:
            workers.close()

    async def _start(self, network: Any, workers: Workers, capacity_bytes: int) -> list[Driver]:
        policy, loop = self._policy(), AsyncioLoop(workers)
        drivers = []
        for number, (uri, issued) in enumerate(
            zip((*self.index_uris, *self.cache_uris), self._issued, strict=True)
        ):
            role: Role
            tiers = {}
            if uri in self.index_uris:
                role = Index(base_uri=uri, policy=policy)
            else:
                tiers["host"] = MemoryTier(capacity_bytes)
                role = Holder(
                    base_uri=uri,
                    policy=policy,
                    tiers={"host": TierLimits(capacity_bytes=capacity_bytes)},
                    random_bytes=os.urandom,
                    now_ms=loop.now_ms(),
                    index_uris=self.index_uris,
                )
            credentials = self.credentials_of(issued.certificate, issued.key)
            peers = ServicePeers.of_network(network, credentials)
            driver = Driver(role, loop, peers, committer=NoStore(), tiers=tiers, failed=self.failures.append)
            driver.start()
            drivers.append(driver)
            self._listeners[uri] = await network.listen(
                credentials, uri, ServedRole(driver).on_event, sock=self._sockets[number]
            )
        return drivers

    def stop(self) -> None:
        """Let `run` end."""
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)


def _listening() -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


@contextmanager
def serve_cache(
    *,
    caches: int = 1,
    capacity_bytes: int = 1 << 30,
    scopes: Sequence[Scope] | None = None,
    indexes: int = 1,
) -> Iterator[Served]:
    """Serve an index and cache servers in a thread of this process, on free ports, with certificates made for
    it.

    `capacity_bytes` is what each cache server holds in memory. Without `scopes` there is one, with a key that
    is made up. `indexes` is how many parts the index has (OP-3). Needs the extra ``services``.
    """
    known = tuple(scopes) if scopes is not None else (Scope(os.urandom(32)),)
    with tempfile.TemporaryDirectory(prefix="kvsp-served-") as directory:
        served, ready = Served(Path(directory), caches, known, indexes), threading.Event()

        def run() -> None:
            try:
                asyncio.run(served.run(capacity_bytes, ready))
            except Exception as error:
                served.failures.append(error)
                ready.set()

        thread = threading.Thread(target=run, name="kvsp-served", daemon=True)
        thread.start()
        try:
            if not ready.wait(_START_S):
                raise KVSPError(f"index and cache server did not start within {_START_S} s")
            if served.failures:
                raise served.failures[0]
            yield served
        finally:
            served.stop()
            thread.join(_START_S)
