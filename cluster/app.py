"""start_cluster: from a ClusterConfig to a cluster that answers, and back. What the `espalier serve` command and the tests call."""

import contextlib
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from espalier.cluster.config import ClusterConfig, GatewayConfig, ServedModel
from espalier.cluster.engine_loader import load_engine
from espalier.cluster.gateway_server import GatewayPorts, LoadText
from espalier.cluster.logs import LogConfig, LogFollower
from espalier.cluster.names import GATEWAY_APP, engine_app_name
from espalier.cluster.ray_runtime import RayOptions, RayRuntime
from espalier.cluster.replica import LoadEngine
from espalier.cluster.serve_apps import build_engine_app, build_gateway_app
from espalier.cluster.served_text import load_text
from espalier.replicas.cpus import usable_cpus
from espalier.replicas.errors import CheckpointError, EngineError, InvalidRequestError

POLL_S = 0.5
LOG_POLL_S = 0.2
CALL_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 900.0


class RunningCluster:
    """A cluster that start_cluster has started. http_url, grpc_address: where clients call."""

    def __init__(self, config: ClusterConfig, runtime: RayRuntime, logs: "LogThread | None") -> None:
        self._config = config
        self._runtime = runtime
        self._logs = logs
        self._gateway: DeploymentHandle[Any] | None = None
        self._ports = GatewayPorts(http=0, grpc=0)
        self._applications = (GATEWAY_APP, *(engine_app_name(model.name) for model in config.models))

    @property
    def http_url(self) -> str:
        """Without a slash at its end."""
        return f"http://{_authority(self._config.gateway.host, self._ports.http)}"

    @property
    def grpc_address(self) -> str:
        """As a gRPC channel wants it."""
        return _authority(self._config.gateway.host, self._ports.grpc)

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """What `/ready` tells."""
        assert self._gateway is not None
        answer: tuple[bool, dict[str, Any]] = self._gateway.readiness.remote().result(timeout_s=CALL_TIMEOUT_S)
        return answer

    def stop(self, drain_timeout_s: float | None = None) -> None:
        """Not ready at once; running requests have so long to finish (None: as configured); then everything ends."""
        bound_s = self._config.gateway.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        try:
            if self._gateway is not None:
                # A gateway that is gone has nothing to drain.
                with contextlib.suppress(RayError, RayServeException, TimeoutError):
                    self._gateway.drain.remote(bound_s).result(timeout_s=bound_s + CALL_TIMEOUT_S)
        finally:
            self._runtime.stop(self._applications)
            if self._logs is not None:
                self._logs.stop()

    def _wait_until_ready(self, timeout_s: float, allow_unready: bool) -> None:
        until = time.monotonic() + timeout_s
        while True:
            self._raise_if_deployment_failed()
            if self._gateway is None:
                self._find_gateway()
            elif self._has_settled(allow_unready):
                return
            if time.monotonic() > until:
                raise EngineError(f"the cluster was not ready after {timeout_s:g} s")
            time.sleep(POLL_S)

    def _has_settled(self, allow_unready: bool) -> bool:
        """Whether every replica of every model is ready. A model that may not serve is raised, or counts as settled."""
        _, report = self.ready()
        settled = True
        for model in self._config.models:
            entry = report["models"][model.name]
            failure = entry.get("failure")
            if failure is not None:
                kind = CheckpointError if entry["failure_code"] == CheckpointError.code else EngineError
                if not allow_unready or kind is EngineError:
                    raise kind(f"{model.name}: {failure}")
            num_ready = sum(state == "ready" for state in entry["replicas"].values())
            settled = settled and (failure is not None or num_ready >= model.num_replicas)
        return settled

    def _find_gateway(self) -> None:
        application = serve.status().applications.get(GATEWAY_APP)
        if application is not None and application.status == "RUNNING":
            self._gateway = serve.get_app_handle(GATEWAY_APP)
            self._ports = self._gateway.ports.remote().result(timeout_s=CALL_TIMEOUT_S)

    def _raise_if_deployment_failed(self) -> None:
        running = serve.status().applications
        for name in self._applications:
            application = running.get(name)
            if application is not None and application.status == "DEPLOY_FAILED":
                told = [d.message for d in application.deployments.values() if d.message] or [application.message]
                raise EngineError(f"{name} cannot start: {' '.join(told)}")


class LogThread:
    """Copies the log lines of all processes of this machine to a stream while the cluster runs."""

    def __init__(self, folder: Path, out: TextIO) -> None:
        self._follower = LogFollower(folder, out)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Copy what is left and end."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOG_POLL_S):
            self._follower.copy_new_lines()
        self._follower.copy_new_lines()


def start_cluster(
    config: ClusterConfig,
    *,
    ray_options: RayOptions | None = None,
    allow_unready: bool = False,
    ready_timeout_s: float = READY_TIMEOUT_S,
    load_engine: LoadEngine = load_engine,
    load_text: LoadText = load_text,
) -> RunningCluster:
    """Start Ray and Serve (or join them), deploy everything, and return when all replicas of every model are ready.

    allow_unready: return as well when a model has told that it may not serve, instead of raising what it told.
    Raises InvalidRequestError (a port is taken), CheckpointError (a model may not serve), EngineError.
    """
    _check(config)
    config = _with_threads(config)
    options = ray_options or RayOptions()
    runtime = RayRuntime(options, cpus_asked=sum(model.num_cpus * model.num_replicas for model in config.models))
    log_folder = runtime.temp_dir / "logs" if runtime.temp_dir is not None else None
    logs = LogConfig(level=config.log_level, as_json=config.log_json, folder=log_folder)
    cluster = RunningCluster(config, runtime, LogThread(log_folder, sys.stderr) if log_folder is not None else None)
    try:
        targets = [
            serve.RunTarget(
                build_engine_app(model, config, logs=logs, load=load_engine),
                name=engine_app_name(model.name),
                route_prefix=None,
            )
            for model in config.models
        ]
        targets.append(
            serve.RunTarget(build_gateway_app(config, logs=logs, load=load_text), name=GATEWAY_APP, route_prefix=None)
        )
        serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        cluster._wait_until_ready(ready_timeout_s, allow_unready)
    except BaseException:
        cluster.stop(0.0)
        raise
    return cluster


def _check(config: ClusterConfig) -> None:
    """What can be told before anything is started."""
    gateway = config.gateway
    for name, port in (("http_port", gateway.http_port), ("grpc_port", gateway.grpc_port)):
        if port != 0 and not _is_free(gateway, port):
            raise InvalidRequestError(f"{name}: port {port} of {gateway.host} cannot be listened on", param=name)


def _is_free(gateway: GatewayConfig, port: int) -> bool:
    family = socket.AF_INET6 if ":" in gateway.host else socket.AF_INET
    try:
        socket.create_server((gateway.host, port), family=family).close()
    except OSError:
        return False
    return True


def _with_threads(config: ClusterConfig) -> ClusterConfig:
    """Share this machine's cores among the replicas where nobody said how many threads each should have."""
    share = max(1, usable_cpus() // sum(model.num_replicas for model in config.models))

    def shared(model: ServedModel) -> ServedModel:
        return replace(model, engine=replace(model.engine, cpu_threads=model.engine.cpu_threads or share))

    return replace(config, models=tuple(shared(model) for model in config.models))


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
