"""espalier.v1 messages <-> GenerateCall and ChoiceEvent. Knows the message types; knows neither gRPC nor the gateway."""

from collections.abc import Iterator
from typing import Any, TypeVar

import pydantic_core
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from espalier.cluster.call import ChoiceEvent, GenerateCall, ModelInfo, ModelText
from espalier.cluster.ingress.chat_prompt import chat_token_ids
from espalier.cluster.ingress.openai_models import ChatInput, read_body
from espalier.cluster.ingress.pb import inference_pb2 as pb
from espalier.cluster.ingress.prompt_text import encode_prompt
from espalier.cluster.ingress.sampling_fields import (
    MAX_CHOICES,
    MAX_SESSION_LENGTH,
    check_token_ids,
    resolve_params,
)
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.request import Finish, FinishReason, TokenLogprobs

M = TypeVar("M", bound=Message)

_SAMPLING_NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
)
_STOP_SCALARS = ("max_tokens", "min_tokens", "ignore_eos")
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def parse(raw: bytes, kind: type[M]) -> M:
    """The message in `raw`. Raises InvalidRequestError when it is none, or when it holds a field that this server does not know."""
    try:
        message = kind.FromString(raw)
    except DecodeError:
        raise InvalidRequestError(f"the bytes are no {kind.DESCRIPTOR.full_name}") from None
    for path, number in _unknown_fields(message, kind.DESCRIPTOR.name):
        raise InvalidRequestError(f"{path}: field {number} is not one that this server honours", param=path)
    return message


def require_model(name: str) -> str:
    """The model's name as given. Raises InvalidRequestError when there is none."""
    if not name:
        raise InvalidRequestError("model: is required", param="model")
    return name


def generate_call(
    request: pb.GenerateRequest, info: ModelInfo, text: ModelText, *, call_id: str, deadline: float | None
) -> GenerateCall:
    """The call that the request asks for: tokenized, checked, defaults filled in. Raises InvalidRequestError naming the field.

    It tokenizes, which is CPU work: call it in a thread.
    """
    n = request.n if request.HasField("n") else 1
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequestError(f"n: must lie in [1, {MAX_CHOICES}]", param="n")
    if len(request.session_id) > MAX_SESSION_LENGTH:
        raise InvalidRequestError(f"session_id: at most {MAX_SESSION_LENGTH} characters", param="session_id")
    field, prompt = _input(request, info, text)
    return GenerateCall(
        call_id=call_id,
        model=info.name,
        prompt_token_ids=prompt,
        params=resolve_params(_given(request), info, len(prompt), prompt_field=field),
        n=n,
        priority=request.priority,
        deadline=deadline,
        session=request.session_id or None,
        operation="chat" if request.HasField("chat") else "text_completion",
    )


def tokenize(request: pb.TokenizeRequest, info: ModelInfo, text: ModelText) -> list[int]:
    """The ids that Generate would start from; CPU work. Raises InvalidRequestError naming the field."""
    if request.WhichOneof("input") is None:
        raise InvalidRequestError("input: one of prompt and chat is required", param="input")
    add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
    if request.HasField("prompt"):
        return encode_prompt(request.prompt, info, text, param="prompt", add_special_tokens=add_special_tokens)
    if request.HasField("add_special_tokens"):
        raise InvalidRequestError(
            "add_special_tokens: is of a prompt; a chat template has its own", param="add_special_tokens"
        )
    return _chat_ids(request.chat, info, text)


def response(
    call: GenerateCall, choice: ChoiceEvent, text: ModelText, *, token_ids: bool
) -> pb.GenerateResponse | None:
    """What the client is told of an event; None when that is nothing. An end by an error is not told here."""
    event = choice.event
    message = pb.GenerateResponse(
        id=call.call_id,
        index=choice.index,
        text=event.text,
        token_ids=event.token_ids if token_ids else (),
        logprobs=[_token_logprobs(entry, text) for entry in event.logprobs or ()],
    )
    if event.finish is not None and event.finish.reason in _REASONS:
        message.finish.CopyFrom(_finish(event.finish, seed=call.params.seed, replica=choice.replica))
    elif not (message.text or message.token_ids or message.logprobs):
        return None
    return message


def model(info: ModelInfo) -> pb.Model:
    """A served model as clients see it."""
    return pb.Model(
        name=info.name,
        created=info.created,
        max_context=info.max_context,
        vocab_size=info.vocab_size,
        quantization=info.quantization,
        numerics_id=info.numerics_id,
        defaults=info.defaults,
        ready_replicas=info.ready_replicas,
    )


