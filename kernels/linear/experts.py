"""A mixture of experts on EXL3 weights: tokens sorted by expert, gate and up, SiLU, down, weighted sum in the order of slots.

A token's output depends on its own input, choice of experts and weights alone; each product has the bits of the expert's linear run alone.
Nothing is read back from the device, and grids follow from shapes, so that calls can be captured. Knows no router and no model.
"""

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.device import DeviceClass, device_class
from espalier.kernels.linear.dispatch import load_kernels
from espalier.kernels.linear.expert_group import ExpertGroup
from espalier.kernels.linear.expert_route import Route, allocate_route, block_rows, route


@dataclass(frozen=True, slots=True)
class ExpertBuffers:
    """What calls of one token count and top_k work in; every call overwrites all of it.

    rotated: fp16, inputs of either product. gate_up [pairs, 2 * inner], down [pairs, out]: fp16, in sorted order.
    """

    route: Route
    rotated: Tensor
    gate_up: Tensor
    down: Tensor


def allocate_buffers(gate_up: ExpertGroup, down: ExpertGroup, num_tokens: int, top_k: int) -> ExpertBuffers:
    """For calls of exactly `num_tokens` tokens, on the groups' device. Raises ValueError when the groups do not fit together."""
    if gate_up.num_members != 2 or down.num_members != 1:
        raise ValueError(f"gate_up has {gate_up.num_members} members and down {down.num_members}, not 2 and 1")
    if gate_up.member_width != down.in_features or gate_up.num_experts != down.num_experts:
        raise ValueError(
            f"gate and up are {gate_up.member_width} wide in {gate_up.num_experts} experts, down takes {down.in_features} in {down.num_experts}"
        )
    device, pairs, experts = gate_up.words.device, num_tokens * top_k, gate_up.num_experts
    rows = block_rows(pairs, experts, *_form(device_class(device)).BLOCK_ROWS)
    half = functools.partial(torch.empty, dtype=torch.float16, device=device)
    return ExpertBuffers(
        route=allocate_route(pairs, experts, rows, device),
        rotated=half(pairs * max(2 * gate_up.in_features, down.in_features)),
        gate_up=half(pairs, gate_up.out_features),
        down=half(pairs, down.out_features),
    )


def scratch_size(gate_up: ExpertGroup, down: ExpertGroup, buffers: ExpertBuffers) -> ScratchSize:
    """Of an `expert_mlp` call with these buffers."""
    form = _form(device_class(gate_up.words.device))
    first: ScratchSize = form.scratch_size(gate_up, buffers.route)
    second: ScratchSize = form.scratch_size(down, buffers.route)
    return first | second


def expert_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertGroup,
    down: ExpertGroup,
    buffers: ExpertBuffers,
    scratch: Scratch,
    *,
    out: Tensor,
) -> Tensor:
    """out[t] = sum over slots of weights[t, slot] * down_e(SiLU(gate_e(x[t])) * up_e(x[t])), e = ids[t, slot]. Returns `out`.

    x: fp16, bf16 or fp32 [tokens, width <= in]. ids: int32 or int64 [tokens, top_k] contiguous; an id that no expert here has adds nothing
    (an expert on another device). weights: fp32 [tokens, top_k] contiguous. out: fp16, bf16 or fp32 [tokens, width <= down's out].
    Raises ValueError naming what does not fit.
    """
    from espalier.kernels.linear.expert_rows import gate_rotate, gather_rotate, weighted_sum  # holds kernels

    _check(x, ids, weights, gate_up, down, out)
    order = buffers.route
    route(ids, order)
    pairs = order.num_pairs
    x_rot = buffers.rotated[: 2 * pairs * gate_up.in_features].view(2, pairs, gate_up.in_features)
    gather_rotate(x, ids, order, gate_up.suh, out=x_rot)
    expert_product(x_rot, gate_up, order, buffers.gate_up, scratch)
    inner = buffers.rotated[: pairs * down.in_features].view(1, pairs, down.in_features)
    gate_rotate(buffers.gate_up, ids, order, down.suh, out=inner)
    expert_product(inner, down, order, buffers.down, scratch)
    weighted_sum(buffers.down, order, weights, out)
    return out


def expert_product(x_rot: Tensor, group: ExpertGroup, order: Route, out: Tensor, scratch: Scratch) -> None:
    """Each sorted row times its expert's linears. Rows without an expert are left as they are.

    x_rot: fp16 [members, pairs, in] contiguous, rotated by the row's expert. out: fp16, bf16 or fp32 [pairs, out] contiguous.
    """
    _form(device_class(x_rot.device)).launch(x_rot, group, order, out, scratch)


def _form(device: DeviceClass) -> ModuleType:
    return load_kernels("expert_mma" if device.gluon else "expert_plain", "expert_plain")


def _check(x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertGroup, down: ExpertGroup, out: Tensor) -> None:
    tokens = x.shape[0]
    if x.dim() != 2 or x.stride(1) != 1 or x.shape[1] > gate_up.in_features or not x.dtype.is_floating_point:
        raise ValueError(
            f"x must be [tokens, up to {gate_up.in_features}] with rows of neighbours, is {x.dtype} {list(x.shape)}"
        )
    if ids.shape[0] != tokens:
        raise ValueError(f"ids are of {ids.shape[0]} tokens, x of {tokens}")
    if weights.dtype != torch.float32 or weights.shape != ids.shape or not weights.is_contiguous():
        raise ValueError(
            f"weights must be contiguous float32 {list(ids.shape)}, is {weights.dtype} {list(weights.shape)}"
        )
    if out.shape[0] != tokens or out.shape[1] > down.out_features or out.stride(1) != 1:
        raise ValueError(
            f"out must be [{tokens}, up to {down.out_features}] with rows of neighbours, is {list(out.shape)}"
        )
