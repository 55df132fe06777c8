"""What the wire fronts (HTTP, gRPC) hand to the gateway, and what they get back. Knows neither wire nor Ray."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from espalier.cluster.origin import Origin
from espalier.replicas.request import SamplingParams, TokenEvent

# A client that takes nothing of its reply for so long has left; it would hold its place at the gateway for ever.
STALLED_S = 60
# The client of a call that no key was needed for.
ANONYMOUS = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One accepted call. `n` choices; choice 0 uses params.seed, choice i > 0 a seed hashed from it and i.

    prompt_token_ids: already tokenized, chat template applied. deadline: seconds since the epoch. session: sticky key, if the client gave one.
    client: label of the key that it came with, for the log. operation: what was asked for. origin: the request that it came with.
    """

    call_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    priority: int = 0
    deadline: float | None = None
    session: str | None = None
    client: str = ANONYMOUS
    operation: Literal["chat", "text_completion"] = "text_completion"
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """An event of one choice, and the replica it came from."""

    index: int
    event: TokenEvent
    replica: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What clients may know of a served model. defaults: sampling values of the checkpoint's generation_config.json, by SamplingParams field."""

    name: str
    created: int
    max_context: int
    vocab_size: int
    quantization: str
    numerics_id: str
    defaults: dict[str, float | int]
    ready_replicas: int


class ModelText(Protocol):
    """Text <-> token ids of one model. Implemented by espalier.replicas.tokenizer.Tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str: ...


class GatewayMetrics(Protocol):
    """What the wire fronts count. route, method: names from the served table, never a client's free text. Calls are cheap and never raise."""

    def http_request(self, route: str, status: int) -> None:
        """One HTTP request was answered with that status; a streamed one counts when its stream ends."""
        ...

    def grpc_request(self, method: str, code: str) -> None:
        """One gRPC call ended with that status name, such as `INVALID_ARGUMENT`."""
        ...

    def client_disconnect(self, transport: str) -> None:
        """A client left before its reply was whole. transport: `http` or `grpc`."""
        ...

    def count_api_keys(self, count: Callable[[], int]) -> None:
        """Calls need an API key; count: how many keys are accepted now. Called once."""
        ...


class GenerateGateway(Protocol):
    """The gateway as the wire fronts see it. Methods raise EngineError kinds only."""

    @property
    def metrics(self) -> GatewayMetrics:
        """Where the wire fronts count requests."""
        ...

    def models(self) -> list[ModelInfo]:
        """All served models, ready or not."""
        ...

    def resolve(self, model: str) -> ModelInfo:
        """The model of that name; raises ModelNotFoundError."""
        ...

    def text(self, model: str) -> ModelText:
        """Its tokenizer and chat template; raises ModelNotFoundError, or DrainingError while no replica of it was ever ready."""
        ...

    def generate(self, call: GenerateCall) -> AsyncGenerator[ChoiceEvent, None]:
        """Events of all choices, each choice in order, each ended by one event with `finish`.

        A refusal (QueueFullError, InvalidRequestError, DrainingError, ...) is raised by the first `__anext__`, before any event: a wire front
        awaits the first event, or its own keepalive clock, before it commits to a status. Closing the iterator (aclose) aborts every choice.
        """
        ...

    async def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether every model has a ready replica, and a JSON-able report of what is not."""
        ...

    def metrics_text(self) -> bytes:
        """The Prometheus exposition of this gateway and of all engines."""
        ...

    @property
    def draining(self) -> bool:
        """Whether the gateway is stopping."""
        ...
