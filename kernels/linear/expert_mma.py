"""Expert products on `mma.sync`: the body of `rows_mma.py`, with each block of rows looked up. Kernel and launcher, for any GPU from sm_80 on.

A program forms one split of 64 columns for one block of an expert's rows. Blocks are launched in slabs, so that partial sums need bounded memory.
"""
# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.linear.epilogue import finish
from espalier.kernels.linear.expert_group import ExpertGroup
from espalier.kernels.linear.expert_route import Route
from espalier.kernels.linear.places import split_blocks
from espalier.kernels.linear.rows_launch import BLOCK, RowsShape, mma_shape
from espalier.kernels.linear.rows_mma import split_sum
from espalier.kernels.linear.splits import num_splits

BLOCK_ROWS = (8, 64)  # the least and the most
# Partial sums of one slab, fp32 elements: 64 MiB.
_SLAB_SUMS = 1 << 24


@gluon.jit(do_not_specialize=["pairs", "first_block"])
def _experts(
    x, words, svh, bias, out, partials, counters, blocks, pairs, first_block,
    MEMBER: gl.constexpr, K: gl.constexpr, N: gl.constexpr, RUNS: gl.constexpr, W: gl.constexpr,
    SPLITS: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    # grid: blocks of 16 W columns, splits, row blocks of the slab. MEMBER: columns of one member
    block, split, slab_block = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    place = blocks + (first_block + slab_block) * 3
    expert = gl.load(place).to(gl.int64)
    if expert >= 0:
        column = block * (16 * W)
        first_row = gl.load(place + 1)
        rows = gl.load(place + 2) - first_row
        first, length = split_blocks(split, K, SPLITS)
        acc = split_sum(
            x + (column // MEMBER).to(gl.int64) * pairs * K + first_row.to(gl.int64) * K,
            words + expert * (K * N * RUNS[0][2] // 64),
            column, first, length, rows, K, RUNS, 0, W, BT, STAGES, WHOLE, 0,
        )  # fmt: skip
        # `finish` counts rows from its block's first one: move `out` so that they meet.
        above = slab_block * BT
        biases = bias
        if bias is not None:
            biases = bias + expert * N
        finish(
            acc, svh + expert * N, biases, out + (first_row - above).to(gl.int64) * N, partials, counters, above + rows, N,
            block, split, slab_block, N, BT, SPLITS, GROUPS,
        )  # fmt: skip


def _shape(group: ExpertGroup, route: Route) -> RowsShape:
    return mma_shape(group.in_features, route.block_rows)


def _slab(group: ExpertGroup, route: Route) -> int:
    sums = route.block_rows * group.out_features * num_splits(group.in_features)
    return max(1, min(route.num_blocks, _SLAB_SUMS // sums))


def scratch_size(group: ExpertGroup, route: Route) -> ScratchSize:
    """Of one slab."""
    blocks = _slab(group, route)
    sums = blocks * route.block_rows * group.out_features * num_splits(group.in_features)
    return ScratchSize(counters=blocks * (group.out_features // BLOCK), partials=sums)


def launch(x_rot: Tensor, group: ExpertGroup, route: Route, out: Tensor, scratch: Scratch) -> None:
    """x_rot: fp16 [members, pairs, in] contiguous, sorted. out: fp16, bf16 or fp32 [pairs, out] contiguous, sorted."""
    scratch.require(scratch_size(group, route))
    shape, slab, splits = _shape(group, route), _slab(group, route), num_splits(group.in_features)
    for first_block in range(0, route.num_blocks, slab):
        count = min(slab, route.num_blocks - first_block)
        _experts[(group.out_features // shape.columns, splits, count)](
            x_rot,
            group.words,
            group.svh,
            group.bias,
            out,
            scratch.partials,
            scratch.counters,
            route.blocks,
            route.num_pairs,
            first_block,
            MEMBER=group.member_width,
            K=group.in_features,
            N=group.out_features,
            RUNS=((0, group.out_features, int(2 * group.rate), group.codebook.number),),
            W=shape.warps,
            SPLITS=splits,
            BT=shape.token_tile,
            STAGES=shape.stages,
            WHOLE=shape.whole,
            GROUPS=shape.finish_tokens // 8,
            num_warps=shape.warps,
            enable_fp_fusion=False,
        )
