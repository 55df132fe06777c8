"""Paged attention of few rows a lane (decode, draft verification) on `mma.sync`: a program takes one split of one key-value head (Gluon, sm_80 on).

Bound by memory: the query heads that share a key-value head, and a lane's draft rows, lie in one tile, so that keys and values are read
once. They come in pieces of 128 keys through a ring of buffers. With all scores of the split in registers its softmax needs one exchange
between warps. `merge.py` folds the splits of a lane that has several. Beside prompts there are fewer programs, which share a lane's splits.
Same bits as `plain.py`.
"""
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls, disable-error-code=no-redef

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from espalier.kernels.attention import merge
from espalier.kernels.attention.lanes import LaneTable
from espalier.kernels.attention.splits import EVERY_KEY, most_splits
from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.dependent_launch import DEPENDENT_LAUNCH
from espalier.kernels.device import device_class

BUFFERS = 2  # of 32 KB: three programs share an SM
MIXED_PROGRAMS = 2048  # in rounds with prompts: five times what an H200 runs at once


@gluon.jit
def larger(a0, a1, b0, b1):
    """Two maxima in one reduction, so that warps exchange once."""
    return gl.maximum(a0, b0), gl.maximum(a1, b1)


@gluon.jit
def fetch(
    buffers, keys, values, low_slots, high_slots, left, STEP: gl.constexpr, PIECES: gl.constexpr, WIDTH: gl.constexpr,
    HEAD_DIM: gl.constexpr, S: gl.constexpr, CP: gl.constexpr,
):  # fmt: skip
    """Begins step STEP: keys half by half, then values piece by piece; zeros where nothing was written or nothing belongs.

    Slots are those of every 16th key: a block holds at least 16. left: keys from the split's first to the lane's end.
    """
    if STEP < 2 * PIECES:
        base = keys
        high: gl.constexpr = STEP // PIECES == 1
        piece: gl.constexpr = STEP % PIECES
    else:
        base = values
        high: gl.constexpr = STEP % 2 == 1
        piece: gl.constexpr = STEP // 2 - PIECES
    slots = high_slots if high else low_slots
    group = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, CP)))[:, None, None]
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, CP)))[None, :, None]
    d = (piece * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, CP))))[None, None, :]
    places = base + slots.to(gl.int64)[:, None, None] * HEAD_DIM + (row * HEAD_DIM + d)
    mask = ((128 if high else 0) + group * 16 + row < left) & (d < HEAD_DIM)
    buffer = buffers.index(STEP % S)._reinterpret(
        buffers.dtype, [8, 16, WIDTH], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    )
    async_copy.async_copy_global_to_shared(buffer, places, mask=mask)
    async_copy.commit_group()


