"""Sampling arithmetic of one row, in plain torch: the definition that a kernel must match bit for bit.

Every step is a single fp32 operation rounded once to nearest even, an integer operation, or a comparison; sums are of integers or in the
fixed order of `tree_sum`. So the same logits give the same token on every device, alone or among others. Order of work:
penalize, add_bias, ban, then either `argmax` or scale, keep (top_k, top_p, min_p) and choose.
`order` below always means (value descending, id ascending), values compared as numbers. Knows no requests, seeds or positions: a row's
64-bit key comes from outside (`replicas/sampling/seeds.py`). NaN is refused before, by the caller.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.kernels.elementary import exp_f32, log_f32, tree_sum

# The largest weight is 2^40, so 2^22 of them sum to less than 2^63.
WEIGHT_BITS = 40
# top_p is taken in steps of 2^-30, so that its product with any part of a sum below stays within int64.
SHARE_BITS = 30
# A smaller temperature counts as this one: (score - best) / temperature then stays a number or becomes -inf, never NaN.
MIN_TEMPERATURE = 2.0**-64
# How many of the best tokens a nucleus is looked for in, at first; the result does not depend on it.
_FIRST_PREFIX = 128

_WORD = 0xFFFFFFFF


def penalize(
    scores: Tensor,
    in_prompt: Tensor,
    output_counts: Tensor,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> Tensor:
    """Scores after the three penalties, in this order; [vocab] fp32, a new tensor.

    in_prompt: bool [vocab]. output_counts: int [vocab], below 2^24. Tokens in prompt or output: positive scores are divided by
    `repetition`, others multiplied by it (Keskar et al. 2019, as Hugging Face and vLLM do). Then frequency * count and, for tokens in the
    output, presence are subtracted.
    """
    in_output = output_counts > 0
    factor = scores.new_tensor(repetition)
    repeated = torch.where(scores > 0, scores / factor, scores * factor)
    scores = torch.where(in_prompt | in_output, repeated, scores)
    scores = scores - output_counts.to(torch.float32) * scores.new_tensor(frequency)
    return scores - in_output.to(torch.float32) * scores.new_tensor(presence)


def add_bias(scores: Tensor, token_ids: Sequence[int], biases: Sequence[float]) -> Tensor:
    """Scores with biases[i], rounded to fp32, added to token token_ids[i]; ids are distinct. A new tensor."""
    ids = torch.tensor(token_ids, dtype=torch.int64, device=scores.device)
    scores = scores.clone()
    scores[ids] = scores[ids] + scores.new_tensor(biases)
    return scores


def ban(scores: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Scores with those tokens at -inf, so that they are never drawn. A new tensor."""
    scores = scores.clone()
    scores[torch.tensor(token_ids, dtype=torch.int64, device=scores.device)] = -math.inf
    return scores


def argmax(scores: Tensor) -> int:
    """The first token in order. scores: [vocab] fp32."""
    return int((scores == scores.amax()).nonzero()[0])


def scale(scores: Tensor, temperature: float) -> Tensor:
    """(score - best) / temperature; [vocab] fp32, at most 0, and 0 for the best."""
    # A tensor and not a number as divisor: some devices multiply by the reciprocal of a number.
    return (scores - scores.amax()) / scores.new_tensor(max(temperature, MIN_TEMPERATURE))


def weights(scaled: Tensor) -> Tensor:
    """e^scaled in units of 2^-40, rounded to the nearest integer, ties to even; int64, 2^40 for the best token."""
    return (exp_f32(scaled) * 2.0**WEIGHT_BITS).round().to(torch.int64)


