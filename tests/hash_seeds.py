"""What a program prints in a process of its own, under a given hash seed."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["printed"]


def printed(program: str, hash_seed: str) -> str:
    """Run a program that imports what this process may, and return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
