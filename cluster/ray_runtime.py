"""Starts and stops Ray and Serve for a cluster of one machine, lean and quiet. Knows nothing of models."""

import contextlib
import io
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import serve

from espalier.replicas.errors import EngineError

# Set only where the user has not. Usage reports, metrics agents and idle workers are of no use to a cluster of one machine, and OpenMP's threads
# must not spin while they wait: replicas share the cores.
LEAN_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
OBJECT_STORE_BYTES = 80 << 20
SERVE_HOST = "127.0.0.1"
SERVE_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """address: an existing Ray cluster to join ("auto", or host:port); None starts one on this machine.

    num_cpus: logical cores of the one started; None takes the machine's, or more if the replicas ask for more. num_gpus: its GPUs; None leaves
    the count to Ray, which may not see what CUDA sees, and replicas would wait for what it misses.
    """

    address: str | None = None
    num_cpus: int | None = None
    num_gpus: int | None = None


class RayRuntime:
    """Ray and Serve, started or joined. temp_dir: exists only for a Ray that was started here, and is removed with it.

    Raises EngineError when Ray cannot be started or joined.
    """

    def __init__(self, options: RayOptions, *, cpus_asked: float) -> None:
        self.temp_dir: Path | None = None
        self._joined = options.address is not None
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                # What Ray has to say about itself is not for the users of Espalier.
                warnings.simplefilter("ignore")
                if options.address is not None:
                    ray.init(address=options.address, log_to_driver=False, logging_level=logging.ERROR)
                else:
                    self._start(options, cpus_asked)
                http_options = {"host": SERVE_HOST, "port": _free_or_other(SERVE_PORT)}
                serve.start(proxy_location="HeadOnly", http_options=http_options)
        except Exception as error:
            self.stop(())
            raise EngineError(f"Ray cannot start: {error}") from error
        except BaseException:
            self.stop(())
            raise

    def _start(self, options: RayOptions, cpus_asked: float) -> None:
        for name, value in LEAN_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if not any(name in os.environ for name in AUTH_VARIABLES):
            # Ray's ports are open to the network, and who may talk to them may run code. Ray asks for a token by default and keeps one in the
            # user's home; one that lives as long as these processes is enough here.
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Unix sockets live below it, and their paths may not be long.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="espalier-", dir="/tmp"))
        # Ray's handler ends the process with a core dump; whoever started us has a better one.
        on_sigterm = signal.getsignal(signal.SIGTERM)
        ray.init(
            num_cpus=options.num_cpus or max(os.cpu_count() or 1, math.ceil(cpus_asked)),
            num_gpus=options.num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(self.temp_dir),
        )
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)

    def stop(self, applications: Iterable[str]) -> None:
        """Stop these applications of a Ray that was joined, or all of Ray when it was started here."""
        with _silence():
            if ray.is_initialized() and self._joined:
                for name in applications:
                    serve.delete(name)
            elif ray.is_initialized():
                serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()
        if self.temp_dir is not None:
            shutil.rmtree(self.temp_dir, ignore_errors=True)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Ray tells the terminal about calls to its own actors that it has just stopped; nothing can be done about them."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def _free_or_other(port: int) -> int:
    """The port if it is free on loopback, else another that is."""
    for candidate in (port, 0):
        try:
            with socket.create_server((SERVE_HOST, candidate)) as listener:
                found: int = listener.getsockname()[1]
                return found
        except OSError:
            continue
    raise OSError("no free port on loopback")
