"""How an error leaves over gRPC: status, details that begin with the field at fault, trailing metadata. The table itself is errors.py's."""

from typing import Any, NoReturn

import grpc.aio

from espalier.cluster.ingress.errors import grpc_status, retry_after_s
from espalier.replicas.errors import EngineError

PARAM_KEY = "espalier-param"
RETRY_AFTER_KEY = "retry-after"


def details(error: EngineError) -> str:
    """The error's message, with the name of the field at fault in front."""
    if error.param is None or error.message.startswith(error.param):
        return error.message
    return f"{error.param}: {error.message}"


def trailing_metadata(error: EngineError) -> tuple[tuple[str, str], ...]:
    """`espalier-param` and `retry-after` (whole seconds), each where there is something to say."""
    metadata = []
    if error.param is not None:
        # Metadata takes visible ASCII only, and a param may quote a key of the client's.
        metadata.append((PARAM_KEY, "".join(c if " " <= c <= "~" else "?" for c in error.param)))
    seconds = retry_after_s(error)
    if seconds is not None:
        metadata.append((RETRY_AFTER_KEY, str(seconds)))
    return tuple(metadata)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: EngineError) -> NoReturn:
    """End the call with the error; raises grpc.aio.AbortError, which the server expects."""
    await context.abort(grpc_status(error), details(error), trailing_metadata(error))
