"""The exposition: right numbers, bounded labels, no series of replicas that are gone or silent, and text that Prometheus' own tools accept."""

import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from espalier.cluster.audit_decisions import AuditResult
from espalier.cluster.config import GatewayConfig
from espalier.cluster.ingress.errors import WIRE_STATUS
from espalier.cluster.ingress.grpc_servicer import InferenceServicer
from espalier.cluster.ingress.http import build_http_app
from espalier.cluster.metrics import GRPC_METHODS, HTTP_ROUTES, ClusterMetrics, EngineSnapshot
from espalier.replicas.request import FinishReason
from espalier.replicas.stats import DeviceFigures, EngineStats
from tests.support.fakes import FakeGateway, fake_model

# vLLM's families, which dashboards made for it look for.
VLLM_FAMILIES = {
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "request_success": "counter",
    "num_preemptions": "counter",
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def device_figures() -> DeviceFigures:
    return DeviceFigures(
        pool_bytes=1,
        pool_growths=2,
        poison_resets=3,
        graph_captures=4,
        graph_replays=5,
        device_bytes_used=6,
        device_bytes_total=7,
        device_bytes_reserved=8,
    )


def busy_stats() -> EngineStats:
    stats = EngineStats(running=3, waiting=2, kv_usage=0.25, prompt_tokens=700, generation_tokens=90, steps=40)
    stats.prefix_queries, stats.prefix_hits = 700, 256
    stats.host_blocks, stats.host_blocks_used, stats.prefix_host_hits = 64, 48, 128
    stats.host_saves, stats.host_restores, stats.host_evictions = 60, 8, 12
    stats.prefill_rows, stats.decode_rows, stats.preemptions = 444, 86, 1
    stats.finished[FinishReason.STOP] = 5
    for seconds in (0.0005, 0.3, 0.3, 9999.0):
        stats.ttft_s.observe(seconds)
    return stats


def used_metrics() -> ClusterMetrics:
    metrics = ClusterMetrics(version="1.2.3")
    metrics.count_api_keys(lambda: 2)
    metrics.model_served("fake-model")
    metrics.model_audited("fake-model", AuditResult)
    metrics.replicas_configured("fake-model", 2)
    metrics.replicas_configured("fake-model", 3)
    metrics.http_request("/v1/chat/completions", 200)
    metrics.http_request("/v1/chat/completions", 200)
    metrics.http_request("/wp-login.php", 404)
    metrics.grpc_request("Generate", "OK")
    metrics.grpc_request("Explode", "UNIMPLEMENTED")
    metrics.client_disconnect("http")
    metrics.request_started("fake-model")
    metrics.request_started("fake-model")
    metrics.request_ended("fake-model")
    metrics.refused("fake-model", "queue_full")
    metrics.routed("fake-model", "prefix")
    metrics.replay("fake-model")
    metrics.replica_lost("fake-model")
    return metrics


def engine(
    replica: str, stats: EngineStats | None = None, outstanding: int | None = None, progress_at: float | None = None
) -> EngineSnapshot:
    return EngineSnapshot(
        model="fake-model", replica=replica, stats=stats, outstanding_tokens=outstanding, progress_at=progress_at
    )


def samples(text: bytes) -> Samples:
    """Every sample by name and sorted labels; fails on a duplicate."""
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def test_gateway_counts() -> None:
    found = samples(used_metrics().render([fake_model()], []))
    requests = "espalier_gateway_requests_total"
    assert value(found, requests, transport="http", route="/v1/chat/completions", code="200") == 2
    assert value(found, requests, transport="http", route="other", code="404") == 1
    assert value(found, requests, transport="grpc", route="Generate", code="OK") == 1
    assert value(found, requests, transport="grpc", route="other", code="UNIMPLEMENTED") == 1
    assert value(found, "espalier_gateway_client_disconnects_total", transport="http") == 1
    assert value(found, "espalier_gateway_requests_in_flight", model="fake-model") == 1
    assert value(found, "espalier_gateway_refusals_total", model="fake-model", reason="queue_full") == 1
    assert value(found, "espalier_gateway_replays_total", model="fake-model") == 1
    assert value(found, "espalier_gateway_replica_losses_total", model="fake-model") == 1
    assert value(found, "espalier_router_decisions_total", model="fake-model", kind="prefix") == 1
    assert value(found, "espalier_model_ready_replicas", model="fake-model") == 2
    assert value(found, "espalier_build_info", version="1.2.3") == 1
    assert value(found, "espalier_model_configured_replicas", model="fake-model") == 3
    assert value(found, "espalier_gateway_api_keys") == 2


def test_counts_that_alerts_watch_start_at_zero() -> None:
    """One that appears as 1 has not increased as far as Prometheus can tell."""
    metrics = ClusterMetrics(version="1")
    metrics.model_served("m")
    found = samples(metrics.render([], []))
    assert value(found, "espalier_gateway_requests_in_flight", model="m") == 0
    assert value(found, "espalier_gateway_replays_total", model="m") == 0
    assert value(found, "espalier_gateway_replica_losses_total", model="m") == 0
    for reason in ("queue_full", "unavailable"):
        assert value(found, "espalier_gateway_refusals_total", model="m", reason=reason) == 0
    for kind in ("prefix", "session", "load"):
        assert value(found, "espalier_router_decisions_total", model="m", kind=kind) == 0
    for error in ("request_failed", "replica_lost", "unavailable"):
        requests, wire = "espalier_gateway_requests_total", WIRE_STATUS[error]
        for route in ("/v1/chat/completions", "/v1/completions"):
            assert value(found, requests, transport="http", route=route, code=str(wire.http)) == 0
        assert value(found, requests, transport="grpc", route="Generate", code=wire.grpc.name) == 0


def test_api_keys_are_counted_at_each_scrape_and_only_if_there_is_a_file() -> None:
    metrics = ClusterMetrics(version="1")
    assert b"espalier_gateway_api_keys" not in metrics.render([], [])
    counts = [1, 0]
    metrics.count_api_keys(lambda: counts.pop())
    assert value(samples(metrics.render([], [])), "espalier_gateway_api_keys") == 0
    assert value(samples(metrics.render([], [])), "espalier_gateway_api_keys") == 1


def test_free_text_makes_no_series() -> None:
    metrics = ClusterMetrics(version="1")
    for number in range(50):
        metrics.http_request(f"/{number}", 404)
        metrics.grpc_request(f"Method{number}", "UNIMPLEMENTED")
    counted = {
        dict(labels)["route"]
        for (name, labels), count in samples(metrics.render([], [])).items()
        if name == "espalier_gateway_requests_total" and count
    }
    assert counted == {"other"}


def test_known_routes_keep_their_names() -> None:
    metrics = ClusterMetrics(version="1")
    for route in HTTP_ROUTES:
        metrics.http_request(route, 200)
    for method in GRPC_METHODS:
        metrics.grpc_request(method, "OK")
    found = samples(metrics.render([], []))
    routes = {dict(labels)["route"] for name, labels in found if name == "espalier_gateway_requests_total"}
    assert routes == HTTP_ROUTES | GRPC_METHODS


def test_what_is_served_is_known() -> None:
    """A route or method that is added to a front but not here would be counted as `other`."""
    served = {route.path for route in build_http_app(FakeGateway(), GatewayConfig()).routes if isinstance(route, Route)}
    assert {path.replace(":path}", "}") for path in served} == HTTP_ROUTES
    assert InferenceServicer(FakeGateway()).handlers().keys() == GRPC_METHODS


def test_the_gateways_process_is_there() -> None:
    found = samples(ClusterMetrics(version="1").render([], []))
    assert value(found, "process_cpu_seconds_total") > 0
    assert value(found, "process_resident_memory_bytes") > 0


def test_engine_figures_are_the_snapshot() -> None:
    found = samples(ClusterMetrics(version="1").render([], [engine("r1", busy_stats(), 321, 1700.5)]))
    labels = {"model": "fake-model", "replica": "r1"}
    assert value(found, "espalier_num_requests_running", **labels) == 3
    assert value(found, "espalier_num_requests_waiting", **labels) == 2
    assert value(found, "espalier_kv_cache_usage_perc", **labels) == 0.25
    assert value(found, "espalier_prompt_tokens_total", **labels) == 700
    assert value(found, "espalier_generation_tokens_total", **labels) == 90
    assert value(found, "espalier_prefix_cache_queries_total", **labels) == 700
    assert value(found, "espalier_prefix_cache_hits_total", **labels) == 256
    assert value(found, "espalier_num_preemptions_total", **labels) == 1
    assert value(found, "espalier_rounds_total", **labels) == 40
    assert value(found, "espalier_prefill_rows_total", **labels) == 444
    assert value(found, "espalier_decode_rows_total", **labels) == 86
    assert value(found, "espalier_request_success_total", finished_reason="stop", **labels) == 5
    assert value(found, "espalier_router_outstanding_tokens", **labels) == 321
    assert value(found, "espalier_replica_progress_timestamp_seconds", **labels) == 1700.5


def test_histograms_are_cumulative() -> None:
    stats = busy_stats()
    found = samples(ClusterMetrics(version="1").render([], [engine("r1", stats)]))
    name = "espalier_time_to_first_token_seconds"
    labels = {"model": "fake-model", "replica": "r1"}
    buckets = [value(found, f"{name}_bucket", le=str(edge), **labels) for edge in stats.ttft_s.edges]
    assert buckets == sorted(buckets)
    assert buckets[0] == 1
    assert value(found, f"{name}_bucket", le="0.25", **labels) == 1
    assert value(found, f"{name}_bucket", le="0.5", **labels) == 3
    assert value(found, f"{name}_bucket", le="2560.0", **labels) == 3
    assert value(found, f"{name}_bucket", le="+Inf", **labels) == 4
    assert value(found, f"{name}_count", **labels) == 4
    assert value(found, f"{name}_sum", **labels) == pytest.approx(9999.6005)


def test_a_replica_that_is_gone_leaves_no_series() -> None:
    metrics = used_metrics()
    before = metrics.render([fake_model()], [engine("r1", busy_stats(), 5), engine("r2", busy_stats(), 6)])
    after = metrics.render([fake_model()], [engine("r2", busy_stats(), 6), engine("r3", busy_stats(), 0)])
    assert b'replica="r1"' in before
    assert b'replica="r1"' not in after
    assert b'replica="r3"' in after


def test_what_cannot_be_told_is_absent() -> None:
    found = samples(ClusterMetrics(version="1").render([], [engine("silent"), engine("routed", outstanding=7)]))
    assert [(name, dict(labels)["replica"]) for name, labels in found if "replica" in dict(labels)] == [
        ("espalier_router_outstanding_tokens", "routed")
    ]


def test_families_have_vllm_names_and_types() -> None:
    text = ClusterMetrics(version="1").render([], [engine("r1", busy_stats())]).decode()
    types = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert {name: types[f"espalier_{name}"] for name in VLLM_FAMILIES} == VLLM_FAMILIES


def test_every_family_has_help_and_prefix() -> None:
    text = used_metrics().render([fake_model()], [engine("r1", busy_stats(), 1, 1700.5)]).decode()
    families = list(text_string_to_metric_families(text))
    for family in families:
        assert family.name.startswith(("espalier_", "process_")), family.name
        assert family.documentation.endswith("."), family.name
        assert family.type != "unknown", family.name
        assert family.samples, family.name
    assert len({family.name for family in families}) == len(families)
    assert "_created" not in text


def test_every_count_of_an_engine_is_shown() -> None:
    """A figure added to EngineStats without a family here would be lost silently: each field changes the text."""
    idle = ClusterMetrics(version="1").render([], [engine("r1", EngineStats())])
    for name in EngineStats.__slots__:
        stats = EngineStats()
        if name == "finished":
            stats.finished[FinishReason.LENGTH] = 1
        elif name == "device":
            stats.device = device_figures()
        elif hasattr(getattr(stats, name), "observe"):
            getattr(stats, name).observe(1.0)
        else:
            setattr(stats, name, 1)
        assert ClusterMetrics(version="1").render([], [engine("r1", stats)]) != idle, name


def test_figures_of_a_device_are_there_where_there_is_one() -> None:
    metrics = ClusterMetrics(version="1")
    assert b"espalier_engine_" not in metrics.render([], [engine("r1", busy_stats())])
    stats = busy_stats()
    stats.device = device_figures()
    found = samples(metrics.render([], [engine("r1", busy_stats()), engine("r2", stats)]))
    shown = {name: count for (name, labels), count in found.items() if name.startswith("espalier_engine_")}
    assert shown == {
        "espalier_engine_pool_bytes": 1,
        "espalier_engine_pool_growths_total": 2,
        "espalier_engine_pool_resets_total": 3,
        "espalier_engine_graph_captures_total": 4,
        "espalier_engine_graph_replays_total": 5,
        "espalier_engine_device_memory_used_bytes": 6,
        "espalier_engine_device_memory_total_bytes": 7,
        "espalier_engine_device_memory_reserved_bytes": 8,
    }
    assert all(dict(labels)["replica"] == "r2" for name, labels in found if name in shown)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")
def test_promtool_finds_nothing() -> None:
    on_gpu = busy_stats()
    on_gpu.device = device_figures()
    text = used_metrics().render([fake_model()], [engine("r1", busy_stats(), 1, 1700.5), engine("r2", on_gpu)])
    check = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (check.returncode, check.stdout + check.stderr) == (0, b"")
