"""The resources of the protocol and their typed requests."""

from __future__ import annotations

from kvsp_core.heads import Request, Response

__all__ = ["Request", "Response"]
