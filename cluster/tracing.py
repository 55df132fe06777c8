"""Tracing as the rest of the cluster sees it: a Tracer starts spans, a Span has a context for its children and one end.

Off unless an endpoint is configured: then there is no Tracer anywhere, and nothing of OpenTelemetry is imported (otel_tracer.py does that).
Attributes are names, numbers and hashes; the text of prompts, replies and error messages never is one.
"""

import importlib.util
from collections.abc import Mapping
from typing import Literal, Protocol

from espalier.cluster.config import TraceConfig
from espalier.cluster.trace_context import TraceContext
from espalier.replicas.errors import InvalidRequestError

Value = str | int | float | tuple[str, ...]
Attributes = Mapping[str, Value]
# server: work that came in from another process.
SpanKind = Literal["server", "internal"]
EXPORTER = "opentelemetry.exporter.otlp.proto.grpc"


class Span(Protocol):
    """One piece of work, under way."""

    @property
    def context(self) -> TraceContext:
        """What its children name as their parent."""
        ...

    def end(self, attributes: Attributes, *, error: str | None = None, at: float | None = None) -> None:
        """It is over; call it once. error: the kind of failure that ended it. at: seconds since the epoch; now when None."""
        ...


class Tracer(Protocol):
    """Makes the spans of one process."""

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Attributes,
        *,
        kind: SpanKind = "internal",
        at: float | None = None,
    ) -> Span:
        """A span from `at` (seconds since the epoch; now when None) on. Without a parent it begins a trace."""
        ...

    def close(self) -> None:
        """Send what has ended; gives up after a few seconds. Spans that end later are lost."""
        ...


def require_opentelemetry() -> None:
    """Raises InvalidRequestError when the extra that tracing needs is not installed."""
    try:
        found = importlib.util.find_spec(EXPORTER) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise InvalidRequestError(
            "trace_endpoint: needs OpenTelemetry's OTLP exporter: pip install 'espalier[tracing]'",
            param="trace_endpoint",
        )


def start_tracing(config: TraceConfig | None, service: str) -> Tracer | None:
    """The tracer of this process, or None when tracing is off. service: what the process is called in traces."""
    if config is None:
        return None
    require_opentelemetry()
    from espalier.cluster.otel_tracer import otlp_tracer

    return otlp_tracer(config, service)
