"""The 128-wide Walsh-Hadamard transform around a quantized product: the definition, in plain PyTorch.

Two forms. `rotate_input` and `rotate_output` round as the GPU kernels do, bit for bit (exl3-format 3.2): fp32 butterflies in the
order of index bits 0..6, one multiplication by 1/sqrt(128). `fold_rotations` folds both transforms and both scales into the weight,
as accurately as its dtype allows. Knows no trellis.
"""

import functools
import math

import torch
from torch import Tensor

WIDTH = 128
SCALE = 0.088388347648  # 1/sqrt(128), as the kernels write it; rounded to fp32 in use


@functools.cache
def hadamard_matrix(dtype: torch.dtype) -> Tensor:
    """[128, 128] of +1 and -1 in natural (Sylvester) order: symmetric, its own inverse times 128. Shared: do not write into it."""
    return butterfly(torch.eye(WIDTH)).to(dtype)


def butterfly(x: Tensor) -> Tensor:
    """fp32 [..., n], n a multiple of 128 -> the unscaled transform of each aligned block of 128, in the kernels' order of sums."""
    assert x.dtype == torch.float32 and x.shape[-1] % WIDTH == 0
    out = x
    for half in (1, 2, 4, 8, 16, 32, 64):
        pairs = out.reshape(-1, 2, half)
        out = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
    return out.reshape(x.shape)


def rotate_input(x: Tensor, suh: Tensor) -> Tensor:
    """x [rows, width], fp16 suh [in] -> fp16 [rows, in]: scale, transform in fp32, round. width <= in: x is continued by zeros.

    An fp16 x is scaled in fp16, bf16 and fp32 in fp32.
    """
    assert suh.dtype == torch.float16
    x = torch.nn.functional.pad(x, (0, suh.shape[-1] - x.shape[-1]))
    scaled = (x * suh).float() if x.dtype == torch.float16 else x.float() * suh.float()
    return (butterfly(scaled) * SCALE).half()


def rotate_output(sums: Tensor, svh: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 sums [rows, out], fp16 svh [out] -> `dtype` (fp32 or fp16) [rows, out]: transform in fp32, round to `dtype`, scale in it."""
    assert sums.dtype == torch.float32 and svh.dtype == torch.float16 and dtype in (torch.float32, torch.float16)
    return (butterfly(sums) * SCALE).to(dtype) * svh.to(dtype)


def transform_inputs(matrix: Tensor) -> Tensor:
    """H @ matrix for [in, out] of fp32 or fp64: each aligned block of 128 rows mixed, norms kept."""
    blocks = matrix.view(-1, WIDTH, matrix.shape[1])
    return torch.matmul(_orthonormal(matrix.dtype), blocks).view(matrix.shape)


def transform_outputs(matrix: Tensor) -> Tensor:
    """matrix @ H for [in, out] of fp32 or fp64: each aligned block of 128 columns mixed, norms kept."""
    return torch.matmul(matrix.view(-1, WIDTH), _orthonormal(matrix.dtype)).view(matrix.shape)


def _orthonormal(dtype: torch.dtype) -> Tensor:
    return hadamard_matrix(dtype) / math.sqrt(WIDTH)


def fold_rotations(inner: Tensor, suh: Tensor, svh: Tensor) -> Tensor:
    """diag(suh) H inner H diag(svh), [in, out], in inner's dtype (fp32 or fp64); suh [in] and svh [out] of any dtype.

    Products run over blocks of 128 x 128, so that a block's bits depend on nothing beyond it.
    """
    rows, columns = inner.shape
    hadamard = hadamard_matrix(inner.dtype)
    blocks = inner.view(rows // WIDTH, WIDTH, columns // WIDTH, WIDTH).transpose(1, 2).reshape(-1, WIDTH, WIDTH)
    per_block = hadamard.expand(len(blocks), WIDTH, WIDTH)
    folded = torch.bmm(per_block, torch.bmm(blocks, per_block)).view(rows // WIDTH, columns // WIDTH, WIDTH, WIDTH)
    # 1/sqrt(128) on either side is 1/128, exactly.
    folded *= (suh.to(inner.dtype) / WIDTH).view(-1, 1, WIDTH, 1)
    folded *= svh.to(inner.dtype).view(-1, 1, WIDTH)
    return folded.transpose(1, 2).reshape(rows, columns)
