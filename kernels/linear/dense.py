"""Linears of plain weights side by side: unquantized checkpoints, and heads that share the embedding. Packing, kernel and launcher.

A row's bits depend on its input and the weights alone: every output is summed over the inputs in one order, in tiles whose shape the
weights choose, 16 rows at a time; the matrix instruction is m16n8k16 for 16-bit weights. There the fp32 input is split into two parts of the
weights' type, high and low, each multiplied and summed on its own, so that the input counts with 22 bits (fp16) or 16 (bf16). fp32 weights
are multiplied in fp32. Fast where a call is bound by reading the weights, up to 16 rows; more rows only read them again.
"""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_ROWS = 16  # of a tile: the least that a matrix instruction takes
_WIDTH = 128  # members are padded to multiples of it, as those of a LinearGroup are
# The low part of an fp16 input is kept in fp16's range by a power of two; bf16 has the range of fp32.
_LOW_SCALE = {torch.float16: 2048.0, torch.bfloat16: 1.0, torch.float32: 1.0}
_STAGES = {torch.float16: 5, torch.bfloat16: 5, torch.float32: 3}  # at most 96 KiB of shared memory
_MANY_PROGRAMS = 256  # enough to keep every memory channel of a large card busy


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Linears side by side.

    widths: padded output width of each member, multiples of 128, in order. weight: fp16, bf16 or fp32 [out, in], contiguous; rows of padding
    are zero. bias: fp32 [out] (zeros for padding and members without one), or None. out is the sum of widths.
    """

    in_features: int
    widths: tuple[int, ...]
    weight: Tensor
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return sum(self.widths)

    @property
    def num_members(self) -> int:
        return len(self.widths)


def pack_dense(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> DenseGroup:
    """Packs weights [out, in] of one dtype and input width on their own device; biases: [out] each, or None.

    A single weight whose rows are contiguous and a multiple of 128 is kept as it is, not copied. Raises ValueError when input widths or
    dtypes differ, or a bias is not as long as its weight.
    """
    assert weights and len(weights) == len(biases)
    in_features, dtype = int(weights[0].shape[1]), weights[0].dtype
    if any(weight.shape[1] != in_features for weight in weights):
        raise ValueError(f"linears of one input differ in its width: {[int(weight.shape[1]) for weight in weights]}")
    if dtype not in _FLOATS or any(weight.dtype != dtype for weight in weights):
        raise ValueError(f"linears of one input must share a float dtype: {[weight.dtype for weight in weights]}")
    widths = tuple(-(-int(weight.shape[0]) // _WIDTH) * _WIDTH for weight in weights)
    bias = None
    if any(part is not None for part in biases):
        bias = weights[0].new_zeros(sum(widths), dtype=torch.float32)
        for member, part, place in zip(weights, biases, bias.split(widths), strict=True):
            if part is None:
                continue
            if part.shape != member.shape[:1]:
                raise ValueError(f"a bias has {list(part.shape)} numbers, its weight {member.shape[0]} rows")
            place[: part.shape[0]] = part
    if len(weights) == 1 and widths[0] == weights[0].shape[0] and weights[0].is_contiguous():
        return DenseGroup(in_features, widths, weights[0], bias)
    packed = weights[0].new_zeros(sum(widths), in_features)
    for member, place in zip(weights, packed.split(widths), strict=True):
        place[: member.shape[0]] = member
    return DenseGroup(in_features, widths, packed, bias)


@triton.jit
def _halves(x, DTYPE: tl.constexpr, LOW_SCALE: tl.constexpr):
    # x = high + low / LOW_SCALE, but for what the low part rounds away
    near = x.to(DTYPE).to(tl.float32)
    if DTYPE.is_bf16():
        # Rounded as an integer: the instruction that rounds to one bf16 is slow, the one that packs two is not.
        near = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    return near.to(DTYPE), ((x - near) * LOW_SCALE).to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def _dense_kernel(
    x, weight, bias, out, rows, out_stride, K: tl.constexpr, LOW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    # Programs that read the same weights follow each other.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS
    c, k = tl.arange(0, COLUMNS), tl.arange(0, STEP)
    live = (row < rows)[:, None]
    x_places = x + row.to(tl.int64)[:, None] * K + k[None, :]
    weight_places = weight + column * K + c[None, :] * K + k[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    low_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, STEP):
        if K % STEP == 0:
            inputs = tl.load(x_places + start, mask=live, other=0.0)
            weights = tl.load(weight_places + start)
        else:
            inside = k < K - start
            inputs = tl.load(x_places + start, mask=live & inside[None, :], other=0.0)
            weights = tl.load(weight_places + start, mask=inside[:, None], other=0.0)
        if weights.dtype == tl.float32:
            total = tl.dot(inputs, weights, total, input_precision="ieee")
        else:
            high, low = _halves(inputs, weights.dtype, LOW_SCALE)
            total = tl.dot(high, weights, total)
            low_total = tl.dot(low, weights, low_total)
    y = total + low_total * (1.0 / LOW_SCALE)
    if HAS_BIAS:
        y = y + tl.load(bias + column + c)[None, :]
    places = out + row.to(tl.int64)[:, None] * out_stride + column + c[None, :]
    tl.store(places, y.to(out.dtype.element_ty), mask=live)


def dense_linear(x: Tensor, group: DenseGroup, out: Tensor) -> None:
    """out = x @ weight.T + bias, rounded to out's dtype.

    x: fp32 [rows, in], contiguous; within fp16's range where the weights are fp16, or its row is NaN. out: fp16, bf16 or fp32
    [rows, out_features], rows contiguous or with a stride. Raises ValueError naming what does not fit.
    """
    rows, width = x.shape[0], group.out_features
    if x.dtype != torch.float32 or x.shape != (rows, group.in_features) or not x.is_contiguous():
        raise ValueError(f"x must be contiguous fp32 [rows, {group.in_features}], not {x.dtype} {list(x.shape)}")
    if out.dtype not in _FLOATS or out.shape != (rows, width) or out.stride(1) != 1:
        raise ValueError(
            f"out must be [{rows}, {width}] of a float dtype with dense rows, not {out.dtype} {list(out.shape)}"
        )
    if rows == 0:
        return
    columns, step = _tile(width)
    bias = out if group.bias is None else group.bias  # never read without a bias
    _dense_kernel[(triton.cdiv(rows, _ROWS), width // columns)](
        x, group.weight, bias, out, rows, out.stride(0),
        K=group.in_features, LOW_SCALE=_LOW_SCALE[group.weight.dtype], HAS_BIAS=group.bias is not None,
        ROWS=_ROWS, COLUMNS=columns, STEP=step, num_warps=4, num_stages=_STAGES[group.weight.dtype], enable_fp_fusion=False,
    )  # fmt: skip


def _tile(width: int) -> tuple[int, int]:
    """Columns and inputs of a tile: wide ones read the input less often, narrow ones make more programs of few columns."""
    columns = next((columns for columns in (128, 64) if width // columns >= _MANY_PROGRAMS), 32)
    return columns, 64 if columns == 128 else 128
