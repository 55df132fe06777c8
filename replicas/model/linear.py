"""A linear layer with weights decoded to fp32 and packed in column blocks; linears that read the same input are packed as one.

Knows no checkpoint: see `weights.py` for how the packed weights come about.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.linear.blocked import COLUMN_BLOCK, blocked_linear, num_column_blocks


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Linears side by side. weight: fp32 [blocks, in, 128]. bias: fp32 [blocks * 128], or None.

    widths: true output width of each linear; each starts at a block of its own.
    """

    weight: Tensor
    bias: Tensor | None
    widths: tuple[int, ...]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x fp32 [rows, in], rows a multiple of 8 -> one [rows, width] a linear, views of one tensor."""
        y = blocked_linear(x, self.weight)
        if self.bias is not None:
            y.add_(self.bias)
        if len(self.widths) == 1:
            return (y[:, : self.widths[0]],)
        outs, start = [], 0
        for width in self.widths:
            outs.append(y[:, start : start + width])
            start += num_column_blocks(width) * COLUMN_BLOCK
        return tuple(outs)


@dataclass(frozen=True, slots=True)
class Embedding:
    """The token table as the checkpoint stores it, mapped from the file: raw uint8 [vocab, bytes of a row], at any alignment."""

    raw: Tensor
    dtype: torch.dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [rows] -> fp32 [rows, hidden]."""
        return self.raw.index_select(0, token_ids).view(self.dtype).float()
