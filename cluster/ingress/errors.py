"""How errors look on the wires: one table from error code to HTTP status, gRPC status and OpenAI error type. Knows no request.

Errors that only an ingress can raise (no key, body too large) are kinds of EngineError here, with codes in the same table.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc

from espalier.replicas.errors import EngineError

log = logging.getLogger(__name__)


class UnauthenticatedError(EngineError):
    """No acceptable API key came with the call."""

    code: ClassVar[str] = "invalid_api_key"


class BodyTooLargeError(EngineError):
    """The body is larger than this server reads."""

    code: ClassVar[str] = "body_too_large"


class RouteNotFoundError(EngineError):
    """Nothing is served at that path."""

    code: ClassVar[str] = "unknown_url"


class MethodNotAllowedError(EngineError):
    """The path is served, but not with that method."""

    code: ClassVar[str] = "method_not_allowed"


@dataclass(frozen=True, slots=True)
class WireStatus:
    """One row of the table. openai_type: `error.type` of the body. retry_after_s: for errors worth a retry that do not say when."""

    http: int
    grpc: grpc.StatusCode
    openai_type: str
    retry_after_s: float | None = None


_INVALID = "invalid_request_error"
_SERVER = "server_error"
_INTERNAL = WireStatus(500, grpc.StatusCode.INTERNAL, _SERVER)

WIRE_STATUS: dict[str, WireStatus] = {
    "invalid_request": WireStatus(400, grpc.StatusCode.INVALID_ARGUMENT, _INVALID),
    "invalid_api_key": WireStatus(401, grpc.StatusCode.UNAUTHENTICATED, "authentication_error"),
    "model_not_found": WireStatus(404, grpc.StatusCode.NOT_FOUND, _INVALID),
    "unknown_url": WireStatus(404, grpc.StatusCode.UNIMPLEMENTED, _INVALID),
    "method_not_allowed": WireStatus(405, grpc.StatusCode.UNIMPLEMENTED, _INVALID),
    "body_too_large": WireStatus(413, grpc.StatusCode.RESOURCE_EXHAUSTED, _INVALID),
    "queue_full": WireStatus(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", retry_after_s=1.0),
    "internal_error": _INTERNAL,
    "request_failed": _INTERNAL,
    "checkpoint": _INTERNAL,
    # 502 and ABORTED, not 503 and UNAVAILABLE: tokens were already given out, so a blind retry is the client's decision.
    "replica_lost": WireStatus(502, grpc.StatusCode.ABORTED, _SERVER),
    "unavailable": WireStatus(503, grpc.StatusCode.UNAVAILABLE, _SERVER, retry_after_s=5.0),
    "deadline_exceeded": WireStatus(504, grpc.StatusCode.DEADLINE_EXCEEDED, _SERVER),
}


def wire_error(error: Exception) -> EngineError:
    """The error to show: EngineErrors as they are; anything else is logged here, with its traceback, and shown without internals."""
    if isinstance(error, EngineError):
        return error
    log.error("a request ended in an unexpected error", exc_info=error)
    return EngineError("internal error; the server's log has the details")


def http_status(error: EngineError) -> int:
    """HTTP status of the error; 500 for a code the table lacks."""
    return _row(error).http


def is_fault(code: str) -> bool:
    """Whether an error of that code is the server's fault, not the caller's."""
    return WIRE_STATUS.get(code, _INTERNAL).http >= 500


def grpc_status(error: EngineError) -> grpc.StatusCode:
    """gRPC status of the error; INTERNAL for a code the table lacks."""
    return _row(error).grpc


def retry_after_s(error: EngineError) -> int | None:
    """Whole seconds after which a retry makes sense, at least 1; None when a retry will not help."""
    row = _row(error)
    if row.retry_after_s is None:
        return None
    return max(1, math.ceil(row.retry_after_s if error.retry_after_s is None else error.retry_after_s))


def error_body(error: EngineError) -> dict[str, Any]:
    """OpenAI's error object."""
    row = _row(error)
    return {
        "error": {"message": error.message, "type": row.openai_type, "param": error.param, "code": error.code},
    }


def _row(error: EngineError) -> WireStatus:
    return WIRE_STATUS.get(error.code, _INTERNAL)
