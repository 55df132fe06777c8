"""Residual add, RMS norm and the next linears' input rotations in one launch: kernel and launcher.

Bits equal the unfused sequence: residual + y in fp32, `reference.rms_norm_ieee` to fp32, `hadamard/reference.rotate_input` of that for
every linear that reads it. A few rows are spread over several programs a row; each of them sums the row anew, by the same tree,
which is why the new residual must not overwrite the old one.
"""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.dependent_launch import early_launch, wait_and_release
from espalier.kernels.hadamard.rotate import SCALE, hadamard_128
from espalier.kernels.norm.rms_norm import FLOATS, inverse_rms, normed, row_columns, row_levels

_WARPS = 8
_FEW_ROWS, _FEW_BLOCKS, _BLOCKS = 16, 8, 16  # blocks of 128 columns of a tile: of few rows, and of more
_SPREAD_ROWS = 256  # up to so many rows, a program does one tile of a row; beyond, all of them


@triton.jit
def _sum(residual_ptr, y_ptr, columns, mask, HAS_Y: tl.constexpr):
    x = tl.load(residual_ptr + columns, mask=mask, other=0.0)
    if HAS_Y:
        x = x + tl.load(y_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _weights(weight_ptr, suh_ptr, columns, width, in_features, MEMBERS: tl.constexpr):
    """Norm weights of a tile, and suh of every member."""
    suhs = ()
    for member in tl.static_range(MEMBERS):
        suh = tl.load(suh_ptr + member * in_features + columns, mask=columns < in_features, other=0.0)
        suhs += (suh,)  # type: ignore[assignment]
    return tl.load(weight_ptr + columns, mask=columns < width, other=0.0), suhs


@triton.jit(do_not_specialize=["num_rows", "eps"])
def _add_norm_rotate_kernel(
    residual_ptr, y_ptr, weight_ptr, suh_ptr, sum_ptr, normed_ptr, rotated_ptr,
    eps, num_rows, y_stride, in_features,
    WIDTH: tl.constexpr, MEMBERS: tl.constexpr, HAS_Y: tl.constexpr, HAS_NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    HIGH: tl.constexpr, LEVELS: tl.constexpr, ODD_LEVELS: tl.constexpr, TILES: tl.constexpr, BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_and_release(EARLY)
    row = tl.program_id(1).to(tl.int64)
    residual_ptr += row * WIDTH
    y_ptr += row * y_stride
    places, filled = row_columns(WIDTH, HIGH, LEVELS)
    whole = _sum(residual_ptr, y_ptr, places, filled, HAS_Y)

    # A tile's loads stand before the stores of the one before, and the first tile's before the sum: loads pass neither by themselves.
    columns = (tl.program_id(0) * (TILES * BLOCKS) + tl.arange(0, BLOCKS)[:, None]) * 128 + tl.arange(0, 128)[None, :]
    x = _sum(residual_ptr, y_ptr, columns, columns < WIDTH, HAS_Y)
    if TILES == 1:
        weight, suhs = _weights(weight_ptr, suh_ptr, columns, WIDTH, in_features, MEMBERS)
    scale = inverse_rms(whole, eps, WIDTH, HIGH, LEVELS, ODD_LEVELS)
    for tile in range(TILES):
        if TILES > 1:
            weight, suhs = _weights(weight_ptr, suh_ptr, columns, WIDTH, in_features, MEMBERS)
        here, total, y = columns, x, normed(x, scale, weight, UNIT_OFFSET)
        columns += BLOCKS * 128
        if TILES > 1:
            x = _sum(residual_ptr, y_ptr, columns, (columns < WIDTH) & (tile + 1 < TILES), HAS_Y)
        inside = here < WIDTH
        if HAS_Y:
            tl.store(sum_ptr + row * WIDTH + here, total, mask=inside)
        if HAS_NORMED:
            tl.store(normed_ptr + row * WIDTH + here, y.to(normed_ptr.dtype.element_ty), mask=inside)
        for member in tl.static_range(MEMBERS):
            rotated = hadamard_128(y * suhs[member].to(tl.float32)) * SCALE
            out_ptr = rotated_ptr + (member * num_rows + row) * in_features
            tl.store(out_ptr + here, rotated.to(tl.float16), mask=here < in_features)


def add_norm_rotate(
    residual: Tensor,
    y: Tensor | None,
    weight: Tensor,
    eps: float,
    suh: Tensor | None,
    *,
    total: Tensor | None = None,
    normed: Tensor | None = None,
    rotated: Tensor | None = None,
    unit_offset: bool = False,
) -> None:
    """total = residual + y; normed = RMS norm of that, in fp32; rotated[m] = normed rotated for the linear of suh[m].

    residual fp32 [rows, n]; y fp32, fp16 or bf16 [rows, n], rows of any stride, or None where there is nothing to add yet; weight [n] of a
    float dtype (1 + weight with `unit_offset`); suh fp16 [members, in], in a multiple of 128 not below n, or None. Out: total fp32
    [rows, n], memory of its own, wanted with y; normed [rows, n] of a float dtype, or None; rotated fp16 [members, rows, in], wanted with
    suh. All but y contiguous. Raises ValueError naming what does not fit.
    """
    num_rows, width = residual.shape
    _check(residual, y, weight, suh, total, normed, rotated)
    if num_rows == 0:
        return
    members, in_features = (0, width) if suh is None else suh.shape
    blocks = _FEW_BLOCKS if num_rows <= _FEW_ROWS else _BLOCKS
    tiles = triton.cdiv(in_features, 128 * blocks)
    programs = tiles if num_rows <= _SPREAD_ROWS else 1
    high, levels, odd_levels = row_levels(width)
    _add_norm_rotate_kernel[(programs, num_rows)](
        residual, residual if y is None else y, weight, suh, total, normed, rotated,
        eps, num_rows, 0 if y is None else y.stride(0), in_features,
        WIDTH=width, MEMBERS=members, HAS_Y=y is not None, HAS_NORMED=normed is not None, UNIT_OFFSET=unit_offset,
        HIGH=high, LEVELS=levels, ODD_LEVELS=odd_levels, TILES=tiles // programs, BLOCKS=blocks, num_warps=_WARPS,
        enable_fp_fusion=False, **early_launch(residual.device),
    )  # fmt: skip


def _check(
    residual: Tensor,
    y: Tensor | None,
    weight: Tensor,
    suh: Tensor | None,
    total: Tensor | None,
    normed: Tensor | None,
    rotated: Tensor | None,
) -> None:
    num_rows, width = residual.shape
    if residual.dtype != torch.float32 or not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous fp32 [rows, n], not {residual.dtype} {tuple(residual.shape)}")
    if y is not None and (y.dtype not in FLOATS or y.shape != residual.shape or y.stride(1) != 1):
        raise ValueError(
            f"y must be {tuple(residual.shape)} of a float dtype with dense rows, not {y.dtype} {tuple(y.shape)}"
        )
    if weight.dtype not in FLOATS or weight.shape != (width,):
        raise ValueError(f"weight must be fp16, bf16 or fp32 [{width}], not {weight.dtype} {tuple(weight.shape)}")
    if (y is None) != (total is None) or (suh is None) != (rotated is None):
        raise ValueError("total is wanted with y, and rotated with suh, and only then")
    if total is not None:
        if total.dtype != torch.float32 or not total.is_contiguous() or total.shape != residual.shape:
            raise ValueError(
                f"total must be contiguous fp32 {tuple(residual.shape)}, not {total.dtype} {tuple(total.shape)}"
            )
        if num_rows and total.data_ptr() == residual.data_ptr():
            raise ValueError("total must not be residual: programs of one row read it at different times")
    if normed is not None and (
        normed.dtype not in FLOATS or not normed.is_contiguous() or normed.shape != residual.shape
    ):
        raise ValueError(
            f"normed must be contiguous {tuple(residual.shape)} of a float dtype, not {normed.dtype} {tuple(normed.shape)}"
        )
    if suh is None or rotated is None:
        return
    if suh.dtype != torch.float16 or not suh.is_contiguous() or suh.shape[1] % 128 or suh.shape[1] < width:
        raise ValueError(
            f"suh must be contiguous fp16 [members, a multiple of 128 from {width} on], not {suh.dtype} {tuple(suh.shape)}"
        )
    if (
        rotated.dtype != torch.float16
        or not rotated.is_contiguous()
        or rotated.shape != (len(suh), num_rows, suh.shape[1])
    ):
        raise ValueError(
            f"rotated must be contiguous fp16 {(len(suh), num_rows, suh.shape[1])}, not {rotated.dtype} {tuple(rotated.shape)}"
        )