def _unknown_fields(message: Message, path: str) -> Iterator[tuple[str, int]]:
    """(path of the message that holds it, number) of every field that the schema lacks, however deep."""
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]  # a sequence, which its stub does not say
        yield path, unknown.field_number
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for child in value if field.is_repeated else (value,):
            yield from _unknown_fields(child, field.name)


def _input(request: pb.GenerateRequest, info: ModelInfo, text: ModelText) -> tuple[str, tuple[int, ...]]:
    """The input's field name and its token ids."""
    match request.WhichOneof("input"):
        case "prompt":
            return "prompt", tuple(encode_prompt(request.prompt, info, text, param="prompt"))
        case "token_ids":
            check_token_ids(request.token_ids.ids, info, "token_ids")
            return "token_ids", tuple(request.token_ids.ids)
        case "chat":
            return "messages", tuple(_chat_ids(request.chat, info, text))
    raise InvalidRequestError("input: one of prompt, token_ids and chat is required", param="input")


def _given(request: pb.GenerateRequest) -> dict[str, Any]:
    """The sampling values that the client set, by SamplingParams field."""
    given: dict[str, Any] = {
        name: getattr(request.sampling, name) for name in _SAMPLING_NUMBERS if request.sampling.HasField(name)
    }
    given |= {name: getattr(request.stop, name) for name in _STOP_SCALARS if request.stop.HasField(name)}
    if request.sampling.logit_bias:
        given["logit_bias"] = tuple(sorted(request.sampling.logit_bias.items()))
    if request.stop.stop:
        given["stop"] = tuple(request.stop.stop)
    if request.stop.stop_token_ids:
        given["stop_token_ids"] = tuple(request.stop.stop_token_ids)
    if request.output.HasField("logprobs"):
        given["logprobs"] = request.output.logprobs
    if request.HasField("draft"):
        given["draft"] = request.draft
    return given


def _chat_ids(chat: pb.Chat, info: ModelInfo, text: ModelText) -> list[int]:
    """The ids of a conversation, checked as HTTP's chat body is; errors name the fields as HTTP does, such as `messages[0].role`."""
    value: dict[str, Any] = {
        "messages": [_message(message, f"messages[{i}]") for i, message in enumerate(chat.messages)]
    }
    if chat.tools_json:
        value["tools"] = _json(chat.tools_json, "tools_json")
    if chat.chat_template_kwargs_json:
        value["chat_template_kwargs"] = _json(chat.chat_template_kwargs_json, "chat_template_kwargs_json")
    if chat.HasField("add_generation_prompt"):
        value["add_generation_prompt"] = chat.add_generation_prompt
    return chat_token_ids(read_body(value, ChatInput), value.get("tools"), info, text)


def _message(message: pb.Message, path: str) -> dict[str, Any]:
    value: dict[str, Any] = {"role": message.role}
    for name in ("content", "tool_call_id", "name", "reasoning_content"):
        if message.HasField(name):
            value[name] = getattr(message, name)
    if message.tool_calls_json:
        value["tool_calls"] = _json(message.tool_calls_json, f"{path}.tool_calls_json")
    return value


def _json(text: str, param: str) -> Any:
    """Strict JSON: no NaN, no lone surrogates."""
    try:
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"{param}: not valid JSON: {error}", param=param) from None


def _finish(finish: Finish, *, seed: int, replica: str) -> pb.Finish:
    message = pb.Finish(
        reason=_REASONS[finish.reason],
        usage=pb.Usage(
            prompt_tokens=finish.usage.prompt_tokens,
            completion_tokens=finish.usage.completion_tokens,
            cached_tokens=finish.usage.cached_tokens,
        ),
        token_sha256=finish.token_sha256,
        seed=seed,
        replica=replica,
        timings=pb.Timings(
            queue_seconds=finish.timings.queue_s,
            prefill_seconds=finish.timings.prefill_s,
            decode_seconds=finish.timings.decode_s,
        ),
    )
    if isinstance(finish.matched_stop, str):
        message.matched_stop = finish.matched_stop
    elif finish.matched_stop is not None:
        message.matched_token_id = finish.matched_stop
    return message


def _token_logprobs(entry: TokenLogprobs, text: ModelText) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        chosen=_logprob(entry.token_id, entry.logprob, text),
        top=[_logprob(token_id, logprob, text) for token_id, logprob in entry.top],
    )


def _logprob(token_id: int, logprob: float, text: ModelText) -> pb.Logprob:
    return pb.Logprob(
        token_id=token_id, logprob=logprob, token=text.token_text(token_id), token_bytes=text.token_bytes(token_id)
    )
