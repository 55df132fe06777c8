"""grpc.health.v1 for one gateway: SERVING while its readiness says so. Status only, and so open to callers without a key."""

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from espalier.cluster.call import GenerateGateway

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class GatewayHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Check and Watch. services: the names that are answered for; "" is the whole server. watch_interval_s: how often Watch looks."""

    def __init__(self, gateway: GenerateGateway, services: frozenset[str], watch_interval_s: float = 1.0) -> None:
        self._gateway = gateway
        self._services = services
        self._watch_interval_s = watch_interval_s

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        status = await self._status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Sends the status at once and at every change. Ends when the gateway drains, so that a stopping server need not wait for watchers."""
        last = None
        while True:
            # Asked before the status is: the last status sent before the end is then NOT_SERVING.
            draining = self._gateway.draining
            status = await self._status(request.service)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            if draining:
                return
            await asyncio.sleep(self._watch_interval_s)

    async def _status(self, service: str) -> int:
        if service not in self._services:
            return int(SERVICE_UNKNOWN)
        if self._gateway.draining:
            return int(NOT_SERVING)
        ready, _ = await self._gateway.readiness()
        return int(SERVING if ready else NOT_SERVING)
