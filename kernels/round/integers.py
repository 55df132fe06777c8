"""The one check of the round's launchers: their arguments are tables and lists of integers."""

import torch
from torch import Tensor


def require_integers(name: str, tensor: Tensor, *shape: int, dtype: torch.dtype = torch.int32) -> None:
    """Raises ValueError naming the tensor unless it is contiguous, of this dtype and of this shape."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        wanted = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name} must be contiguous {wanted} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
