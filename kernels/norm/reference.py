"""RMS norm of rows, each by one fixed tree of sums."""

import torch
from torch import Tensor

from espalier.kernels.elementary import tree_sum


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x fp32 [..., n], weight fp32 [n].

    Squares, sums, root, divisions and product are single fp32 operations, so a row's bits depend on the row alone.
    """
    mean = tree_sum(x * x).div_(x.shape[-1])
    return (x / torch.sqrt(mean.add_(eps)).unsqueeze(-1)).mul_(weight)
