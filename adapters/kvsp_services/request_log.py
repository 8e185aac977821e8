"""The ids of requests, and what is logged of requests and calls.

An id is the trace id of the W3C field ``traceparent``: 32 hex digits that mean nothing. A front end draws one
for each generation, every other role for a request that brings none. Calls that a role makes for a request
carry it on, so that the lines of one request are found in the logs of all roles (decision W34).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

import structlog

from kvsp_core.heads import Request
from kvsp_core.problems import Problem
from kvsp_core.resources import Refusal, RoleName, Router
from kvsp_services.logs import REQUEST_ID

__all__ = ["RequestLog", "new_traceparent", "request_id_of"]

_TRACE_ID: Final = slice(3, 35)
_OVERLOADED: Final = 503


def new_traceparent(random_bytes: Callable[[int], bytes] = os.urandom) -> str:
    """Return a ``traceparent`` for a request that begins here."""
    drawn = random_bytes(24).hex()
    return f"00-{drawn[:32]}-{drawn[32:]}-01"


def request_id_of(traceparent: str | None) -> str | None:
    """Return the id of a request, as logs have it."""
    return None if traceparent is None else traceparent[_TRACE_ID]


class RequestLog:
    """Logs the requests and calls of one role.

    All of them at level debug; at any level, as warnings, requests that the role could not answer and calls
    that nobody did. What is refused for overload is counted (see the metrics), not logged: it would make the
    load worse.
    """

    def __init__(self, role: str, *, everything: bool) -> None:
        self._log = structlog.get_logger().bind(role=role)
        self._everything = everything
        self._router = Router(RoleName)

    def request_over(self, request: Request, traceparent: str, status: int | None, took_ms: int) -> None:
        """Take note of a request that has ended; `status` is None where it was not answered."""
        failed = status is not None and status >= 500 and status != _OVERLOADED
        if failed or self._everything:
            self._say("request", failed, request, traceparent, status=status, took_ms=took_ms)

    def call_over(
        self,
        base_uri: str,
        request: Request,
        traceparent: str | None,
        status: int | None,
        failure: str | None,
        took_ms: int,
    ) -> None:
        """Take note of a call that has ended; `failure` says why no whole answer came. With neither status
        nor failure it was given up."""
        failed = failure is not None or (status is not None and status >= 500 and status != _OVERLOADED)
        if not failed and not self._everything:
            return
        more: dict[str, Any] = {} if failure is None else {"failure": failure}
        peer = urlsplit(base_uri).netloc
        self._say("call", failed, request, traceparent, to=peer, status=status, took_ms=took_ms, **more)

    def _say(
        self, event: str, failed: bool, request: Request, traceparent: str | None, **values: object
    ) -> None:
        operation = self._router.route(request)
        known = not isinstance(operation, Refusal | Problem)
        if traceparent is not None:
            values[REQUEST_ID] = request_id_of(traceparent)
        say = self._log.warning if failed else self._log.debug
        say(event, operation=type(operation).__name__ if known else "unknown resource", **values)
