"""The HTTP API: routes, and the road from a body to a gateway call and from its events to a reply. Field rules and shapes are elsewhere."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from espalier.cluster.call import GenerateCall, GenerateGateway, ModelInfo
from espalier.cluster.config import GatewayConfig
from espalier.cluster.ingress.auth import ApiKeys
from espalier.cluster.ingress.chat_prompt import chat_token_ids
from espalier.cluster.ingress.disconnect import while_connected
from espalier.cluster.ingress.http_front import HttpFront, read_json_bytes, record_of, unrouted
from espalier.cluster.ingress.merge import merged_events
from espalier.cluster.ingress.openai_calls import chat_call, completion_calls, completion_prompts
from espalier.cluster.ingress.openai_models import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    TokenizeChatBody,
    parse_json,
    read_body,
)
from espalier.cluster.ingress.openai_reply import Reply, ReplyShape
from espalier.cluster.ingress.openai_shapes import ChatShape, CompletionShape
from espalier.cluster.ingress.prompt_text import encode_prompt
from espalier.cluster.ingress.sampling_fields import MAX_SESSION_LENGTH, check_token_ids
from espalier.cluster.ingress.sse import EventStreamResponse, Opening, sse_frames
from espalier.cluster.tracing import Tracer
from espalier.replicas.errors import InvalidRequestError

MODEL_ROUTE = "/v1/models/{model}"
OPEN_ROUTES = frozenset({"/health", "/ready"})
SESSION_HEADER = "x-session-id"


def build_http_app(gateway: GenerateGateway, config: GatewayConfig, tracer: Tracer | None = None) -> Starlette:
    """The ASGI application of one gateway. Keys are read from config.api_key_file as requests come. tracer: None means no spans."""
    api = _Api(gateway, config)
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{model:path}", api.model),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/health", api.health),
        Route("/ready", api.ready),
        Route("/metrics", api.metrics),
    ]
    keys = ApiKeys(config.api_key_file)
    if keys.required:
        gateway.metrics.count_api_keys(keys.count)
    front = Middleware(
        HttpFront,
        keys=keys,
        metrics=gateway.metrics,
        routes=frozenset(route.path for route in routes),
        prefix_route=MODEL_ROUTE,
        open_routes=OPEN_ROUTES | {"/metrics"} if config.metrics_open else OPEN_ROUTES,
        tracer=tracer,
    )
    app = Starlette(routes=routes, middleware=[front], exception_handlers={HTTPException: unrouted})
    # A redirect of /ready/ to /ready would be one more answer that nobody asked for.
    app.router.redirect_slashes = False
    return app


class _Api:
    """The endpoints of one gateway."""

    def __init__(self, gateway: GenerateGateway, config: GatewayConfig) -> None:
        self._gateway = gateway
        self._keepalive_s = config.keepalive_s

    async def chat(self, request: Request) -> ASGIApp:
        """`POST /v1/chat/completions`."""
        value = await _read_object(request)
        body = read_body(value, ChatBody)
        info, text = self._gateway.resolve(body.model), self._gateway.text(body.model)
        tools = None if body.tool_choice == "none" else value.get("tools")
        prompt = await asyncio.to_thread(chat_token_ids, body, tools, info, text)
        call_id = f"chatcmpl-{record_of(request).request_id}"
        call = chat_call(body, info, prompt, call_id=call_id, session=_session(request))
        return await self._answer(request, body, info, [call], call_id, ChatShape(text))

    async def completions(self, request: Request) -> ASGIApp:
        """`POST /v1/completions`."""
        body = read_body(await _read_object(request), CompletionBody)
        info, text = self._gateway.resolve(body.model), self._gateway.text(body.model)
        prompts = await asyncio.to_thread(completion_prompts, body, info, text)
        call_id = f"cmpl-{record_of(request).request_id}"
        calls = completion_calls(body, info, prompts, call_id=call_id, session=_session(request))
        return await self._answer(request, body, info, calls, call_id, CompletionShape(text))

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [_model_object(info) for info in self._gateway.models()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{model}`."""
        return JSONResponse(_model_object(self._gateway.resolve(request.path_params["model"])))

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: of a text, or of a conversation as chat would render it."""
        value = await _read_object(request)
        if "messages" in value:
            chat = read_body(value, TokenizeChatBody)
            info, text = self._gateway.resolve(chat.model), self._gateway.text(chat.model)
            ids = await asyncio.to_thread(chat_token_ids, chat, value.get("tools"), info, text)
        else:
            body = read_body(value, TokenizeBody)
            info, text = self._gateway.resolve(body.model), self._gateway.text(body.model)
            ids = await asyncio.to_thread(
                encode_prompt, body.prompt, info, text, param="prompt", add_special_tokens=body.add_special_tokens
            )
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": info.max_context})

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        body = read_body(await _read_object(request), DetokenizeBody)
        text = self._gateway.text(body.model)
        check_token_ids(body.tokens, self._gateway.resolve(body.model), "tokens")
        decoded = await asyncio.to_thread(text.decode, body.tokens, skip_special_tokens=body.skip_special_tokens)
        return JSONResponse({"prompt": decoded})

    async def health(self, request: Request) -> Response:
        """`GET /health`: this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: every model has a ready replica, and the gateway is not stopping."""
        ready, report = await self._gateway.readiness()
        ready = ready and not self._gateway.draining
        return JSONResponse({"ready": ready, **report}, status_code=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`."""
        return Response(self._gateway.metrics_text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _answer(
        self,
        request: Request,
        body: GenerateBody,
        info: ModelInfo,
        calls: Sequence[GenerateCall],
        call_id: str,
        shape: ReplyShape,
    ) -> ASGIApp:
        """The reply to `calls`. A stream commits to status 200 with its first event, or after keepalive_s without one."""
        record = record_of(request)
        record.called = True
        calls = [replace(call, client=record.client, origin=record.origin) for call in calls]
        reply = Reply(
            reply_id=call_id,
            created=int(time.time()),
            info=info,
            calls=calls,
            shape=shape,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            return_token_ids=body.return_token_ids is True,
        )
        events = merged_events(self._gateway, calls)
        if not body.stream:
            try:
                return JSONResponse(await while_connected(reply.whole(events), request.receive))
            finally:
                await events.aclose()
        opening = Opening(events)
        try:
            await while_connected(opening.within(self._keepalive_s), request.receive)
        except BaseException:
            await opening.aclose()
            raise
        return EventStreamResponse(
            opening, sse_frames(opening, reply.chunks, keepalive_s=self._keepalive_s, failed=record.failed)
        )


async def _read_object(request: Request) -> dict[str, Any]:
    """The request's JSON object. A body can be large: it is parsed in a thread."""
    return await asyncio.to_thread(parse_json, await read_json_bytes(request))


def _session(request: Request) -> str | None:
    """The sticky key of the `x-session-id` header, if there is one."""
    session = request.headers.get(SESSION_HEADER) or None
    if session is not None and len(session) > MAX_SESSION_LENGTH:
        raise InvalidRequestError(
            f"{SESSION_HEADER}: longer than {MAX_SESSION_LENGTH} characters", param=SESSION_HEADER
        )
    return session


def _model_object(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "espalier",
        "max_model_len": info.max_context,
        "espalier": {
            "vocab_size": info.vocab_size,
            "quantization": info.quantization,
            "numerics_id": info.numerics_id,
            "defaults": info.defaults,
            "ready_replicas": info.ready_replicas,
        },
    }
