"""``kvsp`` as a process that does not outlive whoever started it:

    python -m kvsp_services.demo.member serve CONFIG

Standard input is a pipe that the parent holds open and writes nothing to. When it ends, because the parent
has closed it or is gone in whatever way, this process ends at once.
"""

from __future__ import annotations

import os
import threading
from typing import Final

from kvsp_services.cli import main

__all__: list[str] = []

_PARENT_GONE: Final = 3
"""The exit status, which nobody is left to see."""


def _end_with_parent() -> None:
    while os.read(0, 1 << 12):
        pass
    os._exit(_PARENT_GONE)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    main()
