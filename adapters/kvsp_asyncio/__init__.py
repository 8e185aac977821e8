"""Sockets and timers of asyncio for `kvsp_h2`."""

from __future__ import annotations

from kvsp_asyncio.pump import Link, Listener, Network, open_network, run

__all__ = ["Link", "Listener", "Network", "open_network", "run"]
