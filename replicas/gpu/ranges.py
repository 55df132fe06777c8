"""Ranges: names for what the host does in a round, shown by profilers that read NVTX (Nsight Systems). Knows no rounds; off unless asked for.

Names in use: `plan` (step to packed round), `launch` with `pack` and `run` in it, `wait` (for the results, on the thread that waits).
"""

import contextlib

import torch

_NOTHING = contextlib.nullcontext()


class Ranges:
    """`with ranges("plan"): ...` marks a stretch of the current thread. Disabled, it costs a call and touches no library."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def __call__(self, name: str) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.nvtx.range(name) if self._enabled else _NOTHING


OFF = Ranges(enabled=False)
