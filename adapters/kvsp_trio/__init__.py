"""Sockets and timers of trio for `kvsp_h2`."""

from __future__ import annotations

from kvsp_trio.pump import Link, Listener, Network, open_network

__all__ = ["Link", "Listener", "Network", "open_network"]
