"""The exporter's contract, as a real Prometheus reads it from a real cluster: every family is there and moves by what was asked of the server.

The tests run in their order on one cluster: known requests first, then load, then the loss of a replica. A family that FAMILIES lacks fails.
"""

import asyncio
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from espalier import __version__
from espalier.cluster.ingress.pb import inference_pb2 as pb
from tests.support import prometheus, served_process
from tests.support.metrics_stand import MODEL, SETTLE_S, ZERO_AT_REST, Stand, key, moved
from tests.support.metrics_work import BATCH_TOKENS, KEY, Client, Work, requests_by
from tests.support.tiny import make_tiny_checkpoint
from tests.support.tools import require_tool
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.deploy, pytest.mark.cluster]

RULES = Path("helm/espalier/files/rules")
# Tokens of a reply that takes a while.
LONG = 440

HISTOGRAMS = {
    "espalier_time_to_first_token_seconds",
    "espalier_inter_token_latency_seconds",
    "espalier_e2e_request_latency_seconds",
    "espalier_request_queue_time_seconds",
    "espalier_request_prefill_time_seconds",
    "espalier_request_decode_time_seconds",
    "espalier_request_prompt_tokens",
    "espalier_request_generation_tokens",
    "espalier_rows_per_round",
}
COUNTERS = {
    "espalier_gateway_requests",
    "espalier_gateway_client_disconnects",
    "espalier_gateway_refusals",
    "espalier_gateway_replays",
    "espalier_gateway_replica_losses",
    "espalier_router_decisions",
    "espalier_audit",
    "espalier_prompt_tokens",
    "espalier_generation_tokens",
    "espalier_prefix_cache_queries",
    "espalier_prefix_cache_hits",
    "espalier_prefix_cache_host_hits",
    "espalier_host_cache_saves",
    "espalier_host_cache_restores",
    "espalier_host_cache_evictions",
    "espalier_num_preemptions",
    "espalier_rounds",
    "espalier_prefill_rows",
    "espalier_decode_rows",
    "espalier_request_success",
}
# What they are when nothing runs.
GAUGES_AT_REST = {
    **dict.fromkeys(ZERO_AT_REST, 0.0),
    "espalier_model_ready_replicas": 2.0,
    "espalier_model_configured_replicas": 2.0,
    "espalier_gateway_api_keys": 1.0,
    "espalier_host_cache_blocks": 0.0,
    "espalier_host_cache_blocks_used": 0.0,
    "espalier_build_info": 1.0,
}
OTHER_GAUGES = {"espalier_replica_progress_timestamp_seconds"}
PROCESS = {
    *("process_cpu_seconds", "process_open_fds", "process_max_fds", "process_start_time_seconds"),
    *("process_virtual_memory_bytes", "process_resident_memory_bytes"),
}
FAMILIES = HISTOGRAMS | COUNTERS | GAUGES_AT_REST.keys() | OTHER_GAUGES | PROCESS


