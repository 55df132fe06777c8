"""One real cluster for the whole session: two replicas of a tiny checkpoint behind one gateway, over both wires."""

import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from espalier.cluster.config import ClusterConfig, GatewayConfig, ServedModel
from espalier.replicas.config import EngineConfig
from tests.support.processes import engine_pids
from tests.support.tiny import make_tiny_checkpoint
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from espalier.cluster.app import RunningCluster

MODEL = "tiny"
NUM_REPLICAS = 2
# So old may the engines' figures at the gateway be.
STALE_S = 2.5
IDLE_AT_ZERO = (
    "espalier_num_requests_running",
    "espalier_num_requests_waiting",
    "espalier_kv_cache_usage_perc",
    "espalier_gateway_requests_in_flight",
)


@dataclass(frozen=True)
class LiveCluster:
    """http_url, grpc_address: where it answers. checkpoint: what it serves under the name `model`."""

    running: "RunningCluster"
    checkpoint: Path
    model: str = MODEL

    @property
    def http_url(self) -> str:
        return self.running.http_url

    @property
    def grpc_address(self) -> str:
        return self.running.grpc_address

    def replica_ids(self) -> set[str]:
        """Replicas that are ready now."""
        report = self.running.ready()[1]["models"][self.model]["replicas"]
        return {replica for replica, state in report.items() if state == "ready"}

    def replica_pids(self) -> list[int]:
        """Processes of the engine replicas, by their titles."""
        return engine_pids(os.getpid())

    def metric(self, name: str) -> list[float]:
        """The family's values, one a series."""
        text = httpx.get(f"{self.http_url}/metrics").text
        return [
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " "))
        ]

    def wait_until_idle(self) -> None:
        """Wait until no replica holds a request or a block of one, and the gateway no call, and it has stayed so for STALE_S."""
        busy_at = time.monotonic()

        def idle() -> bool:
            nonlocal busy_at
            if any(value for name in IDLE_AT_ZERO for value in self.metric(name)):
                busy_at = time.monotonic()
            return time.monotonic() - busy_at > STALE_S

        wait_until(idle, "nothing is held")

    def wait_until_healed(self) -> None:
        """Wait until all replicas are ready again."""
        wait_until(lambda: len(self.replica_ids()) == NUM_REPLICAS, "all replicas are ready", timeout_s=90)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    checkpoint = make_tiny_checkpoint(folder / "checkpoint")
    engine = EngineConfig(
        model_path=checkpoint, max_context=512, kv_tokens=4096, max_lanes=8, batch_tokens=64, cache_dir=folder / "cache"
    )
    config = ClusterConfig(
        models=(ServedModel(name=MODEL, engine=engine, num_replicas=NUM_REPLICAS),),
        gateway=GatewayConfig(http_port=0, grpc_port=0, drain_timeout_s=5, max_outstanding=128),
        log_level="info",
    )
    with warnings.catch_warnings():
        # Ray warns when it is imported, and its threads leave files and sockets to the garbage collector.
        warnings.simplefilter("ignore")
        from espalier.cluster.app import start_cluster

        running = start_cluster(config, ready_timeout_s=120)
        yield LiveCluster(running, checkpoint)
        running.stop(1.0)
