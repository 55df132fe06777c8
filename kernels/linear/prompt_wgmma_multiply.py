"""The roles of the Hopper prompt kernel: a producer warp that feeds tiles of x by TMA, two consumer warpgroups that decode and multiply.

A consumer owns 64 of the tile's 128 columns and decodes their weights in registers, two steps a turn: the odd step's while the even step's
`wgmma` runs, and both consumers at their own pace, so that decoding does not empty the tensor cores. The accumulators take what registers there
are: running totals lie in shared memory, where each thread reads and writes its own words only, and at a tile's end the same memory turns
the sums round for the rotation of 128 columns. `prompt_wgmma.py` launches, `prompt_wgmma_work.py` says which program does what.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from espalier.kernels.exl3.decode import JOIN_IMAD, decode_words, load_words
from espalier.kernels.linear.places import member_of
from espalier.kernels.linear.prompt_output import store_tokens
from espalier.kernels.linear.prompt_sums import (
    accumulator_layout,
    from_private,
    private_layout,
    private_offsets,
    sum_apart,
    to_private,
)
from espalier.kernels.linear.prompt_wgmma_work import first_step, owner, segment, segments

_WARPS: gl.constexpr = gl.constexpr(4)  # of a consumer
_COLUMNS: gl.constexpr = gl.constexpr(64)  # of a consumer
_PARTS: gl.constexpr = gl.constexpr(4)  # a total is moved in so many parts, each a quarter of the registers


@gluon.jit
def producer(
    x, stages, ready, free, T, blocks, whole, dealers, ENDS: gl.constexpr, NB: gl.constexpr, BT: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """x: descriptor of [members * T, in] with boxes [BT, 64]. ENDS: each member's end, in column blocks of the run."""
    step = 0
    for i in range(segments(T, whole, dealers, NB, BT, SPLITS)):
        column_block, token_block, first, last, _, _ = segment(i, T, whole, dealers, NB, BT, SPLITS)
        member = member_of(column_block, ENDS)
        # A tile that runs past a member's rows reads the next one's, for outputs nobody stores.
        row = member * T + token_block * BT
        for k in range(first_step(first, blocks, SPLITS), first_step(last, blocks, SPLITS)):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), BT * 64 * 2)
            tma.async_copy_global_to_shared(x, [row, k * 64], ready.index(stage), stages.index(stage))
            step += 1


# ---- running totals in shared memory; the accumulators are in the form of prompt_sums.py ----


@gluon.jit
def _quarters(v):
    # [4 n, 128, 4] -> four of [n, 128, 4]; registers keep their places
    N: gl.constexpr = v.shape[0] // 4
    Q: gl.constexpr = private_layout(N)
    a, b = v.reshape([2, 2, N, 128, 4]).permute((2, 3, 4, 1, 0)).split()
    q0, q1 = a.split()
    q2, q3 = b.split()
    return gl.convert_layout(q0, Q), gl.convert_layout(q1, Q), gl.convert_layout(q2, Q), gl.convert_layout(q3, Q)


@gluon.jit
def _of_quarters(q0, q1, q2, q3):
    N: gl.constexpr = q0.shape[0]
    q = gl.join(gl.join(q0, q1), gl.join(q2, q3))
    return q.permute((4, 3, 0, 1, 2)).reshape([4 * N, 128, 4])


@gluon.jit
def _add_total(acc, mine):
    # accumulators + the running total in shared memory
    N: gl.constexpr = acc.shape[1] // 32
    Q: gl.constexpr = private_layout(N)
    q0, q1, q2, q3 = _quarters(to_private(acc))
    q0 += mine.slice(0, N, dim=0).load(Q)
    q1 += mine.slice(N, N, dim=0).load(Q)
    q2 += mine.slice(2 * N, N, dim=0).load(Q)
    q3 += mine.slice(3 * N, N, dim=0).load(Q)
    return from_private(_of_quarters(q0, q1, q2, q3))


@gluon.jit
def _keep_total(acc, mine, IS_FIRST: gl.constexpr):
    # a split's sum becomes the running total, or is added to it, a quarter at a time
    N: gl.constexpr = acc.shape[1] // 32
    Q: gl.constexpr = private_layout(N)
    q = _quarters(to_private(acc))
    for part in gl.static_range(_PARTS):
        place = mine.slice(part * N, N, dim=0)
        v = q[part]
        if not IS_FIRST:
            v += place.load(Q)
        place.store(v)


@gluon.jit
def _meet(pair, meetings):
    # both consumers have come this far, and see what the other has written
    gl.thread_barrier()
    mbarrier.arrive(pair, count=1)
    mbarrier.wait(pair, meetings & 1)


