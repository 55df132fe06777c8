"""The gRPC server of a gateway: InferenceService, health, reflection, keys, limits. Knows nothing of messages."""

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from espalier.cluster.call import GenerateGateway
from espalier.cluster.config import GatewayConfig
from espalier.cluster.ingress.auth import ApiKeys
from espalier.cluster.ingress.grpc_auth import KeyInterceptor
from espalier.cluster.ingress.grpc_health import GatewayHealth
from espalier.cluster.ingress.grpc_servicer import SERVICE, InferenceServicer
from espalier.cluster.tracing import Tracer

MAX_REQUEST_BYTES = 16 * 2**20
MAX_RESPONSE_BYTES = 16 * 2**20
# A client that vanished without closing its connection is noticed within their sum, and its calls are aborted.
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
MIN_PING_INTERVAL_MS = 10_000


async def start_grpc_server(
    gateway: GenerateGateway, config: GatewayConfig, tracer: Tracer | None = None
) -> tuple[grpc.aio.Server, int]:
    """Listen on config.host and config.grpc_port (0 takes a free one); the started server and its port. Raises OSError when it cannot.

    To stop: let gateway.draining become true, which turns health to NOT_SERVING, wait for the running calls, then `await server.stop(grace)`.
    """
    keys = ApiKeys(config.api_key_file)
    server = grpc.aio.server(interceptors=[KeyInterceptor(keys, gateway.metrics)], options=_options(config))
    servicer = InferenceServicer(gateway, tracer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, servicer.handlers()),))
    health_pb2_grpc.add_HealthServicer_to_server(GatewayHealth(gateway, frozenset({"", SERVICE})), server)
    if config.reflection:
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = f"[{config.host}]:{config.grpc_port}" if ":" in config.host else f"{config.host}:{config.grpc_port}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen on {address}") from error
    await server.start()
    return server, port


def _options(config: GatewayConfig) -> list[tuple[str, int]]:
    return [
        # Another process on the same port would silently take half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
        # More than the gateway accepts, so that what is too much is refused and does not wait unseen.
        ("grpc.max_concurrent_streams", 2 * config.max_outstanding),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ]
