"""A bar for a transfer that takes its time: on standard error, and only where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvsp_client.wire import Progress

__all__ = ["progress_bar"]


def _nothing(done_bytes: int, size_bytes: int | None) -> None:
    """Show nothing."""


@contextmanager
def progress_bar(what: str, *, shown: bool = True) -> Iterator[Progress]:
    """Show how far a transfer has come while the block runs, where it is to be `shown`; nothing of it is left
    on the screen then.

    The value is what to tell it to. Until it is told, the bar only shows that something is under way.
    """
    if not (shown and sys.stderr.isatty()):
        yield _nothing
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done_bytes, size_bytes: bar.update(task, completed=done_bytes, total=size_bytes)
