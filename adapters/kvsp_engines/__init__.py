"""Inference engines behind the interface of `kvsp_core.roles.engine`: a real one, on numpy."""

from __future__ import annotations

from kvsp_engines.weights import LlamaConfig, ModelError

__all__ = ["LlamaConfig", "ModelError"]
