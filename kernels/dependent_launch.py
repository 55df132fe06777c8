"""Programmatic dependent launch: a kernel begins while the one before it in the stream still runs, and waits for it. Plain Triton's side of it.

The contract of every kernel that is launched so: before its wait it reads nothing that the launch before writes, and writes nothing; and each
program does wait, so that whatever comes before a launch has ended when that launch has. A kernel that releases its dependents only
after its own wait promises more: all that is older than itself is complete when they begin, so they may read weights at once. That is how
the kernels here do it that make a linear's input; the linears begin in `linear/dependent_launch.py`. Knows no kernel.
"""
# ruff: noqa: N803 (compile-time constants of kernels are in capitals, as Triton's own are)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from espalier.kernels.device import device_class

DEPENDENT_LAUNCH = (9, 0)  # compute capability from which on a launch may begin before the one it waits for has ended


def early_launch(device: torch.device) -> dict[str, bool]:
    """How to launch a kernel that begins with `wait_and_release(EARLY)` there. No option that an untested Triton might not know."""
    found = device_class(device)
    early = found.gluon and found.capability >= DEPENDENT_LAUNCH
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def wait_and_release(EARLY: tl.constexpr):
    """First in a kernel: its inputs are there, and the next launch may begin where there is room."""
    if EARLY:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
