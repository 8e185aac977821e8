"""OpenTelemetry traces of what roles do (the extra ``otel``), made from their inputs and effects.

A request that comes in is a span, and so is every call that it leads to, at whatever role: the calls carry
the W3C field ``traceparent``. So a prefetch directive is one trace with its lookups, leases and fetches, and
a session that moves is one with the directive to resume it and all that is loaded for it. What a role
observes while a request is open is an event of its span.

Spans name resources, roles, statuses and counts. No path, key, token, session, scope or principal gets into
one. `open_traces` says when there are any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import attrs
import structlog

from kvsp_core.heads import Request
from kvsp_core.problems import Problem
from kvsp_core.resources import Refusal, RoleName, Router
from kvsp_core.roles.role import (
    AnswerReceived,
    BlockReceived,
    Call,
    CallFailed,
    CancelCall,
    Effect,
    Input,
    JobDone,
    JobFailed,
    LineReceived,
    Observe,
    Persist,
    ReadBlock,
    Respond,
    Store,
    StreamEnded,
    StreamStarted,
)
from kvsp_services.driver import Driver
from kvsp_services.ports import Incoming
from kvsp_services.request_log import new_traceparent

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

__all__ = ["Exporting", "TracedDriver", "Traces", "open_traces"]

_MAX_DEPTH: Final = 8
"""Calls that led to calls, after which a new trace begins: one answer may lead to the next call for ever."""
_SWITCHES: Final = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)


@attrs.frozen(eq=False)
class Cause:
    """The span in which something happens, and how many calls deep it is."""

    span: Span
    depth: int = 0


class Traces:
    """The spans of one role. `cause_of` an input is the cause of the effects that it has."""

    def __init__(self, tracer: Tracer, role: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._role = role
        self._router = Router(RoleName)
        self._propagator = TraceContextTextMapPropagator()
        self._requests: dict[int, Cause] = {}
        self._calls: dict[int, Cause] = {}
        self._jobs: dict[int, Cause] = {}

    # Requests

    def request_received(self, number: int, request: Request, traceparent: str | None) -> str:
        """Begin the span of a request, under that of its client where it names one; return what the request
        belongs to here: this span."""
        from opentelemetry.trace import SpanKind

        span = self._begin(request, self._named(traceparent), SpanKind.SERVER, {})
        self._requests[number] = Cause(span)
        return self._name_of(span)

    def generation_begun(self) -> str:
        """Begin a trace for what a front end is asked for; return what its calls belong to."""
        span = self._tracer.start_span("Generation", attributes={"kvsp.role": self._role})
        span.end()
        return self._name_of(span)

    def _named(self, traceparent: str | None) -> Any:
        return self._propagator.extract({} if traceparent is None else {"traceparent": traceparent})

    def _name_of(self, span: Span) -> str:
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent") or new_traceparent()  # there is none where the SDK is off

    def request_ended(self, number: int, *, complete: bool) -> None:
        """End the span of a request."""
        if cause := self._requests.pop(number, None):
            _end(cause.span, None if complete else "cut off")

    # Calls

    def call_begun(self, call: Call, cause: Cause | None) -> Call:
        """Begin the span of a call; return the call as it is to be sent.

        What the role says that the call is for is its parent; else it is `cause`.
        """
        from opentelemetry.trace import SpanKind, set_span_in_context

        if call.traceparent is not None:
            cause, parent = None, self._named(call.traceparent)
        elif cause is None or cause.depth >= _MAX_DEPTH:
            cause, parent = None, None
        else:
            parent = set_span_in_context(cause.span)
        peer = urlsplit(call.base_uri)
        of_peer: dict[str, str | int] = {
            "server.address": peer.hostname or "",
            "server.port": peer.port or 443,
        }
        span = self._begin(call.request, parent, SpanKind.CLIENT, of_peer)
        self._calls[call.call_id] = Cause(span, 0 if cause is None else cause.depth + 1)
        return attrs.evolve(call, traceparent=self._name_of(span))

    def call_ended(self, number: int, status: int | None) -> None:
        """End the span of a call; `status` is that of its answer, where one has come."""
        if cause := self._calls.get(number):
            if status is not None:
                cause.span.set_attribute("http.response.status_code", status)
            _end(cause.span, "no answer" if status is None else None)

    def call_forgotten(self, number: int) -> None:
        """End the span of a call that its role has given up, and forget it: no input comes of it."""
        cause = self._calls.pop(number, None)
        if cause is not None and cause.span.is_recording():
            _end(cause.span, "given up")

    # What a role takes in and wants done

    def cause_of(self, item: Input) -> Cause | None:
        """Return in which span an input belongs: its request's, its call's, that in which its job began."""
        match item:
            case AnswerReceived() | BlockReceived() | StreamEnded() | CallFailed():
                return self._calls.pop(item.call_id, None)
            case LineReceived() | StreamStarted():
                return self._calls.get(item.call_id)
            case JobDone() | JobFailed():
                return self._jobs.pop(item.job_id, None)
            case _:
                return self._requests.get(getattr(item, "request_id", 0))

    def wanted(self, effect: Effect, cause: Cause | None) -> None:
        """Take note of an effect that is carried out."""
        match effect:
            case Respond(request_id=number, response=response):
                if found := self._requests.get(number):
                    found.span.set_attribute("http.response.status_code", response.status)
            case Observe(name=name, value=value, labels=labels):
                if cause is not None and cause.span.is_recording():
                    cause.span.add_event(name, {"value": value, **dict(labels)})
            case Store() | ReadBlock():
                if cause is not None:
                    self._jobs[effect.job_id] = cause
            case CancelCall(call_id=number):
                self.call_forgotten(number)
            case _:
                pass

    def _begin(self, request: Request, parent: Any, kind: Any, more: Mapping[str, str | int]) -> Span:
        operation = self._router.route(request)
        unknown = isinstance(operation, Refusal | Problem)
        attributes = {"kvsp.role": self._role, "http.request.method": request.method, **more}
        name = "unknown resource" if unknown else type(operation).__name__
        return self._tracer.start_span(name, parent, kind, {} if unknown else attributes)


def _end(span: Span, failure: str | None) -> None:
    from opentelemetry.trace import StatusCode

    if failure is not None:
        span.set_status(StatusCode.ERROR, failure)
    span.end()


class TracedDriver(Driver):
    """A driver that says to `traces` what it does."""

    def __init__(self, *arguments: Any, traces: Traces, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._traces = traces
        self._cause: Cause | None = None
        self._causes: dict[int, Cause | None] = {}
        """Of effects that wait for what is not durable yet."""

    def _request_begins(self, number: int, exchange: Incoming) -> str:
        return self._traces.request_received(number, exchange.request, exchange.traceparent)

    def new_traceparent(self) -> str:
        """Begin a trace, and return what belongs to it."""
        return self._traces.generation_begun()

    def exchange_ended(self, exchange: Incoming, *, complete: bool, sent_bytes: int) -> None:
        """Take note that an exchange is over, and end its span."""
        number = self._numbers.get(id(exchange), 0)
        super().exchange_ended(exchange, complete=complete, sent_bytes=sent_bytes)
        self._traces.request_ended(number, complete=complete)

    def call_over(self, call_id: int) -> None:
        """Forget a call that has ended, and end its span."""
        if call := self._calls.get(call_id):
            self._traces.call_ended(call_id, None if call.response is None else call.response.status)
        super().call_over(call_id)

    def _guarded(self, step: Callable[..., tuple[Effect, ...]], *item: Input) -> None:
        self._cause = self._traces.cause_of(item[0]) if item else None
        super()._guarded(step, *item)

    def _order(self, effect: Effect) -> None:
        if not isinstance(effect, Persist):  # which is never carried out
            self._causes[id(effect)] = self._cause
        super()._order(effect)

    def _execute(self, effect: Effect) -> None:
        cause = self._causes.pop(id(effect), None)
        self._traces.wanted(effect, cause)
        super()._execute(self._traces.call_begun(effect, cause) if isinstance(effect, Call) else effect)


class Exporting:
    """Where the spans of a process go."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider

    def of_role(self, role: str) -> Traces:
        """Return the traces of a role."""
        return Traces(self._provider.get_tracer("kvsp"), role)

    def close(self) -> None:
        """Send what is left; blocks, for a bounded time."""
        self._provider.shutdown()


def open_traces(environment: Mapping[str, str] = os.environ) -> Exporting | None:
    """Return where spans go, as the standard ``OTEL_`` variables say; None where they name no exporter.

    ``OTEL_TRACES_EXPORTER`` may be ``otlp``, ``console`` or ``none``; a collector alone means ``otlp``. Where
    the extra is not installed, that is logged.
    """
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() or "otlp"
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none"
    if off or not any(environment.get(name) for name in _SWITCHES):
        return None
    log = structlog.get_logger()
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        log.warning("no traces: the extra otel is missing; in a checkout run: pip install '.[otel]'")
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    if exporter == "console":
        made: Any = ConsoleSpanExporter()
    elif exporter == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        made = OTLPSpanExporter()
    else:
        log.warning("no traces: OTEL_TRACES_EXPORTER may be otlp, console or none", found=exporter)
        return None
    name = environment.get("OTEL_SERVICE_NAME") or "kvsp"
    provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(made))
    return Exporting(provider)
