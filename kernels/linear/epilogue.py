"""Gluon device functions that end a split product: partial sums left in scratch, then rotation, scales, bias and store of the output.

A program owns 64 columns with 4 warps, or 128 with 8 (the transposed product: columns are M of the tensor core's tile, tokens are N). The
rotation mixes 128, so the programs of a block of 128 columns share one counter, and the last of them to arrive, over all splits, finish the
block (`arrivals.py`): they add the partial sums in the order of the splits and do the output's arithmetic as `linear/reference.py` defines
it. Compile kernels that use it with `enable_fp_fusion=False`. Knows neither rates nor how a partial sum came to be.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from espalier.kernels.linear.arrivals import arrive, leave
from espalier.kernels.linear.rows_launch import BLOCK

_BLOCK: gl.constexpr = gl.constexpr(BLOCK)


@gluon.constexpr_function
def _private_layout(groups, warps):
    return gl.BlockedLayout([groups, 1, 4], [1, 32, 1], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def _turn_layout(low_bit, tokens, warps):
    """[128, tokens]: column bits low_bit..low_bit+2 lie in registers, the lowest token bits in lanes and warps, the others in registers."""
    in_warps = [[0, 2 << bit] for bit in range(2 if warps == 4 else 3)]
    in_lanes = [[1 << bit, 0] for bit in range(7) if not low_bit <= bit < low_bit + 3] + [[0, 1]]
    in_registers = [[1 << bit, 0] for bit in range(low_bit, low_bit + 3)]
    in_registers += [[0, token] for token in (8, 16, 32, 64) if 2 * warps <= token < tokens]
    return gl.DistributedLinearLayout(in_registers, in_lanes, in_warps, [], [128, tokens])


@gluon.jit
def _private_offsets(GROUPS: gl.constexpr, SUMS: gl.constexpr, W: gl.constexpr):
    # A thread's accumulators in groups of four neighbours, 16 bytes a lane: the place is private to the thread. 128 threads have 64
    # columns; the next 128 begin SUMS further.
    P: gl.constexpr = _private_layout(GROUPS, W)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, P)))
    thread = gl.arange(0, 32 * W, gl.SliceLayout(0, gl.SliceLayout(2, P)))
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, P)))
    return (group * 512)[:, None, None] + (thread // 128 * SUMS + thread % 128 * 4)[None, :, None] + i[None, None, :]


@gluon.jit
def _to_private(acc, BT: gl.constexpr, W: gl.constexpr):
    # accumulators [16 W, BT] -> [BT/8, 32 W, 4], no value leaves its thread
    v = acc.reshape([W, 2, 8, BT // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([BT // 8, 32 * W, 4])
    return gl.convert_layout(v, _private_layout(BT // 8, W))


@gluon.jit
def _from_private(v, GROUPS: gl.constexpr, W: gl.constexpr):
    # the inverse, for GROUPS groups: [GROUPS, 32 W, 4] -> [16 W, 8 GROUPS]
    return v.reshape([GROUPS, W, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([16 * W, 8 * GROUPS])


@gluon.jit
def _butterfly(v, BIT: gl.constexpr):
    # one stage of the transform along the columns of [128, tokens]; column bit BIT lies in registers
    TOKENS: gl.constexpr = v.shape[1]
    HALF: gl.constexpr = 1 << BIT
    low, high = v.reshape([64 // HALF, 2, HALF, TOKENS]).permute((0, 2, 3, 1)).split()
    return gl.join(low + high, low - high).permute((0, 3, 1, 2)).reshape([128, TOKENS])


@gluon.jit
def _transform(v, TOKENS: gl.constexpr, W: gl.constexpr):
    """fp32 [128, TOKENS] -> the unscaled transform of each token's column block, stages in the order of index bits 0..6."""
    v = gl.convert_layout(v, _turn_layout(0, TOKENS, W))
    v = _butterfly(_butterfly(_butterfly(v, 0), 1), 2)
    v = gl.convert_layout(v, _turn_layout(3, TOKENS, W))
    v = _butterfly(_butterfly(_butterfly(v, 3), 4), 5)
    v = gl.convert_layout(v, _turn_layout(4, TOKENS, W))
    return gl.convert_layout(_butterfly(v, 6), _turn_layout(4, TOKENS, W))


@gluon.jit
def _sum_of_splits(place, GROUPS: gl.constexpr, SPLITS: gl.constexpr, STRIDE: gl.constexpr, W: gl.constexpr):
    # left to right, whatever the order in which they arrived; past the L1, which may hold another launch's
    total = gl.load(place, cache_modifier=".cg")
    for split in gl.static_range(1, SPLITS):
        total += gl.load(place + split * STRIDE, cache_modifier=".cg")
    return _from_private(total, GROUPS, W)


