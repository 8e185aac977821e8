"""The client for inference engines and tools: find, fetch, store and lease blocks.

`Client` is for programs on asyncio or trio, `BlockingClient` for threads. docs/client.md is the guide.
"""

from __future__ import annotations

from kvsp_client.blocking import BlockingClient, BlockingFetch, BlockingJob, BlockingLease
from kvsp_client.client import Client
from kvsp_client.errors import ClientClosed, ClientError, LayersWithdrawn, Refused, Unavailable
from kvsp_client.fetch import Fetch, FetchResult
from kvsp_client.lease import HolderLease, Lease
from kvsp_client.memory import PrefixMemory, Sections
from kvsp_client.settings import ClientSettings
from kvsp_client.stats import ClientStats
from kvsp_client.store import StoreResult
from kvsp_core.machines.prefix_load import Miss, MissReason
from kvsp_core.prefix import Prefix, PrefixKeys
from kvsp_core.storing import StoreOutcome
from kvsp_h2 import Credentials

__all__ = [
    "BlockingClient",
    "BlockingFetch",
    "BlockingJob",
    "BlockingLease",
    "Client",
    "ClientClosed",
    "ClientError",
    "ClientSettings",
    "ClientStats",
    "Credentials",
    "Fetch",
    "FetchResult",
    "HolderLease",
    "LayersWithdrawn",
    "Lease",
    "Miss",
    "MissReason",
    "Prefix",
    "PrefixKeys",
    "PrefixMemory",
    "Refused",
    "Sections",
    "StoreOutcome",
    "StoreResult",
    "Unavailable",
]
