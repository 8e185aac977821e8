"""``/health``, ``/ready`` and ``/metrics`` of a process, in plain HTTP on a port of its own.

Meant for the loopback interface, or one that only the monitoring reaches: it says how much is done, never
for whom. It runs in a thread, so it also answers while the loop is busy, and says then that it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvsp_services import http1
from kvsp_services.metrics import Metrics

__all__ = ["MonitoringServer"]

_TEXT: Final = "text/plain; charset=utf-8"
_METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
_METHODS: Final = ("GET", "HEAD")
_CONNECTIONS: Final = 64
"""How many may be open at a time."""


class MonitoringServer:
    """Serves until it is closed. `port` 0 takes a free one; the attribute `port` says which.

    `alive` and `ready` return None, or in a few words why not: they are called in the server's thread.
    Raises `LocalProtocolError` where the port is taken.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        alive: Callable[[], str | None],
        ready: Callable[[], str | None],
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        def checked(check: Callable[[], str | None]) -> tuple[int, str, bytes]:
            reason = check()
            return (200, _TEXT, b"ok\n") if reason is None else (503, _TEXT, f"{reason}\n".encode())

        pages: dict[str, Callable[[], tuple[int, str, bytes]]] = {
            "/health": lambda: checked(alive),
            "/ready": lambda: checked(ready),
            "/metrics": lambda: (200, _METRICS, metrics.exposition()),
        }

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            headers = {"cache-control": "no-store"}
            if (page := pages.get(scope["path"])) is None:
                status, kind, body = 404, _TEXT, f"try {', '.join(pages)}\n".encode()
            elif scope["method"] in _METHODS:
                status, kind, body = page()
            else:
                status, kind, body = 405, _TEXT, b"ask with GET\n"
                headers["allow"] = ", ".join(_METHODS)
            await Response(body, status, headers, kind)(scope, receive, send)

        self._open = ExitStack()
        portal = self._open.enter_context(start_blocking_portal(name="kvsp-monitoring"))
        try:
            self._serving, port = portal.start_task(_serve, app, host, port)
        except BaseException:
            self._open.close()
            raise
        self.port: int = port

    def close(self) -> None:
        """Stop serving."""
        self._serving.cancel()
        self._open.close()


async def _serve(app: ASGIApp, host: str, port: int, *, task_status: TaskStatus[int]) -> None:
    await http1.serve(
        app,
        host=host,
        port=port,
        key="monitoring.port",
        listening=task_status.started,
        stopping=anyio.sleep_forever,
        connections=_CONNECTIONS,
    )
