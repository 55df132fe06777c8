"""Origin: the client's request that a piece of work is done for. JSON logs and spans carry it, at the gateway and at the replicas."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from espalier.cluster.trace_context import TraceContext


@dataclass(frozen=True, slots=True)
class Origin:
    """request_id: the `x-request-id` of the reply. trace: the span to be a part of, ours or the caller's; None when there is neither."""

    request_id: str
    trace: TraceContext | None = None


# Of the task at hand; tasks that it starts inherit it.
ORIGIN: ContextVar[Origin | None] = ContextVar("origin", default=None)


@contextmanager
def at_work_for(origin: Origin) -> Iterator[None]:
    """What is logged inside is said to be of this request."""
    token = ORIGIN.set(origin)
    try:
        yield
    finally:
        ORIGIN.reset(token)
