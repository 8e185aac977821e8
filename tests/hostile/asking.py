"""Requests with the certificates of a cluster's members, over connections that stay."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvsp_asyncio
from kvsp_core.resources import Operation
from kvsp_h2 import Credentials
from kvsp_services.asking import Answer, AskError, ask_over
from kvsp_services.wire import ServicePeers

__all__ = ["Asker"]


class Asker:
    """Asks from a thread of its own, for any thread. A context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._network: Any = None
        self._peers: dict[str, ServicePeers] = {}
        self._started = threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._run(),), daemon=True
        )

    def __enter__(self) -> Asker:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._loop.close()

    async def _run(self) -> None:
        self._stopping = asyncio.Event()
        async with kvsp_asyncio.open_network() as self._network:
            self._started.set()
            await self._stopping.wait()

    def ask(
        self,
        who: str,
        base_uri: str,
        operation: Operation,
        body: object = None,
        pieces: Sequence[memoryview] = (),
    ) -> Answer:
        """Make a request with somebody's certificate; raises `AskError` where there is no answer."""
        asked = asyncio.run_coroutine_threadsafe(
            self._ask(who, base_uri, operation, body, pieces), self._loop
        )
        try:
            return asked.result()
        except TimeoutError:
            raise AskError(f"{base_uri} did not answer in time") from None

    async def _ask(
        self, who: str, base_uri: str, operation: Operation, body: object, pieces: Sequence[memoryview]
    ) -> Answer:
        peers = self._peers.get(who)
        if peers is None:
            folder = self._folder
            credentials = Credentials(folder / f"{who}.pem", folder / f"{who}.key", folder / "ca.pem")
            peers = self._peers[who] = ServicePeers.of_network(self._network, credentials)
        return await ask_over(peers, base_uri, operation, body, pieces)
