"""The last pass of a draw, one program a row: orders what has to be ordered, and writes the row's token and status."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

import triton
import triton.language as tl

from espalier.kernels.sampling.lines import (
    EDITED,
    GREEDY,
    KIND,
    MIN_WEIGHT,
    PLAIN,
    SHARE,
    SHORT,
    TEMPERATURE,
    TOP_K,
    is_finite,
    load_scores,
    number,
    row_best,
    seed_of,
    word,
)
from espalier.kernels.sampling.noise import gumbel, hash32, row_key
from espalier.kernels.sampling.order import first_of, id_of, scale, share_of, value_of, weight
from espalier.kernels.sampling.select import gather_leading, list_all, prefix_end
from espalier.kernels.sampling.sift import NO_TOKEN, SUMS, is_drawn

_INF = tl.constexpr(float("inf"))
_SUMS = tl.constexpr(SUMS)
_SHORT_STEP = tl.constexpr(512)
_LONG_STEP = tl.constexpr(4096)
OK, NO_FINITE_MAXIMUM = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def choose_kernel(
    logits,
    logits_stride,
    lanes,
    positions,
    table,
    width,
    scores,
    scores_stride,
    group_best,
    num_groups,
    chosen_groups,
    chunk_best,
    num_chunks,
    ends,
    sums,
    chunk_token,
    chunk_rival,
    keys,
    keys_stride,
    num_keys,
    spare,
    token_ids,
    status,
    vocab,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPARE: tl.constexpr,
):
    """Writes token_ids and status, int32 [rows]; sums and num_keys are zero again after it."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + row).to(tl.int64)
    if lane < 0:
        return
    line = table + lane * width
    kind = word(line, KIND)
    best = row_best(chunk_best + row * num_chunks, num_chunks, CHUNKS)
    if not is_finite(best):
        tl.store(token_ids + row, 0)
        tl.store(status + row, NO_FINITE_MAXIMUM)
        return
    row_logits = logits + row * logits_stride
    row_scores = scores + row * scores_stride
    row_groups = group_best + row * num_groups
    row_keys = keys + row * keys_stride
    edited = word(line, EDITED)
    value = tl.full((), -_INF, tl.float32)
    token = tl.full((), NO_TOKEN, tl.int32)
    if kind == GREEDY:
        group = tl.arange(0, GROUPS)
        tops = tl.load(row_groups + group, mask=group < num_groups, other=-_INF)
        ids = first_of(tops, group, best) * GROUP + tl.arange(0, GROUP)
        token = first_of(load_scores(row_logits, row_scores, edited, ids, ids < vocab), ids, best)
    else:
        temperature = number(line, TEMPERATURE)
        min_weight = number(line, MIN_WEIGHT)
        key = row_key(seed_of(line), tl.load(positions + row))
        # Of PLAIN rows all tokens are drawn from, of LONG ones those from here up and the beginning of a list; of SHORT ones only that.
        drawn_from = -_INF
        if kind != PLAIN:
            count, share = word(line, TOP_K), word(line, SHARE)
            length = 0
            weight_before = tl.full((), 0, tl.int64)
            total = tl.full((), -1, tl.int64)
            drawn_from = _INF
            if kind == SHORT:
                length, _ = gather_leading(
                    row_logits,
                    row_scores,
                    edited,
                    vocab,
                    row_groups,
                    num_groups,
                    best,
                    temperature,
                    count,
                    chosen_groups + row * num_groups,
                    row_keys,
                    True,
                    GROUP,
                    GROUPS,
                )
            else:
                row_sums = sums + row * _SUMS
                weight_of_all, weight_to_lower = tl.load(row_sums), tl.load(row_sums + 1)
                weight_before, number_before = tl.load(row_sums + 2), tl.load(row_sums + 3).to(tl.int32)
                length = tl.load(num_keys + row)
                tl.debug_barrier()
                tl.store(row_sums + tl.arange(0, _SUMS), tl.zeros((_SUMS,), tl.int64))
                tl.store(num_keys + row, 0)
                drawn_from = tl.load(ends + 2 * row)
                right = (number_before < count) & (count <= number_before + length)
                if count == 0:
                    total = weight_of_all
                    enough = share_of(share, total)
                    right = (weight_before < enough) & (enough <= weight_to_lower)
                if not right:
                    length = list_all(row_logits, row_scores, edited, vocab, best, temperature, row_keys)
                    number_before = 0
                    weight_before = weight_before * 0
                    drawn_from = _INF
                count = tl.where(count > 0, count - number_before, NO_TOKEN)
            end = prefix_end(row_keys, length, count, share, weight_before, total, spare + row * SPARE)
            if length <= _SHORT_STEP:
                value, token = _best_listed(row_keys, 0, length, end, key, min_weight, value, token, _SHORT_STEP)
            else:
                for start in range(0, length, _LONG_STEP):
                    value, token = _best_listed(row_keys, start, length, end, key, min_weight, value, token, _LONG_STEP)
        if kind != SHORT:
            tokens_of_chunks = chunk_token + row * num_chunks
            rivals = chunk_rival + row * num_chunks
            if drawn_from < _INF:
                value, token = _best_of_chunks(
                    row_logits,
                    row_scores,
                    edited,
                    vocab,
                    best,
                    temperature,
                    tokens_of_chunks,
                    rivals,
                    num_chunks,
                    drawn_from,
                    key,
                    min_weight,
                    value,
                    token,
                    CHUNK,
                    CHUNKS,
                )
    tl.store(token_ids + row, token)
    tl.store(status + row, OK)


