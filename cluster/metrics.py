"""Every metric of the cluster: names, labels and buckets of gateway, router and engines, and their Prometheus text.

The gateway counts into ClusterMetrics as things happen; engines count on their own, and their snapshots are rendered as they are, so a replica
that is gone leaves no series and one that sent no figures has none. Label sets are bounded: models and replicas are those served, routes and
methods those listed here (any other is `other`). Engine families carry vLLM's names under the prefix `espalier_`.
Knows neither Ray nor the wires.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from espalier.cluster.call import ModelInfo
from espalier.cluster.router import RouteKind
from espalier.replicas.errors import DrainingError, QueueFullError
from espalier.replicas.stats import EngineStats, Histogram

HTTP_ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/metrics",
    }
)
GRPC_METHODS = frozenset({"Generate", "Tokenize", "Detokenize", "ListModels"})
OTHER = "other"
# Routes that generate, and the codes by which the server tells that it failed: what alerts and boards count as failed, of each transport.
GENERATE_ROUTES = {"http": ("/v1/chat/completions", "/v1/completions"), "grpc": ("Generate",)}
FAILURE_CODES = {"http": ("500", "502", "503"), "grpc": ("INTERNAL", "ABORTED", "UNAVAILABLE")}
ENGINE_LABELS = ("model", "replica")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """One live replica at the moment of a scrape. What is None cannot be told now, and is left out.

    stats: the engine's own counts. outstanding_tokens: what the router believes it still has to compute.
    progress_at: when it last told that it was idle or had finished a round, in seconds since the epoch.
    """

    model: str
    replica: str
    stats: EngineStats | None = None
    outstanding_tokens: int | None = None
    progress_at: float | None = None


class ClusterMetrics:
    """Counts of one gateway, and the exposition of it and of the engines that it sees. Implements cluster.call.GatewayMetrics."""

    def __init__(self, *, version: str) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._requests = Counter(
            "espalier_gateway_requests",
            "Requests answered, by transport, route or method, and HTTP status or gRPC code.",
            ("transport", "route", "code"),
            registry=registry,
        )
        # There from the start, as in model_served.
        for transport, routes in GENERATE_ROUTES.items():
            for route, code in product(routes, FAILURE_CODES[transport]):
                self._requests.labels(transport, route, code)
        self._disconnects = Counter(
            "espalier_gateway_client_disconnects",
            "Clients that left before their reply was whole.",
            ("transport",),
            registry=registry,
        )
        self._in_flight = Gauge(
            "espalier_gateway_requests_in_flight",
            "Generate calls that the gateway has accepted and not finished.",
            ("model",),
            registry=registry,
        )
        self._refusals = Counter(
            "espalier_gateway_refusals",
            "Generate calls refused by the gateway or by the engine's queue, by error code.",
            ("model", "reason"),
            registry=registry,
        )
        self._replays = Counter(
            "espalier_gateway_replays",
            "Requests sent to another replica because theirs was lost before their first token.",
            ("model",),
            registry=registry,
        )
        self._replica_losses = Counter(
            "espalier_gateway_replica_losses",
            "Replicas whose stream to this gateway broke.",
            ("model",),
            registry=registry,
        )
        self._decisions = Counter(
            "espalier_router_decisions",
            "Requests routed, by what decided: a held prefix, a sticky session, or the least load.",
            ("model", "kind"),
            registry=registry,
        )
        self._configured = Gauge(
            "espalier_model_configured_replicas",
            "Replicas that the model's configuration asks for, as its replicas told.",
            ("model",),
            registry=registry,
        )
        self._audits = Counter(
            "espalier_audit",
            "Finished replies that were sampled to be run again and compared, by result.",
            ("model", "result"),
            registry=registry,
        )
        self._audits_pending = Gauge(
            "espalier_audit_pending",
            "Finished replies that wait for their audit or are being audited.",
            ("model",),
            registry=registry,
        )
        # The gateway's own process under the names that every client library gives them: process_cpu_seconds_total and so on.
        ProcessCollector(registry=registry)
        Gauge("espalier_build_info", "Always 1; the label tells the version.", ("version",), registry=registry).labels(
            version
        ).set(1)

    # What the wire fronts count.

    def http_request(self, route: str, status: int) -> None:
        """One HTTP request was answered; a route that is not in HTTP_ROUTES counts as `other`."""
        self._requests.labels("http", route if route in HTTP_ROUTES else OTHER, str(status)).inc()

    def grpc_request(self, method: str, code: str) -> None:
        """One gRPC call of InferenceService ended; a method that is not in GRPC_METHODS counts as `other`."""
        self._requests.labels("grpc", method if method in GRPC_METHODS else OTHER, code).inc()

    def client_disconnect(self, transport: str) -> None:
        """A client left before its reply was whole."""
        self._disconnects.labels(transport).inc()

    def count_api_keys(self, count: Callable[[], int]) -> None:
        """From now on tell at each scrape how many API keys are accepted. Without a key file there is nothing to tell."""
        Gauge(
            "espalier_gateway_api_keys",
            "API keys that are accepted now; 0 means that the key file lets nobody in.",
            registry=self._registry,
        ).set_function(count)

    # What the gateway counts. `model` is always a served name.

    def model_served(self, model: str) -> None:
        """The model is served. Its counts are there from the start: one that first appears as 1 has not increased as far as Prometheus can
        tell."""
        self._in_flight.labels(model)
        self._replays.labels(model)
        self._replica_losses.labels(model)
        for reason in (QueueFullError.code, DrainingError.code):
            self._refusals.labels(model, reason)
        for kind in get_args(RouteKind):
            self._decisions.labels(model, kind)

    def replicas_configured(self, model: str, count: int) -> None:
        """The model should have so many replicas; told until something else is, also while there are none."""
        self._configured.labels(model).set(count)

    def request_started(self, model: str) -> None:
        """A generate call was accepted; request_ended must follow, however it ends."""
        self._in_flight.labels(model).inc()

    def request_ended(self, model: str) -> None:
        """The end of a call that request_started counted."""
        self._in_flight.labels(model).dec()

    def refused(self, model: str, reason: str) -> None:
        """A generate call was refused. reason: an EngineError code."""
        self._refusals.labels(model, reason).inc()

    def routed(self, model: str, kind: RouteKind) -> None:
        """The router chose a replica, and why."""
        self._decisions.labels(model, kind).inc()

    def replay(self, model: str) -> None:
        """A request without a token so far was sent to another replica."""
        self._replays.labels(model).inc()

    def replica_lost(self, model: str) -> None:
        """The stream of a replica broke."""
        self._replica_losses.labels(model).inc()

    def model_audited(self, model: str, results: Iterable[str]) -> None:
        """Replies of the model are audited; each result is there from the start, as in model_served."""
        self._audits_pending.labels(model)
        for result in results:
            self._audits.labels(model, result)

    def audits_pending(self, model: str, change: int) -> None:
        """So many more replies wait for their audit."""
        self._audits_pending.labels(model).inc(change)

    def audited(self, model: str, result: str) -> None:
        """One audit has ended. result: an AuditResult."""
        self._audits.labels(model, result).inc()

    def render(self, models: Sequence[ModelInfo], engines: Sequence[EngineSnapshot]) -> bytes:
        """The Prometheus text: this gateway's counts, the served models, and each of the live engines."""
        scrape = CollectorRegistry()
        scrape.register(_Scrape(self._registry, models, engines))
        return generate_latest(scrape)


