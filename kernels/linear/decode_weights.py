"""Packed words -> fp16 weights in scratch, for products that read each weight many times: kernel and launcher.

What is written is a stack of steps of 64 inputs, [in / 64, columns, 64] in that order, so that a tile of neighbouring columns is one piece of
memory. The weights are those that every other form decodes in registers. Knows neither splits nor rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from espalier.kernels.exl3.decode import JOIN_IMAD, decode_words, load_words
from espalier.kernels.linear.group import Run

STEP = 64  # inputs of a step
BLOCK = 128  # columns of a program
NUM_WARPS = 4
_TILES: gl.constexpr = gl.constexpr(8)  # of 16 columns: two a warp
_STEPS = 2  # of a program


@gluon.jit(do_not_specialize=["first_block", "blocks"])
def decode_weights(
    words, weights, first_block, blocks, ROW: gl.constexpr, STEPS: gl.constexpr, RATE2: gl.constexpr,
    CODEBOOK: gl.constexpr,
):  # fmt: skip
    """weights: fp16 [in / 64, 128 * blocks, 64], of the run's columns from 128 * first_block on. Grid: blocks, in / (64 * STEPS)."""
    W: gl.constexpr = gl.num_warps()
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8]), 2)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    block = gl.program_id(0)
    n = gl.arange(0, 128, gl.SliceLayout(1, L))
    k = gl.arange(0, 64, gl.SliceLayout(0, L))
    inside = n[:, None] * 64 + k[None, :]
    first = gl.program_id(1) * STEPS
    tile = (first_block + block) * _TILES
    following = load_words(words, tile, first, ROW, RATE2, _TILES, W)
    for step in gl.static_range(STEPS):
        packed = following
        if step + 1 < STEPS:
            following = load_words(words, tile, first + step + 1, ROW, RATE2, _TILES, W)
        w = gl.convert_layout(decode_words(packed, A, _TILES, RATE2, CODEBOOK, JOIN_IMAD), L)
        place = ((first + step) * blocks + block).to(gl.int64) * (128 * 64)
        gl.store(weights + place + inside, w)


def launch(run: Run, first_block: int, blocks: int, in_features: int, weights: Tensor) -> None:
    """Decodes `blocks` blocks of 128 columns of a run. weights: fp16 [in / 64 * 128 * blocks, 64] contiguous."""
    decode_weights[(blocks, in_features // (STEP * _STEPS))](
        run.words,
        weights,
        first_block,
        blocks,
        ROW=int(run.columns * 2 * run.rate),
        STEPS=_STEPS,
        RATE2=int(2 * run.rate),
        CODEBOOK=run.codebook.number,
        num_warps=NUM_WARPS,
    )
