"""Spans of requests and of what they lead to, over several roles, and nothing confidential in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvsp_core.heads import Response
from kvsp_core.identity import Scope
from kvsp_core.messages import LookupRequest
from kvsp_core.resources import Lookup, request_for
from kvsp_core.roles.role import (
    AnswerReceived,
    BlockName,
    BodyArrived,
    Call,
    CallFailed,
    CancelCall,
    JobDone,
    Observe,
    ReadBlock,
    Respond,
)
from kvsp_services.request_log import new_traceparent
from kvsp_services.tracing import Traces, open_traces
from tests.adapters.services import test_cache_server
from tests.adapters.services.cluster import OPERATOR, Cluster, until
from tests.adapters.services.test_cache_server import Shell

KEY, SCOPE, COMPAT = "ab" * 32, "cd" * 16, "ef" * 32
HEAD, BODY = request_for(Lookup(), LookupRequest(scope_id=SCOPE, compat_id=COMPAT, block_keys=(KEY,)))


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter: InMemorySpanExporter) -> Traces:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Traces(provider.get_tracer("test"), "index")


def call(number: int) -> Call:
    return Call(
        call_id=number, base_uri="https://h1.example:8443/kvsp/", request=HEAD, body=BODY, timeout_ms=9
    )


def named(traceparent: str | None) -> tuple[int, int]:
    """Return the trace and the span that a field names."""
    _, trace, span, _ = (traceparent or "---").split("-")
    return int(trace, 16), int(span, 16)


def test_what_a_request_leads_to_is_in_its_trace(traces: Traces, exporter: InMemorySpanExporter) -> None:
    belongs_to = traces.request_received(1, HEAD, None)
    cause = traces.cause_of(BodyArrived(1, BODY))
    traces.wanted(Observe("kvsp_index_lookup_requests"), cause)
    traces.wanted(ReadBlock(5, 1, BlockName(COMPAT, SCOPE, KEY), "host"), cause)
    sent = traces.call_begun(call(7), traces.cause_of(JobDone(5)))
    traces.call_ended(7, 200)
    after = traces.cause_of(AnswerReceived(7, Response(status=200), b""))
    traces.call_begun(call(8), after)
    traces.call_ended(8, None)
    traces.wanted(Respond(1, Response(status=200), b""), cause)
    traces.request_ended(1, complete=True)
    first, second, request = exporter.get_finished_spans()
    assert [span.name for span in (first, second, request)] == ["Lookup"] * 3
    assert first.parent is not None
    assert second.parent is not None
    assert request.parent is None
    assert first.parent.span_id == request.context.span_id
    assert second.parent.span_id == first.context.span_id
    assert named(belongs_to) == (request.context.trace_id, request.context.span_id)
    assert named(sent.traceparent) == (first.context.trace_id, first.context.span_id)
    assert first.attributes == {
        "kvsp.role": "index",
        "http.request.method": "POST",
        "server.address": "h1.example",
        "server.port": 8443,
        "http.response.status_code": 200,
    }
    assert not second.status.is_ok
    assert [event.name for event in request.events] == ["kvsp_index_lookup_requests"]
    assert not traces._requests
    assert not traces._jobs


def test_a_request_is_in_the_trace_of_who_calls(traces: Traces, exporter: InMemorySpanExporter) -> None:
    sent = traces.call_begun(call(1), None)
    traces.request_received(1, sent.request, sent.traceparent)
    traces.request_ended(1, complete=False)
    traces.call_ended(1, 200)
    served, called = exporter.get_finished_spans()
    assert served.parent is not None
    assert served.parent.span_id == called.context.span_id
    assert not served.status.is_ok


@pytest.mark.parametrize(
    ("sampler", "traced"),
    [("parentbased_always_on", 0), ("always_on", 2), ("traceidratio", 2), ("always_off", 0)],
)
def test_behind_a_role_that_exports_nothing_a_role_traces_by_its_own_sampler(
    sampler: str, traced: int, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = Traces(provider.get_tracer("test"), "index")
    begun = new_traceparent()
    belongs_to = traces.request_received(1, HEAD, begun)
    sent = traces.call_begun(attrs.evolve(call(7), traceparent=belongs_to), None)
    traces.call_ended(7, 200)
    traces.request_ended(1, complete=True)
    assert len(exporter.get_finished_spans()) == traced
    for field in (belongs_to, sent.traceparent):
        assert named(field)[0] == named(begun)[0]
        assert (field or "").endswith("-01" if traced else "-00")


def test_a_call_is_in_the_trace_of_the_request_that_its_role_makes_it_for(
    traces: Traces, exporter: InMemorySpanExporter
) -> None:
    """Whatever the role was told of when it made it: what waits in a queue is often another's turn."""
    first, other = (traces.request_received(number, HEAD, None) for number in (1, 2))
    traces.call_begun(attrs.evolve(call(7), traceparent=first), traces.cause_of(BodyArrived(2, BODY)))
    traces.call_ended(7, 200)
    (span,) = exporter.get_finished_spans()
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == named(first)
    assert named(first)[0] != named(other)[0]


