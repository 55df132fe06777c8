"""OpenAI replies from events: whole, or chunk by chunk. What chat and text completions share; a ReplyShape is what they do not. Knows no HTTP."""

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from espalier.cluster.call import ChoiceEvent, GenerateCall, ModelInfo
from espalier.replicas.errors import DrainingError, RequestFailedError
from espalier.replicas.request import Finish, FinishReason, TokenLogprobs


class ReplyShape(Protocol):
    """Chat's or text completions' part of a reply."""

    @property
    def whole_name(self) -> str:
        """`object` of a whole reply."""
        ...

    @property
    def chunk_name(self) -> str:
        """`object` of a chunk."""
        ...

    def opening(self) -> dict[str, Any] | None:
        """What each choice's first chunk holds before any text, or None when there is no such chunk."""
        ...

    def delta(self, text: str) -> dict[str, Any]:
        """What a chunk's choice says."""
        ...

    def message(self, text: str) -> dict[str, Any]:
        """What a whole reply's choice says."""
        ...

    def logprobs(self, entries: Sequence[TokenLogprobs], text_offset: int) -> dict[str, Any]:
        """`logprobs` of a choice. text_offset: characters of the tokens before these."""
        ...

    def token_length(self, token_id: int) -> int:
        """Characters that a token adds to text_offset."""
        ...


@dataclass(slots=True)
class _Choice:
    """What a choice has said so far. text, token_ids and logprobs are kept for whole replies only."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text_offset: int = 0
    replica: str = ""
    finish: Finish | None = None


@dataclass(slots=True)
class Reply:
    """One reply of `n` choices to each of its calls. Choice c * n + i is choice i of call c.

    created: seconds since the epoch. include_usage: end the stream with a usage chunk. return_token_ids: say all ids, the prompts' too.
    """

    reply_id: str
    created: int
    info: ModelInfo
    calls: Sequence[GenerateCall]
    shape: ReplyShape
    include_usage: bool
    return_token_ids: bool
    _choices: list[_Choice] = field(init=False)

    def __post_init__(self) -> None:
        self._choices = [_Choice() for call in self.calls for _ in range(call.n)]

    async def whole(self, events: AsyncIterable[ChoiceEvent]) -> dict[str, Any]:
        """The reply as one object. Raises the error of the first choice that ends with one."""
        async for item in events:
            choice, event = self._choices[item.index], item.event
            choice.text.append(event.text)
            choice.token_ids += event.token_ids
            choice.logprobs += event.logprobs or ()
            if event.finish is not None:
                raise_failure(event.finish)
                choice.finish, choice.replica = event.finish, item.replica
        return {
            **self._head(self.shape.whole_name),
            "choices": [self._whole_choice(index) for index in range(len(self._choices))],
            "usage": self._usage(),
        }

    async def chunks(self, events: AsyncIterable[ChoiceEvent]) -> AsyncGenerator[dict[str, Any], None]:
        """The reply as chunks of one choice each, and the usage chunk if asked for. Raises as `whole` does, after the choice's last text."""
        opening = self.shape.opening()
        if opening is not None:
            for index in range(len(self._choices)):
                yield self._chunk(index, {**opening, "logprobs": None, "finish_reason": None}, first=True)
        async for item in events:
            choice, event = self._choices[item.index], item.event
            first = opening is None and not choice.replica
            choice.replica, choice.finish = item.replica, event.finish
            if event.text or event.logprobs or event.finish is not None or (self.return_token_ids and event.token_ids):
                yield self._event_chunk(item, first=first)
            if event.finish is not None:
                raise_failure(event.finish)
        if self.include_usage:
            yield {**self._head(self.shape.chunk_name), "choices": [], "usage": self._usage()}

    def _event_chunk(self, item: ChoiceEvent, *, first: bool) -> dict[str, Any]:
        choice, event = self._choices[item.index], item.event
        body: dict[str, Any] = {**self.shape.delta(event.text), "logprobs": None, "finish_reason": None}
        if event.logprobs:
            body["logprobs"] = self.shape.logprobs(event.logprobs, choice.text_offset)
            choice.text_offset += sum(self.shape.token_length(entry.token_id) for entry in event.logprobs)
        if self.return_token_ids:
            body["token_ids"] = list(event.token_ids)
        finish = event.finish
        if finish is None or finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return self._chunk(item.index, body, first=first)
        body["finish_reason"] = finish.reason
        return {**self._chunk(item.index, body, first=first), "espalier": self._espalier(item.index)}

    def _chunk(self, index: int, choice: dict[str, Any], *, first: bool) -> dict[str, Any]:
        chunk = {**self._head(self.shape.chunk_name), "choices": [{"index": index, **choice}]}
        if self.include_usage:
            chunk["usage"] = None
        if first:
            chunk |= self._prompt_ids(index)
        return chunk

    def _whole_choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        body: dict[str, Any] = {"index": index, **self.shape.message("".join(choice.text)), "logprobs": None}
        if self._call(index).params.logprobs is not None:
            body["logprobs"] = self.shape.logprobs(choice.logprobs, 0)
        body["finish_reason"] = self._finish(index).reason
        if self.return_token_ids:
            body["token_ids"] = choice.token_ids
        return {**body, **self._prompt_ids(index), "espalier": self._espalier(index)}

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": self.reply_id,
            "object": name,
            "created": self.created,
            "model": self.info.name,
            # What OpenAI means by it: same fingerprint, same seed, same tokens.
            "system_fingerprint": self.info.numerics_id,
        }

    def _call(self, index: int) -> GenerateCall:
        return self.calls[index // self.calls[0].n]

    def _finish(self, index: int) -> Finish:
        finish = self._choices[index].finish
        assert finish is not None, f"choice {index} has no end"
        return finish

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """The prompt's ids, once a prompt: beside its first choice."""
        call = self._call(index)
        return (
            {"prompt_token_ids": list(call.prompt_token_ids)} if self.return_token_ids and index % call.n == 0 else {}
        )

    def _espalier(self, index: int) -> dict[str, Any]:
        finish = self._finish(index)
        return {
            "token_sha256": finish.token_sha256,
            "seed": self._call(index).params.seed,
            "replica": self._choices[index].replica,
            "queue_seconds": finish.timings.queue_s,
            "prefill_seconds": finish.timings.prefill_s,
            "decode_seconds": finish.timings.decode_s,
        }

    def _usage(self) -> dict[str, Any]:
        """Prompts count once each, generated tokens of all choices; cached tokens are those of each prompt's first choice."""
        usages = [self._finish(index).usage for index in range(len(self._choices))]
        first = usages[:: self.calls[0].n]
        prompt_tokens = sum(usage.prompt_tokens for usage in first)
        completion_tokens = sum(usage.completion_tokens for usage in usages)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in first)},
        }


def raise_failure(finish: Finish) -> None:
    """Raises what went wrong when a choice ended other than by `stop` or `length`."""
    if finish.reason is FinishReason.ERROR:
        raise finish.error or RequestFailedError("the request failed")
    if finish.reason is FinishReason.CANCELLED:
        raise DrainingError("the request was cancelled by the server")
