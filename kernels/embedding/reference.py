"""Token embeddings: rows of a table."""

import torch
from torch import Tensor


def gather(token_ids: Tensor, table: Tensor, scale: float | None = None) -> Tensor:
    """table [vocabulary, n] fp32, fp16 or bf16 -> fp32 [rows, n], times the scale if there is one; token_ids integer [rows].

    A row whose id lies outside of the vocabulary is NaN: a launch cannot refuse it, and must not read beyond the table.
    """
    known = (token_ids >= 0) & (token_ids < table.shape[0])
    rows = torch.where(known[:, None], table[token_ids.masked_fill(~known, 0)].float(), torch.nan)
    return rows if scale is None else rows * scale
