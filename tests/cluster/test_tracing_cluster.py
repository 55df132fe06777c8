"""`espalier serve` with a collector beside it: one trace through gateway and replica, by both wires, and log lines that carry its id."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from espalier.cluster.ingress.pb import inference_pb2 as pb
from espalier.cluster.ingress.pb.inference_pb2_grpc import InferenceServiceStub
from tests.support.spans import CALLER, CALLER_TRACE
from tests.support.tiny import make_tiny_checkpoint
from tests.support.tools import require_module
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.deploy]

START_S = 180.0
STOP_S = 60
GRPC_TRACE = "0" * 31 + "1"
PHASES = {"queue", "prefill", "decode"}


@dataclass(frozen=True)
class SeenSpan:
    """service: who sent it. Ids are hexadecimal."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str


@dataclass
class Collector:
    """An OTLP collector that keeps what it is sent."""

    spans: list[SeenSpan] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def export(self, message: Any, _context: Any) -> Any:
        with self.lock:
            for sent in message.resource_spans:
                [service] = [a.value.string_value for a in sent.resource.attributes if a.key == "service.name"]
                self.spans += [
                    SeenSpan(service, s.name, s.trace_id.hex(), s.span_id.hex(), s.parent_span_id.hex())
                    for scope in sent.scope_spans
                    for s in scope.spans
                ]
        return require_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2").ExportTraceServiceResponse()

    def of(self, trace_id: str) -> dict[str, SeenSpan]:
        """The spans of a trace, by name."""
        with self.lock:
            return {span.name: span for span in self.spans if span.trace_id == trace_id}


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector and its endpoint."""
    messages = require_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    collector = Collector()
    handler = grpc.unary_unary_rpc_method_handler(
        collector.export,
        request_deserializer=messages.ExportTraceServiceRequest.FromString,
        response_serializer=messages.ExportTraceServiceResponse.SerializeToString,
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@dataclass(frozen=True)
class Served:
    """A running `espalier serve`. log: the file that its lines go to."""

    process: "subprocess.Popen[bytes]"
    http_url: str
    grpc_address: str
    log: Path

    def lines(self) -> list[dict[str, Any]]:
        """Its JSON log lines; what else a process says on stderr is not ours."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Served]:
    """One replica of a tiny model, JSON logs down to debug, until the block ends; then it is told to stop and must obey."""
    model = make_tiny_checkpoint(folder / "tiny")
    command = [sys.executable, "-m", "espalier.deploy", "serve", "--model", str(model), "--replicas", "1"]
    command += ["--cache-dir", str(folder / "cache"), "--http-port", "0", "--grpc-port", "0", "--context", "128"]
    command += ["--log-json", "--log-level", "debug", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out, log = folder / "out", folder / "log"
    with out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
        try:
            wait_until(
                lambda: " gRPC " in out.read_text() or process.poll() is not None, "it serves or has ended", START_S
            )
            assert process.poll() is None, log.read_text()
            said = [line.split() for line in out.read_text().splitlines()]
            told = {words[0]: words[1] for words in said if len(words) == 2}
            yield Served(process, told["HTTP"], told["gRPC"], log)
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_S) == 0
        finally:
            process.kill()
            process.wait()


def test_one_trace_through_gateway_and_replica_and_in_their_logs(tmp_path: Path) -> None:
    require_module("opentelemetry.exporter.otlp.proto.grpc")
    with collecting() as (collector, endpoint), serving(tmp_path, "--trace-endpoint", endpoint) as served:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "ignore_eos": True}
        reply = httpx.post(f"{served.http_url}/v1/chat/completions", json=body, headers=CALLER, timeout=60)
        assert reply.status_code == 200, reply.text
        with grpc.insecure_channel(served.grpc_address) as channel:
            request = pb.GenerateRequest(model="tiny", prompt="Hi", stop=pb.StopParams(max_tokens=8, ignore_eos=True))
            metadata = [("traceparent", f"00-{GRPC_TRACE}-{'0' * 15}1-01")]
            assert list(InferenceServiceStub(channel).Generate(request, metadata=metadata, timeout=60))
        # What has not been sent when the cluster is told to stop is sent then.
    http = {"POST /v1/chat/completions": "espalier-gateway", "chat tiny": "espalier-gateway"}
    rpc = {"espalier.v1.InferenceService/Generate": "espalier-gateway", "text_completion tiny": "espalier-gateway"}
    replica = dict.fromkeys({"replica tiny", *PHASES}, "espalier-replica")
    for trace_id, gateway in ((CALLER_TRACE, http), (GRPC_TRACE, rpc)):
        spans = collector.of(trace_id)
        assert {name: span.service for name, span in spans.items()} == gateway | replica
        wire, call = (spans[name] for name in gateway)
        assert (call.parent_id, spans["replica tiny"].parent_id) == (wire.span_id, call.span_id)
        assert {spans[name].parent_id for name in PHASES} == {spans["replica tiny"].span_id}
    said = {(line["event"], line["request_id"]) for line in served.lines() if line.get("trace_id") == CALLER_TRACE}
    request_id = reply.headers["x-request-id"]
    assert said == {("http", request_id), ("request", request_id), ("request ended", request_id)}
