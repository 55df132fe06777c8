"""Token embeddings: kernel and launcher. Bits equal `reference.gather`."""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024
_WARPS = 4


@triton.jit(do_not_specialize=["scale"])
def _gather_kernel(
    token_ids_ptr, table_ptr, out_ptr, scale, vocabulary, width, HAS_SCALE: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    token = tl.load(token_ids_ptr + row).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    known = (token >= 0) & (token < vocabulary)
    x = tl.load(table_ptr + token * width + columns, mask=inside & known, other=float("nan")).to(tl.float32)
    if HAS_SCALE:
        x = x * scale
    tl.store(out_ptr + row * width + columns, x, mask=inside)


def gather(token_ids: Tensor, table: Tensor, out: Tensor, scale: float | None = None) -> None:
    """out[r] = table[token_ids[r]] in fp32, times scale if there is one; NaN for an id outside of the vocabulary.

    token_ids int32 or int64 [rows]; table fp16, bf16 or fp32 [vocabulary, n]; out fp32 [rows, n]; all contiguous. Raises ValueError
    naming what does not fit.
    """
    vocabulary, width = table.shape
    if token_ids.dtype not in (torch.int32, torch.int64) or token_ids.dim() != 1 or not token_ids.is_contiguous():
        raise ValueError(
            f"token_ids must be contiguous int32 or int64 [rows], not {token_ids.dtype} {tuple(token_ids.shape)}"
        )
    if table.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not table.is_contiguous():
        raise ValueError(
            f"table must be contiguous [vocabulary, n] of a float dtype, not {table.dtype} {tuple(table.shape)}"
        )
    if out.dtype != torch.float32 or not out.is_contiguous() or out.shape != (len(token_ids), width):
        raise ValueError(f"out must be contiguous fp32 {(len(token_ids), width)}, not {out.dtype} {tuple(out.shape)}")
    if out.numel() == 0:
        return
    grid = (triton.cdiv(width, _COLUMNS), len(token_ids))
    _gather_kernel[grid](
        token_ids, table, out, 1.0 if scale is None else scale, vocabulary, width,
        HAS_SCALE=scale is not None, COLUMNS=_COLUMNS, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
