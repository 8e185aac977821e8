"""Taking requests in, the same for every role: route, authorize, read the body, and refuse what is wrong.

A role gives its requests to a `Desk` and serves what comes back as `Asked`: a typed request of a client
that may make it, with its body read and checked. Everything else the desk has answered already: an unknown
resource or method, a client without the role or the scope, a body that is too large, of another media type
or not what it should be. Requirements HT-4, HT-5, HT-8, SE-1; decisions W10 and W11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Final, TypeAlias

import attrs

from kvsp_core.answers import empty_response, json_response, problem_response
from kvsp_core.bodies import decoder
from kvsp_core.errors import LimitExceeded, RemoteProtocolError
from kvsp_core.heads import Request
from kvsp_core.identity import CompatibilityDescriptor
from kvsp_core.messages import ReshardMessage, decode_reshard
from kvsp_core.problems import BAD_REQUEST, TOO_LARGE, UNAVAILABLE, Problem
from kvsp_core.registries import JSON_MEDIA_TYPE
from kvsp_core.resources import (
    RESOURCES,
    Operation,
    Refusal,
    RoleName,
    Router,
    check_head,
    resource_of,
)
from kvsp_core.roles.role import (
    BodyArrived,
    BodyFailed,
    Effect,
    ReceiveBody,
    RequestEnded,
    RequestReceived,
    Respond,
)

__all__ = ["Asked", "Desk", "Intake", "answer", "done", "refuse"]

_RETRY_AFTER_S: Final = 1


@attrs.frozen(kw_only=True)
class Asked:
    """A request to be served: the client may make it, and its body, where it has a JSON one, is read."""

    request_id: int
    client: str
    operation: Operation
    request: Request = attrs.field(repr=False)
    body: object = attrs.field(default=None, repr=False)
    traceparent: str | None = None
    """What the request belongs to."""


Intake: TypeAlias = RequestReceived | BodyArrived | BodyFailed | RequestEnded
"""The inputs that a role gives to its desk."""


def answer(request_id: int, message: object, status: int = 200, *, location: str | None = None) -> Respond:
    """Return the effect that answers with a record or message, or the JSON octets of one."""
    response, octets = json_response(message, status, location=location)
    return Respond(request_id, response, octets)


def done(request_id: int, status: int = 204, *, location: str | None = None) -> Respond:
    """Return the effect that answers without a body."""
    response, octets = empty_response(status, location=location)
    return Respond(request_id, response, octets)


def refuse(request_id: int, problem: Problem, *, allow: tuple[str, ...] = ()) -> Respond:
    """Return the effect that answers with a problem; what cannot be served now says when to come back."""
    retry_after_s = _RETRY_AFTER_S if problem.status == UNAVAILABLE.status else None
    response, octets = problem_response(problem, allow=allow, retry_after_s=retry_after_s)
    return Respond(request_id, response, octets)


class Desk:
    """Takes the requests of one base URI in.

    `served` are the roles it stands for. `allow` says from the head alone why a client may not ask for
    this, or None; what only the body tells is for the role to check.
    """

    def __init__(self, served: Iterable[RoleName], allow: Callable[[str, Operation], Problem | None]) -> None:
        self._router = Router(served)
        self._allow = allow
        self._awaiting: dict[int, Asked] = {}  # requests whose body is being taken in

    def take(self, item: Intake) -> tuple[Asked | None, tuple[Effect, ...]]:
        """Take an input in; return the request that is now to be served, if any, and what is to be done."""
        match item:
            case RequestReceived():
                return self._received(item)
            case BodyArrived(request_id, body):
                return self._body_arrived(request_id, body)
            case BodyFailed(request_id, problem):
                known = self._awaiting.pop(request_id, None)
                return None, (refuse(request_id, problem),) if known else ()
            case RequestEnded(request_id):
                self._awaiting.pop(request_id, None)
                return None, ()

    def _received(self, item: RequestReceived) -> tuple[Asked | None, tuple[Effect, ...]]:
        request_id, client, request = item.request_id, item.client, item.request
        operation = self._router.route(request)
        if isinstance(operation, Refusal):
            return None, (refuse(request_id, operation.problem, allow=operation.allow),)
        problem = self._allow(client, operation) or check_head(operation, request)
        if problem is not None:
            return None, (refuse(request_id, problem),)
        asked = Asked(
            request_id=request_id,
            client=client,
            operation=operation,
            request=request,
            traceparent=item.traceparent,
        )
        row = resource_of(operation)
        if row.body_type != JSON_MEDIA_TYPE or row.body is None:
            return asked, ()
        if request.content_length == 0:
            if not row.body_required:
                return asked, ()
            return None, (refuse(request_id, Problem(BAD_REQUEST, "the request has no body, and needs one")),)
        self._awaiting[request_id] = asked
        return None, (ReceiveBody(request_id, row.limit_bytes),)

    def _body_arrived(self, request_id: int, octets: bytes) -> tuple[Asked | None, tuple[Effect, ...]]:
        asked = self._awaiting.pop(request_id, None)
        if asked is None:
            return None, ()
        row = resource_of(asked.operation)
        if not octets and not row.body_required:
            return asked, ()
        try:
            body = _READERS[row.body](octets)
        except RemoteProtocolError as error:
            return None, (refuse(request_id, Problem(BAD_REQUEST, str(error))),)
        except LimitExceeded as error:
            return None, (refuse(request_id, Problem(TOO_LARGE, str(error))),)
        return attrs.evolve(asked, body=body), ()


def _reader(kind: object) -> Callable[[bytes], object]:
    """Return what reads the bodies of a class."""
    if kind is CompatibilityDescriptor:
        return CompatibilityDescriptor.from_json
    if kind is ReshardMessage:
        return decode_reshard
    assert isinstance(kind, type)
    return decoder(kind)


_READERS: Final = MappingProxyType(
    {
        row.body: _reader(row.body)
        for row in RESOURCES
        if row.body is not None and row.body_type == JSON_MEDIA_TYPE
    }
)
"""What reads the bodies of each class: made once, as that takes longer than reading."""
