"""What stands between the q, k, v linears and attention, in one launch: head norms, rope, the cache's new keys and values.

Bits equal the unfused sequence: `norm/reference.rms_norm_ieee` of each query and key head to fp32 (where the model has such norms),
`reference.rotate` of that, one rounding to the dtype of q_out or of the cache. Values are rounded only. A head is computed alone.
"""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803, N806
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.attention.store import check_cache, head_places
from espalier.kernels.norm.rms_norm import FLOATS, tree_levels
from espalier.kernels.rope.rotate_heads import HEADS, WARPS, check_angles, turn_heads, turn_sizes


@triton.jit(do_not_specialize=["eps", "num_positions"])
def _norm_rotate_store_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, out_ptr, keys_ptr, values_ptr,
    eps, num_positions, q_row, q_head, k_row, k_head, v_row, v_head,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr, LEVELS: tl.constexpr, ODD_LEVELS: tl.constexpr,
    HAS_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # Programs of a row: first those of its query heads, then of its key heads, then of its value heads.
    Q_PROGRAMS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_PROGRAMS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    program = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    position = tl.load(positions_ptr + row)
    if program < Q_PROGRAMS:
        heads = (program * HEADS + tl.arange(0, HEADS))[None, :]
        turn_heads(
            q_ptr + row * q_row + heads * q_head, out_ptr + (row * Q_HEADS + heads) * HEAD_DIM, heads < Q_HEADS,
            q_weight_ptr, eps, cos_ptr, sin_ptr, position, num_positions,
            HEAD_DIM, HALF, HALF_PADDED, REST_PADDED, LEVELS, ODD_LEVELS, HAS_NORM, UNIT_OFFSET,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + row)
        heads = ((program - Q_PROGRAMS) % KV_PROGRAMS * HEADS + tl.arange(0, HEADS))[None, :]
        mask = (heads < KV_HEADS) & (slot >= 0)
        places = head_places(slot, heads, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        if program < Q_PROGRAMS + KV_PROGRAMS:
            turn_heads(
                k_ptr + row * k_row + heads * k_head, keys_ptr + places, mask,
                k_weight_ptr, eps, cos_ptr, sin_ptr, position, num_positions,
                HEAD_DIM, HALF, HALF_PADDED, REST_PADDED, LEVELS, ODD_LEVELS, HAS_NORM, UNIT_OFFSET,
            )  # fmt: skip
        else:
            columns = tl.arange(0, 1 << LEVELS)[:, None]
            stored = mask & (columns < HEAD_DIM)
            v = tl.load(v_ptr + row * v_row + heads * v_head + columns, mask=stored, other=0.0)
            tl.store(values_ptr + places + columns, v.to(values_ptr.dtype.element_ty), mask=stored)


def norm_rotate_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    q_out: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    unit_offset: bool = False,
) -> None:
    """q_out = rope(norm(q)); keys, values at slots[r] = rope(norm(k[r])), v[r]; a row whose slot is negative stores nothing.

    q [rows, heads, head_dim] and k, v [rows, kv_heads, head_dim] fp16, bf16 or fp32, dense heads of any strides (views of one row of
    the linears' output). norm_weights: of query and key heads, [head_dim] each, of a float dtype (1 + weight with `unit_offset`), or
    None; eps is theirs. cos, sin, positions as in `rotate_heads`; slots, keys, values as in `attention/store.py`; q_out contiguous, of
    q's shape and a float dtype. Raises ValueError naming what does not fit.
    """
    num_rows, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    for name, x, shape in (("q", q, q.shape), ("k", k, (num_rows, kv_heads, head_dim)), ("v", v, k.shape)):
        if x.dtype not in FLOATS or x.shape != shape or x.stride(2) != 1:
            raise ValueError(
                f"{name} must be {tuple(shape)} of a float dtype with dense heads, not {x.dtype} {tuple(x.shape)}"
            )
    if q_out.dtype not in FLOATS or not q_out.is_contiguous() or q_out.shape != q.shape:
        raise ValueError(
            f"q_out must be contiguous {tuple(q.shape)} of a float dtype, not {q_out.dtype} {tuple(q_out.shape)}"
        )
    for weight in norm_weights or ():
        if weight.dtype not in FLOATS or weight.shape != (head_dim,):
            raise ValueError(
                f"norm_weights must be [{head_dim}] of a float dtype, not {weight.dtype} {tuple(weight.shape)}"
            )
    check_angles(cos, sin, positions, num_rows, head_dim)
    check_cache(keys, values, slots, num_rows, kv_heads, head_dim)
    if num_rows == 0:
        return
    q_weight, k_weight = norm_weights or (cos, cos)  # not read without norms
    levels, odd_levels = tree_levels(head_dim)
    programs = triton.cdiv(q_heads, HEADS) + 2 * triton.cdiv(kv_heads, HEADS)
    _norm_rotate_store_kernel[(programs, num_rows)](
        q, k, v, q_weight, k_weight, cos, sin, positions, slots, q_out, keys, values,
        eps, len(cos), q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=keys.shape[2], LEVELS=levels, ODD_LEVELS=odd_levels,
        HAS_NORM=norm_weights is not None, UNIT_OFFSET=unit_offset, HEADS=HEADS, num_warps=WARPS, enable_fp_fusion=False,
        **turn_sizes(cos, head_dim),
    )  # fmt: skip
