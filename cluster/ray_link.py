"""RayLink: a replica reached over a Serve handle, every call pinned to it. The router of the handle must be request_router.PinnedRouter."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from espalier.cluster.messages import ReplicaDescription, ReplicaReport
from espalier.cluster.origin import Origin
from espalier.replicas.errors import EngineError, ReplicaLostError
from espalier.replicas.request import Request

# A pinned call waits for its replica for ever when Serve does not know it any more.
CALL_TIMEOUT_S = 10.0


class RayLink:
    """A ReplicaLink. gateway_id: names this gateway to the replica, unique among all gateways."""

    def __init__(self, handle: DeploymentHandle[Any], replica_id: str, gateway_id: str) -> None:
        self._handle = handle
        self._attach = handle.options(method_name="attach", stream=True)
        self._gateway_id = gateway_id
        self.replica_id = replica_id

    async def describe(self) -> ReplicaDescription:
        description: ReplicaDescription = await self._call(self._handle.describe.remote(replica=self.replica_id))
        return description

    async def reports(self) -> AsyncGenerator[ReplicaReport, None]:
        stream: Any = self._attach.remote(self._gateway_id, replica=self.replica_id)
        try:
            async for report in stream:
                yield report
        except (RayError, RayServeException) as error:
            raise self._lost(error) from error
        finally:
            # A stream that is merely dropped goes on for ever on the replica.
            stream.cancel()

    async def renew(self) -> None:
        await self._call(self._handle.renew.remote(self._gateway_id, replica=self.replica_id))

    async def submit(self, request: Request, origin: Origin | None = None) -> None:
        await self._call(self._handle.submit.remote(self._gateway_id, request, origin, replica=self.replica_id))

    async def abort(self, request_id: str) -> None:
        await self._call(self._handle.abort.remote(request_id, replica=self.replica_id))

    async def _call(self, response: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await response
        except RayTaskError as error:
            if isinstance(error.cause, EngineError):
                raise error.cause from None
            raise self._lost(error) from error
        except (RayError, RayServeException, TimeoutError) as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> ReplicaLostError:
        return ReplicaLostError(
            f"replica {self.replica_id} cannot be reached: {type(getattr(error, 'cause', None) or error).__name__}"
        )