@pytest.fixture(scope="module")
def stand(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    require_tool("prometheus", "promtool")
    folder = tmp_path_factory.mktemp("contract")
    keys = folder / "keys"
    keys.write_text(f"ada: {KEY}\n")
    keys.chmod(0o600)
    options = {
        "model": str(make_tiny_checkpoint(folder / "tiny")),
        "name": MODEL,
        "replicas": 2,
        "cpus": 0.5,
        "cpu_threads": 1,
        "context": 512,
        "kv_tokens": 512,
        "max_lanes": 2,
        "batch_tokens": BATCH_TOKENS,
        "cache_dir": str(folder / "cache"),
        "max_outstanding": 12,
        "audit_share": 1.0,
        "api_key_file": str(keys),
        "metrics_open": True,
    }
    with (
        served_process.serving(folder, options) as served,
        prometheus.scraping(
            folder / "prometheus", served.http_address, sorted((root / RULES).glob("*.yaml"))
        ) as watching,
    ):
        here = Stand(served, watching, keys)
        wait_until(lambda: here.total("espalier_model_ready_replicas") == 2, "replicas are seen", SETTLE_S)
        wait_until(lambda: len(watching.now("espalier_num_requests_running")) == 2, "both report", SETTLE_S)
        yield here


def test_every_family_is_known_and_well_named(stand: Stand) -> None:
    text = httpx.get(f"{stand.served.http_url}/metrics").text
    assert {family.name for family in text_string_to_metric_families(text)} == FAMILIES
    check = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (check.returncode, check.stdout + check.stderr) == (0, "")


def test_gauges_at_rest(stand: Stand) -> None:
    stand.settle()
    assert {name: stand.total(name) for name in GAUGES_AT_REST} == GAUGES_AT_REST
    assert stand.watching.now("espalier_build_info")[0].labels["version"] == __version__
    # Idle replicas report every second.
    ages = stand.watching.now("time() - espalier_replica_progress_timestamp_seconds")
    assert len(ages) == 2 and all(-1 < age.finite[0] < 15 for age in ages)


def test_known_requests_count_exactly(stand: Stand) -> None:
    """One after the other, each with its audit."""
    before = stand.settle()
    shared = "A long beginning of many words. " * 6
    work = Work()

    async def talk() -> None:
        async with Client(stand) as client:
            work.add((await client.chat(shared, 12)).json()["usage"])
            await stand.audited()
            pieces = [piece async for piece in client.generate(shared, 9, temperature=0.9)]
            [usage] = [piece.finish.usage for piece in pieces if piece.HasField("finish")]
            work.usages.append((usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens))
            await stand.audited()
            work.add(await client.stream("Another one, streamed and short.", 5))
            await stand.audited()
            for content in ("I call myself by a session.", "And what follows stays with it."):
                work.add((await client.chat(content, 7, session="ada", temperature=0.8, seed=3)).json()["usage"])
                await stand.audited()

    asyncio.run(talk())
    assert sum(cached for _, cached, _ in work.usages) >= 32, "the shared beginning was found"
    assert moved(before, stand.settle()) == {
        **work.counts(),
        **requests_by("http", "/v1/chat/completions", _200=4),
        **requests_by("grpc", "Generate", OK=1),
        key("espalier_router_decisions_total", kind="load"): 3,
        key("espalier_router_decisions_total", kind="prefix"): 1,
        key("espalier_router_decisions_total", kind="session"): 1,
    }


def test_refusals_and_other_routes_count_exactly(stand: Stand) -> None:
    before = stand.settle()

    async def talk() -> None:
        async with Client(stand) as client:
            assert (await client.chat("Hello", 4, model="none")).status_code == 404
            assert (await client.chat("Hello", -1)).status_code == 400
            assert (await client.chat("Hello", 4, no_such_field=1)).status_code == 400
            assert (await client.post("/v1/completions", {}, authorization="Bearer wrong")).status_code == 401
            assert (await client.post("/wp-login.php", {})).status_code == 404
            for path in ("/health", "/ready", "/v1/models", f"/v1/models/{MODEL}"):
                assert (await client.get(path)).status_code == 200
            ids = (await client.post("/tokenize", {"model": MODEL, "prompt": "Hello"})).json()["tokens"]
            assert (await client.post("/detokenize", {"model": MODEL, "tokens": ids})).status_code == 200
            await client.unary("Tokenize", pb.TokenizeRequest(model=MODEL, prompt="Hello"))
            await client.unary("Detokenize", pb.DetokenizeRequest(model=MODEL, token_ids=ids))
            await client.unary("ListModels", pb.ListModelsRequest())
            for call, code in (
                (client.unary("ListModels", pb.ListModelsRequest(), metadata=()), grpc.StatusCode.UNAUTHENTICATED),
                (client.unary("Tokenize", pb.TokenizeRequest(model="none")), grpc.StatusCode.NOT_FOUND),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is code
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.generate("Hello", 0).read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(talk())
    assert moved(before, stand.settle()) == {
        **requests_by("http", "/v1/chat/completions", _404=1, _400=2),
        **requests_by("http", "/v1/completions", _401=1),
        **requests_by("http", "other", _404=1),
        **requests_by("http", "/health", _200=1),
        **requests_by("http", "/ready", _200=1),
        **requests_by("http", "/v1/models", _200=1),
        **requests_by("http", "/v1/models/{model}", _200=1),
        **requests_by("http", "/tokenize", _200=1),
        **requests_by("http", "/detokenize", _200=1),
        **requests_by("grpc", "Tokenize", OK=1, NOT_FOUND=1),
        **requests_by("grpc", "Detokenize", OK=1),
        **requests_by("grpc", "ListModels", OK=1, UNAUTHENTICATED=1),
        **requests_by("grpc", "Generate", INVALID_ARGUMENT=1),
    }


def test_the_key_file_is_watched(stand: Stand) -> None:
    stand.keys.chmod(0o644)
    wait_until(lambda: stand.total("espalier_gateway_api_keys") == 0, "no key is accepted", SETTLE_S)
    stand.keys.chmod(0o600)
    wait_until(lambda: stand.total("espalier_gateway_api_keys") == 1, "the key is accepted", SETTLE_S)


def test_two_that_do_not_fit_together_make_one_preemption(stand: Stand) -> None:
    """A replica has blocks for 512 tokens; either of the two needs most of them."""
    before, length = stand.settle(), 300

    async def talk() -> list[httpx.Response]:
        async with Client(stand) as client:
            asks = [client.chat(f"Number {number}, which is long.", length, session="ada") for number in range(2)]
            return await asyncio.gather(*asks)

    replies = [reply.json() for reply in asyncio.run(talk())]
    assert {reply["usage"]["completion_tokens"] for reply in replies} == {length}
    changes = moved(before, stand.settle())
    assert changes[key("espalier_num_preemptions_total")] == 1
    assert changes[key("espalier_router_decisions_total", kind="session")] == 2
    # Once each, though one was computed twice.
    assert changes[key("espalier_generation_tokens_total")] == 2 * length
    assert changes[key("espalier_prompt_tokens_total")] == sum(reply["usage"]["prompt_tokens"] for reply in replies)
    assert changes[key("espalier_request_success_total", finished_reason="length")] == 2
    assert changes[key("espalier_audit_total", result="equal")] == 2


def test_clients_that_leave_count_exactly(stand: Stand) -> None:
    """Eight at once, for four lanes: all gauges of load move, twelve more are too many, and everything goes back when the clients leave."""
    before = stand.settle()
    loaded = ("running", "waiting")

    async def talk() -> None:
        async with Client(stand) as client:

            async def over_grpc(number: int) -> None:
                call = client.generate(f"Over gRPC, {number}", LONG)
                try:
                    async for _ in call:
                        pass
                finally:
                    call.cancel()

            tasks = [asyncio.create_task(client.stream(f"Streamed, {number}", LONG)) for number in range(4)]
            tasks += [asyncio.create_task(over_grpc(number)) for number in range(4)]

            def busy() -> bool:
                figures = [stand.total(f"espalier_num_requests_{state}") for state in loaded]
                figures += [
                    stand.total("espalier_kv_cache_usage_perc"),
                    stand.total("espalier_router_outstanding_tokens"),
                ]
                return all(figures) and stand.total("espalier_gateway_requests_in_flight") == 8

            await asyncio.to_thread(wait_until, busy, "all gauges of load have moved", SETTLE_S)
            assert (await client.chat("Too many", 4, n=12, temperature=1)).status_code == 429
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(talk())
    changes = moved(before, stand.settle())
    left = {
        transport: changes.get(key("espalier_gateway_client_disconnects_total", transport=transport), 0)
        for transport in ("http", "grpc")
    }
    assert left["http"] + left["grpc"] > 0
    assert changes[key("espalier_request_success_total", finished_reason="cancelled")] == left["http"] + left["grpc"]
    assert changes[key("espalier_gateway_refusals_total", reason="queue_full")] == 1
    refused = requests_by("http", "/v1/chat/completions", _429=1)
    assert refused.items() <= changes.items()
    # Whoever had its whole reply before it left counts as answered.
    for transport, route, left_code, whole_code in (
        ("http", "/v1/chat/completions", "499", "200"),
        ("grpc", "Generate", "CANCELLED", "OK"),
    ):
        by_code = {
            code: changes.get(key("espalier_gateway_requests_total", transport=transport, route=route, code=code), 0)
            for code in (left_code, whole_code)
        }
        assert by_code == {left_code: left[transport], whole_code: 4 - left[transport]}


def test_every_recording_rule_has_a_series_and_no_alert_fires(root: Path, stand: Stand) -> None:
    document = yaml.safe_load((root / RULES / "recording.yaml").read_text())
    names = {rule["record"] for group in document["groups"] for rule in group["rules"]}
    wait_until(lambda: names <= set(stand.watching.label_values("__name__")), "all rules have series", SETTLE_S)
    assert all(series.finite for name in names for series in stand.watching.now(name))
    assert stand.watching.now('ALERTS{alertstate="firing"}') == []


def test_a_lost_replica_and_what_is_replayed_count_exactly(stand: Stand) -> None:
    """Twelve at once for four lanes: when one replica is killed, what had tokens ends in an error, and what had none runs on the other."""
    before = stand.settle()
    victim = stand.served.replica_pids()[0]

    async def talk() -> list[httpx.Response]:
        async with Client(stand) as client:
            asks = [asyncio.create_task(client.chat(f"Under load, {number}", LONG)) for number in range(12)]

            def backed_up() -> bool:
                waiting = stand.watching.now("espalier_num_requests_waiting")
                return len(waiting) == 2 and all(series.finite[0] >= 2 for series in waiting)

            await asyncio.to_thread(wait_until, backed_up, "requests wait at both", SETTLE_S)
            os.kill(victim, signal.SIGKILL)
            return await asyncio.gather(*asks)

    codes = Counter(str(reply.status_code) for reply in asyncio.run(talk()))
    assert codes.total() == 12 and codes.keys() <= {"200", "502"}
    wait_until(lambda: stand.total("espalier_model_ready_replicas") == 2, "a new one is ready", SETTLE_S)
    wait_until(lambda: len(stand.watching.now("espalier_num_requests_running")) == 2, "both report", SETTLE_S)
    stand.wait_for_scrapes(3)
    # The dead replica's own counts are gone with it, and audits go on: what the gateway counts of requests is left to compare.
    changes = moved(before, stand.counts())
    replays = changes[key("espalier_gateway_replays_total")]
    placed = sum(change for (name, _), change in changes.items() if name == "espalier_router_decisions_total")
    assert replays >= 1
    assert placed == 12 + replays
    assert changes[key("espalier_gateway_replica_losses_total")] == 1
    for code, number in codes.items():
        requests = key("espalier_gateway_requests_total", transport="http", route="/v1/chat/completions", code=code)
        assert changes[requests] == number
    assert stand.total("espalier_model_configured_replicas") == 2
