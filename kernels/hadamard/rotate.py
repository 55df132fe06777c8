"""The rotations around an EXL3 product as launches of their own: kernels and launchers. Knows no trellis and no product.

Bits equal `reference.rotate_input` and `linear/reference.rotate_back`: single fp32 operations in the reference's order. A block of 128
lies in 16 lanes of 8 values: three stages of the butterfly in registers, four by shuffles, nothing through shared memory. Every block is
computed alone, so tile sizes show in no bit.
"""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803, N806
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.dependent_launch import early_launch, wait_and_release

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
SCALE = tl.constexpr(0.088388347648)  # as in reference.py
# (rows, blocks of 128) of a program of four warps: what is fastest for a few rows, and for many.
_FEW_ROWS, _MANY_ROWS, _MANY = (1, 8), (2, 8), 65
WARPS = 4


def launch_tile(num_rows: int) -> tuple[int, int]:
    """Rows and blocks of 128 of a program that takes every block alone."""
    return _FEW_ROWS if num_rows < _MANY else _MANY_ROWS


@triton.jit
def _neighbours_in_lane(x, HALF: tl.constexpr):
    """One stage for an index bit whose two values lie in one lane: x fp32 [n], partners HALF apart."""
    N: tl.constexpr = x.shape[0]
    low, high = tl.split(tl.permute(tl.reshape(x, [N // (2 * HALF), 2, HALF]), [0, 2, 1]))
    return tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 2, 1]), [N])


@triton.jit
def hadamard_128(x):
    """fp32 [blocks, 128] -> the unscaled transform of each block, in the reference's order of sums."""
    BLOCKS: tl.constexpr = x.shape[0]
    flat = tl.reshape(x, [BLOCKS * 128])
    flat = _neighbours_in_lane(flat, 1)
    flat = _neighbours_in_lane(flat, 2)
    flat = _neighbours_in_lane(flat, 4)
    y = tl.reshape(flat, [BLOCKS, 16, 8])
    lane = tl.arange(0, 16)[None, :, None]
    for stage in tl.static_range(4):
        partner = tl.gather(y, tl.broadcast_to(lane ^ (1 << stage), [BLOCKS, 16, 8]), 1)
        # Plus for the lower of two partners, minus for the upper: a product by one is exact, so the fma rounds as the sum does.
        sign = tl.where((lane & (1 << stage)) == 0, 1.0, -1.0)
        y = tl.fma(y, tl.broadcast_to(sign, [BLOCKS, 16, 8]), partner)
    return tl.reshape(y, [BLOCKS, 128])


@triton.jit
def scale_input(x, suh):
    """x * suh as fp32: rounded to fp16 when x is fp16, kept in fp32 else."""
    if x.dtype == tl.float16:
        return (x * suh).to(tl.float32)
    return x.to(tl.float32) * suh.to(tl.float32)


@triton.jit
def block_tile(block_row, block_column, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Rows [ROWS * BLOCKS, 1] and columns [ROWS * BLOCKS, 128] of a program's blocks."""
    block = tl.arange(0, ROWS * BLOCKS)
    rows = block_row * ROWS + block // BLOCKS
    columns = (block_column * BLOCKS + block % BLOCKS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    return rows[:, None], columns


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_input_kernel(
    x_ptr, suh_ptr, out_ptr, num_rows, width, x_stride, in_features,
    MEMBERS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_and_release(EARLY)
    # Programs of one tile of x follow each other, so that members after the first find it in the L2.
    member = tl.program_id(0) % MEMBERS
    rows, columns = block_tile(tl.program_id(1), tl.program_id(0) // MEMBERS, ROWS, BLOCKS)
    x = tl.load(x_ptr + rows.to(tl.int64) * x_stride + columns, mask=(rows < num_rows) & (columns < width), other=0.0)
    inside = columns < in_features
    suh = tl.load(suh_ptr + member * in_features + columns, mask=inside, other=0.0)
    y = hadamard_128(scale_input(x, suh)) * SCALE
    out_rows = (member * num_rows + rows).to(tl.int64)
    tl.store(out_ptr + out_rows * in_features + columns, y.to(tl.float16), mask=inside & (rows < num_rows))


def rotate_input(x: Tensor, suh: Tensor, out: Tensor) -> None:
    """out[m] = fp16(H(x * suh[m])) for every member m, H the 128-wide transform over 1/sqrt(128).

    x fp16, bf16 or fp32 [rows, width], rows of any stride, width <= in (zeros beyond). suh fp16 [members, in]. out fp16
    [members, rows, in]. suh and out contiguous, in a multiple of 128. Raises ValueError naming what does not fit.
    """
    members, in_features = suh.shape
    num_rows, width = x.shape
    if x.dtype not in _FLOATS or x.stride(1) != 1 or width > in_features:
        raise ValueError(
            f"x must be fp16, bf16 or fp32 [rows, up to {in_features}] with dense rows, not {x.dtype} {tuple(x.shape)}"
        )
    if suh.dtype != torch.float16 or not suh.is_contiguous() or in_features % 128:
        raise ValueError(
            f"suh must be contiguous fp16 [members, a multiple of 128], not {suh.dtype} {tuple(suh.shape)}"
        )
    if out.dtype != torch.float16 or not out.is_contiguous() or out.shape != (members, num_rows, in_features):
        raise ValueError(
            f"out must be contiguous fp16 {(members, num_rows, in_features)}, not {out.dtype} {tuple(out.shape)}"
        )
    if num_rows == 0:
        return
    rows, blocks = launch_tile(num_rows)
    grid = (triton.cdiv(in_features, 128 * blocks) * members, triton.cdiv(num_rows, rows))
    _rotate_input_kernel[grid](
        x, suh, out, num_rows, width, x.stride(0), in_features,
        MEMBERS=members, ROWS=rows, BLOCKS=blocks, num_warps=WARPS, enable_fp_fusion=False, **early_launch(x.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_back_kernel(
    sums_ptr, svh_ptr, bias_ptr, out_ptr, num_rows, out_features,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    rows, columns = block_tile(tl.program_id(1), tl.program_id(0), ROWS, BLOCKS)
    inside = columns < out_features
    mask = inside & (rows < num_rows)
    places = rows.to(tl.int64) * out_features + columns
    y = hadamard_128(tl.load(sums_ptr + places, mask=mask, other=0.0)) * SCALE
    y = y * tl.load(svh_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y = y + tl.load(bias_ptr + columns, mask=inside, other=0.0)
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=mask)


def rotate_back(sums: Tensor, svh: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = H(sums) * svh + bias in fp32, rounded once to out's dtype.

    sums fp32 [rows, out]; svh fp16 [out]; bias fp32 [out] or None; out fp16, bf16 or fp32 [rows, out]; all contiguous, out a multiple
    of 128. Raises ValueError naming what does not fit.
    """
    num_rows, out_features = sums.shape
    if sums.dtype != torch.float32 or not sums.is_contiguous() or out_features % 128:
        raise ValueError(
            f"sums must be contiguous fp32 [rows, a multiple of 128], not {sums.dtype} {tuple(sums.shape)}"
        )
    if svh.dtype != torch.float16 or svh.shape != (out_features,):
        raise ValueError(f"svh must be fp16 [{out_features}], not {svh.dtype} {tuple(svh.shape)}")
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (out_features,)):
        raise ValueError(f"bias must be fp32 [{out_features}], not {bias.dtype} {tuple(bias.shape)}")
    if out.dtype not in _FLOATS or not out.is_contiguous() or out.shape != sums.shape:
        raise ValueError(
            f"out must be contiguous {tuple(sums.shape)} of a float dtype, not {out.dtype} {tuple(out.shape)}"
        )
    if num_rows == 0:
        return
    rows, blocks = launch_tile(num_rows)
    grid = (triton.cdiv(out_features, 128 * blocks), triton.cdiv(num_rows, rows))
    _rotate_back_kernel[grid](
        sums, svh, sums if bias is None else bias, out, num_rows, out_features,
        HAS_BIAS=bias is not None, ROWS=rows, BLOCKS=blocks, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
