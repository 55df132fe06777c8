"""From what a client gave to a checked SamplingParams: defaults, seed, room in the context, ids in the vocabulary. Knows neither wire.

Both fronts come through here, so that the same fields mean the same tokens over HTTP and gRPC.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from espalier.cluster.call import ModelInfo
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.request import SAMPLING_FIELDS, SamplingParams

MAX_CHOICES = 16
MAX_SESSION_LENGTH = 256
# Drawn seeds fit in a JSON number: a client that reads doubles can send the seed back unchanged.
_DRAWN_SEED_BITS = 53


def resolve_params(
    given: Mapping[str, Any],
    info: ModelInfo,
    num_prompt_tokens: int,
    *,
    prompt_field: str,
    max_tokens_field: str = "max_tokens",
    default_max_tokens: int | None = None,
) -> SamplingParams:
    """The SamplingParams of one prompt.

    given: values by SamplingParams field; only those that the client set. The rest comes from the model's defaults, then from SamplingParams' own.
    Without a seed one is drawn. Without max_tokens it is what the context leaves, at most default_max_tokens where that is not None.
    prompt_field, max_tokens_field: what the wire calls them, for errors. Raises InvalidRequestError naming the field.
    """
    assert given.keys() <= SAMPLING_FIELDS, f"not sampling fields: {given.keys() - SAMPLING_FIELDS}"
    values: dict[str, Any] = {**info.defaults, **given}
    if "seed" not in values:
        values["seed"] = draw_seed()
    values["max_tokens"] = _max_tokens(
        given.get("max_tokens"), info, num_prompt_tokens, prompt_field, max_tokens_field, default_max_tokens
    )
    params = SamplingParams(**values)
    check_token_ids([token_id for token_id, _ in params.logit_bias], info, "logit_bias")
    check_token_ids(params.stop_token_ids, info, "stop_token_ids")
    return params


def draw_seed() -> int:
    """A seed for a request that gave none."""
    return secrets.randbits(_DRAWN_SEED_BITS)


def check_token_ids(token_ids: Sequence[int], info: ModelInfo, param: str) -> None:
    """Raises InvalidRequestError naming `param` when an id lies outside the model's vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < info.vocab_size:
            raise InvalidRequestError(
                f"{param}: token id {token_id} is not in the vocabulary of {info.vocab_size}", param=param
            )


def deadline_after(timeout_s: float | None) -> float | None:
    """Seconds since the epoch at which a request that comes in now is given up; None leaves it to the gateway."""
    return None if timeout_s is None else time.time() + timeout_s


def _max_tokens(
    given: int | None,
    info: ModelInfo,
    num_prompt_tokens: int,
    prompt_field: str,
    max_tokens_field: str,
    default: int | None,
) -> int:
    if num_prompt_tokens == 0:
        raise InvalidRequestError(f"{prompt_field}: must hold at least one token", param=prompt_field)
    room = info.max_context - num_prompt_tokens
    if room < 1:
        raise InvalidRequestError(
            f"{prompt_field}: {num_prompt_tokens} tokens leave no room for a reply in a context of {info.max_context}",
            param=prompt_field,
        )
    if given is None:
        return room if default is None else min(room, default)
    if given > room:
        raise InvalidRequestError(
            f"{max_tokens_field}: {num_prompt_tokens} prompt tokens and {given} generated ones do not fit "
            f"in a context of {info.max_context}",
            param=max_tokens_field,
        )
    return given
