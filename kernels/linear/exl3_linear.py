"""The EXL3 linear: y = x @ W + bias for one group of linears, 1 to 8,192 rows, with one arithmetic at every row count.

A row's bits depend on that row and the weights alone (`reference.py` is the definition, `splits.py` the order of sums). Launches allocate
nothing and ask the device nothing when the caller brings `out`, `rotated` and scratch, so that they can be captured in a CUDA graph.
Knows no checkpoint and no layer; `dispatch.py` knows which kernel runs.
"""

import functools

import torch
from torch import Tensor

from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.device import DeviceClass, device_class
from espalier.kernels.linear.dispatch import Form, choose_form, load_form, thresholds
from espalier.kernels.linear.group import LinearGroup

OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def exl3_linear(x: Tensor, group: LinearGroup, scratch: Scratch, *, out: Tensor, rotated: Tensor) -> Tensor:
    """x fp16, bf16 or fp32 [rows, width <= in] -> out fp16, bf16 or fp32 [rows, out], which is returned.

    in, out: the group's padded widths; a narrower x is continued by zeros, as padded checkpoints want it. rotated: fp16 workspace of at least
    `rotated_numel(group, rows)` elements. scratch: at least `scratch_size(group, rows)`.
    Raises ValueError naming the argument that does not fit.
    """
    from espalier.kernels.hadamard.rotate import rotate_input  # holds kernels

    rows = _check(x, group, out)
    needed = rotated_numel(group, rows)
    if rotated.dtype != torch.float16 or not rotated.is_contiguous() or rotated.numel() < needed:
        raise ValueError(
            f"rotated must be contiguous float16 with {needed} elements, is {rotated.dtype} {list(rotated.shape)}"
        )
    if rows == 0:
        return out
    x_rot = rotated.view(-1)[:needed].view(group.num_members, rows, group.in_features)
    rotate_input(x, group.suh, out=x_rot)
    return linear_rotated(x_rot, group, scratch, out)


def linear_rotated(
    x_rot: Tensor, group: LinearGroup, scratch: Scratch, out: Tensor, form: Form | None = None
) -> Tensor:
    """The product without the input rotation, for inputs that a fused kernel has rotated. Returns `out`.

    x_rot: fp16 [members, rows, in] contiguous, each member's input by its own suh. form: instead of the fastest; same bits.
    """
    members, rows, in_features = x_rot.shape
    if x_rot.dtype != torch.float16 or not x_rot.is_contiguous() or members != group.num_members:
        raise ValueError(
            f"x_rot must be contiguous float16 [{group.num_members}, rows, in], is {x_rot.dtype} {list(x_rot.shape)}"
        )
    if in_features != group.in_features:
        raise ValueError(f"x_rot is {in_features} wide, the linear {group.in_features}")
    _check_out(out, rows, group)
    if rows:
        device = device_class(x_rot.device)
        if not device.triton:
            raise ValueError(f"x_rot is on {x_rot.device}, where no Triton kernel runs")
        load_form(form or choose_form(device, rows, group.out_features)).launch(x_rot, group, out, scratch)
    return out


def scratch_size(group: LinearGroup, max_rows: int) -> ScratchSize:
    """Enough for any call of up to `max_rows` rows on the group's device."""
    return scratch_for(device_class(group.svh.device), group.in_features, group.widths, max_rows)


def rotated_numel(group: LinearGroup, rows: int) -> int:
    """fp16 elements of the rotated inputs: one set a member."""
    return group.num_members * rows * group.in_features


@functools.cache
def scratch_for(device: DeviceClass, in_features: int, widths: tuple[int, ...], max_rows: int) -> ScratchSize:
    """`scratch_size` from shapes, before there are weights."""
    # Every form's need grows with the rows it gets, so the last row count of each form decides.
    last_rows = [last for last, _ in thresholds(device, sum(widths)) if last < max_rows]
    size = ScratchSize()
    for rows in (*last_rows, max_rows):
        module = load_form(choose_form(device, rows, sum(widths)))
        size |= module.scratch_size(in_features, widths, rows)
    return size


def allocate_scratch(size: ScratchSize, device: torch.device) -> Scratch:
    """For eager callers and tests; a server takes a pool per stream instead (`replicas/streams`)."""
    return Scratch(
        torch.zeros(size.counters, dtype=torch.int32, device=device),
        torch.empty(size.partials, dtype=torch.float32, device=device),
    )


def allocate_rotated(group: LinearGroup, max_rows: int) -> Tensor:
    """Workspace for the rotated inputs of up to `max_rows` rows, on the group's device."""
    return torch.empty(rotated_numel(group, max_rows), dtype=torch.float16, device=group.svh.device)


def _check(x: Tensor, group: LinearGroup, out: Tensor) -> int:
    if x.dim() != 2 or x.dtype not in OUT_DTYPES:
        raise ValueError(f"x must be float16, bfloat16 or float32 [rows, width], is {x.dtype} {list(x.shape)}")
    rows, width = x.shape
    if width > group.in_features:
        raise ValueError(f"x is {width} wide, the linear {group.in_features}")
    if x.stride(1) != 1:
        raise ValueError(f"x: the elements of a row must be neighbours, stride is {x.stride(1)}")
    _check_out(out, rows, group)
    return int(rows)


def _check_out(out: Tensor, rows: int, group: LinearGroup) -> None:
    if out.dtype not in OUT_DTYPES or tuple(out.shape) != (rows, group.out_features) or out.stride(1) != 1:
        raise ValueError(
            f"out must be float16, bfloat16 or float32 [{rows}, {group.out_features}] with rows of neighbours, "
            f"is {out.dtype} {list(out.shape)}"
        )
