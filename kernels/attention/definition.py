"""What paged attention computes, in float64 over one sequence's keys and values laid out in order. For tests; slow."""

import torch
from torch import Tensor


def gather(cached: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Positions 0 .. length - 1 of a cache [blocks, kv_heads, block_size, head_dim] -> [length, kv_heads, head_dim]."""
    kv_heads, _, head_dim = cached.shape[1:]
    return cached[blocks.long()].transpose(1, 2).reshape(-1, kv_heads, head_dim)[:length]


def attention(q: Tensor, keys: Tensor, values: Tensor, start: int, scale: float, window: int | None = None) -> Tensor:
    """q [rows, heads, head_dim] at positions start, start + 1, ...; keys, values [length, kv_heads, head_dim] -> float64 as q.

    A row at position p sees keys 0 .. p, of which the last `window` if there is one. Query head h reads key-value head
    h // (heads / kv_heads).
    """
    group = q.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("rhd,khd->hrk", q.double(), k) * scale
    position = torch.arange(start, start + q.shape[0], device=q.device)[:, None]
    key = torch.arange(k.shape[0], device=q.device)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    return torch.einsum("hrk,khd->rhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
