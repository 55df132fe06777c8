"""Trellis -> weights, and x @ W, in plain PyTorch: the definition every kernel is tested against, fast enough to load a small model.

The decode is bit-exact (exl3-format 2); `linear` follows the arithmetic of the format's tuned GEMM (3.2) and `linear_fp64` is the
mathematical form (3.4). Knows no checkpoint files.
"""

import torch
from torch import Tensor

from espalier.kernels.exl3 import codebook
from espalier.kernels.exl3.layout import BLOCK, TILE, Exl3Tensors, positions_to_matrix, unpack_states_by_position
from espalier.kernels.hadamard.reference import fold_rotations, rotate_input, rotate_output

# Tiles decoded together: intermediates of 256 x 4 bytes a tile should stay within a core's cache.
_CHUNK_TILES = 1024


def decode_inner(tensors: Exl3Tensors) -> Tensor:
    """fp16 [in, out]: the decoded weight in the rotated basis, bit for bit."""
    inner = torch.empty((tensors.in_features, tensors.out_features), dtype=torch.float16)
    for rows, columns in _chunks(tensors):
        inner[rows, columns] = _decode_chunk(tensors, rows, columns, torch.float16)
    return inner


def effective_weight(tensors: Exl3Tensors, dtype: torch.dtype = torch.float32) -> Tensor:
    """`dtype` (fp32 or fp64) [in, out]: diag(suh) H W_inner H diag(svh), so that y = x @ W.

    The transforms run in `dtype`; in fp32 the error is a few units in the last place of the largest weight of a block.
    Columns come out the same however the linear is split into multiples of 128.
    """
    weight = torch.empty((tensors.in_features, tensors.out_features), dtype=dtype)
    for rows, columns in _chunks(tensors):
        inner = _decode_chunk(tensors, rows, columns, dtype)
        weight[rows, columns] = fold_rotations(inner, tensors.suh[rows], tensors.svh[columns])
    return weight


def linear(x: Tensor, tensors: Exl3Tensors, bias: Tensor | None = None, dtype: torch.dtype = torch.float16) -> Tensor:
    """fp16 x [rows, in] -> y [rows, out] in `dtype` (fp16 or fp32), rounded where the tuned GEMM rounds.

    The order of the fp32 sum over inputs is nobody's contract; it is taken in fp64 here and rounded once. bias: fp16 [out] or None.
    """
    rotated = rotate_input(x, tensors.suh)
    sums = (rotated.double() @ decode_inner(tensors).double()).float()
    y = rotate_output(sums, tensors.svh, dtype)
    return y if bias is None else y + bias.to(dtype)


def linear_fp64(x: Tensor, tensors: Exl3Tensors, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] of any dtype -> fp64 [rows, out], nothing rounded on the way."""
    y = x.double() @ effective_weight(tensors, torch.float64)
    return y if bias is None else y + bias.double()


def _chunks(tensors: Exl3Tensors) -> list[tuple[slice, slice]]:
    """Rows and columns of blocks 128 inputs high that cover the weight."""
    width = _CHUNK_TILES * TILE // (BLOCK // TILE) // BLOCK * BLOCK
    return [
        (slice(row, row + BLOCK), slice(column, min(column + width, tensors.out_features)))
        for row in range(0, tensors.in_features, BLOCK)
        for column in range(0, tensors.out_features, width)
    ]


def _decode_chunk(tensors: Exl3Tensors, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
    """`dtype` [rows, columns] of the inner weight; fp16 values fit all three dtypes exactly."""
    tiles = tensors.trellis[rows.start // TILE : rows.stop // TILE, columns.start // TILE : columns.stop // TILE]
    states = unpack_states_by_position(tiles)
    table = codebook.values(tensors.codebook).to(dtype)
    values = table.index_select(0, states.view(-1)).view(states.shape)
    return positions_to_matrix(values, (rows.stop - rows.start) // TILE)
