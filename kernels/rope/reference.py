"""Rotary position embedding in the halves layout: dimension i turns with dimension i + rotary_dim / 2, the rest stay (partial rope)."""

import torch
from torch import Tensor

_CHUNK_POSITIONS = 4096


def rope_table(inverse_frequencies: Tensor, num_positions: int, cos_sin_scale: float) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [num_positions, head_dim / 2] each, times cos_sin_scale.

    The angle is fp32(position) * inverse_frequency in fp32, as transformers has it; its cos and sin are taken in fp64 and rounded once.
    Computed in chunks at fixed positions, so that an entry does not depend on the table's length.
    """
    chunks: list[tuple[Tensor, Tensor]] = []
    for start in range(0, num_positions, _CHUNK_POSITIONS):
        positions = torch.arange(start, start + _CHUNK_POSITIONS).float()
        angles = (positions[:, None] * inverse_frequencies).double()
        chunks.append((torch.cos(angles).float() * cos_sin_scale, torch.sin(angles).float() * cos_sin_scale))
    cos, sin = (torch.cat(parts)[:num_positions].contiguous() for parts in zip(*chunks, strict=True))
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, heads, head_dim] turned by its row's angles, cos and sin [rows, rotary_dim / 2]; a new fp32 tensor.

    rotary_dim may be less than head_dim: the dimensions from it on stay as they are. fp16 and bf16 are widened first.
    """
    x = x.float()
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = torch.empty_like(x)
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half : 2 * half])
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
