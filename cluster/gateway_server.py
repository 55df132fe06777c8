"""GatewayServer: the Serve deployment that holds a Gateway and its two servers, each on a port of its own. Serve's proxy is not in their way."""

import asyncio
import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from espalier import __version__
from espalier.cluster.catalog import ServedText
from espalier.cluster.config import ClusterConfig, ServedModel
from espalier.cluster.discovery import Discovery
from espalier.cluster.gateway import Gateway
from espalier.cluster.ingress.grpc import start_grpc_server
from espalier.cluster.ingress.http import build_http_app
from espalier.cluster.ingress.http_server import CLOSE_S, HttpServer, listen
from espalier.cluster.logs import LogConfig, configure_logging
from espalier.cluster.metrics import ClusterMetrics
from espalier.cluster.replica_board import BOARD
from espalier.cluster.tracing import start_tracing

log = logging.getLogger(__name__)

LoadText = Callable[[ServedModel], ServedText]


@dataclass(frozen=True, slots=True)
class GatewayPorts:
    """Where a gateway listens; free ports that were asked for as 0 are told here."""

    http: int
    grpc: int


class GatewayServer:
    """Starts listening before Serve counts it as running. One process holds one gateway."""

    async def __init__(self, config: ClusterConfig, logs: LogConfig, load_text: LoadText) -> None:  # type: ignore[misc]
        # Serve awaits an async __init__; only in one can servers be started before the replica is RUNNING.
        configure_logging(logs, f"gateway-{os.getpid()}")
        self._config = config
        self._tracer = start_tracing(config.tracing, "espalier-gateway")
        texts = {model.name: await asyncio.to_thread(load_text, model) for model in config.models}
        self._gateway = Gateway(config, texts, ClusterMetrics(version=__version__), tracer=self._tracer)
        listener = listen(config.gateway.host, config.gateway.http_port)
        self._http = HttpServer(build_http_app(self._gateway, config.gateway, self._tracer))
        self._http_task = asyncio.create_task(self._http.serve(sockets=[listener]), name="http server")
        self._grpc, grpc_port = await start_grpc_server(self._gateway, config.gateway, self._tracer)
        self._ports = GatewayPorts(http=listener.getsockname()[1], grpc=grpc_port)
        discovery = Discovery(texts, self._gateway.fleet, BOARD, uuid.uuid4().hex)
        self._discovery_task = asyncio.create_task(discovery.run(), name="discovery")
        log.info("gateway listens", extra={"http_port": self._ports.http, "grpc_port": self._ports.grpc})

    async def ports(self) -> GatewayPorts:
        """Where it listens."""
        return self._ports

    async def readiness(self) -> tuple[bool, dict[str, Any]]:
        """What `/ready` tells; see GenerateGateway.readiness."""
        return await self._gateway.readiness()

    async def drain(self, timeout_s: float) -> None:
        """Not ready from now on; returns when all running requests have ended, after `timeout_s` seconds at the latest."""
        await self._gateway.drain(timeout_s)

    async def check_health(self) -> None:
        """Raises when one of our tasks has ended, so that Serve replaces this gateway."""
        for task in (self._http_task, self._discovery_task):
            if task.done():
                raise RuntimeError(f"{task.get_name()} has ended")

    async def close(self) -> None:
        """Drains, then stops listening and tells whoever still asks; returns when all connections are closed."""
        await self._gateway.drain(self._config.gateway.drain_timeout_s)
        self._discovery_task.cancel()
        self._http.should_exit = True
        await self._grpc.stop(CLOSE_S)
        await asyncio.wait((self._http_task, self._discovery_task))
        # Only now: the replicas wait for these streams to end before they stop.
        await self._gateway.fleet.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def __del__(self) -> None:
        # Serve awaits this once when it stops the replica.
        await self.close()
