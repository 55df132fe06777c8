"""Log probabilities of the chosen and the best tokens, in Triton: bit for bit `reference.log_softmax` and `reference.leading`.

Two passes: the sum over the vocabulary is cut at a level of its tree, so that many programs share its first halvings, and one program a row
does the rest, orders the best tokens and writes. Rows that want none are left alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

import triton
import triton.language as tl

from espalier.kernels.elementary_device import exp_f32, log_normal, tree_index, tree_sum
from espalier.kernels.sampling.lines import EDITED, NUM_TOP, is_finite, load_scores, row_best, word
from espalier.kernels.sampling.order import id_of, value_of
from espalier.kernels.sampling.select import RANKED, gather_leading, rank_all, shorten

FIRST_HALVINGS = 5  # of at most 2^18 elements, to at most 2^13 columns
LAST_HALVINGS = 13
COLUMNS = 128
_MAX_TOP_BLOCK = tl.constexpr(32)
_INF = tl.constexpr(float("inf"))


@triton.jit
def sum_kernel(
    logits,
    logits_stride,
    lanes,
    table,
    width,
    scores,
    scores_stride,
    chunk_best,
    num_chunks,
    column_sums,
    num_columns,
    vocab,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    """One program COLUMNS columns and row: column_sums fp32 [rows, num_columns], sums of e^(score - best) after the first halvings."""
    row = tl.program_id(1).to(tl.int64)
    lane = tl.load(lanes + row).to(tl.int64)
    if lane < 0:
        return
    line = table + lane * width
    if word(line, NUM_TOP) < 0:
        return
    best = row_best(chunk_best + row * num_chunks, num_chunks, CHUNKS)
    if not is_finite(best):
        return
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    slots = tl.arange(0, 1 << HALVINGS)
    index, valid = tree_index(columns[None, :], slots[:, None], vocab, HALVINGS)
    edited = word(line, EDITED)
    x = load_scores(logits + row * logits_stride, scores + row * scores_stride, edited, index, valid)
    terms = tl.where(valid, exp_f32(x - best), 0.0)
    tl.store(column_sums + row * num_columns + columns, tree_sum(terms, HALVINGS), mask=columns < num_columns)


@triton.jit
def report_kernel(
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
    column_sums,
    num_columns,
    keys,
    keys_stride,
    spare,
    token_ids,
    logprob,
    top_ids,
    top_logprobs,
    max_top,
    vocab,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    HALVINGS: tl.constexpr,
    SPARE: tl.constexpr,
):
    """Writes logprob fp32 [rows] and top_ids int32, top_logprobs fp32 [rows, max_top]; unused places are -1 and -inf."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + row).to(tl.int64)
    if lane < 0:
        return
    line = table + lane * width
    num_top = word(line, NUM_TOP)
    if num_top < 0:
        return
    best = row_best(chunk_best + row * num_chunks, num_chunks, CHUNKS)
    if not is_finite(best):
        return
    row_logits = logits + row * logits_stride
    row_scores = scores + row * scores_stride
    row_keys = keys + row * keys_stride
    edited = word(line, EDITED)

    index, valid = tree_index(0, tl.arange(0, 1 << HALVINGS), num_columns, HALVINGS)
    sums = tl.load(column_sums + row * num_columns + index, mask=valid, other=0.0)
    log_total = log_normal(tree_sum(sums, HALVINGS))
    token = tl.load(token_ids + row)
    tl.store(logprob + row, (load_scores(row_logits, row_scores, edited, token, token >= 0) - best) - log_total)

    place = tl.arange(0, _MAX_TOP_BLOCK)
    tl.store(top_ids + row * max_top + place, tl.full((_MAX_TOP_BLOCK,), -1, tl.int32), mask=place < max_top)
    tl.store(top_logprobs + row * max_top + place, tl.full((_MAX_TOP_BLOCK,), -_INF, tl.float32), mask=place < max_top)
    tl.debug_barrier()
    if num_top > 0:
        length, _ = gather_leading(
            row_logits,
            row_scores,
            edited,
            vocab,
            group_best + row * num_groups,
            num_groups,
            best,
            1.0,
            num_top,
            chosen_groups + row * num_groups,
            row_keys,
            False,
            GROUP,
            GROUPS,
        )
        if length > RANKED:
            length = shorten(row_keys, length, num_top, spare + row * SPARE)
        key, rank, _ = rank_all(row_keys, length)
        reported = (tl.arange(0, RANKED) < length) & (rank < num_top)
        at = row * max_top + rank
        tl.store(top_ids + at, id_of(key), mask=reported)
        tl.store(top_logprobs + at, (value_of(key) - best) - log_total, mask=reported)
