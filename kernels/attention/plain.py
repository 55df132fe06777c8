"""Paged attention in plain Triton: any GPU from compute capability 8.0 on, any Triton that we install, and the interpreter.

A program owns a tile of rows of one key-value head, the query heads that share it side by side, and walks over the splits one after the
other. It defines the arithmetic; the Gluon forms give the same bits. Sums of weights come out of the same matrix product as the weighted
values, from a column of ones, so that their order is the same wherever the product's is.
"""
# ruff: noqa: N803, RUF005 (compile-time constants of kernels are in capitals; kernels join tuples by +)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls, disable-error-code=assignment

import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.attention.lanes import LaneTable
from espalier.kernels.attention.splits import SPLIT_KEYS, TILE_KEYS


@triton.jit
def fold(largest, total, mixed, split_largest, split_total, split_mixed):
    """Merges a split into what came before it: largest [M], total [M, 16] and mixed [M, D]. An unseen split (-inf, 0, 0) changes nothing."""
    new = tl.maximum(largest, split_largest)
    shift = tl.where(new == float("-inf"), 0.0, new)
    old, added = tl.exp2(largest - shift)[:, None], tl.exp2(split_largest - shift)[:, None]
    return new, tl.fma(total, old, split_total * added), tl.fma(mixed, old, split_mixed * added)


@triton.jit(do_not_specialize=["q_stride", "out_stride", "table_stride", "window", "min_rows"])
def attend_rows(
    q, keys, values, out, first_row, num_rows, start, tables, q_stride, out_stride, table_stride, factor, window, min_rows,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of M rows, KV_HEADS * PIECES, lanes). factor: softmax scale times log2(e).

    GROUP: query heads of a key-value head. HEAD_DIM is taken in PIECES of D numbers: a program reads keys whole, of values its own piece.
    Strides of q and out count 16 numbers, so that their alignment is known.
    """
    lane, head, piece = tl.program_id(2), tl.program_id(1) // PIECES, tl.program_id(1) % PIECES
    rows = tl.load(num_rows + lane)
    place = (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # the longest tiles first
    if (rows >= min_rows) & (place < rows * GROUP):
        first_position = tl.load(start + lane)
        r = place + tl.arange(0, M)
        token = r // GROUP
        real = (r < rows * GROUP)[:, None]
        position = first_position + token
        row = (tl.load(first_row + lane) + token).to(tl.int64)[:, None]
        column = ((head * GROUP + r % GROUP) * HEAD_DIM)[:, None]
        queries = ()
        for i in tl.static_range(PIECES):
            d = (i * D + tl.arange(0, D))[None, :]
            loaded = tl.load(q + row * (q_stride * 16) + column + d, mask=real & (d < HEAD_DIM), other=0.0)
            queries = queries + (loaded.to(keys.dtype.element_ty),)
        end = first_position + rows
        seen = tl.minimum(first_position + (place + M - 1) // GROUP + 1, end)  # keys that the tile's last row sees
        begin = tl.maximum(first_position + place // GROUP - window + 1, 0)
        mine = (piece * D + tl.arange(0, D))[None, :]
        ones = tl.full([TILE, 16], 1.0, tl.float32).to(keys.dtype.element_ty)
        largest = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M, 16], tl.float32)
        mixed = tl.zeros([M, D], tl.float32)
        for split in range(begin // SPLIT, (seen + SPLIT - 1) // SPLIT):
            split_largest = tl.full([M], float("-inf"), tl.float32)
            split_total = tl.zeros([M, 16], tl.float32)
            split_mixed = tl.zeros([M, D], tl.float32)
            for tile in range(SPLIT // TILE):
                key = split * SPLIT + tile * TILE + tl.arange(0, TILE)
                written = (key < end)[:, None]
                block = tl.load(tables + lane.to(tl.int64) * table_stride + key // BLOCK, mask=key < end, other=0)
                slot = (((block.to(tl.int64) * KV_HEADS + head) * BLOCK + key % BLOCK) * HEAD_DIM)[:, None]
                scores = tl.zeros([M, TILE], tl.float32)
                for i in tl.static_range(PIECES):
                    d = (i * D + tl.arange(0, D))[None, :]
                    k = tl.load(keys + slot + d, mask=written & (d < HEAD_DIM), other=0.0)
                    scores = tl.dot(queries[i], tl.trans(k), scores)
                # Slots behind the lane's end may hold NaN, and 0 times NaN is NaN.
                v = tl.load(values + slot + mine, mask=written & (mine < HEAD_DIM), other=0.0)
                visible = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
                scores = tl.where(visible, scores, float("-inf"))
                new = tl.maximum(split_largest, tl.max(scores, 1) * factor)
                shift = tl.where(new == float("-inf"), 0.0, new)
                keep = tl.exp2(split_largest - shift)[:, None]
                weights = tl.exp2(tl.fma(scores, factor, -shift[:, None])).to(v.dtype)
                split_total = tl.dot(weights, ones, split_total * keep)
                split_mixed = tl.dot(weights, v, split_mixed * keep)
                split_largest = new
            largest, total, mixed = fold(largest, total, mixed, split_largest, split_total, split_mixed)
        share = tl.div_rn(1.0, tl.max(total, 1))  # its columns are equal
        result = (mixed * share[:, None]).to(out.dtype.element_ty)
        tl.store(out + row * (out_stride * 16) + column + mine, result, mask=real & (mine < HEAD_DIM))


def launch(
    q: Tensor, keys: Tensor, values: Tensor, lanes: LaneTable, factor: float, window: int, out: Tensor, min_rows: int
) -> None:
    """Attention of the lanes that have at least min_rows rows."""
    kv_heads, block_size, head_dim = keys.shape[1:]
    group = q.shape[1] // kv_heads
    tile_rows = 16 if lanes.max_rows * group <= 16 else 64
    width = min(128, 1 << (head_dim - 1).bit_length())
    pieces = -(-head_dim // width)
    attend_rows[(-(-lanes.max_rows * group // tile_rows), kv_heads * pieces, lanes.num_lanes)](
        q, keys, values, out, lanes.first_row, lanes.num_rows, lanes.start, lanes.block_tables,
        q.stride(0) // 16, out.stride(0) // 16, lanes.block_tables.stride(0), factor, window, min_rows,
        GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK=block_size, M=tile_rows, D=width, PIECES=pieces,
        TILE=TILE_KEYS, SPLIT=SPLIT_KEYS, num_warps=4 if tile_rows == 16 else 8, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
