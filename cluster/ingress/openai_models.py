"""The OpenAI request bodies that this server reads, and how a body becomes one. Knows field names and types, not what they do.

Keys that are not here are refused by name. Keys that OpenAI clients send out of habit are accepted where their value asks for nothing
(`store: false`, `tool_choice: "auto"`); a value that asks for something this server does not do is refused by name as well.
A body is as large as its sender likes, so every list and object stops at its first fault.
Types are exact: `"1"` is not a number, `true` not an integer, NaN and infinity are no JSON.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from espalier.cluster.ingress.sampling_fields import MAX_CHOICES, MAX_SESSION_LENGTH
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.request import MAX_LOGIT_BIASES, MAX_LOGPROBS

_MAX_STEP_LENGTH = 64


def _only(accepted: object) -> Callable[[Any], Any]:
    """A check that takes the one value that asks for nothing."""

    def check(value: Any) -> Any:
        if value != accepted:
            raise PydanticCustomError(
                "not_honoured", "this server honours only {accepted}", {"accepted": json.dumps(accepted)}
            )
        return value

    return check


def _at_most(number: int) -> Callable[[Any], Any]:
    """A check that an object has no more keys than that."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > number:
            raise PydanticCustomError("too_many", "at most {number} keys", {"number": number})
        return value

    return check


Off = Annotated[bool, AfterValidator(_only(False))]
On = Annotated[bool, AfterValidator(_only(True))]
One = Annotated[int, AfterValidator(_only(1))]
EmptyText = Annotated[str, AfterValidator(_only(""))]
EmptyList = Annotated[list[Any], AfterValidator(_only([]))]
# Bounds that a field shares with SamplingParams are left to it; those here are of fields with another name there, or none.
PositiveInt = Annotated[int, Field(ge=1)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512)]
SessionId = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SESSION_LENGTH)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TextOnly = Annotated[Texts, AfterValidator(_only(["text"]))]
LogitBias = Annotated[
    dict[Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")], float],
    BeforeValidator(_at_most(MAX_LOGIT_BIASES)),
]


class WireModel(BaseModel):
    """Base of all bodies: exact types, no unknown key, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_key(cls, value: Any) -> Any:
        """Keep one key that is not known, for its complaint, and no more: millions of complaints would take seconds and gigabytes to make."""
        known = cls.model_fields
        if not isinstance(value, dict) or len(value) <= len(known):
            return value
        unknown = next(key for key in value if key not in known)
        return {key: value[key] for key in (*known, unknown) if key in value}


class StreamOptions(WireModel):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: Off | None = None


class TextFormat(WireModel):
    """`response_format`, in the one form that asks for nothing."""

    type: Literal["text"]


class GenerateBody(WireModel):
    """What chat and text completions share. None always means: not given."""

    model: ModelName
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: int | None = None
    max_tokens: PositiveInt | None = None
    min_tokens: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    draft: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    session_id: SessionId | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    # Accepted where they ask for nothing.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Off | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    response_format: TextFormat | None = None


class TextPart(WireModel):
    """A content part. Images, audio and files are refused: the models served here read text."""

    type: Literal["text"]
    text: str


class FunctionCall(WireModel):
    """The function of a tool call in the history. arguments: a JSON object as text, as OpenAI has it, or the object itself."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(WireModel):
    """A tool call in the history."""

    type: Literal["function"] = "function"
    function: FunctionCall
    id: str | None = None
    index: int | None = None


class Message(WireModel):
    """One message of the conversation. The fields after tool_call_id are those of replies that clients send back; only empty ones are taken."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: EmptyList | None = None


class ToolFunction(WireModel):
    """A function that the chat template tells the model of. parameters: its JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Off | None = None


class Tool(WireModel):
    """A tool for the chat template. Calls come back as the model writes them, in the content."""

    type: Literal["function"]
    function: ToolFunction


class ChatInput(WireModel):
    """What makes a chat prompt."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Off | None = None


class ChatBody(GenerateBody, ChatInput):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: On | None = None
    modalities: TextOnly | None = None
    functions: EmptyList | None = None
    function_call: Literal["auto", "none"] | None = None


class CompletionBody(GenerateBody):
    """`POST /v1/completions`. prompt: one text, one list of token ids, or a list of either, each a prompt of its own."""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Off | None = None
    suffix: EmptyText | None = None
    best_of: One | None = None


class TokenizeBody(WireModel):
    """`POST /tokenize` of a text."""

    model: ModelName
    prompt: str
    add_special_tokens: bool = True


class TokenizeChatBody(ChatInput):
    """`POST /tokenize` of a conversation, rendered with the chat template."""

    model: ModelName


class DetokenizeBody(WireModel):
    """`POST /detokenize`."""

    model: ModelName
    tokens: TokenIds
    skip_special_tokens: bool = False


Body = TypeVar("Body", bound=WireModel)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`, UTF-8, strictly: no NaN, no lone surrogates. Raises InvalidRequestError."""
    try:
        value = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def read_body(value: dict[str, Any], kind: type[Body]) -> Body:
    """`value` as a body of that kind. Raises InvalidRequestError naming the first field at fault."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        # Every arm of a union complains; the one that got furthest into the body is the one that was meant.
        steps, fault = max(((_steps(fault, value), fault) for fault in faults), key=lambda found: len(found[0]))
        param = "".join(steps).removeprefix(".")
        raise InvalidRequestError(f"{param}: {_explain(fault)}", param=param) from None


def _explain(fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        return "not a field that this server honours"
    if fault["type"] == "model_type":
        return "input should be an object"
    message: str = fault["msg"]
    return message[0].lower() + message[1:]


def _steps(fault: Any, value: Any) -> list[str]:
    """The path to the field at fault, as `.messages`, `[0]`, `.content`. pydantic's location also names arms of unions: those lead nowhere."""
    location = fault["loc"]
    steps = []
    for number, step in enumerate(location):
        if isinstance(step, int) and isinstance(value, list):
            steps.append(f"[{step}]")
            value = value[step]
        elif isinstance(step, str) and isinstance(value, dict):
            known = step in value
            if known or (fault["type"] == "missing" and number == len(location) - 1):
                # A key is the client's own text: escaped, since a param also travels in headers, and cut.
                steps.append(f".{ascii(step)[1:-1][:_MAX_STEP_LENGTH]}")
                value = value.get(step)
    return steps
