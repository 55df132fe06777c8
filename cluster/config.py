"""ClusterConfig: what the cluster serves and where it listens. Read by deploy from file, environment and flags."""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from espalier.cluster.names import engine_app_name
from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import InvalidRequestError


def _require(ok: bool, name: str, message: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{name}: {message}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model and its replicas. name: what clients put in `model`. num_cpus, num_gpus: what each replica asks of Ray."""

    name: str
    engine: EngineConfig
    num_replicas: int = 2
    num_cpus: float = 1.0
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        _require(bool(self.name), "name", "a model needs a name")
        _require(
            self.name.isprintable() and self.name == self.name.strip(),
            "name",
            "must be printable, without outer spaces",
        )
        _require(self.num_replicas >= 1, "replicas", "must be at least 1")
        _require(self.num_cpus >= 0, "num_cpus", "must be at least 0")
        _require(self.num_gpus >= 0, "num_gpus", "must be at least 0")
        whole = self.num_gpus <= 1 or self.num_gpus == int(self.num_gpus)
        _require(whole, "num_gpus", "must be a whole number where it is more than 1")
        for name, asked in (("num_cpus", self.num_cpus), ("num_gpus", self.num_gpus)):
            _require(asked == round(asked, 4), name, "must be counted in ten-thousandths, as Ray does")
        # Ray shows a replica no GPU that it has not asked for.
        on_gpu = self.engine.device == "cuda"
        _require(not on_gpu or self.num_gpus > 0, "num_gpus", "must be more than 0 where replicas run on GPUs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Weights of the router. affinity_min_tokens: a held prefix shorter than this attracts nothing.

    affinity_max_excess: a replica that holds the prefix is still passed over when it has so many more outstanding tokens than the least loaded.
    prefix_entries: block hashes remembered per replica. session_ttl_s: how long a session sticks to its replica after its last request.
    """

    affinity_min_tokens: int = 32
    affinity_max_excess: int = 4096
    prefix_entries: int = 65536
    session_ttl_s: float = 600.0

    def __post_init__(self) -> None:
        _require(self.affinity_min_tokens >= 0, "affinity_min_tokens", "must be at least 0")
        _require(self.affinity_max_excess >= 0, "affinity_max_excess", "must be at least 0")
        _require(self.prefix_entries >= 1, "prefix_entries", "must be at least 1")
        _require(self.session_ttl_s >= 0, "session_ttl_s", "must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Where clients call. http_port, grpc_port: 0 takes a free one. api_key_file: `label: key` lines, mode 0600; None means no keys.

    metrics_open: `/metrics` needs no key. max_outstanding: requests accepted at once by this gateway, over all models.
    keepalive_s: seconds between SSE comments before the first token. drain_timeout_s: how long running requests may take to finish at stop.
    default_deadline_s: deadline of a request that names none; None means none. reflection: offer gRPC reflection.
    audit_share: of the finished replies, 0..1, that are run again in spare time and compared.
    """

    host: str = "127.0.0.1"
    http_port: int = 5000
    grpc_port: int = 50051
    api_key_file: Path | None = None
    metrics_open: bool = False
    max_outstanding: int = 512
    keepalive_s: float = 15.0
    drain_timeout_s: float = 30.0
    default_deadline_s: float | None = None
    reflection: bool = True
    audit_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("http_port", "grpc_port"):
            _require(0 <= getattr(self, name) <= 65535, name, "must be a port number, or 0 for a free one")
        same = self.http_port == self.grpc_port != 0
        _require(not same, "grpc_port", "must differ from http_port")
        _require(self.max_outstanding >= 1, "max_outstanding", "must be at least 1")
        _require(self.keepalive_s > 0, "keepalive_s", "must be positive")
        _require(self.drain_timeout_s >= 0, "drain_timeout_s", "must be at least 0")
        _require(
            self.default_deadline_s is None or self.default_deadline_s > 0, "default_deadline_s", "must be positive"
        )
        _require(0 <= self.audit_share <= 1, "audit_share", "must lie between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """endpoint: the OTLP/gRPC collector that spans go to, `http://` or `https://` with host and port. ratio: of new traces, the share sampled."""

    endpoint: str
    ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The whole cluster: its models and the gateway in front of them. log_json: one JSON object a log line.

    trace_endpoint, trace_ratio: see TraceConfig; without an endpoint there is no tracing.
    """

    models: tuple[ServedModel, ...]
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    log_level: str = "info"
    log_json: bool = False
    trace_endpoint: str | None = None
    trace_ratio: float = 1.0

    def __post_init__(self) -> None:
        _require(len(self.models) > 0, "models", "at least one model is needed")
        names = [model.name for model in self.models]
        _require(len(set(names)) == len(names), "models", "each model needs a name of its own")
        applications = {engine_app_name(name) for name in names}
        _require(len(applications) == len(names), "models", "names must differ in more than punctuation")
        _require(
            self.log_level in ("debug", "info", "warning", "error"),
            "log_level",
            "must be debug, info, warning or error",
        )
        _require(
            self.trace_endpoint is None or _is_address(self.trace_endpoint),
            "trace_endpoint",
            "must be http://HOST:PORT or https://HOST:PORT",
        )
        _require(0 <= self.trace_ratio <= 1, "trace_ratio", "must lie between 0 and 1")

    @property
    def tracing(self) -> TraceConfig | None:
        """Where spans go; None when tracing is off."""
        return (
            None if self.trace_endpoint is None else TraceConfig(endpoint=self.trace_endpoint, ratio=self.trace_ratio)
        )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        return False
    return named and parts.path in ("", "/")
