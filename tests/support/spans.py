"""A tracer whose spans stay in this process, over OpenTelemetry's own SDK, and how tests read them."""

from typing import TYPE_CHECKING, Any

from tests.support.tools import require_module

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

CALLER_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER_SPAN = "00f067aa0ba902b7"
CALLER = {"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01", "tracestate": "vendor=one"}


class KeptSpans:
    """tracer: what the code under test is given. Skips the test where there is no SDK."""

    def __init__(self, *, ratio: float = 1.0) -> None:
        export = require_module("opentelemetry.sdk.trace.export")
        memory = require_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")
        from espalier.cluster.otel_tracer import OtelTracer

        self._exporter = memory.InMemorySpanExporter()
        self.tracer = OtelTracer(export.SimpleSpanProcessor(self._exporter), service="test", ratio=ratio)

    def all(self) -> "tuple[ReadableSpan, ...]":
        """Every span that has ended, in the order of their ends."""
        ended: tuple[ReadableSpan, ...] = self._exporter.get_finished_spans()
        return ended

    def named(self, name: str) -> "list[ReadableSpan]":
        return [span for span in self.all() if span.name == name]

    def one(self, name: str) -> "ReadableSpan":
        [span] = self.named(name)
        return span


def attributes(span: "ReadableSpan") -> dict[str, Any]:
    return dict(span.attributes or {})


def parent_id(span: "ReadableSpan") -> str | None:
    return None if span.parent is None else f"{span.parent.span_id:016x}"


def span_id(span: "ReadableSpan") -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def trace_id(span: "ReadableSpan") -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def status(span: "ReadableSpan") -> tuple[str, str | None]:
    """`UNSET` or `ERROR`, and the error's kind."""
    return span.status.status_code.name, span.status.description
