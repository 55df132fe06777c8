"""EXL3 linear of many rows on Hopper: kernel and launcher. Persistent, warp-specialized, weights decoded in registers for `wgmma`.

A program's tile is 128 columns x 128 or 256 tokens: a producer warp for x and two consumer warpgroups (prompt_wgmma_multiply.py). The order of
work is `prompt_schedule.py`'s. All partial sums of a row are formed and added as in every other form.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.device import device_class
from espalier.kernels.linear.group import LinearGroup, Run
from espalier.kernels.linear.prompt_schedule import MAX_PROGRAMS, choose_tokens, deal, member_ends
from espalier.kernels.linear.prompt_wgmma_multiply import consumer, producer
from espalier.kernels.linear.splits import BORDER, num_splits

BLOCK = 128  # columns of a tile
NUM_WARPS = 4  # of the first consumer, as a launch counts them
STAGES = {128: 8, 256: 3}  # tiles of x in shared memory, for each tile's tokens
_OTHER_WARPS: gl.constexpr = gl.constexpr([4, 1])  # second consumer, producer
_REGISTERS: gl.constexpr = gl.constexpr([240, 24])


@gluon.jit(do_not_specialize=["T", "blocks", "whole", "dealers"])
def prompt_wgmma(
    x, words, svh, bias, out, partials, counters, T, out_stride, blocks, whole, dealers, ENDS: gl.constexpr,
    NB: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, RATE2: gl.constexpr,
    CODEBOOK: gl.constexpr,
):  # fmt: skip
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    stages = gl.allocate_shared_memory(gl.float16, [STAGES, BT, 64], x.layout)
    totals = gl.allocate_shared_memory(gl.float32, [BT, 128], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    finished = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    pair = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    mbarrier.init(pair, count=2)
    gl.warp_specialize(
        [
            (consumer, (0, stages, totals, finished, ready, free, pair, words, svh, bias, out, partials, counters, T,
                        out_stride, blocks, whole, dealers, NB, BT, STAGES, SPLITS, RATE2, CODEBOOK)),
            (consumer, (1, stages, totals, finished, ready, free, pair, words, svh, bias, out, partials, counters, T,
                        out_stride, blocks, whole, dealers, NB, BT, STAGES, SPLITS, RATE2, CODEBOOK)),
            (producer, (x, stages, ready, free, T, blocks, whole, dealers, ENDS, NB, BT, STAGES, SPLITS)),
        ],
        _OTHER_WARPS,
        _REGISTERS,
    )  # fmt: skip


def scratch_size(in_features: int, widths: tuple[int, ...], rows: int) -> ScratchSize:
    """Sums of tiles that several programs share. The same for all rows and widths."""
    return ScratchSize(counters=MAX_PROGRAMS, partials=MAX_PROGRAMS * num_splits(in_features) * BLOCK * max(STAGES))


def launch(x_rot: Tensor, group: LinearGroup, out: Tensor, scratch: Scratch) -> None:
    """x_rot: fp16 [members, rows, in] contiguous. out: fp16, bf16 or fp32 [rows, out], rows of neighbours."""
    programs = min(device_class(x_rot.device).num_sms, MAX_PROGRAMS)
    for run in group.runs:
        tokens = choose_tokens(x_rot.shape[1], run.columns // BLOCK, x_rot.shape[2], programs)
        launch_run(x_rot, group, run, out, scratch, tokens, programs)


def launch_run(
    x_rot: Tensor, group: LinearGroup, run: Run, out: Tensor, scratch: Scratch, tokens: int, programs: int
) -> None:
    """One run of the group, cut as the caller likes. tokens: a tile's. programs: that run side by side, at most MAX_PROGRAMS."""
    _, rows, in_features = x_rot.shape
    scratch.require(scratch_size(in_features, group.widths, rows))
    column_blocks, splits = run.columns // BLOCK, num_splits(in_features)
    schedule = deal(-(-rows // tokens) * column_blocks, splits, programs)
    columns = slice(run.first_column, run.first_column + run.columns)
    x = TensorDescriptor.from_tensor(x_rot.view(-1, in_features), [tokens, 64], gl.NVMMASharedLayout(128, 16, 2))
    prompt_wgmma[(schedule.programs,)](
        x,
        run.words,
        group.svh[columns],
        None if group.bias is None else group.bias[columns],
        out[:, columns],
        scratch.partials,
        scratch.counters,
        rows,
        out.stride(0),
        in_features // BORDER,
        schedule.whole,
        schedule.dealers,
        ENDS=member_ends(group.widths, run.first_column),
        NB=column_blocks,
        BT=tokens,
        STAGES=STAGES[tokens],
        SPLITS=splits,
        RATE2=int(2 * run.rate),
        CODEBOOK=run.codebook.number,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
