"""ReplicaBoard: which replicas of each engine application run, as Serve's routers in this process hear it from the controller.

Serve makes the router object itself, out of reach of whoever holds the handle; the board is where the two meet. Knows no Ray.
"""

import threading


class ReplicaBoard:
    """Written by request_router.PinnedRouter on Serve's router thread, read by discovery on the gateway's loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, frozenset[str]] = {}

    def publish(self, app_name: str, replica_ids: frozenset[str]) -> None:
        """These are the running replicas of the application, all of them."""
        with self._lock:
            self._running[app_name] = replica_ids

    def running(self, app_name: str) -> frozenset[str]:
        """The replicas last published."""
        with self._lock:
            return self._running.get(app_name, frozenset())


BOARD = ReplicaBoard()
