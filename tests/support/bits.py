"""Bits of what kernels write: poisoned outputs, comparisons where NaN equals NaN, calls captured in a graph. Knows no kernel."""

from collections.abc import Callable

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """An output that nobody has written: NaN everywhere."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Whether shapes, dtypes and all bits are equal, on any devices; NaN equals NaN."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    integers = _INTEGERS[got.element_size()]
    a, b = got.detach().cpu().contiguous(), want.detach().cpu().contiguous()
    # A NaN's payload is no result.
    both_nan = a.isnan() & b.isnan()
    return bool(((a.view(integers) == b.view(integers)) | both_nan).all())


def captured(call: Callable[[], object], outputs: list[Tensor]) -> list[Tensor]:
    """What a graph of the call writes when it is replayed on outputs that were poisoned after the capture."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for output in outputs:
        output.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return [output.clone() for output in outputs]
