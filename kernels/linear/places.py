"""Gluon device functions that tell where in a grouped, split product a program works. Knows neither weights nor sums."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803 (compile-time constants of kernels are in capitals, as Triton's own are)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def row_words(run):
    """int32 words of 64 inputs and all columns of a run, one of `rows_launch.run_constants`."""
    return (run[1] - run[0]) * run[2]


@gluon.jit
def program_place(SPAN: gl.constexpr):
    """(block of columns, split, token tile) of this program. Grid: token tiles, SPAN * splits, blocks / SPAN.

    All splits of SPAN neighbouring blocks run before the next ones, so that their partial sums are read while L2 still holds them.
    """
    inside = gl.program_id(1)
    return gl.program_id(2) * SPAN + inside % SPAN, inside // SPAN, gl.program_id(0)


@gluon.jit
def split_blocks(split, K: gl.constexpr, SPLITS: gl.constexpr):
    """(first block of 128 inputs of a split, how many it has), by the rule of `splits.py`."""
    first = split * (K // 128) // SPLITS
    return first, (split + 1) * (K // 128) // SPLITS - first


@gluon.jit
def member_of(column, ENDS: gl.constexpr):
    """Which member of a group has this column. ENDS: each member's end, in the column's unit."""
    member = 0
    for i in gl.static_range(len(ENDS) - 1):
        member += (column >= ENDS[i]).to(gl.int32)
    return member