class _Scrape(Collector):
    """One moment's families: the gateway's registry, then models, then engines."""

    def __init__(
        self, gateway: CollectorRegistry, models: Sequence[ModelInfo], engines: Sequence[EngineSnapshot]
    ) -> None:
        self._gateway = gateway
        self._models = models
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        for family in self._gateway.collect():
            # The text format has no place for creation times: the client library would send each as a gauge of its own.
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
        ready = GaugeMetricFamily("espalier_model_ready_replicas", "Replicas that take requests.", labels=["model"])
        for model in self._models:
            ready.add_metric([model.name], model.ready_replicas)
        yield ready
        yield _outstanding(self._engines)
        yield _progress(self._engines)
        yield from _engine_families(self._engines)


def _outstanding(engines: Sequence[EngineSnapshot]) -> Metric:
    family = GaugeMetricFamily(
        "espalier_router_outstanding_tokens",
        "Tokens that the router believes a replica still has to compute.",
        labels=ENGINE_LABELS,
    )
    for engine in engines:
        if engine.outstanding_tokens is not None:
            family.add_metric([engine.model, engine.replica], engine.outstanding_tokens)
    return family


def _progress(engines: Sequence[EngineSnapshot]) -> Metric:
    family = GaugeMetricFamily(
        "espalier_replica_progress_timestamp_seconds",
        "When a replica last told that it was idle or had finished a round, since the epoch.",
        labels=ENGINE_LABELS,
    )
    for engine in engines:
        if engine.progress_at is not None:
            family.add_metric([engine.model, engine.replica], engine.progress_at)
    return family


def _engine_families(engines: Sequence[EngineSnapshot]) -> Iterable[Metric]:
    counted = [(engine, engine.stats) for engine in engines if engine.stats is not None]
    families: list[Metric] = list(_device_families(counted))
    for name, help_text, gauge_field in _GAUGES:
        gauge = GaugeMetricFamily(name, help_text, labels=ENGINE_LABELS)
        for engine, stats in counted:
            gauge.add_metric([engine.model, engine.replica], getattr(stats, gauge_field))
        families.append(gauge)
    for name, help_text, counter_field in _COUNTERS:
        counter = CounterMetricFamily(name, help_text, labels=ENGINE_LABELS)
        for engine, stats in counted:
            counter.add_metric([engine.model, engine.replica], getattr(stats, counter_field))
        families.append(counter)
    finished = CounterMetricFamily(
        "espalier_request_success", "Requests ended, by reason.", labels=(*ENGINE_LABELS, "finished_reason")
    )
    for engine, stats in counted:
        for reason, count in stats.finished.items():
            finished.add_metric([engine.model, engine.replica, reason.value], count)
    families.append(finished)
    for name, help_text, histogram_field in _HISTOGRAMS:
        histogram = HistogramMetricFamily(name, help_text, labels=ENGINE_LABELS)
        for engine, stats in counted:
            values: Histogram = getattr(stats, histogram_field)
            histogram.add_metric([engine.model, engine.replica], _buckets(values), values.total)
        families.append(histogram)
    return families


