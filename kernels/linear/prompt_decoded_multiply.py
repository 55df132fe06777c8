"""The roles of the Hopper prompt kernel on decoded weights: a producer warp that feeds tiles by TMA, three consumer warpgroups that multiply.

A consumer owns 64 of the tile's 192 tokens and all its 128 columns, so that accumulators and running totals fit its registers together: where
a split ends, it adds them while the other two keep the tensor cores busy. Columns are N of `wgmma`, so the rotation of 128 of them needs no
other warp, and consumers never meet. Of a narrower tile, of 128 or 64 tokens, the last consumers have none. Tiles go round robin.
`prompt_decoded.py` launches.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from espalier.kernels.linear.places import member_of
from espalier.kernels.linear.prompt_output import stage_in_lanes, stage_in_registers
from espalier.kernels.linear.prompt_sums import accumulator_layout
from espalier.kernels.linear.prompt_wgmma_work import first_step, tile_place

CONSUMERS: gl.constexpr = gl.constexpr(3)
ROWS: gl.constexpr = gl.constexpr(64)  # tokens of a consumer
_BLOCK: gl.constexpr = gl.constexpr(128)  # columns of a tile
# Output: the lane bits of column bits 1 and 2 change places with bits 3 and 4, so that a lane has 8 neighbours.
_NEIGHBOURS: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)


@gluon.jit
def producer(
    x, weights, xs, ws, ready, free, T, tokens, blocks, first_block, NB, ENDS: gl.constexpr, STAGES: gl.constexpr
):
    """x: descriptor of [members * T, in], boxes [64, 64]. weights: of [in / 64 * 128 * NB, 64], boxes [128, 64]. tokens: of a tile."""
    step = 0
    token_blocks = gl.cdiv(T, tokens)
    for tile in range(gl.program_id(0), NB * token_blocks, gl.num_programs(0)):
        column_block, token_block = tile_place(tile, token_blocks, NB)
        row = token_block * tokens
        # Tokens of consumers that have any; the last of them may read the next member's, for outputs nobody stores.
        live = gl.minimum(tokens, gl.cdiv(T - row, ROWS) * ROWS)
        row += member_of(first_block + column_block, ENDS) * T
        for k in range(2 * blocks):
            stage = step % STAGES
            here = ready.index(stage)
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            for parts in gl.static_range(1, CONSUMERS + 1):
                mbarrier.expect(here, (parts * ROWS + _BLOCK) * 64 * 2, pred=live == parts * ROWS)
            tma.async_copy_global_to_shared(weights, [(k * NB + column_block) * _BLOCK, 0], here, ws.index(stage))
            for part in gl.static_range(CONSUMERS):
                place = xs.index(stage * CONSUMERS + part)
                tma.async_copy_global_to_shared(x, [row + part * ROWS, k * 64], here, place, pred=part * ROWS < live)
            step += 1


@gluon.jit
def _split_sum(steps, step, WG: gl.constexpr, xs, ws, ready, free, STAGES: gl.constexpr):
    # one chain over `steps` stages of the ring, from number `step` on
    acc = gl.zeros([ROWS, _BLOCK], gl.float32, accumulator_layout(128))
    for s in range(gl.maximum(steps, 1)):  # at least one, and the compiler must know it: else no wgmma overlaps another
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        acc = warpgroup_mma(xs.index(stage * CONSUMERS + WG), ws.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        gl.thread_barrier()  # all warps are done with the stage of the step before
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=s > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    gl.thread_barrier()
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
    return acc, step


@gluon.jit
def _store(total, svh, bias, out, row, T, out_stride):
    # linear/reference.py, every operation a single fp32 one; svh, bias, out: at the block's first column
    ACC: gl.constexpr = accumulator_layout(128)
    n = gl.arange(0, 128, gl.SliceLayout(0, ACC))
    v = gl.convert_layout(stage_in_registers(total, 0), ACC, assert_trivial=True)
    v = stage_in_lanes(stage_in_lanes(v, n, 1, 0), n, 2, 1)
    for bit in gl.static_range(3, 7):
        v = gl.convert_layout(stage_in_registers(v, bit), ACC, assert_trivial=True)
    v = v * 0.088388347648 * gl.load(svh + n).to(gl.float32)[None, :]
    if bias is not None:
        v = v + gl.load(bias + n)[None, :]
    t = row + gl.arange(0, ROWS, gl.SliceLayout(1, _NEIGHBOURS))
    at = t.to(gl.int64)[:, None] * out_stride + gl.arange(0, 128, gl.SliceLayout(0, _NEIGHBOURS))[None, :]
    gl.store(out + at, gl.convert_layout(v.to(out.dtype.element_ty), _NEIGHBOURS), mask=(t < T)[:, None])


@gluon.jit
def _let_pass(steps, step, ready, free, STAGES: gl.constexpr):
    # stages that this consumer has no rows for
    for _ in range(steps):
        mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
        gl.thread_barrier()  # no warp may miss a turn of the ring
        mbarrier.arrive(free.index(step % STAGES), count=1)
        step += 1
    return step


@gluon.jit
def consumer(
    WG: gl.constexpr, xs, ws, ready, free, svh, bias, out, T, tokens, out_stride, blocks, NB, STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """WG: which of the tile's tokens. Everything else as the kernel has it."""
    step = 0
    token_blocks = gl.cdiv(T, tokens)
    for tile in range(gl.program_id(0), NB * token_blocks, gl.num_programs(0)):
        column_block, token_block = tile_place(tile, token_blocks, NB)
        row = token_block * tokens + WG * ROWS
        if (row < T) & (tokens > WG * ROWS):
            total = gl.zeros([ROWS, _BLOCK], gl.float32, accumulator_layout(128))
            for split in range(SPLITS):
                steps = first_step(split + 1, blocks, SPLITS) - first_step(split, blocks, SPLITS)
                acc, step = _split_sum(steps, step, WG, xs, ws, ready, free, STAGES)
                if split == 0:
                    total = acc
                else:
                    total += acc
            at = column_block * _BLOCK
            shift = bias
            if bias is not None:
                shift = bias + at
            _store(total, svh + at, shift, out + at, row, T, out_stride)
        else:
            step = _let_pass(2 * blocks, step, ready, free, STAGES)
