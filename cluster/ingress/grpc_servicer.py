"""InferenceService: what each method does with the gateway. Knows messages only through grpc_wire, and nothing of ports or keys."""

# grpc's handler type takes parameters only in its stubs.
from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from espalier.cluster.call import STALLED_S, GenerateGateway
from espalier.cluster.ingress import grpc_wire
from espalier.cluster.ingress.errors import grpc_status, wire_error
from espalier.cluster.ingress.grpc_auth import CLIENT
from espalier.cluster.ingress.grpc_call import GrpcCall, grpc_call
from espalier.cluster.ingress.grpc_status import abort
from espalier.cluster.ingress.openai_reply import raise_failure
from espalier.cluster.ingress.pb import inference_pb2 as pb
from espalier.cluster.ingress.sampling_fields import check_token_ids, deadline_after
from espalier.cluster.tracing import Tracer
from espalier.replicas.errors import DeadlineExceededError, DrainingError, RequestFailedError

SERVICE = "espalier.v1.InferenceService"

Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request", bound=Message)
Method = Callable[[Request, Context, GrpcCall], Awaitable[Message | None]]


class InferenceServicer:
    """The methods, and the handlers that a server registers. tracer: None means no spans."""

    def __init__(self, gateway: GenerateGateway, tracer: Tracer | None = None) -> None:
        self._gateway = gateway
        self._tracer = tracer

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """By method name. Requests arrive as bytes, so that a malformed one is answered like any other bad request."""
        unary = grpc.unary_unary_rpc_method_handler
        stream = grpc.unary_stream_rpc_method_handler
        return {
            "Generate": stream(self._answer("Generate", pb.GenerateRequest, self._generate), None, _serialize),
            "Tokenize": unary(self._answer("Tokenize", pb.TokenizeRequest, self._tokenize), None, _serialize),
            "Detokenize": unary(self._answer("Detokenize", pb.DetokenizeRequest, self._detokenize), None, _serialize),
            "ListModels": unary(self._answer("ListModels", pb.ListModelsRequest, self._list_models), None, _serialize),
        }

    def _answer(
        self, name: str, kind: type[Request], method: Method[Request]
    ) -> Callable[[bytes, Context], Awaitable[Message | None]]:
        """`method` with its request parsed, its errors turned into statuses and its end counted."""

        async def answer(raw: bytes, context: Context) -> Message | None:
            with grpc_call(f"{SERVICE}/{name}", context.invocation_metadata() or (), self._tracer) as call:
                try:
                    reply = await method(grpc_wire.parse(raw, kind), context, call)
                except asyncio.CancelledError:
                    self._end_cancelled(name, call, context)
                    raise
                except grpc.aio.InternalError:
                    self._end_cancelled(name, call, context)
                    with contextlib.suppress(grpc.aio.InternalError):
                        await context.abort(grpc.StatusCode.CANCELLED, "the call is over")
                    return None
                except Exception as error:
                    shown = wire_error(error)
                    self._end(name, call, grpc_status(shown), shown.code)
                    await abort(context, shown)
                self._end(name, call, grpc.StatusCode.OK)
                return reply

        return answer

    def _end(self, name: str, call: GrpcCall, code: grpc.StatusCode, error: str | None = None) -> None:
        """The call ends so. Counted before its client can know."""
        call.code, call.error = code, error
        self._gateway.metrics.grpc_request(name, code.name)

    def _end_cancelled(self, name: str, call: GrpcCall, context: Context) -> None:
        """The call was cancelled: its deadline passed, this server stopped before the call was done, or the client left."""
        if context.time_remaining() == 0:
            self._end(name, call, grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceededError.code)
        elif self._gateway.draining:
            self._end(name, call, grpc.StatusCode.UNAVAILABLE, DrainingError.code)
        else:
            self._end(name, call, grpc.StatusCode.CANCELLED)
            self._gateway.metrics.client_disconnect("grpc")

    async def _generate(self, request: pb.GenerateRequest, context: Context, surroundings: GrpcCall) -> None:
        info = self._gateway.resolve(grpc_wire.require_model(request.model))
        text = self._gateway.text(info.name)
        call = await asyncio.to_thread(
            grpc_wire.generate_call,
            request,
            info,
            text,
            call_id=f"gen-{surroundings.origin.request_id}",
            deadline=deadline_after(context.time_remaining()),
        )
        call = replace(call, client=CLIENT.get(), origin=surroundings.origin)
        async with contextlib.aclosing(self._gateway.generate(call)) as choices:
            async for choice in choices:
                message = grpc_wire.response(call, choice, text, token_ids=request.output.return_token_ids)
                if message is not None:
                    await _write(context, message)
                if choice.event.finish is not None:
                    # A choice that failed ends the whole call: errors are statuses, never messages in the stream.
                    raise_failure(choice.event.finish)

    async def _tokenize(self, request: pb.TokenizeRequest, _context: Context, _call: GrpcCall) -> pb.TokenizeResponse:
        info = self._gateway.resolve(grpc_wire.require_model(request.model))
        token_ids = await asyncio.to_thread(grpc_wire.tokenize, request, info, self._gateway.text(info.name))
        return pb.TokenizeResponse(token_ids=token_ids, max_context=info.max_context)

    async def _detokenize(
        self, request: pb.DetokenizeRequest, _context: Context, _call: GrpcCall
    ) -> pb.DetokenizeResponse:
        info = self._gateway.resolve(grpc_wire.require_model(request.model))
        check_token_ids(request.token_ids, info, "token_ids")
        text = self._gateway.text(info.name)
        return pb.DetokenizeResponse(
            text=text.decode(request.token_ids, skip_special_tokens=request.skip_special_tokens)
        )

    async def _list_models(
        self, _request: pb.ListModelsRequest, _context: Context, _call: GrpcCall
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[grpc_wire.model(info) for info in self._gateway.models()])


async def _write(context: Context, message: Message) -> None:
    """Returns when the client has room for more. Raises RequestFailedError when it has had none for STALLED_S seconds.

    Raises grpc.aio.InternalError when the call is over already: gRPC may learn of that in a write before it cancels the handler.
    """
    try:
        async with asyncio.timeout(STALLED_S):
            await context.write(message)
    except TimeoutError:
        raise RequestFailedError(f"the client has taken nothing of its reply for {STALLED_S} s") from None


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