def _device_families(counted: Sequence[tuple[EngineSnapshot, EngineStats]]) -> Iterable[Metric]:
    """Of engines that run on devices with figures of their own; none, not even their names, where no engine does."""
    on_device = [(engine, stats.device) for engine, stats in counted if stats.device is not None]
    if not on_device:
        return
    for name, help_text, gauge_field in _DEVICE_GAUGES:
        gauge = GaugeMetricFamily(name, help_text, labels=ENGINE_LABELS)
        for engine, figures in on_device:
            gauge.add_metric([engine.model, engine.replica], getattr(figures, gauge_field))
        yield gauge
    for name, help_text, counter_field in _DEVICE_COUNTERS:
        counter = CounterMetricFamily(name, help_text, labels=ENGINE_LABELS)
        for engine, figures in on_device:
            counter.add_metric([engine.model, engine.replica], getattr(figures, counter_field))
        yield counter


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper edge, as Prometheus wants them."""
    seen = 0
    buckets = []
    for edge, count in zip((*map(str, histogram.edges), "+Inf"), histogram.counts, strict=True):
        seen += count
        buckets.append((edge, float(seen)))
    return buckets


# Engine families: name (counters get `_total`), help, field of EngineStats.
_GAUGES = (
    ("espalier_num_requests_running", "Requests that hold a lane.", "running"),
    ("espalier_num_requests_waiting", "Requests in the queue.", "waiting"),
    ("espalier_kv_cache_usage_perc", "Share of KV blocks that live sequences hold; 1 is all of them.", "kv_usage"),
    ("espalier_host_cache_blocks", "Blocks that the host tier has room for.", "host_blocks"),
    ("espalier_host_cache_blocks_used", "Blocks that the host tier holds.", "host_blocks_used"),
)
_COUNTERS = (
    ("espalier_prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("espalier_generation_tokens", "Tokens generated.", "generation_tokens"),
    ("espalier_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("espalier_prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    ("espalier_prefix_cache_host_hits", "Those of them that came back from the host tier.", "prefix_host_hits"),
    ("espalier_host_cache_saves", "Blocks copied to the host tier.", "host_saves"),
    ("espalier_host_cache_restores", "Blocks copied back from the host tier.", "host_restores"),
    ("espalier_host_cache_evictions", "Blocks that left the host tier for others.", "host_evictions"),
    ("espalier_num_preemptions", "Sequences sent back to the queue to free their blocks.", "preemptions"),
    ("espalier_rounds", "Rounds committed; a round is one forward of the model.", "steps"),
    ("espalier_prefill_rows", "Rows computed for prompts.", "prefill_rows"),
    ("espalier_decode_rows", "Rows computed as the only one of their lane.", "decode_rows"),
)
# The same of DeviceFigures.
_DEVICE_GAUGES = (
    ("espalier_engine_device_memory_used_bytes", "Device memory in use.", "device_bytes_used"),
    ("espalier_engine_device_memory_total_bytes", "Device memory in all.", "device_bytes_total"),
    (
        "espalier_engine_device_memory_reserved_bytes",
        "Device memory that this engine holds for tensors.",
        "device_bytes_reserved",
    ),
    ("espalier_engine_pool_bytes", "Memory of the counters that kernels lock with.", "pool_bytes"),
)
_DEVICE_COUNTERS = (
    ("espalier_engine_pool_growths", "Times that a counter pool was made larger.", "pool_growths"),
    ("espalier_engine_pool_resets", "Counter pools zeroed because their round failed.", "poison_resets"),
    ("espalier_engine_graph_captures", "Rounds captured as CUDA graphs.", "graph_captures"),
    ("espalier_engine_graph_replays", "Rounds run by replaying a CUDA graph.", "graph_replays"),
)
_HISTOGRAMS = (
    ("espalier_time_to_first_token_seconds", "From submission to the first token.", "ttft_s"),
    ("espalier_inter_token_latency_seconds", "Between tokens that followed each other.", "inter_token_s"),
    ("espalier_e2e_request_latency_seconds", "From submission to the end of a request.", "e2e_s"),
    ("espalier_request_queue_time_seconds", "Waiting before the first row ran.", "queue_s"),
    ("espalier_request_prefill_time_seconds", "From the first row to the first token.", "prefill_s"),
    ("espalier_request_decode_time_seconds", "From the first to the last token.", "decode_s"),
    ("espalier_request_prompt_tokens", "Prompt tokens of ended requests.", "request_prompt_tokens"),
    ("espalier_request_generation_tokens", "Generated tokens of ended requests.", "request_generation_tokens"),
    ("espalier_rows_per_round", "Rows of each round.", "rows_per_step"),
)
