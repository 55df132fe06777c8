"""Token ids -> text as they arrive, whole characters only.

The text of a reply is defined here: the bytes of its tokens joined and read as UTF-8, each maximal invalid part as one U+FFFD. It continues
the prompt, so a first token that begins with a space keeps it. Knows nothing of stops.
"""

import codecs
from typing import Protocol


class TextDecoder(Protocol):
    """What detokenization needs of a tokenizer; implemented by espalier.replicas.tokenizer.Tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes the token stands for inside a text; maybe a part of a character. Empty for an id the tokenizer lacks."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a mark of the format (begin, end, role, ...) rather than text."""
        ...


class NoText:
    """The decoder of a model that is measured without its tokenizer: every token stands for nothing."""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def is_special(self, token_id: int) -> bool:
        return False


class Detokenizer:
    """One reply's text, piece by piece. The pieces joined are the text of all tokens, however they were cut."""

    def __init__(self, decoder: TextDecoder, *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        # Holds back the bytes of a character that is not complete yet.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if self._skip_special_tokens and self._decoder.is_special(token_id):
            return ""
        return self._utf8.decode(self._decoder.token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the last character was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)
