"""PinnedRouter: Serve's router for engine applications. A call goes to the replica that its `replica` keyword names, and nowhere else.

Choosing is done by cluster/router.py in the gateway. Serve pickles this module by value; modules that it imports stay those of the process.
"""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from espalier.cluster import replica_board
from espalier.replicas import errors


class PinnedRouter(RequestRouter):
    """A call without the keyword goes to any replica. One for a replica that does not run fails at once with ReplicaLostError.

    Serve would try for ever to find such a replica, and it routes only a few calls at a time: calls to the dead would hold up all others.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One rank: the replica asked for, or all."""
        wanted: Any = pending_request.kwargs.get("replica") if pending_request is not None else None
        if pending_request is None or wanted is None:
            return [candidate_replicas]
        if pinned := [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]:
            return [pinned]
        if not pending_request.future.done():
            pending_request.future.set_exception(errors.ReplicaLostError(f"replica {wanted} does not run"))
        # Serve sees that the call is done only when it is offered something.
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The controller told which replicas run."""
        super().update_replicas(replicas)
        self._publish(list(self.curr_replicas))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call found a replica dead before the controller did."""
        super().on_replica_actor_died(replica_id)
        self._publish(list(self.curr_replicas))

    def _publish(self, replica_ids: Sequence[ReplicaID]) -> None:
        replica_board.BOARD.publish(self.app_name, frozenset(replica_id.unique_id for replica_id in replica_ids))
