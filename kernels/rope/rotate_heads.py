"""Rotary position embedding as a launch of its own: kernel and launcher, and the device function that the fused form shares.

Bits equal `reference.rotate`: products, then a sum or a difference, never an fma.
"""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.norm.rms_norm import FLOATS, head_inverse_rms, normed, tree_columns

HEADS = 8  # of a program
WARPS = 4


@triton.jit
def turn_heads(
    x_ptr, out_ptr, mask, weight_ptr, eps, cos_ptr, sin_ptr, position, num_positions,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
    LEVELS: tl.constexpr, ODD_LEVELS: tl.constexpr, HAS_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Heads of one row, normed if asked, turned by the row's angles and stored, rounded to out's dtype.

    x_ptr, out_ptr, mask [1, heads]: where each head begins, and which are wanted. HALF: half of the dimensions that turn, the first ones.
    A position outside of the table gives NaN: a launch cannot refuse it, and must not read beyond the table.
    """
    # Every head has its own copy of angles and weights, in its values' layout, so that threads exchange nothing.
    columns = tl.broadcast_to(tl.arange(0, HALF_PADDED)[:, None], [HALF_PADDED, mask.shape[1]])
    turns = mask & (columns < HALF)
    first = tl.load(x_ptr + columns, mask=turns, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + columns + HALF, mask=turns, other=0.0).to(tl.float32)
    scale = tl.full([1, 1], 1.0, tl.float32)
    if HAS_NORM:
        if HALF == HALF_PADDED and 2 * HALF == HEAD_DIM:
            # The first halving of the tree adds one half to the other.
            scale = head_inverse_rms(first * first + second * second, eps, HEAD_DIM, LEVELS - 1)[None, :]
        else:
            tree, inside = tree_columns(HEAD_DIM, LEVELS, ODD_LEVELS)
            x = tl.load(x_ptr + tree[:, None], mask=mask & inside[:, None], other=0.0).to(tl.float32)
            scale = head_inverse_rms(x * x, eps, HEAD_DIM, LEVELS)[None, :]
        first = _normed(first, columns, turns, weight_ptr, scale, UNIT_OFFSET)
        second = _normed(second, columns + HALF, turns, weight_ptr, scale, UNIT_OFFSET)
    known = turns & (position >= 0) & (position < num_positions)
    places = position.to(tl.int64) * HALF + columns
    cos = tl.load(cos_ptr + places, mask=known, other=float("nan"))
    sin = tl.load(sin_ptr + places, mask=known, other=float("nan"))
    tl.store(out_ptr + columns, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=turns)
    tl.store(out_ptr + columns + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=turns)
    if REST_PADDED > 0:
        columns = tl.broadcast_to(tl.arange(0, REST_PADDED)[:, None], [REST_PADDED, mask.shape[1]]) + 2 * HALF
        stays = mask & (columns < HEAD_DIM)
        rest = tl.load(x_ptr + columns, mask=stays, other=0.0).to(tl.float32)
        if HAS_NORM:
            rest = _normed(rest, columns, stays, weight_ptr, scale, UNIT_OFFSET)
        tl.store(out_ptr + columns, rest.to(out_ptr.dtype.element_ty), mask=stays)


@triton.jit
def _normed(x, columns, mask, weight_ptr, scale, UNIT_OFFSET: tl.constexpr):
    return normed(x, scale, tl.load(weight_ptr + columns, mask=mask, other=0.0), UNIT_OFFSET)


@triton.jit(do_not_specialize=["num_positions"])
def _rotate_heads_kernel(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, out_ptr, num_heads, row_stride, head_stride, num_positions,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    heads = (tl.program_id(0) * HEADS + tl.arange(0, HEADS))[None, :]
    turn_heads(
        x_ptr + row * row_stride + heads * head_stride, out_ptr + (row * num_heads + heads) * HEAD_DIM, heads < num_heads,
        x_ptr, 0.0, cos_ptr, sin_ptr, tl.load(positions_ptr + row), num_positions,
        HEAD_DIM, HALF, HALF_PADDED, REST_PADDED, 0, 0, False, False,
    )  # fmt: skip


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, out: Tensor) -> None:
    """out = x turned by the angles of each row's position, rounded once to out's dtype.

    x [rows, heads, head_dim] fp16, bf16 or fp32, dense heads of any strides; cos, sin fp32 [positions, rotary_dim / 2]
    (`reference.rope_table`), rotary_dim <= head_dim; positions int32 or int64 [rows]; out contiguous, of x's shape and a float dtype.
    Raises ValueError naming what does not fit.
    """
    num_rows, num_heads, head_dim = x.shape
    if x.dtype not in FLOATS or x.stride(2) != 1:
        raise ValueError(
            f"x must be [rows, heads, head_dim] of a float dtype with dense heads, not {x.dtype} {tuple(x.shape)}"
        )
    if out.dtype not in FLOATS or not out.is_contiguous() or out.shape != x.shape:
        raise ValueError(
            f"out must be contiguous {tuple(x.shape)} of a float dtype, not {out.dtype} {tuple(out.shape)}"
        )
    check_angles(cos, sin, positions, num_rows, head_dim)
    if x.numel() == 0:
        return
    _rotate_heads_kernel[(triton.cdiv(num_heads, HEADS), num_rows)](
        x, cos, sin, positions, out, num_heads, x.stride(0), x.stride(1), len(cos),
        HEAD_DIM=head_dim, HEADS=HEADS, num_warps=WARPS, enable_fp_fusion=False, **turn_sizes(cos, head_dim),
    )  # fmt: skip


def turn_sizes(cos: Tensor, head_dim: int) -> dict[str, int]:
    """HALF, HALF_PADDED and REST_PADDED for `turn_heads`."""
    half = cos.shape[1]
    rest = head_dim - 2 * half
    return {
        "HALF": half,
        "HALF_PADDED": triton.next_power_of_2(half),
        "REST_PADDED": triton.next_power_of_2(rest) if rest else 0,
    }


def check_angles(cos: Tensor, sin: Tensor, positions: Tensor, num_rows: int, head_dim: int) -> None:
    """Raises ValueError unless these are the tables and positions that `rotate_heads` describes."""
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype != torch.float32 or not table.is_contiguous() or table.shape != cos.shape:
            raise ValueError(
                f"{name} must be contiguous fp32 {tuple(cos.shape)}, not {table.dtype} {tuple(table.shape)}"
            )
    if cos.dim() != 2 or not 0 < 2 * cos.shape[1] <= head_dim:
        raise ValueError(f"cos must be [positions, at most {head_dim // 2}], not {tuple(cos.shape)}")
    if (
        positions.dtype not in (torch.int32, torch.int64)
        or positions.shape != (num_rows,)
        or not positions.is_contiguous()
    ):
        raise ValueError(
            f"positions must be contiguous int32 or int64 [{num_rows}], not {positions.dtype} {tuple(positions.shape)}"
        )