def keep(scaled: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor | None:
    """Ids of the tokens that may be drawn, int64, or None for all of them. Each filter works on what the one before it kept.

    scaled: as `scale` returns it. top_k (0: off): the first top_k in order. top_p (1: off): the shortest prefix in order whose weights
    sum to at least ceil(P * total / 2^30), where P = max(1, top_p * 2^30 rounded) and total is over what top_k kept.
    min_p (0: off): those of weight at least ceil(min_p * 2^40).
    """
    kept = leading(scaled, top_k) if 0 < top_k < scaled.shape[0] else None
    if top_p < 1.0:
        kept = _nucleus(scaled, kept, max(1, round(top_p * 2**SHARE_BITS)))
    if min_p > 0.0:
        enough = math.ceil(min_p * 2.0**WEIGHT_BITS)
        heavy = weights(scaled if kept is None else scaled[kept]) >= enough
        kept = heavy.nonzero()[:, 0] if kept is None else kept[heavy]
    return kept


def leading(values: Tensor, count: int) -> Tensor:
    """Ids of the first `count` tokens in order, in order; int64. values: [vocab] fp32."""
    count = min(count, values.shape[0])
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    # topk alone leaves open which of equal values it takes; its smallest value is certain.
    candidates = (values >= values.topk(count).values[-1]).nonzero()[:, 0]
    return candidates[values[candidates].sort(descending=True, stable=True).indices[:count]]


def _nucleus(scaled: Tensor, ordered: Tensor | None, share: int) -> Tensor:
    """The shortest prefix in order with `share` / 2^30 of all weight. ordered: the tokens to choose from, in order; None for all."""
    vocab = scaled.shape[0]
    all_weights = weights(scaled if ordered is None else scaled[ordered])
    total = int(all_weights.sum())
    enough = -(-share * total >> SHARE_BITS)
    if ordered is not None:
        return ordered[_before(all_weights) < enough]
    # Most nuclei are short: look at the best few first, at all only when those weigh too little.
    count = _FIRST_PREFIX
    while True:
        ordered = leading(scaled, count)
        prefix_weights = all_weights[ordered]
        if count >= vocab or int(prefix_weights.sum()) >= enough:
            return ordered[_before(prefix_weights) < enough]
        count *= 8


def _before(ordered_weights: Tensor) -> Tensor:
    """Weight of all tokens before each one."""
    return ordered_weights.cumsum(0) - ordered_weights


def choose(scaled: Tensor, kept: Tensor | None, key: int) -> int:
    """The kept token of largest scaled + noise, the lower id of equals: a draw in proportion to e^scaled (Gumbel-max)."""
    ids = torch.arange(scaled.shape[0], device=scaled.device) if kept is None else kept
    perturbed = (scaled if kept is None else scaled[kept]) + gumbel(key, ids)
    return int(ids[perturbed == perturbed.amax()].amin())


def gumbel(key: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log u) of each token; fp32, between -3.14 and 22.9. key: uint64. token_ids: int64, below 2^31.

    With h = hash32(key, id) and v = fp32(2 * (h mod 2^31) + 1) * 2^-33, u is v where h < 2^31 and 1 - v elsewhere: either tail of u, and
    so the far tail of the noise that rare tokens live by, has the full resolution of fp32. -log(1 - v) is v * (log t / (t - 1)) with
    t = fp32(1 - v), or v where t is 1 (Kahan's log1p).
    """
    h = hash32(key, token_ids)
    v = ((h << 1) & _WORD | 1).to(torch.float32) * 2.0**-33
    upper = h >> 31 == 1
    t = 1.0 - v
    log = log_f32(torch.where(upper, t, v))
    near_one = torch.where(t == 1.0, v, v * (log / (t - 1.0)))
    return -log_f32(torch.where(upper, near_one, -log))


def hash32(key: int, token_ids: Tensor) -> Tensor:
    """mix32(mix32(id XOR low word of key) + high word of key), in uint32 held in int64. For one key no two ids get the same."""
    return _mix32(_mix32(token_ids ^ (key & _WORD)).add_(key >> 32).bitwise_and_(_WORD))


def _mix32(x: Tensor) -> Tensor:
    """A bijection of uint32: the shift-multiply mixer with constants by Wellons ("lowbias32"). An int64 product wraps, its low word is right."""
    x = x ^ (x >> 16)
    x.mul_(0x7FEB352D).bitwise_and_(_WORD)
    x ^= x >> 15
    x.mul_(0x846CA68B).bitwise_and_(_WORD)
    x ^= x >> 16
    return x


def log_softmax(scores: Tensor, token_ids: Tensor) -> Tensor:
    """Natural-log probabilities of those tokens: (score - best) - log(tree_sum(exp(score - best))) over the vocabulary. fp32 [len(token_ids)]."""
    shifted = scores - scores.amax()
    return shifted[token_ids] - log_f32(tree_sum(exp_f32(shifted)))
