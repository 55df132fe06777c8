"""Spans of requests on both wires: one trace from the caller to the replica, whatever the end, and none of strangers."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from espalier.cluster.config import GatewayConfig
from espalier.cluster.ingress.grpc import start_grpc_server
from espalier.cluster.ingress.http import build_http_app
from espalier.cluster.ingress.pb.inference_pb2_grpc import InferenceServiceStub
from espalier.cluster.replica_spans import RequestTrail
from espalier.replicas.errors import EngineError, QueueFullError, RequestFailedError
from tests.support.asgi_client import ask
from tests.support.fakes import FakeGateway, FakeReply
from tests.support.gateway_stage import Stage, run
from tests.support.grpc_serving import generate, request, until
from tests.support.local_link import MODEL
from tests.support.spans import (
    CALLER,
    CALLER_SPAN,
    CALLER_TRACE,
    KeptSpans,
    attributes,
    parent_id,
    span_id,
    status,
    trace_id,
)

CHAT_ROUTE = "/v1/chat/completions"
HTTP_SPAN = f"POST {CHAT_ROUTE}"
RPC_SPAN = "espalier.v1.InferenceService/Generate"
SECRET = "what-the-client-wrote"
CHAT = {
    "model": MODEL.name,
    "messages": [{"role": "user", "content": SECRET}],
    "max_tokens": 3,
    "seed": 2**64 - 1,
    "stop": [SECRET],
}


class TracedStage(Stage):
    """A stage whose gateway and replicas trace into `spans`."""

    def __init__(self, spans: KeptSpans, **options: Any) -> None:
        super().__init__(tracer=spans.tracer, **options)
        for link in self.links:
            link.replica._trail = RequestTrail(MODEL.name, spans.tracer)


@asynccontextmanager
async def http_client(stage: Stage, spans: KeptSpans) -> AsyncGenerator[httpx.AsyncClient, None]:
    transport = httpx.ASGITransport(build_http_app(stage.gateway, GatewayConfig(), spans.tracer))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield client


async def post_chat(stage: Stage, spans: KeptSpans, headers: dict[str, str], rounds: int = 3) -> httpx.Response:
    """A chat that the fake engines answer in so many rounds."""
    async with http_client(stage, spans) as client:
        asked = asyncio.create_task(client.post(CHAT_ROUTE, json=CHAT, headers=headers))
        await stage.started()
        stage.round(rounds)
        return await asked


def test_over_http_one_trace_from_the_caller_to_the_replica() -> None:
    spans = KeptSpans()

    async def test() -> None:
        async with TracedStage(spans, replicas=1) as stage:
            reply = await post_chat(stage, spans, CALLER)
        request_id, chosen = reply.headers["x-request-id"], reply.json()["choices"][0]
        http, call, replica = spans.one(HTTP_SPAN), spans.one("chat fake-model"), spans.one("replica fake-model")
        assert {trace_id(span) for span in spans.all()} == {CALLER_TRACE}
        assert [parent_id(span) for span in (http, call, replica)] == [CALLER_SPAN, span_id(http), span_id(call)]
        assert all(span.context and span.context.trace_state.to_header() == "vendor=one" for span in spans.all())
        assert [span.kind.name for span in (http, call, replica)] == ["SERVER", "INTERNAL", "SERVER"]
        assert {status(span) for span in spans.all()} == {("UNSET", None)}
        assert attributes(http) == {
            "http.request.method": "POST",
            "http.route": CHAT_ROUTE,
            "http.response.status_code": 200,
            "espalier.request.id": request_id,
            "espalier.client": "-",
        }
        told = attributes(call)
        assert told.pop("gen_ai.server.time_to_first_token") >= 0
        assert told == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "espalier",
            "gen_ai.request.model": MODEL.name,
            "gen_ai.request.choice.count": 1,
            "gen_ai.request.max_tokens": 3,
            "gen_ai.request.temperature": 1.0,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.top_k": 0,
            "gen_ai.request.frequency_penalty": 0.0,
            "gen_ai.request.presence_penalty": 0.0,
            "gen_ai.response.id": f"chatcmpl-{request_id}",
            "gen_ai.response.model": MODEL.name,
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.usage.input_tokens": reply.json()["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": 3,
            "gen_ai.usage.cache_read.input_tokens": 0,
            "espalier.seed": str(2**64 - 1),
            "espalier.client": "-",
            "espalier.replica.id": ("replica-0",),
            "espalier.token_sha256": (chosen["espalier"]["token_sha256"],),
            "espalier.replays": 0,
            "espalier.outcome": "ok",
        }
        assert attributes(replica)["espalier.replica.id"] == "replica-0"
        assert attributes(replica)["espalier.token_sha256"] == chosen["espalier"]["token_sha256"]
        assert attributes(replica)["espalier.request.id"] == f"chatcmpl-{request_id}-0"

    run(test)


def test_over_grpc_the_same() -> None:
    spans = KeptSpans()

    async def test() -> None:
        async with TracedStage(spans, replicas=1) as stage:
            server, port = await start_grpc_server(stage.gateway, GatewayConfig(grpc_port=0), spans.tracer)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                asked = asyncio.create_task(
                    generate(channel, request(stop={"max_tokens": 2}), metadata=[*CALLER.items()])
                )
                await stage.started()
                stage.round(2)
                answer = await asked
            await server.stop(None)
        rpc, call = spans.one(RPC_SPAN), spans.one("text_completion fake-model")
        assert answer.error is None
        assert {trace_id(span) for span in spans.all()} == {CALLER_TRACE}
        assert [parent_id(span) for span in (rpc, call)] == [CALLER_SPAN, span_id(rpc)]
        assert parent_id(spans.one("replica fake-model")) == span_id(call)
        request_id = attributes(rpc)["espalier.request.id"]
        assert attributes(rpc) == {
            "rpc.system.name": "grpc",
            "rpc.method": RPC_SPAN,
            "rpc.response.status_code": "OK",
            "espalier.request.id": request_id,
        }
        assert attributes(call)["gen_ai.response.id"] == answer.pieces[0].id == f"gen-{request_id}"
        assert attributes(call)["espalier.token_sha256"] == (answer.finish().token_sha256,)

    run(test)


def test_each_choice_has_a_replica_span_and_each_prompt_a_call_span() -> None:
    spans = KeptSpans()

    async def test() -> None:
        body = {"model": MODEL.name, "prompt": ["a", "b"], "n": 2, "max_tokens": 1}
        async with TracedStage(spans) as stage, http_client(stage, spans) as client:
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            await stage.started(4)
            stage.round()
            assert (await asked).status_code == 200
        calls = {span_id(span): span for span in spans.named("text_completion fake-model")}
        replicas = spans.named("replica fake-model")
        assert len(calls) == 2
        assert sorted(str(parent_id(span)) for span in replicas) == sorted([*calls, *calls])
        assert {parent_id(span) for span in calls.values()} == {span_id(spans.one("POST /v1/completions"))}
        assert {len(attributes(span)["espalier.replica.id"]) for span in calls.values()} == {2}

    run(test)


def test_no_span_holds_what_clients_write_or_read() -> None:
    spans = KeptSpans()

    async def test() -> None:
        async with TracedStage(spans, replicas=1) as stage, http_client(stage, spans) as client:
            reply = await post_chat(stage, spans, {})
            refused = await client.post(CHAT_ROUTE, json=CHAT | {"temperature": SECRET})
        assert reply.json()["choices"][0]["message"]["content"]
        assert refused.status_code == 400
        told = "".join(span.to_json() for span in spans.all())
        assert SECRET not in told
        assert reply.json()["choices"][0]["message"]["content"] not in told

    run(test)


@pytest.mark.parametrize(
    ("error", "code", "wire_status"),
    [
        (QueueFullError("full", retry_after_s=1.0), "queue_full", ("UNSET", None)),
        (RequestFailedError("broken"), "request_failed", ("ERROR", "request_failed")),
    ],
    ids=["refused", "failed"],
)
def test_an_error_ends_every_span_with_its_kind(
    error: EngineError, code: str, wire_status: tuple[str, str | None]
) -> None:
    spans = KeptSpans()

    async def test() -> None:
        async with TracedStage(spans, replicas=2) as stage, http_client(stage, spans) as client:
            for link in stage.links:
                link.engine.refuse = error
            reply = await client.post(CHAT_ROUTE, json=CHAT)
        http, call, replicas = spans.one(HTTP_SPAN), spans.one("chat fake-model"), spans.named("replica fake-model")
        # A replica that is full is not the last word.
        assert len(replicas) == (2 if isinstance(error, QueueFullError) else 1)
        assert status(http) == wire_status
        assert attributes(http)["http.response.status_code"] == reply.status_code
        assert attributes(http)["espalier.error.code"] == code
        for span in (call, *replicas):
            assert status(span) == ("ERROR", code)
            assert attributes(span)["error.type"] == code

    run(test)


def test_a_replica_that_is_lost_shows_in_the_calls_span() -> None:
    spans = KeptSpans()

    async def test() -> None:
        async with TracedStage(spans, replicas=1) as stage, http_client(stage, spans) as client:
            asked = asyncio.create_task(client.post(CHAT_ROUTE, json=CHAT))
            await stage.started()
            stage.round()
            [choice] = (choice for _, choice in stage.gateway._choices.values())
            await until(lambda: bool(choice.emitted))
            stage.links[0].kill()
            assert (await asked).status_code == 502
        assert status(spans.one(HTTP_SPAN)) == status(spans.one("chat fake-model")) == ("ERROR", "replica_lost")

    run(test)


def test_an_error_in_a_stream_that_has_begun_is_the_servers() -> None:
    spans = KeptSpans()
    gateway = FakeGateway(FakeReply(break_after=1, break_with=RequestFailedError("broken")))
    app = build_http_app(gateway, GatewayConfig(), spans.tracer)
    reply = ask(app, "POST", CHAT_ROUTE, json=CHAT | {"max_tokens": 20, "stream": True})
    assert reply.status_code == 200
    assert status(spans.one(HTTP_SPAN)) == ("ERROR", "request_failed")


def test_an_http_client_that_leaves_ends_its_spans() -> None:
    spans = KeptSpans()

    async def test() -> None:
        async with TracedStage(spans, replicas=1) as stage:
            asked = asyncio.create_task(post_and_leave(stage, spans))
            await asked
            await stage.until_gone()
        assert attributes(spans.one(HTTP_SPAN))["http.response.status_code"] == 499
        assert attributes(spans.one("chat fake-model"))["espalier.outcome"] == "client_left"
        assert {status(span) for span in spans.all()} == {("UNSET", None)}

    run(test)


async def post_and_leave(stage: Stage, spans: KeptSpans) -> None:
    """A client that is gone as soon as its request has reached a replica."""
    app = build_http_app(stage.gateway, GatewayConfig(), spans.tracer)
    content = httpx.Request("POST", "http://server", json=CHAT).content
    messages = iter([{"type": "http.request", "body": content, "more_body": False}])

    async def receive() -> dict[str, Any]:
        if (message := next(messages, None)) is not None:
            return message
        await stage.started()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError(f"nobody is there to read {message}")

    scope = {"type": "http", "method": "POST", "path": CHAT_ROUTE, "headers": [], "query_string": b""}
    await app(scope, receive, send)


def test_a_grpc_client_that_leaves_ends_its_spans() -> None:
    spans = KeptSpans()

    async def test() -> None:
        async with TracedStage(spans, replicas=1) as stage:
            server, port = await start_grpc_server(stage.gateway, GatewayConfig(grpc_port=0), spans.tracer)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = InferenceServiceStub(channel).Generate(request(stop={"max_tokens": 2}))
                await stage.started()
                call.cancel()
                await until(lambda: len(spans.named(RPC_SPAN)) == 1)
            await server.stop(None)
        assert attributes(spans.one(RPC_SPAN))["rpc.response.status_code"] == "CANCELLED"
        assert attributes(spans.one("text_completion fake-model"))["espalier.outcome"] == "client_left"
        assert {status(span) for span in spans.all()} == {("UNSET", None)}

    run(test)


def test_a_grpc_error_is_told_by_its_status() -> None:
    spans = KeptSpans()

    async def test() -> None:
        gateway = FakeGateway(FakeReply(refusal=RequestFailedError("broken")), FakeReply())
        server, port = await start_grpc_server(gateway, GatewayConfig(grpc_port=0), spans.tracer)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await generate(channel, request())
            await generate(channel, request(model="other"))
        await server.stop(None)
        failed, refused = spans.named(RPC_SPAN)
        assert attributes(failed)["rpc.response.status_code"] == "INTERNAL"
        assert status(failed) == ("ERROR", "request_failed")
        assert attributes(refused)["rpc.response.status_code"] == "NOT_FOUND"
        assert attributes(refused)["espalier.error.code"] == "model_not_found"
        assert status(refused) == ("UNSET", None)

    run(test)


def test_callers_decide_whether_their_traces_are_sampled_and_the_ratio_is_for_the_rest() -> None:
    async def names(spans: KeptSpans, headers: dict[str, str]) -> set[str]:
        async with TracedStage(spans, replicas=1) as stage:
            await post_chat(stage, spans, headers)
        return {span.name for span in spans.all()}

    async def test() -> None:
        every = {HTTP_SPAN, "chat fake-model", "replica fake-model"}
        unsampled = {"traceparent": CALLER["traceparent"][:-2] + "00"}
        assert await names(KeptSpans(ratio=0.0), {}) == set()
        assert await names(KeptSpans(ratio=0.0), CALLER) == every
        assert await names(KeptSpans(ratio=1.0), unsampled) == set()
        assert await names(KeptSpans(ratio=1.0), {"traceparent": "nonsense"}) == every

    run(test)


def test_strangers_and_probes_leave_no_spans(tmp_path: Path) -> None:
    spans = KeptSpans()
    keys = tmp_path / "keys"
    keys.write_text("one: " + "k" * 32 + "\n")
    keys.chmod(0o600)
    app = build_http_app(FakeGateway(), GatewayConfig(api_key_file=keys), spans.tracer)
    assert ask(app, "POST", CHAT_ROUTE, json=CHAT, headers=CALLER).status_code == 401
    assert ask(app, "GET", "/health").status_code == 200
    key = {"authorization": "Bearer " + "k" * 32}
    assert ask(app, "GET", "/metrics", headers=key).status_code == 200
    assert spans.all() == ()
    assert ask(app, "GET", "/v1/models", headers=key).status_code == 200
    assert attributes(spans.one("GET /v1/models"))["espalier.client"] == "one"
