"""`espalier serve` with a cluster that does nothing, as a process of its own: for tests of signals and exit codes.

Arguments: what start_cluster does (`starts`, `hangs`, `hangs-in-ray` with its signal handler, or `fails`), what stop does (`stops` or `hangs`),
then those of `espalier serve`.
"""

import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from espalier.cluster.config import ClusterConfig
from espalier.cluster.ray_runtime import RayOptions
from espalier.deploy import local
from espalier.deploy.cli import main
from espalier.replicas.errors import InvalidRequestError

HANG_S = 60.0


@dataclass(frozen=True, slots=True)
class FakeCluster:
    stop_how: str
    http_url: str = "http://127.0.0.1:1"
    grpc_address: str = "127.0.0.1:2"

    def ready(self) -> tuple[bool, dict[str, Any]]:
        return True, {"models": {}}

    def stop(self, drain_timeout_s: float) -> None:
        print(f"stop within {drain_timeout_s:g}", flush=True)
        if self.stop_how == "hangs":
            time.sleep(HANG_S)


start_how, stop_how, *arguments = sys.argv[1:]


def start_cluster(_: ClusterConfig, *, ray_options: RayOptions, allow_unready: bool) -> FakeCluster:
    print("starting", flush=True)
    if start_how == "hangs-in-ray":
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        print("ray starts", flush=True)
    if start_how in ("hangs", "hangs-in-ray"):
        time.sleep(HANG_S)
    if start_how == "fails":
        raise InvalidRequestError("http_port: port 5000 is taken")
    return FakeCluster(stop_how)


local.start_cluster = start_cluster  # type: ignore[assignment]
sys.exit(main(["serve", *arguments]))
