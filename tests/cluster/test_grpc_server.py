"""The server around InferenceService: models, tokens, health, reflection, keys, ports."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from espalier.cluster.config import GatewayConfig
from espalier.cluster.ingress.grpc import start_grpc_server
from espalier.cluster.ingress.grpc_servicer import SERVICE
from espalier.cluster.ingress.pb import inference_pb2 as pb
from espalier.cluster.ingress.pb.inference_pb2_grpc import InferenceServiceStub
from tests.support.fakes import END_OF_TEXT, FAKE_MODEL, FakeGateway, fake_model
from tests.support.grpc_serving import generate, request, serving

Status = health_pb2.HealthCheckResponse
KEY = "sk-test-0123456789"


def run(gateway: FakeGateway, body: Callable[[grpc.aio.Channel], Awaitable[None]], **config: Any) -> None:
    """`body` with a channel to a server of `gateway`."""

    async def main() -> None:
        async with serving(gateway, **config) as channel:
            await body(channel)

    asyncio.run(main())


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"ann: {KEY}\n")
    path.chmod(0o600)
    return path


async def check(channel: grpc.aio.Channel, service: str = "") -> int:
    """One health check."""
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


async def listed(channel: grpc.aio.Channel, **options: Any) -> set[str]:
    """The services that reflection lists."""
    stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), **options
    )
    reply = await stream.read()
    return {service.name for service in reply.list_services_response.service}


async def code_of(call: Awaitable[Any]) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_models_with_their_limits() -> None:
    second = fake_model("second", ready_replicas=0, defaults={"temperature": 0.6, "top_k": 20}, max_context=64)

    async def body(channel: grpc.aio.Channel) -> None:
        reply = await InferenceServiceStub(channel).ListModels(pb.ListModelsRequest())
        assert [model.name for model in reply.models] == [FAKE_MODEL, "second"]
        assert reply.models[0].ready_replicas == 2
        assert reply.models[1] == pb.Model(
            name="second",
            created=1_700_000_000,
            max_context=64,
            vocab_size=512,
            quantization="exl3",
            numerics_id="fake-numerics",
            defaults={"temperature": 0.6, "top_k": 20},
            ready_replicas=0,
        )

    run(FakeGateway(models=[fake_model(), second]), body)


def test_tokenize_gives_what_generate_starts_from() -> None:
    gateway = FakeGateway()
    conversation = pb.Chat(messages=[pb.Message(role="user", content="Hi")])

    async def body(channel: grpc.aio.Channel) -> None:
        stub = InferenceServiceStub(channel)
        for source in ({"prompt": "Hi"}, {"chat": conversation}):
            reply = await stub.Tokenize(pb.TokenizeRequest(model=FAKE_MODEL, **source))
            await generate(channel, request(**source))
            assert tuple(reply.token_ids) == gateway.calls[-1].prompt_token_ids
            assert reply.max_context == 4096
        bare = await stub.Tokenize(pb.TokenizeRequest(model=FAKE_MODEL, prompt="Hi", add_special_tokens=False))
        assert list(bare.token_ids) == [*b"Hi"]

    run(gateway, body)


def test_detokenize() -> None:
    async def body(channel: grpc.aio.Channel) -> None:
        stub = InferenceServiceStub(channel)
        ids = [*"é!".encode(), END_OF_TEXT]
        whole = await stub.Detokenize(pb.DetokenizeRequest(model=FAKE_MODEL, token_ids=ids))
        plain = await stub.Detokenize(pb.DetokenizeRequest(model=FAKE_MODEL, token_ids=ids, skip_special_tokens=True))
        assert (whole.text, plain.text) == ("é!<|endoftext|>", "é!")

    gateway = FakeGateway()
    run(gateway, body)
    assert gateway.metrics.grpc == [("Detokenize", "OK")] * 2


def test_health_follows_readiness() -> None:
    gateway = FakeGateway()

    async def body(channel: grpc.aio.Channel) -> None:
        assert await check(channel) == Status.SERVING
        assert await check(channel, SERVICE) == Status.SERVING
        gateway.ready = False
        assert await check(channel, SERVICE) == Status.NOT_SERVING
        gateway.ready, gateway.draining = True, True
        assert await check(channel) == Status.NOT_SERVING
        assert await code_of(check(channel, "espalier.v1.Other")) is grpc.StatusCode.NOT_FOUND

    run(gateway, body)


def test_watch_tells_changes_and_ends_when_the_gateway_drains() -> None:
    gateway = FakeGateway()

    async def body(channel: grpc.aio.Channel) -> None:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == Status.SERVING
        gateway.ready = False
        assert (await watch.read()).status == Status.NOT_SERVING
        gateway.ready = True
        assert (await watch.read()).status == Status.SERVING
        gateway.draining = True
        assert (await watch.read()).status == Status.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF

    run(gateway, body)


def test_watch_of_an_unknown_service_says_so_and_waits() -> None:
    async def body(channel: grpc.aio.Channel) -> None:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="ghost"))
        assert (await watch.read()).status == Status.SERVICE_UNKNOWN
        assert not watch.done()
        watch.cancel()

    run(FakeGateway(), body)


def test_reflection_lists_services_unless_switched_off() -> None:
    async def on(channel: grpc.aio.Channel) -> None:
        assert await listed(channel) == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}

    async def off(channel: grpc.aio.Channel) -> None:
        assert await code_of(listed(channel)) is grpc.StatusCode.UNIMPLEMENTED

    run(FakeGateway(), on)
    run(FakeGateway(), off, reflection=False)


@pytest.mark.parametrize(
    "metadata",
    [(("authorization", f"Bearer {KEY}"),), (("authorization", f"bearer {KEY}"),), (("x-api-key", KEY),)],
    ids=["bearer", "lower", "x-api-key"],
)
def test_a_key_opens_everything(key_file: Path, metadata: tuple[tuple[str, str], ...]) -> None:
    async def body(channel: grpc.aio.Channel) -> None:
        assert (await generate(channel, request(), metadata=metadata)).text() == "Hello, world."
        assert SERVICE in await listed(channel, metadata=metadata)

    gateway = FakeGateway()
    run(gateway, body, api_key_file=key_file)
    assert [call.client for call in gateway.calls] == ["ann"]


@pytest.mark.parametrize(
    "metadata",
    [(), (("authorization", "Bearer wrong"),), (("authorization", KEY),), (("x-api-key", ""),)],
    ids=["none", "wrong", "no scheme", "empty"],
)
def test_without_a_key_only_health_answers(key_file: Path, metadata: tuple[tuple[str, str], ...]) -> None:
    gateway = FakeGateway()

    async def body(channel: grpc.aio.Channel) -> None:
        stub = InferenceServiceStub(channel)
        answer = await generate(channel, request(), metadata=metadata)
        assert answer.code is grpc.StatusCode.UNAUTHENTICATED
        assert KEY not in answer.details
        models = stub.ListModels(pb.ListModelsRequest(), metadata=metadata)
        assert await code_of(models) is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(listed(channel, metadata=metadata)) is grpc.StatusCode.UNAUTHENTICATED
        unknown = channel.unary_unary("/espalier.v1.InferenceService/Ghost")(b"", metadata=metadata)
        assert await code_of(unknown) is grpc.StatusCode.UNAUTHENTICATED
        assert await check(channel) == Status.SERVING

    run(gateway, body, api_key_file=key_file)
    assert gateway.calls == []
    assert gateway.metrics.grpc[:2] == [("Generate", "UNAUTHENTICATED"), ("ListModels", "UNAUTHENTICATED")]


def test_a_key_file_that_breaks_closes_the_door(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata = (("x-api-key", KEY),)

    def set_mode(mode: int) -> None:
        key_file.chmod(mode)

    async def body(channel: grpc.aio.Channel) -> None:
        assert (await generate(channel, request(), metadata=metadata)).code is grpc.StatusCode.OK
        set_mode(0o644)
        assert (await generate(channel, request(), metadata=metadata)).code is grpc.StatusCode.UNAUTHENTICATED
        set_mode(0o600)
        assert (await generate(channel, request(), metadata=metadata)).code is grpc.StatusCode.OK

    with caplog.at_level(logging.ERROR):
        run(FakeGateway(), body, api_key_file=key_file)
    assert KEY not in caplog.text


def test_a_taken_port_is_an_error() -> None:
    async def main() -> None:
        server, port = await start_grpc_server(FakeGateway(), GatewayConfig(grpc_port=0))
        try:
            with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
                await start_grpc_server(FakeGateway(), GatewayConfig(grpc_port=port))
        finally:
            await server.stop(None)

    asyncio.run(main())
