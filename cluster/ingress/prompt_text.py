"""A prompt's text to token ids, within bounds: what cannot fit a context anyhow is refused before it is encoded. Knows no wire."""

from espalier.cluster.call import ModelInfo, ModelText
from espalier.replicas.errors import InvalidRequestError

# Four is usual. Encoding costs time and about 150 bytes of memory a character, so a text is not encoded only to find that it is too long.
MAX_CHARS_PER_TOKEN = 16


def encode_prompt(
    prompt: str, info: ModelInfo, text: ModelText, *, param: str, add_special_tokens: bool = True
) -> list[int]:
    """The token ids. CPU work: call it in a thread. Raises InvalidRequestError naming `param` for a text far beyond the model's context."""
    limit = info.max_context * MAX_CHARS_PER_TOKEN
    if len(prompt) > limit:
        raise InvalidRequestError(
            f"{param}: {len(prompt)} characters; at most {limit} are read for a context of {info.max_context} tokens",
            param=param,
        )
    return text.encode(prompt, add_special_tokens=add_special_tokens)
