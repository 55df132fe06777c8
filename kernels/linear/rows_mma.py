"""EXL3 linear of a few rows on `mma.sync`: kernel and launcher, for any GPU from sm_80 on. One split of 64 columns a program.

The product is transposed: a warp decodes 16 columns of weights straight into the A fragments of the tensor core, the rows of x are its B
operand. Words are loaded two steps of 64 inputs ahead of their decode. x of the whole split lies in shared memory where it is small, and a
step is decoded in one go; else x comes through a ring, and each 16 inputs are multiplied as soon as they are decoded: fewer registers, so
that more programs share an SM. Row counts above one token tile become more programs. Partial sums meet in `epilogue.finish`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

import math

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.dependent_launch import DEPENDENT_LAUNCH
from espalier.kernels.device import device_class
from espalier.kernels.exl3.decode import advance, decode_tile, decode_words, load_at, word_pointers
from espalier.kernels.linear.dependent_launch import let_dependents_start, wait_for_inputs
from espalier.kernels.linear.epilogue import finish
from espalier.kernels.linear.group import LinearGroup
from espalier.kernels.linear.places import member_of, program_place, row_words, split_blocks
from espalier.kernels.linear.rows_launch import (
    RowsShape,
    evenly,
    in_spans,
    kernel_constants,
    launch_grid,
    mma_register_cap,
    mma_shape,
    scratch_for,
)
from espalier.kernels.linear.splits import num_splits


@gluon.jit
def split_sum(
    x,
    words,
    column,
    first,
    blocks,
    T,
    K: gl.constexpr,
    RUNS: gl.constexpr,
    INDEX: gl.constexpr,
    W: gl.constexpr,
    BT: gl.constexpr,
    STAGES: gl.constexpr,
    WHOLE: gl.constexpr,
    PDL: gl.constexpr,
    SPARE: gl.constexpr = 0,
):
    """The partial sum over `blocks` blocks of 128 inputs from block `first` on: fp32 [16 W, BT] for the columns from `column` on.

    x: [T, K]; words: of run INDEX of RUNS. STAGES, WHOLE, SPARE: as in `RowsShape`.
    """
    RUN: gl.constexpr = RUNS[INDEX]
    ROW: gl.constexpr = row_words(RUN)
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    XL: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16] if WHOLE else [4, 8], [W, 1], [1, 0])
    ONCE: gl.constexpr = BT > 8
    xs = gl.allocate_shared_memory(gl.float16, [STAGES + SPARE, BT, 128], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    p = word_pointers(words, (column - RUN[0]) // 16, 2 * first, ROW, RUN[2], W, W)
    w0, w1 = load_at(p, 0, W, W, ONCE), load_at(p, ROW, W, W, ONCE)
    if PDL:
        let_dependents_start()
        wait_for_inputs()
    t = gl.arange(0, BT, gl.SliceLayout(1, XL))
    k = gl.arange(0, 128, gl.SliceLayout(0, XL))
    if WHOLE:
        px = x + t[:, None] * K + (first * 128 + k)[None, :]
        inside = (t < T)[:, None] & (k < 128)[None, :]
        for i in range(blocks):
            async_copy.async_copy_global_to_shared(xs.index(i), px + i * 128, mask=inside)
        async_copy.commit_group()
        async_copy.wait_group(0)
        gl.thread_barrier()
    else:
        # Rows past the end are copies of the last one: a mask for each row would cost a tenth of the loop.
        px = gl.minimum(t, T - 1)[:, None] * K + (first * 128 + k)[None, :]
        every = (t < BT)[:, None] & (k < 128)[None, :]
        for i in gl.static_range(STAGES - 1):
            async_copy.async_copy_global_to_shared(xs.index(i), x + (px + i * 128), mask=every & (i < blocks))
            async_copy.commit_group()
    acc = gl.zeros([16 * W, BT], gl.float32, ACC)
    for i in range(blocks):
        if WHOLE:
            x_block = xs.index(i)
        else:
            async_copy.wait_group(STAGES - 2)
            gl.thread_barrier()
            ahead = i + STAGES - 1
            async_copy.async_copy_global_to_shared(
                xs.index(ahead % STAGES), x + (px + ahead * 128), mask=every & (ahead < blocks)
            )
            async_copy.commit_group()
            x_block = xs.index(i % STAGES)
        for u in gl.static_range(2):
            if WHOLE:
                weights = decode_words(w0, A, W, RUN[2], RUN[3])
            else:
                for tile in gl.static_range(4):
                    x_tile = x_block.slice(64 * u + 16 * tile, 16, dim=1).permute((1, 0)).load(B)
                    acc = mma_v2(decode_tile(w0, tile, A, W, RUN[2], RUN[3]), x_tile, acc)
            if u == 0:
                # Past the end the last words are read again: a load without a branch or a mask.
                p = advance(p, gl.where(i + 1 < blocks, 2 * ROW, 0))
            w2 = load_at(p, u * ROW, W, W, ONCE)
            if WHOLE:
                acc = mma_v2(weights, x_block.slice(64 * u, 64, dim=1).permute((1, 0)).load(B), acc)
            w0, w1 = w1, w2
    if not WHOLE:
        async_copy.wait_group(0)  # masked copies still write zeros, and the memory is used again
        gl.thread_barrier()
    return acc


@gluon.jit(do_not_specialize=["T", "out_stride"])
def rows_mma(
    x,
    words,
    svh,
    bias,
    out,
    partials,
    counters,
    T,
    out_stride,
    K: gl.constexpr,
    N: gl.constexpr,
    RUNS: gl.constexpr,
    ENDS: gl.constexpr,
    SPLITS: gl.constexpr,
    SPAN: gl.constexpr,
    W: gl.constexpr,
    BT: gl.constexpr,
    STAGES: gl.constexpr,
    WHOLE: gl.constexpr,
    SPARE: gl.constexpr,
    GROUPS: gl.constexpr,
    PDL: gl.constexpr,
):
    # grid: see `program_place`; a block is 16 W columns. words: a tensor for each run; RUNS: (first column, end, rate2, codebook) of
    # each; ENDS: each member's end
    block, split, token_block = program_place(SPAN)
    column = block * (16 * W)
    first, blocks = split_blocks(split, K, SPLITS)
    member = member_of(column, ENDS)
    x += (member * T + token_block * BT).to(gl.int64) * K
    rows = T - token_block * BT
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1], instr_shape=[16, 8])
    acc = gl.zeros([16 * W, BT], gl.float32, ACC)
    for i in gl.static_range(len(RUNS)):
        if (column >= RUNS[i][0]) & (column < RUNS[i][1]):
            acc = split_sum(x, words[i], column, first, blocks, rows, K, RUNS, i, W, BT, STAGES, WHOLE, PDL, SPARE)
    finish(acc, svh, bias, out, partials, counters, T, out_stride, block, split, token_block, N, BT, SPLITS, GROUPS)


def scratch_size(in_features: int, widths: tuple[int, ...], rows: int) -> ScratchSize:
    """Grows with the rows."""
    return scratch_for(in_features, sum(widths), rows, mma_shape(in_features, rows))


def launch(x_rot: Tensor, group: LinearGroup, out: Tensor, scratch: Scratch) -> None:
    """x_rot: fp16 [members, rows, in] contiguous. out: fp16, bf16 or fp32 [rows, out], rows of neighbours."""
    _, rows, in_features = x_rot.shape
    device = device_class(x_rot.device)
    shape = in_spans(mma_shape(in_features, rows), in_features, group.out_features, rows)
    if device.capability >= DEPENDENT_LAUNCH:
        programs = math.prod(launch_grid(group.out_features, num_splits(in_features), rows, shape))
        shape = evenly(shape, programs, shape.stages, shape.token_tile * 256, device)
    launch_as(x_rot, group, out, scratch, shape)


def launch_as(x_rot: Tensor, group: LinearGroup, out: Tensor, scratch: Scratch, shape: RowsShape) -> None:
    """`launch` cut as the caller likes: for tests, and for measurements."""
    _, rows, in_features = x_rot.shape
    scratch.require(scratch_for(in_features, group.out_features, rows, shape))
    device = device_class(x_rot.device)
    dependent = device.capability >= DEPENDENT_LAUNCH
    splits = num_splits(in_features)
    rows_mma[launch_grid(group.out_features, splits, rows, shape)](
        x_rot,
        tuple(run.words for run in group.runs),
        group.svh,
        group.bias,
        out,
        scratch.partials,
        scratch.counters,
        rows,
        out.stride(0),
        **kernel_constants(group, shape),
        WHOLE=shape.whole,
        PDL=dependent,
        num_warps=shape.warps,
        maxnreg=mma_register_cap(shape, group, device),
        enable_fp_fusion=False,
        launch_pdl=dependent,
    )
