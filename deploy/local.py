"""Runs a cluster on this machine until it is told to stop. Knows signals and what to print; how a cluster starts is cluster/app.py's."""

import json
import os
import shlex
import signal
import threading
import time
from types import FrameType

from espalier import __version__
from espalier.cluster.app import start_cluster
from espalier.cluster.config import ClusterConfig

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
QUESTION = "What is the capital of France?"


class StopSignal:
    """SIGTERM and SIGINT. The first asks for a stop, and interrupts a start that is still under way; the second ends the process at once.

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
            raise KeyboardInterrupt

    def _count(self) -> None:
        while True:
            (number,) = os.read(self._numbers, 1)
            if number in STOP_SIGNALS:
                if self._asked.is_set():
                    os._exit(128 + number)
                self._asked.set()


def serve(config: ClusterConfig) -> int:
    """Starts the cluster, says where it listens, waits for a signal, stops. Returns the exit code; a start that fails raises its EngineError."""
    stop = StopSignal()
    began = time.monotonic()
    try:
        cluster = start_cluster(config)
        stop.started()
    except (KeyboardInterrupt, SystemExit):
        # SystemExit is how Ray's own handler, which replaces ours while Ray starts, answers SIGTERM.
        print("stopped before it was ready", flush=True)
        return 0
    print(greeting(config, cluster.http_url, cluster.grpc_address, time.monotonic() - began), flush=True)
    stop.wait()
    print(f"stopping: running requests have {config.gateway.drain_timeout_s:g} s to finish", flush=True)
    cluster.stop(config.gateway.drain_timeout_s)
    return 0


def greeting(config: ClusterConfig, http_url: str, grpc_address: str, seconds: float) -> str:
    """Where the cluster listens and one line to try it with."""
    models = ", ".join(f"{model.name} x {model.num_replicas}" for model in config.models)
    body = json.dumps({"model": config.models[0].name, "messages": [{"role": "user", "content": QUESTION}]})
    key = " -H 'Authorization: Bearer KEY'" if config.gateway.api_key_file else ""
    return (
        f"espalier {__version__} is ready after {seconds:.1f} s: {models}\n"
        f"  HTTP {http_url}\n"
        f"  gRPC {grpc_address}\n"
        f"  try: curl {http_url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
    )
