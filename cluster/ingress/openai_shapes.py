"""The shapes of chat and text completion replies: names, deltas, messages, logprobs. Pure; knows no events."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.cluster.call import ModelText
from espalier.replicas.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChatShape:
    """`chat.completion`."""

    text: ModelText
    whole_name: str = "chat.completion"
    chunk_name: str = "chat.completion.chunk"

    def opening(self) -> dict[str, Any] | None:
        """The role chunk."""
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str) -> dict[str, Any]:
        """A piece of the message."""
        return {"delta": {"content": text} if text else {}}

    def message(self, text: str) -> dict[str, Any]:
        """The message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, entries: Sequence[TokenLogprobs], text_offset: int) -> dict[str, Any]:
        """One entry a token, each with its alternatives."""
        return {
            "content": [
                {
                    **self._token(entry.token_id, entry.logprob),
                    "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def token_length(self, token_id: int) -> int:
        """Chat logprobs have no offsets."""
        return 0

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_string(self.text, token_id),
            "logprob": _finite(logprob),
            "bytes": list(self.text.token_bytes(token_id)),
        }


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """`text_completion`, whole and in chunks."""

    text: ModelText
    whole_name: str = "text_completion"
    chunk_name: str = "text_completion"

    def opening(self) -> dict[str, Any] | None:
        """None: the first chunk has text."""
        return None

    def delta(self, text: str) -> dict[str, Any]:
        """A piece of the text."""
        return {"text": text}

    def message(self, text: str) -> dict[str, Any]:
        """The text."""
        return {"text": text}

    def logprobs(self, entries: Sequence[TokenLogprobs], text_offset: int) -> dict[str, Any]:
        """Four lists, one item a token. Of two alternatives with the same string the likelier one is kept; the chosen token is always in."""
        offsets = []
        for entry in entries:
            offsets.append(text_offset)
            text_offset += self.token_length(entry.token_id)
        return {
            "tokens": [token_string(self.text, entry.token_id) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def token_length(self, token_id: int) -> int:
        """Characters of the token's string."""
        return len(token_string(self.text, token_id))

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top = {token_string(self.text, entry.token_id): _finite(entry.logprob)}
        for token_id, logprob in entry.top:
            top.setdefault(token_string(self.text, token_id), _finite(logprob))
        return top


def token_string(text: ModelText, token_id: int) -> str:
    """The token as text; a token that is part of a character as OpenAI writes those, such as `bytes:\\xe2\\x82`."""
    raw = text.token_bytes(token_id)
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text.token_text(token_id)


def _finite(logprob: float) -> float:
    """A logprob that JSON can hold; OpenAI writes minus infinity as -9999."""
    return max(logprob, -9999.0)
