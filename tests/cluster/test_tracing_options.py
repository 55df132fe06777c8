"""Tracing as an option: off, not installed, wrongly given, or with a collector that is not there."""

import importlib.util
import logging
import socket
import subprocess
import sys
import time

import pytest

from espalier.cluster.config import ClusterConfig, TraceConfig
from espalier.cluster.tracing import require_opentelemetry, start_tracing
from espalier.replicas.errors import InvalidRequestError
from tests.support.local_link import MODEL
from tests.support.tools import require_module

OFF = """
import sys
import espalier.cluster.gateway, espalier.cluster.replica, espalier.cluster.ingress.http, espalier.cluster.ingress.grpc
from espalier.cluster.tracing import start_tracing
assert start_tracing(None, "espalier-gateway") is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


def test_nothing_is_imported_while_it_is_off() -> None:
    subprocess.run([sys.executable, "-c", OFF], check=True)


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter.otlp.proto.grpc"])
def test_without_the_extra_the_option_is_refused(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> None:
        # The way of importlib: no parent is an error, no module is nothing.
        if missing != name:
            raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(InvalidRequestError, match=r"trace_endpoint: .*espalier\[tracing\]") as refused:
        require_opentelemetry()
    assert refused.value.param == "trace_endpoint"
    with pytest.raises(InvalidRequestError, match="trace_endpoint"):
        start_tracing(TraceConfig(endpoint="http://127.0.0.1:4317"), "espalier-gateway")


@pytest.mark.parametrize(
    "endpoint",
    ["", "collector:4317", "grpc://collector:4317", "http://collector", "http://:4317", "http://c:x", "http://c:1/v1"],
)
def test_an_endpoint_is_a_scheme_a_host_and_a_port(endpoint: str) -> None:
    with pytest.raises(InvalidRequestError, match="trace_endpoint: "):
        ClusterConfig(models=(MODEL,), trace_endpoint=endpoint)


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_a_ratio_is_a_share(ratio: float) -> None:
    with pytest.raises(InvalidRequestError, match="trace_ratio: "):
        ClusterConfig(models=(MODEL,), trace_ratio=ratio)


def test_the_options_make_the_config() -> None:
    assert ClusterConfig(models=(MODEL,)).tracing is None
    config = ClusterConfig(models=(MODEL,), trace_endpoint="https://collector:4317", trace_ratio=0.5)
    assert config.tracing == TraceConfig(endpoint="https://collector:4317", ratio=0.5)


@pytest.mark.deploy
def test_a_collector_that_is_not_there_is_told_of_and_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    require_module("opentelemetry.exporter.otlp.proto.grpc")
    logger, theirs = logging.getLogger("espalier"), logging.getLogger("opentelemetry")
    ours, before = logger.handlers, (theirs.handlers, theirs.propagate)
    logger.handlers = [caplog.handler]
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        tracer = start_tracing(TraceConfig(endpoint=endpoint), "espalier-gateway")
        assert tracer is not None
        tracer.start("work", None, {}).end({})
        began = time.monotonic()
        tracer.close()
        assert time.monotonic() - began < 10
        assert any(endpoint.removeprefix("http://") in record.getMessage() for record in caplog.records)
    finally:
        logger.handlers, (theirs.handlers, theirs.propagate) = ours, before
