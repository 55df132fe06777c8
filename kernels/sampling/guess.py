"""A guess between which scores a long prefix ends, in Triton, one program a LONG row: read few tokens, and be wrong rarely.

The leading tokens are listed and so known exactly; of the other groups the best token is known, and a few more stand for the rest. Numbers
or weights above a score are estimated from these, and so is the error. A guess decides about time alone: `sift.py` counts and weighs
exactly, and `choose.py` notices a wrong one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

import triton
import triton.language as tl

from espalier.kernels.elementary_device import exp_f32
from espalier.kernels.sampling.lines import (
    EDITED,
    KIND,
    LONG,
    SHARE,
    TEMPERATURE,
    TOP_K,
    is_finite,
    load_scores,
    number,
    row_best,
    word,
)
from espalier.kernels.sampling.order import scale, value_of
from espalier.kernels.sampling.select import gather_leading

_LEADING = tl.constexpr(64)
_SAMPLES = tl.constexpr(2)  # of each group
_DEVIATIONS = tl.constexpr(3.0)
_SOME_TOKENS = tl.constexpr(128.0)  # beside the error, for what samples cannot show
_FEW = tl.constexpr(3000.0)  # a prefix of so many tokens is listed whole
_HALVINGS = tl.constexpr(10)
_MORE_HALVINGS = tl.constexpr(8)
_SHARE_UNITS = tl.constexpr(2.0**-30)
_STEP = tl.constexpr(1024)
_INF = tl.constexpr(float("inf"))


@triton.jit
def guess_kernel(
    logits,
    logits_stride,
    lanes,
    table,
    width,
    scores,
    scores_stride,
    group_best,
    num_groups,
    chosen_groups,
    chunk_best,
    num_chunks,
    keys,
    keys_stride,
    ends,
    vocab,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Writes ends fp32 [rows, 2]: the prefix seems to end below the first scaled score, and not below the second. keys is scratch."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + row).to(tl.int64)
    if lane < 0:
        return
    line = table + lane * width
    if word(line, KIND) != LONG:
        return
    best = row_best(chunk_best + row * num_chunks, num_chunks, CHUNKS)
    if not is_finite(best):
        return
    row_logits = logits + row * logits_stride
    row_scores = scores + row * scores_stride
    row_groups = group_best + row * num_groups
    row_keys = keys + row * keys_stride
    edited = word(line, EDITED)
    temperature = number(line, TEMPERATURE)
    count, share = word(line, TOP_K), word(line, SHARE).to(tl.float32) * _SHARE_UNITS
    by_weight = count == 0

    length, bound = gather_leading(
        row_logits,
        row_scores,
        edited,
        vocab,
        row_groups,
        num_groups,
        best,
        temperature,
        _LEADING,
        chosen_groups + row * num_groups,
        row_keys,
        True,
        GROUP,
        GROUPS,
    )
    sums = tl.zeros((_STEP,), tl.float32)
    for start in range(0, length, _STEP):
        i = start + tl.arange(0, _STEP)
        value = value_of(tl.load(row_keys + i, mask=i < length, other=0))
        sums += tl.where(i < length, tl.where(by_weight, exp_f32(value), 1.0), 0.0)
    leading = tl.sum(sums, axis=0)
    # Above this, everything is in the list.
    ceiling = tl.where(length < vocab, value_of(bound << 32), -_INF)

    sample = tl.arange(0, _SAMPLES * GROUPS)
    group = sample // _SAMPLES
    token_ids = group * GROUP + (group * 29 + sample % _SAMPLES * 37) % GROUP
    tops = tl.load(row_groups + group, mask=group < num_groups, other=-_INF)
    others = load_scores(row_logits, row_scores, edited, token_ids, token_ids < vocab)
    others = tl.where(others < tops, others, -_INF)
    tops, others = scale(tops, best, temperature), scale(others, best, temperature)
    tops = tl.where((tops < ceiling) & (sample % _SAMPLES == 0), tops, -_INF)
    others = tl.where(others < ceiling, others, -_INF)
    top_amounts = _amounts(tops, by_weight)
    other_amounts = _amounts(others, by_weight) * (GROUP // _SAMPLES)

    lowest = tl.min(
        tl.minimum(tl.where(tops > -_INF, tops, ceiling), tl.where(others > -_INF, others, ceiling)), axis=0
    )
    whole = leading + tl.sum(top_amounts + other_amounts, axis=0)
    target = tl.where(by_weight, share * whole, count.to(tl.float32))
    end, _ = _search(tops, top_amounts, others, other_amounts, lowest, ceiling, target - leading, _HALVINGS)
    above = tl.sum(tl.where(others >= end, other_amounts * other_amounts, 0.0), axis=0)
    below = tl.sum(tl.where(others < end, other_amounts * other_amounts, 0.0), axis=0)
    part = tl.where(by_weight, share, above / tl.maximum(above + below, 1.0))
    error = _DEVIATIONS * tl.sqrt((1.0 - part) * (1.0 - part) * above + part * part * below)
    error += _SOME_TOKENS * tl.where(by_weight, exp_f32(end), 1.0)
    # Where little is left after the end, half of that is margin enough.
    enough = tl.minimum(target + error, 0.5 * (target + whole))
    lower, _ = _search(tops, top_amounts, others, other_amounts, lowest, end, enough - leading, _MORE_HALVINGS)
    _, upper = _search(tops, top_amounts, others, other_amounts, end, ceiling, target - error - leading, _MORE_HALVINGS)
    lower = tl.where(target >= whole, -_INF, lower)
    listed = tl.sum((tops >= lower).to(tl.float32) + tl.where(others >= lower, 1.0 * GROUP / _SAMPLES, 0.0), axis=0)
    # Few tokens, the leading ones among which the prefix may end, or a second filter on what top_k leaves: all of it from the first on.
    whole_prefix = (listed < _FEW) | (target - error <= leading) | ((count > 0) & (share > 0.0))
    tl.store(ends + 2 * row, tl.where(whole_prefix, _INF, upper))
    tl.store(ends + 2 * row + 1, lower)


@triton.jit
def _amounts(scaled, by_weight):
    return tl.where(scaled > -_INF, tl.where(by_weight, exp_f32(scaled), 1.0), 0.0)


@triton.jit
def _search(tops, top_amounts, others, other_amounts, low, high, target, HALVINGS: tl.constexpr):
    """(low, high) close together, with about `target` above: more from low up, if that is so at the beginning, less from high up."""
    for _ in range(HALVINGS):
        middle = (low + high) * 0.5
        amounts = tl.where(tops >= middle, top_amounts, 0.0) + tl.where(others >= middle, other_amounts, 0.0)
        reached = tl.sum(amounts, axis=0) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low, high