@gluon.jit
def _finished(place, scale, shift, TOKENS: gl.constexpr, SPLITS: gl.constexpr, SUMS: gl.constexpr, W: gl.constexpr):
    # fp32 [128, TOKENS], of the partial sums at `place`
    whole = _sum_of_splits(place, TOKENS // 8, SPLITS, 2 * SUMS, W)
    if W == 4:
        right = _sum_of_splits(place + SUMS, TOKENS // 8, SPLITS, 2 * SUMS, W)
        whole = gl.join(whole, right).permute((2, 0, 1)).reshape([_BLOCK, TOKENS])
    # Each a single rounded operation, in this order: linear/reference.py rotate_back.
    y = _transform(whole, TOKENS, W) * 0.088388347648 * scale
    if shift is not None:
        y = y + shift
    return y


@gluon.jit
def block_counter(block, token_block, N: gl.constexpr, W: gl.constexpr):
    """Which counter the programs of a block of 128 columns and a token tile share."""
    return token_block * (N // _BLOCK) + block // (8 // W)


@gluon.jit
def finish(
    acc,
    svh,
    bias,
    out,
    partials,
    counters,
    T,
    out_stride,
    block,
    split,
    token_block,
    N: gl.constexpr,
    BT: gl.constexpr,
    SPLITS: gl.constexpr,
    GROUPS: gl.constexpr,
    HELPERS: gl.constexpr = 1,
):
    """Leave one split's sum; the last programs to arrive at a block of 128 columns store the block's output and zero its counter.

    acc: fp32 [16 W, BT] in a layout of W = 4 or 8 warps, 16 columns each (mma version 2 or 3). svh: fp16 [N]. bias: fp32 [N] or None.
    out: [T, N], rows `out_stride` apart. block, split, token_block: which columns (counted in acc's), split and rows acc is of.
    partials, counters: see `rows_launch.scratch_for`. GROUPS: eights of tokens that are finished together, W / 4 at least. HELPERS: as in
    `arrivals.arrive`; where there are several, each program must have begun (`arrivals.begin`).
    """
    W: gl.constexpr = acc.shape[0] // 16
    HALVES: gl.constexpr = 8 // W  # programs that share a split of 128 columns
    SUMS: gl.constexpr = 64 * BT
    TOKENS: gl.constexpr = 8 * GROUPS
    shared = block_counter(block, token_block, N, W)
    base = partials + shared.to(gl.int64) * (2 * SPLITS * SUMS)
    mine = base + (split * 2 + block % HALVES) * SUMS
    gl.store(mine + _private_offsets(BT // 8, SUMS, W), _to_private(acc, BT, W))
    gl.thread_barrier()
    index, count = arrive(counters + shared, HALVES * SPLITS, HELPERS)
    if index >= 0:
        L: gl.constexpr = _turn_layout(4, TOKENS, W)
        n = block // HALVES * _BLOCK + gl.arange(0, _BLOCK, gl.SliceLayout(1, L))
        t = token_block * BT + gl.arange(0, TOKENS, gl.SliceLayout(0, L))
        scale = gl.load(svh + n).to(gl.float32)[:, None]
        shift = None
        if bias is not None:
            shift = gl.load(bias + n)[:, None]
        place = base + _private_offsets(GROUPS, SUMS, W)
        at = out + t.to(gl.int64)[None, :] * out_stride + n[:, None]
        turns = gl.cdiv(gl.minimum(T - token_block * BT, BT), TOKENS)
        if HELPERS == 1:
            for _ in range(turns):
                y = _finished(place, scale, shift, TOKENS, SPLITS, SUMS, W)
                gl.store(at, y.to(out.dtype.element_ty), mask=(t < T)[None, :] & (n < N)[:, None])
                t += TOKENS
                at += TOKENS * out_stride
                place += TOKENS * 64
        else:
            # Offsets made anew each turn hold fewer registers than pointers that move.
            for turn in range(index, turns, count):
                y = _finished(place + turn * (TOKENS * 64), scale, shift, TOKENS, SPLITS, SUMS, W)
                inside = (t < T - turn * TOKENS)[None, :] & (n < N)[:, None]
                gl.store(at + turn * (TOKENS * out_stride), y.to(out.dtype.element_ty), mask=inside)
        leave(counters + shared, count, HELPERS)
