"""The gate of a SwiGLU MLP."""

import torch
from torch import Tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate / (1 + exp(-gate)) * up, elementwise, fp32.

    torch.sigmoid is avoided: its last elements go through other code than the rest. torch.exp of a contiguous tensor does not, which
    the check at load confirms.
    """
    denominator = torch.exp(gate.neg().contiguous()).add_(1.0)
    return (gate / denominator).mul_(up)
