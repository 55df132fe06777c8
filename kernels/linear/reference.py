"""The EXL3 linear's arithmetic in plain PyTorch: the definition that every kernel form is tested against. Knows no kernel and no launch.

    x_rot   = fp16(H(x * suh))                       per member of a group; H = fp32 butterfly, times 1/sqrt(128)
    p[s]    = sum of x_rot * W_inner over split s    one chain from zero, 16 inputs a step, in order, fp32
    total   = ((p[0] + p[1]) + p[2]) + ...           fp32
    y       = H(total) * svh + bias                  single fp32 operations, rounded once to the output's dtype

The sums of 16 products inside a step are the hardware's, so p is met by kernels up to rounding, everything else bit for bit. Against
exllamav3 (exl3-format 3.2) an fp16 output has one rounding less: svh is multiplied in fp32.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.kernels.exl3.layout import Exl3Tensors
from espalier.kernels.exl3.reference import decode_inner
from espalier.kernels.hadamard.reference import SCALE, butterfly, rotate_input
from espalier.kernels.linear.splits import split_borders

STEP = 16  # inputs of one matrix instruction: the grain of a chain


def partial_sums(x_rot: Tensor, inner: Tensor, chain: torch.dtype = torch.float32) -> Tensor:
    """x_rot fp16 [rows, in], inner fp16 [in, out] -> fp32 [splits, rows, out].

    chain: fp32 rounds the running sum after every step of 16 inputs, as a kernel's accumulator does; fp64 rounds each split's sum once.
    """
    borders = split_borders(x_rot.shape[1])
    return torch.stack(
        [
            _chain(x_rot[:, first:last].double(), inner[first:last].double(), chain)
            for first, last in itertools.pairwise(borders)
        ]
    )


def _chain(x: Tensor, inner: Tensor, chain: torch.dtype) -> Tensor:
    if chain == torch.float64:
        return (x @ inner).float()
    assert chain == torch.float32
    total = x.new_zeros((x.shape[0], inner.shape[1]), dtype=torch.float32)
    for first in range(0, x.shape[1], STEP):
        total = (total.double() + x[:, first : first + STEP] @ inner[first : first + STEP]).float()
    return total


def add_in_order(partials: Tensor) -> Tensor:
    """fp32 [splits, rows, out] -> fp32 [rows, out], added left to right."""
    total = partials[0].clone()
    for partial in partials[1:]:
        total += partial
    return total


def rotate_back(total: Tensor, svh: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """fp32 total [rows, out], fp16 svh [out], fp32 bias [out] or None -> `dtype` (fp16, bf16 or fp32) [rows, out]."""
    y = butterfly(total) * SCALE * svh.float()
    return (y if bias is None else y + bias.float()).to(dtype)


def linear(
    x: Tensor,
    members: Sequence[Exl3Tensors],
    biases: Sequence[Tensor | None],
    dtype: torch.dtype = torch.float16,
    chain: torch.dtype = torch.float32,
) -> Tensor:
    """x [rows, in] -> `dtype` [rows, sum of the members' out], members side by side. Runs on the CPU; biases [out] each, or None."""
    parts = []
    for member, bias in zip(members, biases, strict=True):
        total = add_in_order(partial_sums(rotate_input(x, member.suh), decode_inner(member), chain))
        parts.append(rotate_back(total, member.svh, bias, dtype))
    return torch.cat(parts, dim=1)
