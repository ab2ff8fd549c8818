"""Traces: one OpenTelemetry span per request, made of its record when it has ended, and sent over OTLP by a thread.

While a request runs, all that it costs is two random numbers and one header line. Needs the extra `otel`. No span holds
a word of a prompt or a key.
"""

import logging
import random
from collections.abc import Mapping
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from fairshare.gateway.options import TracingSpec
from fairshare.gateway.ports import Outcome, RequestRecord
from fairshare.gateway.record_thread import RecordThread
from fairshare.wire.trace_context import Trace, continued

log = logging.getLogger("fairshare.gateway")

MOST_WAITING = 20_000
"""Spans that wait to be sent."""

SEND_SECONDS = 1.0
"""How long spans are gathered."""

MOST_AT_ONCE = 512
"""Spans in one message."""

_SCOPE = InstrumentationScope("fairshare", version("fairshare"))


class Tracing(RecordThread):
    """Gives each request its place in a trace, and sends the spans of those that have ended (a `Recorder`)."""

    def __init__(self, spec: TracingSpec, *, exporter: SpanExporter | None = None) -> None:
        """`exporter`: None: to the endpoint of `spec`."""
        super().__init__("traces", every_seconds=SEND_SECONDS, most_waiting=MOST_WAITING)
        self._sample = spec.sample
        self._exporter = exporter or OTLPSpanExporter(endpoint=spec.endpoint)
        # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say more, or otherwise.
        self._resource = Resource.create({"service.version": version("fairshare")})
        if str(self._resource.attributes["service.name"]).startswith("unknown_service"):
            self._resource = self._resource.merge(Resource({"service.name": "fairshare"}))
        self._failing = False

    # ------------------------------------------------------------------ on the event loop

    def begin(self, forwarded: bytes) -> tuple[Trace, bytes]:
        """A request has arrived: its span, and the header lines for its engine."""
        return continued(forwarded, random_bits=random.getrandbits, draw=self._draw)

    def finished(self, record: RequestRecord) -> None:
        if record.trace is not None and record.trace.sampled:
            super().finished(record)

    def _draw(self) -> bool:
        return random.random() < self._sample

    # ------------------------------------------------------------------ on its thread

    def stop(self) -> None:
        super().stop()
        self._exporter.shutdown()

    def take(self, records: list[RequestRecord], lost: int) -> None:
        for first in range(0, len(records), MOST_AT_ONCE):
            spans = [span_of(record, self._resource) for record in records[first : first + MOST_AT_ONCE]]
            failed = self._exporter.export(spans) is not SpanExportResult.SUCCESS
            lost += len(spans) if failed else 0
            if failed != self._failing:
                self._failing = failed
                if failed:
                    log.error(
                        "Traces cannot be sent, so their spans are lost; look at the collector and at tracing.endpoint."
                    )
                else:
                    log.info("Traces are sent again.")
        if lost and not self._failing:
            log.warning("%d spans were lost: the collector takes them too slowly.", lost)


def span_of(record: RequestRecord, resource: Resource) -> ReadableSpan:
    """The span of a request that has ended, and that has a trace."""
    trace = record.trace
    assert trace is not None
    events: list[Event] = []
    if record.sent_seconds is not None:
        waited = {"fairshare.held_seconds": record.held_seconds, "fairshare.recalls": record.recalls}
        events.append(Event("sent to the engine", waited, _at(record, record.sent_seconds)))
    if record.first_byte_seconds is not None:
        events.append(Event("first byte to the client", {}, _at(record, record.first_byte_seconds)))
    broke = record.outcome is Outcome.FAILED or record.status >= 500
    return ReadableSpan(
        name=record.endpoint or "unknown path",
        context=_context(trace.trace_id, trace.span_id, remote=False),
        parent=None if trace.parent_span_id is None else _context(trace.trace_id, trace.parent_span_id, remote=True),
        resource=resource,
        attributes=_attributes(record),
        events=events,
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR, record.reason) if broke else Status(),
        start_time=_at(record, 0.0),
        end_time=_at(record, record.total_seconds),
        instrumentation_scope=_SCOPE,
    )


def _attributes(record: RequestRecord) -> Mapping[str, str | int | float | bool]:
    """Names of OpenTelemetry's conventions where there are any; what is empty is left out."""
    attributes: dict[str, str | int | float | bool | None] = {
        "http.route": record.endpoint,
        "http.response.status_code": record.status,
        "error.type": record.reason,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "fairshare.request_id": record.id,
        "fairshare.team": record.team,
        "fairshare.key": record.key_id,
        "fairshare.pool": record.pool,
        "fairshare.served_by": record.served_by,
        "fairshare.engine": record.instance_id,
        "fairshare.service_class": record.service_class.name.lower(),
        "fairshare.standing": None if record.standing is None else record.standing.value,
        "fairshare.priority": record.priority,
        "fairshare.slots": record.slots,
        "fairshare.stream": record.stream,
        "fairshare.outcome": record.outcome.value,
        "fairshare.held_seconds": record.held_seconds,
        "fairshare.added_seconds": record.added_seconds,
        "fairshare.cost_units": record.cost_units,
        "fairshare.recalls": record.recalls,
        "fairshare.retries": record.retries,
    }
    return {name: value for name, value in attributes.items() if value is not None and value != ""}


def _context(trace_id: str, span_id: str, *, remote: bool) -> SpanContext:
    return SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=remote, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


def _at(record: RequestRecord, seconds: float) -> int:
    """Nanoseconds since 1970."""
    return round((record.arrived_at + seconds) * 1e9)
