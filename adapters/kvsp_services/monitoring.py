"""``/health``, ``/ready`` and ``/metrics`` of a process, in plain HTTP on a port of its own.

Meant for the loopback interface, or one that only the monitoring reaches: it says how much is done, never
for whom. It runs in a thread, so it also answers while the loop is busy, and says then that it is.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import structlog

from kvsp_core.errors import LocalProtocolError
from kvsp_services.metrics import Metrics

__all__ = ["MonitoringServer"]

_TEXT: Final = "text/plain; charset=utf-8"
_METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"
_REQUEST_TIMEOUT_S: Final = 5
_AGAIN_S: Final = 0.05


class _Server(ThreadingHTTPServer):
    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; where that fails, as without descriptors, it is not tried again at once."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_AGAIN_S)
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that go away, and of anything else one line."""
        error = sys.exception()
        if not isinstance(error, OSError):
            structlog.get_logger().error("monitoring failed", error=type(error).__name__)


class MonitoringServer:
    """Serves until it is closed. `port` 0 takes a free one; the attribute `port` says which.

    `alive` and `ready` return None, or in a few words why not: they are called in the server's threads.
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

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_TIMEOUT_S
            server_version = "kvsp"
            sys_version = ""

            def do_GET(self) -> None:
                page = pages.get(self.path.partition("?")[0])
                status, kind, body = page() if page else (404, _TEXT, f"try {', '.join(pages)}\n".encode())
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *arguments: object) -> None:
                """Log nothing: every scrape would be a line."""

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise LocalProtocolError(
                f"monitoring on {host}:{port}: {error.strerror}; choose another port under [monitoring]"
            ) from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="kvsp-monitoring",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
