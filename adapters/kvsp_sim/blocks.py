"""Containers in simulated buffers."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from kvsp_core.container import decode_container
from kvsp_core.roles.role import JobDone

__all__ = ["described"]


@lru_cache(maxsize=4096)
def _description(octets: bytes) -> dict[str, object]:
    header, digests = decode_container(octets)
    return {
        "header": header,
        "layer_digests": digests,
        "repr_digest": hashlib.sha256(octets).hexdigest(),
    }


def described(job_id: int, octets: bytes) -> JobDone:
    """Return the completion of a job that read a container."""
    return JobDone(job_id, **_description(octets))  # type: ignore[arg-type]
