"""The roles of the Hopper prompt kernel on decoded weights: a producer warp that feeds tiles by TMA, three consumer warpgroups that multiply.

A consumer owns 64 of the tile's 192 tokens and all its 128 columns, so that accumulators and running totals fit its registers together: where
a split ends, it adds them while the other two keep the tensor cores busy. Columns are N of `wgmma`, so the rotation of 128 of them needs no
other warp, and consumers never meet. `prompt_decoded.py` launches, `prompt_wgmma_work.py` says which program does what.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from espalier.kernels.linear.places import member_of
from espalier.kernels.linear.prompt_output import stage_in_lanes, stage_in_registers
from espalier.kernels.linear.prompt_sums import accumulator_layout, private_offsets, sum_apart, to_private
from espalier.kernels.linear.prompt_wgmma_work import first_step, owner, segment, segments

CONSUMERS: gl.constexpr = gl.constexpr(3)
ROWS: gl.constexpr = gl.constexpr(64)  # tokens of a consumer
TOKENS: gl.constexpr = gl.constexpr(192)  # of a tile
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
    x, weights, xs, ws, ready, free, T, blocks, whole, dealers, first_block, NB, ENDS: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """x: descriptor of [members * T, in], boxes [64, 64]. weights: of [in / 64 * 128 * NB, 64], boxes [128, 64]."""
    step = 0
    for i in range(segments(T, whole, dealers, NB, TOKENS, SPLITS)):
        column_block, token_block, first, last, _, _ = segment(i, T, whole, dealers, NB, TOKENS, SPLITS)
        # A tile that runs past a member's rows reads the next one's, for outputs nobody stores.
        row = member_of(first_block + column_block, ENDS) * T + token_block * TOKENS
        for k in range(first_step(first, blocks, SPLITS), first_step(last, blocks, SPLITS)):
            stage = step % STAGES
            here = ready.index(stage)
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(here, (TOKENS + _BLOCK) * 64 * 2)
            tma.async_copy_global_to_shared(weights, [(k * NB + column_block) * _BLOCK, 0], here, ws.index(stage))
            for part in gl.static_range(CONSUMERS):
                place = xs.index(stage * CONSUMERS + part)
                tma.async_copy_global_to_shared(x, [row + part * ROWS, k * 64], here, place)
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
    WG: gl.constexpr, xs, ws, ready, free, svh, bias, out, partials, counters, T, out_stride, blocks, whole, dealers,
    NB, STAGES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """WG: which of the tile's tokens. Everything else as the kernel has it."""
    ACC: gl.constexpr = accumulator_layout(128)
    SLOT: gl.constexpr = TOKENS * _BLOCK
    left = partials + WG * (ROWS * _BLOCK)
    slot = left + gl.program_id(0).to(gl.int64) * (SPLITS * SLOT)
    step = 0
    for i in range(segments(T, whole, dealers, NB, TOKENS, SPLITS)):
        column_block, token_block, first, last, shared, units = segment(i, T, whole, dealers, NB, TOKENS, SPLITS)
        row = token_block * TOKENS + WG * ROWS
        if row < T:
            total = gl.zeros([ROWS, _BLOCK], gl.float32, ACC)
            for split in range(first, last):
                steps = first_step(split + 1, blocks, SPLITS) - first_step(split, blocks, SPLITS)
                acc, step = _split_sum(steps, step, WG, xs, ws, ready, free, STAGES)
                if first > 0:  # an earlier program has the tile's head: every later sum is kept apart
                    gl.store(slot + split * SLOT + private_offsets(16), to_private(acc))
                elif split == 0:
                    total = acc
                else:
                    total += acc
            done = 1
            if last - first < SPLITS:
                if first == 0:
                    gl.store(slot + private_offsets(16), to_private(total))
                gl.thread_barrier()  # all of this consumer's sums are stored
                unit = shared * SPLITS
                others = owner(unit + SPLITS - 1, units, dealers) - owner(unit, units, dealers)
                counter = counters + shared * CONSUMERS + WG
                done = (gl.atomic_add(counter, 1, sem="acq_rel") == others).to(gl.int32)
                if done != 0:
                    total = sum_apart(left, unit, units, dealers, SPLITS, SLOT, 128)
                    gl.atomic_xchg(counter, 0, sem="relaxed")
            if done != 0:
                at = column_block * _BLOCK
                shift = bias
                if bias is not None:
                    shift = bias + at
                _store(total, svh + at, shift, out + at, row, T, out_stride)
        else:
            step = _let_pass(
                first_step(last, blocks, SPLITS) - first_step(first, blocks, SPLITS), step, ready, free, STAGES
            )
