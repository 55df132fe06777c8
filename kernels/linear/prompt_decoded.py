"""EXL3 linear of very many rows on Hopper: kernel and launcher. Weights are decoded once, into scratch, and multiplied from there.

Columns go span by span: `decode_weights.py` writes a span as fp16, then a persistent, warp-specialized kernel multiplies it
(prompt_decoded_multiply.py) with tiles of 128 columns and 192 tokens, or 128 or 64 where those fill the device better (`choose_spans`).
`prompt_wgmma` decodes each weight once for 256 tokens instead, which costs more power and instructions than the way through memory once rows
are many. All partial sums of a row are formed and added as in every other form.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.device import device_class
from espalier.kernels.linear import decode_weights
from espalier.kernels.linear.group import LinearGroup, Run
from espalier.kernels.linear.prompt_decoded_multiply import CONSUMERS, ROWS, consumer, producer
from espalier.kernels.linear.prompt_schedule import member_ends
from espalier.kernels.linear.prompt_spans import choose_spans
from espalier.kernels.linear.splits import BORDER, num_splits

BLOCK = 128  # columns of a tile
NUM_WARPS = 4  # of the first consumer, as a launch counts them
STAGES = 5  # tiles of x and of weights in shared memory
SPAN_WEIGHTS = 1 << 25  # decoded at a time, at most, but one block of columns at least
_OTHER_WARPS: gl.constexpr = gl.constexpr([4, 4, 1])  # second and third consumer, producer
_REGISTERS: gl.constexpr = gl.constexpr([160, 160, 24])


@gluon.jit(do_not_specialize=["T", "tokens", "blocks", "first_block", "NB"])
def prompt_decoded(
    x, weights, svh, bias, out, T, tokens, out_stride, blocks, first_block, NB, ENDS: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """tokens: of a tile, 64, 128 or 192. blocks: of 128 inputs. NB: column blocks of the span, which begins at block `first_block` of the group.

    svh, bias, out: at the span's first column.
    """
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    xs = gl.allocate_shared_memory(gl.float16, [STAGES * CONSUMERS, ROWS, 64], x.layout)
    ws = gl.allocate_shared_memory(gl.float16, [STAGES, 128, 64], weights.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS)
    gl.warp_specialize(
        [
            (consumer, (0, xs, ws, ready, free, svh, bias, out, T, tokens, out_stride, blocks, NB, STAGES, SPLITS)),
            (consumer, (1, xs, ws, ready, free, svh, bias, out, T, tokens, out_stride, blocks, NB, STAGES, SPLITS)),
            (consumer, (2, xs, ws, ready, free, svh, bias, out, T, tokens, out_stride, blocks, NB, STAGES, SPLITS)),
            (producer, (x, weights, xs, ws, ready, free, T, tokens, blocks, first_block, NB, ENDS, STAGES)),
        ],
        _OTHER_WARPS,
        _REGISTERS,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring columns of a run that are decoded at a time, in blocks of 128: from the run's block `first_block` on."""

    run: Run
    first_block: int
    blocks: int
    tokens: int  # of a tile: 64, 128 or 192


def _most_blocks(in_features: int) -> int:
    return max(1, SPAN_WEIGHTS // (in_features * BLOCK))


def scratch_size(in_features: int, widths: tuple[int, ...], rows: int) -> ScratchSize:
    """The decoded weights of a span, two to a partial sum. The same for all rows."""
    return ScratchSize(partials=min(_most_blocks(in_features), sum(widths) // BLOCK) * BLOCK * in_features // 2)


def spans(group: LinearGroup, rows: int, programs: int) -> list[Span]:
    """In what pieces the group is decoded and multiplied. programs: that run side by side."""
    found = []
    rows = -(-rows // ROWS.value) * ROWS.value  # which changes nothing and leaves few row counts to remember
    for run in group.runs:
        first = 0
        for blocks, tokens in choose_spans(run.columns // BLOCK, rows, _most_blocks(group.in_features), programs):
            found.append(Span(run, first, blocks, tokens))
            first += blocks
    return found


def launch(x_rot: Tensor, group: LinearGroup, out: Tensor, scratch: Scratch) -> None:
    """x_rot: fp16 [members, rows, in] contiguous. out: fp16, bf16 or fp32 [rows, out], rows of neighbours."""
    programs = device_class(x_rot.device).num_sms
    for span in spans(group, x_rot.shape[1], programs):
        launch_span(x_rot, group, span, out, scratch, programs)


def launch_span(x_rot: Tensor, group: LinearGroup, span: Span, out: Tensor, scratch: Scratch, programs: int) -> None:
    """One span, decoded and multiplied. programs: that run side by side."""
    _, rows, in_features = x_rot.shape
    scratch.require(scratch_size(in_features, group.widths, rows))
    weights = scratch.partials[: span.blocks * BLOCK * in_features // 2].view(torch.float16).view(-1, 64)
    decode_weights.launch(span.run, span.first_block, span.blocks, in_features, weights)
    multiply(x_rot, group, span, weights, out, programs)


def multiply(x_rot: Tensor, group: LinearGroup, span: Span, weights: Tensor, out: Tensor, programs: int) -> None:
    """The product with a span's decoded weights, fp16 [in / 64 * 128 * blocks, 64]."""
    _, rows, in_features = x_rot.shape
    tiles = -(-rows // span.tokens) * span.blocks
    first = span.run.first_column + span.first_block * BLOCK
    columns = slice(first, first + span.blocks * BLOCK)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    prompt_decoded[(min(tiles, programs),)](
        TensorDescriptor.from_tensor(x_rot.view(-1, in_features), [ROWS.value, 64], layout),
        TensorDescriptor.from_tensor(weights, [BLOCK, 64], layout),
        group.svh[columns],
        None if group.bias is None else group.bias[columns],
        out[:, columns],
        rows,
        span.tokens,
        out.stride(0),
        in_features // BORDER,
        first // BLOCK,
        span.blocks,
        ENDS=member_ends(group.widths, 0),
        STAGES=STAGES,
        SPLITS=num_splits(in_features),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
