"""Bodies of the OpenAI API for the bench's calls, in two dialects: Espalier's, and what every server of that API reads. Knows no connection."""

from dataclasses import fields
from typing import Any

from espalier.deploy.bench.target import Call
from espalier.replicas.request import SamplingParams

CHAT_ROUTE, TEXT_ROUTE = "/v1/chat/completions", "/v1/completions"
# Sent whatever they are: a model may bring other defaults of its own, and a seed that is not given is drawn.
_ALWAYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens")
_OTHER = frozenset({"logit_bias", "logprobs", "stop", "stop_token_ids"})


def route_of(call: Call) -> str:
    """Where it is posted: prompts of token ids are text completions."""
    return CHAT_ROUTE if call.prompt.messages else TEXT_ROUTE


def espalier_body(model: str, call: Call) -> dict[str, Any]:
    """Everything that the call says, with the reply's token ids."""
    body = _stream(model, call) | {"return_token_ids": True} | _sampling(call.params)
    if call.session is not None:
        body["session_id"] = call.session
    if call.params.logprobs is not None and call.prompt.messages:
        body |= {"logprobs": True, "top_logprobs": call.params.logprobs}
    elif call.params.logprobs is not None:
        body["logprobs"] = call.params.logprobs
    return body


def common_body(model: str, call: Call, *, ignore_eos: bool) -> dict[str, Any]:
    """What OpenAI itself reads, and ignore_eos where the server knows it."""
    params = call.params
    body = _stream(model, call) | {"max_tokens": params.max_tokens, "temperature": params.temperature}
    if params.temperature > 0:
        body |= {"top_p": params.top_p, "seed": params.seed}
    return body | ({"ignore_eos": True} if ignore_eos and params.ignore_eos else {})


def _stream(model: str, call: Call) -> dict[str, Any]:
    prompt = call.prompt
    content = {"messages": list(prompt.messages)} if prompt.messages else {"prompt": list(prompt.token_ids)}
    return {"model": model, "stream": True, "stream_options": {"include_usage": True}} | content


def _sampling(params: SamplingParams) -> dict[str, Any]:
    default = SamplingParams()
    body: dict[str, Any] = {}
    for name in (field.name for field in fields(SamplingParams)):
        value = getattr(params, name)
        if name not in _OTHER and (name in _ALWAYS or value != getattr(default, name)):
            body[name] = value
    if params.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    for name in ("stop", "stop_token_ids"):
        if value := getattr(params, name):
            body[name] = list(value)
    return body
