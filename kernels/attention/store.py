"""Keys and values of a round's rows into the paged cache: kernel and launcher, and the addressing that the fused form shares."""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_HEADS = 4  # of a program, one a warp


@triton.jit
def head_places(slot, heads, num_heads, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where each head's values of a slot begin in [blocks, num_heads, BLOCK_SIZE, HEAD_DIM]: int64, of heads' shape."""
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    return ((block * num_heads + heads) * BLOCK_SIZE + place) * HEAD_DIM


@triton.jit
def _store_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, num_heads, k_row, k_head, v_row, v_head,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    heads = (tl.program_id(0) * HEADS + tl.arange(0, HEADS))[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    mask = (columns < HEAD_DIM) & (heads < num_heads) & (slot >= 0)
    places = head_places(slot, heads, num_heads, BLOCK_SIZE, HEAD_DIM) + columns
    k = tl.load(k_ptr + row * k_row + heads * k_head + columns, mask=mask, other=0.0)
    tl.store(keys_ptr + places, k.to(keys_ptr.dtype.element_ty), mask=mask)
    v = tl.load(v_ptr + row * v_row + heads * v_head + columns, mask=mask, other=0.0)
    tl.store(values_ptr + places, v.to(values_ptr.dtype.element_ty), mask=mask)


def store_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Writes row r of k and v to slot slots[r] of keys and values, rounded to their dtype; a row whose slot is negative writes nothing.

    k, v [rows, kv_heads, head_dim] fp16, bf16 or fp32, dense heads of any strides; keys, values as `check_cache` wants them. Rows that
    share a slot leave it undefined. Raises ValueError naming what does not fit.
    """
    num_rows, num_heads, head_dim = k.shape
    for name, x in (("k", k), ("v", v)):
        if x.dtype not in _FLOATS or x.shape != k.shape or x.stride(2) != 1:
            raise ValueError(
                f"{name} must be {tuple(k.shape)} of a float dtype with dense heads, not {x.dtype} {tuple(x.shape)}"
            )
    check_cache(keys, values, slots, num_rows, num_heads, head_dim)
    if k.numel() == 0:
        return
    _store_kernel[(triton.cdiv(num_heads, _HEADS), num_rows)](
        k, v, keys, values, slots, num_heads, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        BLOCK_SIZE=keys.shape[2], HEAD_DIM=head_dim, COLUMNS=triton.next_power_of_2(head_dim), HEADS=_HEADS, num_warps=_HEADS, enable_fp_fusion=False,
    )  # fmt: skip


def check_cache(keys: Tensor, values: Tensor, slots: Tensor, num_rows: int, num_heads: int, head_dim: int) -> None:
    """Raises ValueError unless keys and values are contiguous [blocks, num_heads, block_size, head_dim] of one float dtype, and slots
    int64 [num_rows]: block * block_size + place in the block, or negative."""
    for name, cached in (("keys", keys), ("values", values)):
        if cached.dtype not in _FLOATS or cached.dtype != keys.dtype or not cached.is_contiguous():
            raise ValueError(f"{name} must be contiguous, of keys' dtype {keys.dtype}, not {cached.dtype}")
        if cached.dim() != 4 or cached.shape != (*keys.shape[:1], num_heads, *keys.shape[2:3], head_dim):
            raise ValueError(f"{name} must be [blocks, {num_heads}, block_size, {head_dim}], not {tuple(cached.shape)}")
    if slots.dtype != torch.int64 or slots.shape != (num_rows,) or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int64 [{num_rows}], not {slots.dtype} {tuple(slots.shape)}")