def test_what_a_front_end_is_asked_for_is_a_trace(traces: Traces, exporter: InMemorySpanExporter) -> None:
    traces.call_begun(attrs.evolve(call(1), traceparent=traces.generation_begun()), None)
    traces.call_ended(1, 200)
    generation, called = exporter.get_finished_spans()
    assert called.parent is not None
    assert called.parent.span_id == generation.context.span_id


def test_a_call_that_is_given_up_is_in_the_trace(traces: Traces, exporter: InMemorySpanExporter) -> None:
    traces.call_begun(call(1), None)
    traces.wanted(CancelCall(1), None)
    traces.call_ended(1, None)
    (span,) = exporter.get_finished_spans()
    assert span.status.description == "given up"
    assert not traces._calls


def test_calls_that_lead_to_calls_for_ever_are_many_traces_and_none_is_kept(
    traces: Traces, exporter: InMemorySpanExporter
) -> None:
    cause = None
    for number in range(1, 41):
        traces.call_begun(call(number), cause)
        traces.call_ended(number, 200)
        cause = traces.cause_of(AnswerReceived(number, Response(status=200), b""))
    traces.call_begun(call(99), None)
    traces.call_ended(99, None)
    traces.wanted(CancelCall(99), None)
    assert traces.cause_of(CallFailed(99, "")) is None
    assert not traces._calls
    of_each: dict[int, int] = {}
    for span in exporter.get_finished_spans():
        of_each[span.context.trace_id] = of_each.get(span.context.trace_id, 0) + 1
    assert max(of_each.values()) <= 9


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, ""),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, ""),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "may be otlp, console or none"),
    ],
)
def test_without_an_exporter_there_are_no_traces(
    environment: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert open_traces(environment) is None
    assert said in "".join(capsys.readouterr())


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    yield from test_cache_server.cluster.__wrapped__(tmp_path)  # type: ignore[attr-defined]


@pytest.mark.requirement("SE-5")
def test_a_block_that_is_stored_is_one_trace_over_two_roles_and_tells_nothing_of_it(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    shell = Shell(cluster, capfd)
    status, _, complained = shell.put(0)
    assert status == 0, complained
    assert until(lambda: shell.matched() == 1)
    assert cluster.stop() == 0
    text = (cluster.directory / "serve.out").read_text()
    spans = spans_in(text)
    (stored,) = [span for span in spans if span["name"] == "StoreBlock"]
    trace = [span for span in spans if span["context"]["trace_id"] == stored["context"]["trace_id"]]
    published = {(span["name"], span["attributes"]["kvsp.role"], span["kind"]) for span in trace}
    assert ("PublishReplica", "holder", "SpanKind.CLIENT") in published
    assert ("PublishReplica", "index", "SpanKind.SERVER") in published
    assert stored["attributes"]["http.response.status_code"] == 201
    scope = Scope(test_cache_server.SCOPE_KEY)
    for secret in (*shell.keys, scope.scope_id, test_cache_server.SCOPE_KEY.hex(), OPERATOR):
        assert secret not in text


def spans_in(text: str) -> list[dict[str, Any]]:
    """Return the spans that the console exporter has written, one JSON object after another."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while (start := text.find("{", at)) >= 0:
        span, at = decoder.raw_decode(text, start)
        found.append(span)
    return found
