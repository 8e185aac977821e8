"""Compatibility Descriptors by content, at an index or a holder (decision W30).

A descriptor is kept under the ID that is computed from it, so nobody can give one for another's caches
(CD-6). Who knows a descriptor knows block size and geometry; who does not checks structure only.
"""

from __future__ import annotations

from typing import Final

from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.limits import MAX_DESCRIPTORS
from kvsp_core.problems import INCOMPATIBLE, NOT_FOUND, STORAGE_FULL, Problem
from kvsp_core.resources import GetDescriptor, PutDescriptor
from kvsp_core.roles.role import Effect
from kvsp_core.roles.serving import Asked, answer, done, refuse

__all__ = ["Descriptors"]

_OTHER_ID: Final = Problem(INCOMPATIBLE, "the descriptor does not have the ID of the path; compute it anew")
_UNKNOWN: Final = Problem(NOT_FOUND, "the descriptor is not known here; its publisher can put it")
_FULL: Final = Problem(STORAGE_FULL, "no room for more descriptors")


class Descriptors:
    """The descriptors that one role knows."""

    def __init__(self) -> None:
        self._known: dict[str, CompatibilityDescriptor] = {}

    def get(self, compat_id: str) -> CompatibilityDescriptor | None:
        """Return the descriptor of this ID, or None."""
        return self._known.get(compat_id)

    def add(self, descriptor: CompatibilityDescriptor) -> None:
        """Take in a descriptor the role was configured with."""
        self._known[descriptor.compat_id] = descriptor

    def serve(self, asked: Asked) -> tuple[Effect, ...]:
        """Serve GET and PUT of a descriptor."""
        match asked.operation:
            case GetDescriptor(compat_id):
                descriptor = self._known.get(compat_id)
                if descriptor is None:
                    return (refuse(asked.request_id, _UNKNOWN),)
                return (answer(asked.request_id, descriptor.canonical_json),)
            case PutDescriptor(compat_id):
                assert isinstance(asked.body, CompatibilityDescriptor)
                if asked.body.compat_id != compat_id:
                    return (refuse(asked.request_id, _OTHER_ID),)
                if compat_id in self._known:
                    return (done(asked.request_id),)
                if len(self._known) >= MAX_DESCRIPTORS:
                    return (refuse(asked.request_id, _FULL),)
                self._known[compat_id] = asked.body
                return (done(asked.request_id, 201),)
            case _:
                raise AssertionError("not a request about a descriptor")
