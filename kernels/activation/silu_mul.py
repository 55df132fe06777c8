"""SiLU(gate) * up as a launch of its own: kernel and launcher. Bits equal `reference.silu_mul_ieee`."""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.elementary_device import exp_f32

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_COLUMNS = 1024
_WARPS = 4


@triton.jit
def gated(gate, up):
    """gate / (1 + exp(-gate)) * up, widened to fp32."""
    gate = gate.to(tl.float32)
    return tl.div_rn(gate, exp_f32(-gate) + 1.0) * up.to(tl.float32)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, stride, COLUMNS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    gate_ptr = gate_up_ptr + row * stride
    y = gated(
        tl.load(gate_ptr + columns, mask=inside, other=0.0),
        tl.load(gate_ptr + width + columns, mask=inside, other=0.0),
    )
    tl.store(out_ptr + row * width + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out = gate / (1 + exp(-gate)) * up in fp32, rounded once to out's dtype.

    gate_up [rows, 2 n], gate and up side by side, dense rows of any stride; out [rows, n], contiguous. Each fp16, bf16 or fp32.
    Raises ValueError naming what does not fit.
    """
    num_rows, both = gate_up.shape
    if gate_up.dtype not in FLOATS or gate_up.stride(1) != 1 or both % 2:
        raise ValueError(
            f"gate_up must be [rows, 2 n] of a float dtype with dense rows, not {gate_up.dtype} {tuple(gate_up.shape)}"
        )
    if out.dtype not in FLOATS or not out.is_contiguous() or out.shape != (num_rows, both // 2):
        raise ValueError(
            f"out must be contiguous {(num_rows, both // 2)} of a float dtype, not {out.dtype} {tuple(out.shape)}"
        )
    if out.numel() == 0:
        return
    grid = (triton.cdiv(both // 2, _COLUMNS), num_rows)
    _silu_mul_kernel[grid](
        gate_up, out, both // 2, gate_up.stride(0), COLUMNS=_COLUMNS, num_warps=_WARPS, enable_fp_fusion=False
    )
