"""One table for both wires: every error kind has its row, and nothing internal leaves."""

import logging

import grpc
import pytest

from espalier.cluster.ingress.errors import (
    WIRE_STATUS,
    UnauthenticatedError,
    error_body,
    grpc_status,
    http_status,
    retry_after_s,
    wire_error,
)
from espalier.replicas.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    ReplicaLostError,
    RequestFailedError,
)


def _kinds(kind: type[EngineError]) -> set[type[EngineError]]:
    return {kind}.union(*(_kinds(sub) for sub in kind.__subclasses__()))


def test_every_kind_has_a_row_and_every_row_a_kind() -> None:
    # Kinds of the command line never reach a wire.
    served = ("espalier.replicas.", "espalier.cluster.")
    ours = {kind for kind in _kinds(EngineError) if kind.__module__.startswith(served)}
    assert {kind.code for kind in ours} == WIRE_STATUS.keys()


@pytest.mark.parametrize(
    ("error", "http", "status"),
    [
        (InvalidRequestError("x"), 400, grpc.StatusCode.INVALID_ARGUMENT),
        (UnauthenticatedError("x"), 401, grpc.StatusCode.UNAUTHENTICATED),
        (ModelNotFoundError("x"), 404, grpc.StatusCode.NOT_FOUND),
        (QueueFullError("x"), 429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (RequestFailedError("x"), 500, grpc.StatusCode.INTERNAL),
        (ReplicaLostError("x"), 502, grpc.StatusCode.ABORTED),
        (DrainingError("x"), 503, grpc.StatusCode.UNAVAILABLE),
        (DeadlineExceededError("x"), 504, grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_statuses(error: EngineError, http: int, status: grpc.StatusCode) -> None:
    assert http_status(error) == http
    assert grpc_status(error) is status


def test_a_kind_without_a_row_is_an_internal_error() -> None:
    error = EngineError("x")
    error.code = "made_up"  # type: ignore[misc]
    assert (http_status(error), grpc_status(error)) == (500, grpc.StatusCode.INTERNAL)


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (QueueFullError("x"), 1),
        (QueueFullError("x", retry_after_s=0.2), 1),
        (QueueFullError("x", retry_after_s=2.1), 3),
        (DrainingError("x"), 5),
        (InvalidRequestError("x"), None),
        (RequestFailedError("x"), None),
    ],
)
def test_retry_after_is_whole_seconds_or_absent(error: EngineError, seconds: int | None) -> None:
    assert retry_after_s(error) == seconds


def test_error_body_is_openais() -> None:
    assert error_body(InvalidRequestError("top_p: no", param="top_p")) == {
        "error": {"message": "top_p: no", "type": "invalid_request_error", "param": "top_p", "code": "invalid_request"}
    }


def test_unexpected_errors_are_logged_once_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        shown = wire_error(RuntimeError("secret path /etc/x"))
    assert shown.code == "internal_error"
    assert "secret" not in shown.message
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert "secret path" in caplog.text


def test_engine_errors_pass_unlogged(caplog: pytest.LogCaptureFixture) -> None:
    error = QueueFullError("full")
    assert wire_error(error) is error
    assert not caplog.records