@triton.jit
def _best_listed(keys, start, length, end, key, min_weight, value, token, STEP: tl.constexpr):
    """The better of (value, token) and the best draw among listed tokens up to `end`, from place `start` on."""
    i = start + tl.arange(0, STEP)
    rank_keys = tl.load(keys + i, mask=i < length, other=0)
    scaled = value_of(rank_keys)
    drawn = (i < length) & (rank_keys <= end)
    if min_weight > 0.0:
        drawn = drawn & (weight(scaled) >= min_weight)
    return _better(scaled, id_of(rank_keys), drawn, key, value, token)


@triton.jit
def _best_of_chunks(
    logits,
    scores,
    edited,
    vocab,
    best,
    temperature,
    chunk_token,
    chunk_rival,
    num_chunks,
    drawn_from,
    key,
    min_weight,
    value,
    token,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The better of (value, token) and the best draw among the tokens that `sift.py` left: one a chunk, and the rivals that reach it."""
    chunk = tl.arange(0, CHUNKS)
    ids = tl.load(chunk_token + chunk, mask=chunk < num_chunks, other=NO_TOKEN)
    drawn = ids != NO_TOKEN
    scaled = scale(load_scores(logits, scores, edited, ids, drawn), best, temperature)
    value, token = _better(scaled, ids, drawn, key, value, token)
    rivals = tl.load(chunk_rival + chunk, mask=chunk < num_chunks, other=-_INF)
    if tl.max(rivals, axis=0) >= value:
        for c in range(num_chunks):
            if tl.load(chunk_rival + c) >= value:
                token_ids = c * CHUNK + tl.arange(0, CHUNK)
                inside = token_ids < vocab
                x = scale(load_scores(logits, scores, edited, token_ids, inside), best, temperature)
                value, token = _better(x, token_ids, is_drawn(x, inside, drawn_from, min_weight), key, value, token)
    return value, token


@triton.jit
def _better(scaled, token_ids, drawn, key, value, token):
    """The better of (value, token) and the largest scaled + noise of tokens that are drawn from: the larger, or of equals the lower id."""
    perturbed = tl.where(drawn, scaled + gumbel(hash32(key, token_ids)), -_INF)
    found = tl.max(perturbed, axis=0)
    at = first_of(perturbed, token_ids, found)
    better = (found > value) | ((found == value) & (at < token))
    return tl.where(better, found, value), tl.where(better, at, token)
