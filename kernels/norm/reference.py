"""RMS norm of rows, each by one fixed tree of sums: as the CPU path takes it, and as every device can."""

import torch
from torch import Tensor

from espalier.kernels.elementary import tree_sum


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x fp32 [..., n], weight fp32 [n].

    Squares, sums, root, divisions and product are single fp32 operations, so a row's bits depend on the row alone.
    """
    mean = tree_sum(x * x).div_(x.shape[-1])
    return (x / torch.sqrt(mean.add_(eps)).unsqueeze(-1)).mul_(weight)


def rms_norm_ieee(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """What the kernels compute, with the same bits on every device: x * (1 / sqrt(mean(x^2) + eps)) * weight -> fp32.

    x [..., n] and weight [n] may be fp16 or bf16 and are widened first. `unit_offset` multiplies by 1 + weight. Against `rms_norm` the
    root is rounded once (torch.sqrt is an ulp off at times on a CPU) and its reciprocal is taken once a row: a division for every
    element would cost a kernel as much as the rest of its work.
    """
    x, weight = x.float(), weight.float()
    if unit_offset:
        weight = weight + 1.0
    mean = tree_sum(x * x).div_(x.shape[-1])
    # A root in fp64 is close enough that rounding it to fp32 gives the fp32 root.
    root = torch.sqrt(mean.add_(eps).double()).float()
    return (x * (torch.ones_like(root) / root).unsqueeze(-1)).mul_(weight)
