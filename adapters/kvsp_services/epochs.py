"""The epochs of an instance: each start has a greater one than all before it (requirement ST-3).

An epoch is the wall clock's time at the start, in milliseconds, unless that clock has been set back since the
last start: then it is one more than the last. The last is kept in a file, which holds nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from kvsp_client.files import replacing
from kvsp_services.logs import said_of

__all__ = ["next_epoch"]

_MAX_FILE_BYTES: Final = 32
_LARGEST: Final = 1 << 52
"""Well below what a status can carry: a larger number in the file is none of ours."""


def next_epoch(path: Path, now_ms: int) -> int:
    """Return the epoch of a start at this wall-clock time, and keep it in a file for the next one.

    Where the file cannot be written, that is logged, and the clock alone decides.
    """
    epoch = max(now_ms, _last(path) + 1)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, f"{epoch}\n".encode()):
            pass
    except OSError as error:
        structlog.get_logger().warning("the epoch could not be kept", file=str(path), error=said_of(error))
    return epoch


def _last(path: Path) -> int:
    try:
        with path.open("rb") as file:
            last = int(file.read(_MAX_FILE_BYTES))
    except (OSError, ValueError):
        return 0
    return last if 0 <= last < _LARGEST else 0
