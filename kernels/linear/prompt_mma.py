"""EXL3 linear of many rows on `mma.sync`: kernel and launcher. Portable: compute capability 8.0 and up.

A program owns a tile of 128 columns x BT tokens and walks through all splits, 32 columns a warp. Weights are decoded in registers, x comes
by cp.async through a ring in shared memory, and the running total waits in shared memory while the next split is summed: registers hold
one set of accumulators only. The finished tile is rotated and stored from there. No scratch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.device import device_class
from espalier.kernels.exl3.decode import JOIN_IMAD, decode_tile, load_words
from espalier.kernels.linear.group import LinearGroup, Run
from espalier.kernels.linear.places import member_of
from espalier.kernels.linear.prompt_output import store_tokens
from espalier.kernels.linear.prompt_schedule import member_ends
from espalier.kernels.linear.splits import BORDER, num_splits

BLOCK = 128  # columns of a tile
NUM_WARPS = 4
_W: gl.constexpr = gl.constexpr(NUM_WARPS)
_GROUP: gl.constexpr = gl.constexpr(8)  # column blocks that share each tile of x while it is in the L2


@dataclass(frozen=True, slots=True)
class MmaShape:
    """tokens: of a tile. stages: tiles of x, 64 inputs each, in shared memory."""

    tokens: int
    stages: int

    @property
    def shared_memory(self) -> int:
        """Bytes: totals in fp32, and the ring."""
        return self.tokens * (BLOCK * 4 + self.stages * 64 * 2)


def choose_shape(shared_memory: int) -> MmaShape:
    """shared_memory: bytes that a program may ask for. Two programs of the result, or three, fit an SM."""
    deep = MmaShape(64, 3)
    return deep if 2 * deep.shared_memory <= shared_memory else MmaShape(64, 2)


@gluon.jit(do_not_specialize=["T", "blocks"])
def prompt_mma(
    x,
    words,
    svh,
    bias,
    out,
    T,
    out_stride,
    blocks,
    ENDS: gl.constexpr,
    NB: gl.constexpr,
    BT: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    RATE2: gl.constexpr,
    CODEBOOK: gl.constexpr,
):
    # grid: tiles. x: fp16 [members, T, 128 blocks]. ENDS: each member's end, in column blocks
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[_W, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    XL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_W, 1], [1, 0])
    ROW: gl.constexpr = NB * 8 * 16 * RATE2
    token_blocks = gl.cdiv(T, BT)
    group = gl.program_id(0) // (_GROUP * token_blocks)
    inside = gl.program_id(0) % (_GROUP * token_blocks)
    width = gl.minimum(NB - group * _GROUP, _GROUP)
    column_block, row = group * _GROUP + inside % width, inside // width * BT
    member = member_of(column_block, ENDS)

    stages = gl.allocate_shared_memory(gl.float16, [STAGES, BT, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    totals = gl.allocate_shared_memory(gl.float32, [BT, 128], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    t = gl.minimum(
        row + gl.arange(0, BT, gl.SliceLayout(1, XL)), T - 1
    )  # rows past the end: copies of the last one, never stored
    k = gl.arange(0, 64, gl.SliceLayout(0, XL))
    px = x + (member * T + t).to(gl.int64)[:, None] * (blocks * 128) + k[None, :]
    end = blocks * 2 - 1
    for i in gl.static_range(STAGES - 1):
        async_copy.async_copy_global_to_shared(stages.index(i), px + gl.minimum(i, end) * 64)
        async_copy.commit_group()
    tile = column_block * 8
    step = gl.to_tensor(0)
    packed = load_words(words, tile, step, ROW, RATE2, 2 * _W, _W)
    for split in range(SPLITS):
        acc = gl.zeros([128, BT], gl.float32, ACC)
        for _ in range((split + 1) * blocks // SPLITS - split * blocks // SPLITS):
            for _ in gl.static_range(2):
                async_copy.wait_group(STAGES - 2)
                gl.thread_barrier()
                # Past the end the last step is read again: no branch and no mask.
                at = gl.minimum(step + STAGES - 1, end)
                async_copy.async_copy_global_to_shared(stages.index((step + STAGES - 1) % STAGES), px + at * 64)
                async_copy.commit_group()
                x_step = stages.index(step % STAGES)
                following = load_words(words, tile, gl.minimum(step + 1, end), ROW, RATE2, 2 * _W, _W)
                # Each 16 inputs are multiplied as soon as they are decoded, which keeps few weights and rows in registers.
                for i in gl.static_range(4):
                    weights = decode_tile(packed, i, A, 2 * _W, RATE2, CODEBOOK, JOIN_IMAD)
                    acc = mma_v2(weights, x_step.slice(16 * i, 16, dim=1).permute((1, 0)).load(B), acc)
                packed = following
                step += 1
        if split > 0:
            acc += totals.permute((1, 0)).load(ACC)
        totals.permute((1, 0)).store(acc)
    async_copy.wait_group(0)
    gl.thread_barrier()
    n = column_block * 128
    shift = bias
    if bias is not None:
        shift = bias + n
    store_tokens(totals, svh + n, shift, out + n, row, T, out_stride, BT)


def scratch_size(in_features: int, widths: tuple[int, ...], rows: int) -> ScratchSize:
    """Nothing."""
    return ScratchSize()


def launch(x_rot: Tensor, group: LinearGroup, out: Tensor, scratch: Scratch) -> None:
    """x_rot: fp16 [members, rows, in] contiguous. out: fp16, bf16 or fp32 [rows, out], rows of neighbours."""
    shape = choose_shape(device_class(x_rot.device).shared_memory)
    for run in group.runs:
        launch_run(x_rot, group, run, out, shape)


def launch_run(x_rot: Tensor, group: LinearGroup, run: Run, out: Tensor, shape: MmaShape) -> None:
    """One run of the group, cut as the caller likes."""
    _, rows, in_features = x_rot.shape
    column_blocks = run.columns // BLOCK
    columns = slice(run.first_column, run.first_column + run.columns)
    prompt_mma[(-(-rows // shape.tokens) * column_blocks,)](
        x_rot,
        run.words,
        group.svh[columns],
        None if group.bias is None else group.bias[columns],
        out[:, columns],
        rows,
        out.stride(0),
        in_features // BORDER,
        ENDS=member_ends(group.widths, run.first_column),
        NB=column_blocks,
        BT=shape.tokens,
        STAGES=shape.stages,
        SPLITS=num_splits(in_features),
        RATE2=int(2 * run.rate),
        CODEBOOK=run.codebook.number,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
