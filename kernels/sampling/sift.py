"""The pass over all tokens of rows that draw from many, chunk by chunk: who may win the draw, and what has to be ordered.

PLAIN rows draw from all tokens. LONG rows draw from those above the guessed ends of their filters, and list the tokens between these, for
`choose.py` to order; exact sums tell whether the guess was right. Integers are added atomically, in any order. No noise is computed here:
a bound of it, from the hash, tells almost always which token of a chunk can be the best.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

import triton
import triton.language as tl

from espalier.kernels.sampling.lines import (
    EDITED,
    KIND,
    LONG,
    MIN_WEIGHT,
    PLAIN,
    SHARE,
    TEMPERATURE,
    TOP_K,
    is_finite,
    load_scores,
    number,
    row_best,
    seed_of,
    word,
)
from espalier.kernels.sampling.noise import gumbel_ceiling, hash32, row_key
from espalier.kernels.sampling.order import first_of, rank_key, rank_word, scale, weight

SUMS = (
    4  # int64 numbers a row: weight of all, from the lower end up, from the upper end up; number from the upper end up
)
NO_TOKEN = tl.constexpr(2**31 - 1)
_SUMS = tl.constexpr(SUMS)
_INF = tl.constexpr(float("inf"))
# Noise lies between -3.14 and 22.9, so a scaled score below their difference cannot beat the best one, which is 0.
_HOPELESS = tl.constexpr(-27.0)
_WEIGHTLESS = tl.constexpr(-29.0)  # e^-29 is less than half of 2^-40
# A lower score weighs no more than this times a higher one's weight, plus 1: e^x is two ulp off, weights are rounded to integers.
_NEARLY_MONOTONE = tl.constexpr(1.0001)


@triton.jit
def sift_kernel(
    logits,
    logits_stride,
    lanes,
    positions,
    table,
    width,
    scores,
    scores_stride,
    chunk_best,
    num_chunks,
    ends,
    sums,
    chunk_token,
    chunk_rival,
    keys,
    keys_stride,
    num_keys,
    vocab,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One program a chunk and row.

    Writes chunk_token int32 and chunk_rival fp32 [rows, num_chunks]: the token of the highest bound, and the next bound. For LONG rows adds to
    sums int64 [rows, SUMS] and num_keys int32 [rows], zeros before, and appends to keys int64.
    """
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.load(lanes + row).to(tl.int64)
    if lane < 0:
        return
    line = table + lane * width
    kind = word(line, KIND)
    if (kind != PLAIN) & (kind != LONG):
        return
    temperature = number(line, TEMPERATURE)
    best = row_best(chunk_best + row * num_chunks, num_chunks, CHUNKS)
    if not is_finite(best):
        return
    # What the chunk's best token may still do: win, be listed, or weigh something.
    top = scale(tl.load(chunk_best + row * num_chunks + chunk), best, temperature)
    min_weight = number(line, MIN_WEIGHT)
    upper, lower, least = _INF, -_INF, _HOPELESS
    weighed = (word(line, SHARE) > 0) & (word(line, TOP_K) == 0)
    if kind == LONG:
        upper, lower = tl.load(ends + 2 * row), tl.load(ends + 2 * row + 1)
        least = tl.where(weighed, tl.minimum(lower, _WEIGHTLESS), lower)
    elif weight(top) * _NEARLY_MONOTONE + 1.0 < min_weight:
        least = _INF
    token = tl.full((), NO_TOKEN, tl.int32)
    rival = tl.full((), -_INF, tl.float32)
    if top >= least:
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = token_ids < vocab
        edited = word(line, EDITED)
        x = load_scores(logits + row * logits_stride, scores + row * scores_stride, edited, token_ids, inside)
        scaled = scale(x, best, temperature)
        drawn_from = -_INF
        if kind == LONG:
            drawn_from = upper
            _sum_and_list(
                scaled,
                token_ids,
                inside,
                top,
                upper,
                lower,
                weighed,
                sums + row * _SUMS,
                keys + row * keys_stride,
                num_keys + row,
            )
        if top >= drawn_from:
            bounds = scaled + gumbel_ceiling(hash32(row_key(seed_of(line), tl.load(positions + row)), token_ids))
            bounds = tl.where(is_drawn(scaled, inside, drawn_from, min_weight), bounds, -_INF)
            highest = tl.max(bounds, axis=0)
            if highest > -_INF:
                token = first_of(bounds, token_ids, highest)
                rival = tl.max(tl.where(token_ids == token, -_INF, bounds), axis=0)
    tl.store(chunk_token + row * num_chunks + chunk, token)
    tl.store(chunk_rival + row * num_chunks + chunk, rival)


@triton.jit
def is_drawn(scaled, inside, drawn_from, min_weight):
    """Which tokens of a chunk are drawn from."""
    drawn = inside & (scaled >= drawn_from)
    if min_weight > 0.0:
        drawn = drawn & (weight(scaled) >= min_weight)
    return drawn


@triton.jit
def _sum_and_list(scaled, token_ids, inside, top, upper, lower, weighed, sums, keys, num_keys):
    """Adds a chunk's part to a LONG row's sums, and lists what lies between the ends."""
    if weighed:
        weights = weight(scaled).to(tl.int64)  # 0 of what is -inf, as beyond the vocabulary
        tl.atomic_add(sums, tl.sum(weights, axis=0), sem="relaxed")
        if top >= lower:
            tl.atomic_add(sums + 1, tl.sum(tl.where(scaled >= lower, weights, 0), axis=0), sem="relaxed")
        if top >= upper:
            tl.atomic_add(sums + 2, tl.sum(tl.where(scaled >= upper, weights, 0), axis=0), sem="relaxed")
    if top >= upper:
        number = tl.sum((inside & (scaled >= upper)).to(tl.int32), axis=0)
        tl.atomic_add(sums + 3, number.to(tl.int64), sem="relaxed")
    if top >= lower:
        listed = inside & (scaled < upper) & (scaled >= lower)
        places = tl.cumsum(listed.to(tl.int32), axis=0)
        start = tl.atomic_add(num_keys, tl.max(places, axis=0), sem="relaxed")
        tl.store(keys + start + places - 1, rank_key(rank_word(scaled), token_ids), mask=listed)
