"""First calls of a CPU's vector functions, made by one thread before any others.

torch gives exp, sqrt, cos and sin of a CPU to oneMKL, which looks for a function's code at its first call in the process. In oneMKL 2024.2, which
torch 2.13 is built with, threads that make this call together may compute it with code of low accuracy (PyTorch issue 188792): a rope table made so
is wrong by an ulp in places for as long as the process lives, on a GPU too, which gets it from the CPU. Whatever loads a model calls this first.
Knows the functions that loading and rounds call, not where.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

_FUNCTIONS: tuple[tuple[Callable[[Tensor], Tensor], torch.dtype], ...] = (
    (torch.exp, torch.float32),
    (torch.sqrt, torch.float32),
    (torch.cos, torch.float64),
    (torch.sin, torch.float64),
)
# Two models may be loaded at once.
_one_at_a_time = threading.Lock()


def settle_vector_math() -> None:
    """Calls each function with one number, which no library shares out. Later calls cost a few microseconds and change nothing."""
    with _one_at_a_time:
        for function, dtype in _FUNCTIONS:
            function(torch.ones(1, dtype=dtype))
