"""Every error that a request or a checkpoint can end in. Each kind carries a code; `cluster/ingress/errors.py` maps codes to wires.

Raised where: request.py and the ingress (InvalidRequestError), the scheduler's queue (QueueFullError, DeadlineExceededError),
the engine (RequestFailedError, DrainingError), the checkpoint loader (CheckpointError), the gateway (ModelNotFoundError, ReplicaLostError).
"""

from typing import Any, ClassVar


class EngineError(Exception):
    """Base of all errors that users see.

    message: a sentence for the user. param: the request field, config key or option at fault, if one is.
    retry_after_s: seconds after which trying again makes sense, if it does.
    """

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by positional args; ours have keywords and cross process borders.
        return (_rebuild, (type(self), self.message, self.param, self.retry_after_s))


def _rebuild(kind: type[EngineError], message: str, param: str | None, retry_after_s: float | None) -> EngineError:
    return kind(message, param=param, retry_after_s=retry_after_s)


class InvalidRequestError(EngineError):
    """The request itself is wrong; `param` names the field."""

    code = "invalid_request"


class ModelNotFoundError(EngineError):
    """No engine of that name is served here."""

    code = "model_not_found"


class QueueFullError(EngineError):
    """Bounded queue is full; try again after `retry_after_s`."""

    code = "queue_full"


class DeadlineExceededError(EngineError):
    """The request's deadline passed before it was finished."""

    code = "deadline_exceeded"


class DrainingError(EngineError):
    """This replica or gateway is stopping, or no replica is ready, and takes no new requests."""

    code = "unavailable"


class ReplicaLostError(EngineError):
    """The replica died after the request had produced tokens."""

    code = "replica_lost"


class RequestFailedError(EngineError):
    """Computing this request failed; its neighbours are untouched."""

    code = "request_failed"


class CheckpointError(EngineError):
    """A checkpoint cannot be served; the message names the file and the tensor or key."""

    code = "checkpoint"
