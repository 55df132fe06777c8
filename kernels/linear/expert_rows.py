"""What surrounds expert products, row by row: gather + input rotation, SiLU(gate) x up + input rotation, weighted sum. Kernels and launchers.

Bits equal the dense sequence for the same row: `hadamard/rotate.py`, `activation/silu_mul_rotate.py`. Rows are in the order of a `Route`.
"""
# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.activation.silu_mul import gated
from espalier.kernels.hadamard.rotate import SCALE, hadamard_128, scale_input
from espalier.kernels.linear.expert_route import Route

_BLOCKS = 4  # of 128 columns a program
_COLUMNS = 512


@triton.jit
def _columns(BLOCKS: tl.constexpr):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    return block[:, None] * 128 + tl.arange(0, 128)[None, :]


@triton.jit(do_not_specialize=["pairs", "top_k"])
def _gather_rotate_kernel(x, ids, pair_of, suh, out, pairs, top_k, width, x_stride, K, BLOCKS: tl.constexpr):
    row, member = tl.program_id(1), tl.program_id(2)
    pair = tl.load(pair_of + row)
    if pair >= 0:
        columns = _columns(BLOCKS)
        expert = tl.load(ids + pair).to(tl.int64)
        given = tl.load(x + (pair // top_k).to(tl.int64) * x_stride + columns, mask=columns < width, other=0.0)
        scale = tl.load(suh + (expert * tl.num_programs(2) + member) * K + columns, mask=columns < K, other=0.0)
        y = hadamard_128(scale_input(given, scale)) * SCALE
        place = out + (member.to(tl.int64) * pairs + row) * K + columns
        tl.store(place, y.to(tl.float16), mask=columns < K)


def gather_rotate(x: Tensor, ids: Tensor, route: Route, suh: Tensor, out: Tensor) -> None:
    """out[m, r] = the rotated input of sorted row r for member m of its expert; rows without an expert are left as they are.

    x: fp16, bf16 or fp32 [tokens, width], width <= in (zeros beyond). ids: [tokens, top_k]. suh: fp16 [experts, members, in]. out: fp16
    [members, pairs, in] contiguous.
    """
    members, in_features = suh.shape[1:]
    grid = (triton.cdiv(in_features, 128 * _BLOCKS), route.num_pairs, members)
    _gather_rotate_kernel[grid](
        x, ids, route.pair_of, suh, out, route.num_pairs, ids.shape[1], x.shape[1], x.stride(0), in_features,
        BLOCKS=_BLOCKS, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _gate_rotate_kernel(gate_up, ids, pair_of, suh, out, K, BLOCKS: tl.constexpr):
    row = tl.program_id(1)
    pair = tl.load(pair_of + row)
    if pair >= 0:
        columns = _columns(BLOCKS)
        inside = columns < K
        place = gate_up + row.to(tl.int64) * (2 * K) + columns
        y = gated(tl.load(place, mask=inside, other=0.0), tl.load(place + K, mask=inside, other=0.0))
        expert = tl.load(ids + pair).to(tl.int64)
        scale = tl.load(suh + expert * K + columns, mask=inside, other=0.0)
        y = hadamard_128(y * scale.to(tl.float32)) * SCALE
        tl.store(out + row.to(tl.int64) * K + columns, y.to(tl.float16), mask=inside)


def gate_rotate(gate_up: Tensor, ids: Tensor, route: Route, suh: Tensor, out: Tensor) -> None:
    """out[0, r] = the rotation, for its expert's down linear, of SiLU(gate) * up of sorted row r, kept in fp32 between.

    gate_up: fp16, bf16 or fp32 [pairs, 2 in] contiguous, side by side. suh: fp16 [experts, 1, in]. out: fp16 [1, pairs, in] contiguous.
    """
    in_features = suh.shape[2]
    _gate_rotate_kernel[(triton.cdiv(in_features, 128 * _BLOCKS), route.num_pairs)](
        gate_up, ids, route.pair_of, suh, out, in_features, BLOCKS=_BLOCKS, num_warps=1, enable_fp_fusion=False
    )


@triton.jit(do_not_specialize=["top_k"])
def _weighted_sum_kernel(y, row_of, weights, out, top_k, width, N, out_stride, COLUMNS: tl.constexpr):
    token = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros([COLUMNS], tl.float32)
    for slot in range(top_k):
        row = tl.load(row_of + token * top_k + slot)
        if row >= 0:
            part = tl.load(y + row.to(tl.int64) * N + columns, mask=inside, other=0.0).to(tl.float32)
            total += tl.load(weights + token * top_k + slot) * part
    tl.store(out + token.to(tl.int64) * out_stride + columns, total.to(out.dtype.element_ty), mask=inside)


def weighted_sum(y: Tensor, route: Route, weights: Tensor, out: Tensor) -> None:
    """out[t] = ((w[t,0] * y[t,0]) + w[t,1] * y[t,1]) + ... in the order of the slots, single fp32 operations, rounded once.

    y: fp16, bf16 or fp32 [pairs, N] in sorted order. weights: fp32 [tokens, top_k]. out: fp16, bf16 or fp32 [tokens, width <= N].
    Slots without an expert add nothing.
    """
    tokens, top_k = weights.shape
    _weighted_sum_kernel[(triton.cdiv(out.shape[1], _COLUMNS), tokens)](
        y, route.row_of, weights, out, top_k, out.shape[1], y.shape[1], out.stride(0),
        COLUMNS=_COLUMNS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
