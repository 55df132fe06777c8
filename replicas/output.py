"""One choice's output as it grows: its text, and every rule of where it ends. Knows neither engine nor wire.

Rules, in the order in which they are asked of each token: an end token (the model's own, or stop_token_ids), a stop string that the token's
text completes, max_tokens. Before the reply has min_tokens tokens only max_tokens counts. The text of an end token, a stop string and what
follows it are not part of the reply's text; their tokens are part of its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from espalier.replicas.detokenizer import Detokenizer, TextDecoder
from espalier.replicas.request import FinishReason, SamplingParams
from espalier.replicas.sampling.stops import StopMatcher, end_token_ids


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Why the choice ended. matched: the stop string or the id that ended it; None when it ran into max_tokens."""

    matched: str | int | None
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one token added. text: what can be shown now; all that is left, when `stop` is set."""

    text: str
    stop: StopMatch | None = None


class OutputStream:
    """The output of one choice. The texts of all deltas and of `flush` joined are the reply's text, however the tokens were cut.

    emitted: tokens that another stream has been given already. The new one goes on where that one stands: their text is not returned
    again, but what that stream still held back is.
    """

    def __init__(
        self,
        text: TextDecoder,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        emitted: Sequence[int] = (),
    ) -> None:
        self._params = params
        self._end_ids = end_token_ids(params, eos_token_ids)
        self._detokenizer = Detokenizer(text)
        self._stops = StopMatcher(params.stop)
        self._num_tokens = 0
        self._ended = False
        for token_id in emitted:
            self.push(token_id)

    @property
    def num_tokens(self) -> int:
        """Tokens pushed so far, the emitted ones included."""
        return self._num_tokens

    def push(self, token_id: int) -> OutputDelta:
        """Takes the next token. Once a delta has carried a `stop`, no more tokens may come. Raises what the decoder raises, unchanged then."""
        assert not self._ended, "a token after the end of its choice"
        may_stop = self._num_tokens + 1 >= self._params.min_tokens
        if may_stop and token_id in self._end_ids:
            self._num_tokens += 1
            return OutputDelta(self.flush(), StopMatch(token_id, FinishReason.STOP))
        whole_characters = self._detokenizer.push(token_id)
        self._num_tokens += 1
        text, stop = self._stops.push(whole_characters, armed=may_stop)
        if stop is not None:
            self._ended = True
            return OutputDelta(text, StopMatch(stop, FinishReason.STOP))
        if self._num_tokens >= self._params.max_tokens:
            return OutputDelta(text + self.flush(), StopMatch(None, FinishReason.LENGTH))
        return OutputDelta(text)

    def flush(self) -> str:
        """The text still held back, for a choice that ends for a reason found elsewhere; nothing once it has ended."""
        if self._ended:
            return ""
        self._ended = True
        return self._stops.flush() + self._detokenizer.flush()
