"""The gate of a SwiGLU MLP: as the CPU path takes it, and as every device can."""

import torch
from torch import Tensor

from espalier.kernels.elementary import exp_f32


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate / (1 + exp(-gate)) * up, elementwise, fp32.

    torch.sigmoid is avoided: its last elements go through other code than the rest. torch.exp of a contiguous tensor does not, which
    the check at load confirms.
    """
    denominator = torch.exp(gate.neg().contiguous()).add_(1.0)
    return (gate / denominator).mul_(up)


def silu_mul_ieee(gate: Tensor, up: Tensor) -> Tensor:
    """What the kernels compute: as `silu_mul`, with `exp_f32` for torch.exp, so with the same bits on every device -> fp32.

    gate and up may be fp16 or bf16 and are widened first.
    """
    gate = gate.float()
    return (gate / exp_f32(-gate).add_(1.0)).mul_(up.float())
