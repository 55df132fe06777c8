"""From a checked OpenAI body and its tokenized prompts to GenerateCalls: one call a prompt, `n` choices each. Pure; knows no HTTP."""

from collections.abc import Sequence
from typing import Any

from espalier.cluster.call import GenerateCall, ModelInfo, ModelText
from espalier.cluster.ingress.openai_models import ChatBody, CompletionBody, GenerateBody
from espalier.cluster.ingress.prompt_text import encode_prompt
from espalier.cluster.ingress.sampling_fields import check_token_ids, deadline_after, resolve_params
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.request import SamplingParams

MAX_PROMPTS = 64
# OpenAI's default for text completions; chat replies may fill the context.
COMPLETION_MAX_TOKENS = 16


def chat_call(
    body: ChatBody, info: ModelInfo, prompt: Sequence[int], *, call_id: str, session: str | None
) -> GenerateCall:
    """The call of a chat. session: a sticky key from outside the body, which the body's own overrides."""
    given = _given(body)
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise InvalidRequestError("top_logprobs: needs logprobs to be true", param="top_logprobs")
    max_tokens_field = "max_tokens"
    if body.max_completion_tokens is not None:
        max_tokens_field = "max_completion_tokens"
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise InvalidRequestError("max_completion_tokens: contradicts max_tokens", param=max_tokens_field)
        given["max_tokens"] = body.max_completion_tokens
    params = resolve_params(given, info, len(prompt), prompt_field="messages", max_tokens_field=max_tokens_field)
    return _call(body, call_id, prompt, session, params=params)


def completion_calls(
    body: CompletionBody, info: ModelInfo, prompts: Sequence[Sequence[int]], *, call_id: str, session: str | None
) -> list[GenerateCall]:
    """The calls of a text completion, one a prompt. A given seed is every prompt's; without one each prompt draws its own."""
    given = _given(body)
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
    calls = []
    for i, prompt in enumerate(prompts):
        params = resolve_params(
            given,
            info,
            len(prompt),
            prompt_field="prompt" if len(prompts) == 1 else f"prompt[{i}]",
            default_max_tokens=COMPLETION_MAX_TOKENS,
        )
        calls.append(_call(body, call_id if len(prompts) == 1 else f"{call_id}-{i}", prompt, session, params=params))
    return calls


def completion_prompts(body: CompletionBody, info: ModelInfo, text: ModelText) -> list[list[int]]:
    """The token ids of each prompt; texts are encoded with the model's special tokens. CPU work: call it in a thread.

    Raises InvalidRequestError naming `prompt`.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        return [encode_prompt(prompt, info, text, param="prompt")]
    if not prompt or isinstance(prompt[0], int):
        prompts: list[Any] = [prompt]
    else:
        prompts = list(prompt)
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt: at most {MAX_PROMPTS} prompts a request", param="prompt")
    encoded = []
    for i, item in enumerate(prompts):
        if isinstance(item, str):
            encoded.append(encode_prompt(item, info, text, param=f"prompt[{i}]" if len(prompts) > 1 else "prompt"))
        else:
            check_token_ids(item, info, "prompt")
            encoded.append(item)
    return encoded


def _given(body: GenerateBody) -> dict[str, Any]:
    """The SamplingParams fields that the client set, logprobs apart: chat and completions spell that differently."""
    given: dict[str, Any] = {name: value for name in _SAME_NAME_FIELDS if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = tuple(sorted((int(token_id), bias) for token_id, bias in body.logit_bias.items()))
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    return given


_SAME_NAME_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "draft",
)


def _call(
    body: GenerateBody, call_id: str, prompt: Sequence[int], session: str | None, *, params: SamplingParams
) -> GenerateCall:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options: needs stream to be true", param="stream_options")
    return GenerateCall(
        call_id=call_id,
        model=body.model,
        prompt_token_ids=tuple(prompt),
        params=params,
        n=body.n or 1,
        priority=body.priority or 0,
        deadline=deadline_after(body.timeout),
        session=body.session_id or session,
        operation="chat" if isinstance(body, ChatBody) else "text_completion",
    )
