"""Packed trellis -> dense weight in plain Triton: kernel and launcher. For tests, and for whoever wants the numbers."""
# ruff: noqa: N803 (compile-time constants of kernels are in capitals, as Triton's own are)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.decode_plain import decode_step

_TILES = 8  # column tiles of one program


@triton.jit
def _reconstruct(words, out, tiles, TILES: tl.constexpr, RATE2: tl.constexpr, CODEBOOK: tl.constexpr):
    step, tile = tl.program_id(0), tl.program_id(1) * TILES
    weights = decode_step(words, tile, step, tiles, TILES, RATE2, CODEBOOK)
    k = (step * 64 + tl.arange(0, 64)).to(tl.int64)
    n = tile * 16 + tl.arange(0, 16 * TILES)
    tl.store(out + k[:, None] * (tiles * 16) + n[None, :], weights)


def reconstruct(words: Tensor, codebook: Codebook, out: Tensor | None = None) -> Tensor:
    """int32 [in/64, out/16, 32 * rate] (`exl3/pack.py`) -> fp16 [in, out]: the inner weight, bit for bit `reference.decode_inner`.

    out: where to write it, contiguous. out/16 must be a multiple of 8, as it is for every linear.
    """
    steps, tiles, size = words.shape
    assert words.dtype == torch.int32 and words.is_contiguous() and tiles % _TILES == 0
    if out is None:
        out = torch.empty((steps * 64, tiles * 16), dtype=torch.float16, device=words.device)
    assert out.shape == (steps * 64, tiles * 16) and out.dtype == torch.float16 and out.is_contiguous()
    _reconstruct[(steps, tiles // _TILES)](
        words, out, tiles, TILES=_TILES, RATE2=size // 16, CODEBOOK=codebook.number, num_warps=4
    )
    return out
