"""Reading a lane's line of parameters and a row's scores, in Triton: device functions and the columns as constants."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

import triton
import triton.language as tl

from espalier.kernels.sampling.rows import Kind, Word

GREEDY, PLAIN, SHORT, LONG = (tl.constexpr(int(kind)) for kind in Kind)
KIND = tl.constexpr(int(Word.KIND))
TEMPERATURE = tl.constexpr(int(Word.TEMPERATURE))
TOP_K = tl.constexpr(int(Word.TOP_K))
SHARE = tl.constexpr(int(Word.SHARE))
MIN_WEIGHT = tl.constexpr(int(Word.MIN_WEIGHT))
EDITED = tl.constexpr(int(Word.EDITED))
PENALIZED = tl.constexpr(int(Word.PENALIZED))
REPETITION = tl.constexpr(int(Word.REPETITION))
PRESENCE = tl.constexpr(int(Word.PRESENCE))
FREQUENCY = tl.constexpr(int(Word.FREQUENCY))
NUM_BIASES = tl.constexpr(int(Word.NUM_BIASES))
NUM_BANNED = tl.constexpr(int(Word.NUM_BANNED))
BANNED_BEFORE = tl.constexpr(int(Word.BANNED_BEFORE))
NUM_TOP = tl.constexpr(int(Word.NUM_TOP))
SEED_LOW = tl.constexpr(int(Word.SEED_LOW))
SEED_HIGH = tl.constexpr(int(Word.SEED_HIGH))
HEADER = tl.constexpr(int(Word.HEADER))

_INF = tl.constexpr(float("inf"))


@triton.jit
def word(line, COLUMN: tl.constexpr):
    """An integer of the line."""
    return tl.load(line + COLUMN)


@triton.jit
def number(line, COLUMN: tl.constexpr):
    """An fp32 number of the line."""
    return tl.load(line + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def seed_of(line):
    """The lane's seed, uint64."""
    low = tl.load(line + SEED_LOW).to(tl.uint32).to(tl.uint64)
    return (tl.load(line + SEED_HIGH).to(tl.uint32).to(tl.uint64) << 32) | low


@triton.jit
def load_scores(logits, scores, edited, offsets, mask):
    """Scores of a row at these offsets, fp32, -inf where masked: its edited scores if it has any, its logits otherwise."""
    if edited:  # noqa: SIM108 (both branches of a conditional expression would be long)
        x = tl.load(scores + offsets, mask=mask, other=-_INF)
    else:
        x = tl.load(logits + offsets, mask=mask, other=-_INF).to(tl.float32)
    return x


@triton.jit
def is_finite(x):
    """Whether an fp32 number is neither infinite nor NaN."""
    return tl.abs(x) < _INF


@triton.jit
def row_best(chunk_best, num_chunks, CHUNKS: tl.constexpr):
    """The best score of a row, from those of its chunks."""
    i = tl.arange(0, CHUNKS)
    return tl.max(tl.load(chunk_best + i, mask=i < num_chunks, other=-_INF), axis=0)
