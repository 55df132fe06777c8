"""Stand-ins for the gateway and a model's text, so that the wire fronts are tested without Ray, torch or a checkpoint.

FakeText is byte-level: id = byte, then three special tokens. FakeGateway answers from FakeReply scripts and records what it was asked
and which streams were closed before their end.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.cluster.call import ChoiceEvent, GenerateCall, ModelInfo
from espalier.replicas.errors import EngineError, ModelNotFoundError
from espalier.replicas.request import Finish, FinishReason, Timings, TokenEvent, TokenLogprobs, Usage
from espalier.replicas.token_hash import token_sha256

FAKE_MODEL = "fake-model"
END_OF_TEXT = 256
IM_START = 257
IM_END = 258
SPECIAL_TOKENS = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
VOCAB_SIZE = 512


class FakeText:
    """ModelText over bytes: id 0..255 is that byte, 256..258 are special. `add_special_tokens` puts <|endoftext|> in front."""

    def __init__(self) -> None:
        self.rendered: list[dict[str, Any]] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = [END_OF_TEXT] if add_special_tokens else []
        while text:
            starts = {text.find(name): name for name in SPECIAL_TOKENS if name in text}
            at = min(starts, default=len(text))
            ids += text[:at].encode()
            if starts:
                ids.append(SPECIAL_TOKENS[starts[at]])
                at += len(starts[at])
            text = text[at:]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        kept = [i for i in token_ids if i < 256 or not skip_special_tokens]
        return b"".join(self.token_bytes(i) for i in kept).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return next((name.encode() for name, i in SPECIAL_TOKENS.items() if i == token_id), b"")

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        self.rendered.append({"messages": list(messages), "tools": tools, "template_kwargs": template_kwargs})
        text = "".join(f"<|im_start|>{m['role']}\n{_plain(m.get('content'))}<|im_end|>\n" for m in messages)
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def _plain(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


@dataclass(frozen=True, kw_only=True)
class FakeReply:
    """How FakeGateway answers one call.

    texts: choice i says texts[i % len]; its tokens are its bytes and <|endoftext|>, cut at max_tokens. chunk: tokens an event.
    refusal: raised by the first `__anext__`. first_delay_s, gap_s: waits before the first and before each later event.
    break_after, break_with: raise break_with once so many events have gone out. hold_after: wait for ever after so many events.
    end_error: every choice ends with FinishReason.ERROR and this error.
    """

    texts: tuple[str, ...] = ("Hello, world.",)
    chunk: int = 4
    cached_tokens: int = 0
    refusal: Exception | None = None
    first_delay_s: float = 0.0
    gap_s: float = 0.0
    break_after: int | None = None
    break_with: Exception | None = None
    hold_after: int | None = None
    end_error: EngineError | None = None


@dataclass
class FakeMetrics:
    """GatewayMetrics that keeps what it was told."""

    http: list[tuple[str, int]] = field(default_factory=list)
    grpc: list[tuple[str, str]] = field(default_factory=list)
    disconnects: list[str] = field(default_factory=list)
    num_api_keys: Callable[[], int] | None = None

    def http_request(self, route: str, status: int) -> None:
        self.http.append((route, status))

    def grpc_request(self, method: str, code: str) -> None:
        self.grpc.append((method, code))

    def client_disconnect(self, transport: str) -> None:
        self.disconnects.append(transport)

    def count_api_keys(self, count: Callable[[], int]) -> None:
        self.num_api_keys = count


def fake_model(name: str = FAKE_MODEL, **changes: Any) -> ModelInfo:
    """A ModelInfo of the fake text's vocabulary and a context of 4096 tokens; `changes` replace fields."""
    values: dict[str, Any] = {
        "created": 1_700_000_000,
        "max_context": 4096,
        "vocab_size": VOCAB_SIZE,
        "quantization": "exl3",
        "numerics_id": "fake-numerics",
        "defaults": {},
        "ready_replicas": 2,
    }
    return ModelInfo(name=name, **(values | changes))


