"""Folds the splits of a lane's rows, in order, and writes the rows: the second launch of `decode.py`. Plain Triton; a program owns one row.

Knows no keys. The folding of a row is one chain, so its loads are what takes time: many are in flight at once.
"""
# ruff: noqa: N803, RUF005 (compile-time constants of kernels are in capitals; kernels join tuples by +)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls, disable-error-code=assignment

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from espalier.kernels.attention.lanes import LaneTable

DEPTH = 32  # splits whose partial sums are in flight


@triton.jit(do_not_specialize=["out_stride", "window", "max_rows", "splits", "stored"])
def merge_row(
    partials, maxima, out, first_row, num_rows, start, out_stride, window, max_rows, splits, stored, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr, D: tl.constexpr,
    DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (rows stored of a tile, KV_HEADS * TILES, lanes). Layout of partials and maxima: see `attend_split`.

    EARLY: launched before the splits are done; everything they write is read after the wait.
    """
    lane = tl.program_id(2)
    head, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    rows = tl.load(num_rows + lane)
    first_position = tl.load(start + lane)
    place = tile * M
    row = place + tl.program_id(0)
    begin = tl.maximum(first_position + place // GROUP - window + 1, 0) // 256
    seen = tl.minimum(first_position + (place + M - 1) // GROUP + 1, first_position + rows)
    count = (seen + 255) // 256 - begin
    if EARLY:
        gdc_wait()
    if (rows <= max_rows) & (row < rows * GROUP) & (count > 1):
        d = tl.arange(0, D)
        unit = ((lane * KV_HEADS + head) * TILES + tile).to(tl.int64) * splits
        base = partials + (unit * stored + tl.program_id(0)) * D
        numbers = maxima + unit * 2 * stored + tl.program_id(0)
        largest = float("-inf")
        total = 0.0
        mixed = tl.zeros([D], tl.float32)
        for first in range(0, count, DEPTH):
            news = ()
            totals = ()
            mixes = ()
            for i in tl.static_range(DEPTH):
                there = first + i < count  # what is not there folds in as a split that nobody sees
                at = (first + i) * stored
                news = news + (tl.load(numbers + at * 2, mask=there, other=float("-inf")),)
                totals = totals + (tl.load(numbers + at * 2 + stored, mask=there, other=0.0),)
                mixes = mixes + (tl.load(base + at * D + d, mask=there & (d < HEAD_DIM), other=0.0),)
            for i in tl.static_range(DEPTH):
                new = tl.maximum(largest, news[i])
                shift = tl.where(new == float("-inf"), 0.0, new)
                old, added = tl.exp2(largest - shift), tl.exp2(news[i] - shift)
                total = tl.fma(total, old, totals[i] * added)
                mixed = tl.fma(mixed, old, mixes[i] * added)
                largest = new
        share = tl.div_rn(1.0, total)
        place_out = (tl.load(first_row + lane) + row // GROUP).to(tl.int64) * (out_stride * 16)
        column = (head * GROUP + row % GROUP) * HEAD_DIM
        tl.store(out + place_out + column + d, (mixed * share).to(out.dtype.element_ty), mask=d < HEAD_DIM)


def launch(
    lanes: LaneTable, partials: Tensor, maxima: Tensor, out: Tensor, *, max_rows: int, window: int, kv_heads: int, tiles: int,
    splits: int, stored: int, tile_rows: int, width: int, early: bool,
) -> None:  # fmt: skip
    """Merges what a launch of `attend_split` with these numbers left; width: numbers of a partial row."""
    merge_row[(stored, kv_heads * tiles, lanes.num_lanes)](
        partials, maxima, out, lanes.first_row, lanes.num_rows, lanes.start, out.stride(0) // 16, window, max_rows, splits,
        stored, GROUP=out.shape[1] // kv_heads, KV_HEADS=kv_heads, HEAD_DIM=out.shape[2], M=tile_rows, TILES=tiles, D=width,
        DEPTH=DEPTH, EARLY=early, num_warps=width // 64, enable_fp_fusion=False, launch_pdl=early,
    )  # fmt: skip
