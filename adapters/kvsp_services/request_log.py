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

import attrs
import structlog

from kvsp_core.heads import Request
from kvsp_core.problems import Problem
from kvsp_core.resources import Refusal, RoleName, Router
from kvsp_services.logs import REQUEST_ID, said_of

__all__ = ["OVERLOADED", "RequestLog", "new_traceparent", "request_id_of"]

NOT_ALLOWED: Final = 403
OVERLOADED: Final = 503
"""The status of what is refused for now, of which there is most when there is too much of everything."""
QUIET_MS: Final = 10_000
"""How long after a warning there is no other of its kind."""
MAX_KINDS: Final = 256
_TRACE_ID: Final = slice(3, 35)
_OTHERS: Final = (None, "others")


def new_traceparent(random_bytes: Callable[[int], bytes] = os.urandom) -> str:
    """Return a ``traceparent`` for a request that begins here, and of which nobody exports a span."""
    drawn = random_bytes(24).hex()
    return f"00-{drawn[:32]}-{drawn[32:]}-00"


def request_id_of(traceparent: str | None) -> str | None:
    """Return the id of a request, as logs have it."""
    return None if traceparent is None else traceparent[_TRACE_ID]


class RequestLog:
    """Logs the requests and calls of one role, and what its tiers fail at.

    With `everything`, all of them at level debug; at any level, as warnings, requests that the role could not
    answer, calls that nobody did or that a policy refused, and jobs of a tier that does not work. Of those
    there is no bound while a peer is away or overloaded, or a disk fails, so of one operation with one peer,
    and of one error of a tier, the first is a warning, and then one in 10 s, which says how many were left
    out. What is refused for overload is counted (see the metrics), not logged: it would make the load worse.
    """

    def __init__(self, role: str, *, everything: bool) -> None:
        self._log = structlog.get_logger(role=role)
        self.everything = everything
        self._router = Router(RoleName)
        self._quiet = _Quiet()

    def request_over(
        self, request: Request, traceparent: str, status: int | None, *, began_ms: int, now_ms: int
    ) -> None:
        """Take note of a request that has ended; `status` is None where it was not answered."""
        failed = status is not None and status >= 500 and status != OVERLOADED
        if failed or self.everything:
            said = {"status": status, "took_ms": now_ms - began_ms}
            self._say("request", failed, request, traceparent, said, now_ms)

    def call_over(
        self,
        base_uri: str,
        request: Request,
        traceparent: str | None,
        status: int | None,
        failure: str | None,
        *,
        began_ms: int,
        now_ms: int,
    ) -> None:
        """Take note of a call that has ended; `failure` says why no whole answer came. With neither status
        nor failure it was given up."""
        if status == NOT_ALLOWED and failure is None:
            failure = "the policy of that role does not allow it"
        failed = failure is not None or (status is not None and status >= 500 and status != OVERLOADED)
        if not failed and not self.everything:
            return
        said: dict[str, Any] = {"to": urlsplit(base_uri).netloc, "status": status}
        said["took_ms"] = now_ms - began_ms
        if failure is not None:
            said["failure"] = failure
        self._say("call", failed, request, traceparent, said, now_ms)

    def tier_failed(self, tier: str, error: BaseException, *, now_ms: int) -> None:
        """Take note that a tier does not work."""
        left_out = self._quiet.left_out((tier, type(error).__name__), now_ms)
        if left_out is None:
            return
        more = {"left_out": left_out} if left_out else {}
        self._log.warning("tier failed", tier=tier, failure=said_of(error), **more)

    def _say(
        self,
        event: str,
        failed: bool,
        request: Request,
        traceparent: str | None,
        values: dict[str, Any],
        now_ms: int,
    ) -> None:
        routed = self._router.route(request)
        known = not isinstance(routed, Refusal | Problem)
        operation = type(routed).__name__ if known else "unknown resource"
        left_out = self._quiet.left_out((values.get("to"), operation), now_ms) if failed else None
        if left_out is None and not self.everything:
            return
        if left_out:
            values["left_out"] = left_out
        if traceparent is not None:
            values[REQUEST_ID] = request_id_of(traceparent)
        say = self._log.debug if left_out is None else self._log.warning
        say(event, operation=operation, **values)


@attrs.define
class _Since:
    """When there was a warning, and how many there would have been since."""

    warned_ms: int
    left_out: int = 0


class _Quiet:
    """Lets a warning through for each kind of failure, and then one in `QUIET_MS`.

    So many kinds are known at most; while all of them are recent, what is new counts as one kind.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str | None, str], _Since] = {}

    def left_out(self, kind: tuple[str | None, str], now_ms: int) -> int | None:
        """Return how many were left out since the last warning; None where there is to be none now."""
        since = self._kinds.get(kind)
        if since is None and len(self._kinds) >= MAX_KINDS:
            self._kinds = {k: s for k, s in self._kinds.items() if now_ms - s.warned_ms < QUIET_MS}
            if len(self._kinds) >= MAX_KINDS:
                kind = _OTHERS
                since = self._kinds.get(kind)
        if since is not None and now_ms - since.warned_ms < QUIET_MS:
            since.left_out += 1
            return None
        self._kinds[kind] = _Since(now_ms)
        return 0 if since is None else since.left_out
