"""Sums of a split product that a prompt kernel leaves apart: a thread's accumulators in scratch, and their total. Gluon device functions.

A thread's accumulators lie in groups of four neighbours, so that each thread writes and reads its own 16 bytes and no value leaves it; whoever
adds a tile's sums has them in the same places. Which program left which sum: `prompt_schedule.py`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from espalier.kernels.linear.prompt_wgmma_work import owner


@gluon.constexpr_function
def private_layout(groups):
    """Of [groups, 128, 4]: thread t has [:, t, :]."""
    return gl.BlockedLayout([groups, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def accumulator_layout(width):
    """Of [64, width], a warpgroup's."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16])


@gluon.jit
def to_private(acc):
    """Accumulators [64, width] -> [width / 8, 128, 4]."""
    WIDTH: gl.constexpr = acc.shape[1]
    v = acc.reshape([4, 2, 8, WIDTH // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([WIDTH // 8, 128, 4])
    return gl.convert_layout(v, private_layout(WIDTH // 8))


@gluon.jit
def from_private(v):
    """The inverse."""
    WIDTH: gl.constexpr = v.shape[0] * 8
    acc = v.reshape([WIDTH // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([64, WIDTH])
    return gl.convert_layout(acc, accumulator_layout(WIDTH))


@gluon.jit
def private_offsets(GROUPS: gl.constexpr):
    """Where [GROUPS, 128, 4] lies in memory."""
    P: gl.constexpr = private_layout(GROUPS)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, P)))
    thread = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, P)))
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, P)))
    return (group * 512)[:, None, None] + (thread * 4)[None, :, None] + i[None, None, :]


@gluon.jit
def sum_apart(base, unit, units, dealers, SPLITS: gl.constexpr, SLOT: gl.constexpr, WIDTH: gl.constexpr):
    """The total of a shared tile whose first split is `unit`: left to right, whoever left the sums; past the L1.

    base: this warpgroup's place in program 0's first slot. SLOT: elements of a slot; a program has one a split.
    """
    place = base + private_offsets(WIDTH // 8)
    first = owner(unit, units, dealers)
    total = gl.load(place + first.to(gl.int64) * (SPLITS * SLOT), cache_modifier=".cg")
    for split in range((first + 1) * units // dealers - unit, SPLITS):
        at = owner(unit + split, units, dealers) * SPLITS + split
        total += gl.load(place + at.to(gl.int64) * SLOT, cache_modifier=".cg")
    return from_private(total)