@gluon.jit
def consumer(
    WG: gl.constexpr, stages, totals, finished, ready, free, pair, words, svh, bias, out, partials, counters, T,
    out_stride, blocks, whole, dealers, NB: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr,
    SPLITS: gl.constexpr, RATE2: gl.constexpr, CODEBOOK: gl.constexpr,
):  # fmt: skip
    """WG: which half of the columns. totals: fp32 [BT, 128]. finished: int32 [1]. Everything else as the kernel has it."""
    ACC: gl.constexpr = accumulator_layout(BT)
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    F: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    PRIVATE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [2, 1, 0])
    ROW: gl.constexpr = NB * 8 * 16 * RATE2
    SLOT: gl.constexpr = 2 * _COLUMNS * BT
    mine = totals._reinterpret(gl.float32, [2 * (BT // 8), 128, 4], PRIVATE).slice(WG * (BT // 8), BT // 8, dim=0)
    halves = totals._reinterpret(gl.float32, [2, BT // 2, 128], totals.layout)
    columns = totals.slice(_COLUMNS * WG, _COLUMNS, dim=1).permute((1, 0))
    left = partials + WG * (_COLUMNS * BT)
    slot = left + gl.program_id(0).to(gl.int64) * (SPLITS * SLOT)
    step = 0
    meetings = 0
    for i in range(segments(T, whole, dealers, NB, BT, SPLITS)):
        column_block, token_block, first, last, shared, units = segment(i, T, whole, dealers, NB, BT, SPLITS)
        tile = column_block * 8 + WG * _WARPS
        k = first_step(first, blocks, SPLITS)
        end = first_step(last, blocks, SPLITS) - 1
        even = decode_words(
            load_words(words, tile, k, ROW, RATE2, _WARPS, _WARPS), A, _WARPS, RATE2, CODEBOOK, JOIN_IMAD
        )
        k = gl.minimum(k + 1, end)
        packed = load_words(words, tile, k, ROW, RATE2, _WARPS, _WARPS)
        acc = gl.zeros([_COLUMNS, BT], gl.float32, ACC)
        for split in range(first, last):
            acc = gl.zeros([_COLUMNS, BT], gl.float32, ACC)
            steps = first_step(split + 1, blocks, SPLITS) - first_step(split, blocks, SPLITS)
            # A `wgmma` reads its weights' registers until it is waited for: what is decoded meanwhile has its own, and nothing moves from one
            # turn to the next on its way (as it would, if a step's weights became "the last step's").
            # At least one turn, and the compiler must know it: else it lets no wgmma overlap another.
            for _ in range(gl.maximum(steps // 2, 1)):
                stage = step % STAGES
                mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
                acc = warpgroup_mma(even, stages.index(stage).permute((1, 0)), acc, is_async=True)
                odd = decode_words(packed, A, _WARPS, RATE2, CODEBOOK, JOIN_IMAD)
                k = gl.minimum(k + 1, end)
                packed = load_words(words, tile, k, ROW, RATE2, _WARPS, _WARPS)
                after = (step + 1) % STAGES
                mbarrier.wait(ready.index(after), ((step + 1) // STAGES) & 1)
                acc = warpgroup_mma(odd, stages.index(after).permute((1, 0)), acc, is_async=True)
                acc, even = warpgroup_mma_wait(1, deps=[acc, even])
                gl.thread_barrier()
                mbarrier.arrive(free.index(stage), count=1)
                even = decode_words(packed, A, _WARPS, RATE2, CODEBOOK, JOIN_IMAD)
                k = gl.minimum(k + 1, end)
                packed = load_words(words, tile, k, ROW, RATE2, _WARPS, _WARPS)
                acc, odd = warpgroup_mma_wait(0, deps=[acc, odd])
                gl.thread_barrier()
                mbarrier.arrive(free.index(after), count=1)
                step += 2
            if first > 0:  # an earlier program has the tile's head: every later sum is kept apart
                gl.store(slot + split * SLOT + private_offsets(BT // 8), to_private(acc))
            elif split == 0:
                if SPLITS > 1:
                    _keep_total(acc, mine, True)
            elif split < SPLITS - 1:
                _keep_total(acc, mine, False)
        if last - first == SPLITS:
            if SPLITS > 1:
                acc = _add_total(acc, mine)
            done = 1
        else:
            if first == 0:
                Q: gl.constexpr = private_layout(BT // 32)
                for part in gl.static_range(_PARTS):
                    v = mine.slice(part * (BT // 32), BT // 32, dim=0).load(Q)
                    gl.store(slot + part * (BT // 32) * 512 + private_offsets(BT // 32), v)
            _meet(pair, meetings)  # both halves of the columns are stored
            unit = shared * SPLITS
            if WG == 0:
                seen = gl.atomic_add(counters + shared, 1, sem="acq_rel")
                others = owner(unit + SPLITS - 1, units, dealers) - owner(unit, units, dealers)
                finished.store(gl.full([1], 0, gl.int32, F) + (seen == others).to(gl.int32))
            _meet(pair, meetings + 1)  # the verdict is known
            meetings += 2
            done = gl.max(finished.load(F), 0)
            if done != 0:
                acc = sum_apart(left, unit, units, dealers, SPLITS, SLOT, BT)
                if WG == 0:
                    gl.atomic_xchg(counters + shared, 0, sem="relaxed")
        _meet(pair, meetings)  # nobody reads a total any more
        if done != 0:
            columns.store(acc)
        _meet(pair, meetings + 1)  # all sums lie in the memory
        if done != 0:
            HALF: gl.constexpr = BT // 2
            shift = bias
            if bias is not None:
                shift = bias + column_block * 128
            store_tokens(
                halves.index(WG), svh + column_block * 128, shift, out + column_block * 128,
                token_block * BT + WG * HALF, T, out_stride, HALF,
            )  # fmt: skip
        _meet(pair, meetings + 2)  # the memory may hold totals again
        meetings += 3
