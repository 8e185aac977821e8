"""Pages that are generated as a whole: written, or said to be stale."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["write_or_check"]


def write_or_check(page: Path, text: Callable[[], str], arguments: list[str]) -> int:
    """Write a page, or with ``--check`` say whether it is current; return the exit status."""
    if "--check" not in arguments:
        page.write_text(text(), encoding="utf-8")
        return 0
    if page.exists() and page.read_text(encoding="utf-8") == text():
        return 0
    print(f"docs/{page.name} is not what the source says now; run make docs and commit it", file=sys.stderr)
    return 1
