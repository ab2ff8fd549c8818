"""Spans, as a collector gets them."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from fairshare.core.decisions import Mode
from fairshare.gateway.options import TracingSpec
from fairshare.gateway.tracing import MOST_AT_ONCE, Tracing
from gateway.rig import STREAM, Rig, run
from gateway.test_access_log import record

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
CONTEXT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "a=1"}


class Collector(HTTPServer):
    """Takes spans over OTLP and keeps them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Post)
        self.bodies: list[bytes] = []
        self.paths: list[str] = []

    @property
    def spans(self) -> list[Any]:
        return [span for scope in self._scopes() for span in scope.spans]

    @property
    def resources(self) -> list[dict[str, str]]:
        return [
            {each.key: each.value.string_value for each in resource.resource.attributes}
            for body in self.bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        ]

    def _scopes(self) -> list[Any]:
        return [
            scope
            for body in self.bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
        ]


class _Post(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


class Kept(SpanExporter):
    """In the place of a collector."""

    def __init__(self) -> None:
        self.batches: list[list[ReadableSpan]] = []
        self.result = SpanExportResult.SUCCESS

    def export(self, spans: Any) -> SpanExportResult:
        self.batches.append(list(spans))
        return self.result


def tracing(exporter: SpanExporter, *, sample: float = 1.0) -> Tracing:
    return Tracing(TracingSpec(endpoint="http://unused", sample=sample), exporter=exporter)


def test_a_request_is_one_span_in_its_clients_trace_and_its_engine_is_told() -> None:
    async def main() -> None:
        with collector() as told:
            traces = Tracing(TracingSpec(endpoint=f"http://127.0.0.1:{told.server_port}/v1/traces"))
            async with Rig.started(mode=Mode.HOLD) as rig:
                rig.driver.tracer = traces
                secret = "the moon is made of cheese"
                body = STREAM | {"messages": [{"role": "user", "content": secret}]}
                reply = await rig.ask("/v1/chat/completions", body, headers=CONTEXT)
                traces.finished(await rig.kept.wait(1))
            traces.start()
            traces.stop()
            (span,) = told.spans
            up = rig.engine.asked[0].headers
            assert span.trace_id.hex() == TRACE_ID
            assert span.parent_span_id.hex() == PARENT_ID
            assert up["traceparent"] == f"00-{TRACE_ID}-{span.span_id.hex()}-01"
            assert up["tracestate"] == "a=1"
            assert span.name == "/v1/chat/completions"
            assert [event.name for event in span.events] == ["sent to the engine", "first byte to the client"]
            assert span.start_time_unix_nano <= span.events[0].time_unix_nano <= span.end_time_unix_nano
            found = attributes(span)
            assert found["fairshare.team"] == "red"
            assert found["fairshare.request_id"] == reply.headers["x-request-id"]
            assert found["fairshare.standing"] == "within-share"
            assert found["gen_ai.usage.output_tokens"] == 5
            assert found["http.response.status_code"] == 200
            assert told.paths == ["/v1/traces"]
            assert told.resources[0]["service.name"] == "fairshare"
            for unwanted in (secret, "fs-red", "engine-secret"):
                assert unwanted.encode() not in told.bodies[0]

    run(main)


def test_without_a_clients_context_the_trace_begins_here_and_a_refusal_has_its_span_too() -> None:
    async def main() -> None:
        kept = Kept()
        traces = tracing(kept)
        async with Rig.started() as rig:
            rig.driver.tracer = traces
            await rig.ask()
            await rig.ask(body={"model": "unknown"}, headers=CONTEXT)
            for each in rig.records:
                traces.finished(each)
            traces.write()
            begun, refused = kept.batches[0]
            assert begun.parent is None
            assert begun.context.trace_id
            assert rig.engine.asked[0].headers["traceparent"] == (
                f"00-{begun.context.trace_id:032x}-{begun.context.span_id:016x}-01"
            )
            assert refused.parent is not None
            assert f"{refused.parent.span_id:016x}" == PARENT_ID
            assert refused.attributes is not None
            assert refused.attributes["error.type"] == "model_not_found"

    run(main)


def test_without_tracing_a_clients_context_goes_to_the_engine_as_it_is() -> None:
    async def main() -> None:
        async with Rig.started() as rig:
            await rig.ask(headers=CONTEXT)
            await rig.ask()
            first, second = (asked.headers for asked in rig.engine.asked)
            assert first["traceparent"] == CONTEXT["traceparent"]
            assert "traceparent" not in second
            assert [each.trace for each in rig.records] == [None, None]

    run(main)


def test_what_is_not_sampled_is_not_sent_and_its_engine_is_told_so() -> None:
    kept = Kept()
    traces = tracing(kept, sample=0.0)
    trace, forwarded = traces.begin(b"")
    traces.finished(record(trace=trace))
    traces.write()
    assert forwarded.endswith(b"-00\r\n")
    assert kept.batches == []
    sampled, _ = traces.begin(f"traceparent: {CONTEXT['traceparent']}\r\n".encode())
    traces.finished(record(trace=sampled))
    traces.write()
    assert len(kept.batches) == 1


def test_a_request_that_broke_is_an_error_and_one_that_was_wrong_is_not() -> None:
    kept = Kept()
    traces = tracing(kept)
    for status in (200, 400, 503):
        traces.finished(record(status=status, reason="r" if status > 200 else "", trace=traces.begin(b"")[0]))
    traces.write()
    assert [span.status.status_code.name for span in kept.batches[0]] == ["UNSET", "UNSET", "ERROR"]


def test_many_spans_go_in_several_messages() -> None:
    kept = Kept()
    traces = tracing(kept)
    for _ in range(MOST_AT_ONCE + 1):
        traces.finished(record(trace=traces.begin(b"")[0]))
    traces.write()
    assert [len(batch) for batch in kept.batches] == [MOST_AT_ONCE, 1]


def test_a_collector_that_is_away_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    kept = Kept()
    traces = tracing(kept)
    for result in (SpanExportResult.FAILURE, SpanExportResult.FAILURE, SpanExportResult.SUCCESS):
        kept.result = result
        traces.finished(record(trace=traces.begin(b"")[0]))
        traces.write()
    assert caplog.messages == [
        "Traces cannot be sent, so their spans are lost; look at the collector and at tracing.endpoint.",
        "Traces are sent again.",
    ]


def test_the_gateway_runs_without_the_extra() -> None:
    script = "import sys, fairshare.compose, fairshare.cli; print([m for m in sys.modules if 'opentelemetry' in m])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
