"""A gRPC server over a fake gateway, and calls to it. For tests; everything runs in the test's own event loop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from espalier.cluster.config import GatewayConfig
from espalier.cluster.ingress.grpc import start_grpc_server
from espalier.cluster.ingress.pb import inference_pb2 as pb
from espalier.cluster.ingress.pb.inference_pb2_grpc import InferenceServiceStub
from tests.support.fakes import FAKE_MODEL, FakeGateway

WAIT_S = 10.0


@contextlib.asynccontextmanager
async def serving(
    gateway: FakeGateway, channel_options: Sequence[tuple[str, Any]] = (), **config: Any
) -> AsyncGenerator[grpc.aio.Channel, None]:
    """A channel to a server of `gateway` on a free port; both are gone afterwards."""
    server, port = await start_grpc_server(gateway, GatewayConfig(grpc_port=0, **config))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", channel_options) as channel:
            yield channel
    finally:
        await server.stop(None)


@dataclass
class Answer:
    """How one call ended, seen by the client: what came, and the error that ended it, if one did."""

    pieces: list[pb.GenerateResponse] = field(default_factory=list)
    error: grpc.aio.AioRpcError | None = None

    @property
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK if self.error is None else self.error.code()

    @property
    def details(self) -> str:
        return "" if self.error is None else self.error.details() or ""

    @property
    def trailing(self) -> dict[str, str]:
        return {} if self.error is None else {key: str(value) for key, value in self.error.trailing_metadata()}

    def of(self, index: int) -> list[pb.GenerateResponse]:
        """The pieces of one choice."""
        return [piece for piece in self.pieces if piece.index == index]

    def text(self, index: int = 0) -> str:
        return "".join(piece.text for piece in self.of(index))

    def token_ids(self, index: int = 0) -> list[int]:
        return [token_id for piece in self.of(index) for token_id in piece.token_ids]

    def finish(self, index: int = 0) -> pb.Finish:
        (finish,) = [piece.finish for piece in self.of(index) if piece.HasField("finish")]
        return finish


def request(**fields: Any) -> pb.GenerateRequest:
    """A valid request with `fields` in place of its own; giving another input replaces the prompt."""
    if not {"prompt", "token_ids", "chat"} & fields.keys():
        fields["prompt"] = "Say hello."
    return pb.GenerateRequest(**{"model": FAKE_MODEL, **fields})


async def generate(channel: grpc.aio.Channel, message: pb.GenerateRequest, **options: Any) -> Answer:
    """The call read to its end."""
    answer = Answer()
    try:
        async for piece in InferenceServiceStub(channel).Generate(message, **options):
            answer.pieces.append(piece)
    except grpc.aio.AioRpcError as error:
        answer.error = error
    return answer


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fails after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the condition is of plain objects, which signal nothing
            await asyncio.sleep(0.005)
