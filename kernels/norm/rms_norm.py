"""RMS norm of rows or heads as a launch of its own: kernel and launcher, and the tree of sums that other kernels norm with.

Bits equal `reference.rms_norm_ieee`: the same tree, then single fp32 operations. A row's program is shaped by its width alone.
"""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803, N806
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.elementary_device import tree_index, tree_sum

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_LONG = 1024  # columns; a longer row is folded: eight warps of four columns a lane


def row_levels(width: int) -> tuple[int, int, int]:
    """(HIGH, LEVELS, ODD_LEVELS) for `row_columns` and `inverse_rms`: how a row's tree of sums is cut.

    HIGH halvings of the whole row, while it is even and long; then LEVELS halvings until one column is left, ODD_LEVELS of them of the
    width's odd factor.
    """
    high = 0
    while width % 2 == 0 and width > _LONG:
        width //= 2
        high += 1
    return high, *tree_levels(width)


def tree_levels(width: int) -> tuple[int, int]:
    """(LEVELS, ODD_LEVELS) for `tree_columns`: halvings of the width until one column is left, and how many of them halve its odd factor."""
    odd = width // (width & -width)
    return (width - 1).bit_length(), (odd - 1).bit_length()


@triton.jit
def tree_columns(WIDTH: tl.constexpr, LEVELS: tl.constexpr, ODD_LEVELS: tl.constexpr):
    """Which column `tree_sum` wants in each slot, and whether it wants one: int32 and bool [2^LEVELS].

    As `tree_index` has it, without its arithmetic for the halvings of an even width: those are halves of the slots too.
    """
    slot = tl.arange(0, 1 << LEVELS)
    ODD: tl.constexpr = WIDTH >> (LEVELS - ODD_LEVELS)
    column, inside = tree_index(0, slot & ((1 << ODD_LEVELS) - 1), ODD, ODD_LEVELS)
    return (slot >> ODD_LEVELS) * ODD + column, inside


@triton.jit
def row_columns(WIDTH: tl.constexpr, HIGH: tl.constexpr, LEVELS: tl.constexpr):
    """Columns of a row as `inverse_rms` wants them, and whether there is one: int32 and bool [2^HIGH, 2^LEVELS], in order."""
    column = tl.arange(0, 1 << LEVELS)[None, :]
    return tl.arange(0, 1 << HIGH)[:, None] * (WIDTH >> HIGH) + column, column < (WIDTH >> HIGH)


@triton.jit
def inverse_rms(x, eps, WIDTH: tl.constexpr, HIGH: tl.constexpr, LEVELS: tl.constexpr, ODD_LEVELS: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of a row laid out by `row_columns`, zeros where it has no column."""
    total = tree_sum(x * x, HIGH)
    # The gather also deals the columns out so that a lane adds its own first, which pays where they are in order already.
    columns, inside = tree_columns(WIDTH >> HIGH, LEVELS, ODD_LEVELS)
    total = tl.where(inside, tl.gather(total, columns, 0), 0.0)
    return _inverse_root(tree_sum(total, LEVELS), eps, WIDTH)


@triton.jit
def head_inverse_rms(squares, eps, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of each head: squares [2^LEVELS, heads], laid out by `tree_columns`, zeros where it has no column -> [heads].

    With fewer levels than the width has: what the halvings before them left.
    """
    return _inverse_root(tree_sum(squares, LEVELS), eps, WIDTH)


@triton.jit
def _inverse_root(total, eps, WIDTH: tl.constexpr):
    root = tl.sqrt_rn(tl.div_rn(total, tl.full(total.shape, WIDTH, tl.float32)) + eps)
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit
def normed(x, scale, weight, UNIT_OFFSET: tl.constexpr):
    """x * scale * weight, or * (1 + weight), in fp32; scale is `inverse_rms`."""
    weight = weight.to(tl.float32)
    if UNIT_OFFSET:
        weight = weight + 1.0
    return x * scale * weight


@triton.jit(do_not_specialize=["eps"])
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, heads, row_stride, head_stride,
    WIDTH: tl.constexpr, UNIT_OFFSET: tl.constexpr, HIGH: tl.constexpr, LEVELS: tl.constexpr, ODD_LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    x_ptr += (program // heads).to(tl.int64) * row_stride + program % heads * head_stride
    out_ptr += program.to(tl.int64) * WIDTH
    places, filled = row_columns(WIDTH, HIGH, LEVELS)
    row = tl.load(x_ptr + places, mask=filled, other=0.0).to(tl.float32)
    scale = inverse_rms(row, eps, WIDTH, HIGH, LEVELS, ODD_LEVELS)
    for first in range(0, WIDTH, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < WIDTH
        x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        y = normed(x, scale, tl.load(weight_ptr + columns, mask=inside, other=0.0), UNIT_OFFSET)
        tl.store(out_ptr + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, *, unit_offset: bool = False) -> None:
    """out = x * (1 / sqrt(mean(x^2) + eps)) * weight over the last dimension, rounded once to out's dtype; * (1 + weight) with `unit_offset`.

    x [rows, n] or [rows, heads, n], dense over n, other strides free; weight [n]; out contiguous, of x's shape. Each fp16, bf16 or
    fp32. Raises ValueError naming what does not fit.
    """
    width = x.shape[-1]
    if x.dtype not in FLOATS or x.dim() not in (2, 3) or x.stride(-1) != 1:
        raise ValueError(
            f"x must be fp16, bf16 or fp32 [rows, n] or [rows, heads, n], dense over n, not {x.dtype} {tuple(x.shape)}"
        )
    if weight.dtype not in FLOATS or weight.shape != (width,):
        raise ValueError(f"weight must be fp16, bf16 or fp32 [{width}], not {weight.dtype} {tuple(weight.shape)}")
    if out.dtype not in FLOATS or not out.is_contiguous() or out.shape != x.shape:
        raise ValueError(
            f"out must be contiguous {tuple(x.shape)} of a float dtype, not {out.dtype} {tuple(out.shape)}"
        )
    if x.numel() == 0:
        return
    heads = x.shape[1] if x.dim() == 3 else 1
    high, levels, odd_levels = row_levels(width)
    _rms_norm_kernel[(x.shape[0] * heads,)](
        x, weight, out, eps, heads, x.stride(0), x.stride(-2),
        WIDTH=width, UNIT_OFFSET=unit_offset, HIGH=high, LEVELS=levels, ODD_LEVELS=odd_levels,
        COLUMNS=1 << levels, num_warps=row_warps(levels), enable_fp_fusion=False,
    )  # fmt: skip


def row_warps(levels: int) -> int:
    """Warps of a program that takes 2^levels columns at a time: four columns a lane, so that loads are wide, up to eight warps."""
    return min(8, max(1, 1 << levels >> 7))
