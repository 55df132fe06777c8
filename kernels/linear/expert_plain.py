"""Expert products in plain Triton: the chains and the end of `plain.py`, with each block of rows looked up. Kernel and launcher."""
# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.linear.expert_group import ExpertGroup
from espalier.kernels.linear.expert_route import Route
from espalier.kernels.linear.plain import COLUMNS, store_rotated, sum_splits
from espalier.kernels.linear.splits import num_splits

BLOCK_ROWS = (16, 64)  # the least and the most


@triton.jit(do_not_specialize=["pairs"])
def _experts(
    x, words, svh, bias, out, blocks, pairs, MEMBER: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, RATE2: tl.constexpr, CODEBOOK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    # MEMBER: columns of one member, in blocks of 128
    column = tl.program_id(0)
    place = blocks + tl.program_id(1) * 3
    expert = tl.load(place).to(tl.int64)
    if expert >= 0:
        row = tl.load(place + 1) + tl.arange(0, ROWS)
        mask = row < tl.load(place + 2)
        row = row.to(tl.int64)
        inputs = ((column // MEMBER).to(tl.int64) * pairs + row) * K
        w = words + expert * (K * N * RATE2 // 64)
        total = sum_splits(x, inputs, mask, w, column * 8, N // 16, K, SPLITS, ROWS, RATE2, CODEBOOK)
        scales, biases = svh + expert * N, bias + expert * N
        store_rotated(total, scales, biases, out, row * N, mask, column * 128, HAS_BIAS, ROWS)


def scratch_size(group: ExpertGroup, route: Route) -> ScratchSize:
    """Nothing: a program forms all partial sums of its block."""
    return ScratchSize()


def launch(x_rot: Tensor, group: ExpertGroup, route: Route, out: Tensor, scratch: Scratch) -> None:
    """x_rot: fp16 [members, pairs, in] contiguous, sorted. out: fp16, bf16 or fp32 [pairs, out] contiguous, sorted."""
    _experts[(group.out_features // COLUMNS, route.num_blocks)](
        x_rot,
        group.words,
        group.svh,
        group.svh if group.bias is None else group.bias,  # never read without a bias
        out,
        route.blocks,
        route.num_pairs,
        MEMBER=group.member_width // COLUMNS,
        K=group.in_features,
        N=group.out_features,
        SPLITS=num_splits(group.in_features),
        ROWS=route.block_rows,
        RATE2=int(2 * group.rate),
        CODEBOOK=group.codebook.number,
        HAS_BIAS=group.bias is not None,
        num_warps=8 if route.block_rows == 64 else 4,
        num_stages=2,
        enable_fp_fusion=False,
    )
