"""Problem types: what a refusal is called on the wire (protocol section "Error Handling", requirement PR-1).

A `Problem` is what a machine or a role answers to a peer's mistake. The nine types of KVSP are used only for
what the protocol's table says; every other refusal is an ``about:blank`` problem, whose title is that of its
status.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import attrs

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

    `detail` never holds a token, a key, a record or a session identifier.
    """

    type: ProblemType
    detail: str = ""

    @property
    def status(self) -> int:
        """The HTTP status of the answer."""
        return self.type.status


def blank(status: int) -> ProblemType:
    """Return the ``about:blank`` type of an HTTP status (RFC 9457, section 4.2.1)."""
    return ProblemType("", HTTPStatus(status).phrase, status)


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
