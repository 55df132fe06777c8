"""The Serve applications of a cluster: one per model, and the gateway. For app.start_cluster, and through serve_config.py for Serve config files."""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from espalier.cluster.config import ClusterConfig, ServedModel
from espalier.cluster.engine_loader import load_engine
from espalier.cluster.gateway_server import GatewayServer, LoadText
from espalier.cluster.logs import LogConfig
from espalier.cluster.names import ENGINE_DEPLOYMENT, GATEWAY_DEPLOYMENT
from espalier.cluster.replica import EngineReplica, LoadEngine
from espalier.cluster.served_text import load_text

ROUTER_CLASS: Any = "espalier.cluster.request_router.PinnedRouter"
# Calls are short but for one stream a gateway; the engine's own queue is what bounds requests.
MAX_ONGOING_CALLS = 4096
# Constructors that fail are tried again in case it was the machine's fault, but not for long.
MAX_START_ATTEMPTS = 3
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
# On top of the drain: closing servers and streams.
STOP_MARGIN_S = 10.0


def build_engine_app(
    model: ServedModel,
    config: ClusterConfig,
    *,
    logs: LogConfig | None = None,
    load: LoadEngine = load_engine,
    resources: Mapping[str, float] | None = None,
) -> Application:
    """The application that serves one model; deploy it under names.engine_app_name(model.name), without a route.

    resources: what each replica asks of Ray beside CPUs and GPUs; it keeps a model on the nodes that have its files.
    """
    deployment = serve.deployment(
        name=ENGINE_DEPLOYMENT,
        num_replicas=model.num_replicas,
        ray_actor_options={
            "num_cpus": model.num_cpus,
            "num_gpus": model.num_gpus,
            "resources": dict(resources or {}),
        },
        request_router_config=RequestRouterConfig(request_router_class=ROUTER_CLASS),
        **_common(config),
    )
    return deployment(EngineReplica).bind(model, logs or _logs(config), load, config.tracing)


def build_gateway_app(
    config: ClusterConfig,
    *,
    logs: LogConfig | None = None,
    load: LoadText = load_text,
    resources: Mapping[str, float] | None = None,
) -> Application:
    """The application of the gateway; deploy it under names.GATEWAY_APP, without a route: it listens on ports of its own.

    resources: what it asks of Ray; it keeps the gateway on the node that clients reach.
    """
    deployment = serve.deployment(
        name=GATEWAY_DEPLOYMENT,
        num_replicas=1,
        # Ports of a node have one listener: a gateway that takes another's place starts when that one is gone.
        max_replicas_per_node=1,
        ray_actor_options={"num_cpus": 0, "resources": dict(resources or {})},
        **_common(config),
    )
    return deployment(GatewayServer).bind(config, logs or _logs(config), load)


def _common(config: ClusterConfig) -> dict[str, Any]:
    return {
        "max_ongoing_requests": MAX_ONGOING_CALLS,
        "max_constructor_retry_count": MAX_START_ATTEMPTS,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": config.gateway.drain_timeout_s + STOP_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.1,
    }


def _logs(config: ClusterConfig) -> LogConfig:
    return LogConfig(level=config.log_level, as_json=config.log_json)
