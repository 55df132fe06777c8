"""What surrounds every call of InferenceService: its origin, for logs, and its span where tracing is on. Knows no method's meaning."""

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from espalier.cluster.ingress.errors import is_fault
from espalier.cluster.origin import Origin, at_work_for
from espalier.cluster.trace_context import TRACEPARENT, TRACESTATE, read_trace_context
from espalier.cluster.tracing import Tracer, Value


@dataclass(slots=True)
class GrpcCall:
    """A call under way. code, error: how it ended, as far as its handler has told; error is the code of an EngineError."""

    origin: Origin
    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    error: str | None = None


@contextmanager
def grpc_call(method: str, metadata: Iterable[tuple[str, str | bytes]], tracer: Tracer | None) -> Iterator[GrpcCall]:
    """The surroundings of one call, until its handler is done, however that ends. method: with its service, `SERVICE/METHOD`."""

    headers: dict[str, list[str]] = {TRACEPARENT: [], TRACESTATE: []}
    for key, value in metadata:
        if key in headers:
            headers[key].append(str(value))
    trace = read_trace_context(headers[TRACEPARENT], headers[TRACESTATE])
    span = None
    if tracer is not None:
        attributes = {"rpc.system.name": "grpc", "rpc.method": method}
        span = tracer.start(method, trace, attributes, kind="server")
        trace = span.context
    call = GrpcCall(Origin(uuid.uuid4().hex, trace))
    try:
        with at_work_for(call.origin):
            yield call
    finally:
        if span is not None:
            ends: dict[str, Value] = {
                "rpc.response.status_code": call.code.name,
                "espalier.request.id": call.origin.request_id,
            }
            if call.error is not None:
                ends["espalier.error.code"] = call.error
            span.end(ends, error=call.error if call.error is not None and is_fault(call.error) else None)
