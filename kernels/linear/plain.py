"""The EXL3 linear in plain Triton: any GPU from compute capability 8.0 on, any Triton that we install, and the interpreter.

Slower than the Gluon forms and equal to them bit for bit: the same chains of matrix instructions, one for each split, added left to right.
A program owns 128 columns, so that it can rotate them. Where that leaves too few programs each split gets its own, the partial sums go
through memory and a second launch finishes them. Each member of a group is a launch of its own.
"""
# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.exl3.decode_plain import decode_step
from espalier.kernels.hadamard.rotate import SCALE, hadamard_128
from espalier.kernels.linear.group import LinearGroup
from espalier.kernels.linear.splits import num_splits

COLUMNS = 128  # of one program: the rotation's width
MOST_ROWS = 128
# Below so many output blocks the splits are spread over programs.
_FEW_BLOCKS = 160


@triton.jit
def store_rotated(total, svh, bias, out, places, mask, column, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr):
    """fp32 [ROWS, 128] sums -> out. places: int64 [ROWS], where each row's first column lies in `out`."""
    c = column + tl.arange(0, 128)
    y = hadamard_128(total) * SCALE * tl.load(svh + c).to(tl.float32)[None, :]
    if HAS_BIAS:
        y = y + tl.load(bias + c)[None, :]
    tl.store(out + places[:, None] + c[None, :], y.to(out.dtype.element_ty), mask=mask[:, None])


@triton.jit
def split_sum(
    x, places, mask, words, tile, tiles, split, K: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    RATE2: tl.constexpr, CODEBOOK: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS, 128]: one chain over the split's inputs. places: int64 [ROWS], where each row of `x` begins."""
    k = tl.arange(0, 64)
    acc = tl.zeros([ROWS, 128], tl.float32)
    for step in range(split * (K // 128) // SPLITS * 2, (split + 1) * (K // 128) // SPLITS * 2):
        rows = tl.load(x + places[:, None] + (step * 64 + k)[None, :], mask=mask[:, None], other=0.0)
        weights = decode_step(words, tile, step, tiles, 8, RATE2, CODEBOOK)
        # Where an operand comes from bytes, Triton permutes the inputs among matrix instructions, to keep them as they were loaded. A
        # reduction over nothing hides where the weights come from, so that instruction i sums inputs 16 i .. 16 i + 15 and no others.
        weights = tl.max(tl.reshape(weights, [64, 128, 1]), 2).to(tl.float16)
        acc = tl.dot(rows, weights, acc)
    return acc


@triton.jit
def sum_splits(
    x, places, mask, words, tile, tiles, K: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    RATE2: tl.constexpr, CODEBOOK: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS, 128]: all partial sums, added left to right."""
    total = split_sum(x, places, mask, words, tile, tiles, 0, K, SPLITS, ROWS, RATE2, CODEBOOK)
    for split in range(1, SPLITS):
        total += split_sum(x, places, mask, words, tile, tiles, split, K, SPLITS, ROWS, RATE2, CODEBOOK)
    return total


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, words, svh, bias, out, rows, out_stride, column, first_tile, tiles, K: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, RATE2: tl.constexpr, CODEBOOK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    # columns `column + 128 program` of `out`; the run's tile `first_tile` is the member's first
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    tile = first_tile + tl.program_id(0) * 8
    total = sum_splits(x, row.to(tl.int64) * K, mask, words, tile, tiles, K, SPLITS, ROWS, RATE2, CODEBOOK)
    places = row.to(tl.int64) * out_stride
    store_rotated(total, svh, bias, out, places, mask, column + tl.program_id(0) * 128, HAS_BIAS, ROWS)


@triton.jit(do_not_specialize=["rows"])
def _partials(
    x, words, partials, rows, first_tile, tiles, K: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    RATE2: tl.constexpr, CODEBOOK: tl.constexpr,
):  # fmt: skip
    # partials: fp32 [splits, rows, columns]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    tile = first_tile + tl.program_id(0) * 8
    acc = split_sum(x, row.to(tl.int64) * K, row < rows, words, tile, tiles, split, K, SPLITS, ROWS, RATE2, CODEBOOK)
    places = (split.to(tl.int64) * rows + row) * (tl.num_programs(0) * 128) + tl.program_id(0) * 128
    tl.store(partials + places[:, None] + tl.arange(0, 128)[None, :], acc, mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _finish(
    partials, svh, bias, out, rows, out_stride, column, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    width = tl.num_programs(0) * 128
    p = partials + (row.to(tl.int64) * width + tl.program_id(0) * 128)[:, None] + tl.arange(0, 128)[None, :]
    step = rows.to(tl.int64) * width
    total = tl.load(p, mask=mask[:, None], other=0.0)
    for split in range(1, SPLITS):
        total += tl.load(p + split * step, mask=mask[:, None], other=0.0)
    places = row.to(tl.int64) * out_stride
    store_rotated(total, svh, bias, out, places, mask, column + tl.program_id(0) * 128, HAS_BIAS, ROWS)


def row_block(rows: int) -> int:
    """Rows of one program: 16 is the least that a matrix instruction takes."""
    return next((block for block in (16, 32, 64) if rows <= block), MOST_ROWS)


def _spreads(width: int, rows: int) -> bool:
    return width // COLUMNS * -(-rows // row_block(rows)) < _FEW_BLOCKS


def scratch_size(in_features: int, widths: tuple[int, ...], max_rows: int) -> ScratchSize:
    """For any call of up to `max_rows` rows. Members follow each other in the same memory; at most 80 MiB."""
    sums = 0
    for width in widths:
        most_row_blocks = (_FEW_BLOCKS - 1) // (width // COLUMNS)
        sums = max(sums, min(max_rows, most_row_blocks * MOST_ROWS) * width)
    return ScratchSize(partials=num_splits(in_features) * sums)


def launch(x_rot: Tensor, group: LinearGroup, out: Tensor, scratch: Scratch) -> None:
    """x_rot: fp16 [members, rows, in] contiguous. out: fp16, bf16 or fp32 [rows, out], rows contiguous or with a stride."""
    rows, width_in = int(x_rot.shape[1]), group.in_features
    scratch.require(scratch_size(width_in, group.widths, rows))
    block, splits = row_block(rows), num_splits(width_in)
    bias = group.svh if group.bias is None else group.bias  # never read without a bias
    options = {"num_warps": 8 if block >= 64 else 4, "num_stages": 2, "enable_fp_fusion": False}
    column = 0
    for member, width in enumerate(group.widths):
        run = next(run for run in group.runs if column < run.first_column + run.columns)
        product = {"K": width_in, "SPLITS": splits, "ROWS": block}
        weights = {"RATE2": int(2 * run.rate), "CODEBOOK": run.codebook.number}
        place = ((column - run.first_column) // 16, run.columns // 16)
        grid = (width // COLUMNS, triton.cdiv(rows, block))
        if _spreads(width, rows):
            _partials[(*grid, splits)](
                x_rot[member], run.words, scratch.partials, rows, *place, **product, **weights, **options
            )
            _finish[grid](
                scratch.partials,
                group.svh,
                bias,
                out,
                rows,
                out.stride(0),
                column,
                SPLITS=splits,
                ROWS=block,
                HAS_BIAS=group.bias is not None,
                num_warps=4,
                enable_fp_fusion=False,
            )
        else:
            _linear[grid](
                x_rot[member],
                run.words,
                group.svh,
                bias,
                out,
                rows,
                out.stride(0),
                column,
                *place,
                **product,
                **weights,
                HAS_BIAS=group.bias is not None,
                **options,
            )
        column += width