@gluon.jit
def take_split(
    mine, count, begin, q, keys, values, out, tables, partials, maxima, lane, head, tile, rows, first_position, row0, place,
    q_stride, out_stride, table_stride, factor, window, tiles, splits, stored, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK: gl.constexpr, M: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Split `mine` of the `count` splits, from `begin` on, that the tile's rows see."""
    W: gl.constexpr = 4
    WIDTH: gl.constexpr = 128 if HEAD_DIM > 64 else 64
    PIECES: gl.constexpr = (HEAD_DIM + 127) // 128
    D: gl.constexpr = PIECES * WIDTH
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, W], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    CP: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // WIDTH, WIDTH // 8], [1, W, 1], [2, 1, 0])
    TYPE: gl.constexpr = keys.dtype.element_ty
    split = begin + mine
    end = first_position + rows
    key = split * 256 + 16 * gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, CP)))
    table = tables + lane.to(gl.int64) * table_stride
    low_block = gl.load(table + key // BLOCK, mask=key < end, other=0)
    high_block = gl.load(table + (key + 128) // BLOCK, mask=key + 128 < end, other=0)
    low_slots = (low_block * KV_HEADS + head) * BLOCK + key % BLOCK
    high_slots = (high_block * KV_HEADS + head) * BLOCK + key % BLOCK
    left = end - split * 256
    buffers = gl.allocate_shared_memory(TYPE, [S, 128, WIDTH], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    for step in gl.static_range(S):
        fetch(buffers, keys, values, low_slots, high_slots, left, step, PIECES, WIDTH, HEAD_DIM, S, CP)

    # The tile's rows: query heads of a token side by side, then the next token's.
    ra = place + gl.arange(0, M, gl.SliceLayout(1, A))
    da = gl.arange(0, WIDTH, gl.SliceLayout(0, A))
    qa = q + (row0 + ra // GROUP).to(gl.int64) * (q_stride * 16) + (head * GROUP + ra % GROUP) * HEAD_DIM
    low = gl.zeros([M, 128], gl.float32, ACC)
    high = gl.zeros([M, 128], gl.float32, ACC)
    for step in gl.static_range(2 * PIECES):
        if step == 0 or PIECES > 1:
            d = step % PIECES * WIDTH + da
            mask = (ra < rows * GROUP)[:, None] & (d < HEAD_DIM)[None, :]
            query = gl.load(qa[:, None] + d[None, :], mask=mask, other=0.0).to(TYPE)
        async_copy.wait_group(min(4 * PIECES, step + S) - step - 1)
        gl.thread_barrier()
        k = buffers.index(step % S).permute((1, 0)).load(B)
        if step < PIECES:
            low = mma_v2(query, k, low)
        else:
            high = mma_v2(query, k, high)
        if step + S < 4 * PIECES:
            gl.thread_barrier()
            fetch(buffers, keys, values, low_slots, high_slots, left, step + S, PIECES, WIDTH, HEAD_DIM, S, CP)

    r = place + gl.arange(0, M, gl.SliceLayout(1, ACC))
    # How many positions before the row a key of the low half lies: 0 <= age < window is what the row sees.
    first_keys = split * 256 + gl.arange(0, 128, gl.SliceLayout(0, ACC))
    age = (first_position + r // GROUP)[:, None] - first_keys[None, :]
    if (split * 256 + 255 > first_position) | (split * 256 + window < end):  # not every row sees every key
        low = gl.where(age.to(gl.uint32) < window.to(gl.uint32), low, float("-inf"))
        high = gl.where((age - 128).to(gl.uint32) < window.to(gl.uint32), high, float("-inf"))
    low_largest, high_largest = gl.reduce((low, high), 1, larger)
    before = low_largest * factor
    shift = gl.where(before == float("-inf"), 0.0, before)
    weights = gl.allocate_shared_memory(TYPE, [2, M, 128], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    weights.index(0).store(gl.exp2(gl.fma(low, factor, -shift[:, None])).to(TYPE))
    largest = gl.maximum(before, high_largest * factor)
    shift = gl.where(largest == float("-inf"), 0.0, largest)
    weights.index(1).store(gl.exp2(gl.fma(high, factor, -shift[:, None])).to(TYPE))
    keep = gl.exp2(before - shift)[:, None]
    gl.thread_barrier()
    low_weights, high_weights = weights.index(0).load(A), weights.index(1).load(A)
    ones = gl.full([128, 8 * W], 1.0, TYPE, B)
    total = mma_v2(low_weights, ones, gl.zeros([M, 8 * W], gl.float32, ACC))
    total = gl.max(mma_v2(high_weights, ones, total * keep), 1)  # its columns are equal

    alone = count == 1
    share = gl.div_rn(gl.full_like(total, 1.0), total)
    unit = ((lane * KV_HEADS + head) * tiles + tile).to(gl.int64) * splits + mine
    kept = unit * stored + r - place
    real = r < rows * GROUP
    dc = gl.arange(0, WIDTH, gl.SliceLayout(0, ACC))
    outs = out + (row0 + r // GROUP).to(gl.int64) * (out_stride * 16) + (head * GROUP + r % GROUP) * HEAD_DIM
    mixed = gl.zeros([M, WIDTH], gl.float32, ACC)
    for step in gl.static_range(2 * PIECES, 4 * PIECES):
        async_copy.wait_group(min(4 * PIECES, step + S) - step - 1)
        gl.thread_barrier()
        v = buffers.index(step % S).load(B)
        if step % 2 == 0:
            begun = gl.zeros([M, WIDTH], gl.float32, ACC)
            mixed = mma_v2(low_weights, v, begun)
        else:
            mixed = mma_v2(high_weights, v, mixed * keep)
            d = (step // 2 - PIECES) * WIDTH + dc
            mask = real[:, None] & (d < HEAD_DIM)[None, :]
            if alone:
                gl.store(outs[:, None] + d[None, :], (mixed * share[:, None]).to(out.dtype.element_ty), mask=mask)
            else:
                gl.store(partials + kept[:, None] * D + d[None, :], mixed, mask=mask)
        if step + S < 4 * PIECES:
            gl.thread_barrier()
            fetch(buffers, keys, values, low_slots, high_slots, left, step + S, PIECES, WIDTH, HEAD_DIM, S, CP)
    if count > 1:
        gl.store(maxima + unit * stored + kept, largest, mask=real)
        gl.store(maxima + unit * stored + kept + stored, total, mask=real)


@gluon.jit(
    do_not_specialize=["q_stride", "out_stride", "table_stride", "window", "max_rows", "tiles", "splits", "stored"]
)
def attend_split(
    q, keys, values, out, first_row, num_rows, start, tables, shares, partials, maxima, q_stride, out_stride, table_stride,
    factor, window, max_rows, tiles, splits, stored, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK: gl.constexpr, M: gl.constexpr, S: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Grid: (splits, KV_HEADS * tiles, lanes). Lanes of more than max_rows rows are left alone.

    SHARED: grid (any, KV_HEADS * tiles, entries of shares); the programs of a lane's entries take turns with its splits.
    S: buffers of the ring. Strides of q and out count 16 numbers. partials: [lanes, KV_HEADS, tiles, splits, stored (rows kept of a tile
    of M), D]; maxima: [.., 2, stored], the largest and the total.
    """
    if SHARED:
        entry = shares + 3 * gl.program_id(2)
        lane = gl.load(entry)
        first = gl.load(entry + 1) * gl.num_programs(0) + gl.program_id(0)
        step = gl.load(entry + 2) * gl.num_programs(0)
    else:
        lane = gl.program_id(2)
        first = gl.program_id(0)
    head, tile = gl.program_id(1) // tiles, gl.program_id(1) % tiles
    rows = gl.load(num_rows + lane)
    first_position = gl.load(start + lane)
    row0 = gl.load(first_row + lane)
    place = tile * M
    begin = gl.maximum(first_position + place // GROUP - window + 1, 0) // 256
    seen = gl.minimum(first_position + (place + M - 1) // GROUP + 1, first_position + rows)
    count = (seen + 255) // 256 - begin
    if (rows <= max_rows) & (place < rows * GROUP) & (first < count):
        if SHARED:
            for mine in range(first, count, step):
                take_split(
                    mine, count, begin, q, keys, values, out, tables, partials, maxima, lane, head, tile, rows, first_position,
                    row0, place, q_stride, out_stride, table_stride, factor, window, tiles, splits, stored, GROUP, KV_HEADS,
                    HEAD_DIM, BLOCK, M, S,
                )  # fmt: skip
                gl.thread_barrier()  # the next split's keys are written over these values
        else:
            take_split(
                first, count, begin, q, keys, values, out, tables, partials, maxima, lane, head, tile, rows, first_position,
                row0, place, q_stride, out_stride, table_stride, factor, window, tiles, splits, stored, GROUP, KV_HEADS,
                HEAD_DIM, BLOCK, M, S,
            )  # fmt: skip


def tile_rows(max_rows: int, group: int) -> int:
    """Rows of a program's tile."""
    return 16 if max_rows * group <= 16 else 32


def _shape(max_rows: int, group: int, head_dim: int) -> tuple[int, int, int]:
    """(tiles of a lane, rows stored of a tile, padded head_dim)."""
    m = tile_rows(max_rows, group)
    return -(-max_rows * group // m), min(m, max_rows * group), 64 if head_dim <= 64 else -(-head_dim // 128) * 128


def scratch_size(
    num_lanes: int, max_rows: int, max_context: int, window: int | None, heads: int, kv_heads: int, head_dim: int
) -> ScratchSize:
    """What `launch` needs for that many lanes of at most max_rows rows."""
    tiles, stored, width = _shape(max_rows, heads // kv_heads, head_dim)
    splits = most_splits(max_context, max_rows, window)
    if splits == 1:
        return ScratchSize()
    return ScratchSize(partials=num_lanes * kv_heads * tiles * splits * stored * (width + 2))


def launch(
    q: Tensor, keys: Tensor, values: Tensor, lanes: LaneTable, scratch: Scratch, factor: float, window: int | None,
    out: Tensor, max_rows: int,
) -> None:  # fmt: skip
    """Attention of the lanes that have 1 to max_rows rows."""
    kv_heads, block_size, head_dim = keys.shape[1:]
    group = q.shape[1] // kv_heads
    size = scratch_size(lanes.num_lanes, max_rows, lanes.max_context, window, q.shape[1], kv_heads, head_dim)
    scratch.require(size)
    tiles, stored, width = _shape(max_rows, group, head_dim)
    splits = most_splits(lanes.max_context, max_rows, window)
    maxima = scratch.partials[size.partials // (width + 2) * width :]
    m = tile_rows(max_rows, group)
    visible = EVERY_KEY if window is None else window
    # Lanes of a round with prompts may have many rows, or none: programs for all splits of each would be idle for the most part.
    programs = splits
    if lanes.max_rows > max_rows:
        programs = min(splits, max(1, MIXED_PROGRAMS // (kv_heads * tiles * lanes.num_lanes)))
    attend_split[(programs, kv_heads * tiles, lanes.num_lanes)](
        q, keys, values, out, lanes.first_row, lanes.num_rows, lanes.start, lanes.block_tables, lanes.shares,
        scratch.partials, maxima, q.stride(0) // 16, out.stride(0) // 16, lanes.block_tables.stride(0), factor, visible,
        max_rows, tiles, splits, stored, GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK=block_size, M=m,
        S=BUFFERS, SHARED=programs < splits, num_warps=4, maxnreg=168 if m == 16 else None, enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        merge.launch(
            lanes, scratch.partials, maxima, out, max_rows=max_rows, window=visible, kv_heads=kv_heads, tiles=tiles,
            splits=splits, stored=stored, tile_rows=m, width=width, early=device_class(q.device).capability >= DEPENDENT_LAUNCH,
        )  # fmt: skip
