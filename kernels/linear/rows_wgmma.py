"""EXL3 linear of 17 to 128 rows on Hopper's `wgmma`: kernel and launcher. One split of 64 columns a program.

As `rows_mma`, with a token tile so wide that the tensor core reads x from shared memory by itself: TMA fills a ring of x tiles, and the
next weights are decoded while `wgmma` works on the last. Row counts above one token tile become more programs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

import math

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.device import device_class
from espalier.kernels.exl3.decode import advance, decode_words, load_at, word_pointers
from espalier.kernels.linear.arrivals import begin
from espalier.kernels.linear.dependent_launch import let_dependents_start, wait_for_inputs
from espalier.kernels.linear.epilogue import block_counter, finish
from espalier.kernels.linear.group import LinearGroup
from espalier.kernels.linear.places import member_of, program_place, row_words, split_blocks
from espalier.kernels.linear.rows_launch import (
    RowsShape,
    evenly,
    kernel_constants,
    launch_grid,
    register_cap,
    scratch_for,
    wgmma_shape,
)
from espalier.kernels.linear.splits import num_splits


@gluon.jit
def _again(index):
    """The same int32, which the compiler does not know: what is made of it is made anew at the end, and holds no registers until then."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [index], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _fetch(xd, row, k, ready, xs, stage, BT: gl.constexpr, there):
    """x[row : row + BT, k : k + 128] into the two halves of a stage, if it is `there`."""
    mbarrier.expect(ready, BT * 128 * 2, pred=there)
    tma.async_copy_global_to_shared(xd, [row, k], ready, xs.index(2 * stage), pred=there)
    tma.async_copy_global_to_shared(xd, [row, k + 64], ready, xs.index(2 * stage + 1), pred=there)


@gluon.jit
def _split_sum(
    xd,
    words,
    counter,
    column,
    row,
    first,
    blocks,
    HELPERS: gl.constexpr,
    RUNS: gl.constexpr,
    INDEX: gl.constexpr,
    W: gl.constexpr,
    BT: gl.constexpr,
    STAGES: gl.constexpr,
    SPARE: gl.constexpr,
    PDL: gl.constexpr,
):
    # the partial sum over blocks `first`, first + 1, ... of 128 inputs; x rows from `row` of the descriptor on; counter, HELPERS: of
    # `arrivals.begin`
    RUN: gl.constexpr = RUNS[INDEX]
    ROW: gl.constexpr = row_words(RUN)
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, BT, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    xs = gl.allocate_shared_memory(gl.float16, [2 * STAGES + SPARE, BT, 64], xd.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p = word_pointers(words, (column - RUN[0]) // 16, 2 * first, ROW, RUN[2], W, W)
    w0, w1 = load_at(p, 0, W, W, True), load_at(p, ROW, W, W, True)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    if PDL:
        let_dependents_start()
        wait_for_inputs()
    for i in gl.static_range(STAGES):
        _fetch(xd, row, (first + i) * 128, ready.index(i), xs, i, BT, i < blocks)
    begin(counter, HELPERS)
    acc = gl.zeros([16 * W, BT], gl.float32, ACC)
    for i in range(blocks):
        stage = i % STAGES
        left = decode_words(w0, A, W, RUN[2], RUN[3])
        # Past the end the last words are read again: a load without a branch or a mask.
        p = advance(p, gl.where(i + 1 < blocks, 2 * ROW, 0))
        w0 = load_at(p, 0, W, W, True)
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        acc = warpgroup_mma(left, xs.index(2 * stage).permute((1, 0)), acc, is_async=True)
        right = decode_words(w1, A, W, RUN[2], RUN[3])
        w1 = load_at(p, ROW, W, W, True)
        acc = warpgroup_mma(right, xs.index(2 * stage + 1).permute((1, 0)), acc, is_async=True)
        acc, left, right = warpgroup_mma_wait(0, deps=[acc, left, right])
        gl.thread_barrier()  # all warps are done with this stage
        _fetch(xd, row, (first + i + STAGES) * 128, ready.index(stage), xs, stage, BT, i + STAGES < blocks)
    return acc


@gluon.jit(do_not_specialize=["T", "out_stride"])
def rows_wgmma(
    xd,
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
    SPARE: gl.constexpr,
    GROUPS: gl.constexpr,
    HELPERS: gl.constexpr,
    PDL: gl.constexpr,
):
    # grid: see `program_place`; a block is 16 W columns. words: a tensor for each run; RUNS: (first column, end, rate2, codebook) of each;
    # ENDS: each member's end
    block, split, token_block = program_place(SPAN)
    column = block * (16 * W)
    first, blocks = split_blocks(split, K, SPLITS)
    member = member_of(column, ENDS)
    # A tile that runs past a member's rows reads the next one's, for outputs nobody stores.
    row = member * T + token_block * BT
    counter = counters + block_counter(_again(block), _again(token_block), N, W)
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, BT, 16])
    acc = gl.zeros([16 * W, BT], gl.float32, ACC)
    for i in gl.static_range(len(RUNS)):
        if (column >= RUNS[i][0]) & (column < RUNS[i][1]):
            acc = _split_sum(
                xd, words[i], counter, column, row, first, blocks, HELPERS, RUNS, i, W, BT, STAGES, SPARE, PDL
            )  # fmt: skip
    finish(
        acc, svh, bias, out, partials, counters, T, out_stride, block, split, token_block, N, BT, SPLITS, GROUPS, HELPERS
    )  # fmt: skip


def scratch_size(in_features: int, widths: tuple[int, ...], rows: int) -> ScratchSize:
    """Grows with the rows."""
    return scratch_for(in_features, sum(widths), rows, wgmma_shape(in_features, sum(widths), rows))


def launch(x_rot: Tensor, group: LinearGroup, out: Tensor, scratch: Scratch) -> None:
    """x_rot: fp16 [members, rows, in] contiguous. out: fp16, bf16 or fp32 [rows, out], rows of neighbours."""
    _, rows, in_features = x_rot.shape
    shape = wgmma_shape(in_features, group.out_features, rows)
    programs = math.prod(launch_grid(group.out_features, num_splits(in_features), rows, shape))
    shape = evenly(shape, programs, 2 * shape.stages, shape.token_tile * 128, device_class(x_rot.device))
    launch_as(x_rot, group, out, scratch, shape)


def launch_as(x_rot: Tensor, group: LinearGroup, out: Tensor, scratch: Scratch, shape: RowsShape) -> None:
    """`launch` cut as the caller likes: for tests, and for measurements."""
    _, rows, in_features = x_rot.shape
    scratch.require(scratch_for(in_features, group.out_features, rows, shape))
    splits = num_splits(in_features)
    tile = [shape.token_tile, 64]
    rows_wgmma[launch_grid(group.out_features, splits, rows, shape)](
        TensorDescriptor.from_tensor(x_rot.view(-1, in_features), tile, gl.NVMMASharedLayout(128, 16, 2)),
        tuple(run.words for run in group.runs),
        group.svh,
        group.bias,
        out,
        scratch.partials,
        scratch.counters,
        rows,
        out.stride(0),
        **kernel_constants(group, shape),
        HELPERS=shape.helpers,
        PDL=True,
        num_warps=shape.warps,
        maxnreg=register_cap(shape, group, device_class(x_rot.device)),
        enable_fp_fusion=False,
        launch_pdl=True,
    )
