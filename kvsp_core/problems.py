"""Problem types: what a refusal is called on the wire (protocol section "Error Handling", requirement PR-1).

A `Problem` is what a machine or a role answers to a peer's mistake. The nine types of KVSP are used only for
what the protocol's table says; every other refusal is an ``about:blank`` problem, whose title is that of its
status. On the wire a problem is a document of type ``application/problem+json`` (RFC 9457).
"""

from __future__ import annotations

import re
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

import attrs
import msgspec

from kvsp_core.limits import MIN_LEASE_TTL_MS
from kvsp_core.registries import Registry

__all__ = [
    "BAD_REQUEST",
    "CONFLICT",
    "DIGEST_MISMATCH",
    "FORBIDDEN",
    "INCOMPATIBLE",
    "INVALID_STATE",
    "LAYERS_UNAVAILABLE",
    "LEASE_QUOTA",
    "METHOD_NOT_ALLOWED",
    "NOT_ACCEPTABLE",
    "NOT_FOUND",
    "PLAN_CONFLICT",
    "PRECONDITION_FAILED",
    "PRECONDITION_REQUIRED",
    "PROBLEM_BASE_URI",
    "PROBLEM_TYPES",
    "SCOPE_DENIED",
    "STALE_EPOCH",
    "STORAGE_FULL",
    "TOO_LARGE",
    "UNAVAILABLE",
    "UNKNOWN_RESOURCE",
    "UNSUPPORTED_MEDIA_TYPE",
    "Problem",
    "ProblemType",
    "blank",
    "problem_document",
    "problem_of",
]

PROBLEM_BASE_URI: Final = "https://iana.org/assignments/kvsp#"


@attrs.frozen
class ProblemType:
    """A kind of refusal: its registered suffix (empty for ``about:blank``), title and HTTP status."""

    suffix: str
    title: str
    status: int

    @property
    def uri(self) -> str:
        """The type URI that goes on the wire."""
        return PROBLEM_BASE_URI + self.suffix if self.suffix else "about:blank"


@attrs.frozen
class Problem:
    """One refusal: its type and, in plain words, what was wrong and what to do.

    `detail` never holds a token, a key, a record or a session identifier. `max_ttl_ms` is the longest lease
    that is granted, where one was refused for being longer (decision W32).
    """

    type: ProblemType
    detail: str = ""
    max_ttl_ms: int | None = None

    @property
    def status(self) -> int:
        """The HTTP status of the answer."""
        return self.type.status


def blank(status: int) -> ProblemType:
    """Return the ``about:blank`` type of an HTTP status (RFC 9457, section 4.2.1)."""
    try:
        title = HTTPStatus(status).phrase
    except ValueError:  # one newer than this program, which counts for its class (HT-6)
        title = _CLASSES.get(status // 100, "Not an HTTP status")
    return ProblemType("", title, status)


_CLASSES: Final = MappingProxyType(
    {1: "Informational", 2: "Success", 3: "Redirection", 4: "Client error", 5: "Server error"}
)


NOT_FOUND: Final = ProblemType("kvsp-not-found", "Block, lease, session, or directive unknown", 404)
SCOPE_DENIED: Final = ProblemType("kvsp-scope-denied", "Client not authorized for the scope", 403)
INCOMPATIBLE: Final = ProblemType("kvsp-incompatible", "Compatibility ID mismatch", 409)
LEASE_QUOTA: Final = ProblemType("kvsp-lease-quota", "Lease quota exceeded", 429)
STALE_EPOCH: Final = ProblemType("kvsp-stale-epoch", "Epoch older than current", 409)
INVALID_STATE: Final = ProblemType("kvsp-invalid-state", "Operation not allowed in the instance state", 409)
DIGEST_MISMATCH: Final = ProblemType("kvsp-digest-mismatch", "Stored data does not match its digest", 422)
PLAN_CONFLICT: Final = ProblemType(
    "kvsp-plan-conflict", "Reshard plan does not match the current map version", 409
)
LAYERS_UNAVAILABLE: Final = ProblemType("kvsp-layers-unavailable", "Requested layers not held", 404)

BAD_REQUEST: Final = blank(400)
FORBIDDEN: Final = blank(403)
UNKNOWN_RESOURCE: Final = blank(404)
METHOD_NOT_ALLOWED: Final = blank(405)
NOT_ACCEPTABLE: Final = blank(406)
CONFLICT: Final = blank(409)
PRECONDITION_FAILED: Final = blank(412)
TOO_LARGE: Final = blank(413)
UNSUPPORTED_MEDIA_TYPE: Final = blank(415)
PRECONDITION_REQUIRED: Final = blank(428)
UNAVAILABLE: Final = blank(503)
STORAGE_FULL: Final = blank(507)

PROBLEM_TYPES: Final = Registry(
    "KVSP Problem Types",
    {
        kind.suffix: kind
        for kind in (
            NOT_FOUND,
            SCOPE_DENIED,
            INCOMPATIBLE,
            LEASE_QUOTA,
            STALE_EPOCH,
            INVALID_STATE,
            DIGEST_MISMATCH,
            PLAN_CONFLICT,
            LAYERS_UNAVAILABLE,
        )
    },
)


# On the wire ------------------------------------------------------------------------------------------------

_MAX_DETAIL_CHARS: Final = 400
_UNPRINTABLE: Final = re.compile(r"[^ -~]+")


def problem_document(problem: Problem) -> bytes:
    """Return the JSON octets of a problem: type, title, status, and detail where there is one."""
    members: dict[str, object] = {
        "type": problem.type.uri,
        "title": problem.type.title,
        "status": problem.type.status,
    }
    if problem.detail:
        members["detail"] = problem.detail
    if problem.max_ttl_ms is not None:
        members["max_ttl_ms"] = problem.max_ttl_ms
    return msgspec.json.encode(members)


def problem_of(status: int, octets: bytes) -> Problem:
    """Return the problem that an answer with an error status reports.

    The status of the answer counts, whatever the document says. A type that we do not know, or that does not
    go with the class of the status, and a body that is no problem document, leave the status alone to say
    what went wrong (HT-6). `detail` is cut and holds printable ASCII only, since a peer wrote it.
    """
    try:
        document = msgspec.json.decode(octets, type=_Document)
    except (ValueError, RecursionError):
        document = _Document()
    kind = PROBLEM_TYPES.get(document.type.removeprefix(PROBLEM_BASE_URI))
    if kind is None or document.type != kind.uri or kind.status // 100 != status // 100:
        kind = blank(status)
    detail, longest = _UNPRINTABLE.sub(" ", document.detail)[:_MAX_DETAIL_CHARS].strip(), document.max_ttl_ms
    if kind is not LEASE_QUOTA or type(longest) is not int or longest < MIN_LEASE_TTL_MS:
        return Problem(kind, detail)
    return Problem(kind, detail, longest)


class _Document(msgspec.Struct):
    type: str = ""
    detail: str = ""
    max_ttl_ms: object = None
