"""The key check in front of every gRPC call but the health probes, which tell only SERVING or not. Knows no service by name but that one."""

# grpc's handler type takes parameters only in its stubs.
from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from espalier.cluster.call import ANONYMOUS, GatewayMetrics
from espalier.cluster.ingress.auth import ApiKeys, presented_key
from espalier.cluster.ingress.errors import UnauthenticatedError
from espalier.cluster.ingress.grpc_status import abort

OPEN_SERVICE = "/grpc.health.v1.Health/"
# Label of the key that the call at hand came with; a call and its interceptors run in one task.
CLIENT: ContextVar[str] = ContextVar("client", default=ANONYMOUS)


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED, and counts it, without a valid key in `authorization: Bearer KEY` or `x-api-key: KEY`."""

    def __init__(self, keys: ApiKeys, metrics: GatewayMetrics) -> None:
        self._keys = keys
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        path = handler_call_details.method
        if not path.startswith(OPEN_SERVICE):
            # Values are bytes only under names that end in `-bin`.
            metadata = {str(name): str(value) for name, value in handler_call_details.invocation_metadata}
            try:
                key = presented_key(metadata.get("authorization"), metadata.get("x-api-key"))
                CLIENT.set(self._keys.authenticate(key))
            except UnauthenticatedError as error:
                self._metrics.grpc_request(path.rpartition("/")[2], grpc.StatusCode.UNAUTHENTICATED.name)
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: UnauthenticatedError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler for a call of any shape, which ends it before its messages are read."""

    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
