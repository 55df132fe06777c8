"""What surrounds every HTTP request: key, error bodies, count, one log line, bounded reading of bodies. Knows no route's meaning."""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, replace

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from espalier.cluster.call import ANONYMOUS, GatewayMetrics
from espalier.cluster.ingress.auth import ApiKeys, presented_key
from espalier.cluster.ingress.disconnect import ClientDisconnectedError
from espalier.cluster.ingress.errors import (
    BodyTooLargeError,
    MethodNotAllowedError,
    RouteNotFoundError,
    error_body,
    http_status,
    is_fault,
    retry_after_s,
    wire_error,
)
from espalier.cluster.origin import ORIGIN, Origin, at_work_for
from espalier.cluster.trace_context import TRACEPARENT, TRACESTATE, read_trace_context
from espalier.cluster.tracing import Span, Tracer, Value
from espalier.replicas.errors import DrainingError, EngineError, InvalidRequestError

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
# Nobody receives this status; nginx logs it for clients that left.
STATUS_CLIENT_LEFT = 499
NO_ERROR = "-"
_RECORD = "espalier.record"
_BY_THE_CLOCK = frozenset({"/health", "/ready", "/metrics"})


@dataclass(slots=True)
class RequestRecord:
    """What the log line says of a request. Never a prompt, a reply or a key.

    origin: its request id, ours, in the log and in the reply's `x-request-id`, and its trace. span: None where it is not traced.
    client: label of the key that was presented.
    called: the gateway was asked to generate. error: code of the error that the reply ended in.
    """

    method: str
    route: str
    origin: Origin
    client: str = ANONYMOUS
    called: bool = False
    error: str = NO_ERROR
    status: int = 0
    span: Span | None = None

    @property
    def request_id(self) -> str:
        """The id in `origin`."""
        return self.origin.request_id

    def failed(self, code: str) -> None:
        """The reply ended in an error of that code."""
        self.error = code

    def log_fields(self) -> dict[str, str | int]:
        """The fields of its line."""
        return {
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "client": self.client,
            "request": self.request_id,
            "error": self.error,
        }


def record_of(request: Request) -> RequestRecord:
    """The record of a request that came through HttpFront."""
    record: RequestRecord = request.scope[_RECORD]
    return record


class HttpFront:
    """ASGI middleware around all routes.

    open_routes: paths that need no key. A request is counted under its path if that is in `routes`, under `other` if not; paths below
    `prefix_route`'s fixed part count under it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        metrics: GatewayMetrics,
        routes: frozenset[str],
        prefix_route: str,
        open_routes: frozenset[str],
        tracer: Tracer | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._routes = routes
        self._prefix_route = prefix_route
        self._prefix = prefix_route[: prefix_route.index("{")]
        self._open_routes = open_routes
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        trace = read_trace_context(headers.getlist(TRACEPARENT), headers.getlist(TRACESTATE))
        origin = Origin(uuid.uuid4().hex, trace)
        record = scope[_RECORD] = RequestRecord(scope["method"], self._route(scope["path"]), origin)
        with at_work_for(origin):
            await self._answer(record, scope, receive, send)

    async def _answer(self, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()

        async def recording_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            await self._run(record, scope, receive, recording_send)
        finally:
            self._metrics.http_request(record.route, record.status)
            if record.span is not None:
                _end_span(record.span, record)
            # Lines of probes and scrapes are of use only when something is looked for; the gateway has one for each call that it answers.
            told = record.route in _BY_THE_CLOCK or (record.called and record.error == NO_ERROR)
            seconds = round(time.monotonic() - started, 4)
            log.log(logging.DEBUG if told else logging.INFO, "http", extra={**record.log_fields(), "seconds": seconds})

    async def _run(self, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if record.route not in self._open_routes:
                headers = Headers(scope=scope)
                record.client = self._keys.authenticate(
                    presented_key(headers.get("authorization"), headers.get("x-api-key"))
                )
            if self._tracer is not None and record.route not in _BY_THE_CLOCK:
                self._begin_span(self._tracer, record)
            await self._app(scope, receive, send)
        except (ClientDisconnectedError, ClientDisconnect):
            record.status = STATUS_CLIENT_LEFT
            self._metrics.client_disconnect("http")
        except asyncio.CancelledError:
            # The server stops, and this request has not even come in whole.
            if record.status:
                raise
            await self._refuse(DrainingError("the gateway is stopping"), record, scope, receive, send)
        except Exception as error:
            await self._refuse(error, record, scope, receive, send)

    async def _refuse(
        self, error: Exception, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        shown = wire_error(error)
        record.failed(shown.code)
        if record.status == 0:
            await error_response(shown)(scope, receive, send)

    def _begin_span(self, tracer: Tracer, record: RequestRecord) -> None:
        """Only once the key is known to be good: strangers leave no traces."""
        attributes = {"http.request.method": record.method, "http.route": record.route}
        record.span = tracer.start(f"{record.method} {record.route}", record.origin.trace, attributes, kind="server")
        record.origin = replace(record.origin, trace=record.span.context)
        ORIGIN.set(record.origin)

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        return self._prefix_route if path.startswith(self._prefix) else "other"


def _end_span(span: Span, record: RequestRecord) -> None:
    ends: dict[str, Value] = {
        "http.response.status_code": record.status,
        "espalier.request.id": record.request_id,
        "espalier.client": record.client,
    }
    if record.error != NO_ERROR:
        ends["espalier.error.code"] = record.error
    span.end(ends, error=record.error if record.error != NO_ERROR and is_fault(record.error) else None)


def error_response(error: EngineError) -> Response:
    """OpenAI's error body under the status of the error's kind, with Retry-After where a retry makes sense."""
    headers = {}
    seconds = retry_after_s(error)
    if seconds is not None:
        headers["retry-after"] = str(seconds)
    status = http_status(error)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=status, headers=headers)


async def unrouted(request: Request, error: Exception) -> Response:
    """The answer to a path or a method that no route takes, in place of the framework's."""
    assert isinstance(error, HTTPException)
    kind = MethodNotAllowedError if error.status_code == 405 else RouteNotFoundError
    shown = kind(f"nothing is served at {request.method} {request.url.path[:200]}")
    record_of(request).failed(shown.code)
    response = error_response(shown)
    response.headers.update(error.headers or {})
    return response


async def read_json_bytes(request: Request) -> bytes:
    """The body, which must call itself JSON (or nothing). Raises InvalidRequestError, and BodyTooLargeError before more is read than fits."""
    content_type = request.headers.get("content-type", "application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequestError(
            f"content-type: must be application/json, not {content_type[:100]}", param="content-type"
        )
    too_large = BodyTooLargeError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise too_large
    return bytes(body)
