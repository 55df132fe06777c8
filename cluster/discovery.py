"""Discovery: keeps the fleet in step with the replicas that Serve runs. Engine applications are found by name, and may come later."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from espalier.cluster.fleet import Fleet
from espalier.cluster.names import ENGINE_DEPLOYMENT, engine_app_name
from espalier.cluster.ray_link import RayLink
from espalier.cluster.replica_board import ReplicaBoard

log = logging.getLogger(__name__)

PERIOD_S = 0.25
# Asking the controller whether an application exists costs it a call.
LOOKUP_PERIOD_S = 1.0


class Discovery:
    """gateway_id: names this gateway to the replicas."""

    def __init__(self, models: Iterable[str], fleet: Fleet, board: ReplicaBoard, gateway_id: str) -> None:
        self._models = tuple(models)
        self._fleet = fleet
        self._board = board
        self._gateway_id = gateway_id
        self._handles: dict[str, DeploymentHandle[Any]] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        await asyncio.gather(*(self._follow(model) for model in self._models))

    async def _follow(self, model: str) -> None:
        handle = await self._find(model)
        while True:
            self._reconcile(model, handle, self._board.running(engine_app_name(model)))
            await asyncio.sleep(PERIOD_S)

    async def _find(self, model: str) -> DeploymentHandle[Any]:
        while True:
            try:
                # A handle that was never used has no router, and without one nothing is published.
                return serve.get_deployment_handle(ENGINE_DEPLOYMENT, engine_app_name(model)).options()
            except RayServeException:
                await asyncio.sleep(LOOKUP_PERIOD_S)

    def _reconcile(self, model: str, handle: DeploymentHandle[Any], running: frozenset[str]) -> None:
        attached = self._fleet.ids(model)
        for replica_id in running - attached:
            log.info("replica found", extra={"model": model, "replica": replica_id})
            self._fleet.add(model, RayLink(handle, replica_id, self._gateway_id))
        for replica_id in attached - running:
            self._fleet.remove(replica_id)
