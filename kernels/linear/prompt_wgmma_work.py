"""Gluon device functions that every role of Hopper's prompt kernels calls: where tiles lie, which segments a program has, where splits begin.

They carry out `prompt_schedule.py`, whose `segments_of` is their mirror in plain Python. Splits' bounds stay run-time values: with bounds
known at compile time Triton 3.6 aborts on the roles' loops.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803 (compile-time constants of kernels are in capitals, as Triton's own are)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_GROUP: gl.constexpr = gl.constexpr(16)  # column blocks that share each tile of x while it is in the L2


@gluon.jit
def first_step(split, blocks, SPLITS: gl.constexpr):
    """The step of 64 inputs at which a split begins (linear/splits.py). blocks: the input's width in blocks of 128."""
    return split * blocks // SPLITS * 2


@gluon.jit
def tile_place(tile, token_blocks, NB):
    """(column block, token block) of a tile. NB: column blocks, of which neighbours are done together."""
    group = tile // (_GROUP * token_blocks)
    width = gl.minimum(NB - group * _GROUP, _GROUP)
    inside = tile % (_GROUP * token_blocks)
    return group * _GROUP + inside % width, inside // width


@gluon.jit
def segments(T, whole, dealers, NB, BT: gl.constexpr, SPLITS: gl.constexpr):
    """How many segments this program has. T: rows. whole, dealers: see `Deal`. NB: column blocks. BT: tokens of a tile."""
    program = gl.program_id(0)
    count = gl.maximum(whole - program + gl.num_programs(0) - 1, 0) // gl.num_programs(0)
    if program < dealers:
        units = (NB * gl.cdiv(T, BT) - whole) * SPLITS
        count += gl.cdiv((program + 1) * units // dealers, SPLITS) - program * units // dealers // SPLITS
    return count


@gluon.jit
def segment(i, T, whole, dealers, NB, BT: gl.constexpr, SPLITS: gl.constexpr):
    """This program's segment i: (column block, token block, first split, split after the last, tile among the shared, shared splits)."""
    program = gl.program_id(0)
    token_blocks = gl.cdiv(T, BT)
    units = (NB * token_blocks - whole) * SPLITS
    tile = program + i * gl.num_programs(0)
    shared = 0
    first = 0
    last = SPLITS
    if tile >= whole:
        unit, end = program * units // dealers, (program + 1) * units // dealers
        before = gl.maximum(whole - program + gl.num_programs(0) - 1, 0) // gl.num_programs(0)
        shared = unit // SPLITS + i - before
        tile = whole + shared
        first = gl.maximum(unit - shared * SPLITS, 0)
        last = gl.minimum(end - shared * SPLITS, SPLITS)
    column_block, token_block = tile_place(tile, token_blocks, NB)
    return column_block, token_block, first, last, shared, units


@gluon.jit
def owner(unit, units, dealers):
    """The program that a shared split, counted over all shared tiles, is dealt to."""
    return ((unit + 1) * dealers - 1) // units
