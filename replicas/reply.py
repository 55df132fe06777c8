"""Reply: what one request has been answered so far; makes its events, its usage and its timings. Knows no scheduler and no thread."""

from espalier.replicas.detokenizer import TextDecoder
from espalier.replicas.errors import EngineError
from espalier.replicas.output import OutputStream, StopMatch
from espalier.replicas.request import Finish, FinishReason, Request, Timings, TokenEvent, TokenLogprobs, Usage
from espalier.replicas.schedule.step import SampledToken
from espalier.replicas.stats import EngineStats
from espalier.replicas.token_hash import token_sha256


class Reply:
    """One request's answer. Times are readings of one monotonic clock, in seconds.

    token_ids: all generated tokens, those that an earlier attempt had emitted included. Making a Reply raises what the decoder raises on those.
    """

    def __init__(
        self, request: Request, text: TextDecoder, eos_token_ids: tuple[int, ...], *, submitted_at: float
    ) -> None:
        self._request = request
        self._output = OutputStream(text, request.params, eos_token_ids, request.emitted_token_ids)
        self.token_ids = list(request.emitted_token_ids)
        self._submitted_at = submitted_at
        self._started_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None

    def start(self, now: float) -> None:
        """Notes that rows of it run; later calls change nothing."""
        if self._started_at is None:
            self._started_at = now

    def push(
        self, sampled: tuple[SampledToken, ...], now: float, stats: EngineStats
    ) -> tuple[TokenEvent, StopMatch | None]:
        """Takes new tokens, up to and with the one that ends the reply. Raises what the decoder raises; the reply is as before then."""
        first_index = len(self.token_ids)
        text = ""
        stop = None
        kept: list[SampledToken] = []
        for token in sampled:
            delta = self._output.push(token.token_id)
            kept.append(token)
            text += delta.text
            if (stop := delta.stop) is not None:
                break
        self.token_ids += [token.token_id for token in kept]
        self._count_tokens(len(kept), now, stats)
        event = TokenEvent(
            self._request.request_id,
            self._request.attempt,
            first_index,
            tuple(token.token_id for token in kept),
            text,
            self._logprobs(kept),
        )
        return event, stop

    def _logprobs(self, kept: list[SampledToken]) -> tuple[TokenLogprobs, ...] | None:
        if self._request.params.logprobs is None:
            return None
        return tuple(token.logprobs for token in kept if token.logprobs is not None)

    def _count_tokens(self, count: int, now: float, stats: EngineStats) -> None:
        stats.generation_tokens += count
        if self._last_token_at is not None:
            # Tokens that came together share the time since the last one.
            for _ in range(count):
                stats.inter_token_s.observe((now - self._last_token_at) / count)
        if self._first_token_at is None:
            self._first_token_at = now
            if not self._request.emitted_token_ids:
                stats.ttft_s.observe(now - self._submitted_at)
        self._last_token_at = now

    def last_event(self) -> TokenEvent:
        """An event without tokens, to carry a finish."""
        return TokenEvent(self._request.request_id, self._request.attempt, len(self.token_ids), (), "")

    def finish(
        self,
        reason: FinishReason,
        now: float,
        stats: EngineStats,
        *,
        cached_tokens: int,
        matched: str | int | None = None,
        error: EngineError | None = None,
    ) -> Finish:
        """The end of the reply, counted."""
        usage = Usage(len(self._request.prompt_token_ids), len(self.token_ids), cached_tokens)
        timings = self._timings(now)
        stats.finished[reason] += 1
        stats.e2e_s.observe(now - self._submitted_at)
        stats.queue_s.observe(timings.queue_s)
        if self._first_token_at is not None:
            stats.prefill_s.observe(timings.prefill_s)
            stats.decode_s.observe(timings.decode_s)
        stats.request_prompt_tokens.observe(usage.prompt_tokens)
        stats.request_generation_tokens.observe(usage.completion_tokens)
        return Finish(reason, usage, token_sha256(self.token_ids), timings, matched, error)

    def _timings(self, now: float) -> Timings:
        started_at = now if self._started_at is None else self._started_at
        first_token_at = now if self._first_token_at is None else self._first_token_at
        last_token_at = now if self._last_token_at is None else self._last_token_at
        return Timings(started_at - self._submitted_at, first_token_at - started_at, last_token_at - first_token_at)
