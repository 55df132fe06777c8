"""Paged attention of prompt chunks on Hopper: warp-specialized `wgmma` (Gluon, sm_90), head_dim up to 256.

A program owns a tile of the round's list (`work.py`): 128 rows of one key-value head, the query heads that share it side by side. A
producer warp brings tiles of keys and values, a cache block at a time, by TMA; two warpgroups of 64 rows each go at their own pace, so that
one's exponentials run beside the other's products. A split's sums and those of all splits before it both lie in registers. Same bits as
`plain.py`.
"""
# ruff: noqa: N803, N806, RUF005 (compile-time constants of kernels are in capitals; kernels join tuples by +)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls, disable-error-code=assignment

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from espalier.kernels.attention.lanes import LaneTable
from espalier.kernels.attention.work import TILE_ROWS

ROWS = gl.constexpr(TILE_ROWS)
UNITS = 4  # of the ring: 32 KB each
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def bring(desc, ring, ready, free, unit, rows, column, BLOCK: gl.constexpr, CHUNKS: gl.constexpr, S: gl.constexpr):
    """Fills the ring's unit: 128 keys, as cache blocks from `rows` on, times 64 * CHUNKS numbers from `column` on."""
    PAGES: gl.constexpr = 128 // BLOCK
    pages = ring._reinterpret(ring.dtype, [S * CHUNKS * PAGES, BLOCK, 64], BOX)
    stage = unit % S
    mbarrier.wait(free.index(stage), (unit // S & 1) ^ 1)
    mbarrier.expect(ready.index(stage), 128 * 64 * CHUNKS * 2)
    for page in gl.static_range(PAGES):
        for c in gl.static_range(CHUNKS):
            at = pages.index((stage * CHUNKS + c) * PAGES + page)
            tma.async_copy_global_to_shared(desc, [rows[page], column + c * 64], ready.index(stage), at)


@gluon.jit
def producer(
    kd, vd, ring, ready, free, table, head, piece, end, first, last, KV_HEADS: gl.constexpr, BLOCK: gl.constexpr,
    PIECES: gl.constexpr, CHUNKS: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """For tiles first .. last - 1: all pieces of the keys, then one of the values. Blocks behind the lane's end repeat its last one."""
    PAGES: gl.constexpr = 128 // BLOCK
    unit = 0
    for tile in range(first, last):
        rows = ()
        for page in gl.static_range(PAGES):
            block = gl.load(table + gl.minimum(tile * PAGES + page, (end - 1) // BLOCK))
            rows = rows + ((block * KV_HEADS + head) * BLOCK,)
        for i in gl.static_range(PIECES):
            bring(kd, ring, ready, free, unit + i, rows, i * 128, BLOCK, CHUNKS, S)
        bring(vd, ring, ready, free, unit + PIECES, rows, piece * 128, BLOCK, CHUNKS, S)
        unit += PIECES + 1


@gluon.jit
def forget_unwritten(WG: gl.constexpr, ring, stage, free, tile, end, CHUNKS: gl.constexpr, S: gl.constexpr):
    """Zeros in place of values behind the lane's end: 0 times what lies there may be NaN. The second warpgroup writes them, the first waits.

    A program has one tile at most that reaches behind the end, so the barrier beyond those of the stages is waited for once.
    """
    if WG == 1:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        strips = ring._reinterpret(ring.dtype, [S * CHUNKS * 8, 16, 64], BOX)
        row = gl.arange(0, 16, gl.SliceLayout(1, L))
        for strip in range((end - tile * 128) // 16, 8):
            for c in gl.static_range(CHUNKS):
                at = strips.index((stage * CHUNKS + c) * 8 + strip)
                v = at.load(L)
                at.store(gl.where((tile * 128 + strip * 16 + row < end)[:, None], v, gl.zeros_like(v)))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(free.index(S), count=1)
    else:
        mbarrier.wait(free.index(S), 0)


@gluon.jit
def consumer(
    WG: gl.constexpr, q, out, queries, ring, ones, ready, free, row0, head, piece, mine, rows, first_position, first, last,
    q_stride, out_stride, factor, window, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PIECES: gl.constexpr,
    CHUNKS: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 64 rows."""
    D: gl.constexpr = 64 * CHUNKS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    MIXED: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MIXED, 2)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    TYPE: gl.constexpr = ring.dtype
    end = first_position + rows
    place = mine * ROWS + WG * 64
    low_position = first_position + place // GROUP
    high_position = first_position + (place + 63) // GROUP

    rl = place + gl.arange(0, 64, gl.SliceLayout(1, L))
    real = (rl < rows * GROUP)[:, None]
    row = (row0 + rl // GROUP).to(gl.int64)[:, None]
    column = ((head * GROUP + rl % GROUP) * HEAD_DIM)[:, None]
    for i in gl.static_range(PIECES):
        d = (i * D + gl.arange(0, D, gl.SliceLayout(0, L)))[None, :]
        loaded = gl.load(q + row * (q_stride * 16) + column + d, mask=real & (d < HEAD_DIM), other=0.0)
        queries.index(WG * PIECES + i).store(loaded.to(TYPE))
    fence_async_shared()
    gl.thread_barrier()

    position = first_position + (place + gl.arange(0, 64, gl.SliceLayout(1, SCORES))) // GROUP
    key = gl.arange(0, 128, gl.SliceLayout(0, SCORES))
    infinite = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    largest = infinite
    total = gl.zeros([64, 8], gl.float32, TOTAL)
    mixed = gl.zeros([64, D], gl.float32, MIXED)
    split_largest = infinite
    split_total = total
    split_mixed = mixed
    unit = 0
    for tile in range(first, last):
        scores = gl.zeros([64, 128], gl.float32, SCORES)
        for i in gl.static_range(PIECES):
            stage = (unit + i) % S
            mbarrier.wait(ready.index(stage), (unit + i) // S & 1)
            keys = ring.index(stage).permute((1, 0))
            scores = warpgroup_mma(queries.index(WG * PIECES + i), keys, scores, use_acc=i > 0, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        gl.thread_barrier()
        for i in gl.static_range(PIECES):
            mbarrier.arrive(free.index((unit + i) % S), count=1)
        if (tile * 128 + 127 > low_position) | (tile * 128 <= high_position - window):
            age = position[:, None] - (tile * 128 + key)[None, :]
            scores = gl.where(age.to(gl.uint32) < window.to(gl.uint32), scores, float("-inf"))  # 0 <= age < window
        # At a split's first tile nothing is kept: 2^-inf is 0.
        before = gl.where(tile % 2 == 0, infinite, split_largest)
        split_largest = gl.maximum(before, gl.max(scores, 1) * factor)
        shift = gl.where(split_largest == float("-inf"), 0.0, split_largest)
        weights = gl.exp2(gl.fma(scores, factor, -shift[:, None])).to(TYPE)
        weights = gl.convert_layout(weights, A, assert_trivial=True)
        keep = gl.exp2(before - shift)
        split_mixed = split_mixed * gl.convert_layout(keep, gl.SliceLayout(1, MIXED))[:, None]
        split_total = split_total * gl.convert_layout(keep, gl.SliceLayout(1, TOTAL))[:, None]
        unit += PIECES
        stage = unit % S
        mbarrier.wait(ready.index(stage), unit // S & 1)
        if tile * 128 + 128 > end:
            forget_unwritten(WG, ring, stage, free, tile, end, CHUNKS, S)
        split_mixed = warpgroup_mma(weights, ring.index(stage), split_mixed, is_async=True)
        split_total = warpgroup_mma(weights, ones.permute((1, 0)), split_total, is_async=True)
        split_mixed, split_total = warpgroup_mma_wait(0, deps=[split_mixed, split_total])
        gl.thread_barrier()
        mbarrier.arrive(free.index(stage), count=1)
        unit += 1
        if (tile % 2 == 1) | (tile == last - 1):
            new = gl.maximum(largest, split_largest)
            shift = gl.where(new == float("-inf"), 0.0, new)
            old, added = gl.exp2(largest - shift), gl.exp2(split_largest - shift)
            largest = new
            o = gl.convert_layout(old, gl.SliceLayout(1, TOTAL))[:, None]
            total = gl.fma(total, o, split_total * gl.convert_layout(added, gl.SliceLayout(1, TOTAL))[:, None])
            o = gl.convert_layout(old, gl.SliceLayout(1, MIXED))[:, None]
            mixed = gl.fma(mixed, o, split_mixed * gl.convert_layout(added, gl.SliceLayout(1, MIXED))[:, None])
    sums = gl.convert_layout(gl.max(total, 1), gl.SliceLayout(1, MIXED))  # its columns are equal
    share = gl.div_rn(gl.full_like(sums, 1.0), sums)
    result = gl.convert_layout((mixed * share[:, None]).to(out.dtype.element_ty), L)
    d = (piece * D + gl.arange(0, D, gl.SliceLayout(0, L)))[None, :]
    gl.store(out + row * (out_stride * 16) + column + d, result, mask=real & (d < HEAD_DIM))


@gluon.jit(do_not_specialize=["q_stride", "out_stride", "table_stride", "window"])
def attend_chunk(
    q, kd, vd, out, first_row, num_rows, start, tables, tiles, q_stride, out_stride, table_stride, factor, window,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Grid: (KV_HEADS * PIECES, entries of tiles). S: units of the ring."""
    PIECES: gl.constexpr = (HEAD_DIM + 127) // 128
    CHUNKS: gl.constexpr = 2 if HEAD_DIM > 64 else 1
    TYPE: gl.constexpr = kd.dtype
    head, piece = gl.program_id(0) // PIECES, gl.program_id(0) % PIECES
    entry = tiles + 2 * gl.program_id(1)
    lane, mine = gl.load(entry), gl.load(entry + 1)
    if lane >= 0:
        rows = gl.load(num_rows + lane)
        first_position = gl.load(start + lane)
        row0 = gl.load(first_row + lane)
        table = tables + lane.to(gl.int64) * table_stride
        end = first_position + rows
        place = mine * ROWS
        first = gl.maximum(first_position + place // GROUP - window + 1, 0) // 128
        last = (gl.minimum(first_position + (place + 127) // GROUP + 1, end) + 127) // 128
        queries = gl.allocate_shared_memory(TYPE, [2 * PIECES, 64, 64 * CHUNKS], BOX)
        ring = gl.allocate_shared_memory(TYPE, [S, 128, 64 * CHUNKS], BOX)
        ones = gl.allocate_shared_memory(TYPE, [8, 128], BOX)
        ones.store(gl.full([8, 128], 1.0, TYPE, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])))
        fence_async_shared()
        ready = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [S + 1, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(S):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(free.index(i), count=2)
        mbarrier.init(free.index(S), count=1)  # for `forget_unwritten`
        gl.warp_specialize(
            [
                (consumer, (0, q, out, queries, ring, ones, ready, free, row0, head, piece, mine, rows, first_position,
                            first, last, q_stride, out_stride, factor, window, GROUP, HEAD_DIM, PIECES, CHUNKS, S)),
                (consumer, (1, q, out, queries, ring, ones, ready, free, row0, head, piece, mine, rows, first_position,
                            first, last, q_stride, out_stride, factor, window, GROUP, HEAD_DIM, PIECES, CHUNKS, S)),
                (producer, (kd, vd, ring, ready, free, table, head, piece, end, first, last, KV_HEADS, BLOCK, PIECES,
                            CHUNKS, S)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def launch(q: Tensor, keys: Tensor, values: Tensor, lanes: LaneTable, factor: float, window: int, out: Tensor) -> None:
    """Attention of the lanes in the table's list of tiles."""
    blocks, kv_heads, block_size, head_dim = keys.shape
    group = q.shape[1] // kv_heads
    flat = (blocks * kv_heads * block_size, head_dim)
    kd, vd = (TensorDescriptor.from_tensor(cache.view(flat), [block_size, 64], BOX.value) for cache in (keys, values))
    attend_chunk[(kv_heads * -(-head_dim // 128), lanes.tiles.shape[0])](
        q, kd, vd, out, lanes.first_row, lanes.num_rows, lanes.start, lanes.block_tables, lanes.tiles, q.stride(0) // 16,
        out.stride(0) // 16, lanes.block_tables.stride(0), factor, window, GROUP=group, KV_HEADS=kv_heads,
        HEAD_DIM=head_dim, BLOCK=block_size, S=UNITS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
