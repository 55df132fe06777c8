"""Logits -> tokens: each row's parameters, history and key turned into calls of the sampling arithmetic.

Policy only; the arithmetic, and what "the same bits everywhere" means for it, is `kernels/sampling/reference.py`. Knows no sequences: a row
carries all it needs, so a row's result cannot depend on the rows beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.sampling import reference
from espalier.replicas.errors import InvalidRequestError, RequestFailedError
from espalier.replicas.request import SamplingParams, TokenLogprobs
from espalier.replicas.sampling.history import TokenHistory
from espalier.replicas.sampling.seeds import row_key
from espalier.replicas.schedule.step import SampledToken

__all__ = ["SampleRow", "TokenHistory", "sample", "sample_row"]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row is sampled with.

    position: absolute position of the token being drawn (prompt and reply counted together, from 0).
    history: tokens before that position; needed if `params.needs_history`. banned: ids that cannot be drawn (ends before min_tokens).
    """

    params: SamplingParams
    position: int
    history: TokenHistory | None = None
    banned: tuple[int, ...] = ()


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """Draws one token a row. logits: [rows, vocab] fp32, left unchanged. Errors as `sample_row`."""
    assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} rows to sample"
    return [sample_row(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)]


def sample_row(logits: Tensor, row: SampleRow) -> SampledToken:
    """Draws the token of one row. logits: [vocab] fp32, left unchanged.

    Raises RequestFailedError if the best score is not a finite number, InvalidRequestError for a bias on a token the model lacks.
    """
    params = row.params
    scores = _scores(logits, row)
    best = float(scores.amax())
    if not math.isfinite(best):
        raise RequestFailedError(f"the logits for position {row.position} have no finite maximum")
    if params.temperature == 0.0:
        token_id = reference.argmax(scores)
    else:
        scaled = reference.scale(scores, params.temperature)
        kept = reference.keep(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        token_id = reference.choose(scaled, kept, row_key(params.seed, row.position))
    return SampledToken(token_id, None if params.logprobs is None else _logprobs(scores, token_id, params.logprobs))


def _scores(logits: Tensor, row: SampleRow) -> Tensor:
    """Logits after penalties, bias and bans; [vocab] fp32."""
    params, scores = row.params, logits
    if params.needs_history:
        assert row.history is not None, "penalties need the history"
        assert row.history.length == row.position, f"history ends at {row.history.length}, not at {row.position}"
        scores = reference.penalize(
            scores,
            row.history.in_prompt,
            row.history.output_counts,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )
    if params.logit_bias:
        bias = dict(params.logit_bias)
        for token_id in bias:
            if token_id >= scores.shape[0]:
                message = f"logit_bias: the model has no token {token_id}, its vocabulary ends at {scores.shape[0] - 1}"
                raise InvalidRequestError(message, param="logit_bias")
        scores = reference.add_bias(scores, list(bias), list(bias.values()))
    if row.banned:
        scores = reference.ban(scores, [token_id for token_id in row.banned if token_id < scores.shape[0]])
    return scores


def _logprobs(scores: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    chosen = torch.tensor([token_id], device=scores.device)
    ids = torch.cat((chosen, reference.leading(scores, num_top)))
    logprobs = reference.log_softmax(scores, ids).tolist()
    pairs = zip(ids.tolist()[1:], logprobs[1:], strict=True)
    # A token that cannot be drawn has no logarithm to report.
    return TokenLogprobs(token_id, logprobs[0], tuple(pair for pair in pairs if pair[1] > -math.inf))
