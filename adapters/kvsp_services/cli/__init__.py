"""The command line tool ``kvsp``.

Every command exits with 0 for yes, 1 for no (the input is wrong, the answer is a refusal) and 2 for a wrong
call. An error is one line on standard error that says what to do. Other packages add commands by entry
points of the group ``kvsp.commands``; each names a click command.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing", "main"]


@contextmanager
def importing() -> Iterator[None]:
    """Have an interrupt end the process at once while modules are imported: there is nothing to tidy up yet,
    and extension modules turn it into other errors, or crash."""
    try:
        before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    except ValueError:  # in another thread than the main one, which no signal interrupts
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """Run ``kvsp`` with the arguments of the process."""
    if sys.argv[1:2] in (["serve"], ["demo"]):  # before anything imports numpy
        with importing():
            from kvsp_services.engine_port import pinned_numerics

        os.environ.update(pinned_numerics())
    try:
        with importing():
            from kvsp_services.cli.app import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvsp"):
            raise
        print(f"kvsp: {error.name} is missing; in a checkout run: pip install '.[cli]'", file=sys.stderr)
        sys.exit(2)
    sys.exit(run(sys.argv[1:]))
