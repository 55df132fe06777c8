"""A Tracer over OpenTelemetry's SDK, sending by OTLP over gRPC. The one file that imports OpenTelemetry. Knows no request."""

import logging
import os
import socket
import threading

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import Span as OpenTelemetrySpan

from espalier import __version__
from espalier.cluster import tracing
from espalier.cluster.config import TraceConfig
from espalier.cluster.logs import ROOT
from espalier.cluster.trace_context import TraceContext

# Spans are seen so long after their end.
SEND_PERIOD_S = 1.0
EXPORT_TIMEOUT_S = 5
CLOSE_S = 5.0
KINDS = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}


class OtelSpan:
    """A tracing.Span."""

    def __init__(self, span: OpenTelemetrySpan) -> None:
        self._span = span

    @property
    def context(self) -> TraceContext:
        told = self._span.get_span_context()
        return TraceContext(
            f"00-{told.trace_id:032x}-{told.span_id:016x}-{told.trace_flags:02x}", told.trace_state.to_header()
        )

    def end(self, attributes: tracing.Attributes, *, error: str | None = None, at: float | None = None) -> None:
        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_nanoseconds(at))


class OtelTracer:
    """A tracing.Tracer. ratio: of the traces that begin here, the share that is sampled; others follow their parent."""

    def __init__(self, processor: SpanProcessor, *, service: str, ratio: float) -> None:
        resource = Resource.create(
            {
                "service.name": service,
                "service.version": __version__,
                "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
            }
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)), resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("espalier", __version__)

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: tracing.Attributes,
        *,
        kind: tracing.SpanKind = "internal",
        at: float | None = None,
    ) -> tracing.Span:
        # Never the parent of OpenTelemetry's own context: other libraries of the process may use that.
        context = Context() if parent is None else set_span_in_context(_remote(parent), Context())
        span = self._tracer.start_span(
            name, context, kind=KINDS[kind], attributes=dict(attributes), start_time=_nanoseconds(at)
        )
        return OtelSpan(span)

    def close(self) -> None:
        # The SDK's own bound is longer than a process that stops has.
        closing = threading.Thread(target=self._provider.shutdown, name="close tracing", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def otlp_tracer(config: TraceConfig, service: str) -> OtelTracer:
    """Headers, certificates and resource attributes come from OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_HEADERS and so on)."""
    # The exporter is in an extra; what is above comes with Ray as well.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    # A collector that cannot be reached is told where everything else is.
    theirs = logging.getLogger("opentelemetry")
    theirs.handlers, theirs.propagate = list(logging.getLogger(ROOT).handlers), False
    exporter = OTLPSpanExporter(
        endpoint=config.endpoint, insecure=config.endpoint.startswith("http:"), timeout=EXPORT_TIMEOUT_S
    )
    processor = BatchSpanProcessor(exporter, schedule_delay_millis=SEND_PERIOD_S * 1000)
    return OtelTracer(processor, service=service, ratio=config.ratio)


def _remote(parent: TraceContext) -> NonRecordingSpan:
    return NonRecordingSpan(
        SpanContext(
            int(parent.trace_id, 16),
            int(parent.span_id, 16),
            is_remote=True,
            trace_flags=TraceFlags(parent.flags),
            trace_state=TraceState.from_header([parent.tracestate]) if parent.tracestate else None,
        )
    )


def _nanoseconds(at: float | None) -> int | None:
    return None if at is None else int(at * 1e9)
