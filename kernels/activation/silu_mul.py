"""SiLU(gate) * up as a launch of its own: kernel and launcher. Bits equal `reference.silu_mul_ieee`."""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.device import interpreting
from espalier.kernels.elementary import EXP_OVERFLOW
from espalier.kernels.elementary_device import exp_f32, one_plus_exp_eighth

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_COLUMNS = 1024
_WARPS = 4
_OVERFLOW = tl.constexpr(EXP_OVERFLOW)
_LOWEST = tl.constexpr(-3e38)


@triton.jit
def gated(gate, up):
    """gate / (1 + exp(-gate)) * up, widened to fp32."""
    gate = gate.to(tl.float32)
    return tl.div_rn(gate, exp_f32(-gate) + 1.0) * up.to(tl.float32)


@triton.jit
def short_gated(gate, up, COMPILED: tl.constexpr):
    """`gated`, bit for bit; of fp16 in three quarters of the instructions. COMPILED: not interpreted, where an fma is none.

    The quotient is the gate times an approximate reciprocal, corrected once. For every half that is the IEEE quotient, provided that the
    reciprocal is an ulp off at most, and the nearest fp32 where 1 + exp(-gate) is 2 - 2^-23, on which the GPUs' own division relies too:
    `test_activation.py` tries every half with every such reciprocal, `test_fusions.py` those of a GPU.
    """
    if gate.dtype != tl.float16 or not COMPILED:
        return gated(gate, up)
    gate = gate.to(tl.float32)
    eighth = one_plus_exp_eighth(-gate)
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [eighth], dtype=tl.float32, is_pure=True, pack=1
    )
    # Beyond, the sum is infinite: the quotient is -0, or NaN for -inf.
    inverse = tl.where(gate < -_OVERFLOW, 0.0, inverse)
    quotient = gate * inverse
    # What is left is NaN for +inf, and must not spread. It is taken with the other sign, so that -0 stays -0.
    left = tl.maximum(tl.fma(eighth, quotient, -gate), _LOWEST)
    # Not `-left`: that is 0 - left, and turns 0 into 0.
    return tl.fma(left * -1.0, inverse, quotient) * (up.to(tl.float32) * 0.125)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, stride, COLUMNS: tl.constexpr, COMPILED: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    gate_ptr = gate_up_ptr + row * stride
    y = short_gated(
        tl.load(gate_ptr + columns, mask=inside, other=0.0),
        tl.load(gate_ptr + width + columns, mask=inside, other=0.0),
        COMPILED,
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
        gate_up, out, both // 2, gate_up.stride(0),
        COLUMNS=_COLUMNS, COMPILED=not interpreting(), num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
