"""What travels between gateway and engine: a request, its parameters, and the events that answer it. Knows no torch and no wire format."""

import enum
import math
from dataclasses import dataclass, fields

from espalier.replicas.errors import EngineError, InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 4096
MAX_SEED = 2**64 - 1
MAX_TOKEN_ID = 2**31 - 1


def _require(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise InvalidRequestError(f"{param}: {message}", param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one choice is sampled and where it ends. Checked when made; raises InvalidRequestError naming the field.

    Applied in this order: repetition, presence and frequency penalties, logit_bias, temperature, top_k, top_p, min_p.
    temperature 0 is greedy (the best logit after penalties and bias; ties by lower id). top_k 0, top_p 1 and min_p 0 are off.
    seed: uint64; with the absolute position and the token id it fixes the noise of each draw.
    max_tokens, min_tokens: generated tokens, the stop token included. Before min_tokens no end of any kind is taken.
    stop: strings that end the text and are not part of it. stop_token_ids: ids that end it, beside the model's own end tokens.
    ignore_eos: the model's end tokens (not stop_token_ids) are ordinary tokens.
    logprobs: None, or 0..20 alternatives to report beside each chosen token.
    draft: whether speculative drafts may be used; never changes the tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    draft: bool = True

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _require(math.isfinite(getattr(self, name)), name, "must be a finite number")
        _require(0.0 <= self.temperature <= 100.0, "temperature", "must lie in [0, 100]")
        _require(0 <= self.top_k <= MAX_TOKEN_ID, "top_k", "must be 0 (off) or a positive number of tokens")
        _require(0.0 < self.top_p <= 1.0, "top_p", "must lie in (0, 1]")
        _require(0.0 <= self.min_p <= 1.0, "min_p", "must lie in [0, 1]")
        _require(0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "must lie in [0.01, 100]")
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must lie in [-2, 2]")
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must lie in [-2, 2]")
        _require(len(self.logit_bias) <= MAX_LOGIT_BIASES, "logit_bias", f"at most {MAX_LOGIT_BIASES} tokens")
        for token_id, bias in self.logit_bias:
            _require(0 <= token_id <= MAX_TOKEN_ID, "logit_bias", f"token id {token_id} is out of range")
            _require(math.isfinite(bias) and -100.0 <= bias <= 100.0, "logit_bias", "each bias must lie in [-100, 100]")
        _require(0 <= self.seed <= MAX_SEED, "seed", "must fit in 64 bits, unsigned")
        _require(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must lie between 0 and max_tokens")
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        _require(all(self.stop), "stop", "a stop string cannot be empty")
        too_long = any(len(stop) > MAX_STOP_CHARS for stop in self.stop)
        _require(not too_long, "stop", f"a stop string has at most {MAX_STOP_CHARS} characters")
        _require(len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        for token_id in self.stop_token_ids:
            _require(0 <= token_id <= MAX_TOKEN_ID, "stop_token_ids", f"token id {token_id} is out of range")
        if self.logprobs is not None:
            _require(0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"must lie in [0, {MAX_LOGPROBS}]")

    @property
    def needs_history(self) -> bool:
        """Whether sampling reads the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


SAMPLING_FIELDS = frozenset(f.name for f in fields(SamplingParams))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One choice to generate. Its id is unique among live requests; a replayed request keeps its id and raises `attempt`.

    prompt_token_ids: at least one. emitted_token_ids: tokens of this choice that an earlier attempt already produced; generation goes on
    after them and they count towards max_tokens, usage and the token hash, but are not sent again.
    priority: larger is more urgent. arrival_time, deadline: seconds since the epoch; no deadline when None.
    use_prefix_cache: False takes nothing from the prefix cache and leaves nothing in it; never changes the tokens.
    alone: it runs in spare time, and by itself: see schedule.scheduler.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    attempt: int = 0
    emitted_token_ids: tuple[int, ...] = ()
    priority: int = 0
    arrival_time: float = 0.0
    deadline: float | None = None
    use_prefix_cache: bool = True
    alone: bool = False

    def __post_init__(self) -> None:
        _require(len(self.prompt_token_ids) > 0, "prompt", "must hold at least one token")
        _require(-(2**31) <= self.priority < 2**31, "priority", "must fit in 32 bits, signed")


class FinishReason(enum.StrEnum):
    """Why a choice ended. ERROR always comes with the error itself."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the chosen token and of the `logprobs` best ones.

    They are those of the logits after penalties and bias, at temperature 1, before top_k, top_p and min_p.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice. cached_tokens: prompt tokens whose state was restored instead of computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on the replica: waiting before the first row ran, until the first token, from the first to the last token."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a choice. token_sha256: see `espalier.replicas.token_hash`. matched_stop: the stop string, or the id that ended it."""

    reason: FinishReason
    usage: Usage
    token_sha256: str
    timings: Timings
    matched_stop: str | int | None = None
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one round produced for one request.

    first_index: index of token_ids[0] among the choice's generated tokens; the receiver finds gaps by it.
    text: what can be shown by now; it may lag behind the tokens (half characters, a stop string that may be under way).
    logprobs: one entry a token when asked for. The last event of a request carries `finish`; an event may carry it alone.
    """

    request_id: str
    attempt: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: Finish | None = None
