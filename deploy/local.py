"""Runs a cluster on this machine until it is told to stop. Knows signals and what to print; how a cluster starts is cluster/app.py's."""

import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType

from espalier import __version__
from espalier.cluster.app import RunningCluster, start_cluster
from espalier.cluster.config import ClusterConfig
from espalier.cluster.ray_runtime import RayOptions

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# One request for a stop can arrive twice: `timeout` and service managers signal a whole group, and `make` passes on what it gets.
ECHO_S = 1.0
QUESTION = "What is the capital of France?"


class StopSignal:
    """SIGTERM and SIGINT. The first asks for a stop, and interrupts a start that is still under way; a later one ends the process at once.

    A thread counts them, told by the interpreter's wakeup descriptor: handlers run in the main thread, and only when it is back from C code;
    and Ray puts one of its own in place of ours when it starts.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._starting = True
        self._numbers, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        threading.Thread(target=self._count, name="signals", daemon=True).start()
        self._take_over()

    def started(self) -> None:
        """From here on a signal interrupts nothing."""
        self._starting = False
        self._take_over()

    def wait(self) -> None:
        """Returns once a stop has been asked for."""
        self._asked.wait()

    def _take_over(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._interrupt)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._starting:
            # Once only: what it ends has to be cleaned up.
            self._starting = False
            raise KeyboardInterrupt

    def _count(self) -> None:
        asked_at = None
        while True:
            (number,) = os.read(self._numbers, 1)
            if number not in STOP_SIGNALS:
                continue
            if asked_at is None:
                asked_at = time.monotonic()
                self._asked.set()
            elif time.monotonic() - asked_at > ECHO_S:
                os._exit(128 + number)


def serve(config: ClusterConfig, num_gpus: int) -> int:
    """Starts the cluster, says where it listens, waits for a signal, stops. Returns the exit code; a start that fails raises its EngineError.

    num_gpus: of this machine.
    """
    stop = StopSignal()
    began = time.monotonic()
    try:
        # Weights that are not what they were leave the cluster up, not ready, so that a probe can tell why.
        cluster = start_cluster(config, ray_options=RayOptions(num_gpus=num_gpus), allow_unready=True)
        stop.started()
    except (KeyboardInterrupt, SystemExit):
        # SystemExit is how Ray's own handler, which replaces ours while Ray starts, answers SIGTERM.
        print("stopped before it was ready", flush=True)
        return 0
    seconds = time.monotonic() - began
    print(greeting(config, cluster.http_url, cluster.grpc_address, seconds, not_ready(cluster)), flush=True)
    stop.wait()
    print(f"stopping: running requests have {config.gateway.drain_timeout_s:g} s to finish", flush=True)
    cluster.stop(config.gateway.drain_timeout_s)
    return 0


def not_ready(cluster: RunningCluster) -> dict[str, str]:
    """Models that may not serve, and why."""
    _, report = cluster.ready()
    return {name: entry["failure"] for name, entry in report["models"].items() if "failure" in entry}


def greeting(
    config: ClusterConfig, http_url: str, grpc_address: str, seconds: float, reasons: Mapping[str, str]
) -> str:
    """Where the cluster listens and one line to try it with. reasons: of models that may not serve, why."""
    models = ", ".join(f"{model.name} x {model.num_replicas}" for model in config.models)
    body = json.dumps({"model": config.models[0].name, "messages": [{"role": "user", "content": QUESTION}]})
    key = " -H 'Authorization: Bearer KEY'" if config.gateway.api_key_file else ""
    lines = [
        f"espalier {__version__} is {'up, but not ready,' if reasons else 'ready'} after {seconds:.1f} s: {models}",
        *(f"  NOT READY {name}: {reason}" for name, reason in reasons.items()),
        f"  HTTP {http_url}",
        f"  gRPC {grpc_address}",
        f"  try: curl {http_url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}",
    ]
    return "\n".join(lines)
