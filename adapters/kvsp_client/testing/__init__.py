"""For tests of whoever uses the client: an index and cache servers in the same process."""

from __future__ import annotations

from kvsp_client.testing.served import ENGINE, Served, serve_cache

__all__ = ["ENGINE", "Served", "serve_cache"]
