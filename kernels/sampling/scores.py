"""First pass over the logits: penalties, biases and bans, and the best score of each small group and each chunk of tokens.

Bit for bit `reference.penalize`, `add_bias` and `ban`. Rows that nothing edits are only read. A NaN among the scores makes the best of its
group inf, which no later pass takes for a number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

import triton
import triton.language as tl

from espalier.kernels.sampling.lines import (
    BANNED_BEFORE,
    EDITED,
    FREQUENCY,
    HEADER,
    NUM_BANNED,
    NUM_BIASES,
    PENALIZED,
    PRESENCE,
    REPETITION,
    number,
    word,
)

_INF = tl.constexpr(float("inf"))
_LIST_STEP = tl.constexpr(256)


@triton.jit(do_not_specialize=["num_pending"])
def score_kernel(
    logits,
    logits_stride,
    lanes,
    positions,
    table,
    width,
    max_biases,
    seen,
    pending,
    num_pending,
    scores,
    scores_stride,
    group_best,
    num_groups,
    chunk_best,
    num_chunks,
    vocab,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program a chunk and row. Writes group_best [rows, num_groups], chunk_best [rows, num_chunks] and, for edited rows, scores."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = tl.load(lanes + row).to(tl.int64)
    if lane < 0:
        return
    line = table + lane * width
    start = chunk * CHUNK
    offsets = start + tl.arange(0, CHUNK)
    inside = offsets < vocab
    x = tl.load(logits + row * logits_stride + offsets, mask=inside, other=-_INF).to(tl.float32)
    if word(line, EDITED):
        if word(line, PENALIZED):
            history = tl.load(seen + lane * vocab + offsets, mask=inside, other=0)
            for i in range(num_pending):
                history += tl.where(offsets == tl.load(pending + row * num_pending + i), 2, 0)
            x = _penalize(x, history, line)
        row_scores = scores + row * scores_stride
        tl.store(row_scores + offsets, x, mask=inside)
        tl.debug_barrier()
        _edit_listed(row_scores, line, max_biases, tl.load(positions + row), start, start + CHUNK)
        tl.debug_barrier()
        x = tl.load(row_scores + offsets, mask=inside, other=-_INF)
    # A maximum passes over NaN.
    x = tl.where(x == x, x, _INF)
    best = tl.max(tl.reshape(x, (CHUNK // GROUP, GROUP)), axis=1)
    groups = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    tl.store(group_best + row * num_groups + groups, best, mask=groups < num_groups)
    tl.store(chunk_best + row * num_chunks + chunk, tl.max(best, axis=0))


@triton.jit
def _penalize(x, seen, line):
    """See `reference.penalize`. seen: as `history.py` keeps it."""
    count = seen >> 1
    factor = number(line, REPETITION)
    repeated = tl.where(x > 0.0, tl.div_rn(x, factor), x * factor)
    x = tl.where(seen != 0, repeated, x)
    x = x - count.to(tl.float32) * number(line, FREQUENCY)
    return x - (count > 0).to(tl.float32) * number(line, PRESENCE)


@triton.jit
def _edit_listed(row_scores, line, max_biases, position, first, end):
    """Biases and then bans of tokens first .. end - 1, in place. Ids of biases are distinct, so each score is written by one thread."""
    num_biases = word(line, NUM_BIASES)
    for start in range(0, num_biases, _LIST_STEP):
        i = start + tl.arange(0, _LIST_STEP)
        listed = i < num_biases
        ids = tl.load(line + HEADER + i, mask=listed, other=-1)
        here = listed & (ids >= first) & (ids < end)
        bias = tl.load(line + HEADER + max_biases + i, mask=here, other=0).to(tl.float32, bitcast=True)
        tl.store(row_scores + ids, tl.load(row_scores + ids, mask=here, other=0.0) + bias, mask=here)
    tl.debug_barrier()
    num_banned = word(line, NUM_BANNED)
    if position >= word(line, BANNED_BEFORE):
        num_banned = 0
    for start in range(0, num_banned, _LIST_STEP):
        i = start + tl.arange(0, _LIST_STEP)
        listed = i < num_banned
        ids = tl.load(line + HEADER + 2 * max_biases + i, mask=listed, other=-1)
        here = listed & (ids >= first) & (ids < end)
        tl.store(row_scores + ids, -_INF + tl.zeros_like(ids).to(tl.float32), mask=here)
