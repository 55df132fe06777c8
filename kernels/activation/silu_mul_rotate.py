"""SiLU(gate) * up and the next linear's input rotation in one launch: kernel and launcher.

Bits equal the unfused sequence: `reference.silu_mul_ieee` to fp32, then `hadamard/reference.rotate_input` of that. Every block of 128
columns is computed alone.
"""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.activation.silu_mul import FLOATS, short_gated
from espalier.kernels.dependent_launch import early_launch, wait_and_release
from espalier.kernels.device import interpreting
from espalier.kernels.hadamard.rotate import SCALE, hadamard_128

# (rows, blocks of 128) of a program of four warps: several rows share their loads of suh, a few rows are spread out instead.
_FEW, _MANY = (1, 8), (4, 8)
_FEW_ROWS = 64
_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])
def _silu_mul_rotate_kernel(
    gate_up_ptr, suh_ptr, out_ptr, num_rows, width, stride, in_features, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    COMPILED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_and_release(EARLY)
    columns = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)[:, None]) * 128 + tl.arange(0, 128)[None, :]
    inside = columns < in_features
    first = tl.program_id(1) * ROWS
    # All loads stand before all stores: they do not pass them by themselves.
    suh = tl.load(suh_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    loaded = ()
    for i in tl.static_range(ROWS):
        given = (first + i < num_rows) & (columns < width)
        gate_ptr = gate_up_ptr + (first + i).to(tl.int64) * stride + columns
        pair = tl.load(gate_ptr, mask=given, other=0.0), tl.load(gate_ptr + width, mask=given, other=0.0)
        loaded += (pair,)  # type: ignore[assignment]
    for i in tl.static_range(ROWS):
        y = hadamard_128(short_gated(loaded[i][0], loaded[i][1], COMPILED) * suh) * SCALE
        row_ptr = out_ptr + (first + i).to(tl.int64) * in_features
        tl.store(row_ptr + columns, y.to(tl.float16), mask=inside & (first + i < num_rows))


def silu_mul_rotate(gate_up: Tensor, suh: Tensor, out: Tensor) -> None:
    """out[0] = the rotation, for the linear of suh[0], of SiLU(gate) * up kept in fp32.

    gate_up [rows, 2 n] fp16, bf16 or fp32, gate and up side by side, dense rows of any stride. suh fp16 [1, in], in a multiple of 128 not
    below n (zeros beyond n); out fp16 [1, rows, in]; both contiguous. Raises ValueError naming what does not fit.
    """
    num_rows, both = gate_up.shape
    if gate_up.dtype not in FLOATS or gate_up.stride(1) != 1 or both % 2:
        raise ValueError(
            f"gate_up must be [rows, 2 n] of a float dtype with dense rows, not {gate_up.dtype} {tuple(gate_up.shape)}"
        )
    width, in_features = both // 2, suh.shape[1]
    if (
        suh.dtype != torch.float16
        or not suh.is_contiguous()
        or len(suh) != 1
        or in_features % 128
        or in_features < width
    ):
        raise ValueError(
            f"suh must be contiguous fp16 [1, a multiple of 128 from {width} on], not {suh.dtype} {tuple(suh.shape)}"
        )
    if out.dtype != torch.float16 or not out.is_contiguous() or out.shape != (1, num_rows, in_features):
        raise ValueError(
            f"out must be contiguous fp16 {(1, num_rows, in_features)}, not {out.dtype} {tuple(out.shape)}"
        )
    if num_rows == 0:
        return
    rows, blocks = _FEW if num_rows <= _FEW_ROWS else _MANY
    grid = (triton.cdiv(in_features, 128 * blocks), triton.cdiv(num_rows, rows))
    _silu_mul_rotate_kernel[grid](
        gate_up, suh, out, num_rows, width, gate_up.stride(0), in_features,
        ROWS=rows, BLOCKS=blocks, COMPILED=not interpreting(), num_warps=_WARPS, enable_fp_fusion=False, **early_launch(gate_up.device),
    )  # fmt: skip
