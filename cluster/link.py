"""ReplicaLink: one engine replica as a gateway reaches it. ray_link.RayLink does it over a Serve handle; tests do it in process."""

from collections.abc import AsyncGenerator
from typing import Protocol

from espalier.cluster.messages import ReplicaDescription, ReplicaReport
from espalier.cluster.origin import Origin
from espalier.replicas.request import Request


class ReplicaLink(Protocol):
    """Methods raise what the engine refuses with (InvalidRequestError, QueueFullError, DrainingError), or ReplicaLostError."""

    @property
    def replica_id(self) -> str:
        """Unique among all replicas that ever were."""
        ...

    async def describe(self) -> ReplicaDescription:
        """What the replica is."""
        ...

    def reports(self) -> AsyncGenerator[ReplicaReport, None]:
        """The one long-lived stream of this gateway from this replica. It ends or raises only when the replica is gone; closing it (aclose)
        tells the replica that the gateway is: it aborts what this gateway sent."""
        ...

    async def renew(self) -> None:
        """Tell the replica that this gateway still lives. A stream whose gateway is silent for replica.LEASE_S is ended by the replica."""
        ...

    async def submit(self, request: Request, origin: Origin | None = None) -> None:
        """Hand over a request; its events come in the reports, perhaps before this returns. Only while the stream is open.

        origin: for the replica's log and spans.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request, if it still runs."""
        ...