class FakeGateway:
    """GenerateGateway from scripts. `replies` are used in order, the last one for ever.

    calls: every call of generate. open: call ids of live streams. finished: those read to their last event or to their error.
    aborted: those closed before. ready, draining: what the probes say.
    """

    def __init__(self, *replies: FakeReply, models: Sequence[ModelInfo] = (), text: FakeText | None = None) -> None:
        self.replies = list(replies) or [FakeReply()]
        self.served = list(models) or [fake_model()]
        self.fake_text = text or FakeText()
        self.metrics = FakeMetrics()
        self.calls: list[GenerateCall] = []
        self.open: set[str] = set()
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.ready = True
        self.draining = False

    def models(self) -> list[ModelInfo]:
        return list(self.served)

    def resolve(self, model: str) -> ModelInfo:
        for info in self.served:
            if info.name == model:
                return info
        raise ModelNotFoundError(f"no model named {model!r} is served here", param="model")

    def text(self, model: str) -> FakeText:
        self.resolve(model)
        return self.fake_text

    def generate(self, call: GenerateCall) -> AsyncGenerator[ChoiceEvent, None]:
        self.calls.append(call)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return self._stream(call, reply)

    async def readiness(self) -> tuple[bool, dict[str, Any]]:
        return self.ready, {m.name: {"ready_replicas": m.ready_replicas if self.ready else 0} for m in self.served}

    def metrics_text(self) -> bytes:
        return b"# HELP espalier_up Whether the gateway runs.\n# TYPE espalier_up gauge\nespalier_up 1\n"

    async def _stream(self, call: GenerateCall, reply: FakeReply) -> AsyncGenerator[ChoiceEvent, None]:
        self.open.add(call.call_id)
        whole = False
        try:
            await asyncio.sleep(reply.first_delay_s)
            if reply.refusal is not None:
                raise reply.refusal
            for count, event in enumerate(_script(call, reply)):
                if count == reply.hold_after:
                    await asyncio.Event().wait()
                if count == reply.break_after and reply.break_with is not None:
                    raise reply.break_with
                if count:
                    await asyncio.sleep(reply.gap_s)
                yield event
            whole = True
        except Exception:
            whole = True
            raise
        finally:
            self.open.discard(call.call_id)
            (self.finished if whole else self.aborted).append(call.call_id)


def _script(call: GenerateCall, reply: FakeReply) -> list[ChoiceEvent]:
    """The events of all choices, interleaved as rounds would bring them."""
    choices = [_choice(call, reply, index) for index in range(call.n)]
    return [events[i] for i in range(max(map(len, choices))) for events in choices if i < len(events)]


def _choice(call: GenerateCall, reply: FakeReply, index: int) -> list[ChoiceEvent]:
    full = [*reply.texts[index % len(reply.texts)].encode(), END_OF_TEXT]
    ids = full[: call.params.max_tokens]
    reason = FinishReason.STOP if len(ids) == len(full) else FinishReason.LENGTH
    if reply.end_error is not None:
        reason = FinishReason.ERROR
    finish = Finish(
        reason=reason,
        usage=Usage(len(call.prompt_token_ids), len(ids), reply.cached_tokens),
        token_sha256=token_sha256(ids),
        timings=Timings(queue_s=0.25, prefill_s=0.5, decode_s=1.5),
        matched_stop=END_OF_TEXT if reason is FinishReason.STOP else None,
        error=reply.end_error,
    )
    events = []
    shown = ""
    for start in range(0, len(ids), reply.chunk):
        end = min(start + reply.chunk, len(ids))
        # Whole characters only, as the engine sends them.
        whole = bytes(i for i in ids[:end] if i < 256).decode(errors="ignore")
        text, shown = whole[len(shown) :], whole
        event = TokenEvent(
            request_id=f"{call.call_id}-{index}",
            attempt=0,
            first_index=start,
            token_ids=tuple(ids[start:end]),
            text=text,
            logprobs=_logprobs(ids[start:end], call.params.logprobs),
            finish=finish if end == len(ids) else None,
        )
        events.append(ChoiceEvent(index, event, f"replica-{index % 2}"))
    return events


def _logprobs(ids: Sequence[int], wanted: int | None) -> tuple[TokenLogprobs, ...] | None:
    """The chosen token at -0.5, then ids upwards from it at -0.5, -1.5, ..."""
    if wanted is None:
        return None
    return tuple(TokenLogprobs(i, -0.5, tuple(((i + k) % VOCAB_SIZE, -0.5 - k) for k in range(wanted))) for i in ids)
